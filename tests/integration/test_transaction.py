"""The transaction of a unit as the server sees it: round trips, isolation, and nothing left on the session."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

import threading

import psycopg
import pytest
from psycopg.rows import dict_row

from exactly_once import Redelivered, Unit
from exactly_once.consumer.options import Isolation
from exactly_once.ledger.session import tag_of
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, apply, apply_until_done, backend_of, offsets, text
from tests.support import journal
from tests.support.waiting import until
from tests.support.worker import record

APPLICATION_NAME = "SELECT application_name FROM pg_stat_activity WHERE pid = {}"


def test_a_unit_costs_two_round_trips_of_its_own(scene: Scene) -> None:
    units = iter(scene.consumer())
    unit = next(units)
    scene.proxy.statements.clear()
    before = scene.proxy.round_trips
    with unit:
        opened = scene.proxy.round_trips
        unit.execute("SELECT 'the effect'")
    assert opened - before == 1
    assert scene.proxy.round_trips - before == 3
    begin, effect, end = scene.proxy.statements
    assert [part.strip().split(" ")[0] for part in begin.split(";")] == ["BEGIN", "SET", "SELECT"]
    assert effect == "SELECT 'the effect'"
    assert ".advance(" in end
    assert end.rstrip().endswith("; COMMIT")


def test_an_undone_unit_asks_what_became_of_it_and_nothing_else(scene: Scene) -> None:
    unit = next(iter(scene.consumer()))
    with pytest.raises(ValueError, match="no"), unit:
        scene.proxy.statements.clear()
        raise ValueError("no")
    rollback, fate = scene.proxy.statements
    assert rollback == "ROLLBACK"
    assert "pg_xact_status(" in fate


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_the_isolation_level_is_the_one_asked_for(scene: Scene, isolation: Isolation) -> None:
    found: list[str] = []
    survived = apply_until_done(
        scene.consumer(isolation=isolation),
        lambda unit: found.extend(*unit.execute("SHOW transaction_isolation").fetchall()),
    )
    assert set(found) == {isolation.lower()}
    assert survived == []
    scene.assert_exact()


def test_the_marker_is_there_inside_a_unit_and_gone_after_it(scene: Scene) -> None:
    consumer = scene.consumer()
    units = iter(consumer)
    watch = APPLICATION_NAME.format(0)
    for fails in (False, True):
        unit = next(units)
        watch = APPLICATION_NAME.format(backend_of(consumer))
        try:
            with unit:
                record(unit, "test")
                assert scene.query(watch) == [(tag_of(consumer._session.instance, "exactly_once", 60),)]
                if fails:
                    raise ValueError("undone")
        except ValueError:
            pass
        assert scene.query(watch) == [("",)]


def test_nothing_is_left_on_the_session(scene: Scene) -> None:
    """Whoever gets this connection next, behind a pooler, finds it as new."""
    consumer = scene.consumer(max_messages=1)
    scene.drain(consumer)
    connection = consumer._session.connection
    state = "SELECT name, setting FROM pg_settings WHERE source = 'session' AND name <> 'application_name'"
    assert connection.execute(state).fetchall() == []
    assert connection.execute("SELECT name FROM pg_prepared_statements").fetchall() == []
    assert connection.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'").fetchall() == []
    assert connection.execute("SHOW application_name").fetchone() == ("",)


def test_what_a_handler_sets_for_the_session_stays_until_the_next_connection(scene: Scene) -> None:
    """As docs/guarantees.md says; what it sets for the transaction ends with that."""
    found: list[tuple[str, str, str]] = []

    def handler(unit: Unit) -> None:
        asked = (
            "SELECT current_setting('search_path'), current_setting('lock_timeout'), to_regclass('pg_temp.own')::text"
        )
        found.append(unit.execute(asked).fetchone())  # type: ignore[arg-type]
        if not found[:-1]:
            unit.execute("SET search_path TO journal")
            unit.execute("CREATE TEMP TABLE own ()")
            unit.execute("SET LOCAL lock_timeout = '7s'")
        if len(found) == 2 and unit.attempt == 1:
            scene.proxy.cut_all()

    apply_until_done(scene.consumer(max_messages=7), handler)
    scene.assert_exact()
    default = scene.query("SHOW search_path")[0][0]
    assert found == [(default, "0", None), ("journal", "0", "own"), *[(default, "0", None)] * 2]


def test_sessions_that_only_read_cost_a_redelivery_and_no_message(scene: Scene) -> None:
    def handler(unit: Unit) -> None:
        unit.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")

    survived = apply_until_done(scene.consumer(max_messages=5), handler)
    assert survived
    assert {type(error.__cause__) for error in survived} == {psycopg.errors.ReadOnlySqlTransaction}
    scene.assert_exact()


def test_a_connection_of_the_users_making_serves_as_well(scene: Scene) -> None:
    """Rows as dicts, no autocommit, every statement prepared at once, a cursor of its own: none of it matters."""

    def connect() -> psycopg.Connection[dict[str, object]]:
        return psycopg.connect(scene.proxy.conninfo, row_factory=dict_row, prepare_threshold=0)

    consumer = scene.consumer(connect=connect, max_messages=1)
    scene.drain(consumer)
    scene.assert_exact()
    consumer._session.connection.execute("SELECT 1 AS one", prepare=False)
    prepared = "SELECT statement FROM pg_prepared_statements WHERE statement !~ 'journal'"
    assert consumer._session.connection.execute(prepared, prepare=False).fetchall() == []


@pytest.mark.fault("B7")
def test_a_conflict_under_serializable_runs_the_batch_again(scene: Scene) -> None:
    """Two serializable transactions that each read what the other writes: one of them is refused with 40001."""
    consumer = scene.consumer(isolation="SERIALIZABLE")
    table = scene.table("who text")
    fought: list[str] = []

    def handler(unit: Unit) -> None:
        unit.connection.execute(f"SELECT count(*) FROM {table}")
        if not fought:
            with psycopg.connect(scene.conninfo) as rival:
                rival.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
                rival.execute(f"SELECT count(*) FROM {table}")
                rival.execute(f"INSERT INTO {table} VALUES ('rival')")
                fought.append("won")
        unit.connection.execute(f"INSERT INTO {table} VALUES ('unit')")

    (lost,) = apply_until_done(consumer, handler)
    assert isinstance(lost.__cause__, psycopg.errors.SerializationFailure)
    scene.assert_exact()


@pytest.mark.fault("B7", more=True)
def test_a_conflict_found_at_commit_runs_the_batch_again(scene: Scene) -> None:
    """The rival commits between our last statement and COMMIT: the server refuses COMMIT itself."""
    consumer = scene.consumer(isolation="SERIALIZABLE")
    table = scene.table("who text")
    rival = psycopg.connect(scene.conninfo)
    rival.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
    fought: list[str] = []

    def handler(unit: Unit) -> None:
        connection = unit.connection
        if not fought:
            rival.execute(f"SELECT count(*) FROM {table}")
        connection.execute(f"SELECT count(*) FROM {table}")
        connection.execute(f"INSERT INTO {table} VALUES ('unit')")
        if not fought:
            rival.execute(f"INSERT INTO {table} VALUES ('rival')")
            rival.commit()
            fought.append("won")

    with rival:
        (lost,) = apply_until_done(consumer, handler)
    assert isinstance(lost.__cause__, psycopg.errors.SerializationFailure)
    scene.assert_exact()


@pytest.mark.fault("B7", more=True)
def test_a_deadlock_runs_the_batch_again(make_scene: MakeScene) -> None:
    scene = make_scene(5)
    table = scene.table("id int, n int")
    scene.query(f"INSERT INTO {table} VALUES (1, 0), (2, 0)")
    update = f"UPDATE {table} SET n = n + 1 WHERE id = "
    rival = psycopg.connect(scene.conninfo)
    rival.execute("SET deadlock_timeout = '1h'")  # the unit is the one that finds it, and so the one that loses
    rival.execute(update + "2")
    threads: list[threading.Thread] = []

    def wait_and_give_up() -> None:
        rival.execute(update + "1")
        rival.rollback()

    def handler(unit: Unit) -> None:
        unit.execute(text(update + "1"))
        if not threads:
            threads.append(threading.Thread(target=wait_and_give_up))
            threads[0].start()
            waits = f"SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = {rival.info.backend_pid}"
            until(lambda: scene.query(waits) == [(1,)], 10, "the rival to wait")
        unit.execute(text(update + "2"))

    with rival:
        (lost,) = apply_until_done(scene.consumer(), handler)
        threads[0].join(10)
    assert isinstance(lost.__cause__, psycopg.errors.DeadlockDetected)
    scene.assert_exact()


@pytest.mark.fault("B9", more=True)
def test_a_lock_timeout_of_the_handler_runs_the_batch_again(scene: Scene) -> None:
    consumer = scene.consumer()
    table = scene.table("id int")
    scene.query(f"INSERT INTO {table} VALUES (1)")
    rival = psycopg.connect(scene.conninfo)
    rival.execute(f"SELECT * FROM {table} FOR UPDATE")

    def handler(unit: Unit) -> None:
        connection = unit.connection
        connection.execute("SET LOCAL lock_timeout = '50ms'")
        try:
            connection.execute(f"SELECT * FROM {table} FOR UPDATE")
        finally:
            rival.rollback()

    with rival:
        (lost,) = apply_until_done(consumer, handler)
    assert isinstance(lost.__cause__, psycopg.errors.LockNotAvailable)
    scene.assert_exact()


def test_what_the_handler_gets_wrong_in_sql_is_its_own_error(scene: Scene) -> None:
    """Classes 22, 23 and P0001 are not retried by the library: they propagate as they are."""
    consumer = scene.consumer()
    units = iter(consumer)
    for statement, error in (
        ("SELECT 1 / 0", psycopg.errors.DivisionByZero),
        ("INSERT INTO journal.entries (topic) VALUES (NULL)", psycopg.errors.NotNullViolation),
        ("DO $$ BEGIN RAISE 'no'; END $$", psycopg.errors.RaiseException),
    ):
        unit = next(units)
        with pytest.raises(error) as raised, unit:
            record(unit, "test")
            unit.execute(statement)
        assert not isinstance(raised.value, Redelivered)
        assert scene.applied() == []
    unit = next(units)
    assert unit.attempt == 4
    apply(unit)
    assert scene.applied() == offsets(unit)
    assert journal.counted(scene.conninfo, scene.topic) == len(offsets(unit))
