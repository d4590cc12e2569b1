"""Spark sink: micro-batches of Structured Streaming into Postgres, each row of Kafka once.

    from spark_sink import PostgresSink

    sink = PostgresSink(conninfo, table="orders", group_id="orders")
    frame.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()

Module map: :mod:`.sink` is what Spark calls, on the driver, and :mod:`.run` what it does for each batch.
:mod:`.stream_query` asks Spark for the query that calls, and refuses plans that cannot be exact. :mod:`.offset_log`
reads which offsets a batch covers and :mod:`.ranges` compares them with the ledger; :mod:`.owners` acquires rows of the
ledger, once a run; :mod:`.frame` checks columns. :mod:`.tasks` brings rows to an :mod:`.attempt`, which writes them in
one transaction, and :mod:`.offset_filter` looks at every row's offset.

:mod:`.data_source` is the other way, ``format("exactly_once_postgres")``: tasks put rows into :mod:`.staging`, and a
:mod:`.publication` writes, by such an attempt, what Spark has counted.
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
