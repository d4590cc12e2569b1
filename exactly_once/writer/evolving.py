"""Evolving: the columns that the values of messages ask for. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

import msgspec

from .json_shape import BYTE_ORDER_MARK, UNAVAILABLE, fields_in

_moment: Callable[[bytes], datetime] = msgspec.json.Decoder(Annotated[datetime, msgspec.Meta(tz=True)]).decode


def types_in(names: Collection[str], values: Iterable[bytes | None]) -> dict[str, str]:
    """Return the types of columns that hold certain fields of objects; none for a field that is null everywhere."""
    types: dict[str, str | None] = {}
    for value in values:
        if value is None:
            continue
        fields = fields_in(value.removeprefix(BYTE_ORDER_MARK))
        for name in names:
            if name in fields and bytes(fields[name]) != UNAVAILABLE:
                try:
                    kind = type_of(msgspec.json.decode(fields[name]))
                except (msgspec.DecodeError, ValueError, RecursionError):
                    kind = "jsonb"  # of which Postgres tells what is wrong with it, if it is
                types[name] = wider(types.get(name), kind)
    return {name: kind for name, kind in types.items() if kind is not None}


def type_of(value: Any) -> str | None:
    """Return the type of a column that holds a value of JSON; None for null."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "bigint" if -(1 << 63) <= value < (1 << 63) else "numeric"
    if isinstance(value, (float, Decimal)):
        return "numeric" if math.isfinite(value) else "jsonb"  # a double would change most decimal fractions
    if isinstance(value, str):
        # A moment is what the decoder takes for one: other notations of ISO 8601 it refuses.
        try:
            _moment(msgspec.json.encode(value))
        except (msgspec.ValidationError, UnicodeEncodeError):
            return "text"
        return "timestamptz"
    return "jsonb"


def wider(one: str | None, other: str | None) -> str | None:
    """Find a type that holds the values of both."""
    if one is None or other is None or one == other:
        return one or other
    kinds = {one, other}
    if kinds <= {"bigint", "numeric"}:
        return "numeric"
    return "text" if kinds <= {"text", "timestamptz"} else "jsonb"
