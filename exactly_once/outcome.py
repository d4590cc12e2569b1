"""Whose fault an error is: the outcome table of the protocol as one pure function."""

from __future__ import annotations

import re
from enum import Enum

import psycopg

SHORT_COUNT = "EO001"
"""SQLSTATE of the advance: fewer rows matched than the unit has partitions."""
FOREIGN_TRANSACTION = "EO002"
"""SQLSTATE of the advance: it did not run in the transaction that the unit began."""


_MISTAKES = re.compile(
    # By PgBouncer, too. The server's own texts are those of an English one; others are waited for.
    r"authentication failed|no pg_hba\.conf entry|(?:role|database) \S+ does not exist|no such (?:database|user)"
    r"|is not permitted to log in|permission denied for database|no password supplied"
    r"|server does not support SSL|certificate|SSL error(?!: unexpected eof)|sslmode value|definition of service"
    r"|service file|invalid (?:\S+ value|port number|connection option)"
    r"|(?:resolve host|host name) .*(?:not known|nor servname|No address associated|does not resolve)",
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


_CONFLICTS = ("40", "55P03")
_ENVIRONMENT = ("08", "53", "57", "58", "25006", "26000")
_DURATION = ("57014", "25P03", "25P04")
_HANDLER = ("22", "23", "P0001", "25P02")


def classify(error: BaseException, *, connection_lost: bool) -> Fault:
    """Say whose fault ``error`` is. The state of the connection is asked before the error.

    Frameworks wrap psycopg's errors, so the first one in the chain of causes decides.
    """
    driver = driver_error(error)
    state = driver.sqlstate if driver is not None else None
    if state is not None and state.startswith(_DURATION):
        return Fault.DURATION
    if connection_lost:
        return Fault.ENVIRONMENT
    if state is None:
        return Fault.OTHER if isinstance(error, MemoryError) else Fault.HANDLER
    for fault, prefixes in (
        (Fault.CONFLICT, _CONFLICTS),
        (Fault.ENVIRONMENT, _ENVIRONMENT),
        (Fault.HANDLER, _HANDLER),
    ):
        if state.startswith(prefixes):
            return fault
    return Fault.OTHER


def is_mistaken(error: BaseException) -> bool:
    """Tell whether a connection failed for what waiting does not mend: a name, a password, a certificate.

    libpq gives no SQLSTATE for a connection that it could not make, so its text is read. Of several hosts all must be
    mistaken, but one of the addresses of a name is enough: ``localhost`` is two, and a server may listen at one.
    """
    driver = driver_error(error)
    if driver is None or not isinstance(driver, psycopg.OperationalError):
        return False
    if driver.sqlstate is not None:
        return driver.sqlstate.startswith(("28", "3D"))
    _, *attempts = _ATTEMPT.split(str(driver))
    by_host: dict[str, bool] = {}
    for host, text in zip(attempts[::2], attempts[1::2], strict=True):
        by_host[host] = by_host.get(host, False) or _MISTAKES.search(text) is not None
    return all(by_host.values()) if by_host else _MISTAKES.search(str(driver)) is not None


def driver_error(error: BaseException) -> psycopg.Error | None:
    """Find psycopg's own error behind ``error``: itself, its ``orig``, its causes and contexts."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        candidate = waiting.pop(0)
        if candidate is None or id(candidate) in seen:
            continue
        if isinstance(candidate, psycopg.Error):
            return candidate
        seen.add(id(candidate))
        orig = getattr(candidate, "orig", None)
        waiting += [
            orig if isinstance(orig, BaseException) else None,
            candidate.__cause__,
            candidate.__context__,
        ]
    return None
