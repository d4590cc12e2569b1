"""WindowFilter: every key of the last so many, or of the last so many seconds. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic

from exactly_once.errors import ConfigurationError
from exactly_once.kafka.kinds import check_kinds

from .filter import Change, K, MemoryFilter
from .keys import GivenKey, Key


class Generations(Generic[K]):
    """Keys in two sets: when the younger one is full or old, it becomes the older one, which is dropped as a whole."""

    def __init__(self, keys: int | None, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._full = keys
        self._seconds = seconds
        self._clock = clock
        self._began = clock()
        self.younger: set[K] = set()
        self.older: set[K] = set()
        # How often that happened, and to how many keys.
        self.turns = self.dropped = 0

    def turn(self) -> None:
        """Begin a new generation."""
        self.turns += 1
        self.dropped += len(self.older)
        self.older, self.younger = self.younger, set()

    def age(self) -> None:
        """Begin as many as the time that passed demands: a key stays for ``seconds``, and no longer than two of it."""
        if self._seconds is not None:
            due = int((self._clock() - self._began) / self._seconds)
            if due:
                self._began += due * self._seconds
            for _ in range(min(2, due)):
                self.turn()

    def add(self, keys: Iterable[K]) -> None:
        """Add keys to the younger one."""
        self.younger.update(keys)
        if self._full is not None and len(self.younger) >= self._full:
            self.turn()

    def of(self, keys: Collection[K]) -> set[K]:
        """Return those of the keys that are here."""
        if self.younger.isdisjoint(keys) and self.older.isdisjoint(keys):
            return set()
        return {key for key in keys if key in self.younger or key in self.older}


class WindowFilter(MemoryFilter[GivenKey, Key]):
    """Recognises every key of its window; ``WindowFilter(keys=1_000_000)`` or ``WindowFilter(seconds=600)``.

    The window is the last ``keys`` confirmed keys (up to twice as many are held), or the keys confirmed in the last
    ``seconds`` (and some time after). It never takes a new key for a seen one.

    Thread-safe. ``docs/publishing.md`` says what it promises after a failed send, a crash, beside a second process.
    With ``writes_key`` messages carry their key in a header, so that ``producer.resolve(topic)`` finds unknown ones.
    Of unknown keys, too, it keeps the latest ``keys``, or those of the last ``seconds``; an older one is new again
    (``stats().evicted``).
    """

    def __init__(
        self,
        *,
        keys: int | None = None,
        seconds: float | None = None,
        writes_key: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_kinds(WindowFilter.__init__, locals())
        super().__init__()
        self.writes_key = writes_key
        if (keys is None) == (seconds is None):
            raise ConfigurationError("give either keys= or seconds=: WindowFilter(keys=1_000_000)")
        if not (keys or seconds or 0) > 0:
            raise ConfigurationError(f"the window must be positive, not {keys if seconds is None else seconds!r}")
        self.max_unknown = keys
        self._seconds = seconds
        self._kept: Generations[Key] = Generations(keys, seconds, clock)

    def _seen(self, keys: Sequence[Key]) -> Collection[Key]:
        self._age()
        return self._kept.of(keys)

    def _keep(self, keys: Sequence[Key]) -> None:
        self._age()
        self._kept.add(keys)

    def _change(self, change: Change, keys: Iterable[Key]) -> None:
        self._age()  # or a key that is unknown from now on would be as old as the last call
        super()._change(change, keys)

    def _figures(self) -> dict[str, int]:
        self._age()
        kept = self._kept
        return {"confirmed": len(kept.younger) + len(kept.older), "evicted": self._evicted + kept.dropped}

    def _age(self) -> None:
        self._kept.age()
        if self._seconds is not None:
            self._epoch = self._kept.turns
            while self._unknown and next(iter(self._unknown.values())) < self._epoch - 1:
                self._drop_oldest_unknown()
