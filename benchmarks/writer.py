"""What the table writer costs: where a message's time goes, the formats, and the ways of writing by rows a batch.

    python benchmarks/writer.py [--rounds N] [--only PART]

The programs of a comparison alternate in one process on the same server; read the ratios. The steps of a
message are timed alone, in the main thread, shortest of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import psycopg
from common import PAYMENT_COLUMNS, Connection, payment, show, timed
from confluent_kafka import Message

from exactly_once import embedded
from exactly_once.writer import TableWriter
from exactly_once.writer.formats import FormatDecoder, FormatName, format_of
from exactly_once.writer.from_json import JsonDecoder
from exactly_once.writer.plan import Plan

UNIT = 10_000  # so many that what is done once for a unit does not show
NOW = datetime.now(UTC)


def value(number: int) -> bytes:
    """Make a payment of about 80 bytes."""
    return json.dumps(payment(number)).encode()


def best(program: Callable[[], object], rounds: int) -> float:
    """Return the least processor time of the main thread in seconds."""
    took = []
    for _ in range(rounds):
        began = time.thread_time()
        program()
        took.append(time.thread_time() - began)
    return min(took)


def steps(connection: Connection, rounds: int) -> Iterator[str]:
    """Say where a message's time goes in the main thread, without consuming and without the server."""
    messages = [Message(topic="t", partition=0, offset=i, value=value(i)) for i in range(UNIT)]
    connection.execute(f"CREATE TEMP TABLE stepped ({PAYMENT_COLUMNS})")
    decoder = JsonDecoder()
    table = TableWriter("stepped").table(connection)
    decoder.prepare(table, mode="append", key=())
    decoded = decoder.decode(messages)
    rows, plan = list(decoded), Plan(table, decoded.columns)

    def encode(rows: list[Any]) -> object:
        return deque(plan.encode(plan.prepare(rows, exact=decoded.exact))[1], 0)

    programs: dict[str, Callable[[], object]] = {
        "value()": lambda: deque(map(Message.value, messages), 0),
        "decode, to a tuple": lambda: deque(decoder.decode(messages), 0),
        "encode": lambda: encode(rows),
        "all of it": lambda: encode(list(decoder.decode(messages))),
        "look at values that no decoder has checked": lambda: plan.prepare(rows),
    }
    yield "| step | ns a message |"
    yield "|---|---|"
    for name, program in programs.items():
        yield f"| {name} | {best(program, rounds) / UNIT * 1e9:,.0f} |"
    connection.rollback()


def formats(connection: Connection, rounds: int) -> Iterator[str]:
    """Compare what decoding the same rows costs in each format; ``json`` is what plain JSON costs."""
    rows = [json.loads(value(i)) for i in range(UNIT)]
    texts = [{name: str(each) for name, each in row.items()} for row in rows]
    kinds = {"id": "int64", "name": "string", "amount": "double", "ts": "string"}
    schema = {"type": "struct", "fields": [{"field": name, "type": kind} for name, kind in kinds.items()]}
    mysql = {"id": "bigint", "name": "varchar(40)", "amount": "double", "ts": "varchar(40)"}
    canal = {"type": "INSERT", "isDdl": False, "old": None, "mysqlType": mysql, "pkNames": ["id"]}
    event = {"specversion": "1.0", "type": "payment", "source": "/payments", "datacontenttype": "application/json"}
    sent: dict[FormatName, Callable[[int], bytes]] = {
        "json": value,
        "connect": lambda i: json.dumps({"schema": schema, "payload": rows[i]}).encode(),
        "debezium": lambda i: json.dumps({"before": None, "after": rows[i], "op": "c", "source": {"lsn": i}}).encode(),
        "maxwell": lambda i: json.dumps({"database": "d", "table": "t", "type": "insert", "data": rows[i]}).encode(),
        "canal": lambda i: json.dumps({**canal, "database": "d", "table": "t", "data": [texts[i]]}).encode(),
        "cloudevents": lambda i: json.dumps({**event, "id": str(i), "data": rows[i]}).encode(),
        "csv": lambda i: ",".join(texts[i].values()).encode(),
        "msgpack": lambda i: msgspec.msgpack.encode(rows[i]),
    }
    connection.execute(f"CREATE TEMP TABLE formed ({PAYMENT_COLUMNS})")
    table = TableWriter("formed").table(connection)
    json_ns = 0.0
    yield "| format | bytes a message | ns a message | times JSON |"
    yield "|---|---|---|---|"
    for name, make in sent.items():
        fields = {column: f"data.{column}" for column in kinds} if name == "cloudevents" else None
        decoder: Any = JsonDecoder(fields=fields, lax=name in ("canal", "csv"))
        if name != "json":
            form = format_of(name, columns=list(kinds) if name == "csv" else None, lax=True)
            decoder = FormatDecoder(decoder, form)
        decoder.prepare(table, mode="append", key=())
        messages = [Message(topic="t", partition=0, offset=i, value=make(i)) for i in range(UNIT)]
        ns = best(lambda d=decoder, m=messages: deque(d.decode(m), 0), rounds) / UNIT * 1e9  # type: ignore[misc]
        json_ns = json_ns or ns
        size = sum(len(message.value()) for message in messages) / UNIT
        yield f"| {name} | {size:,.0f} | {ns:,.0f} | {ns / json_ns:.1f} |"
    connection.rollback()


def ways(connection: Connection, rounds: int) -> Iterator[str]:
    """Compare the ways into a table with a primary key, by rows a batch: where is the switch?"""
    connection.execute(f"CREATE TABLE IF NOT EXISTS way ({PAYMENT_COLUMNS}, PRIMARY KEY (id))")
    connection.commit()
    writers = {
        "upsert from arrays": TableWriter("way", mode="upsert", small_batch=10**9),
        "upsert from a stage": TableWriter("way", mode="upsert", small_batch=0),
        "append from arrays": TableWriter("way", mode="insert-ignore", small_batch=10**9),
        "append by COPY": TableWriter("way"),
    }
    yield "| rows a batch | executemany ON CONFLICT, rows/s | " + " | ".join(writers) + " |"
    yield "|---" * (len(writers) + 2) + "|"
    # On both sides of where the writer switches from arrays to a stage.
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
    for _ in range(rounds * (20 if size < 500 else 2)):  # small batches scatter more
        connection.execute("TRUNCATE way")
        connection.commit()
        took.append(timed(lambda: (program(), connection.commit())))
    return size / statistics.median(took)


def executemany(connection: Connection, rows: list[tuple[Any, ...]]) -> None:
    """What most people write."""
    connection.cursor().executemany(
        "INSERT INTO way VALUES (%s, %s, %s, %s) ON CONFLICT (id) DO UPDATE"
        " SET name = EXCLUDED.name, amount = EXCLUDED.amount, ts = EXCLUDED.ts",
        rows,
    )


def main() -> None:
    """Start a server, run the parts that were asked for, print tables."""
    parts = {"steps": steps, "formats": formats, "ways": ways}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=parts)
    args = parser.parse_args()
    with (
        embedded.Postgres(settings={"max_wal_size": "8GB"}) as postgres,
        psycopg.connect(postgres.conninfo, prepare_threshold=None) as connection,
    ):
        show({name: partial(part, connection, args.rounds) for name, part in parts.items()}, args.only)


if __name__ == "__main__":
    main()
