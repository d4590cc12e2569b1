"""WindowFilter: exact within its window, and nothing grows beyond it."""

from __future__ import annotations

import math
import random
from uuid import UUID, uuid4

import pytest

from exactly_once import ConfigurationError
from exactly_once.publish import State, WindowFilter
from exactly_once.publish.keys import GivenKey
from exactly_once.publish.window import Generations


class Clock:
    """A clock that stands until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def send(made: WindowFilter, key: bytes | str | int | UUID | bytearray) -> State:
    """Reserve and, where it is new, confirm."""
    state = made.reserve(key)
    if state is State.NEW:
        made.confirm(key)
    return state


def test_the_last_keys_are_all_recognised_wherever_the_generations_turn() -> None:
    made = WindowFilter(keys=100)
    for n in range(1000):
        assert send(made, n) is State.NEW
        for earlier in range(max(0, n - 99), n + 1):
            assert made.reserve(earlier) is State.DUPLICATE


def test_memory_is_bounded_by_two_windows() -> None:
    made = WindowFilter(keys=100)
    for n in range(10_000):
        send(made, n)
        assert made.stats().confirmed <= 200
    stats = made.stats()
    assert stats.evicted + stats.confirmed == 10_000


def test_batches_larger_than_the_window_keep_their_last_keys() -> None:
    made = WindowFilter(keys=10)
    keys = list(range(1000))
    made.reserve_many(keys)
    made.confirm_many(keys)
    assert set(made.reserve_many(keys[-10:])) == {State.DUPLICATE}


def test_keys_of_the_last_seconds_are_recognised() -> None:
    clock = Clock()
    made = WindowFilter(seconds=10, clock=clock)
    rng = random.Random(1)  # seed 1
    sent: dict[int, float] = {}
    for n in range(3000):
        clock.now += rng.random() * (15 if n % 100 == 0 else 0.2)
        send(made, n)
        sent[n] = clock.now
        for earlier in rng.sample(sorted(sent), min(5, len(sent))):
            if clock.now - sent[earlier] < 10:
                assert made.reserve(earlier) is State.DUPLICATE


def test_an_unknown_key_stays_as_long_as_a_confirmed_one() -> None:
    clock = Clock()
    made = WindowFilter(seconds=600, clock=clock)
    clock.now += 590
    made.reserve("a")
    clock.now += 300
    made.mark_unknown("a")
    for _ in range(3):
        clock.now += 180
        made.reserve("b")
    assert made.reserve("a") is State.UNKNOWN


def test_unknown_keys_leave_by_age_too() -> None:
    clock = Clock()
    made = WindowFilter(seconds=10, clock=clock)
    made.reserve("a")
    made.mark_unknown("a")
    clock.now += 100
    assert (made.stats().unknown, made.stats().evicted) == (0, 1)
    assert made.reserve("a") is State.NEW


def test_of_unknown_keys_the_latest_are_kept() -> None:
    made = WindowFilter(keys=2)
    for key in "abc":
        made.reserve(key)
        made.mark_unknown(key)
    assert (made.stats().unknown, made.stats().evicted) == (2, 1)
    assert made.reserve_many("abc") == [State.NEW, State.UNKNOWN, State.UNKNOWN]


def test_a_window_of_one_key_is_one() -> None:
    made = WindowFilter(keys=1)
    assert (send(made, "a"), send(made, "b"), made.reserve("b")) == (State.NEW, State.NEW, State.DUPLICATE)
    assert (made.writes_key, WindowFilter(keys=1, writes_key=True).writes_key) == (False, True)


def test_of_a_batch_with_a_seen_key_the_others_are_new() -> None:
    made = WindowFilter(keys=10)
    send(made, "a")
    assert made.reserve_many(["b", "a", "c"]) == [State.NEW, State.DUPLICATE, State.NEW]


def test_a_key_stays_for_its_seconds_from_its_confirmation_on() -> None:
    clock = Clock()
    made = WindowFilter(seconds=10, clock=clock)
    made.reserve("slow")
    clock.now += 95
    made.confirm("slow")
    clock.now += 9
    assert made.reserve("slow") is State.DUPLICATE


def test_a_released_key_takes_no_room() -> None:
    made = WindowFilter(keys=10)
    made.reserve("a")
    made.release("a")
    assert not made._open


def test_a_window_without_an_end_keeps_all() -> None:
    clock = Clock()
    made = WindowFilter(seconds=math.inf, clock=clock)
    send(made, "a")
    clock.now += 1e9
    assert made.reserve("a") is State.DUPLICATE


def test_keys_leave_by_time_also_when_nothing_happens_meanwhile() -> None:
    clock = Clock()
    made = WindowFilter(seconds=10, clock=clock)
    send(made, "a")
    clock.now += 1000
    assert made.reserve("a") is State.NEW
    assert made.stats().confirmed == 0


def test_a_reservation_does_not_leave_by_age() -> None:
    made = WindowFilter(keys=10)
    made.reserve("slow")
    made.reserve("unsure")
    made.mark_unknown("unsure")
    for n in range(1000):
        send(made, n)
    assert made.reserve("slow") is State.IN_FLIGHT
    assert made.reserve("unsure") is State.UNKNOWN


def test_keys_of_different_types_are_different() -> None:
    made = WindowFilter(keys=100)
    number = uuid4()
    keys: list[GivenKey] = [b"1", "1", 1, number, str(number), number.bytes, number.int >> 65]
    assert made.reserve_many(keys) == [State.NEW] * len(keys)


def test_a_caller_may_change_its_bytearray_afterwards() -> None:
    """A filter that kept the caller's buffer would take a new key for a seen one."""
    made = WindowFilter(keys=100)
    key = bytearray(b"one")
    send(made, key)
    key[:] = b"two"
    assert made.reserve(b"two") is State.NEW
    assert made.reserve(b"one") is State.DUPLICATE


def test_a_subclass_of_str_counts_by_its_text() -> None:
    class Odd(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 1

    made = WindowFilter(keys=100)
    assert send(made, Odd("a")) is State.NEW
    assert made.reserve(Odd("b")) is State.NEW
    assert made.reserve("a") is State.DUPLICATE


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "either keys= or seconds="),
        ({"keys": 1, "seconds": 1}, "either keys= or seconds="),
        ({"keys": 0}, "positive, not 0"),
        ({"seconds": -1}, "positive, not -1"),
    ],
)
def test_a_window_that_is_none_is_refused(options: dict[str, int], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        WindowFilter(**options)  # type: ignore[arg-type]


def test_generations_keep_few_keys_and_none_for_longer_than_two_of_their_times() -> None:
    """After that a database may have dropped the key, and a new message of that key must not be lost."""
    now, added = 0.0, dict[int, float]()
    made = Generations[int](5, 10.0, lambda: now)
    rng = random.Random(7)
    for key in range(2000):
        now += rng.expovariate(0.5)
        made.age()
        made.add((key,))
        added[key] = now
        kept = made.younger | made.older
        assert len(kept) <= 10
        assert all(now - added[other] <= 20 for other in kept)
