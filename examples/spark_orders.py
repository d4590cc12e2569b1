"""Stream orders from Kafka through Spark into Postgres, each once; kill it at any time and start it again.

    python examples/spark_orders.py [--orders N] [--directory DIRECTORY]

Brings its own Kafka, Postgres and, where no Java 17 or 21 is installed, Java:
``pip install 'kafka-exactly-once[demo,spark]'``. Servers and checkpoint keep their files in the directory, so that
the same command goes on where the last one was killed, and compares the table with the topic at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import psycopg
import tenacity
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from exactly_once import embedded
from exactly_once.embedded import spark
from exactly_once.ledger.migrate import migrate
from spark_sink import BatchReport, PostgresSink, SinkUnit

TOPIC, PARTITIONS = "orders", 3
TABLES = """
CREATE TABLE IF NOT EXISTS orders (id bigint, customer text, amount numeric(10, 2), partition int, "offset" bigint);
CREATE TABLE IF NOT EXISTS total (orders bigint);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT FROM total)
"""


def read(session: SparkSession, bootstrap_servers: str) -> DataFrame:
    """Read orders; topic, partition and offset go along to the sink."""
    source = session.readStream.format("kafka").options(
        **{"kafka.bootstrap.servers": bootstrap_servers, "subscribe": TOPIC, "startingOffsets": "earliest"},
        maxOffsetsPerTrigger="10000",
    )
    order = F.from_json(F.col("value").cast("string"), "id bigint, customer string, amount decimal(10, 2)")
    return (
        source.load()
        .select(order.alias("order"), "topic", "partition", "offset")
        .select("order.*", "topic", "partition", "offset")
    )


def count(unit: SinkUnit) -> None:
    """Write something of our own, in the transaction of the rows."""
    unit.execute("UPDATE total SET orders = orders + %s", [unit.rows])


def show(report: BatchReport) -> None:
    """Tell how far it is: on a terminal in one line."""
    is_live = sys.stdout.isatty()
    text = f"batch {report.batch_id}: {report.rows} orders"
    print(f"\r{text}" if is_live else text, end="" if is_live else "\n", flush=True)


def run(session: SparkSession, bootstrap_servers: str, conninfo: str, checkpoint: str) -> None:
    """Write what is in the topic and not yet in the table."""
    sink = PostgresSink(
        conninfo,
        table="orders",
        group_id="orders-to-table",
        bootstrap_servers=bootstrap_servers,
        in_transaction=count,
        on_report=show,
    )
    writer = read(session, bootstrap_servers).writeStream.foreachBatch(sink)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    sink.release()


def produce(bootstrap_servers: str, orders: int) -> None:
    """Fill the topic up: order n is in partition n % 3, behind those that are there already."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    if TOPIC not in admin.list_topics(timeout=30).topics:
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(30)
    producer = Producer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, "log_level": 3})
    for partition, end in enumerate(ends(bootstrap_servers)):
        for number in range(partition + PARTITIONS * end, orders, PARTITIONS):
            order = {"id": number, "customer": f"customer {number % 100}", "amount": f"{number % 1000}.50"}
            while True:
                try:
                    producer.produce(TOPIC, json.dumps(order), partition=partition)
                    break
                except BufferError:
                    producer.poll(1)
    producer.flush()


# The brokers of a topic that was just made take a moment to agree on its leaders.
@tenacity.retry(
    retry=tenacity.retry_if_exception_type(KafkaException),
    stop=tenacity.stop_after_delay(60),
    wait=tenacity.wait_fixed(0.5),
    reraise=True,
)
def ends(bootstrap_servers: str) -> list[int]:
    """Return where each partition ends."""
    client = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "nobody"})
    try:
        return [client.get_watermark_offsets(TopicPartition(TOPIC, n), timeout=30)[1] for n in range(PARTITIONS)]
    finally:
        client.close()


def check(bootstrap_servers: str, conninfo: str) -> NoReturn:
    """Compare the table with the topic; exit with 0 if they are the same."""
    wanted = sum(ends(bootstrap_servers))
    with psycopg.connect(conninfo) as connection:
        found = connection.execute("SELECT count(*), count(DISTINCT id), max(id) + 1 FROM orders").fetchone()
        total = connection.execute("SELECT orders FROM total").fetchone()
    assert found is not None
    rows, different, _ = found
    print(f"\n{wanted} orders in the topic; {rows} rows, {wanted - different} lost, {rows - different} doubled")
    sys.exit(found != (wanted, wanted, wanted) or total != (wanted,))


# The servers of a run that was killed take a moment to end.
@tenacity.retry(
    retry=tenacity.retry_if_exception_type(embedded.StartError),
    stop=tenacity.stop_after_delay(60),
    wait=tenacity.wait_fixed(1),
    reraise=True,
)
def start(directory: Path) -> embedded.Servers:
    """Start both servers on what they had."""
    postgres = embedded.Postgres(directory=directory / "postgres").start()
    try:
        return embedded.Servers(embedded.Kafka(directory=directory / "kafka").start(), postgres)
    except BaseException:
        postgres.close()
        raise


def main() -> None:
    """Run it all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--orders", type=int, default=200_000)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir(), "spark-orders"))
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    print(f"kill -9 {os.getpid()} when you like, and run it again; --directory {args.directory}", flush=True)
    with start(args.directory) as servers:
        with psycopg.connect(servers.conninfo, autocommit=True) as connection:
            migrate(connection)
            connection.execute(TABLES)
        produce(servers.bootstrap_servers, args.orders)
        print("starting Spark", flush=True)
        with spark.session("orders") as session:
            run(session, servers.bootstrap_servers, servers.conninfo, str(args.directory / "checkpoint"))
        check(servers.bootstrap_servers, servers.conninfo)


if __name__ == "__main__":
    main()
