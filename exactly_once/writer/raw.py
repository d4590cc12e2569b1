"""Raw: messages as they are, key and value each in a column, and any function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from confluent_kafka import Message

from .changes import MISSING, Row, Tombstone
from .decoding import Decoded, Envelope, Source
from .errors import BadRow, TableError
from .statements import Mode
from .table import Table


class RawDecoder:
    """Stores key and value without looking into them: as bytea, text or jsonb, whatever the columns are.

    In an upsert a message without a value deletes the row with its key; elsewhere it is stored as null.
    """

    def __init__(
        self,
        *,
        key: str | None = "key",
        value: str | None = "value",
        metadata: Mapping[str, Source] | None = None,
    ) -> None:
        self._value = value
        self._envelope = Envelope({**({key: "key"} if key is not None else {}), **(metadata or {})})
        self._key: Sequence[str] = ()
        self._deletes = False

    def prepare(self, table: Table, *, mode: Mode, key: Sequence[str]) -> None:
        """See to it that the table has the columns, and that a tombstone has all of the key."""
        self._envelope.prepare(table)
        table.pick([self._value] if self._value is not None else [])
        self._deletes = mode == "upsert"
        self._key = key
        if self._deletes and (lacking := [k for k in key if k not in self._envelope.columns]):
            raise TableError(f"{table}: raw messages cannot fill the key column {', '.join(lacking)}")

    def decode(self, messages: Sequence[Message]) -> Decoded:
        """Describe the rows."""
        first = (self._value,) if self._value is not None else ()

        def make() -> Iterator[Row]:
            for message in messages:
                if self._deletes and message.value() is None:
                    yield Tombstone(self._envelope.get(k, message) for k in self._key)
                else:
                    yield ((message.value(),) if first else ()) + tuple(self._envelope.values(message))

        return Decoded(
            columns=(*first, *self._envelope.columns), origins=messages, make=make, exact=self._envelope.exact
        )


class FunctionDecoder:
    """Asks a function for each message's rows.

    The function returns a mapping from column to value, several of them, a :class:`Tombstone`, or None for a
    message that has no row. A column that a mapping lacks counts as missing.
    """

    def __init__(self, function: Callable[[Message], Any], *, columns: Sequence[str] | None = None) -> None:
        self._function = function
        self._wanted = columns
        self._columns: tuple[str, ...] = ()

    def prepare(self, table: Table, *, mode: Mode, key: Sequence[str]) -> None:
        """Take all columns of the table, unless some were named."""
        self._columns = tuple(self._wanted if self._wanted is not None else table.writable)
        table.pick(self._columns)

    def decode(self, messages: Sequence[Message]) -> Decoded:
        """Call the function for each message, now: how many rows there are is known only afterwards."""
        rows: list[Row] = []
        origins: list[Message] = []
        for message in messages:
            try:
                made = self._function(message)
                if made is None or isinstance(made, (Mapping, Tombstone)):
                    made = [] if made is None else [made]
                for one in made:
                    if isinstance(one, Tombstone):
                        rows.append(one)
                    elif unknown := set(one) - set(self._columns):
                        raise ValueError(f"there is no column {', '.join(sorted(map(repr, unknown)))}")
                    else:
                        rows.append(tuple(one.get(name, MISSING) for name in self._columns))
                    origins.append(message)
            except Exception as error:
                raise BadRow(str(error) or type(error).__name__, message=message) from error
        return Decoded(columns=self._columns, origins=origins, make=lambda: iter(rows))
