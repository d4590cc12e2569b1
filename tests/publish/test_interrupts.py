"""A signal whose handler raises inside the client's ``produce``, before it takes a message or behind that."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import signal
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from confluent_kafka import Producer

from exactly_once.publish import (
    DedupProducer,
    Delivery,
    Outcome,
    ProducerRecord,
    SequenceFilter,
    State,
    TransactionalProducer,
    Undelivered,
    WindowFilter,
)
from tests.publish.test_producer import NOWHERE, values
from tests.publish.test_random_failures import REFUSED, TIMED_OUT, Report
from tests.support.interrupts import Interrupt, Interrupter
from tests.support.topics import create_topic


class Interrupted:
    """The real client; a real signal comes with the message of one value, when the client has it or just before."""

    def __init__(self, client: Producer, at: bytes, *, is_taken: bool) -> None:
        self._client, self._at, self._is_taken = client, at, is_taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def __len__(self) -> int:
        return len(self._client)

    def produce(self, topic: str, value: bytes, *arguments: Any, **options: Any) -> None:
        is_now = value == self._at
        if self._is_taken or not is_now:
            self._client.produce(topic, value, *arguments, **options)
        if is_now:
            self._at = b""
            signal.raise_signal(signal.SIGINT)


def one_by_one(producer: DedupProducer, topic: str) -> None:
    for n in range(4):
        producer.produce(topic, b"%d" % n, dedup_key=n)


def one_by_one_with_headers(producer: DedupProducer, topic: str) -> None:
    for n in range(4):
        producer.produce(topic, b"%d" % n, dedup_key=n, headers={"a": b"b"})


def many(producer: DedupProducer, topic: str) -> None:
    producer.produce_many(topic, [b"%d" % n for n in range(4)], dedup_keys=range(4))


WAYS = pytest.mark.parametrize("way", [one_by_one, one_by_one_with_headers, many])
Way = Callable[[DedupProducer, str], None]


@WAYS
def test_a_message_that_the_client_has_taken_is_not_sent_again(bootstrap_servers: str, way: Way) -> None:
    topic = create_topic(bootstrap_servers, 1)
    # Nothing is sent before the second attempt.
    settings = {"bootstrap.servers": bootstrap_servers, "linger.ms": 60_000}
    with DedupProducer(settings, dedup=WindowFilter(keys=10)) as producer:
        producer._client = Interrupted(producer._client, b"1", is_taken=True)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            way(producer, topic)
        producer.poll(0)  # the client still has it
        again = [producer.produce(topic, b"%d" % n, dedup_key=n) for n in range(4)]
        assert [delivery.is_attached for delivery in again] == [True, True, False, False]
        producer.flush(60)
        assert {delivery.outcome for delivery in again} == {Outcome.DELIVERED}
        way(producer, topic)
    assert values(bootstrap_servers, topic) == {b"%d" % n: 1 for n in range(4)}


def test_a_report_beside_a_message_in_doubt_is_settled(bootstrap_servers: str) -> None:
    topic = create_topic(bootstrap_servers, 1)
    settings = {"bootstrap.servers": bootstrap_servers, "linger.ms": 60_000}
    with DedupProducer(settings, dedup=WindowFilter(keys=10)) as producer:
        producer.produce(topic, b"0", dedup_key=0)
        producer._client.flush(60)  # while nobody holds a delivery
        producer._client = Interrupted(producer._client, b"1", is_taken=True)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            producer.produce(topic, b"1", dedup_key=1)
        producer.poll(0)
        again = [producer.produce(topic, b"%d" % n, dedup_key=n) for n in range(2)]
        assert [(delivery.duplicate, delivery.is_attached) for delivery in again] == [(True, False), (False, True)]
    assert values(bootstrap_servers, topic) == {b"0": 1, b"1": 1}


@WAYS
def test_a_message_that_the_client_has_not_taken_is_unknown_once_all_reports_are_there(
    bootstrap_servers: str, way: Way
) -> None:
    topic = create_topic(bootstrap_servers, 1)
    with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=WindowFilter(keys=10)) as producer:
        producer._client = Interrupted(producer._client, b"1", is_taken=False)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            way(producer, topic)
        producer._client.flush(60)  # the reports of those that nobody holds a delivery of come at once
        with pytest.raises(Undelivered, match="1 messages failed"):
            producer.flush(60)
        assert producer.filter_of(topic).stats().unknown == 1
        again = [producer.produce(topic, b"%d" % n, dedup_key=n) for n in range(4)]
        assert [(delivery.duplicate, delivery.may_repeat) for delivery in again] == [
            (True, False),
            (False, True),
            (False, False),
            (False, False),
        ]
    assert values(bootstrap_servers, topic) == {b"%d" % n: 1 for n in range(4)}


def test_close_fails_what_an_interrupt_left_in_the_queue() -> None:
    producer = DedupProducer({**NOWHERE, "message.timeout.ms": 60_000}, dedup=WindowFilter(keys=10))
    producer._client = Interrupted(producer._client, b"1", is_taken=True)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        one_by_one(producer, "t")
    made = producer.filter_of("t")
    with pytest.raises(Undelivered, match="2 messages"):
        producer.close(0)
    assert [made.reserve(n) for n in range(3)] == [State.UNKNOWN, State.UNKNOWN, State.NEW]


class Between(Interrupter):
    """Not where a lock is taken or given back, or a try begins: the interpreter calls no signal handler there."""

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith(("with ", "try:")):
            return self._line
        return super()._line(frame, event, argument)


class Telling:
    """Stands in for a client that has everything to tell at once, each of it one time; or keeps so many back."""

    keeps = 0

    def __init__(self) -> None:
        self.queue: deque[tuple[bytes, Callable[..., None]]] = deque()

    def __len__(self) -> int:
        return len(self.queue)

    def produce(self, topic: str, value: bytes, key: None, partition: int, callback: Any, **_: Any) -> None:
        self.queue.append((value, callback))

    def poll(self, seconds: float = 0) -> int:
        while len(self.queue) > self.keeps:
            value, callback = self.queue.popleft()
            callback(ERRORS.get(value), Report(int(value)))
        return 0

    def flush(self, seconds: float = 0) -> int:
        return self.poll()


ERRORS = {b"2": REFUSED, b"4": TIMED_OUT}
OUTCOMES = [Outcome.DELIVERED, Outcome.DELIVERED, Outcome.NOT_PERSISTED, Outcome.DELIVERED, Outcome.UNKNOWN]
STATES = [State.DUPLICATE, State.DUPLICATE, State.NEW, State.DUPLICATE, State.UNKNOWN]


@pytest.mark.parametrize("keeps", [0, 1])
@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_poll_that_is_interrupted_at_any_line_leaves_nothing_pending(
    monkeypatch: pytest.MonkeyPatch, *, is_watched: bool, fails: bool, keeps: int
) -> None:
    monkeypatch.setattr(DedupProducer, "_connect", lambda _: Telling())
    numbers = range(5) if fails else (0, 1, 3)
    interrupter = Between()
    for line in itertools.count(1):
        made = WindowFilter(keys=10)
        producer = DedupProducer(NOWHERE, dedup=made)
        deliveries = [producer.produce("t", b"%d" % n, dedup_key=n) for n in numbers]
        if is_watched:
            assert deliveries[0].outcome is Outcome.PENDING
        monkeypatch.setattr(Telling, "keeps", keeps)
        with contextlib.suppress(Interrupt), interrupter.after(line):
            producer.poll(0)
        if interrupter.left:
            break
        assert deliveries[0].message is None or deliveries[0].message.value() == b"0"
        monkeypatch.setattr(Telling, "keeps", 0)
        producer.poll(0)
        for delivery, n in zip(deliveries, numbers, strict=True):
            # A report may be lost in its callback.
            outcomes = {OUTCOMES[n], Outcome.UNKNOWN} if "delivery.py" in interrupter.where[-1] else {OUTCOMES[n]}
            assert delivery.outcome in outcomes, interrupter.where[-1]
            states = {STATES[n], State.UNKNOWN} if "delivery.py" in interrupter.where[-1] else {STATES[n]}
            assert made.reserve(n) in states, interrupter.where[-1]
        producer._topics["t"].failed.clear()
        producer.close()
    assert line > 50


def test_a_callback_of_the_application_that_raises_again_and_again_leaves_one_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Raising(Telling):
        def poll(self, seconds: float = 0) -> int:
            raise ZeroDivisionError

    monkeypatch.setattr(DedupProducer, "_connect", lambda _: Raising())
    producer = DedupProducer(NOWHERE, dedup=WindowFilter(keys=10))
    delivery = producer.produce("t", b"0", dedup_key=0)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            producer.poll(0)
    assert len(producer._topics["t"].doubts) == 1
    monkeypatch.setattr(Raising, "poll", Telling.poll)
    producer.close()
    assert delivery.outcome is Outcome.DELIVERED


def test_a_commit_that_is_interrupted_at_any_line_leaves_nothing_pending(bootstrap_servers: str, name: str) -> None:
    topic = create_topic(bootstrap_servers, 1, name=name)
    interrupter, sent = Between(), dict[int, Delivery]()
    with DedupProducer(
        {"bootstrap.servers": bootstrap_servers},
        dedup=lambda _: SequenceFilter(),
        producer_name=name,
    ) as producer:
        producer.filter_of(topic)
        committer = producer._committer
        assert committer is not None
        for line in itertools.count(1):
            numbers = range(3 * line, 3 * line + 3)
            committer.seconds = 3600.0
            producer.produce_many(topic, [b"%d" % n for n in numbers], sequences=numbers)
            deliveries = [producer.produce(topic, b"", sequence=n) for n in numbers]  # they attach
            committer.seconds = 0.0  # as if the time had passed
            with contextlib.suppress(Interrupt), interrupter.after(line, "producer.py", "topic.py"):
                producer.poll(0)
            if interrupter.left:
                break
            producer.poll(0)
            assert Outcome.PENDING not in {each.outcome for each in deliveries}, interrupter.where[-1]
            assert not len(producer), interrupter.where[-1]
            sent |= zip(numbers, deliveries, strict=True)
        producer._topics[topic].failed.clear()
    assert line > 50
    found = values(bootstrap_servers, topic)
    assert set(found.values()) == {1}
    for number, delivery in sent.items():
        assert (b"%d" % number in found) is (delivery.outcome is Outcome.DELIVERED) or (
            delivery.outcome is Outcome.UNKNOWN
        )


def test_a_transaction_that_is_interrupted_at_any_line_leaves_nothing_pending(
    bootstrap_servers: str, name: str
) -> None:
    topic, made = create_topic(bootstrap_servers, 1, name=name), WindowFilter(keys=10_000)
    interrupter, sent = Between(), dict[int, State]()
    settings = {"bootstrap.servers": bootstrap_servers, "transactional.id": name}
    with TransactionalProducer(settings, dedup=made) as producer:
        for line in itertools.count(1):
            numbers = range(2 * line, 2 * line + 2)
            with (
                contextlib.suppress(Interrupt),
                interrupter.after(line, "transactional.py"),
                producer.transaction() as transaction,
            ):
                transaction.messages += [(topic, ProducerRecord(b"%d" % n, dedup_key=n)) for n in numbers]
            if interrupter.left:
                break
            assert made.stats().in_flight == 0, interrupter.where[-1]
            states = made.reserve_many(numbers)
            made.release_many(numbers)  # what was unknown is so again
            sent |= zip(numbers, states, strict=True)
    assert line > 50
    found = values(bootstrap_servers, topic)
    assert set(found.values()) == {1}
    for number, state in sent.items():
        assert state is State.UNKNOWN or (b"%d" % number in found) is (state is State.DUPLICATE)
