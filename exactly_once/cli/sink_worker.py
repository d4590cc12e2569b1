"""A worker of the sink command: one member of the group, in a process that may be one of several."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO

from exactly_once import DeadLetterLimit, ExactlyOnceConsumer
from exactly_once.unit import Unit
from exactly_once.writer.sink import Router

from .problems import one_line
from .sink_flows import Flow

logger = logging.getLogger(__name__)

_SECONDS_LIVE = 0.5
_SECONDS_LOGGED = 10.0
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All that a worker needs; it crosses from process to process."""

    flows: Sequence[Flow]
    kafka: Mapping[str, Any] = field(repr=False)
    conninfo: str = field(repr=False)
    schema: str
    start: Any = None
    max_messages: int = 10_000
    until_end: bool = False
    on_poison: Any = "stop"
    dead_letter_limit: int | None = None
    metrics_port: int | None = None
    log_json: bool = False
    is_live: bool = False
    secrets: frozenset[str] = field(default=frozenset(), repr=False)


def work(task: Task) -> None:
    """Copy messages until a signal, the end or an error."""
    topics = [topic for flow in task.flows for topic in flow.topics]
    sinks = {topic: sink for flow in task.flows for sink in [flow.sink()] for topic in flow.topics}
    progress = Progress(is_live=task.is_live)
    route = Router(sinks)

    def handle(unit: Unit) -> None:
        began = time.monotonic()
        before = sum(sink.rows for sink in set(sinks.values()))
        route(unit)
        progress.wrote(unit, sum(s.rows for s in set(sinks.values())) - before, time.monotonic() - began)

    limit = DeadLetterLimit() if task.dead_letter_limit is None else DeadLetterLimit(in_a_row=task.dead_letter_limit)
    with ExitStack() as stack:
        metrics = _metrics() if task.metrics_port is not None else None
        consumer = stack.enter_context(
            ExactlyOnceConsumer(
                task.kafka,
                conninfo=task.conninfo,
                schema=task.schema,
                start=task.start,
                max_messages=task.max_messages,
                metrics=metrics,
            )
        )
        if metrics is not None:
            from exactly_once.endpoints import Endpoints  # noqa: PLC0415 - a port is opened only when asked for

            stack.enter_context(Endpoints(consumer, port=task.metrics_port or 0, render=metrics.render))
        consumer.subscribe(topics)
        consumer.run(handle, on_poison=task.on_poison, dead_letter_limit=limit, until_end=task.until_end)
        progress.end()


def work_alone(task: Task) -> None:
    """Be one of several workers: the whole life of a process."""
    set_up_logs(as_json=task.log_json)
    try:
        work(task)
    except Exception as error:  # noqa: BLE001 - the last place where it can become one line
        print(f"exactly-once: error: {one_line(error, task.secrets)}", file=sys.stderr, flush=True)
        sys.exit(1)


def set_up_logs(*, as_json: bool) -> None:
    """Send the library's records to stderr, as lines for people or for a collector."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("exactly_once")
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)


class JsonLines(logging.Formatter):
    """One JSON object a record, with whatever it carries beside its text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        more = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        at = datetime.fromtimestamp(record.created, UTC).isoformat()
        return json.dumps({"at": at, "level": record.levelname, "text": record.getMessage(), **more}, default=str)


class Progress:
    """Says how it goes: a line that moves on a terminal, else a record now and then."""

    def __init__(self, *, is_live: bool, out: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_live = is_live
        self._out = out
        self._clock = clock
        self._began = self._told = clock()
        self._seconds = _SECONDS_LIVE if is_live else _SECONDS_LOGGED
        self.messages = self.rows = self.units = 0
        self.busy_seconds = 0.0
        self._total = 0
        self._ends: dict[str, int] = {}

    def wrote(self, unit: Unit, rows: int, seconds: float) -> None:
        """Take note of a unit that is about to be committed."""
        self.messages += len(unit.messages)
        self.rows += rows
        self.units += 1
        self.busy_seconds += seconds
        self._total += len(unit.messages)
        self._ends |= {str(a.partition): a.next_offset for a in unit.advances}
        if self._clock() - self._told >= self._seconds:
            self.tell()

    def end(self) -> None:
        """Say the rest."""
        self.tell()
        if self._is_live:
            print(file=self._out)

    def tell(self) -> None:
        """Say what happened since the last time."""
        now = self._clock()
        seconds = max(now - self._told, 1e-9)
        size = self.messages / self.units if self.units else 0
        each = 1000 * self.busy_seconds / self.units if self.units else 0
        text = (
            f"{self._total:,} messages; {self.messages / seconds:,.0f} messages/s, {self.rows / seconds:,.0f} rows/s, "
            f"{size:,.0f} messages a unit, {each:,.1f} ms to write one"
        )
        if self._is_live:
            print(f"\r{text:<110}", end="", file=self._out, flush=True)
        else:
            more = {"action": "progress", "messages": self._total, "next_offsets": dict(self._ends)}
            logger.info("%s", text, extra=more)
        self._told, self.messages, self.rows, self.units, self.busy_seconds = now, 0, 0, 0, 0.0


def _metrics() -> Any:
    from exactly_once.prometheus import PrometheusMetrics  # noqa: PLC0415 - an extra

    return PrometheusMetrics()
