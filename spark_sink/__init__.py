"""Spark sink: micro-batches of Structured Streaming into Postgres, each row of Kafka once.

    from spark_sink import PostgresSink

    sink = PostgresSink(conninfo, table="orders", group_id="orders", checkpoint_location=path)
    frame.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()

Module map: :mod:`.sink` is what Spark calls, on the driver. :mod:`.offset_log` reads which offsets a batch covers and
:mod:`.ranges` compares them with the ledger; :mod:`.owners` acquires rows of the ledger, once a run; :mod:`.frame`
checks columns. In the tasks :mod:`.by_batch` and :mod:`.by_partition` write, each through an :mod:`.attempt`, and
:mod:`.screen` looks at every row's offset. :mod:`.batch_ledger` counts batch ids for aggregations.
"""

from __future__ import annotations

from .errors import FrameError, IncompleteInput, LedgerBehindCheckpoint, QueryChanged, RowsOutOfOrder
from .report import BatchReport
from .sink import PostgresSink
from .unit import SinkUnit

__all__ = [
    "BatchReport",
    "FrameError",
    "IncompleteInput",
    "LedgerBehindCheckpoint",
    "PostgresSink",
    "QueryChanged",
    "RowsOutOfOrder",
    "SinkUnit",
]
