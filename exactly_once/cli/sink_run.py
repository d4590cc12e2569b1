"""Run of the sink command: look at topics and tables, then show what would be stored, or start the workers."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import FrameType
from typing import Any

import psycopg
from confluent_kafka import Message
from psycopg import sql
from psycopg.rows import class_row

from exactly_once.errors import ConfigurationError
from exactly_once.ledger.outcome import PATIENCE_SECONDS
from exactly_once.ledger.retry import waiting
from exactly_once.ledger.session import Connection
from exactly_once.ledger.sql import query
from exactly_once.writer import TableError
from exactly_once.writer.evolving import add_columns
from exactly_once.writer.table import read_table

from . import options, output
from .problems import CommandError, UsageError
from .servers import Stored
from .sink_crew import Crew
from .sink_flows import Flow, Run, read_flows, read_run, with_rest
from .sink_sample import REST_COMMENT, SAMPLE, Positions, columns_of, create_table, sample
from .sink_worker import Task, fail, set_up_logs, work

logger = logging.getLogger(__name__)

_STARTS = ("earliest", "latest", "committed")
_WAITS = (1.0, 30.0)
"""Seconds between looks at a topic that is empty: at first, and at most."""


def run(args: argparse.Namespace) -> int:
    """Look at everything, then show it or start the workers."""
    settings = options.settings(args, more=("sink", "run", "schema_registry"))
    flows = read_flows(args, settings.more.get("sink", ()), settings.more.get("schema_registry"))
    task = _task(args, settings, flows, read_run(args, settings.more.get("run", {})))
    set_up_logs(as_json=args.json, is_live=task.is_live and not args.dry_run)
    try:
        with _ending_on_signals():
            if args.dry_run:
                return _dry_run(args, task)
            task = replace(task, flows=[_prepare(args, task, flow) for flow in flows])
            if task.run.workers > 1:
                return Crew(task).run()
            work(task)
    except Exception as error:
        if args.debug:
            raise
        fail(error, task)
        return 2 if isinstance(error, (ConfigurationError, UsageError)) else 1
    return 0


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
        flows=flows,
        run=run_,
        kafka={
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A flow whose table is as the messages need it, once the statements are executed."""

    flow: Flow
    statements: Sequence[sql.Composed] = ()
    messages: Sequence[Message] = ()


def _made_ready(args: argparse.Namespace, task: Task, flow: Flow, connection: Connection) -> _Ready:
    """Find out what must be done to the table, or to have one.

    :raises TableError: when there is none, and none is to be made.
    """
    # A Schema Registry that is away is waited for, as the workers do.
    asking = waiting(PATIENCE_SECONDS, group_id=task.kafka["group.id"])
    try:
        table = read_table(connection, flow.table)
    except TableError as error:
        connection.rollback()
        if not (args.create_table or args.dry_run):
            raise TableError(f"{error}; --create-table makes one") from None
        messages = _sample(args, task, flow, connection)
        columns = asking(columns_of, flow, messages, for_new_table=True)
        return _Ready(flow=with_rest(flow, columns.rest), statements=create_table(flow, columns), messages=messages)
    parameters = {"name": flow.table, "comment": REST_COMMENT}
    found = connection.execute(query("find_rest_column", ""), parameters, prepare=False).fetchone()
    flow = with_rest(flow, found[0] if found else None)
    if not (args.add_columns or args.dry_run):
        return _Ready(flow=flow)
    messages = sample(task.kafka, flow.topics, _positions(task, connection) if args.add_columns else None)
    wanted = asking(columns_of, flow, messages, for_new_table=False).types if args.add_columns else {}
    new = add_columns(table, wanted)
    return _Ready(flow=flow, statements=new, messages=messages)


def _positions(task: Task, connection: Connection) -> Positions:
    """Return where the group stands."""
    with connection.cursor(row_factory=class_row(Stored)) as cursor:
        cursor.execute(query("status", task.schema), {"group_id": task.kafka["group.id"]}, prepare=False)
        return {(row.topic, row.partition): row.next_offset or 0 for row in cursor}


def _sample(args: argparse.Namespace, task: Task, flow: Flow, connection: Connection) -> Sequence[Message]:
    """Read a sample of topics that are to become a table; wait for the first message of a service's.

    :raises CommandError: when there is none, and it is not to be waited for.
    """
    waited, pause = 0.0, _WAITS[0]
    while not (messages := sample(task.kafka, flow.topics)) and flow.format != "raw":
        topics = ", ".join(flow.topics)
        if args.dry_run or task.run.until_end:
            raise CommandError(
                f"{topics} holds no messages to learn columns from; make the table {flow.table} yourself"
            )
        logger.info("waiting for a first message of %s, to learn columns from: %.0f s", topics, waited)
        time.sleep(pause)
        waited, pause = waited + pause, min(2 * pause, _WAITS[1])
    return messages


def _prepare(args: argparse.Namespace, task: Task, flow: Flow) -> Flow:
    """Make or extend the table where that was asked for, and see to it that it takes what it will be given."""
    with task.open() as connection:
        connection.autocommit = False
        ready = _made_ready(args, task, flow, connection)
        for statement in ready.statements:
            try:
                connection.execute(statement, prepare=False)
            except psycopg.errors.InvalidSchemaName as error:
                raise CommandError(f"{flow.table}: {error.diag.message_primary}; create the schema first") from error
            logger.info("%s", statement.as_string(None), extra={"action": "ddl"})
        ready.flow.sink().write(connection, [])
    return ready.flow


def _dry_run(args: argparse.Namespace, task: Task) -> int:
    """Do all of it to the first messages, in a transaction that is rolled back."""
    shown: list[dict[str, Any]] = []
    for flow in task.flows:
        with task.open() as connection:
            connection.autocommit = False
            ready = _made_ready(args, task, flow, connection)
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
