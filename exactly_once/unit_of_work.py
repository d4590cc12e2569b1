"""Unit of work: one guarded transaction that moves offsets together with effects.

It knows the database side only; what becomes of the messages is decided by :mod:`.settlement`.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from .errors import ConfigurationError, TransactionAborted, TransactionBusy, TransactionEnded
from .failpoints import failpoint, is_armed
from .ledger import Ledger
from .libpq import send
from .model import Advance
from .outcome import FOREIGN_TRANSACTION, driver_error
from .session import Begun, Connection, is_lost


class UnitOfWork:
    """BEGIN, effects, guards, advance, COMMIT; all of it durable or nothing."""

    def __init__(self, ledger: Ledger, *, isolation: str = "READ COMMITTED") -> None:
        self._ledger = ledger
        self._isolation = isolation
        self._connection: Connection | None = None
        self.begun: Begun | None = None
        self.is_unknown = False
        """Whether COMMIT was sent and nobody has told yet what came of it."""
        self.is_joined = False
        """Whether the transaction is somebody else's."""
        self.is_advanced = False
        """Whether the ledger was moved in a joined transaction."""

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
    def is_lost(self) -> bool:
        """Whether the connection on which the transaction began is gone."""
        return self._connection is None or is_lost(self._connection)

    def begin(self) -> None:
        """Open the transaction and learn its id, in one round trip."""
        self.begun = self._ledger.session.begin(self._isolation)
        self._connection = self._ledger.session.connection
        failpoint("begun")

    def join(self, connection: Connection) -> None:
        """Take part in a transaction that somebody else opened and will commit.

        :raises ConfigurationError: when no transaction is open there, or it is a connection of ours.
        """
        if self._ledger.session.owns(connection):
            raise ConfigurationError("join() is for a transaction of yours; `with unit:` has one on this connection")
        if connection.info.transaction_status is TransactionStatus.IDLE and connection.autocommit:
            raise ConfigurationError(
                "join() was given a connection in autocommit mode without a transaction; open one around it"
            )
        self._connection, self.is_joined = connection, True
        self.begun = self._ledger.session.join(connection)
        failpoint("begun")

    def advance(self, advances: Sequence[Advance]) -> None:
        """Move the ledger in the joined transaction; its owner's COMMIT makes it durable."""
        assert self.begun is not None
        self.guard()
        failpoint("guarded")
        self._ledger.advance(self.connection, advances, xid=self.begun.xid, commit=False)
        self.is_advanced = True
        failpoint("advanced")

    def commit(self, advances: Sequence[Advance]) -> None:
        """Check that the transaction is still the one that began, advance the ledger, COMMIT.

        :raises HandlerError: when the handler ended or broke the transaction.
        :raises BaseException: whatever happened after COMMIT was sent; :attr:`is_unknown` is set then.
        :raises psycopg.Error: for what failed before COMMIT could be reached.
        """
        self.guard()
        failpoint("guarded")
        self.is_unknown = True
        try:
            self._advance_and_commit(advances)
            failpoint("committed")
        except BaseException as error:
            status = self.connection.info.transaction_status
            self.is_unknown = status not in (TransactionStatus.INERROR, TransactionStatus.INTRANS)
            driver = driver_error(error)
            if driver is not None and driver.sqlstate == FOREIGN_TRANSACTION:
                raise transaction_ended() from error
            raise

    def _advance_and_commit(self, advances: Sequence[Advance]) -> None:
        assert self.begun is not None
        if is_armed("advanced"):
            self._ledger.advance(self.connection, advances, xid=self.begun.xid, commit=False)
            failpoint("advanced")
            send(self.connection, b"COMMIT")
        else:
            self._ledger.advance(self.connection, advances, xid=self.begun.xid, commit=True)

    def roll_back(self) -> None:
        """End the transaction without effects; a connection that cannot do it is discarded."""
        self._ledger.session.roll_back()

    def fate(self) -> str:
        """Find out what became of the transaction: ``committed`` or ``aborted``; raises as the session does."""
        assert self.begun is not None
        return self._ledger.session.fate(self.begun)

    def guard(self) -> None:
        """Refuse to go on when the handler left the transaction in another state.

        :raises HandlerError: saying what the handler did, and what it should do instead.
        """
        connection = self.connection
        if is_lost(connection):
            raise psycopg.OperationalError("the connection was lost inside the unit of work")
        if connection.pgconn.pipeline_status != PipelineStatus.OFF:
            raise TransactionBusy(
                "the handler left a pipeline open on unit.connection; leave its block before returning"
            )
        status = connection.info.transaction_status
        if status is TransactionStatus.INERROR:
            raise TransactionAborted(
                "a SQL error was swallowed: the transaction is aborted and nothing of it can be stored. Let the error "
                "propagate, or put the statement into `with unit.connection.transaction():` and catch it outside"
            )
        if status is TransactionStatus.ACTIVE:
            raise TransactionBusy("the handler left a COPY open on unit.connection; use it in a with block")
        if status is TransactionStatus.IDLE and self.is_joined:
            raise TransactionEnded("the transaction was ended inside the block of join(); end it after the block")
        if status is TransactionStatus.IDLE:
            raise transaction_ended()


def transaction_ended() -> TransactionEnded:
    """Make the error for a handler that rolled back by itself."""
    return TransactionEnded(
        "the handler ended the transaction of the unit (ROLLBACK); nothing of it was stored. The unit commits by "
        "itself; raise an exception to undo it, use `with unit.connection.transaction():` for a part of it"
    )
