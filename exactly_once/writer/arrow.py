"""Arrow: record batches into a table, as they are where pgpq and the types allow it, else as rows.

Nothing is imported here that an extra brings: whoever has a batch has pyarrow, and without pgpq rows are made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Protocol

from confluent_kafka import Message

from exactly_once.ledger.session import Connection

from .changes import Row
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
    encode = partial(_encode(), batch)
    return writer.write_encoded(connection, encode, _Rows(batch), columns=batch.schema.names, origins=origins)


def rows_of(batch: ArrowBatch) -> list[Row]:
    """Turn a batch into rows; the names of its columns are ``batch.schema.names``.

    :raises BadRow: for a value that Python cannot hold, such as a timestamp beyond the year 9999.
    """
    named = zip(batch.schema.names, batch.columns, strict=True)
    return list(zip(*(_values(name, array) for name, array in named), strict=True))


class _Rows:
    """The rows of a batch, made when somebody wants them."""

    def __init__(self, batch: ArrowBatch) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Row]:
        return iter(rows_of(self._batch))


@cache
def _encode() -> Callable[[ArrowBatch, Sequence[Column]], list[bytes] | None]:
    try:
        module = importlib.import_module(".arrow_copy", __package__)
    except ImportError:
        return lambda _batch, _columns: None
    return module.encode  # type: ignore[no-any-return]


def _values(name: str, array: Any) -> list[Any]:
    array = _in_utc(array)
    try:
        return list(array.to_pylist(maps_as_pydicts="strict"))
    except (ValueError, OverflowError, KeyError) as error:
        for row, value in enumerate(array):
            try:
                value.as_py(maps_as_pydicts="strict")
            except (ValueError, OverflowError, KeyError) as reason:
                raise BadRow(str(reason), row=row, column=name) from error
        raise


def _in_utc(array: Any) -> Any:
    """Give instants UTC for their time zone: in another one Python has not all that Postgres has, such as year 1."""
    kind = str(array.type)
    if "tz=" not in kind:
        return array
    pa = importlib.import_module("pyarrow")

    def utc(kind: Any) -> Any:
        if pa.types.is_timestamp(kind) and kind.tz is not None:
            return pa.timestamp(kind.unit, "UTC")
        if pa.types.is_list(kind):
            return pa.list_(utc(kind.value_type))
        if pa.types.is_large_list(kind):
            return pa.large_list(utc(kind.value_type))
        return kind

    return array.cast(utc(array.type))
