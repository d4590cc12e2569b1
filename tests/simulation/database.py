"""Database: the ledger and the effects as Postgres keeps them, with transactions and row locks.

Operations happen at once or raise; who waits, and what is lost on the way, is the caller's part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Literal, NamedTuple
from uuid import UUID

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from exactly_once._model import Advance, Partition, Row
from exactly_once.ledger.outcome import SHORT_COUNT

Effect = tuple[Partition, int]
Status = Literal["in progress", "committed", "aborted"]

REGISTER = Partition("", -1)
"""The lock under which the rows of a group are made, which is none of a row."""


class Violation(AssertionError):
    """The protocol broke its promise."""


class ShortCount(psycopg.DatabaseError):
    """The advance matched fewer rows than the unit has partitions."""

    sqlstate = SHORT_COUNT


@dataclass(eq=False, slots=True)
class Transaction:
    """A transaction of one backend. ``advances`` is what it was sent and has not executed yet."""

    xid: str
    incarnation: str
    instance: UUID
    effects: list[Effect] = field(default_factory=list)
    rows: dict[Partition, Row] = field(default_factory=dict)
    locked: list[Partition] = field(default_factory=list)
    advances: Sequence[Advance] | None = None
    executed: Sequence[Advance] = ()
    is_commit_sent: bool = False
    status: Status = "in progress"


class Connection:
    """What a client holds; it looks like psycopg's as far as the unit of work looks."""

    pipeline_status = PipelineStatus.OFF
    encoding = "utf-8"
    _num_transactions = 0

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.closed = self.broken = False
        self.open_transaction: Transaction | None = None
        self.is_in_error = False
        self.lock = Lock()
        self.info = self.pgconn = self

    def cursor(self) -> None:
        """Be there to be watched: the simulated handler has its effects without one."""

    transaction = pipeline = cursor

    @property
    def transaction_status(self) -> TransactionStatus:
        if self.closed or self.broken:
            return TransactionStatus.UNKNOWN
        if self.open_transaction is None:
            return TransactionStatus.IDLE
        return TransactionStatus.INERROR if self.is_in_error else TransactionStatus.INTRANS


class Waits(Exception):
    """The answer of a statement that waits for a lock."""


class State(NamedTuple):
    """What is committed."""

    rows: dict[Partition, Row]
    effects: dict[Partition, tuple[int, ...]]


class Statement(NamedTuple):
    """One thing that the server executed, in the order in which it did, for :mod:`.replay`."""

    transaction: Transaction | None
    name: str
    """A method of the ledger or of the transaction; ``fail_over`` and ``reset`` have no transaction."""
    arguments: tuple[Any, ...]
    answer: Any
    """What is returned or raised, :class:`Waits` too; of what changes what is committed, the state behind it."""


@dataclass(frozen=True, slots=True)
class Acquisition:
    """Who took a partition from whom, and how many commits a failover must lose to lose that."""

    partition: Partition
    instance: UUID
    before: UUID | None
    commits: int


@dataclass(slots=True)
class _Change:
    """How to take one commit back, for a failover that loses it."""

    rows: dict[Partition, Row | None]
    added: list[Effect]
    removed: list[Effect]


class Database:
    """Rows, effects and what is under way. The oracle looks at every commit."""

    def __init__(self, log: Callable[[Partition, int, int], list[int]], *, is_strict: bool) -> None:
        self._log = log
        self._is_strict = is_strict
        self._xids = itertools.count(1)
        self._history: list[_Change] = []
        self._locks: dict[Partition, Transaction] = {}
        self.rows: dict[Partition, Row] = {}
        self.effects: dict[Partition, set[int]] = {}
        self.transactions: dict[str, Transaction] = {}
        self.in_flight: list[Transaction] = []
        self.statements: list[Statement] = []
        """What was executed since the beginning, where it is kept."""
        self.keeps_statements = False
        self.incarnation = "1"
        self.is_down = False
        self.fences_token = self.fences_epoch = self.compares_expected = True
        self.minds_zombies = True
        self.upheavals = 0
        """How many failovers and resets there were; without any, no offset ever is a surprise."""

    def begin(self, instance: UUID) -> Transaction:
        transaction = Transaction(str(next(self._xids)), self.incarnation, instance)
        self.transactions[transaction.xid] = transaction
        self.record(transaction, "begin", None)
        return transaction

    def record(self, transaction: Transaction | None, name: str, answer: Any, *arguments: Any) -> None:
        if self.keeps_statements:
            self.statements.append(Statement(transaction, name, arguments, answer))

    def apply(self, transaction: Transaction, effects: Sequence[Effect]) -> None:
        """Do what a handler does."""
        transaction.effects += effects
        self.record(transaction, "apply", None, effects)

    def try_lock(self, transaction: Transaction, partitions: Iterable[Partition]) -> bool:
        """Lock rows that are there, all or none. A real server waits in between."""
        partitions = [p for p in partitions if p in self.rows or p is REGISTER]
        if any(self._locks.get(p, transaction) is not transaction for p in partitions):
            return False
        for partition in partitions:
            if partition not in self._locks:
                self._locks[partition] = transaction
                transaction.locked.append(partition)
        return True

    def is_locked(self, partition: Partition) -> bool:
        return partition in self._locks

    def see(self, transaction: Transaction, partition: Partition) -> Row | None:
        return transaction.rows.get(partition) or self.rows.get(partition)

    def matches(self, transaction: Transaction, advance: Advance) -> bool:
        """The WHERE of the advance."""
        row = self.see(transaction, advance.partition)
        return (
            row is not None
            and (row.owner_token == advance.token or not self.fences_token)
            and (row.owner_epoch == advance.epoch or not self.fences_epoch)
            and row.generation == advance.generation
            and row.topic_id == advance.topic_id
            and (row.next_offset == advance.expected or not self.compares_expected)
        )

    def moved_by(self, transaction: Transaction, advances: Sequence[Advance]) -> list[Partition]:
        """Return for which rows an advance waits: a server does not wait for one that cannot match."""
        return [a.partition for a in advances if self.matches(transaction, a)]

    def advance(self, transaction: Transaction, advances: Sequence[Advance]) -> None:
        """Execute the advance under the locks that the transaction holds.

        :raises ShortCount: as the server does.
        """
        transaction.advances, transaction.executed = None, advances
        if not all(self.matches(transaction, a) for a in advances):
            raise ShortCount("advanced too few partitions")
        rotates = any(a.rotates for a in advances)
        for a in advances:
            row = self.see(transaction, a.partition)
            assert row is not None
            transaction.rows[a.partition] = replace(
                row, generation=row.generation + rotates, next_offset=a.next_offset, leader_epoch=a.leader_epoch
            )

    def commit(self, transaction: Transaction) -> None:
        assert transaction.status == "in progress"
        self._examine(transaction)
        self._history.append(_Change({p: self.rows.get(p) for p in transaction.rows}, transaction.effects, []))
        self.rows.update(transaction.rows)
        for partition, offset in transaction.effects:
            self.effects.setdefault(partition, set()).add(offset)
        self._end(transaction, "committed")
        self._record_state(transaction, "commit")

    def abort(self, transaction: Transaction) -> None:
        if transaction.status == "in progress":
            self._end(transaction, "aborted")
            self.record(transaction, "abort", None)

    def outcome(self, transaction: Transaction) -> Status:
        """End a transaction that is still open, and tell what became of it."""
        status: Status = "committed" if transaction.status == "committed" else "aborted"
        self.record(transaction, "outcome", status)
        self.abort(transaction)
        return status

    def land(self, transaction: Transaction) -> bool:
        """Let what was sent long ago happen now; False while it waits for a lock."""
        try:
            if (advances := transaction.advances) is not None:
                if not self.try_lock(transaction, self.moved_by(transaction, advances)):
                    self.record(transaction, "advance", Waits(), advances)
                    return False
                self.advance(transaction, advances)
                self.record(transaction, "advance", None, advances)
            self.commit(transaction)
        except ShortCount as error:
            self.record(transaction, "advance", error, advances)
            self.abort(transaction)
        return True

    def fail_over(self, lost_commits: int) -> None:
        """Go on from a standby that lacks the last commits, offsets and effects together."""
        self.upheavals += 1
        self.incarnation = str(int(self.incarnation) + 1)
        for transaction in [t for t in self.transactions.values() if t.status == "in progress"]:
            self.abort(transaction)
        for _ in range(min(lost_commits, len(self._history))):
            change = self._history.pop()
            for partition, row in change.rows.items():
                if row is None:
                    del self.rows[partition]
                else:
                    self.rows[partition] = row
            for partition, offset in change.added:
                self.effects[partition].discard(offset)
            for partition, offset in change.removed:
                self.effects[partition].add(offset)
        self._record_state(None, "fail_over", lost_commits)

    def owner_of(self, partition: Partition) -> UUID | None:
        row = self.rows.get(partition)
        return row.owner_instance if row is not None else None

    def last_acquisition(self) -> Acquisition | None:
        """Return the last change of an owner, if no offset has moved since."""
        for commits, change in enumerate(reversed(self._history), start=1):
            for partition, before in change.rows.items():
                row = self.rows.get(partition)
                if before is None or row is None or before.next_offset not in {None, row.next_offset}:
                    return None
                if row.owner_epoch > before.owner_epoch and row.owner_instance is not None:
                    return Acquisition(partition, row.owner_instance, before.owner_instance, commits)
        return None

    def reset(self, partition: Partition, offset: int) -> None:
        """Do what an operator does: move the offset, and set the effects right by hand."""
        self.upheavals += 1
        row = self.rows[partition]
        have = self.effects.setdefault(partition, set())
        should = set(self._log(partition, 0, offset))
        self._history.append(
            _Change(
                {partition: row},
                [(partition, o) for o in sorted(should - have)],
                [(partition, o) for o in sorted(have - should)],
            )
        )
        self.effects[partition] = should
        self.rows[partition] = replace(
            row, next_offset=offset, leader_epoch=None, owner_epoch=row.owner_epoch + 1, owner_token=None
        )
        self._record_state(None, "reset", partition, offset, sorted(should))

    def _record_state(self, transaction: Transaction | None, name: str, *arguments: Any) -> None:
        if self.keeps_statements:
            effects = {p: tuple(sorted(offsets)) for p, offsets in self.effects.items() if offsets}
            self.record(transaction, name, State(dict(self.rows), effects), *arguments)

    def _end(self, transaction: Transaction, status: Status) -> None:
        transaction.status = status
        for partition in transaction.locked:
            del self._locks[partition]
        if transaction in self.in_flight:
            self.in_flight.remove(transaction)

    def _examine(self, transaction: Transaction) -> None:
        """Refuse a second effect of a message; if strict, also an offset that moved without its effects."""
        for advance in transaction.executed:
            row = self.rows[advance.partition]
            if row.owner_token != advance.token and self.minds_zombies:
                who = "an attempt given up" if row.owner_instance == transaction.instance else "a zombie"
                raise Violation(f"{advance.partition}: {who} commits {advance.expected}..{advance.next_offset - 1}")
        effects = transaction.effects
        if len(set(effects)) < len(effects):
            raise Violation(f"applied twice in one transaction: {effects}")
        for partition, offset in effects:
            if offset in self.effects.get(partition, ()):
                raise Violation(f"{partition} offset {offset} is applied twice")
        if not self._is_strict:
            return
        for partition, new in transaction.rows.items():
            old = self.rows.get(partition)
            if old is None or old.next_offset is None or new.next_offset is None:
                continue
            passed = self._log(partition, old.next_offset, new.next_offset)
            applied = [offset for p, offset in effects if p == partition]
            if passed != applied:
                raise Violation(f"{partition} moved past {passed} with the effects of {applied}")
