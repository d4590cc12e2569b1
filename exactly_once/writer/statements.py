"""Statements: the writer's templates filled in for one table, and executed in the transaction given."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import psycopg
from psycopg import sql

from exactly_once.ledger.session import Connection, cursor_on
from exactly_once.ledger.sql import query

from .changes import Marks, Missing, Row, Rules, Tombstone, keys_of
from .errors import TableError
from .plan import Plan, Prepared
from .table import Column

Mode = Literal["append", "upsert", "insert-ignore"]

# No name can have it.
_PLACEHOLDER = "\0"
_STAGE_NAME = "exactly_once_stage"
_STAGE = sql.Identifier("pg_temp", _STAGE_NAME)


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
    merge: tuple[str, ...] = ()
    """Columns of JSON whose fields are stored beside those that are there."""
    always: tuple[str, ...] = ()
    """Columns that a change sets also where a row lacks them: to their default."""


def append(connection: Connection, plan: Plan, form: str, encoded: Iterable[bytes | bytearray]) -> int:
    """Append rows by COPY, from their encoded form."""
    cursor = cursor_on(connection)
    _copy(cursor, plan.table.identifier, plan.names, form, encoded)
    return cursor.rowcount


def stage_columns(count: int) -> list[str]:
    """Return the names of the stage's columns."""
    return [f"c{i}" for i in range(count)]


def merge(connection: Connection, plan: Plan, prepared: Prepared, conflict: Conflict, *, small_batch: int) -> int:
    """Store rows by one statement that knows what to do about rows that are there."""
    rows = prepared.rows if isinstance(prepared.rows, Sequence) else list(prepared.rows)
    prepared = Prepared(rows, prepared.is_binary)
    if not rows:
        return 0
    cursor = cursor_on(connection)
    if len(rows) <= small_batch:
        natives, values = plan.arrays(prepared)
        return cursor.execute(_from_arrays(plan, conflict, tuple(natives)), values, prepare=False).rowcount
    names = stage_columns(len(plan.names))
    # The stage's columns take what the binary form of the value takes.
    kinds = (
        sql.SQL("{} {}").format(sql.Identifier(n), sql.SQL(_input_type(c)))
        for n, c in zip(names, plan.columns, strict=True)
    )
    try:
        cursor.execute(query("create_stage", "", columns=_list(kinds)), prepare=False)
    except psycopg.errors.InsufficientPrivilege as error:
        raise TableError(
            f"{plan.table}: many rows at once go by a temporary table: GRANT TEMPORARY ON DATABASE to the role "
            f"({error.diag.message_primary})"
        ) from error
    _copy(cursor, _STAGE, names, *plan.encode(prepared))
    insert = _insert(plan, conflict, list(map(sql.Identifier, names)), _STAGE, sql.SQL("s.ctid"))
    # Stored, and the stage dropped, in one message to the server.
    return cursor.execute(sql.SQL("; ").join([insert, query("drop_stage", "")]), prepare=False).rowcount


def delete_by_key(connection: Connection, key: Plan, sought: Prepared) -> set[int]:
    """Delete the rows of keys; tell which there were by position."""
    if not key.table.has_delete_rules:
        return by_key("delete_rows", connection, key, sought)
    found = by_key("find_rows", connection, key, sought)
    by_key("delete_found", connection, key, sought)
    return found


def by_key(
    name: Literal["delete_rows", "delete_found", "find_rows"], connection: Connection, key: Plan, sought: Prepared
) -> set[int]:
    """Delete or find the rows of keys, which are locked in the order of the keys; tell which there are by position.

    ``key`` is the plan of the key's columns.
    """
    natives, arrays = key.arrays(sought)
    columns = [sql.SQL("t.{}").format(sql.Identifier(n)) for n in key.names]
    same = (
        sql.SQL("{} {} {}").format(column, _operator("=", kind), value)
        for column, kind, value in zip(columns, key.columns, _values(key, natives), strict=True)
    )
    statement = query(
        name,
        "",
        table=key.table.identifier,
        source=_arrays(key, natives),
        same=sql.SQL(" AND ").join(same),
        lock=sql.SQL("ORDER BY {} FOR UPDATE OF t").format(_list(columns)),
    )
    cursor = cursor_on(connection).execute(_finished(statement), arrays, prepare=False)
    return {number - 1 for (number,) in (cursor.fetchall() if cursor.description else ())}


def rank(connection: Connection, plan: Plan, changes: Sequence[Row], rules: Rules, *, is_binary: bool) -> Marks:
    """Rank the keys of changes, and what says which is newer, as Postgres finds them equal and in order."""
    positions = (*rules.key, *(() if rules.newest_by is None else (rules.newest_by,)))
    part = plan.part([plan.names[i] for i in positions])
    keys = keys_of(changes, rules.key)
    rows = [key if len(rules.key) > 1 else (key,) for key in keys]
    if rules.newest_by is not None:
        newest = [
            None if type(c) is Tombstone or isinstance(c[rules.newest_by], Missing) else c[rules.newest_by]
            for c in changes
        ]
        rows = [(*row, age) for row, age in zip(rows, newest, strict=True)]
    natives, arrays = part.arrays(Prepared(rows, is_binary))
    numbers = list(map(sql.Identifier, stage_columns(len(part.names))))
    names = (sql.SQL("t.{} AS {}").format(sql.Identifier(n), c) for n, c in zip(part.names, numbers, strict=True))
    statement = query(
        "rank_rows",
        "",
        table=part.table.identifier,
        names=_list(names),
        keys=_list(numbers[: len(rules.key)]),
        age=sql.SQL("NULL::int") if rules.newest_by is None else numbers[-1],
        values=_list(_values(part, natives)),
        source=_arrays(part, natives),
    )
    ranks = cursor_on(connection).execute(_finished(statement), arrays, prepare=False).fetchall()
    return Marks([r[0] for r in ranks], [r[1] for r in ranks] if rules.newest_by is not None else ())


def place_in_copy(plan: Plan, context: str) -> tuple[int | None, str | None]:
    """Return the row and the column at which a COPY of ours has failed, as far as an error's context says them.

    Its words are in the server's language; what is known are the names.
    """
    told = {name: name for name in plan.names} | dict(zip(stage_columns(len(plan.names)), plan.names, strict=True))
    relations = "|".join(map(re.escape, (plan.table.name, _STAGE_NAME)))
    found = re.search(rf"^(?:COPY )?(?:{relations})\D{{1,12}}(\d+)(.*)$", context, re.MULTILINE)
    if found is None:
        return None, None
    # The word for column is before its name, or else behind it, as is the one for line.
    forms = (r"[,、] ?(?:[^\W\d]+ )?{} ?(?::.*)?", r"[^,、]{{1,8}}, {} [^\W\d]+(?::.*)?")
    named = [name for name in told if name in found[2]]  # of a wide table but a few, each a pattern of its own
    columns = (told[name] for form in forms for name in named if re.fullmatch(form.format(re.escape(name)), found[2]))
    return int(found[1]) - 1, next(columns, None)


def _copy(
    cursor: psycopg.Cursor[Any],
    target: sql.Identifier,
    names: Iterable[str],
    form: str,
    encoded: Iterable[bytes | bytearray],
) -> None:
    columns = _list(map(sql.Identifier, names))
    with cursor.copy(query("copy_rows", "", target=target, columns=columns, format=sql.SQL(form))) as copying:
        for part in encoded:
            copying.write(part)


def _insert(
    plan: Plan, conflict: Conflict, values: Sequence[sql.Composable], source: sql.Composable, ordinal: sql.Composable
) -> sql.Composed:
    keys = [values[i] for i in plan.positions(conflict.key)]
    key_columns = plan.table.pick(conflict.key)
    # By key two workers lock the same rows in one order; where rows have to do with each other theirs is kept.
    order_by = [ordinal] if plan.table.keeps_order else [*map(_collated, keys, key_columns), ordinal]
    order = sql.SQL("ORDER BY {}").format(_list(order_by)) if keys else sql.SQL("")
    # Postgres looks for a null in these before it looks whether the row is there, so they are what the row has.
    kept = plan.kept_not_null if conflict.mode == "upsert" else ()
    same = (
        sql.SQL("o.{} {} {}").format(sql.Identifier(c.name), _operator("=", c), value)
        for c, value in zip(key_columns, keys, strict=True)
    )
    where = sql.SQL(" AND ").join(same)
    stored = sql.SQL("(SELECT o.{} FROM {} AS o WHERE {})")
    return query(
        "insert_rows",
        "",
        table=plan.table.identifier,
        columns=_list(map(sql.Identifier, [*plan.names, *kept])),
        values=_list([*values, *(stored.format(sql.Identifier(n), plan.table.identifier, where) for n in kept)]),
        source=source,
        order=order,
        conflict=_clause(plan, conflict),
    )


@lru_cache(maxsize=256)
def _from_arrays(plan: Plan, conflict: Conflict, natives: tuple[bool, ...]) -> bytes:
    """Return what stores rows that are given as arrays; to compose it takes as long as to store one."""
    return _finished(_insert(plan, conflict, _values(plan, natives), _arrays(plan, natives), sql.SQL("s.ordinal")))


def counts_each(plan: Plan, conflict: Conflict) -> bool:
    """Tell whether Postgres counts each row as stored, unless a trigger of the table keeps it out."""
    return conflict.mode == "upsert" and conflict.newest_by is None and bool(_changed(plan, conflict))


def _changed(plan: Plan, conflict: Conflict) -> list[str]:
    """Return the columns that are set where a row is there."""
    allowed = {*plan.names, *conflict.always} if conflict.update is None else conflict.update
    set_names = [*plan.names, *(n for n in conflict.always if n not in plan.names)]
    return [n for n in set_names if n not in conflict.key and n in allowed]


def _clause(plan: Plan, conflict: Conflict) -> sql.Composable:
    if conflict.mode == "append":
        return sql.SQL("")
    key = _list(map(sql.Identifier, conflict.key))
    if conflict.mode == "insert-ignore":
        return sql.SQL("ON CONFLICT ({}) DO NOTHING").format(key) if conflict.key else sql.SQL("ON CONFLICT DO NOTHING")
    if not (changed := _changed(plan, conflict)):
        return sql.SQL("ON CONFLICT ({}) DO NOTHING").format(key)
    # Of a null and a number the number is the sum.
    plus = "{0} = coalesce(t.{0} + EXCLUDED.{0}, EXCLUDED.{0}, t.{0})"
    both = "{0} = (coalesce(t.{0}::jsonb, '{{}}') || EXCLUDED.{0}::jsonb)::{1}"
    forms = (plus if n in conflict.add else both if n in conflict.merge else "{0} = EXCLUDED.{0}" for n in changed)
    kinds = (sql.SQL(column.base_name) for column in plan.table.pick(changed))
    changes = _list(sql.SQL(f).format(sql.Identifier(n), k) for f, n, k in zip(forms, changed, kinds, strict=True))
    clause = sql.SQL("ON CONFLICT ({}) DO UPDATE SET {}").format(key, changes)
    if conflict.newest_by is None:
        return clause
    (newest,) = plan.table.pick([conflict.newest_by])
    is_newer = sql.SQL(" WHERE t.{0} IS NOT DISTINCT FROM NULL OR EXCLUDED.{0} {1} t.{0}")
    return clause + is_newer.format(sql.Identifier(newest.name), _operator(">=", newest))


def _arrays(plan: Plan, natives: Sequence[bool]) -> sql.Composed:
    types = (c.base_name if is_native else "text" for c, is_native in zip(plan.columns, natives, strict=True))
    arrays = _list(sql.SQL("{}::{}[]").format(sql.SQL(_PLACEHOLDER), sql.SQL(t)) for t in types)
    names = _list(map(sql.Identifier, [*stage_columns(len(plan.names)), "ordinal"]))
    return sql.SQL("(SELECT * FROM unnest({}) WITH ORDINALITY AS u({}))").format(arrays, names)


def _values(plan: Plan, natives: Sequence[bool]) -> list[sql.Composable]:
    """Return what an array's element is as a value of its column."""
    # To the type without length, for a cast to one with length would cut what does not fit. What a number in the text
    # of an interval means, say the fields of its column, at which only the input of the type looks, and no cast.
    cast, read = "s.{}::{}", "(SELECT r.v FROM jsonb_to_record(jsonb_build_object('v', s.{})) AS r(v {}))"
    return [
        sql.SQL("s.{}" if is_native else read if c.is_interval_of_fields else cast).format(
            sql.Identifier(name), sql.SQL(_input_type(c))
        )
        for name, c, is_native in zip(stage_columns(len(natives)), plan.columns, natives, strict=True)
    ]


def _collated(value: sql.Composable, column: Column) -> sql.Composable:
    """Return a value that is sorted as its column is: of those that are equal there the first one comes first."""
    return value if column.collation is None else sql.SQL("{} COLLATE {}").format(value, sql.SQL(column.collation))


def _input_type(column: Column) -> str:
    return column.type_name if column.is_interval_of_fields else column.base_name


def _operator(sign: Literal["=", ">="], column: Column) -> sql.Composable:
    """Return the operator that an index uses: off the search_path its sign is another one's, of citext that of text."""
    if column.operator_schema in (None, "pg_catalog"):
        return sql.SQL(sign)
    return sql.SQL("OPERATOR({}.{})").format(sql.Identifier(column.operator_schema), sql.SQL(sign))


def _list(parts: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)


def _finished(statement: sql.Composed) -> bytes:
    """Turn our marks into placeholders; a % in a name is none."""
    return statement.as_string(None).replace("%", "%%").replace(_PLACEHOLDER, "%s").encode()
