"""Checker: what took effect against what is in the topic. It shares nothing with the library.

The topic is read anew, from its beginning, by a consumer of its own; the ledger is never looked at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import psycopg
from psycopg import sql

from .journal import scan
from .payments import ACCOUNTS, BRANCHES, OPENING_BALANCE, changes

Place = tuple[int, int]
"""Partition and offset of a message; or branch and number of an account."""


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
    """Accounts that do not have what the messages in the topic say."""
    balance: int
    """The sum over all accounts."""


TOTAL = BRANCHES * ACCOUNTS * OPENING_BALANCE
"""The money that there is."""


def check(bootstrap_servers: str, conninfo: str, topic: str, schema: str) -> Verdict:
    """Scan the topic and compare it with the journal and the accounts."""
    messages = {(record.partition, record.offset): record.value for record in scan(bootstrap_servers, topic)}
    name = sql.Identifier(schema)
    with psycopg.connect(conninfo) as connection:
        journal = connection.execute(sql.SQL('SELECT partition, "offset" FROM {}.journal').format(name))
        times: Counter[Place] = Counter((partition, offset) for partition, offset in journal)
        accounts = connection.execute(sql.SQL("SELECT branch, id, balance FROM {}.account").format(name))
        return compare(messages, times, {(branch, number): balance for branch, number, balance in accounts})


def compare(
    messages: Mapping[Place, bytes | None], journal: Mapping[Place, int], balances: Mapping[Place, int]
) -> Verdict:
    """Compare messages with how often each took effect, and with the balances."""
    expected: defaultdict[Place, int] = defaultdict(lambda: OPENING_BALANCE)
    for (branch, _), value in messages.items():
        for account, amount in changes(value):
            expected[branch, account] += amount
    return Verdict(
        messages=len(messages),
        lost=sum(place not in journal for place in messages),
        duplicated=sum(times > 1 for times in journal.values()),
        foreign=sum(place not in messages for place in journal),
        wrong_balances=sum(balance != expected[account] for account, balance in balances.items()),
        balance=sum(balances.values()),
    )
