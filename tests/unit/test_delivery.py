"""FetchBuffer: nothing is lost, nothing comes twice, the order of a partition is kept, whatever happens between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import KafkaError, Message
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from exactly_once._model import Partition, Row, Span
from exactly_once.consumer.buffer import FetchBuffer, Sent
from exactly_once.consumer.partitions import Ownership

A0, A1, B0 = Partition("a", 0), Partition("a", 1), Partition("b", 0)
MANY = 10**9


def message(partition: Partition, offset: int, *, size: int = 1) -> Message:
    return Message(topic=partition.topic, partition=partition.number, offset=offset, value=b"v" * size, leader_epoch=7)


def error(code: int) -> Message:
    return Message(topic="a", partition=0, offset=3, error=KafkaError(code))


def at(messages: list[Message]) -> list[tuple[str | None, int | None, int | None]]:
    return [(m.topic(), m.partition(), m.offset()) for m in messages]


def own(ownership: Ownership, partition: Partition, offset: int = 0) -> None:
    """Bring a partition to where its messages flow."""
    row = Row(partition=partition, next_offset=offset, owner_token=uuid4(), owner_epoch=1)
    ownership.assigned([partition])
    ownership.acquired([row])
    ownership.started(partition, row)
    ownership.positioned([partition])


def unexpected(_: Message) -> None:
    pytest.fail("no error event was sent")


def delivering(*partitions: Partition, on_error: Callable[[Message], None] = unexpected, **kw: Any) -> FetchBuffer:
    ownership = Ownership()
    for partition in partitions:
        own(ownership, partition)
    return FetchBuffer(ownership, on_error=on_error, **kw)


def test_messages_come_out_as_they_went_in_with_their_ends() -> None:
    delivery = delivering(A0, A1, B0)
    given = [message(A0, 0), message(A0, 1), message(B0, 0), message(A1, 0), message(A0, 2)]
    delivery.add(given)
    batch, spans = delivery.next_batch(MANY, MANY)
    assert batch == given
    assert spans == {A0: Span(0, 3, 7), A1: Span(0, 1, 7), B0: Span(0, 1, 7)}
    assert (delivery.gaps, delivery.dropped, delivery.attempt) == (0, 0, 1)
    assert delivery.next_batch(MANY, MANY)[0] == []


@pytest.mark.parametrize("is_again", [False, True])
@pytest.mark.parametrize("offset", [1, 20])
def test_what_was_fetched_before_the_partition_was_positioned_elsewhere_is_dropped(
    offset: int, *, is_again: bool
) -> None:
    """Whether it waits for the first time or comes again: below where the ledger stands now, and above."""
    ownership = Ownership()
    own(ownership, A0)
    delivery = FetchBuffer(ownership, on_error=unexpected)
    delivery.add([message(A0, 0), message(A0, 1)])
    if is_again:
        delivery.requeue(delivery.next_batch(MANY, MANY)[0])
    own(ownership, A0, offset)
    delivery.discard()
    assert delivery.waiting == 0
    delivery.add([message(A0, offset)])
    assert at(delivery.next_batch(MANY, MANY)[0]) == [("a", 0, offset)]


def test_error_events_go_to_on_error_and_are_never_delivered() -> None:
    errors: list[Message] = []
    delivery = delivering(A0, on_error=errors.append)
    events = [error(KafkaError._PARTITION_EOF), error(KafkaError._ALL_BROKERS_DOWN)]
    delivery.add([events[0], message(A0, 0), events[1], message(A0, 1)])
    assert errors == events
    assert at(delivery.next_batch(MANY, MANY)[0]) == [("a", 0, 0), ("a", 0, 1)]
    assert delivery.dropped == 0


def test_nothing_is_taken_behind_what_cannot_be_read_and_everything_before_it() -> None:
    """librdkafka means to go on behind a batch whose checksum is wrong; the offset would move past it."""
    ownership = Ownership()
    own(ownership, A0)
    own(ownership, A1)
    delivery = FetchBuffer(ownership, on_error=lambda _: ownership.unreadable(A0, "damaged"))
    damaged = error(KafkaError._BAD_MSG)
    delivery.add([message(A0, 0), message(A0, 1), damaged, message(A0, 4), message(A1, 0)])
    delivery.add([message(A0, 5), message(A1, 1)])
    batch, spans = delivery.next_batch(MANY, MANY)
    assert at(batch) == [("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("a", 1, 1)]
    assert spans[A0].end == 2
    assert ownership.states[A0].position == 2
    assert (delivery.dropped, delivery.not_owned) == (2, 0)


@pytest.mark.parametrize(
    ("offsets", "gaps"), [([0, 1, 2], 0), ([0, 3], 1), ([0, 2, 3], 1), ([5, 6, 9], 2), ([0, 3, 4, 9], 2)]
)
def test_a_gap_of_the_log_is_counted_and_passed(offsets: list[int], gaps: int) -> None:
    delivery = delivering(A0)
    delivery.add([message(A0, offset) for offset in offsets])
    assert [m.offset() for m in delivery.next_batch(MANY, MANY)[0]] == offsets
    assert delivery.gaps == gaps


def test_a_gap_between_two_fetches_is_counted_too() -> None:
    delivery = delivering(A0)
    delivery.add([message(A0, 0)])
    delivery.add([message(A0, 5)])
    assert delivery.gaps == 1
    assert delivery.ownership.states[A0].gaps == {5: 1}


def test_what_was_fetched_before_is_dropped_and_counted() -> None:
    delivery = delivering(A0)
    delivery.add([message(A0, 0), message(A0, 1), message(A0, 2)])
    delivery.add([message(A0, 1), message(A0, 2), message(A0, 3)])
    assert [m.offset() for m in delivery.next_batch(MANY, MANY)[0]] == [0, 1, 2, 3]
    assert (delivery.dropped, delivery.gaps) == (2, 0)


def test_messages_of_partitions_that_are_not_ours_are_dropped_and_counted() -> None:
    delivery = delivering(A0)
    delivery.add([message(A1, 0), message(A0, 0), message(B0, 0)])
    assert at(delivery.next_batch(MANY, MANY)[0]) == [("a", 0, 0)]
    assert (delivery.dropped, delivery.not_owned) == (2, 2)


def test_nothing_is_counted_before_anything_came() -> None:
    delivery = delivering(A0)
    assert (delivery.attempt, delivery.gaps, delivery.dropped, delivery.not_owned) == (0, 0, 0, 0)
    assert (delivery.waiting, delivery.keeps, delivery.repeats, delivery.to_pause) == (0, False, False, set())


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("queue_bytes", [0, 50])
def test_a_batch_is_bounded_by_count_and_by_bytes(queue_bytes: int, *, keep: bool) -> None:
    delivery = delivering(A0, queue_bytes=queue_bytes)
    delivery.add([message(A0, offset, size=10) for offset in range(6)], keep=keep)
    assert [m.offset() for m in delivery.next_batch(2, 49)[0]] == [0, 1]
    assert [m.offset() for m in delivery.next_batch(9, 20)[0]] == [2, 3], "just what is allowed"
    assert [m.offset() for m in delivery.next_batch(9, 20)[0]] == [4, 5]


@pytest.mark.parametrize(("options", "count"), [({}, 6), ({"can_outgrow": True}, 2)])
def test_a_batch_is_weighed_only_where_it_may_be_larger_than_what_the_client_holds(
    options: dict[str, Any], count: int
) -> None:
    delivery = delivering(A0, queue_bytes=20, **options)
    delivery.add([message(A0, offset, size=10) for offset in range(6)])
    assert len(delivery.next_batch(9, 20)[0]) == count


def test_keys_count_as_bytes_too() -> None:
    delivery = delivering(A0)
    delivery.add([Message(topic="a", partition=0, offset=n, key=b"k" * 6, value=b"v" * 4) for n in range(3)])
    assert [m.offset() for m in delivery.next_batch(9, 29)[0]] == [0, 1]


def test_a_message_larger_than_the_bound_comes_alone() -> None:
    delivery = delivering(A0)
    delivery.add([message(A0, 0, size=100), message(A0, 1, size=100)])
    assert [m.offset() for m in delivery.next_batch(9, 10)[0]] == [0]
    assert [m.offset() for m in delivery.next_batch(9, 10)[0]] == [1]


def test_a_batch_that_is_put_back_comes_first_alone_and_counts_its_attempts() -> None:
    delivery = delivering(A0)
    delivery.add([message(A0, 0), message(A0, 1)])
    batch, _ = delivery.next_batch(MANY, MANY)
    delivery.add([message(A0, 2)])
    delivery.requeue(batch)
    assert delivery.waiting == 3
    assert delivery.next_batch(MANY, MANY) == (batch, {A0: Span(0, 2, 7)})
    assert delivery.attempt == 2
    assert delivery.next_batch(MANY, MANY)[1] == {A0: Span(2, 3, 7)}
    assert delivery.attempt == 1


def test_a_batch_that_is_put_back_may_come_in_parts() -> None:
    delivery = delivering(A0)
    delivery.add([message(A0, offset) for offset in range(4)])
    delivery.requeue(delivery.next_batch(MANY, MANY)[0])
    assert delivery.next_batch(2, MANY)[1] == {A0: Span(0, 2, 7)}
    assert delivery.next_batch(2, MANY)[1] == {A0: Span(2, 4, 7)}


def test_attempts_are_counted_of_each_message_and_told_of_the_one_with_most() -> None:
    delivery = delivering(A0)
    delivery.add([message(A0, offset) for offset in range(4)])
    attempts = []
    for count in (MANY, 2, 2, MANY, 3):
        batch, _ = delivery.next_batch(count, MANY)
        attempts.append(delivery.attempt)
        delivery.requeue(batch)
    assert attempts == [1, 2, 3, 4, 5]
    for attempt in (6, 4):
        delivery.next_batch(2, MANY)
        assert delivery.attempt == attempt
    delivery.add([message(A0, 4)])
    delivery.requeue(delivery.next_batch(MANY, MANY)[0])
    assert (delivery.next_batch(MANY, MANY)[1], delivery.attempt) == ({A0: Span(4, 5, 7)}, 2)


def test_what_was_kept_is_handed_out_for_the_first_time_behind_what_came_again() -> None:
    delivery = delivering(A0)
    delivery.add([message(A0, 0)])
    delivery.requeue(delivery.next_batch(MANY, MANY)[0])
    delivery.add([message(A0, 1)], keep=True)
    attempts = []
    for _ in range(3):
        batch, _ = delivery.next_batch(MANY, MANY)
        attempts.append((batch[0].offset(), delivery.attempt))
        if attempts == [(0, 2), (1, 1)]:
            delivery.requeue(batch)
    assert attempts == [(0, 2), (1, 1), (1, 2)]


def test_all_that_waits_can_be_dropped() -> None:
    delivery = delivering(A0)
    delivery.add([message(A0, 0)])
    again, _ = delivery.next_batch(MANY, MANY)
    delivery.add([message(A0, 1)])
    delivery.requeue(again)
    delivery.drop_all()
    assert (delivery.waiting, delivery.repeats) == (0, False)
    delivery.add([message(A0, 2)])
    delivery.drop_all()
    assert delivery.next_batch(MANY, MANY) == ([], {})


def test_only_what_is_not_ours_any_more_is_dropped() -> None:
    delivery = delivering(A0, A1)
    delivery.add([message(A0, 0), message(A1, 0)])
    delivery.ownership.revoked([A0])
    delivery.discard()
    batch, spans = delivery.next_batch(MANY, MANY)
    assert (at(batch), spans) == ([("a", 1, 0)], {A1: Span(0, 1, 7)})


def test_two_fetches_come_with_the_ends_of_both() -> None:
    delivery = delivering(A0, A1)
    delivery.add([message(A0, 0)])
    delivery.add([message(A1, 0)])
    assert delivery.next_batch(MANY, MANY)[1] == {A0: Span(0, 1, 7), A1: Span(0, 1, 7)}


def test_the_leader_epoch_is_that_of_the_last_message() -> None:
    delivery = delivering(A0)
    delivery.add([Message(topic="a", partition=0, offset=n, value=b"v", leader_epoch=n) for n in range(3)])
    assert [delivery.next_batch(2, MANY)[1] for _ in range(2)] == [{A0: Span(0, 2, 1)}, {A0: Span(2, 3, 2)}]


def test_a_part_of_a_fetch_comes_with_its_own_ends() -> None:
    delivery = delivering(A0, A1)
    delivery.add([message(A0, 0), message(A0, 1), message(A1, 0)])
    assert delivery.next_batch(1, MANY)[1] == {A0: Span(0, 1, 7)}
    assert delivery.next_batch(MANY, MANY)[1] == {A0: Span(1, 2, 7), A1: Span(0, 1, 7)}


def test_a_part_that_is_put_back_comes_before_the_rest() -> None:
    delivery = delivering(A0)
    delivery.add([message(A0, offset) for offset in range(4)])
    delivery.requeue(delivery.next_batch(MANY, MANY)[0])
    delivery.requeue(delivery.next_batch(2, MANY)[0])
    assert [m.offset() for m in delivery.next_batch(MANY, MANY)[0]] == [0, 1, 2, 3]


def test_what_was_revoked_meanwhile_is_not_put_back() -> None:
    ownership = Ownership()
    own(ownership, A0)
    own(ownership, A1)
    delivery = FetchBuffer(ownership, on_error=unexpected)
    delivery.add([message(A0, 0), message(A1, 0)])
    batch, _ = delivery.next_batch(MANY, MANY)
    ownership.revoked([A0])
    delivery.requeue(batch)
    assert at(delivery.next_batch(MANY, MANY)[0]) == [("a", 1, 0)]


def test_with_one_topic_its_name_is_not_asked_of_each_message() -> None:
    delivery = delivering(A0, A1)
    delivery.only_topic = "a"
    delivery.add([message(A0, 0), message(A1, 0), message(A0, 1)])
    assert delivery.next_batch(MANY, MANY)[1] == {A0: Span(0, 2, 7), A1: Span(0, 1, 7)}


def test_what_is_kept_comes_in_turns_and_in_order() -> None:
    delivery = delivering(A0, A1, B0)
    delivery.add([message(A0, 0)])
    delivery.add([*(message(A0, offset) for offset in range(1, 5)), message(A1, 0), message(A1, 1)], keep=True)
    assert delivery.to_pause == {A0, A1}
    turns = [at(delivery.next_batch(1, MANY)[0]) for _ in range(2)]
    delivery.add([message(B0, 0)])  # which was not paused
    assert delivery.to_pause == {A0, A1, B0}
    turns += [at(delivery.next_batch(2, MANY)[0]) for _ in range(3)]
    assert turns == [
        [("a", 0, 0)],
        [("a", 1, 0)],
        [("a", 0, 1), ("a", 0, 2)],
        [("a", 1, 1), ("b", 0, 0)],
        [("a", 0, 3), ("a", 0, 4)],
    ]
    assert delivery.to_pause == set()
    assert not delivery.keeps
    assert delivery.waiting == 0
    assert delivery.next_batch(1, MANY) == ([], {})


def test_no_more_is_kept_than_the_client_holds() -> None:
    """Of large messages, and of small ones, which take memory beside what is in them."""
    for size, count in ((6000, 2), (1, 20)):
        delivery = delivering(A0, A1, queue_bytes=10_000)
        delivery.add([message(A0, offset, size=size) for offset in range(count)], keep=True)
        assert delivery.to_pause is None
        delivery.next_batch(1, MANY)
        assert delivery.to_pause == {A0}


@pytest.mark.parametrize(("queue_bytes", "to_pause"), [(1, None), (5009, None), (5010, {A0})])
def test_a_kept_message_counts_half_a_kilobyte_beside_what_is_in_it(queue_bytes: int, to_pause: Any) -> None:
    delivery = delivering(A0, A1, queue_bytes=queue_bytes)
    delivery.add([message(A0, offset) for offset in range(10)], keep=True)
    assert delivery.to_pause == to_pause


def test_what_was_kept_of_a_partition_that_is_gone_takes_no_memory() -> None:
    """Or nothing would be fetched any more, as if enough were kept."""
    delivery = delivering(A0, A1, queue_bytes=10_000)
    delivery.add([message(A0, 0, size=6000), message(A1, 0, size=3000), message(A1, 1)], keep=True)
    assert (delivery.to_pause, delivery.waiting) == (None, 3)
    delivery.ownership.revoked([A0])
    delivery.discard()
    assert delivery.to_pause == {A1}
    delivery.drop_all()
    assert not delivery.keeps
    assert delivery.waiting == 0
    for size, to_pause in ((9500, {A1}), (9501, None)):
        delivery.add([message(A1, delivery.ownership.states[A1].position, size=size)], keep=True)
        assert delivery.to_pause == to_pause, "what was dropped counts no more"
        delivery.drop_all()


class Interleavings(RuleBasedStateMachine):
    """Fetching, units and trouble in any order, against a model that only counts what was applied."""

    partitions = (A0, A1, B0)

    @initialize(holes=st.sets(st.integers(0, 200)), only_owned=st.booleans())
    def begin(self, holes: set[int], *, only_owned: bool) -> None:
        self.log = {p: [o for o in range(200) if (o + p.number) not in holes] for p in self.partitions}
        self.ownership = Ownership()
        self.errors: list[Message] = []
        self.delivery = FetchBuffer(self.ownership, on_error=self.errors.append)
        self.position = dict.fromkeys(self.partitions, 0)
        self.ledger = dict.fromkeys(self.partitions, 0)
        self.applied: dict[Partition, list[int]] = {p: [] for p in self.partitions}
        self.unit: list[Message] = []
        self.advances: list[Any] = []
        for partition in self.partitions[: 2 if only_owned else 3]:
            own(self.ownership, partition)

    @rule(data=st.data(), with_error=st.booleans(), repeat=st.booleans(), keep=st.booleans())
    def fetch(self, data: st.DataObject, *, with_error: bool, repeat: bool, keep: bool) -> None:
        fetched = []
        # Once each: within one call the client gives the messages of a partition in rising order.
        for partition in data.draw(st.lists(st.sampled_from(self.partitions), unique=True)):
            start = max(0, self.position[partition] - 2 * repeat)
            run = [o for o in self.log[partition] if o >= start][: data.draw(st.integers(0, 4))]
            fetched += [message(partition, offset, size=offset % 5) for offset in run]
            self.position[partition] = max([self.position[partition], *(o + 1 for o in run)])
        if with_error:
            fetched.insert(len(fetched) // 2, error(KafkaError._PARTITION_EOF))
        self.delivery.add(fetched, keep=keep)

    @precondition(lambda self: not self.unit)
    @rule(count=st.integers(1, 6), size=st.integers(1, 12))
    def take(self, count: int, size: int) -> None:
        self.unit, spans = self.delivery.next_batch(count, size)
        assert len(self.unit) <= count
        assert sum(map(len, self.unit)) <= size or len(self.unit) == 1
        assert all(m.error() is None for m in self.unit)
        self.advances = self.ownership.hand_out(spans)

    @precondition(lambda self: self.unit)
    @rule()
    def commit(self) -> None:
        for m in self.unit:
            self.applied[Partition(str(m.topic()), m.partition() or 0)].append(m.offset() or 0)
        self.ledger |= {a.partition: a.next_offset for a in self.advances}
        self.ownership.committed(self.advances)
        self.unit = []

    @precondition(lambda self: self.unit)
    @rule()
    def abort(self) -> None:
        self.ownership.aborted(self.advances)
        self.delivery.requeue(self.unit)
        self.unit = []

    @precondition(lambda self: not self.unit)
    @rule()
    def poll_raised(self) -> None:
        self.ownership.invalidate_all()
        self.delivery.discard()
        self._place()

    @precondition(lambda self: not self.unit)
    @rule(partition=st.sampled_from(partitions))
    def revoked_and_assigned_again(self, partition: Partition) -> None:
        self.ownership.revoked([partition])
        self.delivery.discard()
        own(self.ownership, partition, self.ledger[partition])
        self.position[partition] = self.ledger[partition]

    @precondition(lambda self: not self.unit)
    @rule(partition=st.sampled_from(partitions))
    def revoked(self, partition: Partition) -> None:
        self.ownership.revoked([partition])
        self.delivery.discard()

    @invariant()
    def applied_is_the_log_up_to_the_ledger(self) -> None:
        for partition in getattr(self, "log", ()):
            below = [o for o in self.log[partition] if o < self.ledger[partition]]
            assert self.applied[partition] == below

    def teardown(self) -> None:
        """Whatever happened: what is owned can still be read to its end."""
        if not hasattr(self, "log"):
            return
        if self.unit:
            self.abort()
        self.poll_raised()
        for partition in self.ownership.states:
            self.delivery.add([message(partition, o) for o in self.log[partition] if o >= self.position[partition]])
        while self.delivery.waiting:
            self.unit, spans = self.delivery.next_batch(50, MANY)
            self.advances = self.ownership.hand_out(spans)
            self.commit()
        assert all(self.applied[p] == self.log[p] for p in self.ownership.states)

    def _place(self) -> None:
        targets = self.ownership.to_position()
        self.position |= {p: h.next_offset for p, h in targets.items()}
        self.ownership.positioned(targets)


Interleavings.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestInterleavings = Interleavings.TestCase


def test_dead_letters_of_a_batch_cost_one_look_through_it_together() -> None:
    """A mock, because only the looks count: a hundred in a batch of 10,000 took longer than storing the others."""

    class Counted(list[Message]):
        looks = 0

        def __iter__(self) -> Iterator[Message]:
            self.looks += 1
            return super().__iter__()

    batch = Counted(Message(topic="t", partition=i % 2, offset=i) for i in range(100))
    sent = Sent(batch)
    for number in range(2, 100):
        assert sent.before(batch[number]) == number - 2
        assert sent.of(batch[number]).offset() == number
    assert sent.before(batch[0]) is None
    other = Message(topic="t", partition=7, offset=9)
    assert (sent.of(other), sent.before(other)) == (other, None)
    assert batch.looks < 10
