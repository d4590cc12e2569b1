"""A key whose partition changes: its messages take effect once each, in no order."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from confluent_kafka import Message, Producer

from exactly_once.consumer import maintenance
from tests.conftest import MakeConsumer
from tests.support import journal
from tests.support.topics import add_partitions, create_topic
from tests.support.worker import drain, ensure_journal, record, turn_until


def send(bootstrap_servers: str, topic: str, key: bytes, value: bytes) -> int | None:
    """Produce a message where its key belongs, and return the partition."""
    placed: list[Message] = []
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    producer.produce(topic, value, key, on_delivery=lambda _, message: placed.append(message))
    assert producer.flush(30) == 0
    return placed[0].partition()


@pytest.mark.fault("C14")
def test_new_messages_of_a_key_may_overtake_its_old_ones_when_partitions_are_added(
    *,
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    conninfo: str,
    db: psycopg.Connection[Any],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "LOCK_SECONDS", 0.2)
    ensure_journal(conninfo)
    create_topic(bootstrap_servers, 1, name=name)
    with make_consumer() as first:
        first.subscribe([name])
        turn_until(first, first._ownership.owned, 30, "the row")
    keys = [b"%d" % number for number in range(20)]
    for key in keys:
        assert send(bootstrap_servers, name, key, b"old") == 0
    add_partitions(bootstrap_servers, name, 2)
    moved = next(key for key in keys if send(bootstrap_servers, name, key, b"new") == 1)
    with make_consumer() as consumer, psycopg.connect(conninfo) as slow:
        # What keeps the old partition waiting may as well be a slow owner, or a longer log.
        slow.execute("SELECT FROM exactly_once.ledger WHERE group_id = %s AND partition = 0 FOR UPDATE", (name,))
        consumer.subscribe([name])
        with next(iter(consumer)) as unit:
            record(unit, "test")
            assert [(message.key(), message.value()) for message in unit.messages] == [(moved, b"new")]
        slow.rollback()
        drain(consumer)
    verdict = journal.check(conninfo, bootstrap_servers, name)
    assert verdict.exact, str(verdict)
