"""resolve: the topic is asked what became of messages whose outcome is unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer

from exactly_once import ConfigurationError
from exactly_once.publish import (
    DedupProducer,
    Filter,
    PostgresWindow,
    Resolved,
    SequenceFilter,
    SlotFilter,
    State,
    WindowFilter,
)
from exactly_once.publish.headers import with_key, with_sequence
from exactly_once.publish.tail import ends_of
from tests.publish.conftest import WINDOW_SECONDS, MakeOwner
from tests.publish.test_sequences_on_broker import delete_all
from tests.support.waiting import until


def put(bootstrap_servers: str, topic: str, headers: Any) -> None:
    """Put a message into the topic whose report nobody gets."""
    client = Producer({"bootstrap.servers": bootstrap_servers})
    client.produce(topic, b"x", headers=headers)
    assert client.flush(60) == 0


def doubt(made: Filter[Any], *keys: Any) -> None:
    made.reserve_many(keys)
    made.mark_unknown_many(keys)


@pytest.mark.parametrize("kind", ["window", "slots", "postgres"])
def test_keys_that_are_in_the_topic_are_duplicates_and_others_stay_unknown(
    bootstrap_servers: str, topic: str, make_owner: MakeOwner, kind: str
) -> None:
    kinds: dict[str, Callable[[], Filter[Any]]] = {
        "window": lambda: WindowFilter(keys=100, writes_key=True),
        "slots": lambda: SlotFilter(1024, writes_key=True),
        "postgres": lambda: PostgresWindow(make_owner(), scope=topic, seconds=WINDOW_SECONDS),
    }
    made = kinds[kind]()
    with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=made) as producer:
        producer.produce(topic, b"x", dedup_key="delivered").result(60)
        doubt(made, "there", "not there", "x" * 1000)
        put(bootstrap_servers, topic, with_key(None, "there"))
        put(bootstrap_servers, topic, with_key(None, "x" * 1000))
        put(bootstrap_servers, topic, None)  # by somebody who writes no keys
        assert producer.resolve(topic) == Resolved(delivered=2, absent=0, unknown=1)
        assert made.reserve_many(["there", "not there", "delivered"]) == [
            State.DUPLICATE,
            State.UNKNOWN,
            State.DUPLICATE,
        ]
        made.release("not there")


def test_numbers_that_are_not_in_the_topic_are_absent_because_nothing_can_arrive(
    bootstrap_servers: str, topic: str
) -> None:
    made = SequenceFilter()
    with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=made, producer_name=topic) as producer:
        producer.produce(topic, b"1", sequence=1).result(60)
        # The end of its transaction comes a moment behind the answer, and nothing of this producer before it.
        until(lambda: sum(ends_of({"bootstrap.servers": bootstrap_servers}, topic).values()) == 2, 60, "the end of it")
        doubt(made, 2, 3)
        put(bootstrap_servers, topic, with_sequence(None, topic, 1, 2))
        put(bootstrap_servers, topic, with_sequence(None, "somebody else", 1, 3))
        assert producer.resolve(topic) == Resolved(delivered=1, absent=1, unknown=0)
        assert producer.last_sequence_id(topic) == 2
        assert not producer.produce(topic, b"3", sequence=3).may_repeat
        producer.flush(60)
        assert producer.last_sequence_id(topic) == 3


def test_what_retention_has_removed_is_not_taken_for_absent(bootstrap_servers: str, topic: str) -> None:
    made = SequenceFilter()
    with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=made, producer_name=topic) as producer:
        producer.produce(topic, b"1", sequence=1).result(60)
        doubt(made, 2)
        put(bootstrap_servers, topic, with_sequence(None, topic, 1, 2))
        put(bootstrap_servers, topic, None)
        delete_all(bootstrap_servers, topic)
        assert producer.resolve(topic) == Resolved(delivered=0, absent=0, unknown=1)
        made.release(2)
        producer.abandon(topic, 2)


def test_messages_without_their_keys_cannot_be_looked_for(bootstrap_servers: str, topic: str) -> None:
    with (
        DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=WindowFilter(keys=10)) as producer,
        pytest.raises(ConfigurationError, match="writes_key=True"),
    ):
        producer.resolve(topic)


@pytest.mark.parametrize("given", [[0], {0: "a"}, {0: 1.5}, {"0": 0}, {"orders": {0: 0}}, {-1: 0}])
def test_what_is_no_position_is_refused(given: Any) -> None:
    with (
        DedupProducer({"bootstrap.servers": "127.0.0.1:1"}, dedup=WindowFilter(keys=10, writes_key=True)) as producer,
        pytest.raises(ConfigurationError, match="positions="),
    ):
        producer.resolve("orders", positions=given)


def test_positions_of_a_partition_that_is_not_there_are_refused(bootstrap_servers: str, topic: str) -> None:
    window = WindowFilter(keys=10, writes_key=True)
    with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=window) as producer:
        producer.produce(topic, b"x", dedup_key=1).result(60)
        with pytest.raises(ConfigurationError, match=f"{topic}' has no partition 7"):
            producer.resolve(topic, positions={0: 0, 7: 0})


def test_a_filter_in_memory_is_not_told_to_lease_for_longer(
    bootstrap_servers: str, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    kafka = {"bootstrap.servers": bootstrap_servers, "message.timeout.ms": 0}
    with DedupProducer(kafka, dedup=WindowFilter(keys=10)) as producer:
        producer.produce(topic, b"x", dedup_key=1).result(60)
    assert "lease_short" not in [getattr(record, "action", None) for record in caplog.records]
