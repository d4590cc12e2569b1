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
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from exactly_once import embedded
from exactly_once.ledger.migrate import migrate
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

BATCH = 1000
Make = Callable[[], Filter[Any]]


def one_by_one(made: Filter[Any], keys: Sequence[Any]) -> None:
    """Reserve and confirm each key by itself."""
    reserve, confirm = made.reserve, made.confirm
    for key in keys:
        reserve(key)
        confirm(key)


def in_batches(made: Filter[Any], keys: Sequence[Any]) -> None:
    """Reserve and confirm a thousand at a time."""
    for start in range(0, len(keys), BATCH):
        batch = keys[start : start + BATCH]
        made.reserve_many(batch)
        made.confirm_many(batch)


def seconds(run: Callable[[Filter[Any], Sequence[Any]], None], make: Make, keys: Sequence[Any]) -> float:
    """Time one pass over the keys; the processor's time, because others may use this machine, too."""
    made = make()
    gc.collect()
    began = time.process_time()
    run(made, keys)
    return time.process_time() - began


def compare(name: str, make: Make, reference: Make, keys: Sequence[Any], rounds: int) -> str:
    """Alternate a filter with the reference; return a row of the table."""
    cells = []
    for run in (one_by_one, in_batches):
        ratios, times = [], []
        for _ in range(rounds):
            plain = seconds(run, reference, keys)
            own = seconds(run, make, keys)
            ratios.append(own / plain)
            times.append(own / len(keys) * 1e9)
        cells.append(
            f"{statistics.median(times):,.0f} | {statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"
        )
    return f"| {name} | {' | '.join(cells)} |"


def filters(count: int, rounds: int) -> Iterator[str]:
    """Compare every filter in memory with the plain set, 16-byte keys or numbers in order."""
    keys = [os.urandom(16) for _ in range(count)]
    # Slots for a window of a tenth of the keys, with one loss in a million.
    slots = slots_for(count // 10, 1e-6, 8) // 16 * 16 + 16
    yield "| filter | ns a key | ratio, one by one | ns a key | ratio, batches of 1,000 |"
    yield "|---|---|---|---|---|"
    yield compare("WindowFilter", lambda: WindowFilter(keys=count // 4), ReferenceFilter, keys, rounds)
    for ways in (1, 8, 16):
        make = lambda ways=ways: SlotFilter(slots, ways=ways)  # noqa: E731
        yield compare(f"SlotFilter, {ways} ways, whole keys", make, ReferenceFilter, keys, rounds)  # type: ignore[arg-type]
    for bits in (64, 128):
        make = lambda bits=bits: SlotFilter(slots, ways=8, fingerprint=bits)  # noqa: E731
        yield compare(f"SlotFilter, 8 ways, {bits} bits", make, ReferenceFilter, keys, rounds)  # type: ignore[arg-type]
    yield compare("SequenceFilter, in order", SequenceFilter, PlainSet, list(range(count)), rounds)
    links = [Link("chain", n) for n in range(count)]
    plain = [("chain", n) for n in range(count)]
    yield against_tuples("ChainFilter, dense, in order", lambda: ChainFilter(dense=True), links, plain, rounds)
    yield f"8 ways: {slots:,} slots, 8 bytes each and the keys (49 bytes) or 8 or 16 bytes each in all"


def against_tuples(name: str, make: Make, keys: Sequence[Any], plain: Sequence[Any], rounds: int) -> str:
    """As compare, where the filter's own keys would be slow in a set."""
    cells = []
    for run in (one_by_one, in_batches):
        pairs = [(seconds(run, PlainSet, plain), seconds(run, make, keys)) for _ in range(rounds)]
        ratios = [own / base for base, own in pairs]
        per_key = statistics.median(own for _, own in pairs) / len(keys) * 1e9
        cells.append(f"{per_key:,.0f} | {statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]")
    return f"| {name} | {' | '.join(cells)} |"


def growth(limit: int) -> Iterator[str]:
    """Show that memory and time do not grow with the keys seen."""
    yield "| keys seen | WindowFilter(100,000): MB, ns a key | SlotFilter(2**17, 8 ways, 64 bits): MB, ns a key |"
    yield "|---|---|---|"
    window, slots = WindowFilter(keys=100_000), SlotFilter(1 << 17, ways=8, fingerprint=64)
    seen = {id(window): 0, id(slots): 0}
    count = 10_000
    while count <= limit:
        cells = []
        for made in (window, slots):
            before, began = seen[id(made)], time.process_time()
            feed(made, before, count)
            passed = time.process_time() - began
            seen[id(made)] = count
            cells.append(f"{resident_mb():,.0f}, {passed / max(1, count - before) * 1e9:,.0f}")
        yield f"| {count:,} | {' | '.join(cells)} |"
        count *= 10


def feed(made: Filter[Any], start: int, end: int) -> None:
    """Send keys from start to end in batches."""
    numbers = iter(range(start, end))
    while batch := [b"%016d" % n for n in islice(numbers, BATCH)]:
        made.reserve_many(batch)
        made.confirm_many(batch)


def resident_mb() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def postgres(batches: int, rounds: int) -> Iterator[str]:
    """Compare reserve and confirm with one bare INSERT of the same keys."""
    yield "| keys a batch | bare INSERT, keys/s | reserved and confirmed, keys/s | ratio, median [min-max] |"
    yield "|---|---|---|---|"
    with (
        embedded.Postgres(settings={"max_wal_size": "8GB"}) as server,
        psycopg.connect(server.conninfo, autocommit=True) as connection,
    ):
        migrate(connection)
        connection.execute("CREATE TABLE bare (key bytea PRIMARY KEY)")
        with PublishOwner(server.conninfo) as owner:
            made = PostgresWindow(owner, scope="bench", seconds=3600)
            for size in (100, 1000, 10_000):
                ratios, rates = [], []
                for _ in range(rounds):
                    keys = [[os.urandom(16) for _ in range(size)] for _ in range(max(5, batches * 1000 // size))]
                    bare, own = bare_insert(connection, keys), reserve_and_confirm(made, keys)
                    ratios.append(own / bare)
                    rates.append((bare, own))
                    connection.execute("CHECKPOINT")
                bare, own = (statistics.median(column) for column in zip(*rates, strict=True))
                yield (
                    f"| {size:,} | {bare:,.0f} | {own:,.0f} "
                    f"| {statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}] |"
                )


def bare_insert(connection: psycopg.Connection[Any], batches: list[list[bytes]]) -> float:
    """Return keys a second."""
    began = time.perf_counter()
    for keys in batches:
        connection.execute("INSERT INTO bare SELECT * FROM unnest(%s::bytea[]) ON CONFLICT DO NOTHING", [keys])
    return sum(map(len, batches)) / (time.perf_counter() - began)


def reserve_and_confirm(made: Filter[Any], batches: list[list[bytes]]) -> float:
    """Return keys a second."""
    began = time.perf_counter()
    for keys in batches:
        made.reserve_many(keys)
        made.confirm_many(keys)
    return sum(map(len, batches)) / (time.perf_counter() - began)


def producer(messages: int, rounds: int) -> Iterator[str]:
    """Compare the producer with confluent-kafka's own, with the same settings and a delivery callback.

    Messages a second of the processor's time, the client's threads included.
    """
    yield "| producer | messages/s of processor time, median | ratio, median [min-max] |"
    yield "|---|---|---|"
    with embedded.Kafka() as kafka:
        runs = {
            "confluent_kafka.Producer, delivery callback": plain_rate,
            "DedupProducer with WindowFilter": dedup_rate,
            "the same with a set kept by hand, a closure for each message": by_hand_rate,
            "the same, produce_many with 1,000 records": many_rate,
            "the same, produce_many with 1,000 payloads and their keys": payloads_rate,
            "confluent_kafka.Producer with one header": header_rate,
            "DedupProducer with SequenceFilter": sequence_rate,
            "the same, produce_many with 1,000 payloads and their numbers": numbers_rate,
        }
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + 1):
            for name, run in runs.items():
                rate = run(kafka.bootstrap_servers, messages)
                if number:  # the first round warms up
                    rates[name].append(rate)
        plain = next(iter(rates.values()))
        for name, found in rates.items():
            ratios = [a / b for a, b in zip(found, plain, strict=True)]
            low, high = min(ratios), max(ratios)
            rate, ratio = statistics.median(found), statistics.median(ratios)
            yield f"| {name} | {rate:,.0f} | {ratio:.2f} [{low:.2f}-{high:.2f}] |"


def settings(bootstrap_servers: str) -> dict[str, Any]:
    """Give all the same client."""
    return {
        "bootstrap.servers": bootstrap_servers,
        "enable.idempotence": True,
        "acks": "all",
        "linger.ms": 20,
        "queue.buffering.max.messages": 1_000_000,
    }


def make_topic(bootstrap_servers: str) -> str:
    """Create an empty topic."""
    name = f"bench-{uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.create_topics([NewTopic(name, 3, 1)])[name].result(30)
    return name


def plain_rate(bootstrap_servers: str, messages: int) -> float:
    """Produce as an ordinary program does."""
    topic, client = make_topic(bootstrap_servers), Producer(settings(bootstrap_servers))
    failed = 0

    def delivered(error: object, _: object) -> None:
        nonlocal failed
        failed += error is not None

    began = time.process_time()
    for n in range(messages):
        client.produce(topic, b"%0100d" % n, on_delivery=delivered)
        if not n % BATCH:
            client.poll(0)
    client.flush()
    assert not failed
    return messages / (time.process_time() - began)


def dedup_rate(bootstrap_servers: str, messages: int) -> float:
    """The same with a key for each message."""
    topic = make_topic(bootstrap_servers)
    with DedupProducer(settings(bootstrap_servers), dedup=WindowFilter(keys=messages)) as client:
        client.filter_of(topic)
        began = time.process_time()
        for n in range(messages):
            value = b"%0100d" % n
            client.produce(topic, value, dedup_key=value[-16:])
            if not n % BATCH:
                client.poll(0)
        client.flush()
        return messages / (time.process_time() - began)


def many_rate(bootstrap_servers: str, messages: int) -> float:
    """The same with a thousand messages a call."""
    topic = make_topic(bootstrap_servers)
    with DedupProducer(settings(bootstrap_servers), dedup=WindowFilter(keys=messages)) as client:
        client.filter_of(topic)
        began = time.process_time()
        for start in range(0, messages, BATCH):
            values = [b"%0100d" % n for n in range(start, start + BATCH)]
            client.produce_many(topic, [ProducerRecord(value, dedup_key=value[-16:]) for value in values])
            client.poll(0)
        client.flush()
        return messages / (time.process_time() - began)


def by_hand_rate(bootstrap_servers: str, messages: int) -> float:
    """What one would write: a set of what was acknowledged."""
    topic, client = make_topic(bootstrap_servers), Producer(settings(bootstrap_servers))
    seen: set[bytes] = set()
    began = time.process_time()
    for n in range(messages):
        value = b"%0100d" % n
        key = value[-16:]
        if key not in seen:

            def delivered(error: object, _: object, key: bytes = key) -> None:
                if error is None:
                    seen.add(key)

            client.produce(topic, value, on_delivery=delivered)
        if not n % BATCH:
            client.poll(0)
    client.flush()
    return messages / (time.process_time() - began)


def header_rate(bootstrap_servers: str, messages: int) -> float:
    """What numbered messages must be compared with: they carry a header."""
    topic, client = make_topic(bootstrap_servers), Producer(settings(bootstrap_servers))
    failed = 0

    def delivered(error: object, _: object) -> None:
        nonlocal failed
        failed += error is not None

    began = time.process_time()
    for n in range(messages):
        headers = [("exactly-once-sequence", b"%d:%d:name" % (n - 1, n))]
        client.produce(topic, b"%0100d" % n, headers=headers, on_delivery=delivered)
        if not n % BATCH:
            client.poll(0)
    client.flush()
    assert not failed
    return messages / (time.process_time() - began)


def payloads_rate(bootstrap_servers: str, messages: int) -> float:
    """As many_rate, without a record for each message."""
    topic = make_topic(bootstrap_servers)
    with DedupProducer(settings(bootstrap_servers), dedup=WindowFilter(keys=messages)) as client:
        client.filter_of(topic)
        began = time.process_time()
        for start in range(0, messages, BATCH):
            values = [b"%0100d" % n for n in range(start, start + BATCH)]
            client.produce_many(topic, values, dedup_keys=[value[-16:] for value in values])
            client.poll(0)
        client.flush()
        return messages / (time.process_time() - began)


def numbers_rate(bootstrap_servers: str, messages: int) -> float:
    """As payloads_rate, with numbers."""
    topic = make_topic(bootstrap_servers)
    with DedupProducer(settings(bootstrap_servers), dedup=SequenceFilter(max_outstanding=messages)) as client:
        client.filter_of(topic)
        began = time.process_time()
        for start in range(0, messages, BATCH):
            values = [b"%0100d" % n for n in range(start, start + BATCH)]
            client.produce_many(topic, values, sequences=range(start, start + BATCH))
            client.poll(0)
        client.flush()
        return messages / (time.process_time() - began)


def sequence_rate(bootstrap_servers: str, messages: int) -> float:
    """The same with a number, which is written into a header."""
    topic = make_topic(bootstrap_servers)
    with DedupProducer(settings(bootstrap_servers), dedup=SequenceFilter(max_outstanding=messages)) as client:
        client.filter_of(topic)
        began = time.process_time()
        for n in range(messages):
            client.produce(topic, b"%0100d" % n, sequence=n)
            if not n % BATCH:
                client.poll(0)
        client.flush()
        return messages / (time.process_time() - began)


def main() -> None:
    """Run the parts that were asked for, print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--growth-keys", type=int, default=10_000_000, help="100 million take some minutes")
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["filters", "growth", "postgres", "producer"])
    args = parser.parse_args()
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "filters": lambda: filters(args.keys, args.rounds),
        "growth": lambda: growth(args.growth_keys),
        "postgres": lambda: postgres(args.batches, args.rounds),
        "producer": lambda: producer(args.messages, args.rounds),
    }
    for name in [args.only] if args.only else parts:
        for line in parts[name]():
            print(line, flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
