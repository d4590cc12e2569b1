"""Kills drivers with -9 at random moments, under a query of each mode at once, and compares tables with the topic.

    python -m tests.spark.killing KILLS [SEED]

starts Kafka and Postgres, kills until each mode was struck so often, prints what became of it, and exits with 1 where
one lost or doubled anything. One driver runs a query of each mode; a kill strikes those that are writing a batch in
that moment: the sink was called and has not returned, or rows are staged and not published. The tables have no keys
that would hide anything, but those that sums are kept by; they are compared with the topic as a reader of its own
finds it.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from exactly_once import embedded
from exactly_once.demo.journal import scan
from exactly_once.embedded import spark
from exactly_once.ledger.migrate import migrate
from tests.support.spark import Driver, read_topic
from tests.support.topics import create_topic, produce

PARTITIONS = 3
A_ROUND, A_BATCH = 600, 60
"""Messages that come in for each driver, and how many of them make a batch: it is killed among ten of each mode."""
ROUNDS_A_KILL = 20
"""Drivers that are killed at most for each kill of each mode."""
ROWS = ("batch", "small", "partition", "source", "several")
"""Modes whose tables have a row for each message."""
SUMS = ("counted", "several_sums")
"""Modes whose tables have how many messages there are of each partition."""
SINKS = ("batch", "small", "partition", "several", "counted")
"""The queries with a sink; the one of the data source is the other."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong with the table of one mode."""

    mode: str
    lost: int
    doubled: int


def start(session: Any, bootstrap_servers: str, conninfo: str, topic: str, place: Path, *, a_batch: str) -> list[Any]:
    """Start a query of each mode, with so many messages a batch."""
    from spark_sink import ExactlyOncePostgres, PostgresSink  # noqa: PLC0415

    session.dataSource.register(ExactlyOncePostgres)

    def sink(group_id: str, **options: Any) -> PostgresSink:
        chosen = {"table": f"killed_{group_id}", "group_id": group_id, "small_batch": 0, **options}
        return PostgresSink(conninfo, **chosen)

    def told(mode: str, write: Callable[[Any, int], object]) -> Callable[[Any, int], None]:
        def function(frame: Any, batch_id: int) -> None:
            print("batch", mode, batch_id)
            write(frame, batch_id)
            print("wrote", mode, batch_id)

        return function

    sums = {"mode": "upsert", "key": ["partition"], "add": ["n"]}
    tables = {"killed_several": {}, "killed_several_sums": sums}
    several = sink("several", table=None, tables=tables)

    def write_several(frame: Any, batch_id: int) -> None:
        totals = frame.groupBy("partition").count().withColumnRenamed("count", "n")
        several.write({"killed_several": frame, "killed_several_sums": totals}, batch_id)

    def stream() -> Any:
        frame = read_topic(session, bootstrap_servers, topic, maxOffsetsPerTrigger=a_batch)
        return frame.select("topic", "partition", "offset")

    def writing(mode: str, frame: Any, write: Callable[[Any, int], object]) -> Any:
        return mode, frame.writeStream.foreachBatch(told(mode, write))

    counts = stream().groupBy("partition").count().withColumnRenamed("count", "n")
    counted = sink("counted", mode="upsert", ledger="batch-id")
    options = {"conninfo": conninfo, "table": "killed_source", "groupId": "source"}
    writers = [
        writing("batch", stream(), sink("batch")),
        writing("small", stream(), sink("small", small_batch=1000)),
        writing("partition", stream(), sink("partition", transaction="partition")),
        writing("several", stream(), write_several),
        ("counted", counts.writeStream.outputMode("update").foreachBatch(told("counted", counted))),
        ("source", stream().writeStream.format("exactly_once_postgres").options(**options)),
    ]
    return [
        writer.option("checkpointLocation", str(place / mode)).trigger(availableNow=True).start()
        for mode, writer in writers
    ]


def main(*arguments: str) -> None:
    """Run the queries until they have read what is there."""
    bootstrap_servers, conninfo, topic, place, a_batch = arguments
    with spark.session("killed", master="local[2,4]") as session:
        for query in start(session, bootstrap_servers, conninfo, topic, Path(place), a_batch=a_batch):
            query.awaitTermination()
        print("drained")


def create_tables(conninfo: str) -> None:
    """Make the tables of all modes."""
    with psycopg.connect(conninfo) as connection:
        for mode in ROWS:
            connection.execute(f'CREATE TABLE killed_{mode} (topic text, partition int, "offset" bigint)')
        for mode in SUMS:
            connection.execute(f"CREATE TABLE killed_{mode} (partition int PRIMARY KEY, n bigint)")


def kill_drivers(bootstrap_servers: str, conninfo: str, place: Path, *, kills: int, seed: int) -> list[Verdict]:
    """Kill drivers until each query was struck so often, let another driver finish, and compare."""
    chance = random.Random(seed)
    topic = create_topic(bootstrap_servers, PARTITIONS)
    create_tables(conninfo)
    arguments = ("-m", "tests.spark.killing", "drive", bootstrap_servers, conninfo, topic, str(place))
    struck = Counter(dict.fromkeys((*SINKS, "source"), 0))
    rounds = 0
    while min(struck.values()) < kills:
        assert rounds < ROUNDS_A_KILL * kills, f"too few kills strike a batch: {struck}"
        produce(bootstrap_servers, topic, A_ROUND, PARTITIONS, start=rounds * A_ROUND)
        rounds += 1
        aim = min(struck, key=lambda query: (struck[query], chance.random()))
        with psycopg.connect(conninfo, autocommit=True) as db, Driver(*arguments, str(A_BATCH)) as driver:
            left = staged_runs(db)
            driver.wait("batch")
            time.sleep(chance.uniform(0, 6))  # at any moment of the batches that follow
            while driver.status is None and aim not in writing_now(driver, staged_runs(db) - left):
                time.sleep(0.002)  # a driver that has drained all of it ends, and strikes nothing
            if driver.status is not None:
                driver.wait("drained")
            driver.kill(everything=chance.random() < 0.5)
            hit = writing_now(driver, staged_runs(db) - left)
            struck.update(hit)
            print(f"kill {rounds} struck {', '.join(hit) or 'none'}; so far {dict(struck)}", flush=True)
    with Driver(*arguments, str(rounds * A_ROUND)) as driver:  # what was left over, in few batches
        driver.wait("drained", 600)
        assert driver.wait_ended() == 0
    return compare(bootstrap_servers, conninfo, topic)


def staged_runs(db: psycopg.Connection[Any]) -> set[Any]:
    """Return the runs of the data source of which rows are staged and not published."""
    return set(db.execute("SELECT DISTINCT run_id FROM exactly_once.spark_stage WHERE group_id = 'source'").fetchall())


def writing_now(driver: Driver, staged: set[Any]) -> list[str]:
    """Return the queries that are within a batch, or were when their driver was killed."""
    words = [line.split() for line in driver.lines]
    last = {line[1]: line[0] for line in words if line[0] in ("batch", "wrote")}
    return [*(query for query in SINKS if last.get(query) == "batch"), *(["source"] if staged else [])]


def compare(bootstrap_servers: str, conninfo: str, topic: str) -> list[Verdict]:
    """Compare the tables with the topic; the ledger is not looked at."""
    messages = {(record.partition, record.offset) for record in scan(bootstrap_servers, topic)}
    wanted = Counter(partition for partition, _ in messages)
    verdicts = []
    with psycopg.connect(conninfo) as connection:
        for mode in ROWS:
            found = Counter(connection.execute(f'SELECT partition, "offset" FROM killed_{mode}').fetchall())
            verdicts.append(Verdict(mode, len(messages - found.keys()), found.total() - len(found)))
        for mode in SUMS:
            sums: Counter[int] = Counter(dict(connection.execute(f"SELECT partition, n FROM killed_{mode}").fetchall()))
            verdicts.append(Verdict(mode, (wanted - sums).total(), (sums - wanted).total()))
    return verdicts


def run(kills: int, seed: int) -> int:
    """Start the servers, kill, and tell."""
    with embedded.start() as servers, tempfile.TemporaryDirectory() as place:
        with psycopg.connect(servers.conninfo, autocommit=True) as connection:
            migrate(connection)
        verdicts = kill_drivers(servers.bootstrap_servers, servers.conninfo, Path(place), kills=kills, seed=seed)
    for verdict in verdicts:
        print(verdict)
    return int(any(verdict.lost or verdict.doubled for verdict in verdicts))


if __name__ == "__main__":
    if sys.argv[1] == "drive":
        main(*sys.argv[2:])
    else:
        sys.exit(run(int(sys.argv[1]), int((sys.argv[2:] or ["1"])[0])))
