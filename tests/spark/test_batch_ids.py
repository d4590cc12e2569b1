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


def test_a_first_batch_behind_a_known_checkpoint_is_refused(scene: Scene, counts: str) -> None:
    """Whether the query has written elsewhere, or the database was set back: rows are missing here."""

    def elsewhere(frame: DataFrame, _: int) -> None:
        frame.count()

    scene.produce(20)
    Counting(scene, counts).run_into(elsewhere, "update")
    scene.produce(20)
    with pytest.raises(Exception, match="LedgerBehindCheckpoint"):
        Counting(scene, counts).run("update", "upsert")
