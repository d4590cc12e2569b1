"""Settlement: what becomes of a unit and of its messages. The outcome table, row by row."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from typing import NoReturn

import psycopg

from exactly_once._log import about
from exactly_once._model import Advance, Partition, Row
from exactly_once.errors import (
    Ahead,
    ExactlyOnceError,
    Fenced,
    HandlerCommitted,
    NoProgress,
    OutcomeLost,
    OutcomePending,
    Redelivered,
    Rewound,
    TransactionAborted,
    UnitNotFinished,
    UnitTooSlow,
)
from exactly_once.ledger.conflict import Conflict
from exactly_once.ledger.outcome import (
    PATIENCE_SECONDS,
    READ_ONLY,
    SHORT_COUNT,
    TRIES,
    Fault,
    Patience,
    classify,
    driver_error,
    is_by_statement,
)
from exactly_once.ledger.retry import briefly
from exactly_once.ledger.rows import LOCK_SECONDS, Ledger, row_missing
from exactly_once.ledger.session import Connection, is_lost
from exactly_once.ledger.stale_owners import Watcher

from .buffer import Delivery
from .kafka_offsets import Mirror
from .partitions import Ownership, Resolution
from .unit import Unit

logger = logging.getLogger(__name__)

_HALT_SECONDS = 10.0
_TROUBLE_SECONDS = 5.0
_BACK_SECONDS = 30.0
"""How long a server that went down under a unit, again, may take to come back: far below max.poll.interval.ms."""
_UNUSED_UNITS = 3
"""How many units a handler may leave unused before that is told: the first messages may be none that it looks at."""
_NOBODYS = (Fault.CONFLICT, Fault.ENVIRONMENT)


@dataclass(slots=True)
class Counters:
    """What happened to units so far, for logs and tests."""

    committed: int = 0
    messages: int = 0
    redelivered: int = 0
    fenced: int = 0
    ahead: int = 0
    rewound: int = 0
    resolved_committed: int = 0
    resolved_aborted: int = 0
    resolved_fenced: int = 0
    dead_letters: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name))


class Settlement:
    """Begins, commits, undoes and resolves the units of one consumer."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        ownership: Ownership,
        delivery: Delivery,
        mirror: Mirror,
        watcher: Watcher,
        max_messages: int,
    ) -> None:
        self._ledger = ledger
        self._about = partial(about, group=ledger.group_id)
        self._ownership = ownership
        self._delivery = delivery
        self._mirror = mirror
        self._watcher = watcher
        self._max_messages = max_messages
        self._began_at = 0.0
        self._pending: tuple[Unit, bool] | None = None
        self._troubles = 0
        self._patience = Patience()
        self._suspects: dict[Partition, int] = {}
        """Up to where the messages go that failed too often: parts of them are cut at their first failure."""
        self._unused: int | None = 0
        """How many units were committed by a handler that has used none of them; None once it did, or it was told."""
        self.not_before = 0.0
        """When the next unit makes sense, on the monotonic clock: servers that refuse are not asked in a hurry."""
        self.limit = max_messages
        self.counters = Counters()
        self.timing: tuple[float, float | None] = (0.0, None)
        """Seconds that the last committed unit took, and of these the COMMIT, where it was ours."""
        self.committed_at: float | None = None
        """When that was, on the monotonic clock."""
        self.failed: ExactlyOnceError | None = None

    @property
    def awaits_joined(self) -> bool:
        """Whether a unit waits for the end of somebody else's transaction."""
        return self._pending is not None and self._pending[0].work.is_joined

    @property
    def is_pending(self) -> bool:
        """Whether a unit waits for its outcome."""
        return self._pending is not None

    def begin(self, unit: Unit) -> None:
        """Open the unit's transaction.

        :raises Redelivered: when the database cannot be reached or refuses for now.
        """
        self._began_at = time.monotonic()
        try:
            unit.work.begin()
        except BaseException as error:
            lost = unit.work.is_lost
            self._give_back(unit)
            unit.work.roll_back()
            self._raise_fault(unit, error, lost=lost, began=False)
            raise
        self._watch(unit)

    def _watch(self, unit: Unit) -> None:
        """Have whoever stands still in our way ended, while the unit is open."""
        assert unit.work.begun is not None
        holdings = ((a.partition, self._ownership.holdings.get(a.partition)) for a in unit.advances)
        self._watcher.watch(
            unit.work.begun.pid,
            connection=unit.work.connection,
            may_take=unit.work.max_unit_seconds,
            taken=[(p, h.previous_instance) for p, h in holdings if h is not None and h.previous_instance is not None],
        )

    def join(self, unit: Unit, connection: Connection) -> None:
        """Have the unit take part in a transaction that somebody else will end; :meth:`settle` finds out how."""
        self._began_at = time.monotonic()
        try:
            unit.work.join(connection)
        except BaseException:
            self._give_back(unit)
            raise
        self._ownership.unknown(unit.advances)
        self._pending = (unit, True)
        self._watch(unit)

    def leave(self, unit: Unit) -> None:
        """Move the offsets in the joined transaction, which is watched until it is settled.

        :raises Redelivered: when the rows are not ours any more; the caller's transaction is broken then.
        """
        try:
            unit.work.advance(unit.advances)
        except psycopg.Error as error:
            if error.sqlstate == SHORT_COUNT:
                raise Redelivered(_told(unit, "another owner has taken the partitions")) from error
            raise

    def finish(self, unit: Unit) -> None:
        """Commit the unit; raise whatever became of it instead."""
        sent_at = time.monotonic()
        try:
            unit.work.commit(unit.advances)
            self._landed(unit, commit_seconds=time.monotonic() - sent_at)
        except BaseException as error:
            if unit.work.is_unknown:
                self._after_unknown(unit, error)
                return
            self.abandon(unit, error)
            raise
        finally:
            self._watcher.clear()

    def abandon(self, unit: Unit, error: BaseException) -> None:
        """Undo a unit before its COMMIT was sent; return if ``error`` itself tells it best.

        :raises HandlerCommitted: when the handler had committed by itself.
        :raises Redelivered: when it is nobody's fault, or nobody can say yet.
        """
        self._watcher.clear()
        lost = unit.work.is_lost
        self._pending = (unit, False)  # so that an interruption of what follows loses nothing
        unit.work.roll_back()
        self._count(unit, error, lost=lost)
        try:
            # A unit whose statement ends the whole server, each time, is to be judged when the server is back.
            fate = briefly(_BACK_SECONDS if self._patience.is_out else 0)(unit.work.fate)
        except psycopg.Error as trouble:
            if not isinstance(error, Exception):
                return
            raise OutcomePending(_told(unit, f"what became of it is not known yet: {str(trouble).strip()}")) from error
        except OutcomeLost as unclear:
            self._outcome_lost(unit, unclear)
        if fate == "committed":
            self._handler_committed(unit, error)
        driver = driver_error(error)
        if driver is not None and driver.sqlstate == SHORT_COUNT:
            self._judge(unit, error)
        self._pending = None
        self._give_back(unit)
        self._raise_fault(unit, error, lost=lost, began=True)

    def settle(self) -> None:
        """Find out what became of the unit that is pending, if there is one.

        :raises psycopg.Error: when the database cannot be asked now; call again.
        :raises HandlerCommitted: when the handler had committed by itself.
        """
        if self._pending is None:
            return
        unit, commit_sent = self._pending
        if commit_sent and self._ownership.doubt is None:
            self._ownership.misplaced()  # it was resolved, and interrupted then
        elif unit.work.is_joined:
            self._settle_joined(unit)
        elif commit_sent:
            self._resolve(unit)
        else:
            unit.work.roll_back()  # again: it may have been interrupted
            try:
                fate = unit.work.fate()
            except OutcomeLost as unclear:
                self._outcome_lost(unit, unclear)
            if fate == "committed":
                self._handler_committed(unit, None)
            self._pending = None  # first: an interruption may not give it back twice
            self._give_back(unit)
        self._pending = None

    def _settle_joined(self, unit: Unit) -> None:
        """Find out what became of a transaction that was somebody else's to end."""
        assert unit.work.begun is not None
        session = self._ledger.session
        try:
            status = session.status(unit.work.begun)
            if status is None or (status == "in progress" and unit.work.is_lost):
                # A connection that is lost commits nothing any more: what it left open is ended.
                status = session.fate(unit.work.begun)
        except OutcomeLost as unclear:
            self._watcher.clear()
            self._outcome_lost(unit, unclear)
        if status in ("in progress", "prepared"):
            raise UnitNotFinished(
                f"the transaction that {unit!r} joined is still open: commit it or roll it back, then iterate on"
            )
        self._watcher.clear()
        if status == "committed" and not (unit.work.is_advanced and self._has_advanced(unit)):
            self._handler_committed(unit, None)
        self._resolve(unit)

    def _has_advanced(self, unit: Unit) -> bool:
        """Look whether the rows moved: a rollback to a savepoint before the block undoes that, and only that."""
        rows = {row.partition: row for row in self._ledger.read(sorted(a.partition for a in unit.advances))}
        return not any(
            row.owner_token == a.token and row.next_offset == a.expected
            for a in unit.advances
            if (row := rows.get(a.partition)) is not None
        )

    def _landed(self, unit: Unit, *, commit_seconds: float | None = None) -> None:
        with self._ownership.changing():
            self._ownership.committed(unit.advances)
        for advance in unit.advances:
            self._mirror.applied(advance.partition, advance.next_offset, advance.leader_epoch)
        self.counters.committed += 1
        self.counters.messages += len(unit.sent)
        self.counters.dead_letters += unit.dead_letters
        self._troubles = 0
        self._patience.landed()
        self._note_use(unit)
        self.committed_at = time.monotonic()
        self.timing = self.committed_at - self._began_at, commit_seconds
        late = self.timing[0] > unit.work.max_unit_seconds
        self.limit = max(1, len(unit.messages) // 2) if late else min(self._max_messages, self.limit * 2)

    def _note_use(self, unit: Unit) -> None:
        """Notice a handler that never uses its units: it writes elsewhere, where effects are doubled."""
        is_used = unit.is_touched or unit.is_connection_used
        if is_used and unit.dead_letters < len(unit.messages):
            self._unused = None
        elif self._unused is not None and not is_used:
            self._unused += 1
            if self._unused == _UNUSED_UNITS:
                self.tell_unused()

    def tell_unused(self) -> None:
        """Log, once, that no unit was used so far, if that is so."""
        if self._unused:
            logger.warning(
                "the handler did not use its unit (unit.execute, unit.connection, ...) in any of %s units so far: "
                "effects elsewhere are at-least-once, so redelivery and the search for a poisonous message repeat them",
                self._unused,
                extra=self._about("unit_unused"),
            )
        self._unused = None

    def _count(self, unit: Unit, error: BaseException, *, lost: bool) -> None:
        """Count failures of the same messages that look like nobody's fault."""
        is_ours = isinstance(error, ExactlyOnceError) or not isinstance(error, Exception)
        if is_ours or unit.is_taken or classify(error, connection_lost=lost) not in _NOBODYS:
            return
        by_statement = is_by_statement(error, connection_lost=lost)
        self._patience.failed(_batch(unit), time.monotonic(), by_statement=by_statement)

    def _give_back(self, unit: Unit) -> None:
        self.counters.redelivered += 1
        with self._ownership.changing():
            self._ownership.aborted(unit.advances)
            self._delivery.put_back(unit.sent.again())

    def _after_unknown(self, unit: Unit, error: BaseException) -> None:
        """Try once to learn the outcome of a COMMIT that was not confirmed."""
        lost = is_lost(unit.work.connection)
        self._ownership.unknown(unit.advances)
        self._pending = (unit, True)
        try:
            resolution = self._resolve(unit)
        except psycopg.Error:
            if not isinstance(error, Exception):
                raise error from None
            raise OutcomePending(_told(unit, "COMMIT was not confirmed, and the database cannot be asked")) from error
        self._pending = None
        if not isinstance(error, Exception):
            raise error
        if resolution is Resolution.FENCED:
            raise Fenced(_told(unit, "COMMIT was not confirmed, and its rows belong to another owner")) from error
        if resolution is Resolution.ABORTED:
            self._count(unit, error, lost=lost)
            self._raise_fault(unit, error, lost=lost, began=True)
            raise error

    def _resolve(self, unit: Unit) -> Resolution:
        doubt = self._ownership.doubt
        assert doubt is not None
        partitions = sorted(a.partition for a in unit.advances)
        rows = self._ledger.resolve(partitions, doubt.tokens, lock_seconds=LOCK_SECONDS)
        with self._ownership.changing():
            resolution = self._ownership.resolved(rows)
            if resolution is Resolution.COMMITTED:
                self.counters.resolved_committed += not unit.work.is_joined
                self._landed(unit)
            else:
                is_fenced = resolution is Resolution.FENCED
                self.counters.redelivered += 1
                self.counters.fenced += is_fenced
                self.counters.resolved_fenced += is_fenced and not unit.work.is_joined
                self.counters.resolved_aborted += not is_fenced and not unit.work.is_joined
                self._delivery.put_back(unit.sent.again())
            self._delivery.discard()
        self._note_rewind(unit, rows)
        level = logging.DEBUG if unit.work.is_joined else logging.WARNING
        extra = self._about(f"resolved_{resolution.name.lower()}", several=unit.advances)
        logger.log(level, "the outcome of %r was in doubt: %s", unit, resolution.value, extra=extra)
        return resolution

    def _note_rewind(self, unit: Unit, rows: list[Row]) -> None:
        """Tell of rows below where the unit began: a failover that cuts off a COMMIT may have lost earlier ones too."""
        stored = {row.partition: row.next_offset for row in rows}
        for advance in unit.advances:
            offset = stored.get(advance.partition, advance.expected)
            if offset is None or offset < advance.expected:
                self.counters.rewound += 1
                text = "%s: expected offset %s, the ledger is back at %s: the database lost commits in a failover"
                extra = self._about("rewound", partition=advance.partition, offset=offset)
                logger.warning(text, advance.partition, advance.expected, offset, extra=extra)

    def tell_rewound(self, partition: Partition, *, mirrored: int) -> None:
        """Tell of commits that were lost while nobody held the partition: Kafka was told a later offset."""
        offset = self._ownership.holdings[partition].expected
        self.counters.rewound += 1
        logger.warning(
            "%s: Kafka was told offset %s, the ledger is at %s: the database lost commits in a failover or a restore, "
            "effects and offsets together; going on from the ledger",
            partition,
            mirrored,
            offset,
            extra=self._about("rewound", partition=partition, offset=offset),
        )

    def _judge(self, unit: Unit, error: BaseException) -> NoReturn:
        """Read the rows of a unit that could not advance, and raise what is wrong with them."""
        try:
            rows = self._ledger.read(sorted(a.partition for a in unit.advances))
        except psycopg.Error:
            self._ownership.unknown(unit.advances)
            self._pending = (unit, True)
            raise OutcomePending(_told(unit, "the ledger did not advance and cannot be read now")) from error
        self._pending = None
        with self._ownership.changing():
            verdicts = self._ownership.judge(unit.advances, rows)
            self.counters.redelivered += 1
            self._delivery.put_back(unit.sent.again())
        stored = {row.partition: row for row in rows}
        for verdict in (Conflict.MISSING, Conflict.RECREATED, Conflict.REWOUND, Conflict.FENCED, Conflict.AHEAD):
            for advance in unit.advances:
                if verdicts[advance.partition] is verdict:
                    raise self._wrong(unit, verdict, advance, stored.get(advance.partition)) from error
        raise Redelivered(_told(unit, "its rows were changed and changed back")) from error

    def _wrong(self, unit: Unit, verdict: Conflict, advance: Advance, row: Row | None) -> ExactlyOnceError:
        """Describe the worst thing that kept a unit from advancing."""
        place = f"{advance.partition} of group {self._ledger.group_id!r}"
        if row is None:
            return Redelivered(_told(unit, str(row_missing(self._ledger.group_id, advance.partition))))
        if verdict is Conflict.RECREATED:
            told = f"{place}: started with topic id {advance.topic_id}, the ledger has {row.topic_id}"
            return Redelivered(_told(unit, told))
        if verdict is Conflict.REWOUND:
            self.counters.rewound += 1
            return Rewound(
                f"{place}: expected offset {advance.expected}, the ledger is back at {row.next_offset}: the database "
                "lost commits in a failover, effects and offsets together; going on from the ledger"
            )
        if verdict is Conflict.AHEAD:
            self.counters.ahead += 1
            return Ahead(f"{place}: expected offset {advance.expected}, the ledger is at {row.next_offset}")
        self.counters.fenced += 1
        owner = row.owner_name or row.owner_instance if row.owner_token else "nobody, it was reset or released"
        return Fenced(_told(unit, f"{place} is owned by {owner} now (owner epoch {row.owner_epoch})"))

    def _outcome_lost(self, unit: Unit, unclear: OutcomeLost) -> NoReturn:
        """Fail for good: nobody knows whether effects are durable."""
        first = unit.advances[0].partition
        mend = f"For each partition: exactly-once reset --topic {first.topic} --partition {first.number} --to-offset N"
        self._halt(unit, OutcomeLost, str(unclear), mend, cause=unclear)

    def _handler_committed(self, unit: Unit, error: BaseException | None) -> NoReturn:
        """Fail for good: effects are durable, their offset is not."""
        reason = (
            f"the transaction that {unit!r} joined was committed without its offsets"
            if unit.work.is_joined
            else f"the handler committed a transaction by itself with the messages of {unit!r}"
        )
        first = unit.advances[0].partition
        wrong = f"{reason}: its effects are durable, the offset is not"
        mend = (
            "Take COMMIT out of the handler and out of what it calls, decide which messages took effect, then "
            f"for each partition: exactly-once reset --topic {first.topic} --partition {first.number} --to-offset N"
        )
        self._halt(unit, HandlerCommitted, wrong, mend, cause=error)

    def _halt(
        self,
        unit: Unit,
        kind: type[HandlerCommitted | OutcomeLost],
        wrong: str,
        mend: str,
        *,
        cause: BaseException | None,
    ) -> NoReturn:
        """Raise what is wrong from now on, here and in whatever process acquires the partitions next."""
        try:
            halted = briefly(_HALT_SECONDS)(self._ledger.halt, unit.advances, reason=wrong)
            missed = self._not_halted([a for a in unit.advances if a.partition not in halted])
        except psycopg.Error as trouble:
            halted, missed = set(), f"could not be halted in the ledger: {str(trouble).strip()}"
        done = f"Halted until an operator resets them: {_names(halted)}. " if halted else ""
        left = [a for a in unit.advances if a.partition not in halted]
        undone = f"NOT halted: {_names(a.partition for a in left)}, {missed}. " if left else ""
        failure = self.failed = kind(f"{wrong}. {done}{undone}{mend}")
        failure.__cause__ = cause
        self._pending = None
        if left:
            logger.critical("%s", failure, extra=self._about("halt_failed", several=left))
        raise failure

    def _not_halted(self, advances: list[Advance]) -> str:
        """Say why rows could not be halted: where they are now."""
        rows = {row.partition: row for row in self._ledger.read([a.partition for a in advances])} if advances else {}
        found = []
        for advance in advances:
            row = rows.get(advance.partition)
            if row is None:
                found.append(f"{advance.partition} has no row")
            elif row.topic_id != advance.topic_id:
                found.append(f"{advance.partition} belongs to another topic of that name by now")
            else:
                found.append(
                    f"{advance.partition} went on from {advance.expected} to {row.next_offset} under another owner "
                    f"(owner epoch {row.owner_epoch}), which has applied these messages, too"
                )
        return "; ".join(found)

    def _is_suspect(self, unit: Unit) -> bool:
        """Tell whether a unit has failed often enough, or is a part of one that has and can be cut further."""
        several = len(unit.messages) > 1
        is_part = all(a.next_offset <= self._suspects.get(a.partition, -1) for a in unit.advances)
        return self._patience.is_handlers or (several and is_part)

    def _blame(self, unit: Unit, error: Exception, fault: Fault, *, lost: bool) -> Fault:
        """End what would go on for ever: say whose fault it is that these messages failed so often.

        Every one of these tries had a transaction that began, so the server answers us.
        """
        if fault not in _NOBODYS or unit.is_taken:
            return fault
        several, patience = len(unit.messages) > 1, self._patience
        if fault is Fault.ENVIRONMENT and is_by_statement(error, connection_lost=lost):
            if self._is_suspect(unit) and not (_is_read_only(error) and self._refuses_writes(unit)):
                fault = Fault.HANDLER
        elif patience.is_overdue:
            unit.fault = Fault.OTHER
            what = f"nothing could be committed for {PATIENCE_SECONDS:g} s: {str(error).strip()}"
            raise NoProgress(_told(unit, what)) from error
        elif patience.is_out and several:
            self.limit = max(1, len(unit.messages) // 2)  # perhaps there is less to collide with, or to hold
        if fault is Fault.HANDLER:
            if patience.by_statement == TRIES:
                text = (
                    "%r failed %s times in a row while the database server answers, so its statements are at fault: %s"
                )
                extra = self._about("tried_enough", several=unit.advances)
                logger.warning(text, unit, TRIES, str(error).strip(), extra=extra)
            self._suspects = {a.partition: a.next_offset for a in unit.advances} if several else self._suspects
            self._troubles = 0
        return fault

    def _refuses_writes(self, unit: Unit) -> bool:
        """Find out on another connection whether the server itself refuses to write."""
        self._ledger.session.discard()
        try:
            self._ledger.read(sorted(a.partition for a in unit.advances))  # locks rows, which is writing
        except psycopg.Error:
            return True
        return False

    def _raise_fault(self, unit: Unit, error: BaseException, *, lost: bool, began: bool) -> None:
        """Raise what the outcome table says of ``error``, or return if it is to propagate itself."""
        if not isinstance(error, Exception):
            return
        if isinstance(error, ExactlyOnceError):
            unit.fault = Fault.HANDLER if isinstance(error, TransactionAborted) else Fault.OTHER
            return
        fault = classify(error, connection_lost=lost)
        if began:
            fault = self._blame(unit, error, fault, lost=lost)
        unit.fault = fault
        if fault is Fault.DURATION:
            self.limit = max(1, len(unit.messages) // 2)
            if len(unit.messages) == 1:
                raise UnitTooSlow(
                    _told(unit, f"one message is not done in the time that is allowed: {error}")
                ) from error
        if fault is Fault.ENVIRONMENT:
            self._ledger.session.discard()  # a live connection may lead to what was the primary once
            self._troubles += 1
            self.not_before = time.monotonic() + min(_TROUBLE_SECONDS, 0.05 * 2.0**self._troubles)
        if fault in (Fault.CONFLICT, Fault.ENVIRONMENT, Fault.DURATION):
            raise Redelivered(_told(unit, str(error).strip())) from error


def _told(unit: Unit, what: str) -> str:
    return f"{what} ({unit!r}); nothing is lost, the messages come again if they did not take effect"


def _batch(unit: Unit) -> Hashable:
    return tuple((a.partition, a.expected, a.next_offset) for a in unit.advances)


def _names(partitions: Iterable[Partition]) -> str:
    return ", ".join(map(str, sorted(partitions)))


def _is_read_only(error: Exception) -> bool:
    driver = driver_error(error)
    return driver is not None and driver.sqlstate == READ_ONLY
