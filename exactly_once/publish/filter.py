"""The protocol of all filters: the states of a key, one table of the changes between them, base classes. No I/O.

    absent ── reserve: NEW ──> in flight ── confirm ──> confirmed       (reserve: DUPLICATE)
      ^                         │     │
      └──────── release ────────┘     └── mark_unknown ──> unknown      (in flight: IN_FLIGHT)

Reserving an unknown key answers UNKNOWN and gives the reservation to the caller, who may send again and
cannot be sure. Releasing *that* reservation makes the key unknown again, because the first attempt may still be
in the log; releasing an unknown key makes it absent: somebody has read the log.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

from exactly_once.errors import ConfigurationError

from .keys import Key, checked_all, encoded

K = TypeVar("K", bound=Hashable)
G_contra = TypeVar("G_contra", contravariant=True)

Takes = Literal["dedup_key", "sequence", "chain", "nothing"]


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


class KeyState(Enum):
    """What a key is; the values are those of shared stores."""

    ABSENT = "-"
    IN_FLIGHT = "f"
    RESENT = "t"
    """In flight again, after an attempt that may be in the log."""
    UNKNOWN = "u"
    CONFIRMED = "c"


Change = Literal["reserve", "confirm", "release", "mark_unknown"]
NEW, IN_FLIGHT, UNKNOWN, DUPLICATE = State.NEW, State.IN_FLIGHT, State.UNKNOWN, State.DUPLICATE
# Reading an enum's member costs more than a global.
_ABSENT, _SENT, _RESENT, _UNKNOWN, _CONFIRMED = KeyState

# What a reservation is answered.
ANSWERS = {_ABSENT: NEW, _SENT: IN_FLIGHT, _RESENT: IN_FLIGHT, _UNKNOWN: UNKNOWN, _CONFIRMED: DUPLICATE}
# The table of states: what a key is after a change. The functions of 0003_publish.sql do the same to rows.
CHANGES: dict[Change, dict[KeyState, KeyState]] = {
    "reserve": {_ABSENT: _SENT, _SENT: _SENT, _RESENT: _RESENT, _UNKNOWN: _RESENT, _CONFIRMED: _CONFIRMED},
    "confirm": dict.fromkeys(KeyState, _CONFIRMED),
    "release": {_ABSENT: _ABSENT, _SENT: _ABSENT, _RESENT: _UNKNOWN, _UNKNOWN: _ABSENT, _CONFIRMED: _CONFIRMED},
    "mark_unknown": {**dict.fromkeys(KeyState, _UNKNOWN), _ABSENT: _ABSENT, _CONFIRMED: _CONFIRMED},
}


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
    """Confirmed keys that it no longer recognises, and unknown ones that it let go."""
    evicted_young: int = 0
    """Those of them that had not yet left the promised window: each may let a duplicate through."""
    failed_open: int = 0
    """Keys let through unasked because a store was away or a limit was reached."""
    cache_hits: int = 0
    """Duplicates that a cache in front of a store answered."""


class Resolved(NamedTuple):
    """What became of keys that were unknown."""

    delivered: int
    absent: int
    unknown: int
    """They are not in the log, but may still arrive there, or were removed from it."""


class Filter(ABC, Generic[G_contra]):
    """What a duplicate filter does. Every method may be called from any thread.

    The single forms are made of the batch forms; a filter has those, or ``_settle`` for all but the first.
    """

    takes: Takes = "dedup_key"
    """Which argument of ``produce`` its keys are."""
    writes_key = False
    """Whether messages carry their key in a header, so that it can be found in the log."""
    topic: str | None = None
    """The only topic that it serves, set by the first producer that uses it."""
    is_remote = False
    """Whether its changes wait for a server."""
    reserved_seconds: float = math.inf
    """For how long a key stays reserved whose process says nothing more."""

    def reserve(self, key: G_contra) -> State:
        """Ask for the right to send ``key``; with NEW or UNKNOWN the caller has it and must settle it."""
        return self.reserve_many((key,))[0]

    def confirm(self, key: G_contra) -> None:
        """Settle: the message is in the log. Also for a key found there that nobody had reserved."""
        self.confirm_many((key,))

    def release(self, key: G_contra) -> None:
        """Settle: the message is surely not in the log. A confirmed key stays confirmed."""
        self.release_many((key,))

    def mark_unknown(self, key: G_contra) -> None:
        """Settle: nobody knows whether the message is in the log."""
        self.mark_unknown_many((key,))

    @abstractmethod
    def reserve_many(self, keys: Iterable[G_contra]) -> list[State]:
        """Reserve several keys, in order; the second of two equal ones is in flight.

        All keys are checked first: a key that is refused leaves none reserved.
        """

    def confirm_many(self, keys: Iterable[G_contra]) -> None:
        """Confirm several keys."""
        self._settle("confirm", keys)

    def release_many(self, keys: Iterable[G_contra]) -> None:
        """Release several keys."""
        self._settle("release", keys)

    def mark_unknown_many(self, keys: Iterable[G_contra]) -> None:
        """Mark several keys as unknown."""
        self._settle("mark_unknown", keys)

    @abstractmethod
    def stats(self) -> Stats:
        """Return the figures of this moment."""

    def check_topic(self, topic: str) -> None:
        """Raise for a topic whose keys it could not look for."""

    def check_same(self, key: G_contra, other: G_contra) -> None:
        """Raise for two equal keys that say nevertheless that their messages are different ones."""

    def resolve(self, found: Collection[Any], *, is_sure: bool) -> Resolved:
        """Settle unknown keys by what is in the log: encoded keys, or numbers. The rest is absent if that is sure.

        :raises ConfigurationError: when messages do not carry their keys.
        """
        raise ConfigurationError(
            f"messages of a {type(self).__name__} do not carry their keys, so nothing can be looked for. WindowFilter "
            "and SlotFilter have writes_key=True for that"
        )

    def close(self) -> None:
        """Give back what the filter itself has opened: mostly nothing."""

    def _settle(self, change: Change, keys: Iterable[G_contra]) -> object:
        raise NotImplementedError


class NoFilter(Filter[object]):
    """Lets everything through: for topics where deduplication is off."""

    takes = "nothing"

    def reserve_many(self, keys: Iterable[object]) -> list[State]:
        """Answer that all are new."""
        return [NEW for _ in keys]

    def stats(self) -> Stats:
        """Return nothing but zeros."""
        return Stats()

    def _settle(self, change: Change, keys: Iterable[object]) -> None:
        """Do nothing."""


class MemoryFilter(Filter[G_contra], Generic[G_contra, K]):
    """The part that filters in this process share: the keys that are open. Confirmed keys are a subclass's matter."""

    max_unknown: int | None = None
    """So many unknown keys are kept; None for no bound. The oldest one that is let go counts as absent."""
    keeps_absent = False
    """Whether a released key stays open: a confirmed neighbour would make it look seen."""

    def __init__(self) -> None:
        # Keys in flight and unknown ones; and with ``keeps_absent`` those that failed.
        self._open: dict[K, KeyState] = {}
        # Those of ``_open`` that are unknown, oldest first, and in which epoch they became so.
        self._unknown: dict[K, int] = {}
        # Raised by a subclass whose unknown keys leave by age.
        self._epoch = 0
        # Protects all of the state, a subclass's as well.
        self._lock = threading.Lock()
        self._duplicates = 0
        self._evicted = 0

    def _checked(self, keys: Iterable[G_contra]) -> list[K]:
        """Return the keys in the form in which they are kept, or raise for one that is refused."""
        return checked_all(keys)  # type: ignore[arg-type, return-value]  # a subclass with other keys has its own

    @abstractmethod
    def _seen(self, keys: Sequence[K]) -> Collection[K]:
        """Return those of the keys that are confirmed."""

    @abstractmethod
    def _keep(self, keys: Sequence[K]) -> None:
        """Keep keys as confirmed."""

    def _form(self, key: K) -> object:
        """Return the form of a key in which it is looked for in the log."""
        return encoded(cast("Key", key))

    def _figures(self) -> dict[str, int]:
        """Return the figures that are a subclass's matter."""
        return {}

    def reserve_many(self, keys: Iterable[G_contra]) -> list[State]:
        """Reserve several keys, in order."""
        wanted = self._checked(keys)
        with self._lock:
            return self._reserve(wanted)

    def stats(self) -> Stats:
        """Return the figures of this moment."""
        with self._lock:
            own = self._figures()  # first: what is too old leaves by that
            in_flight = len(self._open) - len(self._unknown) - list(self._open.values()).count(_ABSENT)
            figures = {"in_flight": in_flight, "unknown": len(self._unknown), "duplicates": self._duplicates}
            return Stats(**{"confirmed": -1, "evicted": self._evicted, **figures, **own})

    def resolve(self, found: Collection[Any], *, is_sure: bool) -> Resolved:
        """Settle unknown keys by what is in the log."""
        if not self.writes_key:
            return super().resolve(found, is_sure=is_sure)
        with self._lock:
            unknown = list(self._unknown)
            there = [key for key in unknown if self._form(key) in found]
            self._keep(there)
            self._close(there)
            rest = list(self._unknown) if is_sure else []
            self._change("release", rest)
            return Resolved(len(there), len(rest), len(unknown) - len(there) - len(rest))

    def _settle(self, change: Change, keys: Iterable[G_contra]) -> None:
        settled = self._checked(keys)
        with self._lock:
            if change == "confirm":
                self._keep(settled)
                self._close(settled)
            else:
                self._change(change, settled)

    def _reserve(self, wanted: list[K]) -> list[State]:
        seen = self._seen(wanted)
        if len(wanted) == 1 and not seen and wanted[0] not in self._open:
            self._open[wanted[0]] = _SENT
            return [NEW]
        fresh = dict.fromkeys(wanted, _SENT)
        if not seen and len(fresh) == len(wanted) and (not self._open or self._open.keys().isdisjoint(fresh)):
            self._open.update(fresh)
            return [NEW] * len(wanted)
        answers: list[State] = []
        for key in wanted:
            state = self._open.get(key) or (_CONFIRMED if key in seen else _ABSENT)
            if state is _CONFIRMED:
                self._duplicates += 1
            else:
                self._unknown.pop(key, None)
                self._open[key] = CHANGES["reserve"][state]
            answers.append(ANSWERS[state])
        return answers

    def _close(self, keys: list[K]) -> None:
        deque(map(self._open.pop, keys, repeat(None)), maxlen=0)
        if self._unknown:
            deque(map(self._unknown.pop, keys, repeat(None)), maxlen=0)

    def _change(self, change: Change, keys: Iterable[K]) -> None:
        for key in keys:
            before = self._open.get(key)
            if before is None:
                continue
            state = CHANGES[change][before]
            self._unknown.pop(key, None)
            if state is _ABSENT and change == "release" and not self.keeps_absent:
                del self._open[key]
                continue
            self._open[key] = state
            if state is _UNKNOWN:
                self._unknown[key] = self._epoch
        while self.max_unknown is not None and len(self._unknown) > self.max_unknown:
            self._drop_oldest_unknown()

    def _drop_oldest_unknown(self) -> None:
        oldest = next(iter(self._unknown))
        del self._unknown[oldest], self._open[oldest]
        self._evicted += 1
