"""Storing: rows that were looked at before, by COPY, from a stage or from arrays, in the transaction given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psycopg import sql

from exactly_once.session import Connection, cursor_on

from . import statements
from .changes import Row
from .errors import TableChanged
from .plan import Plan, Prepared
from .statements import STAGE, Conflict
from .table import lock_shape


def append(connection: Connection, plan: Plan, prepared: Prepared) -> int:
    """Append rows by COPY.

    :raises TableChanged: when the columns are not those that the rows were encoded for.
    """
    form, encoded = plan.encode(prepared)
    return append_encoded(connection, plan, form, encoded)


def append_encoded(connection: Connection, plan: Plan, form: str, encoded: Iterable[bytes | bytearray]) -> int:
    """Append rows that are encoded for these columns already.

    :raises TableChanged: when the columns are others by now.
    """
    if form == "BINARY" and lock_shape(connection, plan.table) != plan.table.shape:
        # The bytes of one type might be taken for another's.
        raise TableChanged(f"{plan.table} was altered since it was read; its columns are read anew")
    return _copy(connection, plan.table.identifier, plan.names, form, encoded)


def merge(connection: Connection, plan: Plan, prepared: Prepared, conflict: Conflict, *, small_batch: int) -> int:
    """Store rows by one statement that knows what to do about rows that are there."""
    rows = prepared.rows if isinstance(prepared.rows, Sequence) else list(prepared.rows)
    prepared = Prepared(rows, prepared.is_binary)
    if not rows:
        return 0
    if len(rows) > small_batch:
        return _merge_staged(connection, plan, prepared, conflict)
    natives, values = plan.arrays(prepared)
    statement = statements.insert_from_arrays(plan, natives, conflict)
    return cursor_on(connection).execute(statement, values, prepare=False).rowcount


def delete(connection: Connection, key: Plan, doomed: Sequence[Row], *, is_binary: bool) -> int:
    """Delete rows by key; ``key`` is the plan of the key's columns."""
    natives, values = key.arrays(Prepared(doomed, is_binary))
    statement = statements.delete_from_arrays(key, natives)
    return cursor_on(connection).execute(statement, values, prepare=False).rowcount


def _merge_staged(connection: Connection, plan: Plan, prepared: Prepared, conflict: Conflict) -> int:
    form, encoded = plan.encode(prepared)
    cursor = cursor_on(connection)
    cursor.execute(statements.create_stage(plan.columns), prepare=False)
    _copy(connection, STAGE, statements.stage_columns(len(plan.names)), form, encoded)
    return cursor.execute(statements.insert_from_stage(plan, conflict), prepare=False).rowcount


def _copy(
    connection: Connection,
    target: sql.Identifier,
    names: Sequence[str],
    form: str,
    encoded: Iterable[bytes | bytearray],
) -> int:
    cursor = cursor_on(connection)
    with cursor.copy(statements.copy(target, names, form)) as copying:
        for part in encoded:
            copying.write(part)
    return cursor.rowcount
