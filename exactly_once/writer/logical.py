"""Logical types: what numbers, texts and base64 of Connect, Debezium and Avro stand for, as JSON for a column."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from functools import lru_cache, partial
from typing import Literal
from uuid import UUID

import msgspec
from msgspec import Raw

from .codec import BYTEA
from .codecs import name_of
from .errors import BadRow, cut, short
from .json_shape import NULL, NULL_DOCUMENT, UNAVAILABLE, Path, Shape, fields_in, refuse_malformed
from .json_values import TIMES
from .numbers import scaled
from .table import Column
from .times import BEYOND, EPOCH, span_of

# The fields of an object, each as JSON text.
Row = dict[str, bytes]
# Makes of the JSON text of a value the JSON text of what it stands for, for the column that it goes to.
Convert = Callable[[bytes, "Column | None"], bytes]

# So many schemas are kept: of many topics, a few each.
_SHAPES = 256
NUMBERS = ("int2", "int4", "int8", "float4", "float8", "numeric")
# Of which a text could be the base64 of other bytes.
_WITHOUT_BYTES = frozenset((*NUMBERS, *TIMES, "oid", "bool", "money", "uuid", "bit", "varbit", "macaddr", "macaddr8"))
# Hexadecimal that is the base64 of other bytes, too.
_HEX_OR_BASE64 = re.compile(rb'"(?:(?:[\da-f]{4})+|(?:[\dA-F]{4})+)"')


class Schema(msgspec.Struct, frozen=True, eq=False, omit_defaults=True):
    """A schema of Kafka Connect, as its JsonConverter writes it."""

    type: str
    name: str | None = None
    field: str | None = None
    fields: tuple[Schema, ...] = ()
    items: Schema | None = None
    """Of an array."""
    values: Schema | None = None
    """Of a map."""
    parameters: Mapping[str, str] | None = None

    def of(self, field: str) -> Schema | None:
        """Return the schema of a field."""
        return next((each for each in self.fields if each.field == field), None)


# Schemas by their text, which each message repeats.
schema_in = lru_cache(_SHAPES)(msgspec.json.Decoder(Schema).decode)


def converted(
    row: Row, schema: Schema | None, columns: Mapping[str, Column], binary: Mapping[str, str] | None = None
) -> Row:
    """Write the values of a row as what they stand for, for the columns of the same names as fields.

    ``binary`` is the form that text for some columns has, of bytes or of the bytes of a number. What the schema says is
    bytes comes in base64.

    :raises BadRow: for a value that is not of the type that the schema says, or bytes for a column that holds none.
    """
    conversions = _conversions(schema) if schema is not None else {}
    for name in _plain_bytes(schema) & columns.keys() if schema is not None else ():
        column, form = columns[name], (binary or {}).get(columns[name].name)
        if form == "hex":
            conversions = {**conversions, name: _hex}
        elif form is None and _type(column) in _WITHOUT_BYTES and row.get(name, NULL) not in (NULL, UNAVAILABLE):
            # Their base64 may look like a value of the column.
            what = f"{short(row[name].decode())} are bytes, as the schema says, and {column.type_name} holds none"
            raise BadRow(f"{what}: make the column bytea", column=name)
    for name, convert in conversions.items():
        if row.get(name, NULL) not in (NULL, UNAVAILABLE):
            try:
                row[name] = convert(row[name], columns.get(name))
            except OverflowError as error:
                raise BadRow(f"{short(row[name].decode())}: {error}", column=name) from error
            except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                what = f"{short(row[name].decode())} is not of the type that the schema says: {error}"
                raise BadRow(what, column=name) from error
    return row


class _Wrapped(msgspec.Struct, forbid_unknown_fields=True):
    schema: Raw = Raw()
    payload: Raw = Raw()


_wrapped, _whole = msgspec.json.Decoder(_Wrapped).decode, msgspec.json.Decoder(Raw).decode


def opened(text: bytes | None) -> tuple[Schema | None, bytes | None]:
    """Split schema and payload; a text without them is the payload. None for no payload."""
    # The name is looked for first: a message without a schema is not to be parsed twice.
    if text is None or not text.lstrip().startswith(b"{") or b'"payload"' not in text:
        return None, text
    try:
        found = _wrapped(text)
    except msgspec.ValidationError:  # it has other fields, behind which it may be malformed
        _whole(text)
        return None, text
    if not found.payload:
        return None, text
    schema, payload = bytes(found.schema), bytes(found.payload)
    return schema_in(schema) if schema.startswith(b"{") else None, None if payload == NULL else payload


def of_bytes(columns: Mapping[str, Column], binary: Collection[str]) -> dict[str, Column]:
    """Return the columns of bytes, or of lists of such, but for those of which it was said how text holds bytes."""
    return {f: c for f, c in columns.items() if (c.element or c).type_oid == BYTEA and c.name not in binary}


def refuse_unsure_bytes(row: Row, schema: Schema | None, columns: Mapping[str, Column]) -> None:
    """Refuse text that may be hexadecimal or base64 where a schema says that it is text, or there is none.

    :raises BadRow: naming what tells the two from each other.
    """
    for name, column in columns.items():
        is_text = schema is None or name in _texts(schema)
        text = row.get(name, UNAVAILABLE)
        if is_text and text != UNAVAILABLE and (found := _HEX_OR_BASE64.search(text)):
            what = f"{found[0].decode()} is hexadecimal or the base64 of other bytes, and no schema tells"
            how = f'say binary = {{ {column.name} = "hex" }}, or "base64"' if column.element is None else "store text"
            raise BadRow(f"{what}: {how}", column=column.name)


@lru_cache(_SHAPES)
def _texts(schema: Schema) -> set[str | None]:
    """Find the fields of an object that are text, or lists of it."""

    def innermost(kind: Schema) -> Schema:
        return kind if kind.items is None else innermost(kind.items)

    return {each.field for each in schema.fields if innermost(each).type == "string"}


@lru_cache(_SHAPES)
def holding(schema: Schema, field: str) -> Schema:
    """Return the schema of an object whose only field is of a schema: that of a key which is one bare value."""
    return Schema("struct", fields=(msgspec.structs.replace(schema, field=field),))


def in_key(
    shape: Shape,
    key: bytes | None,
    columns: Mapping[str, Column] | None = None,
    binary: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """Return the JSON of each column that a message's key has a field for, be it with a schema or without.

    With ``columns``, those that the key's fields fill, values are what the schema says that they stand for.

    :raises ValueError: for a key that is no object.
    :raises BadRow: for a value that is not of the type that the schema says, or may be bytes in two ways; ``binary``
        has the columns of which that was said.
    """
    try:
        schema, payload = opened(key)
        if payload is None:
            return {}
        if columns is not None and schema is not None:
            row = {name: bytes(value) for name, value in fields_in(payload).items()}
            refuse_unsure_bytes(row, schema, of_bytes(columns, binary or ()))
            row = converted(row, schema, columns, binary)
            payload = msgspec.json.encode({name: Raw(value) for name, value in row.items()})
        return shape.find(payload)[0]
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the key is no object in JSON: {cut(key)}") from error


def types_of(schema: Schema, above: Path = ()) -> dict[Path, str]:
    """Return the types of columns that hold the fields of a schema, also those of objects in it, by their paths."""
    types: dict[Path, str] = {}
    for each in schema.fields:
        if each.field is not None:
            path, kind = (*above, each.field), _column_type(each)
            if kind != "jsonb" or not above:  # of what else is in an object the values tell
                types[path] = kind
            if each.name not in _LOGICAL:
                types |= types_of(each, path)
    return types


def types_in_key(key: bytes | None) -> dict[Path, str]:
    """Return the types of columns that the schema of a key tells; none where it has no schema."""
    schema, _ = opened(key)
    return {} if schema is None else types_of(schema)


@lru_cache(_SHAPES)
def _plain_bytes(schema: Schema) -> frozenset[str]:
    """Find the fields of an object that are bytes, and stand for nothing else."""
    plain = (each.field for each in schema.fields if each.type == "bytes" and each.name not in _LOGICAL)
    return frozenset(name for name in plain if name is not None)


@lru_cache(_SHAPES)
def _conversions(schema: Schema) -> dict[str, Convert]:
    """Find the fields of an object whose values stand for something else."""
    found = ((field.field, _conversion(field)) for field in schema.fields)
    return {name: convert for name, convert in found if name is not None and convert is not None}


def _conversion(schema: Schema) -> Convert | None:
    known, _ = _LOGICAL.get(schema.name or "", (None, ""))
    if known is not None:
        return partial(known, schema.parameters or {})
    if schema.type == "boolean":
        return _boolean
    inner = schema.items if schema.type == "array" else schema.values if schema.type == "map" else None
    if inner is not None and (convert := _conversion(inner)) is not None:
        return partial(_array if schema.type == "array" else _map, convert)
    if schema.type == "struct" and (fields := _conversions(schema)):
        return partial(_struct, fields)
    return None


def _raw(convert: Convert, value: Raw, column: Column | None = None) -> Raw:
    text = bytes(value)
    return value if text == NULL else Raw(convert(text, column))


def _array(convert: Convert, text: bytes, column: Column | None) -> bytes:
    element = None if column is None else column.element
    return msgspec.json.encode([_raw(convert, each, element) for each in msgspec.json.decode(text, type=list[Raw])])


def _map(convert: Convert, text: bytes, column: Column | None) -> bytes:
    if not text.startswith(b"{"):  # with keys that are no texts it is a list of pairs
        return text
    return msgspec.json.encode({key: _raw(convert, each) for key, each in fields_in(text).items()})


def _struct(fields: Mapping[str, Convert], text: bytes, column: Column | None) -> bytes:
    row = fields_in(text)
    return msgspec.json.encode(row | {name: _raw(fields[name], row[name]) for name in fields if name in row})


def _type(column: Column | None) -> str | None:
    return None if column is None else name_of(column.type_oid)


def _text(value: str) -> bytes:
    return msgspec.json.encode(value)


# Of logical types without a zone.
_EPOCH = EPOCH.replace(tzinfo=None)
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_DAY_SECONDS = 86_400
# What Debezium says of Postgres's bit varying without a length.
_NO_LENGTH = 2**31 - 1


def _since_epoch(*, days: int = 0, seconds: int = 0) -> datetime:
    try:
        return _EPOCH + timedelta(days=days, seconds=seconds)
    except OverflowError as error:  # also of what Debezium writes for infinity
        raise OverflowError(f"it is {BEYOND}; a column of bigint takes the number as it is") from error


def _date(_: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    days = msgspec.json.decode(text, type=int)
    return text if _type(column) in NUMBERS else _text(_since_epoch(days=days).date().isoformat())


def _moment(kind: str, unit: str, _: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    """Write a time, a timestamp or an instant, whose zone is known, with all its digits.

    The zone is UTC. A column that has one gets it of each kind, and one that has none of no kind.
    """
    of_column = _type(column)
    if of_column in NUMBERS:
        return text
    digits = _DIGITS[unit]
    count = msgspec.json.decode(text, type=int)
    if kind == "time" and of_column == "interval" and not (count * 10**6) % 10**digits:
        return _text(span_of(count * 10**6 // 10**digits))  # MySQL's time is one: below zero, or beyond a day
    seconds, part = divmod(count, 10**digits)
    if kind == "time" and (seconds, part) == (_DAY_SECONDS, 0):
        return _text("24:00:00")
    if kind == "time" and not 0 <= seconds < _DAY_SECONDS:
        raise ValueError("it is no time of a day; a column of interval takes it")
    moment, fraction = _since_epoch(seconds=seconds), f".{part:0{digits}d}" if part else ""
    if kind == "time":
        return _text(f"{moment:%H:%M:%S}{fraction}")
    is_zoned = of_column == "timestamptz" or (kind == "instant" and of_column != "timestamp")
    return _text(f"{moment.isoformat()}{fraction}{'Z' if is_zoned else ''}")


def _iso(kind: str, _: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    """Leave the zone out of ISO 8601 for a column that has none; at the source there was none, either."""
    return text.replace(b'Z"', b'"') if _type(column) == kind else text


def _duration(_: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    return text if _type(column) in NUMBERS else _text(span_of(msgspec.json.decode(text, type=int)))


def _decimal(parameters: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    """Write an integer in base64, and its scale, which may be beside it, as a number; a number stays as it is."""
    if not text.startswith((b'"', b"{")):
        return text
    value = msgspec.json.decode(text)
    if isinstance(value, str):
        value = {"value": value, "scale": int(parameters["scale"])}
    return f"{scaled(base64.b64decode(value['value'], validate=True), value['scale']):f}".encode()


def _hex(text: bytes, _: Column | None) -> bytes:
    return _text(base64.b64decode(msgspec.json.decode(text, type=str), validate=True).hex())


def _uuid(_: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    """Write the 16 bytes of a UUID as text."""
    if _type(column) == "bytea":
        return text
    return _text(str(UUID(bytes=base64.b64decode(msgspec.json.decode(text, type=str), validate=True))))


def _json(_: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    """Take the document out of its text, but for a column of text."""
    document = msgspec.json.decode(text, type=str)
    if column is not None and _type(column) not in ("json", "jsonb"):
        return text
    return document_in(document, column)


def document_in(text: str, column: Column | None) -> bytes:
    """Return the JSON in a text; a null stays a document where a column takes one.

    :raises ValueError: for what is malformed.
    """
    refuse_malformed(document := text.encode())
    return NULL_DOCUMENT if document.strip() == NULL and column is not None else document


def _boolean(text: bytes, column: Column | None) -> bytes:
    """Write what Debezium makes of a single bit as that, for a column of bits."""
    return {b"true": b'"1"', b"false": b'"0"'}.get(text, text) if _type(column) in ("bit", "varbit") else text


def _bits(parameters: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    if _type(column) == "bytea":
        return text
    number = int.from_bytes(base64.b64decode(msgspec.json.decode(text, type=str), validate=True), "little")
    if _type(column) in NUMBERS:
        return str(number).encode()
    length = int(parameters.get("length", 1))
    if length == _NO_LENGTH:
        raise ValueError("the source does not tell how many bits it has, the first of which may be 0: make it bytea")
    return _text(f"{number:0{length}b}")


def _geometry(_: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    """Write a point as Postgres does, as also where it has no more; or a geometry as PostGIS does: hexadecimal EWKB."""
    if _type(column) in ("json", "jsonb"):
        return text
    value = msgspec.json.decode(text)
    if _type(column) == "point" or value.get("wkb") is None:
        return _text(f"({value['x']},{value['y']})")
    wkb, srid = base64.b64decode(value["wkb"], validate=True), value.get("srid")
    order: Literal["little", "big"] = "little" if wkb[0] else "big"
    if srid is not None:
        kind = int.from_bytes(wkb[1:5], order) | 0x20000000  # EWKB's flag: a SRID follows
        wkb = wkb[:1] + kind.to_bytes(4, order) + int(srid).to_bytes(4, order) + wkb[5:]
    return _text(wkb.hex())


# What makes a column's value of what a type of this name stands for, where that is something else; and the column.
_LOGICAL: dict[str, tuple[Callable[[Mapping[str, str], bytes, Column | None], bytes] | None, str]] = {
    "io.debezium.time.Date": (_date, "date"),
    "io.debezium.time.Time": (partial(_moment, "time", "ms"), "time"),
    "io.debezium.time.MicroTime": (partial(_moment, "time", "us"), "time"),
    "io.debezium.time.NanoTime": (partial(_moment, "time", "ns"), "time"),
    "io.debezium.time.Timestamp": (partial(_moment, "timestamp", "ms"), "timestamp"),
    "io.debezium.time.MicroTimestamp": (partial(_moment, "timestamp", "us"), "timestamp"),
    "io.debezium.time.NanoTimestamp": (partial(_moment, "timestamp", "ns"), "timestamp"),
    **{
        f"io.debezium.time.Iso{kind.capitalize()}": (partial(_iso, kind), kind)
        for kind in ("date", "time", "timestamp")
    },
    "io.debezium.time.ZonedTimestamp": (None, "timestamptz"),
    "io.debezium.time.ZonedTime": (None, "timetz"),
    "io.debezium.time.MicroDuration": (_duration, "interval"),
    "io.debezium.time.Interval": (None, "interval"),
    "io.debezium.data.VariableScaleDecimal": (_decimal, "numeric"),
    "io.debezium.data.Json": (_json, "jsonb"),
    "io.debezium.data.Uuid": (None, "uuid"),
    "io.debezium.data.Bits": (_bits, "bit varying"),
    "io.debezium.data.geometry.Point": (_geometry, "point"),
    "io.debezium.data.geometry.Geometry": (_geometry, "jsonb"),
    "io.debezium.data.geometry.Geography": (_geometry, "jsonb"),
    "org.apache.kafka.connect.data.Date": (_date, "date"),
    "org.apache.kafka.connect.data.Time": (partial(_moment, "time", "ms"), "time"),
    "org.apache.kafka.connect.data.Timestamp": (partial(_moment, "timestamp", "ms"), "timestamp"),
    "org.apache.kafka.connect.data.Decimal": (_decimal, "numeric"),
    "avro.uuid-fixed": (_uuid, "uuid"),
    "avro.timestamp-millis": (partial(_moment, "instant", "ms"), "timestamptz"),
    "avro.timestamp-micros": (partial(_moment, "instant", "us"), "timestamptz"),
    "avro.timestamp-nanos": (partial(_moment, "instant", "ns"), "timestamptz"),
}
_COLUMNS = {
    "int8": "smallint",
    "int16": "smallint",
    "int32": "integer",
    "int64": "bigint",
    "uint64": "numeric",
    "float": "real",
    "double": "double precision",
    "float32": "real",
    "float64": "double precision",
    "boolean": "boolean",
    "string": "text",
    "bytes": "bytea",
}


def _column_type(schema: Schema) -> str:
    if schema.name in _LOGICAL:
        return _LOGICAL[schema.name][1]
    if schema.type == "array" and schema.items is not None and schema.items.type in _COLUMNS:
        return f"{_column_type(schema.items)}[]"
    return _COLUMNS.get(schema.type, "jsonb")
