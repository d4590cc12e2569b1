"""Ranges: what a batch covers against what the ledger says, and which of its rows are written. Pure, no I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from exactly_once._model import Partition
from exactly_once.errors import TopicRecreated
from exactly_once.ledger.commands import command
from exactly_once.writer import BadRow

from .errors import FrameError, LedgerBehindCheckpoint, QueryChanged, RowsOutOfOrder

if TYPE_CHECKING:
    from .offset_log import Failure

# How the names of columns begin that travel with a batch and are never written.
RESERVED = "__exactly_once_"
TOPIC, PARTITION, OFFSET = f"{RESERVED}topic", f"{RESERVED}partition", f"{RESERVED}offset"
"""Copies of the three columns under names and types that are known."""
PLACES = (TOPIC, PARTITION, OFFSET)
_KEY = f"{RESERVED}key"

# A partition, lowest and highest offset; None where a row lacks one, or topic or partition.
ObservedRange = tuple[Partition, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Group:
    """A group of one ledger, as errors name it, with the commands that mend them."""

    group_id: str
    schema: str

    def __str__(self) -> str:
        return f"group {self.group_id!r}"

    def command(self, action: str, *more: object) -> str:
        """Return a command about this group."""
        return command(action, self.group_id, self.schema, *more)

    def anew(self) -> str:
        """Tell how a query reads again what the ledger lacks."""
        return (
            "start the query with a new checkpoint and the startingOffsets that "
            f"`{self.command('hand-over', '--to', 'spark')}` prints"
        )

    def resets(self, offsets: Mapping[Partition, int], existing: Set[Partition]) -> str:
        """Return the commands that move rows; ``existing`` are those that there are of their topics."""
        # Where a topic has no row at all, reset makes those of all its partitions together.
        absent = sorted({p.topic for p in offsets} - {p.topic for p in existing})
        ways: list[tuple[object, ...]] = [("--topic", topic, "--to-earliest") for topic in absent]
        ways += [("--topic", p.topic, "--partition", p.number, "--to-offset", o) for p, o in sorted(offsets.items())]
        return "; ".join(self.command("reset", *way) for way in ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The offsets of one partition that a batch covers; a start of None is not known."""

    partition: Partition
    start: int | None
    end: int

    @property
    def first(self) -> int:
        """Where to begin when the ledger says nothing: in front of everything if the start is not known."""
        return 0 if self.start is None else self.start


NO_PLACE = "a row has no topic, partition or offset, so nobody can tell whether it was written"
KEPT = (
    "something has kept it since an earlier batch (a join of streams, a window, a state), and the ledger would take it "
    "for written. Say ledger='batch-id'"
)


def one_batch(row: Partition, batch_id: int) -> list[Range]:
    """Return what a batch covers of the row of its query's batch ids."""
    return [Range(partition=row, start=batch_id, end=batch_id + 1)]


def remaining(ranges: Iterable[Range], next_offsets: Mapping[Partition, int], group: Group) -> list[Range]:
    """Return what is still to be written, from where the ledger stands; what it has up to the end is left out."""
    todo = []
    lost: dict[Partition, int] = {}
    for given in sorted(ranges, key=lambda r: r.partition):
        next_offset = next_offsets[given.partition]
        if given.end < given.first:
            raise gone_back(given.partition, given.first, given.end, group)
        if given.start is not None and next_offset < given.start:
            lost[given.partition] = given.start
        elif next_offset < given.end:
            todo.append(replace(given, start=next_offset))
    for partition, start in lost.items():  # the first, with the commands for all
        raise behind(partition, next_offsets[partition], start, group, lost=lost)
    return todo


def gone_back(partition: Partition, known: int, end: int, group: Group) -> TopicRecreated:
    """Describe a partition whose log ends below what was read of it."""
    return TopicRecreated(
        f"{partition} of {group}: Spark's offsets go back from {known} to {end}, so the topic was deleted and made "
        "again. To read the new one start with a new checkpoint, after: "
        f"{group.command('adopt', '--topic', partition.topic, '--to-earliest')}"
    )


def behind(
    partition: Partition, next_offset: int | None, known: int, group: Group, *, lost: Mapping[Partition, int] = {}
) -> LedgerBehindCheckpoint:
    """Describe a row that is below where it is known to have stood.

    At the start of a batch ``lost`` has where each such row stood, for the ways out.
    """
    way = (
        "Start the query again: what this batch has written and was lost is written again, and what was lost of "
        "batches before it is refused then, with the ways out"
    )
    if partition.counts_batches:
        if lost:
            way = (
                "Where nothing of the batches between is missing in the table: "
                f"{group.command('reset', '--to-batch', known - 1)}. Else start with a new checkpoint: with "
                "startingOffsets from the ledger; or, where it counts only batches, with another group_id and an "
                "empty table"
            )
        return LedgerBehindCheckpoint(
            f"{group}: the ledger has counted batch {(next_offset or 0) - 1}, Spark goes on with batch {known}: the "
            f"database was set back, or the query has not written through this sink before. {way}"
        )
    if lost:
        way = f"To read them again {group.anew()}; to leave them out: {group.resets(lost, lost.keys())}"
        more = f", and more in {', '.join(map(str, sorted(lost.keys() - {partition})))}"
    return LedgerBehindCheckpoint(
        f"{partition} of {group}: the ledger stands at offset {next_offset}, the query goes on at {known}, so "
        f"{known - (next_offset or 0)} offsets would be lost{more if len(lost) > 1 else ''}. The database was set back "
        "(a failover that lost commits, a restore), the ledger was reset, or this is another server, such as the old "
        f"primary of a failover: look at that first. {way}"
    )


def not_written(
    failure: Failure,
    batch_id: int,
    ranges: Iterable[Range],
    next_offsets: Mapping[Partition, int],
    existing: Set[Partition],
    *,
    group: Group,
) -> LedgerBehindCheckpoint:
    """Describe a batch that failed, behind which Spark goes on all the same."""
    left_out = {r.partition: r.start for r in ranges if r.start is not None}
    short = {p: start for p, start in left_out.items() if next_offsets.get(p, -1) < start}
    ways, commands = group.anew(), group.resets(short, existing)
    if any(partition.counts_batches for partition in short):
        ways = "empty the table and start the query with a new checkpoint and another group_id"
        commands = group.command("reset", "--to-batch", batch_id - 1)
    return LedgerBehindCheckpoint(
        f"{group}: batch {failure.batch_id} failed and was not written since, and Spark goes on with batch "
        f"{batch_id}: the function that foreachBatch was given has caught the error, or it has not called the sink "
        f"when the batch came again. The error was {failure.error}. To write what is missing {ways}; to leave it out: "
        f"{commands}"
    )


def refuse_older(
    next_batch: int, batch_id: int, counted: Iterable[tuple[str | None]], now: str | None, group: Group
) -> None:
    """See that a batch below the next one is a replay of the last, by digests of what was counted and is now."""
    if batch_id < next_batch - 1 or (now is not None and any(before not in (None, now) for (before,) in counted)):
        raise QueryChanged(
            f"{group}: the ledger has counted batch {next_batch - 1}, Spark comes with another batch "
            f"{batch_id}: the checkpoint is an older copy. Restore the newest one; or empty the table and start with a "
            "new checkpoint and another group_id"
        )


def over_skipped(
    ranges: Iterable[Range], next_offsets: Mapping[Partition, int], written: Mapping[Partition, int]
) -> list[Range]:
    """Let ranges begin where the ledger stands, where it has all that was ``written``.

    What lies between was in batches for which the user's function has not called the sink, such as empty ones.
    """
    return [
        replace(r, start=next_offsets[r.partition])
        if r.start is not None and written.get(r.partition, r.start) <= next_offsets[r.partition] < r.start
        else r
        for r in ranges
    ]


def looked_through(spans: Iterable[ObservedRange], ended: Mapping[Partition, int]) -> list[Range]:
    """Return ranges as the rows themselves show them.

    Where rows begin says nothing of where the batch began; only behind a batch of the same run, which has
    ``ended`` there, the start is known.
    """
    ends: dict[Partition, int] = {}
    for partition, lowest, highest in spans:
        if lowest is None or highest is None or None in partition:
            raise RowsOutOfOrder(NO_PLACE)
        start = ended.get(partition, 0)
        if lowest < start:
            raise RowsOutOfOrder(
                f"a row of {partition} has offset {lowest}, an earlier batch of this run has ended at {start}: {KEPT}"
            )
        ends[partition] = max(highest + 1, ends.get(partition, 0))
    return [Range(partition=partition, start=ended.get(partition), end=end) for partition, end in ends.items()]


class OffsetFilter:
    """Lets rows from the ledger's offsets on pass.

    ``strictly`` demands that offsets rise within each partition: only then is what was written up to
    any moment a prefix of the partition, and only then may an offset be moved up to the last row.

    ``claim`` is the column of a key that rows claim; it demands that rows of one message differ in it.
    """

    def __init__(
        self,
        next_offsets: Mapping[Partition, int],
        ranges: Mapping[Partition, Range],
        *,
        strictly: bool = False,
        claim: str | None = None,
    ) -> None:
        self._from = next_offsets
        self._ranges = ranges
        self._strictly = strictly
        self._claim = claim
        # Places and keys of the last message so far, which goes on where the edge of a COPY cuts it.
        self._edge: list[pa.Table] = []
        # The highest offset that was seen of each partition.
        self.last: dict[Partition, int] = {}
        self.dropped = 0

    def keep(self, rows: pa.Table) -> pa.Table:
        """Return the rows that are to be written."""
        if rows.num_rows == 0:
            return rows
        if any(rows.column(name).null_count for name in PLACES):
            raise RowsOutOfOrder(NO_PLACE)
        found = list(spans(rows))
        for partition, first, last in found:
            covered = self._ranges.get(partition)
            if covered is None:
                raise RowsOutOfOrder(
                    f"a row says that it comes from {partition}, which this batch does not cover: the columns of "
                    "topic, partition and offset are not those of the query's Kafka source, or checkpoint_location= "
                    "is of another query"
                )
            if last >= covered.end:
                raise RowsOutOfOrder(
                    f"a row of {partition} has offset {last}, the batch ends before {covered.end}: the offset column "
                    "is not Kafka's, or checkpoint_location= is of another query"
                )
            if first < covered.first:
                raise RowsOutOfOrder(
                    f"a row of {partition} has offset {first}, the batch begins at {covered.first}: {KEPT}"
                )
        if self._strictly:
            self._check_order(rows.select(PLACES), found)
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
        if self._claim is not None and kept.num_rows:
            # Under a name of ours: of one that begins with a dot Arrow would read a path.
            self._check_keys(kept.select([*PLACES, self._claim]).rename_columns([*PLACES, _KEY]), self._claim)
        return kept

    def _check_keys(self, rows: pa.Table, claim: str) -> None:
        """Refuse rows of one message that claim one key: all but the first would pass for events that came before.

        Rows of one message follow each other, as what claims is sorted by offsets.
        """
        rows = pa.concat_tables([*self._edge, rows])
        self._edge = [rows.filter(pc.equal(rows.column(OFFSET), rows.column(OFFSET)[-1]))]
        if _count(rows, PLACES).num_rows == rows.num_rows:
            return  # one row of each message, as mostly
        counts = _count(rows, [*PLACES, _KEY])
        for each in counts.filter(pc.greater(counts.column(f"{OFFSET}_count"), 1)).to_pylist():
            if each[_KEY] not in (None, ""):
                raise FrameError(
                    f"several rows of {Partition(each[TOPIC], each[PARTITION])} offset {each[OFFSET]} have one key to "
                    f"claim, {claim} {each[_KEY]!r}: all but the first would be left out, as an event that came "
                    "before. Rows that an explode or a join makes of one message need a key each, such as "
                    f"concat({claim}, '-', pos) behind a posexplode"
                )

    def _check_order(self, rows: pa.Table, found: Sequence[tuple[Partition, int, int]]) -> None:
        """Look at places in the order of rows: offsets must rise within a partition, here and since the last rows."""
        # A stable sort: within a partition the order of rows stays.
        places = rows.take(pc.sort_indices(rows, [(TOPIC, "ascending"), (PARTITION, "ascending")]))
        topics, numbers, offsets = (places.column(name).combine_chunks() for name in PLACES)
        is_next = pc.or_(pc.not_equal(topics[1:], topics[:-1]), pc.not_equal(numbers[1:], numbers[:-1]))
        rises = pc.or_(is_next, pc.greater(offsets[1:], offsets[:-1]))
        goes_on = all(first > self.last.get(partition, -1) for partition, first, _ in found)
        if not (goes_on and pc.all(rises, min_count=0).as_py()):
            raise RowsOutOfOrder(
                "offsets do not rise strictly within a partition: several rows have come of one message (explode, a "
                "join, a union of a stream with itself). transaction='partition' cannot tell which of them were "
                "written; use transaction='batch'"
            )


@contextlib.contextmanager
def naming(rows: pa.Table) -> Iterator[None]:
    """Let an error about one of the rows say which message it came from."""
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


def _count(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Count the rows that are alike in these columns."""
    return rows.group_by(list(columns), use_threads=False).aggregate([(OFFSET, "count")])
