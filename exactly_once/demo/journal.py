"""The oracle: what took effect in Postgres against what is in the topic; it shares nothing with the library."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from uuid import uuid4

import tenacity
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

# What clients report of a partition while its broker is down or its next leader is not known to all.
_NO_LEADER = {
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
}


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
    """The comparison of a topic with the effects of its messages."""

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


def compare(records: Iterable[Record], effects: Iterable[Entry]) -> Verdict:
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
    )


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
    # While a broker comes back, the client says of a partition without a leader that it is unknown.
    until_led = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda e: isinstance(e, KafkaException) and e.args[0].code() in _NO_LEADER),
        wait=tenacity.wait_fixed(0.1),  # a broker takes seconds to be back
        stop=tenacity.stop_after_delay(timeout_seconds),
        reraise=True,
    )
    try:
        metadata = consumer.list_topics(topic, timeout=timeout_seconds).topics[topic]
        if metadata.error is not None:
            raise LookupError(f"{topic}: {metadata.error}")
        ends = {}
        for partition in metadata.partitions:
            of_partition = TopicPartition(topic, partition)
            _, ends[partition] = until_led(consumer.get_watermark_offsets, of_partition, timeout=timeout_seconds)
        return ends
    finally:
        consumer.close()
