"""WindowFilter: every key of the last so many, or of the last so many seconds. No I/O.

Two generations of sets: keys are confirmed into the current one; when that is full (or old enough) it becomes the
previous one, and what was the previous one is dropped as a whole.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat

from exactly_once.errors import ConfigurationError

from .keys import MAX_KEY_LENGTH, GivenKey, Key, checked, checked_all
from .protocol import State, Stats
from .reservations import CLEAN, Reservations

_NEW, _DUPLICATE = State.NEW, State.DUPLICATE


class WindowFilter:
    """Recognises every key of its window; ``WindowFilter(keys=1_000_000)`` or ``WindowFilter(seconds=600)``.

    The window is the last ``keys`` confirmed keys (up to twice as many are held), or the keys confirmed in the last
    ``seconds`` (and some time after). It never takes a new key for a seen one.

    What it promises after

    - a failed send: the key is absent again if the message surely is not in the log, else unknown;
    - a crash of the process: nothing, it starts empty;
    - a second process: nothing, each has its own;
    - a key older than the window: nothing, it is new again.

    Reserved and unknown keys never leave by age. Every method may be called from any thread.
    """

    def __init__(
        self,
        *,
        keys: int | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (keys is None) == (seconds is None):
            raise ConfigurationError("give either keys= or seconds=: WindowFilter(keys=1_000_000)")
        if not (keys or seconds or 0) > 0:
            raise ConfigurationError(f"the window must be positive, not {keys if seconds is None else seconds!r}")
        self._limit = keys
        self._seconds = seconds
        self._clock = clock
        self._began = clock() if seconds is not None else 0.0
        self._current: set[Key] = set()
        self._previous: set[Key] = set()
        self._reservations: Reservations[Key] = Reservations()
        self._held = self._reservations.held
        self._lock = threading.Lock()
        self._duplicates = 0
        self._evicted = 0

    def reserve(self, key: GivenKey) -> State:
        """Ask for the right to send ``key``."""
        if (type(key) is not bytes and type(key) is not str) or not 0 < len(key) <= MAX_KEY_LENGTH:
            key = checked(key)
        with self._lock:
            if self._seconds is not None:
                self._age()
            if key in self._current or key in self._previous:
                self._duplicates += 1
                return _DUPLICATE
            if key in self._held:
                return self._reservations.again(key)
            self._held[key] = CLEAN
            return _NEW

    def confirm(self, key: GivenKey) -> None:
        """Settle: the message is in the log."""
        if (type(key) is not bytes and type(key) is not str) or not 0 < len(key) <= MAX_KEY_LENGTH:
            key = checked(key)
        with self._lock:
            self._held.pop(key, None)
            self._current.add(key)
            if self._limit is None:
                self._age()
            elif len(self._current) >= self._limit:
                self._turn()

    def release(self, key: GivenKey) -> None:
        """Settle: the message is surely not in the log."""
        self.release_many((key,))

    def mark_unknown(self, key: GivenKey) -> None:
        """Settle: nobody knows whether the message is in the log."""
        self.mark_unknown_many((key,))

    def reserve_many(self, keys: Iterable[GivenKey]) -> list[State]:
        """Reserve several keys, in order."""
        wanted = checked_all(keys)
        with self._lock:
            self._age()
            fresh = dict.fromkeys(wanted, CLEAN)
            if (
                len(fresh) == len(wanted)
                and self._current.isdisjoint(wanted)
                and self._previous.isdisjoint(wanted)
                and (not self._held or self._held.keys().isdisjoint(wanted))
            ):
                self._held.update(fresh)
                return [_NEW] * len(wanted)
            return [self._reserve(key) for key in wanted]

    def confirm_many(self, keys: Iterable[GivenKey]) -> None:
        """Confirm several keys."""
        found = checked_all(keys)
        with self._lock:
            self._age()
            deque(map(self._held.pop, found, repeat(None)), maxlen=0)
            self._current.update(found)
            if self._limit is not None and len(self._current) >= self._limit:
                self._turn()

    def release_many(self, keys: Iterable[GivenKey]) -> None:
        """Forget several keys."""
        lost = checked_all(keys)
        with self._lock:
            for key in lost:
                self._reservations.release(key)

    def mark_unknown_many(self, keys: Iterable[GivenKey]) -> None:
        """Doubt several keys."""
        unsure = checked_all(keys)
        with self._lock:
            for key in unsure:
                self._reservations.mark_unknown(key)

    def stats(self) -> Stats:
        """Return the figures of this moment."""
        with self._lock:
            self._age()
            in_flight, unknown = self._reservations.count()
            return Stats(
                confirmed=len(self._current) + len(self._previous),
                in_flight=in_flight,
                unknown=unknown,
                duplicates=self._duplicates,
                evicted=self._evicted,
            )

    def close(self) -> None:
        """Do nothing; there is nothing to give back."""

    def _reserve(self, key: Key) -> State:
        if key in self._current or key in self._previous:
            self._duplicates += 1
            return _DUPLICATE
        if key in self._held:
            return self._reservations.again(key)
        self._held[key] = CLEAN
        return _NEW

    def _age(self) -> None:
        """Turn the generations as often as the time that passed demands."""
        if self._seconds is None:
            return
        passed = self._clock() - self._began
        if passed >= self._seconds:
            self._turn()
            if passed >= 2 * self._seconds:
                self._turn()
            self._began += passed

    def _turn(self) -> None:
        self._evicted += len(self._previous)
        self._previous, self._current = self._current, set()
