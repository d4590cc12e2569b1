"""Formats: what messages are written in becomes JSON, which one decoder makes rows of.

A format turns a message into keys and values in JSON, so that there is one place that knows what a column takes. Binary
values become base64, times ISO 8601, NaN and infinity their names.
"""

from __future__ import annotations

import base64
import contextlib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, Protocol, get_args

import msgspec
from confluent_kafka import Message
from msgspec import Raw

from exactly_once.errors import ConfigurationError
from exactly_once.kafka.kinds import check_choice

from .codecs import name_of
from .decoding import WHOLE_KEYS, Decoded, remade
from .envelopes import Change, Envelope, Format, recognised
from .errors import BadRow, cut
from .from_json import JsonDecoder, path_of
from .json_shape import BYTE_ORDER_MARK, NULL, NULL_DOCUMENT, UNAVAILABLE, Path, fields_in, found_at, refuse_malformed
from .statements import Mode
from .table import Column, Table
from .times import EPOCH

FormatName = Literal["debezium", "connect", "maxwell", "canal", "cloudevents", "csv", "msgpack"]

# Fields that hold the row: who fills a column from one of them knows what the messages are.
_WRAPPERS = {"payload", "before", "after", "data"}
_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}
# How a timestamp of MessagePack begins that has nanoseconds.
_FINE_TIMES = (b"\xd7\xff", b"\xc7\x0c\xff")
# What is raised for a message that is not of its format.
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)
# What may be where an object was.
_NO_OBJECTS = (Raw(NULL), Raw(UNAVAILABLE))
_encode = msgspec.json.Encoder(decimal_format="number").encode


class Binary(Protocol):
    """Turns key and value of a message into JSON before its format is looked at."""

    def opened(self, message: Message, *, opens_key: bool = True) -> Message:
        """Return the message with its value in JSON, and its key unless nobody reads it.

        :raises BadRow: for a message that is not of the form.
        """


def hint_for(value: bytes | None) -> str | None:
    """Say which option a message asks for that is no plain JSON; None if none is known."""
    if (value or b"").startswith(b"\0"):
        return "a zero byte at the start is the wire format of a Schema Registry: say --schema-registry URL"
    if (found := recognised(value)) is not None:
        return (
            f"the message is in an envelope of {found.capitalize()}: say --format {found}, or --format json to take "
            "its fields as they are"
        )
    return None


class FormatDecoder:
    """Turns messages into JSON and gives them to ``decoder``; without a format they are JSON.

    ``opens_keys`` has rows keep their messages' keys in JSON, too. With ``guards`` messages in a
    format that nobody has named are refused, for most of what they say would be lost.
    """

    def __init__(
        self,
        decoder: JsonDecoder,
        form: Format | None = None,
        *,
        binary: Binary | None = None,
        opens_keys: bool = False,
        guards: bool = False,
    ) -> None:
        self._decoder = decoder
        self.missing = decoder.missing
        self._format = form or Format()
        self._binary = binary
        self._is_json = form is None and binary is None
        self._guards = guards
        self._opens_keys = opens_keys or any(source.startswith("key:") for source in decoder.envelope.sources.values())
        self._deletes = False
        # Whether a column of the table's key is the message's own key, as it was sent.
        self._has_whole_key = False

    def prepare(self, table: Table, *, mode: Mode, key: Sequence[str]) -> None:
        """Get ready for a table."""
        self._decoder.prepare(table, mode=mode, key=key)
        paths, columns = self._decoder.paths, {column.name: column for column in table.columns}
        # A table that takes the fields of an envelope is filled with them.
        self._is_guarded = self._guards and not {path[0] for path in paths.values()} & _WRAPPERS
        by_field = {path[0]: columns[name] for name, path in paths.items() if len(path) == 1}
        names = [paths[name][-1] for name in key if name in paths] if mode == "upsert" else []
        self._format.prepare(by_field, mode=mode, key=names)
        self._deletes = mode == "upsert"
        sources = self._decoder.envelope.sources
        self._has_whole_key = any(sources.get(name) == "key" for name in key)
        own = (name for name, source in sources.items() if source == "key")
        self._opens_keys |= any(name_of(columns[name].type_oid) not in WHOLE_KEYS for name in own)

    @property
    def new_fields(self) -> set[str]:
        """The fields that no column takes, as the decoder knows them."""
        return self._decoder.new_fields

    def types(self, messages: Sequence[Message]) -> dict[str, str]:
        """Return the types of columns that messages tell; those that cannot be read tell none."""
        types: dict[str, str] = {}
        for message in messages:
            with contextlib.suppress(*_UNREADABLE):
                opened = message if self._binary is None else self._binary.opened(message, opens_key=False)
                types |= {path[0]: kind for path, kind in self._format.types(opened).items() if len(path) == 1}
        return types

    def decode(self, messages: Sequence[Message]) -> Decoded:
        """Turn all messages into JSON now; what is wrong with a row is raised when it is made.

        For formats that nobody has named both ends of the batch are looked at, since a topic has one format.

        :raises BadRow: for a message that is not of the format, or asks for what cannot be done.
        """
        for message in (messages[0], messages[-1]) if messages and self._is_guarded else ():
            if (hint := hint_for(message.value())) is not None:
                raise BadRow(hint, message=message)
        if self._is_json:
            return self._decoder.decode(messages)
        before = self._format.left_out
        found = [self.read(message)[0] for message in messages]
        decoded = self._decoder.decode([each for some in found for each in some])
        filtered = decoded.filtered + self._format.left_out - before
        unmet = self._format.unmet | (set(decoded.unmet) - self._format.sought)
        return replace(decoded, filtered=filtered, unmet=unmet)

    def read(self, message: Message, *, tells: bool = False) -> tuple[list[Message], dict[Path, str], tuple[str, ...]]:
        """Return what a message says as messages in JSON; with ``tells`` also types and key, as far as it tells them.

        :raises BadRow: for a message that is not of the format, or asks for what cannot be done.
        """
        try:
            reads_key = tells or self._opens_keys or self._deletes or message.value() is None
            opened = message if self._binary is None else self._binary.opened(message, opens_key=reads_key)
            # A row's own key is what was sent; a delete needs what it says, unless it is to find that.
            own = opened.key() if self._opens_keys else message.key()
            changes = list(self._format.read(opened))
            if self._has_whole_key and len({value is None for _, value in changes}) > 1:
                raise BadRow("the key of the row changed, and a column of it is the message's: it has but one")
            found = [
                remade(message, key if value is None and not self._has_whole_key else own, value)
                for key, value in changes
            ]
            if not tells:
                return found, {}, ()
            return found, self._format.types(opened), self._format.key_fields(opened)
        except BadRow as error:
            raise BadRow(error.reason, message=message, column=error.column) from error
        except _UNREADABLE as error:
            raise BadRow(f"{error}: {cut(message.value())}", message=message) from error


def format_of(
    name: FormatName,
    *,
    columns: Sequence[str] | None = None,
    delimiter: str = ",",
    decimal: Collection[str] = (),
    **envelope: Any,
) -> Format:
    """Return a format by its name; ``columns`` and ``delimiter`` are those of CSV, ``envelope`` those of an envelope.

    :raises ConfigurationError: for a name that is none.
    """
    if name == "csv":
        return Csv(columns, delimiter)
    if name == "msgpack":
        return MessagePack(decimal)
    if name == "cloudevents":
        return CloudEvents()
    check_choice("format", name, get_args(FormatName))
    return Envelope(name, decimal=decimal, **envelope)


class MessagePack(Format):
    """Maps of MessagePack; bytes are base64 for a column of bytes or JSON, and text in UTF-8 for any other.

    For the columns in ``decimal``, and in maps in maps, they are base64, too. An extension is an object, with base64.
    """

    def __init__(self, decimal: Collection[str] = ()) -> None:
        self._decimal = frozenset(decimal)
        # The fields whose columns take text, or bytes, and those columns.
        self._texts: Mapping[str, str] = {}
        self._binary: Mapping[str, str] = {}
        # The fields that held bytes so far, and those that held something else.
        self._bytes_in: set[str] = set()
        self._others_in: set[str] = set()

    def prepare(self, columns: Mapping[str, Column], *, mode: Mode, key: Sequence[str]) -> None:
        """See which columns take text."""
        kinds = {name: name_of((column.element or column).type_oid) for name, column in columns.items()}
        in_base64 = {name for name, column in columns.items() if column.name in self._decimal}
        in_base64 |= {name for name, kind in kinds.items() if kind in ("bytea", "json", "jsonb")}
        self._texts = {name: column.name for name, column in columns.items() if name not in in_base64}
        self._binary = {name: column.name for name, column in columns.items() if kinds[name] == "bytea"}

    def row(self, message: Message) -> bytes | None:
        """Return the row in a map."""
        if (value := message.value()) is None:
            return None
        found = _unpacked(value) if any(hint in value for hint in _FINE_TIMES) else msgspec.msgpack.decode(value)
        if not isinstance(found, dict):
            raise ValueError(f"a map of MessagePack is wanted, not {cut(found)}")
        for name, column in self._texts.items():
            if name in found:
                try:
                    found[name] = _as_text(found[name])
                except UnicodeDecodeError as error:
                    raise BadRow(f"bytes that are no text: {error}", message=message, column=column) from error
        for name, column in self._binary.items():
            if _has_text(found.get(name)):
                reason = f"text for a column of bytes: {cut(found[name])}; send it as bin, or store it in a text column"
                raise BadRow(reason, message=message, column=column)
        return to_json(found)

    def types(self, message: Message) -> dict[Path, str]:
        """Return bytea for bytes, which JSON does not tell from text; text for what is not bytes in each message."""
        found = msgspec.msgpack.decode(message.value() or b"\x80")
        fields = found if isinstance(found, dict) else {}
        self._bytes_in |= {name for name, value in fields.items() if isinstance(value, bytes)}
        self._others_in |= {name for name, value in fields.items() if not isinstance(value, (bytes, type(None)))}
        return {(name,): "text" if name in self._others_in else "bytea" for name in fields if name in self._bytes_in}


def _unpacked(value: bytes) -> Any:
    """Decode MessagePack, with the timestamps that are finer than a microsecond as texts: a datetime is not."""
    found = msgspec.msgpack.decode(value)
    if isinstance(found, dict):
        fields = msgspec.msgpack.decode(value, type=dict[Any, Raw])
        return {name: _unpacked(bytes(each)) for name, each in fields.items()}
    if isinstance(found, list):
        return [_unpacked(bytes(each)) for each in msgspec.msgpack.decode(value, type=list[Raw])]
    if not value.startswith(_FINE_TIMES):
        return found
    data = bytes(msgspec.msgpack.decode(value, type=msgspec.msgpack.Ext).data)
    if len(data) == 8:  # the seconds are the lower 34 bits
        nanoseconds, seconds = divmod(int.from_bytes(data, "big"), 1 << 34)
    else:
        nanoseconds, seconds = int.from_bytes(data[:4], "big"), int.from_bytes(data[4:], "big", signed=True)
    moment = (EPOCH + timedelta(seconds=seconds)).isoformat().removesuffix("+00:00")
    return f"{moment}.{nanoseconds:09d}Z" if nanoseconds % 1000 else found


def _has_text(value: Any) -> bool:
    return any(map(_has_text, value)) if isinstance(value, list) else isinstance(value, str)


def _as_text(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_text(each) for each in value]
    return value.decode() if isinstance(value, bytes) else value


class Shaped(Format):
    """A format whose rows are filtered and flattened.

    ``where`` and ``where_not`` say which values a field must have, or must not, as JSON writes them: a row goes on with
    one of the values of each field in ``where``, and none of those in ``where_not``. Deletes go on. With ``flatten``
    an object in an object becomes its fields, and what it says stands between their names; those in ``drop`` do not.
    """

    def __init__(
        self,
        inner: Format,
        *,
        where: Mapping[str, Sequence[str]] | None = None,
        where_not: Mapping[str, Sequence[str]] | None = None,
        flatten: str | None = None,
        drop: Collection[str] = (),
    ) -> None:
        self._inner = inner
        self._drop = frozenset(drop)
        self._tests = [(path_of(path), frozenset(values), True) for path, values in (where or {}).items()]
        self._tests += [(path_of(path), frozenset(values), False) for path, values in (where_not or {}).items()]
        # Below objects that become their fields nobody else sees what is dropped.
        dropped = frozenset() if flatten is None else self._drop
        self.sought = dropped.union(".".join(path) for path, *_ in self._tests)
        self.unmet = self.sought
        self._flatten = flatten
        # The beginnings of names that fields which are dropped would have.
        self._dropped = [f"{flatten}".join([*path_of(path), ""]) for path in drop]
        self._names: Collection[str] = ()
        self._never_objects: Collection[str] = ()

    def prepare(self, columns: Mapping[str, Column], *, mode: Mode, key: Sequence[str]) -> None:
        """Prepare what is below."""
        self._names = columns
        self._never_objects = {n for n, c in columns.items() if name_of(c.type_oid) not in ("json", "jsonb")}
        self._inner.prepare(columns, mode=mode, key=key)

    def read(self, message: Message) -> Iterator[Change]:
        """Yield the rows that are wanted."""
        before = self._inner.left_out
        changes = list(self._inner.read(message))
        self.left_out += self._inner.left_out - before
        for key, value in changes:
            if value is None:
                yield key, None
                continue
            row = fields_in(value.removeprefix(BYTE_ORDER_MARK))
            texts = [_text_at(row, path) for path, *_ in self._tests]
            if self.unmet:
                self.unmet -= {".".join(t[0]) for t, text in zip(self._tests, texts, strict=True) if text is not None}
            if any((text in t[1]) is not t[2] for t, text in zip(self._tests, texts, strict=True)):
                self.left_out += 1
                continue
            if self._flatten is None:
                yield key, value
                continue
            flat = self._flat(row, "", ())
            self.unmet -= flat.keys()
            # The columns of an object's fields have what is there for the object: null, or a value left out. What has a
            # column that takes no objects was none: its null says nothing of columns with longer names.
            nothings = {
                f: v for f, v in flat.items() if v in _NO_OBJECTS and (v != Raw(NULL) or f not in self._never_objects)
            }
            for name in self._names if nothings else ():
                sources = [field for field in nothings if name.startswith(f"{field}{self._flatten}")]
                if sources and not any(f"{name}{self._flatten}".startswith(each) for each in self._dropped):
                    flat.setdefault(name, nothings[max(sources, key=len)])
            yield key, msgspec.json.encode(flat)

    def types(self, message: Message) -> dict[Path, str]:
        """Return what is told below; of objects that become their fields the types of those."""
        found = self._inner.types(message)
        if (between := self._flatten) is None:
            return found
        return {
            (between.join(path),): kind
            for path, kind in found.items()
            if kind != "jsonb" and self._drop.isdisjoint(".".join(path[: i + 1]) for i in range(len(path)))
        }

    def key_fields(self, message: Message) -> tuple[str, ...]:
        """Return what is told below."""
        return self._inner.key_fields(message)

    def _flat(self, row: Mapping[str, Raw], prefix: str, path: tuple[str, ...]) -> dict[str, Raw]:
        flat: dict[str, Raw] = {}
        for name, value in row.items():
            if (dotted := ".".join((*path, name))) in self._drop:  # a name may have dots of its own
                self.unmet -= {dotted}
                continue
            below = {prefix + name: value}
            if bytes(value).startswith(b"{") and (inner := fields_in(bytes(value))):
                below = self._flat(inner, f"{prefix}{name}{self._flatten}", (*path, name))
            if twice := flat.keys() & below.keys():
                raise ValueError(f"two fields become {', '.join(sorted(twice))} when they are flattened")
            flat |= below
        return flat


def _text_at(row: Mapping[str, Raw], path: Sequence[str]) -> str | None:
    """Return a value as JSON writes it, without the quotes; None where there is none.

    :raises ValueError: for a value that the source left out.
    """
    raw = found_at(row, path)
    if raw == UNAVAILABLE:
        name = ".".join(path)
        raise ValueError(f"the event leaves {name} out, which decides whether it is wanted: set REPLICA IDENTITY FULL")
    if raw is None or raw == NULL_DOCUMENT:
        return None if raw is None else NULL.decode()
    return msgspec.json.decode(raw) if raw.startswith(b'"') else raw.decode()


def jsonable(value: Any) -> Any:
    """Return a value of which JSON loses nothing: NaN and infinity become their names.

    :raises ValueError: for a key of a mapping that is no text.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else _NAMES.get(value, "NaN")
    if isinstance(value, msgspec.msgpack.Ext):
        return {"extension": value.code, "data": base64.b64encode(value.data).decode()}
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"a field's name is no text: {cut(wrong[0])}")
        return {key: jsonable(each) for key, each in value.items()}
    return [jsonable(each) for each in value] if isinstance(value, (list, tuple)) else value


def to_json(value: Any) -> bytes:
    """Write a value as JSON, of which nothing is lost."""
    return _encode(jsonable(value))


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


class CloudEvents(Format):
    """Events, in their structured or their binary mode."""

    def row(self, message: Message) -> bytes | None:
        """Return the attributes of an event as fields, and its data as ``data``, or as base64 in ``data_base64``.

        :raises ValueError: for what is no event, or a batch of them.
        """
        value, headers = message.value(), {pair[0].lower(): pair[1] for pair in message.headers() or ()}
        sent = _text(headers.get("content-type"))
        kind = sent.strip().lower()  # RFC 9110, 8.3.1
        if kind.startswith("application/cloudevents"):
            if not kind.startswith("application/cloudevents+json"):
                raise ValueError(f"events in {sent} are not read; application/cloudevents+json and the binary mode are")
        elif "ce_specversion" in headers:
            event: dict[str, Any] = {name[3:]: _text(text) for name, text in headers.items() if name.startswith("ce_")}
            event |= {"datacontenttype": sent} if sent else {}
            if value is None:
                return _encode(event)
            if not kind or re.match(r"(?:application|text)/(?:json|[^;]*\+json)\b", kind):
                refuse_malformed(value)
                return _encode(event | {"data": Raw(value)})
            if kind.startswith("text/"):
                charset = re.search(r';\s*charset="?([^";\s]+)', kind)
                try:
                    return _encode(event | {"data": value.decode(charset[1] if charset else "utf-8")})
                except LookupError as error:
                    raise ValueError(f"the data is text in an unknown charset: {sent}") from error
            return _encode(event | {"data_base64": base64.b64encode(value).decode()})
        elif value is None:
            return None
        found = msgspec.json.decode(value or b"null", type=dict[str, Raw])
        if "specversion" not in found:
            what = "it has neither a header ce_specversion nor a field specversion"
            raise ValueError(f"the message is no CloudEvent: {what}")
        return value


class Csv(Format):
    """Lines of CSV as Postgres writes them: what is empty and not in quotes is null. A message may hold several.

    ``columns`` names the fields in their order; by default they are the columns of the table, in theirs.
    """

    def __init__(self, columns: Sequence[str] | None = None, delimiter: str = ",") -> None:
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise ConfigurationError(f"csv_delimiter={delimiter!r} is not possible; it is one character and no quote")
        if columns is not None and (not all(columns) or len(set(columns)) < len(columns)):
            names = ", ".join(repr(name) for name in columns)
            raise ConfigurationError(f"csv_columns: each field of a line needs a name of its own: {names}")
        self._names = tuple(columns or ())
        # The fields that hold JSON, and their columns.
        self._json: dict[str, str] = {}
        quoted = re.escape(delimiter)
        self._field = re.compile(rf'(?:"((?:[^"]|"")*)"|([^"{quoted}\r\n]*))({quoted}|\r?\n|\Z)')

    def prepare(self, columns: Mapping[str, Column], *, mode: Mode, key: Sequence[str]) -> None:
        """Name the fields by the columns."""
        if not self._names:  # a column that is added later is no field of the lines
            self._names = tuple(columns)
        self._json = {n: column.name for n, column in columns.items() if name_of(column.type_oid) in ("json", "jsonb")}

    def read(self, message: Message) -> Iterator[Change]:
        """Yield the lines as rows.

        :raises ValueError: for a line of another number of fields, or with a quote where none can be.
        """
        if (value := message.value()) is None:
            yield message.key(), None
            return
        text, position = value.decode("utf-8-sig"), 0
        if not text.strip("\r\n"):
            raise ValueError("there is no line of CSV")
        while position < len(text):
            fields: list[str | None] = []
            is_over = False
            while not is_over:
                found = self._field.match(text, position)
                if found is None:
                    [wrong] = re.findall(r'["\r]', text[position:])[:1]
                    what = "a quote" if wrong == '"' else "a carriage return without a line feed"
                    raise ValueError(f"{what} in the middle of field {len(fields) + 1}")
                inside, bare, end = found.groups()
                fields.append(inside.replace('""', '"') if inside is not None else bare or None)
                position, is_over = found.end(), end in ("", "\n", "\r\n")
            if len(fields) != len(self._names):
                raise ValueError(f"{len(fields)} fields, not {len(self._names)}: {', '.join(self._names)}")
            yield message.key(), _encode(dict(zip(self._names, map(self._as_json, self._names, fields), strict=True)))

    def types(self, message: Message) -> dict[Path, str]:
        """Return text for each: a number may be a name with leading zeros."""
        return {(name,): "text" for name in self._names}

    def _as_json(self, name: str, text: str | None) -> Any:
        if text is None or name not in self._json:
            return text
        try:
            refuse_malformed(raw := text.encode())
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRow(f"{error}: {cut(text)}", column=self._json[name]) from error
        return Raw(raw)
