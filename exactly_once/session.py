"""Session: the one connection of a consumer to Postgres, opened anew when it is lost.

Nothing is ever set for longer than a transaction, so a transaction pooler may stand in between.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from uuid import UUID, uuid4
from zlib import crc32

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from .errors import ConfigurationError, OutcomeLost
from .logs import about
from .redaction import without_secrets
from .sql import query

logger = logging.getLogger(__name__)

Connection = psycopg.Connection[Any]

_DEFAULTS = {
    # A half-open connection is covered by no server time-out. In sum these stay far below the
    # default max.poll.interval.ms of 300 seconds.
    "connect_timeout": "10",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
    # In an SQL_ASCII database psycopg would else give bytes for text.
    "client_encoding": "UTF8",
}
_END_WAIT_SECONDS = 10.0


class Begun(NamedTuple):
    """A transaction of ours: its id, the backend that runs it, the life of the server it began in."""

    xid: str
    pid: int
    server: str


def connector(conninfo: str) -> Callable[[], Connection]:
    """Return a callable that opens connections to ``conninfo`` as the library needs them.

    :raises ConfigurationError: when libpq cannot read ``conninfo``; its text is not repeated.
    """
    try:
        given = conninfo_to_dict(conninfo)
    except psycopg.Error:
        raise ConfigurationError(
            "conninfo is not a connection string that libpq understands; "
            "expected postgresql://user@host:port/database or key=value pairs"
        ) from None
    _refuse_misread(conninfo, given)
    complete = make_conninfo("", **{**_DEFAULTS, **given})

    def connect() -> Connection:
        try:
            return psycopg.connect(complete, autocommit=True, prepare_threshold=None)
        except psycopg.errors.ConnectionTimeout as error:  # the only one that does not say which server
            raise psycopg.errors.ConnectionTimeout(f"{server_of(conninfo)}: {error}") from None

    return hiding(connect)


def hiding(connect: Callable[[], Connection]) -> Callable[[], Connection]:
    """Return ``connect`` with errors that repeat nothing of a password, not even of one that was written wrongly."""

    @functools.wraps(connect)
    def hidden() -> Connection:
        try:
            connection: Any = connect()
        except psycopg.Error as error:
            text = without_secrets(str(error))
            if text == str(error):
                raise
            raise type(error)(text) from None
        if isinstance(connection, psycopg.AsyncConnection) or inspect.isawaitable(connection):
            if inspect.iscoroutine(connection):
                connection.close()
            raise ConfigurationError(
                f"connect= gave {type(connection).__name__}: the consumer needs psycopg.Connection, not the "
                "asynchronous one; docs/how-to/fastapi.md shows how both work side by side"
            )
        made: Connection = connection
        return made

    return hidden


def server_of(conninfo: str) -> str:
    """Name host, port and database of a connection string as libpq would fill them in, and nothing else."""
    defaults = {o.keyword.decode(): o.val.decode() for o in psycopg.pq.Conninfo.get_defaults() if o.val}
    given = {**defaults, **{k: str(v) for k, v in conninfo_to_dict(conninfo).items() if v}}
    if "service" in given and "host" not in given:
        return f"service {given['service']}"
    hosts = (given.get("host") or given.get("hostaddr") or "(local socket)").split(",")
    ports = given.get("port", "").split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    places = [f"{host}:{port or 5432}" for host, port in zip(hosts, ports, strict=False)]
    return f"{','.join(places)}/{given.get('dbname') or given.get('user') or ''}"


def _refuse_misread(conninfo: str, given: Mapping[str, Any]) -> None:
    """Refuse what libpq would take for another part than was meant, before an error repeats a piece of a password."""
    in_uri = re.match(r"postgres(?:ql)?://[^?/]*/([^?]*)", conninfo)
    names = [name for name in str(given.get("host") or "").split(",") if not name.startswith(("/", "@"))]
    ports = [port for port in str(given.get("port") or "").split(",") if port]
    if any("@" in name for name in [*names, in_uri[1] if in_uri else ""]) or not all(p.isdecimal() for p in ports):
        raise ConfigurationError(
            "conninfo: the host, the port or the database would contain an '@' or a piece of the password. Write "
            "characters of a password that mean something in a URI as %40 (@), %3A (:), %2F (/), %3F (?), %23 (#), or "
            "give it by PGPASSWORD or a password file"
        )


def address(connection: Connection) -> str:
    """Name host, port and database of a connection, and nothing secret."""
    info = connection.info
    return f"{info.host}:{info.port}/{info.dbname}"


class Session:
    """Owns the connection; begins, and finds out what became of, transactions on it."""

    def __init__(self, connect: Callable[[], Connection], *, schema: str, instance: UUID | None = None) -> None:
        self.schema = schema
        self.instance = instance or uuid4()
        self.marker = marker_of(self.instance, schema)
        self.connect = hiding(connect)
        self._connection: Connection | None = None
        self._server = ""
        self._closed = False
        marker = sql.Literal(self.marker)
        self._begin = {
            level: query("begin", schema, marker=marker, isolation=sql.SQL(level)).as_bytes(None)
            for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
        }

    @property
    def connection(self) -> Connection:
        """The live connection, opened if there is none.

        :raises psycopg.OperationalError: when the server cannot be reached.
        """
        if self._closed:
            raise psycopg.OperationalError("this consumer is closed")
        if self.lost:
            self.discard()
            connection = self.connect()
            if connection.info.transaction_status is TransactionStatus.IDLE:
                connection.autocommit = True
            self._server = self._ask_server(connection)
            self._connection = connection
        assert self._connection is not None
        if self._connection.info.transaction_status is TransactionStatus.IDLE and not self._connection.autocommit:
            self._connection.autocommit = True
        return self._connection

    @property
    def lost(self) -> bool:
        """Whether there is no connection that could still be used."""
        return self._connection is None or is_lost(self._connection)

    def discard(self) -> None:
        """Close the connection; the next use opens another."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
        self._connection = None

    def begin(self, isolation: str) -> Begun:
        """Open a transaction in one round trip and learn its id."""
        self.roll_back()  # an interruption may have left a transaction: nothing of it may get into this one
        connection = self.connection
        cursor = cursor_on(connection).execute(self._begin[isolation], prepare=False)
        xid, pid = last_row(cursor)
        # What a handler executes after a ROLLBACK of its own must not become durable by itself. There is no public
        # way to say so inside a transaction.
        connection._autocommit = False  # noqa: SLF001
        return Begun(xid, pid, self._server)

    def join(self, connection: Connection) -> Begun:
        """Learn the transaction that is open on somebody else's connection, and leave our mark on it."""
        marker = sql.Literal(self.marker)
        cursor = cursor_on(connection).execute(query("join", self.schema, marker=marker), prepare=False)
        return Begun(*last_row(cursor))

    def owns(self, connection: Connection) -> bool:
        """Tell whether this is our own connection."""
        return connection is self._connection

    @contextlib.contextmanager
    def ledger_transaction(
        self, *, lock_timeout_seconds: float, is_durable: bool = True
    ) -> Iterator[tuple[Connection, int]]:
        """Run a short transaction that only touches the ledger; yield connection and backend pid.

        Without ``is_durable`` nothing waits for the disk: for what may be lost, and for what only looks.
        """
        self.roll_back()  # as above
        connection = self.connection
        opening = query(
            "begin_ledger" if is_durable else "begin_not_durable",
            self.schema,
            marker=sql.Literal(self.marker),
            lock_timeout=sql.Literal(f"{int(lock_timeout_seconds * 1000)}ms"),
        )
        try:
            (pid,) = last_row(cursor_on(connection).execute(opening, prepare=False))
            yield connection, pid
            connection.execute("COMMIT", prepare=False)
        except psycopg.errors.ReadOnlySqlTransaction:
            self.discard()  # this server is not the primary any more; another connection may lead to the one that is
            raise
        except BaseException:
            self.roll_back()
            raise

    def roll_back(self) -> None:
        """End whatever transaction is open; a connection that cannot do even that is discarded."""
        if self._connection is None:
            return
        try:
            if self.lost or self._connection.info.transaction_status is TransactionStatus.ACTIVE:
                self.discard()
            elif self._connection.info.transaction_status is not TransactionStatus.IDLE:
                self._connection.execute("ROLLBACK", prepare=False)
        except psycopg.Error:
            self.discard()

    def status(self, begun: Begun) -> str | None:
        """Ask what became of a transaction: ``committed``, ``aborted``, ``in progress``, or None for nobody knows.

        :raises psycopg.Error: when the server cannot be asked now.
        """
        connection = self.connection
        if self._server != begun.server:
            # After a crash or a failover the ids of transactions that left no trace are given out
            # again, so the answer could be about somebody else's. Without our COMMIT ours is gone.
            extra = about("server_restarted")
            logger.warning("the database server was restarted; transaction %s did not survive", begun.xid, extra=extra)
            return "aborted"
        cursor = cursor_on(connection)
        cursor.execute(query("xact_status", self.schema), {"xid": begun.xid}, prepare=False)
        status: str | None = last_row(cursor)[0]
        return status

    def fate(self, begun: Begun) -> str:
        """Find out what became of a transaction whose COMMIT was never sent by us.

        Return ``committed`` or ``aborted``. One that still runs on a lost connection is ended first.

        :raises psycopg.OperationalError: when the server cannot be asked now.
        :raises OutcomeLost: when the server does not know.
        """
        deadline = time.monotonic() + _END_WAIT_SECONDS
        is_new = self.lost
        while True:
            try:
                status = self.status(begun)
            except psycopg.Error:
                if is_new or not self.lost:
                    raise
                is_new = True  # the connection had been lost unnoticed: ask on another one
                continue
            if status in ("committed", "aborted"):
                return status
            if status is None or time.monotonic() > deadline:
                raise OutcomeLost(
                    f"Postgres cannot say what became of transaction {begun.xid} (it answered {status!r}); "
                    "look whether its effects are there, then use exactly-once reset"
                )
            self._end(begun)

    def end(self, begun: Begun) -> None:
        """End a transaction of ours from outside, while another thread uses the connection; best effort."""
        try:
            with self.connect() as connection:
                parameters = {"xid": begun.xid, "marker": self.marker}
                cursor_on(connection).execute(query("end_transaction", self.schema), parameters, prepare=False)
        except psycopg.Error as error:
            logger.warning(
                "transaction %s could not be ended, so the fence must stop it: %s",
                begun.xid,
                error,
                extra=about("end_failed"),
            )

    @contextlib.contextmanager
    def cut_after(self, seconds: float) -> Iterator[None]:
        """Cut the connection if the block takes longer: what waits in it for a server that stands still fails then."""
        timer = threading.Timer(seconds, self._cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _cut(self) -> None:
        connection = self._connection
        if connection is None or connection.closed:
            return
        logger.warning("Postgres stands still; the connection is cut", extra=about("connection_cut"))
        # The socket and not the connection, which the thread that waits has locked. It may be closed at this moment.
        with contextlib.suppress(OSError, psycopg.Error):
            duplicate = socket.socket(fileno=os.dup(connection.fileno()))
            with duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection for good."""
        self._closed = True
        self.discard()

    def _end(self, begun: Begun) -> None:
        """End the backend that still runs the transaction, and wait until it is gone."""
        parameters = {"xid": begun.xid, "marker": self.marker}
        cursor_on(self.connection).execute(query("end_transaction", self.schema), parameters, prepare=False)
        self.connection.execute(query("give_time", self.schema), prepare=False)

    def _ask_server(self, connection: Connection) -> str:
        return str(last_row(cursor_on(connection).execute(query("server", self.schema), prepare=False))[0])


def marker_of(instance: UUID, schema: str) -> str:
    """Name an instance to the server; the schema is told too, because rows of other schemas are not seen here."""
    return f"exactly_once:{instance}:{crc32(schema.encode()):08x}"


def is_lost(connection: Connection) -> bool:
    """Tell whether a connection is closed, broken or in an unknown state."""
    return connection.closed or connection.broken or connection.info.transaction_status is TransactionStatus.UNKNOWN


def cursor_on(connection: Connection) -> psycopg.Cursor[tuple[Any, ...]]:
    """Make a cursor that gives tuples and prepares nothing, however the connection is set up."""
    return psycopg.Cursor(connection, row_factory=tuple_row)


def last_row(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Read the only row of the last statement of several."""
    while cursor.nextset():
        pass
    row = cursor.fetchone()
    assert row is not None
    return row
