"""``transaction="partition"``: tasks in parallel, each a transaction of its own.

Rows go to tasks by topic and partition, sorted by offset alone: one number is sorted several times faster than three
columns. An attempt that is killed sees its input end early, and commits what it has; because offsets rise strictly
that is a prefix of each partition, and the ledger moves to its last offset + 1. The next attempt goes on from there.
Only when Spark has told the driver that all tasks have succeeded does the driver move the ledger to the ends of the
batch.

A task may have several Kafka partitions, or none. The batch is not atomic across partitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from .attempt import Attempt, Work, tables
from .screen import OFFSET, PARTITION, TOPIC, Screen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def to_tasks(frame: DataFrame, *, count: int) -> DataFrame:
    """Send the rows of each partition to one task, in the order of their offsets.

    The number is said, because adaptive execution leaves only such a shuffle as it is.
    """
    return frame.repartition(count, TOPIC, PARTITION).sortWithinPartitions(OFFSET)


class PartitionTask(NamedTuple):
    """What each task does."""

    work: Work

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write what the ledger has not, in order; return one row that tells what was done, if there were rows."""
        stream = iter(tables(batches, rows_a_copy=self.work.rows_a_copy))
        first = next((table for table in stream if table.num_rows), None)
        if first is None:
            return
        with Attempt(self.work) as attempt:
            self._write(attempt, itertools.chain([first], stream))
        yield attempt.result.as_batch()

    def _write(self, attempt: Attempt, rows: Iterable[pa.Table]) -> None:
        standing = attempt.standing()
        screen = Screen(standing, self.work.ranges, strictly=True)
        attempt.begin()
        for table in rows:
            attempt.write(screen.keep(table))
        attempt.result.dropped = screen.dropped
        moves = {p: (standing[p], last + 1) for p, last in screen.last.items() if last >= standing[p]}
        if moves:
            attempt.commit(moves)
        else:
            attempt.unit.roll_back()  # an earlier attempt has landed, and its answer was lost
            attempt.reached({partition: standing[partition] for partition in screen.last})
