"""``transaction="batch"``: the whole micro-batch in one transaction of one task.

The end of a task's input proves nothing: when an attempt is killed, or what feeds it fails, Spark closes the pipe and
the iterator in Python ends as if all had been read. So an **end mark** travels with the rows: the shuffle brings
all of them to one task, and there a coalesced union goes through them and then, in the same iterator, comes to one row
more. Who has seen the mark has seen every row; who has not, rolls back; and a row behind the mark, should Spark ever go
through a union in another order, fails the batch. The shuffle itself is the other half of the proof: it reads only the
output of tasks that have succeeded.

A small batch, whatever ``transaction=``, is collected and written on the driver instead: an action that returns has
brought all rows, and a second stage with a worker and a connection of its own would take longer than the rows do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from exactly_once._model import Partition
from exactly_once.ledger.session import Session
from exactly_once.writer import TableWriter

from .attempt import Attempt, Result, Work, tables
from .errors import IncompleteInput
from .offset_filter import OFFSET, RESERVED, OffsetFilter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

END = f"{RESERVED}end"
"""The column that is 1 in the end mark, and nowhere else."""


def to_one_task(frame: DataFrame, *, order: Sequence[str]) -> DataFrame:
    """Bring all rows to one task, in this order, the end mark behind them."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - executors do without

    rows = frame.withColumn(END, F.lit(0)).repartition(1)
    nothing = [F.lit(None).cast(f.dataType).alias(f.name) for f in frame.schema.fields]
    mark = frame.sparkSession.range(0, 1, 1, 1).select(*nothing, F.lit(1).alias(END))
    # One after the other in one task; a sort with the mark as its last row would hold up all of them.
    return (rows.sortWithinPartitions(*order) if order else rows).union(mark).coalesce(1)


class BatchTask(NamedTuple):
    """What the one task does."""

    work: Work

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the whole input or nothing; return one row that tells what was done."""
        stream = iter(tables(batches, rows_a_copy=self.work.rows_a_copy))
        # No transaction stands open while rows are still read and sorted.
        first = next(stream, None)
        rows = itertools.chain([] if first is None else [first], stream)
        with Attempt(self.work) as attempt:
            self._write(attempt, up_to_mark(rows), attempt.standing())
        yield attempt.result.as_batch()

    def write_here(
        self, rows: pa.Table, session: Session, writer: TableWriter, standing: Mapping[Partition, int]
    ) -> Result:
        """Write the rows of a small batch on the driver, whose action has brought all of them or raised.

        ``standing`` is where the ledger stood before; an advance from anywhere else matches nothing.
        """
        with Attempt(self.work, session, writer) as attempt:
            self._write(attempt, [rows.sort_by(OFFSET)], standing)
        return attempt.result

    def _write(self, attempt: Attempt, rows: Iterable[pa.Table], standing: Mapping[Partition, int]) -> None:
        moves = {p: (standing[p], r.end) for p, r in self.work.ranges.items() if standing[p] < r.end}
        if not moves:
            attempt.reached(standing)  # an earlier attempt has landed, and its answer was lost
            return
        options = self.work.options
        # What transaction="partition" would refuse in a large batch, it refuses in a small one.
        strictly = options.transaction == "partition"
        offsets = OffsetFilter(standing, self.work.ranges, strictly=strictly) if options.ledger == "offsets" else None
        attempt.begin()
        for table in rows:
            attempt.write(table if offsets is None else offsets.keep(table))
        attempt.result.dropped = 0 if offsets is None else offsets.dropped
        attempt.commit(moves)


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
