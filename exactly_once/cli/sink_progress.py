"""Progress of the sink command: what was committed, how fast, how far the topics are ahead, and what is left out."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TextIO

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
    """Takes what one consumer measures."""

    def __init__(self, rows: Callable[[], int]) -> None:
        self._rows = rows
        self._total: dict[m.Metric, float] = dict.fromkeys((m.MESSAGES, m.UNITS, m.COMMIT_SECONDS), 0.0)
        self._read: m.Read | None = None

    def add(self, metric: m.Metric, amount: float, labels: tuple[str, ...]) -> None:
        """Count."""
        if metric in self._total:
            self._total[metric] += amount

    def observe(self, metric: m.Metric, value: float, labels: tuple[str, ...]) -> None:
        """Sum up."""
        self.add(metric, value, labels)

    def attach(self, read: m.Read) -> None:
        """Learn where lag is read."""
        self._read = read

    def detach(self, read: m.Read) -> None:
        """Forget it again."""
        self._read = None

    def counts(self) -> Counts:
        """Return what there is now."""
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


class Every:
    """Calls a function again and again from a thread of its own, and once more when it is left."""

    def __init__(self, seconds: float, function: Callable[[], object]) -> None:
        self._seconds = seconds
        self._function = function
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sink-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._function()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            self._function()


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
        if self._is_live:
            width = shutil.get_terminal_size().columns - 1
            print(f"{CLEAR}{self._line(counts, before, seconds, width)}", end="", file=self._out, flush=True)
            return
        fields = {"messages": int(counts.messages), "rows": counts.rows, "lag": dict(counts.lag)}
        logger.info("%s", self._text(counts, before, seconds), extra={"action": "progress", **fields})

    def end(self) -> None:
        """Leave the line that moves."""
        if self._is_live:
            print(file=self._out)

    def _waiting(self, counts: Counts) -> str | None:
        """Say for how long no partition was had; at the end and in between there may be none."""
        seconds = self._clock() - self._idle_since
        return f"waiting for the group: {seconds:,.0f} s" if not counts.owned and seconds >= 1 else None

    def _text(self, counts: Counts, before: Counts, seconds: float) -> str:
        text = f"{counts.messages:,.0f} messages; "
        if (waiting := self._waiting(counts)) is not None:
            return text + waiting
        text += f"{(counts.messages - before.messages) / seconds:,.0f} messages/s, "
        text += f"{(counts.rows - before.rows) / seconds:,.0f} rows/s"
        if done := counts.units - before.units:
            size = (counts.messages - before.messages) / done
            commit = (counts.commit_seconds - before.commit_seconds) / done
            text += f", {size:,.0f} a unit, commit {1000 * commit:,.1f} ms"
        if lag := counts.lag:
            worst = max(lag, key=lag.__getitem__)
            text += f", lag {sum(lag.values()):,} (most: {worst} {lag[worst]:,})" if lag[worst] else ", lag 0"
        return text

    def _line(self, counts: Counts, before: Counts, seconds: float, width: int) -> str:
        """Put together what fits into a line; each number has its place, so that nothing moves but the numbers."""
        parts = [f"{counts.messages:>13,.0f} messages"]
        if (waiting := self._waiting(counts)) is not None:
            parts.append(waiting)
        else:
            done = max(counts.units - before.units, 1e-9)
            messages = counts.messages - before.messages
            parts += [
                f"{messages / seconds:>9,.0f}/s",
                f"lag {sum(counts.lag.values()):>11,}",
                f"{(counts.rows - before.rows) / seconds:>9,.0f} rows/s",
                f"{messages / done:>9,.0f} a unit",
                f"commit {min(1000 * (counts.commit_seconds - before.commit_seconds) / done, 99999.9):>8,.1f} ms",
            ]
            if counts.lag:
                worst = max(counts.lag, key=counts.lag.__getitem__)
                parts.append(f"most: {worst} {counts.lag[worst]:,}")
        line = parts[0]
        for part in parts[1:]:
            if len(line) + 2 + len(part) > width:
                break
            line += f"  {part}"
        return line[:width]


class LeftOut:
    """Reports fields that no column takes and columns that nothing fills, when there is more than at the last time."""

    def __init__(self, sinks: Sequence[tuple[str, TableSink]]) -> None:
        self._sinks = sinks
        self._told: dict[TableSink, tuple[int, frozenset[str]]] = {}

    def tell(self) -> None:
        """Write a record for each table of which there is something new to say."""
        for table, sink in self._sinks:
            unused, unfilled = dict(sink.unused_fields), frozenset(sink.unfilled_columns)
            left_out = sink.filtered_messages + sink.repeated_rows
            state = sum(unused.values()) + left_out, unfilled
            if (sink.rows == 0 and not left_out) or state == self._told.get(sink, (0, frozenset())):
                continue
            self._told[sink] = state
            said = []
            if sink.filtered_messages:
                said.append(f"messages that where and where_not leave out: {sink.filtered_messages:,}")
            if sink.repeated_rows:
                said.append(f"rows of events that came before, left out by claim: {sink.repeated_rows:,}")
            if unused:
                most = sorted(unused.items(), key=lambda pair: (-pair[1], pair[0]))
                said.append(f"fields without a column: {_some([f'{name} ({count:,})' for name, count in most])}")
            if unfilled:
                said.append(f"columns that no message has filled: {_some(sorted(unfilled))}")
            extra = {
                "action": "left_out",
                "table": table,
                "unused_fields": unused,
                "unfilled_columns": sorted(unfilled),
            }
            said += [
                f'column {column} is not field {name}: say fields = {{{column} = "{name}", ...}}'
                for name in unused
                if (column := alike(name, unfilled)) is not None
            ]
            if said:
                logger.warning("table %s: %s", table, "; ".join(said), extra=extra)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


class Both:
    """Hands one consumer's measurements to two that want them."""

    def __init__(self, *takers: m.Metrics) -> None:
        self._takers = takers

    def add(self, metric: m.Metric, amount: float, labels: tuple[str, ...]) -> None:
        """Hand on."""
        for taker in self._takers:
            taker.add(metric, amount, labels)

    def observe(self, metric: m.Metric, value: float, labels: tuple[str, ...]) -> None:
        """Hand on."""
        for taker in self._takers:
            taker.observe(metric, value, labels)

    def attach(self, read: m.Read) -> None:
        """Hand on."""
        for taker in self._takers:
            taker.attach(read)

    def detach(self, read: m.Read) -> None:
        """Hand on."""
        for taker in self._takers:
            taker.detach(read)
