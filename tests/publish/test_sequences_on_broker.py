"""Sequences through a real broker: recovery from snapshot and topic, gaps, open transactions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from exactly_once import ConfigurationError
from exactly_once._model import Partition
from exactly_once.demo.journal import scan
from exactly_once.publish import (
    DedupProducer,
    KeyRefused,
    Outcome,
    OutcomeUnknown,
    ProducerFenced,
    ProducerRecord,
    SequenceFilter,
    SnapshotCorrupted,
    SnapshotFile,
    State,
    TailHidden,
    TailLost,
    Undelivered,
    recovery,
    tail,
)
from exactly_once.publish.headers import Sent, headers_of, with_sequence
from exactly_once.publish.recovery import SequenceLog, Walk
from exactly_once.publish.snapshot import pack, unpack
from exactly_once.publish.tail import describe, ends_of, read_tail
from exactly_once.publish.topic import Columns
from tests.support.topics import create_topic, delete_topic
from tests.support.waiting import until

Make = Callable[..., DedupProducer]


@pytest.fixture
def topic(bootstrap_servers: str, name: str) -> str:
    return create_topic(bootstrap_servers, 3, name=name)


@pytest.fixture
def make(bootstrap_servers: str) -> Iterator[Make]:
    made: list[DedupProducer] = []

    def start(**options: Any) -> DedupProducer:
        options.setdefault("producer_name", "files")
        options.setdefault("dedup", lambda _: SequenceFilter())
        made.append(DedupProducer({"bootstrap.servers": bootstrap_servers}, **options))
        return made[-1]

    yield start
    for producer in made:
        producer.close()


def send(producer: DedupProducer, topic: str, *numbers: int) -> None:
    for number in numbers:
        producer.produce(topic, b"%d" % number, sequence=number)
    assert producer.flush(60) == 0


def values(bootstrap_servers: str, topic: str) -> list[int]:
    return sorted(int(record.value or b"") for record in scan(bootstrap_servers, topic))


def lose(bootstrap_servers: str, topic: str, number: int, before: int, name: str = "files") -> None:
    """Put a message into the topic as a producer that died would have left it."""
    client = Producer({"bootstrap.servers": bootstrap_servers})
    client.produce(topic, b"%d" % number, headers=with_sequence(None, name, before, number))
    assert client.flush(60) == 0


def test_a_restart_goes_on_where_the_topic_ends(make: Make, bootstrap_servers: str, topic: str) -> None:
    first = make()
    assert first.last_sequence_id(topic) == -1
    send(first, topic, 0, 117, 1200)
    assert first.last_sequence_id(topic) == 1200
    again = make()
    assert again.last_sequence_id(topic) == 1200
    send(again, topic, 0, 117, 1200, 1300)
    assert values(bootstrap_servers, topic) == [0, 117, 1200, 1300]


def test_headers_that_the_caller_fills_anew_are_those_of_each_message(
    make: Make, bootstrap_servers: str, topic: str
) -> None:
    """The messages go out later, at the end of a transaction."""
    headers: dict[str, bytes] = {}
    producer = make()
    for number in range(3):
        headers["n"] = b"%d" % number
        producer.produce(topic, b"%d" % number, sequence=number, headers=headers)
    records = [ProducerRecord(b"%d" % n, sequence=n, headers=iter([("n", b"%d" % n)])) for n in range(3, 6)]
    producer.produce_many(topic, records)
    assert producer.flush(60) == 0
    read = read_tail({"bootstrap.servers": bootstrap_servers}, topic, None)
    found = {message.value(): dict(headers_of(message) or ())["n"] for message in read}
    assert found == {b"%d" % n: b"%d" % n for n in range(6)}


def test_a_message_that_was_lost_in_the_crash_is_new_and_those_behind_it_are_not(
    make: Make, bootstrap_servers: str, topic: str
) -> None:
    """4 was in flight to one partition when 5 and 6 were acknowledged by others. Then: kill -9."""
    send(make(), topic, 1, 2, 3)
    lose(bootstrap_servers, topic, 5, before=4)
    lose(bootstrap_servers, topic, 6, before=5)
    again = make()
    assert again.last_sequence_id(topic) == 3, "whoever goes on after 6 would lose 4"
    send(again, topic, 4, 5, 6, 7)
    assert values(bootstrap_servers, topic) == [1, 2, 3, 4, 5, 6, 7]
    assert again.last_sequence_id(topic) == 7
    assert make().last_sequence_id(topic) == 7


def test_a_snapshot_saves_reading_the_topic_and_the_rest_is_read(
    make: Make, bootstrap_servers: str, topic: str, tmp_path: Path
) -> None:
    store = SnapshotFile(tmp_path / "snapshot")
    send(make(snapshots=lambda _: store, snapshot_every=10), topic, *range(25))
    lose(bootstrap_servers, topic, 25, before=24)
    filled = SequenceFilter()
    again = make(snapshots=lambda _: store, dedup=filled)
    assert again.last_sequence_id(topic) == 25
    read = again._topics[topic].log
    assert read is not None
    assert read.recover() == 0, "recovering makes a snapshot, so that the next one has nothing to read"


def test_reading_says_nothing_of_the_settings_of_a_producer(
    bootstrap_servers: str, topic: str, capfd: pytest.CaptureFixture[str]
) -> None:
    kafka = {"bootstrap.servers": bootstrap_servers, "linger.ms": 5, "compression.type": "gzip"}
    for life in range(2):
        with DedupProducer(kafka, dedup=SequenceFilter(), producer_name=topic) as producer:
            send(producer, topic, life)
    assert "CONFWARN" not in capfd.readouterr().err


def test_a_new_name_need_not_read_what_is_older(make: Make, bootstrap_servers: str, topic: str) -> None:
    client = Producer({"bootstrap.servers": bootstrap_servers})
    for n in range(30):
        client.produce(topic, b"of another", partition=n % 2, timestamp=1_000_000_000_000 + n)
    assert client.flush(60) == 0
    since = datetime(2020, 1, 1, tzinfo=UTC)
    send(make(published_since=since), topic, 1, 2)
    filled = SequenceFilter()
    log = SequenceLog({"bootstrap.servers": bootstrap_servers}, topic, filled, producer="files", since=since)
    assert log.recover() == 2
    assert filled.persisted == 2
    with pytest.raises(ConfigurationError, match="time zone"):
        make(published_since=datetime(2020, 1, 1))  # noqa: DTZ001 - it is refused


def test_a_snapshot_is_made_every_so_many_confirmations(make: Make, topic: str, tmp_path: Path) -> None:
    saved: list[bytes] = []

    class Store(SnapshotFile):
        def save(self, data: bytes) -> None:
            saved.append(data)
            super().save(data)

    producer = make(snapshots=lambda _: Store(tmp_path / "snapshot"), snapshot_every=10)
    for number in range(35):
        send(producer, topic, number)
    assert len(saved) == 1 + 3, "one at the start"


def test_a_snapshot_that_was_cut_short_is_refused(make: Make, topic: str, tmp_path: Path) -> None:
    store = SnapshotFile(tmp_path / "snapshot")
    send(make(snapshots=lambda _: store, snapshot_every=1), topic, 1, 2)
    data = store.load()
    assert data is not None
    store.save(data[:-3])
    with pytest.raises(SnapshotCorrupted, match=rf"{tmp_path}/snapshot.*{topic}.*cut short.*Remove it to begin anew"):
        make(snapshots=lambda _: store).last_sequence_id(topic)


def test_a_snapshot_of_another_topic_is_refused(make: Make, bootstrap_servers: str, topic: str, tmp_path: Path) -> None:
    store = SnapshotFile(tmp_path / "snapshot")
    send(make(snapshots=lambda _: store, snapshot_every=1), topic, 1)
    other = create_topic(bootstrap_servers, 1)
    with pytest.raises(SnapshotCorrupted, match="not of"):
        make(snapshots=lambda _: store).last_sequence_id(other)


def test_no_snapshot_is_made_while_an_outcome_is_unknown(
    make: Make, bootstrap_servers: str, topic: str, tmp_path: Path
) -> None:
    """The unknown message may stand below the offsets of the snapshot; the next start must still read it."""
    store = SnapshotFile(tmp_path / "snapshot")
    producer = make(snapshots=lambda _: store, snapshot_every=1)
    send(producer, topic, 1)
    before = store.load()
    made = producer.filter_of(topic)
    made.reserve(2)
    lose(bootstrap_servers, topic, 2, before=1)
    made.mark_unknown(2)
    send(producer, topic, 3, 4)
    log = producer._topics[topic].log
    assert log is not None
    log.save()
    again = make(snapshots=lambda _: store)
    assert again.last_sequence_id(topic) == 4, "2 was found"
    assert store.load() != before


def test_no_snapshot_is_made_while_an_unknown_number_is_sent_again(
    make: Make, bootstrap_servers: str, topic: str, tmp_path: Path
) -> None:
    """What was in doubt is still in doubt: a crash now must not hide that it is in the log."""
    store = SnapshotFile(tmp_path / "snapshot")
    producer = make(snapshots=lambda _: store, snapshot_every=1)
    send(producer, topic, 1)
    made = producer.filter_of(topic)
    made.reserve(2)
    lose(bootstrap_servers, topic, 2, before=1)
    made.mark_unknown(2)
    assert made.reserve(2) is State.UNKNOWN, "it is sent again"
    send(producer, topic, 3)
    log = producer._topics[topic].log
    assert log is not None
    log.save()
    again = make(snapshots=lambda _: store)
    assert again.last_sequence_id(topic) == 3
    assert again.produce(topic, b"2", sequence=2).duplicate


def test_a_snapshot_of_another_life_of_the_topic_is_refused(
    make: Make, bootstrap_servers: str, topic: str, tmp_path: Path
) -> None:
    send(make(snapshots=tmp_path), topic, 1, 2, 3)
    delete_topic(bootstrap_servers, topic)
    create_topic(bootstrap_servers, 3, name=topic)
    with pytest.raises(SnapshotCorrupted, match=r"topic id.*begin anew"):
        make(snapshots=tmp_path).last_sequence_id(topic)
    for snapshot in tmp_path.iterdir():
        snapshot.unlink()
    again = make(snapshots=tmp_path)
    send(again, topic, 1, 2, 3)
    assert values(bootstrap_servers, topic) == [1, 2, 3]


def test_a_snapshot_of_another_producer_is_refused(make: Make, topic: str, tmp_path: Path) -> None:
    shared = SnapshotFile(tmp_path / "shared")
    send(make(snapshots=lambda _: shared), topic, 1)
    with pytest.raises(SnapshotCorrupted, match="'files', not of 'others'"):
        make(snapshots=lambda _: shared, producer_name="others").last_sequence_id(topic)


def test_in_a_directory_each_producer_and_topic_has_a_snapshot(
    make: Make, bootstrap_servers: str, topic: str, tmp_path: Path
) -> None:
    other = create_topic(bootstrap_servers, 1)
    for name in ("a/b", "a"):
        producer = make(snapshots=tmp_path, producer_name=name)
        send(producer, topic, 1)
        send(producer, other, 1)
        producer.close()
    assert len(list(tmp_path.iterdir())) == 4
    assert make(snapshots=tmp_path, producer_name="a").last_sequence_id(topic) == 1


def test_the_longest_name_of_a_topic_has_snapshots(
    make: Make, bootstrap_servers: str, name: str, tmp_path: Path
) -> None:
    topics = [create_topic(bootstrap_servers, 1, name=f"{name}{'x' * (248 - len(name))}{n}") for n in range(2)]
    for topic in topics:
        send(make(snapshots=tmp_path), topic, 1, 2)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_log_that_ends_before_the_snapshot_is_refused(
    make: Make,
    bootstrap_servers: str,
    topic: str,
    tmp_path: Path,
) -> None:
    """As after an election of a replica that lacked them, or where the broker tells no ids of topics.

    One broker cannot lose messages on demand: the log of another topic stands for it.
    """
    store = SnapshotFile(tmp_path / "snapshot")
    send(make(snapshots=lambda _: store, snapshot_every=1), topic, *range(30))
    shorter = create_topic(bootstrap_servers, 3)
    content = unpack(recovery._KIND, store.load() or b"")
    known = describe({"bootstrap.servers": bootstrap_servers}, shorter)
    store.save(pack(recovery._KIND, {**content, "topic": shorter, "topic id": known.topic_id}))
    with pytest.raises(TailLost, match="log ends at 0"):
        make(snapshots=lambda _: store).last_sequence_id(shorter)


def test_a_snapshot_of_another_version_is_refused(make: Make, topic: str, tmp_path: Path) -> None:
    store = SnapshotFile(tmp_path / "snapshot")
    send(make(snapshots=lambda _: store), topic, 1)
    store.save((store.load() or b"").replace(b"snapshot 2\n", b"snapshot 1\n", 1))
    with pytest.raises(SnapshotCorrupted, match="another version"):
        make(snapshots=lambda _: store).last_sequence_id(topic)


def test_a_compacted_topic_is_refused(make: Make, bootstrap_servers: str) -> None:
    topic = create_topic(bootstrap_servers, 1, cleanup_policy="compact,delete")
    with pytest.raises(ConfigurationError, match="compacted"):
        make().produce(topic, b"x", sequence=1)


def test_names_of_others_are_not_kept(make: Make, bootstrap_servers: str, topic: str) -> None:
    for n in range(5):
        lose(bootstrap_servers, topic, n, before=-1, name=f"other-{n}")
    filled = SequenceFilter()
    send(make(dedup=filled), topic, 1)
    assert filled.dump() == (1, [])


def test_retention_past_the_snapshot_is_refused(make: Make, bootstrap_servers: str, topic: str, tmp_path: Path) -> None:
    store = SnapshotFile(tmp_path / "snapshot")
    send(make(snapshots=lambda _: store, snapshot_every=1), topic, *range(6))
    data = store.load()
    assert data is not None
    send(make(), topic, *range(6, 30))
    delete_all(bootstrap_servers, topic)
    store.save(data)
    with pytest.raises(TailLost, match=r"behind the snapshot of producer .* offsets \d+ to \d+"):
        make(snapshots=lambda _: store).last_sequence_id(topic)


@pytest.mark.parametrize("transactions", [True, False])
def test_retention_that_has_removed_what_is_known_is_no_matter(
    make: Make, bootstrap_servers: str, topic: str, tmp_path: Path, *, transactions: bool
) -> None:
    """A job that runs less often than retention: also the ends of its transactions are gone, and those of others."""
    for day in range(3):
        producer = make(snapshots=tmp_path, transactions=transactions)
        assert producer.last_sequence_id(topic) == 10 * day - 1
        send(producer, topic, *range(10 * day, 10 * day + 10))
        producer.close()
        delete_all(bootstrap_servers, topic)
    send(make(producer_name="other", accept_trimmed=True), topic, *range(10))
    idle = make(snapshots=tmp_path, transactions=transactions)
    assert idle.last_sequence_id(topic) == 29
    idle.close()
    delete_all(bootstrap_servers, topic)
    assert make(snapshots=tmp_path, transactions=transactions).last_sequence_id(topic) == 29


def test_what_others_lost_behind_a_snapshot_may_be_accepted(
    make: Make, bootstrap_servers: str, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A weekly job beside other producers, of a topic that keeps less than a week."""
    producer = make(snapshots=tmp_path)
    send(producer, topic, *range(10))
    producer.close()
    send(make(producer_name="other"), topic, *range(30))
    delete_all(bootstrap_servers, topic)
    with pytest.raises(TailLost, match="accept_trimmed=True goes on with what the snapshot knows"):
        make(snapshots=tmp_path).last_sequence_id(topic)
    accepting = make(snapshots=tmp_path, accept_trimmed=True)
    assert accepting.last_sequence_id(topic) == 9
    assert "nothing is taken to have been among the messages that retention has removed" in caplog.text
    accepting.close()
    assert make(snapshots=tmp_path).last_sequence_id(topic) == 9, "once is enough"


def test_what_is_in_doubt_behind_a_transaction_that_has_just_ended_is_looked_for(make: Make, topic: str) -> None:
    """The record that ends it may not be there yet: the log seems to end before the position behind it."""
    producer = make()
    for number in range(0, 40, 2):
        producer.produce(topic, b"%d" % number, sequence=number, partition=0).result(60)
        made = producer.filter_of(topic)
        made.reserve(number + 1)
        made.mark_unknown(number + 1)
        assert producer.resolve(topic).absent == 1


def test_a_trimmed_topic_without_a_snapshot_is_refused_unless_accepted(
    make: Make, bootstrap_servers: str, topic: str
) -> None:
    send(make(), topic, *range(30))
    delete_all(bootstrap_servers, topic)
    send(make(producer_name="other", accept_trimmed=True), topic, 1)
    lose(bootstrap_servers, topic, 30, before=29)
    with pytest.raises(TailLost, match="accept_trimmed"):
        make().last_sequence_id(topic)
    accepting = make(accept_trimmed=True)
    assert accepting.last_sequence_id(topic) == -1
    assert accepting.produce(topic, b"30", sequence=30).duplicate


def test_a_topic_without_any_message_of_ours_is_refused_once_it_was_trimmed(
    make: Make, bootstrap_servers: str, topic: str
) -> None:
    """Nothing tells a producer whose messages were all removed from one that has never sent any."""
    send(make(), topic, *range(30))
    delete_all(bootstrap_servers, topic)
    for name in ("files", "new"):
        with pytest.raises(TailLost, match="accept_trimmed"):
            make(producer_name=name).last_sequence_id(topic)
    new = make(producer_name="new", accept_trimmed=True)
    for n in range(30):
        new.produce(topic, b"%d" % n, partition=n % 3, sequence=n)
    new.flush(60)
    assert make(producer_name="new").last_sequence_id(topic) == 29, "back to its first message, in all partitions"


def delete_all(bootstrap_servers: str, topic: str) -> None:
    ends = ends_of({"bootstrap.servers": bootstrap_servers}, topic)
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    wanted = [TopicPartition(p.topic, p.number, offset) for p, offset in ends.items()]
    for future in admin.delete_records(wanted).values():
        future.result(60)


def test_a_message_without_a_number_is_refused(make: Make, topic: str) -> None:
    """Numbers that are drawn would deduplicate nothing: nobody can send one again."""
    producer = make()
    send(producer, topic, 5)
    with pytest.raises(KeyRefused, match="needs sequence="):
        producer.produce(topic, b"x")
    with pytest.raises(KeyRefused, match="needs sequence="):
        producer.produce_many(topic, [ProducerRecord(b"x")])


def test_a_name_is_drawn_and_can_be_read(make: Make, topic: str) -> None:
    one, two = make(producer_name=None), make(producer_name=None)
    assert one.producer_name != two.producer_name
    send(one, topic, 5)
    send(two, topic, 5)
    assert two.last_sequence_id(topic) == 5


def test_an_unknown_outcome_is_sent_again_under_its_number() -> None:
    nowhere = {"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 300, "log_level": 0}
    made = DedupProducer(nowhere, dedup=SequenceFilter(), producer_name="n", recover=False)
    with pytest.raises(OutcomeUnknown):
        made.produce("t", b"x", sequence=7).result(60)
    again = made.produce("t", b"x", sequence=7)
    assert (again.duplicate, again.may_repeat) == (False, True)
    with pytest.raises(OutcomeUnknown):
        again.result(60)
    made.close()


def test_an_open_transaction_hides_committed_messages_until_it_ends(
    bootstrap_servers: str, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader that stops at the end it is shown sees nothing. Ours waits for what the log holds, and logs that."""
    monkeypatch.setattr(tail, "_TOLD_SECONDS", 0.2)
    settings = {"bootstrap.servers": bootstrap_servers}
    other = Producer({**settings, "transactional.id": f"{topic}-other", "transaction.timeout.ms": 300_000})
    other.init_transactions(60)
    other.begin_transaction()
    other.produce(topic, b"-1", partition=0)
    other.flush(60)
    plain = Producer(settings)
    for n in range(10):
        plain.produce(topic, b"%d" % n, partition=0)
    assert plain.flush(60) == 0
    starts = {Partition(topic, n): 0 for n in range(3)}
    with pytest.raises(TailHidden, match="open"):
        list(read_tail(settings, topic, starts, seconds=15))  # less is over before a busy broker shows where the end is
    (told,) = (record for record in caplog.records if getattr(record, "action", "") == "waits_for_tail")
    assert told.getMessage().startswith(f"{topic}[0] shows nothing from offset 0 on, and its log ends at ")
    reading = read_tail(settings, topic, starts, seconds=60)
    other.abort_transaction(60)
    assert sorted(int(message.value() or b"") for message in reading) == list(range(10))


def test_reading_ends_behind_an_aborted_transaction(bootstrap_servers: str, topic: str) -> None:
    """The last offsets of the log are no messages."""
    settings = {"bootstrap.servers": bootstrap_servers}
    producer = Producer({**settings, "transactional.id": f"{topic}-t"})
    producer.init_transactions(60)
    for value, commit in ((b"1", True), (b"2", False)):
        producer.begin_transaction()
        for partition in range(3):
            producer.produce(topic, value, partition=partition)
        producer.flush(60)
        (producer.commit_transaction if commit else producer.abort_transaction)(60)
    assert [m.value() for m in read_tail(settings, topic, None, seconds=60)] == [b"1"] * 3


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ([(-1, 1), (1, 2), (2, 3)], (3, {})),
        ([(2, 3), (-1, 1), (1, 2)], (3, {})),
        ([(-1, 1), (1, 2), (3, 4), (4, 5)], (2, {4: 3, 5: 4})),
        ([(-1, 1), (1, 2), (1, 2), (2, 3)], (3, {})),
        ([(1, 3), (-1, 5)], (5, {})),
        ([(1, 2), (1, 3), (-1, 1)], (3, {})),
        ([], (-1, {})),
    ],
    ids=["in order", "partitions mixed", "one lost", "one doubled", "one overtaken", "two behind one", "nothing"],
)
def test_the_walk_along_a_log(log: list[tuple[int, int]], expected: tuple[int, dict[int, int]]) -> None:
    walk = Walk()
    for before, number in log:
        walk.see(Sent("p", before, number))
    assert walk.result() == expected


def test_what_a_walk_waits_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions are read in turns: the numbers of one wait for those of the others, and for no longer."""
    monkeypatch.setattr(recovery, "_WALKED", 100)
    walk = Walk()
    turns = [range(start + part, start + 60, 3) for start in range(0, 6000, 60) for part in (2, 0, 1)]
    for number in itertools.chain.from_iterable(turns):
        walk.see(Sent("p", number - 1, number))
        assert len(walk._above) <= 300
    assert walk.result() == (5999, {})


def test_of_many_producers_in_a_topic_few_numbers_wait() -> None:
    """One that overtook another makes those behind it wait: of each producer some, and not the rest of the topic."""
    walks = [Walk() for _ in range(50)]
    for walk in walks:
        for before, number in ((1, 2), (-1, 1), *((n - 1, n) for n in range(3, 5000))):
            walk.see(Sent("p", before, number))
    assert sum(len(walk._above) for walk in walks) <= 50 * 1000
    assert [walk.result() for walk in walks] == [(4999, {})] * 50


class Watching:
    """A log of sequences that notes what was unknown when it heard of acknowledged messages."""

    def __init__(self, made: SequenceFilter) -> None:
        self.made = made
        self.unknown: list[int] = []

    def confirmed(self, messages: object) -> None:
        self.unknown.append(self.made.stats().unknown)

    def save(self, *, is_clean: bool = False) -> None:
        pass


@pytest.mark.parametrize("order", [1, -1])
def test_the_doubts_of_a_batch_are_marked_before_its_confirmations(order: int) -> None:
    """Else a snapshot in between would place itself behind a message that is in the log and not in the filter.

    The reports are made by hand: no broker gives both in one batch on demand.
    """
    nowhere = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    made = SequenceFilter()
    producer = DedupProducer(nowhere, dedup=made, producer_name="n", recover=False)
    of_topic = producer._open("t")
    of_topic.log = watching = Watching(made)  # type: ignore[assignment]
    columns = Columns([1, 2], [b"1", b"2"], [None, None], {}, {})
    _, batch, places = of_topic.reserve_many(columns)
    for place in places[::order]:
        batch.report(place, None if place else KafkaError(KafkaError._MSG_TIMED_OUT), None)
    of_topic.settle()
    assert watching.unknown == [1]
    with pytest.raises(Undelivered, match="1 messages failed"):
        producer.close()


@pytest.mark.parametrize("interrupted", [None, "release_many", "mark_unknown_many"])
def test_a_second_attempt_that_failed_leaves_the_doubt_of_the_first(
    interrupted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if what is marked is marked again, because somebody interrupted behind that."""
    made = SequenceFilter()
    producer = DedupProducer(
        {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, dedup=made, producer_name="n", recover=False
    )
    of_topic = producer._open("t")
    made.reserve(1)
    made.mark_unknown(1)
    _, batch, places = of_topic.reserve_many(Columns([1, 2], [b"1", b"2"], [None, None], {}, {}))
    for place in places:
        batch.report(place, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None)
    with monkeypatch.context() as patch:
        if interrupted is not None:
            mark = getattr(made, interrupted)

            def interrupt(keys: list[int]) -> None:
                mark(keys)
                raise KeyboardInterrupt

            patch.setattr(made, interrupted, interrupt)
            with pytest.raises(KeyboardInterrupt):
                of_topic.settle()
    of_topic.settle()
    assert not made.is_settled(1)
    assert made.reserve_many([1, 2]) == [State.UNKNOWN, State.NEW]
    with pytest.raises(Undelivered, match="2 messages failed"):
        producer.close()


@pytest.mark.parametrize("is_idle", [False, True], ids=["frozen", "frozen for long"])
def test_a_predecessor_that_wakes_up_sends_nothing(
    make: Make, bootstrap_servers: str, topic: str, monkeypatch: pytest.MonkeyPatch, *, is_idle: bool
) -> None:
    """Its queue is full of what its successor has sent. After a minute it would make itself a new client."""
    zombie = make(commit_seconds=3600.0)
    send(zombie, topic, 1, 2)
    for number in range(3, 100):
        zombie.produce(topic, b"%d" % number, sequence=number)
    successor = make()
    assert successor.last_sequence_id(topic) == 2
    send(successor, topic, *range(3, 100))
    if is_idle:
        monkeypatch.setattr("exactly_once.publish.transactional._IDLE_SECONDS", 0.0)
    for _ in range(2):
        late = zombie.produce(topic, b"100", sequence=100)
        with pytest.raises(ProducerFenced):
            zombie.flush(60)
        assert late.outcome is Outcome.NOT_PERSISTED
    with pytest.raises(Undelivered):
        zombie.close()
    assert values(bootstrap_servers, topic) == list(range(1, 100))


def test_messages_that_have_waited_for_long_enough_are_published_by_produce_too(make: Make, topic: str) -> None:
    """As by an application that never polls: its first message would wait for thousands of others."""
    producer, numbers = make(commit_seconds=0.2), itertools.count()
    first = producer.produce(topic, b"x", sequence=next(numbers))

    def outcome() -> Outcome | None:
        producer.produce(topic, b"x", sequence=next(numbers))
        return first.outcome if first.done() else None

    assert until(outcome, 60, "the first to be published") is Outcome.DELIVERED


def test_a_client_that_is_replaced_goes_on_where_nobody_has_taken_over(
    make: Make, bootstrap_servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exactly_once.publish.transactional._IDLE_SECONDS", 0.0)
    producer = make()
    for number in range(3):
        send(producer, topic, number)
        lose(bootstrap_servers, topic, 7, before=-1, name="another")
    assert producer.last_sequence_id(topic) == 2


def test_a_refused_message_leaves_the_others_of_its_transaction(make: Make, bootstrap_servers: str, topic: str) -> None:
    """The client refuses it by itself: nothing of the others was sent with it."""
    producer = make()
    large = [producer.produce(topic, b"x" * 2_000_000 if n == 2 else b"%d" % n, sequence=n) for n in range(4)][2]
    with pytest.raises(Undelivered, match="1 messages failed"):
        producer.flush(60)
    assert large.outcome is Outcome.NOT_PERSISTED
    assert values(bootstrap_servers, topic) == [0, 1, 3]
    assert producer.last_sequence_id(topic) == 1


def test_what_is_no_message_leaves_the_others_of_its_transaction(
    make: Make, bootstrap_servers: str, topic: str
) -> None:
    producer = make()
    wrong: list[dict[str, Any]] = [{"value": 7}, {"value": "\ud800"}, {"headers": [("a", 5)]}, {"partition": 99}]
    bad = [producer.produce(topic, sequence=2 * n, **given) for n, given in enumerate(wrong)]
    good = [producer.produce(topic, b"%d" % n, sequence=2 * n + 1) for n in range(10, 13)]
    with pytest.raises(Undelivered, match=r"4 messages failed.*; 0 to"):
        producer.flush(60)
    assert {delivery.outcome for delivery in bad} == {Outcome.NOT_PERSISTED}
    assert {delivery.outcome for delivery in good} == {Outcome.DELIVERED}
    assert values(bootstrap_servers, topic) == [10, 11, 12]


def test_without_transactions_recovery_waits_for_replicas_after_an_unclean_end(
    make: Make, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That there are several replicas is pretended: with one broker nothing lags behind, and nothing is waited for.

    One may stay in sync for 1.5 times what is set; the controller has a second for it.
    """

    def pretend(*arguments: Any) -> Any:
        return describe(*arguments)._replace(replicas=3, lag_seconds=0.1)

    monkeypatch.setattr(recovery, "describe", pretend)
    waits = []
    for is_clean in (False, True, True):
        caplog.clear()
        producer = make(snapshots=tmp_path, transactions=False)
        send(producer, topic, 1)
        waits.append("waiting 1.15 s (by replica.lag.time.max.ms)" in caplog.text)
        if is_clean:
            producer.close()
    assert waits == [True, True, False], "nothing is known; it was not closed; it was"


def test_transactions_after_a_life_without_them_wait_for_replicas_too(
    make: Make, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing fences what was sent without. Replicas are pretended as above."""

    def pretend(*arguments: Any) -> Any:
        return describe(*arguments)._replace(replicas=3, lag_seconds=0.1)

    monkeypatch.setattr(recovery, "describe", pretend)
    waits = []
    for transactions in (True, False, True, True):
        caplog.clear()
        send(make(snapshots=tmp_path, transactions=transactions), topic, 1)
        waits.append("waiting 1.15 s (by replica.lag.time.max.ms)" in caplog.text)
    assert waits == [False, True, True, False], "by what the life before was"
