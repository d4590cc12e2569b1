"""The README's program, to be run by a test."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from spark_sink import PostgresSink


def write(orders: DataFrame, conninfo: str, checkpoint: str) -> StreamingQuery:
    sink = PostgresSink(conninfo, table="orders", group_id="orders-to-table")
    return orders.writeStream.foreachBatch(sink).option("checkpointLocation", checkpoint).start()
