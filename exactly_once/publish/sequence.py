"""SequenceFilter: of one producer's numbers, what was pushed and what is persisted. No I/O.

``persisted`` only rises over numbers that are confirmed without a gap among those that were pushed: with several
partitions a later number may be acknowledged while an earlier one fails, and the retry of that one must not look
like a duplicate.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import lt

from exactly_once.errors import ConfigurationError
from exactly_once.kafka.kinds import check_kinds

from .errors import KeyRefused, LimitReached
from .filter import MemoryFilter, State
from .keys import INT64

# So many numbers that are done with are dropped together: one at a time, each would move all that follow.
_COMPACT_AT = 4096


class SequenceFilter(MemoryFilter[int, int]):
    """Recognises the numbers of one producer, which only go up, with holes: ``reserve(4711)``.

    NEW above everything pushed; DUPLICATE up to the last persisted one; IN_FLIGHT in between, where the caller
    tries again later. A number that fails may be pushed again, also after higher ones were acknowledged. Memory is
    one entry per message in flight. It never takes a new number for a seen one, provided that the numbers rise: a
    number that is first used after a higher one was persisted counts as a duplicate. Each producer name and topic needs
    a filter of its own.

    Thread-safe. ``docs/publishing.md`` says what it promises after a failed send, a crash, beside a second process.
    """

    takes = "sequence"
    writes_key = True

    def __init__(self, *, max_outstanding: int = 1_000_000) -> None:
        check_kinds(SequenceFilter.__init__, locals())
        super().__init__()
        self._max_outstanding = max_outstanding
        # Whose numbers these are, and in which topic, once a producer uses it.
        self._serves: tuple[str, str] | None = None
        self.load(-1, {})

    @contextlib.contextmanager
    def serving(self, producer: str, topic: str) -> Iterator[None]:
        """Take the numbers of one producer in one topic only, from the block on; one that fails takes none.

        :raises ConfigurationError: when it has those of another: these would look like duplicates.
        """
        with self._lock:
            before = self._serves
            if before not in (None, (producer, topic)):
                raise ConfigurationError(
                    f"this SequenceFilter serves producer {before[0]!r} in {before[1]!r}; give {producer!r} in "
                    f"{topic!r} one of its own: dedup=lambda topic: SequenceFilter()"
                )
            self._serves = producer, topic
        try:
            yield
        except BaseException:
            self._serves = before
            raise

    def load(self, persisted: int, above: Mapping[int, int]) -> None:
        """Begin with what is persisted, and what is in the log above that, with the number pushed before each."""
        with self._lock:
            # Every number up to this one that was ever pushed is in the log.
            self._persisted = persisted
            # Of numbers that an earlier life got into the log: the one that it had pushed before each.
            #
            # What lies between that one and persisted was lost in a crash, so persisted must not rise over the gap.
            self._predecessors = dict(above)
            # Those above ``_persisted`` that were pushed, sorted; those before ``_head`` are done with. One that surely
            # failed stays, and persisted does not rise over it: else its retry behind a higher one was a duplicate.
            self._numbers = sorted(above)
            self._head = 0
            # Those of them that are in the log; the others are in ``_open``, or failed.
            self._confirmed = set(above)
            self._open.clear()
            self._unknown.clear()

    def dump(self) -> tuple[int, list[tuple[int, int]]]:
        """Return what :meth:`load` takes, as plain data; what is in flight is none of it."""
        with self._lock:
            return self._persisted, [(number, self._predecessor(number)) for number in sorted(self._confirmed)]

    def reserve_many(self, keys: Iterable[int]) -> list[State]:
        """Push several numbers, in order; old and new ones may be mixed."""
        numbers = self._checked(keys)
        with self._lock:
            last = self._last_pushed()
            is_run = bool(numbers) and numbers[0] > last and all(map(lt, numbers, numbers[1:]))
            fresh = len(numbers) if is_run else sum(number > last for number in numbers)
            outstanding = len(self._numbers) - self._head
            if fresh and fresh > self._max_outstanding - outstanding:  # before any of the batch is pushed
                oldest = self._numbers[self._head] if outstanding else None
                if oldest in self._predecessors:  # it is in the log; what stops the rest is the one before it
                    oldest = self._predecessors[oldest]
                raise LimitReached(
                    f"{f'producer {self._serves[0]!r}' if self._serves else 'this filter'} has {outstanding} numbers "
                    f"above the last persisted one, {self._persisted}; the oldest is {oldest}: send it again, or give "
                    "it up with abandon()"
                )
            # Kept before they are reserved: persisted must not rise over one that an interruption leaves here.
            if is_run:
                self._numbers += numbers
                return self._reserve(numbers)
            for number in numbers:
                if number > self._persisted:  # it may have failed, was lost before a restart, or comes out of order
                    self._insert(number)
            return self._reserve(numbers)

    def abandon(self, number: int) -> None:
        """Give up a number that failed for good, so that ``persisted`` can rise over it; sent again it is a duplicate.

        :raises KeyRefused: for a number above all that were pushed: those below it, which are still to come, would
            count as duplicates.
        """
        with self._lock:
            last = self._last_pushed()
        if self._checked((number,))[0] > last:
            raise KeyRefused(f"{number} cannot be given up: the last one pushed is {last}")
        self.confirm_many((number,))

    def is_confirmed(self, number: int) -> bool:
        """Tell whether a number is known to be in the log."""
        with self._lock:
            return bool(self._seen((number,)))

    def is_settled(self, number: int) -> bool:
        """Tell whether of all numbers up to this one none may be in the log that counts as not there."""
        with self._lock:
            kept = range(self._head, len(self._numbers))
            first = next((self._numbers[n] for n in kept if self._numbers[n] in self._open), None)
            return first is None or first > number

    @property
    def last_pushed(self) -> int:
        """The highest number that was ever pushed, failed or not; -1 if there is none."""
        with self._lock:
            return self._last_pushed()

    @property
    def persisted(self) -> int:
        """The number up to which everything pushed is in the log; -1 if there is none."""
        return self._persisted

    @property
    def pushed(self) -> int:
        """The highest number that was pushed and did not fail, so it falls back; -1 if there is none."""
        with self._lock:
            kept = reversed(self._numbers[self._head :])
            return next((n for n in kept if n in self._open or n in self._confirmed), self._persisted)

    def predecessors(self, numbers: list[int]) -> list[int]:
        """Return the numbers that were pushed before these ones: recovery sees gaps by them."""
        with self._lock:
            place = bisect_left(self._numbers, numbers[0], self._head)
            if not self._predecessors and self._numbers[place : place + len(numbers)] == numbers:
                return [self._predecessor(numbers[0]), *numbers[:-1]]
            return [self._predecessor(number) for number in numbers]

    def _checked(self, keys: Iterable[int]) -> list[int]:
        numbers = list(keys)
        if numbers and (set(map(type, numbers)) != {int} or min(numbers) < 0 or max(numbers) >= INT64):
            wrong = next(n for n in numbers if type(n) is not int or not 0 <= n < INT64)
            raise KeyRefused(f"a sequence number is an int from 0 to 2**63 - 1, not {wrong!r}")
        return numbers

    def _seen(self, keys: Sequence[int]) -> Collection[int]:
        if not self._confirmed and keys and min(keys) > self._persisted:
            return ()
        return {number for number in keys if number <= self._persisted or number in self._confirmed}

    def _keep(self, keys: Sequence[int]) -> None:
        is_run = bool(keys) and not self._confirmed and keys[0] > self._persisted
        if is_run and self._numbers[self._head : self._head + len(keys)] == keys:
            self._persisted = keys[-1]
            self._drop(len(keys))
            return
        for number in keys:
            if number > self._persisted:
                self._insert(number)
                self._confirmed.add(number)
        # Persisted rises up to the first number that is not in the log, or before which one is missing.
        head = self._head
        while head < len(self._numbers):
            first = self._numbers[head]
            # Over the ones below it has risen before, and was interrupted behind that.
            if first > self._persisted:
                if first not in self._confirmed or self._predecessors.get(first, -1) > self._persisted:
                    break
                self._persisted = first
            self._confirmed.discard(first)
            self._predecessors.pop(first, None)
            head += 1
        self._drop(head - self._head)

    def _form(self, key: int) -> int:
        return key

    def _last_pushed(self) -> int:
        """Return the highest number that was ever pushed, failed or not."""
        return self._numbers[-1] if self._numbers else self._persisted

    def _insert(self, number: int) -> None:
        """Keep a number in its place, if it is not there."""
        place = bisect_left(self._numbers, number, self._head)
        if self._numbers[place : place + 1] != [number]:
            self._numbers.insert(place, number)

    def _predecessor(self, number: int) -> int:
        """Return the number that was pushed before this one, or the last persisted one."""
        if number in self._predecessors:
            return self._predecessors[number]
        place = bisect_left(self._numbers, number, self._head)
        return self._numbers[place - 1] if place > self._head else self._persisted

    def _drop(self, count: int) -> None:
        """Be done with the lowest numbers."""
        self._head += count
        if self._head == len(self._numbers) or (self._head >= _COMPACT_AT and 2 * self._head >= len(self._numbers)):
            # The head first: an interruption in between leaves numbers over which persisted has risen, and never hides
            # one that is open.
            kept = self._numbers[self._head :]
            self._head = 0
            self._numbers = kept
