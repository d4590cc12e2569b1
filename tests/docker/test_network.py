"""A worker that is cut off from one server at a time, or frozen as a whole, and comes back."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.chaos.conftest import MakeCrew
from tests.docker.conftest import BROKERS, POOLED, coordinator_of
from tests.support.docker import Stack
from tests.support.docker_worker import ContainerWorker
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import Crew, Worker

PARTITIONS = 6
MESSAGES = 300
LONG = 90
SLOW: dict[str, Any] = {"options": {"max_messages": 20}, "handler_seconds": 0.3}
NOTICE = "?connect_timeout=2&tcp_user_timeout=3000"
"""A connection without an answer is given up after seconds; the library's own default is 30."""
PROTOCOLS = {
    "classic": {"partition.assignment.strategy": "cooperative-sticky"},
    "consumer": {"group.protocol": "consumer"},
}


@pytest.fixture
def topic(bootstrap_servers: str) -> str:
    """A topic with messages, led by all brokers."""
    topic = create_topic(bootstrap_servers, PARTITIONS, replication=3)
    produce(bootstrap_servers, topic, MESSAGES, PARTITIONS)
    return topic


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> dict[str, str]:
    """The two group protocols: who notices a lost member differs."""
    return PROTOCOLS[request.param]


@pytest.mark.fault("D12")
def test_worker_cut_off_from_the_database_keeps_its_partitions(
    way: str, topic: str, cluster: Stack, bootstrap_servers: str, make_crew: MakeCrew
) -> None:
    crew = make_crew(topic, workers_conninfo=way + NOTICE)
    worker = _container(crew.start(**SLOW))
    crew.until_applied(60, LONG)
    server = "pgbouncer" if way == POOLED else "primary"
    worker.cut(server)
    # Also where the first ones were all applied before the engine had cut it off.
    produce(bootstrap_servers, topic, MESSAGES, PARTITIONS, start=MESSAGES)
    worker.wait("redelivered", LONG)
    worker.heal(server)
    crew.until_applied(2 * MESSAGES, LONG)
    assert not worker.count("revoked")
    assert not worker.count("lost")
    crew.end_well(worker)
    crew.assert_exact()


@pytest.mark.fault("D12")
def test_worker_cut_off_from_kafka_is_replaced_and_comes_back(
    protocol: dict[str, str], topic: str, bootstrap_servers: str, make_crew: MakeCrew
) -> None:
    crew = make_crew(topic, kafka=protocol)
    worker = _container(crew.start(**SLOW))
    crew.until_applied(60, LONG)
    heir = crew.start(**SLOW)
    _until_owners(crew, worker, heir)
    worker.cut(*BROKERS)
    _until_owners(crew, heir)
    crew.until_applied(MESSAGES, LONG)
    worker.heal(*BROKERS)
    _until_owners(crew, worker, heir)
    produce(bootstrap_servers, topic, MESSAGES, PARTITIONS, start=MESSAGES)
    crew.until_applied(2 * MESSAGES, LONG)
    crew.end_well(worker, heir)
    crew.assert_exact()


@pytest.mark.fault("A3")
def test_worker_cut_off_from_its_coordinator_only_is_fenced_by_the_database(
    protocol: dict[str, str], topic: str, bootstrap_servers: str, make_crew: MakeCrew
) -> None:
    """It goes on fetching from the other brokers, which do not know that it is no member any more."""
    crew = make_crew(topic, kafka=protocol)
    worker = _container(crew.start(**SLOW))
    crew.until_applied(60, LONG)
    coordinator = coordinator_of(bootstrap_servers, crew.group)
    heir = crew.start(**SLOW)
    _until_owners(crew, worker, heir)
    worker.cut(coordinator)
    _until_owners(crew, heir)
    produce(bootstrap_servers, topic, MESSAGES, PARTITIONS, start=MESSAGES)
    crew.until_applied(2 * MESSAGES, LONG)
    assert crew.owners() == {heir.name: PARTITIONS}
    worker.heal(coordinator)
    _until_owners(crew, worker, heir)
    produce(bootstrap_servers, topic, MESSAGES, PARTITIONS, start=2 * MESSAGES)
    crew.until_applied(3 * MESSAGES, LONG)
    crew.end_well(worker, heir)
    crew.assert_exact()


@pytest.mark.fault("A1")
def test_frozen_worker_wakes_up_as_a_zombie_and_stores_nothing(
    way: str, topic: str, bootstrap_servers: str, make_crew: MakeCrew
) -> None:
    """It is frozen inside its transaction, with the counter's row in hand, which every unit of the heir needs."""
    crew = make_crew(topic, workers_conninfo=way)
    zombie = crew.start(options={"max_messages": 20}, handler_seconds=10)  # more than the engine takes to freeze it
    zombie.wait("handling", LONG)
    until(lambda: _is_inside(crew), LONG, "the worker's handler to have written")
    zombie.stop()
    heir = crew.start(options={"max_messages": 20})
    crew.until_applied(MESSAGES, LONG)
    zombie.cont()
    zombie.wait("redelivered", LONG)
    produce(bootstrap_servers, topic, 60, PARTITIONS, start=MESSAGES)
    crew.until_applied(MESSAGES + 60, LONG)
    crew.end_well(zombie, heir)
    crew.assert_exact()


def test_frozen_primary_is_waited_for(
    way: str, topic: str, cluster: Stack, bootstrap_servers: str, make_crew: MakeCrew
) -> None:
    """Its kernel still answers, so no connection breaks: the same transaction goes on when it wakes up."""
    crew = make_crew(topic, workers_conninfo=way)
    worker = crew.start(**SLOW)
    crew.until_applied(60, LONG)
    cluster["primary"].pause()
    try:
        # What it printed before comes through the engine, later.
        until(lambda: _stands(worker), LONG, "a worker that waits")
        handled = worker.count("handling")
        produce(bootstrap_servers, topic, MESSAGES, PARTITIONS, start=MESSAGES)
        # One unit may have been answered already, and the next one begun; no third one.
        assert worker.count("handling") <= handled + 1
    finally:
        cluster["primary"].unpause()
    crew.until_applied(2 * MESSAGES, LONG)
    assert not worker.count("revoked")
    crew.end_well(worker)
    crew.assert_exact()


def _stands(worker: Worker) -> bool:
    before = len(worker.events)
    time.sleep(3)  # ten times what a unit takes
    return len(worker.events) == before


def _container(worker: Worker) -> ContainerWorker:
    assert isinstance(worker, ContainerWorker)
    return worker


def _until_owners(crew: Crew, *workers: Worker) -> None:
    names = {worker.name for worker in workers}

    def owned() -> bool:
        owners = crew.owners()
        return set(owners) == names and sum(owners.values()) == PARTITIONS

    until(owned, LONG, f"every row to be owned by {names}")


def _is_inside(crew: Crew) -> bool:
    query = (
        "SELECT 1 FROM pg_locks WHERE relation = 'journal.counter'::regclass AND mode = 'RowExclusiveLock' AND %s <> ''"
    )
    return bool(crew.look(query))
