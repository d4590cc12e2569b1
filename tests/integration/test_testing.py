"""``exactly_once.testing``: a handler meets a real unit on its test's own connection, and nothing of it stays."""

# ruff: noqa: PT012 - a unit's block is where things go wrong
from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_NOT_AVAILABLE, Message

from exactly_once import (
    HandlerCommitted,
    TransactionAborted,
    TransactionBusy,
    TransactionEnded,
    TransactionNotYours,
    Unit,
    UnitNotFinished,
    UnitNotUsed,
)
from exactly_once.ledger.dead_letters import find
from exactly_once.testing import FAILPOINTS, crash_at, failing_at, message, unit
from tests.integration.scene import Scene, apply, text
from tests.support.worker import drain

Connection = psycopg.Connection[Any]


@pytest.fixture
def plain(postgres_conninfo: str, name: str) -> Iterator[str]:
    """A database that has never seen our schema, with a table `account`."""
    with psycopg.connect(postgres_conninfo, autocommit=True) as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    conninfo = psycopg.conninfo.make_conninfo(postgres_conninfo, dbname=name)
    with psycopg.connect(conninfo) as connection:
        connection.execute("CREATE TABLE account (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, balance int)")
        connection.execute("INSERT INTO account VALUES (1, 100)")
    yield conninfo
    with psycopg.connect(postgres_conninfo, autocommit=True) as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture(params=["transactions", "autocommit"])
def connection(plain: str, request: pytest.FixtureRequest) -> Iterator[Connection]:
    """A test's own connection, in both of psycopg's ways."""
    with psycopg.connect(plain, autocommit=request.param == "autocommit") as connection:
        yield connection


@pytest.fixture
def balances(plain: str) -> Iterator[Callable[[], list[Any]]]:
    """What others see of the table."""
    with psycopg.connect(plain, autocommit=True) as other:
        yield lambda: [row for (row,) in other.execute("SELECT balance FROM account ORDER BY id, balance")]


def pay(u: Unit) -> None:
    for each in u.messages:
        u.execute("UPDATE account SET balance = balance + %s WHERE id = 1", [int(each.value() or 0)])


def balance(connection: Connection) -> int:
    row = connection.execute("SELECT balance FROM account WHERE id = 1").fetchone()
    assert row is not None
    return int(row[0])


def test_effects_are_seen_inside_and_gone_afterwards(connection: Connection, balances: Callable[[], Any]) -> None:
    with unit(connection, [message("payments", "5"), message("payments", b"7")]) as u:
        pay(u)
        assert balance(connection) == 112
        assert balances() == [100]
    assert connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
    assert balance(connection) == 100


def test_what_the_test_did_before_in_its_own_transaction_stays(plain: str, balances: Callable[[], Any]) -> None:
    with psycopg.connect(plain) as own:
        own.execute("UPDATE account SET balance = 50")
        with unit(own, [message("payments", "5")]) as u:
            pay(u)
            assert balance(own) == 55
        assert balance(own) == 50
    assert balances() == [50]


def test_inside_psycopgs_transaction_block(connection: Connection) -> None:
    with connection.transaction(force_rollback=True):
        connection.execute("UPDATE account SET balance = 50")
        for _ in range(2):
            with unit(connection, [message("payments", "5")]) as u:
                pay(u)
                assert balance(connection) == 55
        assert balance(connection) == 50
    assert balance(connection) == 100


def swallow(u: Unit) -> None:
    with contextlib.suppress(psycopg.Error):
        u.execute("SELECT 1/0")


def roll_back_and_go_on(u: Unit) -> None:
    u.execute("ROLLBACK")
    u.execute("BEGIN")


def leave_a_copy_open(u: Unit) -> None:
    u.connection.pgconn.exec_(b"COPY account FROM STDIN")


BREACHES: dict[str, tuple[Callable[[Unit], object], type[Exception]]] = {
    "a SQL error is swallowed": (swallow, TransactionAborted),
    "ROLLBACK": (lambda u: u.execute("ROLLBACK"), TransactionEnded),
    "ROLLBACK, then another BEGIN": (roll_back_and_go_on, TransactionEnded),
    "a COPY is left open": (leave_a_copy_open, TransactionBusy),
}


@pytest.mark.parametrize("way", BREACHES)
def test_the_guards_of_production_speak(way: str, connection: Connection, balances: Callable[[], Any]) -> None:
    handler, error = BREACHES[way]
    with pytest.raises(error), unit(connection, [message("payments", "5")]) as u:
        pay(u)
        handler(u)
    assert balances() == [100]


def test_a_stream_that_is_left_open_is_named(connection: Connection, balances: Callable[[], Any]) -> None:
    with (
        pytest.raises(TransactionBusy, match=r"stream\(\).* read the stream to its end"),
        unit(connection, [message("payments", "5")]) as u,
    ):
        pay(u)
        rows = u.connection.cursor().stream("SELECT generate_series(1, 100)")
        next(rows)
    assert balances() == [100]


COMMITS: dict[str, Callable[[Unit], object]] = {
    "COMMIT": lambda u: u.execute("COMMIT"),
    "COMMIT, then another BEGIN": lambda u: u.execute("COMMIT; BEGIN"),
}


@pytest.mark.parametrize("way", COMMITS)
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_handler_that_commits_is_told(
    way: str, connection: Connection, balances: Callable[[], Any], *, is_nested: bool
) -> None:
    if is_nested:
        connection.execute("BEGIN" if connection.autocommit else "SELECT 1")
    with pytest.raises(HandlerCommitted, match="Take COMMIT"), unit(connection, [message("payments", "5")]) as u:
        pay(u)
        COMMITS[way](u)
    assert balances() == [105], "that is what it did"
    assert connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE


def test_a_handler_that_commits_and_fails_then_is_told_too(connection: Connection) -> None:
    def handler(u: Unit) -> None:
        u.execute("COMMIT")
        raise ValueError("afterwards")

    with pytest.raises(HandlerCommitted) as caught, unit(connection, [message("payments", "5")]) as u:
        handler(u)
    assert isinstance(caught.value.__cause__, ValueError)


def _leave_the_connections_block(u: Unit) -> None:
    with u.connection:
        pay(u)


def _fail_in_the_connections_block(u: Unit) -> None:
    with u.connection:
        raise ZeroDivisionError


ENDS: dict[str, Callable[[Unit], object]] = {
    "commit()": lambda u: u.connection.commit(),
    "rollback()": lambda u: u.connection.rollback(),
    "close()": lambda u: u.connection.close(),
    "autocommit": lambda u: setattr(u.connection, "autocommit", True),
    "set_autocommit()": lambda u: u.connection.set_autocommit(True),
    "with connection": _leave_the_connections_block,
    "with connection, and raise": _fail_in_the_connections_block,
}


@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize("is_nested", [False, True])
def test_what_would_end_the_transaction_is_refused_at_once_and_is_back_afterwards(
    way: str, connection: Connection, balances: Callable[[], Any], *, is_nested: bool
) -> None:
    own = vars(connection).copy()
    if is_nested:
        connection.execute("BEGIN" if connection.autocommit else "SELECT 1")
    reached: list[bool] = []

    def handler(u: Unit) -> None:
        pay(u)
        ENDS[way](u)
        reached.append(True)

    with pytest.raises(TransactionNotYours, match="of an open unit"), unit(connection, [message("p", "5")]) as u:
        handler(u)
    assert not reached
    assert vars(connection).keys() == own.keys()
    connection.rollback()
    connection.autocommit = not connection.autocommit
    assert balances() == [100]


def test_what_was_set_on_the_connection_is_there_again(connection: Connection) -> None:
    """Tracing does that."""
    plain, seen = connection.cursor, []

    def traced(*args: Any, **options: Any) -> Any:
        seen.append(args)
        return plain(*args, **options)

    own: Any = connection
    own.cursor = traced
    with unit(connection, [message("payments", "5")]) as u:
        pay(u)
    assert own.cursor is traced
    assert len(seen) > 0


def test_a_refused_commit_that_the_handler_swallows_changes_nothing(connection: Connection) -> None:
    with unit(connection, [message("payments", "5")]) as u:
        pay(u)
        with contextlib.suppress(TransactionNotYours):
            u.connection.commit()
        assert balance(connection) == 105
    assert balance(connection) == 100


def test_a_handler_that_does_not_use_its_unit_is_told(
    connection: Connection, plain: str, balances: Callable[[], Any]
) -> None:
    """The commonest mistake: a connection of its own."""

    def handler(u: Unit) -> None:
        with psycopg.connect(plain) as own:
            own.execute("UPDATE account SET balance = balance + %s", [int(u.messages[0].value() or 0)])

    with pytest.raises(UnitNotUsed, match="unused_ok=True"), unit(connection, [message("payments", "5")]) as u:
        handler(u)
        assert balance(connection) == 105, "the test may look"
    assert balances() == [105]
    assert connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
    with unit(connection, [message("payments", "no payment")], unused_ok=True):
        pass
    with unit(connection, []):
        pass
    with unit(connection, [message("payments", "5")]):
        connection.execute("UPDATE account SET balance = 0")  # as an ORM does that has the connection from elsewhere


def test_deferred_constraints_are_checked_as_by_a_commit(connection: Connection, balances: Callable[[], Any]) -> None:
    with pytest.raises(psycopg.errors.UniqueViolation), unit(connection, [message("payments")]) as u:
        u.execute("INSERT INTO account VALUES (1, 1)")
    assert balances() == [100]


def test_what_the_handler_raises_propagates_and_is_rolled_back(connection: Connection) -> None:
    with pytest.raises(ZeroDivisionError), unit(connection, [message("payments", "5")]) as u:
        pay(u)
        raise ZeroDivisionError
    assert balance(connection) == 100


def test_savepoints_of_the_handler_are_fine(connection: Connection) -> None:
    with unit(connection, [message("payments", "5")]) as u:
        pay(u)
        with contextlib.suppress(psycopg.Error), u.connection.transaction():
            u.execute("SELECT 1/0")
        assert balance(connection) == 105


def test_unit_cannot_be_used_afterwards(connection: Connection) -> None:
    with unit(connection, []) as u:
        pass
    with pytest.raises(UnitNotFinished):
        u.execute("SELECT 1")


def test_lost_connection_is_the_handlers_error(connection: Connection, plain: str) -> None:
    with pytest.raises(psycopg.OperationalError), unit(connection, [message("payments", "5")]) as u:
        with psycopg.connect(plain, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
        pay(u)


def test_message_is_what_a_consumer_delivers() -> None:
    made = message("t", "ä", key=b"k", headers=[("h", "v"), ("h", None)], partition=3, offset=7, timestamp=12)
    assert isinstance(made, Message)
    assert (made.topic(), made.partition(), made.offset()) == ("t", 3, 7)
    assert (made.value(), made.key(), made.headers()) == ("ä".encode(), b"k", [("h", b"v"), ("h", None)])
    assert made.timestamp() == (TIMESTAMP_CREATE_TIME, 12)
    assert made.error() is None
    bare = message("t")
    assert (bare.value(), bare.key(), bare.headers()) == (None, None, None)
    assert bare.timestamp()[0] == TIMESTAMP_NOT_AVAILABLE


def test_offsets_increase_by_themselves_and_others_are_refused(connection: Connection) -> None:
    messages = [message("t") for _ in range(3)]
    offsets = [each.offset() or 0 for each in messages]
    assert offsets == sorted(set(offsets))
    with (
        pytest.raises(ValueError, match=r"offset 4 of t\[0\] comes after 5"),
        unit(connection, [message("t", offset=5), message("t", offset=4)]),
    ):
        pass


def test_attempt_and_identity_are_there(connection: Connection) -> None:
    first = message("t", partition=2, offset=9)
    with unit(connection, [first], attempt=3, unused_ok=True) as u:
        assert u.attempt == 3
        assert u.identity(first).text == "test-cluster:t:2:9"


def test_dead_letters_are_seen_where_the_schema_is(conninfo: str, name: str) -> None:
    with psycopg.connect(conninfo) as own:
        with unit(own, [message(name, "5")], group_id=name) as u:
            u.dead_letter(u.messages[0], "not now")
            (letter,) = find(own, schema="exactly_once", group_id=name)
            assert letter.error == "not now"
        assert find(own, schema="exactly_once", group_id=name) == []


# Crashes.


def _work(bootstrap_servers: str, conninfo: str, topic: str, failpoint: str) -> None:
    """What an application's worker does, with one line more."""
    from exactly_once import ExactlyOnceConsumer  # noqa: PLC0415 - as its own process would

    crash_at(failpoint, nth=2)
    kafka = {"bootstrap.servers": bootstrap_servers, "group.id": topic, "session.timeout.ms": 6000}
    with ExactlyOnceConsumer(kafka, conninfo=conninfo, max_messages=5) as consumer:
        consumer.subscribe([topic])
        drain(consumer, "crashing")


@pytest.mark.parametrize("failpoint", ["advanced", "committed"])
def test_worker_crashes_where_told_and_the_next_one_finishes(scene: Scene, failpoint: str) -> None:
    arguments = (scene.bootstrap_servers, scene.conninfo, scene.topic, failpoint)
    worker = multiprocessing.get_context("spawn").Process(target=_work, args=arguments)
    worker.start()
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL
    # At its second unit, before or after the COMMIT.
    assert len(scene.applied()) == {"advanced": 5, "committed": 10}[failpoint]
    scene.drain(scene.consumer())
    scene.assert_exact()


def test_failing_at_a_failpoint_undoes_the_unit(scene: Scene) -> None:
    consumer = scene.consumer(max_messages=5)
    with pytest.raises(TimeoutError), failing_at("advanced", TimeoutError(), nth=2):
        for each in consumer.units(until_end=True):
            apply(each)
    assert scene.applied() == [0, 1, 2, 3, 4]
    scene.drain(consumer)
    scene.assert_exact()


def test_failpoint_that_was_not_passed_is_told(scene: Scene) -> None:
    with (
        pytest.raises(AssertionError, match="'advanced' was not passed 9 times"),
        failing_at("advanced", OSError(), nth=9),
    ):
        scene.drain(scene.consumer())
    scene.assert_exact()


def test_unknown_failpoint_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=", ".join(FAILPOINTS)):
        crash_at("never")
