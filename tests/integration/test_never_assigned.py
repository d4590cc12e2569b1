"""A member to which Kafka assigns nothing for longer than a rebalance may take: its client is replaced by another one.

A real client stands still like that when the group's coordinator crashes while it waits for its first metadata, which
few crashes meet. A member of another program provokes the same wait at any time: it holds the rebalance up.
"""

from __future__ import annotations

import logging
import threading

import pytest
from confluent_kafka import Consumer

from tests.integration.scene import Scene, actions, apply
from tests.support.waiting import until

SETTINGS = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 300, "partition.assignment.strategy": "range"}


@pytest.mark.slow
def test_a_member_without_an_assignment_joins_anew_with_another_client(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    other = Consumer(
        {
            "bootstrap.servers": scene.bootstrap_servers,
            "group.id": scene.topic,
            "enable.auto.commit": False,
            "max.poll.interval.ms": 120_000,
            **SETTINGS,
        }
    )
    # With callbacks of its own it gives nothing up before it polls.
    other.subscribe([scene.topic], on_assign=Consumer.assign, on_revoke=lambda client, _: client.unassign())
    until(lambda: other.poll(0.1) is None and other.assignment(), 30, "an assignment")
    consumer = scene.consumer({**SETTINGS, "max.poll.interval.ms": 6000})
    first = consumer._client

    def leave_when_replaced() -> None:
        try:
            until(lambda: "joining_again" in actions(caplog), 60, "another client")
        finally:
            other.close()

    leaving = threading.Thread(target=leave_when_replaced)
    leaving.start()
    apply(next(iter(consumer)))
    leaving.join()
    assert consumer._client is not first
    (told,) = [r for r in caplog.records if getattr(r, "action", None) == "joining_again"]
    assert told.levelno == logging.WARNING
    assert told.getMessage().startswith("Kafka has assigned nothing, be it no partition, for 9 s, and brokers answer;")
    assert scene.applied() == list(range(10))
