"""Every filter under both producers, against a plain model, with random failures: time-outs, lost reports, refusals,
full queues, crashes, take-overs, turns of the window.

Nothing that was told to be in the log is missing, nothing is doubled that ``may_repeat`` did not say, and what a
producer answers is what the model expects. The client is a stand-in: no real one fails in all these ways, in any order,
a hundred thousand times. Servers of filters are real, and get fewer steps. The steps of a run are
EXACTLY_ONCE_PUBLISH_STEPS, so that a million take one variable.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from confluent_kafka import KafkaError, KafkaException

from exactly_once.publish import (
    ChainFilter,
    DedupProducer,
    Delivery,
    Filter,
    Found,
    Link,
    NotDelivered,
    Outcome,
    PostgresChain,
    PostgresWindow,
    ProducerFenced,
    ProducerRecord,
    PublishOwner,
    SequenceFilter,
    ShardedWindow,
    SharedSlotFilter,
    SlotFilter,
    Store,
    TransactionalProducer,
    WindowFilter,
)
from exactly_once.publish.keys import encoded
from tests.publish.conftest import WINDOW_SECONDS, MakeOwner
from tests.publish.test_postgres_window import end_lease, pass_window
from tests.support.memcached import Memcached
from tests.support.seeds import seeds

STEPS = int(os.environ.get("EXACTLY_ONCE_PUBLISH_STEPS", "120000"))
TIMED_OUT, REFUSED = KafkaError(KafkaError._MSG_TIMED_OUT), KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
OUT_OF_TIME = KafkaException(KafkaError(KafkaError._TIMED_OUT, retriable=True))


class Report:
    """What the client tells of a message."""

    def __init__(self, number: int) -> None:
        self.number = number

    def value(self) -> bytes:
        return b"%d" % self.number


class Client:
    """Stands in for the client and the broker behind it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.queue: list[tuple[int, Any]] = []
        """Numbers of keys and callbacks, in the order of sending."""

    def __len__(self) -> int:
        return len(self.queue)

    def produce(self, topic: str, value: bytes, key: None, partition: int, callback: Any, **_: Any) -> None:
        if self.world.rng.random() < 0.02:
            raise BufferError
        self.queue.append((int(value), callback))

    def poll(self, seconds: float = 0) -> int:
        count = self.world.rng.randrange(4) if seconds < 1 else len(self.queue)
        for number, callback in self.queue[:count]:
            fate = self.world.rng.random()
            if fate < 0.8 or 0.83 < fate < 0.9:  # there; the second kind's report is lost
                self.world.log[number] += 1
            callback(None if fate < 0.8 else REFUSED if fate < 0.83 else TIMED_OUT, Report(number))
        del self.queue[:count]
        return count

    def flush(self, seconds: float = 0) -> int:
        self.poll(10)
        return 0


class TransactionClient(Client):
    """The same in transactions: a commit succeeds, or it does not, or nobody hears which."""

    def __len__(self) -> int:
        return 0  # nothing is refused, and all reports have come when a commit begins

    def poll(self, seconds: float = 0) -> int:
        return 0

    def begin_transaction(self) -> None:
        self.queue.clear()

    def purge(self) -> None:
        self.queue.clear()

    def abort_transaction(self, seconds: float) -> None:
        self.queue.clear()

    def commit_transaction(self, seconds: float) -> None:
        self.world.was_committed = self.world.rng.random() < 0.85
        if self.world.was_committed:
            self.world.log.update(number for number, _ in self.queue)
        self.queue.clear()
        if not self.world.was_committed or self.world.rng.random() < 0.1:
            if self.world.rng.random() < 0.5:
                raise SystemError from OUT_OF_TIME  # as where an error comes amid reports
            raise OUT_OF_TIME


class Dedup(DedupProducer):
    """A producer with that client."""

    def _connect(self) -> Any:
        return Client(World.current)


class Transactional(TransactionalProducer):
    """The same in transactions: what became of one is asked of the world, which may not answer."""

    def _connect(self, seconds: float | None = None) -> Any:
        self._log, self._used_at, self._is_usable = Quiet(), float("inf"), True  # type: ignore[assignment]
        return TransactionClient(World.current)

    def _look_for(self, to_send: Any) -> Outcome:
        if World.current.rng.random() < 0.3:
            raise KafkaException(TIMED_OUT)
        return Outcome.DELIVERED if World.current.was_committed else Outcome.NOT_PERSISTED


class Quiet:
    is_quiet = True


class World:
    """What was sent, what is in the log, and what the model expects a filter to know."""

    current: World

    def __init__(
        self,
        seed: int,
        make: Callable[[], Filter[Any]],
        key: Callable[[int], Any],
        *,
        is_exact: bool = True,
        turn: Callable[[], None] | None = None,
    ) -> None:
        World.current = self
        self.rng = random.Random(seed)
        self.make = make
        self.key = key
        self.is_exact = is_exact
        self.turn = turn
        # Whether what dead owners were sending is looked for only when somebody asks: it may have come again since.
        self.looks_late = False
        self.log: Counter[int] = Counter()
        self.was_committed = False
        self.may_be_twice: Counter[int] = Counter()
        """How often a key was sent although an earlier attempt may have arrived, and somebody said so."""
        self.states: dict[int, str] = {}
        """What the filter must know: in flight, held by the dead, unknown, or confirmed; absent if not here."""
        self.turns: Counter[int] = Counter()
        """How often the window has turned since a key was new."""
        self.open: list[tuple[int, Delivery]] = []
        self.used = 0
        self.producer: Any = None

    def number(self) -> int:
        """Return a key: the next one, or one of the last ones."""
        if not self.used or self.rng.random() < 0.5:
            self.used += 1
            return self.used - 1
        return max(0, self.used - 1 - int(self.rng.expovariate(0.1)))

    def record(self, number: int) -> ProducerRecord:
        return ProducerRecord(b"%d" % number, **{self.made.takes: self.key(number)})

    def start(self, kind: type[Any]) -> None:
        """Begin a life."""
        self.made = self.make()
        self.producer = kind({"bootstrap.servers": "nowhere"}, dedup=self.made, recover=False, producer_name="n")
        self.open.clear()

    def sent(self, number: int, delivery: Delivery) -> None:
        """Compare an answer with what the model expects."""
        expected = self.states.get(number)
        if delivery.outcome is Outcome.SKIPPED:
            assert self.log[number], f"{number} is lost: skipped, and not in the log"
            may_be_found = expected == "unknown" and self.looks_late
            assert may_be_found or expected in ("confirmed", "looked for", "left") or not self.is_exact
            self.states[number] = "left" if expected == "left" else "confirmed"  # a cache may outlive the row
            return
        if delivery.outcome is Outcome.HELD_ELSEWHERE:
            assert expected == "held", f"{number} is {expected}, and was held elsewhere"
            return
        if delivery.is_attached:
            assert expected == "in flight"
        elif delivery.may_repeat:
            assert expected in ("unknown", "looked for", "left") or not self.is_exact
            self.may_be_twice[number] += 1
        elif expected == "left":
            self.may_be_twice[number] += 1
            del self.turns[number]
        elif self.is_exact:
            assert expected is None, f"{number} is {expected}, and was sent as new"
        else:
            self.may_be_twice[number] += expected in ("confirmed", "unknown")  # it has left the window
        self.states[number] = "in flight"
        self.open.append((number, delivery))

    def settle(self) -> None:
        """Compare outcomes with the log."""
        for number, delivery in self.open:
            if delivery.outcome is Outcome.PENDING or delivery.is_attached:
                continue
            if delivery.outcome is Outcome.DELIVERED:
                assert self.log[number], f"{number} is lost: delivered, and not in the log"
                self.states[number] = "confirmed"
            elif delivery.outcome is Outcome.UNKNOWN or delivery.may_repeat:
                self.states[number] = "unknown"
            else:
                self.states.pop(number, None)
        self.open = [(number, delivery) for number, delivery in self.open if not delivery.done()]

    def crash(self) -> None:
        """End a life in the middle: what was sent arrives or does not, and nobody hears of it."""
        for number, _ in self.producer._client.queue:
            self.log[number] += self.rng.random() < 0.5
        del self.producer._client
        self.producer._closed = True

    def pass_window(self) -> None:
        """Let a window pass now and then; a key that has seen two pass may be known or not."""
        if self.turn is None or self.rng.random() > 0.01:
            return
        self.turn()
        self.turns.update(self.states.keys())
        self.states.update((n, "left") for n, s in self.states.items() if self.turns[n] > 1 and s != "in flight")

    def check(self) -> None:
        for number, count in self.log.items():
            assert count <= 1 + self.may_be_twice[number], f"{number} is {count} times in the log, and nobody said so"


def drive(world: World, steps: int, *, crash: Callable[[World], None] | None = None, crashes: float = 0.002) -> None:
    """Publish outside of transactions."""
    world.start(Dedup)
    producer = world.producer
    while steps > 0:
        world.pass_window()
        event = world.rng.random()
        if event < 0.5:
            number = world.number()
            record = world.record(number)
            try:
                delivery = producer.produce("t", record.value, **{world.made.takes: world.key(number)})
            except BufferError:
                pass
            else:
                world.sent(number, delivery)
            steps -= 1
        elif event < 0.6:
            numbers = sorted({world.number() for _ in range(world.rng.randrange(2, 8))})
            for number, delivery in zip(
                numbers, producer.produce_many("t", [world.record(n) for n in numbers], room_seconds=60), strict=True
            ):
                world.sent(number, delivery)
            world.settle()
            steps -= len(numbers)
        elif event < 1 - crashes or crash is None:
            producer.poll(0)
            world.settle()
            steps -= 1
        else:
            world.crash()
            crash(world)
            world.start(Dedup)
            producer = world.producer
    producer.poll(10)
    world.settle()
    world.check()
    for topic in producer._topics.values():  # a life that ended at once has none
        topic.failed.clear()
    producer.close()


def publish(world: World, steps: int) -> None:
    """Publish in transactions."""
    world.start(Transactional)
    while steps > 0:
        world.pass_window()
        numbers = sorted({world.number() for _ in range(world.rng.randrange(1, 6))})
        steps -= len(numbers)
        made: Any = None
        try:
            with world.producer.transaction() as made:
                for number in numbers:
                    record = world.record(number)
                    made.produce("t", record.value, **{world.made.takes: world.key(number)})
        except (NotDelivered, BufferError, ProducerFenced, KafkaException):
            pass
        for number, delivery in zip(numbers, made.deliveries, strict=True):
            world.sent(number, delivery)
        world.settle()
    world.check()
    world.producer.close()


clock = [0.0]


def pass_second() -> None:
    clock[0] += 1


KINDS: dict[str, tuple[Callable[[], Filter[Any]], Callable[[int], Any], bool]] = {
    "window": (lambda: WindowFilter(keys=1_000_000), lambda n: b"%d" % n, True),
    "small window": (lambda: WindowFilter(keys=20), lambda n: n, False),
    "window by time": (lambda: WindowFilter(seconds=1, clock=lambda: clock[0]), lambda n: n, True),
    "slots": (lambda: SlotFilter(1 << 20, ways=16, seed=1), lambda n: f"k{n}", True),
    "few slots": (lambda: SlotFilter(32, ways=4, fingerprint=128, seed=1), lambda n: n, False),
    "sequence": (SequenceFilter, lambda n: n, True),
    "dense chain": (lambda: ChainFilter(dense=True), lambda n: Link("c", n), True),
    "chain": (ChainFilter, lambda n: Link("c", 10 * n + 10, 10 * n), True),
}


def in_memory(world: World) -> None:
    """Filters in memory start empty: what is in the log by then may come twice."""
    world.states.clear()
    world.turns.clear()
    world.may_be_twice.update(dict.fromkeys(world.log, 1))
    world.may_be_twice.update(range(world.used))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_or_doubled_unsaid(kind: str) -> None:
    make, key, is_exact = KINDS[kind]
    for seed in seeds([1], new=1):
        crash = in_memory if "window" in kind or "slots" in kind else None  # numbers start anew: a life is all there is
        drive(World(seed, make, key, is_exact=is_exact, turn=pass_second), STEPS // 20, crash=crash)


@pytest.mark.parametrize("kind", ["window", "window by time", "slots", "sequence", "dense chain"])
def test_nothing_is_lost_or_doubled_in_transactions(kind: str) -> None:
    make, key, is_exact = KINDS[kind]
    for seed in seeds([1], new=1):
        publish(World(seed, make, key, is_exact=is_exact, turn=pass_second), STEPS // 20)


def die(world: World) -> None:
    """Forget what only the dead process knew of a chain: its confirmed numbers are in the database."""
    for number in [n for n, state in world.states.items() if state != "confirmed"]:
        del world.states[number]
        world.may_be_twice[number] += 1


def hold(world: World) -> None:
    """Leave what was in flight to the dead process, whose lease runs for longer than this test."""
    world.states.update((number, "held") for number, state in world.states.items() if state == "in flight")


@pytest.mark.parametrize("kind", ["in transactions", "alone"])
def test_shared_slots_lose_nothing_and_double_nothing_unsaid(memcached: Memcached, name: str, kind: str) -> None:
    made: list[SharedSlotFilter] = []

    def make() -> SharedSlotFilter:
        made.append(SharedSlotFilter(memcached.address, prefix=name, slots=1 << 32, timeout_seconds=60))
        return made[-1]

    world = World(seeds([], new=1)[0], make, lambda n: n)
    if kind == "alone":
        drive(world, STEPS // 200, crash=hold, crashes=0.02)
    else:
        publish(world, STEPS // 200)
    for each in made:
        each.close()


@pytest.mark.parametrize("kind", ["in transactions", "alone"])
def test_chains_in_postgres_lose_nothing_and_double_nothing_unsaid(store: Store, name: str, kind: str) -> None:
    world = World(seeds([], new=1)[0], lambda: PostgresChain(store), lambda n: Link(name, n))
    if kind == "alone":
        drive(world, STEPS // 200, crash=die, crashes=0.02)
    else:
        publish(world, STEPS // 200)


@pytest.mark.parametrize("kind", ["window", "window in transactions", "shards", "shards in transactions"])
def test_a_successor_takes_over_what_is_in_the_log(
    make_owner: MakeOwner, db: psycopg.Connection[Any], own_schema: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Crashes, and the keys of the dead one are found in the log or are unknown.

    Windows turn, or the map of shards is another one in each life.
    """
    monkeypatch.setattr("exactly_once.publish.topic.MARK_SECONDS", 60.0)  # the model knows of no slow disk
    owners: list[PublishOwner] = []

    def found(*_: object) -> Found:
        return Found({encoded(n) for n, count in world.log.items() if count}, is_sure=False)

    def window(scope: str) -> PostgresWindow:
        return PostgresWindow(owners[-1], scope=scope, seconds=WINDOW_SECONDS, take_over=found, cache_keys=4)

    def make() -> PostgresWindow | ShardedWindow:
        owners.append(make_owner(schema=own_schema))
        if "window" in kind:
            return window("a")
        shards = {which: window(which) for which in "abc"}
        chosen = world.rng.sample("abc", world.rng.randrange(1, 4))
        return ShardedWindow({which: shards[which] for which in chosen}, version=len(owners), previous=shards)

    def crash(world: World) -> None:
        owners[-1].close()
        db.execute(f'UPDATE "{own_schema}".publish_owner SET ended_at = NULL WHERE id = %s'.encode(), [owners[-1].id])
        end_lease(db, owners[-1])
        for number, state in list(world.states.items()):
            if state == "in flight":
                world.states[number] = "confirmed" if world.log[number] else "unknown"
            elif state == "unknown" and world.log[number]:
                world.states[number] = "looked for"  # if somebody asks for one that was in flight

    def turn() -> None:
        pass_window(db, own_schema)
        owners[-1]._keep()

    world = World(seeds([], new=1)[0], make, lambda n: n, turn=turn if "window" in kind else None)
    world.looks_late = "shards" in kind
    if "transactions" in kind:
        publish(world, STEPS // 200)
    else:
        drive(world, STEPS // 300, crash=crash, crashes=0.02)
