"""The database goes away, comes back, refuses or falls silent: the consumer waits and nothing is lost or doubled."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import psycopg
import pytest
from confluent_kafka import TopicPartition

from exactly_once import DatabaseUnreachable, ExactlyOnceConsumer, Redelivered, Unit, _failpoints
from exactly_once.embedded import Postgres
from exactly_once.ledger.migrate import migrate
from tests.conftest import MakeConsumer
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, apply, apply_until_done, armed, backend_of
from tests.support import journal
from tests.support.roles import as_role
from tests.support.waiting import until
from tests.support.worker import record

PHASES = ("positioned", "polled", "begun", "handled", "guarded", "advanced", "committed")
"""The failpoints at which the database is hurt, in the order in which a unit passes them."""


@pytest.fixture
def own_postgres(own_servers: None) -> Iterator[Postgres]:
    """A server that may be stopped and set up as the test likes."""
    with Postgres() as server:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            migrate(connection)
        journal.create(server.conninfo)
        yield server


def _nothing(unit: Unit) -> None:
    """All effects are in the journal."""


def _gone(scene: Scene, pid: int) -> bool:
    return scene.query(f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid}") == []


@pytest.mark.fault("A8")
def test_a_database_that_is_down_during_the_assignment_holds_the_partitions(make_scene: MakeScene) -> None:
    scene = make_scene(30, partitions=3)
    consumer = scene.consumer()
    scene.proxy.refuse()
    knocks = threading.Timer(2.5, scene.proxy.heal)
    knocks.start()
    assert apply_until_done(consumer, _nothing) == []
    knocks.join()
    scene.assert_exact()


@pytest.mark.parametrize("protocol", ["range", "cooperative-sticky"])
def test_the_membership_survives_a_database_that_is_down_for_longer_than_the_timeouts(
    make_scene: MakeScene, make_consumer: MakeConsumer, protocol: str
) -> None:
    scene = make_scene(40, partitions=2)
    changes: list[str] = []

    def tell(change: str) -> Callable[[ExactlyOnceConsumer, list[TopicPartition]], None]:
        return lambda _, partitions: changes.append(f"{change} {len(partitions)}")

    # Far above what a busy machine makes a process stand still: that would end the membership, too.
    kafka = {
        "session.timeout.ms": 12_000,
        "heartbeat.interval.ms": 500,
        "max.poll.interval.ms": 12_000,
        "partition.assignment.strategy": protocol,
    }
    consumer = make_consumer(kafka, conninfo=scene.proxy.conninfo, max_messages=5)
    consumer.subscribe([scene.topic], on_assign=tell("assigned"), on_revoke=tell("revoked"), on_lost=tell("lost"))
    down_seconds = 15.0
    outages: list[float] = []

    def go_down(unit: Unit) -> None:
        if not outages:
            outages.append(time.monotonic())
            scene.proxy.refuse()
            threading.Timer(down_seconds, scene.proxy.heal).start()

    survived = apply_until_done(consumer, go_down)
    assert time.monotonic() - outages[0] > down_seconds
    assert len(survived) == 1
    assert changes == ["assigned 2"]
    scene.assert_exact()
    consumer.close()


@pytest.mark.fault("B9")
@pytest.mark.parametrize("phase", PHASES)
def test_a_backend_that_is_ended_in_any_phase_costs_nothing(make_scene: MakeScene, phase: str) -> None:
    scene = make_scene(20, partitions=2)
    consumer = scene.consumer(max_messages=5)

    def end_backend() -> None:
        pid = backend_of(consumer)
        scene.query(f"SELECT pg_terminate_backend({pid})")
        until(lambda: _gone(scene, pid), 10, "the backend's end")

    with armed(phase, end_backend):
        apply_until_done(consumer, _nothing)
    scene.assert_exact()


@pytest.mark.fault("B10")
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_that_is_restarted_in_any_phase_costs_nothing(
    make_scene: MakeScene, own_postgres: Postgres, mode: Literal["fast", "immediate"]
) -> None:
    scene = make_scene(200, partitions=2)
    consumer = scene.consumer(conninfo=own_postgres.conninfo, max_messages=5)
    phases = list(PHASES[1:])

    def handler(unit: Unit) -> None:
        if phases and unit.attempt == 1:
            once = iter([phases.pop(0)])
            name = next(once)

            def restart() -> None:
                _failpoints.disarm()
                own_postgres.restart(mode)

            _failpoints.arm(name, restart)

    apply_until_done(consumer, handler)
    assert phases == []
    verdict = journal.check(own_postgres.conninfo, scene.bootstrap_servers, scene.topic)
    assert verdict.exact, str(verdict)


@pytest.mark.fault("B10", more=True)
def test_a_server_that_crashes_under_load_again_and_again_costs_nothing(
    make_scene: MakeScene, own_postgres: Postgres
) -> None:
    scene = make_scene(3000, partitions=3)
    consumer = scene.consumer(conninfo=own_postgres.conninfo, max_messages=3)
    applied = 0
    crashes = threading.Semaphore(0)

    def crash() -> None:
        for mode in ("immediate", "fast", "immediate"):
            crashes.acquire()
            own_postgres.restart(mode)

    def handler(unit: Unit) -> None:
        nonlocal applied
        applied += len(unit.messages)
        if applied // 300 > (applied - len(unit.messages)) // 300 and applied < 1000:
            crashes.release()
        if applied > 2000:
            thread.join(60)  # so that no crash comes behind the last message

    thread = threading.Thread(target=crash)
    thread.start()
    survived = apply_until_done(consumer, handler)
    assert not thread.is_alive()
    assert survived
    verdict = journal.check(own_postgres.conninfo, scene.bootstrap_servers, scene.topic)
    assert verdict.exact, str(verdict)


@pytest.mark.fault("B13", more=True)
def test_a_server_that_is_read_only_is_waited_for_on_another_connection(
    make_scene: MakeScene, own_postgres: Postgres
) -> None:
    """The connection may lead to what was the primary once: a new one finds the primary of now."""
    scene = make_scene(20)
    consumer = scene.consumer(conninfo=own_postgres.conninfo)
    admin = psycopg.connect(own_postgres.conninfo, autocommit=True)

    def set_read_only(value: str) -> None:
        admin.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}".encode())
        admin.execute("SELECT pg_reload_conf()")
        show = "SELECT setting FROM pg_settings WHERE name = 'default_transaction_read_only'"
        until(lambda: admin.execute(show).fetchone() == (value,), 10, f"read-only to be {value}")

    units = iter(consumer)
    apply(next(units))
    backends = set()
    with admin:
        set_read_only("on")
        for attempt in (1, 2, 3):
            unit = next(units)
            assert unit.attempt == attempt
            with pytest.raises(Redelivered) as raised, unit:
                backends.add(backend_of(consumer))
                record(unit, "test")
            assert isinstance(raised.value.__cause__, psycopg.errors.ReadOnlySqlTransaction)
        set_read_only("off")
        assert len(backends) == 3
        scene.drain(consumer)
    verdict = journal.check(own_postgres.conninfo, scene.bootstrap_servers, scene.topic)
    assert verdict.exact, str(verdict)


def test_a_server_that_is_read_only_at_the_assignment_is_waited_for_on_another_connection(
    make_scene: MakeScene, own_postgres: Postgres
) -> None:
    scene = make_scene(20)
    backends: list[int] = []

    def connect() -> psycopg.Connection[Any]:
        # The first three servers are read-only.
        read_only = "?options=-cdefault_transaction_read_only%3Don" if len(backends) < 3 else ""
        connection = psycopg.connect(own_postgres.conninfo + read_only)
        backends.append(connection.info.backend_pid)
        return connection

    scene.drain(scene.consumer(connect=connect))
    assert len(backends) >= 4
    verdict = journal.check(own_postgres.conninfo, scene.bootstrap_servers, scene.topic)
    assert verdict.exact, str(verdict)


@pytest.mark.fault("B16")
def test_a_server_without_a_free_connection_is_waited_for(scene: Scene, db: psycopg.Connection[Any]) -> None:
    role = f"{scene.topic}_role"
    db.execute(
        f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 1; GRANT pg_write_all_data, pg_read_all_data TO {role}".encode()
    )
    db.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA exactly_once TO {role}".encode())
    conninfo = as_role(scene.conninfo, role)
    consumer = scene.consumer(conninfo=conninfo)
    unit = next(iter(consumer))
    with pytest.raises(Redelivered), unit:
        record(unit, "test")
        pid = backend_of(consumer)
        db.execute("SELECT pg_terminate_backend(%s)", (pid,))
        until(lambda: _gone(scene, pid), 10, "the backend's end")
        rival = psycopg.connect(conninfo)
    alarm = threading.Timer(1.5, rival.close)
    alarm.start()
    scene.drain(consumer)
    alarm.join()
    scene.assert_exact()


@pytest.mark.parametrize("how", ["nobody listens", "nobody answers", "the door is shut"])
def test_a_database_that_cannot_be_reached_at_the_start_is_told_in_time_and_without_the_password(
    scene: Scene, make_consumer: MakeConsumer, how: str
) -> None:
    port = scene.proxy.port
    nobody = socket.socket()  # bound, so that nobody else gets the port, and never listening
    if how == "nobody listens":
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    elif how == "nobody answers":
        scene.proxy.black_hole()
    else:
        scene.proxy.refuse()
    conninfo = f"postgresql://somebody:sesame@127.0.0.1:{port}/bank?connect_timeout=2"
    consumer = make_consumer(conninfo=conninfo, startup_seconds=1)
    began = time.monotonic()
    with nobody, pytest.raises(DatabaseUnreachable) as raised:
        consumer.subscribe([scene.topic])
    assert time.monotonic() - began < 30
    assert "127.0.0.1" in str(raised.value)
    assert str(port) in str(raised.value)
    cause: BaseException | None = raised.value
    while cause is not None:
        assert "sesame" not in str(cause)
        assert "sesame" not in repr(cause)
        cause = cause.__cause__ or cause.__context__
    assert "sesame" not in repr(consumer)


@pytest.mark.fault("D12", more=True)
def test_the_kernel_is_told_to_give_up_a_half_open_connection(scene: Scene) -> None:
    """The fault itself needs a network that drops packets; what covers it is set on the socket."""
    for settings, expected in (("", 30000), ("?tcp_user_timeout=2500", 2500)):
        consumer = scene.consumer(conninfo=scene.conninfo + settings)
        found = socket.socket(fileno=socket.dup(consumer._session.connection.pgconn.socket))
        with found:
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == expected
            assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
        consumer.close()


@pytest.mark.fault("D12")
@pytest.mark.parametrize("at", ["handler", "COMMIT"])
def test_a_connection_that_falls_silent_costs_nothing_once_it_is_given_up(scene: Scene, at: str) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))

    def give_up() -> None:
        time.sleep(1)  # for as long as the kernel would take to notice
        scene.proxy.cut_all()
        scene.proxy.heal()

    thread = threading.Thread(target=give_up)
    with pytest.raises(Redelivered), unit:
        record(unit, "test")
        scene.proxy.black_hole()
        thread.start()
        if at == "handler":
            unit.execute("SELECT 1")
    thread.join()
    scene.drain(consumer)
    scene.assert_exact()


def test_stop_is_heard_while_the_database_is_away(scene: Scene) -> None:
    consumer = scene.consumer()
    units = iter(consumer)
    apply(next(units))
    unit = next(units)  # before the database goes away: without it none is made
    scene.proxy.refuse()
    with pytest.raises(Redelivered):
        apply(unit)
    threading.Timer(0.7, consumer.stop).start()
    assert next(units, None) is None
    began = time.monotonic()
    consumer.close()
    assert time.monotonic() - began < 30
    scene.proxy.heal()
    scene.drain(scene.consumer())
    scene.assert_exact()
