"""The sink: messages to one table, as the handler of ``consumer.run`` or beside a handler of one's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from confluent_kafka import Message

from exactly_once.ledger.session import Connection

from .decoding import Decoder
from .errors import TableError
from .table import Table
from .writer import TableWriter

if TYPE_CHECKING:
    from exactly_once.consumer.unit import Unit


class TableSink:
    """Writes the messages of a unit to a table: ``consumer.run(TableSink("bank.payment", decoder=JsonDecoder()))``.

    Everything but ``decoder`` is an option of :class:`TableWriter`.
    """

    def __init__(self, table: str, *, decoder: Decoder, **options: Any) -> None:
        self.writer = TableWriter(table, **options)
        self.decoder = decoder
        self.rows = 0
        """How many rows were written so far, those of units that were rolled back included."""
        self.unused_fields: Counter[str] = Counter()
        """How often a field came that no column takes, so far; counted as ``rows`` is."""
        self.filtered_messages = 0
        """How many messages the decoder has left out so far, because they are not wanted; counted as ``rows`` is."""
        self.unfilled_columns: set[str] = set()
        """The columns that no message has filled so far."""
        self._prepared_for: Table | None = None
        self._columns: Sequence[str] = ()

    @property
    def missed_deletes(self) -> int:
        """How many deletes found no row so far; counted as ``rows`` is."""
        return self.writer.missed_deletes

    def __call__(self, unit: Unit) -> None:
        """Write the messages of a unit in its transaction."""
        self.write(unit.connection, unit.messages)

    def write(self, connection: Connection, messages: Sequence[Message]) -> int:
        """Write messages; see :meth:`TableWriter.write` for what is raised and returned."""
        table = self.writer.table(connection)  # locked as it is from here on
        if table is not self._prepared_for:
            # A column that was filled so far must not be left out in silence because it is gone.
            table.pick(self._columns)
            self.decoder.prepare(table, mode=self.writer.mode, key=self.writer.key(connection))
            self._prepared_for = table
        decoded = self.decoder.decode(messages)
        self._columns = decoded.columns
        written = self.writer.write(
            connection, decoded, columns=decoded.columns, origins=decoded.origins, exact=decoded.exact, table=table
        )
        self.rows += written
        self.unused_fields += decoded.unused
        self.filtered_messages += decoded.filtered
        self.unfilled_columns = set(decoded.unfilled)
        return written


class Router:
    """Hands each topic's messages to its own sink, all in the transaction of the unit."""

    def __init__(self, sinks: Mapping[str, TableSink]) -> None:
        self._sinks = dict(sinks)

    def __call__(self, unit: Unit) -> None:
        """Write the messages of a unit, table by table in the order in which the topics were given."""
        by_topic: dict[str | None, list[Message]] = {}
        for message in unit.messages:
            by_topic.setdefault(message.topic(), []).append(message)
        if unknown := by_topic.keys() - self._sinks.keys():
            raise TableError(f"no table for topic {', '.join(map(str, unknown))}")
        for topic, sink in self._sinks.items():
            if messages := by_topic.get(topic):
                sink.write(unit.connection, messages)
