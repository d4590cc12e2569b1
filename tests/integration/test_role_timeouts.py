"""Settings of a role: time-outs bound what handlers execute, and nothing of what the library does itself."""

from __future__ import annotations

import threading
from dataclasses import replace
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import Producer
from psycopg.conninfo import make_conninfo

from exactly_once import Unit, UnitTooSlow
from exactly_once.consumer import maintenance
from exactly_once.ledger.session import Connection, Session, connector
from exactly_once.ledger.stale_owners import StaleBackendTerminator
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, actions, apply, backend_of, text
from tests.support.topics import produce
from tests.support.waiting import until
from tests.support.worker import record

LIMIT_SECONDS = 3
"""Of a statement: more than one of these tests needs on a busy machine, less than those wait that it must not end."""


def limited(scene: Scene) -> str:
    """The connection string of a role with time-outs."""
    (version,) = scene.query("SHOW server_version_num")[0]
    options = f"-c statement_timeout={LIMIT_SECONDS}s"
    if int(version) >= 170000:
        options += " -c transaction_timeout=60s"
    return make_conninfo(scene.proxy.conninfo, options=options)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_one_locked_row_keeps_nobody_from_the_others(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch, *, is_cancelled: bool
) -> None:
    """Whether the wait for the lock ends by itself, or an operator cancels it."""
    scene = make_scene(20, partitions=2)
    with scene.consumer() as first:
        apply(next(iter(first)))
    produce(scene.bootstrap_servers, scene.topic, 2, 2, start=20)  # whichever partition the first unit has emptied
    before = len(scene.applied())
    monkeypatch.setattr(maintenance, "LOCK_SECONDS", 60.0 if is_cancelled else LIMIT_SECONDS + 1.0)
    with psycopg.connect(scene.conninfo) as blocker:
        blocker.execute(
            "SELECT FROM exactly_once.ledger WHERE group_id = %s AND partition = 0 FOR UPDATE", (scene.topic,)
        )
        consumer = scene.consumer(conninfo=limited(scene))
        if is_cancelled:
            threading.Thread(target=_cancel_waiting, args=(scene,), daemon=True).start()
        unit = next(iter(consumer))
        assert {m.partition() for m in unit.messages} == {1}
        apply(unit)
        assert len(scene.applied()) > before
    scene.drain(consumer)
    scene.assert_exact()


def _cancel_waiting(scene: Scene) -> None:
    """Cancel the first statement that waits for a lock."""
    waiting = (
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%lock_row%'"
    )
    until(lambda: scene.query(waiting), 30, "a statement that waits")


def test_a_wait_for_our_own_row_is_not_the_handlers_fault(scene: Scene) -> None:
    """Somebody looks at the row with a lock while a unit of one message commits: it waits, however long that is."""
    consumer = scene.consumer(conninfo=limited(scene), max_messages=1)
    unit = next(iter(consumer))
    with psycopg.connect(scene.conninfo) as blocker, unit:
        record(unit, "test")
        blocker.execute("SELECT FROM exactly_once.ledger WHERE group_id = %s FOR UPDATE", (scene.topic,))
        threading.Timer(LIMIT_SECONDS + 1, blocker.rollback).start()
    assert scene.applied() == [0]
    assert consumer.counters.redelivered == 0


@pytest.mark.timeout(90)  # where each end of a session is trouble it never idles
def test_a_session_that_is_ended_for_idling_is_opened_anew_without_a_word(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The looks at rows and at Kafka's offsets come after longer pauses than the role allows."""
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.7)
    monkeypatch.setattr(maintenance, "COMPARE_SECONDS", 0.4)
    consumer = scene.consumer(conninfo=make_conninfo(scene.proxy.conninfo, options="-c idle_session_timeout=100ms"))

    def wait_for_the_end() -> None:
        backend = f"SELECT FROM pg_stat_activity WHERE pid = {backend_of(consumer)}"
        until(lambda: not scene.query(backend), 30, "the end of the session")

    units = iter(consumer)
    apply(next(units))
    unit = next(units)
    wait_for_the_end()
    apply(unit)
    assert consumer.run(lambda unit: record(unit, "test"), idle_seconds=2.0)
    wait_for_the_end()
    consumer.close()
    assert scene.ledger("owner_token") == [None]
    assert consumer.counters.redelivered == 0
    assert "waiting" not in actions(caplog)
    scene.assert_exact()


def test_looks_for_a_frozen_owner_go_on_in_another_session(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    connects: list[Connection] = []

    def connect() -> Connection:
        connects.append(psycopg.connect(scene.conninfo, autocommit=True, options="-c idle_session_timeout=300ms"))
        return connects[-1]

    terminator = StaleBackendTerminator(connect, schema="exactly_once", group_id=scene.topic, instance=uuid4())
    with psycopg.connect(scene.conninfo) as waiting, terminator.acquiring(waiting.info.backend_pid, []):
        until(lambda: len(connects) >= 3, 30, "the third session")
    terminator.close()
    assert "watch_failed" not in actions(caplog)


def test_the_handlers_statements_keep_the_limit(scene: Scene) -> None:
    def slow(unit: Unit) -> None:
        unit.execute("SELECT pg_sleep(60)")

    unit = next(iter(scene.consumer(conninfo=limited(scene), max_messages=1)))
    with pytest.raises(UnitTooSlow, match="statement timeout"), unit:
        slow(unit)


@pytest.mark.parametrize("is_durable", [False, True])
def test_no_transaction_of_the_library_is_bound_by_the_role(scene: Scene, *, is_durable: bool) -> None:
    """Else one that waits for a frozen owner would be over before that is looked for."""
    session = Session(connector(limited(scene)), schema="exactly_once")
    with session.ledger_transaction(lock_timeout_seconds=4, is_durable=is_durable) as (connection, _):
        query = "SELECT name, setting FROM pg_settings WHERE name IN ('statement_timeout', 'transaction_timeout')"
        assert {setting for _, setting in connection.execute(query)} == {"0"}
    session.close()


@pytest.mark.parametrize("joins", [False, True])
def test_nulls_in_arrays_are_nulls_whatever_the_role_says(scene: Scene, *, joins: bool) -> None:
    """A leader epoch, the value of a header, what a handler has in a list: all go to the server in arrays."""
    legacy = make_conninfo(scene.proxy.conninfo, options="-c array_nulls=off")
    headers: list[tuple[str, str | bytes | None]] = [("empty", None), ("full", b"x")]
    producer = Producer({"bootstrap.servers": scene.bootstrap_servers})
    producer.produce(scene.topic, b"poison", partition=0, headers=headers)
    assert producer.flush(30) == 0
    values = scene.table("value text[]")

    def handler(unit: Unit) -> None:
        record(unit, "test")
        for message in unit.messages:
            if message.value() == b"poison":
                unit.dead_letter(message, "poison")
        unit.execute(text(f"INSERT INTO {values} VALUES (%s)"), (["a", None],))

    with psycopg.connect(legacy) as own:
        consumer = scene.consumer(conninfo=legacy, max_messages=100)
        for unit in consumer.units(until_end=True):
            unit._advances = tuple(replace(advance, leader_epoch=None) for advance in unit.advances)
            with unit.join(own) if joins else unit:
                handler(unit)
            own.commit()
    scene.assert_exact()
    assert scene.ledger("leader_epoch") == [None]
    assert set(map(str, scene.query(f"SELECT value FROM {values}"))) == {"(['a', None],)"}
    letters = "SELECT header_names, header_values FROM exactly_once.dead_letter WHERE group_id = %s"
    assert scene.query(letters) == [(["empty", "full"], [None, b"x"])]
