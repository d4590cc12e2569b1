"""Errors of the Kafka client: what never passes stops the loop and names what mends it; the rest is seen, once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message

from exactly_once import ClientFailed
from tests.conftest import MakeConsumer
from tests.support.topics import create_topic, produce
from tests.support.worker import drain, ensure_journal


@pytest.fixture(autouse=True)
def _journal(conninfo: str) -> None:
    ensure_journal(conninfo)


@pytest.mark.parametrize(
    ("settings", "mend"),
    [
        ({"session.timeout.ms": 100, "heartbeat.interval.ms": 50}, "group.min.session.timeout.ms"),
        ({"session.timeout.ms": 3_000_000, "max.poll.interval.ms": 3_000_000}, "group.max.session.timeout.ms"),
        ({"group.protocol": "consumer", "group.remote.assignor": "none"}, "group.remote.assignor"),
    ],
)
def test_a_member_that_kafka_will_never_take_is_told(
    settings: dict[str, Any], mend: str, make_consumer: MakeConsumer, bootstrap_servers: str, name: str
) -> None:
    create_topic(bootstrap_servers, 1, name=name)
    consumer = make_consumer(settings)
    consumer.subscribe([name])
    with pytest.raises(ClientFailed, match=mend):
        next(consumer.units(idle_seconds=60))


def test_members_that_do_not_fit_together_are_told(
    make_consumer: MakeConsumer, bootstrap_servers: str, name: str
) -> None:
    create_topic(bootstrap_servers, 1, name=name)
    produce(bootstrap_servers, name, 5, 1)
    first = make_consumer({"partition.assignment.strategy": "range"})
    first.subscribe([name])
    assert drain(first) == 5
    second = make_consumer({"partition.assignment.strategy": "cooperative-sticky"})
    second.subscribe([name])
    with pytest.raises(ClientFailed, match=r"common partition.assignment.strategy"):
        next(second.units(idle_seconds=60))


def test_other_errors_are_seen_once_each(
    make_consumer: MakeConsumer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Made up here: which errors a broker gives depends on its version."""
    consumer = make_consumer()
    caplog.set_level(logging.DEBUG, "exactly_once")
    for _ in range(3):
        for number in (0, 1):
            error = KafkaError(KafkaError.KAFKA_STORAGE_ERROR)
            consumer._on_error(Message(topic=name, partition=number, offset=0, error=error))
        consumer._on_error(Message(error=KafkaError(KafkaError._TRANSPORT)))
    told = [r for r in caplog.records if getattr(r, "action", "") == "client_said"]
    seen = [r.getMessage() for r in told if r.levelno == logging.WARNING]
    assert len(told) == 9
    assert len(seen) == 3
    assert f"({name}[1])" in seen[1]
