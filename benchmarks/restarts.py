"""What a restart costs: how long partitions pause while workers are restarted under load.

    python benchmarks/restarts.py [--rounds N] [--kills N] [--only NAME]

Three workers, processes of their own, apply a steady load. Each is restarted in turn, as a StatefulSet
does it: SIGTERM, wait for its end, start it again, wait until it is ready. A pause is the longest time between two
commits of a partition around one restart. Then workers are killed with -9 and started again under their instance id.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import psycopg
from common import empty, make_tables, make_topic, show
from confluent_kafka import Producer

from exactly_once import ExactlyOnceConsumer, Unit, embedded

PARTITIONS = 6
WORKERS = 3
RATE = 600
"""Messages a second, over all partitions in turn."""
COOPERATIVE = {"partition.assignment.strategy": "cooperative-sticky"}
NEW = {"group.protocol": "consumer"}

# Name, settings of the workers, whether they are static members, and the heartbeat in milliseconds.
VARIANTS: tuple[tuple[str, dict[str, Any], bool, int], ...] = (
    ("cooperative-sticky, heartbeat 500 ms", COOPERATIVE, False, 500),
    ("cooperative-sticky, heartbeat 3 s (default)", COOPERATIVE, False, 3000),
    ("cooperative-sticky, static members", COOPERATIVE, True, 3000),
    ("group.protocol=consumer, heartbeat 500 ms", NEW, False, 500),
    ("group.protocol=consumer, heartbeat 5 s (default)", NEW, False, 5000),
)


# One worker process.


def work(config: Mapping[str, Any]) -> None:
    """Consume until SIGTERM, and say when it is ready."""
    consumer = ExactlyOnceConsumer(config["kafka"], conninfo=config["conninfo"], name=config["name"])
    threading.Thread(target=tell_ready, args=(consumer,), daemon=True).start()

    def handler(unit: Unit) -> None:
        rows = [(message.partition(), message.offset(), config["name"]) for message in unit.messages]
        unit.copy("sink", ["p", "o", "worker"], rows)

    with consumer:
        consumer.subscribe([config["topic"]])
        consumer.run(handler)


def tell_ready(consumer: ExactlyOnceConsumer) -> None:
    """Print a line once partitions are read from."""
    while not (consumer.health().is_ready and consumer.health().owned):
        time.sleep(0.005)
    print("ready", flush=True)


# The one who restarts them.


class Fleet:
    """Workers of one group."""

    def __init__(self, bootstrap_servers: str, conninfo: str, kafka: Mapping[str, Any], *, is_static: bool) -> None:
        self.conninfo = conninfo
        self.topic = make_topic(bootstrap_servers, PARTITIONS)
        self._kafka = {"bootstrap.servers": bootstrap_servers, "group.id": self.topic, **kafka}
        self._is_static = is_static
        self._started = 0
        self.workers: list[subprocess.Popen[str]] = []
        self.names: list[str] = []

    def start(self, place: int) -> subprocess.Popen[str]:
        """Start a worker at one of the three places."""
        self._started += 1
        name = f"{place}-{self._started}"
        kafka = self._kafka | ({"group.instance.id": str(place)} if self._is_static else {})
        config = {"kafka": kafka, "conninfo": self.conninfo, "topic": self.topic, "name": name}
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(config)], stdout=subprocess.PIPE, text=True
        )
        if place < len(self.workers):
            self.workers[place], self.names[place] = process, name
        else:
            self.workers.append(process)
            self.names.append(name)
        return process

    def restart(self, place: int, settle_seconds: float) -> tuple[float, float]:
        """Restart a worker in order; return the time span."""
        began = time.time()
        self.workers[place].send_signal(signal.SIGTERM)
        assert self.workers[place].wait(60) == 0
        wait_ready(self.start(place))
        time.sleep(settle_seconds)
        return began, time.time()

    def kill(self, place: int) -> float:
        """Kill a worker, start it again, and return the seconds until the first commit of the new one."""
        began = time.time()
        self.workers[place].kill()
        self.workers[place].wait(10)
        wait_ready(self.start(place))
        time.sleep(1)
        query = "SELECT extract(epoch FROM min(pg_xact_commit_timestamp(xmin))) FROM sink WHERE worker = %s"
        with psycopg.connect(self.conninfo) as connection:
            row = connection.execute(query, [self.names[place]]).fetchone()
        assert row is not None
        return float(row[0]) - began

    def pauses(self, began: float, ended: float) -> list[float]:
        """Return for each partition the longest time between two commits in a time span."""
        query = """
            SELECT p, array_agg(DISTINCT extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8) FROM sink
            WHERE pg_xact_commit_timestamp(xmin) BETWEEN to_timestamp(%s) AND to_timestamp(%s) GROUP BY p
        """
        with psycopg.connect(self.conninfo) as connection:
            found = connection.execute(query, [began - 1, ended]).fetchall()
        assert len(found) == PARTITIONS, f"{PARTITIONS - len(found)} partitions paused all the time"
        return [max(b - a for a, b in itertools.pairwise(times)) for _, times in found]

    def end(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.kill()
            worker.wait(10)


def wait_ready(worker: subprocess.Popen[str]) -> None:
    """Wait until a worker says so."""
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"


@contextlib.contextmanager
def fleet(kafka: embedded.Kafka, conninfo: str, settings: Mapping[str, Any], *, is_static: bool) -> Iterator[Fleet]:
    """Start the workers and the load."""
    empty(conninfo)
    made = Fleet(kafka.bootstrap_servers, conninfo, settings, is_static=is_static)
    stop = threading.Event()
    load = threading.Thread(target=produce, args=(kafka.bootstrap_servers, made.topic, stop))
    load.start()
    try:
        for place in range(WORKERS):
            wait_ready(made.start(place))
        time.sleep(10)  # every member has had its share by then
        yield made
    finally:
        made.end()
        stop.set()
        load.join()


def produce(bootstrap_servers: str, topic: str, stop: threading.Event) -> None:
    """Produce at a steady rate."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 0})
    began, number = time.perf_counter(), 0
    while not stop.is_set():
        while number < (time.perf_counter() - began) * RATE:
            producer.produce(topic, b"x" * 100, partition=number % PARTITIONS)
            number += 1
        producer.poll(0.002)
    producer.flush(10)


def percentiles(values: list[float]) -> str:
    """Write median, p99 and the largest of some seconds as cells of a table."""
    values = sorted(values)
    p99 = values[min(len(values) - 1, int(len(values) * 0.99))]
    return f"{statistics.median(values):.2f} s | {p99:.2f} s | {values[-1]:.2f} s | {len(values)} |"


def rolling(conninfo: str, rounds: int, only: str | None) -> Iterator[str]:
    """Restart every worker in turn, several times, under each protocol."""
    yield "| rolling restart | pause of a partition, median | p99 | max | n |"
    yield "|---|---|---|---|---|"
    for name, settings, is_static, heartbeat_ms in VARIANTS:
        if only is not None and only not in name:
            continue
        broker = {"group.consumer.heartbeat.interval.ms": str(heartbeat_ms)}  # there the broker decides
        client = settings if settings is NEW else settings | {"heartbeat.interval.ms": heartbeat_ms}
        settle_seconds = 1 + 2 * heartbeat_ms / 1000  # a change is over once every member has heard of it
        with embedded.Kafka(properties=broker) as kafka, fleet(kafka, conninfo, client, is_static=is_static) as made:
            spans = [made.restart(place, settle_seconds) for _ in range(rounds) for place in range(WORKERS)]
            pauses = [pause for span in spans for pause in made.pauses(*span)]
        yield f"| {name} | {percentiles(pauses)}"


def killing(conninfo: str, kills: int) -> Iterator[str]:
    """Kill workers and start them again under their instance id."""
    yield "| kill -9, then restart | kill to first new commit, median | p99 | max | n |"
    yield "|---|---|---|---|---|"
    with embedded.Kafka() as kafka, fleet(kafka, conninfo, COOPERATIVE, is_static=True) as made:
        seconds = [made.kill(number % WORKERS) for number in range(kills)]
    yield f"| same group.instance.id (classic), session time-out 45 s | {percentiles(seconds)}"


def main() -> None:
    """Be a worker, or start servers and run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--only", help="run only the variants whose name contains this; 'kill' for the kills")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker))
        return
    with embedded.Postgres(settings={"track_commit_timestamp": "on"}) as postgres:
        make_tables(postgres.conninfo, "CREATE TABLE sink (p int4, o int8, worker text)")
        print(f"{os.cpu_count()} cores; {WORKERS} workers, {PARTITIONS} partitions, {RATE} messages/s", flush=True)
        parts = {
            "rolling": lambda: rolling(postgres.conninfo, args.rounds, args.only),
            "kill": lambda: killing(postgres.conninfo, args.kills),
        }
        show(parts, args.only and ("kill" if args.only == "kill" else "rolling"))


if __name__ == "__main__":
    main()
