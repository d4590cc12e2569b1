"""A partition whose leader gives no answer waits alone: the others of its member are started, and read on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from exactly_once import ExactlyOnceConsumer
from exactly_once._model import Partition
from exactly_once.consumer import maintenance
from exactly_once.embedded import Kafka
from exactly_once.kafka.admin import Cluster
from tests.conftest import MakeConsumer
from tests.support.topics import add_partitions, create_topic, produce
from tests.support.worker import drain, ensure_journal, record


@pytest.fixture(autouse=True)
def _journal(conninfo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_journal(conninfo)
    monkeypatch.setattr(maintenance, "_BUSY_SECONDS", 0.05)


@dataclass
class Silence:
    """Partitions of whose logs nobody tells: of a single broker, every leader answers or none does."""

    partitions: set[Partition] = field(default_factory=set)
    tries: int = 0
    """How often it was asked for them."""


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Silence:
    """Take answers out of those of the real broker."""
    ask, silence = Cluster._ask_offsets, Silence()

    def ask_some(self: Cluster, asked: list[Partition], *args: Any, **options: Any) -> Any:
        silent = silence.partitions.intersection(asked)
        silence.tries += bool(silent)
        told, unanswered = ask(self, [p for p in asked if p not in silent], *args, **options)
        return told, unanswered | {p: LookupError(f"nobody tells of {p}") for p in silent}

    monkeypatch.setattr(Cluster, "_ask_offsets", ask_some)
    return silence


def apply_until(consumer: ExactlyOnceConsumer, expected: dict[int, int]) -> None:
    """Apply what comes until so many messages of each of these partitions were, and of no other."""
    left = dict(expected)
    for unit in consumer:
        with unit:
            record(unit, "test")
        for message in unit.messages:
            left[message.partition() or 0] -= 1
        if not any(left.values()):
            return


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "start_postponed"]
    return [text.partition(" cannot")[0] for text in records]


@pytest.mark.slow
def test_partition_without_a_leader_keeps_no_other_from_being_read(
    own_servers: None, make_consumer: MakeConsumer, name: str
) -> None:
    """Three partitions of one replica each; the broker of one is down when the member starts, and comes back."""
    with Kafka(brokers=3) as kafka:
        servers = kafka.bootstrap_servers
        with AdminClient({"bootstrap.servers": servers}) as admin:
            topic = NewTopic(name, num_partitions=3, replica_assignment=[[1], [2], [3]])
            admin.create_topics([topic])[name].result(30)
        produce(servers, name, 30, 3)
        kafka.stop(3)
        consumer = make_consumer({"bootstrap.servers": servers})
        consumer.subscribe([name])
        apply_until(consumer, {0: 10, 1: 10})
        kafka.restart(3)
        apply_until(consumer, {2: 10})
        consumer.close()


def test_partitions_start_beside_one_of_whose_log_nobody_tells(
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    name: str,
    silence: Silence,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is told once as long as it lasts, and read as soon as its leader answers."""
    create_topic(bootstrap_servers, 3, name=name)
    produce(bootstrap_servers, name, 30, 3)
    silence.partitions.add(Partition(name, 1))
    consumer = make_consumer()
    consumer.subscribe([name])
    apply_until(consumer, {0: 10, 2: 10})
    while silence.tries < 3:
        consumer._keep_up()
    silence.partitions.clear()
    apply_until(consumer, {1: 10})
    assert told(caplog) == [f"{name}[1]"]


def test_partitions_are_read_on_beside_an_added_one_of_whose_log_nobody_tells(
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    name: str,
    silence: Silence,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A row of an added partition is made with the offset at which its log begins, which may be unknown for long."""
    create_topic(bootstrap_servers, 2, name=name)
    produce(bootstrap_servers, name, 20, 2)
    with make_consumer() as consumer:
        consumer.subscribe([name])
        assert drain(consumer) == 20
    add_partitions(bootstrap_servers, name, 3)
    produce(bootstrap_servers, name, 30, 3)
    silence.partitions.add(Partition(name, 2))
    consumer = make_consumer()
    consumer.subscribe([name])
    apply_until(consumer, {0: 10, 1: 10})
    silence.partitions.clear()
    apply_until(consumer, {2: 10})
    assert told(caplog) == [f"{name}[2]"]


def test_partitions_are_read_on_while_nobody_tells_why_one_cannot_be(
    make_consumer: MakeConsumer, bootstrap_servers: str, name: str, silence: Silence
) -> None:
    """The client's error is made by hand: it comes of an election that is unclean, say."""
    create_topic(bootstrap_servers, 2, name=name)
    produce(bootstrap_servers, name, 20, 2)
    consumer = make_consumer()
    consumer.subscribe([name])
    assert drain(consumer) == 20
    silence.partitions.add(Partition(name, 0))
    consumer._on_error(Message(topic=name, partition=0, offset=10, error=KafkaError(KafkaError._AUTO_OFFSET_RESET)))
    while silence.tries < 2:
        consumer._keep_up()
    produce(bootstrap_servers, name, 20, 2, start=20)
    apply_until(consumer, {0: 10, 1: 10})
    silence.partitions.clear()
    while consumer._ownership.suspects():
        consumer._keep_up()
