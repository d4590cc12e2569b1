"""Storing: rows that were looked at before, by COPY, from a stage or from arrays, in the transaction given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psycopg import sql

from exactly_once.ledger.session import Connection, cursor_on

from . import statements
from .changes import MISSING, Marks, Row, Rules, Tombstone, keys_of
from .plan import Plan, Prepared
from .statements import STAGE, Conflict


def append(connection: Connection, plan: Plan, prepared: Prepared) -> int:
    """Append rows by COPY."""
    form, encoded = plan.encode(prepared)
    return append_encoded(connection, plan, form, encoded)


def append_encoded(connection: Connection, plan: Plan, form: str, encoded: Iterable[bytes | bytearray]) -> int:
    """Append rows that are encoded for these columns already."""
    return _copy(connection, plan.table.identifier, plan.names, form, encoded)


def merge(connection: Connection, plan: Plan, prepared: Prepared, conflict: Conflict, *, small_batch: int) -> int:
    """Store rows by one statement that knows what to do about rows that are there."""
    rows = prepared.rows if isinstance(prepared.rows, Sequence) else list(prepared.rows)
    prepared = Prepared(rows, prepared.is_binary)
    if not rows:
        return 0
    if len(rows) > small_batch:
        form, encoded = plan.encode(prepared)
        cursor = cursor_on(connection)
        cursor.execute(statements.create_stage(plan.columns), prepare=False)
        _copy(connection, STAGE, statements.stage_columns(len(plan.names)), form, encoded)
        return cursor.execute(statements.insert_from_stage(plan, conflict), prepare=False).rowcount
    natives, values = plan.arrays(prepared)
    statement = statements.insert_from_arrays(plan, natives, conflict)
    return cursor_on(connection).execute(statement, values, prepare=False).rowcount


def delete(connection: Connection, key: Plan, doomed: Sequence[Row], *, is_binary: bool) -> int:
    """Delete rows by key; ``key`` is the plan of the key's columns."""
    natives, values = key.arrays(Prepared(doomed, is_binary))
    statement = statements.delete_from_arrays(key, natives)
    return cursor_on(connection).execute(statement, values, prepare=False).rowcount


def rank(connection: Connection, plan: Plan, changes: Sequence[Row], rules: Rules, *, is_binary: bool) -> Marks:
    """Rank the keys of changes, and what says which is newer, as Postgres finds them equal and in order."""
    positions = (*rules.key, *(() if rules.newest_by is None else (rules.newest_by,)))
    part = plan.part([plan.names[i] for i in positions])
    keys = keys_of(changes, rules.key)
    rows = [key if len(rules.key) > 1 else (key,) for key in keys]
    if rules.newest_by is not None:
        newest = [
            None if type(c) is Tombstone or c[rules.newest_by] is MISSING else c[rules.newest_by] for c in changes
        ]
        rows = [(*row, age) for row, age in zip(rows, newest, strict=True)]
    natives, values = part.arrays(Prepared(rows, is_binary))
    statement = statements.rank_arrays(part, natives, len(rules.key))
    ranks = cursor_on(connection).execute(statement, values, prepare=False).fetchall()
    return Marks([r[0] for r in ranks], [r[1] for r in ranks] if rules.newest_by is not None else ())


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
