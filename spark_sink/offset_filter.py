"""OffsetFilter: looks at where every row comes from, drops what the ledger has, refuses what does not belong here.

It works on whole Arrow batches; only a batch that holds rows of both sides of the ledger's offset is copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import reduce

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from exactly_once._model import Partition
from exactly_once.writer import BadRow

from .errors import RowsOutOfOrder
from .ranges import Range

# How the names of columns begin that travel with a batch and are never written.
RESERVED = "__exactly_once_"
TOPIC, PARTITION, OFFSET = f"{RESERVED}topic", f"{RESERVED}partition", f"{RESERVED}offset"
"""Copies of the three columns under names and types that are known."""
PLACES = (TOPIC, PARTITION, OFFSET)


class OffsetFilter:
    """Lets rows from the ledger's offsets on pass.

    ``strictly`` demands that offsets rise within each partition: only then is what was written up to
    any moment a prefix of the partition, and only then may an offset be moved up to the last row.
    """

    def __init__(
        self, next_offsets: Mapping[Partition, int], ranges: Mapping[Partition, Range], *, strictly: bool = False
    ) -> None:
        self._from = next_offsets
        self._ranges = ranges
        self._strictly = strictly
        # The highest offset that was seen of each partition.
        self.last: dict[Partition, int] = {}
        self.dropped = 0

    def keep(self, rows: pa.Table) -> pa.Table:
        """Return the rows that are to be written.

        :raises RowsOutOfOrder: for rows that the batch cannot hold, or that do not rise.
        """
        if rows.num_rows == 0:
            return rows
        if any(rows.column(name).null_count for name in PLACES):
            raise RowsOutOfOrder("a row has no topic, partition or offset, so nobody can tell whether it was written")
        found = list(spans(rows))
        for partition, first, last in found:
            self._check_range(partition, first, last)
        if self._strictly:
            self._check_order(rows.select(PLACES))
        for partition, _, last in found:
            self.last[partition] = max(last, self.last.get(partition, -1))
        kept = rows
        if any(first < self._from[partition] for partition, first, _ in found):
            topics, numbers, offsets = (rows.column(name) for name in PLACES)
            is_new = [
                pc.and_(
                    pc.and_(pc.equal(topics, partition.topic), pc.equal(numbers, partition.number)),
                    pc.greater_equal(offsets, self._from[partition]),
                )
                for partition, _, _ in found
            ]
            kept = rows.filter(reduce(pc.or_, is_new))
        self.dropped += rows.num_rows - kept.num_rows
        return kept

    def _check_range(self, partition: Partition, first: int, last: int) -> None:
        covered = self._ranges.get(partition)
        if covered is None:
            raise RowsOutOfOrder(
                f"a row says that it comes from {partition}, which this batch does not cover: the columns of topic, "
                "partition and offset are not those of the query's Kafka source, or checkpoint_location= is of "
                "another query"
            )
        if last >= covered.end:
            raise RowsOutOfOrder(
                f"a row of {partition} has offset {last}, the batch ends before {covered.end}: the offset column is "
                "not Kafka's, or checkpoint_location= is of another query"
            )
        if first < covered.first:
            raise RowsOutOfOrder(
                f"a row of {partition} has offset {first}, the batch begins at {covered.first}: something has kept it "
                "since an earlier batch (a join of streams, a window, a state), and the ledger would take it for "
                "written. Say ledger='batch-id'"
            )

    def _check_order(self, rows: pa.Table) -> None:
        """Look at places in the order of rows: offsets must rise within a partition, here and since the last rows."""
        # A stable sort: within a partition the order of rows stays.
        places = rows.take(pc.sort_indices(rows, [(TOPIC, "ascending"), (PARTITION, "ascending")]))
        topics, numbers, offsets = (places.column(name).combine_chunks() for name in PLACES)
        is_next = pc.or_(pc.not_equal(topics[1:], topics[:-1]), pc.not_equal(numbers[1:], numbers[:-1]))
        rises = pc.or_(is_next, pc.greater(offsets[1:], offsets[:-1]))
        starts = [0, *(index + 1 for index in pc.indices_nonzero(is_next).to_pylist())]
        firsts = [(Partition(topics[i].as_py(), numbers[i].as_py()), offsets[i].as_py()) for i in starts]
        goes_on = all(offset > self.last.get(partition, -1) for partition, offset in firsts)
        if not (goes_on and pc.all(rises, min_count=0).as_py()):
            raise RowsOutOfOrder(
                "offsets do not rise strictly within a partition: several rows have come of one message (explode, a "
                "join, a union of a stream with itself). transaction='partition' cannot tell which of them were "
                "written; use transaction='batch'"
            )


@contextlib.contextmanager
def naming(rows: pa.Table) -> Iterator[None]:
    """Let an error about one of the rows say which message it came from.

    :raises BadRow: with topic, partition and offset, where rows have them.
    """
    try:
        yield
    except BadRow as error:
        row = 0 if rows.num_rows == 1 else error.row
        if row is None or error.topic is not None or OFFSET not in rows.column_names:
            raise
        topic, number, offset = (rows.column(name)[row].as_py() for name in PLACES)
        raise BadRow(error.reason, at=(topic, number, offset), row=row, column=error.column) from error


def spans(rows: pa.Table) -> Iterator[tuple[Partition, int, int]]:
    """Return the lowest and the highest offset of each partition."""
    grouped = rows.select(PLACES).group_by([TOPIC, PARTITION], use_threads=False)
    found = grouped.aggregate([(OFFSET, "min"), (OFFSET, "max")])
    names = (TOPIC, PARTITION, f"{OFFSET}_min", f"{OFFSET}_max")
    for topic, number, first, last in zip(*(found.column(name).to_pylist() for name in names), strict=True):
        yield Partition(topic, number), first, last
