"""SlotFilter: a fixed number of slots, overwritten on collision; the opposite of a Bloom filter. No I/O."""

from __future__ import annotations

import secrets
import threading
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Literal

from exactly_once.errors import ConfigurationError

from .keys import MAX_KEY_LENGTH, GivenKey, Key, checked, checked_all, encoded
from .protocol import State, Stats
from .reservations import CLEAN, Reservations
from .sizing import WAYS

_NEW, _DUPLICATE = State.NEW, State.DUPLICATE
_STAMP_MASK = 0xFFFFFFFF
_SHIFT = 20

Fingerprint = Literal[64, 128]


class SlotFilter:
    """Recognises most recent keys in fixed memory: ``SlotFilter(slots=2**20, ways=8)``.

    A key falls into a bucket of ``ways`` slots and overwrites the oldest there. So a duplicate may be let through,
    with the probability that :func:`loss_probability` gives; ``ways=1`` is the original, 8 or 16 lose 100 to 1000
    times less for the same memory. By default slots hold whole keys and a new key is never taken for a seen one.
    ``fingerprint=64`` or ``128`` holds that many bits instead: then a new key is taken for a seen one, and its message
    **lost**, with a probability of at most ways / 2**64 or ways / 2**128 per message.

    With ``window=`` the filter counts evictions of keys younger than that many confirmations
    (``stats().evicted_young``): each is a duplicate that it would not notice.

    What it promises after

    - a failed send: the key is absent again if the message surely is not in the log, else unknown;
    - a crash of the process: nothing, it starts empty;
    - a second process: nothing, each has its own (see SharedSlotFilter);
    - a key older than its window: nothing in particular; it may be recognised or be new again.

    Reservations are held beside the slots, one entry per message in flight. Every method may be called from any thread.
    """

    def __init__(
        self,
        slots: int,
        *,
        ways: int = 8,
        fingerprint: Fingerprint | None = None,
        window: int | None = None,
        seed: int | None = None,
    ) -> None:
        if ways not in WAYS:
            raise ConfigurationError(f"ways={ways!r} is not possible; choose one of {', '.join(map(str, WAYS))}")
        if slots < ways or slots % ways:
            raise ConfigurationError(f"slots={slots!r} must be a multiple of ways={ways}")
        if fingerprint not in (None, 64, 128):
            raise ConfigurationError(
                f"fingerprint={fingerprint!r} is not possible; choose 64, 128 or None (whole keys)"
            )
        if window is not None and not 0 < window <= _STAMP_MASK:
            raise ConfigurationError(f"window={window!r} must lie between 1 and {_STAMP_MASK}")
        self.slots, self.ways = slots, ways
        seed = secrets.randbits(63) if seed is None else seed
        self._table = (
            _KeyTable(slots, ways, seed) if fingerprint is None else _DigestTable(slots, ways, seed, fingerprint)
        )
        self._ages = None if window is None else _Ages(slots, window)
        self._reservations: Reservations[Key] = Reservations()
        self._held = self._reservations.held
        self._lock = threading.Lock()
        self._duplicates = 0

    def reserve(self, key: GivenKey) -> State:
        """Ask for the right to send ``key``."""
        if (type(key) is not bytes and type(key) is not str) or not 0 < len(key) <= MAX_KEY_LENGTH:
            key = checked(key)
        with self._lock:
            if self._table.holds(key):
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
            # What was reserved was not in the table.
            place = self._table.put(key, is_new=self._held.pop(key, None) is not None)
            if self._ages is not None and place >= 0:
                self._ages.note(place)

    def release(self, key: GivenKey) -> None:
        """Settle: the message is surely not in the log."""
        self.release_many((key,))

    def mark_unknown(self, key: GivenKey) -> None:
        """Settle: nobody knows whether the message is in the log."""
        self.mark_unknown_many((key,))

    def reserve_many(self, keys: Iterable[GivenKey]) -> list[State]:
        """Reserve several keys, in order."""
        wanted = checked_all(keys)
        held, again = self._held, self._reservations.again
        states = []
        with self._lock:
            known = self._table.known(wanted)
            fresh = dict.fromkeys(wanted, CLEAN)
            if not known and len(fresh) == len(wanted) and held.keys().isdisjoint(wanted):
                held.update(fresh)
                return [_NEW] * len(wanted)
            for key in wanted:
                if key in known:
                    self._duplicates += 1
                    states.append(_DUPLICATE)
                elif key in held:
                    states.append(again(key))
                else:
                    held[key] = CLEAN
                    states.append(_NEW)
        return states

    def confirm_many(self, keys: Iterable[GivenKey]) -> None:
        """Confirm several keys."""
        found = checked_all(keys)
        pop = self._held.pop
        with self._lock:
            places = self._table.put_many((key, pop(key, None) is not None) for key in found)
            if self._ages is not None:
                for place in places:
                    self._ages.note(place)

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
            in_flight, unknown = self._reservations.count()
            stored = self._table.stored
            evicted = self._table.evicted
            return Stats(
                confirmed=stored - evicted,
                in_flight=in_flight,
                unknown=unknown,
                duplicates=self._duplicates,
                evicted=evicted,
                evicted_young=0 if self._ages is None else self._ages.young,
            )

    def close(self) -> None:
        """Do nothing; there is nothing to give back."""


class _KeyTable:
    """Slots with whole keys: 8 bytes a slot and the key objects."""

    __slots__ = ("_buckets", "_factor", "_heads", "_slots", "_ways", "evicted", "stored")

    def __init__(self, slots: int, ways: int, seed: int) -> None:
        self._slots: list[Key | None] = [None] * slots
        self._ways = ways
        self._buckets = slots // ways
        self._heads = bytearray(self._buckets)
        # Multiplying by a secret odd number and keeping the high bits: which keys collide depends on the secret.
        # An int is its own hash, and low bits that are all zero would stay so: a tuple of it mixes them. Putting the
        # seed into that tuple would not do instead: it moves all keys by the same distance.
        self._factor = int.from_bytes(blake2b(b"%d" % seed, digest_size=8).digest(), "big") | 1
        self.stored = self.evicted = 0

    def holds(self, key: Key) -> bool:
        """Tell whether the key is in its bucket."""
        place = (hash((key,)) * self._factor >> _SHIFT) % self._buckets * self._ways
        return key in self._slots[place : place + self._ways]

    def known(self, keys: list[Key]) -> set[Key]:
        """Return those of the keys that are in their buckets."""
        slots, factor, buckets, ways = self._slots, self._factor, self._buckets, self._ways
        return {
            key
            for key in keys
            if key in slots[(place := (hash((key,)) * factor >> _SHIFT) % buckets * ways) : place + ways]
        }

    def put_many(self, keys: Iterable[tuple[Key, bool]]) -> list[int]:
        """Store keys as ``put`` does, of each told whether it is new; return the slots of those stored."""
        slots, heads, factor, buckets, ways = self._slots, self._heads, self._factor, self._buckets, self._ways
        places = []
        for key, is_new in keys:
            bucket = (hash((key,)) * factor >> _SHIFT) % buckets
            place = bucket * ways
            if not is_new and key in slots[place : place + ways]:
                continue
            head = heads[bucket]
            heads[bucket] = head + 1 if head + 1 < ways else 0
            place += head
            if slots[place] is not None:
                self.evicted += 1
            slots[place] = key
            places.append(place)
        self.stored += len(places)
        return places

    def put(self, key: Key, *, is_new: bool) -> int:
        """Store the key over the oldest of its bucket; return the slot, or -1 if it is there already."""
        ways = self._ways
        bucket = (hash((key,)) * self._factor >> _SHIFT) % self._buckets
        place = bucket * ways
        slots = self._slots
        if not is_new and key in slots[place : place + ways]:
            return -1
        head = self._heads[bucket]
        self._heads[bucket] = (head + 1) % ways
        place += head
        self.stored += 1
        if slots[place] is not None:
            self.evicted += 1
        slots[place] = key
        return place


class _DigestTable:
    """Slots with keyed digests of 8 or 16 bytes, in one array of bytes."""

    __slots__ = ("_buckets", "_bytes", "_data", "_empty", "_heads", "_key", "_ways", "evicted", "stored")

    def __init__(self, slots: int, ways: int, seed: int, bits: int) -> None:
        self._bytes = bits // 8
        self._data = bytearray(slots * self._bytes)
        self._empty = bytes(self._bytes)
        self._ways = ways
        self._buckets = slots // ways
        self._heads = bytearray(self._buckets)
        self._key = seed.to_bytes(16, "big", signed=True)
        self.stored = self.evicted = 0

    def holds(self, key: Key) -> bool:
        """Tell whether the key's digest is in its bucket."""
        digest, bucket = self._place(key)
        return self._find(digest, bucket)

    def known(self, keys: list[Key]) -> set[Key]:
        """Return those of the keys whose digests are in their buckets."""
        return {key for key in keys if self.holds(key)}

    def put_many(self, keys: Iterable[tuple[Key, bool]]) -> list[int]:
        """Store digests as ``put`` does, of each key told whether it is new; return the slots of those stored."""
        return [place for key, is_new in keys if (place := self.put(key, is_new=is_new)) >= 0]

    def put(self, key: Key, *, is_new: bool) -> int:
        """Store the digest over the oldest of its bucket; return the slot, or -1 if it is there already."""
        digest, bucket = self._place(key)
        if not is_new and self._find(digest, bucket):
            return -1
        head = self._heads[bucket]
        self._heads[bucket] = (head + 1) % self._ways
        slot = bucket * self._ways + head
        start = slot * self._bytes
        self.stored += 1
        if self._data[start : start + self._bytes] != self._empty:
            self.evicted += 1
        self._data[start : start + self._bytes] = digest
        return slot

    def _place(self, key: Key) -> tuple[bytes, int]:
        # The bucket comes from bits of its own, so that every bit of the fingerprint tells keys of a bucket apart.
        whole = blake2b(encoded(key), digest_size=self._bytes + 8, key=self._key).digest()
        digest = whole[: self._bytes]
        # All zeros marks an empty slot.
        return digest if digest != self._empty else b"\1" * self._bytes, int.from_bytes(
            whole[-8:], "big"
        ) % self._buckets

    def _find(self, digest: bytes, bucket: int) -> bool:
        size = self._ways * self._bytes
        start = bucket * size
        at = self._data.find(digest, start, start + size)
        while at >= 0 and (at - start) % self._bytes:  # across two slots: not an entry
            at = self._data.find(digest, at + 1, start + size)
        return at >= 0


class _Ages:
    """When each slot was last written, counted in confirmations: 4 bytes a slot."""

    __slots__ = ("_count", "_stamps", "_window", "young")

    def __init__(self, slots: int, window: int) -> None:
        self._stamps = array("I", bytes(4 * slots))
        self._window = window
        self._count = 0
        self.young = 0

    def note(self, slot: int) -> None:
        """Count the eviction if what was in the slot was young."""
        self._count += 1
        stamp = self._stamps[slot]
        if stamp and (self._count - stamp) & _STAMP_MASK <= self._window:
            self.young += 1
        self._stamps[slot] = self._count & _STAMP_MASK or 1
