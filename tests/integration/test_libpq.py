"""What goes to the server without a cursor behaves as what goes with one: errors, notices, interruption."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from unittest import mock

import psycopg
import pytest

from exactly_once.ledger.libpq import send, texts
from exactly_once.ledger.session import Connection, is_lost
from tests.integration.scene import Scene, apply, offsets
from tests.support.waiting import until

SLOW = b"SELECT pg_sleep(60)"


@pytest.fixture
def connection(conninfo: str) -> Iterator[Connection]:
    with closing(psycopg.connect(conninfo, autocommit=True)) as connection:
        yield connection


@pytest.fixture
def busy(connection: Connection) -> str:
    """The query that tells, past the connection, that it is inside of SLOW."""
    return f"SELECT 1 FROM pg_stat_activity WHERE pid = {connection.info.backend_pid} AND wait_event = 'PgSleep'"


def test_a_unit_costs_no_cursor_of_ours(scene: Scene) -> None:
    units = iter(scene.consumer())
    unit = next(units)
    with mock.patch("psycopg.Cursor._execute_gen", side_effect=AssertionError("a cursor executes")), unit:
        pass
    assert offsets(next(units))[0] == offsets(unit)[-1] + 1


def test_every_statement_has_its_result(connection: Connection) -> None:
    results = send(connection, b"SELECT 1, NULL; SELECT 'two'; SET LOCAL work_mem = '1MB'")
    assert [texts(result) for result in results[:2]] == [["1", ""], ["two"]]
    assert results[2].command_status == b"SET"


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1", "SQL_ASCII"])
def test_an_error_is_psycopgs_own_in_every_encoding(connection: Connection, encoding: str) -> None:
    connection.execute(f"SET client_encoding = {encoding}".encode())
    raising = "DO $$ BEGIN RAISE 'für' USING ERRCODE = 'EO001', DETAIL = 'größer'; END $$"
    statement = raising.encode("latin1" if encoding == "LATIN1" else "utf-8")
    with pytest.raises(psycopg.Error) as mine:
        send(connection, statement)
    with pytest.raises(psycopg.Error) as theirs:
        connection.execute(statement)
    assert (type(mine.value), str(mine.value)) == (type(theirs.value), str(theirs.value))
    assert (mine.value.sqlstate, mine.value.diag.message_detail) == ("EO001", theirs.value.diag.message_detail)


def test_what_stands_behind_an_error_is_not_executed(connection: Connection) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        send(connection, b"BEGIN; SELECT 1 / 0; COMMIT")
    assert connection.info.transaction_status is psycopg.pq.TransactionStatus.INERROR


def test_notices_and_notifications_are_handed_on(connection: Connection) -> None:
    heard: list[object] = []
    connection.add_notice_handler(lambda diagnostic: heard.append(diagnostic.message_primary))
    connection.add_notify_handler(lambda notify: heard.append(notify.payload))
    send(connection, b"LISTEN a_channel; DO $$ BEGIN RAISE NOTICE 'noticed'; END $$; NOTIFY a_channel, 'notified'")
    assert heard == ["noticed", "notified"]


@pytest.mark.parametrize("statement", [b"COPY (SELECT 1) TO STDOUT", b"CREATE TEMP TABLE c (i int); COPY c FROM STDIN"])
def test_a_copy_is_an_error_here(connection: Connection, statement: bytes) -> None:
    with pytest.raises(psycopg.InternalError, match="COPY"):
        send(connection, statement)


def test_a_connection_that_is_closed_or_ended_says_so(connection: Connection, conninfo: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
    with pytest.raises(psycopg.OperationalError):
        send(connection, b"SELECT 1")
    assert is_lost(connection)
    connection.close()
    assert is_lost(connection)
    with pytest.raises(psycopg.OperationalError):
        send(connection, b"SELECT 1")


def test_ctrl_c_cancels_it_and_the_connection_stays(connection: Connection, scene: Scene, busy: str) -> None:
    def press() -> None:
        until(lambda: scene.query(busy), 20, "the statement to run")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        send(connection, SLOW)
    thread.join()
    assert texts(send(connection, b"SELECT 1")[0]) == ["1"]


def test_a_signal_handler_that_raises_ends_it(connection: Connection, scene: Scene, busy: str) -> None:
    """As the alarm that bounds a unit after SIGTERM does."""

    def leave(*_: object) -> None:
        raise SystemExit(1)

    def press() -> None:
        until(lambda: scene.query(busy), 20, "the statement to run")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        began = time.monotonic()
        with pytest.raises(SystemExit):
            send(connection, SLOW)
        assert time.monotonic() - began < 55
    finally:
        signal.signal(signal.SIGTERM, before)
        thread.join()


def test_a_backend_that_is_ended_ends_it(connection: Connection, scene: Scene, busy: str) -> None:
    def end() -> None:
        until(lambda: scene.query(busy), 20, "the statement to run")
        scene.query(f"SELECT pg_terminate_backend({connection.info.backend_pid})")

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(psycopg.errors.AdminShutdown):
        send(connection, SLOW)
    thread.join()
    assert is_lost(connection)


def test_ctrl_c_while_begin_is_not_answered_loses_nothing(scene: Scene) -> None:
    consumer = scene.consumer()
    units = iter(consumer)
    unit = next(units)
    fault = scene.proxy.hold_answer("^BEGIN")

    def press() -> None:
        fault.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        fault.release()

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        apply(unit)
    thread.join()
    again = next(units)
    assert offsets(again) == offsets(unit)
    apply(again)
    scene.drain(consumer)
    scene.assert_exact()
