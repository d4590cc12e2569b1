"""The oracle: what took effect in Postgres against what is in the topic; it shares nothing with the library.

The journal is a table **without** unique keys, so that a second effect is seen instead of prevented, and a
counter per topic, an effect that is not idempotent. A handler under test appends to both:

    unit.executemany(journal.APPEND, [journal.entry(message, "worker 1") for message in unit.messages])
    unit.execute(journal.COUNT, (topic, len(unit.messages)))

The counter is one row: transactions that count run one after the other, and a frozen one stops the others. A
test in which that is not wanted leaves COUNT out and passes ``counts=False`` to `check`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from uuid import uuid4

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

CREATE = """
    CREATE SCHEMA journal;
    CREATE TABLE journal.entries (
        topic text NOT NULL,
        partition integer NOT NULL,
        "offset" bigint NOT NULL,
        value bytea,
        worker text NOT NULL,
        xid xid8 NOT NULL DEFAULT pg_current_xact_id()
    );
    CREATE TABLE journal.counter (topic text PRIMARY KEY, total bigint NOT NULL);
"""
# One entry per message; the parameters are those of `entry`.
APPEND = 'INSERT INTO journal.entries (topic, partition, "offset", value, worker) VALUES (%s, %s, %s, %s, %s)'
# Adds to the counter; the parameters are a topic and a number of messages.
COUNT = """
    INSERT INTO journal.counter (topic, total) VALUES (%s, %s)
    ON CONFLICT (topic) DO UPDATE SET total = counter.total + excluded.total
"""


class Identity(NamedTuple):
    """Where a message stands."""

    topic: str
    partition: int
    offset: int


class Record(NamedTuple):
    """A message as the scan found it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None

    @property
    def identity(self) -> Identity:
        return Identity(self.topic, self.partition, self.offset)


class Entry(NamedTuple):
    """An effect as the journal has it."""

    topic: str
    partition: int
    offset: int
    value: bytes | None
    worker: str
    xid: int

    @property
    def identity(self) -> Identity:
        return Identity(self.topic, self.partition, self.offset)


@dataclass(frozen=True)
class Verdict:
    """The comparison of a topic with its journal; `str` of it is fit for an assertion's message."""

    messages: int
    """How many the scan found."""
    lost: list[Identity]
    """In the topic, without an effect."""
    duplicated: dict[Identity, list[Entry]]
    """With more than one effect: all of them, with their workers and transactions."""
    foreign: list[Entry]
    """Effects of no message of the topic: its producer aborted it, or retention has removed it."""
    altered: list[Identity]
    """Effects with another value than the message's."""
    counted: int
    """The counter."""
    counter_ok: bool
    """Whether the counter equals the number of messages; also true where the test does not count."""

    @property
    def exact(self) -> bool:
        """Each message took effect exactly once, and nothing else did."""
        return self.counter_ok and not (self.lost or self.duplicated or self.foreign or self.altered)

    def __str__(self) -> str:
        kinds = ("lost", "duplicated", "foreign", "altered")
        found = ", ".join(f"{len(getattr(self, kind))} {kind}" for kind in kinds)
        firsts = [f"first {kind}: {next(iter(getattr(self, kind)))}" for kind in kinds if getattr(self, kind)]
        if self.duplicated:  # with its effects, whose workers and transactions tell how it came about
            firsts.append(f"its effects: {next(iter(self.duplicated.values()))}")
        return "\n".join([f"{self.messages} messages, {found}, counter {self.counted}", *firsts])


def create(conninfo: str) -> None:
    """Create an empty journal in place of one that is there."""
    with psycopg.connect(conninfo) as connection:
        connection.execute("DROP SCHEMA IF EXISTS journal CASCADE")
        connection.execute(CREATE)


def entry(message: Message, worker: str) -> tuple[str | None, int | None, int | None, bytes | None, str]:
    """Return the parameters of APPEND for a message."""
    return message.topic(), message.partition(), message.offset(), message.value(), worker


def entries(conninfo: str, topic: str) -> list[Entry]:
    query = """
        SELECT topic, partition, "offset", value, worker, xid::text::bigint FROM journal.entries
        WHERE topic = %s ORDER BY partition, "offset", xid
    """
    with psycopg.connect(conninfo) as connection:
        return [Entry(*row) for row in connection.execute(query, (topic,))]


def counted(conninfo: str, topic: str) -> int:
    with psycopg.connect(conninfo) as connection:
        row = connection.execute("SELECT total FROM journal.counter WHERE topic = %s", (topic,)).fetchone()
    return row[0] if row else 0


def scan(bootstrap_servers: str, topic: str, timeout_seconds: float = 60) -> list[Record]:
    """Read the whole topic, committed messages only, with a consumer and a group of its own.

    It reads to the end of the log as it is when the scan begins, open transactions included. A scan that
    stopped at the end which a `read_committed` consumer is shown would miss what an open transaction hides;
    this one waits for it, and raises TimeoutError in the end.
    """
    ends = log_ends(bootstrap_servers, topic, timeout_seconds)
    missing = dict(ends)
    records: list[Record] = []
    deadline = time.monotonic() + timeout_seconds
    consumer = plain_consumer(bootstrap_servers, "read_committed")
    try:
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in ends])
        while missing:
            if time.monotonic() > deadline:
                raise TimeoutError(f"partitions not read to the end (an open transaction hides it?): {missing}")
            for message in consumer.consume(10_000, timeout=0.1):
                partition, offset, error = message.partition(), message.offset(), message.error()
                assert partition is not None
                assert offset is not None
                if error is None:
                    records.append(Record(topic, partition, offset, message.key(), message.value()))
                elif error.code() != KafkaError._PARTITION_EOF:
                    raise RuntimeError(f"scan of {topic}: {error}")
                elif offset >= ends[partition]:  # not an end that a transaction shows while it is open
                    missing.pop(partition, None)
    finally:
        consumer.close()
    return sorted(records)


def compare(records: Iterable[Record], effects: Iterable[Entry], counter: int | None) -> Verdict:
    """Compare a scan with journal entries and, unless it is None, the counter."""
    values = {record.identity: record.value for record in records}
    effects = list(effects)
    times = Counter(effect.identity for effect in effects)
    duplicated: dict[Identity, list[Entry]] = {}
    for effect in effects:
        if times[effect.identity] > 1:
            duplicated.setdefault(effect.identity, []).append(effect)
    return Verdict(
        messages=len(values),
        lost=[identity for identity in values if identity not in times],
        duplicated=duplicated,
        foreign=[effect for effect in effects if effect.identity not in values],
        altered=[e.identity for e in effects if e.identity in values and values[e.identity] != e.value],
        counted=counter or 0,
        counter_ok=counter is None or counter == len(values),
    )


def check(conninfo: str, bootstrap_servers: str, topic: str, *, counts: bool = True) -> Verdict:
    """Scan the topic and compare it with its journal; `counts=False` where the handler left COUNT out."""
    counter = counted(conninfo, topic) if counts else None
    return compare(scan(bootstrap_servers, topic), entries(conninfo, topic), counter)


def plain_consumer(bootstrap_servers: str, isolation_level: str) -> Consumer:
    """Make a consumer that is of no group with others, commits nothing and reports the ends of logs."""
    return Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"scan-{uuid4()}",
            "isolation.level": isolation_level,
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 2,  # a broker that is away is no news
            "fetch.wait.max.ms": 10,  # the end is known from an empty answer, which the broker would hold back
        }
    )


def log_ends(bootstrap_servers: str, topic: str, timeout_seconds: float) -> dict[int, int]:
    """Return where each log ends; a read_committed consumer gets the start of the first open transaction."""
    consumer = plain_consumer(bootstrap_servers, "read_uncommitted")
    try:
        metadata = consumer.list_topics(topic, timeout=timeout_seconds).topics[topic]
        if metadata.error is not None:
            raise LookupError(f"{topic}: {metadata.error}")
        ends = {}
        for partition in metadata.partitions:
            of_partition = TopicPartition(topic, partition)
            ends[partition] = consumer.get_watermark_offsets(of_partition, timeout=timeout_seconds)[1]
        return ends
    finally:
        consumer.close()
