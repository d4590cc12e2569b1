"""The data source's two phases against a real Postgres: what is staged, what counts, who may publish. No Spark."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from exactly_once.embedded import Postgres
from exactly_once.embedded.proxy import ADVANCE_AND_COMMIT, PostgresProxy
from exactly_once.errors import ConfigurationError, Fenced, OwnedByConsumer, SchemaTooOld
from exactly_once.ledger.migrate import migrate
from exactly_once.ledger.session import tag_of
from exactly_once.writer import TableError
from spark_sink import FrameError, LedgerBehindCheckpoint, QueryChanged, RowsOutOfOrder, StageLost, publication
from tests.spark.attempts import Place
from tests.spark.staged import Run, Target, rows

Looking = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def target(conninfo: str, name: str) -> Target:
    return Target(conninfo, name)


def test_rows_of_several_tasks_are_published_once_and_nothing_stays_staged(target: Target) -> None:
    run = Run(target)
    staged = [run.stage(run.rows(0, range(5)), run.rows(1, range(3))), run.stage(run.rows(0, range(5, 9))), run.stage()]
    assert target.written() == []
    assert target.staged() == 3
    for _ in range(2):  # as where the answer to the first call was lost
        run.publish(*staged)
        assert target.offsets() == [(0, n) for n in range(9)] + [(1, n) for n in range(3)]
        assert target.ledger() == [9, 3]
        assert target.staged() == 0


def test_an_attempt_that_spark_did_not_count_is_never_published(target: Target) -> None:
    """A task that was killed behind its last row, a speculative twin, and what one of them stages too late."""
    run = Run(target)
    run.stage(run.rows(0, range(5)))
    counted = run.stage(run.rows(0, range(5)))
    run.publish(counted)
    run.stage(run.rows(0, range(5)))
    assert target.staged() == 1
    run.write(run.rows(0, range(5, 7)), batch_id=1)
    assert target.offsets() == [(0, n) for n in range(7)]
    assert target.staged() == 0


@pytest.mark.parametrize("mode", ["append", "replace"])
@pytest.mark.parametrize("moment", ["cut_before", "cut_after"])
def test_a_commit_that_is_cut_off_is_made_once(target: Target, moment: str, mode: str) -> None:
    """On either side of the server's COMMIT; the publication asks again by itself."""
    ledger = {"append": "offsets", "replace": "batch-id"}[mode]
    with PostgresProxy(target.conninfo) as proxy:
        run = Run(target, conninfo=proxy.conninfo, mode=mode, ledger=ledger)
        staged = run.stage(run.rows(0, range(5)))
        fault = getattr(proxy, moment)(ADVANCE_AND_COMMIT)
        run.publish(staged)
        fault.wait()
    assert target.offsets() == [(0, n) for n in range(5)]
    assert target.staged() == 0


def test_batches_that_were_written_before_under_other_cuts_are_written_once(target: Target, db: Looking) -> None:
    """The checkpoint is lost, and another run reads everything again in other portions."""
    Run(target).write(rows(target.name, 0, range(10)))
    again = Run(target, query_id="another")
    again.write(again.rows(0, range(4)))
    again.write(again.rows(0, range(4, 15)), batch_id=1)
    told = "SELECT batch_id, row_count, dropped FROM exactly_once.spark_query WHERE group_id = %s AND query_id = %s"
    assert db.execute(told, (target.name, "another")).fetchall() == [(1, 5, 6)]
    assert target.offsets() == [(0, n) for n in range(15)]
    assert target.ledger() == [15]


def test_rows_that_are_dropped_are_told_and_loudly_where_all_are(
    target: Target, db: Looking, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as those of a job that brings the beginning of a partition when an earlier one has brought its end."""
    with caplog.at_level(logging.INFO, "spark_sink"):
        for offsets in (range(10, 20), range(10), range(25)):
            job = Run(target, query_id=publication.BATCH_JOB)
            job.write(job.rows(0, offsets))
    told = [(r.levelname, r.getMessage()) for r in caplog.records if getattr(r, "action", None) == "dropped"]
    assert [level for level, _ in told] == ["WARNING", "INFO"]
    assert ": 0 rows, 10 dropped" in told[0][1]
    assert ": 5 rows, 20 dropped" in told[1][1]
    assert target.offsets() == [(0, n) for n in range(10, 25)]
    assert db.execute(
        "SELECT row_count, dropped FROM exactly_once.spark_query WHERE group_id = %s", (target.name,)
    ).fetchall() == [(5, 20)]


def test_of_a_chunk_with_rows_of_several_partitions_each_is_judged_by_its_own(target: Target) -> None:
    """Two topics, two partitions; of one of them the ledger has nothing yet, of another one all."""
    other = f"{target.name}_other"

    def chunk(*ends: int) -> pa.RecordBatch:
        places = [(target.name, 0), (target.name, 1), (other, 0), (other, 1)]
        return pa.concat_batches([rows(*place, range(end)) for place, end in zip(places, ends, strict=True)])

    Run(target).write(chunk(5, 3, 1, 0))
    again = Run(target, query_id="another")
    again.write(chunk(8, 3, 6, 2))
    assert target.ledger() == [8, 3, 6, 2]
    assert target.offsets() == sorted((n, o) for n, end in [(0, 8), (1, 3), (0, 6), (1, 2)] for o in range(end))


@pytest.mark.parametrize("first", ["offsets", "batch-id"])
def test_a_batch_job_that_counts_otherwise_than_the_one_before_is_refused(target: Target, first: str) -> None:
    """One does not tell the other what was written, so that all of it would be written again."""

    def job(ledger: str, **options: str) -> Run:
        return Run(target, query_id=publication.BATCH_JOB, ledger=ledger, **options)

    (other,) = {"offsets", "batch-id"} - {first}
    written = job(first)
    written.write(written.rows(0, range(5)))
    for options in ({}, {"jobId": "another"}) if other == "batch-id" else ({},):
        refused = job(other, **options)
        with pytest.raises(ConfigurationError, match=f"written with ledger='{first}', now it is '{other}'"):
            refused.write(refused.rows(0, range(5)))
    assert target.offsets() == [(0, n) for n in range(5)]
    # What replaces the whole table doubles nothing, and a stream may stand beside a job.
    replacing = job("batch-id", mode="replace")
    replacing.write(replacing.rows(0, range(3)))
    stream = Run(target, ledger="offsets")
    stream.write(stream.rows(0, range(5, 7)))
    assert target.offsets() == [(0, n) for n in (0, 1, 2, 5, 6)]


def test_a_foreign_table_is_warned_of(target: Target, db: Looking, name: str, caplog: pytest.LogCaptureFixture) -> None:
    db.execute(f"CREATE FOREIGN DATA WRAPPER {name}; CREATE SERVER {name} FOREIGN DATA WRAPPER {name}")
    try:
        db.execute(f"DROP TABLE {name}; CREATE FOREIGN TABLE {name} (value text) SERVER {name}")
        run = Run(target)
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):  # the wrapper has no handler
            run.write(run.rows(0, range(5)))
        assert "is a foreign table: after a crash at COMMIT rows can be there twice" in caplog.text
    finally:
        db.execute(f"DROP FOREIGN DATA WRAPPER {name} CASCADE")


def test_a_table_that_was_emptied_is_told(target: Target, db: Looking, caplog: pytest.LogCaptureFixture) -> None:
    Run(target).write(rows(target.name, 0, range(5)))
    assert "is empty" not in caplog.text
    db.execute(f"TRUNCATE {target.name}")
    again = Run(target)
    again.write(again.rows(0, range(5, 9)), batch_id=1)
    assert f"is empty, and group '{target.name}' goes on behind what it has written before" in caplog.text


# Who may publish.


def test_a_run_is_fenced_by_a_later_one_before_either_has_published(target: Target) -> None:
    first, second = Run(target), Run(target)
    staged = first.stage(first.rows(0, range(5)))
    second.register()
    with pytest.raises(Fenced, match="query"):
        first.publish(staged)
    assert target.written() == []
    assert target.ledger() == []
    assert target.staged() == 0, "nobody will ask for what an earlier run has staged"
    second.write(second.rows(0, range(5)))
    with pytest.raises(Fenced):
        first.write(first.rows(1, range(5)), batch_id=1)
    second.write(second.rows(0, range(5, 7)), batch_id=1)
    assert target.offsets() == [(0, n) for n in range(7)]


def test_a_run_that_stands_still_in_its_publication_is_ended_by_a_later_one(target: Target) -> None:
    with PostgresProxy(target.conninfo) as proxy, ThreadPoolExecutor(1) as pool:
        first, second = Run(target, conninfo=proxy.conninfo), Run(target)
        staged = first.stage(first.rows(0, range(5)))
        fault = proxy.hold(ADVANCE_AND_COMMIT, close_client=False)
        publishing = pool.submit(first.publish, staged)
        fault.wait()
        second.write(second.rows(0, range(5)))
        fault.release()
        with pytest.raises(Fenced):
            publishing.result(60)
    assert target.offsets() == [(0, n) for n in range(5)]
    assert target.ledger() == [5]


def test_a_frozen_transaction_that_a_publication_waits_for_is_ended(target: Target) -> None:
    run = Run(target)
    run.write(run.rows(0, range(5)))
    with psycopg.connect(target.conninfo, application_name=tag_of(uuid4(), "exactly_once")) as frozen:
        frozen.execute("SELECT FROM exactly_once.ledger WHERE group_id = %s FOR UPDATE", (target.name,))
        run.write(run.rows(0, range(5, 9)), batch_id=1)
        with pytest.raises(psycopg.OperationalError):
            frozen.execute("SELECT 1")
    assert target.offsets() == [(0, n) for n in range(9)]


def test_a_registration_that_is_cut_off_is_made_again(target: Target) -> None:
    with PostgresProxy(target.conninfo) as proxy:
        run = Run(target, conninfo=proxy.conninfo)
        fault = proxy.cut_before("INSERT INTO .*spark_run")
        run.write(run.rows(0, range(5)))
        fault.wait()
    assert target.offsets() == [(0, n) for n in range(5)]


def test_a_database_without_our_schema_is_told_from_any_other_error(target: Target) -> None:
    with pytest.raises(SchemaTooOld, match="exactly-once migrate"):
        Run(target, schema="nowhere").register()


def test_of_a_thousand_runs_the_latest_are_remembered(target: Target, db: Looking) -> None:
    make = """
        INSERT INTO exactly_once.spark_run (group_id, run_id, held, registered_at)
        SELECT %s, gen_random_uuid(), '[]', clock_timestamp() - n * interval '1 minute'
        FROM generate_series(1, 1000) AS n
    """
    db.execute(make, (target.name,))
    run = Run(target)
    for batch_id in range(2):
        run.write(run.rows(0, [batch_id]), batch_id=batch_id)
    look = """
        SELECT count(*), min(registered_at) > clock_timestamp() - interval '1000 minutes'
        FROM exactly_once.spark_run WHERE group_id = %s
    """
    assert db.execute(look, (target.name,)).fetchall() == [(1000, True)]


def test_tasks_that_register_at_the_same_time_are_one_run(target: Target, db: Looking) -> None:
    run = Run(target)
    start = threading.Barrier(6)

    def register(_: int) -> None:
        start.wait()
        run.register()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(register, range(6)))
    look = "SELECT owner_epoch FROM exactly_once.ledger WHERE group_id = %s"
    assert db.execute(look, (target.name,)).fetchall() == [(1,)]
    run.write(run.rows(0, range(2)))


def test_a_sink_that_takes_rows_fences_the_source_and_the_other_way_round(target: Target) -> None:
    source = Run(target)
    source.write(source.rows(0, range(5)))
    place = Place(target.conninfo, target.name)
    sink = place.owners()
    ranges = place.ranges(7)
    sink.take(ranges, batch_id=0)
    with pytest.raises(Fenced):
        source.write(source.rows(0, range(5, 7)), batch_id=1)
    Run(target).write(rows(target.name, 0, range(5, 7)))
    with pytest.raises(Fenced, match="query"):
        sink.take(ranges, batch_id=1)
    place.close()
    assert target.offsets() == [(0, n) for n in range(7)]


def test_rows_of_a_consumer_are_refused_unless_they_are_to_be_taken(target: Target, db: Looking) -> None:
    own = """
        INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset, owner_token, owner_kind, owner_epoch)
        VALUES (%(name)s, %(name)s, 0, 3, gen_random_uuid(), 'consumer', 1)
    """
    db.execute(own, {"name": target.name})
    with pytest.raises(OwnedByConsumer, match="hand-over"):
        Run(target).write(rows(target.name, 0, range(5)))
    assert target.written() == []
    Run(target, takeOver="true").write(rows(target.name, 0, range(5)))
    assert target.offsets() == [(0, 3), (0, 4)]


def test_an_operator_who_moves_the_ledger_fences_the_run(target: Target, db: Looking) -> None:
    run = Run(target)
    run.write(run.rows(0, range(5)))
    reset = "UPDATE exactly_once.ledger SET next_offset = 0, owner_token = NULL, owner_epoch = 9 WHERE group_id = %s"
    db.execute(reset, (target.name,))
    with pytest.raises(Fenced, match="operator"):
        run.write(run.rows(0, range(5, 9)), batch_id=1)
    assert target.offsets() == [(0, n) for n in range(5)]


# What is staged.


def test_what_is_staged_for_a_later_batch_or_by_another_group_stays(target: Target) -> None:
    other = Run(Target(target.conninfo, f"{target.name}_other"))
    theirs = other.stage(other.rows(0, range(3)))
    run = Run(target)
    staged = run.stage(run.rows(0, range(5))), run.stage(run.rows(0, range(5, 9)), batch_id=1)
    for each in staged:
        run.publish(each)
    other.publish(theirs)
    assert target.offsets() == [(0, n) for n in range(9)]
    assert other.target.offsets() == [(0, n) for n in range(3)]


def test_leftovers_are_no_reason_to_fail(target: Target) -> None:
    with PostgresProxy(target.conninfo) as proxy:
        proxy.refuse()
        publication.reap(target.options(conninfo=proxy.conninfo))


def test_leftovers_go_by_age_and_those_of_an_attempt_at_work_stay(target: Target, db: Looking) -> None:
    run = Run(target, reapAfterSeconds="3600")
    dead = run.stage(run.rows(0, range(5)))
    working = run.stage(run.rows(0, range(5)), run.rows(0, range(5, 9)))
    make_old = """
        UPDATE exactly_once.spark_stage SET staged_at = staged_at - interval '2 hours'
        WHERE attempt = %s OR attempt = %s AND number = 0
    """
    db.execute(make_old, (dead.chunks[0].attempt, working.chunks[0].attempt))
    publication.reap(run.options)
    assert target.staged() == 2
    run.publish(working)
    assert target.offsets() == [(0, n) for n in range(9)]


@pytest.mark.usefixtures("own_servers")
def test_a_crash_of_the_server_between_the_phases_is_noticed_and_loses_nothing(name: str) -> None:
    with Postgres() as postgres:
        with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
            migrate(connection)
        target = Target(postgres.conninfo, name)
        run = Run(target)
        staged = run.stage(run.rows(0, range(5)))
        postgres.restart("fast")
        run.publish(staged)
        staged = run.stage(run.rows(0, range(5, 9)), batch_id=1)
        postgres.restart("immediate")
        with pytest.raises(StageLost, match="4 rows"):
            run.publish(staged)
        assert target.ledger() == [5]
        again = Run(target)
        again.write(again.rows(0, range(5, 9)))
        assert target.offsets() == [(0, n) for n in range(9)]


@pytest.mark.parametrize(("portion", "count", "portions"), [(1000, 1000, 10), (1, 20, 20)])
def test_rows_are_staged_in_portions(
    target: Target, monkeypatch: pytest.MonkeyPatch, portion: int, count: int, portions: int
) -> None:
    """A row that is larger than a portion is one by itself."""
    monkeypatch.setattr(publication, "CHUNK_BYTES", portion)
    run = Run(target)
    staged = run.stage(run.rows(0, range(count)))
    assert len(staged.chunks) >= portions
    assert sum(chunk.row_count for chunk in staged.chunks) == count
    run.publish(staged)
    assert target.offsets() == [(0, n) for n in range(count)]


# What the table makes of it.


@pytest.mark.parametrize(
    ("mode", "winners"), [("upsert", {"a": 5, "b": 4, "c": 9}), ("insert-ignore", {"a": 0, "b": 1, "c": 7})]
)
@pytest.mark.parametrize("portions", ["one after the other", "overlapping", "several partitions in one"])
def test_changes_of_a_key_come_in_the_order_of_offsets(
    target: Target, db: Looking, mode: str, winners: dict[str, int], portions: str
) -> None:
    """However a shuffle has spread them over tasks."""
    db.execute(f"ALTER TABLE {target.name} ADD PRIMARY KEY (value)")
    run = Run(target, mode=mode)

    def changes(*offsets: int) -> pa.RecordBatch:
        """Offsets up to 5 are of the first partition."""
        batches = [run.rows(0, [n for n in offsets if n < 6]), run.rows(1, [n for n in offsets if n > 6])]
        keys = ["abc"[2 if n > 6 else n in (1, 4)] for n in sorted(offsets, key=lambda n: n > 6)]
        return pa.concat_batches(batches).set_column(3, "value", pa.array(keys))

    spreads: dict[str, list[tuple[int, ...]]] = {
        "one after the other": [(9,), (3, 4, 5), (0, 1, 2), (7,)],
        "overlapping": [(5, 1, 3), (9,), (4, 0, 2), (7,)],
        "several partitions in one": [(3, 4, 5, 7), (0, 1, 2, 9)],
    }
    run.publish(*(run.stage(changes(*offsets)) for offsets in spreads[portions]))
    assert {value: offset for _, offset, value in target.written()} == winners


def test_a_table_that_is_missing_or_does_not_fit_is_refused_before_a_row_is_written(
    target: Target, db: Looking
) -> None:
    with pytest.raises(TableError, match="no table nowhere"):
        Run(target, table="nowhere").write(rows(target.name, 0, range(5)))
    db.execute(f"ALTER TABLE {target.name} DROP COLUMN value")
    run = Run(target)
    with pytest.raises(FrameError, match="'value'"):
        run.write(run.rows(0, range(5)))
    db.execute(f"ALTER TABLE {target.name} ADD COLUMN value text")
    run.write(run.rows(0, range(5)))
    assert target.offsets() == [(0, n) for n in range(5)]


def test_a_frame_without_the_key_is_refused_where_rows_may_replace_others(target: Target, db: Looking) -> None:
    db.execute(f"ALTER TABLE {target.name} ADD COLUMN id serial PRIMARY KEY")
    for mode in ("upsert", "insert-ignore"):
        with pytest.raises(FrameError, match="lacks 'id'"):
            Run(target, mode=mode).write(rows(target.name, 0, range(5)))
    Run(target).write(rows(target.name, 0, range(5)))
    assert target.offsets() == [(0, n) for n in range(5)]


def test_rows_that_something_has_kept_since_an_earlier_batch_are_refused(target: Target) -> None:
    """The ledger would take them for written."""
    run = Run(target)
    run.write(run.rows(0, [0, 1, 9]))
    with pytest.raises(RowsOutOfOrder, match=r"offset 5.*ended at 10"):
        run.write(run.rows(0, [5, 10]), batch_id=1)
    with pytest.raises(RowsOutOfOrder, match="no topic"):
        run.write(run.rows(0, [10]).set_column(0, "topic", pa.array([None], pa.string())), batch_id=1)


def test_a_row_without_its_place_is_told_where_the_checkpoint_says_what_the_batch_covers(
    target: Target, tmp_path: Path
) -> None:
    """Beside a row of another partition in its chunk, and another chunk."""
    (tmp_path / "offsets").mkdir()
    (tmp_path / "metadata").write_text('{"id": "query"}')
    (tmp_path / "offsets" / "0").write_text("v1\n{}\n" + json.dumps({target.name: {"0": 5, "1": 5}}))
    run = Run(target, checkpointLocation=str(tmp_path))
    nowhere = run.rows(1, [0]).set_column(0, "topic", pa.array([None], pa.string()))
    with pytest.raises(RowsOutOfOrder, match="no topic"):
        run.write(run.rows(0, range(5)), pa.concat_batches([nowhere, run.rows(1, [1])]))
    assert (target.written(), target.ledger()) == ([], [])


def test_a_later_run_knows_where_the_batch_before_its_own_has_ended(target: Target) -> None:
    """It may bring the last batch again, which did not begin where that has ended."""
    first = Run(target)
    first.write(first.rows(0, range(5)))
    first.write(first.rows(0, range(5, 9)), batch_id=1)
    again = Run(target)
    again.write(again.rows(0, range(5, 9)), batch_id=1)
    again.write(again.rows(0, range(9, 12)), batch_id=2)
    assert target.offsets() == [(0, n) for n in range(12)]
    later = Run(target)
    with pytest.raises(RowsOutOfOrder, match=r"offset 4.*ended at 12"):
        later.write(later.rows(0, [4, 12]), batch_id=3)


def test_a_replacing_batch_takes_the_place_of_all_rows(target: Target) -> None:
    run = Run(target, mode="replace", ledger="batch-id")
    run.write(run.rows(0, [1, 2]))
    run.write(run.rows(0, [3]), batch_id=1)
    assert target.offsets() == [(0, 3)]
    run.publish(run.stage(batch_id=2))
    assert target.offsets() == []


def test_batch_ids_count_one_query_without_gap(target: Target) -> None:
    def run(query_id: str = "query") -> Run:
        return Run(target, query_id=query_id, ledger="batch-id")

    first = run()
    first.write(first.rows(0, [1]))
    replay = run()
    replay.write(replay.rows(0, [1]))
    replay.write(replay.rows(0, [2]), batch_id=1)
    with pytest.raises(LedgerBehindCheckpoint):
        replay.write(replay.rows(0, [9]), batch_id=3)
    with pytest.raises(QueryChanged):
        run("another").register()
    with pytest.raises(Fenced):
        first.write(first.rows(0, [9]), batch_id=2)
    assert target.offsets() == [(0, 1), (0, 2)]


def test_with_offsets_an_older_checkpoint_takes_batch_ids_back_and_no_rows(target: Target, db: Looking) -> None:
    """Old numbers mean new rows then; the same query may count batches instead from there on."""
    first = Run(target)
    for batch_id in range(3):
        first.write(first.rows(0, range(5 * batch_id, 5 * batch_id + 5)), batch_id=batch_id)
    older = Run(target)
    older.write(older.rows(0, range(5, 20)), batch_id=1)
    assert target.offsets() == [(0, n) for n in range(20)]
    with pytest.raises(Fenced):
        first.write(first.rows(0, range(15, 20)), batch_id=3)
    with pytest.raises(LedgerBehindCheckpoint, match="--to-batch 2"):
        older.write(older.rows(0, range(25, 30)), batch_id=3)
    counting = Run(target, ledger="batch-id")
    counting.write(counting.rows(0, range(20, 25)), batch_id=2)
    look = "SELECT next_offset FROM exactly_once.ledger WHERE group_id = %s AND topic = 'query:query'"
    assert db.execute(look, (target.name,)).fetchall() == [(3,)]
    assert target.offsets() == [(0, n) for n in range(25)]


def test_a_run_of_which_the_database_knows_nothing_any_more_is_fenced(target: Target, db: Looking) -> None:
    run = Run(target)
    staged = run.stage(run.rows(0, range(5)))
    db.execute("DELETE FROM exactly_once.spark_run WHERE group_id = %s", (target.name,))
    with pytest.raises(Fenced, match="does not know this run"):
        run.publish(staged)
    assert target.written() == []
