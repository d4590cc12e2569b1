"""Owners: the rows of the ledger that one run of a query owns, and the tables of its group. Runs on the driver.

Rows are partitions, or one for the batch ids of the query. Each is acquired once a run, when it first appears, and
never again: whoever takes it later has fenced this run. A Spark run fences an earlier one; rows that a plain consumer
has not released are refused.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from uuid import UUID

import psycopg

from exactly_once._log import about
from exactly_once._model import ROTATE_EVERY, Advance, Partition, Row
from exactly_once.errors import ConfigurationError, Fenced, TopicRecreated
from exactly_once.ledger.conflict import Conflict, Grant, check
from exactly_once.ledger.rows import LOCK_SECONDS, Ledger, row_missing
from exactly_once.ledger.session import Connection, execute, last_row
from exactly_once.ledger.stale_owners import StaleBackendTerminator
from exactly_once.ledger.start import StartOffsets, refuse_halted
from exactly_once.writer import Table
from exactly_once.writer.table import ABROAD

from .errors import FrameError, LedgerBehindCheckpoint, QueryChanged
from .options import LedgerKind, Options
from .ranges import Group, Range, behind, gone_back

logger = logging.getLogger(__name__)

IF_MADE_AGAIN = (
    "That is right if they are the same messages. If the topic was deleted and made again they are lost: give "
    "bootstrap_servers= or kafka=, with which topics are told apart"
)


def grant_of(partition: Partition, token: UUID, epoch: int, topic_id: str | None) -> Advance:
    """Return what moves a row, but for from where to where; Spark does not tell epochs of leaders."""
    return Advance(
        partition=partition, token=token, epoch=epoch, topic_id=topic_id, expected=0, next_offset=0, leader_epoch=None
    )


class Owners:
    """Acquires rows as they appear, and reads where they stand.

    ``counts`` is for a group whose batch ids stand in place of offsets.
    """

    def __init__(self, ledger: Ledger, *, starter: StartOffsets | None, counts: bool = False) -> None:
        self._ledger = ledger
        self._group = group_of(ledger)
        self.starter = starter
        self._counts = counts
        # What a batch shows to the ledger when it moves a row. ``expected`` is where the driver found it when it took
        # it for a batch, or has left it since: no attempt starts below that, whatever it reads. Tasks leave the row
        # as it is, so ``generation`` stays.
        self.held: dict[Partition, Advance] = {}

    def take(self, ranges: Sequence[Range], *, batch_id: int) -> dict[Partition, int]:
        """Own every partition of the ranges; return where their rows stand now.

        :raises OwnedByConsumer: when a plain consumer has not released one.
        :raises Fenced: when somebody has taken one from this run.
        :raises LedgerBehindCheckpoint: when the ledger does not know what the checkpoint has read.
        :raises TopicRecreated: when a topic has another id than the ledger.
        """
        if self.starter is not None and (known := [h for r in ranges if (h := self.held.get(r.partition)) is not None]):
            # Spark goes on at the old offset, and misses what is below it in the new topic.
            self.starter.describe({each.partition.topic for each in known})
            with _naming_checkpoint():
                for each in known:
                    self.starter.recheck(each.partition, each.topic_id, self.starter.topics[each.partition.topic])
        if new := {r.partition: r for r in ranges if r.partition not in self.held}:
            group = self._group
            existing, ever_existed = self._ledger.known({p.topic for p in new})
            missing = {p: r for p, r in new.items() if p not in existing}
            for partition, given in missing.items():
                if partition in ever_existed:
                    raise row_missing(group.group_id, group.schema, partition)
                if batch_id > 0 and given.start is not None:
                    starts = {p: r.start for p, r in missing.items() if r.start is not None}
                    raise LedgerBehindCheckpoint(
                        f"the ledger has no row of {partition} for {group}, and the checkpoint is at batch "
                        f"{batch_id}, offset {given.start}: the database was set back, this is another one, or the "
                        "query has not written through this sink before. Start with a new checkpoint, or say what was "
                        f"written: {group.resets(starts, existing)}"
                    )
            if self.starter is not None:
                self.starter.require(list(new))
            elif missing:
                self._ledger.register(dict.fromkeys(missing), cluster_id=None, topic_ids={})
            rows = self._ledger.acquire(sorted(new))
            try:
                for row in rows:  # before any of them is started
                    refuse_halted(group.group_id, group.schema, row)
                if self.starter is not None:
                    with _naming_checkpoint():
                        rows = [self.starter.identified(row) for row in rows]
                # Spark chose where to start; it is written down before the first row is, and for whoever comes after.
                fresh = [replace(row, next_offset=new[row.partition].first) for row in rows if row.next_offset is None]
                if fresh and self._ledger.start(fresh) != {row.partition for row in fresh}:
                    raise Fenced(f"another owner has acquired {fresh[0].partition} and others before they were started")
                for row in rows:
                    self._hold(row)
            except BaseException:
                with contextlib.suppress(psycopg.Error):
                    self._ledger.release(
                        [(row.partition, row.owner_token) for row in rows if row.owner_token is not None]
                    )
                raise
            partitions = [row.partition for row in rows]
            extra = about("acquired", group=group.group_id, several=partitions)
            logger.info("acquired %s", ", ".join(map(str, partitions)), extra=extra)
        return self.find([r.partition for r in ranges])

    def check_returned(self, ranges: Iterable[Range], written: Mapping[Partition, int]) -> None:
        """See that partitions that were ``written``, and are not in the batch before this one, are still the same.

        With ``failOnDataLoss=false`` Spark loses sight of a topic that was deleted, and takes one of its name for new.

        :raises TopicRecreated: when offsets go back, or the topic has another id.
        """
        returned = {r.partition: r.end for r in ranges if r.start is None and r.partition in written}
        for partition, end in returned.items():
            if end < written[partition]:
                raise gone_back(partition, written[partition], end, self._group)
        if returned and self.starter is not None:
            self.starter.require(list(returned))
            with _naming_checkpoint():
                for row in self._ledger.read(sorted(returned)):
                    if row.topic_id is not None:
                        self.starter.identified(row)
        elif returned:
            logger.warning(
                "Spark comes back to %s, which the batch before this one lacks, and brings what the ledger of %s "
                "has as written: it is dropped. %s",
                ", ".join(f"{partition} up to offset {end}" for partition, end in returned.items()),
                self._group,
                IF_MADE_AGAIN,
                extra=about("returned", group=self._ledger.group_id, several=list(returned)),
            )

    def find(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return where rows of ours stand now, and remember that no attempt may start below it."""
        rows = checked_rows(self._ledger, [self.held[partition] for partition in partitions])
        for partition, row in rows.items():
            found = row.next_offset or 0
            self.held[partition] = replace(self.held[partition], expected=found, generation=row.generation)
        return {partition: row.next_offset or 0 for partition, row in rows.items()}

    def take_query(
        self, connection: Connection, pid: int, query_id: str, watcher: StaleBackendTerminator, *, first: int
    ) -> int:
        """Own the row of a query's batch ids, in the transaction that is open there; return its next batch id.

        A row that is made begins at ``first``. Where the group has batch ids of other queries, their owners are fenced.
        """
        row, ledger, group = Partition.of_query(query_id), self._ledger.inside(connection), self._group
        with watcher.acquiring(pid, [row]):
            ask(connection, group, "register_lock")
            others = [Partition(topic, 0) for (topic,) in ask(connection, group, "spark_others", topic=row.topic)]
            existing, ever_existed = ledger.known([row.topic])
            if ever_existed - existing:
                raise row_missing(group.group_id, group.schema, row)
            ledger.register({row: first}, cluster_id=None, topic_ids={})
            taken = {each.partition: each for each in ledger.acquire([row, *others])}
        for other in others:
            if self._counts and taken[other].next_offset:
                raise QueryChanged(
                    f"{group} counts the batches of {other.topic}, this is {row.topic}: its "
                    "checkpoint is another one, so the same batch id means other rows. Either start the query with the "
                    "checkpoint that belongs to the group, or start anew: empty the table and choose another group_id"
                )
        self._hold(taken[row])
        return taken[row].next_offset or 0

    def finish(self, todo: Sequence[Range], reached: Mapping[Partition, int], *, batch_id: int = 0) -> None:
        """Move partitions to the ends of their remaining, after the tasks have written all that there was.

        ``reached`` is where they say that they have moved them; a partition without rows is where the driver found it.

        :raises Fenced: when somebody has taken one meanwhile.
        :raises LedgerBehindCheckpoint: when a failover has lost what a task had committed.
        """
        rotates = rotates_at(batch_id)
        wanted = {
            s.partition: replace(
                self.held[s.partition], expected=reached.get(s.partition, s.first), next_offset=s.end, rotates=rotates
            )
            for s in todo
        }
        session = self._ledger.session
        with session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _):
            ledger = self._ledger.inside(connection)
            rows = checked_rows(ledger, list(wanted.values()))
            ends = [
                replace(each, expected=rows[p].next_offset or 0, generation=rows[p].generation)
                for p, each in wanted.items()
            ]
            (xid,) = last_row(execute(connection, session.schema, "current_xid"))
            ledger.advance(connection, ends, xid=xid, commit=False)
        for share in todo:
            self.held[share.partition] = replace(self.held[share.partition], expected=share.end)

    def release(self, ledger: Ledger) -> None:
        """Give all rows back over a connection of the caller's; best effort."""
        held = [(each.partition, each.token) for each in self.held.values()]
        with contextlib.suppress(psycopg.Error):
            ledger.release(held)
            logger.info("released %s partitions", len(held), extra=about("released", group=ledger.group_id))

    def _hold(self, row: Row) -> None:
        refuse_halted(self._group.group_id, self._group.schema, row)
        assert row.owner_token is not None
        self.held[row.partition] = grant_of(row.partition, row.owner_token, row.owner_epoch, row.topic_id)


@contextlib.contextmanager
def _naming_checkpoint() -> Iterator[None]:
    try:
        yield
    except TopicRecreated as error:
        raise TopicRecreated(f"{error}; then start with a new checkpoint") from None


def ask(connection: Connection, group: Group, name: str, /, **parameters: Any) -> psycopg.Cursor[Any]:
    """Execute one of the ledger's statements about a group."""
    return execute(connection, group.schema, name, group_id=group.group_id, **parameters)


def group_of(ledger: Ledger) -> Group:
    """Return the group whose rows a ledger has."""
    return Group(ledger.group_id, ledger.session.schema)


def rotates_at(batch_id: int) -> bool:
    """Tell whether the driver rotates rows when it finishes a batch, which tasks never do."""
    return batch_id % ROTATE_EVERY == 0


def checked_rows(ledger: Ledger, held: Sequence[Advance]) -> dict[Partition, Row]:
    """Read rows under lock, and compare them with what their owner expects of them.

    :raises Fenced: naming who has them now.
    :raises LedgerBehindCheckpoint: when one is below where the driver had found it. Token and epoch survive a failover.
    :raises PartitionHalted: when an attempt has found that ``in_transaction`` commits by itself.
    """
    group = group_of(ledger)
    rows = {row.partition: row for row in ledger.read(sorted(each.partition for each in held))}
    for each in held:
        row = rows.get(each.partition)
        if row is not None:
            refuse_halted(group.group_id, group.schema, row)
        verdict = check(row, Grant(each.token, each.epoch), each.expected, each.topic_id)
        if row is None:
            raise row_missing(group.group_id, group.schema, each.partition)
        if verdict is Conflict.REWOUND:
            raise behind(each.partition, row.next_offset, each.expected, group)
        if verdict not in (Conflict.OK, Conflict.AHEAD):
            owner = f"{row.owner_kind} {row.owner_name or row.owner_instance}" if row.owner_token else "an operator"
            raise Fenced(
                f"{each.partition} of {group} was acquired with owner epoch {each.epoch}; "
                f"{owner} has taken it since (owner epoch {row.owner_epoch}), so this run must not write any more"
            )
    return rows


class Claim(NamedTuple):
    """What the database knew of a group before this run."""

    is_known_query: bool
    """Whether this query has written a batch under it."""
    has_others: bool
    """Whether another query has: one with another checkpoint."""
    ledger: LedgerKind | None = None
    """What the group has counted; None where nothing tells."""


def claim(
    connection: Connection,
    options: Options,
    tables: Sequence[Table],
    query_id: str,
    stateful: Sequence[str],
    *,
    is_job: bool = False,
) -> Claim:
    """Write down which tables the group writes; until it has written something they may be others.

    A batch job may stand beside a stream that counts something else, such as the first load of its table, but not
    beside such a job; one that replaces the whole table doubles nothing.

    :raises ConfigurationError: for another table, or another way of counting, than before.
    """
    wanted = ", ".join(sorted(f"{table.schema}.{table.name}" for table in tables))
    stated = {"table": wanted, "query_id": query_id, "previous": options.previous_table, "is_job": is_job}
    ((written, *known),) = ask(connection, options.group, "spark_claim", **stated)
    if written != wanted:
        raise ConfigurationError(
            f"{options.group} has written into {written}, now the table is {wanted}: what the ledger has "
            "as written is not there and would never come. Choose another group_id, which reads the topic from "
            f"startingOffsets on; or, where {written} was renamed or goes on in {wanted}, say "
            f"previous_table={written!r}"
        )
    claimed = Claim(*known)
    if claimed.ledger not in (None, options.ledger) and not (is_job and options.mode == "replace"):
        raise ConfigurationError(
            f"{options.group} has written with ledger={claimed.ledger!r}, now it is {options.ledger!r}: one "
            "does not tell the other what was written, so rows would be written again. Leave ledger= as it was; or "
            "empty the table and choose another group_id"
        )
    # Without a key nothing tells what would be ignored.
    doubles = any(
        each.mode == "append" or each.add or (each.mode == "insert-ignore" and not (each.key or table.keys))
        for each, table in zip(options.targets, tables, strict=True)
    )
    if stateful and claimed.has_others and not claimed.is_known_query and doubles:
        raise FrameError(
            f"the query has a new checkpoint, and another query has written for {options.group}: the state "
            f"of {', '.join(stateful)} is gone, so rows that it would have dropped would be written again. Restore "
            "the checkpoint; or say mode='insert-ignore' or 'upsert' with a key, without add=; or empty the table and "
            "choose another group_id"
        )
    return claimed


def tell_odd(connection: Connection, options: Options, tables: Iterable[Table], *, has_written: bool) -> None:
    """Log which tables cannot be written exactly once, and which cannot hold what the group ``has_written``."""
    for each, table in zip(options.targets, tables, strict=True):
        if table.is_foreign:
            logger.warning(ABROAD, table, extra=about("foreign_table", group=options.group_id))
        if not has_written or each.mode == "replace":
            continue
        if execute(connection, options.schema, "is_unwritten", name=str(table)).fetchone() == (True,):
            logger.warning(
                "%s is empty, and %s goes on behind what it has written before: rows that there were do not come "
                "again. To have them, too, choose another group_id, and a checkpoint of its own where it is a stream",
                table,
                options.group,
                extra=about("applied_before", group=options.group_id),
            )
