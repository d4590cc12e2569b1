"""JSON: messages whose value is an object, decoded by msgspec into exactly what the table's columns take."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

from confluent_kafka import Message

from exactly_once.errors import ConfigurationError

from .changes import MISSING, Row, Tombstone
from .codec import Naive
from .codecs import name_of
from .decoding import Decoded, Envelope, Source
from .errors import BadRow, TableError
from .json_shape import UNSET, Shape
from .json_types import Epoch, is_exact, json_type
from .statements import Mode
from .table import Column, Table

OnTombstone = Literal["delete", "refuse", "skip"]
"""What to do with a message without a value."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EXPONENTS: dict[Epoch, int] = {"s": 6, "ms": 3, "us": 0, "ns": -3}
_DECIMAL_DIGITS = 28
"""What Python calculates with by default."""


class JsonDecoder:
    """Decodes objects by the columns of the table: a field of the same name for each, others are ignored.

    ``fields`` maps columns to where their value is, with dots for objects in objects: ``{"city":
    "customer.address.city"}``; only those are filled then. A tuple of names is a path whose names have dots.
    ``metadata`` fills columns from the envelope, ``rest`` names a jsonb column that collects all other fields,
    ``epoch`` says which timestamps are numbers, and of what unit. Values are strict: no number in a string, unless
    ``lax``; timestamps in ISO 8601 with a zone for timestamptz and without one for timestamp, unless
    ``naive_timestamps="utc"``. Of a message without a value only the key is decoded, as an object or as plain text.
    """

    def __init__(
        self,
        fields: Mapping[str, str | tuple[str, ...]] | None = None,
        *,
        metadata: Mapping[str, Source] | None = None,
        rest: str | None = None,
        epoch: Mapping[str, Epoch] | None = None,
        lax: bool = False,
        naive_timestamps: Naive = "refuse",
        missing: Literal["null", "apart"] = "null",
        on_tombstone: OnTombstone | None = None,
    ) -> None:
        self._fields = dict(fields) if fields is not None else None
        self._envelope = Envelope(metadata)
        self._rest = rest
        self._epoch = dict(epoch or {})
        self._lax = lax
        self._naive: Naive = naive_timestamps
        self._tells_missing = missing == "apart"
        self._on_tombstone = on_tombstone
        if unknown := set(self._epoch.values()) - set(_EXPONENTS):
            raise ConfigurationError(f"epoch={epoch!r}: the units are s, ms, us and ns, not {', '.join(unknown)}")

    def prepare(self, table: Table, *, mode: Mode, key: Sequence[str]) -> None:
        """Build the decoder of this table's columns."""
        self._envelope.prepare(table)
        paths = self._paths(table)
        columns = table.pick(list(paths))
        if unknown := set(self._epoch) - set(paths):
            raise TableError(f"epoch= names {', '.join(sorted(unknown))}, which no field fills")
        types = {c.name: (paths[c.name], json_type(c, self._naive, self._epoch.get(c.name))) for c in columns}
        self._shape = Shape(types, lax=self._lax, tells_missing=self._tells_missing)
        self._columns = (*paths, *([self._rest] if self._rest else []), *self._envelope.columns)
        self._exact = {c.name for c in columns if is_exact(c, self._naive, self._epoch.get(c.name))}
        self._exact |= self._envelope.exact
        self._fixes = {i: fix for i, c in enumerate(columns) if (fix := self._fix(c)) is not None}
        self._key = _Key(table, key, paths, self) if mode == "upsert" else None
        if self._on_tombstone == "delete" and mode != "upsert":
            raise ConfigurationError("on_tombstone='delete' needs mode='upsert'")

    def decode(self, messages: Sequence[Message]) -> Decoded:
        """Describe the rows; a message is decoded when its row is asked for."""
        if None in map(Message.value, messages):
            return self._decode_with_tombstones(messages)
        return self._decoded(messages, lambda: self._rows(messages))

    def _decode_with_tombstones(self, messages: Sequence[Message]) -> Decoded:
        what = self._on_tombstone or ("delete" if self._key is not None else "refuse")
        if what == "skip":
            messages = [m for m in messages if m.value() is not None]
            return self._decoded(messages, lambda: self._rows(messages))

        def make() -> Iterator[Row]:
            for message in messages:
                if message.value() is not None:
                    yield next(self._rows([message]))
                elif what == "delete" and self._key is not None:
                    yield self._key.tombstone(message, self._envelope)
                else:
                    raise BadRow("the message has no value; there is nothing to store", message=message)

        return self._decoded(messages, make)

    def _decoded(self, messages: Sequence[Message], make: Callable[[], Iterator[Row]]) -> Decoded:
        return Decoded(columns=self._columns, origins=messages, make=make, exact=self._exact)

    def _rows(self, messages: Sequence[Message]) -> Iterator[Row]:
        """Chain what is to be done for each message; where nothing is special, the loop stays in C."""
        values: Iterator[Any] = map(Message.value, messages)
        rows = self._shape.rows(values)
        if self._tells_missing:
            rows = (tuple(MISSING if v is UNSET else v for v in row) for row in rows)
        if self._fixes:
            rows = map(self._fixed, rows)
        if self._rest is not None:
            rows = map(operator.add, rows, ((self._shape.rest(m.value() or b""),) for m in messages))
        return self._envelope.added_to(rows, messages)

    def _paths(self, table: Table) -> dict[str, tuple[str, ...]]:
        if self._fields is not None:
            return {c: tuple(p.split(".")) if isinstance(p, str) else tuple(p) for c, p in self._fields.items()}
        taken = {*self._envelope.columns, self._rest}
        return {name: (name,) for name in table.writable if name not in taken}

    def _fix(self, column: Column) -> Callable[[Any], Any] | None:
        """Return what is to be done to a column's values behind msgspec."""
        unit = self._epoch.get(column.name)
        if unit is not None:
            return lambda value: _moment(value, unit, is_zoned=name_of(column.type_oid) == "timestamptz")
        if column.kind == "c":
            return lambda value: json.loads(bytes(value), parse_float=Decimal)
        return None

    def _fixed(self, row: Row) -> Row:
        values = list(row)
        for position, fix in self._fixes.items():
            if values[position] is not None and values[position] is not MISSING:
                values[position] = fix(values[position])
        return tuple(values)


class _Key:
    """Reads the key of a message that has no value: an object with the fields of the key, or plain text."""

    def __init__(
        self, table: Table, key: Sequence[str], paths: Mapping[str, tuple[str, ...]], decoder: JsonDecoder
    ) -> None:
        self._key = key
        self._table = table
        self._fields = [name for name in key if name in paths]
        types = {c.name: ((paths[c.name][-1],), json_type(c, "refuse", None)) for c in table.pick(self._fields)}
        self._shape = Shape(types) if types else None

    def tombstone(self, message: Message, envelope: Envelope) -> Tombstone:
        """Return what deletes the row of this key."""
        values = {n: envelope.get(n, message) for n in self._key if n not in self._fields}
        if self._fields:
            values |= zip(self._fields, self._decoded(message), strict=True)
        return Tombstone(values[name] for name in self._key)

    def _decoded(self, message: Message) -> Row:
        key = message.key()
        if not key:
            raise BadRow("the message has neither key nor value; there is nothing to delete", message=message)
        if key.lstrip().startswith(b"{") and self._shape is not None:
            return next(self._shape.rows(iter([key])))
        if len(self._fields) > 1:
            raise BadRow(f"the key is no object with {', '.join(self._fields)}", message=message)
        return (key.decode(),)


def _moment(value: Decimal, unit: Epoch, *, is_zoned: bool) -> datetime:
    """Turn a number into a moment, without a detour over floats."""
    microseconds = value.scaleb(_EXPONENTS[unit])
    if len(value.as_tuple().digits) > _DECIMAL_DIGITS or microseconds != microseconds.to_integral_value():
        raise ValueError(f"{value} is finer than a microsecond, which is what Postgres keeps")
    moment = _EPOCH + timedelta(microseconds=int(microseconds))
    return moment if is_zoned else moment.replace(tzinfo=None)
