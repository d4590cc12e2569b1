"""Front filters: they know which keys are surely not in the older generation, so that it need not be looked into.

A front filter never decides that a key is a duplicate; if it may have a key, the database looks. The younger generation
is always looked into, because other processes add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from .store import Store


class FrontFilter(Protocol):
    """What a front filter does; adapters around a Bloom or cuckoo filter of another package fit in."""

    def fill(self, keys: Iterable[bytes]) -> None:
        """Add many keys."""
        ...

    def may_have(self, key: bytes) -> bool:
        """Return False only for a key that surely was never added."""
        ...


class ExactFront:
    """A set of the keys: never wrong, 100 bytes a key."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def fill(self, keys: Iterable[bytes]) -> None:
        """Add many keys."""
        self._keys.update(keys)

    def may_have(self, key: bytes) -> bool:
        """Tell whether the key was added."""
        return key in self._keys


class Members(Protocol):
    """What Bloom filters of most packages have."""

    def add(self, key: bytes, /) -> object:
        """Add a key."""
        ...

    def __contains__(self, key: bytes, /) -> bool:
        """Return False only for a key that surely was never added."""
        ...


class BloomFront:
    """An adapter: ``front=lambda: BloomFront(rbloom.Bloom(1_000_000, 0.01))``, big enough for the keys of a window.

    What it wrongly takes for a member costs one look into the table, and nothing else.
    """

    def __init__(self, members: Members) -> None:
        self._members = members

    def fill(self, keys: Iterable[bytes]) -> None:
        """Add many keys."""
        for key in keys:
            self._members.add(key)

    def may_have(self, key: bytes) -> bool:
        """Tell whether the key may have been added."""
        return key in self._members


class Front:
    """Keeps a front filter of the older generation, made anew when the generations turn."""

    def __init__(self, store: Store, scope: int, make: Callable[[], FrontFilter]) -> None:
        self._store = store
        self._scope = scope
        self._make = make
        self._generation = -1
        self._filter = make()
        self.skipped = 0
        """Batches for which the older generation was not looked into."""
        self.refresh()

    def refresh(self) -> None:
        """Read the older generation if it is another one by now."""
        ((generation,),) = self._store.run("publish_generation")
        if generation == self._generation:
            return
        made = self._make()
        made.fill(key for (key,) in self._store.run("publish_old_keys", scope=self._scope, generation=generation))
        ((still,),) = self._store.run("publish_generation")
        self._filter, self._generation = made, generation if still == generation else -1

    def without(self, keys: Iterable[bytes]) -> int:
        """Return the generation whose older neighbour has none of these keys; -1 if that is not known."""
        if any(map(self._filter.may_have, keys)):
            return -1
        self.skipped += 1
        return self._generation
