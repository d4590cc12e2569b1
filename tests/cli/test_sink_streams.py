"""Streams as their sources write them are tables at the first try, or stop and name what takes them.

Whole messages are compared with whole rows, as sets; no option shapes anything.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from tests.cli.conftest import Command
from tests.cli.streams import PARTITIONS, STREAMS, Row
from tests.support.seeds import first_seed
from tests.support.topics import create_topic
from tests.writer.test_registry import StandIn, registry

__all__ = ["registry"]

Database = psycopg.Connection[Any]

INSTANT = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d)(:\d\d)?(\.\d+)?(Z|[+-]\d\d:?\d\d)?")


def instant(text: str) -> str:
    """The same time in one form, as exact as Postgres has it."""
    found = INSTANT.fullmatch(text)
    if found is None:
        return text
    at = datetime.fromisoformat(found[1] + (found[2] or ":00") + (found[4] or ""))
    at += timedelta(microseconds=int((Decimal(found[3] or "0") * 10**6).to_integral_value()))
    return (at.astimezone(UTC) if found[4] else at).isoformat()


def same(value: Any) -> Any:
    """A value in a form in which equal ones are equal texts."""
    if isinstance(value, dict):
        return {name: same(each) for name, each in sorted(value.items())}
    if isinstance(value, list):
        return [same(each) for each in value]
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
        return f"number {Decimal(str(value)).normalize():f}"
    return instant(value) if isinstance(value, str) else value


def document(row: Row) -> str:
    row = {name: value for name, value in row.items() if name != "rest"} | (row.get("rest") or {})
    return json.dumps({name: same(value) for name, value in sorted(row.items()) if value is not None})


def encoded(value: Any) -> bytes | None:
    """JSON; decimals by their own digits, as Jackson writes them."""
    if value is None or isinstance(value, bytes):
        return value
    marked = json.dumps(value, default=lambda number: f"@{number:f}@")
    return re.sub(r'"@([-.\d]+)@"', r"\1", marked).encode()


@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_becomes_a_table_or_is_refused_with_what_takes_it(
    *, case: str, operate: Command, bootstrap_servers: str, name: str, db: Database, registry: StandIn
) -> None:
    chosen = STREAMS[case](random.Random(first_seed()))
    create_topic(bootstrap_servers, PARTITIONS, name=name)
    registry.add('{"type": "object"}', "JSON")
    registry.add('"string"')
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 5})
    for number, sent in enumerate(chosen.sent):
        place = number % PARTITIONS if sent.partition is None else sent.partition
        producer.produce(name, encoded(sent.value), encoded(sent.key), partition=place, headers=sent.headers)
        producer.poll(0)
    assert producer.flush(60) == 0
    options = [text.replace("REGISTRY", registry.url) for text in chosen.options]
    command = ["sink", "--topic", name, "--table", name, "--create-table", "--start", "earliest", "--until-end"]
    result = operate(*command, *options)
    if chosen.refused:
        assert result.code == 1, result.err
        assert chosen.refused in result.err
        if not (chosen.then or chosen.alter):
            return
        db.execute(chosen.alter.format(name))
        result = operate(*command, *options, *(text.replace("REGISTRY", registry.url) for text in chosen.then))
    assert result.code == 0, result.err
    db.execute("SET timezone = 'UTC'")
    text = db.execute(f"SELECT to_jsonb(t)::text FROM {name} t").fetchall()
    found = Counter(document(json.loads(row, parse_float=Decimal)) for (row,) in text)
    expected = Counter(map(document, chosen.rows))
    assert (found - expected, expected - found) == (Counter(), Counter())
