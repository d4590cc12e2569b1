"""Unit of work: one guarded transaction that moves offsets together with effects.

It knows the database side only; what becomes of the messages is decided by :mod:`.commit`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import get_ident

import psycopg
from psycopg import abc, adapt
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from exactly_once._failpoints import failpoint, is_armed
from exactly_once._model import Advance, Sent
from exactly_once.errors import ConfigurationError, TransactionAborted, TransactionBusy, TransactionEnded

from .libpq import Bound, bind, check, send, send_together
from .outcome import FOREIGN_TRANSACTION, sqlstate_of
from .session import Begun, Connection, is_lost, open_blocks, psycopg_connection
from .sql import query
from .store import LedgerStore

_ENDED_INSIDE = "the transaction was ended inside the block of join(); end it after the block"
_COPYING = (ExecStatus.COPY_IN, ExecStatus.COPY_OUT, ExecStatus.COPY_BOTH)


class UnitOfWork:
    """BEGIN, effects, guards, advance, COMMIT; all of it durable or nothing."""

    def __init__(
        self, ledger: LedgerStore, *, isolation: str = "READ COMMITTED", max_unit_seconds: float = math.inf
    ) -> None:
        self._ledger = ledger
        self._isolation = isolation
        # How long the unit may take before the next one is halved, and before peers doubt that it is alive.
        self.max_unit_seconds = max_unit_seconds
        self._connection: Connection | None = None
        self.begun: Begun | None = None  # none before begin() or join(), as with the connection
        # How many blocks of psycopg's transaction() were open when the unit began: around it, in a joined transaction.
        self._blocks = 0
        # Written by :meth:`join`, :meth:`advance` and :meth:`commit`, for what each sends.
        self.sent = Sent.NOTHING
        # Whether other threads may use the connection, still when the handler has failed. What such a one executes then
        # must not get into the next transaction.
        self.is_shared = False
        # Statements that wait for the next flush, or for COMMIT.
        self._deferred: list[Bound] = []
        # Whether some of them are off the list, and nobody knows yet whether they were executed.
        self._is_flushing = False
        # What converts their parameters, for each thread of the handler, since it keeps what it converts; new ones
        # after a flush, behind which encoding or adapters may change.
        self._transformers: dict[int, abc.Transformer] = {}

    @property
    def connection(self) -> Connection:
        """The connection that the transaction is open on."""
        assert self._connection is not None
        return self._connection

    @property
    def schema(self) -> str:
        """The schema of the ledger."""
        return self._ledger.session.schema

    @property
    def group_id(self) -> str:
        """The consumer group whose offsets move."""
        return self._ledger.group_id

    @property
    def is_unknown(self) -> bool:
        """Whether COMMIT was sent and was not answered."""
        return self.sent is Sent.COMMIT

    @property
    def is_joined(self) -> bool:
        """Whether the transaction is somebody else's."""
        return self.sent in (Sent.JOINED, Sent.ADVANCE)

    @property
    def is_lost(self) -> bool:
        """Whether the connection on which the transaction began is gone."""
        return self._connection is None or is_lost(self._connection)

    def begin(self) -> None:
        """Open the transaction and learn its id, in one round trip."""
        self.begun = self._ledger.session.begin(self._isolation, may_take=self.max_unit_seconds)
        self._connection = self._ledger.session.connection
        failpoint("begun")

    def join(self, connection: Connection) -> None:
        """Take part in a transaction that somebody else opened and will commit.

        :raises ConfigurationError: when no transaction is open there, it is a connection of ours, none of psycopg's, or
            in a pipeline.
        """
        psycopg_connection(connection, "join() was given")
        if self._ledger.session.owns(connection):
            raise ConfigurationError("join() is for a transaction of yours; `with unit:` has one on this connection")
        if connection.info.transaction_status is TransactionStatus.IDLE and connection.autocommit:
            raise ConfigurationError(
                "join() was given a connection in autocommit mode without a transaction; open one around it"
            )
        if connection.pgconn.pipeline_status != PipelineStatus.OFF:
            raise ConfigurationError("join() was given a connection in pipeline mode; open that inside the block")
        self._connection, self.sent, self._blocks = connection, Sent.JOINED, open_blocks(connection)
        self.begun = self._ledger.session.join(connection, may_take=self.max_unit_seconds)
        failpoint("begun")

    def advance(self, advances: Sequence[Advance]) -> None:
        """Move the ledger in the joined transaction; its owner's COMMIT makes it durable."""
        assert self.begun is not None
        self.guard()
        failpoint("guarded")
        try:
            self._ledger.advance(self.connection, advances, xid=self.begun.xid, commit=False)
        except psycopg.Error as error:
            if error.sqlstate == FOREIGN_TRANSACTION:
                raise TransactionEnded(_ENDED_INSIDE) from error
            _name_role(error)
            raise
        self.sent = Sent.ADVANCE
        failpoint("advanced")

    def defer(self, statement: abc.Query, params: abc.Params | None) -> None:
        """Keep a statement until :meth:`flush` or :meth:`commit`, with its parameters as they are now."""
        transformer = self._transformers.get(get_ident())
        if transformer is None:
            transformer = self._transformers[get_ident()] = adapt.Transformer(self.connection)
        bound = bind(transformer, statement, params)
        self._deferred.append(bound)  # of the list that is there now: another thread may have flushed meanwhile

    @property
    def can_flush(self) -> bool:
        """Whether statements wait that can be executed now: not behind an error, in a pipeline, or in a COPY."""
        if not self._deferred or self.connection.lock.locked():  # a COPY keeps it locked
            return False
        pgconn = self.connection.pgconn
        is_open = pgconn.transaction_status == TransactionStatus.INTRANS
        return is_open and pgconn.pipeline_status == PipelineStatus.OFF

    def flush(self) -> None:
        """Execute what was deferred, in order and in one round trip.

        :raises TransactionEnded: when there is no transaction, or one of the statements ends it.
        :raises psycopg.Error: for one that fails.
        """
        if not self._deferred:
            return
        with self.connection.lock:  # as cursors do: another thread of the handler may execute something just now
            if not self._deferred:
                return
            self._is_flushing = True
            deferred, self._deferred, self._transformers = self._deferred, [], {}
            if self.connection.pgconn.transaction_status == TransactionStatus.IDLE:
                raise transaction_ended()
            # Outside of a transaction the Sync would commit what one of them did behind a ROLLBACK of its own.
            still_open = [Bound(query(name, self.schema).as_bytes(None)) for name in ("savepoint", "release_savepoint")]
            try:
                self._check(deferred, send_together(self.connection, [*deferred, *still_open]))
            except psycopg.errors.NoActiveSqlTransaction as error:
                raise transaction_ended() from error
            except psycopg.Error:
                self._is_flushing = False  # the handler may know what to do, in a savepoint say
                raise
            self._is_flushing = False

    def commit(self, advances: Sequence[Advance]) -> None:
        """Check that the transaction is still the one that began, advance the ledger, COMMIT.

        :raises HandlerError: when the handler ended or broke the transaction.
        :raises BaseException: whatever happened after COMMIT was sent; :attr:`is_unknown` is true then.
        :raises psycopg.Error: for what failed before COMMIT could be reached.
        """
        self.guard()
        failpoint("guarded")
        assert self.begun is not None
        self.sent = Sent.COMMIT
        is_refused = False  # whether the server refused a statement before COMMIT, so that COMMIT was not reached
        try:
            if is_armed("advanced"):
                self.flush()
                self._ledger.advance(self.connection, advances, xid=self.begun.xid, commit=False)
                failpoint("advanced")
                send(self.connection, b"COMMIT")
            elif self._deferred:
                deferred, self._deferred = self._deferred, []
                advance = self._ledger.advance_statement(self.connection, advances, xid=self.begun.xid)
                own = [Bound(self._ledger.own_time), Bound(advance), Bound(b"COMMIT")]
                results = send_together(self.connection, [*deferred, *own])
                # What a connection that is lost said last may be a pooler's word, who does not know.
                failed = any(result.status == ExecStatus.FATAL_ERROR for result in results[:-1])
                is_refused = failed and not self.is_lost
                self._check(deferred, results)
            else:
                self._ledger.advance(self.connection, advances, xid=self.begun.xid, commit=True)
            failpoint("committed")
        except BaseException as error:
            status = self.connection.info.transaction_status
            if is_refused or status in (TransactionStatus.INERROR, TransactionStatus.INTRANS):
                self.sent = Sent.NOTHING
            if sqlstate_of(error) == FOREIGN_TRANSACTION:
                raise transaction_ended() from error
            _name_role(error)
            raise

    def _check(self, deferred: Sequence[Bound], results: Sequence[PGresult]) -> None:
        """Raise the error of the first statement that failed; one that was deferred is named in a note."""
        if any(result.status in _COPYING for result in results):
            raise TransactionBusy("a statement that was deferred is a COPY, which needs data; use unit.copy()")
        try:
            check(self.connection, results)
        except psycopg.Error as error:
            failed = next(n for n, result in enumerate(results) if result.status == ExecStatus.FATAL_ERROR)
            if failed < len(deferred):
                text = deferred[failed].query.decode(errors="replace")
                error.add_note(f"statement {failed + 1} of {len(deferred)} that were deferred: {text}")
            raise

    def roll_back(self) -> None:
        """End the transaction without effects; a connection that cannot do it is discarded."""
        if not self.is_joined and self._connection is not None and (self.is_shared or self._connection.lock.locked()):
            self._ledger.session.discard()  # an interrupt, too, can leave it locked: nobody else could use it
        self._ledger.session.roll_back()

    def outcome(self) -> str:
        """Find out what became of the transaction: ``committed`` or ``aborted``; raises as the session does."""
        assert self.begun is not None
        return self._ledger.session.outcome(self.begun)

    def guard(self) -> None:
        """Refuse to go on when the handler left the transaction in another state.

        :raises HandlerError: saying what the handler did, and what it should do instead.
        """
        connection = self.connection
        if is_lost(connection):
            raise psycopg.OperationalError("the connection was lost inside the unit of work")
        if self.is_shared and connection.lock.locked():
            raise TransactionBusy(
                "a thread of the handler still uses unit.connection: wait for all of its threads before it returns"
            )
        if connection.pgconn.pipeline_status != PipelineStatus.OFF:
            raise TransactionBusy(
                "the handler left a pipeline open on unit.connection; leave its block before returning"
            )
        if open_blocks(connection) != self._blocks:
            raise TransactionBusy(
                "a block of `with connection.transaction():` crosses the end of the unit, in a generator that is kept "
                "perhaps: its own end would roll back, or keep, what is not in it. Enter and leave such a block within "
                "the unit, or, with join(), around it"
            )
        status = connection.info.transaction_status
        if self._is_flushing:
            raise TransactionAborted(
                "the handler caught an exception that cut short what it had deferred, such as one of a signal handler: "
                "nothing of the unit can be stored. Let it propagate"
            )
        if status is TransactionStatus.INERROR:
            raise TransactionAborted(
                "a SQL error was swallowed: the transaction is aborted and nothing of it can be stored. Let the error "
                "propagate, or put the statement into `with unit.connection.transaction():` and catch it outside"
            )
        if status is TransactionStatus.ACTIVE:
            raise TransactionBusy(
                "the handler left a COPY or a stream() open on unit.connection; use the COPY in a with block, and read "
                "the stream to its end"
            )
        if status is TransactionStatus.IDLE and self.is_joined:
            raise TransactionEnded(_ENDED_INSIDE)
        if status is TransactionStatus.IDLE:
            raise transaction_ended()


def _name_role(error: BaseException) -> None:
    """Add to a refusal behind the handler what it mostly comes from; one of a deferred statement has a note already."""
    if isinstance(error, psycopg.errors.InsufficientPrivilege) and not hasattr(error, "__notes__"):
        error.add_note(
            "raised behind the handler, when the offsets were to be moved: its role has no grant on the ledger, or no "
            "more (`exactly-once migrate --sql --role NAME` prints the grants), or the handler has left SET LOCAL ROLE "
            "behind (RESET ROLE before it returns)"
        )


def transaction_ended() -> TransactionEnded:
    """Make the error for a handler that rolled back by itself."""
    return TransactionEnded(
        "the handler ended the transaction of the unit (ROLLBACK); nothing of that was stored, but what it committed "
        "by itself afterwards is. The unit commits by itself; raise an exception to undo it, use `with "
        "unit.connection.transaction():` for a part of it"
    )
