"""Sample of a topic: messages of both ends of each partition, the columns they ask for, and the DDL that makes them."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from psycopg import sql

from exactly_once.errors import UnknownTopic
from exactly_once.kafka.log import kafka_logger
from exactly_once.ledger.sql import query
from exactly_once.writer import BadRow
from exactly_once.writer.decoding import key_field
from exactly_once.writer.errors import NAME_BYTES, cut
from exactly_once.writer.evolving import can_be_column, type_of, wider
from exactly_once.writer.formats import hint_for
from exactly_once.writer.from_json import JsonDecoder, path_of

from .problems import CommandError
from .sink_flows import Flow

logger = logging.getLogger(__name__)

# Messages of each end of each partition: enough to meet what most messages have, and read in a second.
SAMPLE = 100
# Tells later runs which column it is.
REST_COMMENT = "exactly-once sink: the fields that have no column of their own"
# Offsets by topic and partition.
Positions = Mapping[tuple[str, int], int]

_WAIT_SECONDS = 10.0
_METADATA_TYPES = {
    "topic": "text",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamptz",
    "key": "bytea",
    "headers": "jsonb",
}


def sample(kafka: Mapping[str, Any], topics: Sequence[str], positions: Positions | None = None) -> list[Message]:
    """Read the first and the last messages of each partition, without being a member of any group.

    With ``positions`` the first ones are those from there on.

    :raises UnknownTopic: for a topic that is not there.
    """
    settings = {key: value for key, value in kafka.items() if key != "group.instance.id"}
    settings |= {"enable.auto.commit": False, "enable.partition.eof": True, "auto.offset.reset": "earliest"}
    client = Consumer({**settings, "logger": kafka_logger()})
    try:
        logs: dict[tuple[str, int], tuple[int, int]] = {}
        for topic in topics:
            found = client.list_topics(topic, timeout=_WAIT_SECONDS).topics[topic]
            if found.error is not None:
                raise UnknownTopic(f"the cluster has no topic {topic}")
            for number in found.partitions:
                start, end = client.get_watermark_offsets(TopicPartition(topic, number), timeout=_WAIT_SECONDS)
                logs[topic, number] = start, end
        starts = {place: max(start, (positions or {}).get(place, 0)) for place, (start, end) in logs.items()}
        head = _read(client, {place: start for place, start in starts.items() if start < logs[place][1]}, logs)
        known = {(m.topic(), m.partition(), m.offset()) for m in head}
        tails = {place: max(start, end - SAMPLE) for place, (start, end) in logs.items() if start < end}
        tail = _read(client, tails, logs)
        return head + [m for m in tail if (m.topic(), m.partition(), m.offset()) not in known]
    finally:
        client.close()


def _read(
    client: Consumer, starts: Mapping[tuple[str, int], int], logs: Mapping[tuple[str, int], tuple[int, int]]
) -> list[Message]:
    """Read at most so many messages from each place."""
    if not starts:
        return []
    client.assign([TopicPartition(topic, number, start) for (topic, number), start in starts.items()])
    found: dict[tuple[str, int], list[Message]] = {place: [] for place in starts}
    left = set(starts)
    heard_at = time.monotonic()
    while left and time.monotonic() - heard_at < _WAIT_SECONDS:
        for message in client.consume(1000, 0.2):
            heard_at, place = time.monotonic(), (str(message.topic()), message.partition() or 0)
            if message.error() is None and place in left:
                found[place].append(message)
            error, offset = message.error(), message.offset() or 0
            ends = error is not None and error.code() == KafkaError._PARTITION_EOF
            if ends or len(found.get(place, ())) >= SAMPLE or offset >= logs[place][1] - 1:
                left.discard(place)
    if left:
        names = ", ".join(f"{topic}[{number}]" for topic, number in sorted(left))
        logger.warning("the sample lacks messages of %s: Kafka sent none for %g s", names, _WAIT_SECONDS)
    return [message for place in sorted(found) for message in found[place]]


@dataclass(slots=True)
class Columns:
    """The columns that a sample asks for."""

    types: dict[str, str] = field(default_factory=dict)
    key: tuple[str, ...] = ()
    """The fields of the messages' keys, where an envelope tells them."""
    rest: str | None = None
    """The column that was not asked for by name, and takes what has no column."""
    left_out: list[str] = field(default_factory=list)
    """Fields that can be no columns."""


def columns_of(flow: Flow, messages: Sequence[Message], *, for_new_table: bool) -> Columns:
    """Find the columns and types that messages ask for; a field that was null everywhere is jsonb.

    A new table gets a column for what has none, unless ``rest`` or ``fields`` say otherwise.

    :raises CommandError: when no message of the sample is of the format, or one is in an envelope that was not named.
    """
    result = Columns()
    if flow.format == "raw":
        result.types = {"key": "bytea", "value": "bytea"}
    elif messages:
        objects, types, result.key = _objects(flow, messages)
        result.types = _types(flow, objects, types)
        result.left_out = [name for name in result.types if not can_be_column(name)]
        result.types = {name: kind for name, kind in result.types.items() if name not in result.left_out}
    result.types |= {column: _metadata_type(source, messages) for column, source in flow.metadata.items()}
    result.types |= {column: type_of(value) or "text" for column, value in flow.constants.items()}
    result.types |= flow.types
    if flow.rest:
        result.types[flow.rest] = "jsonb"
    elif for_new_table and flow.rest is None and flow.format not in ("raw", "csv") and flow.fields is None:
        result.rest = next(name for name in ("rest", "rest_", "other_fields") if name not in result.types)
        result.types[result.rest] = "jsonb"
    if result.left_out:
        where = f"they go to {flow.rest or result.rest}" if flow.rest or result.rest else "they are lost"
        names = ", ".join(map(cut, result.left_out))
        told = f"no column can have the name of {names} (over {NAME_BYTES} bytes, a quote, or Postgres's own); {where}"
        if for_new_table and not (flow.rest or result.rest):
            raise CommandError(f"{told}: say fields = {{column = path}} in a [[sink]], or rest")
        logger.warning("%s", told, extra={"action": "fields_left_out"})
    return result


def _objects(flow: Flow, messages: Sequence[Message]) -> tuple[list[dict[str, Any]], dict[str, str], tuple[str, ...]]:
    """Return the rows in messages, and the types and the key that their schemas tell."""
    objects: list[dict[str, Any]] = []
    types: dict[str, str] = {}
    key: tuple[str, ...] = ()
    bad: list[tuple[Message, str]] = []
    looks = replace(flow, missing="keep", on_tombstone="skip", on_truncate="skip").unwrapping(JsonDecoder())
    for message in messages:
        if flow.format is None and flow.schema_registry is None and (hint := hint_for(message.value())) is not None:
            raise CommandError(f"{_place(message)}: {hint}")
        try:
            found, told, names = ([message], {}, ()) if looks is None else looks.read(message, tells=True)
            rows = [_object(m.value()) for m in found if m.value() is not None]
            objects += rows
            types |= told if rows else {}
            key = key or names
        except (ValueError, BadRow) as error:
            bad.append((message, error.reason if isinstance(error, BadRow) else str(error)))
    if bad:
        message, reason = bad[0]
        what = "JSON objects" if flow.format in (None, "json") else f"messages of format {flow.format}"
        told_ = f"{len(bad)} of {len(messages)} messages of the sample are no {what}; {_place(message)}: {reason}"
        if not objects:
            raise CommandError(told_)
        logger.warning("%s", told_, extra={"action": "sample_skipped"})
    return objects, types, key


def _place(message: Message) -> str:
    return f"{message.topic()}[{message.partition()}] offset {message.offset()}"


def _object(value: bytes | None) -> dict[str, Any]:
    """Read an object as the decoder does, which knows no NaN and no encoding but UTF-8.

    :raises ValueError: showing what it is instead.
    """
    try:
        found = json.loads((value or b"").decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{cut(value)} ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(cut(value))
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"JSON has no {text}")


def _types(flow: Flow, objects: Sequence[dict[str, Any]], types: Mapping[str, str]) -> dict[str, str]:
    """Find the type of each column."""
    if flow.fields is None:
        paths: dict[str, tuple[str, ...]] = {name: (name,) for one in [types, *objects] for name in one}
        renamed = {column: path_of(path) for column, path in flow.rename.items()}
        taken = {*flow.metadata, *flow.constants, flow.rest, *flow.drop, *(path[0] for path in renamed.values())}
        paths = {name: path for name, path in paths.items() if name not in taken} | renamed
    else:
        paths = {column: path_of(path) for column, path in flow.fields.items()}
    found: dict[str, str] = {}
    for column, path in paths.items():
        kind: str | None = types.get(path[0]) if len(path) == 1 else None
        if kind is None:
            for one in objects:
                kind = wider(kind, type_of(_at(one, path)))
        found[column] = kind or "jsonb"
    found |= {column: "date" if unit == "days" else "timestamptz" for column, unit in flow.epoch.items()}
    found |= dict.fromkeys(flow.decimal, "numeric") | dict.fromkeys(flow.json_text, "jsonb")
    return found


def _metadata_type(source: str, messages: Sequence[Message]) -> str:
    """Return the type of a column that holds what a message brings beside its value."""
    if not source.startswith("key:"):
        return _METADATA_TYPES.get(source, "text")
    kind: str | None = None
    for message in messages:
        with contextlib.suppress(ValueError):  # the worker tells which one
            kind = wider(kind, type_of(key_field(path_of(source.removeprefix("key:")), message)))
    return kind or "text"


def _at(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def create_table(flow: Flow, columns: Columns) -> list[sql.Composed]:
    """Write the CREATE TABLE; the key becomes the primary key.

    :raises CommandError: for a column of the key that the sample does not have.
    """
    key = flow.key or (columns.key if flow.mode == "upsert" else ())
    if flow.mode == "upsert" and not key:
        raise CommandError("an upsert needs a key: say --key COLUMN")
    if unknown := [name for name in key if name not in columns.types]:
        raise CommandError(
            f"no message of the sample has {', '.join(unknown)}, which --key names; "
            f"there are {', '.join(columns.types)}"
        )
    name = sql.Identifier(*flow.table_name)
    parts = [sql.SQL("{} {}").format(sql.Identifier(c), sql.SQL(kind)) for c, kind in columns.types.items()]
    if key:
        parts.append(sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, key))))
    made = [sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(name, sql.SQL(", ").join(parts))]
    if columns.rest is not None:
        column = sql.Identifier(*flow.table_name, columns.rest)
        made.append(query("comment_on_rest_column", "", column=column, comment=sql.Literal(REST_COMMENT)))
    return made
