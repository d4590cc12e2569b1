"""Publish the lines of a file, each with its byte offset as sequence id; kill it at any time and start it again.

    python examples/publish_file.py FILE TOPIC [--plain]

A start goes on behind the last line that is surely in the topic, and what lies beyond it there is not sent again. The
file may grow: a last line without its end is left for the next start. One that was written over is refused.
``--plain`` uses confluent-kafka's own producer and a file that says how far it came, to show what happens otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from exactly_once import ExactlyOnceError
from exactly_once.publish import DedupProducer, SequenceFilter, Undelivered

KAFKA = {"bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"], "linger.ms": 2}


def lines(path: Path, start: int, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the text of every line from ``start`` on, of those that begin before ``end``."""
    with path.open("rb") as file:
        file.seek(start)
        while (end is None or file.tell() < end) and (line := file.readline()):
            yield file.tell() - len(line), line.rstrip(b"\n")


def name_of(path: Path) -> str:
    """Return the name under which the lines of this very file are numbered: its place and inode.

    A file of the same name in another directory, or one that took its place, has other numbers; if it has got the
    inode of a file that was deleted, its lines are others than those noted, and it is refused.
    """
    place = f"{path}:{path.stat().st_ino}".encode()
    return f"{path.name}-{blake2b(place, digest_size=16).hexdigest()}"


def whole_lines(path: Path, name: str) -> int:
    """Return where the last whole line ends; note a digest of all before it, and compare what was noted last.

    Numbers are places in the file, so a file that is written over in place would have other lines under old numbers.

    :raises SystemExit: when it was.
    """
    note = path.with_name(f".{path.name}-{blake2b(name.encode(), digest_size=8).hexdigest()}.published")
    noted = json.loads(note.read_text()) if note.exists() else {"end": 0, "digest": ""}
    digest, end, is_same = blake2b(), 0, not noted["end"]
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                digest.update(line)
                end += len(line)
            if end == noted["end"] > 0:
                is_same = digest.hexdigest() == noted["digest"]
    if not is_same:
        raise SystemExit(
            f"{path} is not the file any more of which {name} has published {noted['end']} bytes: give it a --name of "
            "its own, and it is published from its beginning"
        )
    # Before any of these lines is sent, and whole or not at all.
    written = note.with_suffix(".new")
    written.write_text(json.dumps({"end": end, "digest": digest.hexdigest()}))
    written.replace(note)
    return end


def send(producer: Producer | DedupProducer, topic: str, line: bytes, **options: Any) -> None:
    """Hand over a line, and wait for room where too many are on their way."""
    while True:
        try:
            producer.produce(topic, line, **options)
            break
        except BufferError:
            producer.poll(0.1)
    producer.poll(0)


def publish(path: Path, topic: str, *, name: str | None, is_new: bool) -> None:
    """Publish every line once, whatever happened before.

    :raises SystemExit: when the topic does not hold all of them at the end.
    """
    path = path.resolve()  # by whatever link it is reached, it is this file, with what is noted beside it
    name, end = name or name_of(path), -1
    whole = whole_lines(path, name)
    with DedupProducer(
        KAFKA, dedup=SequenceFilter(), producer_name=name, snapshots=path.parent, accept_trimmed=is_new
    ) as producer:
        last = producer.last_sequence_id(topic)
        if last >= whole:
            raise SystemExit(f"{topic} has line {last} of {name}, but {path} has none there: it is another file")
        for offset, line in lines(path, max(last, 0), whole):
            send(producer, topic, line, sequence=offset)
            end = offset
        failure = ""
        try:
            producer.flush()
        except Undelivered as error:  # refused by the broker, or it was away for too long
            failure = f": {error}"
        last = producer.last_sequence_id(topic)
    if last != end:
        raise SystemExit(f"published up to the line at {last}, not up to the last one at {end}{failure}. Run it again")


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
        send(producer, topic, line, on_delivery=delivered)
    producer.flush()


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("topic")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--name", help="of the file, if it is moved between runs; lines of one name are numbered once")
    parser.add_argument(
        "--new", action="store_true", help="it was never published: the topic has lost its oldest lines"
    )
    args = parser.parse_args()
    try:
        if args.plain:
            publish_plain(args.file, args.topic)
        else:
            publish(args.file, args.topic, name=args.name, is_new=args.new)
    except (OSError, ExactlyOnceError) as error:  # no such file, no such topic, another process of this name, ...
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
