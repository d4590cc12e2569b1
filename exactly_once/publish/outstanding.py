"""Outstanding: the numbers of one producer between pushed and persisted. No I/O.

``persisted`` only rises over numbers that are confirmed without a gap among those that were pushed: with several
partitions a later number may be acknowledged while an earlier one fails, and the retry of that one must not look
like a duplicate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from enum import Enum

from .protocol import State

_COMPACT_AT = 4096


class Odd(Enum):
    """What a number is that is not simply in flight."""

    CONFIRMED = "acknowledged, with an earlier number still open"
    FAILED = "surely not in the log; may be pushed again"
    UNKNOWN = "may be in the log"
    TAINTED = "in flight again after an attempt that may be in the log"


_AGAIN = {
    None: (State.IN_FLIGHT, None),
    Odd.CONFIRMED: (State.DUPLICATE, Odd.CONFIRMED),
    Odd.FAILED: (State.NEW, None),
    Odd.UNKNOWN: (State.UNKNOWN, Odd.TAINTED),
    Odd.TAINTED: (State.IN_FLIGHT, Odd.TAINTED),
}
"""The answer to pushing a number again, and what the number is then."""


class Outstanding:
    """The numbers of one producer. The filter's lock protects it."""

    __slots__ = ("befores", "head", "numbers", "odd", "persisted", "pushed", "used_at")

    def __init__(self, persisted: int = -1, above: Mapping[int, int] | None = None) -> None:
        self.persisted = persisted
        """Every number up to this one that was ever pushed is in the log."""
        self.befores = dict(above or {})
        """Of numbers that an earlier life got into the log: the one that it had pushed before each.

        What lies between that one and persisted was lost in a crash, so persisted must not rise over the gap.
        """
        self.numbers: list[int] = sorted(self.befores)
        """Sorted; those before ``head`` are done with."""
        self.head = 0
        self.odd: dict[int, Odd] = dict.fromkeys(self.numbers, Odd.CONFIRMED)
        self.pushed = self.numbers[-1] if self.numbers else persisted
        """The highest number that was ever pushed, failed or not."""
        self.used_at = 0.0

    def push_again(self, number: int) -> State:
        """Answer for a number above ``persisted`` and not above ``pushed``."""
        place = bisect_left(self.numbers, number, self.head)
        if place == len(self.numbers) or self.numbers[place] != number:
            # Lost before a restart, or out of order; it was never acknowledged, so it is new.
            self.numbers.insert(place, number)
            return State.NEW
        state, odd = _AGAIN[self.odd.pop(number, None)]
        if odd is not None:
            self.odd[number] = odd
        return state

    def confirm(self, number: int) -> None:
        """Take note that a number is in the log."""
        if number <= self.persisted:
            return
        place = bisect_left(self.numbers, number, self.head)
        if place == len(self.numbers) or self.numbers[place] != number:
            self.numbers.insert(place, number)
            self.pushed = max(self.pushed, number)
        self.odd[number] = Odd.CONFIRMED
        while self.head < len(self.numbers):
            first = self.numbers[self.head]
            if self.odd.get(first) is not Odd.CONFIRMED or self.befores.get(first, -1) > self.persisted:
                break
            self.persisted = first
            del self.odd[first]
            self.befores.pop(first, None)
            self.head += 1
        self.compact()

    def release(self, number: int) -> None:
        """Take note that a number is surely not in the log."""
        if not self.is_open(number):
            return
        # It stays, and persisted does not rise over it: else its retry behind a higher number would be a duplicate.
        self.odd[number] = Odd.UNKNOWN if self.odd.get(number) is Odd.TAINTED else Odd.FAILED

    def mark_unknown(self, number: int) -> None:
        """Take note that nobody knows whether a number is in the log."""
        if self.is_open(number) and self.odd.get(number) is not Odd.FAILED:
            self.odd[number] = Odd.UNKNOWN

    def is_open(self, number: int) -> bool:
        """Tell whether a number was pushed and is not acknowledged."""
        place = bisect_left(self.numbers, number, self.head)
        found = place < len(self.numbers) and self.numbers[place] == number
        return found and self.odd.get(number) is not Odd.CONFIRMED

    def before(self, number: int) -> int:
        """Return the number that was pushed before this one, or the last persisted one."""
        if number in self.befores:
            return self.befores[number]
        place = bisect_left(self.numbers, number, self.head)
        return self.numbers[place - 1] if place > self.head else self.persisted

    def above(self) -> dict[int, int]:
        """Return the numbers that are acknowledged above ``persisted``, and the one pushed before each."""
        return {n: self.before(n) for n in sorted(self.odd) if self.odd[n] is Odd.CONFIRMED}

    def count(self) -> int:
        """Return how many numbers are kept."""
        return len(self.numbers) - self.head

    def standing(self) -> int:
        """Return the highest number that was pushed and did not fail: pushed falls back on a failure."""
        for number in reversed(self.numbers[self.head :]):
            if self.odd.get(number) is not Odd.FAILED:
                return number
        return self.persisted

    def compact(self) -> None:
        """Drop what is done with, now and then."""
        if self.head == len(self.numbers):
            self.numbers.clear()
            self.head = 0
        elif self.head >= _COMPACT_AT and 2 * self.head >= len(self.numbers):
            del self.numbers[: self.head]
            self.head = 0
