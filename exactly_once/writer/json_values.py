"""JSON values: what msgspec is told to accept for a column, and readers for what it does not make the right thing of.

The readers take every form that loses nothing: slower, and with errors that show the value.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import ROUND_HALF_EVEN, Context, Decimal
from functools import partial
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta

from . import changes
from .codec import ESCAPED_NUL, Naive
from .codecs import codec_of, name_of
from .errors import cut, short
from .json_shape import NULL, NULL_DOCUMENT, UNAVAILABLE, fields_in
from .numbers import LIMITS, decimal_of, oid_of, scaled, whole_of
from .table import Column
from .times import BEYOND, EPOCH, clock_of, span_of

# The unit of dates, times and intervals that are numbers.
Epoch = Literal["s", "ms", "us", "ns", "days"]
# How bytes are written in text, by the names of Debezium's binary.handling.mode.
BinaryMode = Literal["base64", "hex"]
# What to do with NUL, which text in Postgres does not hold.
Nul = Literal["refuse", "strip"]

_TYPES: dict[str, Any] = {
    **{name: Annotated[int, Meta(ge=low, le=high)] for name, (low, high) in LIMITS.items()},
    # Whole numbers apart, because a double changes large ones.
    "float4": int | float,
    "float8": int | float,
    "bool": bool,
    "uuid": UUID,
    "bytea": bytes,
    "date": date,
    "timestamp": Annotated[datetime, Meta(tz=False)],
    "timestamptz": Annotated[datetime, Meta(tz=True)],
    "text": str,
    "varchar": str,
    "bpchar": str,
    "name": str,
    "interval": str,
    "inet": str,
    "cidr": str,
}
_EXACT = {*LIMITS, "bool", "uuid", "date", "bytea"}
_EXACT_WITHOUT_LENGTH = {"text", "varchar", "bpchar", "timestamp", "timestamptz"}
TIMESTAMPS = {"timestamp", "timestamptz"}
FLOATS = {"float4", "float8"}
# What is raised for JSON of which nothing can be made.
UNREADABLE = (msgspec.DecodeError, ValueError, ArithmeticError, TypeError, RecursionError)
# Makes of a field's JSON what the column's codec takes; raises one of UNREADABLE if it cannot.
Reader = Callable[[bytes], Any]

# In microseconds.
_DAY = 86_400_000_000
_UNITS: dict[Epoch, Decimal] = {
    "s": Decimal(1_000_000),
    "ms": Decimal(1000),
    "us": Decimal(1),
    "ns": Decimal("0.001"),
    "days": Decimal(_DAY),
}
# No number is from these years in two units.
_FROM, _TO = 7305 * _DAY, 47_482 * _DAY
# All that Postgres holds is far below in each unit.
_LARGEST_EXPONENT = 30
_TEXT: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)
_LIST: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
_BASE64 = re.compile(rb'"(?:[A-Za-z0-9+/]{4})*[A-Za-z0-9+/]{2}(?:==|[A-Za-z0-9+/]=|[A-Za-z0-9+/]{2})"')
_HEXADECIMAL = re.compile(rb'"(?:[\da-fA-F]{2})+"')
# What a number says nothing of, unless its unit is known.
TIMES = {"timestamp", "timestamptz", "date", "time", "timetz", "interval"}
_NUMBER_STARTS = b"-0123456789"
_BOOLEANS = {
    **dict.fromkeys((b"1", b'"1"', b'"true"', b'"t"'), True),
    **dict.fromkeys((b"0", b'"0"', b'"false"', b'"f"'), False),
}
# What JSON has no numbers for.
_NOT_FINITE = (b'"NaN"', b'"Infinity"', b'"-Infinity"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the values of JSON are to be taken; columns by name."""

    naive: Naive = "refuse"
    nul: Nul = "refuse"
    lax: bool = False
    epoch: Mapping[str, Epoch] = field(default_factory=dict)
    decimal: Mapping[str, int] = field(default_factory=dict)
    """The scales of numbers that come as base64 of their bytes."""
    json_text: frozenset[str] = frozenset()
    binary: Mapping[str, BinaryMode] = field(default_factory=dict)

    def is_special(self, column: Column) -> bool:
        """Tell whether something was said of a column."""
        return any(column.name in said for said in (self.epoch, self.decimal, self.json_text, self.binary))


def fast_type(column: Column, reading: Reading) -> Any:
    """Return what msgspec is to make of a column's values, null apart; Raw where a reader is to look at them.

    What it refuses is looked at again by the reader, which takes more forms and is slower.
    """
    if reading.is_special(column) or column.kind not in ("b", "e"):
        return msgspec.Raw
    element = column.element
    if element is not None:
        kind = fast_type(element, reading) if is_exact(element, reading) else msgspec.Raw
        return kind if kind is msgspec.Raw else list[kind | None]  # type: ignore[valid-type]
    name = base_name(column)
    if name in TIMESTAMPS and reading.naive != "refuse":
        return datetime
    return str if column.kind == "e" else _TYPES.get(name, msgspec.Raw)


def is_exact(column: Column, reading: Reading) -> bool:
    """Tell whether what is accepted needs no further look."""
    if reading.is_special(column) or column.kind not in ("b", "e") or column.element is not None:
        return False
    name = base_name(column) if column.kind == "b" else "text"
    if name in TIMESTAMPS and reading.naive != "refuse":
        return False
    return name in _EXACT or (name in _EXACT_WITHOUT_LENGTH and column.typmod < 0)


def base_name(column: Column) -> str:
    """Return the name of a column's built-in type; nothing for any other."""
    return name_of(column.type_oid) or ""


def reader_of(column: Column, reading: Reading) -> Reader:
    """Return the reader of a column: null is None, all else what its codec takes."""
    read = _read_of(column, reading)
    return lambda raw: None if raw == NULL else changes.UNAVAILABLE if raw == UNAVAILABLE else read(raw)


def checked(column: Column, reading: Reading) -> Reader:
    """Return the same, with a look whether the codec takes it; what is exact comes out exact."""
    read, codec = reader_of(column, reading), codec_of(column, reading.naive)
    exact = is_exact(column, reading)

    def read_checked(raw: bytes) -> Any:
        value = read(raw)
        converted = codec.convert(value)
        if not exact:
            return value
        if codec.is_literal(converted):  # which would go as binary, unseen
            raise ValueError(f"{cut(converted)} can be stored from a program only")
        return converted

    return read_checked


def refusal(column: Column, raw: bytes, error: Exception, reading: Reading) -> str:
    """Say what was wrong with a value, and what would take it."""
    what, value, hint = str(error) or type(error).__name__, shown(raw), _advice(column, raw, reading)
    what = what if value in what or value.strip('"') in what else f"{what}: {value}"
    return f"{column.type_name}: {what}{f'; {hint}' if hint else ''}"


def _advice(column: Column, raw: bytes, reading: Reading) -> str:
    """Say what option, or what other type, would take a value that its column did not; nothing if none is known."""
    name, is_text, is_number = base_name(column), raw.startswith(b'"'), raw[0] in _NUMBER_STARTS
    if is_number and name in TIMES:
        return "" if column.name in reading.epoch else _epoch(column, raw)  # else it says itself what is wrong
    if raw.startswith((b"{", b"[", b"t", b"f")):
        return f"jsonb takes it: {_alter(column, 'jsonb', 'to_jsonb')}" if column.element is None else ""
    if (is_text or is_number) and name == "bool":
        takes = "" if reading.lax else 'lax = true takes 1, 0, "true", "false", "t" and "f"; '
        # Of CSV, say, a column of JSON takes what is JSON only.
        is_plain = is_text and reading.lax
        other = _alter(column, "text") if is_plain else _alter(column, "jsonb", "to_jsonb")
        return f"{takes}{'text takes it' if is_plain else 'jsonb takes all'}: {other}"
    if is_text and name == "bytea" and _HEXADECIMAL.fullmatch(raw):
        return f'binary = {{ {column.name} = "hex" }} takes hexadecimal'
    if is_text and name in FLOATS and not reading.lax:
        return f"lax = true takes numbers and booleans in text; text takes all: {_alter(column, 'text')}"
    if is_number and (name in LIMITS or name in FLOATS):
        return f"numeric takes it: {_alter(column, 'numeric')}"
    if is_text and name in TIMES | LIMITS.keys() | {"numeric", "uuid"}:
        takes = ""
        if name == "numeric" and _BASE64.fullmatch(raw):
            takes = (
                f"decimal = {{ {column.name} = 2 }} takes base64, here of a number with two digits behind the point; "
            )
        return f"{takes}text takes all: {_alter(column, 'text')}"
    return ""


def _epoch(column: Column, raw: bytes) -> str:
    """Say which unit takes a number, where only one makes a likely time of it."""
    if base_name(column) in TIMESTAMPS | {"date"}:
        number = Decimal(raw.decode())
        for unit, size in _UNITS.items():
            if _FROM / size <= number < _TO / size:
                takes = f'epoch = {{ {column.name} = "{unit}" }} takes a number, of which this one is from 1990 to 2100'
                is_day = base_name(column) != "date" or number * size % _DAY == 0
                return takes if is_day else f"{takes}, and in a day: {_alter(column, 'timestamptz')}"
    return f"epoch = {{ {column.name} = UNIT }} takes a number, with {', '.join(_UNITS)} for UNIT"


def _alter(column: Column, kind: str, function: str = "") -> str:
    name = f'"{column.name}"' if not re.fullmatch("[a-z_][a-z0-9_]*", column.name) else column.name
    using = f" USING {function}({name})" if function else ""
    return f"ALTER TABLE ... ALTER COLUMN {name} TYPE {kind}{using}"


def text_of(raw: bytes, *, strips: bool = False) -> str:
    """Return the text of a JSON string, or the digits of a number.

    :raises ValueError: for anything else.
    """
    if raw.startswith(b'"'):
        try:
            text = _TEXT.decode(raw)
        except msgspec.DecodeError as error:
            raise ValueError(f"{cut(raw)} is no text in UTF-8") from error
        return text.replace("\0", "") if strips else text
    if raw[0] in _NUMBER_STARTS:
        return raw.decode()
    raise ValueError(f"text or a number is wanted, not {shown(raw)}")


def stripped(raw: bytes) -> bytes:
    """Take NUL out of the texts in JSON."""
    return ESCAPED_NUL.sub(rb"\1", raw)


def shown(raw: bytes) -> str:
    """Show the JSON of a value, but not much of it."""
    return short(raw.decode(errors="replace"))


def _read_of(column: Column, reading: Reading) -> Reader:
    """Choose the reader; the codec looks at what it makes."""
    if column.name in reading.decimal:
        return partial(_unscaled, scale=reading.decimal[column.name])
    if column.name in reading.epoch:
        return partial(_since_epoch, unit=reading.epoch[column.name], name=base_name(column))
    within = Reading(naive=reading.naive, nul=reading.nul, lax=reading.lax)
    if column.kind == "c":
        return _composite(column, within)
    if column.element is not None:
        return _array(column.element, within)
    name = base_name(column) if column.kind == "b" else ""
    as_text = partial(text_of, strips=reading.nul == "strip")
    if name in ("json", "jsonb"):
        return partial(_json, is_text=column.name in reading.json_text, strips=reading.nul == "strip")
    if name in FLOATS or name == "bool":
        return partial(_number_or_boolean, name=name, lax=reading.lax)
    if name or column.kind != "b":
        form = reading.binary.get(column.name)
        return _SIMPLE.get(name, as_text) if form is None else partial(_bytes, form=form)
    # Of an extension: whatever it makes of it, for a list may be a vector, an object a geometry.
    return lambda raw: raw.decode() if raw.startswith((b"[", b"{")) else as_text(raw)


def _number_or_boolean(raw: bytes, name: str, *, lax: bool) -> Any:
    if name == "bool":
        if raw in (b"true", b"false"):
            return raw == b"true"
        if lax and raw in _BOOLEANS:
            return _BOOLEANS[raw]
        raise ValueError(f"true or false is wanted, not {shown(raw)}")
    if raw.startswith(b'"') and not lax and raw not in _NOT_FINITE:
        raise ValueError(f"a number is wanted, not the text {shown(raw)}")
    text = text_of(raw)
    # An int that a double changes is refused, and only a double knows of -0.
    return int(text) if re.fullmatch(r"-?\d{1,400}", text, re.ASCII) and int(text) else text


def _bytes(raw: bytes, form: BinaryMode = "base64") -> bytes:
    text = _words(raw)
    try:
        return bytes.fromhex(text) if form == "hex" else base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"{shown(raw)} is no {form}: {error}") from error


def _unscaled(raw: bytes, scale: int) -> Decimal:
    """Read a number as Connect's Decimal: the bytes of a whole number; or with a scale beside it."""
    if raw.startswith(b"{"):
        parts = fields_in(raw)
        if parts.keys() != {"scale", "value"}:
            raise ValueError(f"{shown(raw)} is no decimal of scale and value")
        scale, raw = whole_of(text_of(bytes(parts["scale"]))), bytes(parts["value"])
    if not raw.startswith(b'"'):
        return decimal_of(text_of(raw))  # a number already, which the schema of its message may have made of it
    return scaled(_bytes(raw), scale)


def _since_epoch(raw: bytes, unit: Epoch, name: str) -> Any:
    """Turn a number into a moment, a date, a time of day or an interval, without a detour over floats.

    What is no number is left to the column: the schema of a message may tell what its number stands for.
    """
    try:
        value = decimal_of(text_of(raw))
    except ValueError:
        return _SIMPLE[name](raw)
    try:
        if not value.is_finite() or value.adjusted() > _LARGEST_EXPONENT:
            raise ValueError(f"{shown(raw)} is out of range")
        # Digits below the microsecond are rounded, as in ISO 8601.
        context = Context(prec=len(value.as_tuple().digits) + 2 * _LARGEST_EXPONENT, rounding=ROUND_HALF_EVEN)
        microseconds = int(context.multiply(value, _UNITS[unit]).to_integral_value(context=context))
    except ArithmeticError as error:
        raise ValueError(f"{shown(raw)} is no number of {unit}") from error
    if name == "interval":
        return span_of(microseconds)
    if name in ("time", "timetz"):
        if microseconds == _DAY:  # Postgres's last time of a day, which Python has not
            return "24:00:00+00:00" if name == "timetz" else "24:00:00"
        if not 0 <= microseconds < _DAY:
            raise ValueError(f"{shown(raw)} {unit} is no time of a day; a column of interval takes it")
        found = clock_of(microseconds)
        return found.replace(tzinfo=UTC) if name == "timetz" else found
    try:
        moment = EPOCH + timedelta(microseconds=microseconds)
    except OverflowError as error:
        raise ValueError(f"{shown(raw)} {unit} is {BEYOND}; a column of bigint without epoch takes it") from error
    if name == "date":
        if microseconds % _DAY:
            raise ValueError(f"{shown(raw)} {unit} is no whole day, so it is no date")
        return moment.date()
    return moment if name == "timestamptz" else moment.replace(tzinfo=None)


def _moment(raw: bytes) -> Any:
    """Take text, or the parts of it in a list, as Jackson writes a LocalDateTime."""
    if not raw.startswith(b"["):
        return _words(raw)
    parts = _parts(raw)
    return datetime.combine(date(*parts[:3]), _clock(parts[3:]))  # the codec asks for a zone


def _time(raw: bytes) -> Any:
    return _clock(_parts(raw)) if raw.startswith(b"[") else _words(raw)


def _words(raw: bytes) -> str:
    if raw.startswith(b'"'):
        return text_of(raw)
    raise ValueError(f"text is wanted, not {shown(raw)}")


def _parts(raw: bytes) -> list[int]:
    parts = [whole_of(text_of(bytes(part))) for part in _LIST.decode(raw)]
    if not 2 <= len(parts) <= 7:
        raise ValueError(f"{shown(raw)} is no date or time")
    return parts


def _clock(parts: list[int]) -> time:
    """Make a time of hours, minutes, seconds and nanoseconds, as many as there are."""
    hour, minute, second, nanosecond = (parts + [0] * 4)[:4]
    if nanosecond % 1000:
        raise ValueError(f"{nanosecond} nanoseconds are finer than a microsecond, which is what Postgres keeps")
    return time(hour, minute, second, nanosecond // 1000)


def _json(raw: bytes, *, is_text: bool, strips: bool) -> bytes:
    if raw == NULL_DOCUMENT:
        return NULL
    if is_text and raw.startswith(b'"'):
        raw = text_of(raw, strips=strips).encode()
    return stripped(raw) if strips else raw


def _composite(column: Column, reading: Reading) -> Reader:
    readers, codec = {a.name: reader_of(a, reading) for a in column.attributes}, codec_of(column, reading.naive)

    def read(raw: bytes) -> Any:
        if raw.startswith(b'"'):
            return text_of(raw)  # as Postgres writes it
        if not raw.startswith(b"{"):
            raise ValueError(f"an object is wanted, not {shown(raw)}")
        fields = fields_in(raw).items()
        # The codec refuses a name that is no attribute.
        return codec.convert({name: readers[name](bytes(v)) if name in readers else None for name, v in fields})

    return read


def _array(element: Column, reading: Reading) -> Reader:
    """Take lists; how deep they are is told by what comes first, as by Postgres, for JSON may hold lists itself."""
    read_element = reader_of(element, reading)

    def read(raw: bytes) -> Any:
        if raw.startswith(b'"'):
            return text_of(raw)  # as Postgres writes it
        depth, first = 0, raw
        while first.startswith(b"["):
            depth += 1
            parts = _LIST.decode(first)
            first = bytes(parts[0]) if parts else b""
        if not depth:
            raise ValueError(f"a list is wanted, not {shown(raw)}")
        return read_lists(raw, depth)

    def read_lists(raw: bytes, depth: int) -> Any:
        if not depth:
            return read_element(raw)
        if not raw.startswith(b"["):
            raise ValueError(f"the lists in an array are not of one length: {shown(raw)}")
        return [read_lists(bytes(part), depth - 1) for part in _LIST.decode(raw)]

    return read


_SIMPLE: dict[str, Reader] = {
    **dict.fromkeys(LIMITS, lambda raw: whole_of(text_of(raw))),
    "oid": lambda raw: oid_of(text_of(raw)),
    "numeric": lambda raw: Decimal(raw.decode()) if raw[0] in _NUMBER_STARTS else decimal_of(text_of(raw)),
    "bytea": _bytes,
    "date": lambda raw: date(*_parts(raw)) if raw.startswith(b"[") else _words(raw),
    "time": _time,
    "timetz": _time,
    "timestamp": _moment,
    "timestamptz": _moment,
    # Of which the digits of a number would be something else.
    **dict.fromkeys(("interval", "bit", "varbit", "macaddr", "macaddr8"), _words),
    "money": lambda raw: Decimal(raw.decode()) if raw[0] in _NUMBER_STARTS else text_of(raw),
}
