"""A Kafka client whose own thread stands still: replaced while brokers answer, and no reason for close() to wait.

It was met once in a dozen runs of brokers that are killed in turn, and cannot be brought about: a stand-in passes
everything on but commits, and does not end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from exactly_once.consumer import consumer as consuming
from exactly_once.consumer import kafka_offsets
from tests.conftest import PROTOCOLS
from tests.integration.scene import Scene, apply
from tests.support.topics import produce
from tests.support.worker import record


class Silent:
    """A client that answers nothing more that it is asked for."""

    def __init__(self, client: Any, moves_on: threading.Event) -> None:
        self._client, self._moves_on = client, moves_on

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def commit(self, **_: object) -> None:
        """Take it, and tell nobody what became of it."""

    def close(self) -> None:
        self._moves_on.wait()
        self._client.close()


@pytest.fixture
def moves_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(consuming, "CLIENT_SECONDS", 0.2)
    monkeypatch.setattr(kafka_offsets, "_CHECK_SECONDS", 0.2)
    event = threading.Event()
    yield event
    event.set()
    wait_for_the_end()


def wait_for_the_end() -> None:
    """Let a client that was left behind come to its end."""
    for thread in threading.enumerate():
        if thread.name == "exactly_once-close":
            thread.join(30)


@pytest.mark.parametrize("protocol", ["eager", "cooperative"])
def test_a_client_that_answers_nothing_is_replaced(
    scene: Scene, moves_on: threading.Event, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    """When it ends after all, it gives up partitions that are its successor's by then."""
    # The stand-in is a member until it is missed at a poll; where the real thread stands still, no heartbeat is sent.
    consumer = scene.consumer({**PROTOCOLS[protocol], "session.timeout.ms": 6000, "max.poll.interval.ms": 6000})
    with next(iter(consumer)) as unit:
        record(unit, "test")
    scene.query(
        "UPDATE exactly_once.ledger SET owner_token = gen_random_uuid(), owner_epoch = owner_epoch + 1 "
        "WHERE group_id = %s RETURNING 1"
    )
    consumer._client = Silent(consumer._client, moves_on)  # type: ignore[assignment]
    scene.drain(consumer)
    scene.assert_exact()
    told = [r.getMessage() for r in caplog.records if r.levelname in ("WARNING", "ERROR")]
    assert any("left 3 commits without an answer, and brokers answer; joining again" in text for text in told)
    assert any("has not ended within" in text for text in told)
    moves_on.set()
    wait_for_the_end()
    produce(scene.bootstrap_servers, scene.topic, 10, 1, start=20)
    for unit in consumer.units(idle_seconds=2):
        apply(unit)
    assert consumer.health().owned == ((scene.topic, 0),)
    scene.assert_exact()


def test_close_does_not_wait_for_a_client_that_does_not_end(
    scene: Scene, moves_on: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = scene.consumer()
    with next(iter(consumer)) as unit:
        record(unit, "test")
    consumer._client = Silent(consumer._client, moves_on)  # type: ignore[assignment]
    consumer.close()
    assert "the Kafka client has not ended within 0.2 s and is left behind" in caplog.text
    assert scene.ledger("owner_token") == [None], "others need not wait for the row"
