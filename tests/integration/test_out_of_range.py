"""Offsets that are not in the log: below its start, beyond its end, and truncated away."""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from exactly_once import ExactlyOnceConsumer, LogTruncated, OffsetBelowLogStart, OffsetBeyondLogEnd, Redelivered
from exactly_once._model import Partition
from exactly_once.embedded import Kafka
from tests.conftest import MakeConsumer
from tests.support import journal
from tests.support.topics import create_topic, delete_records, produce
from tests.support.waiting import until
from tests.support.worker import drain, ensure_journal

Db = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def _journal(conninfo: str) -> None:
    ensure_journal(conninfo)


@pytest.fixture
def topic(make_consumer: MakeConsumer, bootstrap_servers: str) -> str:
    """A topic with 50 messages, of which the group has applied 20."""
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, 20, 1)
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 20
    produce(bootstrap_servers, topic, 30, 1, start=20)
    return topic


def set_offset(db: Db, group: str, offset: int) -> None:
    """Write an offset into the ledger behind everybody's back."""
    db.execute("UPDATE exactly_once.ledger SET next_offset = %s WHERE group_id = %s", (offset, group))


def audited(db: Db, group: str) -> list[tuple[Any, ...]]:
    """What was corrected: old offset, new offset, reason."""
    query = (
        "SELECT old_offset, new_offset, reason FROM exactly_once.audit WHERE group_id = %s AND action = 'out of range'"
    )
    return db.execute(query, (group,)).fetchall()


def consume(consumer: ExactlyOnceConsumer, topic: str) -> int:
    """Consume to the end with a new consumer; return how many messages took effect."""
    with consumer:
        consumer.subscribe([topic])
        return drain(consumer)


@pytest.mark.fault("C1")
def test_below_the_log_start_is_an_error_with_the_size_of_the_gap(
    make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, db: Db, name: str
) -> None:
    delete_records(bootstrap_servers, topic, 35)
    with pytest.raises(OffsetBelowLogStart, match=r"offset 20, the log starts at 35: retention removed 15 offsets"):
        consume(make_consumer(), topic)
    assert audited(db, name) == []


@pytest.mark.parametrize(("policy", "offset", "messages"), [("earliest", 35, 15), ("latest", 50, 0)])
def test_below_the_log_start_the_policy_moves_the_offset_and_says_so(
    *,
    policy: str,
    offset: int,
    messages: int,
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    topic: str,
    db: Db,
    name: str,
) -> None:
    delete_records(bootstrap_servers, topic, 35)
    assert consume(make_consumer(on_out_of_range=policy), topic) == messages
    ((old, new, reason),) = audited(db, name)
    assert (old, new) == (20, offset)
    assert "retention removed 15 offsets" in reason


@pytest.mark.fault("C2")
def test_beyond_the_log_end_is_an_error(make_consumer: MakeConsumer, topic: str, db: Db, name: str) -> None:
    set_offset(db, name, 51)
    with pytest.raises(OffsetBeyondLogEnd, match=r"offset 51, the log ends at 50.*--partition 0 --to-offset"):
        consume(make_consumer(), topic)
    assert audited(db, name) == []


@pytest.mark.parametrize(("policy", "offset", "messages"), [("earliest", 0, 50), ("latest", 50, 0)])
def test_beyond_the_log_end_the_policy_moves_the_offset_and_says_so(
    *, policy: str, offset: int, messages: int, make_consumer: MakeConsumer, topic: str, db: Db, name: str
) -> None:
    set_offset(db, name, 51)
    assert consume(make_consumer(on_out_of_range=policy), topic) == messages
    ((old, new, reason),) = audited(db, name)
    assert (old, new) == (51, offset)
    assert "the log ends at 50" in reason


def test_offset_at_the_log_end_is_in_range(make_consumer: MakeConsumer, topic: str, db: Db, name: str) -> None:
    set_offset(db, name, 50)
    assert consume(make_consumer(), topic) == 0
    assert audited(db, name) == []


@pytest.mark.parametrize(("policy", "messages"), [("fail", None), ("earliest", 15), ("latest", 0)])
def test_retention_that_passes_a_running_consumer_is_seen(
    *,
    policy: str,
    messages: int | None,
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    topic: str,
    db: Db,
    name: str,
) -> None:
    """The client then says only "reset": the offsets say why. Under ``fail`` every iteration says it again."""
    with make_consumer(on_out_of_range=policy, max_messages=1) as consumer:
        consumer.subscribe([topic])
        _take_partition(consumer)
        delete_records(bootstrap_servers, topic, 35)
        _forget_fetched(consumer)
        if messages is None:
            for _ in range(2):
                with pytest.raises(OffsetBelowLogStart, match="retention removed"):
                    drain(consumer)
            assert audited(db, name) == []
        else:
            assert drain(consumer) == messages
            assert len(audited(db, name)) == 1


@pytest.mark.parametrize("policy", ["fail", "earliest"])
def test_what_was_fetched_before_retention_removed_it_is_applied(
    *,
    policy: str,
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    conninfo: str,
    topic: str,
    db: Db,
    name: str,
) -> None:
    """It comes again after a conflict, when the client has already reported that it cannot read on."""
    with make_consumer(on_out_of_range=policy) as consumer:
        consumer.subscribe([topic])
        fetched = 0
        for unit in consumer:
            with contextlib.suppress(Redelivered), unit:
                fetched = len(unit.messages)
                delete_records(bootstrap_servers, topic, 45)
                consumer._ownership.suspect(Partition(topic, 0), "the offset is out of range")
                raise Redelivered("a conflict")
            break
        assert fetched > 1
        drain(consumer)
    assert [entry.offset for entry in journal.entries(conninfo, topic)] == list(range(50))
    assert audited(db, name) == []


def test_operator_reset_mends_a_running_consumer(
    make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, db: Db, name: str
) -> None:
    """The loop went on asking after the error, and an operator resets the offset: it goes on from there."""
    with make_consumer(max_messages=1) as consumer:
        consumer.subscribe([topic])
        _take_partition(consumer)
        delete_records(bootstrap_servers, topic, 35)
        _forget_fetched(consumer)
        with pytest.raises(OffsetBelowLogStart):
            drain(consumer)
        db.execute(
            "UPDATE exactly_once.ledger SET next_offset = 40, leader_epoch = NULL, owner_epoch = owner_epoch + 1, "
            "owner_token = NULL WHERE group_id = %s",
            (name,),
        )
        assert drain(consumer) == 10


def _take_partition(consumer: ExactlyOnceConsumer) -> None:
    """Have a unit, so that the partition is placed, and undo it."""
    with pytest.raises(ZeroDivisionError):
        _fail(consumer)


def _fail(consumer: ExactlyOnceConsumer) -> None:
    for unit in consumer:
        with unit:
            raise ZeroDivisionError


def _forget_fetched(consumer: ExactlyOnceConsumer) -> None:
    """Make the client fetch again at the ledger's offset, as after any exception out of it."""
    consumer._ownership.invalidate_all()
    consumer._buffer.discard()


@pytest.mark.slow
@pytest.mark.fault("C3")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_running", [False, True])
def test_log_rewritten_by_an_unclean_election_is_seen_although_the_offset_is_in_range(
    *, is_running: bool, make_consumer: MakeConsumer, db: Db, name: str
) -> None:
    """A replica that lacks applied messages becomes leader, and others are written at their offsets."""
    with Kafka(brokers=3) as kafka:
        servers = kafka.bootstrap_servers
        # Two replicas; the third node keeps the quorum of the controllers while one of the two is away.
        topic = _replicated_topic(servers, name, replicas=[1, 2])
        produce(servers, topic, 10, 1)
        kafka.kill(2)
        produce(servers, topic, 20, 1, start=10)
        consumer = make_consumer({"bootstrap.servers": servers})
        consumer.subscribe([topic])
        assert drain(consumer) == 30
        if not is_running:
            consumer.close()
        kafka.kill(1)
        kafka.restart(2)
        _until_led_by(servers, topic, 2)
        produce(servers, topic, 40, 1, start=1000)
        if not is_running:
            consumer = make_consumer({"bootstrap.servers": servers})
            consumer.subscribe([topic])
        with pytest.raises(LogTruncated, match=r"offset 30 \(leader epoch \d+\).*unclean"):
            drain(consumer)
        assert audited(db, name) == []
        consumer.close()


def _replicated_topic(servers: str, name: str, *, replicas: list[int]) -> str:
    admin = AdminClient({"bootstrap.servers": servers})
    config = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
    admin.create_topics([NewTopic(name, num_partitions=1, replica_assignment=[replicas], config=config)])[name].result(
        30
    )
    _until_led_by(servers, name, replicas[0])
    return name


def _until_led_by(servers: str, topic: str, node: int) -> None:
    admin = AdminClient({"bootstrap.servers": servers})

    def is_led() -> bool:
        partitions = admin.list_topics(topic, timeout=60).topics[topic].partitions
        return 0 in partitions and partitions[0].leader == node

    until(is_led, 60, f"node {node} to lead {topic}")
