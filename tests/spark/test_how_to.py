"""The programs of docs/how-to/spark.md that are not the example's, and the README's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pyspark.sql.functions import count

from spark_sink import ExactlyOncePostgres, PostgresSink
from tests.spark.readme_program import write
from tests.support.spark import read_topic
from tests.support.topics import create_topic, produce
from tests.support.waiting import SPARK_SECONDS

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def test_an_aggregation_keeps_its_table_up_to_date(
    spark: SparkSession, bootstrap_servers: str, conninfo: str, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
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
        )
        per_customer = orders.groupBy("customer").count()
        writer = per_customer.writeStream.outputMode("update").foreachBatch(sink)
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        assert query.awaitTermination(SPARK_SECONDS)
        rows = db.execute("SELECT * FROM customer_orders ORDER BY 1").fetchall()
        assert rows == [(str(n), total // 5) for n in range(5)]
    db.execute("DROP TABLE customer_orders")


def test_rows_and_totals_are_written_in_one_transaction(
    spark: SparkSession, bootstrap_servers: str, conninfo: str, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    db.execute("CREATE TABLE orders (customer text)")
    db.execute("CREATE TABLE customer_totals (customer text PRIMARY KEY, orders bigint NOT NULL)")
    topic = create_topic(bootstrap_servers, 2)
    checkpoint = str(tmp_path / "checkpoint")
    produce(bootstrap_servers, topic, 50, 2)
    orders = read_topic(spark, bootstrap_servers, topic, maxOffsetsPerTrigger="25")
    customer = "cast(cast(cast(value as string) as int) % 5 as string) customer"
    orders = orders.selectExpr("topic", "partition", "offset", customer)
    sink = PostgresSink(
        conninfo,
        group_id="orders-and-totals",
        tables={
            "orders": {},
            "customer_totals": {"mode": "upsert", "key": ["customer"], "add": ["orders"]},
        },
    )

    def both(batch: DataFrame, batch_id: int) -> None:
        """Write the rows, and how many they are by customer."""
        totals = batch.groupBy("customer").agg(count("*").alias("orders"))
        sink.write({"orders": batch, "customer_totals": totals}, batch_id)

    writer = orders.writeStream.foreachBatch(both)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    assert query.awaitTermination(SPARK_SECONDS)
    assert db.execute("SELECT count(*) FROM orders").fetchone() == (50,)
    assert db.execute("SELECT orders FROM customer_totals").fetchall() == [(10,)] * 5
    db.execute("DROP TABLE orders, customer_totals")


def test_the_program_of_the_readme_writes(
    spark: SparkSession, bootstrap_servers: str, conninfo: str, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    db.execute("CREATE TABLE orders (item text)")
    topic = create_topic(bootstrap_servers, 2)
    produce(bootstrap_servers, topic, 50, 2)
    orders = read_topic(spark, bootstrap_servers, topic)
    orders = orders.selectExpr("topic", "partition", "offset", "cast(value as string) item")
    query = write(orders, conninfo, str(tmp_path / "checkpoint"))
    try:
        query.processAllAvailable()
        assert db.execute("SELECT count(DISTINCT item), count(*) FROM orders").fetchone() == (50, 50)
    finally:
        query.stop()
        db.execute("DROP TABLE orders")


def test_the_data_source_writes_streams_and_jobs(
    spark: SparkSession, bootstrap_servers: str, conninfo: str, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    db.execute('CREATE TABLE orders (partition int, "offset" bigint, item text)')
    db.execute("CREATE TABLE customers (id bigint)")
    topic = create_topic(bootstrap_servers, 2)
    checkpoint = str(tmp_path / "checkpoint")
    produce(bootstrap_servers, topic, 50, 2)
    session = spark
    orders = read_topic(spark, bootstrap_servers, topic)
    orders = orders.selectExpr("topic", "partition", "offset", "cast(value as string) item")
    session.dataSource.register(ExactlyOncePostgres)
    writer = orders.writeStream.format("exactly_once_postgres").options(
        conninfo=conninfo, table="orders", groupId="orders-to-table"
    )
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    assert query.awaitTermination(SPARK_SECONDS)
    assert db.execute("SELECT count(DISTINCT item), count(*) FROM orders").fetchone() == (50, 50)
    frame = spark.range(7)
    for _ in range(2):
        job = frame.write.format("exactly_once_postgres").options(
            conninfo=conninfo, table="customers", groupId="customers", ledger="batch-id", jobId="2026-11-21"
        )
        job.mode("append").save()
        assert db.execute("SELECT count(*) FROM customers").fetchone() == (7,)
    db.execute("DROP TABLE orders, customers")
