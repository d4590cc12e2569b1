"""``exactly-once verify``: injures any pipeline that copies a topic into a database, and counts lost and doubled."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import KafkaException
from psycopg.postgres import types

from exactly_once import embedded
from exactly_once.demo.display import Display
from exactly_once.demo.payments import create_topic
from exactly_once.embedded.proxy import PostgresProxy
from exactly_once.ledger.commands import DEFAULT_SCHEMA
from exactly_once.ledger.migrate import migrate
from exactly_once.soak.pipeline import FAULTS, NothingShown, Plan, counted, verify

from .options import YEAR_SECONDS, Settings, number, positive
from .problems import CUT_SHORT, UsageError
from .runs import add_seed, drawn, ending_in_order, naming_a_full_disk
from .servers import open_cluster, open_database

# The options that a plan has by the same name.
_OPTIONS = ("topic", "effects", "value", "processes", "messages", "seconds", "patience_seconds")
# As Postgres names types that hold the number of a message.
_NUMBERS = {"int2", "int4", "int8", "numeric", "float4", "float8"}
_TEXTS = {"text", "varchar", "bpchar", "json", "jsonb"}
_SHOWN_BYTES = 4000  # of what a pipeline printed: some tracebacks
_DESCRIPTION = """\
Publish numbered messages, start the pipeline, kill and pause its processes and cut its connections at
COMMIT, let it catch up, and count by the query how often each message took effect.

example:
  exactly-once verify --setup 'CREATE TABLE copy (n int)' \\
      --effects 'SELECT n, count(*) FROM copy GROUP BY 1' \\
      --start 'python pipeline.py {bootstrap_servers} {conninfo} {topic}'

Faults "cut-before" and "cut-after" lose the connection before or after the server has done the COMMIT; the
pipeline must connect by the {conninfo} that it is given. Without --bootstrap-servers a Kafka is started for
it, without --conninfo a Postgres, in which the ledger of this library is there.

exit codes:
  0    every message took effect once
  1    some were lost or doubled
  2    refused, nothing was begun: an option, the program, the SQL, effects or a topic of before
  3    nothing is shown: no fault struck, the pipeline did nothing, or a server was away"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "verify", help="injure any pipeline, and count lost and doubled", description=_DESCRIPTION
    )
    parser.add_argument("--start", required=True, metavar="COMMAND", help="starts one process of the pipeline")
    parser.add_argument(
        "--effects", required=True, metavar="SQL", help="returns numbers, and how often each took effect"
    )
    parser.add_argument("--setup", metavar="SQL", help="run once before, to make the tables")
    parser.add_argument("--bootstrap-servers", metavar="LIST", help="a Kafka of yours")
    parser.add_argument("--conninfo", metavar="CONNINFO", help="a Postgres of yours")
    parser.add_argument("--topic", default="verify", metavar="NAME", help="is made, with 6 partitions (verify)")
    parser.add_argument(
        "--value", default='{"n": {n}}', metavar="TEXT", help="a message, {n} for its number ('{\"n\": {n}}')"
    )
    parser.add_argument("--processes", type=positive, default=2, metavar="N", help="of the pipeline (2)")
    parser.add_argument("--messages", type=positive, default=20_000, metavar="N", help="how many (20,000)")
    seconds = number(float, "must be a number of seconds from 1 to a year", least=1, most=YEAR_SECONDS)
    parser.add_argument("--seconds", type=seconds, default=60.0, metavar="N", help="for how long faults strike (60)")
    parser.add_argument(
        "--patience-seconds",
        type=seconds,
        default=60.0,
        metavar="N",
        help="what stands still for so long in the end is lost (60)",
    )
    parser.add_argument("--fault", action="append", choices=FAULTS, dest="faults", help="only these; may be repeated")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="what the pipeline prints (shown where it ends by itself)"
    )
    add_seed(parser, "draw the same faults as another run")


def run(args: argparse.Namespace) -> int:
    start = _words(args.start)
    given = Settings(schema=DEFAULT_SCHEMA, bootstrap_servers=args.bootstrap_servers, conninfo=args.conninfo)
    if args.conninfo is not None:
        given.opener()
        if any("cut" in fault for fault in args.faults or FAULTS):
            _check_proxy(args.conninfo)
    seed = drawn(args, 10_000)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ending_in_order(args, lambda: {"seed": seed}))
        display = stack.enter_context(Display(sys.stderr if args.json else sys.stdout))
        display.log(f"--seed {seed} draws the same faults")
        if args.bootstrap_servers is None:
            given = replace(given, bootstrap_servers=stack.enter_context(embedded.Kafka()).bootstrap_servers)
        if args.conninfo is None:
            given = replace(given, conninfo=stack.enter_context(embedded.Postgres()).conninfo)
        stack.enter_context(naming_a_full_disk())
        plan = Plan(
            bootstrap_servers=given.required("bootstrap_servers"),
            conninfo=given.required("conninfo"),
            start=start,
            faults=args.faults or FAULTS,
            seed=seed,
            **{name: getattr(args, name) for name in _OPTIONS},
        )
        path = args.log or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verify-")), "log")
        with _refusing("--log"):
            log = stack.enter_context(path.open("w+b"))
        open_cluster(given)
        with open_database(given, check=False) as session:
            if args.conninfo is None:
                migrate(session.connection)
            # What a refusal leaves behind would be in the way of the next try.
            with session.connection.transaction():
                if args.setup is not None:
                    with _refusing("--setup"):
                        session.connection.execute(args.setup.encode(), prepare=False)
                with _refusing("--effects"):
                    _check_effects(session.connection, args.effects)
                with _refusing("--topic"):
                    create_topic(plan.bootstrap_servers, plan.topic)

        def show_log() -> None:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _SHOWN_BYTES))
            display.line(log.read().decode(errors="replace"))

        try:
            verdict = verify(plan, display, log)
        except NothingShown:
            show_log()
            raise
        if verdict.ended:
            show_log()
            display.log(f"processes ended by themselves and were started again: {verdict.ended}", style="bold red")
        display.line(
            f"{args.start}\n{verdict.messages:,} messages, {verdict.struck}, {verdict.seconds:g} s, --seed {seed}: "
            f"{verdict.lost:,} lost, {verdict.doubled:,} doubled, {verdict.foreign:,} foreign"
        )
        for kind, numbers in verdict.examples.items():
            display.line(f"  {kind}: {', '.join(numbers)} ...")
        if never := [kind for kind in plan.faults if not verdict.faults[kind]]:
            cuts = {kind for kind in plan.faults if "cut" in kind}  # where one has struck, the pipeline is reached
            is_outside = bool(cuts) and cuts <= set(never)
            hint = "cuts need the {conninfo} that --start is given" if is_outside else "a longer run has more faults"
            display.line(f"never struck: {', '.join(never)}; {hint}")
        if not verdict.is_shown:
            display.log("nothing is shown: no fault struck", style="bold red")
        if args.json:
            print(json.dumps({**verdict.as_dict(), "seed": seed}), flush=True)
    return 1 if not verdict.is_exact else 0 if verdict.is_shown else CUT_SHORT


def _words(command: str) -> list[str]:
    """Split the command line of a process, and look whether it can be run.

    :raises UsageError: when it cannot.
    """
    try:
        words = shlex.split(command)
        for word in words:
            word.format(bootstrap_servers="", conninfo="", topic="")
    except (LookupError, ValueError, AttributeError) as error:
        raise UsageError(
            f"--start: {error} in {command}: quotes come in pairs, there are {{bootstrap_servers}}, {{conninfo}} and "
            "{topic}, and any other brace is written twice"
        ) from None
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"--start: there is no program {words[0] if words else ''!r} that can be run")
    return words


def _check_proxy(conninfo: str) -> None:
    """Refuse a database that connections could not reach through the proxy that cuts them.

    :raises UsageError: naming what can be done without.
    """
    try:
        PostgresProxy(conninfo)
    except ValueError:
        raise UsageError(
            "--conninfo: cuts need a postgresql:// URI with one TCP host, and connections that may be unencrypted; "
            "or choose --fault kill and --fault pause"
        ) from None


def _check_effects(connection: psycopg.Connection[Any], effects: str) -> None:
    """Refuse a query whose rows are no numbers and counts, or that finds any before there is a message."""
    cursor = connection.execute(effects.encode(), prepare=False)
    found = [types.get(column.type_code) for column in cursor.description or ()]
    columns = [each.name if each else "an unknown type" for each in found]
    if len(columns) != 2 or columns[0] not in _NUMBERS | _TEXTS or columns[1] not in _NUMBERS:
        raise UsageError(
            f"--effects returns {' and '.join(columns) or 'nothing'}; two columns are needed: "
            "the number of a message, as a number or text, and how often it took effect, as a number"
        )
    if old := counted(cursor.fetchall()):
        raise UsageError(
            f"--effects finds {len(old):,} numbers before there is a message, {next(iter(old))} for instance: they "
            "would be counted. Let it count an empty table, which --setup can make or empty"
        )


@contextlib.contextmanager
def _refusing(option: str) -> Iterator[None]:
    """Raise what a server or the file system answers about the text of an option as an error of that option."""
    try:
        yield
    except psycopg.OperationalError:
        raise
    except psycopg.Error as error:
        raise UsageError(f"{option}: {error.diag.message_primary or error}") from error
    except KafkaException as error:
        raise UsageError(f"{option}: {error.args[0].str()}") from error
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"{option}: {error}") from error
