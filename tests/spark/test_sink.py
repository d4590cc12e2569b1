"""The sink on a real topic: what is written once stays written once, however the query is started again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import spark_sink.run as driver_side
from spark_sink.offset_log import reader
from tests.spark.scene import JOURNAL, Scene
from tests.support.spark import drain
from tests.support.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark_sink import BatchReport
    from spark_sink.options import Transaction

both = pytest.mark.parametrize("transaction", ["batch", "partition"])


@both
def test_every_message_is_written_once(scene: Scene, transaction: Transaction) -> None:
    scene.produce(1000)
    scene.run(scene.sink(transaction=transaction), per_trigger=400)
    scene.check()
    assert scene.ledger() == scene.ends()
    assert [r.batch_id for r in scene.reports] == list(range(len(scene.reports)))
    assert sum(r.rows for r in scene.reports) == 1000


def test_a_query_that_has_ended_keeps_no_connection_when_others_come(scene: Scene) -> None:
    """Py4J holds every function that Spark has called, so that no sink ever becomes garbage."""
    conninfo, scene.conninfo = scene.conninfo, make_conninfo(scene.conninfo, application_name=scene.topic)
    sinks = []
    for number in range(4):
        sinks.append(scene.sink(small_batch=1000))
        scene.produce(10)
        if number % 2:
            scene.run(sinks[-1])
            continue
        with pytest.raises(Exception, match="nowhere"):
            scene.run(scene.sink(table="nowhere"))
    scene.conninfo = conninfo
    with psycopg.connect(conninfo, autocommit=True) as looking:
        look = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        until(lambda: looking.execute(look, (scene.topic,)).fetchone() == (1,), 60, "one connection, of the last query")
        sinks[-1].release()
        until(lambda: looking.execute(look, (scene.topic,)).fetchone() == (0,), 60, "no connection")
    scene.check()


@both
def test_a_replayed_batch_writes_nothing(scene: Scene, transaction: Transaction) -> None:
    scene.produce(1000)
    scene.run(scene.sink(transaction=transaction))
    last = scene.forget_last_commit()
    scene.produce(100)
    scene.run(scene.sink(transaction=transaction))
    assert [(r.batch_id, r.is_replay) for r in scene.reports[1:]] == [(last, True), (last + 1, False)]
    scene.check()


def test_a_query_with_state_runs_through_a_replayed_batch_and_writes_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark 4.2 fails a query whose function left a batch's state alone; one without state need not be read again."""
    through: list[int] = []
    original = driver_side._run_through

    def noted(frame: DataFrame) -> int:
        through.append(original(frame))
        return through[-1]

    monkeypatch.setattr(driver_side, "_run_through", noted)

    def distinct(frame: DataFrame) -> DataFrame:
        return frame.dropDuplicates(["partition", "offset"])

    scene.produce(300)
    scene.run(change=distinct)
    scene.forget_last_commit()
    scene.run(change=distinct)
    assert through == [300]
    scene.lose_checkpoint()
    scene.run()
    assert through == [300], "without a state"
    scene.check()


@pytest.mark.fault("F5")
@both
def test_a_lost_checkpoint_and_other_batches_write_nothing_twice(scene: Scene, transaction: Transaction) -> None:
    """F5: numbers begin at 0 again, under another query."""
    scene.produce(1000)
    scene.run(scene.sink(transaction=transaction), per_trigger=300)
    scene.lose_checkpoint()
    scene.produce(200)
    scene.run(scene.sink(transaction=transaction), per_trigger=700)
    scene.check()
    assert sum(r.dropped for r in scene.reports) > 0, "a batch was on both sides of the ledger's offset"


def test_a_small_batch_is_written_by_the_driver_and_as_well_guarded(scene: Scene) -> None:
    scene.produce(500)
    scene.run(scene.sink(small_batch=500))
    scene.forget_last_commit()
    scene.produce(100)
    scene.run(scene.sink(small_batch=500))
    assert [r.rows for r in scene.reports] == [500, 0, 100]
    assert scene.ledger() == scene.ends()
    scene.check()


@both
def test_the_ledger_moves_past_rows_that_a_filter_dropped(scene: Scene, transaction: Transaction) -> None:
    """The plain consumer must be able to take over: it would apply what the query did not want."""
    scene.produce(100)
    scene.run(scene.sink(transaction=transaction), change=lambda frame: frame.where("partition = 1 and offset < 10"))
    assert scene.ledger() == {0: 50, 1: 50}
    assert [r.rows for r in scene.reports] == [10]
    scene.run(scene.sink(transaction=transaction), change=lambda frame: frame.where("false"))
    assert scene.ledger() == {0: 50, 1: 50}


@pytest.mark.fault("A11", more=True)
def test_partitions_that_are_added_are_acquired_when_they_appear(scene: Scene) -> None:
    scene.produce(100)
    scene.run(scene.sink(bootstrap_servers=scene.bootstrap_servers))
    scene.add_partition()
    scene.produce(90)
    scene.run(scene.sink(bootstrap_servers=scene.bootstrap_servers))
    assert scene.ledger() == {0: 80, 1: 80, 2: 30}
    scene.check()


def test_a_ledger_behind_the_checkpoint_is_refused(scene: Scene, db: psycopg.Connection[Any]) -> None:
    """The database lost commits in a failover, and Spark would go on behind them."""
    scene.produce(100)
    scene.run()
    db.execute("UPDATE exactly_once.ledger SET next_offset = 40 WHERE group_id = %s", (scene.topic,))
    scene.produce(100)
    with pytest.raises(Exception, match=r"LedgerBehindCheckpoint.*10 offsets would be lost"):
        scene.run()
    assert scene.ledger() == {0: 40, 1: 40}


def test_a_batch_that_the_ledger_has_lost_is_written_again_and_told(
    scene: Scene, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The first one of a checkpoint, in front of which nothing can be missing."""
    scene.produce(20)
    scene.run()
    scene.forget_last_commit()
    db.execute(f"DELETE FROM {JOURNAL} WHERE topic = %s", (scene.topic,))
    db.execute("UPDATE exactly_once.ledger SET next_offset = 0 WHERE group_id = %s", (scene.topic,))
    scene.run()
    scene.check()
    (said,) = [each.getMessage() for each in caplog.records if getattr(each, "action", "") == "written_again"]
    assert "batch 0 " in said
    # Behind another batch something would be missing, so that it is refused, and not said to be written.
    caplog.clear()
    scene.produce(20)
    scene.run()
    scene.forget_last_commit()
    db.execute("UPDATE exactly_once.ledger SET next_offset = 0 WHERE group_id = %s", (scene.topic,))
    with pytest.raises(Exception, match="LedgerBehindCheckpoint"):
        scene.run()
    assert not [each for each in caplog.records if getattr(each, "action", "") == "written_again"]


@pytest.mark.fault("F9")
def test_an_older_checkpoint_writes_nothing_twice(scene: Scene, tmp_path: Path) -> None:
    """F9: its next batch has the number of one that was written, and other rows."""
    scene.produce(100)
    scene.run()
    shutil.copytree(scene.checkpoint, tmp_path / "older")
    scene.produce(100)
    scene.run()
    scene.lose_checkpoint()
    shutil.copytree(tmp_path / "older", scene.checkpoint)
    scene.produce(100)
    scene.run()
    scene.check()


def test_the_checkpoint_of_another_query_is_refused(scene: Scene, tmp_path: Path) -> None:
    scene.produce(10)
    scene.run()
    other = str(scene.checkpoint.rename(tmp_path / "other"))
    with pytest.raises(Exception, match="belongs to query"):
        scene.run(scene.sink(checkpoint_location=other))


def test_several_rows_of_one_message_are_written_in_one_batch_and_refused_by_partition(scene: Scene) -> None:
    scene.produce(10)

    def thrice(frame: DataFrame) -> DataFrame:
        return frame.selectExpr("*", "explode(array(1, 2, 3)) AS part")

    with pytest.raises(Exception, match="RowsOutOfOrder"):
        scene.run(scene.sink(transaction="partition"), change=thrice)
    scene.run(scene.sink(), change=thrice)
    assert sum(r.rows for r in scene.reports) == 30


def test_two_topics_in_one_query_are_told_apart(scene: Scene) -> None:
    """A union of two streams: two sources in one offset log."""
    other = Scene(scene.spark, scene.bootstrap_servers, scene.conninfo, scene.checkpoint.parent)
    for one in (scene, other):
        one.produce(100)
    both_topics = scene.stream().union(other.stream())
    for _ in range(2):
        drain(both_topics, scene.sink(), scene.checkpoint)
        scene.forget_last_commit()
    for one in (scene, other):
        one.check()


def test_an_upsert_takes_the_last_change_of_each_key(scene: Scene, name: str, db: psycopg.Connection[Any]) -> None:
    db.execute(f"CREATE TABLE {name} (key text PRIMARY KEY, last bigint NOT NULL)")
    scene.produce(2000)

    def keyed(frame: DataFrame) -> DataFrame:
        return frame.selectExpr(
            "topic", "partition", "offset", "concat(partition, '-', offset % 7) AS key", "offset AS last"
        )

    drain(keyed(scene.stream()), scene.sink(table=name, mode="upsert"), scene.checkpoint)
    assert db.execute(f"SELECT min(last), count(*) FROM {name}").fetchone() == (993, 14)
    db.execute(f"DROP TABLE {name}")


@pytest.mark.parametrize("small_batch", [0, 1000])
def test_a_table_that_is_altered_between_batches_is_written_as_it_is_then(
    scene: Scene, small_batch: int, name: str, db: psycopg.Connection[Any]
) -> None:
    """The driver, which writes small batches, has read the table before; a task, which helps it out, reads it anew."""
    db.execute(f'CREATE TABLE {name} (topic text, partition int, "offset" bigint, value bytea, worker text)')
    changes = [
        "ADD COLUMN seen timestamptz DEFAULT now(), ALTER partition TYPE bigint",
        'ALTER "offset" TYPE numeric, ALTER partition TYPE smallint, DROP COLUMN seen',
    ]

    def alter(_: BatchReport) -> None:
        if changes:
            db.execute(f"ALTER TABLE {name} {changes.pop(0)}")

    scene.produce(800)
    scene.run(scene.sink(table=name, on_report=alter, small_batch=small_batch), per_trigger=200)
    assert not changes
    seen = db.execute(f'SELECT count(*), count(DISTINCT (partition, "offset")) FROM {name}').fetchone()
    assert seen == (800, 800)
    db.execute(f"DROP TABLE {name}")


def test_a_query_that_has_ended_releases_its_rows(scene: Scene, db: psycopg.Connection[Any]) -> None:
    sink = scene.sink()
    listener = sink.listener()
    scene.spark.streams.addListener(listener)
    try:
        scene.produce(10)
        scene.run(sink)
        owned = "SELECT count(owner_token) FROM exactly_once.ledger WHERE group_id = %s"
        until(lambda: db.execute(owned, (scene.topic,)).fetchone() == (0,), 60, "the release of the ended query")
    finally:
        scene.spark.streams.removeListener(listener)


@pytest.mark.fault("F7")
@both
def test_where_retention_has_removed_messages_the_ledger_goes_on_behind_them(
    scene: Scene, transaction: Transaction, db: psycopg.Connection[Any]
) -> None:
    """F7: failOnDataLoss=false accepts the loss; nothing else is lost, and nothing comes twice."""
    scene.produce(20)
    scene.run(scene.sink(transaction=transaction))
    scene.produce(80)
    scene.delete_records_below(30)
    scene.run(scene.sink(transaction=transaction), failOnDataLoss="false")
    assert scene.ledger() == scene.ends()
    written = db.execute(
        'SELECT partition, array_agg("offset" ORDER BY "offset") FROM journal.entries WHERE topic = %s GROUP BY 1',
        (scene.topic,),
    ).fetchall()
    assert dict(written) == {n: [*range(10), *range(30, 50)] for n in range(2)}


@pytest.mark.parametrize("scheme", ["", "file", "viewfs"])
def test_the_checkpoint_is_read_from_any_storage_of_spark(scheme: str, spark: SparkSession, tmp_path: Path) -> None:
    """Viewfs shows a directory as that of a file system which is not this machine's disk."""
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").write_bytes(b"v1\n\x00\xff")
    spark.conf.set(f"fs.viewfs.mounttable.{tmp_path.name}.link./checkpoint", tmp_path.as_uri())
    location = {"": str(tmp_path), "file": tmp_path.as_uri(), "viewfs": f"viewfs://{tmp_path.name}/checkpoint"}
    read = reader(location[scheme], spark)
    assert (read("offsets/0"), read("offsets"), read("offsets/1")) == (b"v1\n\x00\xff", b"", None)
