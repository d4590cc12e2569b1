"""Progress of the sink command: what was committed, how fast, and how far the topics are ahead."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from exactly_once import metrics as m

logger = logging.getLogger(__name__)

_SECONDS_LIVE = 1.0
_SECONDS_LOGGED = 10.0


class Progress:
    """Takes a consumer's measurements and says how it goes: a line that moves on a terminal, else records.

    Use it as a context manager around the consumer: it says the rest when that is closed.
    """

    def __init__(
        self,
        *,
        is_live: bool,
        rows: Callable[[], int],
        out: TextIO = sys.stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_live = is_live
        self._rows = rows
        self._out = out
        self._clock = clock
        self._seconds = _SECONDS_LIVE if is_live else _SECONDS_LOGGED
        self._told_at = clock()
        # What was there when it was told the last time.
        self._messages = self._units = self._commit_seconds = 0.0
        self._rows_told = 0
        self._total: dict[m.Metric, float] = dict.fromkeys((m.MESSAGES, m.UNITS, m.COMMIT_SECONDS), 0.0)
        self._read: m.Read | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sink-progress", daemon=True)

    # What a consumer asks of its metrics.

    def add(self, metric: m.Metric, amount: float, labels: tuple[str, ...]) -> None:
        """Count."""
        self._count(metric, amount)

    def observe(self, metric: m.Metric, value: float, labels: tuple[str, ...]) -> None:
        """Sum up."""
        self._count(metric, value)

    def attach(self, read: m.Read) -> None:
        """Learn where lag is read."""
        self._read = read

    def detach(self, read: m.Read) -> None:
        """Forget it again."""
        self._read = None

    def _count(self, metric: m.Metric, amount: float) -> None:
        if metric in self._total:
            self._total[metric] += amount

    # What is said.

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.tell()
        if self._is_live:
            print(file=self._out)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            self.tell()

    def tell(self) -> None:
        """Say what happened since the last time."""
        lag = self._lag()
        now, rows = self._clock(), self._rows()
        messages, units, commit_seconds = (self._total[each] for each in (m.MESSAGES, m.UNITS, m.COMMIT_SECONDS))
        seconds = max(now - self._told_at, 1e-9)
        done = units - self._units
        text = f"{messages:,.0f} messages; {(messages - self._messages) / seconds:,.0f} messages/s, "
        text += f"{(rows - self._rows_told) / seconds:,.0f} rows/s"
        if done:
            size, commit = (messages - self._messages) / done, (commit_seconds - self._commit_seconds) / done
            text += f", {size:,.0f} a unit, commit {1000 * commit:,.1f} ms"
        if lag:
            worst = max(lag, key=lag.__getitem__)
            text += f", lag {sum(lag.values()):,} (most: {worst} {lag[worst]:,})" if lag[worst] else ", lag 0"
        self._print(text, messages=int(messages), rows=rows, lag=lag)
        self._told_at, self._messages, self._units = now, messages, units
        self._rows_told, self._commit_seconds = rows, commit_seconds

    def _lag(self) -> dict[str, int]:
        read = self._read
        samples = read() if read is not None else ()
        return {f"{s.labels[2]}[{s.labels[3]}]": int(s.value) for s in samples if s.metric is m.LAG}

    def _print(self, text: str, **fields: object) -> None:
        if self._is_live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{text[:width]:<{width}}", end="", file=self._out, flush=True)
        else:
            logger.info("%s", text, extra={"action": "progress", **fields})


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
