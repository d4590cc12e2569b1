"""A failover that loses commits, between the driver's look at the ledger and the end of its batch: never in silence.

Tasks, batch ids and publications are called as Spark calls them, without Spark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from exactly_once import _failpoints
from exactly_once._model import Partition
from spark_sink import LedgerBehindCheckpoint
from spark_sink.attempt import Work
from spark_sink.ranges import remaining
from tests.spark.attempts import CountingPlace, Place, run
from tests.spark.staged import Run, Target
from tests.support.standby import primary_and_standby
from tests.support.waiting import until

both = pytest.mark.parametrize("transaction", ["batch", "partition"])


def make_place(conninfo: str, name: str) -> Place:
    with psycopg.connect(conninfo) as connection:
        connection.execute(f'CREATE TABLE {name} (partition int NOT NULL, "offset" bigint NOT NULL)')
    return Place(conninfo, name)


def lose(db: psycopg.Connection[Any], place: Place, from_offset: int) -> None:
    """Set table and ledger back together, as a failover does; token and epoch are older than what it loses."""
    db.execute(f'DELETE FROM {place.name} WHERE "offset" >= %s', (from_offset,))
    db.execute("UPDATE exactly_once.ledger SET next_offset = %s WHERE group_id = %s", (from_offset, place.name))


class Driver:
    """What the driver does for one batch after the other of one partition."""

    def __init__(self, place: Place, transaction: str) -> None:
        self.place, self.transaction = place, transaction
        self.owners = place.owners()

    def take(self, offsets: range) -> Work:
        """Take the rows; what is returned travels to the tasks."""
        self.ranges = self.place.ranges(offsets.stop, start=offsets.start)
        return self.place.work(self.owners, self.ranges, transaction=self.transaction)

    def attempt(self, work: Work, offsets: range) -> None:
        """Do what a task does."""
        self.result = run(self.transaction, work, self.place.input(self.transaction, offsets))

    def finish(self) -> None:
        """Do what follows behind the tasks."""
        found = {p: held.expected for p, held in self.owners.held.items()}
        reached = {Partition(topic, number): offset for topic, number, offset in self.result["reached"]}
        self.owners.finish(remaining(self.ranges, found, self.place.group), reached)

    def write(self, offsets: range) -> None:
        """Do all of it."""
        self.attempt(self.take(offsets), offsets)
        self.finish()


@both
def test_what_an_attempt_finds_below_its_drivers_row_is_refused(
    place: Place, transaction: str, db: psycopg.Connection[Any]
) -> None:
    driver = Driver(place, transaction)
    driver.write(range(50))
    driver.write(range(50, 100))
    work = driver.take(range(100, 150))
    lose(db, place, 50)
    for _ in range(2):  # the retry is refused as well
        with pytest.raises(LedgerBehindCheckpoint, match=r"at offset 50.* on at 100, so 50 offsets"):
            driver.attempt(work, range(100, 150))
    assert place.ledger() == [50]
    assert len(place.written()) == 50


@both
def test_what_is_lost_between_an_attempts_look_and_its_commit_is_refused(
    place: Place, transaction: str, db: psycopg.Connection[Any]
) -> None:
    driver = Driver(place, transaction)
    driver.write(range(50))
    work = driver.take(range(50, 100))
    _failpoints.arm("guarded", lambda: lose(db, place, 20))
    try:
        with pytest.raises(LedgerBehindCheckpoint, match=r"at offset 20.* on at 50"):
            driver.attempt(work, range(50, 100))
    finally:
        _failpoints.disarm()
    assert place.ledger() == [20]


@both
def test_a_retry_writes_again_what_the_failover_lost_of_its_own_batch(
    place: Place, transaction: str, db: psycopg.Connection[Any]
) -> None:
    driver = Driver(place, transaction)
    driver.write(range(50))
    work = driver.take(range(50, 100))
    driver.attempt(work, range(50, 100))
    lose(db, place, 50)
    driver.attempt(work, range(50, 100))
    driver.finish()
    assert place.written() == [(0, offset) for offset in range(100)]
    assert place.ledger() == [100]


@both
def test_what_is_lost_behind_the_tasks_is_refused_by_the_driver(
    place: Place, transaction: str, db: psycopg.Connection[Any]
) -> None:
    driver = Driver(place, transaction)
    driver.write(range(50))
    driver.attempt(driver.take(range(50, 100)), range(50, 90))  # a filter has dropped the last ten
    lose(db, place, 50)
    with pytest.raises(LedgerBehindCheckpoint, match="at offset 50"):
        driver.finish()
    assert place.ledger() == [50]


@both
def test_an_attempt_behind_one_that_landed_tells_how_far_that_came(place: Place, transaction: str) -> None:
    """Its answer was lost, and the driver compares all the same."""
    driver = Driver(place, transaction)
    work = driver.take(range(50))
    for _ in range(2):
        driver.attempt(work, range(50))
    driver.finish()
    assert place.ledger() == [50]


@pytest.mark.parametrize("moment", ["before the attempt", "before its commit"])
def test_a_batch_that_is_not_the_next_one_is_not_counted(
    place: Place, moment: str, db: psycopg.Connection[Any]
) -> None:
    counting = CountingPlace(place, "query")
    driver = counting.driver()

    def set_back() -> None:
        db.execute(f'DELETE FROM {place.name} WHERE "offset" >= 50')
        db.execute("UPDATE exactly_once.ledger SET next_offset = 1 WHERE group_id = %s", (place.name,))

    for batch_id in range(2):
        work = counting.work(batch_id, driver)
        run("batch", work, place.input("batch", range(50 * batch_id, 50 * batch_id + 50)))
    work = counting.work(2, driver)
    if moment == "before the attempt":
        set_back()
    else:
        _failpoints.arm("guarded", set_back)
    try:
        for _ in range(2):
            with pytest.raises(LedgerBehindCheckpoint, match="counted batch 0, Spark goes on with batch 2"):
                run("batch", work, place.input("batch", range(100, 150)))
            _failpoints.disarm()
    finally:
        _failpoints.disarm()
    assert len(place.written()) == 50


@pytest.mark.parametrize("ledger", ["offsets", "batch-id"])
@pytest.mark.parametrize("lost", ["one batch", "all of the run", "its registration, too"])
def test_a_publication_that_is_not_the_next_one_of_its_run_is_refused(
    conninfo: str, name: str, db: psycopg.Connection[Any], ledger: str, lost: str
) -> None:
    target = Target(conninfo, name)
    earlier = Run(target, ledger=ledger)
    earlier.write(earlier.rows(0, range(50)))
    run = Run(target, ledger=ledger)
    if lost == "one batch":
        run.write(run.rows(0, range(50, 60)), batch_id=1)
    elif lost == "all of the run":
        run.register(1)
    tables = ("ledger", "spark_run", "spark_query")
    before = {t: db.execute(f"SELECT * FROM exactly_once.{t} WHERE group_id = %s", (name,)).fetchall() for t in tables}
    first = 2 if lost == "one batch" else 1
    run.write(run.rows(0, range(60, 100)), batch_id=first)
    for table, rows in before.items():
        db.execute(f"DELETE FROM exactly_once.{table} WHERE group_id = %s", (name,))
        for row in rows:
            values = [Jsonb(value) if isinstance(value, list) else value for value in row]
            db.execute(f"INSERT INTO exactly_once.{table} VALUES ({', '.join(['%s'] * len(row))})", values)
    db.execute(f'DELETE FROM {name} WHERE "offset" >= 60')
    for _ in range(2):
        with pytest.raises(LedgerBehindCheckpoint, match=f"batch {first - 1}, Spark goes on with batch {first + 1}"):
            run.write(run.rows(0, range(100, 150)), batch_id=first + 1)
    assert max(offset for _, offset in target.offsets()) < 60


@pytest.mark.usefixtures("own_servers")
def test_a_lagging_standby_that_is_promoted_is_refused_by_every_path(name: str) -> None:
    """The second of three batches was committed on the primary only; the driver has seen that it was."""
    with primary_and_standby() as pair:
        drivers = {kind: Driver(make_place(pair.conninfo, f"{name}_{kind}"), kind) for kind in ("batch", "partition")}
        source = Run(Target(pair.conninfo, f"{name}_source"))
        counting = CountingPlace(make_place(pair.conninfo, f"{name}_ids"), "query")
        counter = counting.driver()

        def count(work: Work) -> None:
            run("batch", work, counting.place.input("batch", range(50)))

        def write(batch_id: int) -> None:
            offsets = range(50 * batch_id, 50 * batch_id + 50)
            for driver in drivers.values():
                driver.write(offsets)
            count(counting.work(batch_id, counter))
            source.write(source.rows(0, offsets), batch_id=batch_id)

        write(0)
        until(pair.is_streaming, 30, "a standby that has the first batch")
        pair.standby.stop()
        write(1)
        works = {kind: driver.take(range(100, 150)) for kind, driver in drivers.items()}
        next_count = counting.work(2, counter)
        pair.fail_over()
        third: list[Callable[[], object]] = [
            *(lambda k=kind: drivers[k].attempt(works[k], range(100, 150)) for kind in drivers),
            lambda: count(next_count),
            lambda: source.write(source.rows(0, range(100, 150)), batch_id=2),
        ]
        for path in third:
            with pytest.raises(LedgerBehindCheckpoint):
                path()
        for place in [*(driver.place for driver in drivers.values()), counting.place]:
            assert len(place.written()) == 50
            place.close()
        assert len(source.target.written()) == 50
