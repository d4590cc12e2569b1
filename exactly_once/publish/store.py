"""Store: the connection of the filters that live in Postgres; opened anew when it is lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import psycopg

from exactly_once.errors import ConfigurationError
from exactly_once.ledger import migrate as schemas
from exactly_once.ledger.migrate import check_schema_name
from exactly_once.ledger.session import Connection, connector, cursor_on, dispose, is_lost
from exactly_once.ledger.sql import query

from .errors import FilterUnavailable, ProducerFenced
from .guard import Guard

T = TypeVar("T")
Rows = Sequence[tuple[Any, ...]]

_FENCED = "EO003"
_OLD_MAP = "EO005"


class Store:
    """Runs named queries, each its own transaction; one thread at a time.

    A statement whose answer was lost is run a second time on a new connection: callers pass only what may run twice.
    """

    def __init__(
        self,
        conninfo: str | None = None,
        *,
        connect: Callable[[], Connection] | None = None,
        schema: str = "exactly_once",
        migrate: bool = False,
    ) -> None:
        if (conninfo is None) == (connect is None):
            raise ConfigurationError("give either conninfo= (a connection string) or connect= (a callable), not both")
        check_schema_name(schema)
        self.schema = schema
        self._connect = connect or connector(conninfo or "")
        self._lock = threading.RLock()
        self._guard = Guard("this connection of filters")
        self._connection: Connection | None = None
        try:
            with self._using() as connection:
                if migrate:
                    schemas.migrate(connection, schema)
                schemas.check(connection, schema)
        except psycopg.OperationalError as error:
            raise self._translated(error) from error

    def run(self, name: str, /, **parameters: Any) -> Rows:
        """Run a query and return its rows.

        :raises FilterUnavailable: when the database cannot be asked.
        :raises ProducerFenced: when the owner that the query names was fenced.
        """
        return self.each(lambda connection: self.on(connection, name, **parameters))

    def on(self, connection: Connection, name: str, /, **parameters: Any) -> Rows:
        """Run a query on a connection of :meth:`each`."""
        cursor = cursor_on(connection).execute(query(name, self.schema), parameters or None, prepare=False)
        return cursor.fetchall() if cursor.description else []

    def each(self, work: Callable[[Connection], T]) -> T:
        """Call ``work`` with the connection, and once more if the connection was lost meanwhile."""
        try:
            with self._using() as connection:
                return work(connection)
        except psycopg.OperationalError as error:
            if self._connection is not None:
                raise self._translated(error) from error
        except psycopg.Error as error:
            raise self._translated(error) from error
        try:
            with self._using() as connection:
                return work(connection)
        except psycopg.Error as error:
            raise self._translated(error) from error

    def close(self) -> None:
        """Close the connection; the next use opens another. A child leaves that of its parent alone."""
        if not self._guard.is_ours():
            return
        with self._lock:
            self._discard()

    @contextlib.contextmanager
    def _using(self) -> Iterator[Connection]:
        self._guard.check()
        with self._lock:
            if self._connection is None or is_lost(self._connection):
                self._discard()
                self._connection = self._connect()
                self._connection.autocommit = True
            try:
                yield self._connection
            except psycopg.Error as error:
                # A server that is no primary any more is left, too.
                if is_lost(self._connection) or isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
                    self._discard()
                raise
            except BaseException:
                self._discard()  # an interruption may have left an answer on the wire
                raise

    def _discard(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                dispose(self._connection)
        self._connection = None

    @staticmethod
    def _translated(error: psycopg.Error) -> Exception:
        if error.sqlstate == _OLD_MAP:
            return ProducerFenced(str(error.diag.message_primary))
        if error.sqlstate == _FENCED:
            return ProducerFenced("another process has fenced this owner; stop, or start anew")
        if isinstance(error, psycopg.OperationalError):
            return FilterUnavailable(f"the database of the filter cannot be asked: {error}")
        return error
