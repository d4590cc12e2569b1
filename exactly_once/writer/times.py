"""Times: the codecs of timestamps, dates, times and intervals. No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from operator import attrgetter
from typing import Any

from .codec import Codec, Naive, by_text, named, refuse
from .errors import cut

_ZONE = attrgetter("tzinfo")
_BC = re.compile(r"\d{4,}-\d\d-\d\d(?:[ t][\d:.]+)?(?P<zone>z|[+-]\d\d(?::?\d\d)?)? bc")


def timestamp(name: str, typmod: int, naive: Naive) -> Codec:
    """Make the codec of timestamp and timestamptz.

    A time zone that is lacking, or is there where the column holds none, is refused, or UTC by choice.
    """
    is_zoned = name == "timestamptz"

    def check(value: datetime) -> None:
        _check_zone(value, is_zoned=is_zoned)
        _check_fraction(value, typmod)

    def coerce(value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                return _special(value, is_zoned=is_zoned)
        if not isinstance(value, datetime):
            raise ValueError(f"a timestamp is wanted, not {type(value).__name__}: {cut(value)}")
        if getattr(value, "nanosecond", 0):
            raise ValueError(f"{value} has nanoseconds; Postgres keeps microseconds")
        if naive == "utc" and (value.utcoffset() is None) is is_zoned:
            value = value.replace(tzinfo=UTC) if is_zoned else value.astimezone(UTC).replace(tzinfo=None)
        return datetime.combine(value.date(), value.timetz())

    def check_all(values: Sequence[datetime]) -> bool:
        zones = map(_ZONE, values)
        return all(zones) if is_zoned else not any(zones)

    codec = named(name, {datetime}, coerce, check=check, check_all=check_all if typmod < 0 else None)
    return replace(codec, exact=frozenset()) if naive == "utc" else codec


def day() -> Codec:
    """Make the codec of date; a datetime is none, because it says more."""

    def coerce(value: Any) -> Any:
        if isinstance(value, datetime) or not isinstance(value, (date, str)):
            raise ValueError(f"a date is wanted, not {type(value).__name__}: {cut(value)}")
        if isinstance(value, date):
            return value
        try:
            return date.fromisoformat(value)
        except ValueError:
            return _special(value, is_zoned=False)

    return named("date", {date}, coerce)


def clock(name: str, typmod: int) -> Codec:
    """Make the codec of time and timetz."""
    is_zoned = name == "timetz"
    wanted = refuse("a time is wanted")

    def check(value: time) -> None:
        _check_zone(value, is_zoned=is_zoned)
        _check_fraction(value, typmod)

    return named(name, {time}, lambda v: time.fromisoformat(v) if isinstance(v, str) else wanted(v), check=check)


def interval(typmod: int) -> Codec:
    """Make the codec of interval; one with restricted fields goes as text."""
    wanted = refuse("an interval is wanted")
    if typmod >= 0:
        return by_text()
    return named("interval", {timedelta}, lambda value: value if isinstance(value, str) else wanted(value))


def _special(value: str, *, is_zoned: bool) -> str:
    """Let through what Postgres holds and Python does not, as long as it cannot be misread."""
    text = value.strip().lower()
    if text in ("infinity", "-infinity"):
        return text
    if (before_christ := _BC.fullmatch(text)) and (before_christ["zone"] is not None) is is_zoned:
        return text
    raise ValueError(f"{cut(value)} is not in ISO 8601")


def _check_zone(value: datetime | time, *, is_zoned: bool) -> None:
    if (value.tzinfo is not None) is not is_zoned:
        raise ValueError(
            f"{value.isoformat()} has {'no' if is_zoned else 'a'} time zone; the column {_HOLDS[is_zoned]}"
        )


def _check_fraction(value: datetime | time, typmod: int) -> None:
    if 0 <= typmod < 6 and value.microsecond % 10 ** (6 - typmod):
        raise ValueError(f"{value.isoformat()} has more than {typmod} digits of a second")


_HOLDS = {True: "needs one", False: "holds none"}
