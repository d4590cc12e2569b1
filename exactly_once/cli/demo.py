"""``exactly-once demo``: payments survive kill -9 and zombies, next to an ordinary loop that does not."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import shutil
import sys
import threading
from pathlib import Path

import psycopg

from exactly_once import embedded
from exactly_once.demo import nemesis, result
from exactly_once.demo.checker import check
from exactly_once.demo.display import Display
from exactly_once.demo.trial import Setting, Trial
from exactly_once.ledger.migrate import migrate

from .runs import CUT_SHORT, add_seed, ending_on_sigterm, positive

# So many that there is work for each fault; a laptop applies them in less time than it is injured.
_MESSAGES = 100_000
_QUICK_MESSAGES = 20_000
_TITLES = {
    "exactly_once": "With the library: offsets and effects in one transaction, behind a fence",
    "at_least_once": "An ordinary loop, the same faults: poll, write, commit the database, commit Kafka",
}
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
  3    a run was cut short, on a machine that is too busy for instance: it shows nothing"""


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
    parser.add_argument("--messages", type=positive, metavar="N", help=f"how many payments ({_MESSAGES}) or orders")
    add_seed(parser, "repeat the payments and faults of another run")
    parser.add_argument(
        "--quick", action="store_true", help=f"half the time: {_QUICK_MESSAGES} payments and fewer faults"
    )
    parser.add_argument("--keep", action="store_true", help="leave the servers running until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Run both sides on servers of their own, and print what that shows."""
    if args.what == "spark":
        from exactly_once.cli import demo_spark  # noqa: PLC0415  (its extra is large)

        return demo_spark.run(args)
    # Short enough to be typed again.
    seed = random.SystemRandom().randrange(10_000) if args.seed is None else args.seed
    results: dict[str, result.Result] = {}
    with ending_on_sigterm(), Display() as display:
        display.log(f"starting Kafka and Postgres; --seed {seed} repeats the payments and faults")
        with embedded.start() as servers:
            setting = Setting(
                bootstrap_servers=servers.bootstrap_servers,
                conninfo=servers.conninfo,
                seed=seed,
                messages=args.messages or (_QUICK_MESSAGES if args.quick else _MESSAGES),
                faults=nemesis.plan(seed, quick=args.quick),
                # How long a frozen worker's partitions stay with it: what a viewer waits for.
                session_ms=1_500 if args.quick else 3_000,
            )
            for loop in _TITLES:
                results[loop] = _side(loop, setting, display)
                if results["exactly_once"].is_cut_short:
                    break  # there is nothing to compare with
            if len(results) == len(_TITLES):
                display.line("")
                display.table(result.HEAD, result.rows(results), good=results["exactly_once"].is_exact)
            display.line(f"\n{result.conclusion(results, seed=seed)}")
            display.line("Next: the README does it with your own consumer; docs/guarantees.md says what is promised.")
            if args.keep:
                command = shutil.which("exactly-once") or str(Path(sys.executable).with_name("exactly-once"))
                display.line("\nThe servers stay until Ctrl-C. In another terminal:")
                display.line(f"  export EXACTLY_ONCE_BOOTSTRAP_SERVERS={setting.bootstrap_servers}")
                display.line(f"  export EXACTLY_ONCE_CONNINFO={shlex.quote(setting.conninfo)}")
                display.line(f"  {command} status")
                display.line(f"  {command} {_SINK}")
                display.line(f"  psql {shlex.quote(setting.conninfo)} -c 'TABLE demo_exactly_once.journal LIMIT 10'")
                with contextlib.suppress(KeyboardInterrupt):
                    threading.Event().wait()
                display.line("")
    if args.json:
        print(json.dumps(result.as_json(results, seed=seed)), flush=True)
    if results["exactly_once"].failures:
        return 1
    return CUT_SHORT if any(side.is_cut_short for side in results.values()) else 0


def _side(loop: str, setting: Setting, display: Display) -> result.Result:
    display.title(_TITLES[loop])
    with psycopg.connect(setting.conninfo, autocommit=True) as connection:
        migrate(connection)
    trial = Trial(loop, setting, display)
    tally = trial.run()
    display.log("checking it against the topic, read anew from its beginning")
    verdict = check(setting.bootstrap_servers, setting.conninfo, trial.topic, trial.schema)
    return result.Result(tally, verdict, setting.messages)
