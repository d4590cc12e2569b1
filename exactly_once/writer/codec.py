"""Codec: how the values of one column get to Postgres, in binary or as literals, and never a silent change. No I/O.

The driver's binary dumpers trust their caller: they wrap an int that is too large, take the string "f" for
true and a datetime for its date. So whatever is handed to them is looked at here first, by whole columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from typing import Any, Literal, NoReturn
from uuid import UUID

from psycopg.postgres import types as registry
from psycopg.types.multirange import Multirange
from psycopg.types.range import Range

from .changes import Missing
from .errors import cut

# What to do with a timestamp whose time zone is not said, or is said where the column holds none.
Naive = Literal["refuse", "utc"]

TEXT = registry["text"].oid
BYTEA = registry["bytea"].oid
# A NUL as JSON escapes it, or several, behind no backslash of its own; jsonb holds none.
ESCAPED_NUL = re.compile(rb"(?<!\\)((?:\\\\)*)(?:\\u0000)+")
_NONE = type(None)

_FAR_ZONE = timedelta(hours=16)
_NEEDS_QUOTES = frozenset('{}(),"\\ \t\n\r\v\f')


def literal(value: Any) -> str | None:
    """Write a value as Postgres reads it; a string is taken to be written so already.

    :raises ValueError: for a kind of value that has no such form.
    """
    if value is None:
        return None
    writer = _WRITERS.get(type(value)) or next((w for kind, w in _WRITERS.items() if isinstance(value, kind)), None)
    if writer is None:
        raise ValueError(f"a {type(value).__name__} has no form that Postgres reads: {cut(value)}")
    return writer(value)


def json_text(value: Any) -> str:
    """Write JSON that Postgres accepts, without NaN and Infinity.

    :raises ValueError: for what JSON cannot say.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except TypeError as error:
        raise ValueError(f"{error}: {cut(value)}") from error


def record(values: Sequence[Any]) -> str:
    """Write a value of a composite type, from those of its attributes."""
    return "(" + ",".join(map(_part, values)) + ")"


def array_text(values: Sequence[Any], delimiter: str = ",") -> str:
    """Write an array, of which a list within is a dimension."""
    parts = []
    for value in values:
        text = array_text(value, delimiter) if isinstance(value, list) else literal(value)
        if text is None:
            text = "NULL"
        elif not isinstance(value, list):
            text = f'"{text}"' if text.upper() == "NULL" else _quoted(text, doubled="\\")
        parts.append(text)
    return "{" + delimiter.join(parts) + "}"


def _quoted(text: str, *, doubled: str) -> str:
    """Quote a part of an array or record where it needs that."""
    if text and _NEEDS_QUOTES.isdisjoint(text):
        return text
    text = text.replace("\\", "\\\\").replace('"', f'{doubled}"')
    return f'"{text}"'


def _part(value: Any) -> str:
    """Write an attribute of a record or a bound of a range."""
    return "" if value is None else _quoted(literal(value) or "", doubled='"')


def _range(value: Range[Any]) -> str:
    if value.isempty:
        return "empty"
    opening, closing = "[" if value.lower_inc else "(", "]" if value.upper_inc else ")"
    return f"{opening}{_part(value.lower)},{_part(value.upper)}{closing}"


def _moment(value: datetime) -> str:
    """Write a moment; Postgres's text has no zones of 16 hours and more, which Python has and its binary form takes."""
    is_far = abs(value.utcoffset() or timedelta()) >= _FAR_ZONE
    return (value.astimezone(UTC) if is_far else value).isoformat(sep=" ")


_WRITERS: dict[type, Callable[[Any], str]] = {
    str: str.__str__,
    bool: lambda value: "t" if value else "f",
    int: int.__repr__,
    float: float.__repr__,
    Decimal: str,
    **dict.fromkeys((bytes, bytearray, memoryview), lambda value: "\\x" + value.hex()),
    datetime: _moment,
    date: date.isoformat,
    time: time.isoformat,
    # Each with its sign: with IntervalStyle sql_standard the first one's would else be that of all.
    timedelta: lambda value: f"{value.days:+d} days {value.seconds:+d} seconds {value.microseconds:+d} microseconds",
    UUID: str,
    list: array_text,
    tuple: record,
    dict: json_text,
    Range: _range,
    Multirange: lambda value: "{" + ",".join(map(_range, value)) + "}",
    **dict.fromkeys((IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network), str),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How the values of one column get to Postgres."""

    wire: int | None
    """The type by which the driver dumps the value in binary; None when it goes as text."""
    exact: frozenset[type] = frozenset()
    """The Python types that need no conversion."""
    coerce: Callable[[Any], Any]
    """Make another value exact, or a text that Postgres reads; ValueError if that would change it."""
    check: Callable[[Any], object] | None = None
    """Look at a value; ValueError if the column does not hold it unchanged."""
    check_all: Callable[[Sequence[Any]], bool] | None = None
    """The same for all values of a batch at once, without telling which one it is."""
    as_text: Callable[[Any], str | None] = literal
    """Write a converted value as Postgres reads it."""

    def accepts(self, values: Sequence[Any]) -> bool:
        """Tell whether all values of a column can be dumped as they are."""
        kinds = set(map(type, values))
        has_none = _NONE in kinds
        kinds.discard(_NONE)
        if not kinds <= self.exact:
            return False
        if not kinds or (self.check is None and self.check_all is None):
            return True
        present = [v for v in values if v is not None] if has_none else values
        if self.check_all is not None:
            return self.check_all(present)
        assert self.check is not None
        try:
            for value in present:
                self.check(value)
        except ValueError:
            return False
        return True

    def convert(self, value: Any) -> Any:
        """Make one value exact, or a text that Postgres reads.

        :raises ValueError: when the column would not hold the value as it is.
        """
        if value is None or isinstance(value, Missing):
            return value
        if type(value).__module__ == "numpy":
            value = value.tolist()  # what Python has for it; of a scalar, too
        if type(value) not in self.exact:
            try:
                value = self.coerce(value)
            except (TypeError, OverflowError, InvalidOperation, AttributeError) as error:
                raise ValueError(f"{cut(value)} does not fit: {error}") from error
        if self.is_literal(value):
            return str.__str__(value)
        if self.check is not None:
            self.check(value)
        return value

    def is_literal(self, value: Any) -> bool:
        """Tell whether a converted value is a text for the server to read, and not what the driver dumps."""
        return self.wire != TEXT and isinstance(value, str)

    def is_binary(self, values: Sequence[Any]) -> bool:
        """Tell whether converted values can all go in binary."""
        # Kinds of str, too: a dumper of another type reads their memory as if they were that.
        return self.wire is not None and (
            self.wire == TEXT or not any(issubclass(kind, str) for kind in set(map(type, values)))
        )


def named(name: str, exact: set[type], coerce: Callable[[Any], Any], **more: Any) -> Codec:
    """Make the codec of a type that the driver dumps under its own name."""
    return Codec(wire=registry[name].oid, exact=frozenset(exact), coerce=coerce, **more)


def as_literal(value: Any) -> str:
    """Write whatever has a literal, for the server to judge."""
    text = literal(value)
    assert text is not None
    return text


def by_text(coerce: Callable[[Any], Any] = as_literal) -> Codec:
    """Make the codec of a type without a binary form here."""
    return Codec(wire=None, coerce=coerce)


def refuse(what: str) -> Callable[[Any], NoReturn]:
    """Make the conversion of a column that takes nothing but its own type."""

    def refusing(value: Any) -> NoReturn:
        raise ValueError(f"{what}, not {type(value).__name__}: {cut(value)}")

    return refusing


def text_or(what: str) -> Callable[[Any], str]:
    """Make the conversion of a column that takes its own type, and text that is left to Postgres."""
    wanted = refuse(what)
    return lambda value: value if isinstance(value, str) else wanted(value)
