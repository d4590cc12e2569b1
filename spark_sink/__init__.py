"""Spark sink: micro-batches of Structured Streaming into Postgres, each row of Kafka once.

    from spark_sink import PostgresSink

    sink = PostgresSink(conninfo, table="orders", group_id="orders")
    frame.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()

The other way is :mod:`.data_source`, ``format("exactly_once_postgres")``. Which file does what is in
docs/architecture.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import FrameError, IncompleteInput, LedgerBehindCheckpoint, QueryChanged, RowsOutOfOrder, StageLost
from .report import BatchReport, SinkUnit
from .sink import PostgresSink

if TYPE_CHECKING:
    from .data_source import ExactlyOncePostgres

__all__ = [
    "BatchReport",
    "ExactlyOncePostgres",
    "FrameError",
    "IncompleteInput",
    "LedgerBehindCheckpoint",
    "PostgresSink",
    "QueryChanged",
    "RowsOutOfOrder",
    "SinkUnit",
    "StageLost",
]


def __getattr__(name: str) -> Any:
    """Import the data source when it is asked for, because it needs pyspark."""
    if name != "ExactlyOncePostgres":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(".data_source", __name__).ExactlyOncePostgres
    except ImportError as error:
        raise ImportError(f"the data source needs pyspark 4.0 or newer: {error}") from error
