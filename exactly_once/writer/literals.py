"""Literals: reads arrays, ranges and composite values as Postgres writes them, down to the texts of parts. No I/O.

So each part is looked at like a value of its own, and none is read by the session's time zone or DateStyle, or rounded.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from psycopg.types.range import Range

from .errors import cut

# Possessive, for a quote within is doubled, and each pair could be read in two ways.
_QUOTED = r'"(?:[^"\\]|""|\\.)*+"'
_BOUND = rf'\s*+(?:{_QUOTED}\s*+|[^"\\,)\]]*+)'
_RANGE = re.compile(
    rf"\s*+(?:empty|(?P<open>[\[(])(?P<lower>{_BOUND}),(?P<upper>{_BOUND})(?P<close>[\])]))\s*+",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)
_FIELD = re.compile(rf'({_QUOTED}|[^"\\,)]*+)([,)])', re.DOTALL)
_ELEMENT = re.compile(r'"(?:[^"\\]|\\.)*+"|[^"\\{},]++', re.DOTALL)
# Of an array whose first element is not number 1.
_SUBSCRIPTS = re.compile(r"\s*+((?:\[[+-]?\d+(?::[+-]?\d+)?\]\s*+)*+=)?\s*+", re.ASCII)
_OPENING = re.compile(r"\{\s*+(\})?\s*+", re.ASCII)
_SEPARATOR = re.compile(r"\s*+([,}])\s*+", re.ASCII)
_ESCAPE = re.compile(r'\\(.)|""', re.DOTALL)
_BLANKS = " \t\n\r\v\f"
# As many as Postgres holds.
_DIMENSIONS = 6


def read_range(text: str) -> Range[str]:
    """Return a range of the texts of its bounds.

    :raises ValueError: for any other text.
    """
    found = _RANGE.fullmatch(text)
    return _range(found) if found else _refuse(text, "range")


def read_multirange(text: str) -> list[Range[str]]:
    """Return the ranges of a multirange.

    :raises ValueError: for any other text.
    """
    text = text.strip(_BLANKS)
    opening, ranges = _OPENING.match(text), []
    is_open = opening is not None and not opening[1]
    at = opening.end() if opening else -1
    while is_open:
        found = _RANGE.match(text, at)
        separator = found and _SEPARATOR.match(text, found.end())
        if not found or not separator:
            _refuse(text, "multirange")
        ranges.append(_range(found))
        is_open, at = separator[1] == ",", separator.end()
    return ranges if at == len(text) else _refuse(text, "multirange")


def read_record(text: str) -> tuple[str | None, ...]:
    """Return the texts of a composite value's attributes.

    :raises ValueError: for any other text.
    """
    text = text.strip(_BLANKS)
    fields: list[str | None] = []
    is_open, at = text.startswith("("), 1
    while is_open:
        found = _FIELD.match(text, at)
        if found is None:
            _refuse(text, "composite value")
        fields.append(_unquoted(found[1]) if found[1] else None)
        is_open, at = found[2] == ",", found.end()
    return tuple(fields) if fields and at == len(text) else _refuse(text, "composite value")


def read_array(text: str) -> tuple[str, list[Any]]:
    """Return what precedes an array whose first element is not number 1, and lists of the texts of its elements.

    :raises ValueError: for any other text.
    """
    subscripts = _SUBSCRIPTS.match(text)
    assert subscripts is not None
    values, end = _elements(text, subscripts.end(), 1)
    return (subscripts[1] or "", values) if end == len(text) else _refuse(text, "array")


def _elements(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    """Read one pair of braces and the blanks behind it, and tell where they end."""
    opening = _OPENING.match(text, at)
    if opening is None or depth > _DIMENSIONS:
        _refuse(text, "array")
    values: list[Any] = []
    is_open, at = not opening[1], opening.end()
    while is_open:
        if text.startswith("{", at):
            value, at = _elements(text, at, depth + 1)
            values.append(value)
        else:
            found = _ELEMENT.match(text, at)
            given = found[0].strip(_BLANKS) if found else ""
            if found is None or not given:
                _refuse(text, "array")
            values.append(None if given.upper() == "NULL" else _unquoted(given))
            at = found.end()
        separator = _SEPARATOR.match(text, at)
        if separator is None:
            _refuse(text, "array")
        is_open, at = separator[1] == ",", separator.end()
    return values, at


def _range(found: re.Match[str]) -> Range[str]:
    if found["open"] is None:
        return Range(empty=True)
    lower, upper = (_bound(found[name]) if found[name] else None for name in ("lower", "upper"))
    return Range(lower, upper, found["open"] + found["close"])


def _bound(text: str) -> str:
    """Return what a bound says: blanks around it are a part, which most types ignore and text does not."""
    words = text.strip(_BLANKS)
    return text.replace(words, _unquoted(words), 1)


def _unquoted(text: str) -> str:
    return _ESCAPE.sub(lambda found: found[1] or '"', text[1:-1]) if text.startswith('"') else text


def _refuse(text: str, what: str) -> NoReturn:
    raise ValueError(f"{cut(text)} is no {what} as Postgres writes it")
