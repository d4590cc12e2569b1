"""Someone else's transaction: offsets move in it, and what became of it is found out afterwards."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from confluent_kafka import OFFSET_INVALID, Consumer, TopicPartition

from exactly_once import (
    ConfigurationError,
    ExactlyOnceConsumer,
    HandlerCommitted,
    NoProgress,
    Redelivered,
    TransactionAborted,
    TransactionBusy,
    TransactionEnded,
    Unit,
    UnitNotFinished,
)
from exactly_once.consumer.units import Units
from exactly_once.embedded import Postgres
from exactly_once.ledger import outcome
from exactly_once.ledger.migrate import migrate
from exactly_once.ledger.outcome import TRIES
from exactly_once.ledger.rows import Ledger
from exactly_once.ledger.session import Session, connector
from exactly_once.ledger.sql import grants
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene
from tests.support import journal
from tests.support.roles import as_role
from tests.support.waiting import until
from tests.support.worker import ROOT, record

Own = psycopg.Connection[Any]

_LONGER_THAN_ONE_TRY = 1.0
"""Seconds within which the loop asks several times."""


@pytest.fixture
def own(scene: Scene) -> Iterator[Own]:
    """A connection of the application, with transactions in psycopg's usual way."""
    with psycopg.connect(scene.conninfo) as connection:
        yield connection


@pytest.fixture
def units(scene: Scene) -> Units:
    return scene.consumer().units(until_end=True)


def joined(unit: Unit, own: Own) -> None:
    with unit.join(own):
        record(unit, "test")


def fail_in_the_block(unit: Unit, own: Own) -> None:
    with unit.join(own):
        record(unit, "test")
        raise ZeroDivisionError


def finish(units: Units, own: Own) -> None:
    for unit in units:
        joined(unit, own)
        own.commit()


def test_what_commits_is_applied_once(scene: Scene, units: Units, own: Own) -> None:
    finish(units, own)
    scene.assert_exact()


def test_what_is_rolled_back_comes_again_and_nothing_is_raised(scene: Scene, units: Units, own: Own) -> None:
    unit = next(units)
    joined(unit, own)
    own.rollback()
    again = next(units)
    assert [m.offset() for m in again.messages] == [m.offset() for m in unit.messages]
    assert (unit.attempt, again.attempt) == (1, 2)
    joined(again, own)
    own.commit()
    finish(units, own)
    scene.assert_exact()


def test_rollbacks_without_an_end_are_told_and_end_the_loop(
    scene: Scene, units: Units, own: Own, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A framework rolls back at an error that the application has swallowed, and nothing is raised."""
    attempts = []

    def serve() -> None:
        for unit in units:
            attempts.append(unit.attempt)
            assert len(attempts) <= 2 * TRIES
            if len(attempts) == 2 * TRIES:
                monkeypatch.setattr(outcome, "PATIENCE_SECONDS", 0.0)
            with own.transaction(force_rollback=True), unit.join(own):
                record(unit, "test")

    with pytest.raises(NoProgress, match="are rolled back each time, nothing committed for"):
        serve()
    monkeypatch.undo()
    with own.transaction(force_rollback=True), next(units).join(own) as unit:
        attempts.append(unit.attempt)
    assert attempts == list(range(1, 2 * TRIES + 2)), "it goes on with the same messages"
    (told,) = [r for r in caplog.records if getattr(r, "action", "") == "joined_rolled_back"]
    assert (told.levelname, f"{TRIES} times with the same messages" in told.message) == ("WARNING", True)
    assert scene.applied() == []
    finish(units, own)
    scene.assert_exact()


@pytest.mark.parametrize("is_resolved", [False, True])
def test_a_thread_that_comes_behind_the_joined_commit_is_told_of(
    scene: Scene, units: Units, own: Own, *, is_resolved: bool
) -> None:
    def use(unit: Unit) -> None:
        with ThreadPoolExecutor(1) as pool:
            assert isinstance(pool.submit(unit.execute, "SELECT 1").exception(60), UnitNotFinished)

    unit = next(units)
    joined(unit, own)
    own.commit()
    if is_resolved:
        joined(next(units), own)
        own.commit()
    use(unit)
    with pytest.raises(TransactionBusy, match="behind its COMMIT, so what it was to store is lost"):
        next(units)
    finish(units, own)
    scene.assert_exact()


def test_a_thread_that_comes_behind_a_joined_rollback_loses_nothing(scene: Scene, units: Units, own: Own) -> None:
    unit = next(units)
    joined(unit, own)
    own.rollback()
    with ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(unit.execute, "SELECT 1").exception(60), UnitNotFinished)
    finish(units, own)
    scene.assert_exact()


def test_error_in_the_block_and_a_rollback_bring_the_messages_again(scene: Scene, units: Units, own: Own) -> None:
    with pytest.raises(ZeroDivisionError):
        fail_in_the_block(next(units), own)
    own.rollback()
    finish(units, own)
    scene.assert_exact()


def test_next_unit_while_the_transaction_is_open_is_refused_and_waits_for_it(
    scene: Scene, units: Units, own: Own
) -> None:
    joined(next(units), own)
    for _ in range(2):
        with pytest.raises(UnitNotFinished, match="is still open: commit it or roll it back"):
            next(units)
    own.commit()
    finish(units, own)
    scene.assert_exact()


def test_offsets_are_not_durable_before_the_commit(scene: Scene, units: Units, own: Own) -> None:
    joined(next(units), own)
    assert scene.ledger("next_offset") == [0]
    own.commit()
    assert scene.ledger("next_offset") == [10]


def test_connection_that_is_lost_before_commit_brings_the_messages_again(scene: Scene, units: Units, own: Own) -> None:
    with psycopg.connect(scene.conninfo) as other:
        joined(next(units), other)
        other.close()
    finish(units, own)
    scene.assert_exact()


def test_lost_commit_is_found_out(scene: Scene, units: Units, own: Own) -> None:
    """It had landed when the connection broke: the messages do not come again."""
    with psycopg.connect(scene.proxy.conninfo) as other:
        joined(next(units), other)
        fault = scene.proxy.cut_after("^COMMIT")
        with pytest.raises(psycopg.OperationalError):
            other.commit()
        fault.wait()
    finish(units, own)
    scene.assert_exact()


def test_commit_after_a_failed_block_halts(scene: Scene, units: Units, own: Own) -> None:
    """The effects are there and the offset is not: going on in any way would be wrong."""
    with pytest.raises(ZeroDivisionError):
        fail_in_the_block(next(units), own)
    own.commit()
    with pytest.raises(HandlerCommitted, match=r"joined was committed without its offsets"):
        next(units)
    assert all(scene.ledger("halted"))


def test_savepoint_that_undoes_the_advance_only_halts(scene: Scene, units: Units, own: Own) -> None:
    unit = next(units)
    own.execute("INSERT INTO journal.counter VALUES (%s, 1)", (scene.topic,))
    own.execute("SAVEPOINT inside")
    joined(unit, own)
    own.execute("ROLLBACK TO SAVEPOINT inside")
    own.commit()
    with pytest.raises(HandlerCommitted):
        next(units)
    assert all(scene.ledger("halted"))


def test_savepoint_that_undoes_the_advance_halts_whoever_has_the_rows_by_then(
    scene: Scene, units: Units, own: Own, conninfo: str
) -> None:
    """Another owner took them before the COMMIT, so that its effects would be applied again."""
    unit = next(units)
    own.execute("INSERT INTO journal.counter VALUES (%s, 1)", (scene.topic,))
    own.execute("SAVEPOINT inside")
    joined(unit, own)
    own.execute("ROLLBACK TO SAVEPOINT inside")
    session = Session(connector(conninfo), schema="exactly_once")
    Ledger(session, group_id=scene.topic, owner_kind="consumer").acquire([a.partition for a in unit.advances])
    own.commit()
    with pytest.raises(HandlerCommitted):
        next(units)
    session.close()
    assert all(scene.ledger("halted"))


def test_a_connection_that_gives_no_text_is_refused_by_that_name(units: Units, own: Own) -> None:
    own.execute("SET client_encoding = 'SQL_ASCII'")
    with pytest.raises(ConfigurationError, match="client_encoding SQL_ASCII"):
        joined(next(units), own)
    own.rollback()


def test_commit_inside_the_block_halts(scene: Scene, units: Units, own: Own) -> None:
    def commit_inside() -> None:
        with next(units).join(own) as unit:
            record(unit, "test")
            own.commit()

    with pytest.raises(TransactionEnded, match="inside the block"):
        commit_inside()
    with pytest.raises(HandlerCommitted):
        next(units)


@pytest.mark.parametrize("end", ["rollback", "commit"])
def test_another_transaction_behind_the_end_of_the_joined_one_is_told(
    scene: Scene, units: Units, own: Own, end: str
) -> None:
    def end_inside(unit: Unit) -> None:
        with unit.join(own):
            getattr(own, end)()
            own.execute("SELECT 1")

    with pytest.raises(TransactionEnded, match="inside the block"):
        end_inside(next(units))
    own.rollback()
    if end == "commit":
        with pytest.raises(HandlerCommitted):
            next(units)
    else:
        finish(units, own)
        scene.assert_exact()


def test_a_pipeline_around_the_block_is_refused_and_loses_nothing(scene: Scene, units: Units, own: Own) -> None:
    with pytest.raises(ConfigurationError, match="open that inside the block"), own.pipeline():
        joined(next(units), own)
    for unit in units:
        with unit.join(own), own.pipeline():
            record(unit, "test")
        own.commit()
    scene.assert_exact()


def test_swallowed_sql_error_is_told_at_the_end_of_the_block(scene: Scene, units: Units, own: Own) -> None:
    def swallow() -> None:
        with next(units).join(own) as unit, pytest.raises(psycopg.errors.DivisionByZero):
            unit.execute("SELECT 1/0")

    with pytest.raises(TransactionAborted):
        swallow()
    own.rollback()
    finish(units, own)
    scene.assert_exact()


@pytest.mark.parametrize("isolation", psycopg.IsolationLevel)
def test_fenced_unit_is_redelivered_and_its_transaction_is_broken(
    scene: Scene, units: Units, own: Own, isolation: psycopg.IsolationLevel
) -> None:
    """Above READ COMMITTED the server calls it a conflict."""
    own.isolation_level = isolation

    def fence() -> None:
        with next(units).join(own) as unit:
            record(unit, "test")
            scene.query(
                "UPDATE exactly_once.ledger SET owner_epoch = owner_epoch + 1, owner_token = gen_random_uuid() "
                "WHERE group_id = %s"
            )

    with pytest.raises(Redelivered, match=r"another owner|could not serialize"):
        fence()
    own.rollback()
    finish(units, own)
    scene.assert_exact()


def test_psycopgs_transaction_block_may_be_joined(scene: Scene, units: Units) -> None:
    with psycopg.connect(scene.conninfo, autocommit=True) as connection:
        for unit in units:
            with connection.transaction(), unit.join(connection):
                record(unit, "test")
    scene.assert_exact()


def test_autocommit_without_a_transaction_is_refused_and_loses_nothing(scene: Scene, units: Units, own: Own) -> None:
    connection = psycopg.connect(scene.conninfo, autocommit=True)
    with connection, pytest.raises(ConfigurationError, match="autocommit"), next(units).join(connection):
        pass
    finish(units, own)
    scene.assert_exact()


def test_our_own_connection_is_refused(scene: Scene, own: Own) -> None:
    made: list[Own] = []

    def connect() -> Own:
        made.append(psycopg.connect(scene.conninfo))
        return made[-1]

    units = scene.consumer(connect=connect).units(until_end=True)
    with pytest.raises(ConfigurationError, match="transaction of yours"), next(units).join(made[0]):
        pass
    finish(units, own)
    scene.assert_exact()


def test_close_with_an_open_transaction_leaves_it_to_whoever_comes_next(scene: Scene, own: Own) -> None:
    consumer = scene.consumer()
    joined(next(consumer.units()), own)
    consumer.close()
    own.commit()
    scene.drain(scene.consumer())
    scene.assert_exact()


def test_close_after_the_commit_releases(scene: Scene, own: Own) -> None:
    consumer = scene.consumer()
    joined(next(consumer.units()), own)
    own.commit()
    consumer.close()
    assert scene.ledger("owner_token") == [None]


def test_unit_that_was_joined_cannot_be_entered(scene: Scene, units: Units, own: Own) -> None:
    unit = next(units)
    joined(unit, own)
    with pytest.raises(UnitNotFinished, match="entered before"), unit:
        pass
    own.rollback()


def test_ways_can_change_from_unit_to_unit(scene: Scene, own: Own) -> None:
    consumer: ExactlyOnceConsumer = scene.consumer(max_messages=3)
    for number, unit in enumerate(consumer.units(until_end=True)):
        if number % 2:
            joined(unit, own)
            own.commit()
        else:
            with unit:
                record(unit, "test")
    scene.assert_exact()


ODD = "-c TimeZone=America/Chicago -c DateStyle=SQL,DMY"


@pytest.mark.parametrize("meddling", ["settings", "statistics"])
def test_whatever_the_application_has_set_a_transaction_is_told_from_another(scene: Scene, meddling: str) -> None:
    """A time zone of its own made every answer "the server was restarted", and a commit without offsets unnoticed."""
    units = scene.consumer().units(until_end=True)
    with psycopg.connect(scene.conninfo, options=ODD if meddling == "settings" else "") as own:
        joined(next(units), own)
        if meddling == "statistics":
            scene.query("SELECT pg_stat_reset_shared('bgwriter')")
        with pytest.raises(UnitNotFinished):
            next(units)
        own.commit()
        with pytest.raises(ZeroDivisionError):
            fail_in_the_block(next(units), own)
        own.commit()
        with pytest.raises(HandlerCommitted):
            next(units)
    assert all(scene.ledger("halted"))
    assert len(scene.applied()) == len(set(scene.applied()))


def test_a_commit_in_two_phases_is_open_until_its_second(make_scene: MakeScene) -> None:
    with Postgres(settings={"max_prepared_transactions": "5"}) as server:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            migrate(connection)
        journal.create(server.conninfo)
        scene = replace(make_scene(20), conninfo=server.conninfo)
        units = scene.consumer(conninfo=server.conninfo).units(until_end=True)
        with psycopg.connect(server.conninfo) as own:
            joined(next(units), own)
            own.execute("PREPARE TRANSACTION 'first'")
            with pytest.raises(UnitNotFinished):
                next(units)
            own.rollback()
            own.autocommit = True
            own.execute("COMMIT PREPARED 'first'")
            own.autocommit = False
            finish(units, own)
        scene.assert_exact()


# The end of an iteration.


@pytest.mark.parametrize("way", ["stop", "break", "error", "rolled back"])
def test_whatever_ends_the_loop_close_settles_the_last_unit(scene: Scene, own: Own, way: str) -> None:
    consumer = scene.consumer()

    def serve() -> None:
        for unit in consumer:
            joined(unit, own)
            if way == "rolled back":
                own.rollback()
                consumer.stop()
                continue
            own.commit()
            if way == "stop":
                consumer.stop()
            elif way == "break":
                break
            else:
                raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError), consumer:
        serve()
    done = 0 if way == "rolled back" else 10
    assert scene.ledger("next_offset") == [done]
    assert scene.ledger("owner_token") == [None]
    assert (consumer.counters.committed, consumer.counters.messages) == (done // 10, done)
    settings = {"bootstrap.servers": scene.bootstrap_servers, "group.id": scene.topic}
    kafka = Consumer(settings)
    (found,) = kafka.committed([TopicPartition(scene.topic, 0)], timeout=60)
    kafka.close()
    assert found.offset == (10 if done else OFFSET_INVALID), "dashboards, and whoever goes back, see the ledger's"


def test_close_settles_although_its_own_idle_connection_was_lost_unnoticed(scene: Scene, own: Own) -> None:
    consumer = scene.consumer()
    for unit in consumer:
        joined(unit, own)
        own.commit()
        consumer.stop()
    scene.proxy.cut_all()
    consumer.close()
    assert scene.ledger("owner_token") == [None]
    assert consumer.counters.committed == 1


def test_stop_with_the_transaction_still_open_leaves_it_to_whoever_comes_next(scene: Scene, own: Own) -> None:
    consumer = scene.consumer()
    for unit in consumer:
        joined(unit, own)
        consumer.stop()
        break
    consumer.close()
    assert scene.ledger("owner_token") != [None]
    own.commit()
    scene.drain(scene.consumer())
    scene.assert_exact()


def test_sigterm_ends_a_loop_of_transactions_of_its_own_in_good_order(scene: Scene) -> None:
    """As a management command of Django does it: the signal's handler calls stop()."""
    command = [sys.executable, "-m", "tests.integration.join_loop"]
    arguments = [scene.bootstrap_servers, scene.conninfo, scene.topic]
    with subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=90)
    assert worker.returncode == 0
    (offset,) = scene.ledger("next_offset")
    assert offset > 0
    assert scene.ledger("owner_token") == [None]
    kafka = Consumer({"bootstrap.servers": scene.bootstrap_servers, "group.id": scene.topic})
    (found,) = kafka.committed([TopicPartition(scene.topic, 0)], timeout=60)
    kafka.close()
    assert found.offset == offset


# A connection of another role.


def test_a_lost_connection_of_another_role_is_waited_for_and_the_missing_right_is_named(
    scene: Scene, db: Own, caplog: pytest.LogCaptureFixture
) -> None:
    """The library's role may not end it, so it waits, polling; it neither halts nor goes on."""
    library, application = f"{scene.topic}_library", f"{scene.topic}_application"
    for role in (library, application):
        db.execute(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA journal TO {role}".encode())
        db.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA journal TO {role}".encode())
        db.execute(grants("exactly_once", role))
    units = scene.consumer(conninfo=as_role(scene.conninfo, library)).units(until_end=True)
    own = psycopg.connect(as_role(scene.proxy.conninfo, application))
    backend = own.info.backend_pid
    fault = scene.proxy.hold("pg_sleep", close_client=True)

    with pytest.raises(psycopg.OperationalError), next(units).join(own) as unit:
        unit.execute("SELECT pg_sleep(0)")
    fault.wait()

    def end_it() -> None:
        until(lambda: "may not end it" in caplog.text, 20, "a word about the right")
        time.sleep(_LONGER_THAN_ONE_TRY)
        scene.query(f"SELECT pg_terminate_backend({backend})")
        fault.release()

    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(end_it)
        again = next(units)
        ending.result(60)
    assert again.attempt == 2
    assert caplog.text.count("may not end it") == 1
    assert "GRANT pg_signal_backend" in caplog.text
    assert scene.ledger("halted") == [None]
    with psycopg.connect(scene.conninfo) as another:
        joined(again, another)
