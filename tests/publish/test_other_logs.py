"""A log that cannot prove that a message was never there: it is compacted, has become so, or is another topic's."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from exactly_once.publish import (
    DedupProducer,
    Outcome,
    OutcomeUnknown,
    PostgresWindow,
    ProducerRecord,
    Resolved,
    SequenceFilter,
    State,
    TailLost,
    TopicTakeOver,
    TransactionalProducer,
    Undelivered,
    WindowFilter,
    end_positions,
)
from exactly_once.publish.headers import with_key
from exactly_once.publish.owners import TOPIC_ID
from tests.publish.conftest import WINDOW_SECONDS, MakeOwner
from tests.publish.test_postgres_window import end_lease
from tests.publish.test_resolve import doubt
from tests.publish.test_take_over import send
from tests.support.kafka_proxy import END_TXN, KafkaProxy
from tests.support.topics import create_topic, delete_topic

DUPLICATE, NEW, UNKNOWN = State.DUPLICATE, State.NEW, State.UNKNOWN
COMPACTED = pytest.mark.parametrize("policy", ["compact", "compact,delete"])


def set_policy(kafka: Mapping[str, Any], topic: str, policy: str) -> None:
    """Change the cleanup policy of a topic."""
    entry = ConfigEntry("cleanup.policy", policy, incremental_operation=AlterConfigOpType.SET)
    change = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    with AdminClient(dict(kafka)) as admin:
        admin.incremental_alter_configs([change])[change].result(60)


def make_anew(kafka: Mapping[str, Any], topic: str) -> None:
    """Delete a topic, and create another one of its name."""
    delete_topic(kafka["bootstrap.servers"], topic)
    create_topic(kafka["bootstrap.servers"], 1, name=topic)


def take_over(make_owner: MakeOwner, kafka: dict[str, Any], topic: str) -> PostgresWindow:
    return PostgresWindow(make_owner(), scope=topic, seconds=WINDOW_SECONDS, take_over=TopicTakeOver(kafka))


@COMPACTED
@pytest.mark.parametrize("is_later", [False, True])
def test_what_a_compacted_topic_does_not_hold_of_a_dead_owner_is_unknown(
    make_owner: MakeOwner,
    db: psycopg.Connection[Any],
    kafka: dict[str, Any],
    policy: str,
    *,
    is_later: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = create_topic(kafka["bootstrap.servers"], 1, cleanup_policy="delete" if is_later else policy)
    dead = make_owner(positions=end_positions(kafka, [topic]), transactional_id=f"{topic}-dead")
    PostgresWindow(dead, scope=topic, seconds=WINDOW_SECONDS).reserve_many(["there", "perhaps cleaned away"])
    client = Producer(kafka)
    client.produce(topic, b"x", b"a compacted topic needs one", headers=with_key(None, "there"))
    assert client.flush(60) == 0
    if is_later:
        set_policy(kafka, topic, policy)
    end_lease(db, dead)
    ours = take_over(make_owner, kafka, topic)
    assert ours.reserve_many(["there", "perhaps cleaned away", "new"]) == [DUPLICATE, UNKNOWN, NEW]
    assert "it is compacted" in caplog.text


@pytest.mark.parametrize("has_id", [True, False])
def test_a_topic_that_was_made_anew_and_is_short_leaves_no_key_stuck(
    make_owner: MakeOwner, db: psycopg.Connection[Any], kafka: dict[str, Any], *, has_id: bool
) -> None:
    """The dead owner's start is behind its end. Old brokers give no ids, and neither did earlier positions."""
    topic = create_topic(kafka["bootstrap.servers"], 1)
    send(Producer(kafka), topic, *range(5))
    positions: Any = end_positions(kafka, [topic])
    if not has_id:
        positions = {topic: {n: end for n, end in positions[topic].items() if isinstance(n, int)}}
    dead = make_owner(positions=positions, transactional_id=f"{topic}-dead")
    PostgresWindow(dead, scope=topic, seconds=WINDOW_SECONDS).reserve_many(["there", "perhaps in the old one"])
    make_anew(kafka, topic)
    send(Producer(kafka), topic, "there")
    end_lease(db, dead)
    ours = take_over(make_owner, kafka, topic)
    assert ours.reserve_many(["there", "perhaps in the old one", "new"]) == [DUPLICATE, UNKNOWN, NEW]


def test_a_topic_that_was_made_anew_and_has_grown_is_read_from_its_beginning(
    make_owner: MakeOwner, db: psycopg.Connection[Any], kafka: dict[str, Any]
) -> None:
    """Below the dead owner's start are messages that it has sent since."""
    topic = create_topic(kafka["bootstrap.servers"], 1)
    send(Producer(kafka), topic, 0)
    positions = end_positions(kafka, [topic])
    assert positions[topic].keys() == {0, TOPIC_ID}
    dead = make_owner(positions=positions, transactional_id=f"{topic}-dead")
    PostgresWindow(dead, scope=topic, seconds=WINDOW_SECONDS).reserve_many(["there", "perhaps in the old one"])
    make_anew(kafka, topic)
    send(Producer(kafka), topic, "there", "more", "and more")
    end_lease(db, dead)
    ours = take_over(make_owner, kafka, topic)
    assert ours.reserve_many(["there", "perhaps in the old one", "new"]) == [DUPLICATE, UNKNOWN, NEW]


def test_resolve_leaves_unknown_what_a_topic_that_has_become_compacted_does_not_hold(
    kafka: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    topic, made = create_topic(kafka["bootstrap.servers"], 1), WindowFilter(keys=100, writes_key=True)
    settings = {**kafka, "transactional.id": f"{topic}-resolves"}
    with TransactionalProducer(settings, dedup=made) as producer:
        with producer.transaction() as transaction:
            transaction.produce(topic, b"x", dedup_key="delivered")
        set_policy(kafka, topic, "compact")
        doubt(made, "perhaps cleaned away")
        assert producer.resolve(topic) == Resolved(delivered=0, absent=0, unknown=1)
        assert "it is compacted" in caplog.text
        set_policy(kafka, topic, "delete")
        assert producer.resolve(topic) == Resolved(delivered=0, absent=1, unknown=0)


def test_resolve_leaves_unknown_what_a_topic_that_was_made_anew_does_not_hold(kafka: dict[str, Any]) -> None:
    topic, made = create_topic(kafka["bootstrap.servers"], 1), SequenceFilter()
    producer = DedupProducer(kafka, dedup=made, producer_name=topic)
    producer.produce(topic, b"1", sequence=1).result(60)
    doubt(made, 2)
    make_anew(kafka, topic)
    send(Producer(kafka), topic, *range(20))  # past where the producer knows the old one
    assert producer.resolve(topic) == Resolved(delivered=0, absent=0, unknown=1)
    producer.close()


@pytest.mark.usefixtures("impatient")
def test_a_transaction_that_a_compacted_topic_does_not_show_is_unknown(
    proxied_broker: KafkaProxy, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it was aborted, or a later message of the same key has taken its place."""
    topic = create_topic(proxied_broker.bootstrap_servers, 1, cleanup_policy="compact")
    plain = create_topic(proxied_broker.bootstrap_servers, 1)
    settings = {"bootstrap.servers": proxied_broker.bootstrap_servers, "transactional.id": name}
    with TransactionalProducer(
        {**settings, "socket.timeout.ms": 60_000}, dedup=lambda _: WindowFilter(keys=10)
    ) as producer:
        for topics, outcome in (((topic,), Outcome.UNKNOWN), ((topic, plain), Outcome.NOT_PERSISTED)):
            held = proxied_broker.hold(END_TXN)
            expected = pytest.raises(OutcomeUnknown if outcome is Outcome.UNKNOWN else Exception)
            with expected, producer.transaction() as transaction:
                transaction.messages += [(t, ProducerRecord(b"x", b"key", dedup_key=str(topics))) for t in topics]
            assert held.fired.is_set()
            assert {delivery.outcome for delivery in transaction.deliveries} == {outcome}
            held.release()
    assert "it is compacted" in caplog.text


@pytest.mark.parametrize("change", ["compacted", "made anew"])
def test_numbers_are_not_sent_on_where_nobody_can_tell_who_else_has_sent_some(
    kafka: dict[str, Any], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A client that is replaced looks for another writer of its name; at the start the topic was another one."""
    topic = create_topic(kafka["bootstrap.servers"], 1)
    producer = DedupProducer(kafka, dedup=SequenceFilter(), producer_name=topic)
    producer.produce(topic, b"1", sequence=1).result(60)
    if change == "compacted":
        set_policy(kafka, topic, "compact")
    else:
        make_anew(kafka, topic)
        send(Producer(kafka), topic, *range(20))  # past where the producer knows the old one
    monkeypatch.setattr("exactly_once.publish.transactional._IDLE_SECONDS", 0.0)
    delivery = producer.produce(topic, b"2", key=b"k", sequence=2)
    with pytest.raises(TailLost, match=f"another producer has taken over '{topic}'.*{change}"):
        producer.flush(60)
    assert delivery.outcome is Outcome.UNKNOWN
    with contextlib.suppress(Undelivered, TailLost):
        producer.close()
