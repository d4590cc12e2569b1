"""``exactly-once soak``: every kind of group under random faults for as long as asked, and one verdict."""

from __future__ import annotations

import argparse
import json
import sys

from exactly_once import embedded
from exactly_once.demo.display import Display
from exactly_once.soak.run import SETTINGS, Soak
from exactly_once.soak.verdict import KINDS

from .options import number
from .problems import CUT_SHORT
from .runs import add_seed, drawn, ending_in_order, naming_a_full_disk

_MINUTES = 2.0  # every kind of fault strikes at least once
# In less, workers are hardly ready; a year is longer than anybody means.
_FROM_MINUTES, _TO_MINUTES = 0.1, 525_600.0
_DESCRIPTION = """\
Start a Kafka and a Postgres of its own. Groups of each rebalance protocol and the sink command apply the same
messages, published by transactions of which some are aborted, while workers are killed and frozen, join and
leave, connections are cut at COMMIT, both servers crash, and a standby that lacks commits takes the place of
Postgres. Snapshots are compared with the topics meanwhile, and everything at the end.

exit codes:
  0    every message took effect once in every group, offsets agreed with effects, and nothing stood still
  1    an anomaly was found: the verdict counts and names it
  3    nothing is shown: a server did not come up again, or no fault struck"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "soak", help="injure it for as long as you like, and count", description=_DESCRIPTION
    )
    bounds = f"must be a number from {_FROM_MINUTES:g} to {_TO_MINUTES:,.0f}"
    minutes = number(float, bounds, least=_FROM_MINUTES, most=_TO_MINUTES)
    parser.add_argument("--minutes", type=minutes, default=_MINUTES, metavar="N", help=f"faults for N ({_MINUTES:g})")
    one_or_three = number(int, "must be 1 or 3", least=1, most=3)
    parser.add_argument("--brokers", type=one_or_three, choices=(1, 3), default=1, help="how many (1)")
    add_seed(parser, "draw the same faults and messages as another run")


def run(args: argparse.Namespace) -> int:
    seed = drawn(args, 1_000_000)
    soak: Soak | None = None
    with (
        ending_in_order(args, lambda: {"seed": seed} if soak is None else soak.so_far()),
        Display(sys.stderr if args.json else sys.stdout) as display,
    ):
        display.log(f"starting Kafka and Postgres; --seed {seed} draws the same faults")
        with embedded.start(brokers=args.brokers, settings=SETTINGS) as servers, naming_a_full_disk():
            seconds = args.minutes * 60
            soak = Soak(servers, seed=seed, seconds=seconds, brokers=args.brokers, display=display)
            verdict = soak.run()
        if args.json:
            print(json.dumps(verdict), flush=True)
        for text in verdict["anomalies"]:
            display.line(text)
        found = ", ".join(f"{verdict[kind]:,} {kind.replace('_', ' ')}" for kind in KINDS)
        display.line(
            f"{verdict['messages']:,} messages for each of {len(verdict['groups'])} groups, "
            f"{verdict['faults_total']:,} faults, {verdict['seconds']:,} s, --seed {seed}: {found}"
        )
        if not verdict["faults_total"]:
            display.log("nothing is shown: no fault struck; give it more --minutes", style="bold red")
    if verdict["anomalies"]:
        return 1
    return 0 if verdict["ok"] else CUT_SHORT
