"""Run of the sink command: look at topics and tables, then show what would be stored, or start the workers."""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

from exactly_once.consumer.options import group_id_in
from exactly_once.errors import ConfigurationError
from exactly_once.writer import MISSING, Tombstone

from . import options, output
from .problems import CommandError, UsageError
from .servers import open_cluster
from .sink_flows import Flow, Run, Task, read_flows, read_run
from .sink_progress import Counts, Progress, every
from .sink_tables import SAMPLE, NoColumns, made_ready, opened, prepare
from .sink_worker import fail, set_up_logs, work, work_alone

logger = logging.getLogger(__name__)

_STARTS = ("earliest", "latest", "committed")
# With patterns: new topics are found within ten seconds, not five minutes, and Kafka's own are none of them.
_PATTERN_SETTINGS = {"topic.metadata.refresh.interval.ms": 10_000, "topic.blacklist": "^__"}
_PAUSE_SECONDS = 1.0
# How long workers may take to stop, besides what the unit in hand is given: to close their clients and connections.
_CLOSE_SECONDS = 15.0
_KILLED, _TERMINATED, _INTERRUPTED = (128 + n for n in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT))


def run(args: argparse.Namespace) -> int:
    """Look at everything, then show it or start the workers."""
    settings = options.settings(args)
    flows = read_flows(args, settings.more.get("sink", ()), settings.more.get("schema_registry"))
    task = _task(args, settings, flows, read_run(args, settings.more.get("run", {})))
    set_up_logs(as_json=args.json, is_live=task.is_live and not args.dry_run)
    try:
        with _ending_on_signals(task):
            named = {topic for flow in task.flows for topic in flow.topics}
            found: dict[str, Flow] = {}
            for topic in sorted(open_cluster(settings).topic_names()) if task.patterns else ():
                if not topic.startswith("__") and topic not in named and (flow := task.found_by_pattern(topic)):
                    found[topic] = flow
            if task.patterns:
                said, extra = ", ".join(found) or "none", {"action": "topics_found"}
                logger.info("topics that patterns find now: %s", said, extra=extra)
            if not (task.flows or found) and (args.dry_run or task.run.until_end):
                raise CommandError("no topic has a name that a pattern finds")
            if args.dry_run:
                return _dry_run(args, task, [*task.flows, *found.values()])
            ready: list[Flow] = []
            waiting: list[Flow] = []
            for flow in (*task.flows, *found.values()):
                try:
                    ready.append(prepare(task, flow))
                # Topics that show no columns of theirs wait for a message, and do not hold up the others.
                except NoColumns as error:
                    waiting.append(flow)
                    extra = {"action": "table_waits", "table": flow.table}
                    logger.warning("waiting for a first message of %s: %s", ", ".join(flow.topics), error, extra=extra)
            by_pattern = {topic: flow for flow in ready for topic in flow.topics if topic in found}
            flows = [flow for flow in ready if not by_pattern.keys() & {*flow.topics}]
            task = replace(task, flows=flows, found=by_pattern, waiting=waiting)
            if task.run.workers > 1:
                return Crew(task).run()
            work(task)
    except Exception as error:
        has_no_reader = args.dry_run and isinstance(error, BrokenPipeError)
        if args.debug or has_no_reader:
            raise
        fail(error, task)
        return 2 if isinstance(error, (ConfigurationError, UsageError)) else 1
    return 0


@contextlib.contextmanager
def _ending_on_signals(task: Task) -> Iterator[None]:
    """End on a SIGTERM that comes before there is a unit: in order, unless an end was to be reached."""

    def end(number: int, frame: FrameType | None) -> None:
        logger.info("SIGTERM: stopping; nothing was begun", extra={"action": "stopping"})
        raise SystemExit(_TERMINATED if task.run.until_end else 0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _task(args: argparse.Namespace, settings: options.Settings, flows: Sequence[Flow], run_: Run) -> Task:
    if run_.workers > 1 and run_.metrics_port is not None:
        raise UsageError("--metrics-port serves one process; run the workers as processes of their own")
    start: Any = run_.start
    if start is not None and start not in _STARTS:
        try:
            start = datetime.fromisoformat(start)
        except ValueError:
            raise UsageError(f"--start {start!r}: say {', '.join(_STARTS)} or a time in ISO 8601") from None
        if start.tzinfo is None:
            raise UsageError(
                f"--start {run_.start!r} has no time zone: say {start.isoformat()}Z, or another one than UTC"
            )
    settings.opener()
    group_id = settings.required("group_id")
    try:
        group_id_in({"group.id": group_id})  # a sample is read first, by a client that ends the process for some names
    except ConfigurationError as error:
        raise UsageError(str(error)) from None
    return Task(
        flows=[flow for flow in flows if flow.topics_regex is None],
        patterns=(patterns := [flow for flow in flows if flow.topics_regex is not None]),
        creates_tables=args.create_table,
        adds_columns=args.add_columns,
        run=run_,
        kafka={
            **(_PATTERN_SETTINGS if patterns else {}),
            **settings.kafka,
            "bootstrap.servers": settings.required("bootstrap_servers"),
            "group.id": group_id,
        },
        settings=settings,
        start=start,
        log_json=args.json,
        is_live=sys.stderr.isatty() and not args.json,
    )


def _dry_run(args: argparse.Namespace, task: Task, flows: Sequence[Flow]) -> int:
    """Do all of it to the first messages, in a transaction that is rolled back."""
    shown: list[dict[str, Any]] = []
    for flow in flows:
        with opened(task) as connection:
            try:
                ready = made_ready(task, flow, connection, is_dry=True)
            except NoColumns as error:
                if len(flows) == 1:
                    raise
                logger.warning("%s", error, extra={"action": "table_waits", "table": flow.table})
                continue
            ddl = [statement.as_string(None) for statement in ready.statements]
            ready.make(connection)
            sink = replace(ready.flow, evolve=None, claim=None).sink()
            messages = ready.messages[:SAMPLE]
            written = sink.write(connection, messages)
            decoded = sink.decoder.decode(messages)
            changes, key = list(decoded), sink.writer.key(connection)
            kinds = [column.base_name for column in sink.writer.table(connection).pick(decoded.columns)]
            connection.rollback()
        stored = [row for row in changes if not isinstance(row, Tombstone)]
        rows = [[_shown(value, kind) for value, kind in zip(row, kinds, strict=True)] for row in stored]
        deletes = [dict(zip(key, row, strict=True)) for row in changes if isinstance(row, Tombstone)]
        one = {"table": flow.table, "ddl": "; ".join(ddl) or None, "columns": decoded.columns, "rows": rows}
        shown.append({**one, "deletes": deletes, "written": written})
    if args.json:
        output.print_json({"sinks": shown})
        return 0
    for each in shown:
        if each["ddl"]:
            print(f"{each['ddl']};")
        output.print_table(list(each["columns"]), each["rows"])
        for doomed in each["deletes"]:
            print("delete", ", ".join(f"{name} = {output.printable(value)}" for name, value in doomed.items()))
        counts = f"{len(each['rows'])} rows and {len(each['deletes'])} deletes" if each["deletes"] else ""
        print(f"{counts or str(len(each['rows'])) + ' rows'} for {each['table']}; nothing was stored")
    return 0


def _shown(value: Any, kind: str) -> Any:
    """Return a value as Postgres shows it, where Python would show another."""
    if value is MISSING:
        return "(default)"
    if isinstance(value, bytes):
        return value.decode() if kind in ("json", "jsonb") else f"\\x{value.hex()}"
    return value


class Crew:
    """Keeps the workers running until they are done, one fails, or a signal comes; says how all of them do."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._context = multiprocessing.get_context("spawn")
        # The last that each worker has sent; of those that are gone, too.
        self._counts: dict[Connection, Counts] = {}
        self._workers: list[SpawnProcess] = []
        self._kill_at: float | None = None
        self._signal: int | None = None  # the first that came from outside

    def run(self) -> int:
        """Watch until all are gone; return the exit code."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        progress = Progress(lambda: sum(list(self._counts.values()), Counts()), is_live=self._task.is_live)
        code = failed = 0
        try:
            with every(progress.seconds, progress.tell):
                for _ in range(self._task.run.workers):
                    self._start()
                while self._workers:
                    wait([*(w.sentinel for w in self._workers), *self._open()], timeout=_PAUSE_SECONDS)
                    self._receive()
                    for worker in [w for w in self._workers if not w.is_alive()]:
                        self._workers.remove(worker)
                        ended = worker.exitcode or 0
                        if self._kill_at is not None:
                            # One that has no handler of signals yet dies of SIGTERM, and has not begun.
                            unbegun = _TERMINATED if self._task.run.until_end else 0
                            by_signal = {-signal.SIGKILL: _KILLED, -signal.SIGTERM: unbegun}
                            code = max(code, by_signal.get(ended, ended))
                        elif ended < 0:
                            logger.warning("worker %s died of signal %s; another takes its place", worker.pid, -ended)
                            time.sleep(_PAUSE_SECONDS)
                            if self._kill_at is None:  # no signal came meanwhile
                                self._start()
                        elif ended > 0:
                            logger.error("worker %s failed; stopping the others", worker.pid)
                            failed = ended  # how the others end says nothing more
                            self._stop()
                    if self._kill_at is not None and time.monotonic() > self._kill_at:
                        logger.warning("workers do not stop; ending them, which loses nothing")
                        for worker in self._workers:
                            worker.kill()
                            worker.join()
                self._receive()  # what the last ones have sent before they ended
            progress.end()
        finally:
            for worker in self._workers:
                worker.terminate()
            for number, handler in before.items():
                signal.signal(number, handler)
        is_interrupted = code == _TERMINATED and self._signal == signal.SIGINT  # workers are always sent SIGTERM
        return failed or (_INTERRUPTED if is_interrupted else code)

    def _open(self) -> list[Connection]:
        return [each for each in self._counts if not each.closed]

    def _receive(self) -> None:
        """Take in what workers have sent; what one has done stays counted when it is gone."""
        for connection in self._open():
            try:
                while connection.poll():
                    self._counts[connection] = connection.recv()
            except (EOFError, OSError):
                connection.close()
                self._counts[connection] = replace(self._counts[connection], owned=0, lag={})

    def _start(self) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        worker = self._context.Process(target=work_alone, args=(self._task, theirs))
        worker.start()
        self._workers.append(worker)
        if self._kill_at is not None:  # a signal that came before it was among them
            worker.terminate()
        theirs.close()  # or its end would not be noticed
        self._counts[ours] = Counts()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number
        self._stop()

    def _stop(self) -> None:
        self._kill_at = self._kill_at or time.monotonic() + self._task.run.stop_seconds + _CLOSE_SECONDS
        for worker in self._workers:
            with contextlib.suppress(ValueError):  # one that was not started yet
                if worker.is_alive():
                    worker.terminate()
