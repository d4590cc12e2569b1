"""The oracle finds what it is there to find: a scan of a real topic against a journal in a real Postgres."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]

from exactly_once.demo.journal import Entry, Identity, Record
from tests.support import journal
from tests.support.topics import create_topic, produce

TOPIC = "payments"
RECORDS = [Record(TOPIC, partition, offset, b"key", b"%d" % offset) for partition in (0, 1) for offset in range(3)]


def effect(record: Record, worker: str = "worker", xid: int = 1) -> Entry:
    return Entry(*record.identity, record.value, worker, xid)


EFFECTS = [effect(record) for record in RECORDS]


@pytest.fixture
def empty_journal(postgres_conninfo: str) -> str:
    journal.create(postgres_conninfo)
    return postgres_conninfo


@pytest.fixture
def transaction(bootstrap_servers: str, name: str) -> Iterator[Producer]:
    """A transactional producer with a transaction begun."""
    with Producer({"bootstrap.servers": bootstrap_servers, "transactional.id": name}) as producer:
        producer.init_transactions(30)
        producer.begin_transaction()
        yield producer


def apply(conninfo: str, records: list[Record], worker: str, count: int) -> None:
    with psycopg.connect(conninfo) as connection, connection.cursor() as cursor:
        cursor.executemany(journal.APPEND, [(*record.identity, record.value, worker) for record in records])
        cursor.execute(journal.COUNT, (records[0].topic, count))


def test_each_message_with_one_effect_is_exact() -> None:
    verdict = journal.compare(RECORDS, EFFECTS, len(RECORDS))
    assert verdict.exact
    assert verdict.messages == 6


def test_a_message_without_effect_is_lost() -> None:
    verdict = journal.compare(RECORDS, EFFECTS[1:], None)
    assert verdict.lost == [Identity(TOPIC, 0, 0)]
    assert not verdict.exact


def test_a_second_effect_is_a_duplicate_that_names_worker_and_transaction() -> None:
    second = effect(RECORDS[4], worker="zombie", xid=2)
    verdict = journal.compare(RECORDS, [*EFFECTS, second], None)
    assert verdict.duplicated == {Identity(TOPIC, 1, 1): [EFFECTS[4], second]}
    assert not verdict.exact
    assert "1 duplicated" in str(verdict)
    assert "zombie" in str(verdict)


def test_an_effect_of_no_message_is_foreign() -> None:
    aborted = Entry(TOPIC, 0, 99, b"", "worker", 1)
    verdict = journal.compare(RECORDS, [*EFFECTS, aborted], None)
    assert verdict.foreign == [aborted]
    assert not verdict.exact


def test_an_effect_with_another_value_is_altered() -> None:
    null = EFFECTS[0]._replace(value=None)
    verdict = journal.compare(RECORDS, [null, *EFFECTS[1:]], None)
    assert verdict.altered == [Identity(TOPIC, 0, 0)]
    assert not verdict.exact


def test_a_counter_that_differs_is_not_exact() -> None:
    verdict = journal.compare(RECORDS, EFFECTS, 7)
    assert not verdict.counter_ok
    assert not verdict.exact
    assert replace(verdict, counter_ok=True).exact


def test_the_journal_keeps_every_effect_with_its_transaction(empty_journal: str) -> None:
    apply(empty_journal, RECORDS[:2], "first", 2)
    apply(empty_journal, RECORDS[:1], "second", 1)
    first, second, other = journal.entries(empty_journal, TOPIC)
    assert first.identity == second.identity == RECORDS[0].identity
    assert {first.worker, second.worker} == {"first", "second"}
    assert first.xid == other.xid != second.xid
    assert journal.counted(empty_journal, TOPIC) == 3


def test_a_transaction_that_is_rolled_back_leaves_nothing_in_the_journal(empty_journal: str) -> None:
    with psycopg.connect(empty_journal) as connection:
        connection.execute(journal.COUNT, (TOPIC, 1))
        connection.execute(journal.APPEND, (*RECORDS[0].identity, None, "worker"))
        connection.rollback()
    assert journal.entries(empty_journal, TOPIC) == []
    assert journal.counted(empty_journal, TOPIC) == 0


def test_create_starts_an_empty_journal_in_place_of_the_last(empty_journal: str) -> None:
    apply(empty_journal, RECORDS, "worker", 6)
    journal.create(empty_journal)
    assert journal.entries(empty_journal, TOPIC) == []


def test_scan_returns_every_message_of_every_partition_the_empty_ones_read_too(
    bootstrap_servers: str,
) -> None:
    topic = create_topic(bootstrap_servers, 3)
    produce(bootstrap_servers, topic, 1_000, 2)
    records = journal.scan(bootstrap_servers, topic)
    assert sorted(int(record.value or b"") for record in records) == list(range(1_000))
    assert [record.offset for record in records if record.partition == 1] == list(range(500))


def test_scan_reads_past_an_aborted_tail_without_its_messages(bootstrap_servers: str, transaction: Producer) -> None:
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, 1, 1)
    transaction.produce(topic, b"aborted")
    transaction.flush()
    transaction.abort_transaction()
    assert [record.value for record in journal.scan(bootstrap_servers, topic)] == [b"0"]


def test_scan_does_not_take_what_an_open_transaction_hides_for_the_end(
    bootstrap_servers: str, transaction: Producer
) -> None:
    topic = create_topic(bootstrap_servers, 1)
    transaction.produce(topic, b"open")
    transaction.flush()
    produce(bootstrap_servers, topic, 1, 1)
    with pytest.raises(TimeoutError, match="open transaction"):
        journal.scan(bootstrap_servers, topic, timeout_seconds=1)
    transaction.commit_transaction()
    assert [record.value for record in journal.scan(bootstrap_servers, topic)] == [b"open", b"0"]


def test_scan_of_an_unknown_topic_is_an_error(bootstrap_servers: str, name: str) -> None:
    with pytest.raises(LookupError, match=name):
        journal.scan(bootstrap_servers, name)


def test_check_compares_the_scan_with_the_journal_and_the_counter(empty_journal: str, bootstrap_servers: str) -> None:
    topic = create_topic(bootstrap_servers, 2)
    produce(bootstrap_servers, topic, 10, 2)
    records = journal.scan(bootstrap_servers, topic)
    apply(empty_journal, records, "worker", len(records))
    assert journal.check(empty_journal, bootstrap_servers, topic).exact
    apply(empty_journal, records[:1], "worker", 0)
    verdict = journal.check(empty_journal, bootstrap_servers, topic)
    assert list(verdict.duplicated) == [records[0].identity]
    assert verdict.counter_ok
    assert not verdict.lost


def test_create_topic_sets_partitions_and_configuration(bootstrap_servers: str, name: str) -> None:
    assert create_topic(bootstrap_servers, 3, name=name, cleanup_policy="compact") == name
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    resource = ConfigResource(ConfigResource.Type.TOPIC, name)
    config = admin.describe_configs([resource])[resource].result(timeout=10)
    assert config["cleanup.policy"].value == "compact"
    assert len(admin.list_topics(name, timeout=10).topics[name].partitions) == 3
