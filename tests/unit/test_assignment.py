"""Rebalance callbacks: what a signal handler raises in one is kept, and so is what Kafka said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from exactly_once import ExactlyOnceConsumer
from exactly_once._model import Partition
from exactly_once.consumer.rebalance import Assignment, Change
from tests.support.interrupts import Interrupt

_ID = "group.instance.id"


class Client:
    """Stands for the Kafka client, of which a test cannot choose the line that a signal interrupts."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callable[[Client, list[Any]], None]] = {}
        self.calls = 0
        self.errors: list[BaseException] = []

    def subscribe(self, topics: list[str], **callbacks: Any) -> None:
        self.callbacks = callbacks

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop()

    assign = incremental_assign


class Interrupted:
    """A partition at whose first look a signal comes."""

    partition = 1

    def __init__(self) -> None:
        self.looks = 0

    @property
    def topic(self) -> str:
        self.looks += 1
        if self.looks == 1:
            raise Interrupt
        return "t"


@pytest.fixture
def subscribed() -> tuple[Client, Assignment]:
    client, assignment = Client(), Assignment(incremental=True, group_id="g")
    assignment.topics = ["t"]
    assignment.join(client)  # type: ignore[arg-type]
    return client, assignment


def test_an_interrupt_before_the_event_is_recorded_loses_nothing(subscribed: tuple[Client, Assignment]) -> None:
    client, assignment = subscribed
    client.callbacks["on_assign"](client, [Interrupted()])
    assert [(e.change, e.partitions) for e in assignment.events] == [(Change.ASSIGNED, (Partition("t", 1),))]
    assert [type(failure) for failure in assignment.failures] == [Interrupt]
    assert client.calls == 1


def test_an_interrupt_behind_it_records_the_event_once(subscribed: tuple[Client, Assignment]) -> None:
    client, assignment = subscribed
    client.errors = [Interrupt()]
    client.callbacks["on_assign"](client, [TopicPartition("t", 1)])
    assert len(assignment.events) == len(assignment.failures) == 1
    assert client.calls == 2


def test_what_the_client_refuses_is_not_tried_again(subscribed: tuple[Client, Assignment]) -> None:
    client, assignment = subscribed
    client.errors = [KafkaException(KafkaError(KafkaError._FATAL))]
    client.callbacks["on_assign"](client, [TopicPartition("t", 1)])
    assert len(assignment.events) == len(assignment.failures) == 1
    assert client.calls == 1


class Seeking(Client):
    """Stands for a client to which brokers are coming back: what its seek answers then depends on the moment."""

    def __init__(self, *codes: int) -> None:
        super().__init__()
        self.seeks = [KafkaException(KafkaError(code)) for code in codes]

    def assignment(self) -> list[TopicPartition]:
        return []

    def resume(self, _: list[TopicPartition]) -> None:
        pass

    def seek(self, _: TopicPartition) -> None:
        if self.seeks:
            raise self.seeks.pop()


@pytest.mark.parametrize("code", [KafkaError._STATE, KafkaError._OUTDATED, KafkaError._UNKNOWN_PARTITION])
def test_a_seek_that_is_not_possible_yet_is_tried_again(code: int) -> None:
    client, assignment = Seeking(code), Assignment(incremental=True, group_id="g")
    assignment.position(client, {Partition("t", 1): (5, 2)}, {})  # type: ignore[arg-type]
    assert not client.seeks


def test_what_a_broker_answers_to_a_seek_is_raised() -> None:
    client, assignment = Seeking(KafkaError.TOPIC_AUTHORIZATION_FAILED), Assignment(incremental=True, group_id="g")
    with pytest.raises(KafkaException):
        assignment.position(client, {Partition("t", 1): (5, 2)}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "for_good"), [({}, True), ({_ID: ""}, True), ({_ID: "me"}, False)])
def test_a_member_without_a_name_leaves_for_good(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch, *, for_good: bool
) -> None:
    """An empty name, of a variable that is not set, is none to librdkafka either."""
    kafka = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0, **given}
    left: list[bool] = []
    with ExactlyOnceConsumer(kafka, conninfo="host=127.0.0.1 port=1", start="earliest") as consumer:
        monkeypatch.setattr(consumer._assignment, "topics", ["t"])
        monkeypatch.setattr(consumer._assignment, "leave", lambda _, *, for_good: left.append(for_good))
        consumer._leave()
        monkeypatch.undo()
    assert left == [for_good]
