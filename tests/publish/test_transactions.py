"""Fault E7 and its neighbours: transactions whose end is answered late, never, or by a fence."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from exactly_once.errors import BrokerUnreachable, ConfigurationError
from exactly_once.publish import (
    DedupProducer,
    HeldElsewhere,
    KeyRefused,
    NotPersisted,
    Outcome,
    OutcomeUnknown,
    PostgresWindow,
    ProducerFenced,
    ProducerRecord,
    PublishOwner,
    SequenceFilter,
    State,
    TopicTakeOver,
    Transaction,
    TransactionalProducer,
    WindowFilter,
)
from exactly_once.publish.delivery import Batch
from exactly_once.publish.headers import headers_of
from exactly_once.publish.tail import read_tail
from exactly_once.publish.topic import TopicPublisher
from tests.publish.conftest import WINDOW_SECONDS, MakeOwner
from tests.publish.test_postgres_window import end_lease
from tests.publish.test_sequences_on_broker import values
from tests.support.kafka_proxy import END_TXN, INIT_PRODUCER_ID, KafkaProxy
from tests.support.topics import create_topic

MakeProducer = Callable[..., TransactionalProducer]
IMPATIENT = {"socket.timeout.ms": 3000}
"""The client repeats a request that got no answer within this."""


@pytest.fixture
def topic(proxied_broker: KafkaProxy) -> str:
    return create_topic(proxied_broker.bootstrap_servers, 3)


@pytest.fixture
def settings(proxied_broker: KafkaProxy, name: str) -> dict[str, Any]:
    return {"bootstrap.servers": proxied_broker.bootstrap_servers, "transactional.id": name}


@pytest.fixture
def make_producer(settings: dict[str, Any]) -> Iterator[MakeProducer]:
    """Make producers; what they left open is not in the way of later tests."""
    made: list[TransactionalProducer] = []

    def make(**options: Any) -> TransactionalProducer:
        given = {**settings, **options.pop("kafka", {})}
        made.append(TransactionalProducer(given, **{"dedup": lambda _: WindowFilter(keys=1000), **options}))
        return made[-1]

    yield make
    for producer in made:
        producer.close()


def publish(producer: TransactionalProducer, topic: str, *numbers: int) -> Transaction:
    with producer.transaction() as transaction:
        for n in numbers:
            transaction.produce(topic, b"%d" % n, partition=n % 2, dedup_key=n)
    return transaction


def refused(
    producer: TransactionalProducer,
    error: type[BaseException],
    *wanted: tuple[str, ProducerRecord],
    seconds: float = 60,
) -> Transaction:
    """Publish what must fail with an error; return the transaction."""
    with pytest.raises(error), producer.transaction(timeout_seconds=seconds) as transaction:
        transaction.messages += wanted
    return transaction


def numbered(topic: str, n: int) -> tuple[str, ProducerRecord]:
    return topic, ProducerRecord(b"%d" % n, partition=n % 2, dedup_key=n)


def outcomes(transaction: Transaction) -> list[Outcome]:
    return [delivery.outcome for delivery in transaction.deliveries]


def test_a_client_that_goes_on_commits_what_was_aborted(
    proxied_broker: KafkaProxy, settings: dict[str, Any], topic: str
) -> None:
    """Fault E7 itself, with the plain producer on a broker that knows KIP-890: the client does not.

    The client repeats an EndTxn that got no answer and says nothing of it; the first one arrives in the next one.
    """
    client = Producer({**settings, **IMPATIENT, "log_level": 0})
    client.init_transactions(60)
    late = proxied_broker.hold(END_TXN)
    client.begin_transaction()
    client.produce(topic, b"1", partition=0)
    client.commit_transaction(60)
    assert late.fired.is_set()
    client.begin_transaction()
    client.produce(topic, b"2", partition=0)
    client.flush(60)
    late.release()
    assert late.error_code() == 0
    try:
        client.abort_transaction(60)
    except KafkaException as error:
        print("the abort of what is committed:", error)
    assert values(proxied_broker.bootstrap_servers, topic) == [1, 2], "2 was never committed by the application"


def test_headers_that_the_caller_fills_anew_are_those_of_each_message(
    proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str
) -> None:
    """The messages go out at the end of the block."""
    headers: dict[str, bytes] = {}
    with make_producer().transaction() as transaction:
        for number in range(3):
            headers["n"] = b"%d" % number
            transaction.produce(topic, b"%d" % number, dedup_key=number, headers=headers)
    read = read_tail({"bootstrap.servers": proxied_broker.bootstrap_servers}, topic, None)
    found = {message.value(): dict(headers_of(message) or ())["n"] for message in read}
    assert found == {b"%d" % n: b"%d" % n for n in range(3)}


@pytest.mark.fault("E7")
@pytest.mark.parametrize("is_cut", [False, True], ids=["timed out", "disconnected"])
def test_a_late_end_does_not_hit_the_next_transaction(
    proxied_broker: KafkaProxy,
    make_producer: MakeProducer,
    topic: str,
    is_cut: bool,  # noqa: FBT001
) -> None:
    """Fault E7: the same, and the client was replaced although the commit succeeded."""
    producer = make_producer(kafka=IMPATIENT)
    publish(producer, topic, 1)
    first = producer._client
    late = proxied_broker.hold(END_TXN, cut_client=is_cut)
    publish(producer, topic, 3)
    assert late.fired.is_set()
    next_end = proxied_broker.hold(END_TXN)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(publish, producer, topic, 5)
        next_end.wait()
        late.release()
        assert late.error_code() in (KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)
        next_end.release()
        assert outcomes(running.result(60)) == [Outcome.DELIVERED]
    assert producer._client is not first
    assert values(proxied_broker.bootstrap_servers, topic) == [1, 3, 5]


def test_a_clean_commit_keeps_the_client(make_producer: MakeProducer, proxied_broker: KafkaProxy, topic: str) -> None:
    producer = make_producer()
    client = producer._client
    for n in range(20):
        publish(producer, topic, 2 * n, 2 * n + 1)
    assert producer._client is client
    assert producer.filter_of(topic).stats().confirmed == 40
    assert values(proxied_broker.bootstrap_servers, topic) == list(range(40))
    again = publish(producer, topic, 3, 4, 40, 40)
    assert outcomes(again) == [Outcome.SKIPPED, Outcome.SKIPPED, Outcome.DELIVERED, Outcome.DELIVERED]
    assert [d.duplicate for d in again.deliveries] == [True, True, False, True]
    assert again.deliveries[2].offset is not None
    assert values(proxied_broker.bootstrap_servers, topic) == list(range(41))


@pytest.mark.usefixtures("impatient")
def test_a_lost_answer_is_looked_up_in_the_topic(
    proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str
) -> None:
    """The commit was done and nobody heard of it; the caller does, without waiting for a retry of the client."""
    producer = make_producer()
    publish(producer, topic, 1)
    lost = proxied_broker.lose_answer(END_TXN)
    transaction = publish(producer, topic, 3, 4)
    assert lost.fired.is_set()
    assert outcomes(transaction) == [Outcome.DELIVERED] * 2
    assert publish(producer, topic, 3, 4).deliveries[0].duplicate
    assert values(proxied_broker.bootstrap_servers, topic) == [1, 3, 4]


@pytest.mark.usefixtures("impatient")
def test_an_end_that_never_arrives_is_an_abort(
    proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str
) -> None:
    """The keys are absent again, and the same messages can be sent at once."""
    producer = make_producer()
    publish(producer, topic, 1)
    held = proxied_broker.hold(END_TXN)
    told: list[object] = []
    with pytest.raises(NotPersisted), producer.transaction() as transaction:
        transaction.produce(topic, b"3", partition=1, dedup_key=3, on_delivery=lambda error, _: told.append(error))
    assert held.fired.is_set()
    assert outcomes(transaction) == [Outcome.NOT_PERSISTED]
    assert len(told) == 1
    assert isinstance(told[0], KafkaError)
    stats = producer.filter_of(topic).stats()
    assert (stats.confirmed, stats.in_flight, stats.unknown) == (1, 0, 0)
    assert not publish(producer, topic, 3).deliveries[0].may_repeat
    held.release()
    assert held.error_code() in (KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)
    assert values(proxied_broker.bootstrap_servers, topic) == [1, 3]


@pytest.mark.usefixtures("impatient")
def test_what_nobody_can_tell_is_unknown(
    proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers answer nothing more: the keys are unknown, and sending them again says so."""
    producer = make_producer()
    lost, silent = proxied_broker.lose_answer(END_TXN), proxied_broker.hold(INIT_PRODUCER_ID)
    with monkeypatch.context() as patch:
        patch.setattr(TransactionalProducer, "find_seconds", 15.0)
        transaction = refused(producer, OutcomeUnknown, numbered(topic, 3))
    assert lost.fired.is_set()
    assert silent.fired.is_set()
    assert outcomes(transaction) == [Outcome.UNKNOWN]
    assert producer.filter_of(topic).stats().unknown == 1
    silent.release()
    again = publish(producer, topic, 3).deliveries[0]
    assert (again.duplicate, again.may_repeat) == (False, True)
    assert values(proxied_broker.bootstrap_servers, topic) == [3, 3], "as may_repeat has admitted"


def test_an_error_in_the_block_sends_nothing(
    proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str
) -> None:
    producer = make_producer()
    before = proxied_broker.requests.count(END_TXN)

    with pytest.raises(KeyError), producer.transaction() as transaction:  # noqa: PT012 - that is its subject
        transaction.produce(topic, b"1", dedup_key=1)
        raise KeyError
    assert (proxied_broker.requests.count(END_TXN), producer._topics) == (before, {})
    assert outcomes(publish(producer, topic, 1)) == [Outcome.DELIVERED]
    assert values(proxied_broker.bootstrap_servers, topic) == [1]


def test_one_refused_message_sends_nothing(proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str) -> None:
    other = create_topic(proxied_broker.bootstrap_servers, 1)
    producer = make_producer()
    refused(producer, KeyRefused, numbered(topic, 1), (other, ProducerRecord(b"without a key")))
    too_large = ProducerRecord(b"x" * 2_000_000, dedup_key=2)
    transaction = refused(producer, KafkaException, numbered(topic, 1), (topic, too_large))
    assert outcomes(transaction) == [Outcome.NOT_PERSISTED] * 2
    assert producer.filter_of(topic).stats().in_flight == 0
    publish(producer, topic, 1)
    assert values(proxied_broker.bootstrap_servers, topic) == [1]


def test_a_message_refused_by_the_broker_aborts_all(
    proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str
) -> None:
    small = create_topic(proxied_broker.bootstrap_servers, 1, max_message_bytes="1000")
    producer = make_producer()
    transaction = refused(producer, NotPersisted, numbered(topic, 1), (small, ProducerRecord(b"x" * 5000, dedup_key=2)))
    assert outcomes(transaction) == [Outcome.NOT_PERSISTED] * 2
    publish(producer, topic, 1)
    assert values(proxied_broker.bootstrap_servers, topic) == [1]


def test_messages_behind_a_refused_one_do_not_wait_for_their_time_out(bootstrap_servers: str, name: str) -> None:
    """The client sends none of them any more, and its commit waited for them, and named its wait as the cause."""
    small = create_topic(bootstrap_servers, 1, max_message_bytes="100000")
    kafka = {"bootstrap.servers": bootstrap_servers, "transactional.id": name, "message.max.bytes": 5_000_000}
    with TransactionalProducer(kafka, dedup=WindowFilter(keys=10)) as producer:
        # One that fills a batch of its own is refused while the commit waits, and the batch behind it is not sent yet.
        records = [(small, ProducerRecord(b"x" * (1_500_000 if n == 2 else 1), dedup_key=n)) for n in range(5)]
        began = time.monotonic()
        transaction = refused(producer, NotPersisted, *records)
    assert time.monotonic() - began < 30
    assert outcomes(transaction) == [Outcome.NOT_PERSISTED] * 5
    assert "too large" in str(transaction.deliveries[0].error), "the acknowledged one tells why it was aborted"


def test_a_fatal_error_of_the_client_is_an_abort_and_the_next_transaction_has_another_client(
    proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in fails: of a real client only a fence brings that about, which has an error of its own."""
    producer = make_producer()
    client = producer._client

    def fail(*_: object, **__: object) -> None:
        raise KafkaException(KafkaError(KafkaError._FATAL, "as of a bug", fatal=True))

    with monkeypatch.context() as patch:
        patch.setattr(producer, "_hand_over", fail)
        transaction = refused(producer, NotPersisted, numbered(topic, 1))
    assert outcomes(transaction) == [Outcome.NOT_PERSISTED]
    assert outcomes(publish(producer, topic, 1)) == [Outcome.DELIVERED]
    assert producer._client is not client
    assert values(proxied_broker.bootstrap_servers, topic) == [1]


class Elsewhere(WindowFilter):
    """A filter in which another process holds the key 2."""

    def reserve_many(self, keys: Any) -> list[State]:
        keys = list(keys)
        states = super().reserve_many(keys)
        return [State.IN_FLIGHT if key == 2 else state for key, state in zip(keys, states, strict=True)]


def test_one_key_in_flight_elsewhere_sends_nothing(
    proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str
) -> None:
    producer = make_producer(dedup=Elsewhere(keys=10))
    transaction = refused(producer, HeldElsewhere, numbered(topic, 1), numbered(topic, 2))
    assert outcomes(transaction) == [Outcome.NOT_PERSISTED, Outcome.HELD_ELSEWHERE]
    assert outcomes(publish(producer, topic, 1)) == [Outcome.DELIVERED]


def test_a_second_producer_under_the_id_fences_the_first(
    proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str
) -> None:
    """The first one stops for good: making another client would fence the second in its turn."""
    first = make_producer()
    publish(first, topic, 1)
    second = make_producer()
    for _ in range(2):
        refused(first, ProducerFenced, numbered(topic, 3))
    assert outcomes(publish(second, topic, 5)) == [Outcome.DELIVERED]
    assert first.filter_of(topic).stats().in_flight == 0
    assert values(proxied_broker.bootstrap_servers, topic) == [1, 5]


def test_fenced_with_the_end_under_way(proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str) -> None:
    """The second one begins while the first waits for its commit: it is aborted, and the first finds that out."""
    first = make_producer()
    publish(first, topic, 1)
    held = proxied_broker.hold(END_TXN)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(publish, first, topic, 3)
        held.wait()
        second = make_producer()
        held.release()
        with pytest.raises(ProducerFenced):
            running.result(60)
    publish(second, topic, 5)
    assert values(proxied_broker.bootstrap_servers, topic) == [1, 5]
    assert first.filter_of(topic).stats().in_flight == 0


def test_what_an_interrupted_transaction_has_left_is_not_taken_for_sent(
    proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between reserving and sending: the key is unknown, and no later commit may confirm it."""
    producer = make_producer()

    def interrupted(made: Any, *, reserve: Any = producer._reserve_all) -> None:
        reserve(made)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(producer, "_reserve_all", interrupted)
        left = refused(producer, KeyboardInterrupt, numbered(topic, 1))
    assert outcomes(publish(producer, topic, 2)) == [Outcome.DELIVERED]
    assert outcomes(left) == [Outcome.UNKNOWN]
    assert producer.filter_of(topic).stats().confirmed == 1
    assert values(proxied_broker.bootstrap_servers, topic) == [2]


def test_polling_while_a_transaction_is_given_up_confirms_nothing(
    proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever polls between any two lines must not take a message without an error for delivered."""
    producer = make_producer(kafka={"queue.buffering.max.messages": 1, "linger.ms": 20_000})
    publish(producer, topic, 1)
    of_topic = producer._topics[topic]
    take = TopicPublisher._take

    def polled(self: TopicPublisher, outcome: Outcome, batch: Batch, places: Sequence[int]) -> None:
        polling = threading.Thread(target=producer.poll)
        polling.start()
        polling.join(0.5)
        take(self, outcome, batch, places)

    monkeypatch.setattr(TopicPublisher, "_take", polled)
    transaction = refused(producer, BufferError, *(numbered(topic, n) for n in range(2, 9)), seconds=0)
    assert set(outcomes(transaction)) == {Outcome.NOT_PERSISTED}
    assert of_topic.filter.stats().confirmed == 1


def test_threads_publish_in_turn(proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str) -> None:
    """All want the same keys; each is there once, and polling meanwhile makes nothing known early."""
    producer = make_producer()
    done = threading.Event()

    def poll() -> None:
        while not done.is_set():
            producer.poll(0.01)

    with ThreadPoolExecutor(5) as pool:
        polling = pool.submit(poll)
        running = [pool.submit(publish, producer, topic, *range(n, 40)) for n in range(4) for _ in range(2)]
        deliveries = [d for each in running for d in each.result(60).deliveries]
        done.set()
        polling.result(60)
    assert {d.outcome for d in deliveries} <= {Outcome.DELIVERED, Outcome.SKIPPED}
    assert sum(not d.duplicate for d in deliveries) == 40
    assert values(proxied_broker.bootstrap_servers, topic) == list(range(40))


def test_nothing_is_known_before_the_commit_is(
    proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str
) -> None:
    """The messages are acknowledged and somebody polls; but a transaction may still be aborted."""
    producer = make_producer()
    held = proxied_broker.hold(END_TXN)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(publish, producer, topic, 1, 2)
        held.wait()
        producer.poll(0.1)
        stats = producer.filter_of(topic).stats()
        assert (stats.confirmed, stats.in_flight) == (0, 2)
        held.release()
        assert outcomes(running.result(60)) == [Outcome.DELIVERED] * 2
    assert producer.filter_of(topic).stats().confirmed == 2


@pytest.mark.usefixtures("impatient")
def test_sequences_in_transactions(proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str) -> None:
    """A number of an aborted transaction is new again, and the next life reads what was committed."""
    options = {"dedup": lambda _: SequenceFilter(), "producer_name": "files"}
    producer = make_producer(**options)

    def send(made: TransactionalProducer, *numbers: int) -> Transaction:
        with made.transaction() as transaction:
            for n in numbers:
                transaction.produce(topic, b"%d" % n, partition=n % 2, sequence=n)
        return transaction

    send(producer, 1, 2, 5)
    proxied_broker.hold(END_TXN)
    with pytest.raises(NotPersisted):
        send(producer, 5, 6, 7)
    assert producer.last_sequence_id(topic) == 5
    send(producer, 6, 7)
    with make_producer(**options) as again:
        assert again.last_sequence_id(topic) == 7
        assert [d.duplicate for d in send(again, 7, 8).deliveries] == [True, False]
    assert values(proxied_broker.bootstrap_servers, topic) == [1, 2, 5, 6, 7, 8]


def test_a_client_that_did_not_get_ready_does_not_fence_the_next_one(
    proxied_broker: KafkaProxy, make_producer: MakeProducer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on asking, and whoever keeps the exception would keep it alive."""
    silent = proxied_broker.lose_answer(INIT_PRODUCER_ID)
    with monkeypatch.context() as patch:
        patch.setattr("exactly_once.publish.transactional._SECONDS", 10.0)
        with pytest.raises(BrokerUnreachable) as kept:
            make_producer(kafka={"socket.timeout.ms": 13_000})
    assert silent.fired.is_set()
    producer = make_producer()
    asked = proxied_broker.requests.count(INIT_PRODUCER_ID)
    silent.release()
    deadline = time.monotonic() + 6
    numbers = itertools.count()
    while time.monotonic() < deadline:
        assert outcomes(publish(producer, topic, next(numbers))) == [Outcome.DELIVERED]
    assert proxied_broker.requests.count(INIT_PRODUCER_ID) == asked
    assert kept.value.__traceback__ is not None


def test_without_brokers_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exactly_once.publish.transactional._SECONDS", 0.5)
    kafka = {"bootstrap.servers": "127.0.0.1:1", "transactional.id": "x", "log_level": 0}
    with pytest.raises(BrokerUnreachable, match="'x'"):
        TransactionalProducer(kafka, dedup=WindowFilter(keys=1))


def test_an_id_is_needed() -> None:
    with pytest.raises(ConfigurationError, match=r"transactional\.id"):
        TransactionalProducer({"bootstrap.servers": "127.0.0.1:1"}, dedup=WindowFilter(keys=1))


def test_a_timeout_that_no_broker_allows_is_no_trouble_of_brokers(make_producer: MakeProducer) -> None:
    """Who waits for brokers to come back would try it for ever."""
    with pytest.raises(ConfigurationError, match=r"transaction\.max\.timeout\.ms"):
        make_producer(kafka={"transaction.timeout.ms": 10_000_000})


def test_an_owner_that_promises_another_id_is_refused(make_owner: MakeOwner) -> None:
    """A take-over would believe it: what it does not find is new, for certain."""
    owner = make_owner(transactional_id="a")
    kafka = {"bootstrap.servers": "127.0.0.1:1"}
    with pytest.raises(ConfigurationError, match="as 'b'"):
        TransactionalProducer({**kafka, "transactional.id": "b"}, dedup=WindowFilter(keys=1), owner=owner)
    with pytest.raises(ConfigurationError, match="outside of transactions"):
        DedupProducer(kafka, dedup=WindowFilter(keys=1), owner=owner)
    made = DedupProducer(kafka, dedup=PostgresWindow(owner, scope="t", seconds=WINDOW_SECONDS))
    with pytest.raises(ConfigurationError, match="outside of transactions"):
        made.produce("t", b"x", dedup_key=1)
    made.close()


def test_a_life_that_takes_over_under_its_own_id_must_start_once_more(
    proxied_broker: KafkaProxy,
    make_producer: MakeProducer,
    make_owner: MakeOwner,
    *,
    db: psycopg.Connection[Any],
    topic: str,
    name: str,
) -> None:
    """An id is to be drawn for each life; with one for all, fencing the dead one fences this one. Nothing is lost."""
    take_over = TopicTakeOver({"bootstrap.servers": proxied_broker.bootstrap_servers})
    owners = [make_owner(transactional_id=name) for _ in range(3)]
    dead = PostgresWindow(owners[0], scope=topic, seconds=WINDOW_SECONDS)
    dead.reserve(1)
    end_lease(db, owners[0])

    def start(owner: PublishOwner) -> TransactionalProducer:
        made = PostgresWindow(owner, scope=topic, seconds=WINDOW_SECONDS, take_over=take_over)
        return make_producer(dedup=made, owner=owner)

    with start(owners[1]) as producer:
        refused(producer, ProducerFenced, numbered(topic, 1), numbered(topic, 3))
    with start(owners[2]) as producer:
        assert [d.may_repeat for d in publish(producer, topic, 1, 3).deliveries] == [False, False]
    assert values(proxied_broker.bootstrap_servers, topic) == [1, 3]


def test_a_transaction_that_is_over_takes_nothing_more(make_producer: MakeProducer, topic: str) -> None:
    """As in a line that slipped out of the block."""
    producer = make_producer()
    over = publish(producer, topic, 1)
    with pytest.raises(KeyError), producer.transaction() as left:
        raise KeyError
    for transaction in (over, left):
        with pytest.raises(ConfigurationError, match="never be sent"):
            transaction.produce(topic, b"2", dedup_key=2)
