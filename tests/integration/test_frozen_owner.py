"""An owner frozen inside a unit keeps its row locks: the next owner's watcher ends it, and nobody else."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from exactly_once import ExactlyOnceConsumer, Redelivered, Unit
from exactly_once.consumer.replay import Replay
from exactly_once.ledger import stale_owners
from exactly_once.ledger.dead_letters import find
from exactly_once.ledger.session import connector, tag_of
from exactly_once.ledger.sql import grants
from exactly_once.ledger.stale_owners import StaleBackendTerminator
from tests.conftest import MakeConsumer
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene
from tests.support.roles import as_role
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


@pytest.mark.fault("A4", more=True)
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


@pytest.mark.fault("A4", more=True)
def test_an_owner_frozen_inside_copy_is_ended_by_the_next_one(
    make_scene: MakeScene, caplog: pytest.LogCaptureFixture
) -> None:
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
        ended = [r.getMessage().partition(" of ")[0] for r in caplog.records if "ended backend" in r.getMessage()]
        assert set(ended) == {f"ended backend {backend}"}, "again where it takes long to end, and nobody else"
        assert backend not in _marked(scene)
        scene.assert_exact()
        successor.close()
        frozen.send_signal(signal.SIGCONT)
        said, _ = frozen.communicate(timeout=90)
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

SCHEMA = "exactly_once"
STILL = 2.0
"""A sign of life comes every tenth of a second; where one may be late, looks wait for it: see `_look_behind_signs`."""
UNBOUNDED = 3.0


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of the watcher far shorter; of what it waits for only the order counts."""
    monkeypatch.setattr(stale_owners, "FROZEN_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(stale_owners, "STILL_SECONDS", STILL)
    monkeypatch.setattr(stale_owners, "UNBOUNDED_SECONDS", UNBOUNDED)
    monkeypatch.setattr(stale_owners, "_YOUNG_SECONDS", 0.4)
    monkeypatch.setattr(stale_owners, "_TURN_SECONDS", 0.05)
    monkeypatch.setattr(stale_owners, "_SIGN_SECONDS", 0.1)
    monkeypatch.setattr(stale_owners, "_LONGEST_PAUSE_SECONDS", 0.1)


@pytest.fixture
def contested(scene: Scene, hasty: None) -> str:
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


def _lives(scene: Scene, holder: psycopg.Connection[Any]) -> bool:
    return scene.query(f"SELECT 1 FROM pg_stat_activity WHERE pid = {holder.info.backend_pid}") != []


# Blockers of a backend that have not shown life just now: of those that ever did, or of all.
LATE_SIGNS = """
    SELECT 1 FROM unnest(pg_blocking_pids({pid})) AS w(pid)
    LEFT JOIN pg_stat_activity s ON s.application_name = 'exactly_once_alive:' || w.pid
    WHERE coalesce(s.state_change < clock_timestamp() - interval '0.5 s', {all_show})
"""


def _look_behind_signs(scene: Scene, consumer: ExactlyOnceConsumer, *, all_show: bool = False) -> None:
    """Let the watcher look right behind signs of life only.

    Who looks and who shows life are one process here, which a busy machine may stop for longer than STILL; it goes on
    with either of them.
    """
    look = consumer._terminator._end_blockers

    def look_then(watched: Any) -> None:
        late = LATE_SIGNS.format(pid=watched.pid, all_show=all_show)
        until(lambda: not scene.query(late), 60, "signs of life of all who show any")
        look(watched)

    consumer._terminator._end_blockers = look_then  # type: ignore[method-assign]


def _run_into(
    scene: Scene,
    contested: str,
    holder: psycopg.Connection[Any] | Callable[[], psycopg.Connection[Any]],
    **options: Any,
) -> bool:
    """Have a unit wait for the row until it was looked at for long, or the holder ended; return whether it lives."""
    consumer = scene.consumer(**options)
    unit = next(iter(consumer))
    if callable(holder):
        holder = holder()
    _look_behind_signs(scene, consumer)
    looks = 0
    look = consumer._terminator._end_blockers

    def count(watched: Any) -> None:
        nonlocal looks
        look(watched)
        looks += 1

    consumer._terminator._end_blockers = count  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool, unit:
        waiting = pool.submit(unit.execute, f"SELECT * FROM {contested} FOR UPDATE".encode())
        until(lambda: looks, 20, "a look")
        enough = time.monotonic() + UNBOUNDED + STILL
        until(lambda: waiting.done() or (looks > 5 and time.monotonic() > enough), 30, "the watcher to do its work")
        if lives := _lives(scene, holder):
            holder.rollback()
        waiting.result(60)
    holder.close()
    return lives


@contextmanager
def _alive(
    db: psycopg.Connection[Any], conninfo: str, holder: psycopg.Connection[Any], group_id: str, peer: UUID
) -> Iterator[None]:
    """Have an instance show that it lives, in the transaction of the holder."""
    shower = StaleBackendTerminator(connector(conninfo), schema=SCHEMA, group_id=group_id, instance=peer)
    shower.watch(holder.info.backend_pid)
    try:
        until(lambda: _signs(db, holder), 20, "a sign of life")
        yield
    finally:
        shower.close()


def _signs(db: psycopg.Connection[Any], holder: psycopg.Connection[Any]) -> list[Any]:
    signs = "SELECT 1 FROM pg_stat_activity WHERE application_name = %s"
    return db.execute(signs, (f"exactly_once_alive:{holder.info.backend_pid}",)).fetchall()


def _own(db: psycopg.Connection[Any], scene: Scene, peer: UUID, *topics: str) -> None:
    """Have an instance own partition 0 of topics."""
    for topic in topics:
        db.execute(
            "INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset, owner_epoch, owner_token,"
            " owner_kind, owner_instance, acquired_at) VALUES (%s, %s, 0, 0, 1, %s, 'consumer', %s, now())",
            (scene.topic, topic, uuid4(), peer),
        )


@pytest.mark.parametrize("may_take", [0, 60, float("inf")])
def test_a_marked_backend_whose_instance_owns_nothing_is_ended(scene: Scene, contested: str, may_take: float) -> None:
    """Its rows were taken: whatever it does, it cannot commit."""
    assert not _run_into(scene, contested, _hold(scene.conninfo, contested, tag_of(uuid4(), SCHEMA, may_take)))


@pytest.mark.parametrize("application_name", ["", "psql", "exactly_once", "exactlyXonce:00000000", "my exactly_once:x"])
def test_a_backend_without_our_marker_is_left_alone(scene: Scene, contested: str, application_name: str) -> None:
    assert _run_into(scene, contested, _hold(scene.conninfo, contested, application_name))


def test_a_marked_backend_of_another_schema_is_left_alone(scene: Scene, contested: str) -> None:
    """Its rows are in a ledger that is not ours, so nothing can be concluded from their absence here."""
    assert _run_into(scene, contested, _hold(scene.conninfo, contested, tag_of(uuid4(), "another")))


def test_a_marked_backend_of_another_role_is_left_alone(
    scene: Scene, contested: str, db: psycopg.Connection[Any]
) -> None:
    role = f"{scene.topic}_role"
    db.execute(f"CREATE ROLE {role} LOGIN; GRANT ALL ON {contested} TO {role}".encode())
    holder = _hold(as_role(scene.conninfo, role), contested, tag_of(uuid4(), SCHEMA))
    assert _run_into(scene, contested, holder)


def test_a_healthy_peer_is_left_alone_for_the_time_that_its_own_unit_may_take(
    scene: Scene, contested: str, db: psycopg.Connection[Any]
) -> None:
    """It owns its own partitions, which were never ours: its handler is just slow on the row that we want."""
    peer = uuid4()
    _own(db, scene, peer, "other")
    assert _run_into(scene, contested, _hold(scene.conninfo, contested, tag_of(peer, SCHEMA, 60)))


@pytest.mark.parametrize("may_take", [0, 1, float("inf")])
def test_a_peer_that_stands_still_is_ended_although_it_owns_rows(
    scene: Scene, contested: str, db: psycopg.Connection[Any], may_take: float
) -> None:
    """Where every other member waits for a frozen one, nobody polls, and Kafka never takes its partitions away."""
    peer = uuid4()
    _own(db, scene, peer, "other")
    assert not _run_into(scene, contested, _hold(scene.conninfo, contested, tag_of(peer, SCHEMA, may_take)))


@pytest.mark.parametrize("may_take", [1, float("inf"), None])
def test_a_sign_of_life_is_respected_however_long_it_takes(
    scene: Scene, contested: str, db: psycopg.Connection[Any], may_take: float | None
) -> None:
    peer = uuid4()
    _own(db, scene, peer, "other")
    holder = _hold(scene.conninfo, contested, tag_of(peer, SCHEMA, may_take))
    with _alive(db, scene.conninfo, holder, "other", peer):
        assert _run_into(scene, contested, holder)


@pytest.mark.parametrize("is_alive", [True, False])
def test_the_documented_rights_are_enough_to_end_and_to_be_spared(
    scene: Scene, contested: str, db: psycopg.Connection[Any], *, is_alive: bool
) -> None:
    role, peer = f"{scene.topic}_role", uuid4()
    db.execute(f"CREATE ROLE {role} LOGIN; GRANT ALL ON {contested} TO {role}".encode())
    db.execute(grants(SCHEMA, role))
    _own(db, scene, peer, "other")
    conninfo = as_role(scene.conninfo, role)
    holder = _hold(conninfo, contested, tag_of(peer, SCHEMA, 1))
    with _alive(db, conninfo, holder, "other", peer) if is_alive else nullcontext():
        assert _run_into(scene, contested, holder, conninfo=conninfo) is is_alive


def test_what_owns_no_rows_by_nature_is_not_fenced(
    scene: Scene, contested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay, an operator's change: of these it says nothing that their instance owns no row."""
    monkeypatch.setattr(stale_owners, "UNBOUNDED_SECONDS", 60.0)
    assert _run_into(scene, contested, _hold(scene.conninfo, contested, tag_of(uuid4(), SCHEMA, None)))


def test_a_peer_that_still_owns_something_is_ended_if_it_began_before_we_took_a_row_of_it(
    scene: Scene, contested: str, db: psycopg.Connection[Any]
) -> None:
    """It was frozen when its rows were taken one by one; only the partition that went to us is known to us."""
    peer = uuid4()
    _own(db, scene, peer, "other", scene.topic)
    assert not _run_into(scene, contested, _hold(scene.conninfo, contested, tag_of(peer, SCHEMA, 60)))


def test_what_a_previous_owner_began_after_we_took_a_row_of_it_is_left_alone(
    scene: Scene, contested: str, db: psycopg.Connection[Any]
) -> None:
    """It knows by now, and works on what it has."""
    peer = uuid4()
    _own(db, scene, peer, "other", scene.topic)
    assert _run_into(scene, contested, lambda: _hold(scene.conninfo, contested, tag_of(peer, SCHEMA, 60)))


def test_what_a_previous_owner_began_before_is_left_alone_if_it_had_released_the_row(
    scene: Scene, contested: str, db: psycopg.Connection[Any]
) -> None:
    """A rebalance in good order: its next unit may well have begun before we acquired what it gave away."""
    peer = uuid4()
    _own(db, scene, peer, "other", scene.topic)
    db.execute("UPDATE exactly_once.ledger SET owner_token = NULL WHERE topic = %s", (scene.topic,))
    assert _run_into(scene, contested, _hold(scene.conninfo, contested, tag_of(peer, SCHEMA, 60)))


@pytest.mark.parametrize(("may_take", "lives"), [(1, False), (60, True)])
def test_an_owner_that_lives_but_is_beyond_its_time_does_not_keep_its_row_from_the_next(
    scene: Scene, contested: str, db: psycopg.Connection[Any], may_take: float, *, lives: bool
) -> None:
    """As one that hangs between the block of join and its own COMMIT: it has advanced, so nobody can acquire."""
    peer = uuid4()
    _own(db, scene, peer, scene.topic)
    holder = _hold(scene.conninfo, "exactly_once.ledger", tag_of(peer, SCHEMA, may_take))
    with _alive(db, scene.conninfo, holder, scene.topic, peer), ThreadPoolExecutor(1) as pool:
        consumer = scene.consumer()
        _look_behind_signs(scene, consumer)
        looked: list[object] = []
        look = consumer._terminator._end_blockers
        consumer._terminator._end_blockers = lambda watched: looked.append(look(watched))  # type: ignore[method-assign]

        def let_go() -> bool:
            until(lambda: not _lives(scene, holder) or len(looked) > 20, 30, "the watcher to look")
            is_alive = _lives(scene, holder)
            if is_alive:
                holder.rollback()
            return is_alive

        letting_go = pool.submit(let_go)
        next(iter(consumer))
        assert letting_go.result(60) is lives
    holder.close()


def test_a_joined_transaction_shows_life_from_the_block_to_its_commit_and_no_longer(
    scene: Scene, hasty: None, db: psycopg.Connection[Any]
) -> None:
    consumer = scene.consumer(max_unit_seconds=0.1)
    units = iter(consumer)
    with psycopg.connect(scene.conninfo) as own:
        with next(units).join(own):
            pass
        until(lambda: _signs(db, own), 20, "a sign of life")
        own.commit()
        until(lambda: not _signs(db, own), 20, "the end of it")
    next(units)
    assert consumer.counters.committed == 1


# Real workers.


@pytest.mark.parametrize("way", ["loop", "beyond its time", "in_thread"])
def test_two_workers_that_hold_one_row_for_long_take_turns(
    way: str, hasty: None, make_scene: MakeScene, make_consumer: MakeConsumer
) -> None:
    """Each holds it for longer than a frozen one may stand still; nobody is frozen, so nobody is ended."""
    scene = make_scene(6, partitions=2)
    table = scene.table("n int")
    scene.query(f"INSERT INTO {table} VALUES (0)")
    options: dict[str, Any] = {"max_messages": 1, "max_unit_seconds": 1} if way == "beyond its time" else {}
    consumers = [make_consumer(**{"max_messages": 1, **options}) for _ in range(2)]
    for consumer in consumers:
        # Within the time that a unit may take none is shown.
        _look_behind_signs(scene, consumer, all_show=way != "loop")
    held = threading.Event()

    def handle(unit: Unit) -> None:
        unit.execute(f"UPDATE {table} SET n = n + 1".encode())
        held.set()
        time.sleep(UNBOUNDED + STILL if way == "in_thread" else 2 * STILL)

    def work(consumer: ExactlyOnceConsumer) -> int:
        redelivered = 0
        if way == "in_thread":
            consumer.run(handle, in_thread=True, until_end=True)
            return consumer.counters.redelivered
        units = consumer.units(until_end=True)
        while True:
            try:
                for unit in units:
                    with unit:
                        handle(unit)
                return redelivered
            except Redelivered:
                redelivered += 1

    def subscribed(consumer: ExactlyOnceConsumer) -> int:
        with consumer:
            consumer.subscribe([scene.topic])
            return work(consumer)

    with ThreadPoolExecutor(2) as pool:
        redelivered = sum(pool.map(subscribed, consumers))
    assert redelivered <= 1, "the second member's arrival may cost the first one a unit, and nothing else does"
    assert [consumer._terminator.ended for consumer in consumers] == [0, 0]
    assert scene.query(f"SELECT n FROM {table}") == [(6,)]


def test_a_replay_that_a_worker_waits_for_is_left_alone(
    scene: Scene, contested: str, db: psycopg.Connection[Any]
) -> None:
    """Its session owns no row, and its handler takes longer than anything may stand still."""
    with scene.consumer(max_messages=1) as consumer:
        unit = next(iter(consumer))
        with unit:
            unit.dead_letter(unit.messages[0], "to be replayed")
    (letter,) = find(db, schema=SCHEMA, group_id=scene.topic)
    replay = Replay(connector(scene.conninfo), schema=SCHEMA)
    holding = threading.Event()

    def handler(unit: Unit) -> None:
        unit.execute(f"SELECT * FROM {contested} FOR UPDATE".encode())
        holding.set()
        time.sleep(UNBOUNDED + STILL)

    with ThreadPoolExecutor(1) as pool:
        replayed = pool.submit(replay.replay, letter, handler)
        assert holding.wait(60)
        consumer = scene.consumer()
        _look_behind_signs(scene, consumer, all_show=True)
        with next(iter(consumer)) as unit:
            unit.execute(f"SELECT * FROM {contested} FOR UPDATE".encode())
        assert replayed.result(60)
    replay.close()
    assert consumer._terminator.ended == 0


def test_the_watcher_looks_only_when_something_takes_long(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    monkeypatch.setattr(StaleBackendTerminator, "_end_blockers", lambda *args: looked.append(args))
    drain(scene.consumer(max_messages=2))
    assert looked == []
    scene.assert_exact()


@pytest.mark.parametrize("way", ["computes", "executes", "computes for ever"])
def test_slow_units_cost_one_connection_at_most(make_scene: MakeScene, hasty: None, way: str) -> None:
    """None while nothing is executed: what computes waits for nobody, and peers know how long it may take."""
    scene = make_scene(6)
    is_handling = False
    opened: list[bool] = []

    def connect() -> psycopg.Connection[Any]:
        if threading.current_thread().name == "exactly_once-watcher":
            opened.append(is_handling)  # on a busy machine an acquisition may have taken long, too
        return psycopg.connect(scene.conninfo)

    def handler(unit: Unit) -> None:
        nonlocal is_handling
        is_handling = True
        if way == "executes":
            unit.execute("SELECT pg_sleep(0.8)")
        else:
            time.sleep(0.8)
        is_handling = False

    consumer = scene.consumer(connect=connect, max_messages=2)
    consumer.run(handler, in_thread=way == "computes for ever", until_end=True)
    assert consumer.counters.committed >= 3
    if way == "computes":
        assert True not in opened
    else:
        assert len(opened) == 1


def test_a_full_server_is_said_once_and_asked_again(
    scene: Scene, contested: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The second connection is the first that a full server refuses."""
    holder = _hold(scene.conninfo, contested, tag_of(uuid4(), SCHEMA))
    tries: list[int] = []

    def connect() -> psycopg.Connection[Any]:
        if threading.current_thread().name == "exactly_once-watcher" and len(tries) < 5:
            tries.append(1)
            raise psycopg.OperationalError("FATAL:  sorry, too many clients already")
        return psycopg.connect(scene.conninfo)

    with next(iter(scene.consumer(connect=connect))) as unit:
        unit.execute(f"SELECT * FROM {contested} FOR UPDATE".encode())
    assert len(tries) == 5
    assert caplog.text.count("too many clients already") == 1
    assert "each worker needs a connection for that" in caplog.text
    assert not _lives(scene, holder)
    holder.close()
