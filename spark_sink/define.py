"""Define: tables made of the schema of a frame, and columns added to them, before its rows are written."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from exactly_once._log import about
from exactly_once.ledger.session import Connection
from exactly_once.writer import Table, TableError
from exactly_once.writer.ddl import add_columns, can_be_column, create_table, parts_of
from exactly_once.writer.errors import NAME_BYTES, TableMissing
from exactly_once.writer.table import alter, read_table

from .errors import FrameError
from .frame import check_key, has_places
from .options import Options

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

logger = logging.getLogger(__name__)

# By Spark's type the one of Postgres that takes each of its values as it is.
_TYPES = {
    "boolean": "boolean",
    **dict.fromkeys(("byte", "short"), "smallint"),
    "integer": "integer",
    "long": "bigint",
    "float": "real",
    "double": "double precision",
    **dict.fromkeys(("string", "char", "varchar"), "text"),
    "binary": "bytea",
    "date": "date",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
    "time": "time",
    "daytimeinterval": "interval",
    **dict.fromkeys(("struct", "map", "variant"), "jsonb"),
}


def define(connection: Connection, options: Options, schema: StructType | None) -> list[sql.Composed]:
    """Make or extend the table of a frame, where that was asked for; return what was executed.

    :raises FrameError: for a column that can be none of Postgres, by its type or its name.
    :raises TableError: when there is no table and none is to be made, or the role may not do it, or it would not stay.
    """
    name = str(options.table)
    table: Table | None = None
    executed: list[sql.Composed] = []
    try:
        table = read_table(connection, name)
    except TableMissing as error:
        if schema is None or not options.create_table:
            raise TableError(f"{error}; create_table=True makes one of the frame that is written") from None
        columns = new_columns(schema, options)
        if options.mode in ("upsert", "insert-ignore") and not options.key:
            raise FrameError(f"{name} is to be made, and mode={options.mode!r} needs a key: say key=[...]") from None
        check_key(options.key or (), columns, name)
        executed += _execute(connection, name, [create_table(parts_of(name), columns, options.key or ())])
        # Another driver may have made it meanwhile, of fewer columns. Of what is no name there is still none.
        with contextlib.suppress(TableMissing):
            table = read_table(connection, name)
    if table is not None and table.schema.startswith("pg_temp_"):
        raise TableError(f"{name} is a temporary table, which ends with its connection; name the schema of another one")
    if table is not None and schema is not None:
        executed += _execute(connection, name, add_columns(table, new_columns(schema, options, table)))
    return executed


def _execute(connection: Connection, name: str, statements: Iterable[sql.Composed]) -> list[sql.Composed]:
    """Execute statements about a table; return those that another driver has not."""
    executed = []
    for statement in statements:
        try:
            # Another driver may make it in the same moment; IF NOT EXISTS does not wait for that.
            with (
                contextlib.suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable),
                connection.transaction(),
            ):
                alter(connection, statement)
                executed.append(statement)
        except psycopg.errors.TooManyColumns as error:  # dropped ones count
            raise TableError(f"{name}: {error.diag.message_primary}; leave columns out of the frame") from error
        except psycopg.ProgrammingError as error:
            text = statement.as_string(None)
            raise TableError(f"{name}: {error.diag.message_primary}; have somebody execute who may: {text}") from error
    return executed


def log(options: Options, statements: Iterable[sql.Composed], *, has_written: bool) -> None:
    """Say what was executed, and of a table that was made for a group which has written what it lacks."""
    lacks = "; what the group has written before does not come again" if has_written else ""
    for text in (statement.as_string(None) for statement in statements):
        told = lacks if text.startswith("CREATE") else ""
        logger.warning("%s%s", text, told, extra=about("ddl", group=options.group_id))


def new_columns(schema: StructType, options: Options, table: Table | None = None) -> dict[str, str]:
    """Return the columns that a frame has and a table lacks, with their types; none where none are to be added.

    What only tells where a row comes from is left out, as it is where rows are written.

    :raises FrameError: for one that can be no column.
    """
    if table is not None and options.evolve is None:
        return {}
    known = set() if table is None else {c.name for c in table.columns}
    left_out = {*(options.place_columns if has_places(schema, options) else ()), options.claim} - {*(options.key or ())}
    found = {f.name: f.dataType for f in schema.fields if f.name not in known | left_out}
    types = {}
    for name, kind in found.items():
        if alike := [other for other in (*known, *found) if other != name and other.lower() == name.lower()]:
            raise FrameError(
                f"columns {name!r} and {alike[0]!r} differ in upper and lower case only; rename one of them"
            )
        if not can_be_column(name):
            raise FrameError(
                f"no column can have the name {name!r} (over {NAME_BYTES} bytes, a quote or backslash, or Postgres's "
                "own); rename it"
            )
        if (type_name := _type_of(kind)) is None:
            raise FrameError(
                f"column {name!r} is {kind.simpleString()}, and no type of Postgres takes each such value as it is; "
                "cast it in the frame"
            )
        types[name] = type_name
    return types


def _type_of(kind: DataType) -> str | None:
    """Return the type of a column; None where there is none."""
    name = kind.typeName()
    if name == "decimal":
        return f"numeric({kind.precision},{kind.scale})"  # type: ignore[attr-defined]
    if name != "array":
        return _TYPES.get(name)
    element = _type_of(kind.elementType)  # type: ignore[attr-defined]
    is_nested = element is not None and element.endswith(("jsonb", "[]"))
    return "jsonb" if is_nested else element and f"{element}[]"
