"""Sample of a topic: its first messages, the columns they ask for, and the DDL that makes them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, TopicPartition
from psycopg import sql

from exactly_once.errors import UnknownTopic
from exactly_once.writer import Table

from .sink_flows import Flow

SAMPLE = 100
_NAME = re.compile(r'"(?:[^"]|"")*"|[^."]+')
_WAIT_SECONDS = 10.0
_METADATA_TYPES = {
    "topic": "text",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamptz",
    "key": "bytea",
    "headers": "jsonb",
}


def first_messages(kafka: Mapping[str, Any], topics: Sequence[str], count: int = SAMPLE) -> list[Message]:
    """Read the first messages of topics, of each partition in turn, without being a member of any group."""
    settings = {**kafka, "enable.auto.commit": False, "enable.partition.eof": True, "log_level": 0}
    client = Consumer(settings)
    try:
        places = []
        for topic in topics:
            found = client.list_topics(topic, timeout=_WAIT_SECONDS).topics[topic]
            if found.error is not None:
                raise UnknownTopic(f"the cluster has no topic {topic}")
            places += [TopicPartition(topic, number, OFFSET_BEGINNING) for number in found.partitions]
        client.assign(places)
        messages: list[Message] = []
        ended = 0
        deadline = time.monotonic() + _WAIT_SECONDS
        while len(messages) < count and ended < len(places) and time.monotonic() < deadline:
            for message in client.consume(count - len(messages), 0.2):
                if message.error() is None:
                    messages.append(message)
                else:
                    ended += 1
        return messages
    finally:
        client.close()


def columns_of(flow: Flow, messages: Iterable[Message]) -> dict[str, str]:
    """Find the columns and types that messages ask for; a field that was null everywhere is jsonb."""
    found: dict[str, str | None] = {}
    if flow.format == "raw":
        found = {"key": "bytea", "value": "bytea"}
    else:
        for message in messages:
            value = json.loads(message.value() or b"{}")
            for name, field in value.items() if isinstance(value, dict) else ():
                found[name] = _wider(found.get(name), _type(field))
        if flow.fields is not None:
            at_top = {c: p for c, p in flow.fields.items() if isinstance(p, str)}
            found = {column: found.get(path) or "jsonb" for column, path in at_top.items()}
        found |= dict.fromkeys(flow.epoch, "timestamptz")
    found |= {column: _METADATA_TYPES[source] for column, source in flow.metadata.items()}
    if flow.rest is not None:
        found[flow.rest] = "jsonb"
    return {name: kind or "jsonb" for name, kind in found.items()}


def create_table(flow: Flow, columns: Mapping[str, str]) -> sql.Composed:
    """Write the CREATE TABLE; the key becomes the primary key."""
    name = sql.Identifier(*(_unquoted(part) for part in _NAME.findall(flow.table)))
    parts = [sql.SQL("{} {}").format(sql.Identifier(c), sql.SQL(kind)) for c, kind in columns.items()]
    if flow.key:
        parts.append(sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, flow.key))))
    return sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(name, sql.SQL(", ").join(parts))


def add_columns(table: Table, columns: Mapping[str, str]) -> sql.Composed | None:
    """Write the ALTER TABLE that adds what is missing; nothing is ever dropped or changed."""
    there = {c.name for c in table.columns}
    new = {name: kind for name, kind in columns.items() if name not in there}
    if not new:
        return None
    parts = [sql.SQL("ADD COLUMN IF NOT EXISTS {} {}").format(sql.Identifier(n), sql.SQL(k)) for n, k in new.items()]
    return sql.SQL("ALTER TABLE {} {}").format(table.identifier, sql.SQL(", ").join(parts))


def _unquoted(part: str) -> str:
    """Read a part of a name as SQL does."""
    return part[1:-1].replace('""', '"') if part.startswith('"') else part.lower()


def _type(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "bigint" if -(1 << 63) <= value < (1 << 63) else "numeric"
    if isinstance(value, float):
        return "numeric"  # a double would change most decimal fractions
    if isinstance(value, str):
        return "timestamptz" if _is_moment(value) else "text"
    return "jsonb"


def _is_moment(value: str) -> bool:
    try:
        return "T" in value and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _wider(one: str | None, other: str | None) -> str | None:
    """Find a type that holds the values of both."""
    if one is None or other is None or one == other:
        return one or other
    kinds = {one, other}
    if kinds <= {"bigint", "numeric"}:
        return "numeric"
    return "text" if kinds <= {"text", "timestamptz"} else "jsonb"
