"""Aggregations: rows without offsets, counted by batch id."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from spark_sink import PostgresSink
from tests.spark.scene import Scene, Sink
from tests.spark.source import write_stream
from tests.support.spark import read_topic, run_out

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@pytest.fixture
def counts(name: str, db: psycopg.Connection[Any]) -> Iterator[str]:
    """A table of counts by Kafka partition."""
    db.execute(f"CREATE TABLE {name} (partition int PRIMARY KEY, count bigint NOT NULL)")
    yield name
    db.execute(f"DROP TABLE {name}")


class Counting:
    """A query that counts messages by partition."""

    def __init__(self, scene: Scene, table: str) -> None:
        self.scene = scene
        self.table = table

    def sink(self, mode: str) -> PostgresSink:
        return self.scene.sink(table=self.table, ledger="batch-id", mode=mode)

    def frame(self, **options: str) -> DataFrame:
        stream = read_topic(self.scene.spark, self.scene.bootstrap_servers, self.scene.topic, **options)
        return stream.groupBy("partition").count()

    def run(self, output: str, mode: str, **options: str) -> None:
        """Run it over what is there."""
        self.run_into(self.sink(mode), output, **options)

    def run_into(self, sink: Sink, output: str, **options: str) -> None:
        writer = self.frame(**options).writeStream.outputMode(output).foreachBatch(sink)
        run_out(writer.option("checkpointLocation", str(self.scene.checkpoint)))

    def read(self) -> dict[int, int]:
        with psycopg.connect(self.scene.conninfo) as connection:
            return dict(connection.execute(f"SELECT partition, count FROM {self.table}").fetchall())


@pytest.mark.parametrize(("output", "mode"), [("update", "upsert"), ("complete", "replace")])
def test_an_aggregation_is_right_through_replays(scene: Scene, counts: str, output: str, mode: str) -> None:
    counting = Counting(scene, counts)
    scene.produce(100)
    counting.run(output, mode, maxOffsetsPerTrigger="60")
    assert counting.read() == scene.ends()
    last = scene.forget_last_commit()
    scene.produce(20)
    counting.run(output, mode)
    assert (last, True) in [(r.batch_id, r.is_replay) for r in scene.reports]
    assert counting.read() == scene.ends()


@pytest.mark.fault("F5", "F9", more=True)
def test_another_query_and_an_older_checkpoint_are_refused(scene: Scene, counts: str, tmp_path: Path) -> None:
    """F5, F7 and F9, where numbers of batches are all that there is."""
    counting = Counting(scene, counts)
    scene.produce(60)
    counting.run("update", "upsert", maxOffsetsPerTrigger="60")
    older = tmp_path / "older"
    shutil.copytree(scene.checkpoint, older)
    scene.produce(60)
    counting.run("update", "upsert", maxOffsetsPerTrigger="60")
    before = counting.read()

    newest = tmp_path / "newest"
    scene.checkpoint.rename(newest)
    with pytest.raises(Exception, match=r"QueryChanged.*another\s+group_id"):
        counting.run("update", "upsert")
    shutil.rmtree(scene.checkpoint)

    # The same batch id again, planned anew over what has arrived since: other rows.
    shutil.copytree(older, scene.checkpoint)
    scene.produce(40)
    with pytest.raises(Exception, match=r"QueryChanged.*older copy"):
        counting.run("update", "upsert")
    assert counting.read() == before
    shutil.rmtree(scene.checkpoint)

    newest.rename(scene.checkpoint)
    counting.run("update", "upsert")
    assert counting.read() == scene.ends()


@pytest.mark.fault("F9", more=True)
@pytest.mark.parametrize("way", ["foreachBatch", "data source"])
def test_an_older_checkpoint_with_other_files_is_refused(
    scene: Scene, name: str, db: psycopg.Connection[Any], tmp_path: Path, way: str
) -> None:
    """The offsets of files are numbers, equal for other files."""
    db.execute(f"CREATE TABLE {name} (value bigint)")
    arrived = tmp_path / "files"
    arrived.mkdir()

    def run(value: int) -> None:
        (arrived / f"{value}.csv").write_text(f"{value}\n")
        frame = scene.spark.readStream.schema("value long").csv(str(arrived))
        if way == "data source":
            write_stream(scene, frame, table=name, ledger="batch-id")
        else:
            sink = scene.sink(table=name, ledger="batch-id")
            run_out(frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(scene.checkpoint)))

    run(0)
    shutil.copytree(scene.checkpoint, tmp_path / "older")
    run(1)
    scene.checkpoint.rename(tmp_path / "newest")
    (tmp_path / "older").rename(scene.checkpoint)
    (arrived / "1.csv").rename(tmp_path / "1.csv")
    with pytest.raises(Exception, match=r"QueryChanged.*older copy"):
        run(2)
    shutil.rmtree(scene.checkpoint)
    (tmp_path / "newest").rename(scene.checkpoint)
    scene.forget_last_commit()
    run(3)  # and what it has written comes again, and is left out
    run(4)
    assert sorted(db.execute(f"SELECT value FROM {name}").fetchall()) == [(0,), (1,), (2,), (3,), (4,)]
    db.execute(f"DROP TABLE {name}")


def test_a_first_batch_behind_a_known_checkpoint_is_refused(scene: Scene, counts: str) -> None:
    """Whether the query has written elsewhere, or the database was set back: rows are missing here."""

    def elsewhere(frame: DataFrame, _: int) -> None:
        frame.count()

    scene.produce(20)
    Counting(scene, counts).run_into(elsewhere, "update")
    scene.produce(20)
    with pytest.raises(Exception, match="LedgerBehindCheckpoint"):
        Counting(scene, counts).run("update", "upsert")
