"""What the benchmarks have in common: servers, topics and loops, programs by turns, and how figures are shown."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import psycopg
from confluent_kafka import Consumer, Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from exactly_once import ExactlyOnceConsumer
from exactly_once.demo.payments import send
from exactly_once.ledger.migrate import migrate

T = TypeVar("T")
Connection = psycopg.Connection[Any]
Effect = Callable[[Connection, Sequence[Message]], object]

PARTITIONS = 6
PAYMENT_COLUMNS = "id bigint, name text, amount double precision, ts timestamptz"


class Servers(NamedTuple):
    """Where the servers are, and the topic that is read again and again."""

    bootstrap_servers: str
    conninfo: str
    topic: str = ""


class Run(NamedTuple):
    """One pass over messages: how many, in how many units, in what time."""

    messages: int
    units: int
    seconds: float


def make_tables(conninfo: str, *statements: str) -> None:
    """Make the ledger, and what else a benchmark writes to."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        migrate(connection)
        for statement in statements:
            connection.execute(statement.encode())


def empty(conninfo: str, table: str = "sink") -> None:
    """Start each program with an empty table, and with a checkpoint behind it that the next one would pay for."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"TRUNCATE {table}".encode())
        connection.execute("CHECKPOINT")


def payment(number: int) -> dict[str, Any]:
    """Make a payment, of about 80 bytes in JSON, for a table of these columns."""
    document = {"id": number, "name": f"customer-{number % 1000}", "amount": number * 0.25}
    return {**document, "ts": "2026-01-01T10:00:00.123456Z"}


def make_topic(bootstrap_servers: str, partitions: int) -> str:
    """Create an empty topic."""
    name = f"bench-{uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    # Seconds: 600 partitions take some.
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(60)
    return name


def filled_topic(bootstrap_servers: str, partitions: int, values: Iterable[str | bytes]) -> str:
    """Create a topic and put the values into its partitions by turns."""
    topic = make_topic(bootstrap_servers, partitions)
    producer = Producer(
        {"bootstrap.servers": bootstrap_servers, "linger.ms": 50, "queue.buffering.max.messages": 1_000_000}
    )
    for number, value in enumerate(values):
        send(producer, topic, value, partition=number % partitions)
    assert producer.flush(120) == 0  # a million messages take some seconds
    return topic


def consumer_settings(bootstrap_servers: str) -> dict[str, Any]:
    """Give all programs the same client, in a group of its own each time; the library's defaults, written out."""
    return {
        "bootstrap.servers": bootstrap_servers,
        "group.id": f"bench-{uuid4().hex[:8]}",
        "fetch.queue.backoff.ms": 10,
        "isolation.level": "read_committed",
    }


def plain_settings(bootstrap_servers: str) -> dict[str, Any]:
    """The same for a program without the library."""
    return {**consumer_settings(bootstrap_servers), "enable.auto.commit": False, "auto.offset.reset": "earliest"}


def plain(servers: Servers, size: int, limit: int, effect: Effect, *, commits: bool = True) -> Run:
    """Batches of the plain client, each with its effect and a COMMIT, and no offset anywhere."""
    client = Consumer(plain_settings(servers.bootstrap_servers))
    client.subscribe([servers.topic])
    done = units = 0
    with psycopg.connect(servers.conninfo, prepare_threshold=None) as connection:  # as the library has it
        batch = client.consume(1, 30)  # what joining a group takes is in no rate
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


def library(servers: Servers, size: int, limit: int, effect: Effect) -> Run:
    """The same through the library."""
    done = units = 0
    with ExactlyOnceConsumer(
        consumer_settings(servers.bootstrap_servers), conninfo=servers.conninfo, max_messages=size
    ) as consumer:
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


def ignore(connection: Connection, messages: Sequence[Message]) -> None:
    """Consume only."""


def timed(program: Callable[[], object]) -> float:
    """Return the seconds that a program takes."""
    began = time.perf_counter()
    program()
    return time.perf_counter() - began


def by_turns(
    programs: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    before: Callable[[], object] = lambda: None,
    warms_up: bool = False,
) -> dict[str, list[T]]:
    """Run programs in alternation, each after ``before``; return what they gave, by rounds, less one that warms up."""
    found: dict[str, list[T]] = {name: [] for name in programs}
    for _ in range(rounds + warms_up):
        for name, program in programs.items():
            before()
            found[name].append(program())
    return {name: given[warms_up:] for name, given in found.items()}


def spread(figures: Sequence[float]) -> str:
    """Return the median of ratios, and their range."""
    return f"{statistics.median(figures):.2f} [{min(figures):.2f}-{max(figures):.2f}]"


def ratio(left: Iterable[float], right: Iterable[float]) -> str:
    """The same of the ratios of one round each."""
    return spread([a / b for a, b in zip(left, right, strict=True)])


def show(parts: Mapping[str, Callable[[], Iterator[str]]], only: str | None = None) -> None:
    """Print the tables of all parts, or of one, line by line as they come."""
    for name in [only] if only else parts:
        for line in parts[name]():
            print(line, flush=True)
        print(flush=True)
