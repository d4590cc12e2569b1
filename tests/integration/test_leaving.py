"""A consumer that closes has left its group, so that nobody waits for it until its session ends."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from tests.conftest import MakeConsumer
from tests.support.topics import create_topic
from tests.support.waiting import until
from tests.support.worker import turn


def members(bootstrap_servers: str, group: str) -> int:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    return len(admin.describe_consumer_groups([group])[group].result(10).members)


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

    until(settled, 30, "each partition at one of the two members")
    idlest = min((first, second), key=lambda consumer: len(consumer.health().owned))
    idlest.close()
    until(lambda: members(bootstrap_servers, name) == 1, 5, "the other one to be alone")
