"""The Spark data source beside the sink of foreachBatch, counting, and Spark's own JDBC writer.

    python benchmarks/spark_source.py [--rows N] [--written N] [--batches N] [--rounds N] [--only PART]

Programs alternate on the same servers and the same Spark; the first round, in which Java compiles, is left out. What is
measured of a stream is the whole trigger, as Spark itself reports it: planning, reading, writing, commit. Every figure
beside the seconds is a ratio or a difference of two programs of one round, the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
from common import T, by_turns, empty, make_tables, ratio, show, timed
from pyspark.sql import DataFrame
from spark import TABLE, Bench, by_jdbc, fill, in_memory, open_bench, orders

from exactly_once import embedded
from spark_sink import ExactlyOncePostgres

WARM_UP = 5
"""Micro-batches at the start of each query that meet everything for the first time."""

Writer = Any
"""What ``writeStream`` and ``write`` give; the checkpoint is set by who runs it."""
Program = Callable[[Writer, str], Writer]
"""Says where a stream goes; it is told the checkpoint."""


def source(bench: Bench, writer: Writer) -> Writer:
    """Write by the data source, for a group of its own."""
    options = {"conninfo": bench.conninfo, "table": "sink", "groupId": uuid4().hex}
    return writer.format("exactly_once_postgres").options(**options)


def by_sink(bench: Bench, **options: Any) -> Program:
    """Write by foreachBatch."""
    return lambda writer, checkpoint: writer.foreachBatch(bench.sink(checkpoint, **options))


def by_jdbc_in_batches(bench: Bench) -> Program:
    """Write by foreachBatch and JDBC, which gives no guarantee."""
    return lambda writer, _: writer.foreachBatch(lambda frame, _: by_jdbc(bench, frame, is_tuned=True))


def counted(writer: Writer, _: str) -> Writer:
    """Read all, write nothing."""
    return writer.foreachBatch(lambda frame, _: frame.count())


def noop(writer: Writer, _: str = "") -> Writer:
    """Read all and make every row, for Spark's sink that drops them."""
    return writer.format("noop")


# One large batch, from Kafka.


def from_kafka(bench: Bench, rows: int, rounds: int) -> Iterator[str]:
    """One micro-batch of the whole topic."""
    programs: dict[str, Program] = {
        "count()": counted,
        "noop": noop,
        "data source": lambda writer, _: source(bench, writer),
        "sink, batch": by_sink(bench),
        "sink, partition": by_sink(bench, transaction="partition"),
        "JDBC, tuned": by_jdbc_in_batches(bench),
    }
    bench = bench._replace(topic=fill(bench.bootstrap_servers, rows))

    def run(name: str) -> float:
        seconds = sum(triggers(bench, programs[name])) / 1000
        check(bench, 0 if name in ("count()", "noop") else rows)
        return seconds

    seconds = alternated(bench, programs, run, rounds)
    yield from compared(f"one micro-batch of {rows:,} from Kafka", seconds, ("count()", "sink, batch", "JDBC, tuned"))


def triggers(bench: Bench, program: Program, **options: str) -> list[int]:
    """Run a query over the topic; return the milliseconds of its triggers."""
    checkpoint = str(bench.directory / uuid4().hex)
    writer = program(orders(bench, **options).writeStream, checkpoint).option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return [p["durationMs"]["triggerExecution"] for p in query.recentProgress if "addBatch" in p["durationMs"]]


# One batch job, from memory.


def from_memory(bench: Bench, written: int, rounds: int) -> Iterator[str]:
    """A cached frame, written as a job."""
    frame, checkpoint = in_memory(bench, written)
    programs: dict[str, Callable[[DataFrame], object]] = {
        "noop": lambda frame: noop(frame.write).mode("overwrite").save(),
        "data source": lambda frame: source(bench, frame.write).mode("append").save(),
        "sink, batch": lambda frame: bench.sink(checkpoint)(frame, 0),
        "sink, partition": lambda frame: bench.sink(checkpoint, transaction="partition")(frame, 0),
        "JDBC, tuned": lambda frame: by_jdbc(bench, frame, is_tuned=True),
    }

    def run(name: str) -> float:
        seconds = timed(lambda: programs[name](frame))
        check(bench, 0 if name == "noop" else written)
        return seconds

    seconds = alternated(bench, programs, run, rounds)
    frame.unpersist()
    yield from compared(f"a job of {written:,} cached rows", seconds, ("sink, batch", "sink, partition", "JDBC, tuned"))


# Small batches.


def small_batches(bench: Bench, batches: int, rounds: int) -> Iterator[str]:
    """Micro-batches of 1,000 rows, against Spark's sink that drops them."""
    programs: dict[str, Program] = {
        "noop": noop,
        "toArrow()": lambda writer, _: writer.foreachBatch(
            lambda frame, _: frame.toArrow()
        ),  # what the sink begins with
        "data source": lambda writer, _: source(bench, writer),
        "sink, batch": by_sink(bench),
        "sink, partition": by_sink(bench, transaction="partition"),
        "sink, by a task": by_sink(bench, small_batch=0),
    }
    bench = bench._replace(topic=fill(bench.bootstrap_servers, 1000 * batches))

    def run(name: str) -> tuple[float, float]:
        found = triggers(bench, programs[name], maxOffsetsPerTrigger="1000")
        check(bench, 0 if name in ("noop", "toArrow()") else 1000 * batches)
        assert len(found) == batches, f"{name}: {len(found)} batches"
        tail = statistics.quantiles(found[WARM_UP:], n=10, method="inclusive")[-1]
        return statistics.median(found[WARM_UP:]), tail

    kinds: dict[str, list[tuple[float, ...]]] = {
        name: list(zip(*found, strict=True)) for name, found in alternated(bench, programs, run, rounds).items()
    }
    yield "| micro-batch of 1,000 rows | median ms | added to noop | p90 ms | added to noop |"
    yield "|---|---|---|---|---|"
    for name, found in kinds.items():
        cells = [f"{statistics.median(a):.0f} | {added(a, b)}" for a, b in zip(found, kinds["noop"], strict=True)]
        yield f"| {name} | {' | '.join(cells)} |"


# What it takes.


def alternated(bench: Bench, programs: Iterable[str], run: Callable[[str], T], rounds: int) -> dict[str, list[T]]:
    """Run each program by its name into an empty table, round by round, the first of which is left out."""
    runs = {name: partial(run, name) for name in programs}
    return by_turns(runs, rounds, before=lambda: empty(bench.conninfo), warms_up=True)


def compared(title: str, seconds: dict[str, list[float]], others: tuple[str, ...]) -> Iterator[str]:
    """Make a table of programs, each over some of the others."""
    yield f"| {title} | s | {' | '.join(f'time over {other}' for other in others)} |"
    yield f"|---|---|{'---|' * len(others)}"
    for name, found in seconds.items():
        cells = [ratio(found, seconds[other]) for other in others]
        yield f"| {name} | {statistics.median(found):.2f} | {' | '.join(cells)} |"


def added(left: Sequence[float], right: Sequence[float]) -> str:
    """Tell the median of the differences of one round each, and their range."""
    found = [a - b for a, b in zip(left, right, strict=True)]
    return f"{statistics.median(found):+.0f} [{min(found):+.0f} to {max(found):+.0f}]"


def check(bench: Bench, rows: int) -> None:
    """See that a program has written what it is measured by."""
    with psycopg.connect(bench.conninfo) as connection:
        found = connection.execute("SELECT count(*) FROM sink").fetchone()
    assert found == (rows,), f"{found} rows in the table, not {rows}"


def main() -> None:
    """Start servers, run the parts that were asked for, print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="messages in the topic")
    parser.add_argument("--written", type=int, default=1_000_000, help="rows written from memory; an even number")
    parser.add_argument("--batches", type=int, default=60, help="micro-batches of 1,000 rows")
    parser.add_argument("--rounds", type=int, default=5, help="rounds behind the first, which is left out")
    parser.add_argument("--only", choices=("kafka", "memory", "small"))
    args = parser.parse_args()
    if args.batches < WARM_UP + 2:
        parser.error(f"--batches must be {WARM_UP + 2} at least: the first {WARM_UP} are left out")
    with embedded.start(settings={"max_wal_size": "8GB"}) as servers:
        make_tables(servers.conninfo, TABLE)
        with open_bench(servers, "", cores=2) as bench:
            bench.session.dataSource.register(ExactlyOncePostgres)
            made = {
                "kafka": lambda: from_kafka(bench, args.rows, args.rounds),
                "memory": lambda: from_memory(bench, args.written, args.rounds),
                "small": lambda: small_batches(bench, args.batches, args.rounds),
            }
            show(made, args.only)


if __name__ == "__main__":
    main()
