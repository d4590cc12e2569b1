"""What holds a COMMIT or a row up without end: a standby that does not answer, a transaction that somebody prepared."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from exactly_once.consumer import maintenance
from exactly_once.embedded import Postgres
from exactly_once.ledger import stale_owners
from exactly_once.ledger.migrate import migrate
from exactly_once.ledger.session import connector
from exactly_once.ledger.stale_owners import StaleBackendTerminator, _Watched
from tests.integration.conftest import MakeScene
from tests.integration.scene import apply, backend_of
from tests.support import journal
from tests.support.topics import produce
from tests.support.waiting import until
from tests.support.worker import record

Db = psycopg.Connection[Any]


@pytest.fixture(scope="module")
def server(own_servers: None) -> Iterator[Postgres]:
    """A server that knows two-phase commit, with the schema and the journal."""
    with Postgres(settings={"max_prepared_transactions": "2", "fsync": "off"}) as server:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            migrate(connection)
        journal.create(server.conninfo)
        yield server


@pytest.fixture
def admin(server: Postgres) -> Iterator[Db]:
    """A connection to it; nothing stays prepared, and no standby stays wanted."""
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = local")  # it shall not wait itself
        yield connection
        want_standby(connection, "")
        for (gid,) in connection.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
            connection.execute(f"ROLLBACK PREPARED '{gid}'".encode())


def want_standby(admin: Db, name: str) -> None:
    """Have each COMMIT wait for a standby of this name, or for none."""
    admin.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'".encode())
    admin.execute("SELECT pg_reload_conf()")
    show = "SELECT setting FROM pg_settings WHERE name = 'synchronous_standby_names'"
    until(lambda: admin.execute(show).fetchone() == (name,), 10, f"standby {name!r} to be wanted")
    if not name:
        return
    # The server as a whole hears of it a moment later: when a COMMIT really waits.
    with psycopg.connect(admin.info.dsn, password=admin.info.password, autocommit=True) as probe:
        waits = threading.Event()

        def commit() -> None:
            while not waits.is_set():
                probe.execute("SELECT pg_logical_emit_message(true, 'probe', '')")

        committer = threading.Thread(target=commit)
        committer.start()
        until(lambda: is_waiting(admin, probe.info.backend_pid, "SyncRep"), 30, "a COMMIT to wait for the standby")
        waits.set()
        admin.execute("SELECT pg_cancel_backend(%s)", (probe.info.backend_pid,))
        committer.join()


def is_waiting(admin: Db, pid: int, event: str) -> bool:
    """Tell whether a backend waits for something of this kind."""
    query = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND %s IN (wait_event, wait_event_type)"
    return admin.execute(query, (pid, event)).fetchone() is not None


def prepare(server: Postgres, group: str, partition: int) -> None:
    """Lock a row of the ledger in a transaction that stays when its session is gone."""
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute("BEGIN")
        lock = "SELECT FROM exactly_once.ledger WHERE group_id = %s AND partition = %s FOR UPDATE"
        assert connection.execute(lock, (group, partition)).rowcount == 1
        connection.execute("PREPARE TRANSACTION 'in doubt'")


def assert_exact(server: Postgres, bootstrap_servers: str, topic: str) -> None:
    """Ask the oracle."""
    verdict = journal.check(server.conninfo, bootstrap_servers, topic)
    assert verdict.exact, str(verdict)


@pytest.mark.fault("B14")
def test_a_cancelled_wait_for_a_standby_has_committed_and_is_logged(
    make_scene: MakeScene, server: Postgres, admin: Db, caplog: pytest.LogCaptureFixture
) -> None:
    scene = make_scene(20)
    consumer = scene.consumer(conninfo=server.conninfo)
    units = iter(consumer)
    apply(next(units))
    pid = backend_of(consumer)

    def cancel() -> None:
        until(lambda: is_waiting(admin, pid, "SyncRep"), 30, "COMMIT to wait for the standby")
        admin.execute("SELECT pg_cancel_backend(%s)", (pid,))

    canceller = threading.Thread(target=cancel)
    with next(units) as unit:
        record(unit, "test")
        want_standby(admin, "nobody")
        canceller.start()
    canceller.join()
    assert consumer.counters.redelivered == 0
    (told,) = [r for r in caplog.records if getattr(r, "action", "") == "not_replicated"]
    assert "synchronous replication" in told.getMessage()
    assert told.levelname == "WARNING"
    want_standby(admin, "")
    scene.drain(consumer)
    assert_exact(server, scene.bootstrap_servers, scene.topic)


def test_a_backend_that_waits_for_its_standby_is_not_ended(make_scene: MakeScene, server: Postgres, admin: Db) -> None:
    """Ended, it would show what a failover takes back. Who wants its rows waits for the standby, too."""
    scene = make_scene(20)
    consumer = scene.consumer(conninfo=server.conninfo)
    unit = next(iter(consumer))
    pid, instance = backend_of(consumer), consumer._session.instance  # our own lost one is ended at once else

    def commit() -> None:
        until(lambda: is_waiting(admin, pid, "SyncRep"), 30, "COMMIT to wait for the standby")
        with psycopg.connect(server.conninfo, autocommit=True) as waiting:
            lock = "SELECT FROM exactly_once.ledger WHERE group_id = %s FOR UPDATE"
            waiter = threading.Thread(target=lambda: waiting.execute(lock, (scene.topic,)))
            waiter.start()
            until(lambda: is_waiting(admin, waiting.info.backend_pid, "Lock"), 30, "the row to be waited for")
            watcher = StaleBackendTerminator(
                connector(server.conninfo), schema="exactly_once", group_id=scene.topic, instance=instance
            )
            watcher._end_blockers(_Watched(waiting.info.backend_pid))
            ended.append(watcher.ended)
            watcher._discard()
            want_standby(admin, "")
            waiter.join()

    ended: list[int] = []
    committer = threading.Thread(target=commit)
    with unit:
        record(unit, "test")
        want_standby(admin, "nobody")
        committer.start()
    committer.join()
    assert ended == [0]


@pytest.mark.fault("B17")
def test_a_prepared_transaction_keeps_its_partition_and_no_other(
    make_scene: MakeScene,
    server: Postgres,
    admin: Db,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "LOCK_SECONDS", 0.2)
    scene = make_scene(20, partitions=2)
    with scene.consumer(conninfo=server.conninfo) as first:
        scene.drain(first)
    prepare(server, scene.topic, 0)
    produce(scene.bootstrap_servers, scene.topic, 20, 2, start=20)
    consumer = scene.consumer(conninfo=server.conninfo)
    units = consumer.units(until_end=True)
    free = next(units)
    assert {message.partition() for message in free.messages} == {1}
    apply(free)
    assert "if it stays, see also pg_prepared_xacts" in caplog.text
    assert f"{scene.topic}[0] stays locked for now" in caplog.text
    admin.execute("ROLLBACK PREPARED 'in doubt'")
    for unit in units:
        apply(unit)
    assert consumer.counters.redelivered == 0
    assert_exact(server, scene.bootstrap_servers, scene.topic)


@pytest.mark.parametrize(
    ("holder", "table"),
    [
        ("session", "accounts"),
        ("prepared", "accounts"),
        # As VACUUM FULL does, in whose way the look for frozen owners is, too.
        ("session", "exactly_once.ledger"),
    ],
)
def test_a_unit_that_waits_for_a_lock_says_once_who_has_it(
    *,
    make_scene: MakeScene,
    server: Postgres,
    admin: Db,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    holder: str,
    table: str,
) -> None:
    monkeypatch.setattr(stale_owners, "STILL_SECONDS", 0.1)
    scene = make_scene(20)
    consumer = scene.consumer(conninfo=server.conninfo)
    unit = next(iter(consumer))
    admin.execute("CREATE TABLE IF NOT EXISTS accounts (o bigint)")

    def told() -> list[str]:
        return [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "unit_blocked"]

    with psycopg.connect(server.conninfo, application_name="nightly report", autocommit=True) as other:
        other.execute("BEGIN")
        other.execute(f"LOCK TABLE {table}")
        name = f"backend {other.info.backend_pid} has it (user postgres, application_name 'nightly report')"
        if holder == "prepared":
            other.execute("PREPARE TRANSACTION 'in doubt'")
            name = "a prepared transaction has it"

        def end() -> None:
            try:
                until(told, 30, "the wait to be logged")
                # Two more looks come meanwhile, and are silent.
                admin.execute("SELECT pg_sleep(6)")
            finally:
                other.execute("ROLLBACK" if holder == "session" else "ROLLBACK PREPARED 'in doubt'")

        thread = threading.Thread(target=end)
        with unit:
            record(unit, "test")
            thread.start()
            unit.execute("INSERT INTO accounts VALUES (1)")
        thread.join()
    (said,) = told()
    assert name in said
    scene.drain(consumer)
    assert_exact(server, scene.bootstrap_servers, scene.topic)


@pytest.mark.fault("B17", more=True)
def test_a_unit_whose_row_is_prepared_by_another_commits_when_that_has_ended(
    make_scene: MakeScene, server: Postgres, admin: Db
) -> None:
    scene = make_scene(20)
    consumer = scene.consumer(conninfo=server.conninfo)
    unit = next(iter(consumer))
    pid = backend_of(consumer)

    def end() -> None:
        until(lambda: is_waiting(admin, pid, "Lock"), 30, "the advance to wait for the row")
        admin.execute("COMMIT PREPARED 'in doubt'")

    thread = threading.Thread(target=end)
    with unit:
        record(unit, "test")
        prepare(server, scene.topic, 0)
        thread.start()
    thread.join()
    assert consumer.counters.redelivered == 0
    scene.drain(consumer)
    assert_exact(server, scene.bootstrap_servers, scene.topic)
