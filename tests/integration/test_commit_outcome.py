"""COMMIT that is cut, delayed, refused or not answered: its outcome is found out, and nothing is lost or doubled."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from exactly_once import (
    OutcomePending,
    Redelivered,
)
from exactly_once.consumer import commit
from exactly_once.ledger import stale_owners
from tests.integration.scene import Scene, apply, armed, interrupt, offsets
from tests.support import journal
from tests.support.waiting import until
from tests.support.worker import record

LOCK = 7101
"""The advisory lock that a COMMIT of these tests waits for."""


@contextlib.contextmanager
def meanwhile(action: Callable[[], object]) -> Iterator[None]:
    """Run ``action`` in another thread while the block runs; what it raises is raised at the end."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(action)
        try:
            yield
        finally:
            error = future.exception(60)
            if error is not None:
                raise error


@pytest.mark.fault("B1")
def test_a_commit_that_never_reached_the_server_is_redelivered(scene: Scene) -> None:
    consumer = scene.consumer()
    units = iter(consumer)
    unit = next(units)
    fault = scene.proxy.cut_before()
    with pytest.raises(Redelivered):
        apply(unit)
    fault.wait()
    assert consumer.counters.resolved_aborted == 1
    assert scene.applied() == []
    again = next(units)
    assert (offsets(again), again.attempt) == (offsets(unit), 2)
    apply(again)
    scene.drain(consumer)
    scene.assert_exact()


@pytest.mark.fault("B2")
def test_a_commit_whose_answer_was_lost_has_landed_and_nothing_is_raised(scene: Scene) -> None:
    consumer = scene.consumer()
    units = iter(consumer)
    unit = next(units)
    fault = scene.proxy.cut_after()
    apply(unit)
    assert fault.transaction_status == "I"
    assert consumer.counters.resolved_committed == 1
    assert offsets(next(units))[0] == offsets(unit)[-1] + 1
    consumer.close()
    scene.drain(scene.consumer())
    scene.assert_exact()


@pytest.mark.fault("B3")
def test_a_commit_that_arrives_late_is_refused_by_the_server(scene: Scene) -> None:
    """It was resolved as aborted by then; if the server took it, its effects would be there twice."""
    consumer = scene.consumer()
    unit = next(iter(consumer))
    fault = scene.proxy.hold(close_client=True)
    with pytest.raises(Redelivered), unit:
        record(unit, "test", counts=False)
    fault.wait()
    for later in consumer.units(until_end=True):
        with later:
            record(later, "test", counts=False)
    fault.release()
    fault.wait_answered()
    assert fault.transaction_status == "E"
    verdict = journal.check(scene.conninfo, scene.bootstrap_servers, scene.topic, counts=False)
    assert verdict.exact, str(verdict)


def test_a_commit_alone_that_arrives_late_finds_its_backend_ended(scene: Scene) -> None:
    """It had advanced, so its row is locked and the outcome cannot be known before that backend is gone."""
    consumer = scene.consumer()
    unit = next(iter(consumer))
    fault = scene.proxy.hold("^COMMIT$", close_client=True)
    with armed("advanced", lambda: None), pytest.raises(Redelivered):
        apply(unit)
    fault.wait()
    scene.drain(consumer)
    fault.release()
    scene.assert_exact()


def test_an_answer_that_is_late_is_waited_for(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    fault = scene.proxy.hold_answer()

    def see_that_it_landed() -> None:
        fault.wait()
        assert scene.applied() == offsets(unit)
        fault.release()

    with meanwhile(see_that_it_landed):
        apply(unit)
    assert consumer.counters.committed == 1
    scene.drain(consumer)
    scene.assert_exact()


def test_ctrl_c_while_the_answer_to_commit_is_late_keeps_what_landed(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    fault = scene.proxy.hold_answer()

    def press() -> None:
        fault.wait()
        interrupt()
        fault.release()

    with meanwhile(press), pytest.raises(KeyboardInterrupt):
        apply(unit)
    assert scene.applied() == offsets(unit)
    scene.drain(consumer)
    scene.assert_exact()


def test_ctrl_c_while_commit_is_on_its_way_doubles_nothing(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    fault = scene.proxy.hold(close_client=False)

    def press() -> None:
        fault.wait()
        interrupt()

    with meanwhile(press), pytest.raises(KeyboardInterrupt), unit:
        record(unit, "test", counts=False)
    fault.release()
    for later in consumer.units(until_end=True):
        with later:
            record(later, "test", counts=False)
    verdict = journal.check(scene.conninfo, scene.bootstrap_servers, scene.topic, counts=False)
    assert verdict.exact, str(verdict)


@pytest.mark.parametrize("at", ["ROLLBACK", "pg_xact_status"])
def test_ctrl_c_while_a_unit_is_undone_loses_nothing(scene: Scene, at: str) -> None:
    """The second Ctrl-C of an impatient user: the unit is neither committed nor given back yet."""
    consumer = scene.consumer()
    unit = next(iter(consumer))

    def press() -> None:
        fault.wait()
        interrupt()
        fault.release()

    thread = threading.Thread(target=press)
    with pytest.raises(KeyboardInterrupt), unit:
        record(unit, "test")
        fault = scene.proxy.hold_answer(at)
        thread.start()
        raise ValueError("undo me")
    thread.join()
    scene.drain(consumer)
    scene.assert_exact()


class Switch:
    """A way to the database that can be shut: what is open stays, nothing new is let through."""

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo
        self.is_shut = False

    def __call__(self) -> psycopg.Connection:
        if self.is_shut:
            raise psycopg.OperationalError("the switch is shut")
        return psycopg.connect(self.conninfo)


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "did not land"])
def test_an_outcome_that_cannot_be_asked_is_pending_and_the_next_iteration_resolves_it(
    scene: Scene, *, landed: bool
) -> None:
    switch = Switch(scene.proxy.conninfo)
    consumer = scene.consumer(connect=switch)
    units = iter(consumer)
    unit = next(units)
    fault = scene.proxy.cut_after() if landed else scene.proxy.cut_before()
    with pytest.raises(OutcomePending), unit:
        record(unit, "test")
        switch.is_shut = True
    fault.wait()
    assert scene.applied() == (offsets(unit) if landed else [])
    alarm = threading.Timer(1.0, setattr, (switch, "is_shut", False))
    alarm.start()
    following = next(units)
    assert offsets(following)[0] == (offsets(unit)[-1] + 1 if landed else 0)
    assert following.attempt == (1 if landed else 2)
    alarm.join()
    apply(following)
    scene.drain(consumer)
    scene.assert_exact()


def test_a_consumer_closed_with_an_outcome_pending_keeps_its_row_and_the_next_one_is_exact(scene: Scene) -> None:
    switch = Switch(scene.proxy.conninfo)
    consumer = scene.consumer(connect=switch)
    unit = next(iter(consumer))
    scene.proxy.hold(close_client=True)
    with pytest.raises(OutcomePending), unit:
        record(unit, "test")
        switch.is_shut = True
    consumer.close()
    scene.drain(scene.consumer())
    scene.assert_exact()


@pytest.fixture
def slow_commit(scene: Scene, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection]:
    """Every COMMIT of an effect in this test's own table waits while this connection holds the lock."""
    table = scene.table("id int")
    scene.query(f"""
        CREATE FUNCTION {table}() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock({LOCK}); RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION {table}()""")
    with psycopg.connect(scene.conninfo, autocommit=True) as connection:
        connection.execute(f"SELECT pg_advisory_lock({LOCK})")
        yield connection


def _waiting_for_commit(scene: Scene) -> int:
    found = scene.query(f"SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = {LOCK} AND NOT granted")
    return int(found[0][0]) if found else 0


def _waiting_to_resolve(scene: Scene) -> bool:
    """Whether the ledger's row is waited for."""
    return bool(
        scene.query("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%lock_row%%'")
    )


def test_a_commit_that_is_slow_inside_the_old_backend_is_waited_for(
    scene: Scene, slow_commit: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither may the resolve give up, nor the watcher end what it waits for, before the test has looked at it.
    monkeypatch.setattr(commit, "LOCK_SECONDS", 60.0)
    monkeypatch.setattr(stale_owners, "FROZEN_AFTER_SECONDS", 600.0)
    consumer = scene.consumer()
    unit = next(iter(consumer))

    def cut_then_let_go() -> None:
        until(lambda: _waiting_for_commit(scene), 20, "COMMIT to wait")
        scene.proxy.cut_all()
        until(lambda: _waiting_to_resolve(scene), 20, "the resolve to wait")
        slow_commit.execute(f"SELECT pg_advisory_unlock({LOCK})")

    with meanwhile(cut_then_let_go), unit:
        record(unit, "test")
        unit.execute(f'INSERT INTO "{scene.topic}_own" VALUES (1)'.encode())
    assert consumer.counters.resolved_committed == 1
    assert scene.applied() == offsets(unit)
    scene.drain(consumer)
    scene.assert_exact()


def test_a_commit_that_stands_still_inside_the_old_backend_is_ended(
    scene: Scene, slow_commit: psycopg.Connection
) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))

    def cut() -> None:
        until(lambda: _waiting_for_commit(scene), 20, "COMMIT to wait")
        scene.proxy.cut_all()

    with meanwhile(cut), pytest.raises(Redelivered), unit:
        record(unit, "test")
        unit.execute(f'INSERT INTO "{scene.topic}_own" VALUES (1)'.encode())
    scene.drain(consumer)
    slow_commit.execute(f"SELECT pg_advisory_unlock({LOCK})")
    scene.assert_exact()


def test_a_backend_ended_inside_commit_is_nobodys_fault(scene: Scene, slow_commit: psycopg.Connection) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))

    def end() -> None:
        pid = until(lambda: _waiting_for_commit(scene), 20, "COMMIT to wait")
        scene.query(f"SELECT pg_terminate_backend({pid})")

    with meanwhile(end), pytest.raises(Redelivered) as raised, unit:
        record(unit, "test")
        unit.execute(f'INSERT INTO "{scene.topic}_own" VALUES (1)'.encode())
    assert isinstance(raised.value.__cause__, psycopg.OperationalError)
    scene.drain(consumer)
    scene.assert_exact()


@pytest.mark.fault("B8")
def test_a_deferred_constraint_that_fails_at_commit_is_the_handlers_error(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """And in no doubt, as Postgres has answered."""
    table = scene.table("id int UNIQUE DEFERRABLE INITIALLY DEFERRED")
    consumer = scene.consumer()
    units = iter(consumer)
    unit = next(units)
    with pytest.raises(psycopg.errors.UniqueViolation) as raised, unit:
        record(unit, "test")
        unit.execute(f"INSERT INTO {table} VALUES (1), (1)".encode())
    assert not isinstance(raised.value, Redelivered)
    assert "in doubt" not in caplog.text
    assert consumer.counters.resolved_aborted == 0
    assert scene.applied() == []
    again = next(units)
    assert (offsets(again), again.attempt) == (offsets(unit), 2)
    apply(again)
    scene.drain(consumer)
    scene.assert_exact()


@pytest.mark.parametrize(
    ("sqlstate", "expected"),
    [
        ("40001", Redelivered),
        ("40003", Redelivered),
        ("40P01", Redelivered),
        ("55P03", Redelivered),
        ("08006", Redelivered),
        ("53100", Redelivered),
        ("57P01", Redelivered),
        ("57014", Redelivered),
        ("25006", Redelivered),
        ("P0001", psycopg.errors.RaiseException),
        ("23514", psycopg.errors.CheckViolation),
        ("42501", psycopg.errors.InsufficientPrivilege),
    ],
)
@pytest.mark.parametrize("deferred", [True, False], ids=["at COMMIT", "in the handler"])
def test_every_class_of_error_says_whose_fault_it_is(
    scene: Scene, sqlstate: str, expected: type[Exception], *, deferred: bool
) -> None:
    """The server raises them by itself in a trigger, so that the connection stays."""
    table = scene.table("id int")
    scene.query(f"""
        CREATE FUNCTION {table}() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE 'as asked' USING ERRCODE = '{sqlstate}'; END $$;
        CREATE CONSTRAINT TRIGGER t AFTER INSERT ON {table} DEFERRABLE INITIALLY
        {"DEFERRED" if deferred else "IMMEDIATE"} FOR EACH ROW EXECUTE FUNCTION {table}()""")
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(expected) as raised, unit:
        record(unit, "test")
        unit.execute(f"INSERT INTO {table} VALUES (1)".encode())
    assert isinstance(raised.value, Redelivered) == (expected is Redelivered)
    assert scene.applied() == []
    scene.drain(consumer)
    scene.assert_exact()
