"""Handlers that end, break or hold the transaction that is not theirs: found out, told, and never doubled."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from inspect import unwrap
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from exactly_once import (
    HandlerCommitted,
    HandlerError,
    OutcomePending,
    PartitionHalted,
    Redelivered,
    TransactionAborted,
    TransactionBusy,
    TransactionEnded,
    TransactionNotYours,
    TransactionOutcomeUnknown,
    Unit,
)
from exactly_once.consumer import commit
from exactly_once.embedded import Postgres
from exactly_once.ledger.migrate import migrate
from exactly_once.ledger.rows import Ledger
from exactly_once.ledger.sql import query
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


COMMITS: dict[str, Break] = {
    "COMMIT": lambda unit, _: unit.execute("COMMIT"),
    "END": lambda unit, _: unit.execute("END"),
    "COMMIT AND CHAIN": lambda unit, _: unit.execute("COMMIT AND CHAIN"),
    "COMMIT in one of several statements": lambda unit, _: unit.execute("SELECT 1; COMMIT; SELECT 2"),
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
            with pytest.raises(TransactionOutcomeUnknown, match="was prepared, and stays with its locks"), unit:
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
    unit.execute("ROLLBACK")
    record(unit, "in no transaction")


def _roll_back_go_on_and_raise(unit: Unit, _: Scene) -> None:
    unit.execute("ROLLBACK")
    record(unit, "in no transaction")
    raise ValueError("after the fact")


def _mend_an_error_by_rollback(unit: Unit, _: Scene) -> None:
    try:
        unit.execute("SELECT 1 / 0")
    except psycopg.Error:
        unit.execute("ROLLBACK")
        record(unit, "in no transaction")


ROLLBACKS: dict[str, Break] = {
    "ROLLBACK": lambda unit, _: unit.execute("ROLLBACK"),
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


def _leave_the_connections_block(unit: Unit, _: Scene) -> None:
    with unit.connection:
        record(unit, "in the connection's block")


def _fail_in_the_connections_block(unit: Unit, _: Scene) -> None:
    with unit.connection:
        raise ValueError("of the handler")


ENDS: dict[str, Break] = {
    "commit": lambda unit, _: unit.connection.commit(),
    "rollback": lambda unit, _: unit.connection.rollback(),
    "close": lambda unit, _: unit.connection.close(),
    "autocommit": lambda unit, _: setattr(unit.connection, "autocommit", True),
    "with connection": _leave_the_connections_block,
    "with connection, and raise": _fail_in_the_connections_block,
}


@pytest.mark.parametrize("way", ENDS)
def test_what_would_end_the_transaction_is_refused_at_once(scene: Scene, way: str) -> None:
    """On the connection itself, which frameworks reach by references of their own; afterwards it is as it was."""
    made: list[psycopg.Connection[Any]] = []

    def connect() -> psycopg.Connection[Any]:
        made.append(psycopg.connect(scene.conninfo))
        return made[-1]

    consumer = scene.consumer(connect=connect)
    units = iter(consumer)
    apply(next(units))  # behind a first unit it is known that no thread of the handler has the connection: it is kept
    with pytest.raises(TransactionNotYours, match="of an open unit"), next(units) as unit:
        record(unit, "test")
        ENDS[way](unit, scene)
    assert scene.applied() == list(range(10))
    scene.drain(consumer)
    scene.assert_exact()
    assert scene.ledger("halted") == [None]
    for connection in made:
        connection.commit()
        connection.close()
        assert connection.closed
    consumer.close()


def test_run_stops_at_a_handler_that_commits_and_nothing_is_doubled(scene: Scene) -> None:
    def commit(unit: Unit) -> None:
        record(unit, "test")
        unit.connection.commit()

    for _ in range(2):
        with scene.consumer() as consumer, pytest.raises(TransactionNotYours):
            consumer.run(commit, on_poison="dead-letter")
    assert scene.applied() == []
    scene.drain(scene.consumer())
    scene.assert_exact()


@pytest.mark.parametrize(
    "change",
    [
        lambda unit: unit.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"),
        lambda unit: setattr(unit.connection, "isolation_level", psycopg.IsolationLevel.SERIALIZABLE),
    ],
    ids=["SET TRANSACTION", "isolation_level"],
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


def _leave_a_block_open(unit: Unit) -> object:
    block = _in_a_block(unit)
    next(block)
    return block


def _in_a_block(unit: Unit) -> Iterator[None]:
    with unit.connection.transaction():
        record(unit, "in a block")
        yield


LEFT = [_leave_a_copy_open, _leave_a_stream_open, _leave_a_pipeline_open, _leave_a_block_open]


# psycopg before 3.3 tells Python so when its copy is collected.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <generator object Cursor.copy")
@pytest.mark.parametrize("leave_open", LEFT)
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


@pytest.mark.parametrize("way", ["emptied", "replaced"])
def test_a_handler_cannot_change_how_far_its_unit_moves(scene: Scene, way: str) -> None:
    """Without the advance its effects would be durable, and come again."""
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(AttributeError), unit:
        record(unit, "test")
        if way == "emptied":
            unit.advances.clear()  # type: ignore[attr-defined]
        else:
            unit.advances = ()  # type: ignore[misc]
    assert scene.applied() == []
    scene.drain(consumer)
    scene.assert_exact()


def _collect(kept: list[Iterator[None]]) -> None:
    kept.clear()
    gc.collect()


LATE_EXITS: dict[str, Callable[[list[Iterator[None]]], object]] = {
    "closed": lambda kept: [block.close() for block in kept],  # type: ignore[attr-defined]
    "collected": _collect,
    "resumed": lambda kept: [next(block, None) for block in kept],
    "closed by a thread": lambda kept: _in_thread(lambda: LATE_EXITS["closed"](kept)),
}


def _in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", LATE_EXITS)
@pytest.mark.parametrize("end", ["returns", "raises", "rolls back"])
def test_a_block_of_one_unit_that_ends_in_a_later_one_undoes_nothing_of_that(scene: Scene, way: str, end: str) -> None:
    """Both have a savepoint of the same name: the late end would roll the later unit back to its own."""
    consumer = scene.consumer()
    kept: list[Iterator[None]] = []
    units = consumer.units(until_end=True)
    with pytest.raises(ValueError if end == "raises" else TransactionBusy), next(units) as unit:
        kept.append(_in_a_block(unit))
        next(kept[0])
        if end == "raises":
            raise ValueError("after the fact")
        if end == "rolls back":
            unit.execute("ROLLBACK")
    for unit in units:
        with unit, unit.connection.transaction():
            record(unit, "test")
            LATE_EXITS[way](kept)
    scene.assert_exact()


@pytest.mark.parametrize("is_over", [False, True], ids=["open", "rolled back"])
def test_a_block_that_is_opened_between_units_ends_nothing(scene: Scene, *, is_over: bool) -> None:
    consumer = scene.consumer()
    units = consumer.units(until_end=True)
    with next(units) as unit:
        record(unit, "test")
        connection = unit.connection
    block = connection.transaction()
    block.__enter__()
    if is_over:
        connection.execute("ROLLBACK")
    with next(units) as unit:
        record(unit, "test")
        block.__exit__(None, None, None)
    scene.drain(consumer)
    scene.assert_exact()
    assert scene.ledger("halted") == [None]


@pytest.mark.parametrize("way", ["left open", "closed too early"])
def test_a_block_that_crosses_the_edge_of_a_joined_one_is_refused(scene: Scene, way: str) -> None:
    """Its end could undo the advance and keep effects, or the other way round."""
    consumer = scene.consumer()
    units = iter(consumer)
    unit = next(units)
    with contextlib.closing(psycopg.connect(scene.conninfo)) as connection:
        connection.execute("SELECT 1")
        block = connection.transaction()
        if way == "closed too early":
            block.__enter__()
        with pytest.raises(TransactionBusy), unit.join(connection):
            record(unit, "test")
            if way == "left open":
                block.__enter__()
            else:
                block.__exit__(None, None, None)
    scene.drain(consumer)
    scene.assert_exact()


def test_a_savepoint_left_open_commits_with_the_unit(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with unit:
        unit.execute("SAVEPOINT mine")
        record(unit, "test")
    scene.drain(consumer)
    scene.assert_exact()


def _take_over(scene: Scene, *, applied: int = 0, partition: int = 0) -> None:
    """What another member's acquisition writes, and its units after that."""
    scene.query(
        f"UPDATE exactly_once.ledger SET owner_token = '{uuid4()}', owner_epoch = owner_epoch + 1, "
        f"next_offset = next_offset + {applied} WHERE group_id = %s AND partition = {partition} RETURNING 1"
    )


def test_a_commit_of_the_handler_behind_a_fence_halts_whoever_owns_the_partition(scene: Scene) -> None:
    """The new owner has not applied these messages yet, and must not: their effects are durable."""
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(HandlerCommitted, match=rf"Halted until an operator resets them: {scene.topic}\[0\]"), unit:
        record(unit, "test")
        _take_over(scene)
        unit.execute("COMMIT")
    assert "the handler committed" in scene.ledger("halted")[0]
    assert scene.ledger("owner_token") == [None], "it is fenced, too"
    assert scene.ledger("owner_epoch") == [3]
    consumer.close()
    with scene.consumer() as another, pytest.raises(PartitionHalted):
        scene.drain(another)
    assert scene.applied() == offsets(unit)


def test_a_late_halt_leaves_alone_what_has_moved_on_and_says_so(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """The new owner has applied these messages, too: stopping it would mend nothing."""
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(HandlerCommitted, match=r"NOT halted: .* went on from 0 to 5 under another owner"), unit:
        record(unit, "test")
        _take_over(scene, applied=5)
        before = scene.query("SELECT * FROM exactly_once.ledger WHERE group_id = %s")
        unit.execute("COMMIT")
    assert scene.query("SELECT * FROM exactly_once.ledger WHERE group_id = %s") == before
    (told,) = [each for each in caplog.records if each.levelname == "CRITICAL"]
    assert "NOT halted" in told.getMessage()
    with pytest.raises(HandlerCommitted, match="NOT halted"):
        next(iter(consumer))


def test_of_two_partitions_each_is_halted_or_named(make_scene: MakeScene) -> None:
    scene = make_scene(40, partitions=2)
    # The unit waits until it has all 40: of both partitions, whichever is fetched first.
    consumer = scene.consumer(max_messages=40, linger_seconds=60)
    unit = next(iter(consumer))
    assert len(unit.advances) == 2
    halted, left = rf"{scene.topic}\[1\]", rf"{scene.topic}\[0\]"
    expected = rf"resets them: {halted}\. NOT halted: {left}, {left} went on from 0 to 7"
    with pytest.raises(HandlerCommitted, match=expected), unit:
        record(unit, "test")
        _take_over(scene, applied=7, partition=0)
        _take_over(scene, partition=1)
        unit.execute("COMMIT")
    first, second = scene.ledger("halted")
    assert first is None
    assert "the handler committed" in second


def test_a_halt_that_does_not_reach_the_database_is_not_claimed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(commit, "_HALT_SECONDS", 0.0)
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with psycopg.connect(scene.conninfo) as other:
        monkeypatch.setattr(unwrap(Ledger._changing), "__kwdefaults__", {"lock_seconds": 0.1, "is_durable": True})
        expected = r"NOT halted: .*could not be halted in the ledger: .*lock"
        with pytest.raises(HandlerCommitted, match=expected) as raised, unit:
            other.execute("SELECT FROM exactly_once.ledger WHERE group_id = %s FOR UPDATE", (scene.topic,))
            unit.execute("COMMIT")
    assert "Halted until" not in str(raised.value)
    assert any(each.levelname == "CRITICAL" for each in caplog.records)
    assert scene.ledger("halted") == [None]


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
