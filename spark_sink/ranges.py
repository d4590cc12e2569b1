"""Ranges: what a batch covers against what the ledger says; which rows are written. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from exactly_once._model import Partition
from exactly_once.errors import TopicRecreated

from .errors import LedgerBehindCheckpoint, QueryChanged, RowsOutOfOrder


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingRange:
    """A part of a batch that is still to be written: of one partition, from ``write_from`` up to ``end``."""

    partition: Partition
    write_from: int
    end: int


def one_batch(row: Partition, batch_id: int) -> list[Range]:
    """Return what a batch covers of the row of its query's batch ids."""
    return [Range(partition=row, start=batch_id, end=batch_id + 1)]


def remaining(ranges: Iterable[Range], next_offsets: Mapping[Partition, int], *, group_id: str) -> list[RemainingRange]:
    """Return what is still to be written; partitions that the ledger has at or above their end are left out.

    :raises LedgerBehindCheckpoint: when the ledger stands below the start of a range.
    :raises TopicRecreated: when a range goes backwards.
    """
    todo = []
    for given in sorted(ranges, key=lambda r: r.partition):
        next_offset = next_offsets[given.partition]
        if given.end < given.first:
            raise TopicRecreated(
                f"{given.partition} of group {group_id!r}: Spark's offsets go back from {given.start} to {given.end}, "
                "so the topic was deleted and made again. To read the new one start with a new checkpoint, after: "
                f"exactly-once adopt --topic {given.partition.topic}"
            )
        if given.start is not None and next_offset < given.start:
            way = way_out(given.partition, given.start, group_id)
            raise behind(given.partition, next_offset, given.start, group_id=group_id, mend=way)
        if next_offset < given.end:
            todo.append(RemainingRange(partition=given.partition, write_from=next_offset, end=given.end))
    return todo


def way_out(partition: Partition, start: int, group_id: str) -> str:
    """Tell what to do about what is missing in front of a batch."""
    if partition.counts_batches:
        return (
            "Where nothing of the batches between is missing in the table: "
            f"exactly-once reset --group-id {group_id} --to-batch {start - 1}. Else start with a new checkpoint: with "
            "startingOffsets from the ledger; or, where it counts only batches, with another group_id and an empty "
            "table"
        )
    return (
        "To read them again start the query with a new checkpoint and startingOffsets from the ledger; to leave them "
        f"out: exactly-once reset --topic {partition.topic} --partition {partition.number} --to-offset {start}"
    )


START_AGAIN = (
    "Start the query again: what this batch has written and was lost is written again, and what was lost of batches "
    "before it is refused then, with the ways out"
)


def behind(
    partition: Partition, next_offset: int | None, known: int, *, group_id: str, mend: str = START_AGAIN
) -> LedgerBehindCheckpoint:
    """Describe a row that is below where it is known to have stood."""
    if partition.counts_batches:
        return LedgerBehindCheckpoint(
            f"group {group_id!r}: the ledger has counted batch {(next_offset or 0) - 1}, Spark goes on with batch "
            f"{known}: the database was set back, or the query has not written through this sink before. {mend}"
        )
    return LedgerBehindCheckpoint(
        f"{partition} of group {group_id!r}: the ledger stands at offset {next_offset}, the query goes on at {known}, "
        f"so {known - (next_offset or 0)} offsets would be lost. The database was set back (a failover that lost "
        f"commits, a restore) or the ledger was reset. {mend}"
    )


def refuse_older(next_batch: int, batch_id: int, fingerprints: tuple[str | None, str | None], *, group_id: str) -> None:
    """See that a batch below the next one is a replay of the last, by digests of what was counted and of what is now.

    :raises QueryChanged: when the checkpoint is an older copy, so that old numbers mean new rows.
    """
    counted, now = fingerprints
    if batch_id < next_batch - 1 or (None not in fingerprints and counted != now):
        raise QueryChanged(
            f"group {group_id!r}: the ledger has counted batch {next_batch - 1}, Spark comes with another batch "
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


def looked_through(
    spans: Iterable[tuple[str | None, int | None, int | None, int | None]], ended: Mapping[Partition, int]
) -> list[Range]:
    """Return ranges as the rows themselves show them: topic, partition, lowest and highest offset.

    Where rows begin says nothing of where the batch began; only behind a batch of the same run, which has
    ``ended`` there, the start is known.
    """
    found = []
    for topic, number, lowest, highest in spans:
        if topic is None or number is None or lowest is None or highest is None:
            raise RowsOutOfOrder("a row has no topic, partition or offset, so nobody can tell whether it was written")
        partition = Partition(topic, number)
        start = ended.get(partition)
        found.append(Range(partition=partition, start=start, end=max(highest + 1, start or 0)))
    return found
