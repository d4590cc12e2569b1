"""Envelopes: rows and changes out of messages that Debezium, Kafka Connect, Maxwell or Canal have wrapped. No I/O.

Where a schema is sent along, values of its logical types become what they stand for: days a date, base64 a decimal.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal

import msgspec
from confluent_kafka import Message
from msgspec import Raw

from exactly_once._log import about
from exactly_once._model import Partition
from exactly_once.errors import ConfigurationError

from .codecs import name_of
from .errors import BadRow, cut
from .from_json import OnTombstone
from .json_shape import UNAVAILABLE, Path, fields_in
from .logical import NUMBERS, Row, Schema, converted, holding, of_bytes, opened, refuse_unsure_bytes, types_of
from .mysql import column_of, value_for
from .statements import Mode
from .table import Column

logger = logging.getLogger(__name__)

EnvelopeName = Literal["debezium", "connect", "maxwell", "canal"]
# A key, and a row in JSON or None for a delete.
Change = tuple[bytes | None, bytes | None]

# What Debezium writes for a large value that Postgres has not logged, because the update left it as it was.
_PLACEHOLDER = b"__debezium_unavailable_value"
_TEXT, _BASE64, _HEX = _PLACEHOLDER.decode(), base64.b64encode(_PLACEHOLDER).decode(), _PLACEHOLDER.hex()
# Its MD5, which is what stands for it in an array of uuid.
_UUID = "b68a35a7-17ad-35b3-af2a-ae46edb4545a"
# What becomes of it in a column of geometry and of geography: places that nothing has.
_PLACES = ("AQEAACDmEAAAAAAA/IPXl8EAAAD8g9eXwQ==", "AQEAACDmEAAADCHn/f9/ZkAYQs77/39WQA==")
_PLACEHOLDERS: tuple[Any, ...] = (
    *(_TEXT, _BASE64, _HEX, [_TEXT], [_BASE64], [_HEX], [_UUID], list(_PLACEHOLDER)),
    *({_TEXT: _TEXT}, f'{{"{_TEXT}":"{_TEXT}"}}'),  # of hstore
    *({"wkb": wkb, "srid": 4326} for wkb in _PLACES),
)
# Looked for first, for such a value is rare.
_HINTS = [hint.encode() for hint in (_TEXT, _BASE64, _HEX, _UUID, "[95,95,", "[95, 95,", *_PLACES)]
# Statements of which Canal tells that remove no rows.
_WITHOUT_ROWS = ("CREATE", "ALTER", "QUERY", "CINDEX", "DINDEX")
# What is raised for what is no JSON.
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


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
    mysqlType: Mapping[str, str] | None = None  # noqa: N815 - Canal's name
    pkNames: tuple[str, ...] | None = None  # noqa: N815


# Base64 comes in groups of four characters.
_NUMBER_OR_BASE64 = re.compile(rb'"(?=\+?\d+([eE]\+?\d+)?")(?:.{4})+"')
_read = msgspec.json.Decoder(_Wrapped).decode
_rows = msgspec.json.Decoder(tuple[Raw, ...] | None).decode


def recognised(value: bytes | None) -> EnvelopeName | None:
    """Tell in which envelope a message seems to be, if in any."""
    try:
        found = _read(value or b"null")
        if found.schema and found.payload:
            inner = _read(found.payload) if bytes(found.payload).startswith(b"{") else _Wrapped()
            return "debezium" if inner.op and (inner.before or inner.after) else "connect"
    except _MALFORMED:
        return None
    if found.op and found.source and (found.before or found.after):
        return "debezium"
    if found.database and found.table and found.type and found.data:
        return "canal" if found.mysqlType is not None or bytes(found.data).startswith(b"[") else "maxwell"
    return None


class Format:
    """Turns messages into JSON. This one is for JSON, a row each; it depends on neither table nor schema."""

    left_out = 0
    """How many rows, deletes and truncates did not go on so far."""
    sought: Set[str] = frozenset()
    """The fields that decide what goes on, or that do not go on, as options name them."""
    unmet: Set[str] = frozenset()
    """Those of them that no message had so far."""

    def prepare(self, columns: Mapping[str, Column], *, mode: Mode, key: Sequence[str]) -> None:
        """Get ready for a table, whose columns are given by the names of the fields that fill them.

        ``key`` are the fields of an upsert's key.
        """

    def read(self, message: Message) -> Iterable[Change]:
        """Return keys with rows in JSON, or with None for a delete; by default a message is one row.

        :raises BadRow: for a message that is not of the format.
        :raises ValueError: the same; so do other errors of decoding.
        """
        return ((message.key(), self.row(message)),)

    def row(self, message: Message) -> bytes | None:
        """Return the row in a message; None for the delete that a message without a value is."""
        return message.value()

    def types(self, message: Message) -> dict[Path, str]:
        """Return the types of columns that a message tells, by the paths of fields; by default the values tell."""
        return {}

    def key_fields(self, message: Message) -> tuple[str, ...]:
        """Return the names of the fields of the key, as far as a message tells them."""
        return ()


class Envelope(Format):
    """Unwraps messages.

    In an upsert a delete event deletes, and an update that changes the key deletes the old row as well. A tombstone
    behind a delete is nothing. Elsewhere a delete is refused, unless ``on_tombstone="skip"``. A truncate event has no
    key and concerns all partitions: it is refused, unless ``on_truncate="skip"``.

    ``decimal`` names the columns whose numbers are bytes, ``binary`` how text holds bytes, ``drop`` fields whose
    values may be left out by the source; with ``lax`` numbers may be texts.
    """

    def __init__(
        self,
        name: EnvelopeName,
        *,
        missing: str = "null",
        on_tombstone: OnTombstone | None = None,
        on_truncate: Literal["refuse", "skip"] = "refuse",
        decimal: Collection[str] = (),
        binary: Mapping[str, str] | None = None,
        lax: bool = False,
        drop: Collection[str] = (),
    ) -> None:
        self._name = name
        self._drop = frozenset(drop)
        changes = {"debezium": self._debezium, "connect": self._connect, "maxwell": self._maxwell, "canal": self._canal}
        self._changes = changes[name]
        self._keeps_missing = missing == "keep"
        self._on_tombstone = on_tombstone
        self._skips_truncate = on_truncate == "skip"
        self._decimal, self._lax = frozenset(decimal), lax
        self._binary = {**dict.fromkeys(decimal, "base64"), **(binary or {})}
        # The fields of which a text, where no schema tells, may be a number or the base64 of one.
        self._unsure: frozenset[str] = frozenset()
        # The columns that the fields of a row go to, by the fields' names; of bytes, whose form a schema must tell.
        self._columns: Mapping[str, Column] = {}
        self._bytes: Mapping[str, Column] = {}
        self._deletes = False
        # The fields of the key; none where rows are only appended, or where all of it is metadata.
        self._key: tuple[str, ...] = ()
        # Offset and key of each partition's last message, where that was a delete: the tombstone behind it is nothing.
        #
        # What comes again, because a batch failed, is not behind what came after it.
        self._deleted: dict[tuple[str | None, int | None], tuple[int, bytes | None]] = {}
        self._is_behind_delete = False
        # Whether the bare keys of Debezium's messages are those of the rows, as far as rows have shown it, by topic.
        self._bare_keys: dict[str | None, bool] = {}
        # The topics of which it was said that a tombstone is passed over.
        self._told: set[str | None] = set()

    def prepare(self, columns: Mapping[str, Column], *, mode: Mode, key: Sequence[str]) -> None:
        """Refuse a mode in which updates would be lost."""
        if mode == "insert-ignore" and self._name != "connect":
            raise ConfigurationError(
                f"mode='insert-ignore' would leave out the updates of format={self._name!r}: say upsert or append"
            )
        self._columns, self._key, self._deletes = columns, tuple(key), mode == "upsert"
        self._bytes = of_bytes(columns, self._binary)
        if self._name == "debezium" and not self._lax:
            numbers = (f for f, c in columns.items() if name_of(c.type_oid) in NUMBERS and c.name not in self._decimal)
            self._unsure = frozenset(numbers)

    def read(self, message: Message) -> Iterator[Change]:
        """Yield the row or the tombstone in a message; both, tombstone first, where it changes a key.

        :raises BadRow: for a message that is not in the envelope, or asks for what cannot be done.
        """
        place = message.topic(), message.partition()
        offset, key = self._deleted.pop(place, (None, None))
        self._is_behind_delete = offset is not None and key == message.key() and (message.offset() or 0) > offset
        for changed, row in (self._tombstone if message.value() is None else self._changes)(message):
            yield changed, None if row is None else msgspec.json.encode(_raw(row))

    def types(self, message: Message) -> dict[Path, str]:
        """Return the types of the columns that the schema of a message asks for; none where it has no schema."""
        if self._name == "canal":
            return {(name,): column_of(kind) for name, kind in (_event(message).mysqlType or {}).items()}
        schema, _ = opened(message.value())
        return {} if schema is None else types_of(schema.of("after") or schema)

    def key_fields(self, message: Message) -> tuple[str, ...]:
        """Return the names of the fields of the key, as far as a message tells them."""
        try:
            if self._name == "canal":
                return _event(message).pkNames or ()
            return tuple(_fields_of_key(message)[1])
        except _MALFORMED:
            return ()

    # Each of these returns keys with rows, or with None for a delete.

    def _debezium(self, message: Message) -> Iterator[tuple[bytes | None, Row | None]]:
        schema, payload = opened(message.value())
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
            self._truncate()
        elif op in ("c", "r", "u") and after is not None:
            yield from self._stored(message, before if op == "u" else None, after)
        else:
            raise BadRow(f"no change event of Debezium (op is {op!r}): {cut(payload)}")

    def _connect(self, message: Message) -> Iterator[tuple[bytes | None, Row | None]]:
        schema, payload = opened(value := message.value())
        if payload is value:
            raise BadRow(f"the message has no schema and payload: {cut(value)}")
        row = self._row(payload or b"", schema)
        if row is None:
            yield from self._tombstone(message)
        else:
            yield from self._stored(message, None, row)

    def _maxwell(self, message: Message) -> Iterator[tuple[bytes | None, Row | None]]:
        event = _event(message)
        kind = msgspec.json.decode(event.type) if event.type else None
        row = self._row(event.data, None)
        if kind == "delete" and row is not None:
            yield from self._delete(message, row)
        elif kind in ("insert", "update", "bootstrap-insert") and row is not None:
            yield from self._stored(message, row | (self._row(event.old, None) or {}), row)
        elif kind not in ("bootstrap-start", "bootstrap-complete"):
            raise BadRow(f"no change of a row by Maxwell (type is {kind!r}): {cut(message.value())}")

    def _canal(self, message: Message) -> Iterator[tuple[bytes | None, Row | None]]:
        event = _event(message)
        kind = msgspec.json.decode(event.type) if event.type else None
        if kind in _WITHOUT_ROWS:
            text = "%s[%s] offset %s: the source's table met %s; look whether this one is to be altered, too"
            extra = about("source_altered", partition=Partition.of(message), offset=message.offset())
            logger.warning(text, message.topic(), message.partition(), message.offset(), kind, extra=extra)
            return
        if kind == "TRUNCATE":
            self._truncate()
            return
        rows = _rows(event.data) if event.data else None
        if kind not in ("INSERT", "UPDATE", "DELETE") or rows is None:
            raise BadRow(f"no change of rows by Canal (type is {kind!r}): {cut(message.value())}")
        olds = (_rows(event.old) if event.old else None) or (Raw(b"null"),) * len(rows)
        if len(olds) != len(rows):
            raise BadRow(f"data holds {len(rows)} rows, and old {len(olds)}: {cut(message.value())}")
        types = event.mysqlType or {}
        for data, old in zip(rows, olds, strict=True):
            row = self._row(data, None) or {}
            before = row | (self._row(old, None) or {})
            for one in (row, before):
                for name, value in one.items():
                    of_mysql = types.get(name, "")
                    try:
                        one[name] = value_for(self._columns.get(name), of_mysql, value)
                    except (ValueError, LookupError) as error:
                        what = f"{cut(value)}, of MySQL's type {of_mysql or 'unknown'}: {error}"
                        raise BadRow(what, column=name) from error
            if kind == "DELETE":
                yield from self._delete(message, row)
            else:
                yield from self._stored(message, before if kind == "UPDATE" else None, row)

    def _row(self, text: bytes | Raw, schema: Schema | None) -> Row | None:
        """Read an object, its logical types as what they stand for; None for null or nothing."""
        if not (text := bytes(text)) or text == b"null":
            return None
        if self._name == "debezium" and text.startswith(b'"'):
            raise BadRow(
                "the row is a text that holds a document, as Debezium for MongoDB writes it: have its transformation "
                "ExtractNewDocumentState make fields of it, and say --format connect"
            )
        row = {name: bytes(value) for name, value in fields_in(text).items()}
        # A topic of Debezium that was flattened is one of Connect.
        if self._name in ("debezium", "connect") and any(hint in text for hint in _HINTS):
            hinted = [n for n, value in row.items() if any(hint in value for hint in _HINTS)]
            row |= {n: UNAVAILABLE for n in hinted if msgspec.json.decode(row[n]) in _PLACEHOLDERS}
        for name in self._unsure & row.keys() if schema is None else ():
            if _NUMBER_OR_BASE64.fullmatch(row[name]):
                what = f"{row[name].decode()} is a number or the base64 of one, and no schema tells"
                how = "say decimal with its scale, or lax where it is a number (decimal.handling.mode=string)"
                raise BadRow(f"{what}: {how}", column=name)
        return self._converted(row, schema)

    def _converted(self, row: Row, schema: Schema | None) -> Row:
        if schema is not None or self._name == "debezium":
            refuse_unsure_bytes(row, schema, self._bytes)
        return converted(row, schema, self._columns, self._binary)

    def _truncate(self) -> None:
        self.left_out += 1
        if not self._skips_truncate:
            raise BadRow('the source table was truncated: empty this one, and say on_truncate = "skip"')

    def _stored(self, message: Message, before: Row | None, after: Row) -> Iterator[tuple[bytes | None, Row | None]]:
        """Store a row; where it had another key before, delete that one."""
        lacking = next((n for n, text in after.items() if text == UNAVAILABLE and n not in self._drop), None)
        if lacking is not None and not self._keeps_missing:
            raise BadRow(
                'a large value that did not change is not in the message: say missing = "keep" in mode upsert, or '
                "set REPLICA IDENTITY FULL at the source",
                column=lacking,
            )
        if self._key and before is not None and all(name in before and name in after for name in self._key):
            old = {name: before[name] for name in self._key}
            if old != {name: after[name] for name in self._key}:
                if lacking is not None:  # a row of the new key would be another one
                    what = "a large value is not in the message, and the key changed: set REPLICA IDENTITY FULL"
                    raise BadRow(f"{what} at the source", column=lacking)
                yield self._key_text(message, old), None
        self._note_key(message, after)
        yield message.key(), after

    def _delete(self, message: Message, before: Row | None) -> Iterator[tuple[bytes | None, Row | None]]:
        if self._on_tombstone == "skip":
            self.left_out += 1
            return
        if not self._deletes:
            raise BadRow('a delete, and rows are only appended: say mode = "upsert", or on_tombstone = "skip"')
        key, is_object = self._key_of(message)
        # What a bare key stands for only the producer knows.
        if (
            before is not None
            and set(self._key) <= set(before)
            and not (is_object and set(self._key) <= set(key or ()))
        ):
            key = before
        self._note_key(message, before or {})
        key = key or {}
        if not set(self._key) <= set(key):
            raise BadRow(f"a delete without {', '.join(self._key)}: set REPLICA IDENTITY FULL at the source")
        self._deleted[message.topic(), message.partition()] = message.offset() or 0, message.key()
        yield self._key_text(message, {name: key[name] for name in self._key}), None

    def _tombstone(self, message: Message) -> Iterator[tuple[bytes | None, Row | None]]:
        """Delete, because compaction may have left nothing but the tombstone of a delete."""
        if self._is_behind_delete:
            return
        if self._on_tombstone == "skip":
            self.left_out += 1
            return
        (key, is_object), topic = self._key_of(message), message.topic()
        lacks = key is not None and not set(self._key) <= set(key)
        if self._name == "debezium" and self._deletes:
            is_unknown = self._key and _bare_key(message) is not None and not self._bare_keys.get(topic, False)
            if is_unknown or (is_object and lacks):  # where keys are something else, its delete event has done it
                if topic not in self._told:
                    self._told.add(topic)
                    text = (
                        "%s[%s] offset %s: a tombstone is passed over, as others of this topic will be: nothing shows "
                        "that its key %s is the %s of a row. Its delete event deletes, unless compaction has removed "
                        "that"
                    )
                    where = topic, message.partition(), message.offset()
                    extra = about("tombstone_passed_over", partition=Partition.of(message), offset=message.offset())
                    logger.warning(text, *where, cut(message.key()), ", ".join(self._key), extra=extra)
                return
        if lacks:
            raise BadRow(f"a tombstone whose key has no {', '.join(self._key)}: {cut(message.key())}")
        yield message.key() if key is None else self._key_text(message, {n: key[n] for n in self._key}), None

    def _note_key(self, message: Message, row: Row) -> None:
        """See whether a bare key is that of the row, which a tombstone does not show."""
        bare = _bare_key(message) if self._name == "debezium" and self._key else None
        if bare is not None and set(self._key) <= set(row):
            is_own = len(self._key) == 1 and _shown(bare) == _shown(row[self._key[0]])
            self._bare_keys[message.topic()] = is_own and self._bare_keys.get(message.topic(), True)

    def _key_text(self, message: Message, key: Row) -> bytes:
        """Write a key as an object, with what the message's own holds besides: a column may be filled from there.

        That is still to be read by its schema, and ``key`` has been.
        """
        schema, fields = _fields_of_key(message)
        text = msgspec.json.encode(_raw({**fields, **key}))
        if schema is None:
            return text
        left = tuple(each for each in schema.fields if each.field not in key)
        schema = msgspec.structs.replace(schema, fields=left)
        return b'{"schema":%b,"payload":%b}' % (msgspec.json.encode(schema), text)

    def _key_of(self, message: Message) -> tuple[Row | None, bool]:
        """Read the fields of a message's key, and tell whether it is an object; a bare value is the only field.

        None where it is no JSON.
        """
        try:
            schema, payload = opened(message.key())
            if payload is not None and payload.lstrip().startswith(b"{"):
                return self._row(payload, schema), True
            msgspec.json.decode(payload or b"")
        except _MALFORMED:
            return None, False
        if payload is None or len(self._key) != 1:
            return None, False
        [name] = self._key
        return self._converted({name: payload}, schema and holding(schema, name)), False


def _event(message: Message) -> _Wrapped:
    """Read an event of Maxwell or Canal, which a Schema Registry may have wrapped."""
    _, payload = opened(message.value())
    return _read(payload or b"{}")


def _fields_of_key(message: Message) -> tuple[Schema | None, dict[str, Raw]]:
    """Return the schema and the fields of a message's key as they are; none of one that is no object."""
    try:
        schema, payload = opened(message.key())
        return schema, fields_in(payload or b"")
    except _MALFORMED:
        return None, {}


def _bare_key(message: Message) -> bytes | None:
    """Return a message's key if it is neither null nor an object."""
    try:
        _, payload = opened(message.key())
    except _MALFORMED:
        payload = message.key()
    return None if payload is None or payload.lstrip().startswith(b"{") else payload


def _shown(value: bytes) -> bytes:
    """Return a value in JSON, or plain text, as plain text."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(value, type=str).encode()
    return value.strip()


def _raw(row: Row) -> dict[str, Raw]:
    return {name: Raw(text) for name, text in row.items()}
