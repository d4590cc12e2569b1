"""The reference: a plain set behind the protocol, with the same checks of keys and the same lock.

The model of the property tests and the measure of the benchmarks; it never forgets, so its memory grows for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterable
from itertools import repeat
from typing import Generic, TypeVar

from exactly_once.publish import Filter, State, Stats
from exactly_once.publish.keys import MAX_KEY_LENGTH, GivenKey, Key, checked, checked_all

K = TypeVar("K", bound=Hashable)
_NEW, _DUPLICATE = State.NEW, State.DUPLICATE
CLEAN, TAINTED, UNKNOWN = "in flight", "in flight again", "unknown"


class Reservations(Generic[K]):
    """The open keys, written a second time and as plainly as it goes: the table of the package is judged by it."""

    def __init__(self) -> None:
        self.held: dict[K, str] = {}

    def again(self, key: K) -> State:
        if self.held[key] == UNKNOWN:
            self.held[key] = TAINTED
            return State.UNKNOWN
        return State.IN_FLIGHT

    def release(self, key: K) -> None:
        if self.held.get(key) == TAINTED:
            self.held[key] = UNKNOWN
        else:
            self.held.pop(key, None)

    def mark_unknown(self, key: K) -> None:
        if key in self.held:
            self.held[key] = UNKNOWN

    def count(self) -> tuple[int, int]:
        unknown = list(self.held.values()).count(UNKNOWN)
        return len(self.held) - unknown, unknown


class PlainSet(Filter[K], Generic[K]):
    """Any hashable key, never checked: for keys that are tuples."""

    def __init__(self) -> None:
        self._seen: set[K] = set()
        self._reservations: Reservations[K] = Reservations()
        self._held = self._reservations.held
        self._lock = threading.Lock()
        self._duplicates = 0

    def reserve(self, key: K) -> State:
        with self._lock:
            if key in self._seen:
                self._duplicates += 1
                return _DUPLICATE
            if key in self._held:
                return self._reservations.again(key)
            self._held[key] = CLEAN
            return _NEW

    def confirm(self, key: K) -> None:
        with self._lock:
            self._held.pop(key, None)
            self._seen.add(key)

    def release(self, key: K) -> None:
        with self._lock:
            self._reservations.release(key)

    def mark_unknown(self, key: K) -> None:
        with self._lock:
            self._reservations.mark_unknown(key)

    def reserve_many(self, keys: Iterable[K]) -> list[State]:
        wanted = list(keys)
        with self._lock:
            fresh = dict.fromkeys(wanted, CLEAN)
            if (
                len(fresh) == len(wanted)
                and self._seen.isdisjoint(wanted)
                and (not self._held or self._held.keys().isdisjoint(wanted))
            ):
                self._held.update(fresh)
                return [_NEW] * len(wanted)
        return [self.reserve(key) for key in wanted]

    def confirm_many(self, keys: Iterable[K]) -> None:
        found = list(keys)
        with self._lock:
            deque(map(self._held.pop, found, repeat(None)), maxlen=0)
            self._seen.update(found)

    def release_many(self, keys: Iterable[K]) -> None:
        for key in keys:
            self.release(key)

    def mark_unknown_many(self, keys: Iterable[K]) -> None:
        for key in keys:
            self.mark_unknown(key)

    def stats(self) -> Stats:
        with self._lock:
            in_flight, unknown = self._reservations.count()
            return Stats(confirmed=len(self._seen), in_flight=in_flight, unknown=unknown, duplicates=self._duplicates)

    def close(self) -> None:
        pass


class ReferenceFilter(PlainSet[Key]):
    """Dedup keys, checked as every filter checks them."""

    def reserve(self, key: GivenKey) -> State:
        if (type(key) is not bytes and type(key) is not str) or not 0 < len(key) <= MAX_KEY_LENGTH:
            key = checked(key)
        with self._lock:
            if key in self._seen:
                self._duplicates += 1
                return _DUPLICATE
            if key in self._held:
                return self._reservations.again(key)
            self._held[key] = CLEAN
            return _NEW

    def confirm(self, key: GivenKey) -> None:
        if (type(key) is not bytes and type(key) is not str) or not 0 < len(key) <= MAX_KEY_LENGTH:
            key = checked(key)
        with self._lock:
            self._held.pop(key, None)
            self._seen.add(key)

    def release(self, key: GivenKey) -> None:
        super().release(checked(key))

    def mark_unknown(self, key: GivenKey) -> None:
        super().mark_unknown(checked(key))

    def reserve_many(self, keys: Iterable[GivenKey]) -> list[State]:
        return super().reserve_many(checked_all(keys))

    def confirm_many(self, keys: Iterable[GivenKey]) -> None:
        super().confirm_many(checked_all(keys))
