"""Decoding: what turns messages into rows of a table, and what every decoder can add from a message's envelope."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from confluent_kafka import Message

from exactly_once.errors import ConfigurationError

from .changes import Merge, Row
from .codecs import codec_of, name_of
from .errors import BadRow, TableError
from .statements import Mode
from .table import Column, Table
from .times import EPOCH

if TYPE_CHECKING:
    from .json_values import Reading

# What of a message, besides its value, can fill a column: one of SOURCES, ``header:NAME`` or ``key:PATH``.
Source = str
SOURCES = ("topic", "partition", "offset", "timestamp", "key", "headers")

# Of which a key is stored as it was sent.
WHOLE_KEYS = ("bytea", "json", "jsonb", "text", "varchar", "bpchar")
_UUID_BYTES = 16
_NO_TIMESTAMP = 0
# What a header, a key or a timestamp raises that is not what it is read as.
_UNREADABLE = (ValueError, OverflowError, RecursionError)
_EXACT = {
    "topic": ("text", "varchar"),
    "partition": ("int4", "int8"),
    "offset": ("int8",),
    "timestamp": ("timestamptz", "int8"),
    "key": ("bytea",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Rows that are made while they are iterated over, so that none need be kept; can be iterated over again."""

    columns: Sequence[str]
    """What the values of a row are."""
    origins: Sequence[Message]
    """The message that each row comes from."""
    make: Callable[[], Iterator[Row]]
    exact: Collection[str] = ()
    """The columns whose values are what the column takes, without another look."""
    partial: Mapping[str, Merge] = field(default_factory=dict)
    """The columns of JSON that hold the fields of one message only, and what merges the values of two messages."""
    unused: Counter[str] = field(default_factory=Counter)
    """How often a field came that no column takes; counted while the rows are made."""
    filtered: int = 0
    """How many messages were left out, because they are not wanted."""
    repeated: int = 0
    """How many rows were left out, because the key of their event was claimed before."""
    unfilled: Collection[str] = ()
    """The columns that no message filled yet, as far as the decoder knows."""
    unmet: Collection[str] = ()
    """The fields by which messages are filtered, or that are dropped, and that none had yet."""

    def __iter__(self) -> Iterator[Row]:
        return self.make()


class Decoder(Protocol):
    """Turns messages into rows of one table."""

    def prepare(self, table: Table, *, mode: Mode, key: Sequence[str]) -> None:
        """Get ready for a table; called again when it was altered.

        :raises TableError: when the table lacks what the decoder fills.
        """

    def decode(self, messages: Sequence[Message]) -> Decoded:
        """Describe the rows of messages; what is wrong with a message is raised when its row is made."""


class Envelope:
    """Columns that are filled from a message's envelope: ``{"kafka_offset": "offset"}``; or always alike.

    ``header:NAME`` is the last header of a name, as text, and null without one; ``key:PATH`` a field of a key in JSON,
    read as one of a value is.
    ``constants`` are what Python has for a column's type, or its text.
    """

    def __init__(self, sources: Mapping[str, Source] | None, constants: Mapping[str, Any] | None = None) -> None:
        self.sources = dict(sources or {})
        self._constants = dict(constants or {})
        for source in self.sources.values():
            kind, is_named, name = source.partition(":")
            if source not in SOURCES and not (is_named and name and kind in ("header", "key")):
                known = f"{', '.join(SOURCES)}, header:NAME, key:PATH"
                raise ConfigurationError(f"metadata={sources!r}: there is no {source}; there are {known}")
        if twice := self.sources.keys() & self._constants.keys():
            raise ConfigurationError(f"{', '.join(sorted(twice))} is filled by metadata and is a constant")
        self.columns = (*self.sources, *self._constants)
        self.exact: frozenset[str] = frozenset()
        self._getters: list[Callable[[Message], Any]] = []

    def prepare(self, table: Table, reading: Reading | None = None) -> None:
        """Choose for each column the form that its type takes; ``reading`` is how parts of keys and headers are read.

        :raises TableError: for a column that is not there, or does not take what it is to be filled with.
        """
        columns = table.pick(self.columns)
        self._getters = [self._getter(column, reading) for column in columns]
        self.exact = frozenset(
            c.name for c in columns if name_of(c.type_oid) in _EXACT.get(self.sources.get(c.name, ""), ())
        )

    def _getter(self, column: Column, reading: Reading | None) -> Callable[[Message], Any]:
        type_name = name_of(column.type_oid)
        if column.name not in self.sources:
            given = self._constants[column.name]
            try:
                codec_of(column).convert(given)
            except ValueError as error:
                raise TableError(f"the constant of column {column.name}: {error}") from error
            return lambda _: given
        source = self.sources[column.name]
        kind, _, name = source.partition(":")
        if name and kind == "header" and (reading is None or not reading.is_special(column)):
            return partial(header, name, is_bytes=type_name == "bytea")
        if name:
            from . import json_shape, json_values, logical  # noqa: PLC0415 - an extra

            path = tuple(name.split("."))
            shape = json_shape.Shape({"part": (path, json_shape.Raw)})
            filled = {name: column} if len(path) == 1 else {}
            known = reading or json_values.Reading()

            read = json_values.checked(column, known)

            def get(message: Message) -> Any:
                if kind == "key":
                    raw = logical.in_key(shape, message.key(), filled, known.binary).get("part", json_shape.NULL)
                else:
                    raw = json.dumps(header(name, message, is_bytes=False)).encode()
                try:
                    return read(raw)
                except json_values.UNREADABLE as error:
                    raise ValueError(json_values.refusal(column, raw, error, known)) from error

            return get
        if source == "timestamp":
            return _milliseconds if type_name == "int8" else _timestamp
        if source == "headers" and type_name not in ("json", "jsonb"):
            raise TableError(f"column {column.name} is {column.type_name}; headers need json or jsonb")
        if source == "key" and type_name not in WHOLE_KEYS:
            return partial(key_value, column)
        return _GETTERS[source]

    def get(self, column: str, message: Message) -> Any:
        """Return what one column gets from a message.

        :raises BadRow: for a header or a key that is not what it is read as.
        """
        try:
            return self._getters[self.columns.index(column)](message)
        except _UNREADABLE as error:
            raise self._bad(error, message, column) from error

    def values(self, message: Message) -> Row:
        """Return what all of the columns get.

        :raises BadRow: for a header or a key that is not what it is read as.
        """
        values: list[Any] = []
        try:
            values.extend(get(message) for get in self._getters)  # which keeps those before the one that raises
        except _UNREADABLE as error:
            raise self._bad(error, message, self.columns[len(values)]) from error
        return tuple(values)

    def _bad(self, error: Exception, message: Message, column: str) -> BadRow:
        reason = error.reason if isinstance(error, BadRow) else error
        return BadRow(f"{self.sources[column]}: {reason}", message=message, column=column)


def alike(name: str, others: Iterable[str]) -> str | None:
    """Return the only one of several names that is the same but for upper case and underscores."""
    found = [other for other in others if _bare(other) == _bare(name)]
    return found[0] if len(found) == 1 else None


def _bare(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _milliseconds(message: Message) -> int | None:
    kind, milliseconds = message.timestamp()
    return None if kind == _NO_TIMESTAMP else milliseconds


def _timestamp(message: Message) -> datetime | None:
    milliseconds = _milliseconds(message)
    return None if milliseconds is None else EPOCH + timedelta(milliseconds=milliseconds)


def header(name: str, message: Message, *, is_bytes: bool) -> str | bytes | None:
    """Return the last header of a name, as text unless it is to be bytes; None where there is none.

    :raises ValueError: for one that is no text.
    """
    found = [pair[1] for pair in message.headers() or () if pair[0] == name]
    value: str | bytes | None = found[-1] if found else None
    return value.decode() if isinstance(value, bytes) and not is_bytes else value


def key_value(column: Column, message: Message) -> Any:
    """Return a message's key as the value that it is: plain text, or JSON, with a schema or without.

    :raises ValueError: for bytes that are no text; a UUID may be its 16 bytes.
    """
    key = message.key()
    if not isinstance(key, bytes) or (name_of(column.type_oid) == "uuid" and len(key) == _UUID_BYTES):
        return key
    text = key.decode()
    if not text.lstrip().startswith(("{", '"')):
        return text
    value = json.loads(text, parse_float=Decimal)
    if not (isinstance(value, dict) and value.keys() == {"schema", "payload"}):
        return value
    from . import logical  # noqa: PLC0415 - an extra

    schema, payload = logical.opened(key)
    if schema is None or payload is None:
        return value["payload"]
    row = logical.converted({column.name: payload}, logical.holding(schema, column.name), {column.name: column})
    return json.loads(row[column.name], parse_float=Decimal)


def _headers(message: Message) -> list[list[Any]] | None:
    """Return pairs, because a name may come twice; bytes that are no text are shown as base64."""
    headers = message.headers()
    shown: list[list[Any]] = []
    for pair in headers or ():
        value: Any = pair[1]
        try:
            shown.append([pair[0], value.decode() if isinstance(value, bytes) else value])
        except UnicodeDecodeError:
            shown.append([pair[0], {"base64": base64.b64encode(value).decode()}])
    return None if headers is None else shown


def remade(source: Message, key: Any, value: bytes | None) -> Message:
    """Make a message of another key and value; all else, also unreadable headers, is the source's.

    It remembers the key as it was sent.
    """
    kind: Any = type(source)
    made: Any = _remembering(kind)(
        topic=source.topic(),
        partition=source.partition(),
        offset=source.offset(),
        key=key,
        value=value,
        headers=Message.headers(source),
        timestamp=source.timestamp(),
    )
    made.sent_key = _sent_key(source)
    found: Message = made
    return found


@cache
def _remembering(kind: Any) -> Any:
    return kind if hasattr(kind, "sent_key") else type(kind.__name__, (kind,), {"__slots__": ("sent_key",)})


def _sent_key(message: Any) -> Any:
    return message.sent_key if hasattr(type(message), "sent_key") else message.key()


_GETTERS: dict[Source, Callable[[Message], Any]] = {
    "topic": Message.topic,
    "partition": Message.partition,
    "offset": Message.offset,
    "key": _sent_key,
    "headers": _headers,
}
