"""Batches for which the user's function does not call the sink, and queries that have written elsewhere before."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pyspark.sql import functions as F  # noqa: N812

from exactly_once._model import Partition
from spark_sink.attempt import to_tasks
from spark_sink.ranges import OFFSET, PARTITION, TOPIC
from tests.spark.scene import JOURNAL, Scene, Sink
from tests.spark.source import write_stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_sink import PostgresSink

WANTED = "offset < 5 OR offset >= 15"


def unless_empty(sink: PostgresSink) -> Sink:
    """The idiom of Spark's own documentation."""

    def write(frame: DataFrame, batch_id: int) -> None:
        if not frame.isEmpty():
            sink(frame, batch_id)

    return write


def written(scene: Scene, db: psycopg.Connection[Any]) -> list[int]:
    rows = db.execute('SELECT "offset" FROM journal.entries WHERE topic = %s ORDER BY 1', (scene.topic,))
    return [row[0] for row in rows.fetchall()]


def test_empty_batches_may_be_left_out(scene: Scene, db: psycopg.Connection[Any]) -> None:
    """The first one, within a run, and across starts; a ledger that was set back is told from it."""
    for number in range(4):
        scene.produce(10)
        run = {0: "offset >= 5"}.get(number, WANTED)
        scene.run(unless_empty(scene.sink()), change=lambda frame, run=run: frame.where(run))  # type: ignore[misc]
    assert written(scene, db) == [n for n in range(15, 20) for _ in range(2)]
    scene.produce(60)
    scene.run(unless_empty(scene.sink()), change=lambda frame: frame.where("offset % 10 < 5"), per_trigger=10)
    assert len(written(scene, db)) == 10 + 30
    scene.produce(10)
    scene.run(unless_empty(scene.sink()), change=lambda frame: frame.where("false"))
    db.execute("UPDATE exactly_once.ledger SET next_offset = next_offset - 2 WHERE group_id = %s", (scene.topic,))
    scene.produce(10)
    with pytest.raises(Exception, match="LedgerBehindCheckpoint"):
        scene.run()


def test_batch_ids_that_are_left_out_are_no_gap(scene: Scene, db: psycopg.Connection[Any]) -> None:
    sink = scene.sink(ledger="batch-id")

    def odd(frame: DataFrame, batch_id: int) -> None:
        if batch_id % 3 == 0:
            sink(frame, batch_id)

    scene.produce(50)
    scene.run(odd, per_trigger=10)
    assert len(written(scene, db)) == 20
    scene.produce(20)
    scene.run(odd, per_trigger=10)
    assert len(written(scene, db)) == 30
    db.execute("UPDATE exactly_once.ledger SET next_offset = 4 WHERE group_id = %s", (scene.topic,))
    scene.produce(10)
    with pytest.raises(Exception, match="LedgerBehindCheckpoint"):
        scene.run(scene.sink(ledger="batch-id"))


def test_a_query_that_wrote_elsewhere_goes_on_in_the_sink(
    scene: Scene, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """With its checkpoint; where that was written by the sink, and the ledger lacks it, rows are missing."""

    def elsewhere(frame: DataFrame, _: int) -> None:
        frame.count()

    scene.produce(10)
    scene.run(elsewhere)
    scene.produce(10)
    with caplog.at_level(logging.WARNING, "spark_sink"):
        scene.run()
    assert written(scene, db) == [n for n in range(5, 10) for _ in range(2)]
    (told,) = [r for r in caplog.records if getattr(r, "action", None) == "adopted"]
    assert "batch 1" in told.getMessage()
    db.execute("DELETE FROM exactly_once.ledger WHERE group_id = %s", (scene.topic,))
    db.execute("DELETE FROM exactly_once.audit WHERE group_id = %s", (scene.topic,))
    scene.produce(10)
    with pytest.raises(Exception, match="LedgerBehindCheckpoint"):
        scene.run()


@pytest.fixture
def strict(name: str, db: psycopg.Connection[Any]) -> Iterator[str]:
    """A table that takes most rows."""
    db.execute(f'CREATE TABLE {name} (LIKE {JOURNAL} INCLUDING ALL, CHECK (partition = 0 OR "offset" <> 3))')
    yield name
    db.execute(f"DROP TABLE {name}")


def test_a_row_that_cannot_be_stored_is_named_by_its_message(scene: Scene, strict: str) -> None:
    """By the driver, by a task, by each task and by the data source; and the error can be caught by its class."""
    scene.produce(10)
    said = rf"BadRow: {scene.topic}\[1\] offset 3: .*check"
    for options in ({"small_batch": 1000}, {}, {"transaction": "partition"}):
        sink = scene.sink(table=strict, **options)
        with pytest.raises(Exception, match=said):
            scene.run(sink)
        assert type(sink.error).__name__ in ("BadRow", "PythonException")
        shutil.rmtree(scene.checkpoint)
    with pytest.raises(Exception, match=said):
        write_stream(scene, table=strict)


def test_each_partition_has_a_task_of_its_own(scene: Scene) -> None:
    partitions = [Partition(topic, n) for topic in ("a.b", "c-d") for n in (0, 1, 2, 3, 5, 8, 13)]
    rows = [(p.topic, p.number, offset) for p in partitions for offset in range(3)]
    frame = scene.spark.createDataFrame(rows, f"{TOPIC} string, {PARTITION} int, {OFFSET} bigint")
    tasks = to_tasks(frame, partitions).select(TOPIC, PARTITION, F.spark_partition_id().alias("task")).distinct()
    assert len({row.task for row in tasks.collect()}) == len(partitions)
