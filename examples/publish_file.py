"""Publish the lines of a file, each with its byte offset as sequence id; kill it at any time and start it again.

    python examples/publish_file.py FILE TOPIC [--plain]

A start goes on behind the last line that is surely in the topic, and what lies beyond it there is not sent again.
``--plain`` uses confluent-kafka's own producer and a file that says how far it came, to show what happens otherwise.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from confluent_kafka import KafkaError, Message, Producer

from exactly_once.publish import DedupProducer, SequenceFilter, SnapshotFile

KAFKA = {"bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"], "linger.ms": 2}


def lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the text of every line from ``start`` on."""
    with path.open("rb") as file:
        file.seek(start)
        while line := file.readline():
            yield file.tell() - len(line), line.rstrip(b"\n")


def publish(path: Path, topic: str) -> None:
    """Publish every line once, whatever happened before."""
    snapshots = SnapshotFile(path.with_suffix(".snapshot"))
    with DedupProducer(
        KAFKA, dedup=SequenceFilter(), producer_name=path.name, snapshots=lambda _: snapshots
    ) as producer:
        last = producer.last_sequence_id(topic)
        for offset, line in lines(path, max(last, 0)):
            while True:
                try:
                    producer.produce(topic, line, sequence=offset)
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)


def publish_plain(path: Path, topic: str) -> None:
    """Do the same as well as it goes without a filter: note after each report how far it came."""
    progress = path.with_suffix(".progress")
    last = int(progress.read_text() or -1) if progress.exists() else -1
    producer = Producer({**KAFKA, "enable.idempotence": True})

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is None:
            progress.write_text(str((message.value() or b"").split(b",")[0].decode()))

    for offset, line in lines(path, max(last, 0)):
        if offset == last:
            continue
        while True:
            try:
                producer.produce(topic, line, on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    producer.flush()


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("topic")
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    (publish_plain if args.plain else publish)(args.file, args.topic)


if __name__ == "__main__":
    main()
