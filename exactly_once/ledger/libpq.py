"""Libpq: statements that go to the server without a cursor of psycopg.

A cursor costs the client as much as libpq does: for the two messages that open and end every unit, which bind no
parameters and of whose answers hardly anything is read, a quarter of a unit of one message. Waiting is psycopg's own,
so signals, time-outs and a socket that another thread closes end it as they end a cursor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import generators
from psycopg.abc import Params, PQGen, Query, Transformer
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult

_GOOD = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK, ExecStatus.EMPTY_QUERY)
_MAX_PARAMETERS = 65_535  # the protocol counts them in 16 bits


class Bound(NamedTuple):
    """One statement and its parameters as they go to the server."""

    query: bytes
    params: list[bytes | None] | None = None
    types: tuple[int, ...] | None = None
    formats: Sequence[int] | None = None


def send(connection: psycopg.Connection[Any], statements: bytes) -> list[PGresult]:
    """Execute statements without parameters, in one message and one round trip; return a result for each.

    :raises psycopg.Error: for the first that fails; the server executes none of those behind it.
    """
    # Without the lock of the connection: one thread owns a unit, and an interrupt could leave it locked.
    pgconn = connection.pgconn
    pgconn.send_query(statements)
    results: list[PGresult] = connection.wait(generators.execute(pgconn))
    check(connection, results)
    return results


def bind(transformer: Transformer, query: Query, params: Params | None) -> Bound:
    """Convert a statement and its parameters as the cursors of the transformer's connection do; nothing is sent.

    The transformer remembers how types are converted: one for many statements spares most of the work.

    :raises psycopg.Error: for a value that no adapter takes, or parameters that do not fit the placeholders.
    """
    # Nothing public does it without a round trip.
    from psycopg._queries import PostgresClientQuery, PostgresQuery  # noqa: PLC0415

    # Of a RawCursor, with placeholders of the server's, or of a ClientCursor, which writes values into the statement.
    cursors = getattr(transformer.connection, "cursor_factory", None)
    converted: PostgresQuery = getattr(cursors, "_query_cls", PostgresQuery)(transformer)
    converted.convert(query, params)
    if b"\0" in converted.query:
        raise psycopg.ProgrammingError("a statement cannot contain NUL (0x00) bytes")
    if converted.params is None or isinstance(converted, PostgresClientQuery):
        return Bound(converted.query)
    if len(converted.params) > _MAX_PARAMETERS:
        raise psycopg.ProgrammingError(f"{len(converted.params)} parameters are above {_MAX_PARAMETERS}, the limit")
    # Copied: the caller may go on with a bytearray that it gave.
    values = [None if value is None else bytes(value) for value in converted.params]
    return Bound(converted.query, values, converted.types, converted.formats)


def send_together(connection: psycopg.Connection[Any], statements: Sequence[Bound]) -> list[PGresult]:
    """Execute statements in one round trip; return a result for each, also for those that failed.

    Nothing behind one that fails is executed: there is one Sync, at the end, up to which the server skips. Text of one
    statement cannot reach into the next, because each has a message of its own.

    :raises psycopg.Error: when the connection is lost. One that was interrupted, or is copying, is closed.
    """
    pgconn = connection.pgconn
    owners: list[int] = []  # which statement each answer that will come belongs to
    parsed: object = None
    pgconn.enter_pipeline_mode()  # without the connection's lock, as above
    try:
        for number, (query, params, types, formats) in enumerate(statements):
            if params is None:
                pgconn.send_query_params(query, None)
                parsed = None
            else:
                # Equal ones in a row are parsed once, which is most of their cost: as the unnamed statement, which
                # nobody else can meet, also behind a pooler.
                if parsed != (query, types):
                    pgconn.send_prepare(b"", query, param_types=types)
                    owners.append(number)
                    parsed = (query, types)
                pgconn.send_query_prepared(b"", params, param_formats=formats)
            owners.append(number)
        pgconn.pipeline_sync()
        answers: list[PGresult] = connection.wait(_answers(pgconn, len(owners)))
    finally:
        try:
            pgconn.exit_pipeline_mode()
        except psycopg.OperationalError:
            pgconn.finish()
    results: list[PGresult] = []
    for owner, answer in zip(owners, answers, strict=False):
        if owner == len(results):
            results.append(answer)
        elif results[-1].status in _GOOD:
            results[-1] = answer
    return results


def _answers(pgconn: PGconn, count: int) -> PQGen[list[PGresult]]:
    results: list[PGresult] = []
    try:
        yield from generators.send(pgconn)
        for _ in range(count + 1):  # the last one is that of the Sync
            results += yield from generators.fetch_many(pgconn)
    except psycopg.OperationalError:
        # The server's own words, if there are any, say why the connection was lost.
        if not any(result.status == ExecStatus.FATAL_ERROR for result in results):
            raise
    return results[:count]


def check(connection: psycopg.Connection[Any], results: Sequence[PGresult]) -> None:
    """Raise what the first result that is no success says.

    :raises psycopg.Error: as the server says it.
    """
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
