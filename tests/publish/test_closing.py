"""``close`` goes to its end, whatever callbacks raise, and raises all of it then."""

from __future__ import annotations

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message

from exactly_once.errors import ConfigurationError
from exactly_once.publish import (
    DedupProducer,
    OutcomeUnknown,
    ProducerRecord,
    SequenceFilter,
    State,
    TransactionalProducer,
    Undelivered,
    WindowFilter,
)
from tests.publish.test_interrupts import Telling
from tests.publish.test_producer import NOWHERE, values
from tests.support.topics import create_topic
from tests.support.waiting import until


class Closable(WindowFilter):
    """A filter that shows whether it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def fail(*_: object) -> Any:
    raise RuntimeError("the caller's own")


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


def test_a_callback_that_raises_hides_no_failed_message(caplog: pytest.LogCaptureFixture) -> None:
    made, called = Closable(keys=10), list[KafkaError | None]()
    producer = DedupProducer(NOWHERE, dedup=made)
    for n in range(2):
        producer.produce("t", b"x", dedup_key=n, on_delivery=fail)
    producer.produce("t", b"x", dedup_key=2)
    producer.produce("t", b"x", dedup_key=3, on_delivery=lambda error, _: called.append(error))
    with pytest.raises(Undelivered, match=r"1 messages failed.*; 2 to t") as caught:
        producer.close()
    assert notes_of(caught.value).count("RuntimeError: the caller's own") == 2
    logged = [each.getMessage() for each in caplog.records if getattr(each, "action", "") == "close_failed"]
    assert ["RuntimeError: the caller's own" in each for each in logged] == [True, True]
    assert [error is None for error in called] == [False]
    assert (made.is_closed, producer.is_ended, made.reserve(0)) == (True, True, State.UNKNOWN)


def test_a_topic_that_is_opened_meanwhile_keeps_no_other_one_from_being_closed() -> None:
    """As by another thread; here by the first filter that is closed."""

    class Opening(WindowFilter):
        def close(self) -> None:
            with pytest.raises(ConfigurationError, match="closed"):
                producer.filter_of("new")

    last, new = Closable(keys=10), Closable(keys=10)
    filters = {"first": Opening(keys=10), "last": last, "new": new}
    producer = DedupProducer(NOWHERE, dedup=filters.__getitem__)
    for topic in ("first", "last"):
        producer.filter_of(topic)
    producer.close()
    assert (last.is_closed, new.is_closed, producer.is_ended) == (True, True, True)


def test_what_another_thread_publishes_while_the_producer_is_closed_is_refused() -> None:
    """It has passed the check when the other one closes; here it closes in between itself."""

    class Late(Closable):
        def reserve(self, key: Any) -> State:
            with pytest.raises(Undelivered, match="1 messages"):
                producer.close()
            return super().reserve(key)

    opened, late = Closable(keys=10), Late(keys=10)

    def open_late(_: str) -> Closable:
        producer.close()
        return opened

    producer = DedupProducer(NOWHERE, dedup=open_late)
    with pytest.raises(ConfigurationError, match="the producer is closed"):
        producer.produce("t", b"x", dedup_key=0)
    assert opened.is_closed
    producer = DedupProducer(NOWHERE, dedup=late)
    with pytest.raises(ConfigurationError, match="the producer is closed"):
        producer.produce("t", b"x", dedup_key=0)
    assert WindowFilter.reserve(late, 0) is State.NEW


def test_who_waits_while_another_thread_closes_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = DedupProducer({**NOWHERE, "message.timeout.ms": 60_000}, dedup=WindowFilter(keys=10))
    delivery = producer.produce("t", b"x", dedup_key=0)

    asked, wait = itertools.count(), producer.wait
    monkeypatch.setattr(producer, "wait", lambda seconds: (next(asked), wait(seconds)))

    def ask() -> int:
        until(lambda: producer._closed, 30, "the other thread")
        with pytest.raises(OutcomeUnknown):
            delivery.result()
        return next(asked)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask)
        with contextlib.suppress(Undelivered):
            producer.close(2)
        assert waiting.result(60) < 1000, "ten times a second"


def test_a_callback_that_close_calls_waits_for_no_other_message() -> None:
    """Nothing would be reported before it returns."""
    made = WindowFilter(keys=10)
    made.confirm(0)
    producer = DedupProducer({**NOWHERE, "message.timeout.ms": 60_000}, dedup=made)
    pending = producer.produce("t", b"x", dedup_key=1)
    producer.produce("t", b"x", dedup_key=0, on_delivery=lambda *_: pending.result(10))
    with pytest.raises(Undelivered) as caught:
        producer.close(0)
    assert "ConfigurationError: a callback that close() calls" in notes_of(caught.value)


def test_a_callback_of_the_client_that_raises_ends_no_flush(bootstrap_servers: str) -> None:
    topic = create_topic(bootstrap_servers, 1)
    made = Closable(keys=100)
    often = {"statistics.interval.ms": 20, "stats_cb": fail, "linger.ms": 2000}
    producer = DedupProducer({"bootstrap.servers": bootstrap_servers, **often}, dedup=made)
    delivery = producer.produce(topic, b"0", dedup_key=0)
    with pytest.raises(RuntimeError, match="own"):
        producer.close()
    assert delivery.offset == 0
    assert (made.is_closed, producer.is_ended, made.reserve(0)) == (True, True, State.DUPLICATE)
    assert values(bootstrap_servers, topic) == {b"0": 1}


def test_an_error_callback_that_raises_leaves_nothing_without_an_outcome() -> None:
    made = Closable(keys=100)
    producer = DedupProducer({**NOWHERE, "error_cb": fail}, dedup=made)
    producer.produce("t", b"x", dedup_key=0)
    with pytest.raises(Undelivered, match="0 to t") as caught:
        producer.close()
    assert "RuntimeError: the caller's own" in notes_of(caught.value)
    assert (made.is_closed, producer.is_ended, made.reserve(0)) == (True, True, State.UNKNOWN)


def test_an_interruption_is_raised_when_all_is_closed() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    made = Closable(keys=10)
    producer = DedupProducer(NOWHERE, dedup=made)
    producer.produce("t", b"x", dedup_key=0, on_delivery=interrupt)
    producer.produce("t", b"x", dedup_key=1)
    with pytest.raises(KeyboardInterrupt) as caught:
        producer.close()
    assert "Undelivered: 1 messages failed" in notes_of(caught.value)
    assert (made.is_closed, producer.is_ended) == (True, True)


def test_the_client_of_numbered_messages_is_closed_and_a_snapshot_made(bootstrap_servers: str, tmp_path: Path) -> None:
    topic = create_topic(bootstrap_servers, 1)
    settings, called = {"bootstrap.servers": bootstrap_servers}, list[Message | None]()
    producer = DedupProducer(settings, dedup=SequenceFilter(), producer_name="closes", snapshots=tmp_path)
    for n in range(2):
        producer.produce(topic, b"%d" % n, sequence=n, on_delivery=fail)
    producer.produce(topic, b"2", sequence=2, on_delivery=lambda _, message: called.append(message))
    committer = producer._committer
    assert committer is not None
    (snapshot,) = tmp_path.iterdir()
    before = snapshot.read_bytes()
    with pytest.raises(RuntimeError, match="own"):
        producer.close()
    assert (committer.producer.is_ended, producer.is_ended, len(called)) == (True, True, 1)
    assert snapshot.read_bytes() != before
    assert values(bootstrap_servers, topic) == {b"%d" % n: 1 for n in range(3)}


def test_a_callback_that_publishes_while_its_producer_is_closed_is_refused(bootstrap_servers: str, name: str) -> None:
    """It is called in the block that lets no other thread publish."""
    topic, problems = create_topic(bootstrap_servers, 1), list[Exception]()

    def publish(*_: object) -> None:
        try:
            with producer.transaction() as transaction:
                transaction.produce(topic, b"2", dedup_key=2)
        except ConfigurationError as problem:
            problems.append(problem)

    settings = {"bootstrap.servers": bootstrap_servers, "transactional.id": name}
    producer = TransactionalProducer(settings, dedup=WindowFilter(keys=10))
    calls = (fail, publish)
    with pytest.raises(RuntimeError, match="own"), producer.transaction() as transaction:
        transaction.messages += [(topic, ProducerRecord(b"x", dedup_key=n, on_delivery=calls[n])) for n in range(2)]
    producer.close()
    assert ["closed" in str(problem) for problem in problems] == [True]


def test_an_index_error_of_a_callback_is_raised_as_any_other() -> None:
    def fail_by_index(*_: object) -> object:
        raise IndexError

    with DedupProducer(NOWHERE, dedup=WindowFilter(keys=10)) as producer:
        producer.produce("t", b"x", dedup_key=0, on_delivery=fail_by_index)
        with pytest.raises(IndexError):
            producer.flush(60)


def test_what_the_client_tells_of_itself_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of its connections come at any time, and the client counts them with its messages."""
    producer = DedupProducer(NOWHERE, dedup=WindowFilter(keys=10))
    producer.filter_of("t")
    settle = producer._settle_topic

    def settle_late(topic: Any) -> None:
        until(lambda: len(producer._client) > 0, 60, "an error of the client")
        settle(topic)

    monkeypatch.setattr(producer, "_settle_topic", settle_late)
    producer.close()


def test_what_came_behind_a_slow_mark_is_marked_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client and filter are stand-ins: of real ones nothing decides which report comes while a statement waits."""
    goes_on = threading.Event()

    class Slow(WindowFilter):
        is_remote = True

        def confirm_many(self, keys: Any) -> None:
            assert goes_on.wait(30)
            super().confirm_many(keys)

    monkeypatch.setattr("exactly_once.publish.topic.MARK_SECONDS", 0.05)
    monkeypatch.setattr(DedupProducer, "_connect", lambda _: Telling())
    made = Slow(keys=10)
    producer = DedupProducer(NOWHERE, dedup=made)
    for n in range(2):
        producer.produce("t", b"%d" % n, dedup_key=n).done()
    for keeps in (1, 0):
        monkeypatch.setattr(Telling, "keeps", keeps)
        producer.poll(0)
    timer = threading.Timer(1, goes_on.set)
    timer.start()
    producer.close(30)
    timer.join()
    assert made.reserve_many([0, 1]) == [State.DUPLICATE] * 2
