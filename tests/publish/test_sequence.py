"""SequenceFilter: the maps of pushed and persisted numbers, with the faults that others met."""

from __future__ import annotations

import pytest

from exactly_once.publish import KeyRefused, LimitReached, Sequence, SequenceFilter, SnapshotCorrupted, State

NEW, IN_FLIGHT, UNKNOWN, DUPLICATE = State.NEW, State.IN_FLIGHT, State.UNKNOWN, State.DUPLICATE


def s(number: int, producer: str = "files") -> Sequence:
    return Sequence(producer, number)


def publish(made: SequenceFilter, *numbers: int) -> None:
    for number in numbers:
        assert made.reserve(s(number)) is NEW
        made.confirm(s(number))


def test_pushed_rises_with_the_reservation_and_persisted_with_the_confirmation() -> None:
    made = SequenceFilter()
    assert (made.pushed("files"), made.persisted("files")) == (-1, -1)
    made.reserve(s(5))
    assert (made.pushed("files"), made.persisted("files")) == (5, -1)
    made.confirm(s(5))
    assert (made.pushed("files"), made.persisted("files")) == (5, 5)


def test_pushed_falls_back_to_persisted_on_failure() -> None:
    made = SequenceFilter()
    publish(made, 1, 2, 3)
    made.reserve_many([s(4), s(5)])
    made.release_many([s(4), s(5)])
    assert made.pushed("files") == 3
    assert made.reserve_many([s(4), s(5)]) == [NEW, NEW]


def test_ids_with_holes_as_of_a_file() -> None:
    made = SequenceFilter()
    publish(made, 0, 117, 1200, 1 << 62)
    assert made.reserve(s(117)) is DUPLICATE
    assert made.persisted("files") == 1 << 62


def test_a_message_that_fails_behind_an_acknowledged_one_is_not_lost() -> None:
    """With several partitions 5 is acknowledged while 4 fails. The retry of 4 must be new, that of 5 must not."""
    made = SequenceFilter()
    publish(made, 1, 2, 3)
    made.reserve_many([s(4), s(5), s(6)])
    made.confirm(s(5))
    made.release(s(4))
    assert made.persisted("files") == 3
    assert made.reserve_many([s(4), s(5), s(6)]) == [NEW, DUPLICATE, IN_FLIGHT]
    made.confirm_many([s(4), s(6)])
    assert made.persisted("files") == 6


def test_a_failed_number_stays_new_behind_higher_ones_that_came_later() -> None:
    made = SequenceFilter()
    made.reserve(s(4))
    made.release(s(4))
    publish(made, 5, 6)
    assert made.reserve(s(4)) is NEW


def test_a_batch_of_old_and_new_numbers_lets_the_new_ones_through() -> None:
    """Pulsar 6273: the highest number of a batch decided for all of it."""
    made = SequenceFilter()
    publish(made, 1, 2, 3)
    made.reserve(s(4))
    assert made.reserve_many([s(2), s(3), s(4), s(5)]) == [DUPLICATE, DUPLICATE, IN_FLIGHT, NEW]


def test_a_failed_send_before_the_confirmation_is_not_taken_for_a_duplicate() -> None:
    """Pulsar 5218: marked before it was persisted, so the retry was lost."""
    made = SequenceFilter()
    made.reserve(s(1))
    made.release(s(1))
    assert made.reserve(s(1)) is NEW


def test_producers_do_not_mix() -> None:
    made = SequenceFilter()
    publish(made, 7)
    assert made.reserve(s(7, "other")) is NEW
    assert made.reserve_many([s(7), s(8, "other"), s(8)]) == [DUPLICATE, NEW, NEW]


def test_a_number_that_was_never_pushed_cannot_be_given_up() -> None:
    """Those below it, which are still to come, would count as duplicates."""
    made = SequenceFilter()
    made.reserve(s(1))
    for number in (2, 9):
        with pytest.raises(KeyRefused, match="the last one pushed is 1"):
            made.abandon(s(number))
    made.confirm(s(1))
    assert made.reserve(s(2)) is NEW


def test_a_number_given_up_lets_persisted_rise() -> None:
    made = SequenceFilter()
    made.reserve_many([s(1), s(2)])
    made.confirm(s(2))
    made.release(s(1))
    assert made.persisted("files") == -1
    made.abandon(s(1))
    assert made.persisted("files") == 2


def test_outstanding_numbers_are_bounded_and_the_error_names_the_oldest() -> None:
    made = SequenceFilter(max_outstanding=3)
    made.reserve_many([s(1), s(2), s(3)])
    made.release(s(1))
    with pytest.raises(LimitReached, match="the oldest is 1"):
        made.reserve(s(4))
    with pytest.raises(LimitReached):
        made.reserve_many([s(4), s(5)])
    made.confirm_many([s(2), s(3)])
    assert made.reserve(s(1)) is NEW
    made.confirm(s(1))
    assert made.reserve(s(4)) is NEW


def test_nothing_grows_with_the_numbers_seen() -> None:
    made = SequenceFilter()
    made.reserve(s(0))
    for n in range(1, 50_000):
        made.reserve(s(n))
        made.confirm(s(n - 1))
    producer = made._producers["files"]
    assert len(producer.numbers) < 10_000
    assert not producer.states


def test_idle_producers_are_aged_out_and_counted() -> None:
    now = [0.0]
    made = SequenceFilter(max_producers=2, idle_seconds=60, clock=lambda: now[0])
    publish(made, 1)
    made.reserve(s(1, "busy"))
    with pytest.raises(LimitReached, match="max_producers"):
        made.reserve(s(1, "third"))
    now[0] = 61
    assert made.reserve(s(1, "third")) is NEW
    assert made.stats().evicted == 1
    assert made.reserve(s(1, "busy")) is IN_FLIGHT, "a producer with messages in flight is not idle"


def test_a_busy_producer_is_not_idle() -> None:
    now = [0.0]
    made = SequenceFilter(max_producers=2, idle_seconds=60, clock=lambda: now[0])
    publish(made, 1)
    now[0] = 50.0
    made.reserve(s(1, "second"))
    made.confirm(s(1, "second"))
    publish(made, 2)
    now[0] = 61.0
    with pytest.raises(LimitReached):
        made.reserve(s(1, "third"))


def test_a_snapshot_restores_what_was_persisted_and_nothing_in_flight() -> None:
    made = SequenceFilter()
    publish(made, 1, 2, 3)
    made.reserve_many([s(4), s(5), s(6)])
    made.confirm(s(5))
    again = SequenceFilter()
    again.load_bytes(made.to_bytes())
    assert again.persisted("files") == 3
    assert again.reserve_many([s(3), s(4), s(5), s(6)]) == [DUPLICATE, NEW, DUPLICATE, NEW]


def test_a_snapshot_that_was_cut_or_altered_is_refused_whole() -> None:
    made = SequenceFilter()
    publish(made, 1, 2, 3)
    data = made.to_bytes()
    for broken in [data[:n] for n in range(len(data))] + [
        data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :] for n in range(len(data))
    ]:
        again = SequenceFilter()
        with pytest.raises(SnapshotCorrupted):
            again.load_bytes(broken)
        assert again.reserve(s(1)) is NEW
