"""Where the writer does other than Postgres with the same text, on purpose; the page's table, and the fuzz's excuse."""

# ruff: noqa: E501 - a table

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

REFUSED = ("refused",)
"""What is stored of a value that is refused."""
_NUMBERS = ("smallint", "integer", "bigint", "oid", "real", "double precision", "numeric", "json_percent")
_TIMES = ("timestamp", "date", "time")
_EMPTY = re.compile(r"\[[\s\[\],]*\]")


@dataclass(frozen=True, slots=True)
class Case:
    """A value, and what became of it."""

    kind: str
    json: str
    ours: object
    theirs: object

    @property
    def is_refused(self) -> bool:
        """Whether only we refuse it."""
        return self.ours is REFUSED and self.theirs is not REFUSED

    @property
    def is_text(self) -> bool:
        """Whether it is a text in JSON."""
        return self.json.startswith('"')

    def is_of(self, *kinds: str) -> bool:
        """Whether the column, or its elements or attributes, are of such a type."""
        return self.kind.startswith(kinds) or self.kind.startswith("json_place") or self.kind.startswith("json_trip")


@dataclass(frozen=True, slots=True)
class Difference:
    """A row of the page's table."""

    what: str
    here: str
    postgres: str
    is_it: Callable[[Case], bool]


def _is_rounded(case: Case) -> bool:
    """Tell whether Postgres had to cut digits or blanks."""
    return case.is_refused and (
        "(" in case.kind or case.kind in ("name", '"char"', "name[]") or case.is_of("json_short")
    )


def _is_inexact_double(case: Case) -> bool:
    for part in re.findall(r"(?<![\d.eE+-])-?\d+(?![\d.eE])", case.json):
        try:
            if Decimal(part) != Decimal(float(part)):
                return True
        except (InvalidOperation, OverflowError):
            return True
    return False


DIFFERENCES = [
    Difference("digits or blanks that the column does not keep, for `numeric(p,s)`, `time(n)`, `timestamp(n)`, `varchar(n)`, `char(n)`, `name`", "refused", "rounds, or cuts", _is_rounded),
    Difference("an `int` that a double changes", "refused", "rounds", lambda c: c.is_refused and c.is_of("real", "double precision") and _is_inexact_double(c)),
    Difference("text in JSON for a double or a boolean, a number for a boolean", "refused, unless `lax`", "reads it", lambda c: c.is_refused and c.is_of("real", "double precision", "boolean")),
    Difference("underscores and hexadecimal in a number's text; a negative `oid`, one that begins with 0", "refused", "reads it", lambda c: c.is_refused and c.is_of(*_NUMBERS) and bool(re.search(r'_|0[xob]|-|\"(\s|\\[tnrf])*\+?0', c.json.lower()))),
    Difference("true, lists and objects for what is no array, JSON or composite type", "refused", "reads the text of the JSON", lambda c: c.is_refused and bool(re.search(r"true|false|[\[{]", c.json))),
    Difference("a fraction for `money`; a number for `interval`, `bytea`, `bit` and `macaddr`", "refused", "reads the digits", lambda c: c.is_refused and c.is_of("money", "interval", "bytea", "bit", "varbit", "macaddr") and bool(re.search(r"\d", c.json))),
    Difference("a whole number with an exponent for `money`", "stored", "refuses it", lambda c: c.theirs is REFUSED and c.is_of("money") and bool(re.search(r"\d[eE]", c.json))),
    Difference("a time zone too few or too many", "refused, unless `naive_timestamps`", "takes the session's zone, or ignores it", lambda c: c.is_refused and c.is_of("timestamp", "time", "date")),
    Difference("dates and times in other words than ISO 8601, by the day of the year, with a second of 60, or beyond the years 1 to 9999, and `infinity` from JSON where the column has no precision", "refused", "reads it", lambda c: c.is_refused and c.is_of(*_TIMES)),
    Difference("lists for dates and times, ISO weeks, an hour without minutes, a comma before the fraction, zones of 16 hours and more", "stored", "refuses it", lambda c: c.theirs is REFUSED and c.is_of(*_TIMES)),
    Difference("`bytea` from JSON", "reads base64", "reads its own escapes", lambda c: c.is_of("bytea")),
    Difference("fields of a composite type that have no attribute", "refused", "ignores them", lambda c: c.is_refused and c.is_of("json_place", "json_trip")),
    Difference("half of a surrogate pair in `json`", "refused", "stores it", lambda c: c.is_refused and bool(re.search(r"\\ud[89a-f]", c.json.lower()))),
    Difference("short forms of UUIDs and networks", "refused", "reads some", lambda c: c.is_refused and c.is_of("uuid", "inet", "cidr")),
]  # fmt: skip


def page() -> str:
    """Write the page's table."""
    lines = ["| what | here | Postgres |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {d.what} | {d.here} | {d.postgres} |" for d in DIFFERENCES)])


def explained(case: Case) -> bool:
    """Tell whether a case is as it should be: the same here and there, or a difference that is meant."""
    return case.ours == case.theirs or any(d.is_it(case) for d in DIFFERENCES)
