"""Progress of the sink command: what was committed, how fast, how far the topics are ahead, and what is left out."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from exactly_once.metrics import table as m
from exactly_once.writer import TableSink
from exactly_once.writer.decoding import alike

logger = logging.getLogger(__name__)

LIVE_SECONDS = 1.0
LOGGED_SECONDS = 10.0
LEFT_OUT_SECONDS = 60.0
# So many fields or columns are named in one record.
_NAMES = 20
# Takes the line that moves off a terminal.
CLEAR = "\r\x1b[K"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one consumer, or several, have done so far."""

    messages: float = 0
    units: float = 0
    commit_seconds: float = 0
    rows: int = 0
    owned: int = 0
    lag: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            messages=self.messages + other.messages,
            units=self.units + other.units,
            commit_seconds=self.commit_seconds + other.commit_seconds,
            rows=self.rows + other.rows,
            owned=self.owned + other.owned,
            lag={**self.lag, **other.lag},
        )


class Measurements:
    """Takes what one consumer measures, and hands it on where somebody else wants it, too."""

    def __init__(self, rows: Callable[[], int], also: m.Metrics | None = None) -> None:
        self._rows = rows
        self._takers = [] if also is None else [also]
        self._total: dict[m.Metric, float] = dict.fromkeys((m.MESSAGES, m.UNITS, m.COMMIT_SECONDS), 0.0)
        # Reads the lag; none before the consumer is there, and once it is closed.
        self._read: m.Read | None = None

    def add(self, metric: m.Metric, amount: float, labels: tuple[str, ...]) -> None:
        if metric in self._total:
            self._total[metric] += amount
        for taker in self._takers:
            taker.add(metric, amount, labels)

    def observe(self, metric: m.Metric, value: float, labels: tuple[str, ...]) -> None:
        if metric in self._total:
            self._total[metric] += value
        for taker in self._takers:
            taker.observe(metric, value, labels)

    def attach(self, read: m.Read) -> None:
        self._read = read
        for taker in self._takers:
            taker.attach(read)

    def detach(self, read: m.Read) -> None:
        self._read = None
        for taker in self._takers:
            taker.detach(read)

    def counts(self) -> Counts:
        read = self._read
        samples = list(read()) if read is not None else []
        return Counts(
            messages=self._total[m.MESSAGES],
            units=self._total[m.UNITS],
            commit_seconds=self._total[m.COMMIT_SECONDS],
            rows=self._rows(),
            owned=sum(int(s.value) for s in samples if s.metric is m.OWNED),
            lag={f"{s.labels[2]}[{s.labels[3]}]": int(s.value) for s in samples if s.metric is m.LAG},
        )


@contextmanager
def every(seconds: float, function: Callable[[], object]) -> Iterator[None]:
    """Call a function again and again from a thread of its own, and once more at the end."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            function()

    thread = threading.Thread(target=run, name="sink-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        function()


class Progress:
    """Says how it goes: by a line that moves on a terminal, else by records."""

    def __init__(
        self,
        counts: Callable[[], Counts],
        *,
        is_live: bool,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts = counts
        self._is_live = is_live
        self._out = out or sys.stderr
        self._clock = clock
        self._told = Counts()
        self._told_at = self._idle_since = clock()
        # How often to say it.
        self.seconds = LIVE_SECONDS if is_live else LOGGED_SECONDS

    def tell(self) -> None:
        """Say what happened since the last time."""
        counts, now = self._counts(), self._clock()
        seconds = max(now - self._told_at, 1e-9)
        before, self._told, self._told_at = self._told, counts, now
        if counts.owned or counts.units > before.units:
            self._idle_since = now
        # At the end and in between there may be no partition.
        idle = now - self._idle_since
        waiting = f"waiting for the group: {idle:,.0f} s" if not counts.owned and idle >= 1 else None
        messages, rows = counts.messages - before.messages, (counts.rows - before.rows) / seconds
        units = counts.units - before.units
        commit = 1000 * (counts.commit_seconds - before.commit_seconds) / max(units, 1e-9)
        lag, total = counts.lag, sum(counts.lag.values())
        worst = max(lag, key=lag.__getitem__, default="")
        if self._is_live:
            # Each number has its place, so that nothing moves but the numbers.
            parts = [
                f"{messages / seconds:>9,.0f}/s",
                f"lag {total:>11,}",
                f"{rows:>9,.0f} rows/s",
                f"{messages / max(units, 1e-9):>9,.0f} a unit",
                f"commit {min(commit, 99999.9):>8,.1f} ms",
                *([f"most: {worst} {lag[worst]:,}"] if lag else []),
            ]
            width = shutil.get_terminal_size().columns - 1
            line = f"{counts.messages:>13,.0f} messages"
            for part in parts if waiting is None else [waiting]:
                if len(line) + 2 + len(part) > width:
                    break
                line += f"  {part}"
            print(f"{CLEAR}{line[:width]}", end="", file=self._out, flush=True)
            return
        text = waiting or f"{messages / seconds:,.0f} messages/s, {rows:,.0f} rows/s"
        if units and waiting is None:
            text += f", {messages / units:,.0f} a unit, commit {commit:,.1f} ms"
        if lag and waiting is None:
            text += f", lag {total:,} (most: {worst} {lag[worst]:,})" if lag[worst] else ", lag 0"
        fields = {"messages": int(counts.messages), "rows": counts.rows, "lag": dict(lag)}
        logger.info("%s messages; %s", f"{counts.messages:,.0f}", text, extra={"action": "progress", **fields})

    def end(self) -> None:
        """Leave the line that moves."""
        if self._is_live:
            print(file=self._out)


class LeftOut:
    """Reports fields that no column takes and columns that nothing fills, when there is more than at the last time."""

    def __init__(self, sinks: Sequence[tuple[str, TableSink]]) -> None:
        self._sinks = sinks
        self._told: dict[TableSink, tuple[int, frozenset[str]]] = {}

    def tell(self) -> None:
        """Write a record for each table of which there is something new to say."""
        for table, sink in self._sinks:
            unused, idle = dict(sink.unused_fields), frozenset(sink.unfilled_columns | sink.unmet_fields)
            left_out = sink.filtered_messages + sink.repeated_rows + sink.missed_deletes + sink.ignored_rows
            state = sum(unused.values()) + left_out, idle
            if (sink.rows == 0 and not left_out) or state == self._told.get(sink, (0, frozenset())):
                continue
            self._told[sink] = state
            said: list[str] = []
            if sink.filtered_messages:
                said.append(
                    f"messages left out by where, where_not, on_tombstone or on_truncate: {sink.filtered_messages:,}"
                )
            if sink.repeated_rows:
                said.append(f"rows of events that came before, left out by claim: {sink.repeated_rows:,}")
            if sink.missed_deletes:
                said.append(f"deletes that took no row away: {sink.missed_deletes:,}")
            if sink.ignored_rows:
                said.append(f"rows that the table had already, or had newer: {sink.ignored_rows:,}")
            if unused:
                most = sorted(unused.items(), key=lambda pair: (-pair[1], pair[0]))
                said.append(f"fields without a column: {_some([f'{name} ({count:,})' for name, count in most])}")
            if sink.unfilled_columns:
                said.append(f"columns that no message has filled: {_some(sorted(sink.unfilled_columns))}")
            if unmet := sorted(sink.unmet_fields):
                said.append(f"fields of where, where_not or drop that no message had: {_some(unmet)}")
            extra = {
                "action": "left_out",
                "table": table,
                "unused_fields": unused,
                "unfilled_columns": sorted(sink.unfilled_columns),
            }
            said += [
                f'column {column} is not field {name}: say rename = {{{column} = "{name}", ...}}'
                for name in unused
                if (column := alike(name, sink.unfilled_columns)) is not None
            ]
            if said:
                # Rows that are inserted and deleted within one unit are no fault, as those of an outbox; and the mode
                # asks for rows to be ignored.
                chosen = bool(sink.missed_deletes) + bool(sink.ignored_rows)
                level = logging.INFO if len(said) == chosen else logging.WARNING
                logger.log(level, "table %s: %s", table, "; ".join(said), extra=extra)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more
