"""A topic that Spark loses sight of and that comes back: the same one, or another one that was made under its name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_sink import ExactlyOncePostgres
from tests.spark.scene import Scene
from tests.spark.source import chosen
from tests.support.topics import create_topic, delete_topic, produce
from tests.support.waiting import SPARK_SECONDS, until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def both_topics(scene: Scene) -> DataFrame:
    """Read the scene's topic and another one; with failOnDataLoss=true, the default, Spark itself ends the query."""
    source = scene.spark.readStream.format("kafka").option("kafka.bootstrap.servers", scene.bootstrap_servers)
    source = source.options(subscribePattern=f"{scene.topic}.*", startingOffsets="earliest", failOnDataLoss="false")
    return source.load().select("topic", "partition", "offset", "value", F.lit("spark").alias("worker"))


def lose(scene: Scene) -> None:
    """Delete the topic, and have a batch without it."""
    delete_topic(scene.bootstrap_servers, scene.topic)
    produce(scene.bootstrap_servers, f"{scene.topic}-other", 4, 2)


def make_again(scene: Scene, count: int) -> None:
    create_topic(scene.bootstrap_servers, 2, name=scene.topic)
    produce(scene.bootstrap_servers, scene.topic, count, 2)


def run_once(scene: Scene, count: int, *, knows_cluster: bool) -> None:
    """Do that between the batches of one run of the sink; its error is raised."""
    create_topic(scene.bootstrap_servers, 2, name=f"{scene.topic}-other")
    scene.produce(20)
    sink = scene.sink(bootstrap_servers=scene.bootstrap_servers if knows_cluster else None)

    def write(frame: DataFrame, batch_id: int) -> None:
        sink(frame, batch_id)
        if batch_id == 0:
            lose(scene)
        elif batch_id == 1:
            make_again(scene, count)

    query = both_topics(scene).writeStream.foreachBatch(write).option("checkpointLocation", str(scene.checkpoint))
    running = query.start()
    try:
        running.processAllAvailable()
    finally:
        running.stop()


@pytest.mark.parametrize("knows_cluster", [False, True])
def test_a_topic_that_was_made_again_and_is_shorter_is_refused(scene: Scene, knows_cluster: bool) -> None:  # noqa: FBT001
    with pytest.raises(Exception, match="offsets go back from 10 to 5, so the topic was deleted"):
        run_once(scene, 10, knows_cluster=knows_cluster)


def test_one_that_is_longer_is_known_by_its_id(scene: Scene) -> None:
    with pytest.raises(Exception, match="the topic of that name now has id"):
        run_once(scene, 40, knows_cluster=True)


def test_without_ids_what_is_dropped_of_it_is_told(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """It may be the same topic, of which Spark brings again what was written."""
    with caplog.at_level(logging.WARNING, "spark_sink"):
        run_once(scene, 40, knows_cluster=False)
    (told,) = [r for r in caplog.records if getattr(r, "action", None) == "returned"]
    assert f"{scene.topic}[0] up to offset 20" in told.getMessage()
    assert "give bootstrap_servers=" in told.getMessage()
    assert scene.ledger() == {0: 20, 1: 20}


def test_the_data_source_refuses_it_within_a_run(scene: Scene) -> None:
    """A run remembers what it has written; how many messages Spark sees first does not matter."""
    create_topic(scene.bootstrap_servers, 2, name=f"{scene.topic}-other")
    scene.produce(20)
    scene.spark.dataSource.register(ExactlyOncePostgres)
    writer = both_topics(scene).writeStream.format("exactly_once_postgres").options(**chosen(scene))
    running = writer.option("checkpointLocation", str(scene.checkpoint)).start()
    try:
        running.processAllAvailable()
        lose(scene)
        running.processAllAvailable()
        make_again(scene, 10)
        with pytest.raises(Exception, match=r"offsets go back from 10 to \d, so the topic was deleted"):
            running.processAllAvailable()
    finally:
        running.stop()


def test_a_topic_that_comes_when_none_matched_before_is_read_from_its_beginning(
    spark: SparkSession, bootstrap_servers: str, journaled: str, tmp_path: Path
) -> None:
    scene = Scene(spark, bootstrap_servers, journaled, tmp_path, topic=f"topic-{uuid4().hex[:12]}")
    frame, sink = both_topics(scene), scene.sink()
    query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(scene.checkpoint)).start()
    try:
        query.processAllAvailable()
        assert not scene.reports
        create_topic(bootstrap_servers, 2, name=scene.topic)
        scene.produce(10)
        until(lambda: query.exception() or scene.reports, SPARK_SECONDS, "a batch")
        query.processAllAvailable()
    finally:
        query.stop()
    scene.check()
