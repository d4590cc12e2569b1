"""Times: the codecs of timestamps, dates, times and intervals, and the text that they take. No I/O."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from operator import attrgetter
from typing import Any

from .codec import Codec, Naive, as_literal, by_text, named, refuse
from .errors import cut

_ZONE = attrgetter("tzinfo")
_BC = re.compile(r"\d{4,}-\d\d-\d\d(?:[ t][\d:.]+)?(?P<zone>z|[+-]\d\d(?::?\d\d)?)? bc")
# Python takes more, such as three digits for seconds, and makes of them what nobody meant.
_CLOCK = r"\d\d(?::?\d\d(?::?\d\d(?:[.,]\d+)?)?)?(?:[Zz]|[+-]\d\d(?::?\d\d(?::?\d\d)?)?)?"
_DAY_TEXT = r"(?:\d{4}-\d\d-\d\d|\d{8}|\d{4}-W\d\d(?:-\d)?|\d{4}W\d\d\d?)"
_DAY_ALONE = re.compile(_DAY_TEXT, re.ASCII)
_MOMENT_TEXT = re.compile(rf"{_DAY_TEXT}(?:[Tt ]{_CLOCK})?", re.ASCII)
_CLOCK_TEXT = re.compile(_CLOCK, re.ASCII)
_LONG_FRACTION = re.compile(r"[.,](\d{7,})")
_MIDNIGHT = re.compile(r"24:00(?::00(?:\.0+)?)?(?P<zone>[Zz]|[+-][\d:]+)?", re.ASCII)
_END_OF_DAY = re.compile(r"(?<=[Tt ])24(?=(?::?00(?::?00(?:[.,]0+)?)?)?(?:[Zz+-]|$))", re.ASCII)
_FAR_YEAR = re.compile(r"[+-]?\d{5,}-|[+-]\d{4}-", re.ASCII)
# An interval that begins with a minus and has no other sign, and where its other numbers begin.
_ONE_SIGN = re.compile(r"[\s@]*-(?=[\d.])(?:[^-+]|(?<=\d)-)*", re.ASCII)
_OTHER_NUMBER = re.compile(r"(?<=[^\d.:+\-eE])(\.?)(?=\d)", re.ASCII)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = 1_000_000
_DAY = 86_400 * _SECOND
# Postgres holds more, Python's dates do not.
BEYOND = "beyond the years 1 to 9999, which are all that is read here"


def timestamp(name: str, typmod: int, naive: Naive) -> Codec:
    """Make the codec of timestamp and timestamptz.

    A time zone that is lacking, or is there where the column holds none, is refused, or UTC by choice.
    """
    is_zoned = name == "timestamptz"

    def coerce(value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = read_moment(value)
            except ValueError:
                return _special(value, is_zoned=is_zoned)
        if not isinstance(value, datetime):
            refuse("a timestamp is wanted")(value)
        if getattr(value, "nanosecond", 0):
            raise ValueError(f"{value} has nanoseconds; Postgres keeps microseconds")
        if naive == "utc" and (value.utcoffset() is None) is is_zoned:
            value = value.replace(tzinfo=UTC) if is_zoned else value.astimezone(UTC).replace(tzinfo=None)
        return datetime.combine(value.date(), value.timetz())

    def check_all(values: Sequence[datetime]) -> bool:
        zones = map(_ZONE, values)
        return all(zones) if is_zoned else not any(zones)

    check = _check(typmod, is_zoned=is_zoned)
    codec = named(name, {datetime}, coerce, check=check, check_all=check_all if typmod < 0 else None)
    return replace(codec, exact=frozenset()) if naive == "utc" else codec


def _to_date(value: Any) -> Any:
    # A datetime is none, because it says more.
    if isinstance(value, datetime) or not isinstance(value, (date, str)):
        refuse("a date is wanted")(value)
    if isinstance(value, date):
        return value
    if _DAY_ALONE.fullmatch(value):  # Python takes ten digits, too, and leaves the last two out
        with contextlib.suppress(ValueError):
            return date.fromisoformat(value)
    return _special(value, is_zoned=False)


DATE = named("date", {date}, _to_date)


def clock(name: str, typmod: int) -> Codec:
    """Make the codec of time and timetz."""
    is_zoned = name == "timetz"

    def coerce(value: Any) -> Any:
        if not isinstance(value, str):
            refuse("a time is wanted")(value)
        read = read_clock(value)
        if isinstance(read, str) and (_MIDNIGHT.fullmatch(read)["zone"] is not None) is not is_zoned:  # type: ignore[index]
            raise ValueError(f"{cut(value)} {_ZONES[is_zoned]}")
        return read

    return named(name, {time}, coerce, check=_check(typmod, is_zoned=is_zoned))


def interval(typmod: int) -> Codec:
    """Make the codec of interval; one with restricted fields goes as text."""

    def coerce(value: Any) -> str:
        text = value if isinstance(value, str) else refuse("an interval is wanted")(value)
        # With IntervalStyle sql_standard the only sign would be that of all numbers.
        return _OTHER_NUMBER.sub(lambda m: "+0." if m[1] else "+", text) if _ONE_SIGN.fullmatch(text) else text

    if typmod < 0:
        return named("interval", {timedelta}, coerce)
    # Each field with the sign of all: of one second before nothing, as Python splits it, a whole day would be left.
    return by_text(lambda value: _whole_days(value) if isinstance(value, timedelta) else as_literal(coerce(value)))


def read_moment(text: str) -> datetime:
    """Read a date and time in ISO 8601; digits below the microsecond are rounded as Postgres does it.

    :raises ValueError: for any other text.
    :raises OverflowError: for what Python cannot hold.
    """
    text = text.strip()
    if not _MOMENT_TEXT.fullmatch(text):
        raise ValueError(f"{cut(text)} is not in ISO 8601")
    text, midnights = _END_OF_DAY.subn("00", text)
    text, microseconds = _without_long_fraction(text)
    try:
        return datetime.fromisoformat(text) + timedelta(days=midnights, microseconds=microseconds)
    except OverflowError as error:
        raise OverflowError(f"it is {BEYOND}") from error


def read_clock(text: str) -> time | str:
    """Read a time in ISO 8601; the end of the day, which Python does not know, is a text for Postgres.

    :raises ValueError: for any other text.
    """
    text = text.strip()
    if not _CLOCK_TEXT.fullmatch(text):
        raise ValueError(f"{cut(text)} is not a time in ISO 8601")
    if _MIDNIGHT.fullmatch(text):
        return text
    text, microseconds = _without_long_fraction(text)
    read = time.fromisoformat(text)
    if not microseconds:
        return read
    whole = ((read.hour * 60 + read.minute) * 60 + read.second) * _SECOND + microseconds
    zone = read.isoformat()[8:]
    return clock_of(whole).replace(tzinfo=read.tzinfo) if whole < _DAY else f"24:00:00{zone}"


def clock_of(microseconds: int) -> time:
    """Return the time so long after midnight."""
    seconds, micros = divmod(microseconds, _SECOND)
    return time(seconds // 3600, seconds // 60 % 60, seconds % 60, micros)


def _whole_days(length: timedelta) -> str:
    days = abs(length).days * (-1 if length < timedelta() else 1)
    return f"{days:+d} days {(length - timedelta(days)) // timedelta(microseconds=1):+d} microseconds"


def span_of(microseconds: int) -> str:
    """Return an interval as a text of hours to microseconds, which no version of Postgres limits to 32 bits of them."""
    sign, (seconds, micros) = "-" if microseconds < 0 else "", divmod(abs(microseconds), _SECOND)
    return f"{sign}{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}.{micros:06}"


def _without_long_fraction(text: str) -> tuple[str, int]:
    """Cut off a fraction that is finer than a microsecond; return it apart, rounded."""
    found = _LONG_FRACTION.search(text)
    if found is None:
        return text, 0
    # By way of a double, as Postgres does it, so that the same becomes of a half.
    return text[: found.start()] + text[found.end() :], round(float(f"0.{found[1]}") * _SECOND)


def _special(value: str, *, is_zoned: bool) -> str:
    """Let through what Postgres holds and Python does not, as long as it cannot be misread."""
    text = value.strip().lower()
    if text in ("infinity", "-infinity"):
        return text
    if (before_christ := _BC.fullmatch(text)) and (before_christ["zone"] is not None) is is_zoned:
        return text
    raise ValueError(f"{cut(value)} is {BEYOND if _FAR_YEAR.match(text) else 'not in ISO 8601'}")


def _check(typmod: int, *, is_zoned: bool) -> Callable[[datetime | time], None]:
    def check(value: datetime | time) -> None:
        if (value.tzinfo is not None) is not is_zoned:
            remedy = ', unless naive_timestamps="utc"' if isinstance(value, datetime) else ""
            raise ValueError(f"{value.isoformat()} {_ZONES[is_zoned]}{remedy}")
        if 0 <= typmod < 6 and value.microsecond % 10 ** (6 - typmod):
            raise ValueError(f"{value.isoformat()} has more than {typmod} digits of a second")

    return check


_ZONES = {
    True: "has no time zone; the column needs one",
    False: "has a time zone; the column holds none",
}
