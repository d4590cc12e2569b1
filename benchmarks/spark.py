"""The Spark sink beside what it competes with: counting, JDBC, COPY without a ledger, psql.

    python benchmarks/spark.py [--rows N] [--written N] [--rounds N] [--only PART]

Programs alternate on the same servers and the same Spark; every figure is a ratio or a difference of two of them,
the median over the rounds, because absolute rates say more about the machine than about the sink.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]
from common import by_turns, empty, filled_topic, make_tables, ratio, show, timed
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from exactly_once import embedded
from exactly_once.demo.spark_driver import jdbc
from exactly_once.embedded import spark
from exactly_once.writer import TableWriter
from exactly_once.writer.arrow import write_arrow
from spark_sink import PostgresSink
from spark_sink.attempt import tables

PARTITIONS = 4  # twice as many as tasks at once, and as many as the curve ends with
COLUMNS = ("id", "name", "value", "at")
TABLE = "CREATE TABLE sink (id bigint, name text, value float8, at timestamptz)"
PLACES = ("topic", "partition", "offset")

Program = Callable[[DataFrame, int], Any]


class Bench(NamedTuple):
    """The servers, Spark and a place for files."""

    session: SparkSession
    bootstrap_servers: str
    postgres: embedded.Postgres
    directory: Path
    topic: str

    @property
    def conninfo(self) -> str:
        return self.postgres.conninfo

    def sink(self, checkpoint: str | None, **options: Any) -> PostgresSink:
        group_id = uuid4().hex
        return PostgresSink(self.conninfo, table="sink", group_id=group_id, checkpoint_location=checkpoint, **options)


# From Kafka.


def from_kafka(bench: Bench, rounds: int) -> Iterator[str]:
    """One micro-batch of the whole topic, against counting it and against JDBC."""
    programs: dict[str, Callable[[str], Program]] = {
        "count()": lambda _: lambda frame, _: frame.count(),
        "sink, batch": bench.sink,
        "sink, partition": partial(bench.sink, transaction="partition"),
        "the same COPY without a ledger": lambda _: lambda frame, _: copied(bench, frame.repartition(1)),
        "JDBC, tuned": lambda _: lambda frame, _: by_jdbc(bench, frame, is_tuned=True),
    }
    runs = {name: partial(run, bench, make) for name, make in programs.items()}
    seconds = by_turns(runs, rounds, before=lambda: empty(bench.conninfo), warms_up=True)
    yield "| one micro-batch from Kafka | s | time over count() | time over tuned JDBC | rate over the same COPY |"
    yield "|---|---|---|---|---|"
    copy = "the same COPY without a ledger"
    for name, found in seconds.items():
        counted, jdbc = ratio(found, seconds["count()"]), ratio(found, seconds["JDBC, tuned"])
        yield f"| {name} | {statistics.median(found):.2f} | {counted} | {jdbc} | {ratio(seconds[copy], found)} |"


def run(bench: Bench, make: Callable[[str], Program]) -> float:
    """Run a query over the topic, which is one micro-batch; return the seconds in the function."""
    checkpoint = str(bench.directory / uuid4().hex)
    program, seconds = make(checkpoint), 0.0

    def measured(frame: DataFrame, batch_id: int) -> None:
        nonlocal seconds
        seconds += timed(lambda: program(frame, batch_id))

    writer = orders(bench).writeStream.foreachBatch(measured).option("checkpointLocation", checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination()
    return seconds


def orders(bench: Bench, **options: str) -> DataFrame:
    """Read the topic as rows."""
    source = bench.session.readStream.format("kafka").options(
        **{"kafka.bootstrap.servers": bench.bootstrap_servers, "subscribe": bench.topic, "startingOffsets": "earliest"},
        **options,
    )
    row = F.from_json(F.col("value").cast("string"), "id bigint, name string, value double, at timestamp").alias("row")
    return source.load().select(row, *PLACES).select("row.*", *PLACES)


# The ways to write.


def copied(bench: Bench, frame: DataFrame) -> None:
    """Binary COPY by our own writer, one transaction for each task, and no ledger."""
    conninfo = bench.conninfo

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        writer, rows = TableWriter("sink"), 0
        with psycopg.connect(conninfo) as connection:
            for table in tables(batches):
                rows += write_arrow(writer, connection, table)
        yield pa.RecordBatch.from_pydict({"rows": [rows]})

    frame.select(*COLUMNS).mapInArrow(write, "rows bigint").collect()


def by_jdbc(bench: Bench, frame: DataFrame, *, is_tuned: bool) -> None:
    """Spark's own JDBC writer, which gives no guarantee."""
    tuned = {"batchsize": "10000"} if is_tuned else {}
    frame.select(*COLUMNS).write.format("jdbc").mode("append").options(
        url=bench.postgres.jdbc_url + ("&reWriteBatchedInserts=true" if is_tuned else ""),
        dbtable="sink",
        driver="org.postgresql.Driver",
        **tuned,
    ).save()


def by_psql(bench: Bench, file: Path) -> None:
    """One ``psql \\copy`` of the same rows as CSV."""
    copy = f"\\copy sink FROM '{file}' WITH (FORMAT csv)"
    subprocess.run([bench.postgres.binary("psql"), bench.conninfo, "--quiet", "--command", copy], check=True)


def in_memory(bench: Bench, written: int) -> tuple[DataFrame, str]:
    """Make rows that lie in memory, and the checkpoint that Spark would have: as if they came from two partitions."""
    columns = ("id", "lpad(cast(id as string), 32, '0') name", "rand(1) value", "timestamp_seconds(id) at")
    places = ("'cached' topic", f"cast(id >= {written // 2} as int) partition", f"id % {written // 2} offset")
    # Two partitions: as many tasks as run at once.
    frame = bench.session.range(0, written, 1, 2).selectExpr(*columns, *places).persist()
    frame.count()
    return frame, checkpoint_of(bench, {"cached": {"0": written // 2, "1": written // 2}})


def write_path(bench: Bench, written: int, rounds: int) -> Iterator[str]:
    """Rows that lie in memory already, written by each way."""
    frame, checkpoint = in_memory(bench, written)
    empty(bench.conninfo)
    copied(bench, frame)
    file = bench.directory / "rows.csv"
    with (
        psycopg.connect(bench.conninfo) as connection,
        connection.cursor().copy("COPY sink TO STDOUT (FORMAT csv)") as rows,
        file.open("wb") as csv,
    ):
        csv.writelines(rows)
    programs: dict[str, Callable[[], object]] = {
        "psql \\copy, CSV": lambda: by_psql(bench, file),
        "writer, one task": lambda: copied(bench, frame.coalesce(1)),
        "writer, two tasks": lambda: copied(bench, frame),
        "sink, batch": lambda: bench.sink(checkpoint)(frame, 0),
        "sink, partition": lambda: bench.sink(checkpoint, transaction="partition")(frame, 0),
        "JDBC, tuned": lambda: by_jdbc(bench, frame, is_tuned=True),
        "JDBC, as it comes": lambda: by_jdbc(bench, frame, is_tuned=False),
    }
    runs = {name: partial(timed, program) for name, program in programs.items()}
    seconds = by_turns(runs, rounds, before=lambda: empty(bench.conninfo), warms_up=True)
    frame.unpersist()
    yield "| rows from memory | s | rate over psql | over tuned JDBC | over JDBC as it comes |"
    yield "|---|---|---|---|---|"
    for name, found in seconds.items():
        over = [ratio(seconds[other], found) for other in ("psql \\copy, CSV", "JDBC, tuned", "JDBC, as it comes")]
        yield f"| {name} | {statistics.median(found):.2f} | {' | '.join(over)} |"


def checkpoint_of(bench: Bench, ends: dict[str, dict[str, int]]) -> str:
    """Write down what Spark would have, had the rows come from Kafka in batch 0."""
    root = bench.directory / uuid4().hex
    starts = {topic: dict.fromkeys(numbers, 0) for topic, numbers in ends.items()}
    for name, text in (
        ("metadata", json.dumps({"id": str(uuid4())})),
        ("offsets/0", "\n".join(("v1", "{}", json.dumps(ends)))),
        ("sources/0/0", "\n".join(("\0v1", json.dumps(starts)))),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


# What it takes.


def fill(bootstrap_servers: str, rows: int) -> str:
    """Make a topic of JSON rows."""
    made = (
        {"id": number, "name": f"{number:032d}", "value": number / 7, "at": "2026-01-02T03:04:05Z"}
        for number in range(rows)
    )
    return filled_topic(bootstrap_servers, PARTITIONS, map(json.dumps, made))


@contextlib.contextmanager
def open_bench(servers: embedded.Servers, topic: str, *, cores: int) -> Iterator[Bench]:
    """Start Spark with so many tasks at once, and JDBC's driver."""
    jars = [*spark.kafka_source(), *jdbc()]
    settings = {
        "spark.driver.defaultJavaOptions": "",  # as Spark starts by itself: compiled well
        "spark.driver.memory": "4g",  # a million cached rows, and what JDBC buffers of them
        "spark.jars": ",".join(map(str, jars)),
        "spark.sql.streaming.numRecentProgressUpdates": "1000",
    }
    with (
        tempfile.TemporaryDirectory(prefix="spark-bench-") as directory,
        spark.session("bench", master=f"local[{cores}]", settings=settings) as session,
    ):
        yield Bench(session, servers.bootstrap_servers, servers.postgres, Path(directory), topic)


def curve(servers: embedded.Servers, topic: str, rounds: int) -> Iterator[str]:
    """``transaction="partition"`` with 1, 2 and 4 tasks at once."""
    yield "| tasks at once | s, count() | s, partition | s, batch |"
    yield "|---|---|---|---|"
    for cores in (1, 2, 4):
        with open_bench(servers, topic, cores=cores) as bench:
            makes: dict[str, Callable[[str], Program]] = {
                "count()": lambda _: lambda frame, _: frame.count(),
                "partition": partial(bench.sink, transaction="partition"),
                "batch": bench.sink,
            }
            runs = {name: partial(run, bench, make) for name, make in makes.items()}
            seconds = by_turns(runs, rounds, before=lambda: empty(bench.conninfo), warms_up=True)
            yield f"| {cores} | {' | '.join(f'{statistics.median(found):.2f}' for found in seconds.values())} |"


def main() -> None:
    """Start servers, run the parts that were asked for, print tables."""
    parts = ("kafka", "memory", "curve")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="messages in the topic")
    parser.add_argument("--written", type=int, default=1_000_000, help="rows written from memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=parts)
    args = parser.parse_args()
    wanted = [args.only] if args.only else parts
    with embedded.start(settings={"max_wal_size": "8GB"}) as servers:
        make_tables(servers.conninfo, TABLE)
        topic = fill(servers.bootstrap_servers, args.rows if {"kafka", "curve"} & set(wanted) else 0)
        with open_bench(servers, topic, cores=2) as bench:
            made = {
                "kafka": lambda: from_kafka(bench, args.rounds),
                "memory": lambda: write_path(bench, args.written, args.rounds),
            }
            show({name: made[name] for name in wanted if name in made})
        if "curve" in wanted:
            show({"curve": lambda: curve(servers, topic, args.rounds)})


if __name__ == "__main__":
    main()
