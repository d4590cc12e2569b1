"""What the guarantee costs: the same topic into the same table with and without the library.

    python benchmarks/guarantee_cost.py [--messages N] [--rounds N] [--latency-seconds N] [--only PART]

Every figure is a ratio or a difference of two programs that alternate in one process on the same
servers, because absolute rates say more about the machine than about the library.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.synchronize import Event
from typing import NamedTuple
from uuid import uuid4

import psycopg
from confluent_kafka import Consumer, KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from exactly_once import ExactlyOnceConsumer, embedded
from exactly_once.schema import migrate

PARTITIONS = 6
COPY = "COPY sink (p, o, v) FROM STDIN (FORMAT BINARY)"
TYPES = ["int4", "int8", "bytea"]


class Run(NamedTuple):
    """One pass over messages: how many, in how many units, in what time."""

    messages: int
    units: int
    seconds: float


class Servers(NamedTuple):
    """Where the servers are, and the topic that is read again and again."""

    bootstrap_servers: str
    conninfo: str
    topic: str


def settings(servers: Servers) -> dict[str, object]:
    """Give both programs the same client, in a group of its own each time."""
    return {
        "bootstrap.servers": servers.bootstrap_servers,
        "group.id": f"bench-{uuid4().hex[:8]}",
        "fetch.queue.backoff.ms": 10,
        "isolation.level": "read_committed",
    }


def write(connection: psycopg.Connection, messages: Sequence[Message]) -> None:
    """Binary COPY of one batch."""
    with connection.cursor() as cursor, cursor.copy(COPY) as copy:
        copy.set_types(TYPES)
        for message in messages:
            copy.write_row((message.partition(), message.offset(), message.value()))


def ignore(connection: psycopg.Connection, messages: Sequence[Message]) -> None:
    """Consume only."""


def plain(servers: Servers, size: int, limit: int, effect: Callable[..., None], *, commits: bool = True) -> Run:
    """Batches of the plain client, each with its effect and a COMMIT, and no offset anywhere."""
    client = Consumer({**settings(servers), "enable.auto.commit": False, "auto.offset.reset": "earliest"})
    client.subscribe([servers.topic])
    done = units = 0
    with psycopg.connect(servers.conninfo) as connection:
        batch = client.consume(1, 30)
        began = time.perf_counter()
        while done < limit:
            batch += client.consume(size - len(batch), 0.05)
            if not batch:
                continue
            effect(connection, batch)
            if commits:
                connection.commit()
            done, units = done + len(batch), units + 1
            batch = []
        seconds = time.perf_counter() - began
    client.close()
    return Run(done, units, seconds)


def library(servers: Servers, size: int, limit: int, effect: Callable[..., None]) -> Run:
    """The same through the library."""
    done = units = 0
    with ExactlyOnceConsumer(settings(servers), conninfo=servers.conninfo, max_messages=size) as consumer:
        consumer.subscribe([servers.topic])
        began = 0.0
        for unit in consumer:
            began = began or time.perf_counter()
            with unit:
                effect(unit.connection, unit.messages)
            done, units = done + len(unit.messages), units + 1
            if done >= limit:
                break
        seconds = time.perf_counter() - began
    return Run(done, units, seconds)


def throughput(servers: Servers, messages: int, rounds: int) -> Iterator[str]:
    """Compare rates for several sizes of a unit."""
    yield "| messages a unit | plain, units/s | added a unit | ratio of rates, median [min-max] |"
    yield "|---|---|---|---|"
    for size, share in ((10_000, 1.0), (1_000, 0.5), (100, 0.1), (1, 0.003)):
        limit = int(messages * share)
        pairs = []
        for _ in range(rounds):
            truncate(servers)
            without = plain(servers, size, limit, write)
            truncate(servers)
            pairs.append((without, library(servers, size, limit, write)))
        yield f"| {size:,} | {row(pairs)}"


def consuming(servers: Servers, messages: int, rounds: int) -> Iterator[str]:
    """Compare rates with a handler that does nothing; the library still commits its offsets."""
    pairs = []
    for _ in range(rounds):
        without = plain(servers, 10_000, messages, ignore, commits=False)
        pairs.append((without, library(servers, 10_000, messages, ignore)))
    yield "| consuming alone | plain, units/s | added a unit | ratio of rates, median [min-max] |"
    yield "|---|---|---|---|"
    yield f"| 10,000 | {row(pairs)}"


def row(pairs: list[tuple[Run, Run]]) -> str:
    """Sum up the pairs of one size."""
    ratios = [(b.messages / b.seconds) / (a.messages / a.seconds) for a, b in pairs]
    added = [b.seconds / b.units - a.seconds / a.units for a, b in pairs]
    rate = statistics.median(a.units / a.seconds for a, _ in pairs)
    return (
        f"{rate:,.0f} | {statistics.median(added) * 1000:.2f} ms "
        f"| {statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}] |"
    )


def latency(servers: Servers, seconds: float, rounds: int) -> Iterator[str]:
    """Compare the time from produce() to the visible row at 1,000 messages a second."""
    figures: dict[str, list[tuple[float, float]]] = {"ordinary loop": [], "library": []}
    for _ in range(rounds):
        for name, program in (("ordinary loop", ordinary_for), ("library", library_for)):
            figures[name].append(measure(servers, seconds, program))
    yield "| produce to visible row | median of the medians | median of the p99s |"
    yield "|---|---|---|"
    for name, runs in figures.items():
        medians, p99s = zip(*runs, strict=True)
        yield f"| {name} | {statistics.median(medians):.2f} ms | {statistics.median(p99s):.2f} ms |"


def measure(servers: Servers, seconds: float, program: Callable[[Servers, Event, Event], None]) -> tuple[float, float]:
    """Run one program beside a steady producer; return median and p99 in milliseconds."""
    servers = servers._replace(topic=make_topic(servers.bootstrap_servers))
    truncate(servers)
    # A process of its own: beside the producer, two loops would wait for one interpreter lock.
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    process = context.Process(target=program, args=(servers, ready, stop))
    process.start()
    assert ready.wait(60)
    producer = Producer({"bootstrap.servers": servers.bootstrap_servers, "linger.ms": 0})
    began = time.perf_counter()
    for number in range(int(seconds * 1000)):
        while time.perf_counter() - began < number / 1000:
            producer.poll(0.0005)
        producer.produce(servers.topic, str(time.time_ns()).encode(), partition=number % PARTITIONS)
    producer.flush()
    with psycopg.connect(servers.conninfo, autocommit=True) as connection:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            found = connection.execute("SELECT count(*) FROM sink").fetchone()
            if found and found[0] >= int(seconds * 1000):
                break
        rows = connection.execute(
            "SELECT extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8 * 1000 "
            "- convert_from(v, 'UTF8')::numeric / 1000000 FROM sink WHERE v <> 'warm'"
        ).fetchall()
    stop.set()
    process.join()
    latencies = sorted(float(r[0]) for r in rows)
    return statistics.median(latencies), latencies[int(len(latencies) * 0.99)]


def ordinary_for(servers: Servers, ready: Event, stop: Event) -> None:
    """The ordinary loop: poll, write, commit the database, commit Kafka."""
    client = Consumer({**settings(servers), "enable.auto.commit": False, "auto.offset.reset": "earliest"})
    client.subscribe([servers.topic])
    warm(servers)
    with psycopg.connect(servers.conninfo) as connection:
        while not stop.is_set():
            batch = client.consume(1, 0.1)
            if batch:
                batch += client.consume(499, 0)
                insert(connection, batch)
                connection.commit()
                client.commit(asynchronous=True)
                ready.set()
    client.close()


def library_for(servers: Servers, ready: Event, stop: Event) -> None:
    """The same with the library."""
    with ExactlyOnceConsumer(settings(servers), conninfo=servers.conninfo) as consumer:
        consumer.subscribe([servers.topic])
        warm(servers)
        threading.Thread(target=stop_later, args=(consumer, stop)).start()
        for unit in consumer:
            with unit:
                insert(unit.connection, unit.messages)
            ready.set()


def stop_later(consumer: ExactlyOnceConsumer, stop: Event) -> None:
    """End the iteration when the measurement is over."""
    stop.wait()
    consumer.stop()


def insert(connection: psycopg.Connection, messages: Sequence[Message]) -> None:
    """Write a few rows as a handler would, in one round trip."""
    connection.execute(
        "INSERT INTO sink SELECT * FROM unnest(%s::int4[], %s::int8[], %s::bytea[])",
        (
            [m.partition() for m in messages],
            [m.offset() for m in messages],
            [m.value() for m in messages],
        ),
    )


def warm(servers: Servers) -> None:
    """Send one message to every partition, so that nothing is met for the first time later."""
    producer = Producer({"bootstrap.servers": servers.bootstrap_servers})
    for partition in range(PARTITIONS):
        producer.produce(servers.topic, b"warm", partition=partition)
    producer.flush()


def make_topic(bootstrap_servers: str) -> str:
    """Create an empty topic."""
    name = f"bench-{uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.create_topics([NewTopic(name, PARTITIONS, 1)])[name].result(30)
    return name


def fill(bootstrap_servers: str, topic: str, messages: int) -> None:
    """Produce small JSON payments."""
    producer = Producer(
        {"bootstrap.servers": bootstrap_servers, "linger.ms": 50, "queue.buffering.max.messages": 1_000_000}
    )
    for number in range(messages):
        value = json.dumps({"payment": number, "account": number % 1000, "amount": "12.50", "currency": "EUR"})
        while True:
            try:
                producer.produce(topic, value, partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(120) == 0, KafkaError


def truncate(servers: Servers) -> None:
    """Start each run with an empty table and a checkpoint behind it."""
    with psycopg.connect(servers.conninfo, autocommit=True) as connection:
        connection.execute("TRUNCATE sink")
        connection.execute("CHECKPOINT")


def main() -> None:
    """Start servers, run the parts that were asked for, print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency-seconds", type=float, default=60)
    parser.add_argument("--only", choices=["throughput", "consuming", "latency"])
    args = parser.parse_args()
    with (
        embedded.Kafka() as kafka,
        embedded.Postgres(settings={"track_commit_timestamp": "on", "max_wal_size": "8GB"}) as postgres,
    ):
        with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
            migrate(connection)
            connection.execute("CREATE TABLE sink (p int4, o int8, v bytea)")
        servers = Servers(kafka.bootstrap_servers, postgres.conninfo, make_topic(kafka.bootstrap_servers))
        if args.only != "latency":
            fill(servers.bootstrap_servers, servers.topic, args.messages)
        parts = {
            "throughput": lambda: throughput(servers, args.messages, args.rounds),
            "consuming": lambda: consuming(servers, args.messages, args.rounds),
            "latency": lambda: latency(servers, args.latency_seconds, args.rounds),
        }
        for name in [args.only] if args.only else parts:
            for line in parts[name]():
                print(line, flush=True)
            print(flush=True)


if __name__ == "__main__":
    main()
