"""Plans under which offsets cannot tell what was written: refused by name, before the first row, at every start."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pyspark.sql import functions as F  # noqa: N812

from spark_sink.errors import FrameError
from tests.spark.scene import Change, Scene
from tests.spark.source import write_stream
from tests.support.spark import drain, read_topic
from tests.support.waiting import SPARK_SECONDS, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame


@pytest.fixture
def pairs(scene: Scene) -> tuple[Scene, Callable[[], DataFrame]]:
    """A topic, and its join with another one whose messages come later."""
    late = Scene(scene.spark, scene.bootstrap_servers, scene.conninfo, scene.checkpoint.parent)

    def joined() -> DataFrame:
        other = read_topic(scene.spark, scene.bootstrap_servers, late.topic)
        other = other.selectExpr("partition AS other_partition", "9 - offset AS other_offset")
        return scene.stream().join(other, F.expr("partition = other_partition AND offset = other_offset"))

    scene.produce(20)
    late.produce(10)
    return late, lambda: joined().drop("other_partition", "other_offset")


def count(db: psycopg.Connection[Any], scene: Scene) -> int:
    row = db.execute("SELECT count(*) FROM journal.entries WHERE topic = %s", (scene.topic,)).fetchone()
    assert row is not None
    return int(row[0])


def test_a_join_of_streams_is_refused_at_every_start(
    scene: Scene, pairs: tuple[Scene, Callable[[], DataFrame]], db: psycopg.Connection[Any]
) -> None:
    late, joined = pairs
    for _ in range(2):
        with pytest.raises(Exception, match=r"FrameError.*StreamingSymmetricHashJoin(.|\n)*ledger='batch-id'"):
            drain(joined(), scene.sink(), scene.checkpoint)
        late.produce(10)
    assert count(db, scene) == 0
    drain(joined(), scene.sink(ledger="batch-id"), scene.checkpoint)
    assert count(db, scene) == 20


def test_the_data_source_refuses_a_join_of_streams_too(
    scene: Scene, pairs: tuple[Scene, Callable[[], DataFrame]], db: psycopg.Connection[Any]
) -> None:
    _, joined = pairs
    for _ in range(2):
        with pytest.raises(Exception, match=r"FrameError.*symmetricHashJoin(.|\n)*ledger='batch-id'"):
            write_stream(scene, joined())
    assert count(db, scene) == 0


def test_the_data_source_notices_late_rows_also_without_the_checkpoint(
    scene: Scene, pairs: tuple[Scene, Callable[[], DataFrame]], db: psycopg.Connection[Any]
) -> None:
    """Where that is not on the driver's disk: a stand-in, a setting that only Spark's Java sees."""
    late, joined = pairs
    setting = "spark.sql.streaming.checkpointLocation"
    scene.spark.conf.set(setting, str(scene.checkpoint))
    try:
        write_stream(scene, joined(), checkpointLocation="", queryName=scene.topic)
        assert count(db, scene) == 10
        late.produce(10)
        for _ in range(2):
            with pytest.raises(Exception, match=r"RowsOutOfOrder.*earlier batch"):
                write_stream(scene, joined(), checkpointLocation="", queryName=scene.topic)
    finally:
        scene.spark.conf.unset(setting)


def test_what_picks_rows_by_looking_at_others_is_refused_with_a_transaction_for_each_task(scene: Scene) -> None:
    scene.produce(20)
    changes: list[Change] = [
        lambda frame: frame.dropDuplicates(["value"]),
        lambda frame: frame.where("rand() < 2"),
    ]
    for change in changes:
        with pytest.raises(Exception, match=r"FrameError.*transaction='partition'.*(Deduplicate|Filter)"):
            scene.run(scene.sink(transaction="partition"), change=change)
        shutil.rmtree(scene.checkpoint)
    by_partition = scene.sink(transaction="partition")

    def write(frame: DataFrame, batch_id: int) -> None:
        taken, told = [], []
        for what, picked in picking(frame).items():
            # A group of its own: behind a frame that has failed no other one of a batch is taken.
            sink = scene.sink(transaction="partition", group_id=f"{scene.topic}-{what}")
            try:
                sink(picked.select(frame.columns), batch_id)
            except FrameError as error:
                told.append(str(error))
            else:
                taken.append(what)
        assert taken == []
        assert all("may look at others" in text for text in told)
        by_partition(frame.repartition(3).withColumn("worker", F.rand().cast("string")), batch_id)

    scene.run(write)
    scene.check()


def picking(frame: DataFrame) -> dict[str, DataFrame]:
    """Make frames of which some row is there because of other rows of the batch, or by chance."""
    frame.createOrReplaceTempView("batch")
    sql = frame.sparkSession.sql
    is_last = "(SELECT 1 FROM batch b WHERE b.value = a.value AND b.offset > a.offset)"
    return {
        "dropDuplicates": frame.dropDuplicates(["value"]),
        "limit": frame.limit(5),
        "sample": frame.sample(0.5),
        "by chance": frame.withColumn("one", F.rand()).where("one < 2").drop("one"),
        "aggregate": frame.groupBy("topic", "partition", "offset", "worker").agg(F.max("value").alias("value")),
        "one of each": frame.groupBy("value").applyInPandas(lambda rows: rows.head(1), frame.schema),
        "cogroup": frame.groupBy("value")
        .cogroup(frame.groupBy("value"))
        .applyInPandas(lambda rows, _: rows.head(1), frame.schema),
        "intersect": frame.intersect(frame),
        "except": frame.exceptAll(frame.where("offset = 0")),
        "anti join": frame.alias("a").join(
            frame.alias("b"), F.expr("a.value = b.value AND a.offset < b.offset"), "left_anti"
        ),
        "semi join": frame.join(frame.where("offset > 1").select("value"), "value", "left_semi"),
        "join of a persisted one": frame.persist().join(frame.select("value"), "value", "left_semi"),
        "not exists": sql(f"SELECT * FROM batch a WHERE NOT EXISTS {is_last}"),
        "in": sql("SELECT a.* FROM batch a WHERE a.offset NOT IN (SELECT b.offset + 1 FROM batch b)"),
        "scalar": sql("SELECT a.* FROM batch a WHERE a.offset = (SELECT any_value(b.offset) FROM batch b)"),
        "lateral": sql("SELECT a.* FROM batch a, LATERAL (SELECT b.value AS other FROM batch b WHERE b.offset > 1)"),
        "with": sql("WITH others AS (SELECT * FROM batch) SELECT a.* FROM batch a LEFT ANTI JOIN others USING (value)"),
        "with twice": sql("WITH x AS (SELECT * FROM batch) SELECT a.* FROM x a LEFT SEMI JOIN x b USING (value)"),
        "first by a window": frame.withColumn("row", F.expr("row_number() OVER (PARTITION BY value ORDER BY `offset`)"))
        .where("row = 1")
        .drop("row"),
    }


def test_what_makes_each_row_of_its_message_alone_is_taken_with_a_transaction_for_each_task(scene: Scene) -> None:
    """Static tables may be joined, twice and with subqueries; neither they nor a union look at others of the batch."""
    dimension = scene.spark.createDataFrame([(n, str(n)) for n in range(2)], "part int, name string")
    dimension.cache()

    def table(frame: DataFrame) -> DataFrame:
        return frame.sparkSession.range(2).selectExpr("cast(id AS int) AS part")

    def change(frame: DataFrame) -> DataFrame:
        for name in ("one", "other"):
            names = dimension.select(F.col("part").alias("partition"), F.col("name").alias(name))
            frame = frame.join(F.broadcast(names), "partition")
        largest = table(frame).groupBy("part").agg(F.count("*").alias("n")).select(F.col("part").alias("partition"))
        return frame.join(largest, "partition", "left_semi")

    def write(frame: DataFrame, batch_id: int) -> None:
        frame.createOrReplaceTempView("batch")
        table(frame).createOrReplaceTempView("known")
        frame = frame.sparkSession.sql(
            "WITH x AS (SELECT * FROM batch) "
            "SELECT * FROM x WHERE partition IN (SELECT max(part) FROM known GROUP BY part)"
        )
        halves = frame.where("offset % 2 = 0").union(frame.where("offset % 2 = 1")).hint("rebalance")
        mapped = change(halves).select(frame.columns).mapInPandas(lambda frames: frames, frame.schema)
        sink(mapped.sortWithinPartitions("offset"), batch_id)

    sink = scene.sink(transaction="partition")
    scene.produce(20)
    scene.run(write, change=change)
    scene.check()


def test_a_batch_that_is_one_transaction_takes_distinct_rows_until_their_state_is_lost(scene: Scene) -> None:
    def distinct(frame: DataFrame) -> DataFrame:
        return frame.dropDuplicates(["value"])

    for _ in range(2):
        scene.produce(10)
        scene.run(change=distinct)
    scene.check()
    scene.lose_checkpoint()
    for mode in ("append", "insert-ignore"):  # the table has no key by which a row could be ignored
        with pytest.raises(Exception, match=r"FrameError.*new checkpoint.*StreamingDeduplicate"):
            scene.run(scene.sink(mode=mode), change=distinct)
        with pytest.raises(Exception, match=r"FrameError.*new checkpoint.*dedupe"):
            write_stream(scene, distinct(scene.stream()), checkpointLocation=f"{scene.checkpoint}-2", mode=mode)


def test_sinks_are_called_from_threads_and_under_other_job_groups(scene: Scene) -> None:
    sinks = [scene.sink(group_id=f"{scene.topic}-{n}") for n in range(2)]

    def write(frame: DataFrame, batch_id: int) -> None:
        frame.sparkSession.sparkContext.setJobGroup("users", "own")
        with ThreadPoolExecutor(2) as pool:
            halves = [pool.submit(sink, frame.where(f"partition = {n}"), batch_id) for n, sink in enumerate(sinks)]
        for half in halves:
            half.result()

    scene.produce(20)
    scene.run(write, per_trigger=10)
    scene.check()
    with psycopg.connect(scene.conninfo) as connection:
        epochs = connection.execute("SELECT max(owner_epoch) FROM exactly_once.ledger WHERE topic = %s", (scene.topic,))
        assert epochs.fetchone() == (1,), "acquired once a run"


def test_one_sink_object_serves_no_two_queries_at_once(scene: Scene) -> None:
    sink = scene.sink()
    scene.produce(10)
    entered = threading.Event()

    def write(frame: DataFrame, batch_id: int) -> None:
        sink(frame, batch_id)
        entered.set()

    writer = scene.stream().writeStream.foreachBatch(write).option("checkpointLocation", str(scene.checkpoint))
    query = writer.start()
    try:
        until(entered.is_set, SPARK_SECONDS, "the first batch")
        with pytest.raises(Exception, match=r"ConfigurationError.*still runs"):
            drain(scene.stream(), sink, scene.checkpoint.with_name("other"))
        assert query.isActive
    finally:
        query.stop()
    scene.run(sink)
    scene.check()
