"""Fault E1: the delivery report does not come, and the message may be in the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from exactly_once.embedded.kafka import Kafka
from exactly_once.publish import DedupProducer, Outcome, OutcomeUnknown, SequenceFilter, WindowFilter
from tests.publish.test_sequences_on_broker import values
from tests.support.topics import create_topic, produce
from tests.support.waiting import until


@pytest.fixture(scope="module")
def kafka(own_servers: None) -> Iterator[Kafka]:
    """A broker that may be frozen."""
    with Kafka() as broker:
        # What a broker does for its first idempotent producer takes longer than the time-outs below.
        produce(broker.bootstrap_servers, create_topic(broker.bootstrap_servers, 1), 1, 1)
        yield broker


@pytest.fixture
def patient(kafka: Kafka) -> dict[str, Any]:
    """Settings of a producer whose messages get there, also where the broker needs long to come back."""
    return {"bootstrap.servers": kafka.bootstrap_servers}


@pytest.fixture
def settings(patient: dict[str, Any]) -> dict[str, Any]:
    return {**patient, "message.timeout.ms": 15_000, "socket.timeout.ms": 3000}


def freeze_and_lose(kafka: Kafka, producer: DedupProducer, topic: str, **identity: Any) -> Any:
    """Send a message to a broker that is frozen; it gets there when the broker goes on, and nobody hears of it."""
    kafka.pause()
    try:
        delivery = producer.produce(topic, b"7", **identity)
        with pytest.raises(OutcomeUnknown):
            delivery.result(60)
    finally:
        kafka.resume()
    return delivery


@pytest.mark.fault("E1")
def test_an_unanswered_message_is_unknown_and_its_retry_says_that_it_may_repeat(
    kafka: Kafka, settings: dict[str, Any], patient: dict[str, Any]
) -> None:
    topic, window = create_topic(kafka.bootstrap_servers, 1), WindowFilter(keys=100)
    with DedupProducer(settings, dedup=window) as producer:
        producer.produce(topic, b"1", dedup_key="warm").result(60)
        lost = freeze_and_lose(kafka, producer, topic, dedup_key="a")
        assert lost.outcome is Outcome.UNKNOWN
    with DedupProducer(patient, dedup=window) as producer:
        again = producer.produce(topic, b"7", dedup_key="a")
        assert (again.duplicate, again.may_repeat) == (False, True)
        again.result(60)
        third = producer.produce(topic, b"7", dedup_key="a")
        assert third.duplicate, "from here on it is known"
    found = values(kafka.bootstrap_servers, topic)
    assert found in ([1, 7], [1, 7, 7]), "never none, and at most what may_repeat admits"


@pytest.mark.fault("E1", more=True)
def test_a_restart_finds_out_what_became_of_an_unanswered_message(
    kafka: Kafka, settings: dict[str, Any], patient: dict[str, Any]
) -> None:
    topic = create_topic(kafka.bootstrap_servers, 1)
    with DedupProducer(settings, dedup=SequenceFilter(), producer_name="n") as producer:
        producer.produce(topic, b"1", sequence=1).result(60)
        freeze_and_lose(kafka, producer, topic, sequence=7)
    with DedupProducer(patient, dedup=SequenceFilter(), producer_name="n") as again:
        last = again.last_sequence_id(topic)
        # Only now: what the broker has got by then may come into the log as long as nobody has fenced its sender.
        arrived = 7 in values(kafka.bootstrap_servers, topic)
        assert last == (7 if arrived else 1)
        assert again.produce(topic, b"7", sequence=7).duplicate is arrived
    assert values(kafka.bootstrap_servers, topic) == [1, 7]


def test_nothing_is_reported_as_sent_while_the_broker_is_away(kafka: Kafka, settings: dict[str, Any]) -> None:
    topic = create_topic(kafka.bootstrap_servers, 1)
    told: list[object] = []
    with DedupProducer(settings, dedup=WindowFilter(keys=1000)) as producer:
        producer.produce(topic, b"1", dedup_key="warm").result(60)
        kafka.pause()
        try:
            sent = [
                producer.produce(topic, b"7", dedup_key=n, on_delivery=lambda error, _: told.append(error))
                for n in range(50)
            ]
            until(lambda: producer.poll(0.1) >= 0 and len(told) == 50, 60, "the reports")
        finally:
            kafka.resume()
        assert all(error is not None for error in told)  # comparing a KafkaError with None breaks its binding
        assert {d.outcome for d in sent} == {Outcome.UNKNOWN}
        assert producer.filter_of(topic).stats().unknown == 50
