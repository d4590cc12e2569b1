"""Intervals: what one chain has *not* seen, as a sorted list. No I/O.

An interval (lower, upper] leaves ``lower`` out and holds ``upper``. Its lower end is a number that was seen, its upper
end one that is known to exist because a later message named it as its predecessor; the last interval has no end.
Numbers are ints or pairs (timestamp, sequence_no); both compare, and infinity compares with both.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import Any

from .errors import InconsistentChain

Number = int | tuple[int, int]


class Intervals:
    """The unseen intervals of one chain. The filter's lock protects it."""

    __slots__ = ("floor", "infinity", "lowers", "uppers")

    def __init__(self, infinity: Any, floor: Any, pairs: Iterable[tuple[Any, Any]] = ()) -> None:
        self.infinity = infinity
        # The lower end of what this chain may have: everything above it is unseen at first.
        self.floor = floor
        given = list(pairs) or [(floor, infinity)]
        self.lowers = [lower for lower, _ in given]
        self.uppers = [upper for _, upper in given]

    @classmethod
    def of_ints(cls, first: int | None = None) -> Intervals:
        """Make those of a chain of ints, the lowest of which is ``first``; None where that is not known."""
        return cls(math.inf, -math.inf if first is None else first - 1)

    @classmethod
    def of_pairs(cls) -> Intervals:
        """Make those of a chain of (timestamp, sequence_no)."""
        return cls((math.inf, math.inf), (-math.inf, -math.inf))

    def find(self, number: Any) -> int:
        """Return the place of the interval that holds ``number``, or -1 if it was seen."""
        lowers = self.lowers
        if number > lowers[-1]:
            return len(lowers) - 1
        place = bisect_left(lowers, number) - 1
        return place if place >= 0 and number <= self.uppers[place] else -1

    def check(self, place: int, number: Any, previous: Any) -> None:
        """Refuse a reference that contradicts what was seen.

        :raises InconsistentChain: when ``previous`` is not below ``number``, or a seen number lies between them.
        """
        if previous >= number:
            raise InconsistentChain(
                f"the message {number} names {previous} as the one before it, which is not below it"
            )
        if previous < self.lowers[place]:
            raise InconsistentChain(
                f"the message {number} names {previous} as the one before it, but {self.lowers[place]} "
                "was seen in between"
            )

    def check_seen(self, number: Any, previous: Any) -> None:
        """Refuse a reference of a seen number across one that is known to exist, and is missing.

        :raises InconsistentChain: if that is so.
        """
        place = bisect_left(self.lowers, number) - 1
        if place >= 0 and previous < self.uppers[place]:
            raise InconsistentChain(
                f"the message {number} names {previous} as the one before it, but {self.uppers[place]} lies in between"
            )

    def divides(self, place: int, number: Any, previous: Any) -> bool:
        """Tell whether marking makes one interval more."""
        return bool(previous > self.lowers[place] and number < self.uppers[place])

    def mark(self, place: int, number: Any, previous: Any) -> None:
        """Take note that ``number`` was seen, and that nothing lies between it and ``previous``."""
        has_left = previous > self.lowers[place]
        has_right = number < self.uppers[place]
        if has_left and has_right:  # division
            self.lowers.insert(place + 1, number)
            self.uppers.insert(place, previous)
        elif has_right:  # left contraction
            self.lowers[place] = number
        elif has_left:  # right contraction
            self.uppers[place] = previous
        else:  # full contraction
            del self.lowers[place], self.uppers[place]

    def gaps(self) -> int:
        """Return how many intervals there are before the last one."""
        return len(self.lowers) - 1

    def drop_lowest(self) -> None:
        """Count everything in the lowest interval as seen."""
        del self.lowers[0], self.uppers[0]

    def join_lowest(self) -> None:
        """Count what was seen between the two lowest intervals as unseen."""
        del self.lowers[1], self.uppers[0]

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return (lower, upper] of every interval, lowest first."""
        return list(zip(self.lowers, self.uppers, strict=True))


# So many references of a chain are kept beside those of its gaps: 10 kB, and further back than messages overtake.
_LINKS = 100


class Links:
    """What the latest messages of a chain named as the one before them, by number. The filter's lock protects it.

    Intervals do not tell a message that was seen from one that cannot exist, because a reference jumped over it. Kept
    for good are the references to messages that are missing: whoever names one of those once more is another message.
    """

    __slots__ = ("numbers", "previous")

    def __init__(self, pairs: Iterable[tuple[Any, Any]] = ()) -> None:
        # Oldest first.
        self.previous: dict[Any, Any] = dict(pairs)
        self.numbers = sorted(self.previous)

    def check(self, number: Any, previous: Any) -> None:
        """Refuse a message that contradicts another one.

        :raises InconsistentChain: when it named another one before, or lies where a reference says that nothing is.
        """
        before = self.previous.get(number)
        if before is not None:
            if before != previous:
                raise InconsistentChain(f"the message {number} names {previous}, and named {before}, as the one before")
            return
        place = bisect_right(self.numbers, number)
        above = self.numbers[place] if place < len(self.numbers) else None
        if above is not None and self.previous[above] < number:
            raise InconsistentChain(
                f"the message {number} names {previous} as the one before it, but {above} names "
                f"{self.previous[above]}, so that nothing lies in between"
            )
        if place and previous < self.numbers[place - 1]:
            raise InconsistentChain(
                f"the message {number} names {previous} as the one before it, but {self.numbers[place - 1]} "
                "was seen in between"
            )

    def add(self, number: Any, previous: Any, intervals: Intervals) -> None:
        """Keep a reference, and let the oldest go whose predecessor was seen."""
        if number not in self.previous:
            insort(self.numbers, number)
        self.previous[number] = previous
        while len(self.numbers) > _LINKS + intervals.gaps() + 1:
            oldest = next(iter(self.previous))
            named = self.previous.pop(oldest)
            gap = intervals.find(named)
            if gap >= 0 and intervals.uppers[gap] == named:
                self.previous[oldest] = named  # once more round: there are fewer of these than are kept
            else:
                del self.numbers[bisect_left(self.numbers, oldest)]


def just_below(number: Any) -> Any:
    """Return the highest number below this one."""
    if isinstance(number, int):
        return number - 1
    timestamp, sequence_no = number
    return (timestamp, sequence_no - 1) if sequence_no > 0 else (timestamp - 1, math.inf)
