"""A second frame of one batch is refused: the ledger counts the batch as written, its rows would be lost in silence."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.spark.scene import JOURNAL, Scene

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@pytest.mark.parametrize("sinks", [1, 2])
def test_the_halves_of_a_batch_cannot_be_written_one_after_the_other(scene: Scene, sinks: int) -> None:
    """Whether by one sink or by two of one group, each perhaps into a table of its own."""
    first, *others = (scene.sink(small_batch=1000) for _ in range(sinks))
    second = others[0] if others else first

    def halves(frame: DataFrame, batch_id: int) -> None:
        first(frame.where("offset % 2 = 0"), batch_id)
        second(frame.where("offset % 2 = 1"), batch_id)

    scene.produce(40)
    with pytest.raises(Exception, match=r"second frame of batch 0(.|\n)*group_id of its own"):
        scene.run(halves)


@pytest.mark.parametrize("sinks", [1, 2])
def test_halves_that_come_from_two_threads_end_the_query_at_the_next_batch(scene: Scene, sinks: int) -> None:
    """A pool keeps the error of the call that was refused, unless somebody asks for it."""
    made = [scene.sink() for _ in range(sinks)]

    def halves(frame: DataFrame, batch_id: int) -> None:
        if batch_id > 0:
            made[0](frame, batch_id)
            return
        with ThreadPoolExecutor() as pool:
            for half in range(2):
                pool.submit(made[-half], frame.where(f"offset % 2 = {half}"), batch_id)

    scene.produce(40)
    with pytest.raises(Exception, match=r"batch 0 was written but for a call that was refused(.|\n)*second frame"):
        scene.run(halves, per_trigger=20)


@pytest.mark.parametrize(("sinks", "table"), [(1, JOURNAL), (2, JOURNAL), (1, "elsewhere")])
def test_another_frame_cannot_take_the_place_of_one_that_failed(scene: Scene, sinks: int, table: str) -> None:
    """It would move the ledger over the rows of the first, whose error the function has caught."""
    first, *others = (scene.sink(small_batch=1000) for _ in range(sinks))
    second = others[0] if others else first

    def halves(frame: DataFrame, batch_id: int) -> None:
        with contextlib.suppress(Exception):
            first.write({table: frame.where("offset % 2 = 0").withColumn("odd", frame["offset"])}, batch_id)
        second(frame.where("offset % 2 = 1"), batch_id)

    scene.produce(40)
    with pytest.raises(Exception, match=r"second frame of batch 0(.|\n)*group_id of its own"):
        scene.run(halves)
    assert scene.reports == []
    scene.run()
    scene.check()


def test_the_frame_that_failed_may_be_tried_again(scene: Scene) -> None:
    """Also where the function makes it anew."""
    failures = [ValueError("once"), None]

    def fail_once(_: object) -> None:
        if (error := failures.pop(0)) is not None:
            raise error

    sink = scene.sink(small_batch=1000, in_transaction=fail_once)

    def write(frame: DataFrame, batch_id: int) -> None:
        with contextlib.suppress(ValueError):
            sink(frame.where("offset >= 0"), batch_id)
            return
        sink(frame.where("offset >= 0"), batch_id)

    scene.produce(40)
    scene.run(write)
    scene.check()


@pytest.mark.parametrize("ledger", ["offsets", "batch-id"])
@pytest.mark.parametrize("per_trigger", [None, 20])
def test_a_refused_frame_whose_error_is_caught_ends_the_query_at_the_next_batch(
    scene: Scene, ledger: str, per_trigger: int | None
) -> None:
    """Once, in this run or the next: its rows are of a batch that the ledger counts and do not come again."""
    sink = scene.sink(small_batch=1000, ledger=ledger)

    def halves(frame: DataFrame, batch_id: int) -> None:
        sink(frame.where("offset % 2 = 0"), batch_id)
        if batch_id == 0:
            with contextlib.suppress(Exception):
                sink(frame.where("offset % 2 = 1"), batch_id)

    scene.produce(40)
    if per_trigger is None:  # the next batch is of another run then
        scene.run(halves)
        scene.produce(20)
    with pytest.raises(Exception, match=r"batch 0 was written but for a call that was refused(.|\n)*second frame"):
        scene.run(halves, per_trigger=per_trigger)
    scene.run(scene.sink(ledger=ledger))
    with psycopg.connect(scene.conninfo) as connection:
        written = connection.execute("SELECT count(*) FROM journal.entries WHERE topic = %s", (scene.topic,)).fetchone()
    read = 20 if per_trigger else 40
    assert written == (scene.produced - read // 2,)


def test_two_sinks_with_a_group_each_share_a_batch(scene: Scene) -> None:
    first, second = (scene.sink(small_batch=1000, group_id=f"{scene.topic}-{n}") for n in range(2))

    def halves(frame: DataFrame, batch_id: int) -> None:
        first(frame.where("offset % 2 = 0"), batch_id)
        second(frame.where("offset % 2 = 1"), batch_id)

    scene.produce(40)
    scene.run(halves, per_trigger=20)
    scene.check()
