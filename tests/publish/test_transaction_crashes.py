"""A process that is killed with -9 in the middle of a transaction; fault E7 with nobody left to replace the client."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from exactly_once.publish import (
    Outcome,
    PostgresWindow,
    PublishOwner,
    SequenceFilter,
    TopicTakeOver,
    TransactionalProducer,
)
from tests.publish.conftest import WINDOW_SECONDS, MakeOwner
from tests.publish.test_sequences_on_broker import values
from tests.support.kafka_proxy import END_TXN, KafkaProxy
from tests.support.seeds import seeds
from tests.support.topics import create_topic

KILLS = int(os.environ.get("EXACTLY_ONCE_PUBLISH_KILLS", "6"))
COUNT = 100 * KILLS
SIZE = 7
"""How many numbers are a transaction."""

NUMBERS = """
import sys
from exactly_once.publish import SequenceFilter, TransactionalProducer
servers, topic, count, size = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])
kafka = {"bootstrap.servers": servers, "transactional.id": topic, "log_level": 0}
with TransactionalProducer(kafka, dedup=SequenceFilter(), producer_name="files") as producer:
    todo = range(producer.last_sequence_id(topic) + 1, count)
    for start in range(todo.start, todo.stop, size):
        if sys.argv[5:] == ["paced"]:
            sys.stdin.readline()
        with producer.transaction() as transaction:
            for n in range(start, min(start + size, count)):
                transaction.produce(topic, b"%d" % n, partition=n % 3, sequence=n)
        print(start, flush=True)
"""
KEYS = """
import sys
from exactly_once.publish import PostgresWindow, PublishOwner, TransactionalProducer, end_positions
servers, topic, conninfo, transactional_id = sys.argv[1:]
kafka = {"bootstrap.servers": servers}
positions = end_positions(kafka, [topic])
owner = PublishOwner(conninfo, name=topic, transactional_id=transactional_id, positions=positions)
with TransactionalProducer(
    {**kafka, "transactional.id": transactional_id},
    dedup=lambda name: PostgresWindow(owner, scope=name, seconds=3600),
    owner=owner,
) as producer, producer.transaction() as transaction:
    transaction.produce(topic, b"1", partition=0, dedup_key=1)
    transaction.produce(topic, b"2", partition=1, dedup_key=2)
"""


@pytest.fixture
def topic(proxied_broker: KafkaProxy) -> str:
    return create_topic(proxied_broker.bootstrap_servers, 3)


@contextmanager
def child(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program; it is killed with -9 at the end of the block."""
    command, pipe = [sys.executable, "-c", program, *arguments], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def numbers_of_next_life(servers: str, topic: str) -> tuple[int, list[bool]]:
    """Start the successor; return what it recovers, and which of 0 to 9 it takes for duplicates."""
    kafka = {"bootstrap.servers": servers, "transactional.id": topic}
    with TransactionalProducer(kafka, dedup=SequenceFilter(), producer_name="files") as producer:
        last = producer.last_sequence_id(topic)
        with producer.transaction() as transaction:
            for n in range(10):
                transaction.produce(topic, b"%d" % n, partition=n % 2, sequence=n)
        return last, [d.duplicate for d in transaction.deliveries]


@pytest.mark.parametrize("is_done", [False, True])
def test_killed_at_the_end_of_a_transaction(
    proxied_broker: KafkaProxy,
    topic: str,
    is_done: bool,  # noqa: FBT001
) -> None:
    """Before the brokers know that it is to be committed all is new; after that all is a duplicate."""
    servers = proxied_broker.bootstrap_servers
    fault = proxied_broker.lose_answer(END_TXN) if is_done else proxied_broker.hold(END_TXN)
    with child(NUMBERS, servers, topic, "10", "10"):
        fault.wait(60)
    assert numbers_of_next_life(servers, topic) == ((9, [True] * 10) if is_done else (-1, [False] * 10))
    fault.release()
    assert (fault.error_code() == 0) is is_done, "a late commit of the dead one changes nothing"
    assert values(servers, topic) == list(range(10))


@pytest.mark.parametrize("is_done", [False, True])
def test_another_process_takes_over_from_one_killed_at_the_end(
    proxied_broker: KafkaProxy,
    topic: str,
    make_owner: MakeOwner,
    conninfo: str,
    is_done: bool,  # noqa: FBT001
) -> None:
    """With the owner's transactional id it is certain: duplicate or new, never unknown."""
    servers = proxied_broker.bootstrap_servers
    fault = proxied_broker.lose_answer(END_TXN) if is_done else proxied_broker.hold(END_TXN)
    with child(KEYS, servers, topic, conninfo, f"{topic}-dead"):
        fault.wait(60)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("UPDATE exactly_once.publish_owner SET lease_until = 'epoch' WHERE name = %s", [topic])
    take_over = TopicTakeOver({"bootstrap.servers": servers})
    made = publish_keys(servers, make_owner(transactional_id=f"{topic}-heir"), take_over, topic)
    assert [d.outcome for d in made] == [Outcome.SKIPPED if is_done else Outcome.DELIVERED] * 2
    assert not any(d.may_repeat for d in made)
    fault.release()
    assert (fault.error_code() == 0) is is_done
    assert values(servers, topic) == [1, 2]


def publish_keys(servers: str, owner: PublishOwner, take_over: TopicTakeOver, topic: str) -> list[Any]:
    with TransactionalProducer(
        {"bootstrap.servers": servers, "transactional.id": f"{topic}-heir"},
        dedup=lambda name: PostgresWindow(owner, scope=name, seconds=WINDOW_SECONDS, take_over=take_over),
        owner=owner,
    ) as producer:
        with producer.transaction() as transaction:
            transaction.produce(topic, b"1", partition=0, dedup_key=1)
            transaction.produce(topic, b"2", partition=1, dedup_key=2)
        return transaction.deliveries


@pytest.mark.parametrize("seed", seeds([2026], new=1))
def test_every_number_is_there_once_however_often_it_was_killed(seed: int, bootstrap_servers: str) -> None:
    rng = random.Random(seed)
    topic = create_topic(bootstrap_servers, 3)
    arguments = [bootstrap_servers, topic, str(COUNT), str(SIZE)]
    for _ in range(KILLS):
        with child(NUMBERS, *arguments, "paced") as process:
            assert process.stdin is not None
            assert process.stdout is not None
            transactions = rng.randrange(1, COUNT // SIZE // KILLS)
            process.stdin.write("\n" * (transactions + 1))
            process.stdin.flush()
            for _ in range(transactions):
                assert process.stdout.readline()
            time.sleep(rng.random() * 0.01)  # some way into the next transaction, or behind it
        assert process.returncode == -9
    with child(NUMBERS, *arguments) as process:
        assert process.wait(200) == 0
    assert values(bootstrap_servers, topic) == list(range(COUNT))
