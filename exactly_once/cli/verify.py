"""``exactly-once verify``: injures any pipeline that copies a topic into a database, and counts lost and doubled."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
from pathlib import Path

import psycopg

from exactly_once import embedded
from exactly_once.demo.display import Display
from exactly_once.demo.payments import create_topic
from exactly_once.soak.pipeline import FAULTS, Plan, verify

from .options import YEAR_SECONDS, number
from .runs import add_seed, drawn, ending_on_sigterm, positive

# The options that a plan has by the same name.
_OPTIONS = ("topic", "start", "effects", "value", "processes", "messages", "seconds", "patience_seconds")
_DESCRIPTION = """\
Publish numbered messages, start the pipeline, kill and pause its processes and cut its connections at
COMMIT, let it catch up, and count by the query how often each message took effect.

example:
  exactly-once verify --setup 'CREATE TABLE copy (n int)' --effects 'SELECT n, count(*) FROM copy GROUP BY 1' \\
      --start 'python copy.py {bootstrap_servers} {conninfo} {topic}'

Faults "cut-before" and "cut-after" lose the connection before or after the server has done the COMMIT; the
pipeline must connect by the {conninfo} that it is given. Without --bootstrap-servers and --conninfo both
servers are started for it.

exit codes:
  0    every message took effect once
  1    some were lost or doubled"""


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
    seed = drawn(args, 10_000)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ending_on_sigterm())
        display = stack.enter_context(Display(sys.stderr if args.json else sys.stdout))
        display.log(f"--seed {seed} draws the same faults")
        servers = None
        if args.bootstrap_servers is None or args.conninfo is None:
            servers = stack.enter_context(embedded.start())
        plan = Plan(
            bootstrap_servers=args.bootstrap_servers or servers.bootstrap_servers,  # type: ignore[union-attr]
            conninfo=args.conninfo or servers.conninfo,  # type: ignore[union-attr]
            faults=args.faults or FAULTS,
            seed=seed,
            **{name: getattr(args, name) for name in _OPTIONS},
        )
        if args.setup is not None:
            with psycopg.connect(plan.conninfo, autocommit=True) as connection:
                connection.execute(args.setup.encode())
        create_topic(plan.bootstrap_servers, plan.topic)
        path = args.log or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verify-")), "log")
        log = stack.enter_context(path.open("w+b"))
        verdict = verify(plan, display, log)
        if verdict.ended:
            log.seek(max(0, log.tell() - 4000))
            display.line(log.read().decode(errors="replace"))
            display.log(f"processes ended by themselves and were started again: {verdict.ended}", style="bold red")
        done = ", ".join(f"{count} {kind}" for kind, count in sorted(verdict.faults.items())) or "no faults"
        display.line(
            f"{shlex.quote(args.start)}\n{verdict.messages:,} messages, {done}, {verdict.seconds:g} s, --seed {seed}: "
            f"{verdict.lost:,} lost, {verdict.doubled:,} doubled, {verdict.foreign:,} foreign"
        )
        for kind, numbers in verdict.examples.items():
            display.line(f"  {kind}: {', '.join(numbers)} ...")
        if args.json:
            print(json.dumps({**verdict.as_dict(), "seed": seed}), flush=True)
    return 0 if verdict.is_exact else 1
