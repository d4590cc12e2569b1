"""One life of the server and the next: what is known of a transaction id is true within one of them only."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from exactly_once.embedded import Postgres
from exactly_once.ledger.migrate import migrate
from exactly_once.ledger.session import Begun, Session, connector
from exactly_once.ledger.sql import query
from tests.support.roles import as_role
from tests.support.waiting import until

ODD = "-c TimeZone=America/Chicago -c DateStyle=SQL,DMY -c extra_float_digits=-15 -c IntervalStyle=iso_8601"


@pytest.fixture(scope="module")
def server(own_servers: None) -> Iterator[Postgres]:
    """A server of these tests' own, in a time zone that is not UTC."""
    # Nothing but the tests takes ids, nor writes the next one into the log.
    quiet = {"autovacuum": "off", "wal_level": "minimal", "max_wal_senders": "0"}
    with Postgres(settings={"timezone": "Europe/Paris", **quiet}) as server:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            migrate(connection)
            connection.execute("CREATE ROLE somebody LOGIN")
        yield server


@pytest.fixture
def session(server: Postgres) -> Iterator[Session]:
    session = Session(connector(server.conninfo), schema="exactly_once")
    yield session
    session.close()


def begun_on(server: Postgres, session: Session, *, options: str = "", role: str = "postgres") -> Begun:
    """What an application's connection tells of its open transaction; it commits."""
    conninfo = server.conninfo if role == "postgres" else as_role(server.conninfo, role)
    with psycopg.connect(conninfo, options=options) as connection:
        return session.join(connection)


def leave_an_id_without_a_trace(server: Postgres, session: Session) -> Begun:
    """Begin a transaction and have the whole server crash before anything of it is durable."""
    begun = session.begin("READ COMMITTED")
    os.kill(begun.pid, signal.SIGKILL)
    until(lambda: _life_of(server) not in ("", begun.incarnation), 30, "the server to notice, and to recover")
    session.discard()
    return begun


def _life_of(server: Postgres) -> str:
    """The life that the server is in, or nothing while it recovers."""
    try:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            return str(connection.execute(sql.SQL("SELECT {}").format(query("incarnation", ""))).fetchall()[0][0])
    except psycopg.OperationalError:
        return ""


@pytest.mark.parametrize("options", ["", ODD], ids=["defaults", "odd settings"])
@pytest.mark.parametrize("role", ["postgres", "somebody"])
def test_the_life_is_the_same_for_every_session_and_role(
    server: Postgres, session: Session, options: str, role: str
) -> None:
    here = session.begin("READ COMMITTED")
    assert begun_on(server, session, options=options, role=role).incarnation == here.incarnation


@pytest.mark.parametrize("target", ["bgwriter", "wal", "io", "archiver"])
def test_a_reset_of_statistics_begins_no_new_life(server: Postgres, session: Session, target: str) -> None:
    begun = session.begin("READ COMMITTED")
    session.roll_back()
    with psycopg.connect(server.conninfo, autocommit=True) as monitor:
        monitor.execute("SELECT pg_stat_reset_shared(%s)", (target,))
        monitor.execute("SELECT pg_stat_reset()")
    assert session.begin("READ COMMITTED").incarnation == begun.incarnation
    session.discard()  # else it would be asked inside of the second one
    committed = begun_on(server, session)
    assert session.status(committed) == "committed"


def test_an_id_that_a_crash_gives_out_again_is_not_believed(server: Postgres, session: Session) -> None:
    """The postmaster lives on when a backend is killed; every crash under it begins another life."""
    lives = set()
    for _ in range(3):
        lost = leave_an_id_without_a_trace(server, session)
        another = begun_on(server, session)
        while int(another.xid) < int(lost.xid):  # ids before it left no trace either
            another = begun_on(server, session)
        assert another.xid == lost.xid, "the test is in vain unless the id is given out again"
        assert session.status(lost) == "aborted"
        assert session.status(another) == "committed"
        assert session.outcome(lost) == "aborted"
        lives.add(lost.incarnation)
    assert len(lives) == 3


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_begins_a_new_life(server: Postgres, session: Session, mode: str) -> None:
    before = begun_on(server, session)
    server.restart(mode)  # type: ignore[arg-type]
    session.discard()
    after = begun_on(server, session)
    assert before.incarnation != after.incarnation
    assert session.status(before) == "aborted", "nobody can say, and no COMMIT of ours was sent"
    assert session.status(after) == "committed"


def test_only_the_backend_of_that_very_transaction_is_ended(server: Postgres, session: Session) -> None:
    """Another life may have given id and pid to somebody else."""
    with psycopg.connect(server.conninfo) as other:
        begun = session.join(other)
        for stranger in (
            begun._replace(incarnation="another life"),
            begun._replace(pid=begun.pid + 1),
            begun._replace(xid=str(int(begun.xid) + 1)),
        ):
            session.end(stranger)
        other.execute("SELECT 1")
        other.execute("SET LOCAL application_name = 'payments'")
        session.end(begun)
        with pytest.raises(psycopg.OperationalError):
            other.execute("SELECT 1")
        other.close()
