"""Owners: the rows of the ledger that one run of a query owns, and the tables of its group. Runs on the driver.

Rows are partitions, or one for the batch ids of the query: a batch id means the same rows only within one query id,
which the checkpoint keeps. Each is acquired once a run, when it first appears, and never again: whoever takes it later
has fenced this run. A Spark run fences an earlier one; rows that a plain consumer has not released are refused.

A group knows the tables that it writes, because an offset that is written into one is in no other.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import psycopg
import tenacity

from exactly_once._log import about
from exactly_once._model import QUERY, ROTATE_EVERY, Advance, Partition, Row
from exactly_once.errors import ConfigurationError, Fenced, PartitionHalted
from exactly_once.ledger.conflict import Conflict, Grant, check
from exactly_once.ledger.retry import waiting
from exactly_once.ledger.rows import Ledger, row_missing
from exactly_once.ledger.session import Connection, cursor_on
from exactly_once.ledger.sql import query
from exactly_once.ledger.stale_owners import StaleBackendTerminator
from exactly_once.ledger.start import StartOffsets, refuse_halted
from exactly_once.writer import Table

from .errors import LedgerBehindCheckpoint, QueryChanged
from .options import Options
from .ranges import Range, RemainingRange, behind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGrant:
    """What a batch shows to the ledger when it moves a row: one of offsets, or one of batch ids."""

    partition: Partition
    grant: Grant
    topic_id: str | None = None
    found: int = 0
    """Where the driver found the row when it took it for a batch, or has left it since. No attempt starts below that,
    whatever it reads."""
    generation: int = 0
    """The row's at that moment. Tasks leave it as it is."""

    def advance(self, expected: int, next_offset: int, *, rotates: bool = False) -> Advance:
        """Return the move of this row that a transaction asks for."""
        return Advance(
            partition=self.partition,
            token=self.grant.token,
            epoch=self.grant.epoch,
            topic_id=self.topic_id,
            expected=expected,
            next_offset=next_offset,
            leader_epoch=None,  # Spark does not tell it
            generation=self.generation,
            rotates=rotates,
        )


def query_row(query_id: str) -> Partition:
    """Return the name of the row whose offset is the next batch id of a query."""
    return Partition(f"{QUERY}{query_id}", 0)


class Owners:
    """Acquires rows as they appear, and reads where they stand.

    ``counts`` is for a group whose batch ids stand in place of offsets.
    """

    def __init__(self, ledger: Ledger, *, starter: StartOffsets | None, counts: bool = False) -> None:
        self._ledger = ledger
        self._starter = starter
        self._counts = counts
        self.held: dict[Partition, BatchGrant] = {}
        self.checks_topics = starter is not None

    def take(self, ranges: Sequence[Range], *, batch_id: int) -> dict[Partition, int]:
        """Own every partition of the ranges; return where their rows stand now.

        :raises OwnedByConsumer: when a plain consumer has not released one.
        :raises Fenced: when somebody has taken one from this run.
        :raises LedgerBehindCheckpoint: when the ledger does not know what the checkpoint has read.
        """
        if new := {r.partition: r for r in ranges if r.partition not in self.held}:
            self._register(new, batch_id)
            self._acquire(new)
        return self.find([r.partition for r in ranges])

    def find(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return where rows of ours stand now, and remember that no attempt may start below it.

        :raises Fenced: when somebody has taken one from this run.
        :raises LedgerBehindCheckpoint: when one is below where this run has left it.
        """
        rows = checked_rows(self._ledger, [self.held[partition] for partition in partitions])
        for partition, row in rows.items():
            found = row.next_offset or 0
            self.held[partition] = replace(self.held[partition], found=found, generation=row.generation)
        return {partition: row.next_offset or 0 for partition, row in rows.items()}

    def take_query(
        self, connection: Connection, pid: int, query_id: str, watcher: StaleBackendTerminator, *, first: int
    ) -> int:
        """Own the row of a query's batch ids, in the transaction that is open there; return its next batch id.

        A row that is made begins at ``first``. Where the group has batch ids of other queries, their owners are fenced.

        :raises QueryChanged: when batches of another one were counted in place of offsets.
        """
        row, ledger = query_row(query_id), self._ledger.inside(connection)
        parameters = {"group_id": ledger.group_id, "topic": row.topic}
        cursor = cursor_on(connection)
        with watcher.acquiring(pid, [row]):
            cursor.execute(query("register_lock", ledger.session.schema), parameters, prepare=False)
            cursor.execute(query("spark_others", ledger.session.schema), parameters, prepare=False)
            others = [Partition(topic, 0) for (topic,) in cursor.fetchall()]
            existing, ever_existed = ledger.known([row.topic])
            if ever_existed - existing:
                raise row_missing(ledger.group_id, row)
            ledger.register({row: first}, cluster_id=None, topic_ids={})
            taken = {found.partition: found for found in ledger.acquire([row, *others])}
        for other in others:
            if self._counts and taken[other].next_offset:
                raise QueryChanged(
                    f"group {ledger.group_id!r} counts the batches of {other.topic}, this is {row.topic}: its "
                    "checkpoint is another one, so the same batch id means other rows. Either start the query with the "
                    "checkpoint that belongs to the group, or start anew: empty the table and choose another group_id"
                )
        self._hold(taken[row])
        return taken[row].next_offset or 0

    def finish(self, todo: Sequence[RemainingRange], reached: Mapping[Partition, int], *, batch_id: int = 0) -> None:
        """Move partitions to the ends of their remaining, after the tasks have written all that there was.

        ``reached`` is where they say that they have moved them; a partition without rows is where the driver found it.

        :raises Fenced: when somebody has taken one meanwhile.
        :raises LedgerBehindCheckpoint: when a failover has lost what a task had committed.
        """
        known = {share.partition: reached.get(share.partition, share.write_from) for share in todo}
        rotates = rotates_at(batch_id)
        advances = [self.held[s.partition].advance(known[s.partition], s.end, rotates=rotates) for s in todo]
        moved = self._ledger.finish(advances)
        left = [self.held[share.partition] for share in todo if share.partition not in moved]
        for partition, row in checked_rows(self._ledger, left).items() if left else ():
            raise behind(partition, row.next_offset, known[partition], group_id=self._ledger.group_id)
        for share in todo:
            self.held[share.partition] = replace(self.held[share.partition], found=share.end)

    def release(self, ledger: Ledger) -> None:
        """Give all rows back over a connection of the caller's; best effort."""
        held = [(h.partition, h.grant.token) for h in self.held.values()]
        with contextlib.suppress(psycopg.Error):
            ledger.release(held)
            logger.info("released %s partitions", len(held), extra=about("released", group=ledger.group_id))

    def _register(self, new: Mapping[Partition, Range], batch_id: int) -> None:
        existing, ever_existed = self._ledger.known({p.topic for p in new})
        missing = {p: r for p, r in new.items() if p not in existing}
        group_id = self._ledger.group_id
        for partition, given in missing.items():
            if partition in ever_existed:
                raise row_missing(group_id, partition)
            if batch_id > 0 and given.start is not None:
                raise LedgerBehindCheckpoint(
                    f"the ledger has no row of {partition} for group {group_id!r}, and the checkpoint is at batch "
                    f"{batch_id}, offset {given.start}: the database was set back, this is another one, or the query "
                    "has not written through this sink before. Start with a new checkpoint, or say what was written: "
                    f"exactly-once reset --topic {partition.topic} --partition {partition.number} "
                    f"--to-offset {given.start}"
                )
        if self._starter is not None:
            self._starter.require(list(new))
        elif missing:
            self._ledger.register(dict.fromkeys(missing), cluster_id=None, topic_ids={})

    def _acquire(self, new: Mapping[Partition, Range]) -> None:
        group_id, rows = self._ledger.group_id, self._ledger.acquire(sorted(new))
        try:
            for row in rows:
                _refuse_halted(group_id, row)
            if self._starter is not None:
                rows = [self._starter.identified(row) for row in rows]
            # Spark chose where to start; it is written down before the first row is, and for whoever comes after.
            fresh = [replace(row, next_offset=new[row.partition].first) for row in rows if row.next_offset is None]
            if fresh and self._ledger.start(fresh) != {row.partition for row in fresh}:
                raise Fenced(f"another owner has acquired {fresh[0].partition} and others before they were started")
            for row in rows:
                self._hold(row)
        except BaseException:
            with contextlib.suppress(psycopg.Error):
                self._ledger.release([(row.partition, row.owner_token) for row in rows if row.owner_token is not None])
            raise
        partitions = [row.partition for row in rows]
        extra = about("acquired", group=group_id, several=partitions)
        logger.info("acquired %s", ", ".join(map(str, partitions)), extra=extra)

    def _hold(self, row: Row) -> None:
        _refuse_halted(self._ledger.group_id, row)
        assert row.owner_token is not None
        grant = Grant(row.owner_token, row.owner_epoch)
        self.held[row.partition] = BatchGrant(partition=row.partition, grant=grant, topic_id=row.topic_id)


def patiently(options: Options) -> tenacity.Retrying:
    """Return a retrier for whole transactions of a batch."""
    return waiting(options.patience_seconds, group_id=options.group_id)


def rotates_at(batch_id: int) -> bool:
    """Tell whether the driver rotates rows when it finishes a batch, which tasks never do."""
    return batch_id % ROTATE_EVERY == 0


def checked_rows(ledger: Ledger, held: Sequence[BatchGrant]) -> dict[Partition, Row]:
    """Read rows under lock, and compare them with what their owner expects of them.

    :raises Fenced: naming who has them now.
    :raises LedgerBehindCheckpoint: when one is below where the driver had found it. Token and epoch survive a failover.
    :raises PartitionHalted: when an attempt has found that ``in_transaction`` commits by itself.
    """
    rows = {row.partition: row for row in ledger.read(sorted(each.partition for each in held))}
    for each in held:
        row = rows.get(each.partition)
        if row is not None:
            _refuse_halted(ledger.group_id, row)
        verdict = check(row, each.grant, each.found, each.topic_id)
        if row is None:
            raise row_missing(ledger.group_id, each.partition)
        if verdict is Conflict.REWOUND:
            raise behind(each.partition, row.next_offset, each.found, group_id=ledger.group_id)
        if verdict not in (Conflict.OK, Conflict.AHEAD):
            owner = f"{row.owner_kind} {row.owner_name or row.owner_instance}" if row.owner_token else "an operator"
            raise Fenced(
                f"{each.partition} of group {ledger.group_id!r} was acquired with owner epoch {each.grant.epoch}; "
                f"{owner} has taken it since (owner epoch {row.owner_epoch}), so this run must not write any more"
            )
    return rows


def _refuse_halted(group_id: str, row: Row) -> None:
    if row.halted is None or not row.partition.counts_batches:
        refuse_halted(group_id, row)
        return
    batch_id = row.next_offset or 0
    reset = f"exactly-once reset --group-id {group_id} --to-batch"
    raise PartitionHalted(
        f"group {group_id!r} is halted behind batch {batch_id - 1}: {row.halted}. Look whether the rows of batch "
        f"{batch_id} are in the table. If they are there and right: {reset} {batch_id}; if they are not, or "
        f"once you have taken them out: {reset} {batch_id - 1}"
    )


class Claim(NamedTuple):
    """What the database knew of a group before this run."""

    is_known_query: bool
    """Whether this query has written a batch under it."""
    has_others: bool
    """Whether another query has: one with another checkpoint."""


def claim(connection: Connection, options: Options, tables: Iterable[Table], query_id: str) -> Claim:
    """Write down which tables the group writes; until it has written something they may be others.

    :raises ConfigurationError: when it has written others.
    """
    wanted = ", ".join(sorted(f"{table.schema}.{table.name}" for table in tables))
    parameters = {
        "group_id": options.group_id,
        "query_id": query_id,
        "table": wanted,
        "previous": options.previous_table,
    }
    row = cursor_on(connection).execute(query("spark_claim", options.schema), parameters, prepare=False).fetchone()
    assert row is not None
    written, is_known_query, has_others = row
    if written != wanted:
        raise ConfigurationError(
            f"group {options.group_id!r} has written into {written}, now the table is {wanted}: what the ledger has "
            "as written is not there and would never come. Choose another group_id, which reads the topic from "
            f"startingOffsets on; or, where {written} was renamed or goes on in {wanted}, say "
            f"previous_table={written!r}"
        )
    return Claim(is_known_query, has_others)
