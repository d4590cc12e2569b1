"""A database that is away or busy, or ends a connection: every path of a batch waits, and tries whole transactions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from exactly_once.embedded import Postgres
from exactly_once.ledger.migrate import migrate
from spark_sink.publication import register
from tests.spark.attempts import CountingPlace, Place, run
from tests.spark.staged import Run, Target, rows
from tests.support.waiting import until

Db = psycopg.Connection[Any]
Submit = Callable[..., Future[Any]]


@pytest.fixture
def submit() -> Iterator[Submit]:
    """Run calls in other threads."""
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def is_waited_for(caplog: pytest.LogCaptureFixture, group: str) -> bool:
    """Tell whether the log says that a group waits."""
    return any(
        record.levelno == logging.WARNING and getattr(record, "group", None) == group and "waiting" in record.message
        for record in caplog.records
    )


@pytest.mark.usefixtures("own_servers")
def test_a_server_that_is_away_ends_no_path_of_a_batch(
    name: str, submit: Submit, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes between the driver's look at the ledger and the tasks, and comes back when all of them wait."""
    with Postgres() as server:
        with psycopg.connect(server.conninfo, autocommit=True) as db:
            migrate(db)
            places = {kind: Place(server.conninfo, f"{name}_{kind}") for kind in ("batch", "partition", "ids", "next")}
            for place in places.values():
                db.execute(f'CREATE TABLE {place.name} (partition int NOT NULL, "offset" bigint NOT NULL)')
        source = Run(Target(server.conninfo, f"{name}_source"))
        staged = source.stage(source.rows(0, range(5)))
        late = Run(Target(server.conninfo, f"{name}_late"))
        works = {kind: places[kind].work(places[kind].owners(), places[kind].ranges(5)) for kind in TASKS}
        works["ids"] = CountingPlace(places["ids"], "query").work(0)
        following = places["next"].owners()
        server.stop("fast")
        calls: dict[str, Callable[[], object]] = {
            places["batch"].name: lambda: run("batch", works["batch"], places["batch"].input("batch", range(5))),
            places["partition"].name: lambda: run(
                "partition", works["partition"], places["partition"].input("partition", range(5))
            ),
            places["ids"].name: lambda: run("batch", works["ids"], places["ids"].input("batch", range(5))),
            places["next"].name: lambda: (
                places["next"].options().patiently(following.take, places["next"].ranges(5), batch_id=0)
            ),
            source.target.name: lambda: source.publish(staged),
            late.target.name: lambda: register(late.options, late.origin()),
        }
        answers = {group: submit(call) for group, call in calls.items()}
        for group in calls:
            until(lambda group=group: is_waited_for(caplog, group), 30, f"{group} to wait")  # type: ignore[misc]
        server.start()
        for answer in answers.values():
            answer.result(60)
        for kind in (*TASKS, "ids"):
            assert places[kind].written() == [(0, offset) for offset in range(5)]
        assert source.target.offsets() == [(0, offset) for offset in range(5)]
        assert places["next"].ledger() == [0]
        for place in places.values():
            place.close()


TASKS = ("batch", "partition")


@pytest.mark.parametrize("trouble", ["lock time-out", "terminated", "cancelled"])
def test_a_publication_is_tried_again_as_a_whole(
    conninfo: str, name: str, db: Db, submit: Submit, caplog: pytest.LogCaptureFixture, *, trouble: str
) -> None:
    """A second try inside of the transaction that is broken found that one, and ended the query with it."""
    target = Target(conninfo, name)
    Run(target).write(rows(name, 0, range(5)))
    options = (
        {"conninfo": make_conninfo(conninfo, options="-c lock_timeout=200ms")} if trouble == "lock time-out" else {}
    )
    source = Run(target, **options)
    staged = source.stage(source.rows(0, range(5, 9)))
    with psycopg.connect(conninfo, application_name="somebody") as holder:
        holder.execute("SELECT FROM exactly_once.ledger WHERE group_id = %s FOR UPDATE", (name,))
        answer = submit(source.publish, staged)
        if trouble == "lock time-out":
            until(lambda: is_waited_for(caplog, name), 20, "the publication to wait")
        else:
            end_waiting(db, name, trouble)
            until(lambda: is_waited_for(caplog, name), 20, "the publication to try again")
        holder.rollback()
    answer.result(60)
    assert target.offsets() == [(0, offset) for offset in range(9)]
    told = [r.message for r in caplog.records if "waiting" in r.message]
    assert all("current transaction is aborted" not in text and "the connection is lost" not in text for text in told)


def end_waiting(db: Db, name: str, trouble: str) -> None:
    """End the statement of the publication that waits for the row, or its backend."""
    waiting = """
        SELECT pid FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND query LIKE '%%lock_row%%' AND application_name LIKE 'exactly\\_once:%%'
    """
    ((pid,),) = until(lambda: db.execute(waiting).fetchall(), 20, "the publication to wait for the row")
    db.execute("SELECT pg_terminate_backend(%s)" if trouble == "terminated" else "SELECT pg_cancel_backend(%s)", (pid,))


def test_a_role_that_is_read_only_by_default_is_told_so(conninfo: str, name: str) -> None:
    """The server does take writes, so nobody need look for another one."""
    read_only = make_conninfo(conninfo, options="-c default_transaction_read_only=on")
    source = Run(Target(conninfo, name), conninfo=read_only, patienceSeconds="0.1")
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction, match=r"default_transaction_read_only is on for \w+ at"):
        source.register()
