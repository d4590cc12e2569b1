"""What the publish filters cost: ratios to a plain set behind the same protocol, and to what one would do by hand.

    python benchmarks/filters.py [--only filters|growth|postgres|producer] [--keys N] [--rounds N]

Programs that are compared alternate in one process, and their ratio is what counts.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import psycopg
from common import Connection, by_turns, make_tables, make_topic, ratio, show, spread, timed
from confluent_kafka import KafkaError, KafkaException, Producer

from exactly_once import embedded
from exactly_once.publish import (
    ChainFilter,
    DedupProducer,
    Filter,
    Link,
    PostgresWindow,
    ProducerRecord,
    PublishOwner,
    SequenceFilter,
    SlotFilter,
    WindowFilter,
    slots_for,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.publish.reference import PlainSet, ReferenceFilter

BATCH = 1000  # what producers hand over at a time, and as often poll
PARTITIONS = 3
Make = Callable[[], Filter[Any]]


def one_by_one(made: Filter[Any], keys: Sequence[Any]) -> None:
    """Reserve and confirm each key by itself."""
    reserve, confirm = made.reserve, made.confirm
    for key in keys:
        reserve(key)
        confirm(key)


def in_batches(made: Filter[Any], keys: Iterable[Any], size: int = BATCH) -> None:
    """Reserve and confirm a thousand at a time, or another number."""
    left = iter(keys)
    while batch := list(islice(left, size)):
        made.reserve_many(batch)
        made.confirm_many(batch)


def seconds(run: Callable[[Filter[Any], Sequence[Any]], None], make: Make, keys: Sequence[Any]) -> float:
    """Time one pass over the keys; the processor's time, because others may use this machine, too."""
    made = make()
    gc.collect()  # of what the program before has left
    began = time.process_time()
    run(made, keys)
    return time.process_time() - began


def compare(
    name: str, make: Make, reference: Make, keys: Sequence[Any], *, rounds: int, plain: Sequence[Any] | None = None
) -> str:
    """Alternate a filter with the reference; return a row of the table.

    The reference gets *plain* where the filter's own keys would be slow in a set.
    """
    cells = []
    for run in (one_by_one, in_batches):
        pairs = [(seconds(run, reference, plain or keys), seconds(run, make, keys)) for _ in range(rounds)]
        per_key = statistics.median(own for _, own in pairs) / len(keys) * 1e9
        cells.append(f"{per_key:,.0f} | {spread([own / base for base, own in pairs])}")
    return f"| {name} | {' | '.join(cells)} |"


def filters(count: int, rounds: int) -> Iterator[str]:
    """Compare every filter in memory with the plain set, 16-byte keys or numbers in order."""
    keys = [os.urandom(16) for _ in range(count)]
    # Slots for a window of a tenth of the keys, with one loss in a million.
    slots = slots_for(count // 10, 1e-6, 8) // 16 * 16 + 16
    yield "| filter | ns a key | ratio, one by one | ns a key | ratio, batches of 1,000 |"
    yield "|---|---|---|---|---|"
    yield compare("WindowFilter", lambda: WindowFilter(keys=count // 4), ReferenceFilter, keys, rounds=rounds)
    for ways in (1, 8, 16):
        make = lambda ways=ways: SlotFilter(slots, ways=ways)  # noqa: E731
        yield compare(f"SlotFilter, {ways} ways, whole keys", make, ReferenceFilter, keys, rounds=rounds)  # type: ignore[arg-type]
    for bits in (64, 128):
        make = lambda bits=bits: SlotFilter(slots, ways=8, fingerprint=bits)  # noqa: E731
        yield compare(f"SlotFilter, 8 ways, {bits} bits", make, ReferenceFilter, keys, rounds=rounds)  # type: ignore[arg-type]
    yield compare("SequenceFilter, in order", SequenceFilter, PlainSet, list(range(count)), rounds=rounds)
    links = [Link("chain", n) for n in range(count)]
    plain = [("chain", n) for n in range(count)]
    yield compare(
        "ChainFilter, dense, in order", lambda: ChainFilter(dense=True), PlainSet, links, rounds=rounds, plain=plain
    )
    yield f"8 ways: {slots:,} slots, 8 bytes each and the keys (49 bytes) or 8 or 16 bytes each in all"


def growth(limit: int) -> Iterator[str]:
    """Show that memory and time do not grow with the keys seen."""
    yield "| keys seen | WindowFilter(100,000): MB, ns a key | SlotFilter(2**17, 8 ways, 64 bits): MB, ns a key |"
    yield "|---|---|---|"
    window, slots = WindowFilter(keys=100_000), SlotFilter(1 << 17, ways=8, fingerprint=64)
    seen = {id(window): 0, id(slots): 0}
    count = 10_000  # a tenth of what the filters hold; from the second step on they are full
    while count <= limit:
        cells = []
        for made in (window, slots):
            before, began = seen[id(made)], time.process_time()
            in_batches(made, (b"%016d" % n for n in range(before, count)))
            passed = time.process_time() - began
            seen[id(made)] = count
            cells.append(
                f"{psutil.Process().memory_info().rss / 1e6:,.0f}, {passed / max(1, count - before) * 1e9:,.0f}"
            )
        yield f"| {count:,} | {' | '.join(cells)} |"
        count *= 10


def postgres(batches: int, rounds: int) -> Iterator[str]:
    """Compare reserve and confirm with one bare INSERT of the same keys."""
    yield "| keys a batch | bare INSERT, keys/s | reserved and confirmed, keys/s | ratio, median [min-max] |"
    yield "|---|---|---|---|"
    with (
        embedded.Postgres(settings={"max_wal_size": "8GB"}) as server,
        psycopg.connect(server.conninfo, autocommit=True) as connection,
    ):
        make_tables(server.conninfo, "CREATE TABLE bare (key bytea PRIMARY KEY)")
        with PublishOwner(server.conninfo) as owner:
            made = PostgresWindow(owner, scope="bench", seconds=3600)  # longer than the run: no key expires
            for size in (100, 1000, 10_000):
                bare, own = [], []
                for _ in range(rounds):
                    keys = [os.urandom(16) for _ in range(size * max(5, batches * 1000 // size))]
                    bare.append(len(keys) / timed(partial(bare_insert, connection, keys, size)))
                    own.append(len(keys) / timed(partial(in_batches, made, keys, size)))
                    connection.execute("CHECKPOINT")  # else the next one pays for it
                rates = " | ".join(f"{statistics.median(found):,.0f}" for found in (bare, own))
                yield f"| {size:,} | {rates} | {ratio(own, bare)} |"


def bare_insert(connection: Connection, keys: Sequence[bytes], size: int) -> None:
    for start in range(0, len(keys), size):
        batch = [keys[start : start + size]]
        connection.execute("INSERT INTO bare SELECT * FROM unnest(%s::bytea[]) ON CONFLICT DO NOTHING", batch)


def producer(messages: int, rounds: int) -> Iterator[str]:
    """Compare the producer with confluent-kafka's own, with the same settings and a delivery callback.

    Messages a second of the processor's time, the client's threads included.
    """
    yield "| producer | messages/s of processor time, median | ratio, median [min-max] |"
    yield "|---|---|---|"
    with embedded.Kafka() as kafka:
        runs: dict[str, Callable[[str, int], float]] = {
            "confluent_kafka.Producer, delivery callback": partial(plain_rate, send=plain),
            "DedupProducer with WindowFilter": partial(key_rate, send=keyed),
            "the same with a set kept by hand, a closure for each message": by_hand_rate,
            "the same, produce_many with 1,000 records": partial(key_rate, send=keyed_records),
            "the same, produce_many with 1,000 payloads and their keys": partial(key_rate, send=keyed_payloads),
            "confluent_kafka.Producer with one header": partial(plain_rate, send=with_header),
            "DedupProducer with SequenceFilter": partial(number_rate, send=numbered),
            "the same, produce_many with 1,000 payloads and their numbers": partial(
                number_rate, send=numbered_payloads
            ),
        }
        measured = {name: partial(run, kafka.bootstrap_servers, messages) for name, run in runs.items()}
        rates = by_turns(measured, rounds, warms_up=True)
        for name, found in rates.items():
            yield f"| {name} | {statistics.median(found):,.0f} | {ratio(found, next(iter(rates.values())))} |"


def settings(bootstrap_servers: str) -> dict[str, Any]:
    """Give all the same client."""
    return {
        "bootstrap.servers": bootstrap_servers,
        "enable.idempotence": True,
        "acks": "all",
        "linger.ms": 20,  # large batches for all: what the client itself costs is not the question
        "queue.buffering.max.messages": 1_000_000,  # all of a run: no program waits for the broker
    }


# Hands a thousand numbered messages to a producer.
Send = Callable[[Any, str, range], object]


def rate(client: Any, bootstrap_servers: str, messages: int, send: Send) -> float:
    """Produce a thousand messages after the other; every program has this loop."""
    topic = make_topic(bootstrap_servers, PARTITIONS)
    if isinstance(client, DedupProducer):
        client.filter_of(topic)  # what starting up costs is no cost of a message
    began = time.process_time()
    for start in range(0, messages, BATCH):
        send(client, topic, range(start, start + BATCH))
        client.poll(0)
    client.flush()
    return messages / (time.process_time() - began)


def plain_rate(bootstrap_servers: str, messages: int, send: Send) -> float:
    return rate(Producer(settings(bootstrap_servers)), bootstrap_servers, messages, send)


def key_rate(bootstrap_servers: str, messages: int, send: Send) -> float:
    with DedupProducer(settings(bootstrap_servers), dedup=WindowFilter(keys=messages)) as client:
        return rate(client, bootstrap_servers, messages, send)


def number_rate(bootstrap_servers: str, messages: int, send: Send) -> float:
    with DedupProducer(settings(bootstrap_servers), dedup=SequenceFilter(max_outstanding=messages)) as client:
        return rate(client, bootstrap_servers, messages, send)


def by_hand_rate(bootstrap_servers: str, messages: int) -> float:
    """What one would write: a set of what was acknowledged."""
    seen: set[bytes] = set()

    def send(client: Producer, topic: str, numbers: range) -> None:
        for n in numbers:
            value = b"%0100d" % n
            key = value[-16:]
            if key not in seen:

                def delivered(error: object, _: object, key: bytes = key) -> None:
                    if error is None:
                        seen.add(key)

                client.produce(topic, value, on_delivery=delivered)

    return plain_rate(bootstrap_servers, messages, send)


def delivered(error: KafkaError | None, _: object) -> None:
    if error is not None:
        raise KafkaException(error)


def plain(client: Producer, topic: str, numbers: range) -> None:
    for n in numbers:
        client.produce(topic, b"%0100d" % n, on_delivery=delivered)


def with_header(client: Producer, topic: str, numbers: range) -> None:
    """What numbered messages must be compared with: they carry a header."""
    for n in numbers:
        headers = [("exactly-once-sequence", b"%d:%d:name" % (n - 1, n))]
        client.produce(topic, b"%0100d" % n, headers=headers, on_delivery=delivered)


def keyed(client: DedupProducer, topic: str, numbers: range) -> None:
    for n in numbers:
        value = b"%0100d" % n
        client.produce(topic, value, dedup_key=value[-16:])


def keyed_records(client: DedupProducer, topic: str, numbers: range) -> None:
    values = [b"%0100d" % n for n in numbers]
    client.produce_many(topic, [ProducerRecord(value, dedup_key=value[-16:]) for value in values])


def keyed_payloads(client: DedupProducer, topic: str, numbers: range) -> None:
    values = [b"%0100d" % n for n in numbers]
    client.produce_many(topic, values, dedup_keys=[value[-16:] for value in values])


def numbered(client: DedupProducer, topic: str, numbers: range) -> None:
    for n in numbers:
        client.produce(topic, b"%0100d" % n, sequence=n)


def numbered_payloads(client: DedupProducer, topic: str, numbers: range) -> None:
    client.produce_many(topic, [b"%0100d" % n for n in numbers], sequences=numbers)


def main() -> None:
    """Run the parts that were asked for, print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--growth-keys", type=int, default=10_000_000, help="100 million take some minutes")
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("filters", "growth", "postgres", "producer"))
    args = parser.parse_args()
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "filters": lambda: filters(args.keys, args.rounds),
        "growth": lambda: growth(args.growth_keys),
        "postgres": lambda: postgres(args.batches, args.rounds),
        "producer": lambda: producer(args.messages, args.rounds),
    }
    show(parts, args.only)


if __name__ == "__main__":
    main()
