"""WindowFilter: every key of the last so many, or of the last so many seconds. No I/O.

Two generations of sets: keys are confirmed into the current one; when that is full (or old enough) it becomes the
previous one, and what was the previous one is dropped as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from exactly_once.errors import ConfigurationError

from .filter import MemoryFilter, Stats
from .keys import GivenKey, Key, checked_all


class WindowFilter(MemoryFilter[GivenKey, Key]):
    """Recognises every key of its window; ``WindowFilter(keys=1_000_000)`` or ``WindowFilter(seconds=600)``.

    The window is the last ``keys`` confirmed keys (up to twice as many are held), or the keys confirmed in the last
    ``seconds`` (and some time after). It never takes a new key for a seen one.

    What it promises after

    - a failed send: the key is absent again if the message surely is not in the log, else unknown;
    - a crash of the process: nothing, it starts empty;
    - a second process: nothing, each has its own;
    - a key older than the window: nothing, it is new again.

    With ``writes_key`` messages carry their key in a header, so that ``producer.resolve(topic)`` finds unknown ones.
    Of unknown keys, too, it keeps the latest ``keys``, or those of the last ``seconds``; an older one is new again
    (``stats().evicted``). Every method may be called from any thread.
    """

    def __init__(
        self,
        *,
        keys: int | None = None,
        seconds: float | None = None,
        writes_key: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.writes_key = writes_key
        if (keys is None) == (seconds is None):
            raise ConfigurationError("give either keys= or seconds=: WindowFilter(keys=1_000_000)")
        if not (keys or seconds or 0) > 0:
            raise ConfigurationError(f"the window must be positive, not {keys if seconds is None else seconds!r}")
        self.max_unknown = self._limit = keys
        self._seconds = seconds
        self._clock = clock
        self._began = clock() if seconds is not None else 0.0
        self._current: set[Key] = set()
        self._previous: set[Key] = set()

    def stats(self) -> Stats:
        """Return the figures of this moment."""
        with self._lock:
            self._age()
            return self._stats(confirmed=len(self._current) + len(self._previous))

    def _checked(self, keys: Iterable[GivenKey]) -> list[Key]:
        return checked_all(keys)

    def _seen(self, keys: Sequence[Key]) -> Collection[Key]:
        if self._seconds is not None:
            self._age()
        if self._current.isdisjoint(keys) and self._previous.isdisjoint(keys):
            return ()
        return {key for key in keys if key in self._current or key in self._previous}

    def _keep(self, keys: Sequence[Key]) -> None:
        self._age()
        self._current.update(keys)
        if self._limit is not None and len(self._current) >= self._limit:
            self._rotate()

    def _age(self) -> None:
        """Rotate the generations as often as the time that passed demands."""
        if self._seconds is None:
            return
        passed = self._clock() - self._began
        if passed >= self._seconds:
            self._rotate()
            if passed >= 2 * self._seconds:
                self._rotate()
            self._began += passed

    def _rotate(self) -> None:
        self._evicted += len(self._previous)
        self._previous, self._current = self._current, set()
        if self._seconds is not None:
            self._epoch += 1
            while self._unknown and next(iter(self._unknown.values())) < self._epoch - 1:
                self._drop_oldest_unknown()
