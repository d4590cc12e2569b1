"""The excerpts of docs/publishing.md, in programs that run."""
# ruff: noqa: SIM117 - as a reader would write it

from __future__ import annotations

from pathlib import Path

import psycopg

from exactly_once.publish import (
    DedupProducer,
    PostgresWindow,
    ProducerRecord,
    PublishOwner,
    SequenceFilter,
    TopicTakeOver,
    TransactionalProducer,
    WindowFilter,
    end_positions,
    slots_for,
)
from tests.publish.test_sequences_on_broker import values
from tests.support.topics import create_topic


def test_the_first_excerpt_sends_once(bootstrap_servers: str) -> None:
    topic, value, order_id = create_topic(bootstrap_servers, 1), b"1", "order-1"
    kafka = {"bootstrap.servers": bootstrap_servers}
    with DedupProducer(kafka, dedup=lambda topic: WindowFilter(keys=1_000_000)) as producer:
        delivery = producer.produce(topic, value, dedup_key=order_id)
        again = producer.produce(topic, value, dedup_key=order_id)
    assert (delivery.duplicate, again.duplicate) == (False, True)
    assert delivery.offset == again.offset == 0
    assert values(bootstrap_servers, topic) == [1]


def test_the_excerpt_on_sources_with_positions_sends_once(bootstrap_servers: str, name: str, tmp_path: Path) -> None:
    topic, directory = create_topic(bootstrap_servers, 1), tmp_path
    kafka = {"bootstrap.servers": bootstrap_servers}
    for end in (5, 10):
        lines = [(n, b"%d" % n) for n in range(end)]
        with DedupProducer(kafka, dedup=SequenceFilter(), producer_name=name, snapshots=directory) as producer:
            last = producer.last_sequence_id(topic)
            for number, line in lines:
                if number >= last:
                    producer.produce(topic, line, sequence=number)
    assert values(bootstrap_servers, topic) == list(range(10))


def test_the_excerpt_for_several_processes_sends_once(
    bootstrap_servers: str, postgres_conninfo: str, name: str
) -> None:
    topic = create_topic(bootstrap_servers, 1, name=name)
    kafka = {"bootstrap.servers": bootstrap_servers}
    events = [(n, b"%d" % n) for n in range(10)]
    conninfo = f"{postgres_conninfo.rsplit('/', 1)[0]}/{own_database(postgres_conninfo, name)}"
    owner = PublishOwner(conninfo, positions=lambda: end_positions(kafka, [topic]), migrate=True)
    take_over = TopicTakeOver(kafka)

    def window(name: str) -> PostgresWindow:
        return PostgresWindow(owner, scope=name, seconds=86_400, take_over=take_over)

    with DedupProducer(kafka, dedup=window) as producer:
        deliveries = producer.produce_many(topic, [ProducerRecord(value, dedup_key=key) for key, value in events])
        producer.flush()
        assert all(
            d.duplicate for d in producer.produce_many(topic, [ProducerRecord(b"0", dedup_key=k) for k, _ in events])
        )
    owner.close()
    assert not any(delivery.duplicate for delivery in deliveries)
    assert values(bootstrap_servers, topic) == list(range(10))


def test_the_excerpt_on_transactions_sends_both_or_none(bootstrap_servers: str, name: str) -> None:
    orders, audit = create_topic(bootstrap_servers, 1), create_topic(bootstrap_servers, 1)
    kafka, dedup = {"bootstrap.servers": bootstrap_servers}, lambda topic: WindowFilter(keys=1_000_000)
    order, entry, order_id = b"1", b"2", name
    with TransactionalProducer({**kafka, "transactional.id": "orders-1"}, dedup=dedup) as producer:
        with producer.transaction() as transaction:
            transaction.produce(orders, order, dedup_key=order_id)
            transaction.produce(audit, entry, dedup_key=order_id)
    assert [delivery.offset for delivery in transaction.deliveries] == [0, 0]
    assert (values(bootstrap_servers, orders), values(bootstrap_servers, audit)) == ([1], [2])


def own_database(conninfo: str, name: str) -> str:
    """Make a database in which the window may have a length of its own."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return name


def test_the_excerpt_on_sizes_is_right() -> None:
    assert slots_for(3_600_000, 0.9) == 1_563_461
    assert slots_for(3_600_000, 0.1) == 34_168_398
