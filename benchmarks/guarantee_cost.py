"""What the guarantee costs: the same topic into the same table with and without the library.

    python benchmarks/guarantee_cost.py [--messages N] [--rounds N] [--latency-seconds N] [--only PART] [--against PATH]

Every figure is a ratio or a difference of two programs that alternate in one process on the same
servers, because absolute rates say more about the machine than about the library. With ``--against``, another
checkout of the library, small units alternate with that one's, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

import psycopg
from common import (
    PARTITIONS,
    Connection,
    Effect,
    Servers,
    by_turns,
    consumer_settings,
    empty,
    filled_topic,
    ignore,
    library,
    make_tables,
    make_topic,
    plain,
    plain_settings,
    show,
    spread,
)
from confluent_kafka import Consumer, Message, Producer

from exactly_once import ExactlyOnceConsumer, embedded

COPY = "COPY sink (p, o, v) FROM STDIN (FORMAT BINARY)"
TYPES = ["int4", "int8", "bytea"]


def write(connection: Connection, messages: Sequence[Message]) -> None:
    """Binary COPY of one batch."""
    with connection.cursor() as cursor, cursor.copy(COPY) as copy:
        copy.set_types(TYPES)
        for message in messages:
            copy.write_row((message.partition(), message.offset(), message.value()))


def throughput(servers: Servers, messages: int, rounds: int) -> Iterator[str]:
    """Compare rates for several sizes of a unit."""
    yield "| messages a unit | plain, units/s | added a unit | ratio of rates, median [min-max] |"
    yield "|---|---|---|---|"
    # Small units take longer for a message: fewer of them do.
    for size, share in ((10_000, 1.0), (1_000, 0.5), (100, 0.1), (1, 0.003)):
        yield compared(servers, size, int(messages * share), write, rounds)


def consuming(servers: Servers, messages: int, rounds: int) -> Iterator[str]:
    """Compare rates with a handler that does nothing; the library still commits its offsets."""
    yield "| consuming alone | plain, units/s | added a unit | ratio of rates, median [min-max] |"
    yield "|---|---|---|---|"
    yield compared(servers, 10_000, messages, ignore, rounds)


def compared(servers: Servers, size: int, limit: int, effect: Effect, rounds: int) -> str:
    """Alternate both programs, and sum up the pairs of one size."""
    runs = by_turns(
        {
            "plain": lambda: plain(servers, size, limit, effect, commits=effect is not ignore),
            "library": lambda: library(servers, size, limit, effect),
        },
        rounds,
        before=lambda: empty(servers.conninfo),
    )
    pairs = list(zip(*runs.values(), strict=True))
    ratios = [(b.messages / b.seconds) / (a.messages / a.seconds) for a, b in pairs]
    added = [b.seconds / b.units - a.seconds / a.units for a, b in pairs]
    rate = statistics.median(a.units / a.seconds for a, _ in pairs)
    return f"| {size:,} | {rate:,.0f} | {statistics.median(added) * 1000:.2f} ms | {spread(ratios)} |"


INSERT = "INSERT INTO sink (p, o, v) VALUES (%s, %s, %s)"


def values(message: Message) -> tuple[object, ...]:
    """One row."""
    return message.partition(), message.offset(), message.value()


def insert_all(connection: Connection, messages: Sequence[Message]) -> None:
    """A row for each message by the usual means: COPY where they are many."""
    if len(messages) == 1:
        connection.execute(INSERT, values(messages[0]))
    elif len(messages) < 500:
        connection.cursor().executemany(INSERT, [values(message) for message in messages])
    else:
        write(connection, messages)


class Laps:
    """The time of each unit, and the CPU time of this thread over all of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.seconds: list[float] = []
        # When the last unit ended, none before the first; and what this thread had used when that one ended.
        self._last = self._cpu = 0.0

    def is_over_after_one_more(self) -> bool:
        """Take note that a unit has ended; the first one starts the clock."""
        now = time.perf_counter()
        if self._last:
            self.seconds.append(now - self._last)
        else:
            self._cpu = time.thread_time()
        self._last = now
        return len(self.seconds) >= self.limit

    def figures(self) -> list[float]:
        """The tenth percentile and the median of a unit, and its CPU time."""
        ordered = sorted(self.seconds)
        cpu = (time.thread_time() - self._cpu) / len(ordered)
        return [ordered[len(ordered) // 10], statistics.median(ordered), cpu]


def by_hand(servers: Servers, size: int, laps: Laps) -> None:
    """The plain client, the effect, COMMIT; no offset anywhere."""
    client = Consumer(plain_settings(servers.bootstrap_servers))
    client.subscribe([servers.topic])
    with psycopg.connect(servers.conninfo) as connection:
        while True:
            batch = client.consume(size, 30)  # a whole one: the topic was filled before
            insert_all(connection, batch)
            connection.commit()
            if laps.is_over_after_one_more():
                break
    client.close()


def by_library(servers: Servers, size: int, laps: Laps, *, defers: bool = False) -> None:
    """The same through the library."""
    with ExactlyOnceConsumer(
        consumer_settings(servers.bootstrap_servers), conninfo=servers.conninfo, max_messages=size
    ) as consumer:
        consumer.subscribe([servers.topic])
        for unit in consumer:
            with unit:
                if defers:
                    for message in unit.messages:
                        unit.defer(INSERT, values(message))
                elif len(unit.messages) == 1:
                    unit.execute(INSERT, values(unit.messages[0]))
                else:
                    insert_all(unit.connection, unit.messages)
            if laps.is_over_after_one_more():
                break


PROGRAMS: dict[str, Callable[[Servers, int, Laps], None]] = {
    "by_hand": by_hand,
    "by_library": by_library,
    "by_library_deferring": partial(by_library, defers=True),
}


def small(servers: Servers, rounds: int, against: str | None) -> Iterator[str]:
    """Compare the time and the client's CPU time of small units, each program in a process of its own."""
    yield "| messages a unit | program | p10 ms | median ms | client CPU ms | added, by p10 [min-max] | ratio by p10 |"
    yield "|---|---|---|---|---|---|---|"
    here = str(Path(__file__).parents[1])
    for size, units in ((1, 1500), (100, 300), (1000, 100)):
        programs = [("by hand", "by_hand", here), ("the library", "by_library", here)]
        programs += [("the library, of before", "by_library", against)] if against else []
        programs += [("the library, unit.defer", "by_library_deferring", here)] if size < 1000 else []
        runs = {name: partial(in_child, servers, program, size, units, path) for name, program, path in programs}
        found = by_turns(runs, rounds, before=lambda: empty(servers.conninfo))
        for name, figures in found.items():
            p10, median, cpu = (statistics.median(each) * 1000 for each in zip(*figures, strict=True))
            added = [(f[0] - h[0]) * 1000 for f, h in zip(figures, found["by hand"], strict=True)]
            ratio = statistics.median(f[0] / h[0] for f, h in zip(figures, found["by hand"], strict=True))
            yield (
                f"| {size:,} | {name} | {p10:.3f} | {median:.3f} | {cpu:.3f} "
                f"| {statistics.median(added):+.3f} [{min(added):+.3f} to {max(added):+.3f}] | {ratio:.2f} |"
            )


def in_child(servers: Servers, program: str, size: int, units: int, path: str) -> list[float]:
    """Run one program on the library of a checkout."""
    words = [sys.executable, __file__, "--child", json.dumps([*servers, program, size, units])]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    figures: list[float] = json.loads(done.stdout)
    return figures


def child(order: str) -> None:
    """Be one program for one measurement; print its figures."""
    *where, program, size, units = json.loads(order)
    laps = Laps(units)
    PROGRAMS[program](Servers(*where), size, laps)
    print(json.dumps(laps.figures()))


def latency(servers: Servers, seconds: float, rounds: int) -> Iterator[str]:
    """Compare the time from produce() to the visible row at 1,000 messages a second."""
    programs = {"ordinary loop": ordinary_for, "library": library_for}
    runs = {name: partial(measure, servers, seconds, program) for name, program in programs.items()}
    figures = by_turns(runs, rounds, before=lambda: empty(servers.conninfo))
    yield "| produce to visible row | median of the medians | median of the p99s |"
    yield "|---|---|---|"
    for name, found in figures.items():
        medians, p99s = zip(*found, strict=True)
        yield f"| {name} | {statistics.median(medians):.2f} ms | {statistics.median(p99s):.2f} ms |"


def measure(servers: Servers, seconds: float, program: Callable[[Servers, Event, Event], None]) -> tuple[float, float]:
    """Run one program beside a steady producer; return median and p99 in milliseconds."""
    servers = servers._replace(topic=make_topic(servers.bootstrap_servers, PARTITIONS))
    # A process of its own: beside the producer, two loops would wait for one interpreter lock.
    context = multiprocessing.get_context("spawn")
    # Set by the program: it has written, so nothing is met for the first time; and by us: it may end.
    ready, stop = context.Event(), context.Event()
    process = context.Process(target=program, args=(servers, ready, stop))
    process.start()
    assert ready.wait(60)  # a process is to start and to join a group
    producer = Producer({"bootstrap.servers": servers.bootstrap_servers, "linger.ms": 0})
    began = time.perf_counter()
    for number in range(int(seconds * 1000)):
        while time.perf_counter() - began < number / 1000:
            producer.poll(0.0005)  # half of the time until the next
        producer.produce(servers.topic, str(time.time_ns()).encode(), partition=number % PARTITIONS)
    producer.flush()
    with psycopg.connect(servers.conninfo, autocommit=True) as connection:
        deadline = time.monotonic() + 30  # for what is under way
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
    client = Consumer(plain_settings(servers.bootstrap_servers))
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
    with ExactlyOnceConsumer(consumer_settings(servers.bootstrap_servers), conninfo=servers.conninfo) as consumer:
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


def insert(connection: Connection, messages: Sequence[Message]) -> None:
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


def payments(count: int) -> Iterator[str]:
    """Make small JSON payments."""
    for number in range(count):
        yield json.dumps({"payment": number, "account": number % 1000, "amount": "12.50", "currency": "EUR"})


def main() -> None:
    """Start servers, run the parts that were asked for, print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency-seconds", type=float, default=60)
    parser.add_argument("--only", choices=["throughput", "consuming", "small", "latency"])
    parser.add_argument("--against", metavar="PATH", help="another checkout, for small units")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    with (
        embedded.Kafka() as kafka,
        embedded.Postgres(settings={"track_commit_timestamp": "on", "max_wal_size": "8GB"}) as postgres,
    ):
        make_tables(postgres.conninfo, "CREATE TABLE sink (p int4, o int8, v bytea)")
        messages = payments(0 if args.only == "latency" else args.messages)  # latency has topics of its own
        topic = filled_topic(kafka.bootstrap_servers, PARTITIONS, messages)
        servers = Servers(kafka.bootstrap_servers, postgres.conninfo, topic)
        parts = {
            "throughput": lambda: throughput(servers, args.messages, args.rounds),
            "consuming": lambda: consuming(servers, args.messages, args.rounds),
            "small": lambda: small(servers, args.rounds, args.against),
            "latency": lambda: latency(servers, args.latency_seconds, args.rounds),
        }
        show(parts, args.only)


if __name__ == "__main__":
    main()
