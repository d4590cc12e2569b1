"""Batch ids in place of offsets: for aggregations, whose rows have none.

A batch id means the same rows only within one query id, which the checkpoint keeps. So another query id under a
known group is refused, and so is a batch that is neither the next one nor a replay of the last: Spark and the ledger
disagree then about what was written, and nobody but an operator can tell who is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from exactly_once._model import Advance, Partition
from exactly_once.errors import Fenced, PartitionHalted
from exactly_once.ledger.rows import LOCK_SECONDS, Ledger
from exactly_once.ledger.session import Connection, Session, cursor_on
from exactly_once.ledger.sql import query

from .errors import LedgerBehindCheckpoint, QueryChanged


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The ownership of a group's batch ids, and the batch that is to be counted."""

    query_id: str
    token: UUID
    epoch: int
    batch_id: int = -1
    skips_from: int | None = None
    """What the ledger has counted before this batch where that is not the one before it: those between had no rows."""
    fingerprint: str | None = None

    @property
    def previous(self) -> int:
        """What the ledger must have counted, so that this batch is the next one."""
        return self.batch_id - 1 if self.skips_from is None else self.skips_from


class BatchIdLedger(Ledger):
    """Counts one batch where :class:`Ledger` moves offsets; the unit of work does not know the difference."""

    def __init__(self, session: Session, *, group_id: str, counted: Counted) -> None:
        super().__init__(session, group_id=group_id, owner_kind="spark")
        self._counted = counted

    def advance(self, connection: Connection, advances: Sequence[Advance], *, xid: str, commit: bool) -> None:
        """Count the batch inside the open transaction; raises as for offsets."""
        parameters = {
            "xid": xid,
            "group_id": self.group_id,
            "token": self._counted.token,
            "epoch": self._counted.epoch,
            "batch_id": self._counted.batch_id,
            "previous": self._counted.previous,
            "fingerprint": self._counted.fingerprint,
        }
        cursor_on(connection).execute(query("spark_advance", self.session.schema), parameters, prepare=False)
        if commit:
            connection.execute("COMMIT", prepare=False)

    def halt(self, advances: Sequence[Advance], *, reason: str) -> set[Partition]:
        """Forbid anybody to go on with this group until an operator has looked."""
        with self.session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _):
            parameters = {"group_id": self.group_id, "token": self._counted.token, "reason": reason}
            cursor_on(connection).execute(query("spark_halt", self.session.schema), parameters, prepare=False)
        return set()  # no partition's row: offsets do not count here

    def check(self) -> bool:
        """Return whether the batch has been counted by now.

        :raises Fenced: when another run owns the group.
        :raises LedgerBehindCheckpoint: when a failover has lost the one before it.
        :raises PartitionHalted: when nobody may go on with it.
        """
        with self.session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _):
            row = _read(connection, self.session.schema, self.group_id)
        if row is not None:
            _refuse_halted(self.group_id, row)
        if row is None or (row[3], row[4]) != (str(self._counted.token), self._counted.epoch):
            raise Fenced(
                f"another run counts the batches of group {self.group_id!r} by now, so this one must not write any more"
            )
        if row[1] < self._counted.batch_id and row[1] != self._counted.previous:
            raise lost_batches(self.group_id, row[1], self._counted.batch_id)
        return bool(row[1] >= self._counted.batch_id)


def acquire(session: Session, *, group_id: str, query_id: str, name: str) -> Counted:
    """Become the owner of a group's batch ids, whatever run owned them before, in a transaction of its own.

    :raises QueryChanged: when they are those of another query.
    :raises PartitionHalted: when nobody may go on with them.
    """
    with session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _):
        return acquire_inside(connection, session, group_id=group_id, query_id=query_id, name=name, token=uuid4())


def acquire_inside(
    connection: Connection, session: Session, *, group_id: str, query_id: str, name: str, token: UUID
) -> Counted:
    """Do it in the transaction that is open there."""
    parameters = {
        "group_id": group_id,
        "query_id": query_id,
        "token": token,
        "owner_instance": session.instance,
        "owner_name": name,
    }
    known = _read(connection, session.schema, group_id)
    if known is not None:
        _refuse_halted(group_id, known)
    found = cursor_on(connection).execute(query("spark_acquire", session.schema), parameters, prepare=False)
    row = found.fetchone()
    if row is None:
        raise QueryChanged(
            f"group {group_id!r} counts the batches of query {known[0] if known else '?'}, this is query "
            f"{query_id}: its checkpoint is another one, so the same batch id means other rows. Either start the "
            "query with the checkpoint that belongs to the group, or start anew: empty the table and choose "
            "another group_id"
        )
    return Counted(query_id=query_id, token=UUID(row[3]), epoch=row[4], batch_id=row[1], fingerprint=row[2])


def owned(connection: Connection, schema: str, *, group_id: str, token: UUID) -> Counted:
    """Return what was counted last, as it is after every transaction that still may change it, in the open one.

    :raises Fenced: when the group is another owner's.
    :raises PartitionHalted: when nobody may go on with it.
    """
    row = _read(connection, schema, group_id)
    if row is not None:
        _refuse_halted(group_id, row)
    if row is None or row[3] != str(token):
        owner = f"{row[6]} (owner epoch {row[4]})" if row is not None and row[3] is not None else "an operator"
        raise Fenced(f"{owner} has taken group {group_id!r} from this run, which must not write any more")
    return Counted(query_id=row[0], token=token, epoch=row[4], batch_id=row[1], fingerprint=row[2])


def is_replay(stored: Counted, batch_id: int, fingerprint: str | None, *, group_id: str) -> bool:
    """Tell whether a batch was written before; ``stored`` is what the ledger counted last.

    :raises LedgerBehindCheckpoint: when batches in between are missing.
    :raises QueryChanged: when the checkpoint is an older copy, so that old numbers mean new rows.
    """
    if batch_id > stored.batch_id + 1:
        raise lost_batches(group_id, stored.batch_id, batch_id)
    is_same = None in (fingerprint, stored.fingerprint) or fingerprint == stored.fingerprint
    if batch_id < stored.batch_id or (batch_id == stored.batch_id and not is_same):
        raise QueryChanged(
            f"group {group_id!r}: the ledger has counted batch {stored.batch_id}, Spark comes with another batch "
            f"{batch_id}: the checkpoint is an older copy. Restore the newest one; or empty the table and start with a "
            "new checkpoint and another group_id"
        )
    return batch_id == stored.batch_id


def lost_batches(
    group_id: str,
    counted: int,
    batch_id: int,
    *,
    mend: str = "Empty the table and start with a new checkpoint and another group_id",
) -> LedgerBehindCheckpoint:
    """Describe a batch that is not the next one."""
    return LedgerBehindCheckpoint(
        f"group {group_id!r}: the ledger has counted batch {counted}, Spark goes on with batch {batch_id}: the "
        f"database was set back, or the query has not written through this sink before. {mend}"
    )


def release(session: Session, *, group_id: str, token: UUID) -> None:
    """Give a group's batch ids back."""
    with session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _):
        parameters = {"group_id": group_id, "token": token}
        cursor_on(connection).execute(query("spark_release", session.schema), parameters, prepare=False)


def _refuse_halted(group_id: str, row: tuple[Any, ...]) -> None:
    if row[5] is not None:
        reset = f"exactly-once reset --group-id {group_id} --to-batch"
        raise PartitionHalted(
            f"group {group_id!r} is halted behind batch {row[1]}: {row[5]}. Look whether the rows of batch "
            f"{row[1] + 1} are in the table. If they are there and right: {reset} {row[1] + 1}; if they are not, or "
            f"once you have taken them out: {reset} {row[1]}"
        )


def _read(connection: Connection, schema: str, group_id: str) -> tuple[Any, ...] | None:
    cursor = cursor_on(connection)
    return cursor.execute(query("spark_counted", schema), {"group_id": group_id}, prepare=False).fetchone()
