"""SequenceFilter: per producer name, what was pushed and what is persisted. No I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from operator import lt
from typing import Any, Literal, NamedTuple

from .errors import KeyRefused, LimitReached, SnapshotCorrupted
from .keys import INT64
from .outstanding import Odd, Outstanding
from .protocol import State, Stats
from .snapshot import pack, unpack

_NEW, _DUPLICATE = State.NEW, State.DUPLICATE
_KIND = "SequenceFilter"
_DOUBTS = frozenset((Odd.UNKNOWN, Odd.TAINTED))


class Sequence(NamedTuple):
    """The identity of a message: who sends it, and its number there."""

    producer: str
    number: int


class SequenceFilter:
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

    takes: Literal["sequence"] = "sequence"

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
        self._producers: dict[str, Outstanding] = {}
        self._lock = threading.Lock()
        self._duplicates = 0
        self._evicted = 0

    def reserve(self, key: Sequence) -> State:
        """Push a number."""
        name, number = key
        if type(number) is not int or not 0 <= number < INT64:
            raise _refused(number)
        with self._lock:
            producer = self._producers.get(name) or self._add(name)
            numbers = producer.numbers
            if number > producer.pushed and len(numbers) - producer.head < self._max_outstanding:
                if not numbers:
                    producer.used_at = self._clock()
                numbers.append(number)
                producer.pushed = number
                return _NEW
            return self._push(producer, name, number)

    def confirm(self, key: Sequence) -> None:
        """Settle: the message is in the log."""
        name, number = key
        with self._lock:
            producer = self._producers.get(name) or self._add(name)
            head = producer.head
            numbers = producer.numbers
            if head < len(numbers) and numbers[head] == number and not producer.odd:
                producer.persisted = number
                if head + 1 == len(numbers):
                    numbers.clear()
                    producer.head = 0
                else:
                    producer.head = head + 1
                    if head >= 1000:
                        producer.compact()
            else:
                producer.confirm(_checked(number))

    def release(self, key: Sequence) -> None:
        """Settle: the message is surely not in the log; pushed falls back."""
        self.release_many((key,))

    def mark_unknown(self, key: Sequence) -> None:
        """Settle: nobody knows whether the message is in the log."""
        self.mark_unknown_many((key,))

    def reserve_many(self, keys: Iterable[Sequence]) -> list[State]:
        """Push several numbers, in order; old and new ones may be mixed."""
        wanted = list(keys)
        if not wanted:
            return []
        numbers = [number for _, number in wanted]
        if set(map(type, numbers)) != {int} or min(numbers) < 0 or max(numbers) >= INT64:
            raise _refused(next(n for n in numbers if type(n) is not int or not 0 <= n < INT64))
        several = {name for name, _ in wanted}
        for name in several:
            _check_name(name)
        with self._lock:
            if len(several) == 1:
                producer = self._producers.get(name) or self._add(name)
                room = self._max_outstanding - producer.count()
                if numbers[0] > producer.pushed and len(numbers) <= room and all(map(lt, numbers, numbers[1:])):
                    producer.numbers += numbers
                    producer.pushed = numbers[-1]
                    producer.used_at = self._clock()
                    return [_NEW] * len(wanted)
            self._make_room(wanted)
            return [self._push(self._producers.get(n) or self._add(n), n, number) for n, number in wanted]

    def confirm_many(self, keys: Iterable[Sequence]) -> None:
        """Confirm several numbers."""
        found = list(keys)
        if not found:
            return
        numbers = [number for _, number in found]
        several = {name for name, _ in found}
        with self._lock:
            producer = self._producers.get(found[0].producer) if len(several) == 1 else None
            if producer is not None and not producer.odd:
                end = producer.head + len(numbers)
                if producer.numbers[producer.head : end] == numbers:
                    producer.persisted = numbers[-1]
                    producer.head = end
                    producer.compact()
                    return
            for name, number in found:
                (self._producers.get(name) or self._add(name)).confirm(_checked(number))

    def release_many(self, keys: Iterable[Sequence]) -> None:
        """Forget several numbers."""
        with self._lock:
            for name, number in keys:
                if name in self._producers:
                    self._producers[name].release(number)

    def mark_unknown_many(self, keys: Iterable[Sequence]) -> None:
        """Doubt several numbers."""
        with self._lock:
            for name, number in keys:
                if name in self._producers:
                    self._producers[name].mark_unknown(number)

    def abandon(self, key: Sequence) -> None:
        """Give up a number that failed for good, so that ``persisted`` can rise over it."""
        name, number = key
        with self._lock:
            if name in self._producers:
                self._producers[name].confirm(_checked(number))

    def is_confirmed(self, producer: str, number: int) -> bool:
        """Tell whether a number is known to be in the log."""
        with self._lock:
            found = self._producers.get(producer)
            return found is not None and (number <= found.persisted or found.odd.get(number) is Odd.CONFIRMED)

    def has_unknown(self, producer: str) -> bool:
        """Tell whether the log may hold a number that counts as not there, also while it is sent again."""
        with self._lock:
            found = self._producers.get(producer)
            return found is not None and not _DOUBTS.isdisjoint(found.odd.values())

    def persisted(self, producer: str) -> int:
        """Return the number up to which everything pushed is in the log; -1 if there is none."""
        with self._lock:
            found = self._producers.get(producer)
            return -1 if found is None else found.persisted

    def pushed(self, producer: str) -> int:
        """Return the highest number that was pushed and did not fail; -1 if there is none."""
        with self._lock:
            found = self._producers.get(producer)
            return -1 if found is None else found.standing()

    def before(self, key: Sequence) -> int:
        """Return the number that was pushed before this one: what recovery needs to see gaps."""
        name, number = key
        with self._lock:
            found = self._producers.get(name)
            return -1 if found is None else found.before(number)

    def stats(self) -> Stats:
        """Return the figures of this moment; confirmed numbers are not counted, they are not kept."""
        with self._lock:
            odd = [state for producer in self._producers.values() for state in producer.odd.values()]
            unknown = sum(state is Odd.UNKNOWN for state in odd)
            settled = unknown + sum(state in (Odd.CONFIRMED, Odd.FAILED) for state in odd)
            outstanding = sum(producer.count() for producer in self._producers.values())
            return Stats(
                confirmed=-1,
                in_flight=outstanding - settled,
                unknown=unknown,
                duplicates=self._duplicates,
                evicted=self._evicted,
            )

    def close(self) -> None:
        """Do nothing; there is nothing to give back."""

    def dump(self) -> dict[str, Any]:
        """Return what is persisted, as plain data; what is in flight is none of it."""
        with self._lock:
            return {name: [p.persisted, list(p.above().items())] for name, p in self._producers.items()}

    def load(self, persisted: Mapping[str, tuple[int, Mapping[int, int]]]) -> None:
        """Put producers in place: what is persisted; and what is acknowledged above that, with the number before."""
        made = {name: Outstanding(number, above) for name, (number, above) in persisted.items()}
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

    def _push(self, producer: Outstanding, name: str, number: int) -> State:
        if number <= producer.persisted:
            self._duplicates += 1
            return _DUPLICATE
        if number <= producer.pushed:
            state = producer.push_again(number)
            self._duplicates += state is _DUPLICATE
            return state
        numbers = producer.numbers
        if len(numbers) - producer.head >= self._max_outstanding:
            raise _full(name, producer)
        if not numbers:
            producer.used_at = self._clock()
        numbers.append(number)
        producer.pushed = number
        return _NEW

    def _make_room(self, wanted: list[Sequence]) -> None:
        """Refuse a batch that may not fit, before any of it is pushed."""
        for name in {name for name, _ in wanted}:
            producer = self._producers.get(name)
            room = self._max_outstanding - (0 if producer is None else producer.count())
            pushed = -1 if producer is None else producer.pushed
            if sum(n == name and number > pushed for n, number in wanted) > room:
                raise _full(name, producer or Outstanding())

    def _add(self, name: str) -> Outstanding:
        _check_name(name)
        now = self._clock()
        if len(self._producers) >= self._max_producers:
            self._age_out(now)
        producer = self._producers[name] = Outstanding()
        producer.used_at = now
        return producer

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


def _check_name(name: object) -> None:
    if type(name) is not str or not name:
        raise KeyRefused(f"a producer's name is a str with something in it, not {name!r}")


def _checked(number: int) -> int:
    if type(number) is not int or not 0 <= number < INT64:
        raise _refused(number)
    return number


def _refused(number: object) -> KeyRefused:
    return KeyRefused(f"a sequence number is an int from 0 to 2**63 - 1, not {number!r}")


def _full(name: str, producer: Outstanding) -> LimitReached:
    oldest = producer.numbers[producer.head] if producer.count() else None
    if oldest in producer.befores:  # it is in the log; what stops the rest is the one before it
        oldest = producer.befores[oldest]
    return LimitReached(
        f"producer {name!r} has {producer.count()} numbers above the last persisted one, {producer.persisted}; "
        f"the oldest is {oldest}: send it again, or give it up with abandon()"
    )
