"""Errors of the writer: one class per decision that a caller can take.

TableError (ExactlyOnceError, psycopg.ProgrammingError)  the table cannot take what it is asked to: stop
TableChanged (psycopg.OperationalError)                  somebody altered the table: run the batch again
RegistryAway (psycopg.OperationalError)                  a Schema Registry does not answer: run the batch again
BadRow (ValueError)                                      one row cannot be stored: its message is at fault

They come out of handlers, where an ExactlyOnceError stops the worker, so only the first one is that. The next
two have a SQLSTATE that :func:`exactly_once.ledger.outcome.classify` takes for a conflict.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import psycopg
from confluent_kafka import Message

from exactly_once.errors import ExactlyOnceError

# Postgres cuts longer names.
NAME_BYTES = 63
_SHOWN = 100
_HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][\da-fA-F][\da-fA-F])\\u[dD][c-fC-F].."
)
Place = tuple[str | None, int | None, int | None]


class TableError(ExactlyOnceError, psycopg.ProgrammingError):
    """The table cannot take what it is asked to; no message is at fault and no retry helps."""

    sqlstate = "0A000"


class TableMissing(TableError):
    """There is no table of that name."""


class TableChanged(psycopg.OperationalError):
    """The table was altered since it was read; nothing was stored, the next attempt reads it anew."""

    sqlstate = "40000"


class RegistryAway(psycopg.OperationalError):
    """A Schema Registry does not answer, or not for now; nothing was stored, the batch comes again."""

    sqlstate = "40000"


class UnreadableValue(psycopg.DataError):
    """What a type's reader says of a value, whatever the class of the error that it raises for it."""

    sqlstate = "22P02"


class BadRow(ValueError):
    """One row cannot be stored as it is; says which one, and why, as far as that is known."""

    def __init__(
        self,
        reason: str,
        *,
        message: Message | None = None,
        at: Place | None = None,
        row: int | None = None,
        column: str | None = None,
    ) -> None:
        self.reason = reason
        if message is not None:
            at = place_of(message)
        self.topic: str | None
        self.partition: int | None
        self.offset: int | None
        self.topic, self.partition, self.offset = at or (None, None, None)
        self.row = row
        self.column = column
        place = f"{self.topic}[{self.partition}] offset {self.offset}" if at is not None else None
        place = place or (f"row {row}" if row is not None else None)
        super().__init__(": ".join(filter(None, (place, f"column {column}" if column else None, reason))))


def place_of(message: Message) -> Place:
    """Return topic, partition and offset of a message."""
    return message.topic(), message.partition(), message.offset()


def cut(value: Any) -> str:
    """Show a value, but not much of it."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write an int of thousands of digits
        return f"a {type(value).__name__} that is too long to be shown"
    return short(text)


def short(text: str) -> str:
    """Leave out what of a text is too long to be shown."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def has_name(text: str, name: str) -> bool:
    """Tell whether a text of Postgres, in any language, has a name in it."""
    return re.search(rf'(?:^|[ "]){re.escape(name)}(?:$|[ ",:])', text) is not None


def way_on(value: bytes | None) -> str:
    """Say what takes a message that is a list, and what is wrong with a text that was cut; nothing of any other."""
    if (value or b"").lstrip().startswith(b"["):
        return "; in a program FunctionDecoder makes several rows of a message"
    if half := _HALF_PAIR.search(value or b""):
        return f"; {half[0].decode()} is half of a character: its producer has cut a text within a surrogate pair"
    return ""


def origin(origins: Sequence[Message] | None, row: int) -> Message | None:
    """Return the message that a row came from, if that is known."""
    return origins[row] if origins is not None and row < len(origins) else None
