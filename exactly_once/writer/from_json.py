"""JSON: messages whose value is an object, decoded by msgspec into exactly what the table's columns take."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, get_args

from confluent_kafka import Message

from exactly_once.errors import ConfigurationError
from exactly_once.kafka.kinds import check_choice

from .changes import MISSING, Missing, Row, Tombstone
from .codec import Naive
from .decoding import Decoded, Envelope, Source, alike
from .errors import NAME_BYTES, BadRow, TableError, cut, way_on
from .json_shape import (
    BYTE_ORDER_MARK,
    NULL,
    UNAVAILABLE,
    UNSET,
    Left,
    Path,
    Raw,
    Shape,
    as_json,
    fields_in,
    found_at,
    merged,
    names_in,
)
from .json_values import (
    FLOATS,
    TIMES,
    TIMESTAMPS,
    UNREADABLE,
    BinaryMode,
    Epoch,
    Nul,
    Reading,
    base_name,
    checked,
    fast_type,
    is_exact,
    reader_of,
    refusal,
    stripped,
    text_of,
)
from .logical import in_key
from .statements import Mode
from .table import OnMissing, Table

# What to do with a message without a value.
OnTombstone = Literal["delete", "refuse", "skip"]

_NUL = rb"\\u0000"
_SHOWN_NAMES = 20
# So many messages are decoded by one loop: enough for its start to cost nothing, and they stay in the cache.
_AT_ONCE = 256
# So many where one of those needs a closer look, so that of messages of which 1 % do 85 % still need none.
_FEW = 16
_PLAIN_NAME = re.compile(r"[\w .-]+", re.ASCII).fullmatch
# Where a zero may have been -0, which only a double knows, or too small for one.
_UNSURE_ZERO = re.compile(rb"(?<!\d)-0|\d[eE]-|0{300}")
# A fraction of a second of which msgspec does not make what Postgres makes of it.
_UNSURE_HALF = rb"\.\d{6}(?:5(?:0*\D|0000000)|4999999)"
_MISSING: dict[str, OnMissing | None] = {"default": None, "null": "null", "apart": "keep"}


class JsonDecoder:
    """Decodes objects by the columns of the table: a field of the same name for each, others are ignored.

    ``fields`` maps columns to where their value is, with dots for objects in objects: ``{"city":
    "customer.address.city"}``; only those are filled then. A tuple of names is a path whose names have dots.
    ``rename`` is the same, and the other columns are filled by their names. Fields in ``drop`` go nowhere.
    ``metadata`` and ``constants`` fill columns as :class:`Envelope` says, ``rest`` names a jsonb column that collects
    all other fields.
    ``epoch`` says which dates, times and intervals are numbers, and of what unit; ``decimal`` which numbers are the
    base64 of their bytes, and with what scale; ``json_text`` which json columns come as text that holds JSON;
    ``binary`` which bytes are ``"hex"``, and of which it is certain that they are ``"base64"``. ``lax`` takes numbers
    and booleans in text too, and 1 and 0 for booleans; ``nul="strip"`` takes NUL out of text.

    Timestamps are ISO 8601 with a zone for timestamptz and without one for timestamp, unless
    ``naive_timestamps="utc"``. A field that is missing is null, or, by default, left to a column that has a
    default; ``missing="apart"`` always tells the two from each other. A message that has no field for any column is
    refused. Of a message without a value only the key is decoded: an object, text in JSON, or plain text.
    """

    def __init__(
        self,
        fields: Mapping[str, str | tuple[str, ...]] | None = None,
        *,
        rename: Mapping[str, str | tuple[str, ...]] | None = None,
        drop: Collection[str] = (),
        metadata: Mapping[str, Source] | None = None,
        constants: Mapping[str, Any] | None = None,
        rest: str | None = None,
        epoch: Mapping[str, Epoch] | None = None,
        decimal: Mapping[str, int] | None = None,
        json_text: Collection[str] = (),
        binary: Mapping[str, BinaryMode] | None = None,
        lax: bool = False,
        nul: Nul = "refuse",
        naive_timestamps: Naive = "refuse",
        missing: Literal["default", "null", "apart"] = "default",
        on_tombstone: OnTombstone | None = None,
    ) -> None:
        self._fields = None if fields is None else paths_of(fields)
        self._rename = paths_of(rename or {})
        if self._fields is not None and self._rename:
            raise ConfigurationError("fields= names all columns that are filled, so there is no rename= beside it")
        # Dots may be between names or in one.
        self._drop = [*dict.fromkeys(names for path in drop for names in _readings(path_of(path)))]
        # Those that no message had so far.
        self._unmet = {".".join(path): path for path in map(path_of, drop)}
        self.envelope = Envelope(metadata, constants)
        self._rest = rest
        self._reading = Reading(
            naive=naive_timestamps,
            nul=nul,
            lax=lax,
            epoch=dict(epoch or {}),
            decimal=dict(decimal or {}),
            json_text=frozenset(json_text),
            binary=dict(binary or {}),
        )
        self.missing = missing
        self._on_tombstone = on_tombstone
        # The columns that a message has filled so far, and the others by their positions.
        self._filled: set[str] = set()
        self._unfilled: dict[int, str] = {}
        # The same until there is a row: of deletes nobody expects a value.
        self._awaited: dict[int, str] = {}
        # Columns whose names Postgres may have cut: filled from longer ones, or known to have a field of their own.
        self._adopted: set[str] = set()
        self._own: set[str] = set()
        for option, value, choices in (("nul", nul, get_args(Nul)), ("missing", missing, tuple(_MISSING))):
            check_choice(option, value, choices)
        for what, said, kind in (
            (f"epoch={epoch!r}: the units", self._reading.epoch, Epoch),
            (f"binary={binary!r}: the forms", self._reading.binary, BinaryMode),
        ):
            if unknown := set(said.values()) - set(get_args(kind)):
                raise ConfigurationError(f"{what} are {', '.join(get_args(kind))}, not {', '.join(map(str, unknown))}")

    def prepare(self, table: Table, *, mode: Mode, key: Sequence[str]) -> None:
        """Build the decoder of this table's columns."""
        if self._on_tombstone == "delete" and mode != "upsert":
            raise ConfigurationError("on_tombstone='delete' needs mode='upsert'")
        self.envelope.prepare(table, self._reading)
        if self._rest is not None and base_name(table.pick([self._rest])[0]) not in ("json", "jsonb"):
            raise TableError(f"{table}: rest={self._rest!r} needs a column of json or jsonb")
        self._table = table
        self._paths: dict[str, Path]
        # The fields of all columns that are filled from fields; of those that are dropped, too.
        self.paths: dict[str, Path]
        if self._fields is not None:
            self.paths = self._paths = self._fields
        else:
            taken = {*self.envelope.columns, self._rest}
            self.paths = {name: (name,) for name in table.writable if name not in taken} | self._rename
            kept = {name: path for name, path in self.paths.items() if name in self._rename or path not in self._drop}
            # An altered table changes nothing about which field a column with a cut name is filled from.
            self._adopted &= kept.keys() - self._rename.keys()
            self._paths = kept | {name: self._paths[name] for name in self._adopted}
        self._columns = (*self._paths, *([self._rest] if self._rest else []), *self.envelope.columns)
        self._key_columns = key if mode == "upsert" else None
        self._fill()

    @property
    def new_fields(self) -> set[str]:
        """The fields of messages, seen since the table was looked at, that no column takes; not those within others."""
        roots = {path[0] for path in self._paths.values()} if self._shape.is_deep else set()
        return {name for name in self._ignored if name.partition(".")[0] not in roots}

    def decode(self, messages: Sequence[Message]) -> Decoded:
        """Describe the rows; a message is decoded when its row is asked for."""
        wanted = messages
        if self._on_tombstone == "skip":
            wanted = [m for m in messages if m.value() is not None]
        if self._unmet:
            self._look_for_dropped(wanted)
        unused: Counter[str] = Counter()

        def make() -> Iterator[Row]:
            unused.clear()
            return self._rows(wanted, unused, at_once=_AT_ONCE)

        return Decoded(
            columns=self._columns,
            origins=wanted,
            make=make,
            exact=self._exact,
            partial={self._rest: merged} if self._rest else {},
            unused=unused,
            filtered=len(messages) - len(wanted),
            unfilled=self._unfilled.values(),
            unmet=self._unmet.keys(),
        )

    # How the columns are filled.

    def _fill(self) -> None:
        """Get ready to fill columns from their paths.

        :raises TableError: for options for columns that no field fills, or that are of another kind.
        """
        columns, reading = self._table.pick(list(self._paths)), self._reading
        # Parts of keys, and headers, are read as fields are.
        parts = self._table.pick([column for column, source in self.envelope.sources.items() if ":" in source])
        names = {c.name: base_name(c) for c in (*columns, *parts)}
        for option, given, kinds in (
            ("epoch", set(reading.epoch), TIMES),
            ("decimal", set(reading.decimal), {"numeric"}),
            ("json_text", set(reading.json_text), {"json", "jsonb"}),
            ("binary", set(reading.binary), {"bytea"}),
        ):
            if unknown := given - set(names):
                raise TableError(f"{option} names {', '.join(sorted(unknown))}, which no field fills")
            if wrong := sorted(name for name in given if names[name] not in kinds):
                raise TableError(f"{option} names {', '.join(wrong)}, which is not of {', '.join(sorted(kinds))}")
        tells = {c.name for c in columns if c.is_left_out(_MISSING[self.missing])}
        types = {c.name: fast_type(c, reading) for c in columns}
        self._shape = Shape(
            {name: (self._paths[name], kind) for name, kind in types.items()}, tells=tells, drop=self._drop
        )
        self._exact = {c.name for c in columns if is_exact(c, reading)} | self.envelope.exact
        self._raw = [(i, reader_of(c, reading)) for i, c in enumerate(columns) if types[c.name] is Raw]
        self._readers = [(c, checked(c, reading)) for c in columns]
        self._absent = {name: MISSING if name in tells else None for name in types}
        self._told = [i for i, c in enumerate(columns) if c.name in tells]
        self._floats = [i for i, c in enumerate(columns) if base_name(c) in FLOATS]
        # The fields seen so far that no column takes.
        self._ignored: set[str] = set()
        unsure = [_UNSURE_HALF] if any(base_name(c.element or c) in TIMESTAMPS for c in columns) else []
        unsure += [_NUL] if reading.nul == "strip" else []
        self._is_unsure = re.compile(b"|".join(unsure)).search if unsure else None
        self._unfilled.clear()
        from_messages = {*self._paths, *self.envelope.sources} - self._filled
        self._awaited = {i: name for i, name in enumerate(self._columns) if name in from_messages}
        key = self._key_columns
        self._key = None if key is None else _Key(self._table, key, self._paths, self._reading)
        self._expect_known(expects=self._rest is None)

    def _expect_known(self, *, expects: bool) -> None:
        """Let msgspec tell of the next field that no column takes, or look for such fields from here on."""
        self._counts = not expects
        decode = self._shape.decode_known if expects else self._shape.decode
        self._decode = decode or _nothing

    def _rows(self, messages: Sequence[Message], unused: Counter[str], *, at_once: int) -> Iterator[Row]:
        """Decode so many at once; those among which one needs a closer look again, by fewer and fewer."""
        for start in range(0, len(messages), at_once):
            some = messages[start : start + at_once]
            if (rows := self._at_once(some, unused)) is not None:
                yield from rows
            elif len(some) > 1:
                yield from self._rows(some, unused, at_once=_FEW if len(some) > _FEW else 1)
            else:
                yield self._alone(some[0], unused)

    def _at_once(self, messages: Sequence[Message], unused: Counter[str]) -> list[Row] | None:
        """Decode by loops that run in C; None where one of the messages needs a closer look."""
        try:
            values: list[Any] = list(map(Message.value, messages))
            if None in values:
                deleted = [self._tombstone(m) if m.value() is None else None for m in messages]
                kept = [m for m in messages if m.value() is not None]
                found = self._at_once(kept, unused) if kept else []
                left = iter(found or ())
                return None if found is None else [next(left) if each is None else each for each in deleted]
            objects = list(map(self._decode, values))
            rows: list[Row] = list(map(self._shape.pick, objects))
            # Although msgspec has decoded them.
            joined = b"\n".join(values)
            if self._shape.empty in rows or (self._is_unsure is not None and self._is_unsure(joined)):
                return None
            if self._rest is not None and UNAVAILABLE in joined:
                return None
            has_zero = any(0 in map(itemgetter(position), rows) for position in self._floats)
            if has_zero and _UNSURE_ZERO.search(joined) is not None:
                return None
            if self._raw or self._told:
                columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
                for position, read in self._raw:  # what msgspec left as it was
                    raws = (v if v is None or v is UNSET else bytes(v) for v in columns[position])
                    columns[position] = [v if v is None or v is UNSET else None if v == NULL else read(v) for v in raws]
                for position in self._told:
                    columns[position] = [MISSING if v is UNSET else v for v in columns[position]]
                rows = list(zip(*columns, strict=True))
            lefts: list[Any] = list(map(self._shape.left, values)) if self._counts else []
            names: list[Collection[str]] = list(map(names_in, lefts)) if self._shape.is_deep else lefts
            if not all(map(self._ignored.issuperset, names)):
                new = {n for each in names for n in each} - self._ignored
                # Whether a long name is that of a column depends on the fields beside it.
                if any(len(name.encode()) > NAME_BYTES for name in new) or self._adopts(new, ()):
                    return None
            added = list(map(self.envelope.values, messages)) if self.envelope.columns else []
        except UNREADABLE:
            return None
        for name, find in () if self._counts else self._shape.ignored:
            if count := sum(map(bool, map(find, objects))):
                unused[name] += count
        if self._counts:
            rows = [self._finished(*each, unused) for each in zip(rows, lefts, names, strict=True)]
        if added:
            rows = [(*row, *more) for row, more in zip(rows, added, strict=True)]
        self._note_filled(rows)
        return rows

    def _tombstone(self, message: Message) -> Tombstone:
        """Read the key of a message without a value.

        :raises BadRow: where it is none, or deletes nothing.
        """
        if self._key is not None and self._on_tombstone in (None, "delete"):
            return self._key.tombstone(message, self.envelope)
        raise BadRow(
            'the message has no value, so nothing can be stored; on_tombstone = "skip" passes over such',
            message=message,
        )

    def _alone(self, message: Message, unused: Counter[str]) -> Row:
        """Decode one message that needs a closer look.

        :raises BadRow: for what is no object, has no field for any column, or one with a value that does not fit.
        """
        if (value := message.value()) is None:
            return self._tombstone(message)
        value = value.removeprefix(BYTE_ORDER_MARK)
        try:
            found, left = self._shape.find(value)
            names = names_in(left)
            if self._adopts(names, found):
                found, left = self._shape.find(value)
                names = names_in(left)
        except UNREADABLE as error:
            reason = f"the value is no object in JSON that fits: {error}: {cut(value)}{way_on(value)}"
            raise BadRow(reason, message=message) from error
        if self._rest is None:
            if names and not self._counts:
                self._expect_known(expects=self._shape.ignore(names))
            if not found and self._paths:
                raise BadRow(self._no_column_for(names), message=message)
        elif lost := [name for name, part in left.items() if part == Raw(UNAVAILABLE)]:
            reason = (
                f"field {lost[0]} is not in the message, and this column cannot keep it: give it a column of its own"
            )
            raise BadRow(reason, message=message, column=self._rest)
        values = []
        for column, read in self._readers:
            raw = found.get(column.name)
            try:
                values.append(self._absent[column.name] if raw is None else read(raw))
            except UNREADABLE as error:
                assert raw is not None
                path = ".".join(self._paths[column.name])
                field = f"field {path}: " if path != column.name else ""
                reason = f"{field}{refusal(column, raw, error, self._reading)}"
                raise BadRow(reason, message=message, column=column.name) from error
        row = self._finished(tuple(values), left, names, unused)
        row = (*row, *self.envelope.values(message)) if self.envelope.columns else row
        self._note_filled([row])
        return row

    def _finished(self, row: Row, left: Left, names: Collection[str], unused: Counter[str]) -> Row:
        """Add what no column takes to the column for the rest, or count it."""
        if self._rest is None:
            for name in names:
                unused[name] += 1
            return row
        rest = as_json(left)
        return (*row, stripped(rest) if self._reading.nul == "strip" else rest)

    def _no_column_for(self, names: Sequence[str]) -> str:
        some = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
        text = f"no field of the message has a column in {self._table}; it has {some or 'no fields'}"
        similar = {column: name for name in names if (column := alike(name, self._paths)) is not None}
        if moved := {column: ".".join(self._paths[column]) for column in similar if column == similar[column]}:
            pairs = ", ".join(f"{column} from {path}" for column, path in moved.items())
            return f"{text}; fields or rename fill {pairs}, which it does not have"
        if similar:
            pairs = ", ".join(f'{column} = "{name}"' for column, name in similar.items())
            option = "rename" if self._fields is None else "fields"  # which fills no other columns
            text += f"; names differ in case or underscores only: {option} = {{ {pairs} }}"
        return text

    def _note_filled(self, rows: Sequence[Row]) -> None:
        if rows and self._awaited:
            self._unfilled.update(self._awaited)
            self._awaited = {}
        for position in list(self._unfilled):
            if any(value is not None and not isinstance(value, Missing) for value in map(itemgetter(position), rows)):
                self._filled.add(self._unfilled.pop(position))

    def _look_for_dropped(self, messages: Sequence[Message]) -> None:
        values = [value for message in messages if (value := message.value()) is not None]
        joined = b"\n".join(values)
        for dropped, path in list(self._unmet.items()):
            # JSON may write any other name in several ways.
            if _PLAIN_NAME(path[-1]) and path[-1].encode() not in joined:
                continue
            for value in values:
                with contextlib.suppress(*UNREADABLE):
                    if found_at(fields_in(value.removeprefix(BYTE_ORDER_MARK)), path) is not None:
                        del self._unmet[dropped]
                        break

    def _adopts(self, names: Collection[str], found: Collection[str]) -> bool:
        """Fill columns whose names Postgres has cut from the fields with the whole names; tell if that changes.

        A field with exactly the column's name has it; ``found`` are the columns that have one beside these fields.

        :raises ValueError: for two fields whose names begin alike.
        """
        # Put in place at the end: a message that is refused in the middle changes nothing for those behind it.
        paths, adopted, own = dict(self._paths), set(self._adopted), set(self._own)
        for name in names if self._fields is None else ():
            encoded = name.encode()
            column = encoded[:NAME_BYTES].decode(errors="ignore")
            if name in adopted:
                adopted.remove(name)
                own.add(name)
                paths[name] = (name,)
            elif len(encoded) > NAME_BYTES and column in paths:
                other = paths[column]
                if other != (column,):
                    raise ValueError(
                        f"the names of {other[0]} and {name} are one, {column}, where Postgres cuts them: "
                        "use rename, or rest"
                    )
                if column in found or column in self._filled:
                    own.add(column)
                if column not in own:
                    adopted.add(column)
                    paths[column] = (name,)
        self._ignored.update(names)
        self._adopted, self._own = adopted, own
        if changed := paths != self._paths:
            self._paths = paths
            self._fill()
        return changed


def path_of(given: str | Sequence[str]) -> Path:
    """Return a path: dots stand between its names, unless it is given as those."""
    return tuple(given.split(".")) if isinstance(given, str) else tuple(given)


def paths_of(given: Mapping[str, str | Sequence[str]]) -> dict[str, Path]:
    """Return the paths of columns."""
    return {column: path_of(path) for column, path in given.items()}


def _readings(path: Path) -> list[Path]:
    """Return the paths that look alike with dots: those in which some names, or all, are one."""
    return [
        (".".join(path[:length]), *rest)
        for length in range(1, len(path) + 1)
        for rest in (_readings(path[length:]) or [()])
    ]


class _Key:
    """Reads the key of a message that has no value: an object with the key's fields, a JSON string or plain text."""

    def __init__(self, table: Table, key: Sequence[str], paths: Mapping[str, Path], reading: Reading) -> None:
        self._key = key
        columns = table.pick([name for name in key if name in paths])
        self._readers = {c.name: checked(c, reading) for c in columns}
        self._encoded = {c.name for c in columns if reading.is_special(c) or base_name(c) == "bytea"}
        self._binary = {**dict.fromkeys(reading.decimal, "base64"), **reading.binary}
        self._by_field = {paths[c.name][-1]: c for c in columns}
        self._shape = Shape({c.name: ((paths[c.name][-1],), Raw) for c in columns})

    def tombstone(self, message: Message, envelope: Envelope) -> Tombstone:
        """Return what deletes the row of this key."""
        values = {n: envelope.get(n, message) for n in self._key if n not in self._readers}
        if self._readers:
            try:
                values |= self._decoded(message.key())
            except UNREADABLE as error:
                reason = f"the key of a message without a value: {error}: {cut(message.key())}"
                raise BadRow(reason, message=message, column=", ".join(self._readers)) from error
        return Tombstone(values[name] for name in self._key)

    def _decoded(self, key: bytes | None) -> dict[str, Any]:
        if not key:
            raise ValueError("there is neither key nor value, so there is nothing to delete")
        raw = key.strip().removeprefix(BYTE_ORDER_MARK)
        if raw.startswith(b"{"):
            found = in_key(self._shape, raw, self._by_field, self._binary)
            return {name: read(found.get(name, NULL)) for name, read in self._readers.items()}
        if len(self._readers) > 1:
            raise ValueError(f"it is no object with {', '.join(self._readers)}")
        ((name, read),) = self._readers.items()
        if raw.startswith(b'"'):
            with contextlib.suppress(ValueError):  # plain text that begins with a quote
                text_of(raw)
                return {name: read(raw)}
        if b"\0" in key:
            hint = ""
            if key.startswith(b"\0"):
                known = f"which has to know schema {int.from_bytes(key[1:5])}"
                hint = f"; of a Schema Registry's wire format: say --schema-registry URL, {known}"
            raise ValueError(f"it holds NUL, so it is in a binary form; keys are read as JSON or text{hint}")
        text = key.decode()
        # What an option says of the column is said of its key, too; bytes are in base64, as in a field.
        return {name: read(json.dumps(text).encode()) if name in self._encoded else text}


def _nothing(_: bytes) -> Any:
    """Stand for a decoder where msgspec cannot be one."""
    raise ValueError
