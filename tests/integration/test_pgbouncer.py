"""Behind PgBouncer in transaction mode, where every transaction may meet another server connection."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from exactly_once import ExactlyOnceConsumer, HandlerCommitted, Redelivered, Unit, UnitNotFinished
from exactly_once.consumer.units import Units
from exactly_once.embedded import Postgres
from exactly_once.embedded.proxy import PostgresProxy
from exactly_once.ledger.migrate import check, migrate
from tests.conftest import MakeConsumer
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, apply, apply_until_done, offsets
from tests.support import journal
from tests.support.pgbouncer import PgBouncer, pgbouncer_missing
from tests.support.pool import Pool
from tests.support.require import skip_unless
from tests.support.waiting import until
from tests.support.worker import record


@pytest.fixture
def pooler(conninfo: str, request: pytest.FixtureRequest) -> Iterator[PgBouncer]:
    """A pooler with two server connections, or as many as a test asks for, before the real server."""
    skip_unless("pgbouncer", pgbouncer_missing())
    with PgBouncer(conninfo, pool_size=getattr(request, "param", 2)) as pooler:
        yield pooler


@pytest.fixture
def wire(pooler: PgBouncer) -> Iterator[PostgresProxy]:
    """The faulty wire between client and pooler."""
    with PostgresProxy(pooler.conninfo) as proxy:
        yield proxy


@pytest.fixture
def neighbours(pooler: PgBouncer) -> Iterator[None]:
    """Other clients that keep the pooler's server connections changing hands."""
    stop = threading.Event()

    def bustle() -> None:
        with psycopg.connect(pooler.conninfo, autocommit=True, prepare_threshold=None) as connection:
            while not stop.wait(0.001):
                connection.execute("SELECT pg_sleep(0.001)")

    threads = [threading.Thread(target=bustle) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()


Consume = Callable[..., ExactlyOnceConsumer]


@pytest.fixture
def consume(wire: PostgresProxy, make_consumer: MakeConsumer, name: str) -> Iterator[Consume]:
    """Make a subscribed consumer behind wire and pooler."""
    made: list[ExactlyOnceConsumer] = []

    def make(**options: Any) -> ExactlyOnceConsumer:
        if "connect" not in options:
            options["conninfo"] = wire.conninfo
        made.append(make_consumer(max_messages=5, **options))
        made[-1].subscribe([name])
        return made[-1]

    yield make
    for consumer in made:
        consumer.close()


def _nothing(unit: Unit) -> None:
    """All effects are in the journal."""


@pytest.mark.fault("B15")
@pytest.mark.usefixtures("neighbours")
def test_the_loop_is_exact_behind_a_pooler(make_scene: MakeScene, consume: Consume) -> None:
    scene = make_scene(200, partitions=2)
    assert apply_until_done(consume(), _nothing) == []
    scene.assert_exact()


@pytest.mark.usefixtures("neighbours")
def test_deferred_statements_are_exact_behind_a_pooler(make_scene: MakeScene, consume: Consume) -> None:
    scene = make_scene(200, partitions=2)
    for unit in consume().units(until_end=True):
        with unit:
            for each in unit.messages:
                unit.defer(journal.APPEND, journal.entry(each, "test"))
                if each.offset() == 50:
                    unit.execute("SELECT 1")
            unit.defer(journal.COUNT, (scene.topic, len(unit.messages)))
    scene.assert_exact()


@pytest.mark.usefixtures("neighbours")
def test_a_connection_with_psycopgs_defaults_breaks_nothing_of_the_librarys(
    make_scene: MakeScene, consume: Consume, wire: PostgresProxy
) -> None:
    """The library's own statements are never prepared, whatever the connection would do by default."""
    scene = make_scene(200, partitions=2)
    consumer = consume(connect=lambda: psycopg.connect(wire.conninfo))
    done = 0
    for unit in consumer.units(until_end=True):
        with unit:
            for entry in unit.messages:
                unit.connection.execute("SELECT %s", (entry.offset(),), prepare=False)
        done += len(unit.messages)
    assert done == sum(scene.ledger("next_offset")) == 200


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "did not land"])
def test_an_unknown_commit_is_resolved_through_the_pooler(
    scene: Scene, consume: Consume, wire: PostgresProxy, *, landed: bool
) -> None:
    consumer = consume()
    unit = next(iter(consumer))
    fault = wire.cut_after() if landed else wire.cut_before()
    if landed:
        apply(unit)
    else:
        with pytest.raises(Redelivered):
            apply(unit)
    fault.wait()
    assert scene.applied() == (offsets(unit) if landed else [])
    scene.drain(consumer)
    scene.assert_exact()


@pytest.mark.parametrize("pooler", [3], indirect=True)
def test_a_commit_that_reaches_the_pooler_late_is_refused(scene: Scene, consume: Consume, wire: PostgresProxy) -> None:
    """One server connection for the old transaction, one for the unit that waits, one for the watcher.

    With two the watcher would wait for the others, and the unit until the pooler's query_wait_timeout.
    """
    consumer = consume()
    unit = next(iter(consumer))
    fault = wire.hold(close_client=True)
    with pytest.raises(Redelivered):
        apply(unit)
    scene.drain(consumer)
    fault.release()
    scene.assert_exact()


def test_a_handler_that_commits_and_loses_the_connection_is_found_out_through_the_pooler(
    scene: Scene, consume: Consume, wire: PostgresProxy
) -> None:
    unit = next(iter(consume()))
    with pytest.raises(HandlerCommitted), unit:
        record(unit, "test")
        unit.execute("COMMIT")
        wire.cut_all()
        unit.execute("SELECT 1")
    assert scene.applied() == offsets(unit)
    assert "the handler committed" in scene.ledger("halted")[0]


def _committed_without_offsets(units: Units, own: psycopg.Connection[Any]) -> None:
    """Fail in the block of join, and commit all the same."""
    with contextlib.suppress(ZeroDivisionError), next(units).join(own) as unit:
        record(unit, "test")
        raise ZeroDivisionError
    own.commit()


def test_a_server_that_restarts_behind_the_pooler_between_units_changes_nothing_for_joined_ones(
    make_scene: MakeScene,
) -> None:
    """The client's connection to the pooler outlives the server, so nothing may be remembered of when it was made."""
    skip_unless("pgbouncer", pgbouncer_missing())
    with Postgres() as server, PgBouncer(server.conninfo) as pooler:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            migrate(connection)
        journal.create(server.conninfo)
        scene = make_scene(20)
        consumer = scene.consumer(conninfo=pooler.conninfo, max_messages=5)
        units = consumer.units()
        backend = _backend_of_client(consumer)
        with psycopg.connect(pooler.conninfo, prepare_threshold=None) as own:
            with next(units).join(own) as unit:
                record(unit, "test")
            own.commit()
            server.restart()
            # The pooler finds out at its next use that its server connections are dead, and makes new ones.
            with psycopg.connect(pooler.conninfo, autocommit=True, prepare_threshold=None) as other:
                until(lambda: _answers(other), 20, "the pooler to reach the server again")
            with next(units).join(own) as unit:
                record(unit, "test")
            with pytest.raises(UnitNotFinished):
                next(units)
            own.commit()
            _committed_without_offsets(units, own)
            with pytest.raises(HandlerCommitted):
                next(units)
            assert _backend_of_client(consumer) == backend, "the test is in vain if the library connected anew"
        applied = [entry.offset for entry in journal.entries(server.conninfo, scene.topic)]
        assert applied == list(range(15))


def _backend_of_client(consumer: ExactlyOnceConsumer) -> int:
    return id(consumer._session.connection)


def _answers(connection: psycopg.Connection[Any]) -> bool:
    try:
        return connection.execute("SELECT true").fetchone() == (True,)
    except psycopg.OperationalError:
        return False


@pytest.mark.usefixtures("neighbours")
def test_nothing_of_a_unit_leaks_to_the_poolers_other_clients(
    scene: Scene, consume: Consume, pooler: PgBouncer
) -> None:
    scene.drain(consume())
    with psycopg.connect(pooler.conninfo, autocommit=True, prepare_threshold=None) as other:
        for _ in range(20):
            shown = other.execute("SELECT current_setting('application_name'), current_setting('lock_timeout')")
            name, lock_timeout = shown.fetchone() or ("", "")
            assert not name.startswith("exactly_once")
            assert lock_timeout == "0"
    left = scene.query("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'exactly_once:%'")
    assert left == [(0,)]


def test_the_schema_is_made_through_the_pooler(pooler: PgBouncer, name: str) -> None:
    with psycopg.connect(pooler.conninfo, autocommit=True, prepare_threshold=None) as connection:
        migrate(connection, name)
        check(connection, name)
        connection.execute(f"DROP SCHEMA {name} CASCADE".encode())


def test_a_server_that_is_away_behind_the_pooler_is_waited_for_at_the_start(make_scene: MakeScene) -> None:
    """The pooler lets clients in all the same, so a connection alone says nothing; it does not leak either."""
    skip_unless("pgbouncer", pgbouncer_missing())
    with Postgres() as server, PgBouncer(server.conninfo, server_login_retry=1) as pooler:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            migrate(connection)
        journal.create(server.conninfo)
        scene = make_scene(5)
        pool = Pool(pooler.conninfo, size=2)
        server.stop()
        starting = threading.Timer(1, server.start)
        starting.start()
        consumer = scene.consumer(connect=pool.getconn)
        starting.join()
        scene.drain(consumer)
        consumer.close()
        assert pool.out == set()
        assert len(journal.entries(server.conninfo, scene.topic)) == 5
