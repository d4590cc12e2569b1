"""Callbacks and interruptions: nothing that is raised at a bad moment loses messages."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from exactly_once import ExactlyOnceConsumer
from exactly_once.consumer.kafka_offsets import MIRROR_SECONDS
from exactly_once.consumer.rebalance import Assignment, Change
from tests.conftest import MakeConsumer
from tests.support import journal
from tests.support.topics import create_topic, produce
from tests.support.worker import drain, ensure_journal, turn_until

PARTITIONS = 2
MESSAGES = 400
FAILURES = 20
QUICK = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 200}


class Oops(Exception):
    """What a callback of these tests raises."""


@pytest.fixture
def topic(bootstrap_servers: str, conninfo: str) -> str:
    """A topic with messages."""
    ensure_journal(conninfo)
    topic = create_topic(bootstrap_servers, PARTITIONS)
    produce(bootstrap_servers, topic, MESSAGES, PARTITIONS)
    return topic


@pytest.fixture
def assert_exact(conninfo: str, bootstrap_servers: str, topic: str) -> Callable[[], None]:
    """Ask the oracle."""

    def assert_exact() -> None:
        verdict = journal.check(conninfo, bootstrap_servers, topic)
        assert verdict.exact, verdict

    return assert_exact


def drain_in_spite(consumer: ExactlyOnceConsumer, error: type[BaseException]) -> int:
    """Drain, going on after each such error; return how many there were."""
    count = 0
    while True:
        try:
            drain(consumer)
            return count
        except error:
            count += 1


def test_on_assign_is_told_the_real_offsets_after_the_acquisition(
    make_consumer: MakeConsumer, topic: str, protocol: dict[str, Any]
) -> None:
    """Not -1001 for "wherever Kafka says": what will be read first, and the rows are ours by then."""
    told: list[list[tuple[int, int]]] = []

    def on_assign(consumer: ExactlyOnceConsumer, partitions: list[TopicPartition]) -> None:
        told.append(sorted((tp.partition, tp.offset) for tp in partitions))
        assert len(consumer._ownership.tokens()) == PARTITIONS

    for start in (0, MESSAGES // PARTITIONS):
        with make_consumer(protocol) as consumer:
            consumer.subscribe([topic], on_assign=on_assign)
            drain(consumer)
        assert told == [[(number, start) for number in range(PARTITIONS)]]
        told.clear()


def test_on_revoke_is_told_what_was_taken_away(
    make_consumer: MakeConsumer, topic: str, protocol: dict[str, Any]
) -> None:
    revoked: list[tuple[str, int]] = []
    second_has_some = threading.Event()

    def on_revoke(_: ExactlyOnceConsumer, partitions: list[TopicPartition]) -> None:
        revoked.extend((tp.topic, tp.partition) for tp in partitions)

    settings = protocol | ({} if "group.protocol" in protocol else QUICK)
    first, second = make_consumer(settings), make_consumer(settings)
    first.subscribe([topic], on_revoke=on_revoke)
    assert drain(first) == MESSAGES

    def join() -> None:
        second.subscribe([topic], on_assign=lambda _, __: second_has_some.set())
        list(second)

    joining = threading.Thread(target=join)
    joining.start()
    while not second_has_some.is_set():
        list(first.units(idle_seconds=0.2))
    second.stop()
    joining.join(120)
    turn_until(first, lambda: revoked, 60, "a call for what was taken")
    assert set(revoked) <= {(topic, number) for number in range(PARTITIONS)}


@pytest.mark.fault("D1")
def test_on_assign_that_raises_is_raised_by_the_iteration_and_loses_nothing(
    make_consumer: MakeConsumer, topic: str, protocol: dict[str, Any], assert_exact: Callable[[], None]
) -> None:
    def on_assign(_: ExactlyOnceConsumer, __: list[TopicPartition]) -> None:
        raise Oops

    with make_consumer(protocol) as consumer:
        consumer.subscribe([topic], on_assign=on_assign)
        assert drain_in_spite(consumer, Oops) == 1
    assert_exact()


@pytest.mark.parametrize("callback", ["stats_cb", "on_commit", "error_cb"])
def test_client_callback_that_raises_is_raised_by_the_iteration_and_loses_nothing(
    callback: str, make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, assert_exact: Callable[[], None]
) -> None:
    """Raised inside librdkafka it would drop the messages in hand; `stats_cb` shows it best, every 10 ms."""
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls <= FAILURES:
            raise Oops(callback)

    # Addresses where nobody listens make error_cb be called: the client tries one of all at random.
    servers = ",".join([bootstrap_servers, *(f"127.0.0.1:{port}" for port in range(1, 10))])
    raised = 0
    while not raised:
        settings = {callback: fail, "statistics.interval.ms": 10, "bootstrap.servers": servers}
        with make_consumer(settings, max_messages=7) as consumer:
            consumer.subscribe([topic])
            raised += drain_in_spite(consumer, Oops)
            # Offsets are committed once a second while messages come; at the end nobody iterates any more.
            until = time.monotonic() + 5 * MIRROR_SECONDS
            while not raised and time.monotonic() < until:
                produce(bootstrap_servers, topic, 10, PARTITIONS)
                raised += drain_in_spite(consumer, Oops)
    assert calls
    assert_exact()


def test_client_callbacks_are_called(make_consumer: MakeConsumer, topic: str) -> None:
    """Those of the settings reach the caller as confluent-kafka would call them."""
    stats: list[str] = []
    commits: list[list[TopicPartition]] = []
    settings = {
        "stats_cb": stats.append,
        "statistics.interval.ms": 50,
        "on_commit": lambda _, offsets: commits.append(offsets),
    }
    with make_consumer(settings) as consumer:
        consumer.subscribe([topic])
        drain(consumer)
    assert json.loads(stats[0])["type"] == "consumer"
    # A commit has what is new, so that the last one need not have both.
    committed = {tp.partition: tp.offset for offsets in commits for tp in offsets}
    assert committed == dict.fromkeys(range(PARTITIONS), MESSAGES // 2)


@pytest.mark.fault("A14")
@pytest.mark.parametrize(
    ("method", "instead"),
    [
        ("assign", "only subscribe"),
        ("seek", "exactly-once reset"),
        ("commit", "with unit"),
        ("store_offsets", "with unit"),
        ("poll", "for unit in consumer"),
        ("consume", "for unit in consumer"),
    ],
)
def test_methods_that_would_break_the_guarantee_say_what_to_use_instead(
    method: str, instead: str, make_consumer: MakeConsumer
) -> None:
    with pytest.raises(AttributeError, match=f"has no {method}\\(\\): .*{instead}"):
        getattr(make_consumer(), method)
    assert not hasattr(make_consumer(), "no_such_thing")


def test_interrupt_at_the_first_line_of_a_callback_leaves_no_partition_unread(
    protocol: dict[str, Any],
    make_consumer: MakeConsumer,
    monkeypatch: pytest.MonkeyPatch,
    assert_exact: Callable[[], None],
    topic: str,
) -> None:
    """There Python handles a signal that came while the client waited; no signal can be timed so, so it is raised."""
    made = Assignment._callback
    interrupts: list[Change] = []

    def interrupted(self: Assignment, change: Change, act: Any) -> Any:
        callback = made(self, change, act)

        def first(*args: Any) -> None:
            if change is Change.ASSIGNED and not interrupts:
                interrupts.append(change)
                raise KeyboardInterrupt
            callback(*args)

        return first

    monkeypatch.setattr(Assignment, "_callback", interrupted)
    with make_consumer(protocol) as consumer:
        consumer.subscribe([topic])
        with pytest.raises(KeyboardInterrupt):
            drain(consumer)
        drain(consumer)
    assert_exact()


@pytest.mark.fault("D2", more=True)
@pytest.mark.parametrize("left", [b"SELECT pg_sleep(0)", b"BEGIN; SELECT 1/0"], ids=["unread", "failed"])
def test_a_statement_that_an_interrupt_has_left_is_not_waited_for(
    left: bytes, make_consumer: MakeConsumer, topic: str, assert_exact: Callable[[], None]
) -> None:
    """Outside of a transaction of ours, where no signal can be timed; libpq refuses all until the answer is read."""
    with make_consumer(max_messages=50) as consumer:
        consumer.subscribe([topic])
        drain(consumer)
        consumer._session.connection.pgconn.send_query(left)
        # Where the origins are compared nothing is begun, which would throw the connection away.
        consumer._maintenance._next_run = consumer._maintenance._next_comparison = 0
        drain(consumer)
    assert_exact()


# An interrupt that happens to come inside a finaliser is swallowed by Python, with this warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(300, method="thread")  # the other method has its signal taken away here
@pytest.mark.fault("D2")
def test_interrupt_while_polling_loses_nothing(
    make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, assert_exact: Callable[[], None]
) -> None:
    """Ctrl-C while messages come in; librdkafka's binding drops what it had fetched when a handler raises."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with make_consumer(max_messages=50) as consumer:
            consumer.subscribe([topic])
            interrupts = 0
            for start in range(MESSAGES, 4 * MESSAGES, 100):
                produce(bootstrap_servers, topic, 100, PARTITIONS, start=start)
                interrupts += drain_until_interrupted(consumer, 0.02)
            signal.setitimer(signal.ITIMER_REAL, 0)
            drain(consumer)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts
    assert_exact()


def drain_until_interrupted(consumer: ExactlyOnceConsumer, seconds: float) -> int:
    """Iterate for ever; return when interrupted, after so long."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        for unit in consumer.units(idle_seconds=1):
            with unit:
                for message in unit.messages:
                    unit.execute(journal.APPEND, journal.entry(message, "test"))
                unit.execute(journal.COUNT, (unit.messages[0].topic(), len(unit.messages)))
    except KeyboardInterrupt:
        return 1
    return 0
