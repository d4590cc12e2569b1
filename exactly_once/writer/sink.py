"""The sink: messages to one table, as the handler of ``consumer.run`` or beside a handler of one's own."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import psycopg
from confluent_kafka import Message

from exactly_once._log import about
from exactly_once.errors import ConfigurationError
from exactly_once.ledger.session import Connection

from .changes import Row
from .ddl import add_columns, can_be_column, elsewhere, unencodable
from .decoding import Decoded, Decoder
from .errors import BadRow, TableChanged, TableError, cut, place_of
from .table import ABROAD, Table, alter, read_table
from .writer import TableWriter

if TYPE_CHECKING:
    from exactly_once.consumer.unit import Unit

    from .claiming import Claim, Claims

logger = logging.getLogger(__name__)

Evolve = Literal["add-columns"]
# Messages of which no row can be made, in their order, and why.
Bad = Sequence[tuple[Message, BadRow]]
# What takes such messages, in the transaction that skips them.
SetAside = Callable[[Bad], object]
# So many messages are looked at once more for each bad one among them.
_SIFTED = 256


class TableSink:
    """Writes the messages of a unit to a table: ``consumer.run(TableSink("bank.payment", decoder=JsonDecoder()))``.

    With ``evolve="add-columns"`` a field that no column takes gets one: the batch comes again, and its transaction
    begins with the ALTER TABLE. A field that was always null so far gets none. ``types`` are those of such columns,
    where the values do not tell. ``claim`` names the field that tells one event from another (a path with dots,
    ``header:NAME``, ``key:PATH``, or ``key:`` for a whole key): of rows with one the first of the group is stored, as
    :meth:`Unit.claim` says. Keys of another table are others, and a message without a value claims no field. All else
    are options of :class:`TableWriter`.
    """

    def __init__(
        self,
        table: str,
        *,
        decoder: Decoder,
        evolve: Evolve | None = None,
        types: Mapping[str, str] | None = None,
        claim: str | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        # What cannot be stored claims nothing, so each row is looked at.
        self.writer = TableWriter(table, **{"sends_each": claim is not None, **options})
        says = getattr(decoder, "missing", None)
        if self.writer.missing in ("keep", "default"):
            if says not in (None, "apart"):
                raise ConfigurationError(
                    f"missing={self.writer.missing!r} needs a decoder that tells a missing field from null: say "
                    'JsonDecoder(missing="apart")'
                )
        elif says == "apart":
            raise ConfigurationError(
                'JsonDecoder(missing="apart") tells a missing field from null, and nothing says what it is to be: '
                'say missing="keep" or "default", too'
            )
        self._claims: Claims | None = None
        if claim is not None:
            from .claiming import Claims  # noqa: PLC0415 - an extra

            self._claims = Claims(claim)
        self._evolves = evolve is not None
        self._types = dict(types or {})
        # Columns that the next transaction adds, until one sees that they are there.
        self._to_add: dict[str, str] = {}
        # Fields that can be no columns.
        self._declined: set[str] = set()
        self.decoder = decoder
        # How many rows were written so far, those of units that were rolled back included.
        self.rows = 0
        # How often a field came that no column takes, so far; counted as ``rows`` is.
        self.unused_fields: Counter[str] = Counter()
        # How many messages the decoder has left out so far, because they are not wanted; counted as ``rows`` is.
        self.filtered_messages = 0
        # How many rows were left out so far, because their event was claimed before; counted as ``rows`` is.
        self.repeated_rows = 0
        # The columns that no message has filled so far.
        self.unfilled_columns: set[str] = set()
        # The fields of ``where``, ``where_not`` and ``drop`` that none had so far.
        self.unmet_fields: set[str] = set()
        self._has_met_bad = False
        self._prepared_for: Table | None = None
        self._columns: Sequence[str] = ()

    @property
    def missed_deletes(self) -> int:
        """How many deletes found no row so far; counted as ``rows`` is."""
        return self.writer.missed_deletes

    @property
    def ignored_rows(self) -> int:
        """How many rows the table had already, or had newer, so far; counted as ``rows`` is."""
        return self.writer.ignored_rows

    def __call__(self, unit: Unit) -> None:
        """Write the messages of a unit in its transaction."""
        self.write(unit.connection, unit.messages, claim=unit.claim_many)

    def write(
        self,
        connection: Connection,
        messages: Sequence[Message],
        *,
        set_aside: SetAside | None = None,
        claim: Claim | None = None,
    ) -> int:
        """Write messages; see :meth:`TableWriter.write` for what is raised and returned.

        From the first bad message on ``set_aside`` gets those of which the decoder makes no row, and the others are
        written: that message itself is raised, for the batch to come again. ``claim`` claims keys, as a unit does.

        :raises ConfigurationError: where keys are to be claimed, and there is nothing to do it.
        """
        if self._claims is not None and claim is None and messages:
            raise ConfigurationError("claim= needs a unit: call the sink with it, or pass claim=unit.claim_many")
        if self._to_add:
            self._add_columns(connection)
        table = self.writer.table(connection)  # locked as it is from here on
        if table is not self._prepared_for:
            # A column that was filled so far must not be left out in silence because it is gone.
            table.pick(self._columns)
            table.refuse_unlogged()
            if table.is_foreign:
                logger.warning(ABROAD, table, extra=about("foreign_table"))
            self.decoder.prepare(table, mode=self.writer.mode, key=self.writer.key(connection))
            self._prepared_for = table
        try:
            is_wary = set_aside is not None and self._has_met_bad
            decoded = self._sifted(messages, set_aside) if set_aside and is_wary else self.decoder.decode(messages)
            if self._claims is not None and claim is not None:
                decoded = self._claims.unclaimed(decoded, table, claim)
            self._columns = decoded.columns
            written = self.writer.write(
                connection,
                decoded,
                columns=decoded.columns,
                origins=decoded.origins,
                exact=decoded.exact,
                partial=decoded.partial,
                table=table,
            )
        except BadRow:
            self._has_met_bad = True
            raise
        if self._evolves:
            self._look_for_columns(table, messages, decoded)
        self.rows += written
        self.unused_fields += decoded.unused
        self.filtered_messages += decoded.filtered
        self.repeated_rows += decoded.repeated
        self.unfilled_columns = set(decoded.unfilled)
        self.unmet_fields = set(decoded.unmet)
        return written

    def _add_columns(self, connection: Connection) -> None:
        """Execute the ALTER TABLE; before anything else locks the table, so that no two workers wait for each other.

        :raises TableError: when the role may not, or a column can only be added elsewhere.
        :raises TableChanged: when the table takes no such columns, so that the batch comes again without them.
        """
        table = read_table(connection, self.writer.name)
        statements = add_columns(table, self._to_add)
        self._to_add = self._to_add if statements else {}
        for statement in statements:
            try:
                alter(connection, statement)
            except psycopg.errors.LockNotAvailable as error:
                raise TableChanged(f"{table} is locked, and gets its columns once it is not: {error}") from error
            except psycopg.errors.InsufficientPrivilege as error:
                raise TableError(f"{table}: only its owner adds columns: {error}") from error
            except psycopg.errors.WrongObjectType as error:
                raise TableError(elsewhere(table, self._to_add, error)) from error
            except psycopg.errors.TooManyColumns as error:
                # No message is at fault: the fields go to the column for the rest, or are counted, as they do
                # without evolve.
                self._declined.update(self._to_add)
                self._to_add = {}
                raise TableChanged(f"{table} takes no more columns: {error}") from error
            except psycopg.errors.UntranslatableCharacter as error:
                if not (odd := unencodable(error, self._to_add)):
                    raise
                self._decline(table, odd, error)
                self._to_add = {name: kind for name, kind in self._to_add.items() if name not in odd}
                raise TableChanged(f"{table} cannot have a column of such a name: {error}") from error
            logger.info("%s", statement.as_string(None), extra=about("ddl"))

    def _decline(self, table: Table, names: Sequence[str], why: object) -> None:
        self._declined.update(names)
        text = "%s gets no column for %s: %s"
        logger.warning(text, table, ", ".join(map(cut, names)), why, extra=about("column_declined"))

    def _sifted(self, messages: Sequence[Message], set_aside: SetAside) -> Decoded:
        """Make rows of all messages of which they can be made; the others are set aside."""
        rows: list[Row] = []
        origins: list[Message] = []
        bad: list[tuple[Message, BadRow]] = []
        unused: Counter[str] = Counter()
        filtered = 0
        parts = [messages[start : start + _SIFTED] for start in range(0, len(messages), _SIFTED)][::-1]
        while parts:
            part = parts.pop()
            try:
                decoded = self.decoder.decode(part)
                made = list(decoded)
            except BadRow as error:
                place = error.topic, error.partition, error.offset
                places = list(map(place_of, part))
                if place not in places:
                    raise
                at = places.index(place)
                bad.append((part[at], error))
                parts += [part[at + 1 :], part[:at]]
                continue
            rows += made
            origins += decoded.origins
            unused += decoded.unused
            filtered += decoded.filtered
        if bad:
            order = {place_of(message): number for number, message in enumerate(messages)}
            set_aside(sorted(bad, key=lambda pair: order[place_of(pair[0])]))
        last = self.decoder.decode([])
        return replace(last, origins=origins, make=lambda: iter(rows), unused=unused, filtered=filtered)

    def _look_for_columns(self, table: Table, messages: Sequence[Message], decoded: Decoded) -> None:
        """Decide what columns a batch asks for.

        :raises TableChanged: when there are some, so that the batch comes again, with them.
        """
        from .evolving import types_in  # noqa: PLC0415 - an extra

        new: set[str] = getattr(self.decoder, "new_fields", set()) - self._declined
        known = {column.name for column in table.columns}
        if odd := sorted(name for name in new if name in known or not can_be_column(name)):
            self._decline(table, odd, "no column can have such a name")
        if not (new := new - self._declined):
            return
        # What is set aside, or left out by a filter, asks for nothing.
        places = set(map(place_of, decoded.origins))
        stored = [message for message in messages if place_of(message) in places]
        told: dict[str, str] = self.decoder.types(stored) if hasattr(self.decoder, "types") else {}
        found = types_in({name: (name,) for name in new}, (message.value() for message in decoded.origins))
        found |= {name: kind for name, kind in {**told, **self._types}.items() if name in found}
        if found:
            self._to_add = found
            columns = ", ".join(f"{cut(name)} {kind}" for name, kind in found.items())
            raise TableChanged(f"{table} gets columns that the messages bring: {columns}")


class Router:
    """Hands each topic's messages to its own sink, all in the transaction of the unit.

    ``set_aside`` takes messages of which no row can be made, so that many of them cost no units of their own. ``find``
    makes the sink of a topic that is none of those given from its messages; with None they are nothing to any table.
    """

    def __init__(
        self,
        sinks: Mapping[str, TableSink],
        *,
        set_aside: Callable[[Unit, Bad], object] | None = None,
        find: Callable[[str, Sequence[Message]], TableSink | None] | None = None,
    ) -> None:
        self._sinks = dict(sinks)
        self._found: dict[str, TableSink] = {}
        self._set_aside = set_aside
        self._find = find

    def __call__(self, unit: Unit) -> None:
        """Write the messages of a unit, table by table in the order in which the topics were given.

        Those that were found follow by name, so that all workers lock their tables in one order.
        """
        connection = unit.connection  # also where no table is there yet: effects elsewhere there are none
        # What is tried alone is judged by who calls us.
        is_alone = len(unit.messages) == 1
        set_aside = None if self._set_aside is None or is_alone else partial(self._set_aside, unit)
        by_topic: dict[str | None, list[Message]] = {}
        for message in unit.messages:
            by_topic.setdefault(message.topic(), []).append(message)
        for topic in by_topic.keys() - self._sinks.keys() - self._found.keys():
            if self._find is None:
                raise TableError(f"no table for topic {topic}")
            if (sink := self._find(str(topic), by_topic[topic])) is not None:
                self._found = dict(sorted({**self._found, str(topic): sink}.items()))
        for topic, sink in {**self._sinks, **self._found}.items():
            if messages := by_topic.get(topic):
                sink.write(connection, messages, set_aside=set_aside, claim=unit.claim_many)
