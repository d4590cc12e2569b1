"""Members that join and leave under load, under each rebalance protocol; revocations at bad moments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
from confluent_kafka import Message

from exactly_once.consumer.rebalance import Change
from tests.conftest import MakeConsumer
from tests.support import journal
from tests.support.topics import add_partitions, create_topic, produce
from tests.support.waiting import until
from tests.support.worker import Crew, drain, ensure_journal, record, turn, turn_until

PARTITIONS = 6
OPTIONS = {"max_messages": 50}


@pytest.fixture
def topic(bootstrap_servers: str) -> str:
    """An empty topic."""
    return create_topic(bootstrap_servers, PARTITIONS)


@pytest.fixture
def crew(bootstrap_servers: str, conninfo: str, name: str, topic: str, protocol: dict[str, Any]) -> Iterator[Crew]:
    """Workers on the topic, under each protocol in turn."""
    with Crew(bootstrap_servers, conninfo, name, [topic], kafka=protocol) as crew:
        yield crew


class Load:
    """Produces in the background until the end of the block; `total` is what was produced."""

    def __init__(self, bootstrap_servers: str, topic: str, partitions: int) -> None:
        self.total = 0
        self._place = (bootstrap_servers, topic, partitions)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        servers, topic, partitions = self._place
        while not self._done.wait(0.05):
            produce(servers, topic, 60, partitions, start=self.total)
            self.total += 60


@pytest.mark.fault("A10", more=True)
def test_members_that_join_and_leave_lose_and_double_nothing(crew: Crew, topic: str, bootstrap_servers: str) -> None:
    """One, two, three members, then two and one again, all in good order, under load."""
    with Load(bootstrap_servers, topic, PARTITIONS) as load:
        first = crew.start(options=OPTIONS)
        first.wait("unit")
        second = crew.start(options=OPTIONS)
        second.wait("unit")
        third = crew.start(options=OPTIONS)
        third.wait("unit")
        crew.end_well(first)
        until(lambda: set(crew.owners()) == {second.name, third.name}, 30, "the others to own rows")
        crew.end_well(second)
        until(lambda: crew.owners() == {third.name: PARTITIONS}, 30, "the last to own everything")
    crew.until_applied(load.total)
    crew.end_well(third)
    crew.assert_exact()
    assert crew.owners() == {}, "rows were not released"


@pytest.mark.fault("A10")
def test_rebalance_storm_loses_and_doubles_nothing(crew: Crew, topic: str, bootstrap_servers: str) -> None:
    """Members come and go as fast as they can be started, one resident works on; epochs only rise."""
    epochs: dict[tuple[str, int], int] = {}
    with Load(bootstrap_servers, topic, PARTITIONS) as load:
        resident = crew.start(options=OPTIONS)
        resident.wait("unit")
        for _ in range(6):
            guest = crew.start(options=OPTIONS)
            guest.wait("assigned")
            crew.end_well(guest)
            before, epochs = epochs, crew.epochs()
            assert all(epochs[p] >= epoch for p, epoch in before.items())
    crew.until_applied(load.total)
    crew.end_well(resident)
    crew.assert_exact()


class LateClient:
    """Serves a revocation behind messages that the same call returns, as clients before librdkafka 2 did.

    Later ones take such messages back, so a real one of today cannot show the fault.
    """

    def __init__(self, client: Any, revoke: Callable[[], object], is_revoked: Callable[[], object]) -> None:
        self._client = client
        self._revoke, self._is_revoked = revoke, is_revoked
        self._is_spent = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def consume(self, *args: Any) -> list[Message]:
        messages: list[Message] = self._client.consume(*args)
        if messages and not self._is_spent:
            self._is_spent = True

            def fetched() -> int:
                messages.extend(self._client.consume(100, 0.1))
                # Ends of logs come as errors: those of the empty topic come before any message.
                return len({message.partition() for message in messages if message.error() is None})

            until(lambda: fetched() == PARTITIONS, 30, "messages of all partitions")
            self._revoke()
            until(lambda: fetched() and self._is_revoked(), 40, "a revocation")
        return messages


@pytest.mark.fault("A9")
def test_messages_of_a_partition_that_was_revoked_behind_them_are_dropped(
    crew: Crew, topic: str, bootstrap_servers: str, make_consumer: MakeConsumer
) -> None:
    with make_consumer(crew.kafka, name="late") as consumer:
        consumer.subscribe([topic])

        def is_revoked() -> bool:
            """Tell whether the client has said so in this very call; it is taken note of only after it."""
            return any(event.change is Change.REVOKED for event in consumer._assignment.events)

        turn_until(consumer, lambda: len(consumer._ownership.owned()) == PARTITIONS, 30, "every partition")
        start = partial(crew.start, options=OPTIONS)
        consumer._client = LateClient(consumer._client, start, is_revoked)  # type: ignore[assignment]
        produce(bootstrap_servers, topic, 600, PARTITIONS)
        drain(consumer, "late")
        assert consumer._buffer.not_owned, "the fault has not occurred"
        crew.until_applied(600)
    crew.end_well(*crew.workers)
    crew.assert_exact()


def test_revocation_while_rows_cannot_be_acquired_does_not_wedge_the_group(
    crew: Crew, topic: str, bootstrap_servers: str, conninfo: str
) -> None:
    """A foreign transaction holds rows while their partitions are assigned, taken away and assigned again."""
    produce(bootstrap_servers, topic, 600, PARTITIONS)
    crew.start(options=OPTIONS, until_end=True).finish()
    produce(bootstrap_servers, topic, 600, PARTITIONS, start=600)
    with psycopg.connect(conninfo) as blocker:
        lock = "SELECT FROM exactly_once.ledger WHERE group_id = %s AND partition < 5 FOR UPDATE"
        blocker.execute(lock, (crew.group,))
        first = crew.start(options=OPTIONS)
        # The free row was acquired after the time-out; the locked ones are still pending when others join.
        first.wait("assigned", partitions=[[topic, 5, 100]])
        second = crew.start(options=OPTIONS)
        third = crew.start(options=OPTIONS)
        crew.end_well(third)
        blocker.rollback()
    crew.until_applied(1200)
    until(lambda: set(crew.owners()) == {first.name, second.name}, 30, "both members to own rows")
    crew.end_well(first, second)
    crew.assert_exact()


def test_locked_rows_do_not_keep_a_member_from_polling(
    make_consumer: MakeConsumer, bootstrap_servers: str, conninfo: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Waiting for each of many locked rows in turn, 4 seconds each, would outlast `max.poll.interval.ms`."""
    many = create_topic(bootstrap_servers, 30)
    with make_consumer() as consumer, psycopg.connect(conninfo) as blocker:
        consumer.subscribe([many])
        list(consumer.units(until_end=True))
        consumer.close()
        blocker.execute("SELECT FROM exactly_once.ledger WHERE group_id = %s AND partition < 29 FOR UPDATE", (name,))
        second = make_consumer({"max.poll.interval.ms": 20_000, "session.timeout.ms": 10_000})
        second.subscribe([many])
        while not second.health().owned:
            turn(second)
        for _ in range(20):
            turn(second)
        assert "_MAX_POLL_EXCEEDED" not in caplog.text
        assert [partition.number for partition, _ in second._ownership.tokens()] == [29]


@pytest.mark.fault("A11", more=True)
def test_partitions_added_later_are_read_from_their_beginning(crew: Crew, topic: str, bootstrap_servers: str) -> None:
    """Under ``latest``, too: what arrived before anybody was assigned to the new partition is not missed."""
    options = OPTIONS | {"start": "latest"}
    crew.start(options=options, until_end=True).finish()
    add_partitions(bootstrap_servers, topic, PARTITIONS + 2)
    produce(bootstrap_servers, topic, 400, PARTITIONS + 2)
    crew.start(options=options, until_end=True).finish()
    crew.assert_exact()


@pytest.mark.fault("A11")
def test_partitions_added_under_running_members_are_read_from_their_beginning(
    crew: Crew, topic: str, bootstrap_servers: str
) -> None:
    """What is there before the first of the members hears of them is not missed, and the old ones go on meanwhile."""
    # Only the client's own search for new partitions makes it join again, where the broker does not tell it.
    kafka = crew.kafka | {"topic.metadata.refresh.interval.ms": 300}
    workers = [crew.start(options=OPTIONS | {"start": "latest"}, kafka=kafka) for _ in range(2)]
    placed = "SELECT count(next_offset) FROM exactly_once.ledger WHERE group_id = %s AND owner_token IS NOT NULL"
    until(lambda: crew.look(placed) == [(PARTITIONS,)], 30, "every row to be owned, and to say where it starts")
    with Load(bootstrap_servers, topic, PARTITIONS) as load:
        crew.until_applied(60)
        add_partitions(bootstrap_servers, topic, PARTITIONS + 2)
        produce(bootstrap_servers, topic, 400, PARTITIONS + 2, start=1_000_000)
        until(lambda: sum(crew.owners().values()) == PARTITIONS + 2, 60, "the new rows to be owned, too")
        total = load.total
        until(lambda: load.total > total, 10, "more load")
    crew.until_applied(load.total + 400)
    crew.end_well(*workers)
    crew.assert_exact()


def test_until_end_does_not_take_a_rebalance_for_the_end(crew: Crew, topic: str, bootstrap_servers: str) -> None:
    """Between two assignments a member holds nothing, which is not the same as having read all of it."""
    produce(bootstrap_servers, topic, 1200, PARTITIONS)
    # Everybody waits for the member that is slow to join again.
    slow = crew.start(options={"max_messages": 1}, handler_seconds=4, counts=False)
    slow.wait("handling")
    reader = crew.start(options={"max_messages": 5}, until_end=True, handler_seconds=0.1, counts=False)
    reader.wait("unit")
    guest = crew.start(options=OPTIONS, handler_seconds=0.1, counts=False)
    guest.wait("assigned")
    crew.end_well(guest, slow)
    reader.finish(180)
    assert crew.applied() == 1200
    crew.assert_exact(counts=False)


def test_member_without_partitions_reaches_its_end(
    protocol: dict[str, Any], bootstrap_servers: str, conninfo: str, name: str
) -> None:
    """One partition, two members: there is nothing to read for the second, and it says so by ending."""
    topic = create_topic(bootstrap_servers, 1)
    with Crew(bootstrap_servers, conninfo, name, [topic], kafka=protocol) as crew:
        crew.start(options=OPTIONS).wait("assigned")
        crew.start(options=OPTIONS, until_end=True).finish()


def test_subscribing_anew_while_messages_of_the_old_topic_arrive_mixes_nothing_up(
    make_consumer: MakeConsumer, bootstrap_servers: str, conninfo: str, protocol: dict[str, Any]
) -> None:
    """Messages of a topic that is left are not taken for those of the one that stays."""
    left, kept = (create_topic(bootstrap_servers, 1) for _ in range(2))
    ensure_journal(conninfo)
    for topic in (left, kept):
        produce(bootstrap_servers, topic, 2000, 1)
    with make_consumer(protocol, max_messages=50) as consumer:
        consumer.subscribe([left, kept])
        units = consumer.units(idle_seconds=10)
        for _ in range(8):
            with next(units) as unit:
                record(unit, "one")
        consumer.subscribe([kept])
        for unit in units:
            with unit:
                record(unit, "one")
    with make_consumer(protocol) as consumer:
        consumer.subscribe([left, kept])
        drain(consumer)
    for topic in (left, kept):
        verdict = journal.check(conninfo, bootstrap_servers, topic)
        assert verdict.exact, verdict
