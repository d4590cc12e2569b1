"""Evolving: the columns that the values of messages ask for. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

import msgspec

from .json_shape import BYTE_ORDER_MARK, UNAVAILABLE, Path, Raw, Shape

_moment: Callable[[bytes], datetime] = msgspec.json.Decoder(Annotated[datetime, msgspec.Meta(tz=True)]).decode


def types_in(paths: Mapping[str, Path], values: Iterable[bytes | None]) -> dict[str, str]:
    """Return the types of columns that hold what objects have at certain paths; none for what is null everywhere."""
    shape = Shape({column: (path, Raw) for column, path in paths.items()})
    types: dict[str, str | None] = {}
    for value in values:
        try:
            found, _ = shape.find((value or b"{}").removeprefix(BYTE_ORDER_MARK))
        except ValueError:  # a path leads into what is no object: the decoder refuses that
            continue
        for column, raw in found.items():
            if raw != UNAVAILABLE:
                try:
                    kind = type_of(msgspec.json.decode(raw))
                except (msgspec.DecodeError, ValueError, RecursionError):
                    kind = "jsonb"  # of which Postgres tells what is wrong with it, if it is
                types[column] = wider(types.get(column), kind)
    return {column: kind for column, kind in types.items() if kind is not None}


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
