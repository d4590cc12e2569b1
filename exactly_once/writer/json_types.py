"""JSON types: what msgspec is told to accept for a column, so that a value is checked while it is read."""

from __future__ import annotations

from datetime import date, datetime, time
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta

from .codec import Naive
from .codecs import name_of
from .table import Column

Epoch = Literal["s", "ms", "us", "ns"]
"""The unit of timestamps that are numbers."""

_LIMITS = {
    "int2": (-(1 << 15), (1 << 15) - 1),
    "int4": (-(1 << 31), (1 << 31) - 1),
    "int8": (-(1 << 63), (1 << 63) - 1),
    "oid": (0, (1 << 32) - 1),
}
_ZONED = Meta(tz=True)
_NOT_ZONED = Meta(tz=False)
_TYPES: dict[str, Any] = {
    **{name: Annotated[int, Meta(ge=low, le=high)] for name, (low, high) in _LIMITS.items()},
    "float4": float,
    "float8": float,
    "numeric": Decimal,
    "bool": bool,
    "uuid": UUID,
    "bytea": bytes,
    "date": date,
    "time": Annotated[time, _NOT_ZONED],
    "timetz": Annotated[time, _ZONED],
    "timestamp": Annotated[datetime, _NOT_ZONED],
    "timestamptz": Annotated[datetime, _ZONED],
    "json": msgspec.Raw,
    "jsonb": msgspec.Raw,
}
_EXACT = {*_LIMITS, "float8", "bool", "uuid", "date", "bytea"}
_EXACT_WITHOUT_LENGTH = {"text", "varchar", "bpchar", "time", "timetz", "timestamp", "timestamptz"}


def json_type(column: Column, naive: Naive, epoch: Epoch | None) -> Any:
    """Return what is accepted for a column, null apart."""
    if epoch is not None:
        return Decimal
    if column.kind == "c":
        return msgspec.Raw
    if column.element_oid is not None:
        element = _scalar(name_of(column.element_oid) if column.element_kind == "b" else None, naive)
        if element is msgspec.Raw:
            return list[msgspec.Raw | None]
        return list[element | list[element | None] | None]  # type: ignore[valid-type]
    return _scalar(name_of(column.type_oid) if column.kind != "e" else None, naive)


def is_exact(column: Column, naive: Naive, epoch: Epoch | None) -> bool:
    """Tell whether what is accepted needs no further look."""
    if epoch is not None or column.kind not in ("b", "e") or column.element_oid is not None:
        return False
    name = name_of(column.type_oid) if column.kind == "b" else "text"
    if name in ("timestamp", "timestamptz") and naive != "refuse":
        return False
    return name in _EXACT or (name in _EXACT_WITHOUT_LENGTH and column.typmod < 0)


def _scalar(name: str | None, naive: Naive) -> Any:
    """Return the type for a built-in one; all that is not known is a text that Postgres reads."""
    if name in ("timestamp", "timestamptz") and naive != "refuse":
        return datetime
    return _TYPES.get(name or "", str)
