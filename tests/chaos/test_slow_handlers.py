"""Handlers slower than Kafka's patience: in a thread they keep the membership, and at a revoke they are ended."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from exactly_once import ExactlyOnceConsumer, Fenced, PoisonMessage, Unit, UnitTooSlow
from exactly_once.consumer.commit import Counters
from exactly_once.ledger.outcome import TRIES
from tests.chaos.conftest import MakeCrew
from tests.conftest import PROTOCOLS, MakeConsumer
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import drain, ensure_journal, record

PARTITIONS = 4
MESSAGES = 40
IMPATIENT = {"max.poll.interval.ms": 6000, "session.timeout.ms": 6000}


@pytest.fixture
def topic(bootstrap_servers: str, conninfo: str) -> str:
    """A topic with messages."""
    ensure_journal(conninfo)
    topic = create_topic(bootstrap_servers, PARTITIONS)
    produce(bootstrap_servers, topic, MESSAGES, PARTITIONS)
    return topic


@pytest.mark.fault("A7", more=True)
def test_handler_that_outlasts_the_poll_interval_commits_at_its_first_attempt(
    topic: str, make_consumer: MakeConsumer
) -> None:
    attempts = []

    def handler(unit: Unit) -> None:
        attempts.append(unit.attempt)
        time.sleep(9)
        record(unit, "test")

    with make_consumer(IMPATIENT) as consumer:
        consumer.subscribe([topic])
        consumer.run(handler, in_thread=True, until_end=True)
        assert attempts == [1] * consumer.counters.committed
        assert consumer.counters.messages == MESSAGES


@pytest.mark.fault("A7", "D4")
def test_loop_whose_handler_outlasts_the_poll_interval_is_fenced_and_works_on(
    *,
    protocol: dict[str, Any],
    make_consumer: MakeConsumer,
    make_crew: MakeCrew,
    bootstrap_servers: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It lives, and heartbeats go on; but Kafka is not polled, so another member gets the partition."""
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, MESSAGES, 1)
    crew = make_crew(topic, kafka=protocol)
    with make_consumer(crew.kafka | {"max.poll.interval.ms": 6000}, max_messages=10) as slow:
        slow.subscribe([topic])
        units = iter(slow)
        with next(units) as unit:
            record(unit, "slow", counts=False)
        with pytest.raises(Fenced), next(units) as unit:  # noqa: PT012
            record(unit, "slow", counts=False)
            heir = crew.start(counts=False)
            crew.until_applied(MESSAGES)
        crew.end_well(heir)
        produce(bootstrap_servers, topic, MESSAGES, 1, start=MESSAGES)
        drain(slow, "slow", counts=False)
    assert "_MAX_POLL_EXCEEDED" in caplog.text
    crew.assert_exact(counts=False)


@pytest.mark.fault("A7", more=True)
def test_two_members_whose_units_outlast_the_poll_interval_take_smaller_ones(
    topic: str, make_consumer: MakeConsumer
) -> None:
    """Else each would begin what the other had not finished, and be fenced, for ever."""
    members: list[ExactlyOnceConsumer] = []
    has_begun = threading.Event()

    def work(name: str) -> Counters:
        def handler(unit: Unit) -> None:
            has_begun.set()
            time.sleep(0.9 * len(unit.messages))
            record(unit, name)

        with make_consumer(IMPATIENT, max_messages=MESSAGES // 4) as consumer:
            members.append(consumer)
            consumer.subscribe([topic])
            consumer.run(handler)
            return consumer.counters

    with ThreadPoolExecutor(2) as threads:
        working = [threads.submit(work, "first")]
        try:
            assert has_begun.wait(60)
            working.append(threads.submit(work, "second"))
            until(lambda: sum(m.counters.messages for m in members) >= MESSAGES, 120, "all messages")
        finally:
            for member in members:
                member.stop()
        counters = [each.result(60) for each in working]
    assert sum(each.messages for each in counters) == MESSAGES
    assert sum(each.fenced for each in counters) > 0, "or nothing was shown"


def test_single_messages_that_are_taken_over_again_and_again_stop_the_service(
    bootstrap_servers: str, conninfo: str, make_consumer: MakeConsumer, db: psycopg.Connection[Any]
) -> None:
    ensure_journal(conninfo)
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, 1, 1)
    attempts = 0

    def handler(unit: Unit) -> None:
        nonlocal attempts
        attempts += 1
        time.sleep(0.02)
        db.execute(
            "UPDATE exactly_once.ledger SET owner_token = gen_random_uuid(), owner_epoch = owner_epoch + 1 "
            "WHERE topic = %s",
            (topic,),
        )
        record(unit, "test")

    with make_consumer(max_unit_seconds=0.01) as consumer:
        consumer.subscribe([topic])
        with pytest.raises(UnitTooSlow, match="in_thread=True"):
            consumer.run(handler)
    assert attempts == TRIES


@pytest.mark.fault("A2", "A13")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_unit_that_outlasts_a_revoke_is_ended_and_the_new_owner_applies_its_messages(
    protocol: str, topic: str, make_crew: MakeCrew, bootstrap_servers: str
) -> None:
    crew = make_crew(topic, kafka=PROTOCOLS[protocol])
    # A unit without the partitions that move would be left alone.
    slow = crew.start(
        mode="run", in_thread=True, revoke_seconds=1.0, handler_seconds=60, slow_from_partitions=PARTITIONS
    )
    produced = MESSAGES

    def is_slow() -> bool:
        nonlocal produced
        if slow.count("handling", partitions=PARTITIONS):
            return True
        produce(bootstrap_servers, topic, MESSAGES, PARTITIONS, start=produced)
        produced += MESSAGES
        return False

    until(is_slow, 60, "a unit of all partitions")
    quick = crew.start()
    until(lambda: "did not finish in time; its transaction is ended" in slow.story(), 60, "the slow unit to be ended")
    slow.kill()
    crew.until_applied(produced, 90)
    crew.end_well(quick)
    crew.assert_exact()


def test_stop_that_outlasts_its_seconds_leaves_nothing_of_the_unit(topic: str, make_crew: MakeCrew) -> None:
    crew = make_crew(topic)
    worker = crew.start(mode="run", in_thread=True, handler_seconds=60, stop_seconds=1)
    worker.wait("handling")
    began = time.monotonic()
    worker.term()
    assert worker.wait_exit(50) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 50
    assert crew.applied() == 0
    crew.start(until_end=True).finish()
    crew.assert_exact()


def test_stop_lets_the_unit_finish(topic: str, make_crew: MakeCrew) -> None:
    crew = make_crew(topic)
    worker = crew.start(mode="run", in_thread=True, handler_seconds=2, options={"max_messages": 10})
    worker.wait("handling")
    worker.term()
    assert worker.finish()["committed"] == 1
    assert crew.applied() == 10


def test_killed_in_the_middle_of_a_slow_unit_the_next_worker_finishes(topic: str, make_crew: MakeCrew) -> None:
    crew = make_crew(topic)
    worker = crew.start(mode="run", in_thread=True, handler_seconds=1, options={"max_messages": 10})
    worker.wait("handling")
    worker.wait("handling")
    worker.kill()
    crew.start(until_end=True).finish()
    crew.assert_exact()


def test_what_the_handler_raises_is_raised_by_run(topic: str, make_consumer: MakeConsumer) -> None:
    def fail(unit: Unit) -> None:
        raise KeyError("account")

    def leave(unit: Unit) -> None:
        raise SystemExit(7)

    with make_consumer() as consumer:
        consumer.subscribe([topic])
        with pytest.raises(PoisonMessage, match="KeyError: 'account'"):
            consumer.run(fail, in_thread=True)
        with pytest.raises(SystemExit, match="7"):
            consumer.run(leave, in_thread=True)
        consumer.run(lambda unit: record(unit, "test"), in_thread=True, until_end=True)
        assert consumer.counters.messages == MESSAGES


@pytest.mark.parametrize("in_thread", [True, False], ids=["slow", "retried"])
def test_every_partition_gets_its_turn_though_each_unit_pauses(
    *, in_thread: bool, make_consumer: MakeConsumer, bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause throws away what was fetched, and behind it the client fetches its first partitions first."""
    monkeypatch.setattr("exactly_once.consumer.handler_thread.QUICK_SECONDS", 0.02)
    topic = create_topic(bootstrap_servers, PARTITIONS)
    produce(bootstrap_servers, topic, 30 * PARTITIONS, PARTITIONS)
    turns: list[int] = []

    def handler(unit: Unit) -> None:
        if in_thread:
            time.sleep(0.15)  # slow by the measure above
        elif unit.attempt == 1:
            raise psycopg.errors.SerializationFailure  # tried again after a pause
        turns.append(unit.advances[0].partition.number)
        if len(turns) == 5 * PARTITIONS:
            consumer.stop()

    with make_consumer(max_messages=1) as consumer:
        consumer.subscribe([topic])
        consumer.run(handler, in_thread=in_thread)
    assert min(turns.count(number) for number in range(PARTITIONS)) >= 2, turns


def test_quick_handlers_pause_nothing(topic: str, make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause throws away what was fetched: it would cost more than the handler."""
    monkeypatch.setattr("exactly_once.consumer.handler_thread.QUICK_SECONDS", 60.0)  # however busy the machine is
    paused: list[Any] = []
    with make_consumer(max_messages=5) as consumer:
        consumer.subscribe([topic])
        consumer.run(lambda unit: paused.append(consumer._assignment.paused), in_thread=True, until_end=True)
    assert len(paused) >= MESSAGES / 5
    assert not any(paused)
