"""DDL: the statements that make a table and add columns to one. No I/O."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence

import psycopg
from psycopg import sql

from exactly_once.ledger.sql import query

from .errors import NAME_BYTES
from .table import Table

_SYSTEM_COLUMNS = {"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}
# Of a name without quotes a database in UTF-8 folds these letters only: Ü stays what it is.
_FOLDED = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_BYTE = re.compile(r"\b0x([0-9a-f]{2})")
_NAME = re.compile(r'"(?:[^"]|"")*"|[^."]+')


def can_be_column(name: str) -> bool:
    """Tell whether a column can have the name of a field."""
    try:
        is_short = 0 < len(name.encode()) <= NAME_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair, as of a text that was cut
        return False
    return is_short and name not in _SYSTEM_COLUMNS and not set('"\\\0') & set(name)


def elsewhere(table: object, names: Iterable[str], error: psycopg.errors.WrongObjectType) -> str:
    """Say where columns can be added that a partition, or a table of a type, cannot get itself."""
    where = "the table that it is a partition of, or to the type that it is a table of"
    return f"{table}: {error.diag.message_primary}; add {', '.join(names)} to {where}, or do without"


def unencodable(error: psycopg.errors.UntranslatableCharacter, names: Iterable[str]) -> list[str]:
    """Return the names with the character that the database's encoding lacks, which Postgres tells by its bytes."""
    character = bytes.fromhex("".join(_BYTE.findall(error.diag.message_primary or ""))).decode(errors="replace")
    return [name for name in names if character and character in name]


def parts_of(name: str) -> list[str]:
    """Return the parts of a table's name, read as SQL does."""
    parts = _NAME.findall(name)
    return [p[1:-1].replace('""', '"') if p.startswith('"') else p.translate(_FOLDED) for p in parts]


def create_table(name: Sequence[str], columns: Mapping[str, str], key: Sequence[str] = ()) -> sql.Composed:
    """Write the CREATE TABLE; the key becomes the primary key."""
    parts = [sql.SQL("{} {}").format(sql.Identifier(c), sql.SQL(kind)) for c, kind in columns.items()]
    if key:
        parts.append(sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, key))))
    return query("create_table", "", table=sql.Identifier(*name), columns=sql.SQL(", ").join(parts))


def add_columns(table: Table, columns: Mapping[str, str]) -> list[sql.Composed]:
    """Write the ALTER TABLE that adds what is missing; nothing is ever dropped or changed."""
    there = {c.name for c in table.columns}
    new = {name: kind for name, kind in columns.items() if name not in there}
    if not new:
        return []
    parts = [sql.SQL("ADD COLUMN IF NOT EXISTS {} {}").format(sql.Identifier(n), sql.SQL(k)) for n, k in new.items()]
    return [sql.SQL("ALTER TABLE {} {}").format(table.identifier, sql.SQL(", ").join(parts))]
