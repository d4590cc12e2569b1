"""Health: what a consumer says of itself while servers are away, handlers are slow, or all is well."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from typing import Any

import pytest
from confluent_kafka import Consumer

from exactly_once import ExactlyOnceConsumer, Health, Unit
from exactly_once.consumer import maintenance
from exactly_once.embedded import Kafka
from tests.conftest import PROTOCOLS, MakeConsumer
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene
from tests.observe.conftest import Run
from tests.support.topics import create_topic, delete_topic
from tests.support.waiting import until
from tests.support.worker import record

IMPATIENT = {"max.poll.interval.ms": 5000, "session.timeout.ms": 4500, "heartbeat.interval.ms": 300}
LIMIT_SECONDS = 5.0


def handler(unit: Unit) -> None:
    record(unit, "test")


def until_ready(consumer: ExactlyOnceConsumer) -> Health:
    until(lambda: consumer.health().is_ready, 30, f"it to be ready: {consumer.health().reasons}")
    return consumer.health()


def until_unready(consumer: ExactlyOnceConsumer) -> Health:
    until(lambda: not consumer.health().is_ready, 30, "it to be not ready")
    return consumer.health()


def until_polled_for_long(consumer: ExactlyOnceConsumer) -> None:
    """Wait until the loop has polled for longer than it may take for one poll, and often: it was held up nowhere.

    Where the whole process stands still for longer, on a busy machine, it passes for dead, and lives again after it.
    """
    began = time.monotonic()
    polls: set[float] = set()

    def has_polled() -> bool:
        polls.add(consumer._observer._polled_at)
        return len(polls) > 20 and time.monotonic() - began > 1.5 * LIMIT_SECONDS and consumer.health().is_alive

    until(has_polled, 60, "the loop to poll again and again")


def test_a_consumer_that_works_is_ready_and_says_what_it_owns(make_scene: MakeScene, run: Run) -> None:
    scene = make_scene(20, partitions=2)
    consumer = scene.consumer()
    run(consumer, lambda: consumer.run(handler))
    health = until_ready(consumer)
    assert (health.is_alive, health.reasons) == (True, ())
    assert (health.owned, health.waiting) == (((scene.topic, 0), (scene.topic, 1)), ())
    until(lambda: consumer.counters.messages == 20, 20, "every message")
    assert consumer.health().seconds_since_commit < 20
    assert consumer.health().seconds_since_poll < 20


def test_health_is_a_value(make_consumer: MakeConsumer) -> None:
    health = make_consumer().health()
    with pytest.raises(dataclasses.FrozenInstanceError):
        health.is_alive = False  # type: ignore[misc]


def test_before_subscribe_and_after_close_it_is_not_ready(scene: Scene, make_consumer: MakeConsumer) -> None:
    consumer = make_consumer()
    assert "not subscribed" in consumer.health().reasons[0]
    consumer.subscribe([scene.topic])
    assert consumer.health().reasons == ("Kafka has not assigned partitions yet",)
    next(iter(consumer))
    assert consumer.health().is_ready
    consumer.close()
    health = consumer.health()
    assert health.reasons == ("it is stopping or has ended",)
    assert health.is_alive
    assert (health.owned, health.waiting) == ((), ()), "its rows are released"


def test_a_database_that_is_away_makes_it_unready_and_never_dead(make_scene: MakeScene, run: Run) -> None:
    scene = make_scene(20)
    consumer = scene.consumer(IMPATIENT, max_unit_seconds=1)
    run(consumer, lambda: consumer.run(handler))
    until_ready(consumer)
    scene.proxy.refuse()
    scene.proxy.cut_all()
    health = until_unready(consumer)
    assert "OperationalError" in health.reasons[0]
    assert health.owned == ((scene.topic, 0),)
    until_polled_for_long(consumer)
    assert not consumer.health().is_ready
    scene.proxy.heal()
    until_ready(consumer)


def test_a_database_that_is_away_from_the_start_leaves_partitions_waiting(make_scene: MakeScene, run: Run) -> None:
    scene = make_scene(20)
    consumer = scene.consumer()
    scene.proxy.refuse()
    run(consumer, lambda: consumer.run(handler))
    until(lambda: consumer.health().waiting == ((scene.topic, 0),), 20, "the assignment")
    assert f"waiting for {scene.topic}[0]" in consumer.health().reasons
    scene.proxy.heal()
    assert until_ready(consumer).owned == ((scene.topic, 0),)


def test_kafka_that_is_away_makes_it_unready_and_not_dead(make_consumer: MakeConsumer, run: Run) -> None:
    with Kafka() as kafka:
        topic = create_topic(kafka.bootstrap_servers, 1)
        consumer = make_consumer({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 2})
        consumer.subscribe([topic])
        run(consumer, lambda: consumer.run(handler))
        until_ready(consumer)
        kafka.stop()
        until(lambda: "no answer from Kafka" in str(consumer.health().reasons), 30, "the reason")
        assert consumer.health().is_alive
        assert not consumer.health().is_ready
        kafka.start()
        until_ready(consumer)
        consumer.stop()


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_slow_handler_is_dead_only_when_the_loop_does_not_poll_for_too_long(
    scene: Scene,
    run: Run,
    in_thread: bool,  # noqa: FBT001 - pytest calls it by name
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(unit: Unit) -> None:
        record(unit, "test")
        entered.set()
        leave.wait(100)

    consumer = scene.consumer(IMPATIENT, max_unit_seconds=1)
    run(consumer, lambda: consumer.run(slow, in_thread=in_thread))
    assert entered.wait(60)
    if in_thread:
        until_polled_for_long(consumer)
    else:
        (dead,) = until(lambda: [h for h in [consumer.health()] if not h.is_alive], 10, "it to be dead")
        assert dead.seconds_since_poll > LIMIT_SECONDS
        assert "the loop has not polled for" in str(dead.reasons)
        assert not dead.is_ready
    leave.set()
    until(lambda: consumer.health().is_alive, 10, "it to live again")


def test_a_member_that_has_nothing_to_do_is_ready(
    scene: Scene, run: Run, protocol: dict[str, Any], make_consumer: MakeConsumer
) -> None:
    """More members than partitions: an update that waits for readiness must not wait for ever."""
    busy = scene.consumer(protocol)
    run(busy, lambda: busy.run(handler))
    until_ready(busy)
    idle = scene.consumer(protocol)
    run(idle, lambda: idle.run(handler))
    until_ready(idle)

    def settled() -> bool:
        found = [busy.health(), idle.health()]
        return all(health.is_ready for health in found) and sorted(len(health.owned) for health in found) == [0, 1]

    until(settled, 20, "both to be ready, one of them with nothing")


def test_a_topic_of_the_subscription_that_is_gone_is_the_reason(
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    run: Run,
    protocol: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when Kafka has taken its partitions away, so that none is missed."""
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.5)
    monkeypatch.setattr(maintenance, "SETTLE_SECONDS", 1.0)
    kept, gone = create_topic(bootstrap_servers, 1), create_topic(bootstrap_servers, 1)
    consumer = make_consumer({**protocol, "topic.metadata.refresh.interval.ms": 300})
    consumer.subscribe([kept, gone])
    run(consumer, lambda: consumer.run(handler))
    until(lambda: len(until_ready(consumer).owned) == 2, 30, "both partitions")
    delete_topic(bootstrap_servers, gone)
    until(lambda: consumer.health().owned == ((kept, 0),), 60, "its partition to be taken away")
    health = until_unready(consumer)
    assert health.owned == ((kept, 0),)
    assert len(health.reasons) == 1
    assert f"nothing comes of topic {gone}: there is no topic" in health.reasons[0]


@pytest.mark.parametrize("protocol", ["eager", "cooperative"])
def test_a_group_that_keeps_a_member_waiting_is_told_of(
    *,
    protocol: str,
    scene: Scene,
    run: Run,
    bootstrap_servers: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a kill: a member that does not answer keeps its partitions until its session has ended."""
    monkeypatch.setattr(maintenance, "_JOINING_SECONDS", 1.0)
    dead = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": scene.topic, **PROTOCOLS[protocol]})
    dead.subscribe([scene.topic])
    until(lambda: dead.poll(0.2) or dead.assignment(), 30, "an assignment")

    def waits() -> list[str]:
        return [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "waiting"]

    consumer = scene.consumer(PROTOCOLS[protocol])
    run(consumer, lambda: consumer.run(handler))
    try:
        until(lambda: len(waits()) >= 2, 30, "two words about the wait")
        assert consumer.health().reasons == ("Kafka has not assigned partitions yet",)
    finally:
        dead.close()
    until_ready(consumer)
    until(lambda: consumer.counters.messages == 20, 20, "every message")
    first, second, *more = waits()
    told = r"waiting for Kafka to assign partitions for (\d+) s: .*session\.timeout\.ms"
    seconds = [int(found[1]) for word in (first, second) if (found := re.match(told, word))]
    assert seconds == sorted(set(seconds))
    assert len(seconds) == 2
    assert seconds[0] > 0
    assert len(more) <= 4, "less and less often"


def test_a_halted_partition_is_the_reason(scene: Scene, run: Run) -> None:
    def commits(unit: Unit) -> None:
        unit.execute("COMMIT")

    consumer = scene.consumer()
    background = run(consumer, lambda: consumer.run(commits))
    until(lambda: any("HandlerCommitted" in reason for reason in consumer.health().reasons), 20, "the reason")
    with pytest.raises(Exception, match="committed"):
        background.join()
    background.error = None
