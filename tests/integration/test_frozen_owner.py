"""An owner frozen inside a unit keeps its row locks: the next owner's watcher ends it, and nobody else."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from exactly_once import Unit
from exactly_once.session import marker_of
from exactly_once.watcher import FROZEN_AFTER_SECONDS, STILL_SECONDS, Watcher
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene
from tests.support.waiting import until
from tests.support.worker import ROOT, Crew, Worker, drain

BACKENDS = """
    SELECT a.pid, a.application_name, a.state, a.wait_event FROM pg_stat_activity a
    WHERE a.application_name LIKE 'exactly_once:%'
"""


@pytest.fixture
def crew(make_scene: MakeScene) -> Iterator[tuple[Scene, Crew]]:
    """Forty messages in two partitions, and workers that are found dead after three seconds."""
    scene = make_scene(40, partitions=2)
    with Crew(scene.bootstrap_servers, scene.conninfo, scene.topic, [scene.topic]) as crew:
        yield scene, crew


@pytest.mark.parametrize("phase", ["handled", "advanced"])
def test_an_owner_frozen_inside_a_unit_is_ended_by_the_next_one(crew: tuple[Scene, Crew], phase: str) -> None:
    """It holds the counter's row, which the next owner's handler needs, and with `advanced` the ledger's too."""
    scene, workers = crew
    frozen = workers.start(options={"max_messages": 5}, failpoint=[phase, "stop", 2])
    frozen.wait("failpoint")
    frozen.wait_stopped()
    (backend,) = _marked(scene, "idle in transaction")
    successor = workers.start(options={"max_messages": 5}, until_end=True)
    successor.finish()
    assert backend not in _marked(scene)
    scene.assert_exact()
    _resume_and_end(frozen)
    scene.assert_exact()


def test_an_owner_frozen_inside_copy_is_ended_by_the_next_one(make_scene: MakeScene) -> None:
    """No time-out of the server ends such a backend: it is active and waits for its client."""
    scene = make_scene(40, partitions=2)
    command = [sys.executable, "-m", "tests.integration.frozen_in_copy"]
    arguments = [scene.bootstrap_servers, scene.conninfo, scene.topic]
    frozen = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        copying = (
            "SELECT pid FROM pg_stat_activity WHERE state = 'active' AND wait_event = 'ClientRead' AND query ~ 'COPY'"
        )
        ((backend,),) = until(lambda: scene.query(copying), 40, "a backend that stands in COPY")
        until(lambda: _is_stopped(frozen.pid), 10, "the worker to stop")
        successor = scene.consumer({"session.timeout.ms": 3000, "heartbeat.interval.ms": 500})
        scene.drain(successor)
        assert successor._watcher.ended == 1
        assert backend not in _marked(scene)
        scene.assert_exact()
        successor.close()
        frozen.send_signal(signal.SIGCONT)
        said, _ = frozen.communicate(timeout=40)
        assert frozen.returncode == 0
        assert said.split()[0] in ("Redelivered", "Fenced")
        scene.assert_exact()
    finally:
        frozen.kill()
        frozen.communicate()


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _resume_and_end(zombie: Worker) -> None:
    """Let it find out that it was fenced; it must neither fail nor apply anything twice."""
    zombie.cont()
    zombie.wait("redelivered")
    zombie.term()
    zombie.finish()


def _marked(scene: Scene, state: str | None = None) -> list[int]:
    return [pid for pid, _, found, _ in scene.query(BACKENDS) if state is None or found == state]


# The watcher alone: whom it ends, and whom it leaves.


@pytest.fixture
def contested(scene: Scene) -> str:
    """A row that several transactions want."""
    table = scene.table("id int")
    scene.query(f"INSERT INTO {table} VALUES (1)")
    return table


def _hold(conninfo: str, table: str, application_name: str) -> psycopg.Connection[Any]:
    """Open a transaction that holds the row, under a name."""
    holder = psycopg.connect(conninfo)
    holder.execute("SELECT set_config('application_name', %s, true)", (application_name,))
    holder.execute(f"SELECT * FROM {table} FOR UPDATE".encode())
    return holder


def _run_into(
    scene: Scene, contested: str, holder: psycopg.Connection[Any], seconds: float = 2 * FROZEN_AFTER_SECONDS
) -> bool:
    """Have a unit wait for the row, by default twice as long as the watcher does; return whether the holder lives."""
    consumer = scene.consumer()
    blocked: list[Unit] = []

    def let_go() -> None:
        until(lambda: blocked, 20, "a unit")
        time.sleep(seconds)
        if alive():
            holder.rollback()

    def alive() -> bool:
        return scene.query(f"SELECT 1 FROM pg_stat_activity WHERE pid = {holder.info.backend_pid}") != []

    thread = threading.Thread(target=let_go)
    thread.start()
    with next(iter(consumer)) as unit:
        blocked.append(unit)
        unit.execute(f"SELECT * FROM {contested} FOR UPDATE".encode())
    thread.join()
    lives = alive()
    holder.close()
    return lives


def test_a_marked_backend_whose_instance_owns_nothing_is_ended(scene: Scene, contested: str) -> None:
    holder = _hold(scene.conninfo, contested, marker_of(uuid4(), "exactly_once"))
    assert not _run_into(scene, contested, holder)


@pytest.mark.parametrize("application_name", ["", "psql", "exactly_once", "exactlyXonce:00000000", "my exactly_once:x"])
def test_a_backend_without_our_marker_is_left_alone(scene: Scene, contested: str, application_name: str) -> None:
    assert _run_into(scene, contested, _hold(scene.conninfo, contested, application_name))


def test_a_marked_backend_of_another_role_is_left_alone(
    scene: Scene, contested: str, db: psycopg.Connection[Any]
) -> None:
    role = f"{scene.topic}_role"
    db.execute(f"CREATE ROLE {role} LOGIN; GRANT ALL ON {contested} TO {role}".encode())
    holder = _hold(scene.conninfo.replace("postgres@", f"{role}@"), contested, marker_of(uuid4(), "exactly_once"))
    assert _run_into(scene, contested, holder)


def test_a_healthy_peer_with_a_long_transaction_is_left_alone(
    scene: Scene, contested: str, db: psycopg.Connection[Any]
) -> None:
    """It owns its own partitions, which were never ours: its handler is just slow on the row that we want."""
    peer = uuid4()
    db.execute(
        "INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset, owner_epoch, owner_token,"
        " owner_kind, owner_instance, acquired_at) VALUES (%s, 'other', 0, 0, 1, %s, 'consumer', %s, now())",
        (scene.topic, uuid4(), peer),
    )
    holder = _hold(scene.conninfo, contested, marker_of(peer, "exactly_once"))
    assert _run_into(scene, contested, holder)


def test_a_peer_that_stands_still_is_ended_although_it_owns_rows(
    scene: Scene, contested: str, db: psycopg.Connection[Any]
) -> None:
    """Where every other member waits for a frozen one, nobody polls, and Kafka never takes its partitions away."""
    peer = uuid4()
    db.execute(
        "INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset, owner_epoch, owner_token,"
        " owner_kind, owner_instance, acquired_at) VALUES (%s, 'other', 0, 0, 1, %s, 'consumer', %s, now())",
        (scene.topic, uuid4(), peer),
    )
    holder = _hold(scene.conninfo, contested, marker_of(peer, "exactly_once"))
    assert not _run_into(scene, contested, holder, seconds=3 * STILL_SECONDS)


def test_a_peer_that_still_owns_something_is_ended_if_it_began_before_we_took_a_row_of_it(
    scene: Scene, contested: str, db: psycopg.Connection[Any]
) -> None:
    """It was frozen when its rows were taken one by one; only the partition that went to us is known to us."""
    peer = uuid4()
    row = (
        "INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset, owner_epoch, owner_token,"
        " owner_kind, owner_instance, acquired_at) VALUES (%s, %s, 0, 0, 1, %s, 'consumer', %s, now())"
    )
    db.execute(row, (scene.topic, "other", uuid4(), peer))
    db.execute(row, (scene.topic, scene.topic, uuid4(), peer))
    holder = _hold(scene.conninfo, contested, marker_of(peer, "exactly_once"))
    assert not _run_into(scene, contested, holder)


def test_the_watcher_looks_only_when_something_takes_long(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    monkeypatch.setattr(Watcher, "_end_blockers", lambda *args: looked.append(args))
    drain(scene.consumer(max_messages=2))
    assert looked == []
    scene.assert_exact()
