"""SlotFilter: a fixed number of slots, overwritten on collision; the opposite of a Bloom filter. No I/O.

Sizing, below: with one way the formula of the original, P(lost after X further keys) = 1 - (1 - 1/N)^X. With w ways a
key is lost when w others fell into its bucket: P(Poisson(X * w / N) >= w).
"""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Literal

from exactly_once.errors import ConfigurationError
from exactly_once.kafka.kinds import check_choice, check_kinds

from .filter import MemoryFilter
from .keys import GivenKey, Key, encoded

WAYS = (1, 2, 4, 8, 16)
_STAMP_MASK = 0xFFFFFFFF
# Low bits of a product depend on few bits of its factors.
_SHIFT = 20

Fingerprint = Literal[64, 128]


class SlotFilter(MemoryFilter[GivenKey, Key]):
    """Recognises most recent keys in fixed memory: ``SlotFilter(slots=2**20, ways=8)``.

    A key falls into a bucket of ``ways`` slots and overwrites the oldest there. So a duplicate may be let through,
    with the probability that :func:`loss_probability` gives; ``ways=1`` is the original, 8 or 16 lose 100 to 1000
    times less for the same memory. By default slots hold whole keys and a new key is never taken for a seen one.
    ``fingerprint=64`` or ``128`` holds that many bits instead: then a new key is taken for a seen one, and its message
    **lost**, with a probability of at most ways / 2**64 or ways / 2**128 per message.

    With ``window=`` the filter counts evictions of keys younger than that many confirmations
    (``stats().evicted_young``): each is a duplicate that it would not notice.

    Thread-safe. ``docs/publishing.md`` says what it promises after a failed send, a crash, beside a second process.
    Keys in flight and unknown ones are held beside the slots, of unknown ones as many as there are slots: an older one
    is new again (``stats().evicted``).
    """

    def __init__(
        self,
        slots: int,
        *,
        ways: int = 8,
        fingerprint: Fingerprint | None = None,
        window: int | None = None,
        writes_key: bool = False,
        seed: int | None = None,
    ) -> None:
        check_kinds(SlotFilter.__init__, locals())
        super().__init__()
        self.writes_key = writes_key
        _check(1, ways)
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
        self._table: _KeyTable | _DigestTable = (
            _KeyTable(slots, ways, seed) if fingerprint is None else _DigestTable(slots, ways, seed, fingerprint)
        )
        self._window = window or 0
        # When each slot was last written, counted in confirmations: 4 bytes a slot.
        self._stamps = array("I", bytes(0 if window is None else 4 * slots))
        self._count = self._young = 0
        self.max_unknown = slots

    def _seen(self, keys: Sequence[Key]) -> Collection[Key]:
        return self._table.known(keys)

    def _keep(self, keys: Sequence[Key]) -> None:
        slots = self._table.put(keys)
        for slot in slots if self._window else ():
            self._count += 1
            stamp = self._stamps[slot]
            self._young += bool(stamp and (self._count - stamp) & _STAMP_MASK <= self._window)
            self._stamps[slot] = self._count & _STAMP_MASK or 1

    def _figures(self) -> dict[str, int]:
        evicted = self._table.evicted
        kept = self._table.stored - evicted
        return {"confirmed": kept, "evicted": self._evicted + evicted, "evicted_young": self._young}


class _KeyTable:
    """Buckets of slots with whole keys: 8 bytes a slot and the key objects."""

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
        # Since the beginning.
        self.stored = self.evicted = 0

    def known(self, keys: Iterable[Key]) -> set[Key]:
        """Return those of the keys that are in their buckets."""
        slots, factor, buckets, ways = self._slots, self._factor, self._buckets, self._ways
        return {
            key
            for key in keys
            if key in slots[(place := (hash((key,)) * factor >> _SHIFT) % buckets * ways) : place + ways]
        }

    def put(self, keys: Iterable[Key]) -> list[int]:
        """Store each key that is not there over the oldest of its bucket; return the slots that were written."""
        slots, heads, factor, buckets, ways = self._slots, self._heads, self._factor, self._buckets, self._ways
        written = []
        for key in keys:
            bucket = (hash((key,)) * factor >> _SHIFT) % buckets
            place = bucket * ways
            if key in slots[place : place + ways]:
                continue
            head = heads[bucket]
            heads[bucket] = head + 1 if head + 1 < ways else 0
            place += head
            if slots[place] is not None:
                self.evicted += 1
            slots[place] = key
            written.append(place)
        self.stored += len(written)
        return written


class _DigestTable:
    """The same with keyed digests of 8 or 16 bytes, in one array of bytes."""

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

    def known(self, keys: Iterable[Key]) -> set[Key]:
        return {key for key in keys if self._find(*self._place(key))}

    def put(self, keys: Iterable[Key]) -> list[int]:
        written = []
        for key in keys:
            digest, bucket = self._place(key)
            if self._find(digest, bucket):
                continue
            head = self._heads[bucket]
            self._heads[bucket] = (head + 1) % self._ways
            slot = bucket * self._ways + head
            start = slot * self._bytes
            if self._data[start : start + self._bytes] != self._empty:
                self.evicted += 1
            self._data[start : start + self._bytes] = digest
            written.append(slot)
        self.stored += len(written)
        return written

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


def slots_for(messages: int, loss_probability: float, ways: int = 1) -> int:
    """Return how many slots keep a key through ``messages`` further ones, but for ``loss_probability``."""
    _check(messages, ways, loss_probability)
    if ways == 1:
        return max(1, round(-1 / math.expm1(math.log1p(-loss_probability) / messages)))
    return math.ceil(messages / _load(loss_probability, ways)) * ways


def loss_probability(messages: int, slots: int, ways: int = 1) -> float:
    """Return the probability that a key is lost after ``messages`` further ones."""
    _check(messages, ways)
    if slots < ways:
        raise ConfigurationError(f"slots={slots!r} must be at least ways={ways}")
    if ways == 1:
        return 1.0 if slots == 1 else -math.expm1(messages * math.log1p(-1 / slots))
    return _at_least(ways, messages * ways / slots)


def messages_for(slots: int, loss_probability: float, ways: int = 1) -> int:
    """Return how many further messages a key survives, but for ``loss_probability``."""
    _check(1, ways, loss_probability)
    if ways == 1:
        return round(math.log1p(-loss_probability) / math.log1p(-1 / slots)) if slots > 1 else 0
    return math.floor(_load(loss_probability, ways) * slots / ways)


def _load(probability: float, ways: int) -> float:
    """Find the mean number of keys per bucket at which ``ways`` or more come with this probability."""
    low, high = 0.0, 1.0
    while _at_least(ways, high) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_least(ways, middle) < probability else (low, middle)
    return high


def _at_least(count: int, mean: float) -> float:
    """P(Poisson(mean) >= count), without losing what is tiny."""
    if mean <= 0:
        return 0.0
    if mean > count:
        return max(0.0, 1.0 - sum(_poisson(n, mean) for n in range(count)))
    total, number = 0.0, count
    while (term := _poisson(number, mean)) > total * 1e-18:
        total += term
        number += 1
    return total


def _poisson(number: int, mean: float) -> float:
    return math.exp(number * math.log(mean) - mean - math.lgamma(number + 1))


def _check(messages: int, ways: int, loss_probability: float = 0.5) -> None:
    if messages < 1:
        raise ConfigurationError(f"messages={messages!r} must be positive")
    if not 0 < loss_probability < 1:
        raise ConfigurationError(f"loss_probability={loss_probability!r} must lie between 0 and 1")
    check_choice("ways", ways, WAYS)
