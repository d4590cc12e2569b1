"""Attempts: killed, run twice at once, outrun, fenced. Tasks are called as Spark's workers call them, without Spark."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from exactly_once import _failpoints
from exactly_once._model import Partition
from exactly_once.errors import AlreadyApplied, Fenced, HandlerCommitted, PartitionHalted, TransactionBusy
from exactly_once.ledger import migrate
from exactly_once.ledger.commands import DEFAULT_SCHEMA
from exactly_once.writer import TableError
from spark_sink import IncompleteInput, LedgerBehindCheckpoint, QueryChanged, RowsOutOfOrder, SinkUnit
from spark_sink.ranges import Group, Range, refuse_older, remaining
from tests.spark.attempts import CountingPlace, Place, interrupted, run
from tests.support.waiting import until

both = pytest.mark.parametrize("transaction", ["batch", "partition"])


@pytest.fixture(autouse=True)
def _each_batch_is_written_when_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all of these small ones are one COPY at the end of the input, and nothing can happen in between."""
    monkeypatch.setattr("spark_sink.attempt.ROWS", 1)


def every(*ends: int) -> list[tuple[int, int]]:
    return [(number, offset) for number, end in enumerate(ends) for offset in range(end)]


@both
def test_an_attempt_writes_its_rows_and_moves_the_ledger(place: Place, transaction: str) -> None:
    work = place.work(place.owners(), place.ranges(5, 3))
    result = run(transaction, work, place.input(transaction, range(5), range(3)))
    assert (result["rows"], result["transactions"]) == (8, 1)
    assert place.written() == every(5, 3)
    assert place.ledger() == [5, 3]


@both
def test_a_table_that_a_crash_would_empty_takes_no_rows(
    place: Place, db: psycopg.Connection[Any], transaction: str
) -> None:
    """The driver has looked at it when the run began; somebody has altered it since."""
    work = place.work(place.owners(), place.ranges(5))
    db.execute(f"ALTER TABLE {place.name} SET UNLOGGED")
    with pytest.raises(TableError, match=r"unlogged.*SET LOGGED"):
        run(transaction, work, place.input(transaction, range(5)))
    assert (place.written(), place.ledger()) == ([], [0])
    db.execute(f"ALTER TABLE {place.name} SET LOGGED")
    run(transaction, work, place.input(transaction, range(5)))
    assert (place.written(), place.ledger()) == (every(5), [5])


def test_input_that_ends_without_its_mark_leaves_nothing(place: Place) -> None:
    """What is left of a batch looks like a whole one: this is how 100,000 of 200,000 rows were lost."""
    work = place.work(place.owners(), place.ranges(5))
    with pytest.raises(IncompleteInput):
        run("batch", work, [place.rows(range(3))])
    with pytest.raises(IncompleteInput):
        run("batch", work, [])
    assert (place.written(), place.ledger()) == ([], [0])
    run("batch", work, place.input("batch", range(5)))
    assert (place.written(), place.ledger()) == (every(5), [5])


def test_rows_and_mark_may_come_in_any_batches(place: Place) -> None:
    work = place.work(place.owners(), place.ranges(4))
    run("batch", work, [place.rows(), place.rows(range(1)), place.rows(range(1, 4)), place.rows(), place.mark()])
    assert place.written() == every(4)


def test_input_by_partition_that_ends_early_leaves_a_prefix_and_the_next_attempt_the_rest(place: Place) -> None:
    owners = place.owners()
    ranges = place.ranges(5, 5)
    work = place.work(owners, ranges)
    run("partition", work, [place.rows(range(3))])
    assert (place.written(), place.ledger()) == (every(3), [3, 0])
    result = run("partition", work, [place.rows(range(5), range(5))])
    assert result["dropped"] == 3
    assert (place.written(), place.ledger()) == (every(5, 5), [5, 5])


@both
def test_an_attempt_after_one_that_landed_writes_nothing(place: Place, transaction: str) -> None:
    """A worker that dies after its COMMIT, whose answer nobody got."""
    work = place.work(place.owners(), place.ranges(5))
    for _ in range(2):
        run(transaction, work, place.input(transaction, range(5)))
    assert place.written() == every(5)


@both
def test_of_two_attempts_at_once_one_lands_and_the_other_leaves_no_trace(place: Place, transaction: str) -> None:
    """A speculative twin: both have copied their rows before either moves the ledger."""
    work = place.work(place.owners(), place.ranges(5))
    have_copied = threading.Barrier(2, timeout=120)
    results: list[Any] = []

    def attempt() -> None:
        results.append(run(transaction, work, place.input(transaction, range(5))))

    def copied() -> None:
        have_copied.wait()

    _failpoints.arm("guarded", copied)
    twins = [threading.Thread(target=attempt) for _ in range(2)]
    for twin in twins:
        twin.start()
    for twin in twins:
        twin.join(120)
    assert sorted(r["transactions"] for r in results) == [0, 1]
    assert sorted(r["rows"] for r in results) == [0, 5]
    assert (place.written(), place.ledger()) == (every(5), [5])


def test_a_twin_that_landed_a_prefix_only_makes_the_other_one_fail(place: Place) -> None:
    """It has copied from where the ledger stood before; its next attempt writes the rest."""
    work = place.work(place.owners(), place.ranges(5))

    def twin_lands() -> None:
        run("partition", work, [place.rows(range(2))])

    with pytest.raises(AlreadyApplied):
        run("partition", work, interrupted([place.rows(range(5))], twin_lands))
    run("partition", work, [place.rows(range(5))])
    assert (place.written(), place.ledger()) == (every(5), [5])


@pytest.mark.parametrize("joined", [1, 100])
@pytest.mark.parametrize("before", [0, 2])
def test_rows_behind_the_end_mark_fail_the_batch(
    joined: int, before: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should Spark ever go through the union in another order, a mark in front would prove nothing."""
    monkeypatch.setattr("spark_sink.attempt.ROWS", joined)
    work = place.work(place.owners(), place.ranges(5))
    with pytest.raises(IncompleteInput, match="behind the end mark"):
        run("batch", work, [place.rows(range(before)), place.mark(), place.rows(range(before, 5))])
    assert (place.written(), place.ledger()) == ([], [0])


def test_an_empty_table_behind_the_end_mark_is_nothing(place: Place) -> None:
    work = place.work(place.owners(), place.ranges(4))
    run("batch", work, [place.rows(range(4)), place.mark(), place.rows(), place.rows()])
    assert (place.written(), place.ledger()) == (every(4), [4])


@pytest.mark.parametrize("joined", [1, 100])
def test_a_second_end_mark_fails_the_batch(joined: int, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_sink.attempt.ROWS", joined)
    work = place.work(place.owners(), place.ranges(4))
    with pytest.raises(IncompleteInput):
        run("batch", work, [place.rows(range(4)), place.mark(), place.rows(), place.mark()])
    assert (place.written(), place.ledger()) == ([], [0])


@both
def test_a_zombies_attempt_is_fenced_at_its_commit(place: Place, transaction: str) -> None:
    ranges = place.ranges(5)
    work = place.work(place.owners(), ranges)
    rows = place.input(transaction, range(5))

    def taken() -> None:
        _failpoints.disarm()
        place.owners().take(ranges, batch_id=0)

    _failpoints.arm("guarded", taken)
    with pytest.raises(Fenced):
        run(transaction, work, rows)
    with pytest.raises(Fenced):
        run(transaction, work, rows)
    assert (place.written(), place.ledger()) == ([], [0])


@both
def test_a_lost_answer_to_commit_fails_the_attempt_and_the_ledger_tells_the_next(
    place: Place, transaction: str, db: psycopg.Connection[Any]
) -> None:
    work = place.work(place.owners(), place.ranges(5))

    def cut() -> None:
        _failpoints.disarm()
        raise psycopg.OperationalError("the answer was lost")

    _failpoints.arm("committed", cut)
    with pytest.raises(psycopg.OperationalError, match="the answer was lost"):
        run(transaction, work, place.input(transaction, range(5)))
    assert run(transaction, work, place.input(transaction, range(5))).get("rows", 0) == 0
    assert (place.written(), place.ledger()) == (every(5), [5])


def test_offsets_that_do_not_rise_are_refused_by_partition_and_fine_in_one_batch(place: Place) -> None:
    work = place.work(place.owners(), place.ranges(3))
    for twice in ([place.rows([0, 1, 1])], [place.rows([0, 1]), place.rows([1, 2])], [place.rows([0, 2, 1])]):
        with pytest.raises(RowsOutOfOrder, match="transaction='batch'"):
            run("partition", work, twice)
    assert place.written() == []
    run("batch", work, [place.rows([0, 1, 1, 2]), place.mark()])
    assert place.written() == [(0, 0), (0, 1), (0, 1), (0, 2)]


@both
@pytest.mark.parametrize("offsets", [([5],), ([0], [0])], ids=["beyond the end", "another partition"])
def test_rows_from_outside_of_the_batch_are_refused(place: Place, transaction: str, offsets: Any) -> None:
    """The columns of another source, or the checkpoint of another query."""
    work = place.work(place.owners(), place.ranges(5))
    with pytest.raises(RowsOutOfOrder):
        run(transaction, work, place.input(transaction, *offsets))
    assert (place.written(), place.ledger()) == ([], [0])


@both
def test_also_runs_in_the_transaction_of_the_rows(
    place: Place, transaction: str, name: str, db: psycopg.Connection[Any]
) -> None:
    db.execute(f"CREATE TABLE {name}_sum (rows int, upto bigint)")

    def also(unit: SinkUnit) -> None:
        ((_, upto),) = unit.offsets.values()
        unit.execute(f"INSERT INTO {name}_sum VALUES (%s, %s)", (unit.rows, upto))

    work = place.work(place.owners(), place.ranges(5), in_transaction=also)

    def fail() -> None:
        raise ZeroDivisionError

    _failpoints.arm("advanced", fail)
    with pytest.raises(ZeroDivisionError):
        run(transaction, work, place.input(transaction, range(5)))
    _failpoints.disarm()
    for _ in range(2):
        run(transaction, work, place.input(transaction, range(5)))
    assert db.execute(f"SELECT * FROM {name}_sum").fetchall() == [(5, 5)]
    db.execute(f'ALTER TABLE {name} ADD UNIQUE (partition, "offset"); INSERT INTO {name} VALUES (0, 7), (0, 8)')
    work = place.work(place.owners(), place.ranges(9, start=5), mode="insert-ignore", in_transaction=also)
    run(transaction, work, place.input(transaction, range(5, 9)))
    assert db.execute(f"SELECT * FROM {name}_sum").fetchall() == [(5, 5), (2, 9)], "of rows that were there none counts"


@both
@pytest.mark.parametrize("again", ["COMMIT", "COMMIT; BEGIN"])
def test_also_that_commits_halts_the_partitions(place: Place, transaction: str, again: str) -> None:
    """Its rows are stored and the ledger was not moved: one more attempt would double them."""
    work = place.work(place.owners(), place.ranges(5), in_transaction=lambda unit: unit.execute(again))
    with pytest.raises(HandlerCommitted):
        run(transaction, work, place.input(transaction, range(5)))
    with pytest.raises(PartitionHalted):
        run(transaction, work, place.input(transaction, range(5)))
    assert place.written() == every(5)
    with pytest.raises(PartitionHalted):
        place.owners().take(place.ranges(5), batch_id=0)


@both
def test_also_cannot_change_how_far_the_ledger_moves(place: Place, transaction: str) -> None:
    """Without the advance its rows would be durable, and come again."""
    work = place.work(place.owners(), place.ranges(5), in_transaction=lambda unit: unit.offsets.clear())
    for _ in range(2):
        run(transaction, work, place.input(transaction, range(5)))
    assert (place.written(), place.ledger()) == (every(5), [5])


@both
def test_also_that_leaves_a_block_open_is_refused(place: Place, transaction: str) -> None:
    kept: list[AbstractContextManager[object]] = []

    def also(unit: SinkUnit) -> None:
        kept.append(unit.connection.transaction())
        kept[-1].__enter__()

    work = place.work(place.owners(), place.ranges(5), in_transaction=also)
    with pytest.raises(TransactionBusy):
        run(transaction, work, place.input(transaction, range(5)))
    assert (place.written(), place.ledger()) == ([], [0])


@both
def test_what_a_deferred_constraint_refuses_at_commit_is_named(
    place: Place, db: psycopg.Connection[Any], transaction: str
) -> None:
    """Postgres names the constraint, and nobody else says which batch, table and offsets it was."""
    db.execute(f'ALTER TABLE {place.name} ADD UNIQUE (partition, "offset") DEFERRABLE INITIALLY DEFERRED')
    db.execute(f"INSERT INTO {place.name} VALUES (0, 3)")
    work = place.work(place.owners(), place.ranges(5))
    said = rf"batch 0 of group '{place.name}' into {place.name}: COMMIT, .* {place.name}\[0\] offsets 0 to 4: duplicate"
    with pytest.raises(psycopg.errors.UniqueViolation, match=said):
        run(transaction, work, place.input(transaction, range(5)))
    assert (place.written(), place.ledger()) == ([(0, 3)], [0])


def test_a_task_without_rows_opens_no_transaction(place: Place) -> None:
    work = place.work(place.owners(), place.ranges(5))
    assert run("partition", work, [place.rows()]) == {}
    assert place.ledger() == [0]


def test_the_driver_moves_to_the_end_what_had_no_rows_there(place: Place) -> None:
    owners = place.owners()
    ranges = place.ranges(5, 7)
    work = place.work(owners, ranges)
    run("partition", work, [place.rows([0, 2])])
    todo = remaining(ranges, dict.fromkeys(work.ranges, 0), place.group)
    owners.finish(todo, {Partition(place.name, 0): 3})
    assert place.ledger() == [5, 7]


def test_a_batch_that_was_counted_is_not_written_again(place: Place) -> None:
    work = CountingPlace(place, "query").work(0)
    for _ in range(2):
        run("batch", work, place.input("batch", range(3)))
    assert place.written() == every(3)


def test_a_batch_without_its_end_mark_is_not_counted(place: Place) -> None:
    work = CountingPlace(place, "query").work(0)
    with pytest.raises(IncompleteInput):
        run("batch", work, [place.rows(range(2))])
    assert place.written() == []


def test_a_replacing_batch_takes_the_place_of_all_rows(place: Place) -> None:
    counting = CountingPlace(place, "query")
    run("batch", counting.work(0, mode="replace"), place.input("batch", range(3)))
    run("batch", counting.work(1, mode="replace"), place.input("batch", range(2)))
    assert place.written() == every(2)
    run("batch", counting.work(2, mode="replace"), [place.mark()])
    assert place.written() == []


@pytest.mark.parametrize("kept_by", ["rule", "trigger", "policy"])
def test_rows_that_cannot_be_replaced_are_not_doubled(place: Place, db: psycopg.Connection[Any], kept_by: str) -> None:
    """To Postgres it is no error when a DELETE leaves rows."""
    name, options = place.name, dict[str, Any](mode="replace")
    counting = CountingPlace(place, "query")
    run("batch", counting.work(0, **options), place.input("batch", range(3)))
    if kept_by == "rule":
        db.execute(f"CREATE RULE r AS ON DELETE TO {name} DO INSTEAD NOTHING")
    elif kept_by == "trigger":
        db.execute(f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        db.execute(f"CREATE TRIGGER t BEFORE DELETE ON {name} FOR EACH ROW EXECUTE FUNCTION {name}()")
    else:
        db.execute(
            f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON {name} FOR INSERT WITH CHECK (true)"
        )
        db.execute(f"CREATE ROLE {name}; GRANT ALL ON {name} TO {name}")
        db.execute(migrate.as_sql(role=name).split("-- What a worker's role needs", 1)[1].split("\n", 1)[1].encode())
        options["conninfo"] = make_conninfo(place.conninfo, options=f"-c role={name}")
    try:
        with pytest.raises(TableError, match="row security" if kept_by == "policy" else "rows are left behind DELETE"):
            run("batch", counting.work(1, **options), place.input("batch", range(2)))
        assert place.written() == every(3)
    finally:
        if kept_by == "trigger":
            db.execute(f"DROP FUNCTION {name} CASCADE")
        elif kept_by == "policy":
            db.execute(f"DROP POLICY p ON {name}; DROP OWNED BY {name}; DROP ROLE {name}")


def test_of_two_attempts_to_count_one_batch_one_lands(place: Place) -> None:
    work = CountingPlace(place, "query").work(0)

    def twin() -> None:
        _failpoints.disarm()
        run("batch", work, place.input("batch", range(3)))

    _failpoints.arm("guarded", twin)
    assert run("batch", work, place.input("batch", range(3)))["transactions"] == 0
    assert place.written() == every(3)


def test_a_zombie_that_counts_batches_is_fenced(place: Place) -> None:
    counting = CountingPlace(place, "query")
    work = counting.work(0)

    def taken() -> None:
        _failpoints.disarm()
        counting.work(0)

    _failpoints.arm("guarded", taken)
    with pytest.raises(Fenced):
        run("batch", work, place.input("batch", range(3)))
    assert place.written() == []


def test_another_query_may_have_a_group_until_a_batch_was_counted(place: Place) -> None:
    CountingPlace(place, "first").work(0)
    run("batch", CountingPlace(place, "second").work(0), place.input("batch", range(3)))
    with pytest.raises(QueryChanged, match="another group_id"):
        CountingPlace(place, "first").work(0)


def test_also_that_commits_halts_the_batches_as_well(place: Place) -> None:
    counting = CountingPlace(place, "query")
    work = counting.work(0, in_transaction=lambda unit: unit.execute("COMMIT"))
    with pytest.raises(HandlerCommitted):
        run("batch", work, place.input("batch", range(3)))
    for again in (lambda: run("batch", work, place.input("batch", range(3))), lambda: counting.work(0)):
        with pytest.raises(PartitionHalted, match="--to-batch 0"):
            again()
    assert place.written() == every(3)


def test_a_table_that_somebody_has_locked_is_waited_for_and_that_is_logged(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The lock has no time-out, so nothing else would tell why a batch stands still."""
    work = place.work(place.owners(), place.ranges(3))
    with psycopg.connect(place.conninfo) as other, ThreadPoolExecutor() as pool:
        other.execute(f"LOCK TABLE {place.name} IN SHARE MODE")
        writing = pool.submit(run, "batch", work, place.input("batch", range(3)))
        told = f"waiting for the lock of table {place.name} for 1 s"
        try:
            until(lambda: told in caplog.text, 10, "the record")
        finally:
            other.rollback()
        assert writing.result()["rows"] == 3
    assert place.written() == every(3)


@pytest.mark.parametrize(
    ("next_batch", "batch_id", "fingerprint", "answer"),
    [
        (0, 0, "a", "new"),
        (5, 5, "b", "new"),
        (5, 4, "a", "replay"),
        (5, 4, None, "replay"),
        (5, 4, "b", QueryChanged),
        (5, 3, "a", QueryChanged),
        (5, 6, "a", LedgerBehindCheckpoint),
        (0, 1, None, LedgerBehindCheckpoint),
    ],
)
def test_a_batch_is_new_or_a_replay_of_the_last_or_refused(
    next_batch: int, batch_id: int, fingerprint: str | None, answer: Any
) -> None:
    row = Partition.of_query("q")

    def judge() -> str:
        if remaining(
            [Range(partition=row, start=batch_id, end=batch_id + 1)],
            {row: next_batch},
            Group("g", DEFAULT_SCHEMA),
        ):
            return "new"
        refuse_older(next_batch, batch_id, [("a",)], fingerprint, Group("g", DEFAULT_SCHEMA))
        return "replay"

    if isinstance(answer, str):
        assert judge() == answer
        return
    with pytest.raises(answer):
        judge()
