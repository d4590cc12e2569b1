"""Session: the one connection of a consumer to Postgres, opened anew when it is lost.

Nothing is ever set for longer than a transaction, so a transaction pooler may stand in between.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar
from uuid import UUID, uuid4
from zlib import crc32

import psycopg
from psycopg import IsolationLevel, adapt, postgres, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import Row, RowFactory, tuple_row
from psycopg.types import TypesRegistry, array
from psycopg.types.string import BytesBinaryDumper

from exactly_once._log import about
from exactly_once._redaction import without_secrets
from exactly_once.errors import ConfigurationError, TransactionNotYours, TransactionOutcomeUnknown

from .libpq import send, texts
from .sql import query

logger = logging.getLogger(__name__)

Connection = psycopg.Connection[Any]
T = TypeVar("T")

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
# The same of a socket that somebody else's function has connected, by the names that libpq has for them.
_SOCKET_OPTIONS = {
    "keepalives_idle": "TCP_KEEPIDLE",
    "keepalives_interval": "TCP_KEEPINTVL",
    "keepalives_count": "TCP_KEEPCNT",
    "tcp_user_timeout": "TCP_USER_TIMEOUT",
}
# How many causes of an error are looked at, as one may be its own.
_CAUSES = 10
# How long a backend may take to end before the caller goes on polling Kafka meanwhile; usually it is milliseconds.
_END_WAIT_SECONDS = 2.0
# How long a thread may take to let go of a connection whose socket was cut: it is woken at once.
_LET_GO_SECONDS = 1.0
# What four digits can say; whatever may take longer is said to be unbounded.
_LONGEST_SECONDS = 9999
# What ends a unit's transaction from under it, and what to do instead.
_NOT_YOURS = {
    "commit": "the unit commits when its block is left",
    "rollback": "raise an exception to undo the unit, or use `with unit.connection.transaction():` for a part of it",
    "close": "the connection is the consumer's; `with unit.connection:` ends the transaction, too: take it out",
    "set_autocommit": "a unit is one transaction",
}
# What a use of a connection begins with: execute() makes a cursor, transaction() sends its SAVEPOINT without one.
_USES = ("cursor", "transaction", "pipeline")
# How psycopg converts values by itself: made anew, since applications change what there is, also before they import us.
ADAPTERS = adapt.AdaptersMap(types=TypesRegistry())
postgres.register_default_types(ADAPTERS.types)
postgres.register_default_adapters(ADAPTERS)
array.register_all_arrays(ADAPTERS)


class _Hexadecimal(adapt.Dumper):
    """Writes bytes in lists: libpq would double backslashes where standard_conforming_strings is off."""

    oid = ADAPTERS.types["bytea"].oid

    def dump(self, obj: Any) -> bytes:
        return b"\\x" + bytes(obj).hex().encode()


ADAPTERS.register_dumper(bytes, _Hexadecimal)
ADAPTERS.register_dumper(bytes, BytesBinaryDumper)  # by itself a value goes as it is
# The server's own function that warns: its text depends on ``lc_messages``, and SQLSTATE 01000 is any warning.
_WAITS_FOR_STANDBY = "SyncRepWaitForLSN"
# Where a connection that is lent keeps what was set on it before, by tracing say.
_OWN = "_exactly_once_own"


class Begun(NamedTuple):
    """A transaction of ours: its id, the backend that runs it, the incarnation of the server in which both are true."""

    xid: str
    pid: int
    incarnation: str


class StillRunning(psycopg.OperationalError):
    """A transaction that nobody will end by COMMIT any more, and whose backend is not gone yet: ask again later."""


def connector(conninfo: str) -> Callable[[], Connection]:
    """Return a callable that opens connections to ``conninfo`` as the library needs them.

    :raises ConfigurationError: when libpq cannot read ``conninfo``; its text is not repeated.
    """
    if not isinstance(conninfo, str):  # as from a variable of the environment that is not set
        raise ConfigurationError(f"conninfo= must be a connection string, not {type(conninfo).__name__}")
    try:
        given = conninfo_to_dict(conninfo)
    except psycopg.Error:
        raise ConfigurationError(
            "conninfo is not a connection string that libpq understands; "
            "expected postgresql://user@host:port/database or key=value pairs"
        ) from None
    # What libpq would take for another part than was meant is refused before an error repeats a piece of a password.
    in_uri = re.match(r"postgres(?:ql)?://[^?/]*/([^?]*)", conninfo)
    names = [name for name in str(given.get("host") or "").split(",") if not name.startswith(("/", "@"))]
    ports = [port for port in str(given.get("port") or "").split(",") if port]
    if any("@" in name for name in [*names, in_uri[1] if in_uri else ""]) or not all(p.isdecimal() for p in ports):
        raise ConfigurationError(
            "conninfo: the port is no number, or the host, the port or the database would contain a piece of the "
            "password. Write characters of a password that mean something in a URI as %40 (@), %3A (:), %2F (/), %3F "
            "(?), %23 (#), or give it by PGPASSWORD or a password file"
        )
    complete = make_conninfo("", **{**_DEFAULTS, **given})

    def connect() -> Connection:
        try:
            return psycopg.connect(complete, autocommit=True, prepare_threshold=None)
        except psycopg.errors.ConnectionTimeout as error:  # the only one that does not say which server
            raise psycopg.errors.ConnectionTimeout(f"{server_of(conninfo)}: {error}") from None

    return hiding(connect)


def hiding(connect: Callable[[], Connection]) -> Callable[[], Connection]:
    """Return ``connect`` with errors that repeat nothing of a password, not even of one that was written wrongly."""
    # What was given last, which nothing keeps alive.
    last: weakref.ref[Connection] | None = None

    @functools.wraps(connect)
    def hidden() -> Connection:
        nonlocal last
        made: object = None
        try:
            made = connect()
            given = psycopg_connection(made, "connect= gave")
            if given.closed and last is not None and last() is given:
                raise ConfigurationError(
                    "connect= gave the same connection again, which is closed: it must open a new one at each call"
                )
            last = weakref.ref(given)
            _notice_silence(given)
            return given
        except BaseException as error:
            if isinstance(made, psycopg.Connection):  # the error is ours, or an interrupt's
                dispose(made)
            if not isinstance(error, Exception):
                raise
            # A framework's engine raises errors of its own for a server that is away. What was being handled when this
            # was called is no cause.
            driver: BaseException | None = error
            for _ in range(_CAUSES):
                if driver is not None and not isinstance(driver, psycopg.Error):
                    driver = driver.__cause__
            if not isinstance(driver, psycopg.Error if driver is error else psycopg.OperationalError):
                raise
            text = without_secrets(str(driver))
            if driver is error and text == str(error):
                raise
            raise type(driver)(text) from None

    return hidden


def psycopg_connection(given: object, what: str) -> Connection:
    """Return what an application gives for a connection if it is one of psycopg's own.

    :raises ConfigurationError: else, as for what a framework has around one.
    """
    if isinstance(given, psycopg.Connection):
        return given
    if inspect.iscoroutine(given):
        given.close()
    kind = f"{type(given).__module__}.{type(given).__qualname__}".removeprefix("builtins.")
    raise ConfigurationError(
        f"{what} {kind}: it must be a psycopg.Connection. SQLAlchemy has it as "
        "session.connection().connection.driver_connection, Django as connection.connection inside atomic(); "
        "docs/how-to/fastapi.md shows asynchronous code beside a consumer"
    )


def _notice_silence(connection: Connection) -> None:
    """Have the system end a connection whose server does not answer any more, unless its maker has said when."""
    # Whoever uses a connection that is lost already is told so.
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as side:
        given = {option.keyword.decode(): option.val for option in connection.pgconn.info if option.val is not None}
        if side.family == socket.AF_UNIX or given.get("keepalives") == b"0":
            return
        for name, option in _SOCKET_OPTIONS.items():
            number = getattr(socket, option, None)  # some systems lack some
            if number is not None and name not in given:
                side.setsockopt(socket.IPPROTO_TCP, number, int(_DEFAULTS[name]))


def _tell_unconfirmed(notice: psycopg.errors.Diagnostic) -> None:
    """Log the server's warning of a COMMIT which no standby has confirmed."""
    if notice.source_function == _WAITS_FOR_STANDBY:
        logger.warning(
            "committed, and perhaps lost in a failover: %s (%s)",
            notice.message_primary,
            notice.message_detail,
            extra=about("not_replicated"),
        )


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


def address(connection: Connection) -> str:
    """Name host, port and database of a connection, and nothing secret."""
    info = connection.info
    return f"{info.host}:{info.port}/{info.dbname}"


class Session:
    """Owns the connection; begins, and finds out what became of, transactions on it."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        *,
        schema: str,
        instance: UUID | None = None,
        owns_rows: bool = True,
    ) -> None:
        """``owns_rows`` is False for sessions that own no rows by nature: peers must not take that for a fence."""
        self.schema = schema
        self.instance = instance or uuid4()
        self.connect = hiding(connect)
        self._owns_rows = owns_rows
        # Of short changes of the ledger, which the server itself ends if their process freezes.
        self._tag = sql.Literal(tag_of(self.instance, schema, None))
        self._connection: Connection | None = None
        self._is_prepared = False  # for our statements
        self._closed = False
        # Whether a statement without a BEGIN sees what others have committed while it waited, and lasts when the server
        # crashes right after it; the role may differ.
        self.autocommits_safely = True
        self._refused: set[str] = set()  # transactions that this role may not end, which was logged
        self._begin: dict[tuple[str, float], bytes] = {}  # composed statements, by isolation and time
        # Where connections have led that were joined: to our own ledger.
        self._same_ledger: set[str] = set()

    @property
    def connection(self) -> Connection:
        """The live connection, opened if there is none.

        :raises psycopg.OperationalError: when the server cannot be reached.
        :raises ConfigurationError: when a new one gives no text.
        """
        if self._closed:
            raise psycopg.OperationalError("this consumer is closed")
        if self.lost or not self._is_prepared:  # an interrupt may have come between the two
            self.discard()
            connection = self._connection = self.connect()
            with contextlib.suppress(ValueError):  # a pool gives the same connection again
                connection.remove_notice_handler(_tell_unconfirmed)
            connection.add_notice_handler(_tell_unconfirmed)
            try:
                _refuse_no_text(connection)
                if connection.info.transaction_status is TransactionStatus.IDLE:
                    connection.autocommit = True
                    # Of blocks of psycopg's transaction(), whatever the role or the application says.
                    connection.isolation_level = IsolationLevel.READ_COMMITTED
                # A pooler accepts clients whose server is away; only an answer tells.
                (self.autocommits_safely,) = last_row(execute(connection, self.schema, "answer"))
            except BaseException:
                self.discard()
                raise
            self._is_prepared = True
        assert self._connection is not None
        if not self._connection.autocommit and self._connection.pgconn.transaction_status == TransactionStatus.IDLE:
            take_back(self._connection)  # an interruption may have left it lent
            self._connection._autocommit = True  # noqa: SLF001 - as begin() took it away, without asking the server
        return self._connection

    @property
    def lost(self) -> bool:
        """Whether there is no connection that could still be used."""
        return self._connection is None or is_lost(self._connection)

    def discard(self) -> None:
        """Close the connection; the next use opens another."""
        if self._connection is not None:
            take_back(self._connection)
            with contextlib.suppress(psycopg.Error):
                dispose(self._connection)
        self._connection, self._is_prepared = None, False

    def after_a_pause(self, execute: Callable[[Connection], T]) -> tuple[Connection, T]:
        """Execute what begins something, and return the connection too: another one where ours was ended for idling.

        A role's ``idle_session_timeout`` may be shorter than the pauses of a group that has nothing to do.
        """
        connection = self.connection
        try:
            return connection, execute(connection)
        except psycopg.errors.IdleSessionTimeout:  # the server has executed nothing
            self.discard()
            connection = self.connection
            return connection, execute(connection)

    def begin(self, isolation: str, *, may_take: float = math.inf) -> Begun:
        """Open a transaction in one round trip and learn its id; peers leave it alone for ``may_take`` seconds."""
        self.roll_back()  # an interruption may have left a transaction: nothing of it may get into this one
        if (isolation, may_take) not in self._begin:  # composed once for each kind of unit
            tag = tag_of(self.instance, self.schema, may_take if self._owns_rows else None)
            begin = query("begin", self.schema, tag=sql.Literal(tag), isolation=sql.SQL(isolation))
            self._begin[isolation, may_take] = begin.as_bytes(cursor_on(self.connection))
        statements = self._begin[isolation, may_take]
        connection, results = self.after_a_pause(lambda connection: send(connection, statements))
        xid, pid, incarnation = texts(results[-1])
        # What a handler executes after a ROLLBACK of its own must not become durable by itself. There is no public
        # way to say so inside a transaction.
        connection._autocommit = False  # noqa: SLF001
        return Begun(xid, int(pid), incarnation)

    def join(self, connection: Connection, *, may_take: float = math.inf) -> Begun:
        """Learn the transaction that is open on somebody else's connection, and leave our mark on it."""
        cursor = execute(
            connection,
            self.schema,
            "join",
            tag=sql.Literal(f"{tag_of(self.instance, self.schema)}:"),
            owns_rows=sql.Literal(self._owns_rows),
            may_take=sql.Literal(may_take),
        )
        return Begun(*last_row(cursor))

    def refuse_other_ledger(self, connection: Connection) -> None:
        """Refuse a connection that leads to another ledger than ours: nothing could ever be applied there.

        :raises ConfigurationError: naming both.
        """
        _refuse_no_text(connection)
        if address(connection) in self._same_ledger:
            return
        (own, *_) = last_row(execute(self.connection, self.schema, "ledger_id"))
        try:
            (found, *_) = last_row(execute(connection, self.schema, "ledger_id"))
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            found = None
        if found != own:
            raise ConfigurationError(
                f"join() was given a connection to {address(connection)}, which has another ledger in schema "
                f"{self.schema!r}, or none; the consumer's is in {address(self.connection)}. Effects and offsets must "
                "be in one database: give the consumer the same one"
            )
        self._same_ledger.add(address(connection))

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
        self.roll_back()  # an interruption may have left a transaction
        timeout, durable = sql.Literal(f"{int(lock_timeout_seconds * 1000)}ms"), sql.Literal(is_durable)
        values = {"tag": self._tag, "lock_timeout": timeout, "is_durable": durable}
        try:
            connection, opening = self.after_a_pause(
                lambda connection: execute(connection, self.schema, "begin_ledger", **values)
            )
            pid, is_read_only, is_standby = last_row(opening)
            if is_read_only:  # said at once, because what only looks would never be refused
                raise psycopg.errors.ReadOnlySqlTransaction(
                    f"{address(connection)} is a standby, which takes no writes"
                    if is_standby
                    else f"default_transaction_read_only is on for {connection.info.user} at {address(connection)}: of "
                    "the role, the database, the server or the connection string"
                )
            yield connection, pid
            cursor_on(connection).execute("COMMIT", prepare=False)
        except psycopg.errors.ReadOnlySqlTransaction:
            self.discard()  # this server is not the primary any more; another connection may lead to the one that is
            raise
        except GeneratorExit:
            # Whoever was interrupted at the edge of the block has left this to the garbage collector, which comes when
            # it likes; the next use of the connection has rolled back long ago, and what is open now is its own.
            raise
        except BaseException:
            self.roll_back()
            raise

    def roll_back(self) -> None:
        """End whatever transaction is open; a connection that cannot do even that is discarded."""
        if self._connection is None:
            return
        take_back(self._connection)
        status = self._connection.pgconn.transaction_status
        if status == TransactionStatus.IDLE and not open_blocks(self._connection):
            return
        try:
            # A block that is left open would end in a later transaction, and undo what that has done since a savepoint
            # of the same name; on a connection that is closed its end sends nothing.
            if status in (TransactionStatus.UNKNOWN, TransactionStatus.ACTIVE) or open_blocks(self._connection):
                self.discard()
            else:
                send(self._connection, b"ROLLBACK")
        except psycopg.Error:
            self.discard()

    def status(self, begun: Begun, *, on: Connection | None = None) -> str | None:
        """Ask what became of a transaction, or return None when the server no longer knows.

        It is ``committed``, ``aborted``, ``in progress``, or ``prepared`` for a commit in two phases.
        It may be asked ``on`` any connection to that server.

        :raises psycopg.Error: when the server cannot be asked now.
        """
        is_new = self.lost
        try:
            status = self._ask(begun, on or self.connection)
        except psycopg.Error:
            if on is not None or is_new or not self.lost:
                raise
            status = self._ask(begun, self.connection)  # it had been lost unnoticed: on another one
        if status == "restarted":
            # After a crash or a failover the ids of transactions that left no trace are given out
            # again, so the answer could be about somebody else's. Without our COMMIT ours is gone.
            extra = about("server_restarted")
            logger.warning("the database server was restarted; transaction %s did not survive", begun.xid, extra=extra)
            return "aborted"
        return status

    def outcome(self, begun: Begun) -> str:
        """Find out what became of a transaction whose COMMIT was never sent by us.

        Return ``committed`` or ``aborted``. One that still runs on a lost connection is ended first.

        :raises psycopg.OperationalError: when the server cannot be asked now.
        :raises StillRunning: which is one of those, when the transaction could not be ended yet.
        :raises TransactionOutcomeUnknown: when the server does not know, or the handler has prepared it for a commit
            of its own.
        """
        deadline = time.monotonic() + _END_WAIT_SECONDS
        while True:
            status = self.status(begun)
            if status in ("committed", "aborted"):
                return status
            if status != "in progress":
                what = f"Postgres no longer reports what became of transaction {begun.xid} (it answered {status!r})"
                if status == "prepared":
                    what = (
                        f"transaction {begun.xid} was prepared, and stays with its locks: COMMIT PREPARED or ROLLBACK "
                        "PREPARED ends it, by its name in pg_prepared_xacts"
                    )
                raise TransactionOutcomeUnknown(
                    f"{what}; look whether its effects are there, then use exactly-once reset"
                )
            may_end = True
            try:
                self._end_on(self.connection, begun)
                execute(self.connection, self.schema, "give_time")
            except psycopg.errors.InsufficientPrivilege as error:
                may_end = False
                if begun.xid not in self._refused:
                    self._refused.add(begun.xid)
                    logger.warning(
                        "backend %s still runs transaction %s, and this role may not end it: %s; waiting until it ends "
                        "by itself. GRANT pg_signal_backend, or the role of that backend, to the role of this "
                        "connection",
                        begun.pid,
                        begun.xid,
                        str(error).partition("\n")[0],
                        extra=about("end_refused"),
                    )
            if not may_end or time.monotonic() > deadline:
                raise StillRunning(
                    f"transaction {begun.xid} still runs in backend {begun.pid} of {address(self.connection)}; "
                    "its messages wait for its end"
                )

    def end(self, begun: Begun) -> None:
        """End a transaction of ours from outside, while another thread uses the connection; best effort."""
        try:
            connection = self.connect()
            try:
                self._end_on(connection, begun)
            finally:
                dispose(connection)
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

        def cut() -> None:
            connection = self._connection
            if connection is None or connection.closed:
                return
            logger.warning("Postgres stands still; the connection is cut", extra=about("connection_cut"))
            _cut(connection)

        timer = threading.Timer(seconds, cut)
        timer.daemon = True
        try:
            timer.start()
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Close the connection for good."""
        self._closed = True
        self.discard()

    def _ask(self, begun: Begun, connection: Connection) -> str | None:
        cursor = execute(connection, self.schema, "xact_status", xid=begun.xid, begun_in=begun.incarnation)
        status: str | None = last_row(cursor)[0]
        return status

    def _end_on(self, connection: Connection, begun: Begun) -> None:
        own = {"xid": begun.xid, "pid": begun.pid, "begun_in": begun.incarnation}
        execute(connection, self.schema, "end_transaction", **own)


def dispose(connection: Connection) -> None:
    """Close a connection; one that came out of a pool is given back closed, so that the pool makes another.

    Closed, because nobody else is to meet what may be left on it, be it a transaction or a setting.
    """
    pool = getattr(connection, "_pool", None)  # psycopg_pool's, which is no dependency
    if pool is not None:
        connection._pool = None  # noqa: SLF001 - else close() may only give it back, as it is
    is_free = False
    try:
        # To close it under a thread of the handler's that is inside of libpq would crash the process.
        is_free = connection.lock.acquire(blocking=False)
        if not is_free:
            _cut(connection)
            is_free = connection.lock.acquire(timeout=_LET_GO_SECONDS)  # not where an interrupt has left it locked
        connection.close()
    finally:
        if is_free:
            connection.lock.release()
        if pool is not None:
            connection._pool = pool  # noqa: SLF001 - putconn() takes its own only
            pool.putconn(connection)


def _cut(connection: Connection) -> None:
    """End what waits on a connection for the server: the socket, as whoever waits has locked the connection."""
    with contextlib.suppress(OSError, psycopg.Error):  # it may be closed just now
        duplicate = socket.socket(fileno=os.dup(connection.fileno()))
        with duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)


def tag_of(instance: UUID, schema: str, may_take: float | None = 0) -> str:
    """Name an instance to the server, as an application_name, which holds 63 bytes.

    The schema is told too, because rows of other schemas are not seen here, and how many seconds the transaction may
    take; None is for those of which it says nothing that their instance owns no rows.
    """
    tag = f"exactly_once:{instance}:{crc32(schema.encode()):08x}"
    if may_take is None:
        return f"{tag}:-"
    if may_take > _LONGEST_SECONDS:
        return f"{tag}:inf"
    return f"{tag}:{math.ceil(may_take)}" if may_take else tag


def is_lost(connection: Connection) -> bool:
    """Tell whether a connection is closed, broken or in an unknown state."""
    return bool(connection.pgconn.transaction_status == TransactionStatus.UNKNOWN)


def open_blocks(connection: Connection) -> int:
    """Count the blocks of ``with connection.transaction():`` that are open; there is no public way to ask."""
    return connection._num_transactions  # noqa: SLF001


def lend(connection: Connection, used: Callable[[], object]) -> None:
    """Have a connection refuse what would end the open transaction, and call ``used`` before it is used.

    Frameworks and applications reach it by references of their own, so the connection itself must do both. What is
    sent as SQL cannot be refused; it is found out afterwards.
    """
    take_back(connection)  # an interruption may have left it lent
    # A tracer's proxy has the attributes of the connection, and methods that would call these again.
    wrapped = getattr(connection, "__wrapped__", connection)
    uses: dict[str, Callable[..., Any]] = {name: getattr(wrapped, name) for name in _USES}
    own = vars(connection)
    own[_OWN] = {name: own[name] for name in (*_NOT_YOURS, *_USES) if name in own}
    own.update({name: partial(_refuse, name, instead) for name, instead in _NOT_YOURS.items()})

    def noting(use: Callable[..., Any], *args: Any, **options: Any) -> Any:
        used()
        return use(*args, **options)

    own.update({name: partial(noting, use) for name, use in uses.items()})


def take_back(connection: Connection) -> None:
    """Give a connection that was lent its own methods again."""
    attributes = vars(connection)
    if _OWN in attributes:
        for name in (*_NOT_YOURS, *_USES):
            attributes.pop(name, None)
        attributes.update(attributes.pop(_OWN))


def _refuse(name: str, instead: str, *_: object, **__: object) -> NoReturn:
    called = "autocommit" if name == "set_autocommit" else f"{name}()"
    raise TransactionNotYours(
        f"{called} on the connection of an open unit: {instead}. Nothing was committed or rolled back by this call"
    )


class _Cursor(psycopg.Cursor[Row]):
    """Converts as psycopg does by itself: what an application has registered is for its own statements."""

    @property
    def adapters(self) -> adapt.AdaptersMap:
        return ADAPTERS


def cursor_on(connection: Connection, rows: RowFactory[Row] = tuple_row) -> psycopg.Cursor[Row]:  # type: ignore[assignment]
    """Make a cursor that gives tuples, in the types of psycopg itself, however the connection is set up."""
    return _Cursor(connection, row_factory=rows)


def execute(connection: Connection, schema: str, name: str, /, **values: Any) -> psycopg.Cursor[tuple[Any, ...]]:
    """Execute a statement of the library by its name. Of the values those that are SQL are written into it."""
    parts = {key: values.pop(key) for key in [*values] if isinstance(values[key], sql.Composable)}
    return cursor_on(connection).execute(query(name, schema, **parts), values or None, prepare=False)


def storable(text: str, connection: Connection) -> str:
    """Escape what the database's encoding or the connection's lacks, and NUL."""
    info = connection.info
    encoding = info.encoding if info.parameter_status("server_encoding") == "UTF8" else "ascii"
    return text.replace("\0", "\\x00").encode(encoding, "backslashreplace").decode(encoding)


def _refuse_no_text(connection: Connection) -> None:
    """Refuse a connection that gives bytes for text, or other bytes for one name than others in the same database."""
    is_unconverted = connection.info.parameter_status("server_encoding") == "SQL_ASCII"
    if connection.info.encoding == "ascii" or (is_unconverted and connection.info.encoding != "utf-8"):
        given = connection.info.parameter_status("client_encoding")
        raise ConfigurationError(
            f"the connection has client_encoding {given}, which "
            + ("the database, in SQL_ASCII, does not convert" if is_unconverted else "gives no text")
            + "; set client_encoding=UTF8"
        )


def last_row(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Read the only row of the last statement of several."""
    while cursor.nextset():
        pass
    row = cursor.fetchone()
    assert row is not None
    return row
