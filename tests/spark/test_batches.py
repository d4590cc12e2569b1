"""Batches as users bring them: executed before, without rows, planned otherwise, from two queries at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from tests.spark.scene import Scene
from tests.support.spark import drain
from tests.support.waiting import SPARK_SECONDS, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

    from spark_sink import SinkUnit
    from spark_sink.options import Mode, Transaction

both = pytest.mark.parametrize("transaction", ["batch", "partition"])
ADAPTIVE = "spark.sql.adaptive.enabled"


@pytest.mark.fault("F11")
@pytest.mark.parametrize("small_batch", [0, 1000])
@both
def test_a_frame_that_has_been_executed_before_is_written_once(
    scene: Scene, transaction: Transaction, small_batch: int
) -> None:
    """F11: each action reads the topic again, so the sink's must be the only one that counts."""
    sink = scene.sink(transaction=transaction, small_batch=small_batch)
    counted: list[int] = []

    def look_first(frame: DataFrame, batch_id: int) -> None:
        counted.append(frame.count())
        sink(frame, batch_id)
        counted.append(frame.count())

    scene.produce(200)
    scene.run(look_first, per_trigger=100)
    assert sum(counted) == 400
    scene.check()
    assert scene.ledger() == scene.ends()


@pytest.mark.fault("F12")
def test_a_batch_without_rows_counts_as_one(scene: Scene, name: str, db: psycopg.Connection[Any]) -> None:
    """F12: what comes again under its number is known, with rows or without."""
    db.execute(f"CREATE TABLE {name} (value text)")
    frame = scene.stream(maxOffsetsPerTrigger="20").where("offset >= 20").selectExpr("CAST(value AS string) value")
    sink_options = {"table": name, "ledger": "batch-id"}
    scene.produce(60)
    drain(frame, scene.sink(**sink_options), scene.checkpoint)
    assert [r.rows for r in scene.reports] == [0, 0, 20]
    last = scene.forget_last_commit()
    drain(frame, scene.sink(**sink_options), scene.checkpoint)
    assert [(r.batch_id, r.is_replay) for r in scene.reports[3:]] == [(last, True)]
    assert db.execute(f"SELECT count(*) FROM {name}").fetchone() == (20,)
    db.execute(f"DROP TABLE {name}")


SPILLS = "spark.shuffle.spill.numElementsForceSpillThreshold"


@pytest.fixture
def spills(scene: Scene) -> Iterator[None]:
    """Each sort runs out of memory now and then."""
    conf = scene.spark.sparkContext._jsc.sc().conf()
    conf.set(SPILLS, "700")
    yield
    conf.remove(SPILLS)


@pytest.mark.parametrize(("mode", "stored"), [("upsert", 2000), ("insert-ignore", 1)])
@pytest.mark.usefixtures("spills")
def test_rows_that_an_explode_makes_of_a_message_stay_in_their_order(
    scene: Scene, name: str, db: psycopg.Connection[Any], mode: Mode, stored: int
) -> None:
    """They have one offset, and a sort that spills gives such rows in any order: another than the last would win."""
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, n int)")
    sink = scene.sink(table=name, mode=mode)

    def write(frame: DataFrame, batch_id: int) -> None:
        places = frame.selectExpr("topic", "partition", "offset", "CAST(offset * 2 + partition AS int) AS id")
        sink(places.selectExpr("*", "explode(sequence(1, 2000)) AS n"), batch_id)

    scene.produce(8)
    scene.run(write)
    assert db.execute(f"SELECT * FROM {name} ORDER BY id").fetchall() == [(n, stored) for n in range(8)]
    assert sum(report.ignored for report in scene.reports) == (8 * 1999 if mode == "insert-ignore" else 0)
    db.execute(f"DROP TABLE {name}")


@pytest.fixture
def adaptive(scene: Scene) -> Iterator[None]:
    """Whatever the test says of adaptive execution, afterwards it is as before."""
    before = scene.spark.conf.get(ADAPTIVE)
    assert before is not None
    yield
    scene.spark.conf.set(ADAPTIVE, before)


@pytest.mark.slow
@pytest.mark.fault("F8")
@both
@pytest.mark.usefixtures("adaptive")
def test_a_batch_that_is_planned_otherwise_the_second_time_is_written_once(
    scene: Scene, transaction: Transaction
) -> None:
    """F8: adaptive or not, from more source tasks; what the first time has landed in part is no part of a plan."""

    def fail(unit: SinkUnit) -> None:
        if any(partition.number == 1 for partition in unit.offsets):
            raise RuntimeError("not this time")

    scene.produce(500)
    for is_adaptive, tasks in (("true", "2"), ("false", "7")):
        scene.spark.conf.set(ADAPTIVE, is_adaptive)
        with pytest.raises(Exception, match="not this time"):
            scene.run(scene.sink(transaction=transaction, in_transaction=fail), minPartitions=tasks)
        assert scene.ledger()[1] == 0
    scene.spark.conf.set(ADAPTIVE, "true")
    scene.run(scene.sink(transaction=transaction), minPartitions="5")
    scene.check()
    assert scene.ledger() == scene.ends()


@pytest.mark.fault("F6")
def test_of_two_queries_with_one_group_the_later_one_goes_on(scene: Scene, tmp_path: Path) -> None:
    """F6: the earlier one is told that it is fenced, and neither loses or doubles a row."""

    def start(name: str) -> Any:
        place = str(tmp_path / name)
        sink = scene.sink(checkpoint_location=place, name=name)
        return scene.stream().writeStream.foreachBatch(sink).option("checkpointLocation", place).start()

    def is_written() -> bool:
        return scene.ledger() == scene.ends()

    scene.produce(100)
    earlier = start("earlier")
    until(is_written, SPARK_SECONDS, "the earlier query to write")
    later = start("later")
    try:
        until(lambda: later.lastProgress is not None, SPARK_SECONDS, "the later query to own the partitions")
        scene.produce(100)
        with pytest.raises(Exception, match="Fenced"):
            earlier.awaitTermination(SPARK_SECONDS)
        until(is_written, SPARK_SECONDS, "the later query to write")
    finally:
        earlier.stop()
        later.stop()
    scene.check()
