"""Whose fault an error is: the outcome table of the protocol as one pure function."""

from __future__ import annotations

from enum import Enum

import psycopg

SHORT_COUNT = "EO001"
"""SQLSTATE of the advance: fewer rows matched than the unit has partitions."""
FOREIGN_TRANSACTION = "EO002"
"""SQLSTATE of the advance: it did not run in the transaction that the unit began."""


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
