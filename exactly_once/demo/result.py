"""Result: what took effect against what is in the topic, and the two sides next to each other.

The check shares nothing with the library: the topic is read anew, from its beginning, by a consumer of its own, and the
ledger is never looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
from psycopg import sql

from exactly_once.embedded import Servers
from exactly_once.ledger.migrate import migrate

from . import journal
from .display import Display, Row, row
from .journal import Entry, Record
from .payments import ACCOUNTS, BRANCHES, OPENING_BALANCE, changes
from .trial import Setting, Tally, Trial, plan

TITLES = {
    "exactly_once": "With the library: offsets and effects in one transaction, behind a fence",
    "at_least_once": "An ordinary loop, the same faults: poll, write, commit the database, commit Kafka",
}
HEAD: Row = ("", "exactly once", "ordinary loop")
# So many that there is work for each fault; a laptop applies them in less time than it is injured.
MESSAGES, QUICK_MESSAGES = 100_000, 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The comparison of a topic with the tables of one side."""

    messages: int
    """How many the scan found."""
    lost: int
    """Messages without an effect."""
    duplicated: int
    """Messages with more than one effect."""
    foreign: int
    """Effects of no message: it was taken back by its publisher."""
    wrong_balances: int
    """Accounts that do not have what the messages in the topic amount to."""
    balance: int
    """The sum over all accounts."""


# The money that there is.
TOTAL = BRANCHES * ACCOUNTS * OPENING_BALANCE


def check(bootstrap_servers: str, conninfo: str, topic: str, schema: str) -> Verdict:
    records = journal.scan(bootstrap_servers, topic)
    name = sql.Identifier(schema)
    with psycopg.connect(conninfo) as connection:
        entries = sql.SQL('SELECT partition, "offset", worker, xid::text::bigint FROM {}.journal').format(name)
        effects = [Entry(topic, n, offset, None, who, xid) for n, offset, who, xid in connection.execute(entries)]
        accounts = connection.execute(sql.SQL("SELECT branch, id, balance FROM {}.account").format(name))
        balances = {(branch, number): balance for branch, number, balance in accounts}
    return compare(records, effects, balances)


def compare(records: Sequence[Record], effects: Sequence[Entry], balances: Mapping[tuple[int, int], int]) -> Verdict:
    """Compare messages with their effects, and with the balances by branch and number of the account.

    The journal of the demo has no values: what a payment was is seen in the balances.
    """
    expected: defaultdict[tuple[int, int], int] = defaultdict(lambda: OPENING_BALANCE)
    # From the messages alone: nothing that a worker wrote is trusted.
    for record in records:
        for account, amount in changes(record.value):
            expected[record.partition, account] += amount
    found = journal.compare(records, effects)
    return Verdict(
        messages=found.messages,
        lost=len(found.lost),
        duplicated=len(found.duplicated),
        foreign=len({effect.identity for effect in found.foreign}),
        wrong_balances=sum(balance != expected[account] for account, balance in balances.items()),
        balance=sum(balances.values()),
    )


@dataclass(frozen=True, slots=True)
class Result:
    """What happened on one side, and what was true afterwards."""

    tally: Tally
    verdict: Verdict
    published: int

    @property
    def is_cut_short(self) -> bool:
        """Whether it did not come to its end: what was not applied by then is not lost, so no figure means anything."""
        return not self.tally.drained

    @property
    def is_shown(self) -> bool:
        """Whether there is anything to conclude: without a fault any loop is exact."""
        return not self.is_cut_short and self.tally.crashes + self.tally.frozen > 0

    @property
    def failures(self) -> list[str]:
        """What went wrong, in words; of a run that was cut short only what must not happen at any time."""
        tally, verdict = self.tally, self.verdict
        # Wrong at any moment, however a run ended.
        never = {
            f"{verdict.duplicated:,} duplicated": verdict.duplicated,
            f"{verdict.foreign:,} effects of aborted messages": verdict.foreign,
            f"{verdict.balance - TOTAL:+,} in the sum of balances": verdict.balance != TOTAL,
            f"{tally.unfenced} zombies not fenced": tally.unfenced,
            f"{tally.errors} workers ended by themselves": tally.errors,
        }
        at_the_end = {
            f"{self.published - verdict.messages:,} payments not published": verdict.messages != self.published,
            f"{verdict.lost:,} lost": verdict.lost,
            f"{verdict.wrong_balances:,} wrong balances": verdict.wrong_balances,
        }
        wrong = never if self.is_cut_short else at_the_end | never
        return [what for what, is_so in wrong.items() if is_so]

    @property
    def is_exact(self) -> bool:
        """Whether every message took effect once, in a run with faults that came to its end."""
        return not self.failures and self.is_shown


def run(side: str, servers: Servers, display: Display, *, seed: int, messages: int | None, quick: bool) -> Result:
    setting = Setting(
        bootstrap_servers=servers.bootstrap_servers,
        conninfo=servers.conninfo,
        seed=seed,
        messages=messages or (QUICK_MESSAGES if quick else MESSAGES),
        faults=plan(seed, quick=quick),
        # How long a frozen worker's partitions stay with it: what a viewer waits for.
        session_ms=1_500 if quick else 3_000,
    )
    with psycopg.connect(setting.conninfo, autocommit=True) as connection:
        migrate(connection)
    trial = Trial(side, setting, display)
    tally = trial.run()
    display.log("checking it against the topic, read anew from its beginning")
    verdict = check(setting.bootstrap_servers, setting.conninfo, trial.topic, trial.schema)
    return Result(tally, verdict, setting.messages)


def as_json(results: Mapping[str, Result], *, seed: int) -> dict[str, Any]:
    document: dict[str, Any] = {"seed": seed, "ok": results["exactly_once"].is_exact}
    for loop, side in results.items():
        figures: dict[str, Any] = {"cut_short": side.tally.waited_for}
        if not side.is_cut_short:
            figures = asdict(side.tally) | asdict(side.verdict) | {"expected_balance": TOTAL}
            del figures["waited_for"]
        document[loop] = figures | {"seed": seed}
    return document


def rows(results: Mapping[str, Result]) -> list[Row]:
    """Return the table without its head; a side that was cut short has no figures."""
    sides = [results["exactly_once"], results["at_least_once"]]
    texts = [
        ("messages in the topic", [f"{s.verdict.messages:,}" for s in sides]),
        ("crashes (kill -9)", [f"{s.tally.crashes}" for s in sides]),
        ("zombies fenced", [f"{s.tally.fenced} of {s.tally.frozen}" for s in sides]),
        ("lost", [f"{s.verdict.lost:,}" for s in sides]),
        ("duplicated", [f"{s.verdict.duplicated:,}" for s in sides]),
        ("accounts with a wrong balance", [f"{s.verdict.wrong_balances:,}" for s in sides]),
        ("sum of balances", [f"{s.verdict.balance:,}" for s in sides]),
        ("seconds", [f"{s.tally.seconds:.1f}" for s in sides]),
    ]
    return [row(name, each, [side.is_cut_short for side in sides]) for name, each in texts]


def conclusion(results: Mapping[str, Result], *, seed: int) -> str:
    exact = results["exactly_once"]
    if exact.failures:
        return f"FAILED: {', '.join(exact.failures)}. That must not happen; please report it with --seed {seed}."
    if exact.is_cut_short:
        return (
            f"Nothing is shown: the run with the library was cut short, waiting for {exact.tally.waited_for}. "
            f"Either this machine is too busy, or something hangs: try it again with --seed {seed}."
        )
    if not exact.is_shown:
        return "Nothing is shown: payments ran out before any fault struck; give it more --messages."
    ordinary = results["at_least_once"]
    shown = (
        f"Shown with --seed {seed}: {exact.verdict.messages:,} payments took effect exactly once through "
        f"{exact.tally.crashes} crashes and {exact.tally.frozen} zombies"
    )
    if ordinary.is_cut_short:
        end = f". The ordinary loop was cut short, waiting for {ordinary.tally.waited_for}: it shows nothing."
    elif ordinary.verdict.duplicated:
        end = f"; the ordinary loop applied {ordinary.verdict.duplicated:,} of them more than once."
    else:
        end = ". The ordinary loop ended without a duplicate this time: luck; try another --seed."
    if exact.tally.spared or ordinary.tally.spared:
        planned = exact.tally.crashes + exact.tally.frozen + exact.tally.spared
        end += (
            f" Of {planned} faults {exact.tally.spared} did not strike the library and {ordinary.tally.spared} not the "
            "ordinary loop, as payments had run out: give it more --messages."
        )
    return shown + end
