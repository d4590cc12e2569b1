"""After a fence: acquired again only once Kafka has taken a commit that was sent to prove the membership."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from confluent_kafka import KafkaError

from exactly_once import ExactlyOnceConsumer, Fenced
from exactly_once.consumer import maintenance
from exactly_once.consumer.rebalance import Change, Event
from exactly_once.embedded import Kafka
from tests.conftest import MakeConsumer
from tests.support.kafka_proxy import OFFSET_COMMIT, KafkaProxy
from tests.support.topics import create_topic, produce
from tests.support.worker import drain, ensure_journal, record, turn, turn_until

Db = psycopg.Connection[Any]
Loop = Callable[[Callable[[], bool], str], None]


@pytest.fixture(scope="module")
def proxy() -> Iterator[KafkaProxy]:
    """A broker whose clients all come through a proxy."""
    with KafkaProxy() as proxy, Kafka(properties={"advertised.listeners": proxy.listener}) as kafka:
        proxy.upstream = kafka.port()
        yield proxy


class Fencing:
    """A consumer that was fenced in the middle of a unit, and its row."""

    def __init__(self, consumer: ExactlyOnceConsumer, db: Db, group: str) -> None:
        self.consumer = consumer
        self._db = db
        self._group = group
        self.lost_at: list[int] = []

    @property
    def epoch(self) -> int:
        """The highest of the group."""
        query = "SELECT max(owner_epoch) FROM exactly_once.ledger WHERE group_id = %s"
        found = self._db.execute(query, (self._group,)).fetchone()
        assert found is not None
        return int(found[0])

    def take(self) -> None:
        """Take all rows, as another owner does."""
        self._db.execute(
            "UPDATE exactly_once.ledger SET owner_epoch = 10, owner_token = gen_random_uuid() WHERE group_id = %s",
            (self._group,),
        )

    def fence(self) -> None:
        """Have another owner take the row under an open unit."""
        with pytest.raises(Fenced), next(iter(self.consumer)) as unit:
            record(unit, "test")
            self.take()

    def turn(self, condition: Callable[[], bool], what: str) -> None:
        """Run the loop until a condition holds."""
        if not condition():
            turn_until(self.consumer, condition, 60, what)

    def wait(self) -> None:
        """Run the loop for a while in which an owner without manners would have acquired the row."""
        for _ in range(30):
            turn(self.consumer, 0.05)


class Noting(deque[Event]):
    """Notes the epoch at the moment when the client gives partitions up."""

    def __init__(self, fencing: Fencing) -> None:
        super().__init__()
        self._fencing = fencing

    def append(self, event: Event) -> None:
        if event.change is Change.LOST:
            self._fencing.lost_at.append(self._fencing.epoch)
        super().append(event)


def has_mirrored(consumer: ExactlyOnceConsumer) -> bool:
    """Whether Kafka was told all that is applied, and has answered."""
    return consumer._kafka_offsets.is_idle and not any(h.is_to_mirror for h in consumer._ownership.states.values())


@pytest.fixture
def fencing(
    *, proxy: KafkaProxy, make_consumer: MakeConsumer, conninfo: str, name: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fencing]:
    """Ten messages, one a unit; the second unit is to be fenced."""
    monkeypatch.setattr(maintenance, "_BUSY_SECONDS", 0.1)
    ensure_journal(conninfo)
    create_topic(proxy.bootstrap_servers, 1, name=name)
    produce(proxy.bootstrap_servers, name, 10, 1)
    consumer = make_consumer({"bootstrap.servers": proxy.bootstrap_servers}, max_messages=1)
    made = Fencing(consumer, db, name)
    consumer._assignment.events = Noting(made)
    consumer.subscribe([name])
    with next(iter(consumer)) as unit:
        record(unit, "test")
    made.turn(lambda: has_mirrored(consumer), "the mirrored commit")
    yield made
    proxy.disarm()


def test_without_an_answer_and_with_that_of_an_older_commit_nothing_is_acquired(
    proxy: KafkaProxy, fencing: Fencing
) -> None:
    older, proof = proxy.hold(OFFSET_COMMIT), proxy.hold(OFFSET_COMMIT)
    with next(iter(fencing.consumer)) as unit:
        record(unit, "test")
    fencing.turn(older.fired.is_set, "the mirrored commit")
    fencing.fence()
    fencing.wait()
    assert fencing.epoch == 10, "it was not asked yet"
    assert not proof.fired.is_set()
    older.release()
    fencing.turn(proof.fired.is_set, "the proof to be on its way, behind the other commit")
    fencing.turn(lambda: fencing.consumer._kafka_offsets._in_flight == 1, "the answer to the older commit")
    fencing.wait()
    assert fencing.epoch == 10, "the answer to another commit is no proof"
    proof.release()
    fencing.turn(lambda: fencing.epoch == 11, "the row to be acquired")
    assert drain(fencing.consumer) == 8


def test_a_commit_of_which_a_partition_is_refused_is_no_proof(proxy: KafkaProxy, fencing: Fencing) -> None:
    refused = [proxy.refuse(OFFSET_COMMIT, KafkaError.TOPIC_AUTHORIZATION_FAILED) for _ in range(3)]
    fencing.fence()
    for fault in refused:
        fencing.turn(fault.fired.is_set, "the refusal")
        assert fencing.epoch == 10
    fencing.turn(lambda: fencing.epoch == 11, "the row to be acquired after a commit that was taken")
    assert not fencing.lost_at
    assert drain(fencing.consumer) == 9


def test_a_commit_of_which_one_partition_of_two_is_refused_is_no_proof(
    proxy: KafkaProxy, fencing: Fencing, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit as a whole is no error then."""
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.2)
    other = create_topic(proxy.bootstrap_servers, 1, name=f"{name}-2")
    consumer = fencing.consumer
    consumer.subscribe([name, other])
    fencing.turn(lambda: len(consumer.health().owned) == 2 and consumer.health().is_ready, "both partitions")
    fencing.turn(lambda: has_mirrored(consumer), "what was to be mirrored")
    refused = [proxy.refuse(OFFSET_COMMIT, KafkaError.TOPIC_AUTHORIZATION_FAILED) for _ in range(3)]
    fencing.take()
    for fault in refused:
        fencing.turn(fault.fired.is_set, "the refusal")
        assert fencing.epoch == 10
    fencing.turn(lambda: fencing.epoch == 11, "the rows to be acquired after a commit that was taken")


def test_a_member_of_an_older_generation_acquires_nothing_until_it_has_joined_again(
    proxy: KafkaProxy, fencing: Fencing
) -> None:
    refused = proxy.refuse(OFFSET_COMMIT, KafkaError.ILLEGAL_GENERATION)
    fencing.fence()
    fencing.turn(refused.fired.is_set, "the refusal")
    assert fencing.epoch == 10
    fencing.turn(lambda: bool(fencing.lost_at), "the client to give its partitions up")
    assert fencing.lost_at == [10], "it was acquired by a member that Kafka had expelled"
    fencing.turn(lambda: fencing.epoch == 11, "the row to be acquired under a new assignment")
    assert drain(fencing.consumer) == 9
