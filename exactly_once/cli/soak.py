"""``exactly-once soak``: every kind of group under random faults for as long as asked, and one verdict."""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys

from exactly_once import embedded
from exactly_once.demo.display import Display, open_display
from exactly_once.embedded.errors import StartError
from exactly_once.soak.run import Soak
from exactly_once.soak.verdict import KINDS

from .demo import CUT_SHORT, positive

_MINUTES = 2.0
_DESCRIPTION = """\
Start a Kafka and a Postgres of its own. Groups of each rebalance protocol and the sink command apply the same
messages, published by transactions of which some are aborted, while workers are killed and frozen, join and
leave, connections are cut at COMMIT, and both servers crash. Snapshots are compared with the topics
meanwhile, and everything at the end.

exit codes:
  0    every message took effect once in every group, offsets agreed with effects, and nothing stood still
  1    an anomaly was found: the verdict counts and names it
  3    it was cut short: a server did not come up again"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "soak", help="injure it for as long as you like, and count", description=_DESCRIPTION
    )
    parser.add_argument("--minutes", type=float, default=_MINUTES, metavar="N", help=f"faults for N ({_MINUTES:g})")
    parser.add_argument("--seed", type=int, metavar="N", help="draw the same faults and messages as another run")
    parser.add_argument("--brokers", type=positive, choices=(1, 3), default=1, help="how many (1)")
    parser.add_argument("--json", action="store_true", help="the verdict as one JSON object in the last line")


def run(args: argparse.Namespace) -> int:
    """Run the soak."""
    # So that everything it started ends, too, when it is asked to end.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with open_display(sys.stderr if args.json else sys.stdout) as display:
            return _soak(args, display)
    finally:
        signal.signal(signal.SIGTERM, before)


def _soak(args: argparse.Namespace, display: Display) -> int:
    seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed
    display.say(f"starting Kafka and Postgres; --seed {seed} draws the same faults")
    try:
        with embedded.start(brokers=args.brokers) as servers:
            verdict = Soak(servers, seed=seed, seconds=args.minutes * 60, brokers=args.brokers, display=display).run()
    except StartError as error:
        display.say(f"cut short, nothing is shown: {error}", style="bold red")
        return CUT_SHORT
    if args.json:
        print(json.dumps(verdict), flush=True)
    for text in verdict["anomalies"]:
        display.line(text)
    found = ", ".join(f"{verdict[kind]:,} {kind.replace('_', ' ')}" for kind in KINDS)
    display.line(
        f"{verdict['messages']:,} messages for each of {len(verdict['groups'])} groups, {verdict['faults_total']:,} "
        f"faults, {verdict['seconds']:,} s, --seed {seed}: {found}"
    )
    return 0 if verdict["ok"] else 1
