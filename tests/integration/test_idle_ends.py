"""When an iteration is over: a member that has not been given its partitions yet has read nothing to the end."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from exactly_once import ExactlyOnceConsumer, Unit
from exactly_once.consumer import maintenance
from exactly_once.embedded import Kafka
from tests.conftest import MakeConsumer
from tests.integration.conftest import MakeScene
from tests.integration.scene import apply
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import ensure_journal, record


def handler(unit: Unit) -> None:
    record(unit, "test")


def test_idle_time_begins_when_kafka_has_given_partitions(
    make_consumer: MakeConsumer, conninfo: str, name: str
) -> None:
    """With Kafka's own delay of the first rebalance, which the embedded broker leaves out unless told."""
    ensure_journal(conninfo)
    with Kafka(properties={"group.initial.rebalance.delay.ms": "8000"}) as kafka:
        create_topic(kafka.bootstrap_servers, 1, name=name)
        produce(kafka.bootstrap_servers, name, 10, 1)
        with make_consumer({"bootstrap.servers": kafka.bootstrap_servers}) as consumer:
            consumer.subscribe([name])
            consumer.run(handler, idle_seconds=5)  # less than that delay, and more than a busy machine takes
            assert consumer.counters.messages == 10


def test_idle_time_begins_when_every_partition_is_read(make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "LOCK_SECONDS", 0.3)
    scene = make_scene(20, partitions=2)
    with scene.consumer() as first:
        apply(next(iter(first)))
    with psycopg.connect(scene.conninfo) as blocker:
        blocker.execute(
            "SELECT FROM exactly_once.ledger WHERE group_id = %s AND partition = 0 FOR UPDATE", (scene.topic,)
        )
        threading.Timer(9, blocker.rollback).start()
        consumer = scene.consumer()
        consumer.run(handler, idle_seconds=5)  # less than that delay, and more than a busy machine takes
    scene.assert_exact()


@pytest.mark.parametrize("end", [{"until_end": True}, {"idle_seconds": 0.3}])
def test_a_member_that_is_left_without_partitions_ends(
    protocol: dict[str, Any], end: dict[str, Any], make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "SETTLE_SECONDS", 2.0)
    scene = make_scene(20)
    busy = scene.consumer(protocol)
    apply(next(iter(busy)))
    idle = scene.consumer(protocol)
    failures: list[BaseException] = []
    # Both take part in the rebalance; which of them is left without is Kafka's choice.
    thread = threading.Thread(target=_serve, args=(idle, end, failures))
    thread.start()
    while thread.is_alive():
        for unit in busy.units(idle_seconds=0.2):
            apply(unit)
    assert not failures
    assert idle.counters.messages + busy.counters.messages <= 20
    scene.drain(busy)
    scene.assert_exact()


@pytest.mark.parametrize("end", [{"until_end": True}, {"idle_seconds": 0.3}])
def test_a_pattern_without_a_topic_ends(
    protocol: dict[str, Any],
    end: dict[str, Any],
    make_consumer: MakeConsumer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(maintenance, "SETTLE_SECONDS", 2.0)
    with make_consumer(protocol) as consumer:
        consumer.subscribe([f"^{name}\\..*"])
        timer = threading.Timer(60, consumer.stop)
        timer.start()
        assert consumer.run(handler, **end)
        timer.cancel()


def test_a_service_without_a_topic_says_so(
    make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setattr(maintenance, "_JOINING_SECONDS", 1.0)
    with make_consumer(wait_for_topics=True) as consumer:
        consumer.subscribe([name])

        def stop() -> None:
            try:
                until(lambda: f"there is no topic (yet) for topics=['{name}']" in caplog.text, 60, "the reason")
            finally:
                consumer.stop()

        thread = threading.Thread(target=stop)
        thread.start()
        consumer.run(handler)
        thread.join()


def test_a_topic_that_is_waited_for_is_no_end(make_consumer: MakeConsumer, bootstrap_servers: str, name: str) -> None:
    with make_consumer({"topic.metadata.refresh.interval.ms": 500}, wait_for_topics=True) as consumer:
        consumer.subscribe([name])

        def make() -> None:
            create_topic(bootstrap_servers, 1, name=name)
            produce(bootstrap_servers, name, 4, 1)

        timer = threading.Timer(maintenance.SETTLE_SECONDS + 1, make)
        timer.start()
        try:
            assert consumer.run(lambda unit: None, idle_seconds=1)
        finally:
            timer.join()
        assert consumer.counters.messages == 4


def _serve(consumer: ExactlyOnceConsumer, end: dict[str, Any], failures: list[BaseException]) -> None:
    try:
        consumer._thread = None  # it was subscribed by the thread of the test
        with consumer:
            for unit in consumer.units(**end):
                apply(unit)
    except BaseException as error:  # noqa: BLE001
        failures.append(error)


def test_a_handler_in_a_thread_may_take_longer_than_nothing_may_come(
    make_consumer: MakeConsumer, bootstrap_servers: str, name: str
) -> None:
    """Partitions are paused for it, which throws away what was fetched; to fetch it again takes a moment."""
    create_topic(bootstrap_servers, 1, name=name)
    produce(bootstrap_servers, name, 4, 1)
    with make_consumer(max_messages=2) as consumer:
        consumer.subscribe([name])
        consumer.run(lambda unit: unit.execute("SELECT pg_sleep(3.2)"), in_thread=True, idle_seconds=3)
        assert consumer.counters.messages == 4


@pytest.mark.slow
def test_a_broker_that_stands_still_is_no_end(
    make_consumer: MakeConsumer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with Kafka() as broker:
        create_topic(broker.bootstrap_servers, 1, name=name)
        for start in range(0, 20, 4):  # in batches, of which one is fetched at a time
            produce(broker.bootstrap_servers, name, 4, 1, start=start)

        def resume() -> None:
            try:
                until(lambda: "whether there is more is not known" in caplog.text, 30, "doubt about the end")
            finally:
                broker.resume()

        resuming = threading.Thread(target=resume)

        def handler(unit: Unit) -> None:
            if resuming.ident is None:
                broker.pause()
                resuming.start()

        little = {"fetch.message.max.bytes": 1, "queued.min.messages": 1, "bootstrap.servers": broker.bootstrap_servers}
        with make_consumer(little, max_messages=1) as consumer:
            consumer.subscribe([name])
            assert consumer.run(handler, idle_seconds=1)
            resuming.join()
            assert consumer.counters.messages == 20
