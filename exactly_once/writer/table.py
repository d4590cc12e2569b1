"""Table: what the catalogue says of a table that is written to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from exactly_once.errors import ConfigurationError
from exactly_once.ledger.rows import LOCK_SECONDS
from exactly_once.ledger.session import Connection, cursor_on, last_row
from exactly_once.ledger.sql import query

from .errors import NAME_BYTES, TableError, TableMissing

# What a field that a row does not have becomes: null, the column's default or, in an upsert, what it was.
OnMissing = Literal["null", "default", "keep"]

# What is logged of one with :attr:`Table.is_foreign`.
ABROAD = "%s or a partition of it is a foreign table: after a crash at COMMIT rows can be there twice"
# Set how long a statement waits for a lock, for the rest of the transaction; return how long it was before.
_LIMIT = "SELECT current_setting('lock_timeout'), set_config('lock_timeout', %s, true)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column; of a domain it tells the type below, which is what goes over the wire."""

    name: str
    type_name: str
    base_name: str
    """The type below the domains, without length or precision."""
    type_oid: int
    typmod: int = -1
    kind: str = "b"
    is_not_null: bool = False
    has_default: bool = False
    is_generated: bool = False
    is_identity: bool = False
    """Whether Postgres numbers it always, so that it is filled only where it is named."""
    is_numbered: bool = False
    """Whether its default is the next number of a sequence."""
    is_domain: bool = False
    is_deterministic: bool = True
    collation: str | None = None
    """As SQL writes it; None for that of the database, and for a type that has none."""
    operator_schema: str | None = None
    """Where the operators are by which an index of its type compares; None for a type without any of its own."""
    attributes: Sequence[Column] = ()
    """Of a composite type."""
    part: Column | None = None
    """What the elements of an array, the bounds of a range, or the ranges of a multirange are; it has no name."""

    @property
    def element(self) -> Column | None:
        """What an array's elements are; None for what is no array."""
        return self.part if self.kind == "b" else None

    @property
    def is_interval_of_fields(self) -> bool:
        """Whether it is an interval, or an array of such, of certain fields or digits: ``interval year to month``."""
        return self.typmod >= 0 and (self.element or self).base_name == "interval"

    def is_left_out(self, missing: OnMissing | None) -> bool:
        """Tell whether a row that lacks it is stored without it, and not with a null."""
        if missing == "keep":
            return True
        return self.has_default and (missing != "null" or self.is_not_null)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as it was when it was read."""

    schema: str
    name: str
    columns: Sequence[Column]
    keys: Sequence[tuple[str, ...]] = ()
    """The sets of columns that ON CONFLICT can name, the primary key first."""
    primary_key: tuple[str, ...] = ()
    """That of them which is the primary key; empty where it is checked late, or there is none."""
    can_be_locked: bool = True
    """Whether it is none of another server."""
    is_foreign: bool = False
    """Whether it, or a partition of it, is of another server."""
    is_unlogged: bool = False
    """Whether a crash of the server empties it, or a partition of it."""
    has_row_security: bool = False
    """Whether policies apply to us; Postgres refuses COPY then."""
    has_rules: bool = False
    """Whether rules rewrite INSERT or UPDATE; a COPY would pass them by."""
    has_delete_rules: bool = False
    notices_deletes: bool = False
    """Whether something hangs on deletes: a foreign key that points here, a trigger, or a table that inherits."""
    keeps_order: bool = False
    """Whether triggers, rules or policies see rows, or a foreign key ties some to others: changes keep their order."""
    shape: str = field(default="", repr=False)
    """All of this, as the server tells it for comparison."""

    @property
    def identifier(self) -> sql.Identifier:
        """The table's full name."""
        return sql.Identifier(self.schema, self.name)

    def __str__(self) -> str:
        return self.identifier.as_string(None)

    @property
    def can_copy(self) -> bool:
        """Whether rows can be appended by COPY."""
        return not self.has_row_security and not self.has_rules

    @property
    def writable(self) -> list[str]:
        """The columns that take values, but for those that Postgres always numbers by itself."""
        return [c.name for c in self.columns if not c.is_generated and not c.is_identity]

    def refuse_unlogged(self) -> None:
        """Refuse a table that loses rows while their offsets stay.

        :raises TableError: for an unlogged one.
        """
        if self.is_unlogged:
            raise TableError(
                f"{self} or a partition of it is unlogged: a crash of the server would empty it, and its messages "
                f"would not come again. ALTER TABLE {self} SET LOGGED, or that partition"
            )

    def pick(self, names: Sequence[str]) -> list[Column]:
        """Return columns by name.

        :raises TableError: for a name that the table does not have, or that takes no values.
        """
        known = {c.name: c for c in self.columns}
        if missing := [n for n in names if n not in known]:
            raise TableError(
                f"{self} has no column {', '.join(map(repr, missing))}; it has {', '.join(map(repr, known))}"
            )
        if generated := [n for n in names if known[n].is_generated]:
            raise TableError(f"{self}: {', '.join(map(repr, generated))} is generated by Postgres and takes no values")
        if len(set(names)) < len(names):
            raise TableError(f"{self}: a column is named twice in {', '.join(names)}")
        return [known[n] for n in names]


def refuse_encoding(connection: Connection) -> None:
    """Refuse a connection whose names and values are not in UTF-8.

    :raises ConfigurationError: saying what mends it.
    """
    if (encoding := connection.info.encoding) != "utf-8":
        raise ConfigurationError(f"the connection's client_encoding is {encoding}; say client_encoding=UTF8")


def read_table(connection: Connection, name: str | sql.Identifier) -> Table:
    """Read a table from the catalogue. ``name`` is written as in SQL: ``bank.payment``, ``"Odd Name"``.

    :raises TableError: when there is none, or rows cannot be copied into it.
    """
    refuse_encoding(connection)
    text = name.as_string(None) if isinstance(name, sql.Identifier) else name
    cursor, by_name = cursor_on(connection), cursor_on(connection, dict_row)
    try:
        (found,) = by_name.execute(query("find_table", ""), {"name": text}, prepare=False)
    except (
        psycopg.errors.InvalidName,
        psycopg.errors.InvalidParameterValue,
        psycopg.errors.SyntaxError,
        psycopg.errors.FeatureNotSupported,
    ) as error:
        quoted = sql.Identifier(text).as_string(None)
        hint = "" if '"' in text or not text else f"; a table that has just this name is written {quoted}"
        raise TableError(f"{text!r} is not the name of a table as SQL writes it: {error}{hint}") from error
    if (long := found.pop("cut")) is not None:
        raise TableError(f"{text}: Postgres cuts the name {long}, which is over {NAME_BYTES} bytes: say another one")
    if found["oid"] is None:
        last = text.rpartition(".")[2].strip('"')
        alike = ", ".join(a for (a,) in cursor.execute(query("find_alike", ""), {"name": last}, prepare=False))
        hint = f"; there is {alike} (upper case needs quotes, another schema its name)" if alike else ""
        raise TableMissing(f"there is no table {text}{hint}")
    oid, is_writable, reads_nulls = (found.pop(name) for name in ("oid", "is_writable", "reads_nulls"))
    if not reads_nulls:  # a null in an array would be stored as the text NULL
        raise TableError(f"{text}: array_nulls is off in this session: ALTER ROLE or DATABASE ... SET array_nulls = on")
    if not is_writable:
        raise TableError(f"{text} is not a table; rows can be written to tables, partitioned and foreign ones too")
    columns = _columns(connection, oid)
    if all(c.is_generated for c in columns):
        raise TableError(f"{text} has no column that takes values: ALTER TABLE {text} ADD COLUMN ...")
    keys = cursor.execute(query("keys_of_table", ""), {"oid": oid}, prepare=False).fetchall()
    return Table(
        **found,
        columns=columns,
        keys=[tuple(key) for key, _ in keys],
        primary_key=next((tuple(key) for key, is_primary in keys if is_primary), ()),
        shape=read_shape(connection, sql.Identifier(found["schema"], found["name"])),
    )


def alter(connection: Connection, statement: sql.Composed) -> None:
    """Execute DDL that waits for its lock for some seconds only, as readers queue behind it.

    :raises psycopg.errors.LockNotAvailable: when somebody has locked the table for longer.
    """
    # What comes after it may wait as long as it did before.
    (before, _) = last_row(connection.execute(_LIMIT, [f"{LOCK_SECONDS}s"], prepare=False))
    connection.execute(statement, prepare=False)
    connection.execute(_LIMIT, [before], prepare=False)


def read_shape(connection: Connection, identifier: sql.Identifier) -> str:
    """Tell what the table is now; empty when it is gone."""
    row = cursor_on(connection).execute(_shape_of(identifier), prepare=False).fetchone()
    return str(row[0]) if row else ""


def lock_shape(connection: Connection, table: Table) -> str:
    """Tell the same, and see to it that it stays so until the transaction ends."""
    if not table.can_be_locked:  # and it is not copied to byte by byte either
        return read_shape(connection, table.identifier)
    statement = sql.SQL("; ").join([query("lock_table", "", table=table.identifier), _shape_of(table.identifier)])
    (shape,) = last_row(cursor_on(connection).execute(statement, prepare=False))
    return str(shape)


def _shape_of(identifier: sql.Identifier) -> sql.Composed:
    return query("shape_of_table", "", qualified=sql.Literal(identifier.as_string(None)))


def _columns(
    connection: Connection, oid: int | None, *, part: int | None = None, typmod: int | None = None
) -> list[Column]:
    """Return the columns of a table or composite type, or the part of a type as the only one."""
    values = {"oid": oid, "part": part, "typmod": typmod}
    rows = cursor_on(connection, dict_row).execute(query("columns_of_table", ""), values, prepare=False).fetchall()
    columns = []
    for row in rows:
        composite, part = row.pop("composite_oid"), row.pop("part_oid")
        attributes = _columns(connection, composite) if composite else ()
        # The modifier of an array is that of its elements; ranges have none.
        parts = _columns(connection, None, part=part, typmod=row["typmod"]) if part else [None]
        columns.append(Column(**row, attributes=attributes, part=parts[0]))
    return columns
