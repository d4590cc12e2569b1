"""Cache: keys that this process has confirmed lately, so that their duplicates need no question. No I/O."""

from __future__ import annotations

import time
from collections.abc import Iterable


class ConfirmedKeys:
    """The last confirmed keys in two generations, none of them for longer than a window.

    A key that is here is a duplicate, because the database keeps it for a window at least. One that is not here may be
    anything: other processes confirm keys, too.
    """

    __slots__ = ("_began", "_older", "_seconds", "_size", "_younger", "hits")

    def __init__(self, keys: int, seconds: float) -> None:
        # Half of each: a generation is dropped as a whole when the younger one is full or half a window old.
        self._size = (keys + 1) // 2
        self._seconds = seconds / 2
        self._younger: set[bytes] = set()
        self._older: set[bytes] = set()
        self._began = time.monotonic()
        # Duplicates that were answered from here.
        self.hits = 0

    def add(self, keys: Iterable[bytes]) -> None:
        """Take keys that were confirmed now."""
        self._age()
        for key in keys if self._size else ():
            if len(self._younger) >= self._size:
                self._turn()
                self._began = time.monotonic()
            self._younger.add(key)

    def of(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return those of the keys that are here."""
        if not self._younger and not self._older:
            return set()
        self._age()
        found = {key for key in keys if key in self._younger or key in self._older}
        self.hits += len(found)
        return found

    def _age(self) -> None:
        """Drop what is too old: a key stays for half a window in either generation."""
        turns = int((time.monotonic() - self._began) / self._seconds)
        self._began += turns * self._seconds
        for _ in range(min(2, turns)):
            self._turn()

    def _turn(self) -> None:
        self._older, self._younger = self._younger, set()
