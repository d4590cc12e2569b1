"""``exactly-once adopt``: rows are given the topic and the cluster of today, only when somebody says so."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from exactly_once import ClusterChanged, Fenced, TopicRecreated
from exactly_once.demo.journal import scan
from exactly_once.embedded import Kafka
from tests.cli.conftest import PARTITIONS, Command, audit, ledger, offsets, read_to_end, suggested
from tests.conftest import MakeConsumer
from tests.support.topics import create_topic, delete_topic, produce

Db = psycopg.Connection[Any]


@pytest.fixture
def recreated(consumed: str, bootstrap_servers: str) -> str:
    """A topic that was deleted and made again with six messages and one partition more."""
    delete_topic(bootstrap_servers, consumed)
    create_topic(bootstrap_servers, 3, name=consumed)
    produce(bootstrap_servers, consumed, 6, 3)
    return consumed


def test_a_recreated_topic_is_read_from_where_the_operator_says(
    operate: Command, recreated: str, db: Db, name: str, make_consumer: MakeConsumer
) -> None:
    with pytest.raises(TopicRecreated) as refused:
        read_to_end(make_consumer, recreated)
    before = ledger(db, name)
    mend = [*suggested(str(refused.value)), "--to-earliest"]
    assert "what was applied of the new topic before it was noticed comes again" in operate(*mend).out
    shown = operate(*mend, "--json")
    assert shown.code == 0
    # The third partition got no row: it looks as if it had been added, and belongs to the new topic.
    assert [(p["old_offset"], p["new_offset"]) for p in shown.partitions] == [(10, 0), (10, 0), (None, 0)]
    assert {(p["again"], p["left_out"]) for p in shown.partitions} == {(None, None)}, "offsets of two topics"
    assert shown.partitions[0]["old_topic_id"] == before[0][4] != shown.json["topic_id"]
    assert ledger(db, name) == before, "that was a dry run"
    assert operate(*mend, "--reason", "new topic", "--execute").code == 0
    assert audit(db, name, "adopt") == [(0, 10, 0, "new topic"), (1, 10, 0, "new topic"), (2, None, 0, "new topic")]
    assert read_to_end(make_consumer, recreated) == [(p, o) for p in range(3) for o in range(2)]


def test_partitions_that_the_new_topic_has_more_get_rows_and_offsets_too(
    operate: Command, recreated: str, db: Db, name: str
) -> None:
    shown = operate("adopt", "--topic", recreated, "--to-latest", "--execute", "--json")
    assert [(p["old_offset"], p["new_offset"], p["is_new"]) for p in shown.partitions] == [
        (10, 2, False),
        (10, 2, False),
        (None, 2, True),
    ]
    assert offsets(db, name) == [2, 2, 2]


def test_reset_refuses_rows_of_the_old_topic_and_names_adopt(
    operate: Command, recreated: str, db: Db, name: str
) -> None:
    before = ledger(db, name)
    refused = operate("reset", "--topic", recreated, "--to-earliest", "--execute")
    assert refused.code == 1
    assert suggested(refused.err)[0] == "adopt"
    assert operate(*suggested(refused.err)).code == 0, "what it says runs as it is printed"
    assert ledger(db, name) == before
    trouble = operate("status", "--check").out.splitlines()[0]
    assert "the topic was deleted and made again" in trouble
    assert operate(*suggested(trouble)).code == 0, "what it says runs as it is printed"


def test_keeping_offsets_that_the_new_log_does_not_have_is_refused(
    operate: Command, recreated: str, db: Db, name: str
) -> None:
    before = ledger(db, name)
    refused = operate("adopt", "--topic", recreated, "--keep-offsets", "--execute")
    assert refused.code == 1
    assert "outside its log, which has offsets 0 to 2" in refused.err
    assert ledger(db, name) == before
    assert operate("adopt", "--topic", recreated, "--keep-offsets", "--execute", "--force").code == 0
    assert offsets(db, name) == [10, 10]


@pytest.mark.fault("C6")
def test_another_cluster_is_adopted_with_the_offsets_that_are_there(
    operate: Command, consumed: str, db: Db, make_consumer: MakeConsumer, bootstrap_servers: str
) -> None:
    """As after a topic was copied offset by offset: other ids, the same log."""
    db.execute(
        "UPDATE exactly_once.ledger SET cluster_id = 'elsewhere', topic_id = 'another' WHERE topic = %s", (consumed,)
    )
    with pytest.raises(ClusterChanged) as refused:
        read_to_end(make_consumer, consumed)
    status = operate("status").out
    assert "belongs to cluster elsewhere" in status
    assert operate(*suggested(status)).code == 0, "what it says runs as it is printed"
    shown = operate(*suggested(str(refused.value)), "--execute")
    assert shown.code == 0
    assert "cluster  elsewhere -> " in shown.out
    produce(bootstrap_servers, consumed, 2, 2, start=20)
    assert read_to_end(make_consumer, consumed) == [(0, 10), (1, 10)]


def test_rows_of_the_topic_that_is_there_are_left_alone(operate: Command, consumed: str, db: Db, name: str) -> None:
    """As where a topic was made again with fewer partitions, adopted, and got the others later."""
    db.execute("UPDATE exactly_once.ledger SET topic_id = 'another' WHERE topic = %s AND partition = 1", (consumed,))
    shown = operate("adopt", "--topic", consumed, "--to-earliest", "--execute")
    assert "left alone, as they belong to these already: partitions 0" in shown.out
    assert offsets(db, name) == [10, 0]
    assert operate("adopt", "--topic", consumed, "--to-earliest", "--execute").code == 1
    assert offsets(db, name) == [10, 0]


def copy(source: str, target: str, topic: str, *, without: int) -> None:
    """Copy a topic to another cluster, without the first messages of each partition."""
    producer = Producer({"bootstrap.servers": target})
    for record in scan(source, topic):
        if record.offset >= without:
            producer.produce(topic, record.value, record.key, partition=record.partition)
    assert producer.flush(60) == 0


@pytest.mark.fault("C6", more=True)
def test_a_mirror_with_other_offsets_is_adopted_at_those_that_the_mirroring_has_translated(
    *,
    command: Command,
    consumed: str,
    db: Db,
    name: str,
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    conninfo: str,
    own_servers: None,
) -> None:
    """As MirrorMaker leaves it: what retention had removed is not there, and the group's offsets are translated."""
    produce(bootstrap_servers, consumed, 4, PARTITIONS, start=20)  # not applied before the failover
    with Kafka() as mirror:
        servers = mirror.bootstrap_servers
        create_topic(servers, PARTITIONS, name=consumed)
        copy(bootstrap_servers, servers, consumed, without=5)
        translated = [TopicPartition(consumed, partition, 10 - 5) for partition in range(PARTITIONS)]
        with closing(Consumer({"bootstrap.servers": servers, "group.id": name})) as mirroring:
            mirroring.commit(offsets=translated, asynchronous=False)
        there = partial(make_consumer, {"bootstrap.servers": servers})
        with pytest.raises(ClusterChanged) as refused:
            read_to_end(there, consumed)
        where = ("--execute", "--conninfo", conninfo, "--bootstrap-servers", servers, "--group-id", name)
        *adopt, keeps = suggested(str(refused.value))
        kept = command(*adopt, keeps, *where)
        assert kept.code == 1, "offset 10 is not in a log that ends at 7"
        assert offsets(db, name) == [10, 10]
        assert command(*adopt, "--to-committed", *where).code == 0
        assert offsets(db, name) == [5, 5]
        assert [(p, old, new) for p, old, new, _ in audit(db, name, "adopt")] == [(0, 10, 5), (1, 10, 5)]
        assert read_to_end(there, consumed) == [(p, o) for p in range(PARTITIONS) for o in (5, 6)]


def test_a_live_owner_is_fenced(operate: Command, topic: str, db: Db, name: str, make_consumer: MakeConsumer) -> None:
    consumer = make_consumer()
    consumer.subscribe([topic])
    unit = next(consumer.units())
    db.execute("UPDATE exactly_once.ledger SET cluster_id = 'elsewhere' WHERE group_id = %s", (name,))
    with pytest.raises(Fenced), unit:
        assert operate("adopt", "--topic", topic, "--to-earliest", "--execute").code == 0
    assert offsets(db, name) == [0, 0]


def test_rows_that_fit_need_no_adoption(operate: Command, consumed: str, db: Db, name: str) -> None:
    before = ledger(db, name)
    refused = operate("adopt", "--topic", consumed, "--to-earliest", "--execute")
    assert refused.code == 1
    reset = suggested(refused.err)
    assert reset[0] == "reset"
    assert operate(*reset).code == 0, "what it says runs as it is printed"
    kept = operate("adopt", "--topic", consumed, "--keep-offsets")
    assert (kept.code, "reset" in kept.err) == (1, False), "there is nothing to move"
    assert ledger(db, name) == before


def test_a_group_without_rows_has_nothing_to_adopt(operate: Command, topic: str, db: Db, name: str) -> None:
    refused = operate("adopt", "--topic", topic, "--to-earliest", "--execute")
    assert refused.code == 1
    assert "nothing to adopt" in refused.err
    assert ledger(db, name) == []


@pytest.mark.parametrize("wrong", ["a b", "a" * 250], ids=["letter", "length"])
def test_a_name_that_no_topic_can_have_is_no_silence_of_kafka(operate: Command, wrong: str, name: str, db: Db) -> None:
    result = operate("adopt", "--topic", wrong, "--to-earliest")
    assert (result.code, result.out) == (1, "")
    assert f"there is no topic {wrong!r}" in result.err
    db.execute(f"CREATE TABLE {name} (key bytea, value bytea)")
    for table, more in ((f"{name}_new", "--create-table"), (name, "--dry-run"), (name, "--lax")):
        result = operate("sink", "--topic", wrong, "--table", table, more, "--until-end", "--start", "earliest")
        assert result.code in {1, 2}
        assert wrong in result.err
        assert "no answer" not in result.err
