"""JSON types: what msgspec is told to accept for a column, so that a value is checked while it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta

from .codec import Naive
from .codecs import name_of
from .table import Column

# The unit of dates and times that are numbers.
Epoch = Literal["s", "ms", "us", "ns", "days"]
# What to do with NUL, which text in Postgres does not hold.
Nul = Literal["refuse", "strip"]

_LIMITS = {
    "int2": (-(1 << 15), (1 << 15) - 1),
    "int4": (-(1 << 31), (1 << 31) - 1),
    "int8": (-(1 << 63), (1 << 63) - 1),
    "oid": (0, (1 << 32) - 1),
}
_TYPES: dict[str, Any] = {
    **{name: Annotated[int, Meta(ge=low, le=high)] for name, (low, high) in _LIMITS.items()},
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
_EXACT = {*_LIMITS, "bool", "uuid", "date", "bytea"}
_EXACT_WITHOUT_LENGTH = {"text", "varchar", "bpchar", "timestamp", "timestamptz"}
_TIMESTAMPS = {"timestamp", "timestamptz"}
FLOATS = {"float4", "float8"}


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

    def is_special(self, column: Column) -> bool:
        """Tell whether something was said of a column."""
        return column.name in self.epoch or column.name in self.decimal or column.name in self.json_text


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
    if name in _TIMESTAMPS and reading.naive != "refuse":
        return datetime
    return str if column.kind == "e" else _TYPES.get(name, msgspec.Raw)


def is_exact(column: Column, reading: Reading) -> bool:
    """Tell whether what is accepted needs no further look."""
    if reading.is_special(column) or column.kind not in ("b", "e") or column.element_oid is not None:
        return False
    name = base_name(column) if column.kind == "b" else "text"
    if name in _TIMESTAMPS and reading.naive != "refuse":
        return False
    return name in _EXACT or (name in _EXACT_WITHOUT_LENGTH and column.typmod < 0)


def base_name(column: Column) -> str:
    """Return the name of a column's built-in type; nothing for any other."""
    return name_of(column.type_oid) or ""
