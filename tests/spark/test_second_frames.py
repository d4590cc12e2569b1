"""A second frame of one batch is refused: the ledger counts the batch as written, its rows would be lost in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.spark.scene import Scene

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


def test_two_sinks_with_a_group_each_share_a_batch(scene: Scene) -> None:
    first, second = (scene.sink(small_batch=1000, group_id=f"{scene.topic}-{n}") for n in range(2))

    def halves(frame: DataFrame, batch_id: int) -> None:
        first(frame.where("offset % 2 = 0"), batch_id)
        second(frame.where("offset % 2 = 1"), batch_id)

    scene.produce(40)
    scene.run(halves, per_trigger=20)
    scene.check()
