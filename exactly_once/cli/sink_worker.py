"""A worker of the sink command: one member of the group, in a process that may be one of several."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from exactly_once import DeadLetterLimit, ExactlyOnceConsumer
from exactly_once.session import Connection, connector
from exactly_once.writer.sink import Router

from .named import NamedConnect
from .problems import one_line
from .sink_flows import Flow, Run
from .sink_progress import Both, Progress

logger = logging.getLogger(__name__)

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All that a worker needs; it crosses from process to process."""

    flows: Sequence[Flow]
    kafka: Mapping[str, Any] = field(repr=False)
    conninfo: str | None = field(repr=False)
    connect: NamedConnect | None = None
    schema: str
    run: Run
    start: Any = None
    log_json: bool = False
    is_live: bool = False
    secrets: frozenset[str] = field(default=frozenset(), repr=False)

    def open(self) -> Connection:
        """Connect to Postgres."""
        return (self.connect or connector(self.conninfo or ""))()


def work(task: Task) -> None:
    """Copy messages until a signal, the end or an error."""
    topics = [topic for flow in task.flows for topic in flow.topics]
    sinks = {topic: sink for flow in task.flows for sink in [flow.sink()] for topic in flow.topics}
    given = {"in_a_row": task.run.dead_letter_limit, "in_window": task.run.dead_letter_window}
    limit = DeadLetterLimit(**{name: number for name, number in given.items() if number is not None})
    progress = Progress(is_live=task.is_live, rows=lambda: sum(sink.rows for sink in set(sinks.values())))
    served = _metrics() if task.run.metrics_port is not None else None
    with ExitStack() as stack:
        stack.enter_context(progress)
        consumer = stack.enter_context(
            ExactlyOnceConsumer(
                task.kafka,
                conninfo=task.conninfo,
                connect=task.connect,
                schema=task.schema,
                start=task.start,
                max_messages=task.run.max_messages,
                linger_seconds=task.run.linger_seconds,
                metrics=progress if served is None else Both(progress, served),
            )
        )
        if served is not None:
            from exactly_once.endpoints import Endpoints  # noqa: PLC0415 - a port is opened only when asked for

            port = task.run.metrics_port or 0
            stack.enter_context(Endpoints(consumer, port=port, host=task.run.metrics_host, render=served.render))
        consumer.subscribe(topics)
        # What is here now stays to the end; looking through it for garbage takes time from each unit.
        gc.collect()
        gc.freeze()
        consumer.run(
            Router(sinks),
            on_poison=task.run.on_poison,
            dead_letter_limit=limit,
            stop_seconds=task.run.stop_seconds,
            until_end=task.run.until_end,
        )


def work_alone(task: Task) -> None:
    """Be one of several workers: the whole life of a process."""
    set_up_logs(as_json=task.log_json, is_live=task.is_live)
    threading.Thread(target=_stop_with_parent, name="sink-parent", daemon=True).start()
    try:
        work(task)
    except Exception as error:  # noqa: BLE001 - the last place where it can become one line
        print(f"exactly-once: error: {one_line(error, task.secrets)}", file=sys.stderr, flush=True)
        sys.exit(1)


def _stop_with_parent() -> None:
    """Stop as a signal does when the process that started this one is gone, however it died."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    logger.warning("the process that started this worker has died; stopping", extra={"action": "parent_died"})
    os.kill(os.getpid(), signal.SIGTERM)


def set_up_logs(*, as_json: bool, is_live: bool) -> None:
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


def _metrics() -> Any:
    from exactly_once.prometheus import PrometheusMetrics  # noqa: PLC0415 - an extra

    return PrometheusMetrics()
