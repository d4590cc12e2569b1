"""Taking over from a dead sender, with Kafka and Postgres: what it sent is a duplicate, what it did not is new."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import psycopg
import pytest
from confluent_kafka import KafkaException, Producer

from exactly_once.errors import BrokerUnreachable
from exactly_once.kafka.admin import Cluster, Topic
from exactly_once.publish import (
    DedupProducer,
    NameTaken,
    Outcome,
    PostgresWindow,
    ProducerFenced,
    ProducerRecord,
    PublishOwner,
    SequenceFilter,
    State,
    TopicTakeOver,
    end_positions,
)
from exactly_once.publish.headers import with_key
from exactly_once.publish.keys import Key
from tests.publish.conftest import WINDOW_SECONDS, MakeOwner
from tests.publish.test_postgres_window import end_lease
from tests.publish.test_sequences_on_broker import delete_all, values
from tests.support.waiting import until

DUPLICATE, NEW, UNKNOWN = State.DUPLICATE, State.NEW, State.UNKNOWN


def in_transaction(kafka: dict[str, Any], transactional_id: str) -> Producer:
    client = Producer({**kafka, "transactional.id": transactional_id, "transaction.timeout.ms": 300_000})
    client.init_transactions(60)
    client.begin_transaction()
    return client


def send(client: Producer, topic: str, *keys: Key) -> None:
    for key in keys:
        client.produce(topic, str(key), partition=0, headers=with_key(None, key))
    client.flush(60)


def is_served(client: Producer, topic: str) -> bool:
    """Produce one more message, which raises once the client knows that it was fenced."""
    client.produce(topic, b"late", partition=0)
    return client.poll(0.05) < 0


@pytest.mark.fault("E2")
def test_a_dead_owner_is_fenced_and_its_committed_messages_are_found_behind_an_open_transaction(
    make_owner: MakeOwner, db: psycopg.Connection[Any], kafka: dict[str, Any], topic: str
) -> None:
    """Another producer's open transaction hides what the dead one has committed, until it ends."""
    hiding = in_transaction(kafka, f"{topic}-hiding")
    send(hiding, topic, "hiding")
    dead = make_owner(transactional_id=f"{topic}-dead", positions=end_positions(kafka, [topic]))
    theirs = PostgresWindow(dead, scope=topic, seconds=WINDOW_SECONDS)
    theirs.reserve_many(["committed", "open", "never sent"])
    client = in_transaction(kafka, f"{topic}-dead")
    send(client, topic, "committed")
    client.commit_transaction(60)
    client.begin_transaction()
    send(client, topic, "open")
    end_lease(db, dead)

    ours = PostgresWindow(make_owner(), scope=topic, seconds=WINDOW_SECONDS, take_over=TopicTakeOver(kafka))
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ours.reserve_many, ["committed", "open", "never sent", "new"])
        # The fence at the brokers aborts the dead one's transaction: from then on only the other one hides anything.
        with pytest.raises(KafkaException):
            until(lambda: is_served(client, topic), 30, "the fence")
        assert not asking.done(), "it must not believe the end that it is shown"
        hiding.commit_transaction(60)
        assert asking.result(60) == [DUPLICATE, NEW, NEW, NEW]


@pytest.mark.fault("E2", more=True)
def test_without_a_transactional_id_what_is_not_there_is_unknown(
    make_owner: MakeOwner, db: psycopg.Connection[Any], kafka: dict[str, Any], topic: str
) -> None:
    """Fault E2: a crash between sending and recording, and one before sending."""
    dead = make_owner(positions=end_positions(kafka, [topic]))
    theirs = PostgresWindow(dead, scope=topic, seconds=WINDOW_SECONDS)
    theirs.reserve_many(["sent", "not sent"])
    send(Producer(kafka), topic, "sent")
    end_lease(db, dead)
    take_over = TopicTakeOver(kafka)
    with DedupProducer(
        kafka,
        dedup=lambda name: PostgresWindow(make_owner(), scope=name, seconds=WINDOW_SECONDS, take_over=take_over),
    ) as producer:
        sent, not_sent, new = producer.produce_many(
            topic, [ProducerRecord(b"again", dedup_key=key) for key in ("sent", "not sent", "new")]
        )
        assert (sent.duplicate, sent.outcome) == (True, Outcome.SKIPPED)
        assert (not_sent.duplicate, not_sent.may_repeat) == (False, True)
        assert (new.duplicate, new.may_repeat) == (False, False)


def test_a_topic_whose_partitions_nobody_may_see_is_not_read_to_its_end(
    make_owner: MakeOwner,
    db: psycopg.Connection[Any],
    kafka: dict[str, Any],
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kafka tells a principal without DESCRIBE of no partitions; the broker of the tests has no authorizer."""
    dead = make_owner(positions=end_positions(kafka, [topic]), transactional_id=f"{topic}-dead")
    PostgresWindow(dead, scope=topic, seconds=WINDOW_SECONDS).reserve_many(["sent"])
    send(Producer(kafka), topic, "sent")
    end_lease(db, dead)
    ours = PostgresWindow(make_owner(), scope=topic, seconds=WINDOW_SECONDS, take_over=TopicTakeOver(kafka))
    with monkeypatch.context() as patched:
        patched.setattr("exactly_once.publish.tail._RANGES_SECONDS", 0.1)
        patched.setattr(Cluster, "describe", lambda _, names: {name: Topic(None, 0) for name in names})
        with pytest.raises(BrokerUnreachable, match="may this principal DESCRIBE"):
            ours.reserve_many(["sent"])
    assert ours.reserve_many(["sent"]) == [DUPLICATE]


@pytest.mark.parametrize("has_positions", [True, False])
def test_retention_past_the_owners_start_leaves_its_keys_unknown(
    make_owner: MakeOwner, db: psycopg.Connection[Any], kafka: dict[str, Any], topic: str, *, has_positions: bool
) -> None:
    """What was removed may have been one of them, also where its sender is fenced at the brokers. No key is stuck."""
    positions = end_positions(kafka, [topic]) if has_positions else None
    dead = make_owner(positions=positions, transactional_id=f"{topic}-dead")
    PostgresWindow(dead, scope=topic, seconds=WINDOW_SECONDS).reserve_many(["removed", "there", "not sent"])
    send(Producer(kafka), topic, "removed")
    delete_all(kafka["bootstrap.servers"], topic)
    send(Producer(kafka), topic, "there")
    end_lease(db, dead)
    ours = PostgresWindow(make_owner(), scope=topic, seconds=WINDOW_SECONDS, take_over=TopicTakeOver(kafka))
    assert ours.reserve_many(["removed", "there", "not sent", "new"]) == [UNKNOWN, DUPLICATE, UNKNOWN, NEW]


def publish(kafka: dict[str, Any], conninfo: str, topic: str, start: str) -> int:
    """Publish each key in turn once there is a start, in a process of its own; return how many were sent from here."""
    with psycopg.connect(conninfo) as connection:
        connection.execute("SELECT pg_advisory_lock_shared(hashtext(%s))", (start,))
    owner = PublishOwner(conninfo=conninfo)
    sent = 0
    with DedupProducer(kafka, dedup=lambda name: PostgresWindow(owner, scope=name, seconds=WINDOW_SECONDS)) as producer:
        for first in range(0, 1000, 100):
            left = list(range(first, first + 100))
            while left:
                deliveries = producer.produce_many(topic, [ProducerRecord(b"%d" % n, dedup_key=n) for n in left])
                producer.flush()
                sent += sum(d.outcome is Outcome.DELIVERED for d in deliveries)
                left = [int(str(d.identity)) for d in deliveries if d.outcome is Outcome.HELD_ELSEWHERE]
    owner.close()
    return sent


@pytest.mark.fault("E3")
def test_two_processes_publish_each_key_once(
    db: psycopg.Connection[Any], conninfo: str, kafka: dict[str, Any], topic: str, bootstrap_servers: str
) -> None:
    """The loser of each key is told, and everything is there once."""
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        db.execute("SELECT pg_advisory_lock(hashtext(%s))", (topic,))
        asked = [pool.submit(publish, kafka, conninfo, topic, topic) for _ in range(2)]
        until(lambda: db.execute(waiting).fetchone() == (2,), 60, "both to wait for the start")
        db.execute("SELECT pg_advisory_unlock_all()")
        assert sum(each.result(200) for each in asked) == 1000
    assert values(bootstrap_servers, topic) == list(range(1000))


def test_a_second_producer_under_a_name_is_refused_and_a_dead_one_is_fenced(
    make_owner: MakeOwner, db: psycopg.Connection[Any], kafka: dict[str, Any], topic: str, bootstrap_servers: str
) -> None:
    owner = make_owner(name=topic, exclusive=True)
    with DedupProducer(kafka, dedup=SequenceFilter(), owner=owner) as producer:
        producer.produce(topic, b"1", sequence=1)
        producer.flush(60)
        with pytest.raises(NameTaken):
            make_owner(name=topic, exclusive=True)
        end_lease(db, owner)
        with DedupProducer(kafka, dedup=SequenceFilter(), owner=make_owner(name=topic, exclusive=True)) as later:
            assert later.producer_name == topic
            assert later.last_sequence_id(topic) == 1
            later.produce(topic, b"2", sequence=2)
        with pytest.raises(ProducerFenced):
            owner.renew()  # as its thread does
        with pytest.raises(ProducerFenced):
            producer.produce(topic, b"2", sequence=2)
    assert values(bootstrap_servers, topic) == [1, 2]
