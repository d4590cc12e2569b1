"""Numbers: the codecs of integers, floats, numeric and booleans. No I/O."""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Sequence
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from typing import Any

from .codec import Codec, by_text, named, text_or
from .errors import cut

# What Postgres reads; Python reads more: digits of other scripts, NaN with a payload.
_WHOLE_TEXT = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)
_OCTAL_TEXT = re.compile(r"\s*[+-]?0\d", re.ASCII)
_NUMBER_TEXT = re.compile(
    r"\s*(?:[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|[+-]?inf(?:inity)?)\s*", re.ASCII | re.IGNORECASE
)
# What the types of whole numbers hold.
LIMITS = {
    **{name: (-(1 << bits), (1 << bits) - 1) for name, bits in (("int2", 15), ("int4", 31), ("int8", 63))},
    "oid": (0, (1 << 32) - 1),
}
# Far more than any type of whole numbers holds, and than Python reads.
_MOST_DIGITS = 1000
_MAX_EXPONENT = 131071
_MIN_EXPONENT = -16383
_UNROUNDED = Context(prec=MAX_PREC, Emin=MIN_EMIN, Emax=MAX_EMAX)


def _whole(name: str) -> Codec:
    low, high = LIMITS[name]
    read = oid_of if name == "oid" else whole_of

    def check(value: int) -> None:
        if not low <= value <= high:
            raise ValueError(f"{cut(value)} is out of range: {name} goes from {low} to {high}")

    def coerce(value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"{value} is no number")
        if isinstance(value, str):
            return read(value)
        if isinstance(value, (float, Decimal)):
            if value != value // 1:
                raise ValueError(f"{cut(value)} is no whole number")
            return int(value)
        return operator.index(value)

    return named(name, {int}, coerce, check=check, check_all=lambda values: low <= min(values) and max(values) <= high)


def _check_float4(value: float) -> None:
    """Refuse what is too large or too small; digits are rounded."""
    try:
        (kept,) = struct.unpack("!f", struct.pack("!f", value))
    except OverflowError:
        raise ValueError(f"{value!r} is out of range for real") from None
    if value and not kept:
        raise ValueError(f"{value!r} is too small for real")


def _to_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(f"{value} is no number")
    if isinstance(value, str):
        value = decimal_of(value)
    result = float(value)
    if isinstance(value, int) and result != value:
        raise ValueError(f"{cut(value)} has more digits than a double holds")
    if math.isinf(result) and value not in (math.inf, -math.inf):
        raise ValueError(f"{cut(str(value))} is out of range for a double")
    if not result and value:
        raise ValueError(f"{cut(str(value))} is too small for a double")
    return result


def _matching(pattern: re.Pattern[str], value: str, what: str) -> str:
    if not pattern.fullmatch(value):
        raise ValueError(f"{cut(value)} is no {what}")
    return str.__str__(value)


def numeric(typmod: int) -> Codec:
    """Make the codec of numeric; with a scale, digits that it does not keep are refused."""
    precision, scale = precision_and_scale(typmod)

    def check(given: Decimal | int) -> None:
        value = Decimal(given)
        if value.is_nan() and str(value) != "NaN":
            raise ValueError(f"{value} is a NaN that Postgres does not hold")
        if not value.is_finite():
            if scale is not None and value.is_infinite():
                raise ValueError(f"{value} does not fit numeric({precision},{scale})")
            return
        if value and not _MIN_EXPONENT <= value.adjusted() <= _MAX_EXPONENT:
            raise ValueError(f"{cut(value)} is out of range for numeric")
        if scale is None:
            return
        _, digits, exponent = value.as_tuple()
        assert isinstance(exponent, int)
        if exponent < -scale and any(digits[max(0, len(digits) + exponent + scale) :]):
            raise ValueError(f"{cut(str(value))} has more digits than numeric({precision},{scale}) keeps")
        if value and value.adjusted() >= precision - scale:
            raise ValueError(f"{cut(str(value))} is out of range for numeric({precision},{scale})")

    return named(
        "numeric", {Decimal, int}, _to_decimal, check=check, check_all=_all_in_range if scale is None else None
    )


def _all_in_range(values: Sequence[Any]) -> bool:
    if any(type(v) is Decimal and v.is_nan() and str(v) != "NaN" for v in values):
        return False
    exponents = [v.adjusted() if type(v) is Decimal else v.bit_length() // 4 for v in values]
    return min(exponents) >= _MIN_EXPONENT and max(exponents) <= _MAX_EXPONENT // 2


def precision_and_scale(typmod: int) -> tuple[int, int | None]:
    """Undo what Postgres packs into the modifier: 16 bits of precision, then 11 of a signed scale."""
    if typmod < 0:
        return 0, None
    packed = typmod - 4
    return (packed >> 16) & 0xFFFF, ((packed & 0x7FF) ^ 1024) - 1024


def _to_decimal(value: Any) -> Decimal:
    if isinstance(value, bool):
        raise ValueError(f"{value} is no number")
    if isinstance(value, float):
        return Decimal(float.__repr__(value))
    if isinstance(value, str):
        return decimal_of(value)
    return Decimal(value) if isinstance(value, (int, Decimal)) else Decimal(operator.index(value))


def _to_money(value: Any) -> str:
    """Let text through; of numbers those whose digits mean the same everywhere."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise ValueError(f"{cut(value)} is no number")
    if value != value // 1:
        raise ValueError(
            f"{cut(str(value))}: money reads digits behind a point by lc_monetary, and rounds them: make the column "
            "numeric, or send text as Postgres writes it"
        )
    return str(int(value))


def whole_of(text: str) -> int:
    """Read a whole number as Postgres does.

    :raises ValueError: for any other text.
    """
    if len(_matching(_WHOLE_TEXT, text, "whole number")) > _MOST_DIGITS:
        raise ValueError(f"{cut(text)} is out of range")
    return int(text)


def oid_of(text: str) -> int:
    """Read an oid that every version of Postgres reads alike: from 16 on a 0 before other digits makes it octal.

    :raises ValueError: for any other text.
    """
    if _OCTAL_TEXT.match(text):
        raise ValueError(f"{cut(text)} begins with 0, with which Postgres reads an oid as octal")
    return whole_of(text)


def decimal_of(text: str) -> Decimal:
    """Read a number as Postgres does.

    :raises ValueError: for any other text.
    """
    return Decimal(_matching(_NUMBER_TEXT, text, "number"))


def scaled(data: bytes, scale: int) -> Decimal:
    """Return the number whose digits are a whole one's, given by its bytes, every digit kept."""
    return Decimal(int.from_bytes(data, signed=True)).scaleb(-scale, _UNROUNDED)


# The codecs of types without a modifier.
CODECS: dict[str, Codec] = {
    **{name: _whole(name) for name in LIMITS},
    "float4": named("float4", {float}, _to_float, check=_check_float4),
    "float8": named("float8", {float}, _to_float),
    "money": by_text(_to_money),
    # A text is left to Postgres, which knows yes and no in many forms.
    "bool": named("bool", {bool}, text_or("a boolean is true or false")),
}
