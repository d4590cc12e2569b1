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
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from exactly_once._model import Partition

from .attempt import Attempt, Work, tables
from .offset_filter import OFFSET, PARTITION, TOPIC, OffsetFilter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def to_tasks(frame: DataFrame, partitions: Sequence[Partition]) -> DataFrame:
    """Send the rows of each of these partitions to a task of its own, in the order of their offsets; others anywhere.

    The number is said, because adaptive execution leaves only such a shuffle as it is.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - executors do without

    task = F.expr(_task_sql(partitions))
    return frame.repartition(len(partitions), task).sortWithinPartitions(OFFSET)


def _task_sql(partitions: Sequence[Partition]) -> str:
    """Return SQL for what a row is hashed by: for each partition a number that Spark's hash sends to its own task.

    Hashed by topic and number themselves, twelve partitions would keep seven or eight of twelve tasks busy.
    """
    keys = _keys(len(partitions))
    topics: dict[str, dict[int, int]] = {}
    for partition, key in zip(partitions, keys, strict=True):
        topics.setdefault(partition.topic, {})[partition.number] = key
    cases = [
        f"WHEN {TOPIC} = '{topic}' THEN try_element_at(array("  # Kafka allows no quotes in names of topics
        + ", ".join(str(numbers.get(n, 0)) for n in range(max(numbers) + 1))
        + f"), {PARTITION} + 1)"
        for topic, numbers in topics.items()
    ]
    return f"coalesce(CASE {' '.join(cases)} END, 0)"


@cache
def _keys(count: int) -> list[int]:
    """Return for each of so many tasks a number that Spark's shuffle sends there."""
    found: dict[int, int] = {}
    for key in itertools.count():
        found.setdefault(_hash(key) % count, key)
        if len(found) == count:
            return [found[task] for task in range(count)]
    raise AssertionError


def _hash(value: int) -> int:
    """Hash an int as Spark does: Murmur3 with seed 42, of a number with a sign."""
    mask = 0xFFFFFFFF
    k = value * 0xCC9E2D51 & mask
    k = ((k << 15 | k >> 17) & mask) * 0x1B873593 & mask
    h = 42 ^ k
    h = ((h << 13 | h >> 19) * 5 + 0xE6546B64 & mask) ^ 4
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    h ^= h >> 16
    return h - (1 << 32) if h >> 31 else h


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
        offsets = OffsetFilter(standing, self.work.ranges, strictly=True)
        attempt.begin()
        for table in rows:
            attempt.write(offsets.keep(table))
        attempt.result.dropped = offsets.dropped
        moves = {p: (standing[p], last + 1) for p, last in offsets.last.items() if last >= standing[p]}
        if moves:
            attempt.commit(moves)
        else:
            attempt.unit.roll_back()  # an earlier attempt has landed, and its answer was lost
            attempt.reached({partition: standing[partition] for partition in offsets.last})
