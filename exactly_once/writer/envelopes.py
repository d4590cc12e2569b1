"""Envelopes: rows and changes out of messages that Debezium, Kafka Connect or Maxwell have wrapped.

What is wrapped becomes a message as a :class:`JsonDecoder` takes it, a row or a tombstone, and goes there. Where a
schema is sent along, values of its logical types become what they stand for: days a date, base64 a decimal.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import msgspec
from confluent_kafka import Message
from msgspec import Raw

from exactly_once.errors import ConfigurationError

from .codecs import name_of
from .decoding import Decoded, Decoder
from .errors import BadRow, cut
from .from_json import OnTombstone
from .statements import Mode
from .table import Column, Table

Format = Literal["debezium", "connect", "maxwell"]
Row = dict[str, bytes]
"""The fields of an object, each as JSON text."""
Convert = Callable[[bytes, "Column | None"], bytes]
"""Makes of the JSON text of a value the JSON text of what it stands for, for the column that it goes to."""

_WRAPPERS = {"payload", "before", "after", "data"}
"""Fields that hold the row: who fills a column from one of them knows what the messages are."""
_UNAVAILABLE = "__debezium_unavailable_value"
"""What Debezium writes for a large value that Postgres has not logged, because the update left it as it was."""
_UNAVAILABLE_FORMS = (_UNAVAILABLE, base64.b64encode(_UNAVAILABLE.encode()).decode(), [_UNAVAILABLE])
_SHAPES = 256
"""So many schemas are kept: of many topics, a few each."""
_NUMBERS = ("int2", "int4", "int8", "float4", "float8", "numeric")


class _Wrapped(msgspec.Struct):
    """All that tells one envelope from another; what a message lacks is empty."""

    schema: Raw = Raw()
    payload: Raw = Raw()
    before: Raw = Raw()
    after: Raw = Raw()
    op: Raw = Raw()
    source: Raw = Raw()
    database: Raw = Raw()
    table: Raw = Raw()
    type: Raw = Raw()
    data: Raw = Raw()
    old: Raw = Raw()


class Schema(msgspec.Struct, frozen=True, eq=False):
    """A schema of Kafka Connect, as its JsonConverter writes it."""

    type: str
    name: str | None = None
    field: str | None = None
    fields: tuple[Schema, ...] = ()
    items: Schema | None = None
    parameters: Mapping[str, str] | None = None

    def of(self, field: str) -> Schema | None:
        """Return the schema of a field."""
        return next((each for each in self.fields if each.field == field), None)


_read = msgspec.json.Decoder(_Wrapped).decode
_fields: Callable[[bytes], dict[str, Raw]] = msgspec.json.Decoder(dict[str, Raw]).decode
_schema = lru_cache(_SHAPES)(msgspec.json.Decoder(Schema).decode)
"""Schemas by their text, which each message repeats."""


def recognised(value: bytes | None) -> Format | None:
    """Tell in which envelope a message seems to be, if in any."""
    try:
        found = _read(value or b"null")
        if found.schema and found.payload:
            inner = _read(found.payload) if bytes(found.payload).startswith(b"{") else _Wrapped()
            return "debezium" if inner.op and (inner.before or inner.after) else "connect"
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if found.op and found.source and (found.before or found.after):
        return "debezium"
    return "maxwell" if found.database and found.table and found.type and found.data else None


class PlainDecoder:
    """Refuses messages in an envelope that nobody has said, of which most would be lost; else as the decoder given."""

    def __init__(self, decoder: Decoder, fields: Mapping[str, str | tuple[str, ...]] | None = None) -> None:
        self._decoder = decoder
        self._fields = fields
        self._is_guarded = True

    def prepare(self, table: Table, *, mode: Mode, key: Sequence[str]) -> None:
        """Get the decoder ready; a table that takes the envelope's own fields is filled with them."""
        self._decoder.prepare(table, mode=mode, key=key)
        paths = table.writable if self._fields is None else self._fields.values()
        roots = {path.split(".")[0] if isinstance(path, str) else path[0] for path in paths}
        self._is_guarded = not roots & _WRAPPERS

    def decode(self, messages: Sequence[Message]) -> Decoded:
        """Look at both ends of the batch, since a topic has one kind of envelope; then decode.

        :raises BadRow: for a message in an envelope.
        """
        for message in (messages[0], messages[-1]) if messages and self._is_guarded else ():
            if (found := recognised(message.value())) is not None:
                raise BadRow(
                    f"the message is in an envelope of {found.capitalize()}: say envelope = {found!r} (--envelope "
                    f'{found}), or envelope = "none" to take its fields as they are',
                    message=message,
                )
        return self._decoder.decode(messages)


class EnvelopeDecoder:
    """Unwraps messages and gives rows and tombstones to ``decoder``; ``fields`` and ``metadata`` are those of that one.

    In an upsert a delete event deletes, and an update that changes the key deletes the old row as well. A tombstone
    behind a delete is nothing. Elsewhere a delete is refused, unless ``on_tombstone="skip"``. A truncate event has no
    key and concerns all partitions: it is refused, unless ``on_truncate="skip"``.
    """

    def __init__(
        self,
        decoder: Decoder,
        envelope: Format,
        *,
        fields: Mapping[str, str | tuple[str, ...]] | None = None,
        metadata: Collection[str] = (),
        missing: str = "null",
        on_tombstone: OnTombstone | None = None,
        on_truncate: Literal["refuse", "skip"] = "refuse",
    ) -> None:
        if envelope not in get_args(Format):
            raise ConfigurationError(
                f"envelope={envelope!r} is not possible; choose one of {', '.join(get_args(Format))}"
            )
        self._decoder = decoder
        self._envelope = envelope
        self._changes = {"debezium": self._debezium, "connect": self._connect, "maxwell": self._maxwell}[envelope]
        self._paths = (
            None if fields is None else {c: p.split(".") if isinstance(p, str) else p for c, p in fields.items()}
        )
        self._metadata = metadata
        self._keeps_missing = missing == "keep"
        self._on_tombstone = on_tombstone
        self._skips_truncate = on_truncate == "skip"
        self._columns: dict[str, Column] = {}
        """The columns that the fields of a row go to, by the fields' names."""
        self._key: tuple[str, ...] = ()
        """The fields of the key; none where rows are only appended."""
        self._deleted: dict[tuple[str | None, int | None], bytes | None] = {}
        """The key of each partition's last message, where that was a delete: the tombstone behind it is nothing."""
        self._is_behind_delete = False

    def prepare(self, table: Table, *, mode: Mode, key: Sequence[str]) -> None:
        """Get ready for a table."""
        if mode == "insert-ignore" and self._envelope != "connect":
            raise ConfigurationError(
                f"mode='insert-ignore' would leave out the updates of envelope={self._envelope!r}: say upsert or append"
            )
        self._decoder.prepare(table, mode=mode, key=key)
        paths = self._paths if self._paths is not None else {name: [name] for name in table.writable}
        columns = {column.name: column for column in table.columns}
        self._columns = {path[0]: columns[name] for name, path in paths.items() if len(path) == 1 and name in columns}
        self._key = ()
        if mode == "upsert":
            self._key = tuple(paths[name][-1] for name in key if name in paths and name not in self._metadata)

    def decode(self, messages: Sequence[Message]) -> Decoded:
        """Unwrap all messages now; what is wrong with a row is raised when it is made.

        :raises BadRow: for a message that is not in the envelope, or asks for what cannot be done.
        """
        unwrapped: list[Message] = []
        for message in messages:
            unwrapped += self.unwrapped(message)
        return self._decoder.decode(unwrapped)

    def unwrapped(self, message: Message) -> list[Message]:
        """Return the row or the tombstone in a message; both, tombstone first, where it changes a key.

        :raises BadRow: for a message that is not in the envelope, or asks for what cannot be done.
        """
        place = message.topic(), message.partition()
        self._is_behind_delete = place in self._deleted and self._deleted.pop(place) == message.key()
        try:
            return [
                _message(message, key, None if row is None else msgspec.json.encode(_raw(row)))
                for key, row in self._changes(message)
            ]
        except BadRow as error:
            raise BadRow(error.reason, message=message, column=error.column) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRow(f"{error}: {cut(message.value())}", message=message) from error

    # Each of these returns keys with rows, or with None for a delete.

    def _debezium(self, message: Message) -> Iterator[tuple[bytes | None, Row | None]]:
        schema, payload = _opened(message.value())
        if payload is None:
            yield from self._tombstone(message)
            return
        event = _read(payload)
        op = msgspec.json.decode(event.op) if event.op else None
        before = self._row(event.before, schema and schema.of("before"))
        after = self._row(event.after, schema and schema.of("after"))
        if op == "d":
            yield from self._delete(message, before)
        elif op == "t":
            if not self._skips_truncate:
                raise BadRow('the source table was truncated: empty this one, and say on_truncate = "skip"')
        elif op in ("c", "r", "u") and after is not None:
            yield from self._stored(message, before if op == "u" else None, after)
        else:
            raise BadRow(f"no change event of Debezium (op is {op!r}): {cut(payload)}")

    def _connect(self, message: Message) -> Iterator[tuple[bytes | None, Row | None]]:
        value = message.value()
        if value is not None and not _read(value).payload:
            raise BadRow(f"the message has no schema and payload: {cut(value)}")
        schema, payload = _opened(value)
        row = self._row(payload or b"", schema)
        if row is None:
            yield from self._tombstone(message)
        else:
            yield message.key(), row

    def _maxwell(self, message: Message) -> Iterator[tuple[bytes | None, Row | None]]:
        if message.value() is None:
            yield from self._tombstone(message)
            return
        event = _read(message.value() or b"")
        kind = msgspec.json.decode(event.type) if event.type else None
        row = self._row(event.data, None)
        if kind == "delete" and row is not None:
            yield from self._delete(message, row)
        elif kind in ("insert", "update", "bootstrap-insert") and row is not None:
            yield from self._stored(message, row | (self._row(event.old, None) or {}), row)
        elif kind not in ("bootstrap-start", "bootstrap-complete"):
            raise BadRow(f"no change of a row by Maxwell (type is {kind!r}): {cut(message.value())}")

    def _row(self, text: bytes | Raw, schema: Schema | None) -> Row | None:
        """Read an object, its logical types as what they stand for; None for null or nothing."""
        if not text or bytes(text) == b"null":
            return None
        row: Row = {name: bytes(value) for name, value in _fields(bytes(text)).items()}
        for name, convert in (_conversions(schema) if schema is not None else {}).items():
            if row.get(name, b"null") != b"null":
                row[name] = _converted(convert, row[name], name, self._columns.get(name))
        return row

    def _stored(self, message: Message, before: Row | None, after: Row) -> Iterator[tuple[bytes | None, Row | None]]:
        """Store a row; where it had another key before, delete that one."""
        for name in [n for n, text in after.items() if _is_unavailable(text)]:
            if not self._keeps_missing:
                raise BadRow(
                    'a large value that did not change is not in the message: say missing = "keep" in mode upsert, or '
                    "set REPLICA IDENTITY FULL at the source",
                    column=name,
                )
            del after[name]
        if self._key and before is not None and all(name in before and name in after for name in self._key):
            old = {name: before[name] for name in self._key}
            if old != {name: after[name] for name in self._key}:
                yield self._key_text(message, old), None
        yield message.key(), after

    def _delete(self, message: Message, before: Row | None) -> Iterator[tuple[bytes | None, Row | None]]:
        if self._on_tombstone == "skip":
            return
        if not self._key and not self._metadata:
            raise BadRow('a delete, and rows are only appended: say mode = "upsert", or on_tombstone = "skip"')
        key = self._key_of(message)
        if key is None or not set(self._key) <= set(key):
            key = before
        if key is None or not set(self._key) <= set(key):
            raise BadRow(f"a delete without {', '.join(self._key)}: set REPLICA IDENTITY FULL at the source")
        self._deleted[message.topic(), message.partition()] = message.key()
        yield self._key_text(message, {name: key[name] for name in self._key}), None

    def _tombstone(self, message: Message) -> Iterator[tuple[bytes | None, Row | None]]:
        """Delete, because compaction may have left nothing but the tombstone of a delete."""
        if self._is_behind_delete or not (self._key or self._metadata) or self._on_tombstone == "skip":
            return
        key = self._key_of(message)
        if key is not None and not set(self._key) <= set(key):
            raise BadRow(f"a tombstone whose key has no {', '.join(self._key)}: {cut(message.key())}")
        yield message.key() if key is None else self._key_text(message, {n: key[n] for n in self._key}), None

    def _key_text(self, message: Message, key: Row) -> bytes | None:
        """Write a key as an object; where columns of the message's envelope are part of it, leave it as it was."""
        return message.key() if self._metadata else msgspec.json.encode(_raw(key))

    def _key_of(self, message: Message) -> Row | None:
        """Read the fields of a message's key; a bare value is the only field. None where it is no JSON."""
        try:
            schema, payload = _opened(message.key())
            if payload is not None and payload.lstrip().startswith(b"{"):
                return self._row(payload, schema)
            msgspec.json.decode(payload or b"")
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return {self._key[0]: payload} if payload is not None and len(self._key) == 1 else None


def _opened(text: bytes | None) -> tuple[Schema | None, bytes | None]:
    """Split schema and payload; a text without them is the payload. None for no payload."""
    if text is None:
        return None, None
    if not text.lstrip().startswith(b"{"):
        return None, text
    found = _read(text)
    if not found.payload:
        return None, text
    schema = _schema(bytes(found.schema)) if found.schema and bytes(found.schema) != b"null" else None
    return schema, None if bytes(found.payload) == b"null" else bytes(found.payload)


def _is_null(text: Raw) -> bool:
    return bytes(text) == b"null"


def _raw(row: Row) -> dict[str, Raw]:
    return {name: Raw(text) for name, text in row.items()}


def _is_unavailable(text: bytes) -> bool:
    is_likely = b"__debezium_unava" in text or b"X19kZWJleml1bV91" in text
    return is_likely and msgspec.json.decode(text) in _UNAVAILABLE_FORMS


def _message(source: Message, key: Any, value: bytes | None) -> Message:
    """Make a message of another key and value; all else is the source's."""
    return Message(
        topic=source.topic(),
        partition=source.partition(),
        offset=source.offset(),
        key=key,
        value=value,
        headers=source.headers(),
        timestamp=source.timestamp(),
    )


# Logical types.


@lru_cache(_SHAPES)
def _conversions(schema: Schema) -> dict[str, Convert]:
    """Find the fields of an object whose values stand for something else."""
    found = ((field.field, _conversion(field)) for field in schema.fields)
    return {name: convert for name, convert in found if name is not None and convert is not None}


def _conversion(schema: Schema) -> Convert | None:
    if (known := _LOGICAL.get(schema.name or "")) is not None:
        return partial(known, schema.parameters or {})
    if schema.type == "array" and schema.items is not None and (inner := _conversion(schema.items)) is not None:
        return partial(_array, inner)
    if schema.type == "struct" and (fields := _conversions(schema)):
        return partial(_struct, fields)
    return None


def _converted(convert: Convert, text: bytes, field: str, column: Column | None) -> bytes:
    try:
        return convert(text, column)
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        raise BadRow(f"{cut(text)} is not of the type that the schema says: {error}", column=field) from error


def _array(convert: Convert, text: bytes, column: Column | None) -> bytes:
    items = msgspec.json.decode(text, type=list[Raw])
    element = None if column is None or column.element_oid is None else _element(column)
    return msgspec.json.encode([each if _is_null(each) else Raw(convert(bytes(each), element)) for each in items])


def _struct(fields: Mapping[str, Convert], text: bytes, column: Column | None) -> bytes:
    row = _fields(text)
    for name, convert in fields.items():
        if name in row and not _is_null(row[name]):
            row[name] = Raw(convert(bytes(row[name]), None))
    return msgspec.json.encode(row)


def _element(column: Column) -> Column:
    return Column(name=column.name, type_name="", base_name="", type_oid=column.element_oid or 0)


def _type(column: Column | None) -> str | None:
    return None if column is None else name_of(column.type_oid)


def _text(value: str) -> bytes:
    return msgspec.json.encode(value)


_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - logical types without a zone
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}


def _date(_: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    days = msgspec.json.decode(text, type=int)
    return text if _type(column) in _NUMBERS else _text((date(1970, 1, 1) + timedelta(days=days)).isoformat())


def _time(unit: str, _: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    if _type(column) in _NUMBERS:
        return text
    moment, fraction = _split(text, unit)
    if (moment - _EPOCH).days:
        raise ValueError("it is no time of a day")
    return _text(f"{moment:%H:%M:%S}{fraction}")


def _timestamp(unit: str, _: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    """Write a moment with all its digits; with the zone, which is UTC, where the column has one."""
    if _type(column) in _NUMBERS:
        return text
    moment, fraction = _split(text, unit)
    return _text(f"{moment.isoformat()}{fraction}{'Z' if _type(column) == 'timestamptz' else ''}")


def _split(text: bytes, unit: str) -> tuple[datetime, str]:
    digits = _DIGITS[unit]
    seconds, fraction = divmod(msgspec.json.decode(text, type=int), 10**digits)
    return _EPOCH + timedelta(seconds=seconds), f".{fraction:0{digits}d}" if fraction else ""


def _duration(_: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    return text if _type(column) in _NUMBERS else _text(f"{msgspec.json.decode(text, type=int)} microseconds")


def _decimal(parameters: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    value = msgspec.json.decode(text)
    return _number(value, int(parameters["scale"]), column) if isinstance(value, str) else text


def _variable_decimal(_: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    value = msgspec.json.decode(text)
    return _number(value["value"], value["scale"], column) if isinstance(value, dict) else text


def _number(encoded: str, scale: int, column: Column | None) -> bytes:
    """Write an integer in base64 and its scale as a decimal, every digit kept."""
    unscaled = int.from_bytes(base64.b64decode(encoded, validate=True), "big", signed=True)
    digits = str(abs(unscaled)).rjust(scale + 1, "0") if scale >= 0 else str(abs(unscaled)) + "0" * -scale
    written = (
        f"{'-' if unscaled < 0 else ''}{digits[:-scale]}.{digits[-scale:]}"
        if scale > 0
        else str(unscaled) + "0" * -scale
    )
    return written.encode() if column is None or _type(column) in _NUMBERS else _text(written)


def _json(_: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    """Take the document out of its text, but for a column of text."""
    document = msgspec.json.decode(text, type=str)
    if column is not None and _type(column) not in ("json", "jsonb"):
        return text
    msgspec.json.decode(document)  # or what is malformed would make the whole row so
    return document.encode()


def _bits(parameters: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    if _type(column) == "bytea":
        return text
    number = int.from_bytes(base64.b64decode(msgspec.json.decode(text, type=str), validate=True), "little")
    if _type(column) in _NUMBERS:
        return str(number).encode()
    return _text(f"{number:0{int(parameters.get('length', 1))}b}")


def _geometry(_: Mapping[str, str], text: bytes, column: Column | None) -> bytes:
    """Write a point as Postgres does, or a geometry as PostGIS does: hexadecimal EWKB."""
    value = msgspec.json.decode(text)
    if _type(column) == "point":
        return _text(f"({value['x']},{value['y']})")
    wkb, srid = base64.b64decode(value["wkb"], validate=True), value.get("srid")
    order: Literal["little", "big"] = "little" if wkb[0] else "big"
    if srid is not None:
        kind = int.from_bytes(wkb[1:5], order) | 0x20000000  # EWKB's flag: a SRID follows
        wkb = wkb[:1] + kind.to_bytes(4, order) + int(srid).to_bytes(4, order) + wkb[5:]
    return _text(wkb.hex())


_LOGICAL: dict[str, Callable[[Mapping[str, str], bytes, Column | None], bytes]] = {
    "io.debezium.time.Date": _date,
    "io.debezium.time.Time": partial(_time, "ms"),
    "io.debezium.time.MicroTime": partial(_time, "us"),
    "io.debezium.time.NanoTime": partial(_time, "ns"),
    "io.debezium.time.Timestamp": partial(_timestamp, "ms"),
    "io.debezium.time.MicroTimestamp": partial(_timestamp, "us"),
    "io.debezium.time.NanoTimestamp": partial(_timestamp, "ns"),
    "io.debezium.time.MicroDuration": _duration,
    "io.debezium.data.VariableScaleDecimal": _variable_decimal,
    "io.debezium.data.Json": _json,
    "io.debezium.data.Bits": _bits,
    "io.debezium.data.geometry.Point": _geometry,
    "io.debezium.data.geometry.Geometry": _geometry,
    "io.debezium.data.geometry.Geography": _geometry,
    "org.apache.kafka.connect.data.Date": _date,
    "org.apache.kafka.connect.data.Time": partial(_time, "ms"),
    "org.apache.kafka.connect.data.Timestamp": partial(_timestamp, "ms"),
    "org.apache.kafka.connect.data.Decimal": _decimal,
}
_LOGICAL_COLUMNS = {
    "Date": "date",
    "Time": "time",
    "MicroTime": "time",
    "NanoTime": "time",
    "Timestamp": "timestamp",
    "MicroTimestamp": "timestamp",
    "NanoTimestamp": "timestamp",
    "ZonedTimestamp": "timestamptz",
    "ZonedTime": "timetz",
    "MicroDuration": "interval",
    "Interval": "interval",
    "Decimal": "numeric",
    "VariableScaleDecimal": "numeric",
    "Json": "jsonb",
    "Uuid": "uuid",
    "Bits": "bit varying",
}
_COLUMNS = {
    "int8": "smallint",
    "int16": "smallint",
    "int32": "integer",
    "int64": "bigint",
    "float": "real",
    "double": "double precision",
    "float32": "real",
    "float64": "double precision",
    "boolean": "boolean",
    "string": "text",
    "bytes": "bytea",
}


def columns_of(schema: Schema) -> dict[str, str]:
    """Return the types of columns that hold the fields of a schema."""
    return {field.field: _column_type(field) for field in schema.fields if field.field is not None}


def _column_type(schema: Schema) -> str:
    package, _, name = (schema.name or "").rpartition(".")
    if name in _LOGICAL_COLUMNS and package.startswith(("io.debezium.", "org.apache.kafka.connect.data")):
        return _LOGICAL_COLUMNS[name]
    if schema.type == "array" and schema.items is not None and schema.items.type in _COLUMNS:
        return f"{_column_type(schema.items)}[]"
    return _COLUMNS.get(schema.type, "jsonb")


def schema_of(message: Message) -> dict[str, str]:
    """Return the types of the columns that the schema of a message asks for; none where it has no schema."""
    schema, _ = _opened(message.value())
    if schema is None:
        return {}
    return columns_of(schema.of("after") or schema)


def key_of(message: Message) -> tuple[str, ...]:
    """Return the names of the fields of a message's key."""
    try:
        _, payload = _opened(message.key())
        return tuple(_fields(payload or b""))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ()
