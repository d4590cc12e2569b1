"""Plan: how rows of certain columns are looked at, converted and encoded. No I/O."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from confluent_kafka import Message
from psycopg._copy_base import format_row_binary
from psycopg.adapt import Transformer
from psycopg.pq import Format

from exactly_once.ledger.session import ADAPTERS

from .changes import MISSING, Missing, Row, Tombstone
from .codec import ESCAPED_NUL, Codec, Naive
from .codecs import codec_of, name_of
from .errors import BadRow, TableError, cut, has_name, origin
from .table import Column, OnMissing, Table

_NONE = type(None)
# Types whose order Python knows, too; that of text is the collation's.
_ORDERED = frozenset(
    {"int2", "int4", "int8", "oid", "numeric", "bool", "uuid", "date", "timestamp", "timestamptz", "time", "bytea"}
)
_COMPARABLE = _ORDERED | {"text", "varchar", "name"}
_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
# By turns so many rows are made and encoded: one by one is a sixth slower, all at once needs their memory.
_CHUNK = 256
# The server stores one part while the next one is made.
_PART_BYTES = 64 * 1024
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows that were looked at, and whether all their values can go in binary."""

    rows: Iterable[Row]
    is_binary: bool


class Plan:
    """The columns that rows fill, in the rows' order, and the codec of each."""

    def __init__(
        self, table: Table, names: Sequence[str], *, naive: Naive = "refuse", missing: OnMissing | None = None
    ) -> None:
        self.table = table
        self._naive = naive
        self._missing = missing
        self.names = tuple(names)
        self.columns: list[Column] = table.pick(names)
        self.codecs: list[Codec] = [codec_of(column, naive) for column in self.columns]
        # Whether MISSING stays what it is, for it is null elsewhere.
        self._is_left_out = [column.is_left_out(missing) for column in self.columns]
        self.may_leave_out = any(self._is_left_out)

    @property
    def kept_not_null(self) -> Sequence[str]:
        """The columns that rows lack, that keep what they are, and that take no null."""
        if self._missing != "keep":
            return ()
        unfilled = (c for c in self.table.columns if c.name not in self.names)
        return [c.name for c in unfilled if c.is_not_null and not (c.has_default or c.is_generated or c.is_identity)]

    def positions(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return where columns are in a row.

        :raises TableError: for one that the rows do not have.
        """
        if unknown := [n for n in names if n not in self.names]:
            text = f"{', '.join(unknown)} is not among the columns that are written: {', '.join(self.names)}"
            if numbered := [c.name for c in self.table.columns if c.name in unknown and c.is_identity]:
                text += f"; Postgres numbers {', '.join(numbered)} by itself unless fields, rename or columns name it"
            raise TableError(text)
        return tuple(map(self.names.index, names))

    def part(self, names: Sequence[str]) -> Plan:
        """Return the plan of only some of the columns."""
        return Plan(self.table, names, naive=self._naive, missing=self._missing)

    def by_columns(
        self,
        prepared: Prepared,
        *,
        first_wins: Sequence[str] | None = None,
        origins: Sequence[Message] | None = None,
    ) -> Iterator[tuple[Plan, Prepared]]:
        """Split rows by the columns that they have, in the order in which those first appear.

        Where the first row of each key ``first_wins`` is to be stored, and it may come twice, no row overtakes another.

        :raises BadRow: for a row that lacks a column of that key, or all columns.
        """
        rows = prepared.rows
        if not self.may_leave_out or not any(MISSING in row for row in rows):
            yield self, prepared
            return
        rows = list(rows)
        keeps_order = self.table.keeps_order
        key = self.positions([name for name in first_wins or () if name in self.names])
        self.refuse_keyless(rows, key, origins, without=(MISSING,))
        if first_wins is not None and not keeps_order:
            # Without a key any constraint may be the one of which two rows are the same.
            positions = self.positions(first_wins)
            columns = [[row[i] for row in rows] for i in positions]
            keeps_order = not columns or not all(map(self.is_comparable, positions, columns))
            keeps_order = keeps_order or len(set(zip(*columns, strict=True))) < len(rows)
        groups: dict[tuple[int, tuple[int, ...]], list[Row]] = {}
        number, before = 0, None
        for row in rows:
            present = tuple(i for i, value in enumerate(row) if value is not MISSING)
            number += keeps_order and present != before
            before = present
            groups.setdefault((number, present), []).append(tuple(row[i] for i in present))
        for (_, present), some in groups.items():
            if not present:
                raise BadRow("a row has none of the columns; there is nothing to store")
            yield self.part([self.names[i] for i in present]), Prepared(some, prepared.is_binary)

    def refuse_keyless(
        self, rows: Sequence[Row], key: Sequence[int], origins: Sequence[Message] | None, *, without: Sequence[Any]
    ) -> None:
        """Refuse a key without a value: it would belong to no row, and come again as another one."""
        for position in key:
            values = [row[position] for row in rows]
            for lacking in without:
                if lacking in values:
                    row = values.index(lacking)
                    at = origin(origins, row)
                    raise BadRow("the key has no value", message=at, row=row, column=self.names[position])

    def prepare(
        self, rows: Sequence[Row], *, exact: Collection[str] = (), origins: Sequence[Message] | None = None
    ) -> Prepared:
        """Look at all values but those of the columns in ``exact``, and convert those that need it.

        :raises BadRow: for a value that the column would not hold as it is.
        """
        # A decoder that tells what is missing does so for all columns.
        is_told = self._missing in ("default", "keep")
        unsure = [i for i, name in enumerate(self.names) if name not in exact or is_told]
        if not unsure or not rows:
            return Prepared(rows, is_binary=True)
        try:
            columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
        except ValueError:
            columns = []
        if len(columns) != len(self.names):
            raise self.find_bad(rows, origins) or TableError(f"{self.table}: rows do not fit {', '.join(self.names)}")
        is_binary = True
        has_changed = False
        for i in unsure:
            codec = self.codecs[i]
            if codec.accepts(columns[i]):
                continue
            converted: list[Any] = []
            try:
                converted.extend(map(codec.convert, columns[i]))  # which keeps those before the one that raises
            except ValueError as error:
                raise _bad(error, origins, len(converted), self.names[i]) from error
            columns[i] = converted if self._is_left_out[i] else [None if v is MISSING else v for v in converted]
            is_binary = is_binary and codec.is_binary(columns[i])
            has_changed = True
        return Prepared(list(zip(*columns, strict=True)) if has_changed else rows, is_binary)

    def encode(self, prepared: Prepared) -> tuple[str, Iterable[bytes | bytearray]]:
        """Encode rows for COPY; return the format's name and the bytes, which are made while they are taken."""
        wires = [codec.wire for codec in self.codecs if codec.wire is not None]
        if prepared.is_binary and len(wires) == len(self.codecs):
            return "BINARY", encode_binary(prepared.rows, wires)
        return "TEXT", [encode_text(prepared.rows, [codec.as_text for codec in self.codecs])]

    def arrays(self, prepared: Prepared) -> tuple[list[bool], list[list[Any]]]:
        """Return the rows by columns: where all values are of the column's own type as that, else as text.

        Before the arrays comes which of them are of their column's own type.
        """
        natives, arrays = [], []
        for column, codec, values in zip(self.columns, self.codecs, zip(*prepared.rows, strict=True), strict=True):
            # The driver takes the type of all ranges in a list from one bound of the first, and writes moments as text
            # in zones that Postgres does not read.
            is_scalar = column.kind == "b" and column.element is None and codec.wire == column.type_oid
            is_scalar = is_scalar and name_of(column.type_oid) != "timestamptz"
            is_native = prepared.is_binary and is_scalar and len({*map(type, values)} - {_NONE}) <= 1
            natives.append(is_native)
            arrays.append(list(values) if is_native else list(map(codec.as_text, values)))
        return natives, arrays

    def is_comparable(self, position: int, values: Iterable[Any]) -> bool:
        """Tell whether Python finds two values of a column equal exactly when Postgres does."""
        return self._is_plain(position) and self._is_native(position, values)

    def has_one_form(self, position: int) -> bool:
        """Tell whether equal values of a column are written alike, unlike 1.0 and 1.00, or a and A of citext."""
        column = self.columns[position]
        return self._is_plain(position) and (name_of(column.type_oid) != "numeric" or column.typmod >= 0)

    def _is_plain(self, position: int) -> bool:
        column = self.columns[position]
        is_known = column.kind == "e" or (column.element is None and name_of(column.type_oid) in _COMPARABLE)
        return is_known and column.is_deterministic

    def is_ordered(self, position: int, values: Iterable[Any]) -> bool:
        """Tell whether Python finds a value of a column the greater one exactly when Postgres does."""
        column = self.columns[position]
        return column.kind == "b" and name_of(column.type_oid) in _ORDERED and self._is_native(position, values)

    def _is_native(self, position: int, values: Iterable[Any]) -> bool:
        """Tell whether Python compares values as Postgres does: none is a text for the server to read, or is odd."""
        codec = self.codecs[position]
        return codec.wire is not None and not any(codec.is_literal(value) or _is_odd(value) for value in values)

    def column_refusing(self, row: Row, reason: str) -> str | None:
        """Return the column whose value Postgres refuses for this reason, if just one can be meant.

        Beside COPY it names none: the type is told, or the value, or both.
        """
        if type(row) is Tombstone or len(row) != len(self.names):
            return None
        pairs = list(zip(self.names, self.columns, row, strict=True))
        by_type = [name for name, column, _ in pairs if has_name(reason, column.type_name)]
        by_value = [name for name, _, value in pairs if isinstance(value, str) and f'"{value}"' in reason]
        both = [name for name in by_type if name in by_value]
        return next((found[0] for found in (both, by_type, by_value) if len(found) == 1), None)

    def find_bad(self, rows: Iterable[Row], origins: Sequence[Message] | None) -> BadRow | None:
        """Look for the row that cannot be made or encoded, one by one; None when all can."""
        iterator = iter(rows)
        for index in itertools.count():
            try:
                row = next(iterator)
            except StopIteration:
                return None
            except BadRow as error:
                return error
            except Exception as error:  # noqa: BLE001 - whatever a decoder raises is about its message
                return _bad(error, origins, index, None)
            if type(row) is Tombstone:
                if any(isinstance(value, str) and "\0" in value for value in row):
                    what = f"text in Postgres holds no NUL, so no row has this key: {cut(tuple(row))}"
                    return BadRow(what, message=origin(origins, index), row=index)
                continue
            if len(row) != len(self.names):
                return BadRow(
                    f"{len(row)} values for {len(self.names)} columns", message=origin(origins, index), row=index
                )
            for name, column, codec, value in zip(self.names, self.columns, self.codecs, row, strict=True):
                if value is None or isinstance(value, Missing):
                    continue
                try:
                    converted = codec.convert(value)
                    # Also within a list or record. The driver names nothing, and Postgres not always the column.
                    text = codec.as_text(converted) or ""
                    if "\0" in text or (name_of(column.type_oid) == "jsonb" and ESCAPED_NUL.search(text.encode())):
                        raise ValueError(
                            f'text in Postgres holds no NUL; nul = "strip" takes it out of JSON: {cut(value)}'
                        )
                    if codec.wire is not None and codec.is_binary([converted]):
                        deque(encode_binary([[converted]], [codec.wire]), maxlen=0)
                    else:
                        encode_text([[converted]], [codec.as_text])
                except Exception as error:  # noqa: BLE001 - the driver's dumpers raise what they please
                    return _bad(error, origins, index, name)
        return None


def _is_odd(value: Any) -> bool:
    """Tell whether Python finds a value equal to others than Postgres does."""
    if isinstance(value, datetime):
        # Of two times in one zone it compares the clocks, one of which may show an hour twice.
        return value.tzinfo is not None and value.tzinfo.utcoffset(None) is None
    return isinstance(value, (bytearray, memoryview)) or (isinstance(value, Decimal) and value.is_nan())


def encode_binary(rows: Iterable[Sequence[Any]], wires: Sequence[int]) -> Iterator[bytearray]:
    """Encode rows whose values are exactly what the driver dumps as these types; yield parts of a COPY."""
    # The driver's own function for one row: what Copy.write_row calls, without its two calls in between,
    # which cost more than the dumping.
    transformer = Transformer(ADAPTERS)
    transformer.set_dumper_types(wires, Format.BINARY)
    encoded = bytearray(_SIGNATURE)
    iterator = iter(rows)
    while chunk := list(itertools.islice(iterator, _CHUNK)):
        deque(map(format_row_binary, chunk, itertools.repeat(transformer), itertools.repeat(encoded)), maxlen=0)
        if len(encoded) >= _PART_BYTES:
            yield encoded
            encoded = bytearray()
    encoded += _TRAILER
    yield encoded


def encode_text(rows: Iterable[Sequence[Any]], writers: Sequence[Callable[[Any], str | None]]) -> bytes:
    """Encode rows by the literals of their values."""
    lines = []
    for row in rows:
        texts = (write(value) for write, value in zip(writers, row, strict=True))
        lines.append("\t".join("\\N" if text is None else text.translate(_ESCAPES) for text in texts) + "\n")
    return "".join(lines).encode()


def _bad(error: Exception, origins: Sequence[Message] | None, index: int, column: str | None) -> BadRow:
    message = origin(origins, index)
    reason = str(error) or type(error).__name__
    if column is None:
        # A decoder's error.
        reason = f"{reason}: {cut(message.value())}" if message is not None else reason
    return BadRow(reason, message=message, row=index, column=column)
