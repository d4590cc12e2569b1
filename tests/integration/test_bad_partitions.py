"""One partition that cannot be read stops neither the others nor the process; it is told, and read when mended."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from exactly_once import (
    BatchUnreadable,
    ExactlyOnceConsumer,
    LedgerRowMissing,
    OffsetBelowLogStart,
    OffsetBeyondLogEnd,
    PartitionHalted,
    StartError,
    TopicRecreated,
)
from exactly_once.consumer import maintenance
from exactly_once.embedded import Kafka
from tests.conftest import MakeConsumer
from tests.support import journal
from tests.support.topics import create_topic, delete_records, produce
from tests.support.waiting import until
from tests.support.worker import drain, ensure_journal, record

Db = psycopg.Connection[Any]

_RESET = "owner_epoch = owner_epoch + 1, owner_token = NULL, halted = NULL"
_FAULTS: dict[type[StartError], tuple[str, str]] = {
    PartitionHalted: ("UPDATE exactly_once.ledger SET halted = 'by a test'", ""),
    OffsetBeyondLogEnd: ("UPDATE exactly_once.ledger SET next_offset = 1000", ", next_offset = 10"),
    TopicRecreated: ("UPDATE exactly_once.ledger SET topic_id = 'another'", ", topic_id = NULL"),
    LedgerRowMissing: ("DELETE FROM exactly_once.ledger", ""),
}
"""How a row goes bad behind everybody's back, and what an operator's reset or adopt sets."""


@pytest.fixture(autouse=True)
def _soon(conninfo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_journal(conninfo)
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.2)
    monkeypatch.setattr(maintenance, "BAD_SECONDS", 3600.0)  # once, however slow the machine is


@pytest.fixture
def topic(bootstrap_servers: str, name: str, make_consumer: MakeConsumer) -> str:
    """Three partitions of which ten messages each were applied, and ten more that were not."""
    create_topic(bootstrap_servers, 3, name=name)
    produce(bootstrap_servers, name, 30, 3)
    with make_consumer() as consumer:
        consumer.subscribe([name])
        assert drain(consumer) == 30
    produce(bootstrap_servers, name, 30, 3, start=30)
    return name


def change(db: Db, group: str, statement: str) -> None:
    assert db.execute(f"{statement} WHERE group_id = %s AND partition = 1".encode(), (group,)).rowcount == 1


def pump(consumer: ExactlyOnceConsumer, condition: Callable[[], bool], what: str) -> None:
    """Apply what comes until a condition holds, as a service does."""

    def holds_after_a_turn() -> bool:
        with contextlib.suppress(StartError):
            for unit in consumer.units(idle_seconds=0.05):
                with unit:
                    record(unit, "test")
        return condition()

    until(lambda: condition() or holds_after_a_turn(), 60, what)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "partition_bad"]


@pytest.mark.parametrize("kind", _FAULTS)
def test_the_others_are_read_and_the_end_says_that_one_is_not(
    *,
    kind: type[StartError],
    protocol: dict[str, Any],
    make_consumer: MakeConsumer,
    topic: str,
    name: str,
    db: Db,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fault, mend = _FAULTS[kind]
    change(db, name, fault)
    with make_consumer(protocol) as consumer:
        consumer.subscribe([topic])
        with pytest.raises(kind):
            drain(consumer)
        assert consumer.counters.messages == 20
        with pytest.raises(kind):
            list(consumer.units(idle_seconds=0.5))
        health = consumer.health()
        assert health.bad[0][:2] == (topic, 1)
        assert kind.__name__ in health.bad[0][2]
        assert health.waiting == ((topic, 1),)
        assert (health.is_alive, health.is_ready, len(health.reasons)) == (True, False, 1)
        assert health.reasons[0].startswith(f"{topic}[1] is not read: {kind.__name__}: ")
        assert [s.value for s in consumer._observer.read() if s.metric.name == "exactly_once_bad_partitions"] == [1]
        assert len(errors(caplog)) == 1, "it is told once, not at each look"
        assert errors(caplog)[0].startswith(f"{topic}[1] is not read, any others are: ")
        if kind is LedgerRowMissing:
            db.execute(
                "INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset) VALUES (%s, %s, 1, 10)",
                (name, topic),
            )
        else:
            change(db, name, f"UPDATE exactly_once.ledger SET {_RESET}{mend}")
        pump(consumer, lambda: consumer.counters.messages == 30, "the rest, without a restart")
        assert consumer.health().bad == ()
        assert drain(consumer) == 0


@pytest.mark.parametrize("kind", _FAULTS)
def test_whoever_wants_to_stop_is_stopped(
    kind: type[StartError], make_consumer: MakeConsumer, topic: str, name: str, db: Db
) -> None:
    change(db, name, _FAULTS[kind][0])
    with make_consumer(stop_on_bad_partition=True) as consumer:
        consumer.subscribe([topic])
        for _ in range(2):
            with pytest.raises(kind):
                next(consumer.units())
        assert consumer.counters.messages == 0


def test_run_goes_on_beside_a_bad_partition_and_tells_of_it_again(
    *,
    make_consumer: MakeConsumer,
    topic: str,
    name: str,
    db: Db,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "BAD_SECONDS", 0.5)
    change(db, name, "UPDATE exactly_once.ledger SET halted = 'by a test'")
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        pump(consumer, lambda: consumer.counters.messages == 20 and len(errors(caplog)) >= 3, "to be told again")
    assert {r.levelno for r in caplog.records if getattr(r, "action", "") == "partition_bad"} == {logging.ERROR}
    epochs = db.execute("SELECT owner_epoch FROM exactly_once.ledger WHERE group_id = %s AND partition = 1", (name,))
    assert epochs.fetchone() == (2,), "it is acquired once by each consumer and not again and again"


def test_no_member_of_a_group_ends_for_a_bad_partition(
    *,
    protocol: dict[str, Any],
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    conninfo: str,
    topic: str,
    name: str,
    db: Db,
) -> None:
    """Whoever has it goes on, so nobody is left to get it next; it is read when it is mended."""
    change(db, name, "UPDATE exactly_once.ledger SET halted = 'by a test'")
    members = [make_consumer(protocol) for _ in range(3)]

    def work(consumer: ExactlyOnceConsumer) -> None:
        consumer.subscribe([topic])
        consumer.run(lambda unit: record(unit, "test"))

    def applied() -> int:
        return sum(consumer.counters.messages for consumer in members)

    with ThreadPoolExecutor(3) as pool:
        working = [pool.submit(work, consumer) for consumer in members]
        try:
            until(lambda: applied() == 20, 60, "what can be read")
            until(lambda: [p for c in members for p in c.health().bad], 60, "the bad partition with one of them")
            members[0].stop()  # whatever it has goes to the others
            working[0].result(60)
            members[0]._thread = None
            members[0].close()
            produce(bootstrap_servers, topic, 30, 3, start=60)
            until(lambda: applied() == 40, 60, "what came behind a rebalance")
            assert not any(each.done() for each in working[1:])
            change(db, name, f"UPDATE exactly_once.ledger SET {_RESET}")
            until(lambda: applied() == 60, 60, "the mended partition")
        finally:
            for consumer in members:
                consumer.stop()
        for each in working:
            each.result(60)
    for consumer in members:
        consumer._thread = None
    verdict = journal.check(conninfo, bootstrap_servers, topic)
    assert verdict.exact, verdict


def test_a_partition_that_goes_bad_while_it_is_read(
    *, protocol: dict[str, Any], make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, name: str, db: Db
) -> None:
    with make_consumer(protocol) as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 30
        produce(bootstrap_servers, topic, 30, 3, start=60)
        delete_records(bootstrap_servers, topic, 25, partition=1)
        consumer._ownership.invalidate_all()  # as after any exception out of the client: fetch at the ledger's offset
        consumer._buffer.drop_all()
        with pytest.raises(OffsetBelowLogStart):
            drain(consumer)
        assert consumer.counters.messages == 30 + 20
        change(db, name, f"UPDATE exactly_once.ledger SET {_RESET}, next_offset = 25")
        pump(consumer, lambda: consumer.counters.messages == 30 + 25, "the rest")


def test_a_row_deleted_under_a_unit_leaves_the_rest_going(
    make_consumer: MakeConsumer, topic: str, name: str, db: Db
) -> None:
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        unit = next(iter(consumer))
        with pytest.raises(Exception, match="it was deleted"), unit:  # noqa: PT012
            record(unit, "test")
            db.execute(
                "DELETE FROM exactly_once.ledger WHERE group_id = %s AND partition = %s",
                (name, unit.messages[0].partition()),
            )
        with pytest.raises(LedgerRowMissing):
            drain(consumer)
        assert consumer.counters.messages == 20


def corrupt(directory: Path, topic: str, value: bytes) -> None:
    """Flip bits inside the batch that holds a value, on the broker's disk."""
    (log,) = directory.glob(f"**/{topic}-0/00000000000000000000.log")
    data = bytearray(log.read_bytes())
    at = data.index(value)
    data[at + 4 : at + 8] = bytes(255 - b for b in data[at + 4 : at + 8])
    log.write_bytes(data)


@pytest.mark.parametrize("codec", ["none", "gzip", "lz4", "snappy", "zstd"])
def test_a_batch_that_cannot_be_read_is_told_and_can_be_skipped(
    *,
    codec: str,
    tmp_path: Path,
    make_consumer: MakeConsumer,
    conninfo: str,
    name: str,
    db: Db,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Damaged on disk: a wrong checksum, or what cannot be unpacked. What comes before it is applied."""
    check = codec == "none"
    with Kafka(directory=tmp_path) as kafka:
        servers = kafka.bootstrap_servers
        create_topic(servers, 2, name=name)
        producer = Producer({"bootstrap.servers": servers, "compression.type": codec})
        for number, partition in [(n, p) for n in range(5) for p in (0, 1)]:
            producer.produce(name, b"value-%d" % number * 20, partition=partition)
            producer.flush()
        kafka.stop()
        if check:
            corrupt(tmp_path, name, b"value-3")
        else:
            # What others have at that place is data, of which without a checksum nobody can tell that it is wrong.
            _corrupt_batch(tmp_path, name, 3, at=75 if codec == "gzip" else 61)
        kafka.start()
        consumer = make_consumer({"bootstrap.servers": servers, "check.crcs": check, "log_level": 2})
        consumer.subscribe([name])
        with pytest.raises(BatchUnreadable, match=rf"{name}\[0\].*at offset 3.*--partition 0 --to-offset"):
            drain(consumer)
        assert consumer.counters.messages == 3 + 5
        assert len(errors(caplog)) == 1
        assert "BatchUnreadable" in consumer.health().bad[0][2]
        db.execute(
            f"UPDATE exactly_once.ledger SET {_RESET}, next_offset = 4 WHERE group_id = %s AND partition = 0", (name,)
        )
        pump(consumer, lambda: consumer.counters.messages == 9, "what comes behind it")
        consumer.close()
        applied = {(e.partition, e.offset) for e in journal.entries(conninfo, name)}
        assert applied == {(0, n) for n in (0, 1, 2, 4)} | {(1, n) for n in range(5)}


def _corrupt_batch(directory: Path, topic: str, number: int, *, at: int) -> None:
    """Flip bits of the compressed part of one batch; a header has 61 bytes."""
    (log,) = directory.glob(f"**/{topic}-0/00000000000000000000.log")
    data = bytearray(log.read_bytes())
    start = 0
    for _ in range(number):
        start += 12 + int.from_bytes(data[start + 8 : start + 12], "big")
    place = slice(start + at, start + at + 4)
    data[place] = bytes(255 - b for b in data[place])
    log.write_bytes(data)
