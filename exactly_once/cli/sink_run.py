"""Run of the sink command: look at topics and tables, then show what would be stored, or start the workers."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from types import FrameType
from typing import Any

from exactly_once.errors import ConfigurationError

from . import options, output
from .problems import CommandError, UsageError
from .servers import open_cluster
from .sink_crew import Crew
from .sink_flows import Flow, Run, Task, read_flows, read_run
from .sink_sample import SAMPLE
from .sink_tables import made_ready, prepare
from .sink_worker import fail, set_up_logs, work

logger = logging.getLogger(__name__)

_STARTS = ("earliest", "latest", "committed")
# With patterns: new topics are found within ten seconds, not five minutes, and Kafka's own are none of them.
_PATTERN_SETTINGS = {"topic.metadata.refresh.interval.ms": 10_000, "topic.blacklist": "^__"}


def run(args: argparse.Namespace) -> int:
    """Look at everything, then show it or start the workers."""
    settings = options.settings(args, more=("sink", "run", "schema_registry"))
    flows = read_flows(args, settings.more.get("sink", ()), settings.more.get("schema_registry"))
    task = _task(args, settings, flows, read_run(args, settings.more.get("run", {})))
    set_up_logs(as_json=args.json, is_live=task.is_live and not args.dry_run)
    try:
        with _ending_on_signals():
            found = _found(settings, task)
            if args.dry_run:
                return _dry_run(args, task, [*task.flows, *found.values()])
            task = replace(
                task,
                flows=[prepare(task, flow) for flow in task.flows],
                found={topic: prepare(task, flow) for topic, flow in found.items()},
            )
            if task.run.workers > 1:
                return Crew(task).run()
            work(task)
    except Exception as error:
        if args.debug:
            raise
        fail(error, task)
        return 2 if isinstance(error, (ConfigurationError, UsageError)) else 1
    return 0


def _found(settings: options.Settings, task: Task) -> dict[str, Flow]:
    """Return the topics that patterns find now, each with the flow of the first that does."""
    if not task.patterns:
        return {}
    named = {topic for flow in task.flows for topic in flow.topics}
    found: dict[str, Flow] = {}
    for topic in sorted(open_cluster(settings).topic_names()):
        of_topic = (flow.of_topic(topic) for flow in task.patterns)
        if not topic.startswith("__") and topic not in named and (flow := next(filter(None, of_topic), None)):
            found[topic] = flow
    logger.info("topics that patterns find now: %s", ", ".join(found) or "none", extra={"action": "topics_found"})
    return found


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """End with exit code 0 on a SIGTERM that comes before there is a unit, when nothing has happened yet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        logger.info("SIGTERM: stopping; nothing was begun", extra={"action": "stopping"})
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _task(args: argparse.Namespace, settings: options.Settings, flows: Sequence[Flow], run_: Run) -> Task:
    if run_.workers > 1 and run_.metrics_port is not None:
        raise UsageError("--metrics-port serves one process; run the workers as processes of their own")
    settings.opener()
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
            "group.id": settings.required("group_id"),
        },
        conninfo=settings.conninfo,
        connect=settings.connect,
        schema=settings.schema,
        start=_start(run_.start),
        log_json=args.json,
        is_live=sys.stderr.isatty() and not args.json,
        secrets=settings.secrets,
    )


def _start(given: str | None) -> Any:
    if given is None or given in _STARTS:
        return given
    try:
        start = datetime.fromisoformat(given)
    except ValueError:
        raise UsageError(f"--start {given!r}: say {', '.join(_STARTS)} or a time in ISO 8601") from None
    if start.tzinfo is None:
        raise UsageError(f"--start {given!r} has no time zone: say {given}Z, or another one than UTC")
    return start


def _dry_run(args: argparse.Namespace, task: Task, flows: Sequence[Flow]) -> int:
    """Do all of it to the first messages, in a transaction that is rolled back."""
    shown: list[dict[str, Any]] = []
    if not flows:
        raise CommandError("no topic has a name that a pattern finds")
    for flow in flows:
        with task.open() as connection:
            connection.autocommit = False
            ready = made_ready(task, flow, connection, is_dry=True)
            ddl = [statement.as_string(None) for statement in ready.statements]
            for statement in ready.statements:
                connection.execute(statement, prepare=False)
            sink = replace(ready.flow, evolve=None, claim=None).sink()
            messages = ready.messages[:SAMPLE]
            written = sink.write(connection, messages)
            decoded = sink.decoder.decode(messages)
            rows = [list(row) for row in decoded]
            connection.rollback()
        shown.append(
            {
                "table": flow.table,
                "ddl": "; ".join(ddl) or None,
                "columns": decoded.columns,
                "rows": rows,
                "written": written,
            }
        )
    if args.json:
        output.print_json({"sinks": shown})
        return 0
    for one in shown:
        if one["ddl"]:
            print(f"{one['ddl']};")
        output.print_table(list(one["columns"]), one["rows"])
        print(f"{len(one['rows'])} rows for {one['table']}; nothing was stored")
    return 0
