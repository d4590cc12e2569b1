"""Literals: any value as the text that Postgres reads; the way of whatever has no binary one. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from typing import Any
from uuid import UUID

from psycopg.types.multirange import Multirange
from psycopg.types.range import Range

from .errors import cut

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
    return "(" + ",".join("" if v is None else _quoted(literal(v) or "", doubled='"') for v in values) + ")"


def _array(values: Sequence[Any]) -> str:
    parts = []
    for value in values:
        text = _array(value) if isinstance(value, list) else literal(value)
        if text is None:
            text = "NULL"
        elif not isinstance(value, list):
            text = f'"{text}"' if text.upper() == "NULL" else _quoted(text, doubled="\\")
        parts.append(text)
    return "{" + ",".join(parts) + "}"


def _quoted(text: str, *, doubled: str) -> str:
    """Quote a part of an array or record where it needs that."""
    if text and _NEEDS_QUOTES.isdisjoint(text):
        return text
    text = text.replace("\\", "\\\\").replace('"', f'{doubled}"')
    return f'"{text}"'


def _range(value: Range[Any]) -> str:
    if value.isempty:
        return "empty"
    lower = "" if value.lower is None else _quoted(literal(value.lower) or "", doubled='"')
    upper = "" if value.upper is None else _quoted(literal(value.upper) or "", doubled='"')
    return f"{'[' if value.lower_inc else '('}{lower},{upper}{']' if value.upper_inc else ')'}"


_WRITERS: dict[type, Callable[[Any], str]] = {
    str: str.__str__,
    bool: lambda value: "t" if value else "f",
    int: int.__repr__,
    float: float.__repr__,
    Decimal: str,
    bytes: lambda value: "\\x" + value.hex(),
    bytearray: lambda value: "\\x" + value.hex(),
    memoryview: lambda value: "\\x" + bytes(value).hex(),
    datetime: lambda value: value.isoformat(sep=" "),
    date: date.isoformat,
    time: time.isoformat,
    timedelta: lambda value: f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds",
    UUID: str,
    list: _array,
    tuple: record,
    dict: json_text,
    Range: _range,
    Multirange: lambda value: "{" + ",".join(map(_range, value)) + "}",
    **dict.fromkeys((IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network), str),
}
