"""Where a group starts: the policies, the refusal, adoption, crashes in between, rows deleted by hand."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition

from exactly_once import (
    ExactlyOnceConsumer,
    LedgerRowMissing,
    NoCommittedOffset,
    OffsetsNotAdopted,
    UnknownTopic,
)
from exactly_once.kafka.admin import Cluster, Topic
from exactly_once.ledger.rows import Ledger
from tests.conftest import MakeConsumer
from tests.support import journal
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import Crew, drain, ensure_journal, record

PARTITIONS = 3

Db = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def _journal(conninfo: str) -> None:
    ensure_journal(conninfo)


@pytest.fixture
def topic(bootstrap_servers: str) -> str:
    """A topic with 30 messages, 10 in each partition."""
    topic = create_topic(bootstrap_servers, PARTITIONS)
    produce(bootstrap_servers, topic, 30, PARTITIONS)
    return topic


@pytest.fixture
def consume(make_consumer: MakeConsumer, topic: str) -> Callable[..., int]:
    """Consume the topic to its end with a consumer of these options; return how many messages took effect."""

    def consume(**options: Any) -> int:
        with make_consumer(**options) as consumer:
            consumer.subscribe([topic])
            return drain(consumer)

    return consume


@pytest.fixture
def offsets(db: Db, name: str, topic: str) -> Callable[[], list[int | None]]:
    """What the ledger holds, by partition."""

    def offsets() -> list[int | None]:
        query = "SELECT next_offset FROM exactly_once.ledger WHERE group_id = %s AND topic = %s ORDER BY partition"
        return [offset for (offset,) in db.execute(query, (name, topic))]

    return offsets


def commit_to_kafka(bootstrap_servers: str, group: str, topic: str, offsets: dict[int, int]) -> None:
    """Commit offsets as an ordinary consumer does."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": group})
    consumer.commit(offsets=[TopicPartition(topic, p, o) for p, o in offsets.items()], asynchronous=False)
    consumer.close()


def test_new_group_starts_at_the_earliest_message(
    consume: Callable[..., int], bootstrap_servers: str, conninfo: str, topic: str
) -> None:
    assert consume() == 30
    verdict = journal.check(conninfo, bootstrap_servers, topic)
    assert verdict.exact, verdict


def test_latest_reads_only_what_comes_after_the_start(
    consume: Callable[..., int], bootstrap_servers: str, topic: str
) -> None:
    assert consume(start="latest") == 0
    produce(bootstrap_servers, topic, 9, PARTITIONS, start=30)
    assert consume(start="latest") == 9


def test_datetime_reads_from_the_first_message_of_that_time(
    consume: Callable[..., int], bootstrap_servers: str, topic: str
) -> None:
    time.sleep(0.01)  # a message's time has a resolution of a millisecond
    moment = datetime.now(UTC)
    time.sleep(0.01)
    produce(bootstrap_servers, topic, 6, PARTITIONS, start=30)
    assert consume(start=moment) == 6


@pytest.mark.parametrize("year", [1, 1960, 1970])
def test_datetime_before_any_message_can_be_reads_all(consume: Callable[..., int], year: int) -> None:
    assert consume(start=datetime(year, 1, 1, tzinfo=UTC)) == 30


def test_datetime_after_the_last_message_starts_at_the_end(
    consume: Callable[..., int], bootstrap_servers: str, topic: str, offsets: Callable[[], list[int | None]]
) -> None:
    assert consume(start=datetime(2100, 1, 1, tzinfo=UTC)) == 0
    assert offsets() == [10, 10, 10]


def test_committed_adopts_a_group_where_kafka_says_it_stands(
    consume: Callable[..., int], bootstrap_servers: str, conninfo: str, topic: str, name: str
) -> None:
    """With lag: just the messages that the old consumer had not committed, each once."""
    commit_to_kafka(bootstrap_servers, name, topic, {0: 4, 1: 10, 2: 0})
    assert consume(start="committed") == 6 + 0 + 10
    firsts: dict[int, int] = {}
    for entry in journal.entries(conninfo, topic):
        firsts.setdefault(entry.partition, entry.offset)
    assert firsts == {0: 4, 2: 0}


@pytest.mark.fault("C15")
def test_adopted_group_goes_on_by_the_ledger_not_by_kafka(
    consume: Callable[..., int], bootstrap_servers: str, topic: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has moved them in Kafka is told that this moves nothing."""
    ignored: list[int] = []
    for offsets in ({0: 4, 1: 10, 2: 0}, {0: 3, 1: 10}, {0: 99, 1: 0}):
        commit_to_kafka(bootstrap_servers, name, topic, offsets)
        assert consume(start="committed") == (16 if not ignored else 0)
        told = [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "kafka_offset_ignored"]
        ignored.append(len(told))
    assert ignored == [0, 1, 2]
    assert f"{topic}[0] at 3, the ledger at 10. To" in told[0]
    assert f"{topic}[0] at 99, the ledger at 10; {topic}[1] at 0, the ledger at 10. To" in told[1]
    assert f"exactly-once reset --group-id {name} --topic {topic} --to-committed" in told[1]


def test_limits_of_memory_are_as_good_as_for_a_plain_consumer(make_consumer: MakeConsumer, topic: str) -> None:
    """Clients beside the main one have the limit of an answer, and not that of a fetch, which fits into it."""
    with make_consumer({"receive.message.max.bytes": "2000000", "fetch.max.bytes": 1_000_000}) as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 30


def test_committed_without_an_offset_starts_an_empty_log_at_its_beginning(
    make_consumer: MakeConsumer, bootstrap_servers: str, name: str
) -> None:
    topic = create_topic(bootstrap_servers, 2)
    produce(bootstrap_servers, topic, 5, 1)
    commit_to_kafka(bootstrap_servers, name, topic, {0: 3})
    with make_consumer(start="committed") as consumer:
        consumer.subscribe([topic])
        assert drain(consumer) == 2
        produce(bootstrap_servers, topic, 4, 2)
        assert drain(consumer) == 4


def test_committed_without_an_offset_of_a_filled_log_is_an_error(
    consume: Callable[..., int],
    bootstrap_servers: str,
    topic: str,
    name: str,
    offsets: Callable[[], list[int | None]],
) -> None:
    commit_to_kafka(bootstrap_servers, name, topic, {0: 4, 2: 0})
    with pytest.raises(NoCommittedOffset, match=rf"{topic}\[1\].*0 to 10. Choose one .*--partition 1 --to-offset"):
        consume(start="committed")
    assert offsets() == [None, None, None], "a partition was started although another could not be"
    assert consume(start="earliest") == 30


def test_offsets_that_were_not_adopted_stay_so_without_start(
    consume: Callable[..., int],
    bootstrap_servers: str,
    topic: str,
    name: str,
    offsets: Callable[[], list[int | None]],
) -> None:
    """The rows that a refused start has made have no offsets: what Kafka holds was read again in silence."""
    commit_to_kafka(bootstrap_servers, name, topic, {0: 4, 2: 0})
    with pytest.raises(NoCommittedOffset):
        consume(start="committed")
    for _ in range(2):
        with pytest.raises(OffsetsNotAdopted, match='start="committed"'):
            consume()
    assert offsets() == [None, None, None]
    commit_to_kafka(bootstrap_servers, name, topic, {1: 1})
    settings = {"group.id": name, "client.id": "old", "enable.auto.commit": False}
    old = Consumer({"bootstrap.servers": bootstrap_servers, **settings})
    old.subscribe([topic])
    until(lambda: old.poll(0.2) is not None or old.assignment(), 60, "the old member")
    ended = threading.Event()

    def work() -> None:  # on, as rebalances wait for it
        while not ended.is_set():
            old.poll(0.1)
        old.close()

    working = threading.Thread(target=work)
    working.start()
    try:
        with pytest.raises(OffsetsNotAdopted, match="members that are none of this library's"):
            consume(start="committed")
    finally:
        ended.set()
        working.join()
    assert consume(start="committed") == 25
    assert consume() == 0


def test_committed_where_kafka_has_nothing_of_the_group_says_what_else_start_takes(
    consume: Callable[..., int], topic: str
) -> None:
    told = rf"{topic}\[0\].*0 to 10. It holds none of the whole topic: leave start= out.*latest.*--to-offset"
    with pytest.raises(NoCommittedOffset, match=told):
        consume(start="committed")
    assert consume() == 30


def test_offsets_in_kafka_without_start_are_refused(
    consume: Callable[..., int],
    bootstrap_servers: str,
    topic: str,
    name: str,
    offsets: Callable[[], list[int | None]],
) -> None:
    """Wrapping a live consumer must not replay its whole topic; both ways out are named."""
    commit_to_kafka(bootstrap_servers, name, topic, {0: 4})
    with pytest.raises(OffsetsNotAdopted, match=r'start="committed".*start="earliest"'):
        consume()
    assert offsets() == []
    with pytest.raises(OffsetsNotAdopted):
        consume()
    assert consume(start="earliest") == 30
    assert consume() == 0, "once there are rows, start is not asked for again"


def test_offsets_of_another_topic_are_no_reason_to_refuse(
    consume: Callable[..., int], bootstrap_servers: str, name: str
) -> None:
    commit_to_kafka(bootstrap_servers, name, create_topic(bootstrap_servers, 1), {0: 0})
    assert consume() == 30


@pytest.mark.parametrize("start", [None, "earliest", "latest", "committed", datetime(2020, 1, 1, tzinfo=UTC)])
def test_two_members_that_start_a_group_at_once_agree(
    start: object, make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, name: str
) -> None:
    """Whoever meets a partition first chooses its start by the same policy, and nobody else chooses again."""
    if start == "committed":
        commit_to_kafka(bootstrap_servers, name, topic, {0: 4, 1: 4, 2: 4})
    members = [make_consumer(start=start) for _ in range(2)]
    done = [0, 0]

    def consume(number: int) -> None:
        members[number].subscribe([topic])
        for unit in members[number].units(idle_seconds=6):
            with unit:
                unit.execute("SELECT 1")
            done[number] += len(unit.messages)

    threads = [threading.Thread(target=consume, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert sum(done) == {"latest": 0, "committed": 18}.get(str(start), 30)


@pytest.mark.parametrize("moment", ["before the start is stored", "after the start is stored"])
def test_crash_while_starting_does_not_choose_the_start_twice(
    *,
    moment: str,
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    topic: str,
    offsets: Callable[[], list[int | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under ``latest`` a second choice would skip what came in between.

    There is no failpoint in starting, so the crash is an exception at the one call that stores the start.
    """

    class Crash(BaseException):
        pass

    start = Ledger.start

    def crash(self: Ledger, rows: Any) -> set[Any]:
        if moment.startswith("after"):
            start(self, rows)
        raise Crash

    monkeypatch.setattr(Ledger, "start", crash)
    with make_consumer(start="latest") as consumer:
        consumer.subscribe([topic])
        with pytest.raises(Crash):
            drain(consumer)
    monkeypatch.undo()
    chosen = moment.startswith("after")
    assert offsets() == ([10] * 3 if chosen else [None] * 3)
    produce(bootstrap_servers, topic, 9, PARTITIONS, start=30)
    with make_consumer(start="latest") as consumer:
        consumer.subscribe([topic])
        # What was not stored was not chosen: nobody has been promised those messages.
        assert drain(consumer) == (9 if chosen else 0)


@pytest.mark.parametrize("failpoint", ["positioned", "polled"])
def test_kill_between_start_and_first_commit_does_not_choose_again(
    failpoint: str, bootstrap_servers: str, conninfo: str, topic: str, name: str
) -> None:
    """Killed for good: what came after the start was stored is read by the next worker."""
    with Crew(bootstrap_servers, conninfo, name, [topic]) as crew:
        options = {"start": "latest"}
        doomed = crew.start(options=options, failpoint=[failpoint, "kill", 1])
        if failpoint == "polled":
            until(lambda: crew.applied() == 30, 20, "the start to be stored")
            produce(bootstrap_servers, topic, 9, PARTITIONS, start=30)
        assert doomed.wait_exit() == -signal.SIGKILL
        started = crew.applied() == 30
        if failpoint == "positioned":
            produce(bootstrap_servers, topic, 9, PARTITIONS, start=30)
        crew.start(options=options, until_end=True).finish()
        assert len(journal.entries(conninfo, topic)) == (9 if started else 0)


@pytest.mark.fault("B21")
@pytest.mark.parametrize("deleted", ["partition = 0", "partition = 1", "partition = 2", "true"])
def test_rows_deleted_by_hand_are_an_error_and_no_new_start(
    deleted: str, consume: Callable[..., int], db: Db, name: str, topic: str
) -> None:
    """The first, one in the middle, the last, and all of them."""
    consume()
    condition = psycopg.sql.SQL(deleted)
    db.execute(psycopg.sql.SQL("DELETE FROM exactly_once.ledger WHERE group_id = %s AND {}").format(condition), (name,))
    for start in (None, "earliest", "latest", "committed"):
        with pytest.raises(LedgerRowMissing, match=rf"{topic}.*reset --group-id {name} --topic {topic} --partition \d"):
            consume(start=start)


def test_row_deleted_while_consuming_is_an_error(
    *, make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, db: Db, name: str, conninfo: str
) -> None:
    """Its effects are rolled back, also when the loop asks again."""
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        drain(consumer)
        db.execute("DELETE FROM exactly_once.ledger WHERE group_id = %s AND partition = 1", (name,))
        produce(bootstrap_servers, topic, 9, PARTITIONS, start=30)
        for _ in range(2):
            with pytest.raises(LedgerRowMissing):
                drain(consumer)
    assert {e.offset for e in journal.entries(conninfo, topic) if e.partition == 1} == set(range(10))


def test_topic_that_comes_later_is_waited_for(make_consumer: MakeConsumer, bootstrap_servers: str, name: str) -> None:
    with make_consumer({"topic.metadata.refresh.interval.ms": 300}, wait_for_topics=True) as consumer:
        consumer.subscribe([name])
        timer = threading.Timer(
            2, lambda: produce(bootstrap_servers, create_topic(bootstrap_servers, 1, name=name), 7, 1)
        )
        timer.start()
        assert _first_messages(consumer, 7) == 7
        timer.join()


def test_a_topic_that_is_waited_for_is_read_from_its_beginning_whatever_start_says(
    make_consumer: MakeConsumer, bootstrap_servers: str, name: str
) -> None:
    there = create_topic(bootstrap_servers, 1, name=f"{name}-there")
    produce(bootstrap_servers, there, 5, 1)
    settings = {"topic.metadata.refresh.interval.ms": 300}
    with make_consumer(settings, start="latest", wait_for_topics=True) as consumer:
        consumer.subscribe([there, name])
        produce(bootstrap_servers, create_topic(bootstrap_servers, 2, name=name), 8, 2)
        assert _first_messages(consumer, 8) == 8


@pytest.mark.fault("A12")
def test_topic_that_matches_later_is_read_from_its_beginning(
    make_consumer: MakeConsumer, bootstrap_servers: str, name: str, protocol: dict[str, Any]
) -> None:
    """A regular expression matches one topic at first and a second one later."""
    settings = {"topic.metadata.refresh.interval.ms": 300, **protocol}
    produce(bootstrap_servers, create_topic(bootstrap_servers, 1, name=f"{name}-a"), 5, 1)
    with make_consumer(settings) as consumer:
        consumer.subscribe([f"^{name}-.*"])
        assert _first_messages(consumer, 5) == 5
        produce(bootstrap_servers, create_topic(bootstrap_servers, 2, name=f"{name}-b"), 8, 2)
        assert _first_messages(consumer, 8) == 8


def _first_messages(consumer: ExactlyOnceConsumer, count: int) -> int:
    """Take units until there were so many messages, or nothing came for long."""
    done = 0
    for unit in consumer.units(idle_seconds=30):
        with unit:
            done += len(unit.messages)
        if done >= count:
            break
    return done


@pytest.mark.parametrize("start", [None, "committed", "earliest", "latest"])
def test_offsets_that_we_mirrored_ourselves_are_no_place_to_start_from(
    start: str | None, consume: Callable[..., int], db: Db, name: str
) -> None:
    """A failover or a restore that lost the rows lost effects with them; Kafka still has the later offsets."""
    consume()
    for table in ("ledger", "audit"):
        db.execute(f"DELETE FROM exactly_once.{table} WHERE group_id = %s", (name,))
    with pytest.raises(OffsetsNotAdopted, match="mirrored"):
        consume(start=start)


@pytest.mark.usefixtures("unhurried")
def test_a_topic_that_others_do_not_know_yet_is_waited_for(
    make_consumer: MakeConsumer, bootstrap_servers: str, name: str
) -> None:
    """A broker that lags behind says for a moment that there is no such topic; here there is none for a moment."""
    timer = threading.Timer(0.7, lambda: create_topic(bootstrap_servers, 1, name=name))
    timer.start()
    with make_consumer() as consumer:
        consumer.subscribe([name])
        timer.join()
        produce(bootstrap_servers, name, 3, 1)
        assert drain(consumer) == 3


def test_a_partition_whose_topic_is_unknown_for_a_moment_waits_and_the_others_do_not(
    make_consumer: MakeConsumer, bootstrap_servers: str, topic: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers that lag cannot be had on demand, so the answer is changed."""
    create_topic(bootstrap_servers, 1, name=name)
    produce(bootstrap_servers, name, 5, 1)
    described = Cluster.described
    known = threading.Event()

    def lagging(self: Cluster, asked: str, future: Any) -> Topic:
        if asked == name and not known.is_set():
            raise UnknownTopic(f"there is no topic {name!r}")
        return described(self, asked, future)

    with make_consumer() as consumer:
        consumer.subscribe([topic, name])
        monkeypatch.setattr(Cluster, "described", lagging)
        applied: list[str | None] = []
        for unit in consumer.units(until_end=True):
            with unit:
                record(unit, "test")
            applied += [m.topic() for m in unit.messages]
            if len(applied) == 30:
                assert name not in applied
                known.set()
        assert applied[30:] == [name] * 5


@pytest.mark.parametrize("start", ["latest", "committed"])
def test_a_topic_that_a_pattern_finds_later_is_read_from_its_start(
    start: str, make_consumer: MakeConsumer, bootstrap_servers: str, name: str
) -> None:
    """What arrived before it was found would else be skipped; also what arrived while the group was away."""
    first, later, last = (f"{name}-{number}" for number in range(3))
    create_topic(bootstrap_servers, 2, name=first)
    produce(bootstrap_servers, first, 10, 2)
    commit_to_kafka(bootstrap_servers, name, first, {0: 5, 1: 5})
    settings = {"topic.metadata.refresh.interval.ms": 300}
    with make_consumer(settings, start=start) as consumer:
        consumer.subscribe([f"^{name}-.*"])
        assert drain(consumer) == 0, "what was there when the group began is left to start="
        create_topic(bootstrap_servers, 2, name=later)
        produce(bootstrap_servers, later, 8, 2)
        done = 0
        for unit in consumer.units(idle_seconds=60):
            with unit:
                record(unit, "test")
            done += len(unit.messages)
            if done >= 8:
                break
        assert (done, drain(consumer)) == (8, 0)
    create_topic(bootstrap_servers, 1, name=last)
    produce(bootstrap_servers, last, 3, 1)
    with make_consumer(settings, start=start) as consumer:
        consumer.subscribe([f"^{name}-.*"])
        assert drain(consumer) == 3


def test_offsets_in_kafka_are_adopted_also_of_a_topic_that_a_pattern_finds_later(
    make_consumer: MakeConsumer, bootstrap_servers: str, name: str
) -> None:
    """The group's rows of one topic, prepared by an operator say, make nothing of another be applied again."""
    first, second = f"{name}-0", f"{name}-1"
    create_topic(bootstrap_servers, 1, name=first)
    with make_consumer() as consumer:
        consumer.subscribe([first])
        assert drain(consumer) == 0
    create_topic(bootstrap_servers, 1, name=second)
    produce(bootstrap_servers, second, 10, 1)
    commit_to_kafka(bootstrap_servers, name, second, {0: 6})
    with make_consumer({"topic.metadata.refresh.interval.ms": 300}, start="committed") as consumer:
        consumer.subscribe([f"^{name}-.*"])
        assert drain(consumer) == 4


def test_a_topic_that_is_named_later_is_left_to_start_also_behind_a_pattern(
    make_consumer: MakeConsumer, bootstrap_servers: str, name: str
) -> None:
    first, second = f"{name}-0", f"other-{name}"
    create_topic(bootstrap_servers, 1, name=first)
    produce(bootstrap_servers, first, 10, 1)
    with make_consumer(start="latest") as consumer:
        consumer.subscribe([f"^{name}-.*"])
        assert drain(consumer) == 0
        create_topic(bootstrap_servers, 1, name=second)
        produce(bootstrap_servers, second, 10, 1)
        consumer.subscribe([first, second])
        assert drain(consumer) == 0


def test_group_that_an_old_consumer_still_works_for_is_not_adopted(
    consume: Callable[..., int], bootstrap_servers: str, topic: str, name: str
) -> None:
    """It would go on applying beside us; once it has left, adoption works."""
    commit_to_kafka(bootstrap_servers, name, topic, {0: 4, 1: 10, 2: 0})
    settings = {"group.id": name, "client.id": "billing", "enable.auto.commit": False}
    old = Consumer({"bootstrap.servers": bootstrap_servers, **settings})
    old.subscribe([topic])
    until(lambda: old.poll(0.2) or old.assignment(), 30, "the old consumer's assignment")
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            old.poll(0.1)

    # Or Kafka would wait for it with the rebalance.
    polling = threading.Thread(target=poll)
    polling.start()
    try:
        with pytest.raises(OffsetsNotAdopted, match=r"still in it: billing at \S+\. Stop every one"):
            consume(start="committed")
    finally:
        stop.set()
        polling.join()
        old.close()
    assert consume(start="committed") == 16


@pytest.mark.fault("D11")
def test_rows_that_another_program_applied_before_are_told_of_once(
    make_consumer: MakeConsumer, topic: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two applications in one group: each lacks what the other has, and nothing else tells."""

    def said(application: str | None) -> list[str]:
        caplog.clear()
        with make_consumer(application=application) as consumer:
            consumer.subscribe([topic])
            consumer.run(lambda unit: None, until_end=True)
        return [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "group_collision"]

    assert said("billing") == []
    assert said("billing") == []
    (text,) = said("reports")
    assert "'billing'" in text
    assert "'reports'" in text
    assert name in text
    assert said("reports") == []
    (text,) = said(None)
    assert "test_start:test_rows_that_another_program_applied" in text
