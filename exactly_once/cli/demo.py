"""``exactly-once demo``: payments survive kill -9 and zombies, next to an ordinary loop that does not."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from exactly_once import embedded
from exactly_once.demo import result
from exactly_once.demo.display import Display
from exactly_once.demo.result import MESSAGES, QUICK_MESSAGES

from .options import positive
from .problems import CUT_SHORT, UsageError
from .runs import add_seed, drawn, ending_in_order, naming_a_full_disk

_SINK = (
    "sink --group-id payments-to-table --topic payments-exactly-once --table payment --create-table --start earliest "
    "--until-end"
)
_DESCRIPTION = """\
Start a Kafka and a Postgres of its own, and let two workers apply payments while they are killed and
frozen: first with the library, then by an ordinary loop. Both are checked against the topic.

exit codes:
  0    both ran to their ends, and with the library nothing was lost or doubled
  1    with the library something was
  3    nothing is shown: a run was cut short, on a machine that is too busy for instance, or no fault struck"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo", help="see it survive kill -9 and zombies, in about a minute", description=_DESCRIPTION
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=("consumer", "spark"),
        default="consumer",
        help="the consumer, beside an ordinary loop (the default), or Spark's sink, beside foreachBatch with JDBC",
    )
    parser.add_argument("--messages", type=positive, metavar="N", help=f"how many payments ({MESSAGES}) or orders")
    add_seed(parser, "repeat the payments and faults of another run")
    parser.add_argument(
        "--quick", action="store_true", help=f"half the time: {QUICK_MESSAGES} payments and fewer faults"
    )
    parser.add_argument("--keep", action="store_true", help="leave the servers running until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    seed = drawn(args, 10_000)
    is_spark = args.what == "spark"
    kind: Any = result
    if is_spark:
        from exactly_once.demo import spark_trial  # noqa: PLC0415  (its extra is large)

        kind = spark_trial
        if (least := spark_trial.LEAST) > (args.messages or least):
            raise UsageError(f"--messages must be {least} or more, as orders come in with each fault")
    results: dict[str, Any] = {}
    with ending_in_order(args, lambda: {"seed": seed}), Display() as display:
        display.log(f"starting the servers; --seed {seed} repeats what is sent and the faults")
        with embedded.start() as servers, naming_a_full_disk():
            for side, title in kind.TITLES.items():
                display.title(title)
                results[side] = kind.run(side, servers, display, seed=seed, messages=args.messages, quick=args.quick)
                if results["exactly_once"].is_cut_short:
                    break  # there is nothing to compare with
            exact = results["exactly_once"]
            if len(results) == len(kind.TITLES):
                display.line("")
                display.table(kind.HEAD, kind.rows(results), good=exact.is_exact)
            display.line(f"\n{kind.conclusion(results, seed=seed)}")
            if not is_spark:
                display.line(
                    "Next: the README does it with your own consumer; docs/guarantees.md has what is promised."
                )
            if args.keep:
                command = shlex.quote(
                    shutil.which("exactly-once") or str(Path(sys.executable).with_name("exactly-once"))
                )
                display.line("\nThe servers stay until Ctrl-C. In another terminal:")
                display.line(f"  export EXACTLY_ONCE_BOOTSTRAP_SERVERS={servers.bootstrap_servers}")
                display.line(f"  export EXACTLY_ONCE_CONNINFO={shlex.quote(servers.conninfo)}")
                display.line(f"  {command} status")
                if not is_spark:
                    display.line(f"  {command} {_SINK}")
                    journal = "TABLE demo_exactly_once.journal LIMIT 10"
                    look = ["psql", servers.conninfo, "-c", journal]
                    if shutil.which("psql") is None:  # which the embedded Postgres does not bring
                        rows = f"psycopg.connect({servers.conninfo!r}).execute({journal!r})"
                        look = [sys.executable, "-c", f"import psycopg; print(*{rows}, sep='\\n')"]
                    display.line(f"  {shlex.join(look)}")
                with contextlib.suppress(KeyboardInterrupt):
                    threading.Event().wait()
                display.line("")
    if args.json:
        print(json.dumps(kind.as_json(results, seed=seed)), flush=True)
    if exact.failures:
        return 1
    return 0 if all(each.is_shown for each in results.values()) else CUT_SHORT
