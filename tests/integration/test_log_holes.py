"""Logs whose offsets are not one after the other: compaction, aborted and open transactions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Producer, TopicPartition

from exactly_once.metrics.table import LAG
from tests.conftest import MakeConsumer
from tests.integration.scene import actions
from tests.support import journal
from tests.support.topics import create_topic, produce, until_end
from tests.support.waiting import until
from tests.support.worker import drain, ensure_journal, record

pytestmark = pytest.mark.usefixtures("unhurried")


@pytest.fixture(autouse=True)
def _journal(conninfo: str) -> None:
    ensure_journal(conninfo)


@pytest.fixture
def producer(bootstrap_servers: str, name: str) -> Iterator[Producer]:
    """A transactional producer; an open transaction of it is aborted at the end."""
    with _transactional(bootstrap_servers, name) as producer:
        yield producer
        producer.purge()
        producer.abort_transaction(60)


@pytest.mark.fault("C7")
def test_compacted_topic_is_applied_exactly_and_ends(
    make_consumer: MakeConsumer, bootstrap_servers: str, conninfo: str
) -> None:
    """Few keys, so that the cleaner leaves holes; the end is known by position, not by count."""
    topic = create_topic(
        bootstrap_servers,
        1,
        cleanup_policy="compact",
        min_cleanable_dirty_ratio="0.01",
        segment_bytes="1048576",
        segment_ms="100",
        max_compaction_lag_ms="100",
        min_compaction_lag_ms="0",
    )
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for number in range(300):
        producer.produce(topic, str(number), str(number % 7), partition=0)
        if number % 50 == 49:
            producer.flush(30)
            time.sleep(0.15)  # segment.ms rolls the segment at the next message
    producer.flush(30)
    until(lambda: len(journal.scan(bootstrap_servers, topic)) < 250, 90, "the cleaner to leave holes")
    with make_consumer(max_messages=20) as consumer:
        consumer.subscribe([topic])
        done = drain(consumer)
        assert consumer._buffer.gaps > 0
    # The cleaner may have gone on after our reading: what we applied twice or skipped would still show.
    verdict = journal.check(conninfo, bootstrap_servers, topic, counts=False)
    assert done < 250
    assert not verdict.lost, verdict
    assert not verdict.duplicated, verdict


@pytest.mark.fault("C8")
def test_aborted_transactions_are_not_applied_and_the_end_is_reached(
    make_consumer: MakeConsumer, bootstrap_servers: str, conninfo: str, producer: Producer
) -> None:
    """The log ends in a control record, which no consumer is ever given."""
    topic = create_topic(bootstrap_servers, 1)
    for round_ in range(10):
        producer.begin_transaction()
        for number in range(5):
            producer.produce(topic, f"{round_}-{number}", partition=0)
        producer.flush(30)
        (producer.abort_transaction if round_ % 2 else producer.commit_transaction)(60)
    with make_consumer(max_messages=3) as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 25
        assert drain(consumer) == 0
    verdict = journal.check(conninfo, bootstrap_servers, topic)
    assert verdict.exact, verdict
    producer.begin_transaction()


def test_log_of_aborted_messages_only_ends_and_is_not_read_again(
    make_consumer: MakeConsumer, bootstrap_servers: str, producer: Producer
) -> None:
    topic = create_topic(bootstrap_servers, 1)
    producer.begin_transaction()
    for number in range(50):
        producer.produce(topic, str(number), partition=0)
    producer.flush(30)
    producer.abort_transaction(60)
    for _ in range(2):
        with make_consumer() as consumer:
            consumer.subscribe([topic])
            assert drain(consumer) == 0
    producer.begin_transaction()


@pytest.mark.fault("C9")
def test_open_transaction_ends_the_reading_and_loses_nothing(
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    conninfo: str,
    producer: Producer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A hung producer hides what comes after its first message; `until_end` must neither wait nor step over it."""
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, 10, 1)
    producer.begin_transaction()
    producer.produce(topic, "in the open transaction", partition=0)
    producer.flush(30)
    produce(bootstrap_servers, topic, 10, 1, start=10)
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 10
        lags = until(lambda: [s.value for s in consumer._observer.read() if s.metric is LAG], 30, "Kafka to answer")
        assert lags == [11]
    assert actions(caplog).count("ends_at_open_transaction") == 1
    producer.commit_transaction(60)
    until_end(bootstrap_servers, topic, 22)
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 11
    assert actions(caplog).count("ends_at_open_transaction") == 1
    verdict = journal.check(conninfo, bootstrap_servers, topic)
    assert verdict.exact, verdict
    producer.begin_transaction()


@pytest.mark.fault("C9")
@pytest.mark.parametrize("end", ["commit", "none"])
def test_a_transaction_is_told_of_that_stays_open_and_none_that_ends(  # noqa: PLR0917 - fixtures
    end: str,
    make_consumer: MakeConsumer,
    producer: Producer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    bootstrap_servers: str,
) -> None:
    """Of those that end there is one or another open nearly always."""
    monkeypatch.setattr("exactly_once.consumer.maintenance.OPEN_SECONDS", 1.5)
    monkeypatch.setattr("exactly_once.consumer.maintenance.RECHECK_SECONDS", 0.1)
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, 10, 1)

    def publish() -> None:
        for number in range(8):
            producer.begin_transaction()
            producer.produce(topic, str(100 + number), partition=0)
            producer.flush(60)
            if end == "none":
                produce(bootstrap_servers, topic, 10, 1, start=10)
                return
            time.sleep(0.7)
            producer.commit_transaction(60)
        producer.begin_transaction()  # which the fixture ends

    with make_consumer(max_messages=5) as consumer, ThreadPoolExecutor(1) as pool:
        consumer.subscribe([topic])
        published = pool.submit(publish)
        consumer.run(lambda unit: record(unit, "test"), idle_seconds=4)
        published.result(60)
    told = [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "transaction_open"]
    assert len(told) == (end == "none")
    if told:
        assert f"{topic}[0]: a transaction of a producer is open at offset 10 for" in told[0]
        assert "to offset 21" in told[0]


def test_latest_does_not_step_over_an_open_transaction(
    make_consumer: MakeConsumer, bootstrap_servers: str, producer: Producer
) -> None:
    """What a producer commits after the group has started is read."""
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, 10, 1)
    producer.begin_transaction()
    producer.produce(topic, "committed after the start", partition=0)
    producer.flush(30)
    with make_consumer(start="latest") as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 0
        producer.commit_transaction(60)
        until_end(bootstrap_servers, topic, 12)
        assert drain(consumer) == 1
    producer.begin_transaction()


def test_idle_seconds_ends_the_reading_when_nothing_came_for_so_long(
    make_consumer: MakeConsumer, bootstrap_servers: str
) -> None:
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, 10, 1)
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        done, last = 0, 0.0
        for unit in consumer.units(idle_seconds=1.5):
            with unit:
                done += len(unit.messages)
            last = time.monotonic()
        assert done == 10
        assert 1.4 < time.monotonic() - last < 60


def test_end_is_where_the_log_ended_when_the_reading_began(make_consumer: MakeConsumer, bootstrap_servers: str) -> None:
    """A producer that never stops does not keep `until_end` from ending."""
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, 10, 1)
    position = TopicPartition(topic, 0)
    assert position.offset < 0
    with make_consumer(max_messages=5) as consumer:
        consumer.subscribe([topic])
        done = 0
        for unit in consumer.units(until_end=True):
            with unit:
                done += len(unit.messages)
                produce(bootstrap_servers, topic, 3, 1, start=done)
            assert done < 500, "it follows the producer"
        assert done >= 10


def _transactional(bootstrap_servers: str, name: str) -> Producer:
    producer = Producer({"bootstrap.servers": bootstrap_servers, "transactional.id": name, "linger.ms": 5})
    producer.init_transactions(60)
    return producer


def test_who_reads_open_transactions_reads_them_until_the_end(
    make_consumer: MakeConsumer, bootstrap_servers: str, producer: Producer
) -> None:
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, 10, 1)
    producer.begin_transaction()
    producer.produce(topic, "in the open transaction", partition=0)
    producer.flush(30)
    produce(bootstrap_servers, topic, 10, 1, start=10)
    with make_consumer({"isolation.level": "read_uncommitted"}, max_messages=3) as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 21
