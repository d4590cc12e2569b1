"""A static member that is fenced by its instance id although nobody else owns its rows.

After an outage of its coordinator a client may fence itself, by a commit that waited in it and went out without a
member id; only chance decides when. A plain client of the same id, which knows no ledger, provokes it at any time.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Consumer

from exactly_once import ExactlyOnceConsumer, InstanceFenced
from tests.integration.scene import Scene, actions, apply
from tests.support.topics import produce
from tests.support.waiting import until
from tests.support.worker import turn_until

STATIC = {"group.instance.id": "a", "session.timeout.ms": 6000, "heartbeat.interval.ms": 300}


def fence(scene: Scene, consumer: ExactlyOnceConsumer) -> None:
    """Join as a member of the same instance id, and vanish; a static member does not leave."""
    twin = Consumer(
        {"bootstrap.servers": scene.bootstrap_servers, "group.id": scene.topic, "enable.auto.commit": False, **STATIC}
    )
    twin.subscribe([scene.topic])
    until(lambda: twin.poll(0.1) is None and twin.assignment(), 30, "an assignment")
    twin.close()
    turn_until(consumer, lambda: consumer._fence is not None, 30, "the member to be fenced")


@pytest.fixture
def member(scene: Scene) -> ExactlyOnceConsumer:
    """A static member that has applied its twenty messages."""
    consumer = scene.consumer(STATIC)
    units = iter(consumer)
    while sum(scene.ledger("next_offset") or [0]) < 20:
        apply(next(units))
    return consumer


def test_member_joins_anew_once_in_a_minute(
    scene: Scene, member: ExactlyOnceConsumer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exactly_once.consumer.consumer.TWIN_SECONDS", 600.0)  # a busy machine's minute is short
    units = iter(member)
    fence(scene, member)
    produce(scene.bootstrap_servers, scene.topic, 10, 1, start=20)
    apply(next(units))
    assert actions(caplog).count("joining_again") == 1
    fence(scene, member)
    with pytest.raises(InstanceFenced, match=r"group\.instance\.id='a'"):
        next(units)
    assert scene.applied()[:21] == list(range(21))


def test_member_whose_rows_another_owns_does_not_join_anew(
    scene: Scene, member: ExactlyOnceConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    """That would take its successor's place, which works."""
    fence(scene, member)
    scene.query(
        "UPDATE exactly_once.ledger SET owner_epoch = owner_epoch + 1, owner_token = gen_random_uuid(), "
        "owner_instance = gen_random_uuid() WHERE group_id = %s"
    )
    with pytest.raises(InstanceFenced):
        next(member.units(idle_seconds=5))
    assert "joining_again" not in actions(caplog)


def test_an_instance_id_that_stays_taken_is_told_once_while_the_member_tries_again(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Under the newer protocol the place of a dead member is refused until its session has ended."""
    settings = {"group.protocol": "consumer", "group.instance.id": "a"}
    holder = scene.consumer(settings)
    apply(next(iter(holder)))
    caplog.set_level(logging.DEBUG)
    late = scene.consumer(settings)

    def levels() -> list[int]:
        return [r.levelno for r in caplog.records if getattr(r, "action", None) == "joining_again"]

    def stop_after_three() -> None:
        try:
            until(lambda: len(levels()) >= 3, 60, "the third refusal")
        finally:
            late.stop()

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop_after_three)
        assert next(iter(late), None) is None
        stopping.result()
    assert levels()[0] == logging.WARNING
    assert set(levels()[1:]) == {logging.DEBUG}
