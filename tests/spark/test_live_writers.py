"""A transaction of Spark that lives is left alone by whoever waits for what it has locked, however long that takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import psycopg
import pytest
from psycopg import sql

from exactly_once import _failpoints
from exactly_once.ledger import stale_owners
from exactly_once.ledger.session import Session, connector
from exactly_once.ledger.stale_owners import StaleBackendTerminator
from tests.spark.attempts import CountingPlace, Place, run
from tests.spark.staged import Run, Target
from tests.support.waiting import SPARK_SECONDS, until

# A sign of life comes every tenth of a second.
STILL, UNBOUNDED = 3.0, 4.0
LIVES = """
    SELECT coalesce(bool_and(EXISTS (
        SELECT FROM pg_stat_activity AS s
        WHERE s.application_name = 'exactly_once_alive:' || blocker
          AND s.state_change > clock_timestamp() - interval '1 second')), true)
    FROM unnest(pg_blocking_pids(%s)) AS blocker
"""
"""Whether all that a backend waits for have shown life a moment ago: not where this process was stopped itself."""


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything of the watcher far shorter; of what it waits for only the order counts."""
    for name, seconds in {
        "FROZEN_AFTER_SECONDS": 0.2,
        "STILL_SECONDS": STILL,
        "UNBOUNDED_SECONDS": UNBOUNDED,
        "_YOUNG_SECONDS": 0.4,
        "_TURN_SECONDS": 0.05,
        "_SIGN_SECONDS": 0.1,
        "_LONGEST_PAUSE_SECONDS": 0.1,
    }.items():
        monkeypatch.setattr(stale_owners, name, seconds)
    yield
    _failpoints.disarm()


class Waiter:
    """A transaction of another group that wants a table which somebody writes."""

    def __init__(self, conninfo: str, table: str) -> None:
        self.session = Session(connector(conninfo), schema="exactly_once")
        self.table = table
        self.watcher = StaleBackendTerminator(
            self.session.connect, schema="exactly_once", group_id="w", instance=self.session.instance
        )
        self.looks = 0
        self._observer = psycopg.connect(conninfo, autocommit=True)
        look = self.watcher._end_blockers

        def count(watched: Any) -> None:
            if self._observer.execute(LIVES, (watched.pid,)).fetchone() == (True,):
                look(watched)
                self.looks += 1

        self.watcher._end_blockers = count  # type: ignore[method-assign]

    def wait(self) -> None:
        """Wait for the table, and have what stands still in the way ended."""
        begun = self.session.begin("READ COMMITTED")
        self.watcher.watch(begun.pid, connection=self.session.connection)
        self.session.connection.execute(
            sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(sql.Identifier(self.table))
        )
        self.session.roll_back()

    def close(self) -> None:
        self.watcher.close()
        self.session.close()
        self._observer.close()


def test_live_transactions_are_left_alone_in_every_mode(conninfo: str, name: str, db: psycopg.Connection[Any]) -> None:
    """Of batch ids no partition has an owner, and the first publication of a run takes its rows in itself."""
    places = {kind: Place(conninfo, f"{name}_{kind}") for kind in ("batch", "partition", "ids")}
    for place in places.values():
        db.execute(f'CREATE TABLE {place.name} (partition int NOT NULL, "offset" bigint NOT NULL)')
    works = {kind: places[kind].work(places[kind].owners(), places[kind].ranges(5)) for kind in ("batch", "partition")}
    works["ids"] = CountingPlace(places["ids"], "query").work(0)
    source = Run(Target(conninfo, f"{name}_source"))
    staged = source.stage(source.rows(0, range(5)))
    go = threading.Event()
    have_written = threading.Semaphore(0)

    def hold() -> None:
        have_written.release()
        assert go.wait(SPARK_SECONDS)

    _failpoints.arm("guarded", hold)
    with ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        stack.callback(go.set)
        writers: list[Future[Any]] = [
            pool.submit(run, "batch", works["batch"], [places["batch"].rows(range(5)), places["batch"].mark()]),
            pool.submit(run, "partition", works["partition"], [places["partition"].rows(range(5))]),
            pool.submit(run, "batch", works["ids"], [places["ids"].rows(range(5)), places["ids"].mark()]),
            pool.submit(source.publish, staged),
        ]
        for _ in writers:
            assert have_written.acquire(timeout=120)
        tables = [*(place.name for place in places.values()), source.target.name]
        waiters = [stack.enter_context(closing(Waiter(conninfo, table))) for table in tables]
        waiting = [pool.submit(waiter.wait) for waiter in waiters]
        time.sleep(UNBOUNDED + STILL)
        before = [waiter.looks for waiter in waiters]
        until(
            lambda: all(waiter.looks > looks + 5 for waiter, looks in zip(waiters, before, strict=True)),
            120,
            "looks of each watcher at writers that show life",
        )
        go.set()
        for each in [*writers, *waiting]:
            each.result(60)
        assert [waiter.watcher.ended for waiter in waiters] == [0] * 4
    for place in places.values():
        assert place.written() == [(0, offset) for offset in range(5)]
        place.close()
    assert source.target.offsets() == [(0, offset) for offset in range(5)]
