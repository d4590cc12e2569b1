"""SharedSlotFilter: slots of a fixed number in a place that several processes share, overwritten on collision."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterable
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol

from exactly_once._log import about
from exactly_once.errors import ConfigurationError

from .by_batch import ByBatch
from .errors import FilterUnavailable
from .guard import Guard
from .keys import GivenKey, checked_all, encoded
from .protocol import State, Stats
from .reservations import Held

logger = logging.getLogger(__name__)

_NEW, _IN_FLIGHT, _UNKNOWN, _DUPLICATE = State.NEW, State.IN_FLIGHT, State.UNKNOWN, State.DUPLICATE
_DIGEST_BYTES = 16

Change = Literal["reserve", "confirm", "release", "mark_unknown"]


class Slot(NamedTuple):
    """What a slot holds: whose digest, and what is known of that key."""

    digest: bytes
    state: bytes
    """c: confirmed, f: in flight, t: in flight again after an attempt that may be in the log, u: unknown"""
    owner: bytes
    """Whose reservation it is."""


class SlotPlace(Protocol):
    """A place of shared slots. It changes a slot only if nobody else has changed it meanwhile."""

    def read(self, slots: list[int]) -> dict[int, tuple[Slot | None, object]]:
        """Return what the slots hold, each with what proves that it is unchanged."""
        ...

    def swap(self, slot: int, proof: object, new: Slot | None) -> bool:
        """Put something else into a slot if it is unchanged; tell whether that was so."""
        ...

    def close(self) -> None:
        """Give back connections."""
        ...


class SharedSlotFilter(ByBatch):
    """Recognises most recent keys, in several processes: ``SharedSlotFilter(MemcachedSlots(...), slots=10**7)``.

    Each key has one slot and overwrites what is there. A slot is changed by compare-and-set, so that of two processes
    with the same key one is told NEW and the other is not. Slots hold digests of 128 bits: a new key is taken for a
    seen one, and its message **lost**, with a probability of 2**-128 per message. Keys that share a slot push each
    other out, also while they are in flight: a duplicate may pass then, with the probability of
    :func:`loss_probability`.

    Where the place cannot be asked, ``on_unavailable="raise"`` (default) raises :class:`FilterUnavailable` and nothing
    is sent; ``"treat_as_new"`` lets everything through and counts it (``stats().failed_open``).

    What it promises after

    - a failed send: the key is absent again if the message surely is not in the log, else unknown;
    - a crash of the process: what it confirmed is there; what it had in flight is in flight until its lease is over,
      then absent;
    - a second process: one of them sends, the other is told IN_FLIGHT or DUPLICATE;
    - a key older than its window: nothing in particular; it may be recognised or be new again;
    - a restart of the place: memcached starts empty.

    Every method may be called from any thread.
    """

    takes: Literal["dedup_key"] = "dedup_key"

    def __init__(
        self,
        place: SlotPlace,
        *,
        slots: int,
        on_unavailable: Literal["raise", "treat_as_new"] = "raise",
        hash_key: bytes = b"exactly-once",
    ) -> None:
        if slots < 1:
            raise ConfigurationError(f"slots={slots!r} must be positive")
        if on_unavailable not in ("raise", "treat_as_new"):
            raise ConfigurationError(f"on_unavailable={on_unavailable!r} is not possible; raise or treat_as_new")
        self._place = place
        self.slots = slots
        self._open = on_unavailable == "treat_as_new"
        self._hash_key = blake2b(hash_key).digest()[:32]  # the same in all processes, unknown to who sends the keys
        self._me = secrets.token_bytes(8)
        self._guard = Guard("this filter")
        self._held: dict[bytes, Held] = {}
        """What this process holds. A slot that is ours and is not in here is from a lost answer."""
        self._lock = threading.Lock()
        self._duplicates = self._evicted = self._failed_open = 0

    def reserve_many(self, keys: Iterable[GivenKey]) -> list[State]:
        """Reserve several keys: one question for all, and one compare-and-set for each that is not a duplicate."""
        answers = [state or _NEW for state in self._change("reserve", keys)]
        self._duplicates += answers.count(_DUPLICATE)
        return answers

    def confirm_many(self, keys: Iterable[GivenKey]) -> None:
        """Confirm several keys."""
        self._change("confirm", keys)

    def release_many(self, keys: Iterable[GivenKey]) -> None:
        """Forget several keys."""
        self._change("release", keys)

    def mark_unknown_many(self, keys: Iterable[GivenKey]) -> None:
        """Doubt several keys."""
        self._change("mark_unknown", keys)

    def stats(self) -> Stats:
        """Return what this process holds and what happened in it; the place itself is not counted."""
        states = list(self._held.values())
        unknown = states.count(Held.UNKNOWN)
        return Stats(
            confirmed=-1,
            in_flight=len(states) - unknown,
            unknown=unknown,
            duplicates=self._duplicates,
            evicted=self._evicted,
            failed_open=self._failed_open,
        )

    def close(self) -> None:
        """Close the place."""
        if self._guard.is_ours():
            self._place.close()

    def _change(self, change: Change, keys: Iterable[GivenKey]) -> list[State | None]:
        self._guard.check()
        places = [self._slot_of(encoded(key)) for key in checked_all(keys)]
        answers: list[State | None] = [None] * len(places)
        todo = list(range(len(places)))
        with self._lock:
            try:
                while todo:
                    todo = self._pass(change, places, todo, answers)
            except FilterUnavailable:
                if not self._open:
                    # Nobody is told that these are reserved: asked for again, they come back as from a lost answer.
                    for (_, digest), answer in zip(places, answers, strict=True):
                        if change == "reserve" and answer in (_NEW, _UNKNOWN):
                            self._held.pop(digest, None)
                    raise
                left = sum(answer is None for answer in answers)
                self._failed_open += left
                logger.warning(
                    "the shared slots are away: %s keys are let through", left, extra=about("keys_let_through")
                )
        return answers

    def _pass(
        self, change: Change, places: list[tuple[int, bytes]], todo: list[int], answers: list[State | None]
    ) -> list[int]:
        """Change each slot once; return the places that must be tried again."""
        found = self._place.read(sorted({places[n][0] for n in todo}))
        again: list[int] = []
        touched: set[int] = set()
        for n in todo:
            slot, digest = places[n]
            if slot in touched:  # changed by an earlier key of this batch: read it again
                again.append(n)
                continue
            touched.add(slot)
            held, proof = found[slot]
            answer, new, changes = step(change, held, digest, self._me, holds=digest in self._held)
            if changes and not self._place.swap(slot, proof, new):
                again.append(n)
                continue
            answers[n] = answer
            if changes and new is not None:
                self._evicted += held is not None and held.digest != digest
            self._note(change, answer, digest)
        return again

    def _slot_of(self, form: bytes) -> tuple[int, bytes]:
        whole = blake2b(form, digest_size=_DIGEST_BYTES + 8, key=self._hash_key).digest()
        return int.from_bytes(whole[_DIGEST_BYTES:], "big") % self.slots, whole[:_DIGEST_BYTES]

    def _note(self, change: Change, answer: State | None, digest: bytes) -> None:
        """Keep the books of what this process holds."""
        if change == "reserve" and answer in (_NEW, _UNKNOWN):
            self._held[digest] = Held.CLEAN if answer is _NEW else Held.TAINTED
        elif change == "confirm":
            self._held.pop(digest, None)
        elif change == "mark_unknown" and digest in self._held:
            self._held[digest] = Held.UNKNOWN
        elif change == "release":
            was = self._held.pop(digest, None)
            if was is Held.TAINTED:
                self._held[digest] = Held.UNKNOWN


def step(
    change: Change, held: Slot | None, digest: bytes, me: bytes, *, holds: bool
) -> tuple[State | None, Slot | None, bool]:
    """Return the answer to a change of a key, what its slot holds afterwards, and whether that is something else.

    Pure: the protocol of one slot.
    """
    state = held.state if held is not None and held.digest == digest else None
    is_open = state in (b"f", b"t")
    is_mine = is_open and held is not None and held.owner == me
    if change == "reserve":
        return _reserved(state, digest, me, is_lost=is_mine and not holds)
    if change == "confirm":
        return None, Slot(digest, b"c", me), state != b"c"
    if is_open and not is_mine:  # our lease was over, and another process has reserved it since
        return None, None, False
    if change == "mark_unknown":
        return None, Slot(digest, b"u", me), is_open
    if state == b"t":
        return None, Slot(digest, b"u", me), True
    return None, None, state in (b"f", b"u")


def _reserved(
    state: bytes | None, digest: bytes, me: bytes, *, is_lost: bool
) -> tuple[State | None, Slot | None, bool]:
    """Answer a reservation; a lost one is our own, of which we never heard that it had worked."""
    if state == b"c":
        return _DUPLICATE, None, False
    if state in (b"f", b"t") and not is_lost:
        return _IN_FLIGHT, None, False
    is_unsure = state in (b"u", b"t")
    return (_UNKNOWN if is_unsure else _NEW), Slot(digest, b"t" if is_unsure else b"f", me), True
