"""The ledger follows a log to its end, also behind offsets that hold no message: markers, aborted and compacted tails.

Else retention, which removes those as well, would leave the ledger below the start of a log that was applied whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from exactly_once import ExactlyOnceConsumer, OffsetBelowLogStart, Unit
from exactly_once.consumer import maintenance
from tests.conftest import MakeConsumer
from tests.support.topics import create_topic, delete_records, end_of, produce, until_end
from tests.support.waiting import until
from tests.support.worker import drain, ensure_journal

Db = psycopg.Connection[Any]
pytestmark = pytest.mark.usefixtures("unhurried")


@pytest.fixture(autouse=True)
def _soon(conninfo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_journal(conninfo)
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.2)
    monkeypatch.setattr(maintenance, "QUIET_SECONDS", 0.0)


def produce_in_transactions(bootstrap_servers: str, topic: str, messages: int, *, aborted: int = 0) -> None:
    """Commit messages to partition 0, and then abort others; their markers are in the log, too."""
    end = end_of(bootstrap_servers, topic)
    producer = Producer({"bootstrap.servers": bootstrap_servers, "transactional.id": topic})
    producer.init_transactions()
    for count, finish in ((messages, producer.commit_transaction), (aborted, producer.abort_transaction)):
        if count:
            producer.begin_transaction()
            for number in range(count):
                producer.produce(topic, str(number).encode(), partition=0)
            producer.flush()
            finish()
            end += count + 1
            until_end(bootstrap_servers, topic, end)


def remove_all(bootstrap_servers: str, topic: str) -> None:
    """Remove everything up to the end of the log, as retention does in the end."""
    delete_records(bootstrap_servers, topic, end_of(bootstrap_servers, topic))


def stored(db: Db, group: str) -> tuple[int, int | None]:
    """Offset and leader epoch of the only row."""
    (row,) = db.execute("SELECT next_offset, leader_epoch FROM exactly_once.ledger WHERE group_id = %s", (group,))
    return row[0], row[1]


def mirrored(bootstrap_servers: str, group: str, topic: str) -> int:
    client = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": group})
    try:
        (found,) = client.committed([TopicPartition(topic, 0)], timeout=60)
        return found.offset
    finally:
        client.close()


def idle(consumer: ExactlyOnceConsumer, condition: Callable[[], bool], what: str) -> None:
    """Run the loop without a message until a condition holds."""

    def holds_after_a_turn() -> bool:
        with pytest.raises(StopIteration):
            next(consumer.units(idle_seconds=0.05))
        return condition()

    until(lambda: condition() or holds_after_a_turn(), 60, what)


@pytest.mark.parametrize("aborted", [0, 5])
def test_a_transactional_topic_that_is_idle_may_lose_all_of_its_log(
    *, protocol: dict[str, Any], aborted: int, make_consumer: MakeConsumer, bootstrap_servers: str, db: Db, name: str
) -> None:
    topic = create_topic(bootstrap_servers, 1, name=name)
    produce_in_transactions(bootstrap_servers, topic, 10, aborted=aborted)
    end = end_of(bootstrap_servers, topic)
    with make_consumer(protocol) as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 10
        idle(consumer, lambda: stored(db, name)[0] == end, "the ledger to be at the end")
        assert stored(db, name) == (end, 0), "a wrong leader epoch would pass for a log that was rewritten"
        idle(consumer, lambda: mirrored(bootstrap_servers, name, topic) == end, "Kafka to be told")
        remove_all(bootstrap_servers, topic)
        produce_in_transactions(bootstrap_servers, topic, 3)
        assert drain(consumer) == 3
    remove_all(bootstrap_servers, topic)
    with make_consumer(protocol) as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 0


def test_closing_moves_to_the_end_at_once(
    make_consumer: MakeConsumer, bootstrap_servers: str, db: Db, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 3600)
    topic = create_topic(bootstrap_servers, 1, name=name)
    produce_in_transactions(bootstrap_servers, topic, 10, aborted=2)
    end = end_of(bootstrap_servers, topic)
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 10
        assert stored(db, name)[0] == 10
    assert stored(db, name)[0] == end
    assert mirrored(bootstrap_servers, name, topic) == end
    remove_all(bootstrap_servers, topic)
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 0


def test_giving_a_partition_away_moves_to_the_end_first(
    *,
    protocol: dict[str, Any],
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    db: Db,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 3600)
    topic = create_topic(bootstrap_servers, 1, name=name)
    produce_in_transactions(bootstrap_servers, topic, 10)
    consumer = make_consumer(protocol)
    consumer.subscribe([topic])
    assert drain(consumer) == 10
    other = create_topic(bootstrap_servers, 1)
    consumer.subscribe([other])  # takes the first topic away
    query = "SELECT next_offset, owner_token IS NULL FROM exactly_once.ledger WHERE group_id = %s AND topic = %s"
    idle(consumer, lambda: db.execute(query, (name, topic)).fetchone() == (11, True), "the row to be given back")


def test_a_unit_that_is_open_is_not_passed(
    make_consumer: MakeConsumer, bootstrap_servers: str, db: Db, name: str
) -> None:
    """Nothing that was handed out and not applied may be skipped, be it at the end of the log."""
    topic = create_topic(bootstrap_servers, 1, name=name)
    produce_in_transactions(bootstrap_servers, topic, 10)
    consumer = make_consumer(max_messages=5)
    consumer.subscribe([topic])
    units = iter(consumer)
    failures = 0
    while failures < 6:
        try:
            with next(units) as unit:
                failures += 1
                raise ZeroDivisionError
        except ZeroDivisionError:
            assert unit.messages[0].offset() == 0
    consumer.close()
    assert stored(db, name)[0] == 0


def test_real_loss_is_still_refused(make_consumer: MakeConsumer, bootstrap_servers: str, name: str) -> None:
    topic = create_topic(bootstrap_servers, 1, name=name)
    produce_in_transactions(bootstrap_servers, topic, 10)
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        drain(consumer)
    produce_in_transactions(bootstrap_servers, topic, 1)
    remove_all(bootstrap_servers, topic)
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        with pytest.raises(OffsetBelowLogStart, match="retention removed 2 offsets"):
            drain(consumer)


def test_a_fenced_member_moves_nothing(
    make_consumer: MakeConsumer, bootstrap_servers: str, db: Db, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = create_topic(bootstrap_servers, 1, name=name)
    produce_in_transactions(bootstrap_servers, topic, 10)
    with make_consumer() as consumer:
        monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 3600)
        consumer.subscribe([topic])
        drain(consumer)
        db.execute("UPDATE exactly_once.ledger SET owner_token = gen_random_uuid() WHERE group_id = %s", (name,))
    assert stored(db, name)[0] == 10


def test_a_plain_log_costs_no_write_and_a_moved_one_only_one(
    make_consumer: MakeConsumer, bootstrap_servers: str, db: Db, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = create_topic(bootstrap_servers, 1, name=name)
    produce(bootstrap_servers, topic, 5, 1)
    row = "SELECT xmin::text FROM exactly_once.ledger WHERE group_id = %s"
    seen: set[tuple[Any, ...]] = set()

    def note(_: Unit | None = None) -> bool:
        seen.add(tuple(db.execute(row, (name,)).fetchall()))
        return False

    consumer = make_consumer()
    consumer.subscribe([topic])
    drain(consumer)
    for expected in (1, 3):  # its unit, and the move behind the marker
        idle(consumer, lambda expected=expected: note() or len(seen) == expected, "the move")  # type: ignore[misc]
        limit = iter(range(20))
        idle(consumer, lambda limit=limit: note() or next(limit, None) is None, "some looks")  # type: ignore[misc]
        assert len(seen) == expected
        if expected == 1:
            monkeypatch.setattr(maintenance, "QUIET_SECONDS", 3600)  # the unit's own write is noted before the move
            produce_in_transactions(bootstrap_servers, topic, 1)
            drain(consumer)
            note()
            monkeypatch.setattr(maintenance, "QUIET_SECONDS", 0.0)
