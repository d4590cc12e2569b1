"""A worker killed at any moment of the protocol: the next one finishes, nothing is lost or doubled."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from exactly_once import _failpoints
from exactly_once.demo.journal import Identity
from tests.chaos.conftest import MakeCrew
from tests.support.topics import create_topic, produce
from tests.support.worker import Crew

PARTITIONS = 3
MESSAGES = 900
OPTIONS = {"max_messages": 50}
POISON = [0, 7, 8, 150, 299]
DEAD = "SELECT topic, partition, message_offset FROM exactly_once.dead_letter WHERE group_id = %s"


@pytest.fixture
def topic(bootstrap_servers: str) -> str:
    """A topic with messages."""
    topic = create_topic(bootstrap_servers, PARTITIONS)
    produce(bootstrap_servers, topic, MESSAGES, PARTITIONS)
    return topic


@pytest.mark.fault("D8")
@pytest.mark.parametrize("nth", [1, 4])
@pytest.mark.parametrize("failpoint", _failpoints.OF_A_UNIT)
def test_killed_at_a_failpoint_the_next_worker_finishes(
    failpoint: str, nth: int, topic: str, make_crew: MakeCrew
) -> None:
    """At its first pass, when nothing was committed yet, and in the middle of the work."""
    _kill_and_finish(make_crew(topic), failpoint, nth)


@pytest.mark.fault("B15", "D8", more=True)
@pytest.mark.parametrize("failpoint", ["begun", "advanced", "committed"])
def test_killed_behind_a_pooler_the_next_worker_finishes(
    failpoint: str, topic: str, make_crew: MakeCrew, pooled_conninfo: str
) -> None:
    """The pooler notices the broken client and must not hand its open transaction to the next one."""
    _kill_and_finish(make_crew(topic, workers_conninfo=pooled_conninfo), failpoint, 3)


def test_killed_again_and_again_the_work_gets_done(topic: str, make_crew: MakeCrew) -> None:
    """Each worker dies after two units, at another moment each time; the last one may live."""
    crew = make_crew(topic)
    for failpoint in ("advanced", "handled", "committed", "guarded"):
        worker = crew.start(options=OPTIONS, failpoint=[failpoint, "kill", 3], until_end=True)
        assert worker.wait_exit() == -signal.SIGKILL, worker.story()
    crew.start(options=OPTIONS, until_end=True).finish()
    crew.assert_exact()


@pytest.mark.fault("C11", "D8", more=True)
@pytest.mark.parametrize("failpoint", ["begun", "dead_lettered", "guarded", "advanced", "committed"])
def test_killed_while_setting_messages_aside_the_next_worker_finishes(
    failpoint: str, topic: str, make_crew: MakeCrew
) -> None:
    """Each message ends in exactly one of two places, and the second worker finds the same ones poisonous."""
    crew = make_crew(topic)
    config: dict[str, Any] = {"options": OPTIONS, "mode": "run", "until_end": True, "poison": POISON}
    killed = failpoint if failpoint == "dead_lettered" else [failpoint, "dead_lettered"]
    first = crew.start(**config, failpoint=[killed, "kill", 3])
    assert first.wait_exit() == -signal.SIGKILL, first.story()
    crew.start(**config).finish()
    dead = [Identity(*row) for row in crew.look(DEAD)]
    verdict = crew.verdict(topic)
    assert sorted(dead) == sorted(verdict.lost) == [Identity(topic, p, o) for p in range(PARTITIONS) for o in POISON]
    assert not verdict.duplicated
    assert verdict.counted == MESSAGES - len(dead)


def _kill_and_finish(crew: Crew, failpoint: str, nth: int) -> None:
    # Slow enough that the background work, mirroring and repositioning, passes its failpoints in the meantime.
    slow: dict[str, Any] = {"handler_seconds": 0.1} if failpoint in ("mirrored", "positioned") else {}
    first = crew.start(options=OPTIONS, failpoint=[failpoint, "kill", min(nth, 2) if slow else nth], **slow)
    assert first.wait_exit() == -signal.SIGKILL, first.story()
    assert first.count("failpoint", name=failpoint) == 1
    crew.start(options=OPTIONS, until_end=True).finish()
    crew.assert_exact()
