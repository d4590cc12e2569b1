"""A worker of the sink command: one member of the group, in a process that may be one of several."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import Message

from exactly_once import DeadLetterLimit, ExactlyOnceConsumer
from exactly_once._model import Partition
from exactly_once.consumer.unit import Unit
from exactly_once.errors import ConfigurationError, TooManyDeadLetters
from exactly_once.ledger.dead_letters import enforce
from exactly_once.writer.errors import TableError, place_of
from exactly_once.writer.sink import Bad, Router, TableSink

from .problems import CommandError, in_options, one_line
from .sink_flows import Task
from .sink_progress import CLEAR, LEFT_OUT_SECONDS, LIVE_SECONDS, Counts, LeftOut, Measurements, Progress, every
from .sink_tables import NoColumns, check_without_table, prepare

logger = logging.getLogger(__name__)

# How long a member that ends waits until it has joined, if it is at that, and Kafka has let it go; how often it looks.
_LEAVE_SECONDS, _LEAVE_WAIT_SECONDS = 5.0, 0.05
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}


class LateTables:
    """The tables of topics that had no messages to make one from, or that a pattern has found meanwhile."""

    def __init__(self, task: Task, filled: list[tuple[str, TableSink]]) -> None:
        self._task = task
        # All tables that are filled, by their names: what is made here is added.
        self._filled = filled
        # What was made so far, by the topics of their flows.
        self._sinks: dict[tuple[str, ...], TableSink] = {}

    def find(self, topic: str, messages: Sequence[Message]) -> TableSink | None:
        """Return the sink of a topic, made of these messages if need be; None while they show no columns."""
        waiting = next((flow for flow in self._task.waiting if topic in flow.topics), None)
        if (flow := waiting or self._task.found_by_pattern(topic)) is None:
            raise TableError(f"no table for topic {topic}")
        if flow.topics not in self._sinks:
            ready = None
            with contextlib.suppress(NoColumns):  # of which what is refused below is no consequence
                ready = prepare(self._task, flow, messages)
            if ready is None:
                check_without_table(flow, messages)
                return None
            logger.info("topic %s is new, and goes to %s", topic, flow.table, extra={"action": "topic_found"})
            self._sinks[flow.topics] = ready.sink()
            self._filled.append((flow.table, self._sinks[flow.topics]))
        return self._sinks[flow.topics]

    def tell_waiting(self) -> None:
        """Log which tables are not made so far."""
        for flow in self._task.waiting:
            if flow.topics not in self._sinks:
                text = "table %s is not made: no message of %s has shown its columns so far"
                extra = {"action": "table_waits", "table": flow.table}
                logger.warning(text, flow.table, ", ".join(flow.topics), extra=extra)


def work(task: Task, report: Callable[[Counts], None] | None = None) -> None:
    """Copy messages until a signal, the end or an error; ``report`` takes what would be shown else."""
    topics = [topic for flow in (*task.flows, *task.waiting) for topic in flow.topics]
    topics += [f"^({flow.topics_regex})$" for flow in task.patterns]
    flows = [*task.flows, *task.found.values()]
    filled = [(flow.table, flow.sink()) for flow in flows]
    sinks = {topic: sink for flow, (_, sink) in zip(flows, filled, strict=True) for topic in flow.topics}
    late = LateTables(task, filled)
    limit = DeadLetterLimit(in_a_row=task.run.dead_letter_limit, in_window=task.run.dead_letter_window)
    served = None
    if task.run.metrics_port is not None:
        from exactly_once.metrics.prometheus import PrometheusMetrics  # noqa: PLC0415 - an extra

        served = PrometheusMetrics()
    measured = Measurements(rows=lambda: sum(sink.rows for _, sink in filled), also=served)
    progress = Progress(measured.counts, is_live=task.is_live)
    with ExitStack() as stack:
        stack.enter_context(every(LEFT_OUT_SECONDS, LeftOut(filled).tell))
        stack.enter_context(every(LEFT_OUT_SECONDS, late.tell_waiting))
        if report is None:
            stack.callback(progress.end)
            stack.enter_context(every(progress.seconds, progress.tell))
        else:
            stack.enter_context(every(LIVE_SECONDS, lambda: report(measured.counts())))
        kafka = stack.enter_context(_named(task))
        kind = ExactlyOnceConsumer if "group.instance.id" in task.kafka else _Member
        consumer = stack.enter_context(
            kind(
                kafka,
                conninfo=task.settings.conninfo,
                connect=task.settings.connect,
                schema=task.settings.schema,
                start=task.start,
                on_out_of_range=task.run.on_out_of_range,
                name=task.run.name,
                max_messages=task.run.max_messages,
                linger_seconds=task.run.linger_seconds,
                claims_window=task.run.claims_window,
                metrics=measured,
            )
        )
        if served is not None:
            from exactly_once.metrics.endpoints import Endpoints  # noqa: PLC0415 - a port is opened only when asked for

            port, host = task.run.metrics_port or 0, task.run.metrics_host
            try:
                stack.enter_context(Endpoints(consumer, port=port, host=host, render=served.render))
            except OSError as error:
                what = f"--metrics-port {port} at --metrics-host {host}: {error.strerror or error}"
                raise CommandError(f"{what}; say another one") from error
        consumer.subscribe(topics)
        # What is here now stays to the end; looking through it for garbage takes time from each unit.
        gc.collect()
        gc.freeze()
        set_aside = partial(_set_aside, limit) if task.run.on_poison == "dead-letter" else None
        consumer.run(
            Router(sinks, set_aside=set_aside, find=late.find),
            on_poison=task.run.on_poison,
            dead_letter_limit=limit,
            stop_seconds=task.run.stop_seconds,
            until_end=task.run.until_end,
        )
        # All is done; a signal that comes while it closes changes nothing any more.
        signal.signal(signal.SIGTERM, lambda *_: logger.info("SIGTERM: closing", extra={"action": "stopping"}))


def _set_aside(limit: DeadLetterLimit, unit: Unit, bad: Bad) -> None:
    """Set messages aside in the unit that applies the others.

    :raises BadRow: when they are too many, so that those before are committed, and the one too many stops the worker.
    """
    # One round trip for all, where libpq can.
    with unit.connection.pipeline() if psycopg.Pipeline.is_supported() else contextlib.nullcontext():
        for message, error in bad:
            unit.dead_letter(message, error)
    errors = {place_of(message): error for message, error in bad}
    runs: list[list[Message]] = []
    """Those that could be too many in a row: several without a good one between them, or the first of a partition."""
    last: dict[Partition, list[Message]] = {}
    for message in unit.messages:
        partition = Partition.of(message)
        is_first = partition not in last
        if place_of(message) not in errors:
            last[partition] = []
            continue
        run = last.setdefault(partition, [])
        run.append(message)
        if len(run) == 1 + (not is_first):
            runs.append(run)
    # The last of all is counted in any case, for the limit in a time. Counting each would cost most of all.
    for run in [*runs, [bad[0][0], bad[-1][0]]]:
        try:
            enforce(limit, unit.connection, run[-1], schema=unit.work.schema, group_id=unit.work.group_id)
        except TooManyDeadLetters:
            raise errors[place_of(run[0])] from None


class _Member(ExactlyOnceConsumer):
    """A member that leaves the group when it ends in order, although its name is static.

    Its partitions are free at once then; they wait for it only after a crash. One that an operator has named stays.
    """

    def _leave(self) -> None:
        if not (self._assignment.topics and self._kafka.get("group.instance.id")):
            super()._leave()
            return
        client, deadline = self._client, time.monotonic() + _LEAVE_SECONDS
        # Who is still joining cannot leave, and would be a member until the session time-out.
        while not client.memberid() and time.monotonic() < deadline:
            client.poll(_LEAVE_WAIT_SECONDS)
        client.unsubscribe()
        while client.memberid() and time.monotonic() < deadline:
            client.poll(_LEAVE_WAIT_SECONDS)


@contextmanager
def _named(task: Task) -> Iterator[dict[str, Any]]:
    """Give a worker the name of a place in its group that no other process of this machine has, while it lives.

    The lock on a place ends with the process, however that dies, so the next one takes the same place. Its file stays
    after a crash only, until the next one ends.
    """
    kafka = dict(task.kafka)
    is_classic = str(kafka.get("group.protocol", "classic")).lower() == "classic"
    given = kafka.get("group.instance.id")
    if given == "":
        del kafka["group.instance.id"]
        yield kafka
        return
    if (not is_classic and given is None) or (given is not None and task.run.workers == 1):
        yield kafka
        return
    group = f"{kafka['bootstrap.servers']} {kafka['group.id']} {given or ''}"
    name = f"exactly-once-{os.getuid()}-{hashlib.sha256(group.encode()).hexdigest()[:16]}"
    number = 0
    while True:
        with ExitStack() as stack:
            try:
                path = Path(tempfile.gettempdir(), f"{name}-{number}.lock")
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, file)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file).st_nlink == 0:  # whoever held it has removed it at its end
                    continue
                stack.callback(path.unlink, missing_ok=True)
                kafka["group.instance.id"] = f"{given or socket.gethostname()}-{number}"
            except BlockingIOError:
                number += 1
                continue
            except OSError as error:
                logger.warning("%s; a restart after a crash will wait for the group's session time-out", error)
            yield kafka
            return


def work_alone(task: Task, counts: Connection) -> None:
    """Be one of several workers: the whole life of a process."""
    set_up_logs(as_json=task.log_json, is_live=task.is_live)

    def stop_with_parent() -> None:
        """Stop as a signal does when the process that started this one is gone, however it died."""
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        logger.warning("the process that started this worker has died; stopping", extra={"action": "parent_died"})
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_with_parent, name="sink-parent", daemon=True).start()

    def report(so_far: Counts) -> None:
        with contextlib.suppress(OSError):  # of a parent that has died
            counts.send(so_far)

    try:
        work(task, report)
    except Exception as error:  # noqa: BLE001 - the last place where it can become one line
        fail(error, task)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)


def fail(error: Exception, task: Task) -> None:
    """Tell the error that ends a worker in one line; as a record where the records are for programs."""
    text = one_line(error, task.settings.secrets)
    if task.log_json:
        logger.critical("%s", text, extra={"action": "failed", "error": type(error).__name__})
    else:
        print(f"{CLEAR if task.is_live else ''}exactly-once: error: {text}", file=sys.stderr, flush=True)


def set_up_logs(*, as_json: bool, is_live: bool) -> None:
    """Send the library's records to stderr, as lines for people or for a collector."""
    handler = logging.StreamHandler()
    before = CLEAR if is_live else ""
    handler.setFormatter(JsonLines() if as_json else Lines(f"{before}%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("exactly_once")
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)


class Lines(logging.Formatter):
    """Lines for people, which name options as the command line does."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line."""
        record.message = in_options(record.message)
        return super().formatMessage(record)


class JsonLines(logging.Formatter):
    """One JSON object a record, with whatever it carries beside its text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        more = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        at = datetime.fromtimestamp(record.created, UTC).isoformat()
        return json.dumps(
            {"at": at, "level": record.levelname, "text": in_options(record.getMessage()), **more}, default=str
        )
