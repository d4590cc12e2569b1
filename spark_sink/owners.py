"""Owners: the rows of the ledger that one run of a query owns. Runs on the driver.

Each partition is acquired once a run, when it first appears, and never again: whoever takes it later has fenced this
run. A Spark run fences an earlier one; rows that a plain consumer has not released are refused.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import psycopg
import tenacity

from exactly_once._log import about
from exactly_once._model import ROTATE_EVERY, Advance, Partition, Row
from exactly_once.errors import Fenced
from exactly_once.ledger.retry import waiting
from exactly_once.ledger.rows import Ledger, row_missing
from exactly_once.ledger.start import StartOffsets, refuse_halted

from .errors import LedgerBehindCheckpoint
from .options import Options
from .ranges import Range, Share, behind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What an owner shows to the ledger when it moves a row."""

    partition: Partition
    token: UUID
    epoch: int
    topic_id: str | None
    found: int = 0
    """Where the driver found the row when it took it for a batch. No attempt starts below that, whatever it reads."""
    generation: int = 0
    """The row's at that moment. Tasks leave it as it is."""

    def advance(self, expected: int, next_offset: int, *, rotates: bool = False) -> Advance:
        """Return the move of this row that a transaction asks for."""
        return Advance(
            partition=self.partition,
            token=self.token,
            epoch=self.epoch,
            topic_id=self.topic_id,
            expected=expected,
            next_offset=next_offset,
            leader_epoch=None,  # Spark does not tell it
            generation=self.generation,
            rotates=rotates,
        )


class Owners:
    """Acquires partitions as they appear, and reads where they stand."""

    def __init__(self, ledger: Ledger, *, starter: StartOffsets | None) -> None:
        self._ledger = ledger
        self._starter = starter
        self.held: dict[Partition, Holding] = {}
        self.checks_topics = starter is not None

    def take(self, ranges: Sequence[Range], *, batch_id: int) -> dict[Partition, Row]:
        """Own every partition of the ranges; return their rows as they stand now.

        :raises OwnedByConsumer: when a plain consumer has not released one.
        :raises Fenced: when somebody has taken one from this run.
        :raises LedgerBehindCheckpoint: when the ledger does not know what the checkpoint has read.
        """
        new = [r for r in ranges if r.partition not in self.held]
        if new:
            self._register(new, batch_id)
            self._acquire({r.partition: r for r in new})
        rows = held_rows(self._ledger, [self.held[r.partition] for r in ranges])
        for partition, row in rows.items():
            found = row.next_offset or 0
            self.held[partition] = replace(self.held[partition], found=found, generation=row.generation)
        return rows

    def finish(self, todo: Sequence[Share], reached: Mapping[Partition, int], *, batch_id: int = 0) -> None:
        """Move partitions to the ends of their shares, after the tasks have written all that there was.

        ``reached`` is where they say that they have moved them; a partition without rows is where the driver found it.

        :raises Fenced: when somebody has taken one meanwhile.
        :raises LedgerBehindCheckpoint: when a failover has lost what a task had committed.
        """
        known = {share.partition: reached.get(share.partition, share.write_from) for share in todo}
        rotates = rotates_at(batch_id)
        advances = [self.held[s.partition].advance(known[s.partition], s.end, rotates=rotates) for s in todo]
        moved = self._ledger.finish(advances)
        left = [self.held[share.partition] for share in todo if share.partition not in moved]
        for partition, row in held_rows(self._ledger, left).items() if left else ():
            raise behind(partition, row.next_offset, known[partition], group_id=self._ledger.group_id)

    def release(self, ledger: Ledger) -> None:
        """Give all rows back over a connection of the caller's; best effort."""
        held = [(h.partition, h.token) for h in self.held.values()]
        with contextlib.suppress(psycopg.Error):
            ledger.release(held)
            logger.info("released %s partitions", len(held), extra=about("released", group=ledger.group_id))

    def _register(self, ranges: list[Range], batch_id: int) -> None:
        partitions = [r.partition for r in ranges]
        topics = {p.topic for p in partitions}
        have, had = self._ledger.known(topics)
        for given in ranges:
            if given.partition in have:
                continue
            if given.partition in had:
                raise row_missing(self._ledger.group_id, given.partition)
            if batch_id > 0 and given.start is not None:
                raise _unknown(self._ledger.group_id, given, batch_id)
        if self._starter is not None:
            self._starter.require(partitions)
        elif missing := [p for p in partitions if p not in have]:
            self._ledger.register(dict.fromkeys(missing), cluster_id=None, topic_ids={})

    def _acquire(self, ranges: dict[Partition, Range]) -> None:
        rows = self._ledger.acquire(sorted(ranges))
        try:
            self._start(rows, ranges)
        except BaseException:
            with contextlib.suppress(psycopg.Error):
                self._ledger.release([(row.partition, row.owner_token) for row in rows if row.owner_token is not None])
            raise
        names = ", ".join(str(row.partition) for row in rows)
        logger.info(
            "acquired %s",
            names,
            extra=about("acquired", group=self._ledger.group_id, several=[r.partition for r in rows]),
        )

    def _start(self, rows: Iterable[Row], ranges: dict[Partition, Range]) -> None:
        rows = [self._checked(row) for row in rows]
        # Spark chose where to start; it is written down before the first row is, and for whoever comes after.
        new = [replace(row, next_offset=ranges[row.partition].first) for row in rows if row.next_offset is None]
        if new and self._ledger.start(new) != {row.partition for row in new}:
            raise Fenced(f"another owner has acquired {new[0].partition} and others before they were started")
        for row in rows:
            assert row.owner_token is not None
            self.held[row.partition] = Holding(
                partition=row.partition, token=row.owner_token, epoch=row.owner_epoch, topic_id=row.topic_id
            )

    def _checked(self, row: Row) -> Row:
        refuse_halted(self._ledger.group_id, row)
        return row if self._starter is None else self._starter.identified(row)


def patiently(options: Options) -> tenacity.Retrying:
    """Return a retrier for whole transactions of a batch."""
    return waiting(options.patience_seconds, group_id=options.group_id)


def rotates_at(batch_id: int) -> bool:
    """Tell whether the driver rotates rows when it finishes a batch, which tasks never do."""
    return batch_id % ROTATE_EVERY == 0


def held_rows(ledger: Ledger, holdings: Sequence[Holding]) -> dict[Partition, Row]:
    """Read rows under lock, and see whether they still are their owner's.

    :raises Fenced: naming who has them now.
    :raises PartitionHalted: when an attempt has found that ``also`` commits by itself.
    """
    rows = {row.partition: row for row in ledger.read(sorted(h.partition for h in holdings))}
    for held in holdings:
        row = rows.get(held.partition)
        if row is None:
            raise row_missing(ledger.group_id, held.partition)
        refuse_halted(ledger.group_id, row)
        if (row.owner_token, row.owner_epoch) != (held.token, held.epoch):
            owner = f"{row.owner_kind} {row.owner_name or row.owner_instance}" if row.owner_token else "an operator"
            raise Fenced(
                f"{held.partition} of group {ledger.group_id!r} was acquired with owner epoch {held.epoch}; {owner} "
                f"has taken it since (owner epoch {row.owner_epoch}), so this run must not write any more"
            )
    return rows


def _unknown(group_id: str, given: Range, batch_id: int) -> LedgerBehindCheckpoint:
    partition = given.partition
    return LedgerBehindCheckpoint(
        f"the ledger has no row of {partition} for group {group_id!r}, and the checkpoint is at batch {batch_id}, "
        f"offset {given.start}: the database was set back, this is another one, or the query has not written through "
        "this sink before. Start with a new checkpoint, or say what was written: "
        f"exactly-once reset --topic {partition.topic} --partition {partition.number} --to-offset {given.start}"
    )
