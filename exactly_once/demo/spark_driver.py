"""Driver: the Spark job of the demo, orders from Kafka into a table and their count, by the sink or by plain JDBC.

It is given its order as a :mod:`.worker` is, for others can see a command line; it prints how far it is after each
micro-batch, and runs until it is ended.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from exactly_once.embedded import spark
from exactly_once.embedded.jars import fetched

from . import worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from spark_sink import SinkUnit

# Of a fixed version: what it is fetched from is checked against `jars.sha256`.
_DRIVER = "org.postgresql:postgresql:42.7.8"
_COLUMNS = ("id", "customer", "gross", "partition", "offset")
_COUNT = sql.SQL("UPDATE {}.total SET orders = orders + %s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(worker.Order):
    """What a driver is to do."""

    side: str
    bootstrap_servers: str
    conninfo: str
    jdbc_url: str
    topic: str
    schema: str
    checkpoint: str
    batch_messages: int


def jdbc() -> list[Path]:
    """Return the jars of Postgres' JDBC driver, fetching them the first time."""
    return list(fetched(_DRIVER, "postgresql-jdbc-42.7.8", "JDBC for Postgres").glob("postgresql*.jar"))


def orders(session: SparkSession, order: Order) -> DataFrame:
    """Read the topic as rows; a column comes from Python, so that tasks have Python workers."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  (an extra brings it)

    gross = F.udf(lambda net: None if net is None else net * 119 // 100, "bigint")  # with 19 % of tax
    source = session.readStream.format("kafka").options(
        **{"kafka.bootstrap.servers": order.bootstrap_servers, "subscribe": order.topic, "startingOffsets": "earliest"},
        maxOffsetsPerTrigger=str(order.batch_messages),
    )
    row = F.from_json(F.col("value").cast("string"), "id bigint, customer string, net bigint").alias("row")
    frame = source.load().select(row, "topic", "partition", "offset").select("row.*", "topic", "partition", "offset")
    return frame.withColumn("gross", gross("net")).drop("net")


def by_sink(order: Order) -> Callable[[DataFrame, int], None]:
    from spark_sink import PostgresSink  # noqa: PLC0415

    statement = _COUNT.format(sql.Identifier(order.schema)).as_string(None)

    def count(unit: SinkUnit) -> None:
        unit.execute(statement, [unit.rows])

    return PostgresSink(order.conninfo, table=f"{order.schema}.orders", group_id=order.schema, in_transaction=count)


def by_jdbc(order: Order) -> Callable[[DataFrame, int], None]:
    """Return what writes as the guides show it: append by JDBC, and a statement of one's own beside it."""

    def write(frame: DataFrame, _: int) -> None:
        frame.persist()  # it is read twice: written, and counted
        rows = frame.select(*_COLUMNS)
        rows.write.jdbc(order.jdbc_url, f"{order.schema}.orders", "append", {"driver": "org.postgresql.Driver"})
        with psycopg.connect(order.conninfo) as connection:
            connection.execute(_COUNT.format(sql.Identifier(order.schema)), [frame.count()])
        frame.unpersist()

    return write


def reached(progress: Any) -> int:
    """Sum up the offsets behind the last batch of a query."""
    ends = json.loads(progress.sources[0].endOffset)
    return sum(sum(partitions.values()) for partitions in ends.values())


def drive(line: str, _: worker.Injury) -> None:
    order = Order.from_line(line)
    settings = {
        "spark.jars": ",".join(map(str, [*spark.kafka_source(), *jdbc()])),
        "spark.driver.memory": "1g",
    }
    # Four tries of a task, as on a cluster: one is the default of a local master.
    with spark.session(order.schema, master="local[2,4]", settings=settings) as session:
        write = by_sink(order) if order.side == "exactly_once" else by_jdbc(order)
        writer = orders(session, order).writeStream.foreachBatch(write)
        query = writer.option("checkpointLocation", order.checkpoint).trigger(processingTime="0 seconds").start()
        last = -1
        while query.isActive:
            query.awaitTermination(1)
            if (progress := query.lastProgress) is not None and progress.batchId != last:
                last = progress.batchId
                sys.stdout.write(f"{reached(progress)}\n")
                sys.stdout.flush()
        query.awaitTermination()  # raises what ended it


if __name__ == "__main__":
    worker.serve(drive)
