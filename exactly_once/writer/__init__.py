"""The table writer: rows into a Postgres table, fast and unchanged, in a transaction that somebody else commits.

    writer = TableWriter("bank.payment", mode="upsert")
    for unit in consumer:
        with unit:
            writer.write(unit.connection, [(m.offset(), m.value()) for m in unit.messages])

Module map: :mod:`.table` reads the catalogue; :mod:`.codecs` (and :mod:`.numbers`, :mod:`.texts`, :mod:`.times`) know
what a column takes; :mod:`.plan` looks at rows and encodes them; :mod:`.changes` makes one change of several;
:mod:`.statements` and :mod:`.upsert` talk to Postgres; :mod:`.decoding` and its neighbours turn messages into rows.
:mod:`.claiming` leaves out events that came before. :mod:`.arrow` takes record batches, and :mod:`.arrow_copy` those
that need not become rows.
"""

from __future__ import annotations

from .changes import MISSING, Tombstone
from .decoding import Decoded, Decoder
from .errors import BadRow, TableChanged, TableError
from .raw import FunctionDecoder, RawDecoder
from .sink import Router, TableSink
from .table import Column, Table
from .writer import TableWriter

__all__ = [
    "MISSING",
    "BadRow",
    "Column",
    "Decoded",
    "Decoder",
    "FunctionDecoder",
    "RawDecoder",
    "Router",
    "Table",
    "TableChanged",
    "TableError",
    "TableSink",
    "TableWriter",
    "Tombstone",
]
