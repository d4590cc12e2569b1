"""Copy a topic into a table on the Spark of docker/compose.yaml, each message once, until it is stopped.

    spark-submit --master spark://spark-master:7077 copy_topic.py TOPIC TABLE

The table has the columns ``topic text, partition integer, "offset" bigint, value bytea``; others stay as they are by
default. ``exactly-once migrate`` has to be run before.
"""

from __future__ import annotations

import argparse
import logging

from pyspark.sql import SparkSession

from spark_sink import PostgresSink


def main() -> None:
    """Run one query."""
    options = arguments()
    group_id = options.group_id or f"{options.topic}-to-{options.table}"
    checkpoint = f"/tmp/checkpoints/{group_id}"  # noqa: S108  (in the driver's container, to try it)
    logging.basicConfig(level=logging.INFO)
    session = SparkSession.builder.appName(group_id).getOrCreate()
    session.sparkContext.setLogLevel("WARN")
    messages = session.readStream.format("kafka").options(
        **{
            "kafka.bootstrap.servers": options.bootstrap_servers,
            "kafka.isolation.level": "read_committed",
            "startingOffsets": "earliest",
            "subscribe": options.topic,
        }
    )
    sink = PostgresSink(
        options.conninfo,
        table=options.table,
        group_id=group_id,
        bootstrap_servers=options.bootstrap_servers,
        checkpoint_location=checkpoint,
        transaction=options.transaction,
        small_batch=options.small_batch,
    )
    rows = messages.load().select("topic", "partition", "offset", "value")
    rows.writeStream.foreachBatch(sink).option("checkpointLocation", checkpoint).start().awaitTermination()


def arguments() -> argparse.Namespace:
    """Read the command line; servers are those of the profile `minimal`."""
    parser = argparse.ArgumentParser(description="Copy a topic into a table.")
    parser.add_argument("topic")
    parser.add_argument("table")
    parser.add_argument("--group-id")
    parser.add_argument("--transaction", choices=["batch", "partition"], default="batch")
    parser.add_argument("--small-batch", type=int, default=1000)
    parser.add_argument("--bootstrap-servers", default="kafka:19092")
    parser.add_argument("--conninfo", default="postgresql://postgres@postgres/postgres")
    return parser.parse_args()


if __name__ == "__main__":
    main()
