"""The fault proxy against a real Postgres: on which side of a statement each fault leaves the server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest

from exactly_once.embedded.proxy import COMMIT, PostgresProxy
from tests.support.pgbouncer import PgBouncer, pgbouncer_missing
from tests.support.require import skip_unless
from tests.support.waiting import until

INSERT = "INSERT INTO effect VALUES (1)"


class Observer:
    """Looks at the server past the proxy."""

    def __init__(self, conninfo: str) -> None:
        self._connection = psycopg.connect(conninfo, autocommit=True)
        self._connection.execute("DROP TABLE IF EXISTS effect")
        self._connection.execute("CREATE TABLE effect (id integer)")

    def close(self) -> None:
        """Leave no table behind."""
        self._connection.execute("DROP TABLE effect")
        self._connection.close()

    def effects(self) -> int:
        """How many rows are committed."""
        (count,) = self._one("SELECT count(*) FROM effect")
        assert isinstance(count, int)
        return count

    def state(self, pid: int) -> object:
        """The state of a backend, None if it has ended."""
        return self._one("SELECT max(state) FROM pg_stat_activity WHERE pid = %s", pid)[0]

    def await_end(self, pid: int) -> None:
        """Wait until a backend has ended."""
        until(lambda: self.state(pid) is None, 10, f"the end of backend {pid}")

    def _one(self, query: str, *parameters: object) -> tuple[object, ...]:
        row = self._connection.execute(query, parameters).fetchone()
        assert row is not None
        return tuple(row)


@pytest.fixture
def observer(postgres_conninfo: str) -> Iterator[Observer]:
    observer = Observer(postgres_conninfo)
    yield observer
    observer.close()


@pytest.fixture
def proxy(postgres_conninfo: str, observer: Observer) -> Iterator[PostgresProxy]:
    # after the observer: the table can be dropped only once the proxy has ended what it held open
    with PostgresProxy(postgres_conninfo, record=True) as proxy:
        yield proxy


@pytest.fixture
def connection(proxy: PostgresProxy) -> Iterator[psycopg.Connection]:
    connection = psycopg.connect(proxy.conninfo, connect_timeout=60)
    yield connection
    connection.close()


@pytest.fixture
def pid(connection: psycopg.Connection) -> int:
    return connection.info.backend_pid  # taken now: a broken connection says 0


@contextmanager
def background(proxy: PostgresProxy) -> Iterator[Executor]:
    """Give a thread for a call that the proxy makes wait, and end the call when the test fails meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool
        except BaseException:
            proxy.cut_all()
            raise


def insert_in_pipeline(connection: psycopg.Connection) -> None:
    with connection.pipeline():
        connection.execute(INSERT)
        connection.execute("COMMIT")


@pytest.mark.parametrize(
    ("sql", "is_commit"),
    [
        ("COMMIT", True),
        (" commit ; ", True),
        ("COMMIT WORK", True),
        ("SELECT exactly_once.advance(1);\ncommit", True),
        ("COMMIT; SELECT 1", False),
        ("COMMIT PREPARED 'x'", False),
        ("SELECT 'a; COMMIT'", False),
        ("INSERT INTO recommit VALUES (1)", False),
        ("ROLLBACK", False),
    ],
)
def test_commit_pattern_aims_at_a_last_statement_that_commits(sql: str, *, is_commit: bool) -> None:
    assert bool(COMMIT.search(sql)) is is_commit


def test_without_a_fault_everything_passes_large_rows_and_copy_included(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer
) -> None:
    text = "x" * 3_000_000
    assert connection.execute("SELECT %s::text", (text,)).fetchone() == (text,)
    with connection.cursor() as cursor, cursor.copy("COPY effect FROM STDIN") as copy:
        for number in range(20_000):
            copy.write_row((number,))
    connection.commit()
    assert observer.effects() == 20_000


def test_clients_that_ask_for_encryption_are_served_in_the_clear(proxy: PostgresProxy) -> None:
    with psycopg.connect(proxy.conninfo, sslmode="prefer", gssencmode="disable") as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_cancel_requests_reach_the_server(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer, pid: int
) -> None:
    connection.execute("SELECT 1")  # begins the transaction, so that "active" means the next statement
    with background(proxy) as pool:
        sleeper = pool.submit(connection.execute, "SELECT pg_sleep(60)")
        until(lambda: observer.state(pid) == "active", 10, "the query to run")
        connection.cancel_safe(timeout=60)
        with pytest.raises(psycopg.errors.QueryCanceled):
            sleeper.result(60)


def test_cut_before_commit_does_not_commit(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer, pid: int
) -> None:
    fault = proxy.cut_before()
    connection.execute(INSERT)
    with pytest.raises(psycopg.OperationalError) as caught:
        connection.commit()
    fault.wait()
    assert caught.value.sqlstate is None
    assert fault.sql == "COMMIT"
    assert not fault.answered.is_set()
    observer.await_end(pid)
    assert observer.effects() == 0


def test_cut_after_commit_commits_and_the_client_sees_the_same_error(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer
) -> None:
    fault = proxy.cut_after()
    connection.execute(INSERT)
    with pytest.raises(psycopg.OperationalError) as caught:
        connection.commit()
    fault.wait()
    assert caught.value.sqlstate is None
    assert fault.transaction_status == "I"
    assert observer.effects() == 1


def test_cut_after_tells_when_the_commit_that_it_let_through_failed(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer, pid: int
) -> None:
    fault = proxy.cut_after()
    connection.execute(INSERT)
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1 / 0; COMMIT")
    fault.wait()
    assert fault.transaction_status == "E"
    observer.await_end(pid)
    assert observer.effects() == 0


@pytest.mark.parametrize("after", [False, True])
def test_cuts_aim_at_a_commit_that_ends_a_query_of_several_statements(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer, pid: int, *, after: bool
) -> None:
    fault = proxy.cut_after() if after else proxy.cut_before()
    connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError):
        connection.execute(f"{INSERT}; COMMIT")
    fault.wait()
    observer.await_end(pid)
    assert observer.effects() == int(after)


@pytest.mark.parametrize("after", [False, True])
def test_cuts_aim_at_a_commit_in_a_pipeline(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer, pid: int, *, after: bool
) -> None:
    connection.execute("SELECT 1")
    fault = proxy.cut_after() if after else proxy.cut_before()
    with pytest.raises(psycopg.OperationalError):
        insert_in_pipeline(connection)
    fault.wait()
    observer.await_end(pid)
    assert observer.effects() == int(after)


def test_hold_with_the_client_closed_leaves_a_transaction_idle_that_commits_after_release(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer, pid: int
) -> None:
    fault = proxy.hold(close_client=True)
    connection.execute(INSERT)
    with pytest.raises(psycopg.OperationalError):
        connection.commit()
    fault.wait()
    assert connection.broken
    assert observer.state(pid) == "idle in transaction"
    assert observer.effects() == 0
    fault.release()
    fault.wait_answered()
    assert observer.effects() == 1
    observer.await_end(pid)


def test_hold_with_the_client_closed_keeps_all_of_a_pipelined_commit(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer
) -> None:
    connection.execute("SELECT 1")
    fault = proxy.hold(close_client=True)
    with pytest.raises(psycopg.OperationalError):
        insert_in_pipeline(connection)
    fault.wait()
    assert observer.effects() == 0
    fault.release()
    fault.wait_answered()
    assert observer.effects() == 1


def test_hold_with_the_client_kept_delays_its_commit(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer
) -> None:
    fault = proxy.hold(close_client=False)
    connection.execute(INSERT)
    with background(proxy) as pool:
        commit = pool.submit(connection.commit)
        fault.wait()
        assert observer.effects() == 0
        assert not commit.done()
        fault.release()
        commit.result(60)
    assert observer.effects() == 1
    assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_client_that_dies_while_its_commit_is_held_does_not_take_it_back(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer
) -> None:
    fault = proxy.hold(close_client=False)
    connection.execute(INSERT)
    connection.pgconn.send_query(b"COMMIT")
    fault.wait()
    connection.close()
    assert observer.effects() == 0
    fault.release()
    fault.wait_answered()
    assert observer.effects() == 1


def test_hold_answer_has_committed_while_the_client_still_waits(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer
) -> None:
    fault = proxy.hold_answer()
    connection.execute(INSERT)
    with background(proxy) as pool:
        commit = pool.submit(connection.commit)
        fault.wait()
        assert observer.effects() == 1
        assert not commit.done()
        fault.release()
        commit.result(60)
    assert connection.execute("SELECT 1").fetchone() == (1,)


def test_faults_aim_at_the_first_statement_that_matches_and_strike_once(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer
) -> None:
    fault = proxy.cut_after("insert into effect")
    connection.execute("SELECT 1")
    assert not fault.fired.is_set()
    with pytest.raises(psycopg.OperationalError):
        connection.execute(INSERT)
    fault.wait()
    assert fault.transaction_status == "T"
    with psycopg.connect(proxy.conninfo) as second:
        second.execute(INSERT)
    assert observer.effects() == 1


def test_a_predicate_can_aim_at_parameterised_and_prepared_statements(
    proxy: PostgresProxy, connection: psycopg.Connection
) -> None:
    statement = "INSERT INTO effect VALUES (%s)"
    connection.execute(statement, (1,), prepare=True)
    fault = proxy.cut_before(lambda sql: sql.startswith("INSERT") and "$1" in sql)
    with pytest.raises(psycopg.OperationalError):  # only bound by now, prepared before the fault was armed
        connection.execute(statement, (2,), prepare=True)
    fault.wait()
    assert fault.sql == "INSERT INTO effect VALUES ($1)"


def test_black_hole_silences_existing_connections_without_closing_them(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer, pid: int
) -> None:
    connection.execute(INSERT)
    proxy.black_hole()
    with background(proxy) as pool:
        commit = pool.submit(connection.commit)
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(proxy.conninfo, connect_timeout=2)
        proxy.heal()
        with psycopg.connect(proxy.conninfo) as second:
            assert second.execute("SELECT 1").fetchone() == (1,)
        assert not commit.done()
        assert observer.state(pid) == "idle in transaction"
        proxy.cut_all()
        with pytest.raises(psycopg.OperationalError):
            commit.result(60)
    observer.await_end(pid)
    assert observer.effects() == 0


def test_black_hole_swallows_an_answer_on_its_way(
    postgres_conninfo: str,
    proxy: PostgresProxy,
    connection: psycopg.Connection,
    observer: Observer,
    pid: int,
) -> None:
    connection.execute("SELECT 1")  # begins the transaction, so that "active" means the next statement
    with psycopg.connect(postgres_conninfo) as blocker, background(proxy) as pool:
        blocker.execute("LOCK TABLE effect")
        answer = pool.submit(connection.execute, "LOCK TABLE effect")
        until(lambda: observer.state(pid) == "active", 10, "the statement to wait")
        proxy.black_hole()
        blocker.commit()
        until(lambda: observer.state(pid) == "idle in transaction", 10, "the statement to end")
        with pytest.raises(TimeoutError):
            answer.result(0.2)
        proxy.cut_all()
        with pytest.raises(psycopg.OperationalError):
            answer.result(60)


def test_a_connection_attempted_during_a_black_hole_is_served_after_healing(proxy: PostgresProxy) -> None:
    proxy.black_hole()
    with background(proxy) as pool:
        attempt = pool.submit(lambda: psycopg.connect(proxy.conninfo, connect_timeout=30))
        until(lambda: proxy.waiting, 10, "the connection to arrive")
        proxy.heal()
        attempt.result(60).close()


def test_refuse_looks_like_a_database_that_is_down_until_healed(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer, pid: int
) -> None:
    connection.execute(INSERT)
    proxy.refuse()
    with pytest.raises(psycopg.OperationalError):
        connection.commit()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(proxy.conninfo)
    observer.await_end(pid)
    proxy.heal()
    with psycopg.connect(proxy.conninfo) as second:
        second.execute(INSERT)
    assert observer.effects() == 1


def test_cut_all_ends_a_held_commit_without_sending_it(
    proxy: PostgresProxy, connection: psycopg.Connection, observer: Observer, pid: int
) -> None:
    fault = proxy.hold(close_client=True)
    connection.execute(INSERT)
    with pytest.raises(psycopg.OperationalError):
        connection.commit()
    fault.wait()
    proxy.cut_all()
    observer.await_end(pid)
    assert observer.effects() == 0


def test_statements_and_round_trips_are_recorded(proxy: PostgresProxy, connection: psycopg.Connection) -> None:
    before = proxy.round_trips
    connection.execute(INSERT)
    connection.execute("SELECT %s", (1,))
    connection.commit()
    assert proxy.statements == ["BEGIN", INSERT, "SELECT $1", "COMMIT"]
    assert proxy.round_trips - before == 4


def test_a_pipeline_is_one_round_trip(proxy: PostgresProxy, connection: psycopg.Connection) -> None:
    connection.autocommit = True
    before = proxy.round_trips
    with connection.pipeline():
        for _ in range(5):
            connection.execute(INSERT)
    assert proxy.round_trips - before == 1
    assert proxy.statements == [INSERT] * 5


def test_waiting_for_a_fault_that_no_statement_meets_fails(proxy: PostgresProxy) -> None:
    with pytest.raises(AssertionError, match="no statement met the fault"):
        proxy.cut_before().wait(0.01)


def test_leaving_the_proxy_ends_its_threads_and_connections(postgres_conninfo: str, observer: Observer) -> None:
    with PostgresProxy(postgres_conninfo) as proxy:
        connection = psycopg.connect(proxy.conninfo)
        pid = connection.info.backend_pid
        fault = proxy.hold(close_client=False)
        connection.pgconn.send_query(b"COMMIT")
        fault.wait()
    observer.await_end(pid)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("proxy-")]
    connection.close()


@pytest.mark.parametrize(
    "conninfo", ["host=127.0.0.1 port=5432", "postgresql:///postgres?host=/tmp", "postgresql://one,two/postgres"]
)
def test_a_conninfo_that_is_no_tcp_uri_is_refused(conninfo: str) -> None:
    with pytest.raises(ValueError, match="TCP host"):
        PostgresProxy(conninfo)


@pytest.mark.parametrize("mode", ["require", "verify-ca", "verify-full"])
def test_a_conninfo_that_asks_for_encryption_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match="sslmode"):
        PostgresProxy(f"postgresql://me@127.0.0.1/postgres?connect_timeout=5&sslmode={mode}")


def test_a_server_with_an_address_of_ipv6_is_reached() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        skip_unless("ipv6", f"this machine has no ::1: {error}")
        return
    startup = (8).to_bytes(4, "big") + (196608).to_bytes(4, "big")
    with server, PostgresProxy(f"postgresql://me@[::1]:{server.getsockname()[1]}/postgres") as proxy:
        server.settimeout(60)
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.sendall(startup)
            connection, _ = server.accept()
            with connection:
                assert connection.recv(len(startup)) == startup


def test_pgbouncer_pools_transactions(postgres_conninfo: str) -> None:
    skip_unless("pgbouncer", pgbouncer_missing())
    with PgBouncer(postgres_conninfo, pool_size=1) as pooler:
        with (
            psycopg.connect(pooler.conninfo, prepare_threshold=None) as first,
            psycopg.connect(pooler.conninfo, prepare_threshold=None) as second,
        ):
            pids = []
            for connection in (first, second):
                pids.append(connection.execute("SELECT pg_backend_pid()").fetchone())
                connection.commit()
        assert pids[0] == pids[1]
        assert "listening on 127.0.0.1" in pooler.log()


def test_faults_reach_through_a_pooler(postgres_conninfo: str, observer: Observer) -> None:
    skip_unless("pgbouncer", pgbouncer_missing())
    with PostgresProxy(postgres_conninfo) as proxy, PgBouncer(proxy.conninfo) as pooler:
        fault = proxy.cut_after("INSERT.*COMMIT")
        with psycopg.connect(pooler.conninfo, prepare_threshold=None) as connection:
            connection.execute("SELECT 1")
            with pytest.raises(psycopg.OperationalError):
                connection.execute(f"{INSERT}; COMMIT")
        fault.wait()
        assert observer.effects() == 1
