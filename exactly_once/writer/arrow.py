"""Arrow: record batches as rows. Nothing is imported here: whoever has a batch has pyarrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from exactly_once.session import Connection

from .changes import Row
from .writer import TableWriter


class _Array(Protocol):
    def to_pylist(self) -> list[Any]:
        """Return the values as Python has them."""


class _Schema(Protocol):
    @property
    def names(self) -> list[str]:
        """The columns' names."""


class ArrowBatch(Protocol):
    """What a ``pyarrow.RecordBatch`` or ``pyarrow.Table`` has, as far as it is needed."""

    @property
    def schema(self) -> _Schema:
        """What the columns are called."""

    @property
    def columns(self) -> Sequence[_Array]:
        """The values."""


def rows_of(batch: ArrowBatch) -> list[Row]:
    """Turn a batch into rows; the names of its columns are ``batch.schema.names``."""
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def write_arrow(writer: TableWriter, connection: Connection, batch: ArrowBatch) -> int:
    """Write a batch, column by name, and return what :meth:`TableWriter.write` returns."""
    return writer.write(connection, rows_of(batch), columns=batch.schema.names)
