"""Owners of rows: Spark and Spark, Spark and the plain consumer, both ways. Real Postgres and Kafka, no Spark."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from exactly_once._model import Partition
from exactly_once.errors import (
    BrokerUnreachable,
    Fenced,
    LedgerRowMissing,
    OwnedByConsumer,
    OwnedBySpark,
    PartitionHalted,
    TopicRecreated,
)
from exactly_once.kafka.admin import Cluster
from exactly_once.ledger.start import StartOffsets
from spark_sink import LedgerBehindCheckpoint
from spark_sink.owners import Owners
from spark_sink.ranges import Range, remaining
from tests.conftest import MakeConsumer
from tests.spark.attempts import Place
from tests.support.topics import create_topic, delete_topic, produce


@pytest.fixture
def topic(bootstrap_servers: str, name: str) -> str:
    """A topic called like the group, with ten messages in two partitions."""
    create_topic(bootstrap_servers, 2, name=name)
    produce(bootstrap_servers, name, 10, 2)
    return name


def next_offsets(owners: Owners, ranges: list[Range], batch_id: int = 0) -> list[int | None]:
    return list(owners.take(ranges, batch_id=batch_id).values())


def test_the_first_batch_writes_down_where_spark_begins(place: Place) -> None:
    assert next_offsets(place.owners(), place.ranges(9, 9, start=4)) == [4, 4]
    assert place.ledger() == [4, 4]


def test_a_partition_is_acquired_once_and_new_ones_when_they_appear(place: Place, db: psycopg.Connection[Any]) -> None:
    owners = place.owners()
    owners.take(place.ranges(9), batch_id=0)
    before = owners.held[Partition(place.name, 0)]
    appeared = Range(partition=Partition(place.name, 1), start=None, end=9)
    assert next_offsets(owners, [*place.ranges(12), appeared], batch_id=1) == [0, 0]
    assert owners.held[Partition(place.name, 0)] == before
    epochs = db.execute("SELECT owner_epoch FROM exactly_once.ledger WHERE group_id = %s", (place.name,)).fetchall()
    assert epochs == [(1,), (1,)]


def test_spark_fences_spark_and_the_earlier_run_never_comes_back(place: Place) -> None:
    ranges = place.ranges(5)
    first, second = place.owners(name="first"), place.owners(name="second")
    todo = remaining(
        ranges,
        {Partition(place.name, 0): next_offsets(first, ranges)[0] or 0},
        place.group,
    )
    second.take(ranges, batch_id=0)
    with pytest.raises(Fenced, match="second"):
        first.take(ranges, batch_id=0)
    with pytest.raises(Fenced):
        first.finish(todo, {})
    assert place.ledger() == [0]


def test_two_queries_of_one_group_on_one_topic_fence_each_other_and_on_two_topics_do_not(place: Place) -> None:
    first, second = place.owners(), place.owners()
    mine, other = place.ranges(5), [Range(partition=Partition(f"{place.name}b", 0), start=0, end=5)]
    first.take(mine, batch_id=0)
    second.take(other, batch_id=0)
    first.take(mine, batch_id=1)


def test_a_checkpoint_that_goes_on_where_the_ledger_knows_nothing_is_refused(place: Place) -> None:
    with pytest.raises(LedgerBehindCheckpoint, match="no row"):
        place.owners().take(place.ranges(9, start=4), batch_id=3)


def test_a_row_that_somebody_deleted_is_missed(place: Place, db: psycopg.Connection[Any]) -> None:
    owners = place.owners()
    owners.take(place.ranges(5), batch_id=0)
    db.execute("DELETE FROM exactly_once.ledger WHERE group_id = %s", (place.name,))
    for someone in (owners, place.owners()):
        with pytest.raises(LedgerRowMissing):
            someone.take(place.ranges(5), batch_id=0)


def test_a_row_that_is_halted_is_found_before_another_one_is_started(place: Place, db: psycopg.Connection[Any]) -> None:
    """The next run may begin the other one elsewhere, and who asks again is told of the halt again."""
    place.owners().take([Range(partition=Partition(place.name, 1), start=0, end=5)], batch_id=0)
    db.execute("UPDATE exactly_once.ledger SET halted = 'by a test' WHERE group_id = %s", (place.name,))
    owners = place.owners()
    for _ in range(2):
        with pytest.raises(PartitionHalted, match="by a test"):
            owners.take(place.ranges(5, 5), batch_id=0)
    assert place.ledger() == [None, 0]
    db.execute("UPDATE exactly_once.ledger SET halted = NULL WHERE group_id = %s", (place.name,))
    assert next_offsets(owners, place.ranges(5, 5)) == [0, 0]


def test_a_database_that_went_back_while_tasks_wrote_is_told(place: Place, db: psycopg.Connection[Any]) -> None:
    owners = place.owners()
    ranges = place.ranges(5, start=2)
    owners.take(ranges, batch_id=0)
    db.execute("UPDATE exactly_once.ledger SET next_offset = 1 WHERE group_id = %s", (place.name,))
    with pytest.raises(LedgerBehindCheckpoint, match=r"at offset 1.* on at 2, so 1 offsets"):
        owners.finish(remaining(ranges, {Partition(place.name, 0): 2}, place.group), {})


def test_released_rows_are_free_for_everybody(place: Place, make_consumer: MakeConsumer, topic: str) -> None:
    """From Spark to the plain consumer and back, without gap or duplicate."""
    spark = place.owners()
    spark.take(place.ranges(3, 2), batch_id=0)
    spark.finish(
        remaining(place.ranges(3, 2), dict.fromkeys(spark.held, 0), place.group),
        {},
    )
    spark.release(spark._ledger)
    consumer = make_consumer()
    consumer.subscribe([topic])
    read = []
    for unit in consumer.units(until_end=True):
        with unit:
            read += [(m.partition(), m.offset()) for m in unit.messages]
    assert sorted(read) == [(0, 3), (0, 4), (1, 2), (1, 3), (1, 4)]
    consumer.close()
    assert next_offsets(place.owners(), place.ranges(5, 5, start=5), batch_id=7) == [5, 5]


def test_rows_of_a_consumer_are_refused_unless_they_are_to_be_taken(
    place: Place, make_consumer: MakeConsumer, topic: str
) -> None:
    consumer = make_consumer()
    consumer.subscribe([topic])
    unit = next(iter(consumer))
    with pytest.raises(OwnedByConsumer, match=r"take_over=True.*exactly-once hand-over"):
        place.owners().take(place.ranges(5, 5), batch_id=0)
    assert next_offsets(place.owners(take_over=True), place.ranges(5, 5)) == [0, 0]
    with pytest.raises(Fenced), unit:
        assert unit.messages


def test_a_consumer_refuses_rows_of_spark_unless_it_is_to_take_them(
    place: Place, make_consumer: MakeConsumer, topic: str
) -> None:
    spark = place.owners()
    spark.take(place.ranges(5, 5), batch_id=0)
    consumer = make_consumer()
    consumer.subscribe([topic])
    with pytest.raises(OwnedBySpark):
        next(iter(consumer))
    consumer.close()
    taker = make_consumer(take_over=True)
    taker.subscribe([topic])
    with next(iter(taker)) as unit:
        assert unit.messages
    with pytest.raises(Fenced):
        spark.take(place.ranges(5, 5), batch_id=1)


def test_with_a_cluster_the_ids_are_stored_and_another_topic_of_that_name_is_refused(
    place: Place, bootstrap_servers: str, topic: str, db: psycopg.Connection[Any]
) -> None:
    def owners() -> Owners:
        ledger = place.owners()._ledger
        cluster = Cluster({"bootstrap.servers": bootstrap_servers})
        return Owners(ledger, starter=StartOffsets(ledger, cluster, start=None, on_out_of_range="fail"))

    first = owners()
    assert next_offsets(first, place.ranges(5, 5, start=1)) == [1, 1]
    ((cluster_id, topic_id),) = db.execute(
        "SELECT DISTINCT cluster_id, topic_id FROM exactly_once.ledger WHERE group_id = %s", (place.name,)
    ).fetchall()
    assert cluster_id
    assert topic_id == next(iter(first.held.values())).topic_id
    db.execute("UPDATE exactly_once.ledger SET topic_id = 'another' WHERE group_id = %s", (place.name,))
    with pytest.raises(TopicRecreated, match=r"adopt .*; then start with a new checkpoint"):
        owners().take(place.ranges(5, 5), batch_id=0)
    still_owned = db.execute(
        "SELECT count(owner_token) FROM exactly_once.ledger WHERE group_id = %s", (place.name,)
    ).fetchone()
    assert still_owned == (0,), "what could not be started was given back"


def test_a_topic_that_is_made_again_while_a_run_has_it_is_refused_by_its_next_batch(
    place: Place, bootstrap_servers: str, topic: str
) -> None:
    ledger, cluster = place.owners()._ledger, Cluster({"bootstrap.servers": bootstrap_servers})
    owners = Owners(ledger, starter=StartOffsets(ledger, cluster, start=None, on_out_of_range="fail"))
    owners.take(place.ranges(5, 5), batch_id=0)
    assert next_offsets(owners, place.ranges(5, 5), batch_id=1) == [0, 0]
    delete_topic(bootstrap_servers, topic)
    assert next_offsets(owners, place.ranges(5, 5), batch_id=2) == [0, 0], "what was read before is written"
    create_topic(bootstrap_servers, 2, name=topic)
    with pytest.raises(TopicRecreated, match=r"adopt .*; then start with a new checkpoint"):
        owners.take(place.ranges(5, 5), batch_id=3)


def test_a_broker_that_has_just_started_is_waited_for(
    place: Place, bootstrap_servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses for a second to tell what a group has committed; real ones do so too seldom to wait for."""
    committed = Cluster.committed
    refused: list[Any] = []

    def loading(*asked: Any) -> Any:
        if not refused:
            refused.append(asked)
            raise BrokerUnreachable("Broker: Not coordinator")
        return committed(*asked)

    monkeypatch.setattr(Cluster, "committed", loading)
    ledger, cluster = place.owners()._ledger, Cluster({"bootstrap.servers": bootstrap_servers})
    owners = Owners(ledger, starter=StartOffsets(ledger, cluster, start=None, on_out_of_range="fail"))
    rows = place.options().patiently(owners.take, place.ranges(5, 5, start=1), batch_id=0)
    assert list(rows.values()) == [1, 1]
    assert refused
