"""Static members: a worker that comes back under its instance id goes on at once, and its old self is fenced."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.chaos.conftest import MakeCrew
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import FAILED, Crew, Worker

MESSAGES = 300
OPTIONS = {"max_messages": 20}
SESSION_SECONDS = 45
AT_ONCE_SECONDS = SESSION_SECONDS - 5
"""Below the session time-out, and enough for Python to start on a busy machine."""


def start(crew: Crew, instance: str, **config: Any) -> Worker:
    """Start a worker under an instance id, with the session time-out that clients have by themselves."""
    settings: dict[str, Any] = {**crew.kafka, "group.instance.id": instance}
    if "group.protocol" not in settings:
        settings["session.timeout.ms"] = SESSION_SECONDS * 1000
    return crew.start(kafka=settings, options=OPTIONS, counts=False, **config)


def until_owned(crew: Crew, *workers: Worker) -> None:
    names = {worker.name for worker in workers}
    until(lambda: set(crew.owners()) == names, 30, f"every row to be owned by one of {names}")


def test_killed_worker_goes_on_at_once_under_its_instance_id(make_crew: MakeCrew, bootstrap_servers: str) -> None:
    """The other one is not disturbed, and nobody waits for the session to end."""
    topic = create_topic(bootstrap_servers, 4)
    crew = make_crew(topic)
    victim, other = start(crew, "a"), start(crew, "b")
    until_owned(crew, victim, other)
    produce(bootstrap_servers, topic, MESSAGES, 4)
    crew.until_applied(MESSAGES)
    revoked = other.count("revoked")

    victim.kill()
    killed_at = time.monotonic()
    produce(bootstrap_servers, topic, MESSAGES, 4, start=MESSAGES)
    heir = start(crew, "a")
    crew.until_applied(2 * MESSAGES)
    assert time.monotonic() - killed_at < AT_ONCE_SECONDS
    assert set(crew.owners()) == {heir.name, other.name}
    assert other.count("revoked") == revoked
    crew.end_well(heir, other)
    crew.assert_exact(counts=False)


def test_worker_that_stops_in_order_and_comes_back_causes_no_rebalance(
    make_crew: MakeCrew, bootstrap_servers: str
) -> None:
    topic = create_topic(bootstrap_servers, 4)
    crew = make_crew(topic)
    restarted, other = start(crew, "a"), start(crew, "b")
    until_owned(crew, restarted, other)
    revoked = other.count("revoked")
    crew.end_well(restarted)
    produce(bootstrap_servers, topic, MESSAGES, 4)
    again = start(crew, "a")
    again.wait("assigned", AT_ONCE_SECONDS)
    crew.until_applied(MESSAGES)
    assert other.count("revoked") == revoked
    crew.end_well(again, other)
    crew.assert_exact(counts=False)


@pytest.mark.fault("A6", "D4")
@pytest.mark.parametrize("failpoint", ["polled", "begun", "handled", "advanced"])
def test_frozen_static_member_stores_nothing_once_its_successor_works(
    failpoint: str, make_crew: MakeCrew, bootstrap_servers: str
) -> None:
    """Kafka knows both by one name; only the ledger's fence tells them apart when the old one wakes up in its unit."""
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, MESSAGES, 1)
    crew = make_crew(topic)
    zombie = start(crew, "a", failpoint=[failpoint, "stop", 3])
    zombie.wait("failpoint", name=failpoint)
    zombie.wait_stopped()
    frozen_at = time.monotonic()
    heir = start(crew, "a")
    heir.wait("assigned", SESSION_SECONDS)
    crew.until_applied(MESSAGES)
    assert time.monotonic() - frozen_at < AT_ONCE_SECONDS, "the heir waited for the session to end"
    epochs = crew.epochs()

    zombie.cont()
    zombie.wait("redelivered", error="Fenced")
    zombie.wait("failed", error="InstanceFenced")
    assert zombie.wait_exit() == FAILED
    produce(bootstrap_servers, topic, MESSAGES, 1, start=MESSAGES)
    crew.until_applied(2 * MESSAGES)
    assert crew.epochs() == epochs, "the zombie took the partition back"
    crew.end_well(heir)
    crew.assert_exact(counts=False)


def test_of_two_processes_under_one_instance_id_one_is_told_and_the_other_works(
    make_crew: MakeCrew, bootstrap_servers: str
) -> None:
    topic = create_topic(bootstrap_servers, 2)
    crew = make_crew(topic)
    twins = [start(crew, "a")]
    until_owned(crew, *twins)
    twins.append(start(crew, "a"))
    produce(bootstrap_servers, topic, MESSAGES, 2)
    until(lambda: any(twin.count("failed", error="InstanceFenced") for twin in twins), 60, "one of them to be told")
    crew.until_applied(MESSAGES)
    (left,) = [twin for twin in twins if not twin.count("failed")]
    produce(bootstrap_servers, topic, MESSAGES, 2, start=MESSAGES)
    crew.until_applied(2 * MESSAGES)
    crew.end_well(left)
    crew.assert_exact(counts=False)


def test_new_protocol_refuses_the_successor_of_a_killed_worker_until_its_session_has_ended(
    make_crew: MakeCrew, bootstrap_servers: str
) -> None:
    """Then it goes on by itself; the broker of these tests ends sessions after 6 seconds, in which none may start."""
    topic = create_topic(bootstrap_servers, 2)
    crew = make_crew(topic, kafka={"group.protocol": "consumer"})
    victim = start(crew, "a")
    until_owned(crew, victim)
    heir = start(crew, "a")
    until(lambda: "joining again" in heir.log(), 30, "the heir to be refused")
    victim.kill()
    produce(bootstrap_servers, topic, MESSAGES, 2)
    crew.until_applied(MESSAGES)
    crew.end_well(heir)
    again = start(crew, "a")
    produce(bootstrap_servers, topic, MESSAGES, 2, start=MESSAGES)
    crew.until_applied(2 * MESSAGES)
    assert "joining again" not in again.log(), "the heir had stopped in order"
    crew.end_well(again)
    crew.assert_exact(counts=False)
