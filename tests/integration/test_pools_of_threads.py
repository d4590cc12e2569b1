"""A handler that gives its messages to a pool of threads: when one fails, others are still at work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psycopg
import pytest

from exactly_once import ExactlyOnceConsumer, TransactionBusy, Unit, UnitNotFinished
from exactly_once.consumer.unit import Stage
from exactly_once.ledger.session import Connection
from tests.integration.scene import Scene, backend_of, offsets
from tests.support.waiting import until
from tests.support.worker import record


def is_asleep(scene: Scene, consumer: ExactlyOnceConsumer) -> bool:
    asleep = f"SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND pid = {backend_of(consumer)}"
    return bool(scene.query(asleep))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that outlive a unit."""
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.mark.parametrize("is_known", [False, True])
def test_what_a_thread_does_behind_its_failed_unit_gets_into_no_other(
    scene: Scene, pool: ThreadPoolExecutor, *, is_known: bool
) -> None:
    """Be it the first unit of the process, or one of a handler that has used threads before."""
    table, may_go_on = scene.table("number int"), threading.Event()
    store = f"INSERT INTO {table} VALUES (1)".encode()

    def work(connection: Connection) -> None:
        assert may_go_on.wait(60)
        connection.execute(store)

    consumer = scene.consumer()
    units = iter(consumer)
    if is_known:
        with next(units) as unit:
            record(unit, "test")
            pool.submit(unit.execute, store).result(60)

    def fail(unit: Unit) -> Future[None]:
        with contextlib.suppress(ValueError), unit:
            record(unit, "test")
            late = pool.submit(work, consumer._session.connection if is_known else unit.connection)
            raise ValueError
        return late

    late = fail(next(units))
    with next(units) as unit:
        record(unit, "test")
        may_go_on.set()
        with pytest.raises(psycopg.OperationalError):
            late.result(60)
    scene.drain(consumer)
    scene.assert_exact()
    assert scene.query(f"SELECT count(*) FROM {table}") == [(int(is_known),)]


def test_a_thread_inside_a_statement_is_woken_and_leaves_the_connection(scene: Scene, pool: ThreadPoolExecutor) -> None:
    consumer = scene.consumer()
    units = iter(consumer)
    with contextlib.suppress(ValueError), next(units) as unit:
        late = pool.submit(unit.execute, "SELECT pg_sleep(200)")
        until(lambda: is_asleep(scene, consumer), 10, "the statement")
        raise ValueError
    with pytest.raises(psycopg.OperationalError):
        late.result(60)
    scene.drain(consumer)
    scene.assert_exact()


@pytest.mark.parametrize("moment", ["before COMMIT is answered", "before the next unit", "at the end"])
def test_a_thread_that_comes_behind_the_block_is_told_of_and_ends_the_service(
    moment: str, scene: Scene, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody looks at the future in which its error is."""
    late: list[Future[object]] = []
    slow, body = scene.table("number int"), "BEGIN PERFORM pg_sleep(1); RETURN NULL; END"
    scene.query(f"""
        CREATE FUNCTION slow_{scene.topic}() RETURNS trigger LANGUAGE plpgsql AS '{body}';
        CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {slow} DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION slow_{scene.topic}()""")

    def store(unit: Unit) -> None:
        record(unit, "test")
        is_last = offsets(unit)[-1] == 19
        if late and not is_last:
            until(late[0].done, 60, "the late thread")
        elif not late and (is_last or moment != "at the end"):
            if moment == "before COMMIT is answered":
                unit.execute(f"INSERT INTO {slow} VALUES (1)")
            late.append(pool.submit(behind_the_block, unit))

    def behind_the_block(unit: Unit) -> object:
        stage = Stage.FINISHING if moment == "before COMMIT is answered" else Stage.DONE
        until(lambda: unit.stage is stage, 60, "the end of the block")
        return unit.execute("SELECT 1")

    consumer = scene.consumer()
    with pytest.raises(TransactionBusy, match=r"behind its COMMIT, so what it was to store is lost.* reset --group-id"):
        consumer.run(store, idle_seconds=3)
    assert isinstance(late[0].exception(), UnitNotFinished)
    assert [r.levelname for r in caplog.records if getattr(r, "action", "") == "used_late"] == ["ERROR"]
    scene.drain(consumer)
    scene.assert_exact()


def test_each_unit_that_was_used_late_is_logged(
    scene: Scene, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the next iteration has something to raise already."""
    units, done = iter(scene.consumer(max_messages=5)), []
    for _ in range(2):
        with next(units) as unit:
            record(unit, "test")
        done.append(unit)
    for unit in done * 2:
        with pytest.raises(UnitNotFinished):
            pool.submit(unit.execute, "SELECT 1").result(60)
    assert [r.levelname for r in caplog.records if getattr(r, "action", "") == "used_late"] == ["ERROR"] * 2
    with pytest.raises(TransactionBusy, match="behind its COMMIT"):
        next(units)


def test_a_thread_that_is_not_waited_for_is_the_handlers_mistake(scene: Scene, pool: ThreadPoolExecutor) -> None:
    def store(unit: Unit) -> None:
        record(unit, "test")
        pool.submit(unit.execute, "SELECT pg_sleep(200)")
        until(lambda: is_asleep(scene, consumer), 10, "the statement")

    consumer = scene.consumer()
    with pytest.raises(TransactionBusy, match="wait for all of its threads"):
        consumer.run(store)
    assert scene.applied() == []
    scene.drain(consumer)
    scene.assert_exact()
