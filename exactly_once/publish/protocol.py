"""The protocol of all filters: the four states of a key and the changes between them.

    absent ── reserve: NEW ──> in flight ── confirm ──> confirmed       (reserve: DUPLICATE)
      ^                         │     │
      └──────── forget ─────────┘     └── doubt ──> unknown             (in flight: IN_FLIGHT)

Reserving an unknown key answers UNKNOWN and gives the reservation to the caller, who may send again and
cannot be sure. Forgetting *that* reservation makes the key unknown again, because the first attempt may still be
in the log; forgetting an unknown key makes it absent: somebody has read the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

K_contra = TypeVar("K_contra", contravariant=True)
K = TypeVar("K")


class State(Enum):
    """What a filter answers to a reservation."""

    NEW = "new"
    """Never seen, or surely not sent: the caller holds the reservation and sends."""
    IN_FLIGHT = "in flight"
    """Somebody else holds the reservation; nothing is known yet."""
    UNKNOWN = "unknown"
    """It may be in the log: the caller holds the reservation, and sending may double it."""
    DUPLICATE = "duplicate"
    """It was acknowledged: the caller must not send it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Figures of a filter: what it holds now, and what happened so far."""

    confirmed: int = 0
    """Confirmed keys that it can recognise now; -1 where counting would cost a scan."""
    in_flight: int = 0
    """Reservations held now."""
    unknown: int = 0
    """Keys now whose message may be in the log."""
    duplicates: int = 0
    """Answers DUPLICATE so far."""
    evicted: int = 0
    """Confirmed keys that it no longer recognises."""
    evicted_young: int = 0
    """Those of them that had not yet left the promised window: each may let a duplicate through."""
    failed_open: int = 0
    """Keys let through unasked because a store was away or a limit was reached."""


class Filter(Protocol[K_contra]):
    """What a duplicate filter does. Every method may be called from any thread."""

    def reserve(self, key: K_contra) -> State:
        """Ask for the right to send ``key``; with NEW or UNKNOWN the caller has it and must settle it."""
        ...

    def confirm(self, key: K_contra) -> None:
        """Settle: the message is in the log. Also for a key found there that nobody had reserved."""
        ...

    def release(self, key: K_contra) -> None:
        """Settle: the message is surely not in the log. A confirmed key stays confirmed."""
        ...

    def mark_unknown(self, key: K_contra) -> None:
        """Settle: nobody knows whether the message is in the log."""
        ...

    def reserve_many(self, keys: Iterable[K_contra]) -> list[State]:
        """Reserve several keys, in order; the second of two equal ones is in flight.

        All keys are checked first: a key that is refused leaves none reserved.
        """
        ...

    def confirm_many(self, keys: Iterable[K_contra]) -> None:
        """Confirm several keys."""
        ...

    def release_many(self, keys: Iterable[K_contra]) -> None:
        """Forget several keys."""
        ...

    def mark_unknown_many(self, keys: Iterable[K_contra]) -> None:
        """Doubt several keys."""
        ...

    def stats(self) -> Stats:
        """Return the figures of this moment."""
        ...

    def close(self) -> None:
        """Give back connections, if there are any."""
        ...


def sends(states: Sequence[State]) -> list[int]:
    """Return the places of those that the caller may send."""
    return [place for place, state in enumerate(states) if state is State.NEW or state is State.UNKNOWN]
