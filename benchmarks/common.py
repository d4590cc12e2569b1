"""What the benchmarks have in common: topics, how a client reads them, and how figures are shown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from uuid import uuid4

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic


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
        while True:
            try:
                producer.produce(topic, value, partition=number % partitions)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(120) == 0
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


def spread(figures: Sequence[float]) -> str:
    """Return the median of ratios, and their range."""
    return f"{statistics.median(figures):.2f} [{min(figures):.2f}-{max(figures):.2f}]"


def ratio(left: Iterable[float], right: Iterable[float]) -> str:
    """The same of the ratios of one round each."""
    return spread([a / b for a, b in zip(left, right, strict=True)])


def show(lines: Iterator[str]) -> None:
    """Print a table as it comes."""
    for line in lines:
        print(line, flush=True)
    print(flush=True)
