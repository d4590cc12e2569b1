"""A consumer that closes has left its group, so that nobody waits for it until its session ends."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from exactly_once.consumer.client import Closing
from exactly_once.consumer.rebalance import generation
from tests.conftest import MakeConsumer
from tests.support.topics import create_topic
from tests.support.waiting import until
from tests.support.worker import turn, turn_until


def members(bootstrap_servers: str, group: str) -> int:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    return len(admin.describe_consumer_groups([group])[group].result(60).members)


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_member_that_closes_is_no_member_any_more(
    partitions: int, protocol: dict[str, Any], make_consumer: MakeConsumer, bootstrap_servers: str, name: str
) -> None:
    """Also one that has no partitions: librdkafka's close alone forgets to tell under cooperative-sticky."""
    topic = create_topic(bootstrap_servers, partitions)
    settings = {**protocol, "heartbeat.interval.ms": 300} if "group.protocol" not in protocol else protocol
    first, second = make_consumer(settings), make_consumer(settings)
    for consumer in (first, second):
        consumer.subscribe([topic])

    def settled() -> bool:
        for consumer in (first, second):
            turn(consumer)
        owned = sorted(len(consumer.health().owned) for consumer in (first, second))
        return owned == [partitions - 1, 1] and all(consumer.health().is_ready for consumer in (first, second))

    until(settled, 90, "each partition at one of the two members")
    idlest = min((first, second), key=lambda consumer: len(consumer.health().owned))
    idlest.close()
    # Before its session ends, after which it would be none in any case: 6 s under the newer protocol, else 45.
    seconds = 5 if "group.protocol" in protocol else 40
    until(lambda: members(bootstrap_servers, name) == 1, seconds, "the other one to be alone", is_exact=True)


def test_no_two_callbacks_are_left_to_the_client_that_closes(
    make_consumer: MakeConsumer, bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two, librdkafka throws a call of the second away where the first ended the client: it waits for ever."""
    topic = create_topic(bootstrap_servers, 2)
    settings = {"partition.assignment.strategy": "cooperative-sticky", "heartbeat.interval.ms": 300}
    first, second = make_consumer(settings), make_consumer(settings)
    first.subscribe([topic])
    turn_until(first, lambda: len(first.health().owned) == 2, 30, "the first to own both partitions")
    seen = generation(first._client)
    second.subscribe([topic])
    # The first does not poll any more: that it is to give a partition away waits in its client.
    turn_until(second, lambda: generation(first._client) > seen, 30, "the group to give the second its part")
    served = []
    wait = Closing.wait

    def counted(closing: Closing, seconds: float) -> bool:
        before = len(first._assignment.events)
        try:
            return wait(closing, seconds)
        finally:
            served.append(len(first._assignment.events) - before)

    monkeypatch.setattr(Closing, "wait", counted)
    first.close()
    assert served in ([0], [1])
