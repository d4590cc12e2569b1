"""Zombies: workers frozen beyond the session timeout, with a unit open, that then wake up."""

from __future__ import annotations

from typing import Any

import pytest

from exactly_once import Fenced
from exactly_once.embedded.proxy import PostgresProxy
from tests.chaos.conftest import MakeCrew
from tests.conftest import PROTOCOLS, MakeConsumer
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import Crew, drain, record, turn_until

MESSAGES = 600
OPTIONS = {"max_messages": 50}
TAKEOVER_SECONDS = 90


@pytest.mark.fault("A1", "D9")
@pytest.mark.parametrize("failpoint", ["polled", "begun", "handled", "advanced", "committed"])
def test_zombie_that_wakes_up_stores_nothing_and_works_on(
    failpoint: str, protocol: dict[str, Any], make_crew: MakeCrew, bootstrap_servers: str
) -> None:
    """Frozen with a unit open, its partition is taken over; awake, it is fenced and serves what Kafka gives it."""
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, MESSAGES, 1)
    # Without the counter: a frozen transaction would hold its row, and every other effect behind it.
    crew = make_crew(topic, kafka=protocol)
    zombie = crew.start(options=OPTIONS, counts=False, failpoint=[failpoint, "stop", 3])
    zombie.wait("failpoint", name=failpoint)
    zombie.wait_stopped()
    heir = crew.start(options=OPTIONS, counts=False)
    heir.wait("assigned", TAKEOVER_SECONDS)
    crew.until_applied(MESSAGES)
    taken, given = sum(crew.epochs().values()), _given(crew)

    zombie.cont()
    if failpoint != "committed":  # the moment after COMMIT: nothing of it is in doubt
        zombie.wait("redelivered")
    produce(bootstrap_servers, topic, MESSAGES, 1, start=MESSAGES)
    crew.until_applied(2 * MESSAGES)
    # Awake it joins again, and Kafka may well give it the partition, or take the heir for dead on a busy machine. But
    # nobody takes what Kafka did not give.
    again = sum(crew.epochs().values()) - taken
    until(lambda: _given(crew) - given >= again, 10, f"Kafka to have given what was taken {again} times")

    heir.kill()
    produce(bootstrap_servers, topic, 100, 1, start=2 * MESSAGES)
    crew.until_applied(2 * MESSAGES + 100)
    assert crew.owners() == {zombie.name: 1}
    crew.assert_exact(counts=False)
    crew.end_well(zombie)


def _given(crew: Crew) -> int:
    """How often Kafka gave somebody a partition."""
    return sum(e["event"] == "assigned" and bool(e["partitions"]) for w in crew.workers for e in list(w.events))


@pytest.mark.fault("A4")
def test_frozen_transaction_does_not_hold_up_the_heir(make_crew: MakeCrew, bootstrap_servers: str) -> None:
    """It holds the row of the counter, which every unit of the heir needs."""
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, MESSAGES, 1)
    crew = make_crew(topic)
    zombie = crew.start(options=OPTIONS, failpoint=["handled", "stop", 3])
    zombie.wait("failpoint")
    zombie.wait_stopped()
    heir = crew.start(options=OPTIONS)
    heir.wait("assigned", TAKEOVER_SECONDS)
    crew.until_applied(MESSAGES)
    zombie.cont()
    zombie.wait("redelivered")
    crew.end_well(heir, zombie)
    crew.assert_exact()


@pytest.mark.fault("A4", more=True)
def test_frozen_transaction_does_not_hold_up_a_member_that_owns_other_partitions(
    make_crew: MakeCrew, bootstrap_servers: str
) -> None:
    """Both need the row of the counter: the living one waits in its handler, cannot join again, and takes nothing."""
    topic = create_topic(bootstrap_servers, 2)
    crew = make_crew(topic, kafka={"max.poll.interval.ms": 6000})
    zombie = crew.start(options=OPTIONS, failpoint=["handled", "stop", 3])
    living = crew.start(options=OPTIONS)
    _until_owned_by(crew, zombie.name, living.name)
    produce(bootstrap_servers, topic, MESSAGES, 2)
    zombie.wait("failpoint")
    zombie.wait_stopped()
    crew.until_applied(MESSAGES)
    crew.assert_exact()


@pytest.mark.fault("A1", more=True)
def test_members_frozen_in_turn_both_work_on(
    protocol: dict[str, Any], make_crew: MakeCrew, bootstrap_servers: str
) -> None:
    """Two members, four partitions, each frozen once at any moment until all its rows were taken."""
    topic = create_topic(bootstrap_servers, 4)
    crew = make_crew(topic, kafka=protocol)
    workers = [crew.start(options=OPTIONS, counts=False) for _ in range(2)]
    everybody = {worker.name for worker in workers}
    total = 0
    for frozen, other in (workers, workers[::-1]):
        _until_owned_by(crew, *everybody)
        frozen.stop()
        _until_owned_by(crew, other.name)
        produce(bootstrap_servers, topic, 400, 4, start=total)
        total += 400
        crew.until_applied(total)
        frozen.cont()
    _until_owned_by(crew, *everybody)
    produce(bootstrap_servers, topic, 400, 4, start=total)
    crew.until_applied(total + 400)
    crew.assert_exact(counts=False)
    crew.end_well(*workers)


def _until_owned_by(crew: Crew, *names: str) -> None:
    until(lambda: set(crew.owners()) == set(names), TAKEOVER_SECONDS, f"every row to be owned by one of {names}")


@pytest.mark.fault("A2", "A5")
def test_late_acquisition_of_one_partition_undoes_a_unit_of_two(
    *, make_crew: MakeCrew, make_consumer: MakeConsumer, bootstrap_servers: str, conninfo: str
) -> None:
    """A member is frozen on its way to the row of the one partition that it got, and overtakes its successor late."""
    topic = create_topic(bootstrap_servers, 2)
    with PostgresProxy(conninfo) as proxy:
        crew = make_crew(topic, kafka=PROTOCOLS["cooperative"], workers_conninfo=proxy.conninfo)
        with make_consumer(crew.kafka, name="owner", max_messages=20, linger_seconds=30) as owner:
            owner.subscribe([topic])
            turn_until(owner, lambda: crew.owners() == {"owner": 2}, TAKEOVER_SECONDS, "both rows")
            late = crew.start(counts=False)
            # It gets nothing before the owner polls again and gives something up.
            acquisition = proxy.hold("BEGIN ISOLATION LEVEL", close_client=False)
            turn_until(owner, acquisition.fired.is_set, TAKEOVER_SECONDS, "the other's acquisition")
            late.stop()
            before = sum(crew.epochs().values())
            turn_until(owner, lambda: _is_taken_again(crew, before), TAKEOVER_SECONDS, "both rows again")
            produce(bootstrap_servers, topic, 20, 2)
            unit = next(iter(owner))  # full at once, so it has messages of both
            with pytest.raises(Fenced), unit:  # noqa: PT012
                record(unit, "owner", counts=False)
                acquisition.release()
                late.cont()
                until(lambda: crew.owners() == {"owner": 1, late.name: 1}, TAKEOVER_SECONDS, "the late acquisition")
            assert sum(crew.epochs().values()) == before + 2
            assert crew.applied() == 0
            turn_until(owner, lambda: late.count("assigned"), TAKEOVER_SECONDS, "the late one to be given something")
            drain(owner, "owner", counts=False)
        crew.until_applied(20)
        crew.end_well(late)
        crew.assert_exact(counts=False)


def _is_taken_again(crew: Crew, before: int) -> bool:
    return crew.owners() == {"owner": 2} and sum(crew.epochs().values()) == before + 1
