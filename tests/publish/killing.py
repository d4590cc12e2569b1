"""Kills publishers with -9 at random moments while a replica lags, and counts what is lost or doubled in their topics.

    python -m tests.publish.killing KILLS [SEED]

starts three brokers and Postgres, kills a publisher of each kind so many times, lets another one finish, prints what
became of each kind, and exits with 1 where one lost or doubled anything. A follower of all partitions stands still
again and again, so that messages are in a leader's log which nobody is shown. The topics are read by a plain consumer;
a key may be there once more for each time that its filter said so before it was sent.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from exactly_once import embedded
from exactly_once.demo.journal import scan
from exactly_once.embedded.kafka import Kafka
from exactly_once.ledger.migrate import migrate
from exactly_once.publish import (
    DedupProducer,
    NotDelivered,
    PostgresWindow,
    ProducerRecord,
    PublishOwner,
    SequenceFilter,
    State,
    TopicTakeOver,
    end_positions,
)
from tests.support.topics import until_in_sync
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
# Two brokers lead; the third one only follows, so it is the one that may stand still.
LEADERS, FOLLOWER = (1, 2), 3
PARTITIONS = 4
BROKER = {
    # A life without transactions waits for so long before it reads the topic.
    "replica.lag.time.max.ms": "3000",
    # The follower stands still for less.
    "broker.session.timeout.ms": "20000",
}
A_LIFE = 4000
"""So many messages more may each life send; it hardly gets there before it is killed."""
A_BATCH = 50
PAUSE_SECONDS = 0.03
"""Between two batches: 1,000 messages a second and more would be a full queue after a while."""
LEASE_SECONDS = 3.0
START_SECONDS = 180.0
END_SECONDS, A_SECOND = 180.0, 200
"""How long the last life may take to end, and how many messages a second it sends at the least: all are left to it."""


def say(*words: object) -> None:
    """Print a line that is there when the process is killed behind it."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Telling(PostgresWindow):
    """Tells of each key that it lets through in doubt, before its message is sent."""

    def reserve_many(self, keys: Iterable[Any], *, map_version: int | None = None) -> list[State]:
        wanted = list(keys)
        states = super().reserve_many(wanted, map_version=map_version)
        for key, state in zip(wanted, states, strict=True):
            if state is State.UNKNOWN:
                say("may repeat", key)
        return states


def publish_numbers(kafka: dict[str, Any], topic: str, place: Path, until: int, *, transactions: bool) -> None:
    """Publish numbers from where the last life came to; send again what failed."""
    options: dict[str, Any] = {"transactions": transactions, "commit_messages": 200, "commit_seconds": 0.1}
    with DedupProducer(
        kafka, dedup=SequenceFilter(), producer_name=f"killed-{topic}", snapshots=place, **options
    ) as producer:
        while (last := producer.last_sequence_id(topic)) < until - 1:
            # The last one is sent again, too: it must be known.
            for start in range(max(last, 0), until, A_BATCH):
                for n in range(start, min(start + A_BATCH, until)):
                    producer.produce(topic, b"%d" % n, partition=n % PARTITIONS, sequence=n)
                producer.poll()
                say("sending")
                time.sleep(PAUSE_SECONDS)
            producer.flush()


def publish_keys(kafka: dict[str, Any], topic: str, place: Path, until: int, conninfo: str) -> None:
    """Publish keys from where the last life noted that it was, and those before that are not confirmed."""
    note = place / topic
    start = int(note.read_text()) if note.exists() else 0
    take_over = TopicTakeOver(kafka)

    def window(name: str) -> PostgresWindow:
        return Telling(owner, scope=name, seconds=86_400, take_over=take_over)

    with (
        PublishOwner(
            conninfo,
            name=f"killed-{topic}",
            exclusive=True,
            wait_seconds=60,
            lease_seconds=LEASE_SECONDS,
            positions=lambda: end_positions(kafka, [topic]),
        ) as owner,
        DedupProducer(kafka, dedup=window) as producer,
    ):
        for first in range(start, until, A_BATCH):
            left = list(range(first, min(first + A_BATCH, until)))
            while left:
                records = [ProducerRecord(b"%d" % n, dedup_key=n, partition=n % PARTITIONS) for n in left]
                deliveries = producer.produce_many(topic, records)
                say("sending")
                left = [n for n, delivery in zip(left, deliveries, strict=True) if not is_delivered(delivery)]
                time.sleep(PAUSE_SECONDS)
            if first >= start + 4 * A_BATCH:
                note.with_suffix(".new").write_text(str(first - 4 * A_BATCH))
                note.with_suffix(".new").replace(note)


def is_delivered(delivery: Any) -> bool:
    """Wait for a message, and tell whether it is in the topic."""
    try:
        delivery.result()
    except NotDelivered:
        return False
    return True


KINDS: dict[str, Callable[..., None]] = {
    "numbers in transactions": lambda *given: publish_numbers(*given[:4], transactions=True),
    "numbers without transactions": lambda *given: publish_numbers(*given[:4], transactions=False),
    "keys": publish_keys,
}


def work(kind: str, *arguments: str) -> None:
    """Publish in a process of its own."""
    bootstrap_servers, topic, place, until, conninfo, end = arguments
    kafka = {"bootstrap.servers": bootstrap_servers, "linger.ms": 2}
    KINDS[kind](kafka, topic, Path(place), int(until), conninfo)
    if end == "killed":
        signal.pause()  # it was faster


@dataclass(frozen=True)
class Verdict:
    """What is wrong with the topic of one kind of publisher."""

    kind: str
    messages: int
    lost: int
    doubled: int
    repeats: int
    """Messages that are there once more, as their filter had said."""
    statuses: str
    """Exit statuses of all its processes."""

    @property
    def is_right(self) -> bool:
        """Whether nothing is lost or doubled, and each process ended as it was to."""
        return not (self.lost or self.doubled) and self.statuses.endswith("-9, 1 x 0")


class Publisher:
    """A process that publishes; whatever it says is kept."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open as long as it writes)
        command = [sys.executable, "-m", "tests.publish.killing", "work", *arguments]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_sending(self) -> None:
        """Return when it has handed messages to its client."""
        with self._news:
            is_there = self._news.wait_for(lambda: "sending" in self.lines or self.has_ended(), START_SECONDS)
        assert is_there, "it has not begun to send"

    def has_ended(self) -> bool:
        """Tell whether it has ended."""
        return self._process.poll() is not None

    def end(self, *, kills: bool, until: int) -> int:
        """Kill it, or wait for its end, after so many messages; return its exit status."""
        if kills:
            self._process.kill()
        try:
            status = self._process.wait(END_SECONDS + until / A_SECOND)
        finally:
            self._process.kill()
        self._reader.join()
        self._errors.seek(0)
        if status not in (0, -9):
            print(self._errors.read(), file=sys.stderr)
        self._errors.close()
        return status

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                with self._news:
                    self.lines.append(line.strip())
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()


def topic_of(kind: str) -> str:
    """Name the topic of a kind of publisher."""
    return f"killed-{kind.replace(' ', '-')}"


def create_led_topic(bootstrap_servers: str, name: str) -> str:
    """Create a topic that the follower has all of and leads nothing of."""
    orders = [[leader, *(n for n in LEADERS if n != leader), FOLLOWER] for leader in LEADERS]
    assignment = [orders[number % len(orders)] for number in range(PARTITIONS)]
    topic = NewTopic(name, PARTITIONS, replica_assignment=assignment, config={"min.insync.replicas": "2"})
    with AdminClient({"bootstrap.servers": bootstrap_servers}) as admin:
        admin.create_topics([topic])[name].result(60)
    until_in_sync(bootstrap_servers, name)
    # The one that stands still would go on to say that there is no such topic.
    for server in bootstrap_servers.split(","):
        with AdminClient({"bootstrap.servers": server}) as admin:
            until(lambda a=admin: a.list_topics(name, timeout=10).topics[name].error is None, 60, f"{name} at {server}")  # type: ignore[misc]
    return name


@contextmanager
def lagging(kafka: Kafka, chance: random.Random) -> Iterator[None]:
    """Have the follower stand still again and again, for less and for longer than a replica may lag."""
    stop = threading.Event()

    def stand_still() -> None:
        while not stop.is_set():
            kafka.pause(FOLLOWER)
            stop.wait(chance.uniform(0.2, 6))
            kafka.resume(FOLLOWER)
            stop.wait(chance.uniform(0.2, 2))

    thread = threading.Thread(target=stand_still)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def kill_publishers(kafka: Kafka, conninfo: str, place: Path, kind: str, *, kills: int, seed: str) -> Verdict:
    """Kill so many publishers of a kind, let another one finish, and compare."""
    chance = random.Random(seed)
    topic = topic_of(kind)
    statuses, repeats = list[int](), Counter[int]()
    for life in range(1, kills + 2):
        is_last = life > kills
        until = min(life, kills) * A_LIFE
        end = "finished" if is_last else "killed"
        publisher = Publisher(kind, kafka.bootstrap_servers, topic, str(place), str(until), conninfo, end)
        try:
            if not is_last:
                publisher.wait_sending()
                time.sleep(chance.uniform(0, 2))  # at any moment of what follows
        finally:
            statuses.append(publisher.end(kills=not is_last, until=until))
        repeats.update(int(line.split()[-1]) for line in publisher.lines if line.startswith("may repeat"))
        print(f"{kind}: life {life} of {kills + 1} ended with {statuses[-1]}", flush=True)
    found = Counter(int(record.value or -1) for record in scan(kafka.bootstrap_servers, topic))
    again = {n: times - 1 for n, times in found.items() if times > 1}
    return Verdict(
        kind,
        messages=len(found),
        lost=len(set(range(kills * A_LIFE)) - found.keys()),
        doubled=sum(max(0, times - repeats[n]) for n, times in again.items()),
        repeats=sum(min(times, repeats[n]) for n, times in again.items()),
        statuses=", ".join(f"{count} x {status}" for status, count in sorted(Counter(statuses).items())),
    )


def kill_all(kafka: Kafka, conninfo: str, place: Path, *, kills: int, seed: int) -> list[Verdict]:
    """Do so with all kinds at once."""

    def kill(kind: str) -> Verdict:
        return kill_publishers(kafka, conninfo, place, kind, kills=kills, seed=f"{seed} {kind}")

    for kind in KINDS:
        create_led_topic(kafka.bootstrap_servers, topic_of(kind))
    with ThreadPoolExecutor(len(KINDS)) as pool, lagging(kafka, random.Random(seed)):
        return list(pool.map(kill, KINDS))


def run(kills: int, seed: int) -> int:
    """Start the servers, kill, and tell."""
    with (
        Kafka(brokers=3, properties=BROKER) as kafka,
        embedded.Postgres() as postgres,
        tempfile.TemporaryDirectory() as place,
    ):
        with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
            migrate(connection)
        verdicts = kill_all(kafka, postgres.conninfo, Path(place), kills=kills, seed=seed)
    for verdict in verdicts:
        print(verdict)
    return int(not all(verdict.is_right for verdict in verdicts))


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(*sys.argv[2:])
    else:
        sys.exit(run(int(sys.argv[1]), int((sys.argv[2:] or ["1"])[0])))
