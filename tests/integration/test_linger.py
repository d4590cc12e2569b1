"""linger_seconds: a unit waits for more, so that few messages a second are few transactions."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Producer

from exactly_once import ConfigurationError, ExactlyOnceConsumer, Unit
from exactly_once.consumer.consumer import POLL_SECONDS
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, apply, offsets
from tests.support.waiting import until
from tests.support.worker import record

LONG = 60.0
"""Longer than any test takes: who waited for it would be seen."""


@contextmanager
def producing(scene: Scene, count: int, *, pause: float = 0.01) -> Iterator[None]:
    """Produce messages one by one while the block runs."""

    def produce() -> None:
        for number in range(count):
            scene.produce_values([b"%d" % number])
            time.sleep(pause)

    thread = threading.Thread(target=produce)
    thread.start()
    yield
    thread.join()


def transactions(scene: Scene) -> int:
    """How many transaction ids the server has given out so far."""
    return int(scene.query("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")[0][0])


def units_of(scene: Scene, count: int, **options: Any) -> tuple[list[int], int]:
    """Apply messages that are produced one by one; return the sizes of the units and the transactions it took.

    The next one is produced when the one before is in the consumer: whoever waits for more gets more, and who does not
    has one, however slow the machine is.
    """
    sizes: list[int] = []
    consumer = scene.consumer(max_messages=500, **options)
    units = consumer.units()
    with producing(scene, 1), next(units) as first:  # what is done once is done
        assert offsets(first) == [0]
    before = transactions(scene)
    given = 0

    def produce() -> None:
        for number in range(count):
            scene.produce_values([b"%d" % number])
            until(lambda number=number: given + consumer._buffer.waiting > number, 60, "the message")  # type: ignore[misc]

    with ThreadPoolExecutor(1) as pool:
        producing_all = pool.submit(produce)
        while given < count:
            unit = next(units)
            given += len(unit.messages)
            apply(unit)
            sizes.append(len(unit.messages))
        producing_all.result()
    taken = transactions(scene) - before
    consumer.close()
    return sizes, taken


@pytest.mark.usefixtures("without_autovacuum")
def test_few_messages_a_second_are_few_transactions(make_scene: MakeScene) -> None:
    began = time.monotonic()
    sizes, taken = units_of(make_scene(0), 60, linger_seconds=0.4)
    # One each time it waited, and no more; 60 messages take a few seconds, and on a busy machine longer.
    assert len(sizes) <= 2 + (time.monotonic() - began) / 0.4, sizes
    assert taken <= 3 * len(sizes) + 10


def test_without_it_nothing_waits(make_scene: MakeScene) -> None:
    sizes, taken = units_of(make_scene(0), 60)
    assert sizes == [1] * 60
    assert taken >= len(sizes)


@pytest.mark.parametrize("bound", [{"max_messages": 5}, {"max_messages": 500, "max_bytes": 25}], ids=str)
def test_a_unit_that_is_full_waits_no_longer(make_scene: MakeScene, bound: dict[str, Any]) -> None:
    scene = make_scene(0)
    scene.produce_values([b"five!"] * 10)
    consumer = scene.consumer(linger_seconds=LONG, **bound)
    units = consumer.units()
    began = time.monotonic()
    for start in (0, 5):
        unit = next(units)
        assert offsets(unit) == list(range(start, start + 5))
        apply(unit)
    assert time.monotonic() - began < LONG / 2


def test_a_batch_that_outgrew_what_the_client_holds_is_cut(make_scene: MakeScene) -> None:
    """Below the client's own limit batches are not weighed; one that waits can come from several fetches."""
    scene = make_scene(0)
    kafka = {"queued.max.messages.kbytes": 1}
    consumer = scene.consumer(kafka, max_messages=500, max_bytes=2000, linger_seconds=LONG)
    with producing(scene, 1):
        pass
    scene.produce_values([b"x" * 300] * 20)
    unit = next(consumer.units())
    assert len(unit.messages) > 1
    assert sum(map(len, unit.messages)) <= 2000
    apply(unit)


def test_a_unit_that_is_tried_again_does_not_wait(make_scene: MakeScene) -> None:
    scene = make_scene(0)
    scene.produce_values([b"1", b"2"])
    consumer = scene.consumer(linger_seconds=LONG, max_messages=2)
    units = consumer.units()
    with pytest.raises(ValueError, match="no"), next(units):
        consumer._commits.limit = 500  # as if there were room: it must not be waited for
        raise ValueError("no")
    began = time.monotonic()
    unit = next(units)
    assert (offsets(unit), unit.attempt) == ([0, 1], 2)
    assert time.monotonic() - began < LONG / 2
    apply(unit)


def test_stop_ends_the_waiting(make_scene: MakeScene) -> None:
    scene = make_scene(0)
    scene.produce_values([b"1"])
    consumer = scene.consumer(linger_seconds=LONG)

    def stop_when_it_waits() -> None:
        until(lambda: consumer._buffer.waiting, 20, "a message that waits")
        consumer.stop()

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop_when_it_waits)
        assert list(consumer.units()) == []
        stopping.result()
    consumer.close()
    with scene.consumer() as another:
        assert offsets(next(another.units())) == [0]


def test_a_rebalance_is_served_meanwhile(make_scene: MakeScene) -> None:
    """The first member waits for a full unit; the second gets its share nevertheless."""
    scene = make_scene(0, partitions=2)
    scene.produce_values([b"1"])
    made: list[ExactlyOnceConsumer] = []

    def wait_for_units() -> None:
        kafka = {"partition.assignment.strategy": "cooperative-sticky"}
        member = scene.consumer(kafka, linger_seconds=LONG, max_messages=500)
        made.append(member)
        assert list(member.units()) == []
        member.close()

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait_for_units)]
        until(lambda: made and made[0]._buffer.waiting, 30, "a message that waits")
        assert len(made[0].health().owned) == 2
        waiting.append(pool.submit(wait_for_units))
        until(lambda: [len(member.health().owned) for member in made] == [1, 1], 30, "one partition each")
        for member in made:
            member.stop()
        for future in waiting:
            future.result(30)


@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "a log that ends in a control record"])
def test_until_end_does_not_wait_for_what_will_not_come(make_scene: MakeScene, *, transactional: bool) -> None:
    scene = make_scene(0, partitions=2)
    settings = {"transactional.id": scene.topic} if transactional else {}
    producer = Producer({"bootstrap.servers": scene.bootstrap_servers, **settings})
    if transactional:
        producer.init_transactions()
        producer.begin_transaction()
    for number in range(7):
        producer.produce(scene.topic, b"v", partition=number % 2)
    if transactional:
        producer.commit_transaction()
    producer.flush()
    consumer = scene.consumer(linger_seconds=LONG, max_messages=500)
    began = time.monotonic()
    sizes = []
    for unit in consumer.units(until_end=True):
        apply(unit)
        sizes.append(len(unit.messages))
    assert sum(sizes) == 7
    assert time.monotonic() - began < LONG / 2
    scene.assert_exact()


def test_run_is_as_exact_with_it(make_scene: MakeScene) -> None:
    scene = make_scene(50, partitions=2)
    seen: list[int] = []

    def handler(unit: Unit) -> None:
        seen.append(len(unit.messages))
        for message in unit.messages:
            if message.offset() == 7 and len(unit.messages) > 1:
                raise ValueError("only alone")
        record(unit, "test")

    consumer = scene.consumer(linger_seconds=POLL_SECONDS, max_messages=20)
    consumer.run(handler, until_end=True)
    scene.assert_exact()


@pytest.mark.parametrize("seconds", [-1, math.inf, math.nan])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="linger_seconds"):
        ExactlyOnceConsumer(
            {"bootstrap.servers": "localhost:1", "group.id": "g"}, conninfo="postgresql:///", linger_seconds=seconds
        )
