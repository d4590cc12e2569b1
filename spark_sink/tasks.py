"""Tasks: how the rows of a micro-batch come to attempts that write them.

``transaction="batch"``: the whole micro-batch in one transaction of one task. The end of a task's input proves nothing:
when an attempt is killed, or what feeds it fails, Spark closes the pipe and the iterator in Python ends as if all had
been read. So an **end mark** travels with the rows: the shuffle brings all of them to one task, and there a
coalesced union goes through them and then, in the same iterator, comes to one row more. Who has seen the mark has seen
every row; who has not, rolls back; and a row behind the mark, should Spark ever go through a union in another order,
fails the batch. The shuffle itself is the other half of the proof: it reads only the output of tasks that have
succeeded.

``transaction="partition"``: tasks in parallel, each a transaction of its own. Rows go to tasks by topic and partition,
sorted by offset alone: one number is sorted several times faster than three columns. An attempt that is killed sees its
input end early, and commits what it has; because offsets rise strictly that is a prefix of each partition, and the
ledger moves to its last offset + 1. The next attempt goes on from there. Only when Spark has told the driver that all
tasks have succeeded does the driver move the ledger to the ends of the batch. A task may have several Kafka partitions,
or none. The batch is not atomic across partitions.

A small batch, whatever ``transaction=``, is collected and written on the driver instead: an action that returns has
brought all rows, and a second stage with a worker and a connection of its own would take longer than the rows do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from exactly_once._model import Partition
from exactly_once.ledger.session import Session
from exactly_once.writer import TableWriter

from .attempt import BYTES, ROWS, Attempt, Part, Result, Work
from .errors import IncompleteInput
from .frame import FRAME, ROW
from .offset_filter import OFFSET, PARTITION, PLACES, RESERVED, TOPIC, OffsetFilter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# The column that is 1 in the end mark, and nowhere else.
END = f"{RESERVED}end"


def to_one_task(frame: DataFrame, *, order: Sequence[str]) -> DataFrame:
    """Bring all rows to one task, in this order, the end mark behind them."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - executors do without

    rows = frame.withColumn(END, F.lit(0)).repartition(1)
    nothing = [F.lit(None).cast(f.dataType).alias(f.name) for f in frame.schema.fields]
    mark = frame.sparkSession.range(0, 1, 1, 1).select(*nothing, F.lit(1).alias(END))
    # One after the other in one task; a sort with the mark as its last row would hold up all of them.
    return (rows.sortWithinPartitions(*order) if order else rows).union(mark).coalesce(1)


def to_tasks(frame: DataFrame, partitions: Sequence[Partition]) -> DataFrame:
    """Send the rows of each of these partitions to a task of its own, in the order of their offsets; others anywhere.

    For each partition rows are hashed by a number that Spark's hash sends to its own task: by topic and number
    themselves, twelve partitions would keep seven or eight of twelve tasks busy. How many tasks is said, because
    adaptive execution leaves only such a shuffle as it is.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - executors do without

    topics: dict[str, dict[int, int]] = {}
    for partition, key in zip(partitions, _keys(len(partitions)), strict=True):
        topics.setdefault(partition.topic, {})[partition.number] = key
    cases = [
        f"WHEN {TOPIC} = '{topic}' THEN try_element_at(array("  # Kafka allows no quotes in names of topics
        + ", ".join(str(numbers.get(n, 0)) for n in range(max(numbers) + 1))
        + f"), {PARTITION} + 1)"
        for topic, numbers in topics.items()
    ]
    task = F.expr(f"coalesce(CASE {' '.join(cases)} END, 0)")
    return frame.repartition(len(partitions), task).sortWithinPartitions(OFFSET)


@cache
def _keys(count: int) -> list[int]:
    """Return for each of so many tasks a number that Spark's shuffle sends there: by Murmur3 with seed 42."""
    found: dict[int, int] = {}
    mask = 0xFFFFFFFF
    for key in itertools.count():
        k = key * 0xCC9E2D51 & mask
        k = ((k << 15 | k >> 17) & mask) * 0x1B873593 & mask
        h = 42 ^ k
        h = ((h << 13 | h >> 19) * 5 + 0xE6546B64 & mask) ^ 4
        h = (h ^ h >> 16) * 0x85EBCA6B & mask
        h = (h ^ h >> 13) * 0xC2B2AE35 & mask
        h ^= h >> 16
        found.setdefault((h - (1 << 32) if h >> 31 else h) % count, key)  # Spark's has a sign
        if len(found) == count:
            break
    return [found[task] for task in range(count)]


class BatchTask(NamedTuple):
    """What the one task of a batch does."""

    work: Work

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the whole input or nothing; return one row that tells what was done."""
        stream = tables(batches, rows_a_copy=self.work.rows_a_copy)
        # No transaction stands open while rows are still read and sorted.
        first = next(stream, None)
        rows = itertools.chain([] if first is None else [first], stream)
        with Attempt(self.work) as attempt:
            _write(attempt, up_to_mark(rows), attempt.standing(), is_whole=True)
        yield attempt.result.as_batch()

    def write_here(
        self, rows: pa.Table, session: Session, writers: Sequence[TableWriter], standing: Mapping[Partition, int]
    ) -> Result:
        """Write the rows of a small batch on the driver, whose action has brought all of them or raised.

        ``standing`` is where the ledger stood before; an advance from anywhere else matches nothing.
        """
        rows = rows.sort_by(OFFSET) if OFFSET in rows.column_names else rows
        with Attempt(self.work, session, writers) as attempt:
            _write(attempt, [rows], standing, is_whole=True)
        return attempt.result


class PartitionTask(NamedTuple):
    """What each task does that has a transaction of its own."""

    work: Work

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write what the ledger has not, in order; return one row that tells what was done, if there were rows."""
        stream = tables(batches, rows_a_copy=self.work.rows_a_copy)
        first = next((table for table in stream if table.num_rows), None)
        if first is None:
            return
        with Attempt(self.work) as attempt:
            _write(attempt, itertools.chain([first], stream), attempt.standing(), is_whole=False)
        yield attempt.result.as_batch()


def _write(attempt: Attempt, rows: Iterable[pa.Table], standing: Mapping[Partition, int], *, is_whole: bool) -> None:
    """Write what the ledger has not, and move it: to the ends of the batch, or as far as the rows go."""
    work = attempt.work
    moves = {p: (standing[p], r.end) for p, r in work.ranges.items() if is_whole and standing[p] < r.end}
    if is_whole and not moves:
        attempt.reached(standing)  # an earlier attempt has landed, and its answer was lost
        return
    # What transaction="partition" would refuse in a large batch, it refuses in a small one.
    strictly = not is_whole or work.options.transaction == "partition"
    offsets = [OffsetFilter(standing, work.ranges, strictly=strictly) if p.has_places else None for p in work.parts]
    attempt.begin()
    attempt.empty()
    for table in rows:
        for number, some in split(table, work.parts):
            known = offsets[number]
            attempt.write(some if known is None else known.keep(some), number)
    attempt.result.dropped = sum(known.dropped for known in offsets if known is not None)
    if not is_whole and offsets[0] is not None:
        last = offsets[0].last
        moves = {p: (standing[p], offset + 1) for p, offset in last.items() if offset >= standing[p]}
        if not moves:
            attempt.unit.roll_back()  # an earlier attempt has landed, and its answer was lost
            attempt.reached({partition: standing[partition] for partition in last})
            return
    attempt.commit(moves)


def split(rows: pa.Table, parts: Sequence[Part]) -> Iterator[tuple[int, pa.Table]]:
    """Return the rows of each table by themselves; of one table they come as they are."""
    if len(parts) == 1:
        yield 0, rows
        return
    for number, part in enumerate(parts):
        some = rows.filter(pc.equal(rows.column(FRAME), number))
        if some.num_rows:
            columns = dict(zip(part.columns, some.column(f"{ROW}{number}").flatten(), strict=True))
            places = {name: some.column(name) for name in PLACES if part.has_places}
            yield number, pa.table(columns | places)


def tables(batches: Iterable[pa.RecordBatch], *, rows_a_copy: int = ROWS) -> Iterator[pa.Table]:
    """Join record batches to tables of so many rows, or of :data:`BYTES`: each is one COPY."""
    joined: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        joined.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= rows_a_copy or size >= BYTES:
            yield pa.Table.from_batches(joined)
            joined, rows, size = [], 0, 0
    if joined:
        yield pa.Table.from_batches(joined)


def up_to_mark(stream: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows in front of the end mark.

    :raises IncompleteInput: when the input ends without one, or goes on behind it.
    """
    seen = 0
    for table in stream:
        marks = pc.sum(table.column(END)).as_py() or 0
        rows = table.slice(0, table.num_rows - marks)
        if (seen and table.num_rows) or pc.sum(rows.column(END)).as_py():
            raise IncompleteInput("rows came behind the end mark of this batch: Spark has not kept them in order")
        seen += marks
        yield rows
    if seen == 1:
        return
    raise IncompleteInput(
        "the rows of this batch ended before their end mark: the attempt was killed, or what feeds it failed. "
        "Nothing of it was kept; Spark runs it again"
    )
