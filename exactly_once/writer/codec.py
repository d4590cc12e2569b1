"""Codec: how the values of one column get to Postgres, and never a silent change on the way. No I/O.

The driver's binary dumpers trust their caller: they wrap an int that is too large, take the string "f" for
true and a datetime for its date. So whatever is handed to them is looked at here first, by whole columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import InvalidOperation
from typing import Any, Literal

from psycopg.postgres import types as registry

from .changes import MISSING
from .errors import cut
from .literals import literal

# What to do with a timestamp whose time zone is not said, or is said where the column holds none.
Naive = Literal["refuse", "utc"]

TEXT = registry["text"].oid
BYTEA = registry["bytea"].oid
_NONE = type(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How the values of one column get to Postgres."""

    wire: int | None
    """The type by which the driver dumps the value in binary; None when it goes as text."""
    exact: frozenset[type] = frozenset()
    """The Python types that need no conversion."""
    coerce: Callable[[Any], Any]
    """Make another value exact, or a text that Postgres reads; ValueError if that would change it."""
    check: Callable[[Any], object] | None = None
    """Look at a value; ValueError if the column does not hold it unchanged."""
    check_all: Callable[[Sequence[Any]], bool] | None = None
    """The same for all values of a batch at once, without telling which one it is."""
    as_text: Callable[[Any], str | None] = literal
    """Write a converted value as Postgres reads it."""

    def accepts(self, values: Sequence[Any]) -> bool:
        """Tell whether all values of a column can be dumped as they are."""
        kinds = set(map(type, values))
        has_none = _NONE in kinds
        kinds.discard(_NONE)
        if not kinds <= self.exact:
            return False
        if not kinds or (self.check is None and self.check_all is None):
            return True
        present = [v for v in values if v is not None] if has_none else values
        if self.check_all is not None:
            return self.check_all(present)
        assert self.check is not None
        try:
            for value in present:
                self.check(value)
        except ValueError:
            return False
        return True

    def convert(self, value: Any) -> Any:
        """Make one value exact, or a text that Postgres reads.

        :raises ValueError: when the column would not hold the value as it is.
        """
        if value is None or value is MISSING:
            return value
        if type(value).__module__ == "numpy":
            value = value.tolist()  # what Python has for it; of a scalar, too
        if type(value) not in self.exact:
            try:
                value = self.coerce(value)
            except (TypeError, OverflowError, InvalidOperation, AttributeError) as error:
                raise ValueError(f"{cut(value)} does not fit: {error}") from error
        if self.is_literal(value):
            return str.__str__(value)
        if self.check is not None:
            self.check(value)
        return value

    def is_literal(self, value: Any) -> bool:
        """Tell whether a converted value is a text for the server to read, and not what the driver dumps."""
        return self.wire != TEXT and isinstance(value, str)

    def is_binary(self, values: Sequence[Any]) -> bool:
        """Tell whether converted values can all go in binary."""
        # Kinds of str, too: a dumper of another type reads their memory as if they were that.
        return self.wire is not None and (
            self.wire == TEXT or not any(issubclass(kind, str) for kind in set(map(type, values)))
        )


def named(name: str, exact: set[type], coerce: Callable[[Any], Any], **more: Any) -> Codec:
    """Make the codec of a type that the driver dumps under its own name."""
    return Codec(wire=registry[name].oid, exact=frozenset(exact), coerce=coerce, **more)


def as_literal(value: Any) -> str:
    """Write whatever has a literal, for the server to judge."""
    text = literal(value)
    assert text is not None
    return text


def by_text(coerce: Callable[[Any], Any] = as_literal) -> Codec:
    """Make the codec of a type without a binary form here."""
    return Codec(wire=None, coerce=coerce)


def refuse(what: str) -> Callable[[Any], Any]:
    """Make the conversion of a column that takes nothing but its own type."""

    def refusing(value: Any) -> Any:
        raise ValueError(f"{what}, not {type(value).__name__}: {cut(value)}")

    return refusing
