"""What every filter must do: the four states, batches, threads, refused keys."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from exactly_once.publish import KeyRefused, State
from tests.publish.subjects import Subject

NEW, IN_FLIGHT, UNKNOWN, DUPLICATE = State.NEW, State.IN_FLIGHT, State.UNKNOWN, State.DUPLICATE


def test_a_key_is_new_then_in_flight_then_a_duplicate(subject: Subject) -> None:
    made, key = subject.make(), subject.key(0)
    assert made.reserve(key) is NEW
    assert made.reserve(key) is IN_FLIGHT
    made.confirm(key)
    assert made.reserve(key) is DUPLICATE
    assert made.reserve(key) is DUPLICATE


def test_a_forgotten_key_is_new_again(subject: Subject) -> None:
    """A send that surely failed must be possible again, or its message is lost."""
    made, key = subject.make(), subject.key(0)
    made.reserve(key)
    made.release(key)
    assert made.reserve(key) is NEW


def test_a_forgotten_key_is_new_again_also_after_a_later_one_was_confirmed(subject: Subject) -> None:
    made = subject.make()
    made.reserve(subject.key(0))
    made.reserve(subject.key(1))
    made.confirm(subject.key(1))
    made.release(subject.key(0))
    assert made.reserve(subject.key(0)) is NEW
    assert made.reserve(subject.key(1)) is DUPLICATE


def test_a_doubted_key_is_handed_out_once_as_unknown(subject: Subject) -> None:
    made, key = subject.make(), subject.key(0)
    made.reserve(key)
    made.mark_unknown(key)
    assert made.reserve(key) is UNKNOWN
    assert made.reserve(key) is IN_FLIGHT, "the first caller holds the reservation"
    made.confirm(key)
    assert made.reserve(key) is DUPLICATE


def test_forgetting_a_second_attempt_does_not_undo_the_doubt_about_the_first(subject: Subject) -> None:
    made, key = subject.make(), subject.key(0)
    made.reserve(key)
    made.mark_unknown(key)
    made.reserve(key)
    made.release(key)
    assert made.reserve(key) is UNKNOWN


def test_forgetting_an_unknown_key_makes_it_absent(subject: Subject) -> None:
    """Somebody has read the log: it is not there."""
    made, key = subject.make(), subject.key(0)
    made.reserve(key)
    made.mark_unknown(key)
    made.release(key)
    assert made.reserve(key) is NEW


def test_a_confirmed_key_stays_confirmed(subject: Subject) -> None:
    made, key = subject.make(), subject.key(0)
    made.reserve(key)
    made.confirm(key)
    made.release(key)
    made.mark_unknown(key)
    made.confirm(key)
    assert made.reserve(key) is DUPLICATE


def test_settling_a_key_that_nobody_reserved_does_nothing(subject: Subject) -> None:
    made, key = subject.make(), subject.key(0)
    made.release(key)
    made.mark_unknown(key)
    assert made.reserve(key) is NEW


def test_a_key_found_in_the_log_is_a_duplicate_without_a_reservation(subject: Subject) -> None:
    made, key = subject.make(), subject.key(0)
    made.confirm(key)
    assert made.reserve(key) is DUPLICATE


def test_a_batch_answers_in_order_and_mixes_old_and_new(subject: Subject) -> None:
    made = subject.make()
    key = subject.key
    assert made.reserve_many([key(0), key(1)]) == [NEW, NEW]
    made.confirm_many([key(0)])
    made.mark_unknown_many([key(1)])
    assert made.reserve_many([key(0), key(1), key(2), key(2), key(3)]) == [DUPLICATE, UNKNOWN, NEW, IN_FLIGHT, NEW]
    made.release_many([key(2), key(3)])
    assert made.reserve_many([key(3), key(2), key(1)]) == [NEW, NEW, IN_FLIGHT]


def test_an_empty_batch_is_nothing(subject: Subject) -> None:
    made = subject.make()
    assert made.reserve_many([]) == []
    made.confirm_many([])
    made.release_many([])
    made.mark_unknown_many([])


def test_large_batches_are_like_single_keys(subject: Subject) -> None:
    made = subject.make()
    keys = [subject.key(n) for n in range(3000)]
    assert made.reserve_many(keys[:2000]) == [NEW] * 2000
    made.confirm_many(keys[:1000])
    states = Counter(made.reserve_many(keys))
    assert states == {DUPLICATE: 1000, IN_FLIGHT: 1000, NEW: 1000}


def test_stats_count_what_is_held(subject: Subject) -> None:
    made = subject.make()
    made.reserve_many([subject.key(n) for n in range(5)])
    made.confirm(subject.key(0))
    made.mark_unknown(subject.key(1))
    made.reserve(subject.key(0))
    stats = made.stats()
    assert (stats.in_flight, stats.unknown, stats.duplicates, stats.evicted) == (3, 1, 1, 0)
    assert stats.confirmed in (1, -1)


def test_a_bad_key_is_refused_and_marks_nothing(subject: Subject) -> None:
    made = subject.make()
    for bad in subject.bad:
        with pytest.raises(KeyRefused):
            made.reserve(bad)
        with pytest.raises(KeyRefused):
            made.reserve_many([subject.key(0), bad])
        with pytest.raises(KeyRefused):
            made.confirm(bad)
    assert made.reserve(subject.key(0)) is NEW


def test_of_many_threads_one_gets_the_reservation(subject: Subject) -> None:
    made = subject.make()
    keys = [subject.key(n) for n in range(300)]
    threads = 8
    barrier = threading.Barrier(threads)

    def run(number: int) -> Counter[State]:
        barrier.wait(60)
        # Half of them in batches: both forms must exclude each other.
        if number % 2:
            return Counter(made.reserve_many(keys))
        return Counter(made.reserve(key) for key in keys)

    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(run, range(threads)), Counter[State]())
    assert total == {NEW: len(keys), IN_FLIGHT: (threads - 1) * len(keys)}


def test_threads_that_retry_failures_confirm_each_key_once(subject: Subject) -> None:
    """Whoever holds a reservation fails every other time; in the end each key was confirmed by one holder."""
    made = subject.make()
    keys = [subject.key(n) for n in range(100)]
    threads = 6
    barrier = threading.Barrier(threads)

    def run(number: int) -> Counter[object]:
        mine: Counter[object] = Counter()
        barrier.wait(60)
        left, turn = set(range(len(keys))), number
        while left:
            for n in sorted(left):
                state = made.reserve(keys[n])
                if state is DUPLICATE:
                    left.discard(n)
                elif state is NEW:
                    turn += 1
                    if turn % 2:
                        made.release(keys[n])
                    else:
                        mine[n] += 1
                        made.confirm(keys[n])
        return mine

    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(run, range(threads)), Counter[object]())
    assert total == dict.fromkeys(range(len(keys)), 1)
