"""Reservations: the keys between absent and confirmed, for the filters in memory. No I/O.

A filter looks into ``held`` itself where speed matters, and asks here for everything that is rare.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Generic, TypeVar

from .protocol import State

K = TypeVar("K", bound=Hashable)


class Held(Enum):
    """How a key is held."""

    CLEAN = "in flight; no earlier attempt can be in the log"
    TAINTED = "in flight again after an attempt that may be in the log"
    UNKNOWN = "not in flight; may be in the log"
    FAILED = "not in flight; surely not in the log, although the filter would take it for seen"


CLEAN = Held.CLEAN
"""What a first reservation is; here because reading an enum's member costs more than a global."""


class Reservations(Generic[K]):
    """The reserved and the unknown keys. The filter's lock protects it."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: dict[K, Held] = {}

    def again(self, key: K) -> State:
        """Answer a reservation of a key that is held."""
        if self.held[key] is Held.UNKNOWN:
            self.held[key] = Held.TAINTED
            return State.UNKNOWN
        return State.IN_FLIGHT

    def release(self, key: K) -> None:
        """Make a key absent, or unknown again where an earlier attempt may be in the log."""
        if self.held.get(key) is Held.TAINTED:
            self.held[key] = Held.UNKNOWN
        else:
            self.held.pop(key, None)

    def mark_unknown(self, key: K) -> None:
        """Make a reserved key unknown."""
        if key in self.held:
            self.held[key] = Held.UNKNOWN

    def count(self) -> tuple[int, int]:
        """Return how many are in flight and how many unknown."""
        unknown = sum(state is Held.UNKNOWN for state in self.held.values())
        return len(self.held) - unknown, unknown
