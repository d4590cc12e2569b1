"""Handlers that end, break or hold the transaction that is not theirs: found out, told, and never doubled."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from uuid import uuid4

import psycopg
import pytest

from exactly_once import (
    HandlerCommitted,
    HandlerError,
    OutcomeLost,
    OutcomePending,
    PartitionHalted,
    Redelivered,
    TransactionAborted,
    TransactionBusy,
    TransactionEnded,
    Unit,
)
from exactly_once.embedded import Postgres
from exactly_once.schema import migrate
from exactly_once.sql import query
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, apply, interrupt, offsets
from tests.support import journal
from tests.support.waiting import until
from tests.support.worker import record

Break = Callable[[Unit, Scene], object]


def _commit_and_raise(unit: Unit, _: Scene) -> None:
    unit.execute("COMMIT")
    raise ValueError("after the fact")


def _commit_and_lose_the_connection(unit: Unit, scene: Scene) -> None:
    unit.execute("COMMIT")
    _terminate(scene, unit)
    unit.execute("SELECT 1")


def _commit_and_lose_the_connection_unnoticed(unit: Unit, scene: Scene) -> None:
    unit.execute("COMMIT")
    _terminate(scene, unit)


def _commit_and_begin_anew(unit: Unit, _: Scene) -> None:
    unit.execute("COMMIT")
    unit.execute("BEGIN")
    record(unit, "in a transaction of the handler's own")


def _leave_the_connections_block(unit: Unit, _: Scene) -> None:
    with unit.connection:
        pass


COMMITS: dict[str, Break] = {
    "COMMIT": lambda unit, _: unit.execute("COMMIT"),
    "END": lambda unit, _: unit.execute("END"),
    "COMMIT AND CHAIN": lambda unit, _: unit.execute("COMMIT AND CHAIN"),
    "COMMIT in one of several statements": lambda unit, _: unit.execute("SELECT 1; COMMIT; SELECT 2"),
    "conn.commit()": lambda unit, _: unit.connection.commit(),
    "with conn": _leave_the_connections_block,
    "COMMIT and raise": _commit_and_raise,
    "COMMIT and lose the connection": _commit_and_lose_the_connection,
    "COMMIT and lose the connection unnoticed": _commit_and_lose_the_connection_unnoticed,
    "COMMIT, BEGIN and go on": _commit_and_begin_anew,
}


@pytest.mark.fault("B5")
@pytest.mark.parametrize("way", COMMITS)
def test_a_handler_that_commits_halts_its_partition_and_is_never_redelivered(scene: Scene, way: str) -> None:
    consumer = scene.consumer()
    units = iter(consumer)
    unit = next(units)
    with pytest.raises(HandlerCommitted), unit:
        record(unit, "test")
        COMMITS[way](unit, scene)
    assert scene.applied() == offsets(unit)
    assert scene.ledger("next_offset") == [0]
    (halted,) = scene.ledger("halted")
    assert "the handler committed" in halted
    with pytest.raises(HandlerCommitted):
        next(units)
    consumer.close()
    with scene.consumer() as another, pytest.raises(PartitionHalted):
        scene.drain(another)
    assert scene.applied() == offsets(unit)
    _reset(scene, to=offsets(unit)[-1] + 1)
    scene.drain(scene.consumer())
    scene.assert_exact()


def test_a_commit_of_the_handler_is_told_although_ctrl_c_came_while_it_was_found_out(scene: Scene) -> None:
    consumer = scene.consumer()
    units = iter(consumer)
    unit = next(units)

    def press() -> None:
        fault.wait()
        interrupt()
        fault.release()

    thread = threading.Thread(target=press)
    with pytest.raises(KeyboardInterrupt), unit:
        record(unit, "test")
        unit.execute("COMMIT")
        fault = scene.proxy.hold_answer("pg_xact_status")
        thread.start()
    thread.join()
    with pytest.raises(HandlerCommitted):
        next(units)
    assert "the handler committed" in scene.ledger("halted")[0]
    assert scene.applied() == offsets(unit)


def test_a_transaction_that_the_handler_prepared_is_not_redelivered_after_a_restart(make_scene: MakeScene) -> None:
    with Postgres(settings={"max_prepared_transactions": "5"}) as server:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            migrate(connection)
        journal.create(server.conninfo)
        scene = make_scene(20)
        with scene.consumer(conninfo=server.conninfo) as consumer:
            unit = next(iter(consumer))
            with pytest.raises(OutcomeLost), unit:
                record(unit, "test", counts=False)
                unit.execute("PREPARE TRANSACTION 'later'")
        another = scene.consumer(conninfo=server.conninfo, stop_on_bad_partition=True)
        with another, pytest.raises(PartitionHalted):
            next(iter(another))


def _raise_after_rollback(unit: Unit, _: Scene) -> None:
    unit.execute("ROLLBACK")
    raise ValueError("after the fact")


def _roll_back_and_begin_anew(unit: Unit, _: Scene) -> None:
    unit.execute("ROLLBACK")
    unit.execute("BEGIN")
    record(unit, "in a transaction of the handler's own")


def _roll_back_and_go_on(unit: Unit, _: Scene) -> None:
    unit.connection.rollback()
    record(unit, "in no transaction")


def _roll_back_go_on_and_raise(unit: Unit, _: Scene) -> None:
    unit.connection.rollback()
    record(unit, "in no transaction")
    raise ValueError("after the fact")


def _mend_an_error_by_rollback(unit: Unit, _: Scene) -> None:
    try:
        unit.execute("SELECT 1 / 0")
    except psycopg.Error:
        unit.connection.rollback()
        record(unit, "in no transaction")


ROLLBACKS: dict[str, Break] = {
    "ROLLBACK": lambda unit, _: unit.execute("ROLLBACK"),
    "conn.rollback()": lambda unit, _: unit.connection.rollback(),
    "ROLLBACK AND CHAIN": lambda unit, _: unit.execute("ROLLBACK AND CHAIN"),
    "ROLLBACK and raise": _raise_after_rollback,
    "ROLLBACK, BEGIN and go on": _roll_back_and_begin_anew,
    "ROLLBACK and go on": _roll_back_and_go_on,
    "ROLLBACK, go on and raise": _roll_back_go_on_and_raise,
    "an error mended by ROLLBACK": _mend_an_error_by_rollback,
}


@pytest.mark.parametrize("way", ROLLBACKS)
def test_a_handler_that_rolls_back_stores_nothing_and_is_not_said_to_have_committed(scene: Scene, way: str) -> None:
    consumer = scene.consumer()
    expected = ValueError if "raise" in way else TransactionEnded
    unit = next(iter(consumer))
    with pytest.raises(expected), unit:
        record(unit, "test")
        ROLLBACKS[way](unit, scene)
    assert scene.applied() == []
    scene.drain(consumer)
    scene.assert_exact()


@pytest.mark.fault("B4")
def test_a_swallowed_sql_error_is_told(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(TransactionAborted), unit:
        record(unit, "test")
        with contextlib.suppress(psycopg.Error):
            unit.execute("SELECT 1 / 0")
    assert scene.applied() == []
    scene.drain(consumer)
    scene.assert_exact()


def test_a_swallowed_loss_of_the_connection_is_nobodys_fault(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(Redelivered), unit:
        record(unit, "test")
        _terminate(scene, unit)
        with contextlib.suppress(psycopg.Error):
            unit.execute("SELECT 1")
    assert scene.applied() == []
    scene.drain(consumer)
    scene.assert_exact()


def test_a_handler_that_renames_its_session_loses_no_more_than_its_wire(scene: Scene) -> None:
    """As tracing does it. The old backend is found by its transaction, and ended while its statement runs."""
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(Redelivered) as raised, unit:
        record(unit, "test")
        unit.execute("SET LOCAL application_name = 'payments'")
        thread = threading.Thread(target=_cut_in_statement, args=[scene])
        thread.start()
        unit.execute("SELECT pg_sleep(60)")
    thread.join()
    assert not isinstance(raised.value, OutcomePending)
    scene.drain(consumer)
    scene.assert_exact()
    assert scene.ledger("halted") == [None]


def _cut_in_statement(scene: Scene) -> None:
    running = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'payments' AND wait_event = 'PgSleep'"
    until(lambda: scene.query(running), 20, "the statement to run")
    scene.proxy.cut_all()


def test_a_handler_that_closes_the_connection_loses_only_its_own_work(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(Redelivered), unit:
        record(unit, "test")
        unit.connection.close()
    assert scene.applied() == []
    scene.drain(consumer)
    scene.assert_exact()


@pytest.mark.parametrize(
    "change",
    [
        lambda unit: unit.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"),
        lambda unit: setattr(unit.connection, "isolation_level", psycopg.IsolationLevel.SERIALIZABLE),
        lambda unit: setattr(unit.connection, "autocommit", False),
    ],
    ids=["SET TRANSACTION", "isolation_level", "autocommit"],
)
def test_the_isolation_cannot_be_changed_inside_a_unit(scene: Scene, change: Callable[[Unit], object]) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(psycopg.Error) as raised, unit:
        record(unit, "test")
        change(unit)
    assert not isinstance(raised.value, Redelivered)
    assert scene.applied() == []
    scene.drain(consumer)
    scene.assert_exact()


def _leave_a_copy_open(unit: Unit) -> object:
    copy = unit.connection.cursor().copy("COPY journal.entries FROM STDIN")
    copy.__enter__()
    return copy


def _leave_a_stream_open(unit: Unit) -> object:
    rows = unit.connection.cursor().stream("SELECT generate_series(1, 100000)")
    next(rows)
    return rows


def _leave_a_pipeline_open(unit: Unit) -> object:
    pipeline = unit.connection.pipeline()
    pipeline.__enter__()
    unit.execute("SELECT 1")
    return pipeline


@pytest.mark.parametrize("leave_open", [_leave_a_copy_open, _leave_a_stream_open, _leave_a_pipeline_open])
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_what_a_handler_leaves_open_is_told_and_stops_nothing(
    scene: Scene, leave_open: Callable[[Unit], object], *, fails: bool
) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(ValueError if fails else TransactionBusy), unit:
        record(unit, "test")
        left = leave_open(unit)
        if fails:
            raise ValueError("after the fact")
    assert scene.applied() == []
    scene.drain(consumer)
    scene.assert_exact()
    del left


def test_a_savepoint_left_open_commits_with_the_unit(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with unit:
        unit.execute("SAVEPOINT mine")
        record(unit, "test")
    scene.drain(consumer)
    scene.assert_exact()


def test_a_commit_of_the_handler_behind_a_fence_is_told_all_the_same(scene: Scene) -> None:
    """Somebody else owns the partition by then, so nothing can be halted; the error must still name it."""
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(HandlerCommitted), unit:
        record(unit, "test")
        scene.query(f"UPDATE exactly_once.ledger SET owner_token = '{uuid4()}' WHERE group_id = %s RETURNING 1")
        unit.execute("COMMIT")


def test_every_broken_contract_is_a_handler_error() -> None:
    for error in (TransactionAborted, TransactionEnded, TransactionBusy, HandlerCommitted):
        assert issubclass(error, HandlerError)
        assert not issubclass(error, Redelivered)


def test_after_a_broken_contract_the_consumer_goes_on(scene: Scene) -> None:
    """One consumer through every way to break a unit that is not fatal."""
    consumer = scene.consumer(max_messages=2)
    for act in ROLLBACKS.values():
        unit = next(iter(consumer))
        with contextlib.suppress(TransactionEnded, ValueError), unit:
            act(unit, scene)
        apply(next(iter(consumer)))
    scene.drain(consumer)
    scene.assert_exact()


def _terminate(scene: Scene, unit: Unit) -> None:
    pid = unit.connection.info.backend_pid
    scene.query(f"SELECT pg_terminate_backend({pid})")
    until(lambda: scene.query(f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid}") == [], 10, "the backend's end")


def _reset(scene: Scene, *, to: int) -> None:
    """What `exactly-once reset` runs."""
    with psycopg.connect(scene.conninfo, autocommit=True) as connection:
        connection.execute(
            query("reset", "exactly_once"),
            {
                "group_id": scene.topic,
                "topics": [scene.topic],
                "partitions": [0],
                "next_offsets": [to],
                "reason": "the effects are there",
            },
        )
