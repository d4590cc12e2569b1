"""A standby of Postgres is promoted while keys are reserved and confirmed."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from exactly_once import embedded
from exactly_once.ledger.migrate import migrate
from exactly_once.ledger.session import Connection, connector
from exactly_once.publish import FilterUnavailable, PostgresWindow, ProducerFenced, PublishOwner, State
from tests.support.waiting import until

NEW, IN_FLIGHT, DUPLICATE = State.NEW, State.IN_FLIGHT, State.DUPLICATE


class Pair:
    """A primary, its standby, and the way to whichever is the primary now."""

    def __init__(self, primary: embedded.Postgres, standby: embedded.Postgres) -> None:
        self.primary, self.standby = primary, standby
        self.now = primary

    def connect(self) -> Connection:
        return connector(self.now.conninfo)()

    def ask(self, server: embedded.Postgres, statement: str) -> Any:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            row = cursor.fetchone() if cursor.description else None
            return row[0] if row else None

    def set(self, server: embedded.Postgres, setting: str, value: str) -> None:
        self.ask(server, f"ALTER SYSTEM SET {setting} = '{value}'")
        self.ask(server, "SELECT pg_reload_conf()")

    def stop_replication(self) -> None:
        """Let the standby have all that there is, and nothing of what comes."""
        behind = "SELECT pg_current_wal_flush_lsn() - replay_lsn FROM pg_stat_replication"
        until(lambda: self.ask(self.primary, behind) == 0, 30, "the standby")
        self.set(self.standby, "primary_conninfo", "")
        connected = "SELECT count(*) FROM pg_stat_replication"
        until(lambda: self.ask(self.primary, connected) == 0, 30, "the end of replication")

    def fail_over(self) -> None:
        """Crash the primary and promote the standby."""
        self.primary.stop("immediate")
        assert self.ask(self.standby, "SELECT pg_promote()")
        self.now = self.standby


@pytest.fixture
def pair(own_servers: None) -> Iterator[Pair]:
    with embedded.Postgres() as primary:
        with psycopg.connect(primary.conninfo, autocommit=True) as connection:
            migrate(connection)
        # Beside the primary's own directory, which its account can reach.
        directory = Path(f"{primary.data_directory.parent}-standby")
        try:
            with _standby(primary, directory) as standby:
                made = Pair(primary, standby)
                until(lambda: made.ask(primary, "SELECT count(*) FROM pg_stat_replication"), 30, "replication")
                yield made
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _standby(primary: embedded.Postgres, directory: Path) -> embedded.Postgres:
    standby = embedded.Postgres(directory=directory)
    backup = [primary.binary("pg_basebackup"), "-d", primary.conninfo, "-D", standby.data_directory, "-R"]
    subprocess.run([*map(str, backup), "--checkpoint=fast", "--no-sync"], check=True)
    return standby


def window(pair: Pair) -> tuple[PublishOwner, PostgresWindow]:
    owner = PublishOwner(connect=pair.connect)
    return owner, PostgresWindow(owner, scope="t", seconds=3600)


@pytest.mark.fault("E4")
def test_with_synchronous_replication_no_key_is_lost_under_load(pair: Pair) -> None:
    pair.set(pair.primary, "synchronous_standby_names", "*")
    sync = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
    until(lambda: pair.ask(pair.primary, sync), 30, "a synchronous standby")
    confirmed, stop, numbers = list[int](), threading.Event(), itertools.count()
    owner, made = window(pair)

    def run() -> None:
        while not stop.is_set():
            keys = [next(numbers) for _ in range(20)]
            if retry(partial(made.reserve_many, keys), stop) is None:
                return
            if retry(partial(confirm, made, keys), stop):
                confirmed.extend(keys)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until(lambda: len(confirmed) > 500, 60, "load")
        pair.fail_over()
        before = len(confirmed)
        until(lambda: len(confirmed) > before + 500, 60, "load after the failover")
    finally:
        stop.set()
        thread.join(60)
    assert set(made.reserve_many(confirmed)) == {DUPLICATE}
    owner.close()


def confirm(made: PostgresWindow, keys: list[int]) -> bool:
    """Confirm, and say that it worked."""
    made.confirm_many(keys)
    return True


def retry(work: Callable[[], Any], stop: threading.Event) -> Any:
    """Repeat what an unavailable database refuses."""
    while True:
        try:
            return work()
        except FilterUnavailable:
            if stop.wait(0.1):
                return None


@pytest.mark.fault("E4", more=True)
def test_with_asynchronous_replication_the_last_keys_may_be_sent_again(pair: Pair) -> None:
    """Fault E4: what had not reached the standby is new again. It is stated, and nothing worse happens."""
    owner, made = window(pair)
    made.reserve_many(["replicated", "in flight"])
    made.confirm("replicated")
    pair.stop_replication()
    made.reserve("too late")
    made.confirm("too late")
    pair.fail_over()
    states = retry(lambda: made.reserve_many(["replicated", "too late", "in flight"]), threading.Event())
    assert states == [DUPLICATE, NEW, IN_FLIGHT]
    owner.close()


@pytest.mark.fault("E4", more=True)
def test_a_scope_that_a_failover_has_lost_shares_no_keys_with_the_next_one(pair: Pair) -> None:
    """The new primary gives the number of the lost scope to another one."""
    owner = PublishOwner(connect=pair.connect)
    pair.stop_replication()
    made = PostgresWindow(owner, scope="made too late", seconds=3600)
    made.reserve("a")
    pair.fail_over()
    other = retry(lambda: PostgresWindow(owner, scope="the next one", seconds=3600), threading.Event())
    made.confirm("a")
    made.reserve("b")
    made.confirm("b")
    assert other.reserve_many(["a", "b"]) == [NEW, NEW]
    assert made.reserve_many(["a", "b"]) == [DUPLICATE, DUPLICATE]
    owner.close()


@pytest.mark.fault("E4", more=True)
def test_an_owner_that_a_failover_has_lost_settles_nothing_of_the_next_one(pair: Pair) -> None:
    """A number of a sequence would be given to both."""
    pair.stop_replication()
    lost, theirs = window(pair)
    theirs.reserve_many(["released", "unknown"])
    pair.fail_over()
    heir, ours = retry(partial(window, pair), threading.Event())
    assert ours.reserve_many(["released", "unknown"]) == [NEW, NEW]
    retry(partial(theirs.release, "released"), threading.Event())
    theirs.mark_unknown("unknown")
    with pytest.raises(ProducerFenced):
        theirs.reserve("more")
    lost.close()
    third, other = window(pair)
    assert other.reserve_many(["released", "unknown"]) == [IN_FLIGHT, IN_FLIGHT]
    assert ours.reserve("more") is NEW
    heir.close()
    third.close()
