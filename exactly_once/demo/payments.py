"""Payments: the tables, the messages and the effect of a batch. The same for both loops.

A payment moves money between two accounts of one branch, and a branch is a partition. Each side has a
schema with accounts and a journal. The journal has no unique key, so that a second effect is seen
instead of prevented.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from typing import Any

import psycopg
import tenacity
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg import sql

logger = logging.getLogger(__name__)

BRANCHES = 6  # as many partitions: three for each of the two workers
# In each branch.
ACCOUNTS = 100
OPENING_BALANCE = 1_000
_REGRETTED = 5  # payments of a transaction that is aborted: they are in the log and must take no effect
_NETWORKS = ("visa", "mastercard", "amex")
_ROOM_SECONDS = 0.1  # less than a viewer notices; a report of delivery ends the wait
_HEARTBEAT_SECONDS = 15.0  # a broker sends one each two seconds
_SECONDS = 120  # longer than a broker on a busy machine takes to answer

_CREATE = """
    CREATE SCHEMA {schema};
    CREATE TABLE {schema}.account (
        branch int, id int, balance bigint NOT NULL, PRIMARY KEY (branch, id)
    ) WITH (fillfactor = 50);
    INSERT INTO {schema}.account
        SELECT branch, id, {opening} FROM generate_series(0, {branches} - 1) branch,
             generate_series(0, {accounts} - 1) id;
    CREATE TABLE {schema}.journal (
        partition int NOT NULL, "offset" bigint NOT NULL, worker text NOT NULL,
        xid xid8 NOT NULL DEFAULT pg_current_xact_id());
    CREATE INDEX ON {schema}.journal (partition, "offset");
"""
_APPEND = 'COPY {schema}.journal (partition, "offset", worker) FROM STDIN'
# Rows are locked in order, so that a zombie and its successor cannot deadlock.
_MOVE = """
    WITH change AS (
        SELECT branch, id, sum(amount) AS amount
        FROM unnest(%s::int[], %s::int[], %s::bigint[]) AS c(branch, id, amount)
        GROUP BY branch, id),
    held AS (
        SELECT branch, id, amount FROM {schema}.account JOIN change USING (branch, id)
        ORDER BY branch, id
        FOR UPDATE OF account)
    UPDATE {schema}.account a SET balance = balance + held.amount
    FROM held WHERE a.branch = held.branch AND a.id = held.id
"""


def create_tables(connection: psycopg.Connection[Any], schema: str) -> None:
    statement = sql.SQL(_CREATE).format(
        schema=sql.Identifier(schema),
        opening=sql.Literal(OPENING_BALANCE),
        branches=sql.Literal(BRANCHES),
        accounts=sql.Literal(ACCOUNTS),
    )
    connection.execute(statement)


def create_topic(bootstrap_servers: str, topic: str, partitions: int = BRANCHES, replicas: int = -1) -> None:
    """Make a topic, by itself with as many replicas as the cluster's own default: with fewer it may take nothing.

    On a busy machine a broker counts as away until its next heartbeat, and too few seem to be there.
    """

    def warn_once(attempt: tenacity.RetryCallState) -> None:
        if attempt.attempt_number == 1:
            logger.warning("too few brokers are there for topic %s; waits up to %g s", topic, _HEARTBEAT_SECONDS)

    patiently = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_lacks_brokers),
        stop=tenacity.stop_after_delay(_HEARTBEAT_SECONDS),
        wait=tenacity.wait_fixed(0.5),
        before_sleep=warn_once,
        reraise=True,
    )
    with AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 2}) as admin:
        patiently(lambda: admin.create_topics([NewTopic(topic, partitions, replicas)])[topic].result(_SECONDS))


def _lacks_brokers(error: BaseException) -> bool:
    return isinstance(error, KafkaException) and error.args[0].code() == KafkaError.INVALID_REPLICATION_FACTOR


def send(producer: Producer, *message: Any, **options: Any) -> None:
    """Hand a message to the client, and wait for room where its queue is full: `Producer.produce` would raise."""
    while True:
        try:
            producer.produce(*message, **options)
        except BufferError:
            producer.poll(_ROOM_SECONDS)
        else:
            producer.poll(0)
            return


def apply(connection: psycopg.Connection[Any], schema: str, messages: Sequence[Message], worker: str) -> None:
    """Write the effects of a batch: an entry in the journal each, and the money moved."""
    name = sql.Identifier(schema)
    branches: list[int] = []
    accounts: list[int] = []
    amounts: list[int] = []
    with connection.cursor() as cursor, cursor.copy(sql.SQL(_APPEND).format(schema=name)) as copy:
        for message in messages:
            copy.write_row((message.partition(), message.offset(), worker))
            for account, amount in changes(message.value()):
                branches.append(message.partition() or 0)
                accounts.append(account)
                amounts.append(amount)
    connection.execute(sql.SQL(_MOVE).format(schema=name), (branches, accounts, amounts))


def changes(value: bytes | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """Read a payment: the two accounts and what each balance changes by."""
    payment = json.loads(value or b"{}")
    return (payment["from"], -payment["amount"]), (payment["to"], payment["amount"])


class Publisher:
    """Publishes the payments of a seed, in Kafka transactions, as many at a time as it is asked for."""

    def __init__(self, bootstrap_servers: str, topic: str, *, seed: int) -> None:
        self._topic = topic
        self._random = random.Random(f"payments {seed}")  # noqa: S311  (to be repeated, not to be secret)
        self._producer = Producer(
            {"bootstrap.servers": bootstrap_servers, "transactional.id": topic, "linger.ms": 5, "log_level": 2}
        )
        self._producer.init_transactions(_SECONDS)
        self._delivered: dict[int, int] = {}  # by partition the last offset of the transaction under way
        self.published = 0
        # For each partition the offset of the last payment that counts.
        self.last: dict[int, int] = {}

    def publish(self, count: int) -> None:
        """Publish ``count`` payments, after a few that are taken back."""
        self._send(_REGRETTED)
        self._producer.abort_transaction(_SECONDS)
        self._send(count)
        self._producer.commit_transaction(_SECONDS)
        self.last |= self._delivered
        self.published += count

    def _send(self, count: int) -> None:
        self._delivered = {}

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is None:
                self._delivered[message.partition() or 0] = message.offset() or 0

        self._producer.begin_transaction()
        for _ in range(count):
            branch = self._random.randrange(BRANCHES)
            payer, payee = self._random.sample(range(ACCOUNTS), 2)
            payment = {"from": payer, "to": payee, "amount": self._random.randint(1, 50)}
            card = {"network": _NETWORKS[payer % len(_NETWORKS)], "last_digits": f"{payer:04}"}
            value = json.dumps({**payment, "card": card})
            send(self._producer, self._topic, value, str(payer), partition=branch, on_delivery=delivered)
        # In the log before the transaction ends, also if it ends by an abort.
        self._producer.flush(_SECONDS)
