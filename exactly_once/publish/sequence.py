"""SequenceFilter: per producer name, what was pushed and what is persisted. No I/O.

``persisted`` only rises over numbers that are confirmed without a gap among those that were pushed: with several
partitions a later number may be acknowledged while an earlier one fails, and the retry of that one must not look
like a duplicate.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import lt
from typing import Any, NamedTuple

from .errors import KeyRefused, LimitReached, SnapshotCorrupted
from .filter import ANSWERS, CHANGES, DUPLICATE, NEW, Change, Filter, KeyState, Resolved, State, Stats
from .keys import INT64
from .snapshot import pack, unpack

_KIND = "SequenceFilter"
# So many numbers that are done with are dropped together: one at a time, each would move all that follow.
_COMPACT_AT = 4096
_ABSENT, _SENT, _RESENT, _UNKNOWN, _CONFIRMED = KeyState
_MAY_BE_THERE = frozenset((_UNKNOWN, _RESENT))


class Sequence(NamedTuple):
    """The identity of a message: who sends it, and its number there."""

    producer: str
    number: int


class SequenceState:
    """The numbers of one producer. The filter's lock protects it."""

    __slots__ = ("head", "last_pushed", "numbers", "persisted", "predecessors", "states", "used_at")

    def __init__(self, persisted: int = -1, above: Mapping[int, int] | None = None) -> None:
        # Every number up to this one that was ever pushed is in the log.
        self.persisted = persisted
        # Of numbers that an earlier life got into the log: the one that it had pushed before each.
        #
        # What lies between that one and persisted was lost in a crash, so persisted must not rise over the gap.
        self.predecessors = dict(above or {})
        # Those above ``persisted`` that were pushed, sorted; those before ``head`` are done with.
        self.numbers: list[int] = sorted(self.predecessors)
        self.head = 0
        # What a number is that is not simply in flight. One that surely failed stays, as absent, and persisted does
        # not rise over it: else its retry behind a higher number would be a duplicate.
        self.states: dict[int, KeyState] = dict.fromkeys(self.numbers, _CONFIRMED)
        # The highest number that was ever pushed, failed or not.
        self.last_pushed = self.numbers[-1] if self.numbers else persisted
        self.used_at = 0.0

    def push(self, number: int) -> State:
        """Answer for any number."""
        if number <= self.persisted:
            return DUPLICATE
        place = bisect_left(self.numbers, number, self.head)
        if place == len(self.numbers) or self.numbers[place] != number:
            # Above all others; or lost before a restart, or out of order: it was never acknowledged, so it is new.
            self.numbers.insert(place, number)
            self.last_pushed = max(self.last_pushed, number)
            return NEW
        state = self.states.get(number, _SENT)
        self._set(number, CHANGES["reserve"][state])
        return ANSWERS[state]

    def settle(self, change: Change, number: int) -> None:
        """Take note of what became of a number; one that nobody pushed can be confirmed only."""
        if number <= self.persisted:
            return
        place = bisect_left(self.numbers, number, self.head)
        if place == len(self.numbers) or self.numbers[place] != number:
            if change != "confirm":
                return
            self.numbers.insert(place, number)
            self.last_pushed = max(self.last_pushed, number)
        self._set(number, CHANGES[change][self.states.get(number, _SENT)])
        self._rise()

    def predecessor(self, number: int) -> int:
        """Return the number that was pushed before this one, or the last persisted one."""
        if number in self.predecessors:
            return self.predecessors[number]
        place = bisect_left(self.numbers, number, self.head)
        return self.numbers[place - 1] if place > self.head else self.persisted

    def above(self) -> dict[int, int]:
        """Return the numbers that are acknowledged above ``persisted``, and the one pushed before each."""
        return {n: self.predecessor(n) for n in sorted(self.states) if self.states[n] is _CONFIRMED}

    def count(self) -> int:
        """Return how many numbers are kept."""
        return len(self.numbers) - self.head

    def pushed(self) -> int:
        """Return the highest number that was pushed and did not fail: pushed falls back on a failure."""
        kept = reversed(self.numbers[self.head :])
        return next((n for n in kept if self.states.get(n) is not _ABSENT), self.persisted)

    def drop(self, count: int) -> None:
        """Be done with the lowest numbers."""
        self.head += count
        if self.head == len(self.numbers):
            self.numbers.clear()
            self.head = 0
        elif self.head >= _COMPACT_AT and 2 * self.head >= len(self.numbers):
            del self.numbers[: self.head]
            self.head = 0

    def _set(self, number: int, state: KeyState) -> None:
        if state is _SENT:
            self.states.pop(number, None)
        else:
            self.states[number] = state

    def _rise(self) -> None:
        head = self.head
        while head < len(self.numbers):
            first = self.numbers[head]
            if self.states.get(first) is not _CONFIRMED or self.predecessors.get(first, -1) > self.persisted:
                break
            self.persisted = first
            del self.states[first]
            self.predecessors.pop(first, None)
            head += 1
        self.drop(head - self.head)


class SequenceFilter(Filter[Sequence]):
    """Recognises numbers of producers that only go up, with holes: ``reserve(Sequence("files", 4711))``.

    NEW above everything pushed; DUPLICATE up to the last persisted one; IN_FLIGHT in between, where the caller
    tries again later. A number that fails may be pushed again, also after higher ones were acknowledged. Memory is
    one entry per producer and per message in flight. It never takes a new number for a seen one, provided that each
    producer's numbers rise: a number that is first used after a higher one was persisted counts as a duplicate.

    What it promises after

    - a failed send: the number may be pushed again, as unknown where the first attempt may be in the log;
    - a crash of the process: everything, once :func:`recover` has read snapshot and topic; else nothing;
    - a second process: nothing, a producer name belongs to one process at a time;
    - a key older than the window: there is no window; a producer that was idle for ``idle_seconds`` may be forgotten
      once there are more than ``max_producers``, and is then new (``stats().evicted`` counts such producers).

    Every method may be called from any thread.
    """

    takes = "sequence"

    def __init__(
        self,
        *,
        max_outstanding: int = 1_000_000,
        max_producers: int = 10_000,
        idle_seconds: float = 6 * 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_outstanding = max_outstanding
        self._max_producers = max_producers
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._producers: dict[str, SequenceState] = {}
        self._lock = threading.Lock()
        self._duplicates = 0
        self._evicted = 0

    def reserve_many(self, keys: Iterable[Sequence]) -> list[State]:
        """Push several numbers, in order; old and new ones may be mixed."""
        wanted = list(keys)
        if not wanted:
            return []
        numbers = _checked([number for _, number in wanted])
        names = {name for name, _ in wanted}
        with self._lock:
            for name in names:  # refuse a batch that may not fit before any of it is pushed
                producer = self._producer(name)
                is_run = len(names) == 1 and numbers[0] > producer.last_pushed and all(map(lt, numbers, numbers[1:]))
                above = producer.last_pushed
                fresh = len(numbers) if is_run else sum(n == name and number > above for n, number in wanted)
                if fresh > self._max_outstanding - producer.count():
                    raise _full(name, producer)
                producer.used_at = self._clock()
                if is_run:
                    producer.numbers += numbers
                    producer.last_pushed = numbers[-1]
                    return [NEW] * len(wanted)
            answers = [self._producers[name].push(number) for name, number in wanted]
            self._duplicates += answers.count(DUPLICATE)
            return answers

    def confirm_many(self, keys: Iterable[Sequence]) -> None:
        """Confirm several numbers."""
        found = list(keys)
        if not found:
            return
        numbers = _checked([number for _, number in found])
        with self._lock:
            producer = self._producer(found[0].producer)
            end = producer.head + len(numbers)
            is_run = producer.numbers[producer.head : end] == numbers and len({name for name, _ in found}) == 1
            if is_run and not producer.states:
                producer.persisted = numbers[-1]
                producer.drop(len(numbers))
                return
            for name, number in found:
                self._producer(name).settle("confirm", number)

    def release_many(self, keys: Iterable[Sequence]) -> None:
        """Release several numbers; pushed falls back."""
        self._settle("release", keys)

    def mark_unknown_many(self, keys: Iterable[Sequence]) -> None:
        """Mark several numbers as unknown."""
        self._settle("mark_unknown", keys)

    def abandon(self, key: Sequence) -> None:
        """Give up a number that failed for good, so that ``persisted`` can rise over it.

        :raises KeyRefused: for a number above all that were pushed: those below it, which are still to come, would
            count as duplicates.
        """
        _checked([key.number])
        with self._lock:
            found = self._producers.get(key.producer)
            last = -1 if found is None else found.last_pushed
        if key.number > last:
            raise KeyRefused(f"{key.number} of {key.producer!r} cannot be given up: the last one pushed is {last}")
        self._settle("confirm", (key,))

    def resolve(self, found: Collection[Sequence], *, is_sure: bool) -> Resolved:
        """Settle unknown numbers by what is in the log."""
        with self._lock:
            unknown = [
                Sequence(name, number)
                for name, producer in self._producers.items()
                for number, state in producer.states.items()
                if state is _UNKNOWN
            ]
        there = [key for key in unknown if key in found]
        rest = [key for key in unknown if key not in found] if is_sure else []
        self.confirm_many(there)
        self.release_many(rest)
        return Resolved(len(there), len(rest), len(unknown) - len(there) - len(rest))

    def is_confirmed(self, producer: str, number: int) -> bool:
        """Tell whether a number is known to be in the log."""
        with self._lock:
            found = self._producers.get(producer)
            return found is not None and (number <= found.persisted or found.states.get(number) is _CONFIRMED)

    def has_unknown(self, producer: str) -> bool:
        """Tell whether the log may hold a number that counts as not there, also while it is sent again."""
        with self._lock:
            found = self._producers.get(producer)
            return found is not None and not _MAY_BE_THERE.isdisjoint(found.states.values())

    def persisted(self, producer: str) -> int:
        """Return the number up to which everything pushed is in the log; -1 if there is none."""
        with self._lock:
            found = self._producers.get(producer)
            return -1 if found is None else found.persisted

    def pushed(self, producer: str) -> int:
        """Return the highest number that was pushed and did not fail; -1 if there is none."""
        with self._lock:
            found = self._producers.get(producer)
            return -1 if found is None else found.pushed()

    def predecessors(self, keys: list[Sequence]) -> list[int]:
        """Return the numbers that were pushed before these ones of one producer: recovery sees gaps by them."""
        name, first = keys[0]
        numbers = [number for _, number in keys]
        with self._lock:
            found = self._producers[name]
            place = bisect_left(found.numbers, first, found.head)
            if not found.predecessors and found.numbers[place : place + len(numbers)] == numbers:
                return [found.predecessor(first), *numbers[:-1]]
            return [found.predecessor(number) for number in numbers]

    def stats(self) -> Stats:
        """Return the figures of this moment; confirmed numbers are not counted, they are not kept."""
        with self._lock:
            states = [state for producer in self._producers.values() for state in producer.states.values()]
            unknown, resent = states.count(_UNKNOWN), states.count(_RESENT)
            outstanding = sum(producer.count() for producer in self._producers.values())
            return Stats(
                confirmed=-1,
                in_flight=outstanding - len(states) + resent,
                unknown=unknown,
                duplicates=self._duplicates,
                evicted=self._evicted,
            )

    def dump(self) -> dict[str, Any]:
        """Return what is persisted, as plain data; what is in flight is none of it."""
        with self._lock:
            return {name: [p.persisted, list(p.above().items())] for name, p in self._producers.items()}

    def load(self, persisted: Mapping[str, tuple[int, Mapping[int, int]]]) -> None:
        """Put producers in place: what is persisted; and what is acknowledged above that, with the number before."""
        made = {name: SequenceState(number, above) for name, (number, above) in persisted.items()}
        now = self._clock()
        for producer in made.values():
            producer.used_at = now
        with self._lock:
            self._producers.update(made)

    def to_bytes(self) -> bytes:
        """Return a snapshot of what is persisted."""
        return pack(_KIND, self.dump())

    def load_bytes(self, data: bytes) -> None:
        """Load a snapshot, whole or not at all.

        :raises SnapshotCorrupted: when it is cut short, altered or not one of these.
        """
        try:
            self.load({str(name): read_dumped(dumped) for name, dumped in unpack(_KIND, data).items()})
        except (TypeError, ValueError) as error:
            raise SnapshotCorrupted(f"the snapshot is whole, but not a SequenceFilter's: {error}") from error

    def _settle(self, change: Change, keys: Iterable[Sequence]) -> None:
        with self._lock:
            for name, number in keys:
                if name in self._producers:
                    self._producers[name].settle(change, number)

    def _producer(self, name: str) -> SequenceState:
        if name not in self._producers:
            if type(name) is not str or not name:
                raise KeyRefused(f"a producer's name is a str with something in it, not {name!r}")
            if len(self._producers) >= self._max_producers:
                self._age_out(self._clock())
            self._producers[name] = SequenceState()
            self._producers[name].used_at = self._clock()
        return self._producers[name]

    def _age_out(self, now: float) -> None:
        idle = [n for n, p in self._producers.items() if not p.count() and now - p.used_at >= self._idle_seconds]
        if not idle:
            raise LimitReached(
                f"there are {len(self._producers)} producers and none was idle for {self._idle_seconds:g} s; "
                "raise max_producers= or lower idle_seconds="
            )
        for name in idle:
            del self._producers[name]
        self._evicted += len(idle)


def read_dumped(dumped: Any) -> tuple[int, dict[int, int]]:
    """Read one producer of :meth:`SequenceFilter.dump`."""
    persisted, above = dumped
    return int(persisted), {int(number): int(before) for number, before in above}


def _checked(numbers: list[int]) -> list[int]:
    if set(map(type, numbers)) != {int} or min(numbers) < 0 or max(numbers) >= INT64:
        wrong = next(n for n in numbers if type(n) is not int or not 0 <= n < INT64)
        raise KeyRefused(f"a sequence number is an int from 0 to 2**63 - 1, not {wrong!r}")
    return numbers


def _full(name: str, producer: SequenceState) -> LimitReached:
    oldest = producer.numbers[producer.head] if producer.count() else None
    if oldest in producer.predecessors:  # it is in the log; what stops the rest is the one before it
        oldest = producer.predecessors[oldest]
    return LimitReached(
        f"producer {name!r} has {producer.count()} numbers above the last persisted one, {producer.persisted}; "
        f"the oldest is {oldest}: send it again, or give it up with abandon()"
    )
