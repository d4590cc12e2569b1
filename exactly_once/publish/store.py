"""Store: the connection of the filters that live in Postgres; opened anew when it is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from exactly_once.errors import ConfigurationError
from exactly_once.kafka.guard import Guard
from exactly_once.kafka.kinds import check_kinds
from exactly_once.ledger import migrate as schemas
from exactly_once.ledger.commands import grants_hint
from exactly_once.ledger.migrate import check_schema_name
from exactly_once.ledger.session import Connection, Session, connector, execute

from .errors import FilterUnavailable, ProducerFenced

T = TypeVar("T")
Rows = Sequence[tuple[Any, ...]]

_FENCED = "EO003"
_OLD_MAP = "EO005"
# A server that takes no writes is a standby, or a primary that was one before: another connection may lead elsewhere.
# Two of the server's time-outs end the session, and psycopg takes them for internal errors.
_AWAY = (
    psycopg.OperationalError,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.TransactionTimeout,
    psycopg.errors.IdleInTransactionSessionTimeout,
)
# What may be different on the next connection; at the start nobody would close this one.
_REFUSALS = (psycopg.errors.ReadOnlySqlTransaction, psycopg.errors.InsufficientPrivilege)


class Store:
    """Runs named queries, each its own transaction; one thread at a time.

    A statement whose answer was lost is run a second time on a new connection: callers pass only what may run twice.
    ``connect`` gives connections without an open transaction.
    """

    def __init__(
        self,
        conninfo: str | None = None,
        *,
        connect: Callable[[], Connection] | None = None,
        schema: str = "exactly_once",
        migrate: bool = False,
    ) -> None:
        check_kinds(Store.__init__, locals())
        if (conninfo is None) == (connect is None):
            raise ConfigurationError("give one of conninfo= (a connection string) and connect= (a callable)")
        check_schema_name(schema)
        self.schema = schema
        self._session = Session(connect or connector(conninfo or ""), schema=schema, owns_rows=False)
        self._lock = threading.RLock()
        self._guard = Guard("this connection of filters")

        def prepare(connection: Connection) -> None:
            if migrate:
                schemas.migrate(connection, schema)
            schemas.check(connection, schema)

        self.each(prepare)

    def run(self, name: str, /, **parameters: Any) -> Rows:
        """Run a query and return its rows.

        :raises FilterUnavailable: when the database cannot be asked, or its role lacks grants.
        :raises ProducerFenced: when the owner that the query names was fenced.
        """
        return self.each(lambda connection: self.on(connection, name, **parameters))

    def on(self, connection: Connection, name: str, /, **parameters: Any) -> Rows:
        """Run a query on a connection of :meth:`each`."""
        cursor = execute(connection, self.schema, name, **parameters)
        return cursor.fetchall() if cursor.description else []

    def each(self, work: Callable[[Connection], T]) -> T:
        """Call ``work`` with the connection, and once more if the connection was lost meanwhile."""
        is_second = False
        while True:
            try:
                return self._use(work)
            except psycopg.Error as error:
                was_lost = isinstance(error, _AWAY) and self._session.lost
                if is_second or not was_lost:
                    raise self._translated(error) from error
            is_second = True

    def close(self) -> None:
        """Close the connection; the next use opens another. A child leaves that of its parent alone."""
        if not self._guard.is_ours():
            return
        with self._lock:
            self._session.discard()

    def _use(self, work: Callable[[Connection], T]) -> T:
        # No context manager made of a generator: one that is interrupted at its edge keeps the lock until it is freed.
        self._guard.check()
        with self._lock:
            try:
                connection = self._session.connection
                if connection.info.transaction_status is not TransactionStatus.IDLE:
                    raise ConfigurationError(
                        "the connection of filters is in an open transaction, which nobody would commit: no mark would "
                        "last. connect= must commit what it executes, or connect with autocommit=True"
                    )
                if self._session.autocommits_safely:
                    return work(connection)
                # READ COMMITTED, because several may change the same keys, and durable: a lost mark makes a duplicate.
                with connection.transaction():
                    self.on(connection, "publish_durably")
                    return work(connection)
            except psycopg.Error as error:
                if self._session.lost or isinstance(error, _REFUSALS):
                    self._session.discard()
                raise
            except BaseException:
                self._session.discard()  # an interruption may have left an answer on the wire
                raise

    def _translated(self, error: psycopg.Error) -> Exception:
        if error.sqlstate == _OLD_MAP:
            return ProducerFenced(str(error.diag.message_primary))
        if error.sqlstate == _FENCED:
            return ProducerFenced("another process has fenced this owner; stop, or start anew")
        if isinstance(error, _AWAY):
            return FilterUnavailable(f"the database of the filter cannot be asked: {error}")
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return FilterUnavailable(
                f"the database of the filter cannot be asked: its role lacks grants: {error.diag.message_primary}. "
                f"{grants_hint(self.schema)}"
            )
        return error
