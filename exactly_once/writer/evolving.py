"""Evolving: the columns that the values of messages ask for, and the statement that adds them. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

import msgspec
from psycopg import sql

from .errors import NAME_BYTES
from .json_shape import BYTE_ORDER_MARK, fields_in
from .table import Table

_SYSTEM_COLUMNS = {"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}
_moment: Callable[[bytes], datetime] = msgspec.json.Decoder(Annotated[datetime, msgspec.Meta(tz=True)]).decode


def can_be_column(name: str) -> bool:
    """Tell whether a column can have the name of a field."""
    try:
        is_short = 0 < len(name.encode()) <= NAME_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair, as of a text that was cut
        return False
    return is_short and name not in _SYSTEM_COLUMNS and not set('"\\\0') & set(name)


def add_columns(table: Table, columns: Mapping[str, str]) -> list[sql.Composed]:
    """Write the ALTER TABLE that adds what is missing; nothing is ever dropped or changed."""
    there = {c.name for c in table.columns}
    new = {name: kind for name, kind in columns.items() if name not in there}
    if not new:
        return []
    parts = [sql.SQL("ADD COLUMN IF NOT EXISTS {} {}").format(sql.Identifier(n), sql.SQL(k)) for n, k in new.items()]
    return [sql.SQL("ALTER TABLE {} {}").format(table.identifier, sql.SQL(", ").join(parts))]


def types_in(names: Collection[str], values: Iterable[bytes | None]) -> dict[str, str]:
    """Return the types of columns that hold certain fields of objects; none for a field that is null everywhere."""
    types: dict[str, str | None] = {}
    for value in values:
        if value is None:
            continue
        fields = fields_in(value.removeprefix(BYTE_ORDER_MARK))
        for name in names:
            if name in fields:
                types[name] = wider(types.get(name), type_of(msgspec.json.decode(fields[name])))
    return {name: kind for name, kind in types.items() if kind is not None}


def type_of(value: Any) -> str | None:
    """Return the type of a column that holds a value of JSON; None for null."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "bigint" if -(1 << 63) <= value < (1 << 63) else "numeric"
    if isinstance(value, (float, Decimal)):
        return "numeric" if math.isfinite(value) else "jsonb"  # a double would change most decimal fractions
    if isinstance(value, str):
        # A moment is what the decoder takes for one: other notations of ISO 8601 it refuses.
        try:
            _moment(msgspec.json.encode(value))
        except (msgspec.ValidationError, UnicodeEncodeError):
            return "text"
        return "timestamptz"
    return "jsonb"


def wider(one: str | None, other: str | None) -> str | None:
    """Find a type that holds the values of both."""
    if one is None or other is None or one == other:
        return one or other
    kinds = {one, other}
    if kinds <= {"bigint", "numeric"}:
        return "numeric"
    return "text" if kinds <= {"text", "timestamptz"} else "jsonb"
