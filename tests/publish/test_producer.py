"""DedupProducer on a real broker: duplicates, outcomes, callbacks, what is refused."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from exactly_once import ClientFailed, ConfigurationError
from exactly_once.demo.journal import scan
from exactly_once.publish import (
    ChainFilter,
    DedupProducer,
    Delivery,
    FilterUnavailable,
    InconsistentChain,
    KeyRefused,
    Link,
    NotPersisted,
    Outcome,
    OutcomeUnknown,
    ProducerRecord,
    SequenceFilter,
    State,
    TailLost,
    Undelivered,
    WindowFilter,
)
from exactly_once.publish.delivery import Batch
from exactly_once.publish.filter import NoFilter
from exactly_once.publish.headers import DEDUP_KEY, SEQUENCE, sequence_of
from exactly_once.publish.recovery import SequenceLog
from exactly_once.publish.tail import read_tail
from tests.support.topics import create_topic
from tests.support.waiting import until

NOWHERE = {"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 300, "log_level": 0}
"""Nobody listens there."""


@pytest.fixture
def producer(bootstrap_servers: str) -> Iterator[DedupProducer]:
    with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=lambda _: WindowFilter(keys=10_000)) as made:
        yield made


def values(bootstrap_servers: str, topic: str) -> Counter[bytes | None]:
    return Counter(record.value for record in scan(bootstrap_servers, topic))


def test_a_key_reaches_the_topic_once(producer: DedupProducer, bootstrap_servers: str, topic: str) -> None:
    first = producer.produce(topic, b"one", dedup_key="a")
    message = first.result(60)
    again = producer.produce(topic, b"again", dedup_key="a")
    other = producer.produce(topic, b"two", dedup_key="b")
    assert message is not None
    assert (message.value(), first.offset, first.partition) == (b"one", message.offset(), message.partition())
    assert not first.duplicate
    assert again.duplicate
    assert again.done()
    assert (again.result(0), again.offset, again.outcome) == (None, None, Outcome.SKIPPED)
    other.result(60)
    assert values(bootstrap_servers, topic) == {b"one": 1, b"two": 1}


def test_a_duplicate_in_flight_gets_the_same_outcome(
    producer: DedupProducer, bootstrap_servers: str, topic: str
) -> None:
    first, twin, third = (producer.produce(topic, b"%d" % n, dedup_key="a") for n in range(3))
    assert [d.is_attached for d in (first, twin, third)] == [False, True, True]
    assert not twin.duplicate, "nobody knows yet"
    twin.result(60)
    assert (first.duplicate, twin.duplicate, third.duplicate) == (False, True, True)
    assert first.offset == twin.offset == third.offset is not None
    assert values(bootstrap_servers, topic) == {b"0": 1}


def test_the_same_key_on_two_topics_is_two_messages(
    producer: DedupProducer, bootstrap_servers: str, topic: str
) -> None:
    other = create_topic(bootstrap_servers, 1)
    assert not producer.produce(topic, b"x", dedup_key="a").duplicate
    assert not producer.produce(other, b"x", dedup_key="a").duplicate
    producer.flush(60)
    assert values(bootstrap_servers, topic) == values(bootstrap_servers, other) == {b"x": 1}


def test_what_is_counted_are_messages_and_not_errors_of_the_client() -> None:
    made = DedupProducer(NOWHERE, dedup=WindowFilter(keys=10))
    made.filter_of("t")
    until(lambda: len(made._client) > 0, 30, "an error of the client's own")
    assert (len(made), made.flush(0)) == (0, 0)
    made.close()


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({"delivery.timeout.ms": 600_000}, 600),
        ({"message.timeout.ms": 3_600_000}, 3600),
        ({"message.timeout.ms": 0}, math.inf),
    ],
)
def test_numbered_messages_are_tried_for_as_long_as_the_client_is_told_to(
    bootstrap_servers: str, topic: str, settings: dict[str, int], seconds: float
) -> None:
    """For the client none is no end, and more than a transaction may last is too much."""
    kafka = {"bootstrap.servers": bootstrap_servers, **settings}
    with DedupProducer(kafka, dedup=SequenceFilter(), producer_name=topic) as made:
        made.produce(topic, b"x", sequence=1).result(60)
        assert made._committer is not None
        assert made._committer.timeout == seconds


def test_callbacks_are_called_for_every_call_once(producer: DedupProducer, topic: str) -> None:
    called: list[tuple[int, KafkaError | None, Message | None]] = []

    def note(number: int) -> Any:
        return lambda error, message: called.append((number, error, message))

    producer.produce(topic, b"0", dedup_key="a", on_delivery=note(0))
    producer.produce(topic, b"1", dedup_key="a", on_delivery=note(1))
    producer.flush(60)
    producer.produce(topic, b"2", dedup_key="a", on_delivery=note(2))
    producer.poll(0)
    assert sorted(number for number, _, _ in called) == [0, 1, 2]
    assert all(error is None for _, error, _ in called)
    messages = {number: message for number, _, message in called}
    assert messages[0] is messages[1] is not None
    assert messages[2] is None, "of what was delivered earlier nothing is here any more"


def test_a_callback_that_raises_propagates_and_loses_no_other(producer: DedupProducer, topic: str) -> None:
    called: list[int] = []

    def fail(error: KafkaError | None, message: Message | None) -> None:
        raise RuntimeError("the caller's own")

    producer.produce(topic, b"0", dedup_key=0, on_delivery=fail)
    for n in range(1, 5):
        producer.produce(topic, b"x", dedup_key=n, on_delivery=lambda *_: called.append(1))
    with pytest.raises(RuntimeError, match="own"):
        producer.flush(60)
    producer.flush(60)
    assert len(called) == 4
    assert producer.produce(topic, b"0", dedup_key=0).duplicate, "it was marked before the callback was called"


def test_a_retry_from_within_the_callback_is_sent() -> None:
    """The usual idiom. The key must be settled before the caller hears of it."""
    with_retry: list[Delivery] = []
    made = DedupProducer(NOWHERE, dedup=WindowFilter(keys=10))

    def retry(error: KafkaError | None, message: Message | None) -> None:
        with_retry.append(made.produce("t", b"x", dedup_key="a"))

    made.produce("t", b"x", dedup_key="a", on_delivery=retry)
    made.flush(60)
    (again,) = with_retry
    assert not again.duplicate
    assert again.may_repeat, "a time-out proves nothing"
    with pytest.raises(OutcomeUnknown):
        again.result(60)
    made.close()


def test_what_timed_out_is_unknown_and_may_be_sent_again() -> None:
    made = DedupProducer(NOWHERE, dedup=WindowFilter(keys=10))
    first = made.produce("t", b"x", dedup_key="a")
    with pytest.raises(OutcomeUnknown) as caught:
        first.result(60)
    assert isinstance(caught.value.__cause__, KafkaException)
    assert first.offset is None
    again = made.produce("t", b"x", dedup_key="a")
    assert (again.duplicate, again.may_repeat) == (False, True)
    assert made.filter_of("t").stats().in_flight == 1
    with pytest.raises(Undelivered):
        made.flush(60)
    assert made.filter_of("t").stats().unknown == 1
    made.close()


def test_a_message_that_is_too_large_is_surely_not_there(producer: DedupProducer, topic: str) -> None:
    with pytest.raises(KafkaException):
        producer.produce(topic, b"x" * 2_000_000, dedup_key="a")
    assert not producer.produce(topic, b"small", dedup_key="a").duplicate
    assert producer.filter_of(topic).stats().in_flight == 1


def test_a_message_refused_by_the_broker_is_surely_not_there(bootstrap_servers: str) -> None:
    topic = create_topic(bootstrap_servers, 1, max_message_bytes="1000")
    with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=WindowFilter(keys=10)) as made:
        with pytest.raises(NotPersisted):
            made.produce(topic, b"x" * 5000, dedup_key="a").result(60)
        again = made.produce(topic, b"small", dedup_key="a")
        assert not again.may_repeat
        assert again.result(60) is not None


def test_a_full_queue_marks_nothing(bootstrap_servers: str, topic: str) -> None:
    """Fault E8."""
    settings = {"bootstrap.servers": bootstrap_servers, "queue.buffering.max.messages": 3, "linger.ms": 100}
    with DedupProducer(settings, dedup=WindowFilter(keys=100)) as made:
        refused = []
        for n in range(20):
            try:
                made.produce(topic, b"%d" % n, dedup_key=n)
            except BufferError:
                refused.append(n)
        assert len(refused) == 17
        made.flush(60)
        assert made.filter_of(topic).stats().in_flight == 0
        for n in refused:
            (delivery,) = made.produce_many(topic, [ProducerRecord(b"%d" % n, dedup_key=n)], room_seconds=30)
            assert not delivery.duplicate
    assert values(bootstrap_servers, topic) == dict.fromkeys((b"%d" % n for n in range(20)), 1)


@pytest.mark.fault("E8")
def test_a_flush_that_times_out_reports_no_success() -> None:
    """Fault E8."""
    made = DedupProducer({**NOWHERE, "message.timeout.ms": 60_000}, dedup=WindowFilter(keys=10))
    delivery = made.produce("t", b"x", dedup_key="a")
    assert made.flush(0.2) == 1
    assert not delivery.done()
    with pytest.raises(TimeoutError):
        delivery.result(0.1)
    with pytest.raises(Undelivered, match="1 messages"):
        made.close(0.1)
    assert delivery.outcome is Outcome.UNKNOWN
    with pytest.raises(OutcomeUnknown):
        delivery.result(0)
    made.close()


def test_leaving_the_block_with_an_error_shows_that_error(caplog: pytest.LogCaptureFixture) -> None:
    """And what failed is told beside it: nobody else will."""
    made = DedupProducer({**NOWHERE, "message.timeout.ms": 500}, dedup=WindowFilter(keys=10))
    made.produce("t", b"x", dedup_key="a")
    with pytest.raises(KeyError) as caught, made:
        raise KeyError
    assert "'a' to t" in caught.value.__notes__[0]
    assert [record.getMessage() for record in caplog.records if "'a' to t" in record.getMessage()]


def test_deduplication_is_off_where_it_is_told_to_be(bootstrap_servers: str, topic: str) -> None:
    settings = {"bootstrap.servers": bootstrap_servers}
    for options in ({"enabled": False}, {"topics": {topic[:5] + "*": False}}):
        with DedupProducer(settings, dedup=WindowFilter(keys=10), **options) as made:
            assert not made.produce(topic, b"x", dedup_key="a").duplicate
            assert made.produce(topic, b"x", dedup_key="a").result(60) is not None
            made.produce(topic, b"y")
    assert values(bootstrap_servers, topic) == {b"x": 4, b"y": 2}
    with DedupProducer(settings, dedup=WindowFilter(keys=10), topics={topic: True, "*": False}) as made:
        made.produce(topic, b"z", dedup_key="a").result(60)
        assert made.produce(topic, b"z", dedup_key="a").duplicate


def test_one_message_or_key_is_not_taken_for_many() -> None:
    with DedupProducer(NOWHERE, dedup=WindowFilter(keys=10)) as made:
        for messages, keys in (([b"x", b"y"], "ab"), ([b"x", b"y"], b"ab"), (b"xy", ["a", "b"]), ("xy", ["a", "b"])):
            with pytest.raises(TypeError, match="takes several messages and keys, not one"):
                made.produce_many("t", messages, dedup_keys=keys)  # type: ignore[arg-type]


def test_many_messages_at_once(producer: DedupProducer, bootstrap_servers: str, topic: str) -> None:
    keys = ["a", "b", "a", "c"]
    deliveries = producer.produce_many(topic, [ProducerRecord(b"%d" % n, dedup_key=key) for n, key in enumerate(keys)])
    assert [d.is_attached for d in deliveries] == [False, False, True, False]
    producer.flush(60)
    assert [d.duplicate for d in deliveries] == [False, False, True, False]
    assert deliveries[0].offset == deliveries[2].offset is not None
    more = producer.produce_many(topic, [ProducerRecord(b"5", dedup_key="c"), ProducerRecord(b"6", dedup_key="d")])
    assert [d.duplicate for d in more] == [True, False]
    producer.flush(60)
    assert values(bootstrap_servers, topic) == {b"0": 1, b"1": 1, b"3": 1, b"6": 1}


def test_many_messages_find_room_in_a_small_queue(bootstrap_servers: str, topic: str) -> None:
    settings = {"bootstrap.servers": bootstrap_servers, "queue.buffering.max.messages": 10, "linger.ms": 5}
    with DedupProducer(settings, dedup=WindowFilter(keys=10_000)) as made:
        made.produce_many(topic, [ProducerRecord(b"%d" % n, dedup_key=n) for n in range(1000)])
    assert values(bootstrap_servers, topic) == dict.fromkeys((b"%d" % n for n in range(1000)), 1)


def test_many_threads_send_each_key_once(producer: DedupProducer, bootstrap_servers: str, topic: str) -> None:
    keys = [uuid4() for _ in range(300)]
    barrier = threading.Barrier(6)

    def run(_: int) -> list[Delivery]:
        barrier.wait(60)
        mine = []
        for key in keys:
            mine.append(producer.produce(topic, key.bytes, dedup_key=key))
            producer.poll(0)
        return mine

    with ThreadPoolExecutor(6) as pool:
        deliveries = [delivery for mine in pool.map(run, range(6)) for delivery in mine]
    producer.flush(60)
    assert all(d.outcome in (Outcome.DELIVERED, Outcome.SKIPPED) for d in deliveries)
    assert sum(not d.duplicate for d in deliveries) == len(keys)
    assert values(bootstrap_servers, topic) == dict.fromkeys((key.bytes for key in keys), 1)


def test_threads_that_call_at_once_with_a_key_that_was_sent_are_all_told_so() -> None:
    """One of them finds the key in flight while another one is told that it is not."""
    window, before = WindowFilter(keys=10), sys.getswitchinterval()
    window.confirm("a")
    with DedupProducer(NOWHERE, dedup=window) as made, ThreadPoolExecutor(4) as pool:
        sys.setswitchinterval(1e-6)
        try:
            calls = [pool.submit(made.produce, "t", b"x", dedup_key="a") for _ in range(10_000)]
            deliveries = [call.result(60) for call in calls]
        finally:
            sys.setswitchinterval(before)
    assert {delivery.outcome for delivery in deliveries} == {Outcome.SKIPPED}


def test_chains_deduplicate_by_number(bootstrap_servers: str, topic: str) -> None:
    with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=ChainFilter()) as made:
        made.produce(topic, b"3", chain=Link("c", 300, 200))
        made.produce(topic, b"2", chain=Link("c", 200, 100))
        assert made.produce(topic, b"2", chain=Link("c", 200)).is_attached
        with pytest.raises(InconsistentChain, match="named 100"):
            made.produce(topic, b"another 2", chain=Link("c", 200, 150))
        twins = [ProducerRecord(b"6", chain=Link("c", 600, before)) for before in (500, 550)]
        with pytest.raises(InconsistentChain, match="named 500"):
            made.produce_many(topic, twins)
        made.flush(60)
        assert made.produce(topic, b"2", chain=Link("c", 200, 100)).duplicate
        with pytest.raises(InconsistentChain, match="named 100"):
            made.produce(topic, b"2", chain=Link("c", 200, 150))
        assert not made.produce(topic, b"1", chain=Link("c", 100, 50)).duplicate
        with pytest.raises(KeyRefused, match="chain="):
            made.produce(topic, b"x", dedup_key="a")
    assert values(bootstrap_servers, topic) == {b"1": 1, b"2": 1, b"3": 1}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"enable.idempotence": False}, "enable.idempotence"),
        ({"enable.idempotence": "0"}, "enable.idempotence"),
        ({"acks": 1}, "acks"),
        ({"request.required.acks": "1"}, "acks"),
        ({"transactional.id": "x"}, "transactional.id"),
        ({"on_delivery": print}, "on_delivery"),
        ({"delivery.report.only.error": True}, "delivery.report.only.error"),
    ],
)
def test_settings_that_break_the_promise_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key):
        DedupProducer({"bootstrap.servers": "127.0.0.1:1", **settings}, dedup=WindowFilter(keys=1))


def test_settings_that_say_the_same_are_taken() -> None:
    same = {"enable.idempotence": "TRUE", "acks": -1, "log_level": 0}
    DedupProducer({"bootstrap.servers": "127.0.0.1:1", **same}, dedup=WindowFilter(keys=1)).close()


def test_a_message_without_the_identity_that_its_filter_knows_is_refused() -> None:
    made = DedupProducer(NOWHERE, dedup=WindowFilter(keys=10))
    with pytest.raises(KeyRefused, match="needs dedup_key="):
        made.produce("t", b"x")
    with pytest.raises(KeyRefused, match="sequence="):
        made.produce_many("t", [ProducerRecord(b"x", sequence=1)])
    for second in ({"sequence": 1}, {"chain": Link("c", 1)}):
        with pytest.raises(KeyRefused, match="was given"):
            made.produce("t", b"x", dedup_key="a", **second)
    with pytest.raises(KeyRefused):
        made.produce("t", b"x", dedup_key=1.5)  # type: ignore[arg-type]
    assert made.filter_of("t").stats().in_flight == 0
    assert not made._topics["t"].in_flight
    made.close()
    numbered = DedupProducer(NOWHERE, dedup=SequenceFilter(), recover=False)
    with pytest.raises(KeyRefused, match="dedup_key="):
        numbered.produce("t", b"x", dedup_key="a")
    numbered.close()


def test_a_filter_of_numbers_serves_one_producer() -> None:
    """The numbers of the second would count as duplicates of the first one's, and be lost."""
    numbers = SequenceFilter()
    first, second = (DedupProducer(NOWHERE, dedup=numbers, producer_name=n, recover=False) for n in ("a", "b"))
    assert first.last_sequence_id("t") == -1
    with pytest.raises(ConfigurationError, match="serves producer 'a' in 't'; give 'b' in 't' one of its own"):
        second.produce("t", b"x", sequence=1)
    first.close()
    second.close()


def test_a_filter_of_numbers_serves_one_topic() -> None:
    """What was read from the second topic would take the place of what is known of the first."""
    numbers = SequenceFilter()
    producer = DedupProducer(NOWHERE, dedup=lambda _: numbers, producer_name="a", recover=False)
    assert producer.last_sequence_id("t") == -1
    with pytest.raises(ConfigurationError, match="serves producer 'a' in 't'; give 'a' in 'other' one of its own"):
        producer.last_sequence_id("other")
    producer.close()


@pytest.mark.parametrize("takes", ["dedup_key", "chain"])
def test_one_filter_that_is_given_for_two_topics_is_refused(takes: str) -> None:
    """The same key on two topics is two messages: the second one was never sent."""
    shared: Any = WindowFilter(keys=10) if takes == "dedup_key" else ChainFilter()
    producer = DedupProducer(NOWHERE, dedup=lambda _: shared)
    assert producer.filter_of("t") is shared
    with pytest.raises(ConfigurationError, match="already serves 't': the same key on 'other'"):
        producer.filter_of("other")
    producer.close()
    with DedupProducer(NOWHERE, dedup=shared) as second:
        with pytest.raises(ConfigurationError, match=r"already serves 't': the same key on 'other'.* dedup=lambda"):
            second.filter_of("other")
        assert second.filter_of("t") is shared
    none = NoFilter()
    with DedupProducer(NOWHERE, dedup=lambda _: none) as without:
        assert without.filter_of("t") is without.filter_of("other")


@pytest.mark.parametrize(
    "produce",
    [
        lambda producer: producer.produce("t", b"1", dedup_key="a"),
        lambda producer: producer.produce_many("t", [b"1", b"2", b"1"], dedup_keys=["a", "b", "a"]),
    ],
)
def test_an_interrupt_while_a_message_is_reserved_leaves_nothing(
    produce: Callable[[DedupProducer], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a second try would attach to a message that nobody sends, and flush() would say that nothing is left."""

    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    with DedupProducer(NOWHERE, dedup=WindowFilter(keys=10)) as producer:
        with monkeypatch.context() as patch:
            patch.setattr("exactly_once.publish.topic.Delivery", interrupt)
            with pytest.raises(KeyboardInterrupt):
                produce(producer)
        assert producer._topics["t"].in_flight == {}
        assert [producer.filter_of("t").reserve(key) for key in ("a", "b")] == [State.NEW, State.NEW]


class Away(WindowFilter):
    """A filter whose store is away when a reservation is undone; a real one would have to fail at just that moment."""

    is_away = True

    def release_many(self, keys: Iterable[Any]) -> None:
        if self.is_away:
            raise FilterUnavailable("as without a network")
        super().release_many(keys)


def test_a_message_that_was_not_handed_over_can_be_sent_again_when_the_store_is_back() -> None:
    """The client's queue is full while the filter's store is away: a retry attached to a message that nobody sends."""
    away = Away(keys=10)
    producer = DedupProducer({**NOWHERE, "queue.buffering.max.messages": 1}, dedup=away)
    producer.produce("t", b"1", dedup_key="a")
    with pytest.raises(BufferError):
        producer.produce("t", b"2", dedup_key="b")
    again = producer.produce("t", b"2", dedup_key="b")
    assert isinstance(again.exception(), NotPersisted), "the store does not know yet that it was not sent"
    away.is_away = False
    producer.poll()
    assert away.reserve("b") is State.NEW
    assert "b" not in producer._topics["t"].in_flight
    producer._client.purge()
    with contextlib.suppress(Undelivered):  # "a", which was never to arrive
        producer.close(0)


def test_an_outcome_that_is_told_twice_is_none_of_another_message() -> None:
    """As where an interrupt comes between a report and the end of its settling."""
    producer = DedupProducer(NOWHERE, dedup=WindowFilter(keys=10))
    first, second = producer.produce_many("t", [b"1", b"2"], dedup_keys=["a", "b"])
    batch, place = first.entry
    for _ in range(2):
        producer._topics["t"]._tell(Outcome.DELIVERED, batch, (place,))
    assert (first.outcome, second.outcome) == (Outcome.DELIVERED, Outcome.PENDING)
    producer._client.purge()
    with contextlib.suppress(Undelivered):
        producer.close(0)


def test_a_batch_that_is_sent_again_while_it_is_in_flight_is_attached_to_in_one_pass() -> None:
    with_places = Batch(DedupProducer(NOWHERE, dedup=WindowFilter(keys=10))._open("t"))
    with_places.identities += ["a", "b", "a"]
    assert [with_places.place_of(key) for key in ("a", "b")] == [2, 1]
    with_places.identities.append("b")
    assert with_places.place_of("b") == 3
    with_places.topic.producer.close()


def test_a_filter_whose_first_topic_could_not_be_opened_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a name with a slip, where retention has removed messages."""

    def recover(_: SequenceLog) -> int:
        raise TailLost("as from retention")

    monkeypatch.setattr(SequenceLog, "recover", recover)
    numbers = SequenceFilter()
    with DedupProducer(NOWHERE, dedup=numbers, producer_name="slip", transactions=False) as first:
        for topic in ("t", "u"):
            with pytest.raises(TailLost):
                first.last_sequence_id(topic)
    with DedupProducer(NOWHERE, dedup=numbers, producer_name="a", recover=False) as second:
        assert second.last_sequence_id("t") == -1


def test_nothing_stays_behind_in_memory(producer: DedupProducer, topic: str) -> None:
    for n in range(2000):
        producer.produce(topic, b"x", dedup_key=n)
    producer.flush(60)
    of_topic = producer._topics[topic]
    assert (of_topic.in_flight, of_topic.reported, any(of_topic._due.values())) == ({}, [], False)
    assert not producer.calls


def test_calls_that_attach_keep_no_older_messages_alive(producer: DedupProducer, topic: str) -> None:
    """A key that is called for again and again: each call attaches to the one in flight before it."""
    first = weakref.ref(producer.produce_many(topic, [ProducerRecord(b"x", dedup_key=n) for n in (0, 1)])._batch)  # type: ignore[attr-defined]
    for n in range(1, 60):
        producer.produce_many(topic, [ProducerRecord(b"x", dedup_key=key) for key in (n, n + 1)])
        producer.produce(topic, b"x", dedup_key=n)
        producer.poll(0)
    for _ in range(60):
        producer.produce(topic, b"x", dedup_key=uuid4())
    producer.flush(60)
    gc.collect()
    assert first() is None


def test_a_report_whose_callback_was_interrupted_is_not_taken_for_success(
    bootstrap_servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two lines: the client believes that it has told us."""
    made = DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=WindowFilter(keys=10))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Batch, "report", interrupted)
        delivery = made.produce(topic, None, dedup_key="a")
        with pytest.raises(KeyboardInterrupt):
            made.flush(60)
    assert not delivery.done()
    with pytest.raises(Undelivered):
        made.close()
    assert delivery.outcome is Outcome.UNKNOWN
    assert made.filter_of(topic).stats().unknown == 1


class Failing(WindowFilter):
    """A filter whose marks fail in a way that nobody foresaw."""

    def confirm_many(self, keys: object) -> None:
        raise OSError("no space left")


def test_an_error_of_the_filter_hides_no_outcome(bootstrap_servers: str, topic: str) -> None:
    made = DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=Failing(keys=10))
    delivery = made.produce(topic, b"x", dedup_key="a")
    with pytest.raises(OSError, match="no space"):
        made.flush(60)
    assert delivery.outcome is Outcome.DELIVERED
    assert made.produce(topic, b"x", dedup_key="a").duplicate, "what could not be marked is still known here"
    with pytest.raises(OSError, match="no space"):
        made.close()


@pytest.mark.parametrize("enabled", [True, False])
def test_headers_of_ours_are_not_passed_on_by_who_writes_none(
    bootstrap_servers: str, topic: str, *, enabled: bool
) -> None:
    """Else a take-over that reads this topic would find a key there that is one of another topic."""
    headers = [(DEDUP_KEY, b"sorder-1"), ("mine", b"1"), (SEQUENCE, b"-1:1:files")]
    settings = {"bootstrap.servers": bootstrap_servers}
    with DedupProducer(settings, dedup=WindowFilter(keys=10), enabled=enabled) as made:
        made.produce(topic, b"x", dedup_key="a", headers=headers)
        made.produce_many(topic, [ProducerRecord(b"x", dedup_key="b", headers=dict(headers))])
    assert [message.headers() for message in read_tail(settings, topic, None)] == [[("mine", b"1")]] * 2


def test_passed_on_headers_of_ours_do_not_deceive(bootstrap_servers: str, topic: str) -> None:
    """Who forwards messages forwards their headers, too: those of another producer must not count."""
    stale = [(SEQUENCE, b"99:100:forwarder"), ("own", b"1"), (DEDUP_KEY, b"bstale")]
    with DedupProducer(
        {"bootstrap.servers": bootstrap_servers}, dedup=SequenceFilter(), producer_name="forwarder"
    ) as made:
        made.produce(topic, b"1", sequence=1, headers=stale).result(60)
    with DedupProducer(
        {"bootstrap.servers": bootstrap_servers}, dedup=SequenceFilter(), producer_name="forwarder"
    ) as again:
        assert again.last_sequence_id(topic) == 1
    assert sequence_of([(SEQUENCE, b"99:100:x"), (SEQUENCE, b"1:2:y")]) == ("y", 1, 2)


def test_a_duplicate_that_attaches_while_the_original_is_settled_is_settled_too(
    producer: DedupProducer, topic: str
) -> None:
    """Between the outcome and the end of the key's flight another thread may come in."""
    delivery = producer.produce(topic, b"x", dedup_key="a")
    delivery.result(60)
    called: list[object] = []
    producer._topics[topic].in_flight["a"] = delivery.entry[0]
    twin = producer.produce(topic, b"x", dedup_key="a", on_delivery=lambda *arguments: called.append(arguments))
    assert twin.is_attached
    assert twin.duplicate
    assert (twin.outcome, twin.offset) == (Outcome.DELIVERED, delivery.offset)
    producer.poll(0)
    assert called == [(None, delivery.message)]


REFUSED = b"x" * 5000
"""Too large for the topics below; the client sends it, because it does not know their limit."""


@pytest.fixture
def small(bootstrap_servers: str) -> str:
    """A topic whose broker refuses large messages."""
    return create_topic(bootstrap_servers, 1, max_message_bytes="1000")


@pytest.mark.parametrize("end", ["flush", "close", "leave the block"])
def test_a_failure_that_nobody_has_looked_at_is_raised(bootstrap_servers: str, small: str, end: str) -> None:
    made = DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=WindowFilter(keys=10))
    made.produce(small, REFUSED, dedup_key="the key")
    leave: Callable[[], object] = {"flush": made.flush, "close": made.close}.get(
        end, partial(made.__exit__, *[None] * 3)
    )
    with pytest.raises(Undelivered, match="'the key'"):
        leave()
    made.close()


def test_a_fatal_error_of_the_client_hides_no_outcome(bootstrap_servers: str, small: str) -> None:
    """The client raises it amid its reports, so that Python calls it a SystemError, which may have lost its cause."""
    # Both go with the flush, in one batch, however long it takes to get there.
    settings = {"bootstrap.servers": bootstrap_servers, "enable.gapless.guarantee": True, "linger.ms": 60_000}
    made = DedupProducer(settings, dedup=WindowFilter(keys=10))
    deliveries = [made.produce(small, payload, dedup_key=n) for n, payload in enumerate((REFUSED, b"x"))]
    with pytest.raises(ClientFailed, match="make a new producer"):
        made.flush()
    with pytest.raises(Undelivered, match="2 messages failed"):
        made.flush()
    assert [delivery.outcome for delivery in deliveries] == [Outcome.NOT_PERSISTED] * 2
    for produce in (
        lambda: made.produce(small, b"y", dedup_key="y"),
        lambda: made.produce(small, b"y", dedup_key="y", headers={"a": b"b"}),
        lambda: made.produce_many(small, [b"y"], dedup_keys=["y"]),
    ):
        with pytest.raises(ClientFailed, match=r"make a new producer .*FATAL"):
            produce()
    assert made.filter_of(small).stats().in_flight == 0
    made.close()
    assert not values(bootstrap_servers, small)


def test_an_error_of_many_messages_names_the_one_that_is_none(bootstrap_servers: str, topic: str) -> None:
    with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=WindowFilter(keys=10)) as made:
        with pytest.raises(TypeError) as caught:
            made.produce_many(topic, [b"a", 5, b"c"], dedup_keys=["k-a", "k-b", "k-c"])  # type: ignore[arg-type]
        assert caught.value.__notes__ == [f"handing over 'k-b' to {topic!r}"]


def test_what_is_no_filter_is_refused() -> None:
    with (
        DedupProducer(NOWHERE, dedup=lambda _: None) as made,  # type: ignore[arg-type, return-value]
        pytest.raises(ConfigurationError, match="dedup= returned None for 't'"),
    ):
        made.produce("t", b"x", dedup_key="a")


def test_a_failure_that_somebody_has_looked_at_is_not_raised(bootstrap_servers: str, small: str) -> None:
    told: list[KafkaError | None] = []
    with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=WindowFilter(keys=10)) as made:
        made.produce(small, REFUSED, dedup_key="callback", on_delivery=lambda error, _: told.append(error))
        asked = made.produce(small, REFUSED, dedup_key="result")
        with pytest.raises(NotPersisted):
            asked.result(60)
        made.flush(60)
        made.produce(small, REFUSED, dedup_key="sent again")
        until(lambda: made.poll(0.1) >= 0 and not made._topics[small].in_flight, 30, "the report")
        made.produce(small, b"small", dedup_key="sent again")
    assert told[0] is not None


class Undoing(WindowFilter):
    """A filter during whose answer another thread asks for the same key; then the store is away."""

    def __init__(self, twin: Any) -> None:
        super().__init__(keys=10)
        self.twin = twin

    def reserve_many(self, keys: Any) -> list[State]:
        self.twin()
        raise FilterUnavailable


def test_what_attached_to_a_call_that_was_undone_is_no_duplicate() -> None:
    """The other thread's call is made from within the first one, where that thread would come in between."""
    told: list[KafkaError | None] = []
    twins: list[Delivery] = []

    def twin(**options: Any) -> None:
        twins.append(made.produce("t", b"x", dedup_key="a", **options))

    made = DedupProducer(NOWHERE, dedup=Undoing(lambda: twin(on_delivery=lambda error, _: told.append(error))))
    with pytest.raises(FilterUnavailable):
        made.produce("t", b"x", dedup_key="a")
    made.flush(60)
    assert (twins[0].outcome, twins[0].duplicate) == (Outcome.NOT_PERSISTED, False)
    assert told[0] is not None
    assert told[0].retriable()
    made.close()
    made = DedupProducer(NOWHERE, dedup=Undoing(twin))
    with pytest.raises(FilterUnavailable):
        made.produce("t", b"x", dedup_key="a")
    with pytest.raises(Undelivered):
        made.close()


class Elsewhere(WindowFilter):
    """A filter whose keys another process holds."""

    def reserve_many(self, keys: Any) -> list[State]:
        return [State.IN_FLIGHT for _ in keys]


def test_what_another_process_is_sending_is_told_as_an_error() -> None:
    told: list[KafkaError | None] = []
    made = DedupProducer(NOWHERE, dedup=Elsewhere(keys=10))
    held = made.produce("t", b"x", dedup_key="a", on_delivery=lambda error, _: told.append(error))
    made.poll(0)
    assert (held.outcome, held.duplicate) == (Outcome.HELD_ELSEWHERE, False)
    assert told[0] is not None
    assert "another process" in told[0].str()
    made.flush(1)
    made.produce("t", b"x", dedup_key="b")
    with pytest.raises(Undelivered, match="'b'"):
        made.close()


def test_a_closed_producer_takes_nothing_more() -> None:
    made = DedupProducer(NOWHERE, dedup=WindowFilter(keys=10))
    made.close()
    for send in (lambda: made.produce("t", b"x", dedup_key="a"), lambda: made.produce_many("t", [])):
        with pytest.raises(ConfigurationError, match="closed"):
            send()
    assert made, "true, although nothing is in flight"


class Told:
    """The client's message of a report."""

    def __init__(self, value: bytes) -> None:
        self.value = lambda: value


class Stand:
    """A client whose reports come when a test says so: no broker holds those of one partition back on demand."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []

    def produce(self, topic: str, value: bytes, key: object, partition: int, told: Any) -> None:
        self.sent.append((value, told))

    def poll(self, timeout: float = 0) -> int:
        return 0

    def flush(self, timeout: float = 0) -> int:
        return 0

    def __len__(self) -> int:
        return 0

    def report(self, *places: int, error: KafkaError | None = None) -> None:
        for place in places:
            value, told = self.sent[place]
            told(error, Told(value))


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand()
    monkeypatch.setattr(DedupProducer, "_connect", lambda _: made)
    return made


def test_a_message_does_not_wait_for_those_beside_it(stand: Stand) -> None:
    """Neither for who asks, nor for who is called back."""
    told: list[object] = []
    made = DedupProducer(NOWHERE, dedup=WindowFilter(keys=100))
    for n in range(3):
        made.produce("t", b"%d" % n, dedup_key=n)
    stand.report(0)  # nobody can ask for this one
    asked = made.produce("t", b"asked", dedup_key="asked")
    made.produce("t", b"called", dedup_key="called", on_delivery=lambda *_: told.append(1))
    many = made.produce_many("t", [b"a", b"b"], dedup_keys=["a", "b"])
    stand.report(3, 4, 6)
    made.poll()
    assert (asked.done(), [each.done() for each in many], told) == (False, [False, False], [1])
    made.poll()  # now it is known that somebody waits
    assert (asked.outcome, [each.done() for each in many]) == (Outcome.DELIVERED, [False, True])
    stand.report(1, 5)
    stand.report(2, error=KafkaError(KafkaError._MSG_TIMED_OUT))
    made.poll()
    assert many[0].outcome is Outcome.DELIVERED
    assert made.produce("t", b"2", dedup_key=2).may_repeat
    assert [made.produce("t", b"%d" % n, dedup_key=n).duplicate for n in (0, 1)] == [True, True]
    stand.report(7)
    made.close()


def test_reports_of_equal_payloads_are_told_apart(stand: Stand) -> None:
    made = DedupProducer(NOWHERE, dedup=WindowFilter(keys=100))
    single = [made.produce("t", b"x", dedup_key=n) for n in range(3)]
    many = made.produce_many("t", [b"x", "x", None, b"y"], dedup_keys=[3, 4, 5, 6])
    stand.report(1, 5, error=KafkaError(KafkaError._MSG_TIMED_OUT))
    stand.report(0, 2, 3, 4, 6)
    made.poll()
    outcomes = [each.outcome for each in (*single, *many)]
    assert [n for n, outcome in enumerate(outcomes) if outcome is not Outcome.DELIVERED] == [1, 5]
    with pytest.raises(Undelivered, match="2 messages"):
        made.close()


def test_payloads_need_as_many_keys(stand: Stand) -> None:
    made = DedupProducer(NOWHERE, dedup=WindowFilter(keys=100))
    for keys in (["a"], ["a", "b", "c"]):
        with pytest.raises(KeyRefused, match=f"2 messages need as many identities, not {len(keys)}"):
            made.produce_many("t", [b"a", b"b"], dedup_keys=keys)
    with pytest.raises(KeyRefused, match="sequence= was given"):
        made.produce_many("t", [b"a"], dedup_keys=["a"], sequences=[1])
    assert not made.produce_many("t", [], dedup_keys=[])
    made.close()
