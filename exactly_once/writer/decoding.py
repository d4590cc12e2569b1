"""Decoding: what turns messages into rows of a table, and what every decoder can add from a message's envelope."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Protocol, get_args

from confluent_kafka import Message

from exactly_once.errors import ConfigurationError

from .changes import Row
from .codecs import name_of
from .errors import TableError
from .statements import Mode
from .table import Column, Table

Source = Literal["topic", "partition", "offset", "timestamp", "key", "headers"]
"""What of a message, besides its value, can fill a column."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NO_TIMESTAMP = 0
_EXACT = {
    "topic": ("text", "varchar"),
    "partition": ("int4", "int8"),
    "offset": ("int8",),
    "timestamp": ("timestamptz", "int8"),
    "key": ("bytea",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Rows that are made while they are iterated over, so that none need be kept; can be iterated over again."""

    columns: Sequence[str]
    """What the values of a row are."""
    origins: Sequence[Message]
    """The message that each row comes from."""
    make: Callable[[], Iterator[Row]]
    exact: Collection[str] = ()
    """The columns whose values are what the column takes, without another look."""
    unused: Counter[str] = field(default_factory=Counter)
    """How often a field came that no column takes; counted while the rows are made."""
    unfilled: Collection[str] = ()
    """The columns that no message filled yet, as far as the decoder knows."""

    def __iter__(self) -> Iterator[Row]:
        return self.make()


class Decoder(Protocol):
    """Turns messages into rows of one table."""

    def prepare(self, table: Table, *, mode: Mode, key: Sequence[str]) -> None:
        """Get ready for a table; called again when it was altered.

        :raises TableError: when the table lacks what the decoder fills.
        """

    def decode(self, messages: Sequence[Message]) -> Decoded:
        """Describe the rows of messages; what is wrong with a message is raised when its row is made."""


class Envelope:
    """Columns that are filled from a message's envelope: ``{"kafka_offset": "offset"}``."""

    def __init__(self, sources: Mapping[str, Source] | None) -> None:
        self.sources = dict(sources or {})
        if unknown := set(self.sources.values()) - set(get_args(Source)):
            raise ConfigurationError(
                f"metadata={sources!r}: there is no {', '.join(unknown)}; there are {', '.join(get_args(Source))}"
            )
        self.columns = tuple(self.sources)
        self.exact: frozenset[str] = frozenset()
        self._getters: list[Callable[[Message], Any]] = []

    def prepare(self, table: Table) -> None:
        """Choose for each column the form that its type takes."""
        columns = table.pick(self.columns)
        self._getters = [_getter(self.sources[c.name], c) for c in columns]
        self.exact = frozenset(c.name for c in columns if name_of(c.type_oid) in _EXACT.get(self.sources[c.name], ()))

    def get(self, column: str, message: Message) -> Any:
        """Return what one column gets from a message."""
        return self._getters[self.columns.index(column)](message)

    def values(self, message: Message) -> Row:
        """Return what all of the columns get."""
        return tuple(get(message) for get in self._getters)


def alike(name: str, others: Iterable[str]) -> str | None:
    """Return the only one of several names that is the same but for upper case and underscores."""
    found = [other for other in others if _bare(other) == _bare(name)]
    return found[0] if len(found) == 1 else None


def _bare(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _getter(source: Source, column: Column) -> Callable[[Message], Any]:
    if source == "timestamp":
        return _milliseconds if name_of(column.type_oid) == "int8" else _timestamp
    if source == "headers":
        if name_of(column.type_oid) not in ("json", "jsonb"):
            raise TableError(f"column {column.name} is {column.type_name}; headers need json or jsonb")
        return _headers
    return {"topic": Message.topic, "partition": Message.partition, "offset": Message.offset, "key": Message.key}[
        source
    ]


def _milliseconds(message: Message) -> int | None:
    kind, milliseconds = message.timestamp()
    return None if kind == _NO_TIMESTAMP else milliseconds


def _timestamp(message: Message) -> datetime | None:
    milliseconds = _milliseconds(message)
    return None if milliseconds is None else _EPOCH + timedelta(milliseconds=milliseconds)


def _headers(message: Message) -> list[list[Any]] | None:
    """Return pairs, because a name may come twice; bytes that are no text are shown as base64."""
    headers = message.headers()
    return None if headers is None else [[pair[0], _shown(pair[1])] for pair in headers]


def _shown(value: str | bytes | None) -> Any:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}
