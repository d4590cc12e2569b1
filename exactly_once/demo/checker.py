"""Checker: what took effect against what is in the topic. It shares nothing with the library.

The topic is read anew, from its beginning, by a consumer of its own; the ledger is never looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql

from . import journal
from .journal import Entry, Record
from .payments import ACCOUNTS, BRANCHES, OPENING_BALANCE, changes


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
    """Scan the topic and compare it with the journal and the accounts."""
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
    found = journal.compare(records, effects, None)
    return Verdict(
        messages=found.messages,
        lost=len(found.lost),
        duplicated=len(found.duplicated),
        foreign=len({effect.identity for effect in found.foreign}),
        wrong_balances=sum(balance != expected[account] for account, balance in balances.items()),
        balance=sum(balances.values()),
    )
