"""What an offset belongs to: the topic's id and the cluster's, checked at the start and while consuming."""

from __future__ import annotations

import logging
import re
import shlex
import threading
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from exactly_once import ClusterChanged, ExactlyOnceConsumer, TopicRecreated, UnknownTopic
from exactly_once.cli import main
from exactly_once.consumer import maintenance
from exactly_once.embedded import Kafka
from exactly_once.kafka.admin import Cluster, Topic
from tests.conftest import MakeConsumer
from tests.support import journal
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import drain, ensure_journal

Db = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def _journal(conninfo: str) -> None:
    ensure_journal(conninfo)


@pytest.fixture
def topic(bootstrap_servers: str) -> str:
    """A topic with 10 messages in one partition."""
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, 10, 1)
    return topic


def recreate(bootstrap_servers: str, topic: str, messages: int) -> None:
    """Delete the topic and make another of the same name, with so many messages."""
    delete(bootstrap_servers, topic)
    create_topic(bootstrap_servers, 1, name=topic)
    produce(bootstrap_servers, topic, messages, 1)


def delete(bootstrap_servers: str, topic: str) -> None:
    """Delete the topic and wait until it is gone."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.delete_topics([topic])[topic].result(30)
    until(lambda: topic not in admin.list_topics(timeout=60).topics, 30, f"{topic} to be gone")


def consume(consumer: ExactlyOnceConsumer, topic: str) -> int:
    """Consume the topic to its end with a new consumer; return how many messages took effect."""
    with consumer:
        consumer.subscribe([topic])
        return drain(consumer)


def stored(db: Db, group: str) -> tuple[Any, ...]:
    """The only row of the group: cluster id, topic id, offset."""
    rows = db.execute(
        "SELECT cluster_id, topic_id, next_offset FROM exactly_once.ledger WHERE group_id = %s", (group,)
    ).fetchall()
    (row,) = rows
    assert isinstance(row, tuple)
    return row


@pytest.mark.fault("C4")
@pytest.mark.parametrize("messages", [0, 10, 200])
def test_topic_recreated_while_stopped_is_refused(
    *, messages: int, make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, db: Db, conninfo: str, name: str
) -> None:
    """However long the new log is; the message has both ids and the command that mends it, whole."""
    consume(make_consumer(), topic)
    before = stored(db, name)
    recreate(bootstrap_servers, topic, messages)
    told = rf"topic id {re.escape(before[1])}.*has id .*below offset 10, where the ledger stands, may have been applied"
    with pytest.raises(TopicRecreated, match=told) as caught:
        consume(make_consumer(), topic)
    assert stored(db, name) == before
    adopt = shlex.split(str(caught.value).partition("exactly-once ")[2])
    assert main([*adopt, "--bootstrap-servers", bootstrap_servers, "--conninfo", conninfo, "--execute"]) == 0
    assert (stored(db, name)[1] != before[1], stored(db, name)[2]) == (True, 0)


@pytest.mark.fault("C4", more=True)
@pytest.mark.parametrize("messages", [0, 5, 200])
@pytest.mark.parametrize("policy", ["fail", "earliest", "latest"])
def test_topic_recreated_while_consuming_stops_the_iteration_for_good(
    *, messages: int, policy: str, make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, name: str, db: Db
) -> None:
    """Shorter or longer than the old one, and whatever the policy for offsets out of range: it is another topic."""
    settings = {"topic.metadata.refresh.interval.ms": 500}
    with make_consumer(settings, on_out_of_range=policy, stop_on_bad_partition=True) as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 10
        before = stored(db, name)
        recreate(bootstrap_servers, topic, messages)
        with pytest.raises(TopicRecreated):
            _consume_for_ever(consumer)
        if messages < 200:  # of a longer log, what comes before the id is looked at again is read on
            assert stored(db, name) == before
        after = stored(db, name)
        produce(bootstrap_servers, topic, 20, 1)
        for _ in range(3):
            with pytest.raises(TopicRecreated):
                _consume_for_ever(consumer)
    assert stored(db, name) == after
    assert (
        db.execute("SELECT FROM exactly_once.audit WHERE action <> 'register' AND group_id = %s", (name,)).rowcount == 0
    )


def test_topic_that_is_gone_is_told_once_while_it_is_asked_for_again_and_again(
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    topic: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.1)
    caplog.set_level(logging.DEBUG, logger="exactly_once")
    consumer = make_consumer()
    consumer.subscribe([topic])
    drain(consumer)
    delete(bootstrap_servers, topic)
    stopping = threading.Timer(3, consumer.stop)
    stopping.start()
    assert list(consumer) == []
    stopping.join()
    levels = [r.levelno for r in caplog.records if getattr(r, "action", "") == "topic_unchecked"]
    assert len(levels) > 2
    assert levels == [logging.WARNING] + [logging.DEBUG] * (len(levels) - 1)


@pytest.mark.parametrize("end", [{"until_end": True}, {"idle_seconds": 1}], ids=str)
def test_an_end_that_the_log_of_a_deleted_topic_would_have_is_not_waited_for(
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    end: dict[str, Any],
) -> None:
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.1)
    monkeypatch.setattr(maintenance, "SETTLE_SECONDS", 1.0)
    produce(bootstrap_servers, topic, 10, 1, start=10)
    # The client has the first ten when the topic goes, and not the others.
    consumer = make_consumer({"fetch.message.max.bytes": 1, "queued.min.messages": 1}, max_messages=1)
    consumer.subscribe([topic])
    units = consumer.units(**end)
    with next(units):
        delete(bootstrap_servers, topic)

    def go_on() -> None:
        for unit in units:
            with unit:
                pass

    for _ in range(2):  # as often as somebody asks
        with pytest.raises(UnknownTopic, match=topic):
            go_on()


@pytest.mark.fault("C5")
def test_other_cluster_behind_the_same_group_is_refused(
    make_consumer: MakeConsumer, topic: str, db: Db, name: str
) -> None:
    consume(make_consumer(), topic)
    before = stored(db, name)
    with Kafka() as other:
        create_topic(other.bootstrap_servers, 1, name=topic)
        produce(other.bootstrap_servers, topic, 200, 1)
        with pytest.raises(ClusterChanged, match=f"belongs to cluster {re.escape(before[0])}.*this is cluster .*adopt"):
            consume(make_consumer({"bootstrap.servers": other.bootstrap_servers}), topic)
    assert stored(db, name) == before


def test_unknown_topic_id_is_stored_as_null_said_once_and_filled_in_later(
    *,
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    topic: str,
    db: Db,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    conninfo: str,
) -> None:
    """An old broker, or missing rights; the embedded broker always knows ids, so its answer is emptied here."""
    described = Cluster.described

    def without_id(self: Cluster, topic: str, future: Any) -> Topic:
        self._say_no_id(topic)
        return described(self, topic, future)._replace(topic_id=None)

    monkeypatch.setattr(Cluster, "described", without_id)
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.05)
    caplog.set_level(logging.WARNING)
    assert consume(make_consumer(), topic) == 10
    assert stored(db, name)[1] is None
    assert sum("gives no topic id" in message for message in caplog.messages) == 1

    monkeypatch.undo()
    produce(bootstrap_servers, topic, 5, 1, start=10)
    assert consume(make_consumer(), topic) == 5
    topic_id = stored(db, name)[1]
    assert topic_id is not None
    audit = "SELECT old_topic_id, new_topic_id FROM exactly_once.audit WHERE group_id = %s AND action = 'identify'"
    assert db.execute(audit, (name,)).fetchall() == [(None, topic_id)]
    verdict = journal.check(conninfo, bootstrap_servers, topic)
    assert verdict.exact, verdict


def test_what_was_read_of_the_new_topic_is_told(
    make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer log is read where the old one stood. The id is changed in the answer, at the right moment."""
    described = Cluster.described
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 600)  # else the id may be looked at between two units
    with make_consumer(max_messages=4, stop_on_bad_partition=True) as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 10
        consumer._maintenance._next_recheck.clear()
        consumer._keep_up()
        until(lambda: all(f.done() for f in consumer._maintenance._asked.values()), 10, "the answer")
        consumer._keep_up()  # the id was right at offset 10
        produce(bootstrap_servers, topic, 4, 1)
        while consumer.counters.messages < 14:  # they may come one by one
            with next(iter(consumer)) as unit:
                unit.execute("SELECT 1")
        monkeypatch.setattr(Cluster, "described", lambda *args: described(*args)._replace(topic_id="another"))
        consumer._maintenance._next_recheck.clear()
        told = r"the old one at offset 10 still; offsets 10 to 13 were applied since.*nothing below offset 10 was read"
        with pytest.raises(TopicRecreated, match=told):
            _consume_for_ever(consumer)


def test_topic_id_that_becomes_known_while_consuming_changes_nothing(
    make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, conninfo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row began without an id, so its units go on to be checked against none."""
    described = Cluster.described
    monkeypatch.setattr(Cluster, "described", lambda *args: described(*args)._replace(topic_id=None))
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.05)
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 10
        monkeypatch.setattr(Cluster, "described", described)
        produce(bootstrap_servers, topic, 5, 1, start=10)
        for unit in consumer.units(idle_seconds=6):
            with unit:
                journal_of = [journal.entry(message, "test") for message in unit.messages]
                unit.executemany(journal.APPEND, journal_of)
    verdict = journal.check(conninfo, bootstrap_servers, topic, counts=False)
    assert verdict.exact, verdict


def _consume_for_ever(consumer: ExactlyOnceConsumer) -> None:
    for unit in consumer.units(idle_seconds=30):
        with unit:
            unit.execute("SELECT 1")
