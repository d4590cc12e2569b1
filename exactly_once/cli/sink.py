"""``exactly-once sink``: copy topics into tables, each message once, without code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from psycopg import sql

from exactly_once.writer import TableError
from exactly_once.writer.table import read_table

from . import options, output
from .problems import CommandError, UsageError
from .sink_crew import Crew
from .sink_flows import FORMATS, MODES, Flow, read_flows
from .sink_sample import SAMPLE, add_columns, columns_of, create_table, first_messages
from .sink_worker import LINGER_SECONDS, Task, set_up_logs, work

_DESCRIPTION = """\
Copy the messages of topics into a table: one batch, one transaction, together with the offsets, so that each
message is there once whatever dies when. Several topics and tables: a [[sink]] for each in the file."""
_EXAMPLE = """
A file with two tables:
  [[sink]]
  topics = ["payments"]
  table = "bank.payment"
  metadata = { kafka_offset = "offset" }
  [[sink]]
  topics = ["customers"]
  table = "customer"
  mode = "upsert"
  fields = { id = "id", city = "address.city" }
"""
_STARTS = ("earliest", "latest", "committed")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "sink", help="copy topics into tables", description=_DESCRIPTION, epilog=options.EPILOG + "\n" + _EXAMPLE
    )
    what = parser.add_argument_group("what")
    what.add_argument("--topic", action="append", dest="topics", metavar="TOPIC", help="may be said several times")
    what.add_argument("--table", metavar="TABLE", help='as in SQL: payment, bank.payment, "Odd Name"')
    what.add_argument("--mode", choices=MODES, help="append (default); upsert by key; insert-ignore")
    what.add_argument("--key", action="append", metavar="COLUMN", help="of an upsert (the primary key)")
    what.add_argument("--format", choices=FORMATS, help="json (default): a field for each column; raw: key and value")
    what.add_argument("--create-table", action="store_true", help="make a table that is not there, from a sample")
    what.add_argument("--add-columns", action="store_true", help="add columns for fields of a sample; drops nothing")
    run_ = parser.add_argument_group("run")
    run_.add_argument(
        "--start", metavar="WHERE", help="for a group without offsets: earliest, latest, committed, a time"
    )
    run_.add_argument("--workers", type=int, default=1, metavar="N", help="processes of the group (%(default)s)")
    run_.add_argument("--until-end", action="store_true", help="stop where the topics end now")
    run_.add_argument("--max-messages", type=int, default=10_000, metavar="N", help="in a transaction (%(default)s)")
    run_.add_argument(
        "--linger-seconds",
        type=float,
        default=LINGER_SECONDS,
        metavar="S",
        help="wait so long for a transaction to fill (%(default)s)",
    )
    run_.add_argument("--on-poison", choices=("stop", "dead-letter"), default="stop", help="(%(default)s)")
    run_.add_argument("--dead-letter-limit", type=int, metavar="N", help="stop after so many in a row (10)")
    run_.add_argument("--dead-letter-window", type=int, metavar="N", help="or after so many in an hour (1000)")
    run_.add_argument("--metrics-port", type=int, metavar="PORT", help="serve /metrics, /livez and /readyz")
    run_.add_argument("--dry-run", action="store_true", help=f"decode the first {SAMPLE} messages and show the rows")
    options.add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Look at everything, then show it or start the workers."""
    settings = options.settings(args, more=("sink",))
    flows = read_flows(args, settings.more.get("sink", ()))
    task = _task(args, settings, flows)
    if args.dry_run:
        return _dry_run(args, task)
    set_up_logs(as_json=args.json)
    for flow in flows:
        _prepare(args, task, flow)
    if args.workers > 1:
        return Crew(replace(task, is_live=False), args.workers).run()
    work(task)
    return 0


def _task(args: argparse.Namespace, settings: options.Settings, flows: Sequence[Flow]) -> Task:
    if args.workers < 1:
        raise UsageError("--workers must be 1 or more")
    if args.workers > 1 and args.metrics_port is not None:
        raise UsageError("--metrics-port serves one process; run the workers as processes of their own")
    settings.opener()
    return Task(
        flows=flows,
        kafka={
            **settings.kafka,
            "bootstrap.servers": settings.required("bootstrap_servers"),
            "group.id": settings.required("group_id"),
        },
        conninfo=settings.conninfo,
        connect=settings.connect,
        schema=settings.schema,
        start=_start(args.start),
        max_messages=args.max_messages,
        linger_seconds=args.linger_seconds,
        until_end=args.until_end,
        on_poison=args.on_poison,
        dead_letter_limit=args.dead_letter_limit,
        dead_letter_window=args.dead_letter_window,
        metrics_port=args.metrics_port,
        log_json=args.json,
        is_live=sys.stderr.isatty() and not args.json,
        secrets=settings.secrets,
    )


def _start(given: str | None) -> Any:
    if given is None or given in _STARTS:
        return given
    try:
        return datetime.fromisoformat(given)
    except ValueError:
        raise UsageError(f"--start {given!r}: say {', '.join(_STARTS)} or a time in ISO 8601") from None


def _ddl(args: argparse.Namespace, task: Task, flow: Flow, connection: Any) -> sql.Composed | None:
    """Return what must be done to the table, or to have one; None when it is as it should be."""
    try:
        table = read_table(connection, flow.table)
    except TableError:
        connection.rollback()
        if not (args.create_table or args.dry_run):
            raise
        table = None
    if table is not None and not args.add_columns:
        return None
    columns = columns_of(flow, first_messages(task.kafka, flow.topics))
    if not columns:
        raise CommandError(f"{', '.join(flow.topics)} holds no messages to learn columns from; make the table yourself")
    return create_table(flow, columns) if table is None else add_columns(table, columns)


def _prepare(args: argparse.Namespace, task: Task, flow: Flow) -> None:
    """Make or extend the table where that was asked for, and see to it that it takes what it will be given."""
    with task.open() as connection:
        connection.autocommit = False
        statement = _ddl(args, task, flow, connection)
        if statement is not None:
            connection.execute(statement, prepare=False)
        flow.sink().write(connection, [])


def _dry_run(args: argparse.Namespace, task: Task) -> int:
    """Do all of it to the first messages, in a transaction that is rolled back."""
    shown: list[dict[str, Any]] = []
    for flow in task.flows:
        messages = first_messages(task.kafka, flow.topics)
        with task.open() as connection:
            connection.autocommit = False
            statement = _ddl(args, task, flow, connection)
            text = statement.as_string(None) if statement is not None else None
            if statement is not None:
                connection.execute(statement, prepare=False)
            sink = flow.sink()
            written = sink.write(connection, messages)
            decoded = sink.decoder.decode(messages)
            rows = [list(row) for row in decoded]
            connection.rollback()
        shown.append({"table": flow.table, "ddl": text, "columns": decoded.columns, "rows": rows, "written": written})
    if args.json:
        output.print_json({"sinks": shown})
        return 0
    for one in shown:
        if one["ddl"]:
            print(f"{one['ddl']};")
        output.print_table(list(one["columns"]), one["rows"])
        print(f"{len(one['rows'])} rows for {one['table']}; nothing was stored")
    return 0
