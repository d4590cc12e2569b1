"""Arrow: record batches into a table, as they are where pgpq and the types allow it, else as rows.

Nothing is imported here that an extra brings: whoever has a batch has pyarrow, and without pgpq rows are made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

from confluent_kafka import Message

from exactly_once.ledger.session import Connection

from .changes import Row
from .decoding import Decoded
from .errors import BadRow
from .table import Column
from .writer import TableWriter


class ArrowBatch(Protocol):
    """What a ``pyarrow.RecordBatch`` or ``pyarrow.Table`` has, as far as it is needed."""

    @property
    def schema(self) -> Any:
        """What the columns are called."""

    @property
    def columns(self) -> Sequence[Any]:
        """The values."""


def write_arrow(
    writer: TableWriter, connection: Connection, batch: ArrowBatch, *, origins: Sequence[Message] | None = None
) -> int:
    """Write a batch, column by name, and return what :meth:`TableWriter.write` returns."""
    names = batch.schema.names
    rows = Decoded(columns=names, origins=origins or (), make=lambda: iter(rows_of(batch)))
    encode = partial(_encode(), batch)
    count = len(batch.columns[0]) if names else 0
    return writer.write_encoded(connection, encode, rows, row_count=count, columns=names, origins=origins)


def rows_of(batch: ArrowBatch) -> list[Row]:
    """Turn a batch into rows; the names of its columns are ``batch.schema.names``.

    :raises BadRow: for a value that Python cannot hold, such as a timestamp beyond the year 9999.
    """
    columns: list[list[Any]] = []
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        # UTC for their time zone: in another one Python has not year 1, for one.
        values = array.cast(_in_utc(array.type)) if "tz=" in str(array.type) else array
        try:
            columns.append(list(values.to_pylist(maps_as_pydicts="strict")))
        except (ValueError, OverflowError, KeyError) as error:
            for row, value in enumerate(values):
                try:
                    value.as_py(maps_as_pydicts="strict")
                except (ValueError, OverflowError, KeyError) as reason:
                    told = f"{value.cast('string')}: " if str(value.type).startswith(("date", "timestamp")) else ""
                    raise BadRow(f"{told}{reason}", row=row, column=name) from error
            raise
    return list(zip(*columns, strict=True))


@cache
def _encode() -> Callable[[ArrowBatch, Sequence[Column]], list[bytes] | None]:
    try:
        module = importlib.import_module(".arrow_copy", __package__)
    except ImportError:
        return lambda _batch, _columns: None
    return module.encode  # type: ignore[no-any-return]


def _in_utc(kind: Any) -> Any:
    pa = importlib.import_module("pyarrow")
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_list(kind):
        return pa.list_(_in_utc(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_in_utc(kind.value_type))
    return kind
