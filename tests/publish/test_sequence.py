"""SequenceFilter: the maps of pushed and persisted numbers, with the faults that others met."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
from confluent_kafka import Message

from exactly_once import ConfigurationError
from exactly_once._model import Partition
from exactly_once.publish import KeyRefused, LimitReached, SequenceFilter, State
from exactly_once.publish import filter as base
from exactly_once.publish import sequence as module
from exactly_once.publish.recovery import SequenceLog
from exactly_once.publish.snapshot import unpack

NEW, IN_FLIGHT, UNKNOWN, DUPLICATE = State.NEW, State.IN_FLIGHT, State.UNKNOWN, State.DUPLICATE


def publish(made: SequenceFilter, *numbers: int) -> None:
    for number in numbers:
        assert made.reserve(number) is NEW
        made.confirm(number)


def test_pushed_rises_with_the_reservation_and_persisted_with_the_confirmation() -> None:
    made = SequenceFilter()
    assert (made.pushed, made.persisted) == (-1, -1)
    made.reserve(5)
    assert (made.pushed, made.persisted) == (5, -1)
    made.confirm(5)
    assert (made.pushed, made.persisted) == (5, 5)


def test_pushed_falls_back_to_persisted_on_failure() -> None:
    made = SequenceFilter()
    publish(made, 1, 2, 3)
    made.reserve_many([4, 5])
    made.release_many([4, 5])
    assert made.pushed == 3
    assert made.reserve_many([4, 5]) == [NEW, NEW]


def test_ids_with_holes_as_of_a_file() -> None:
    made = SequenceFilter()
    publish(made, 0, 117, 1200, 1 << 62)
    assert made.reserve(117) is DUPLICATE
    assert made.persisted == 1 << 62


def test_a_message_that_fails_behind_an_acknowledged_one_is_not_lost() -> None:
    """With several partitions 5 is acknowledged while 4 fails. The retry of 4 must be new, that of 5 must not."""
    made = SequenceFilter()
    publish(made, 1, 2, 3)
    made.reserve_many([4, 5, 6])
    made.confirm(5)
    made.release(4)
    assert made.persisted == 3
    assert made.reserve_many([4, 5, 6]) == [NEW, DUPLICATE, IN_FLIGHT]
    made.confirm_many([4, 6])
    assert made.persisted == 6


def test_a_failed_number_stays_new_behind_higher_ones_that_came_later() -> None:
    made = SequenceFilter()
    made.reserve(4)
    made.release(4)
    publish(made, 5, 6)
    assert made.reserve(4) is NEW


def test_a_batch_of_old_and_new_numbers_lets_the_new_ones_through() -> None:
    """Pulsar 6273: the highest number of a batch decided for all of it."""
    made = SequenceFilter()
    publish(made, 1, 2, 3)
    made.reserve(4)
    assert made.reserve_many([2, 3, 4, 5]) == [DUPLICATE, DUPLICATE, IN_FLIGHT, NEW]


def test_one_filter_serves_one_producer() -> None:
    """The numbers of another one would count as duplicates, and be lost."""
    made = SequenceFilter(max_outstanding=1)
    with contextlib.suppress(ZeroDivisionError), made.serving("misspelt", "t"):
        1 / 0  # noqa: B018 - as of a recovery that fails
    for _ in range(2):
        with made.serving("files", "t"):
            pass
    for producer, topic in (("other", "t"), ("files", "other")):
        with pytest.raises(ConfigurationError, match="serves producer 'files' in 't'"), made.serving(producer, topic):
            pass
    with pytest.raises(LimitReached, match="producer 'files' has 0 numbers"):
        made.reserve_many([1, 2])


def test_a_number_that_was_never_pushed_cannot_be_given_up() -> None:
    """Those below it, which are still to come, would count as duplicates."""
    made = SequenceFilter()
    made.reserve(1)
    for number in (2, 9):
        with pytest.raises(KeyRefused, match="the last one pushed is 1"):
            made.abandon(number)
    made.confirm(1)
    assert made.reserve(2) is NEW


def test_a_number_given_up_lets_persisted_rise() -> None:
    made = SequenceFilter()
    made.reserve_many([1, 2])
    made.confirm(2)
    made.release(1)
    assert made.persisted == -1
    made.abandon(1)
    assert made.persisted == 2


def test_outstanding_numbers_are_bounded_and_the_error_names_the_oldest() -> None:
    made = SequenceFilter(max_outstanding=3)
    made.reserve_many([1, 2, 3])
    made.release(1)
    with pytest.raises(LimitReached, match="the oldest is 1"):
        made.reserve(4)
    with pytest.raises(LimitReached):
        made.reserve_many([4, 5])
    made.confirm_many([2, 3])
    assert made.reserve(1) is NEW
    made.confirm(1)
    assert made.reserve(4) is NEW


def test_nothing_grows_with_the_numbers_seen() -> None:
    made = SequenceFilter()
    made.reserve(0)
    for n in range(1, 50_000):
        made.reserve(n)
        made.confirm(n - 1)
    assert len(made._numbers) < 10_000
    assert not made._confirmed
    assert len(made._open) == 1


def test_what_is_loaded_again_is_what_was_persisted_and_nothing_in_flight() -> None:
    made = SequenceFilter()
    publish(made, 1, 2, 3)
    made.reserve_many([4, 5, 6])
    made.confirm(5)
    again = SequenceFilter()
    persisted, above = made.dump()
    again.load(persisted, dict(above))
    assert again.persisted == 3
    assert again.reserve_many([3, 4, 5, 6]) == [DUPLICATE, NEW, DUPLICATE, NEW]


def test_a_number_below_the_last_pushed_one_is_sent_again_also_at_the_limit() -> None:
    """It is among those that are counted: refused, nothing but giving it up would free the filter."""
    made = SequenceFilter(max_outstanding=3)
    made.reserve_many([1, 5, 9])
    made.reserve(3)
    made.release(1)
    assert made.reserve(1) is NEW
    made.confirm_many([1, 3, 5, 9])
    assert made.persisted == 9


def test_a_number_that_may_be_in_the_log_is_not_settled_while_it_is_sent_again() -> None:
    made = SequenceFilter()
    made.reserve_many([1, 2, 3])
    made.confirm_many([1, 3])
    assert made.is_settled(1)
    assert not made.is_settled(3)
    made.mark_unknown(2)
    for change in (made.reserve, made.release, made.reserve):  # whose failure leaves the doubt of the first attempt
        assert (made.is_settled(1), made.is_settled(2)) == (True, False)
        change(2)
    made.confirm(2)
    assert made.is_settled(made.last_pushed)


def interrupt(call: Callable[[], object], line: int) -> bool:
    """Call, and raise KeyboardInterrupt before so many lines of the filter have run; tell whether there were so many.

    Not where a lock is taken and given back: no code in Python is safe there.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        name = frame.f_code.co_filename
        if name not in (base.__file__, module.__file__):
            return None
        if event == "line" and "with self._lock" not in linecache.getline(name, frame.f_lineno):
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


STEPS: tuple[tuple[str, list[int]], ...] = (
    ("reserve_many", [1, 2, 3]),
    ("confirm_many", [2]),
    ("mark_unknown_many", [1]),
    ("reserve_many", [1, 4]),
    ("confirm_many", [3, 4]),
    ("confirm_many", [1]),
    ("reserve_many", [7]),
    ("confirm_many", [7]),
    ("reserve_many", [8, 9]),
    ("release_many", [8]),
    ("reserve_many", [8]),
    ("confirm_many", [9]),
    ("confirm_many", [8]),
)


@pytest.mark.parametrize("step", range(len(STEPS)), ids=[f"{n}-{name}" for n, (name, _) in enumerate(STEPS)])
def test_what_is_interrupted_at_any_line_is_done_by_the_next_attempt(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COMPACT_AT", 1)
    line, is_interrupted = 0, True
    while is_interrupted:
        line += 1
        made, confirmed, unknown = SequenceFilter(), set[int](), set[int]()
        for number, (name, numbers) in enumerate(STEPS):
            call = getattr(made, name)
            if number == step:
                is_interrupted = interrupt(partial(call, numbers), line)
                assert name == "confirm_many" or not any(map(made.is_settled, unknown)), line
            answers = call(numbers)
            if name == "confirm_many":
                confirmed.update(numbers)
            unknown = (unknown | set(numbers) if name == "mark_unknown_many" else unknown) - confirmed
            assert name != "reserve_many" or DUPLICATE not in answers, line
            assert confirmed.issuperset(n for n in (1, 2, 3, 4, 7, 8, 9) if n <= made.persisted), line
            assert not any(map(made.is_settled, unknown)), line
        assert (made.persisted, made.pushed) == (9, 9), line
        assert made.is_settled(made.last_pushed), line
        assert (made.stats().in_flight, len(made._numbers) - made._head) == (0, 0), line
        assert made.reserve(10) is NEW
        made.confirm(10)
        assert made.persisted == 10, line
    assert line > 3, "nothing was interrupted"


class Kept:
    """A store in memory."""

    data = b""

    def load(self) -> bytes | None:
        return self.data or None

    def save(self, data: bytes) -> None:
        self.data = data


def test_a_snapshot_does_not_go_past_a_message_that_is_on_its_way() -> None:
    """What is acknowledged later may stand below what was acknowledged first, and a killed producer reads on there."""
    numbers, kept = SequenceFilter(), Kept()
    log = SequenceLog({}, "t", numbers, producer="p", store=kept, every=1)

    def acknowledged(number: int, offset: int) -> None:
        numbers.confirm(number)
        log.confirmed([Message(topic="t", partition=0, offset=offset, value=b"")])

    numbers.reserve_many([0, 1, 2])
    acknowledged(2, 12)
    assert log.positions == {}
    numbers.reserve_many([3])
    acknowledged(0, 10)
    acknowledged(1, 11)
    assert log.positions == {Partition("t", 0): 13}, "all that was on its way with 2 is known"
    acknowledged(3, 13)
    assert log.positions == {Partition("t", 0): 14}
    numbers.reserve_many([4, 5])
    numbers.mark_unknown(4)
    acknowledged(5, 15)
    assert log.positions == {Partition("t", 0): 14}
    numbers.release(4)
    log.save()
    assert log.positions == {Partition("t", 0): 16}
    assert unpack("sequences of a producer", kept.data)["positions"] == [[0, 16]]
