"""Statements: the writer's templates filled in for one table. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from psycopg import sql

from exactly_once.ledger.sql import query

from .plan import Plan
from .table import Column

Mode = Literal["append", "upsert", "insert-ignore"]

# No name can have it.
_PLACEHOLDER = "\0"
STAGE = sql.Identifier("pg_temp", "exactly_once_stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """What to do about a row that is there already."""

    mode: Mode
    key: tuple[str, ...] = ()
    update: tuple[str, ...] | None = None
    """The columns that a change may touch; all but the key when it is None."""
    newest_by: str | None = None
    add: tuple[str, ...] = ()
    """Columns whose new value is added to the stored one."""
    always: tuple[str, ...] = ()
    """Columns that a change sets also where a row lacks them: to their default."""


def copy(target: sql.Identifier, names: Iterable[str], form: str) -> sql.Composed:
    """COPY of encoded rows."""
    return query("copy_rows", "", target=target, columns=_list(map(sql.Identifier, names)), format=sql.SQL(form))


def create_stage(columns: Sequence[Column]) -> sql.Composed:
    """Make the stage, whose columns have numbers for names and take what the binary form of the value takes."""
    parts = (sql.SQL("{} {}").format(_numbered(i), sql.SQL(c.base_name)) for i, c in enumerate(columns))
    return query("create_stage", "", columns=_list(parts))


def stage_columns(count: int) -> list[str]:
    """Return the names of the stage's columns."""
    return [f"c{i}" for i in range(count)]


def insert_from_stage(plan: Plan, conflict: Conflict) -> sql.Composed:
    """Store what was staged, and drop the stage, in one message to the server."""
    statement = _insert(plan, conflict, [_numbered(i) for i in range(len(plan.names))], STAGE, sql.SQL("s.ctid"))
    return sql.SQL("; ").join([statement, query("drop_stage", "")])


def insert_from_arrays(plan: Plan, natives: Sequence[bool], conflict: Conflict) -> bytes:
    """Store rows that are passed as one array for each column."""
    values = [_from_array(plan, i, is_native=natives[i]) for i in range(len(plan.names))]
    return _finished(_insert(plan, conflict, values, _arrays(plan, natives), sql.SQL("s.ordinal")))


def delete_from_arrays(plan: Plan, natives: Sequence[bool]) -> bytes:
    """Delete by keys that are passed as one array for each column of the key."""
    names = [sql.Identifier(n) for n in plan.names]
    same = (sql.SQL("t.{0} {1} k.{0}").format(n, _operator("=", c)) for n, c in zip(names, plan.columns, strict=True))
    lock = (sql.SQL("t.{}").format(n) for n in names)
    statement = query(
        "delete_rows",
        "",
        table=plan.table.identifier,
        values=_list(_from_array(plan, i, is_native=natives[i]) for i in range(len(names))),
        source=_arrays(plan, natives),
        columns=_list(names),
        same=sql.SQL(" AND ").join(same),
        lock=sql.SQL("ORDER BY {} FOR UPDATE OF t").format(_list(lock)),
    )
    return _finished(statement)


def rank_arrays(plan: Plan, natives: Sequence[bool], keys: int) -> bytes:
    """Rank rows that are passed as one array for each column: by their keys, and by the last column if it is no key."""
    numbers = [_numbered(i) for i in range(len(plan.names))]
    names = (sql.SQL("t.{} AS {}").format(sql.Identifier(n), c) for n, c in zip(plan.names, numbers, strict=True))
    age: sql.Composable = numbers[keys] if keys < len(numbers) else sql.SQL("NULL::int")
    statement = query(
        "rank_rows",
        "",
        table=plan.table.identifier,
        names=_list(names),
        keys=_list(numbers[:keys]),
        age=age,
        values=_list(_from_array(plan, i, is_native=natives[i]) for i in range(len(numbers))),
        source=_arrays(plan, natives),
    )
    return _finished(statement)


def _insert(
    plan: Plan, conflict: Conflict, values: Sequence[sql.Composable], source: sql.Composable, ordinal: sql.Composable
) -> sql.Composed:
    keys = [values[i] for i in plan.positions(conflict.key)]
    order = sql.SQL("ORDER BY {}").format(_list([*keys, ordinal])) if keys else sql.SQL("")
    return query(
        "insert_rows",
        "",
        table=plan.table.identifier,
        columns=_list(map(sql.Identifier, plan.names)),
        values=_list(values),
        source=source,
        order=order,
        conflict=_clause(plan, conflict),
    )


def _clause(plan: Plan, conflict: Conflict) -> sql.Composable:
    names = plan.names
    if conflict.mode == "append":
        return sql.SQL("")
    key = _list(map(sql.Identifier, conflict.key))
    if conflict.mode == "insert-ignore":
        return sql.SQL("ON CONFLICT ({}) DO NOTHING").format(key) if conflict.key else sql.SQL("ON CONFLICT DO NOTHING")
    allowed = {*names, *conflict.always} if conflict.update is None else conflict.update
    set_names = [*names, *(n for n in conflict.always if n not in names)]
    changed = [n for n in set_names if n not in conflict.key and n in allowed]
    if not changed:
        return sql.SQL("ON CONFLICT ({}) DO NOTHING").format(key)
    # Of a null and a number the number is the sum.
    plus = "{0} = coalesce(t.{0} + EXCLUDED.{0}, EXCLUDED.{0}, t.{0})"
    forms = (sql.SQL(plus if n in conflict.add else "{0} = EXCLUDED.{0}") for n in changed)
    changes = _list(form.format(sql.Identifier(n)) for form, n in zip(forms, changed, strict=True))
    clause = sql.SQL("ON CONFLICT ({}) DO UPDATE SET {}").format(key, changes)
    if conflict.newest_by is None:
        return clause
    (newest,) = plan.table.pick([conflict.newest_by])
    is_newer = sql.SQL(" WHERE t.{0} IS NULL OR EXCLUDED.{0} {1} t.{0}")
    return clause + is_newer.format(sql.Identifier(newest.name), _operator(">=", newest))


def _arrays(plan: Plan, natives: Sequence[bool]) -> sql.Composed:
    types = (c.base_name if is_native else "text" for c, is_native in zip(plan.columns, natives, strict=True))
    arrays = _list(sql.SQL("{}::{}[]").format(sql.SQL(_PLACEHOLDER), sql.SQL(t)) for t in types)
    names = _list([*(_numbered(i) for i in range(len(plan.names))), sql.Identifier("ordinal")])
    return sql.SQL("(SELECT * FROM unnest({}) WITH ORDINALITY AS u({}))").format(arrays, names)


def _from_array(plan: Plan, position: int, *, is_native: bool) -> sql.Composable:
    value = sql.SQL("s.{}").format(_numbered(position))
    if is_native:
        return value
    # To the type without length, for a cast to one with length would cut what does not fit.
    return sql.SQL("{}::{}").format(value, sql.SQL(plan.columns[position].base_name))


def _operator(sign: Literal["=", ">="], column: Column) -> sql.Composable:
    """Return the operator that an index uses: off the search_path its sign is another one's, of citext that of text."""
    if column.operator_schema in (None, "pg_catalog"):
        return sql.SQL(sign)
    return sql.SQL("OPERATOR({}.{})").format(sql.Identifier(column.operator_schema), sql.SQL(sign))


def _list(parts: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)


def _numbered(position: int) -> sql.Identifier:
    return sql.Identifier(f"c{position}")


def _finished(statement: sql.Composed) -> bytes:
    """Turn our marks into placeholders; a % in a name is none."""
    return statement.as_string(None).replace("%", "%%").replace(_PLACEHOLDER, "%s").encode()
