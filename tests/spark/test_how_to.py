"""The programs of docs/how-to/spark.md that are not the example's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from tests.support.topics import create_topic, produce

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_an_aggregation_keeps_its_table_up_to_date(
    spark: SparkSession, bootstrap_servers: str, conninfo: str, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    from spark_sink import PostgresSink  # noqa: PLC0415
    from tests.support.spark import read_topic  # noqa: PLC0415

    db.execute("CREATE TABLE customer_orders (customer text PRIMARY KEY, count bigint NOT NULL)")
    topic = create_topic(bootstrap_servers, 2)
    checkpoint = str(tmp_path / "checkpoint")
    for total in (50, 100):
        produce(bootstrap_servers, topic, 50, 2, start=total - 50)
        orders = read_topic(spark, bootstrap_servers, topic)
        orders = orders.selectExpr("cast(cast(cast(value as string) as int) % 5 as string) customer")
        sink = PostgresSink(
            conninfo,
            table="customer_orders",
            group_id="orders-per-customer",
            mode="upsert",
            ledger="batch-id",
            checkpoint_location=checkpoint,
        )
        per_customer = orders.groupBy("customer").count()
        writer = per_customer.writeStream.outputMode("update").foreachBatch(sink)
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        assert query.awaitTermination(240)
        rows = db.execute("SELECT * FROM customer_orders ORDER BY 1").fetchall()
        assert rows == [(str(n), total // 5) for n in range(5)]
    db.execute("DROP TABLE customer_orders")
