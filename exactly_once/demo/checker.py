"""Checker: what took effect against what is in the topic. It shares nothing with the library.

The topic is read anew, from its beginning, by a consumer of its own; the ledger is never looked at.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from psycopg import sql

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
    return compare(scan(bootstrap_servers, topic), *_effects(conninfo, schema))


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


def scan(bootstrap_servers: str, topic: str, *, timeout_seconds: float = 60.0) -> dict[Place, bytes | None]:
    """Read every committed message, up to the end that the log has now.

    :raises TimeoutError: when the end is not reached, because a transaction in the log stays open.
    """
    ends = _log_ends(bootstrap_servers, topic)
    consumer = _consumer(bootstrap_servers, "read_committed")
    found: dict[Place, bytes | None] = {}
    deadline = time.monotonic() + timeout_seconds
    try:
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in ends])
        while ends:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{topic} could not be read to its end; still missing: {ends}")
            for message in consumer.consume(10_000, 0.1):
                partition, offset, error = message.partition() or 0, message.offset() or 0, message.error()
                if error is None:
                    found[partition, offset] = message.value()
                elif error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                elif offset >= ends.get(partition, 0):
                    ends.pop(partition, None)
    finally:
        consumer.close()
    return found


def _log_ends(bootstrap_servers: str, topic: str) -> dict[int, int]:
    # A read_committed consumer would be told where the first open transaction begins.
    consumer = _consumer(bootstrap_servers, "read_uncommitted")
    try:
        ends = {}
        for partition in range(BRANCHES):
            _, ends[partition] = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=30)
        return ends
    finally:
        consumer.close()


def _consumer(bootstrap_servers: str, isolation_level: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"checker-{uuid.uuid4()}",
            "isolation.level": isolation_level,
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "log_level": 2,
        }
    )


def _effects(conninfo: str, schema: str) -> tuple[Counter[Place], dict[Place, int]]:
    name = sql.Identifier(schema)
    with psycopg.connect(conninfo) as connection:
        journal = connection.execute(sql.SQL('SELECT partition, "offset" FROM {}.journal').format(name))
        times: Counter[Place] = Counter((partition, offset) for partition, offset in journal)
        accounts = connection.execute(sql.SQL("SELECT branch, id, balance FROM {}.account").format(name))
        return times, {(branch, number): balance for branch, number, balance in accounts}
