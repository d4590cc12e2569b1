"""The data source in a real Spark on a real topic: what is written once stays written once. The table is the topic."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, StructType, YearMonthIntervalType

from exactly_once.embedded.proxy import ADVANCE_AND_COMMIT, PostgresProxy
from spark_sink import ExactlyOncePostgres, FrameError
from spark_sink.data_source import StreamWriter
from tests.spark.scene import Scene
from tests.spark.source import chosen, write_stream
from tests.support.spark import Driver, read_topic
from tests.support.waiting import SPARK_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession


def reported(scene: Scene) -> tuple[int, int]:
    """How many rows the last batch has written and dropped."""
    with psycopg.connect(scene.conninfo) as connection:
        look = """
            SELECT row_count, dropped FROM exactly_once.spark_query WHERE group_id = %s ORDER BY written_at DESC LIMIT 1
        """
        row = connection.execute(look, (scene.topic,)).fetchone()
        assert row is not None
        return row[0], row[1]


def leftovers(scene: Scene) -> int:
    """How many chunks lie in the stage."""
    with psycopg.connect(scene.conninfo) as connection:
        look = "SELECT count(*) FROM exactly_once.spark_stage WHERE group_id = %s"
        row = connection.execute(look, (scene.topic,)).fetchone()
        assert row is not None
        return int(row[0])


def topics_identified(scene: Scene) -> bool:
    """Whether the ledger tells which topic of this name each row is about."""
    with psycopg.connect(scene.conninfo) as connection:
        look = "SELECT bool_and(topic_id IS NOT NULL) FROM exactly_once.ledger WHERE topic = %s"
        return connection.execute(look, (scene.topic,)).fetchone() == (True,)


def test_every_message_is_written_once_also_where_batches_come_again(scene: Scene) -> None:
    """The last batch is replayed; then the checkpoint is lost and everything comes again in other portions."""
    scene.produce(1000)
    query = write_stream(scene, per_trigger=400)
    assert len(query.recentProgress) > 2
    scene.check()
    assert scene.ledger() == scene.ends()
    scene.forget_last_commit()
    write_stream(scene)
    assert reported(scene) == (0, 0)
    scene.produce(100)
    scene.lose_checkpoint()
    write_stream(scene, per_trigger=1050, name="again", bootstrapServers=scene.bootstrap_servers)
    scene.check()
    assert topics_identified(scene)
    assert scene.ledger() == scene.ends()
    assert leftovers(scene) == 0


@pytest.mark.fault("F3", more=True)
def test_a_worker_that_dies_after_it_has_staged_is_tried_again_and_only_that_counts(scene: Scene) -> None:
    from pyspark import TaskContext  # noqa: PLC0415

    # Made here, so that Spark sends the class itself and not its name.
    class Dying(StreamWriter):
        def write(self, iterator: Iterator[Any]) -> Any:
            message = super().write(iterator)
            if TaskContext.get().attemptNumber() == 0:  # type: ignore[union-attr]
                os._exit(1)
            return message

    class Source(ExactlyOncePostgres):
        def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:  # noqa: FBT001, N802
            made = super().streamWriter(schema, overwrite)
            return Dying(made._options, made._schema)

    scene.produce(1000)
    write_stream(scene, source=Source)
    scene.check()
    assert leftovers(scene) == 0


def test_a_task_that_fails_for_good_leaves_nothing_in_the_table(scene: Scene) -> None:
    """Another task of the batch has staged its rows by then."""
    scene.produce(100)
    frame = scene.stream()
    failing = frame.where(F.expr("offset != 49 or partition != 1 or raise_error('broken') is null"))
    with pytest.raises(Exception, match="broken"):
        write_stream(scene, failing)
    assert scene.ledger() == {}
    write_stream(scene)
    scene.check()
    assert leftovers(scene) == 0


@pytest.fixture
def start_driver(scene: Scene) -> Iterator[Callable[..., Driver]]:
    """Start drivers in processes of their own, which are ended behind the test."""
    started: list[Driver] = []

    def start(place: Path, conninfo: str) -> Driver:
        arguments = (scene.bootstrap_servers, conninfo, scene.topic, str(place))
        started.append(Driver("-m", "tests.spark.source_driver", *arguments))
        return started[-1]

    yield start
    for driver in started:
        driver.close()


@pytest.mark.fault("F1", more=True)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_driver_killed_at_the_commit_writes_the_batch_once(
    scene: Scene, start_driver: Callable[..., Driver], tmp_path: Path, moment: str
) -> None:
    scene.produce(1000)
    with PostgresProxy(scene.conninfo) as proxy:
        aim = (
            proxy.hold_answer(ADVANCE_AND_COMMIT)
            if moment == "after"
            else proxy.hold(ADVANCE_AND_COMMIT, close_client=False)
        )
        driver = start_driver(tmp_path, proxy.conninfo)
        aim.wait(SPARK_SECONDS)
        driver.kill(everything=True)
        proxy.cut_all()
    assert scene.ledger() == (scene.ends() if moment == "after" else {})
    write_stream(scene)
    assert reported(scene) == ((0, 0) if moment == "after" else (1000, 0))
    scene.check()
    assert leftovers(scene) == 0


def test_a_zombie_driver_is_fenced_by_its_successor(
    scene: Scene, start_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """It stands still in front of its first commit, another one takes over with its own checkpoint, it wakes up."""
    scene.produce(1000)
    with PostgresProxy(scene.conninfo) as proxy:
        aim = proxy.hold("pg_current_xact_id.*", close_client=False)
        zombie = start_driver(tmp_path / "zombie", proxy.conninfo)
        aim.wait(SPARK_SECONDS)
        assert leftovers(scene) > 0, "its tasks are through"
        zombie.stop()
        write_stream(scene, per_trigger=600)
        zombie.cont()
        aim.release()
        assert "Fenced" in zombie.wait("failed")
    assert scene.ledger() == scene.ends()
    scene.check()


def test_a_query_goes_on_behind_an_old_run_of_it_that_has_counted_last(scene: Scene, tmp_path: Path) -> None:
    """One that stood still before its first batch, or that began with an older copy of the checkpoint."""
    scene.produce(10)
    write_stream(scene)
    shutil.copytree(scene.checkpoint, tmp_path / "old")
    scene.produce(20)
    write_stream(scene, per_trigger=5)
    write_stream(scene, checkpointLocation=str(tmp_path / "old"))
    scene.produce(10)
    write_stream(scene)
    scene.check()


def test_a_commit_whose_answer_is_lost_is_not_an_error(scene: Scene) -> None:
    scene.produce(100)
    with PostgresProxy(scene.conninfo) as proxy:
        fault = proxy.cut_after(ADVANCE_AND_COMMIT)
        write_stream(scene, conninfo=proxy.conninfo)
        fault.wait()
    scene.check()


# What goes in.


@pytest.fixture
def table(name: str, db: psycopg.Connection[Any]) -> Iterator[str]:
    """A table of counts by Kafka partition."""
    db.execute(f"CREATE TABLE {name} (partition int PRIMARY KEY, count bigint NOT NULL)")
    yield name
    db.execute(f"DROP TABLE {name}")


def test_an_aggregation_in_output_mode_complete_replaces_its_table(
    scene: Scene, table: str, db: psycopg.Connection[Any]
) -> None:
    def count() -> None:
        counted = read_topic(scene.spark, scene.bootstrap_servers, scene.topic).groupBy("partition").count()
        write_stream(scene, counted, output="complete", table=table, ledger="batch-id", mode="replace")

    for total in (20, 40):
        scene.produce(20)
        count()
        assert db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() == [(0, total // 2), (1, total // 2)]
    scene.forget_last_commit()
    count()
    assert reported(scene)[0] == 0


def test_output_mode_and_mode_must_mean_the_same(scene: Scene, table: str) -> None:
    counted = read_topic(scene.spark, scene.bootstrap_servers, scene.topic).groupBy("partition").count()
    with pytest.raises(Exception, match=r"ConfigurationError.*output mode"):
        write_stream(scene, counted, output="complete", table=table, ledger="batch-id")


def test_a_batch_job_is_written_once_and_gives_its_rows_back(scene: Scene, db: psycopg.Connection[Any]) -> None:
    scene.spark.dataSource.register(ExactlyOncePostgres)
    read = scene.spark.read.format("kafka").option("kafka.bootstrap.servers", scene.bootstrap_servers)
    for produced in (100, 50):
        scene.produce(produced)
        frame = read.option("subscribe", scene.topic).load()
        frame = frame.select("topic", "partition", "offset", "value", F.lit("job").alias("worker"))
        for _ in range(2):
            frame.write.format("exactly_once_postgres").options(**chosen(scene)).mode("append").save()
            scene.check()
        look = "SELECT count(owner_token) FROM exactly_once.ledger WHERE group_id = %s"
        assert db.execute(look, (scene.topic,)).fetchone() == (0,)


def test_a_batch_job_without_offsets_is_written_once_under_its_name(
    spark: SparkSession, conninfo: str, table: str, db: psycopg.Connection[Any]
) -> None:
    """Without a name each one is, and one that replaces the table always does."""
    spark.dataSource.register(ExactlyOncePostgres)
    options = {"conninfo": conninfo, "table": table, "groupId": table, "ledger": "batch-id"}

    def save(first: int, output: str = "append", **more: str) -> list[int]:
        frame = spark.range(first, first + 2, 1, 1).selectExpr("cast(id as int) partition", "id count")
        frame.write.format("exactly_once_postgres").options(**options, **more).mode(output).save()
        return [row[0] for row in db.execute(f"SELECT partition FROM {table} ORDER BY 1").fetchall()]

    assert save(0, jobId="monday") == [0, 1]
    assert save(2, jobId="monday") == [0, 1]
    assert save(2, jobId="tuesday") == [0, 1, 2, 3]
    assert save(4) == [0, 1, 2, 3, 4, 5]
    assert save(6) == [0, 1, 2, 3, 4, 5, 6, 7]
    for first in (8, 0):
        assert save(first, "overwrite", mode="replace", jobId="monday") == [first, first + 1]


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
def test_times_are_the_same_instants_whatever_the_sessions_time_zone(
    scene: Scene, name: str, db: psycopg.Connection[Any], zone: str
) -> None:
    """Of a stream, of a batch job, and as Spark itself tells them; the hour that comes twice in autumn included."""
    db.execute(sql.SQL("CREATE TABLE {} (kind text, at timestamptz, local timestamp)").format(sql.Identifier(name)))
    scene.produce(4)
    before = str(scene.spark.conf.get("spark.sql.session.timeZone"))
    scene.spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        # 5:30 and 6:30 UTC are both half past one in New York on that night.
        instant = F.timestamp_seconds(F.lit(1793511000) + F.col("offset") * 3600)
        times = [
            instant.alias("at"),
            F.expr("timestamp_ntz'2026-11-01 01:30:00'").alias("local"),
        ]
        stream = read_topic(scene.spark, scene.bootstrap_servers, scene.topic)
        places = ["topic", "partition", "offset"]
        write_stream(scene, stream.select(*places, F.lit("stream").alias("kind"), *times), table=name)
        job = scene.spark.createDataFrame([(scene.topic, n % 2, n // 2) for n in range(4)], places)
        job = job.select(*places, F.lit("job").alias("kind"), *times)
        options = {"conninfo": scene.conninfo, "table": name, "groupId": f"{name}-job"}
        scene.spark.dataSource.register(ExactlyOncePostgres)
        job.write.format("exactly_once_postgres").options(**options).mode("append").save()
    finally:
        scene.spark.conf.set("spark.sql.session.timeZone", before)
    look = sql.SQL("SELECT extract(epoch FROM at)::bigint, local::text FROM {} WHERE kind = %s ORDER BY 1")
    expected = [(1793511000 + 3600 * (n // 2), "2026-11-01 01:30:00") for n in range(4)]
    for kind in ("stream", "job"):
        assert db.execute(look.format(sql.Identifier(name)), (kind,)).fetchall() == expected
    db.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(name)))


def test_a_type_that_spark_does_not_hand_to_python_is_refused_by_its_column() -> None:
    source = ExactlyOncePostgres({"conninfo": "", "table": "t", "groupId": "g", "ledger": "batch-id"})
    for kind in (YearMonthIntervalType(), ArrayType(StructType().add("x", YearMonthIntervalType()))):
        with pytest.raises(FrameError, match=r"column 'i' is .*cast it in the frame"):
            source.writer(StructType().add("i", kind), overwrite=False)


def test_spark_finds_the_format_by_itself(spark: SparkSession) -> None:
    """In a session that nothing was registered in; that it is found shows in what it refuses."""
    with pytest.raises(Exception, match="table= is needed"):
        spark.newSession().range(1).write.format("exactly_once_postgres").mode("append").save()


def test_a_table_that_is_named_in_two_ways_is_refused(
    spark: SparkSession, conninfo: str, table: str, db: psycopg.Connection[Any]
) -> None:
    options = {"conninfo": conninfo, "table": table, "groupId": table, "ledger": "batch-id"}
    spark.dataSource.register(ExactlyOncePostgres)
    write = spark.range(1).selectExpr("1 partition", "id count").write.format("exactly_once_postgres")
    write = write.options(**options).mode("append")
    with pytest.raises(Exception, match="option table names the table"):
        write.save("other")
    assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


def test_a_source_beside_kafka_is_refused(scene: Scene, spark: SparkSession, tmp_path: Path) -> None:
    """Of rows from files, say, nobody can tell which were written."""
    scene.produce(5)
    (tmp_path / "archived.json").write_text(json.dumps({"topic": scene.topic, "partition": 0, "offset": 1000}))
    files = spark.readStream.schema(scene.stream().schema).json(str(tmp_path))
    with pytest.raises(Exception, match="offsets are not Kafka's"):
        write_stream(scene, scene.stream().union(files))
    assert scene.ledger() == {}


def test_what_cannot_work_is_refused_when_the_query_starts(scene: Scene) -> None:
    scene.produce(1)
    options: Any
    for frame, options, said in [
        (scene.stream(), {"tabel": "x"}, "no option tabel"),
        (scene.stream(), {"jobId": "x"}, "jobId is for batch jobs"),
        (scene.stream().drop("offset"), {}, "no column 'offset'"),
        (scene.stream(), {"table": "journal.nothing"}, "no table journal.nothing"),
        (scene.stream().selectExpr("*", "struct(offset) extra"), {}, "no column 'extra'"),
    ]:
        with pytest.raises(Exception, match=said):
            write_stream(scene, frame, **options)
        scene.lose_checkpoint()
    write_stream(scene)
    scene.check()
