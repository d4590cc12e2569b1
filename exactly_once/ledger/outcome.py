"""Whose fault an error is: the outcome table of the protocol, and for how long it is nobody's. No I/O."""

from __future__ import annotations

import re
from collections.abc import Hashable
from enum import Enum

import psycopg

from exactly_once.errors import ExactlyOnceError, Redelivered

# SQLSTATE of the advance: fewer rows matched than the unit has partitions.
SHORT_COUNT = "EO001"
# SQLSTATE of the advance: it did not run in the transaction that the unit began.
FOREIGN_TRANSACTION = "EO002"


_MISTAKES = re.compile(
    # By PgBouncer, too. The server's own texts are those of an English one; others are waited for.
    r"authentication failed|no pg_hba\.conf entry|(?:role|database) \S+ does not exist|no such (?:database|user)"
    r"|is not permitted to log in|permission denied for database|no password supplied"
    r"|server does not support SSL|certificate|SSL error(?!: unexpected eof)|sslmode value|definition of service"
    r"|service file|invalid (?:\S+ value|port number|connection option)"
    r"|(?:resolve host|host name|\[Errno) .*(?:not known|nor servname|No address associated|does not resolve)",
    re.IGNORECASE,
)
_ATTEMPT = re.compile(r"^- host: (.*?), hostaddr: .*?: ", re.MULTILINE)


class Fault(Enum):
    """Who can mend what went wrong, and so what happens to the unit."""

    CONFLICT = "run the batch again"
    ENVIRONMENT = "wait, reconnect, run the batch again"
    DURATION = "run half of the batch"
    HANDLER = "the message or the handler is at fault"
    OTHER = "stop, loudly"


# How often in a row one batch may fail by what looks like the server's state and can be a statement's doing, before
# the handler is at fault; and by what is nobody's, before its units become smaller.
TRIES = 5
# For how long the same batches may fail by conflicts, lost connections, or a server that is there and refuses.
PATIENCE_SECONDS = 600.0
# What one failure takes of it at most: the server may have been away since the one before.
_GAP_SECONDS = 30.0

_CONFLICTS = ("40", "55P03")
# HV00N: a foreign server is away.
_ENVIRONMENT = ("08", "53", "57", "58", "25006", "26000", "HV00N")
_DURATION = ("57014", "25P03", "25P04")
_HANDLER = ("00", "01", "02", "09", "10", "20", "21", "22", "23", "27", "2F", "38", "39", "44", "54", "P0", "25P02")
# What every message may meet, or one by a value or a branch of the handler that only it takes.
_DOUBTFUL = (
    *("0A", "0B", "0F", "0L", "0P", "0Z", "24", "28", "2B", "2D", "34", "3B", "3D", "3F", "42", "55000", "HV"),
    "XX000",
)
# What looks like the server's state and can be a statement's own doing: SET TRANSACTION READ ONLY, say.
_BY_STATEMENT = ("25006", "26000", "53400", "58P01")
_OURS = "EO"
# The classes of SQLSTATEs that Postgres gives; another one was made up by an application, for its data.
_STANDARD = frozenset(
    (
        *("00", "01", "02", "03", "08", "09", "0A", "0B", "0F", "0L", "0P", "0Z", "10", "20", "21", "22", "23", "24"),
        *("25", "26", "27", "28", "2B", "2D", "2F", "34", "38", "39", "3B", "3D", "3F", "40", "42", "44", "53", "54"),
        *("55", "57", "58", "72", "F0", "HV", "P0", "XX"),
    )
)
# Of a row that a policy refuses the state is that of a missing grant; the server's function tells them apart.
NOT_GRANTED, _CHECKS_POLICIES = "42501", "ExecWithCheckOptions"
READ_ONLY = "25006"
IN_FAILED_TRANSACTION = "25P02"
COMPLETION_UNKNOWN = "40003"


def classify(error: BaseException, *, connection_lost: bool) -> Fault:
    """Say whose fault ``error`` is. The state of the connection is asked before the error.

    Frameworks wrap psycopg's errors, so the first one in the chain of causes decides.
    """
    state = sqlstate_of(error)
    if state is not None and state.startswith(_DURATION):
        return Fault.DURATION
    if connection_lost:
        return Fault.ENVIRONMENT
    if state is None:
        return Fault.OTHER if isinstance(error, MemoryError) else Fault.HANDLER
    if is_kept_out(error):
        return Fault.HANDLER
    for fault, prefixes in (
        (Fault.CONFLICT, _CONFLICTS),
        (Fault.ENVIRONMENT, _ENVIRONMENT),
        (Fault.HANDLER, _HANDLER),
    ):
        if state.startswith(prefixes):
            return fault
    return Fault.OTHER if state[:2] in _STANDARD or state.startswith(_OURS) else Fault.HANDLER


def is_kept_out(error: BaseException) -> bool:
    """Tell whether a policy of row-level security refuses a row."""
    driver = driver_error(error)
    if driver is None or driver.sqlstate != NOT_GRANTED:
        return False
    return driver.diag.source_function == _CHECKS_POLICIES


def may_be_data(error: BaseException) -> bool:
    """Tell whether an error that is nobody's (:attr:`Fault.OTHER`) could be that of one message all the same.

    Class 42 is: a grant or a table that is missing, but also ``to_tsquery`` of a value. So is a statement that the
    server does not allow, or a cursor that is not there, where one branch of the handler has it; and XX000 of hstore's
    reader before Postgres 16, for instance. Which of them shows when there are fewer messages.
    """
    return (sqlstate_of(error) or "").startswith(_DOUBTFUL)


class Patience:
    """Counts the failures of a batch that are nobody's fault, until they must be somebody's.

    Only failures of a unit whose transaction had begun count: while a server is away none does.
    """

    def __init__(self) -> None:
        # How often this batch has failed in a row.
        self.tries = 0
        # How often of these by what may be a statement's own doing.
        self.by_statement = 0
        self._batch: Hashable = None  # what failed last
        self._seconds = 0.0  # spent on failures since something was committed
        self._last: float | None = None  # when the last failure was, on the monotonic clock

    @property
    def is_out(self) -> bool:
        """Whether the batch has been tried often enough as it is."""
        return self.tries >= TRIES

    @property
    def is_handlers(self) -> bool:
        """Whether the handler is at fault by now."""
        return self.by_statement >= TRIES

    @property
    def is_overdue(self) -> bool:
        """Whether nothing was committed for so long that somebody must look."""
        return self._seconds > PATIENCE_SECONDS

    def failed(self, batch: Hashable, now: float, *, by_statement: bool) -> None:
        """Take note that a batch has failed once more."""
        if batch != self._batch:
            self.tries = self.by_statement = 0
        self.tries += 1
        self.by_statement += by_statement
        self._seconds += 0.0 if self._last is None else min(now - self._last, _GAP_SECONDS)
        self._batch, self._last = batch, now

    def committed(self) -> None:
        """Take note that something was committed."""
        self.tries, self.by_statement, self._batch, self._seconds, self._last = 0, 0, None, 0.0, None


def is_by_statement(error: BaseException, *, connection_lost: bool) -> bool:
    """Tell whether an environment's error may be a statement's own doing.

    A lost connection never counts: of a hundred that are cut none may have been the message's fault.
    """
    return not connection_lost and (sqlstate_of(error) or "").startswith(_BY_STATEMENT)


def is_mistaken(error: BaseException) -> bool:
    """Tell whether a connection failed for what waiting does not mend: a name, a password, a certificate.

    libpq gives no SQLSTATE for a connection that it could not make, so its text is read. Of several hosts all must be
    mistaken, but one of the addresses of a name is enough: ``localhost`` is two, and a server may listen at one.
    """
    driver = driver_error(error)
    if driver is None or not isinstance(driver, psycopg.OperationalError):
        return False
    if driver.sqlstate is not None:
        return driver.sqlstate.startswith("28")
    _, *attempts = _ATTEMPT.split(str(driver))
    by_host: dict[str, bool] = {}
    for host, text in zip(attempts[::2], attempts[1::2], strict=True):
        by_host[host] = by_host.get(host, False) or _MISTAKES.search(text) is not None
    return all(by_host.values()) if by_host else _MISTAKES.search(str(driver)) is not None


def attribute_of(error: BaseException, name: str) -> object:
    """Read an attribute that an error of an application may have; one that fails at that is told as it is, without."""
    try:
        return getattr(error, name, None)
    except Exception:  # noqa: BLE001 - whatever it is, it is the application's
        return None


def sqlstate_of(error: BaseException) -> str | None:
    """Return the SQLSTATE of psycopg's own error behind ``error``, if there is one and the server answered.

    Where the server ends a session within a pipeline, psycopg may say only that the pipeline cannot be left; then the
    server's error is what that one hides.
    """
    driver = driver_error(error)
    if driver is not None and driver.sqlstate is None and isinstance(driver, psycopg.OperationalError):
        hidden = driver.__cause__ or driver.__context__
        driver = None if hidden is None else driver_error(hidden)
    return None if driver is None else driver.sqlstate


def driver_error(error: BaseException) -> psycopg.Error | None:
    """Find psycopg's own error behind ``error``: itself, its ``orig``, what it groups, its causes and contexts."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        candidate = waiting.pop(0)
        if candidate is None or id(candidate) in seen:
            continue
        if isinstance(candidate, psycopg.Error):
            return candidate
        seen.add(id(candidate))
        orig = attribute_of(candidate, "orig")
        waiting += [
            orig if isinstance(orig, BaseException) else None,
            *(candidate.exceptions if isinstance(candidate, BaseExceptionGroup) else ()),
            candidate.__cause__,
            candidate.__context__,
        ]
    return None


def own_error(error: BaseException) -> ExactlyOnceError | None:
    """Find an error of the library: ``error`` itself, or one of those that it groups, as an asyncio.TaskGroup does.

    No cause or context: what an application makes of ours is its own, and what is raised beside ours has nothing to do
    with it.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, ExactlyOnceError) else None
    found = [own for each in error.exceptions if (own := own_error(each)) is not None]
    # What stops goes before what is tried again.
    return min(found, key=lambda own: isinstance(own, Redelivered), default=None)
