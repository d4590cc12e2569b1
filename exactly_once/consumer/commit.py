"""CommitProtocol: begins, commits, undoes and resolves units; :mod:`.outcomes` decides, and here it is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import NoReturn
from uuid import UUID

import psycopg

from exactly_once import errors
from exactly_once._log import about, text_of
from exactly_once._model import Partition, Sent
from exactly_once.ledger.commands import reset_command
from exactly_once.ledger.conflict import Conflict
from exactly_once.ledger.dead_letters import place_of
from exactly_once.ledger.migrate import refuse_lost
from exactly_once.ledger.outcome import (
    COMPLETION_UNKNOWN,
    PATIENCE_SECONDS,
    READ_ONLY,
    SHORT_COUNT,
    TRIES,
    Fault,
    Patience,
    classify,
    is_by_statement,
    own_error,
    sqlstate_of,
)
from exactly_once.ledger.retry import retry_for
from exactly_once.ledger.rows import LOCK_SECONDS, row_missing
from exactly_once.ledger.session import Connection, is_lost
from exactly_once.ledger.stale_owners import StaleBackendTerminator
from exactly_once.ledger.store import LedgerStore

from .buffer import FetchBuffer
from .outcomes import LOST, Decision, Rows, decide
from .partitions import Resolution
from .unit import Unit

logger = logging.getLogger(__name__)

# For how long a halt is tried to be stored, while the partitions of others are not read: below a session time-out.
_HALT_SECONDS = 10.0
# The longest pause between units that a server in trouble makes fail; the first is a tenth of a second.
_TROUBLE_SECONDS = 5.0
# How long a server that went down under a unit, again, may take to come back: far below max.poll.interval.ms.
_BACK_SECONDS = 30.0
# How many units a handler may leave unused before that is told: the first messages may be none that it looks at.
_UNUSED_UNITS = 3
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
    missing: int = 0
    resolved_committed: int = 0
    resolved_aborted: int = 0
    resolved_fenced: int = 0
    dead_letters: int = 0

    def count(self, conflict: Conflict) -> None:
        """Count a row that is not as it was left."""
        self.fenced += conflict is Conflict.FENCED
        self.ahead += conflict is Conflict.AHEAD
        self.rewound += conflict is Conflict.REWOUND
        self.missing += conflict is Conflict.MISSING

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name))


@dataclass(slots=True)
class Pending:
    """The one unit whose outcome is not known.

    Set before anything that may lose the answer, cleared in the same change as the positions: an interruption in
    between leaves those unsound, and then everything is fetched again from where the ledger stands.
    """

    unit: Unit
    sent: Sent
    is_refused: bool = False
    """Whether Postgres answered COMMIT with an error that undoes it: a deferred constraint's, say."""
    tokens: list[UUID] = field(init=False)
    """Every token under which its rows may be ours: each try to resolve adds one, before it is sent."""

    def __post_init__(self) -> None:
        self.tokens = sorted({advance.token for advance in self.unit.advances})


class CommitProtocol:
    """Begins, commits, undoes and resolves the units of one consumer."""

    def __init__(
        self, ledger: LedgerStore, buffer: FetchBuffer, terminator: StaleBackendTerminator, *, max_messages: int
    ) -> None:
        self.ledger = ledger
        self.buffer = buffer
        self.ownership = buffer.ownership
        self._about = partial(about, group=ledger.group_id)
        self._terminator = terminator
        self._max_messages = max_messages
        # When the unit began that is open, on the monotonic clock.
        self._began_at = 0.0
        # Nothing is handed out while it is set.
        self._pending: Pending | None = None
        # How many units in a row failed by the environment's fault; any commit ends that.
        self._troubles = 0
        self._patience = Patience()
        # Up to where the messages go that failed too often: parts of them are cut at their first failure.
        self._suspects: dict[Partition, int] = {}
        # How many units were committed by a handler that has used none of them; None once it did, or it was told.
        self._unused: int | None = 0
        # Whether handlers use units in threads of their own, which may go on behind one that failed; None: not known.
        self._has_threads: bool | None = None
        # When the next unit makes sense, on the monotonic clock: servers that refuse are not asked in a hurry.
        self.not_before = 0.0
        self.limit = max_messages
        # How many units of one message in a row took too long, so that another owner took over meanwhile.
        self._outlasted = 0
        self.counters = Counters()
        # Seconds that the last committed unit took, and of these the COMMIT, where it was ours.
        self.timing: tuple[float, float | None] = (0.0, None)
        # When that was, on the monotonic clock.
        self.committed_at: float | None = None
        self.failed: errors.ExactlyOnceError | None = None  # why nothing is handed out any more: a unit was halted
        # What the next iteration is to raise in place of a unit.
        self.refusal: errors.ExactlyOnceError | None = None

    @property
    def awaits_joined(self) -> bool:
        """Whether a unit waits for the end of somebody else's transaction."""
        return self._pending is not None and self._pending.unit.work.is_joined

    @property
    def is_pending(self) -> bool:
        """Whether a unit waits for its outcome."""
        return self._pending is not None

    def take_back(self, unit: Unit) -> None:
        """Have the messages of a unit come again that nobody has entered, nor ever will."""
        self._began_at = time.monotonic()
        self._give_back(unit)

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
        states = ((a.partition, self.ownership.states.get(a.partition)) for a in unit.advances)
        self._terminator.watch(
            unit.work.begun.pid,
            connection=unit.work.connection,
            may_take=unit.work.max_unit_seconds,
            taken=[(p, h.previous_instance) for p, h in states if h is not None and h.previous_instance is not None],
        )

    def join(self, unit: Unit, connection: Connection) -> None:
        """Have the unit take part in a transaction that somebody else will end; :meth:`resolve` finds out how."""
        self._began_at = time.monotonic()
        try:
            unit.work.join(connection)
            self.ledger.session.refuse_other_ledger(connection)
        except BaseException as error:
            self._give_back(unit)
            refuse_lost(self.ledger.session, error)
            raise
        self._pending = Pending(unit, Sent.JOINED)
        self._watch(unit)

    def leave(self, unit: Unit) -> None:
        """Move the offsets in the joined transaction, which is watched until it is resolved.

        :raises Redelivered: when the rows are not ours any more; the caller's transaction is broken then.
        """
        try:
            unit.work.advance(unit.advances)
        except psycopg.Error as error:
            if error.sqlstate == SHORT_COUNT:
                raise errors.Redelivered(_told(unit, "another owner has taken the partitions")) from error
            if classify(error, connection_lost=False) is Fault.CONFLICT:  # as above READ COMMITTED such an owner is
                raise errors.Redelivered(_told(unit, text_of(error))) from error
            refuse_lost(self.ledger.session, error)
            raise

    def finish(self, unit: Unit) -> None:
        """Commit the unit; raise whatever became of it instead."""
        sent_at = time.monotonic()
        try:
            unit.work.commit(unit.advances)
            self._committed(unit, commit_seconds=time.monotonic() - sent_at)
        except BaseException as error:
            if unit.work.is_unknown:
                self._after_unknown(unit, error)
                return
            self.abandon(unit, error)
            raise
        finally:
            self._terminator.clear()

    def abandon(self, unit: Unit, error: BaseException) -> None:
        """Undo a unit before its COMMIT was sent; return if ``error`` itself tells it best.

        :raises HandlerCommitted: when the handler had committed by itself.
        :raises Redelivered: when it is nobody's fault, or nobody can say yet.
        """
        self._terminator.clear()
        lost = unit.work.is_lost
        self._pending = Pending(unit, Sent.NOTHING)  # so that an interruption of what follows loses nothing
        # Whoever has the connection itself can use it behind the unit; who does is not known before one has gone well.
        unit.work.is_shared |= unit.is_lent if self._has_threads is None else self._has_threads
        unit.work.roll_back()
        self._count(unit, error, lost=lost)
        # A unit whose statement ends the whole server, each time, is to be judged when the server is back.
        asking = retry_for(_BACK_SECONDS if self._patience.is_out else 0)
        status = LOST
        unclear: errors.TransactionOutcomeUnknown | None = None
        try:
            status = asking(unit.work.outcome)
        except psycopg.Error as trouble:
            if not isinstance(error, Exception):
                return
            raise errors.OutcomePending(
                _told(unit, f"what became of it is not known yet: {str(trouble).strip()}")
            ) from error
        except errors.TransactionOutcomeUnknown as lost_for_good:
            unclear = lost_for_good
        decision = decide(Sent.NOTHING, status, "short" if sqlstate_of(error) == SHORT_COUNT else None)
        if decision in (Decision.HALT_COMMITTED, Decision.HALT_UNKNOWN):
            self._halt(unit, decision, unclear or error)
        if decision is Decision.COMPARE:
            self._classify(unit, error)
        else:
            self._give_back(unit)
        self._raise_fault(unit, error, lost=lost, began=True)

    def resolve(self) -> None:
        """Find out what became of the unit that is pending, if there is one.

        :raises psycopg.Error: when the database cannot be asked now; call again.
        :raises UnitNotFinished: when it waits for the end of somebody else's transaction.
        :raises HandlerCommitted: when the handler had committed by itself.
        """
        if self._pending is None:
            return
        pending, unit = self._pending, self._pending.unit
        sent = unit.work.sent if unit.work.is_joined else pending.sent
        status: str | None = None
        rows: Rows | None = None
        unclear: errors.TransactionOutcomeUnknown | None = None
        try:
            if sent is Sent.NOTHING:
                unit.work.roll_back()  # an interruption may have come before the first time
                status = unit.work.outcome()
            elif unit.work.is_joined:
                assert unit.work.begun is not None
                session = self.ledger.session
                status = session.status(unit.work.begun)
                if status is None or (status == "in progress" and unit.work.is_lost):
                    # A connection that is lost commits nothing any more: what it left open is ended.
                    status = session.outcome(unit.work.begun)
        except errors.TransactionOutcomeUnknown as lost_for_good:
            status, unclear = LOST, lost_for_good
        if sent is Sent.ADVANCE and status == "committed":
            # A rollback to a savepoint before the block undoes the advance, and only that.
            found = {row.partition: row for row in self.ledger.read(sorted(a.partition for a in unit.advances))}
            there = [(a, found[a.partition]) for a in unit.advances if a.partition in found]
            # Whoever has the row by now: had the advance been committed, it would not stand where it stood.
            stayed = any(row.next_offset == a.expected for a, row in there)
            rows = "stayed" if stayed else "moved"
        decision = decide(sent, status, rows)
        if decision is Decision.WAIT:
            raise errors.UnitNotFinished(
                f"the transaction that {unit!r} joined is still open: commit it or roll it back, then iterate on"
            )
        self._terminator.clear()
        if decision in (Decision.HALT_COMMITTED, Decision.HALT_UNKNOWN):
            self._halt(unit, decision, unclear)
        elif decision is not Decision.RESOLVE:
            self._give_back(unit)
        elif self._resolve(pending) is Resolution.ABORTED and unit.work.is_joined:
            # Nobody has told why: a framework rolls back at an error that the application has swallowed.
            self._patience.failed(_batch(unit), time.monotonic(), by_statement=False)
            what = "transactions that units joined are rolled back each time"
            if self._patience.tries == TRIES:
                extra = self._about("joined_rolled_back", several=unit.advances)
                logger.warning("%s, %s times with the same messages: %r", what, TRIES, unit, extra=extra)
            if self._patience.is_overdue:
                self.refusal = errors.NoProgress(_told(unit, f"{what}, nothing committed for {PATIENCE_SECONDS:g} s"))

    def used_late(self, unit: Unit) -> None:
        """Take note that a thread has used a unit that was committed: what it was to store is lost."""
        if not unit.is_loss_told:
            unit.is_loss_told = True
            reset = reset_command(self.ledger.group_id, self.ledger.session.schema, unit.advances[0].partition)
            refusal = errors.TransactionBusy(
                f"a thread of the handler used {unit!r} behind its COMMIT, so what it was to store is lost. Wait for "
                f"all threads before the handler returns; then decide which messages are to be read again: {reset}"
            )
            logger.error("%s", refusal, extra=self._about("used_late", several=unit.advances))
            self.refusal = self.refusal or refusal

    def _committed(self, unit: Unit, *, commit_seconds: float | None = None) -> None:
        with self.ownership.changing():
            self.ownership.committed(unit.advances)
        self.counters.committed += 1
        self.counters.messages += len(unit.sent)
        self.counters.dead_letters += len(unit.letters)
        epochs = {advance.partition: advance.epoch for advance in unit.advances} if unit.letters else {}
        for message, why in unit.letters:
            partition = Partition.of(message)
            extra = about(
                "set_aside",
                group=self.ledger.group_id,
                partition=partition,
                offset=message.offset(),
                owner_epoch=epochs[partition],
            )
            logger.error("%s was stored as a dead letter: %s", place_of(message), why, extra=extra)
        self._troubles = 0
        self._patience.committed()
        # Notice a handler that never uses its units: it writes elsewhere, where effects are doubled.
        is_used = unit.is_touched or unit.is_connection_used
        if is_used:
            self._has_threads = unit.work.is_shared or bool(self._has_threads)
        if is_used and len(unit.letters) < unit.given:
            self._unused = None
        elif self._unused is not None and not is_used:
            self._unused += 1
            if self._unused == _UNUSED_UNITS:
                self.log_unused()
        self.committed_at = time.monotonic()
        self.timing = self.committed_at - self._began_at, commit_seconds
        self._outlasted = 0
        self.limit = max(1, unit.given // 2) if self._is_late(unit) else min(self._max_messages, self.limit * 2)

    def log_unused(self) -> None:
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
        is_ours = own_error(error) is not None or not isinstance(error, Exception)
        if is_ours or unit.is_taken or classify(error, connection_lost=lost) not in _NOBODYS:
            return
        self._patience.failed(_batch(unit), time.monotonic(), by_statement=is_by_statement(error, connection_lost=lost))

    def _give_back(self, unit: Unit) -> None:
        self._pending = None  # first: an interruption may not give it back twice
        with self.ownership.changing():
            self.ownership.aborted(unit.advances)
            self._requeue(unit)

    def _requeue(self, unit: Unit) -> None:
        """Have its messages come again: fewer at a time where they took so long that others may take over meanwhile."""
        self.counters.redelivered += 1
        if self._is_late(unit):
            self.limit = max(1, unit.given // 2)
        self.buffer.requeue(unit.sent.again())

    def _is_late(self, unit: Unit) -> bool:
        return time.monotonic() - self._began_at > unit.work.max_unit_seconds

    def _after_unknown(self, unit: Unit, error: BaseException) -> None:
        """Try once to learn the outcome of a COMMIT that was not confirmed."""
        lost = is_lost(unit.work.connection)
        is_refused = sqlstate_of(error) not in (None, COMPLETION_UNKNOWN) and (
            classify(error, connection_lost=lost) in (Fault.HANDLER, Fault.CONFLICT)
        )
        self._pending = Pending(unit, Sent.COMMIT, is_refused=is_refused)
        try:
            resolution = self._resolve(self._pending)
        except psycopg.Error:
            if not isinstance(error, Exception):
                raise error from None
            raise errors.OutcomePending(
                _told(unit, "COMMIT was not confirmed, and the database cannot be asked")
            ) from error
        if not isinstance(error, Exception):
            raise error
        if resolution is Resolution.FENCED:
            raise errors.Fenced(
                _told(unit, "COMMIT was not confirmed, and its rows belong to another owner")
            ) from error
        if resolution is Resolution.ABORTED:
            self._count(unit, error, lost=lost)
            self._raise_fault(unit, error, lost=lost, began=True)
            raise error

    def _resolve(self, pending: Pending) -> Resolution:
        """Take the unit's rows again under a new token, and act on where they are."""
        unit, counters = pending.unit, self.counters
        partitions = sorted(a.partition for a in unit.advances)
        rows = self.ledger.resolve(partitions, pending.tokens, lock_seconds=LOCK_SECONDS)
        # Of a joined transaction its owner knows how it ended, of a refused one Postgres has said so.
        was_in_doubt = not (unit.work.is_joined or pending.is_refused)
        with self.ownership.changing():
            resolution = self.ownership.resolved(unit.advances, pending.tokens, rows)
            if resolution is Resolution.COMMITTED:
                counters.resolved_committed += was_in_doubt
                self._committed(unit)
                unit.settle()
            else:
                if resolution is Resolution.FENCED:
                    counters.fenced += 1
                    counters.resolved_fenced += was_in_doubt
                else:
                    counters.resolved_aborted += was_in_doubt
                self._requeue(unit)
            self.buffer.discard()
            self._pending = None  # with the positions: one of them alone would give the messages back twice
        # A failover that cuts off a COMMIT may have lost earlier ones too.
        stored = {row.partition: row.next_offset for row in rows}
        for advance in unit.advances:
            offset = stored.get(advance.partition, advance.expected)
            if offset is None or offset < advance.expected:
                self.log_rewound(advance.partition, offset, f"expected offset {advance.expected}")
        level = logging.WARNING if was_in_doubt else logging.DEBUG
        extra = self._about(f"resolved_{resolution.name.lower()}", several=unit.advances)
        logger.log(level, "the outcome of %r was in doubt: %s", unit, resolution.value, extra=extra)
        return resolution

    def log_rewound(self, partition: Partition, offset: int | None, known: str) -> None:
        """Log that the ledger is at ``offset``, behind a later one that was committed."""
        self.counters.rewound += 1
        logger.warning(
            "%s: %s, the ledger is at %s: the database lost commits in a failover or a restore, effects and offsets "
            "together; going on from the ledger",
            partition,
            known,
            offset,
            extra=self._about("rewound", partition=partition, offset=offset),
        )

    def _classify(self, unit: Unit, error: BaseException) -> None:
        """Read the rows of a unit that could not advance, and raise what is wrong with them.

        Return if that was nothing several times in a row: then the error is a statement's of the handler, or a
        trigger's, with our SQLSTATE.
        """
        try:
            rows = self.ledger.read(sorted(a.partition for a in unit.advances))
        except psycopg.Error:
            # As after a COMMIT without an answer: the next try takes the rows, and by that learns whose they are.
            self._pending = Pending(unit, Sent.COMMIT)
            raise errors.OutcomePending(_told(unit, "the ledger did not advance and cannot be read now")) from error
        self._pending = None
        with self.ownership.changing():
            conflicts = self.ownership.classify(unit.advances, rows)
            self._requeue(unit)
        stored = {row.partition: row for row in rows}
        # The worst first: where several partitions are wrong, one error names one of them.
        worst = (Conflict.MISSING, Conflict.RECREATED, Conflict.REWOUND, Conflict.FENCED, Conflict.AHEAD)
        wrong = [a for conflict in worst for a in unit.advances if conflicts[a.partition] is conflict]
        if not wrong:
            self._patience.failed(_batch(unit), time.monotonic(), by_statement=True)
            if self._patience.is_handlers:
                return
            raise errors.Redelivered(_told(unit, "its rows were changed and changed back")) from error
        advance, group = wrong[0], self.ledger.group_id
        conflict, row = conflicts[advance.partition], stored.get(advance.partition)
        self.counters.count(conflict)
        place = f"{advance.partition} of group {group!r}"
        if row is None:
            missing = row_missing(group, self.ledger.session.schema, advance.partition)
            raise errors.Redelivered(_told(unit, str(missing))) from error
        if conflict is Conflict.RECREATED:
            told = f"{place}: started with topic id {advance.topic_id}, the ledger has {row.topic_id}"
            raise errors.Redelivered(_told(unit, told)) from error
        if conflict is Conflict.REWOUND:
            raise errors.LedgerRewound(
                f"{place}: expected offset {advance.expected}, the ledger is back at {row.next_offset}: the database "
                "lost commits in a failover, effects and offsets together; going on from the ledger"
            ) from error
        if conflict is Conflict.AHEAD:
            told = f"{place}: expected offset {advance.expected}, the ledger is at {row.next_offset}"
            raise errors.AlreadyApplied(told) from error
        owner = row.owner_name or row.owner_instance if row.owner_token else "nobody, it was reset or released"
        told = f"{place} is owned by {owner} now (owner epoch {row.owner_epoch})"
        if self._is_late(unit):
            told += (
                f", as it took longer than max_unit_seconds={unit.work.max_unit_seconds:g}: the next has half of its "
                "messages at most. Work that takes its time needs run(handler, in_thread=True), or a larger "
                "max.poll.interval.ms"
            )
            self._outlasted += unit.given == 1
            if self._outlasted == TRIES:
                unit.fault = Fault.OTHER
                raise errors.UnitTooSlow(_told(unit, f"{told}. {TRIES} single messages in a row did")) from error
        raise errors.Fenced(_told(unit, told)) from error

    def _halt(self, unit: Unit, decision: Decision, cause: BaseException | None) -> NoReturn:
        """Fail for good, here and in whatever process acquires the partitions next."""
        kind: type[errors.HandlerCommitted | errors.TransactionOutcomeUnknown]
        first = unit.advances[0].partition
        mend = f"or each partition: {reset_command(self.ledger.group_id, self.ledger.session.schema, first)}"
        if decision is Decision.HALT_UNKNOWN:
            kind, wrong, mend = errors.TransactionOutcomeUnknown, str(cause), f"F{mend}"
        else:
            reason = (
                f"the transaction that {unit!r} joined was committed without its offsets"
                if unit.work.is_joined
                else f"the handler committed a transaction by itself with the messages of {unit!r}"
            )
            kind, wrong = errors.HandlerCommitted, f"{reason}: its effects are durable, the offset is not"
            what = "Take COMMIT out of the handler and out of what it calls, decide which messages took effect, then "
            mend = f"{what}f{mend}"
        try:
            halted = retry_for(_HALT_SECONDS)(self.ledger.halt, unit.advances, reason=wrong)
            left = [a for a in unit.advances if a.partition not in halted]
            rows = {row.partition: row for row in self.ledger.read([a.partition for a in left])} if left else {}
            reasons = []
            for advance in left:
                if (row := rows.get(advance.partition)) is None:
                    why = "has no row"
                elif row.topic_id != advance.topic_id:
                    why = "belongs to another topic of that name by now"
                else:
                    why = (
                        f"went on from {advance.expected} to {row.next_offset} under another owner (owner epoch "
                        f"{row.owner_epoch}), which has applied these messages, too"
                    )
                reasons.append(f"{advance.partition} {why}")
            missed = "; ".join(reasons)
        except psycopg.Error as trouble:
            left, missed = list(unit.advances), f"could not be halted in the ledger: {str(trouble).strip()}"
            halted = set()
        done = f"Halted until an operator resets them: {_names(halted)}. " if halted else ""
        undone = f"NOT halted: {_names(a.partition for a in left)}, {missed}. " if left else ""
        failure = self.failed = kind(f"{wrong}. {done}{undone}{mend}")
        failure.__cause__ = cause
        self._pending = None
        if left:
            logger.critical("%s", failure, extra=self._about("halt_failed", several=left))
        raise failure

    def _raise_fault(self, unit: Unit, error: BaseException, *, lost: bool, began: bool) -> None:
        """Raise what the outcome table says of ``error``, or return if it is to propagate itself."""
        if not isinstance(error, Exception):
            return
        if (own := own_error(error)) is not None:
            unit.fault = Fault.HANDLER if isinstance(own, errors.TransactionAborted) else Fault.OTHER
            if own is not error:
                raise own from None  # the group has it, and would be its own cause
            return
        unit.fault = Fault.OTHER
        refuse_lost(self.ledger.session, error)
        fault = classify(error, connection_lost=lost)
        several, patience = unit.given > 1, self._patience
        # End what would go on for ever: say whose fault it is that these messages failed so often. Every one of these
        # tries had a transaction that began, so the server answers us.
        may_be_blamed = began and fault in _NOBODYS and not unit.is_taken
        if may_be_blamed and fault is Fault.ENVIRONMENT and is_by_statement(error, connection_lost=lost):
            # Failed often enough, or a part of what did, which can be cut further.
            is_part = all(a.next_offset <= self._suspects.get(a.partition, -1) for a in unit.advances)
            is_suspect = patience.is_handlers or (several and is_part)
            if is_suspect and sqlstate_of(error) == READ_ONLY:
                # Another connection tells whether the server itself refuses to write.
                self.ledger.session.discard()
                try:
                    self.ledger.read(sorted(a.partition for a in unit.advances))  # locks rows, which is writing
                except psycopg.Error:
                    is_suspect = False
            if is_suspect:
                fault = Fault.HANDLER
                if patience.by_statement == TRIES:
                    text = (
                        "%r failed %s times in a row while the database server answers, so its statements are at "
                        "fault: %s"
                    )
                    extra = self._about("tried_enough", several=unit.advances)
                    logger.warning(text, unit, TRIES, text_of(error), extra=extra)
                self._suspects = {a.partition: a.next_offset for a in unit.advances} if several else self._suspects
                self._troubles = 0
        elif may_be_blamed and patience.is_overdue:
            unit.fault = Fault.OTHER
            what = f"nothing could be committed for {PATIENCE_SECONDS:g} s: {text_of(error)}"
            raise errors.NoProgress(_told(unit, what)) from error
        elif may_be_blamed and patience.is_out and several:
            self.limit = max(1, unit.given // 2)  # perhaps there is less to collide with, or to hold
        unit.fault = fault
        if fault is Fault.DURATION:
            self.limit = max(1, unit.given // 2)
            if unit.given == 1:
                raise errors.UnitTooSlow(
                    _told(unit, f"one message is not done in the time that is allowed: {text_of(error)}")
                ) from error
        if fault is Fault.ENVIRONMENT:
            self.ledger.session.discard()  # a live connection may lead to what was the primary once
            self._troubles += 1
            self.not_before = time.monotonic() + min(_TROUBLE_SECONDS, 0.05 * 2.0**self._troubles)
        if fault in (Fault.CONFLICT, Fault.ENVIRONMENT, Fault.DURATION):
            raise errors.Redelivered(_told(unit, text_of(error))) from error


def _told(unit: Unit, what: str) -> str:
    return f"{what} ({unit!r}); nothing is lost, the messages come again if they did not take effect"


def _batch(unit: Unit) -> tuple[tuple[Partition, int, int], ...]:
    return tuple((a.partition, a.expected, a.next_offset) for a in unit.advances)


def _names(partitions: Iterable[Partition]) -> str:
    return ", ".join(map(str, sorted(partitions)))
