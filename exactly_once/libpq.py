"""Libpq: statements that go to the server without a cursor of psycopg.

A cursor costs the client as much as libpq does: for the two messages that open and end every unit, which bind no
parameters and of whose answers hardly anything is read, that was half of its time. Waiting is psycopg's own, so
signals, time-outs and a socket that another thread closes end it as they end a cursor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult

_GOOD = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK, ExecStatus.EMPTY_QUERY)


def send(connection: psycopg.Connection[Any], statements: bytes) -> list[PGresult]:
    """Execute statements without parameters, in one message and one round trip; return a result for each.

    :raises psycopg.Error: for the first that fails; the server executes none of those behind it.
    """
    pgconn = connection.pgconn
    with connection.lock:
        pgconn.send_query(statements)
        results: list[PGresult] = connection.wait(generators.execute(pgconn))
    check(connection, results)
    return results


def check(connection: psycopg.Connection[Any], results: Sequence[PGresult]) -> None:
    """Raise what the first result that is no success says."""
    if not results:
        raise psycopg.InternalError("the server gave no result")
    for result in results:
        if result.status not in _GOOD:
            if result.status == ExecStatus.FATAL_ERROR:
                raise psycopg.errors.error_from_result(result, encoding=connection.info.encoding)
            raise psycopg.InternalError(f"unexpected result {ExecStatus(result.status).name}")


def texts(result: PGresult) -> list[str]:
    """Read the only row of a result, as text; a null is the empty one."""
    return [(result.get_value(0, column) or b"").decode() for column in range(result.nfields)]
