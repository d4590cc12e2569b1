"""Consumers that are closed leave nothing behind, however many of them one process makes."""

from __future__ import annotations

import gc

from exactly_once import ExactlyOnceConsumer
from tests.conftest import MakeConsumer
from tests.support.leaks import census, left_since
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import drain, ensure_journal

NOBODY = "127.0.0.1:1"


def test_two_thousand_consumers_are_made_and_closed() -> None:
    """Nothing but `close` ends them: the garbage collector is off."""
    gc.disable()
    try:
        before = census()
        for number in range(2000):
            ExactlyOnceConsumer(
                {"bootstrap.servers": NOBODY, "group.id": "many", "log_level": 0},
                conninfo=f"postgresql://{NOBODY}/nothing",
            ).close()
            # A thread that was joined may be seen in /proc for a moment.
            until(lambda: census().kafka_clients <= before.kafka_clients, 10, f"the end of client {number + 1}")
        until(lambda: not census().exceeds(before), 10, "the end of all threads")
    finally:
        gc.enable()


def test_consumers_that_have_worked_leave_nothing(
    make_consumer: MakeConsumer, bootstrap_servers: str, conninfo: str, name: str
) -> None:
    create_topic(bootstrap_servers, 1, name=name)
    produce(bootstrap_servers, name, 10, 1)
    ensure_journal(conninfo)
    before = census()
    for number in range(10):
        with make_consumer() as consumer:
            consumer.subscribe([name])
            assert drain(consumer) == (10 if number == 0 else 0)
        assert not left_since(before), f"after {number + 1} consumers"
