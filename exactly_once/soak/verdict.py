"""Verdict: what took effect against what is in the logs, read anew, and all that was counted, for programs."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence

import confluent_kafka
import psycopg
from psycopg import sql

from exactly_once import __version__
from exactly_once.demo.journal import Entry, compare, scan

from .observer import Anomaly, Place
from .worker import table

# What can be wrong. ``ended``: a worker by itself; ``halted``: a partition; ``foreign``: the effect of no message.
KINDS = (
    "lost",
    "doubled",
    "foreign",
    "altered",
    "offset_behind",
    "offset_ahead",
    "non_monotonic",
    "halted",
    "wedged",
    "ended",
)
_SHOWN = 5  # anomalies of one kind, group and partition that are written out: more of the same show nothing
_LONGEST = 1_000  # characters of one of them; the whole of it was shown when it was found
_SCAN_SECONDS = 180  # for reading one topic: minutes of messages on a machine that is busy
_ENTRIES = 'SELECT topic, partition, "offset", number, worker, xid::text::bigint FROM {table} WHERE topic = %s'
_BACKWARD = """
    SELECT topic, partition, "offset", before FROM (
        SELECT topic, partition, "offset", lag("offset") OVER (PARTITION BY topic, partition ORDER BY id) AS before
        FROM {table}) e
    WHERE "offset" < before ORDER BY topic, partition, "offset"
"""
_LEDGER = "SELECT topic, partition, coalesce(next_offset, 0) FROM exactly_once.ledger WHERE group_id = %s"


def check(
    bootstrap_servers: str, conninfo: str, topics: Sequence[str], groups: Sequence[str], *, is_drained: bool
) -> tuple[int, list[Anomaly]]:
    """Read every topic from its beginning, compare it with each group's table; return messages and anomalies."""
    messages = 0
    anomalies: list[Anomaly] = []
    with psycopg.connect(conninfo) as connection:
        for topic in topics:
            found = scan(bootstrap_servers, topic, _SCAN_SECONDS)
            # As the tables have it: the number alone.
            numbers = [str(json.loads(record.value or b"{}").get("number")).encode() for record in found]
            records = [record._replace(value=number) for record, number in zip(found, numbers, strict=True)]
            messages += len(records)
            for group in groups:
                rows = connection.execute(sql.SQL(_ENTRIES).format(table=table(group)), (topic,))
                effects = [
                    Entry(name, n, offset, str(value).encode(), who, xid) for name, n, offset, value, who, xid in rows
                ]
                wrong = compare(records, effects)
                ends: dict[Place, int] = {
                    (name, number): end for name, number, end in connection.execute(_LEDGER, (group,))
                }
                for kind, places in (
                    ("lost", [i for i in wrong.lost if is_drained or i.offset < ends.get((i.topic, i.partition), 0)]),
                    ("doubled", list(wrong.duplicated)),
                    ("foreign", [effect.identity for effect in wrong.foreign]),
                    ("altered", wrong.altered),
                    ("offset_behind", [e.identity for e in effects if e.offset >= ends.get((e.topic, e.partition), 0)]),
                ):
                    for place in places:
                        where = f"group {group}, {topic} [{place.partition}]"
                        anomalies.append(Anomaly(kind, where, f"offset {place.offset}"))
        for group in groups:
            for name, partition, offset, before in connection.execute(sql.SQL(_BACKWARD).format(table=table(group))):
                what = f"offset {offset} took effect after {before}"
                anomalies.append(Anomaly("non_monotonic", f"group {group}, {name} [{partition}]", what))
    return messages, anomalies


def counts(anomalies: Sequence[Anomaly]) -> dict[str, int]:
    return {kind: sum(anomaly.kind == kind for anomaly in anomalies) for kind in KINDS}


def shown(anomalies: Sequence[Anomaly]) -> list[str]:
    written: dict[tuple[str, str], int] = {}
    texts = []
    for anomaly in sorted(anomalies):
        written[anomaly.kind, anomaly.where] = written.get((anomaly.kind, anomaly.where), 0) + 1
        if written[anomaly.kind, anomaly.where] <= _SHOWN:
            text = str(anomaly)
            texts.append(text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}")
    return texts


def versions(*, postgres: str, kafka: str) -> Mapping[str, str]:
    return {
        "kafka-exactly-once": __version__,
        "python": platform.python_version(),
        "confluent-kafka": importlib.metadata.version("confluent-kafka"),
        "librdkafka": confluent_kafka.libversion()[0],
        "psycopg": psycopg.__version__,
        "postgres": postgres,
        "kafka": kafka,
    }
