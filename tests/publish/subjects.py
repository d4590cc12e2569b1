"""Every filter with the keys that the conformance suite gives it.

Those in memory are here. One that needs a server is made by the fixture of its name in ``conftest.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from exactly_once.publish import ChainFilter, Filter, Link, SequenceFilter, SlotFilter, WindowFilter
from tests.publish.reference import PlainSet, ReferenceFilter

SLOTS = 1 << 14


class Subject(NamedTuple):
    """How to make a filter, and its n-th key; keys rise with n."""

    make: Callable[[], Filter[Any]]
    key: Callable[[int], Any]
    bad: tuple[Any, ...] = ()
    """What it must refuse as a key."""


def as_bytes(n: int) -> bytes:
    return b"key-%06d" % n


BAD_KEYS = (b"", "", 1.5, None, True, ("a", 1), "x" * 1025, b"x" * 1025, 1 << 63, -(1 << 63) - 1)
BAD_SEQUENCES = (-1, 1 << 63, True, 1.0, "1", None)
BAD_LINKS: tuple[Any, ...] = tuple(Link("c", n) for n in (-1, 1 << 63, True, 1.0, "1", (1,), (1, -1), (1, 2, 3)))  # type: ignore[arg-type]
BAD_LINKS += (("c", 1), ("c", 1, None))
BAD_LINKS += (Link("", 1), Link("c", 5, 5), Link("c", 5, 6), Link("c", (5, 0), (5, 0)), Link("c", (5, 0), 4))

IN_MEMORY = {
    "reference": Subject(ReferenceFilter, as_bytes, BAD_KEYS),
    "plain set": Subject(PlainSet, as_bytes),
    "window, bytes": Subject(lambda: WindowFilter(keys=10_000), as_bytes, BAD_KEYS),
    "window, str": Subject(lambda: WindowFilter(keys=10_000), "key-{:06}".format),
    "window, int": Subject(lambda: WindowFilter(keys=10_000), int),
    "window, by time": Subject(lambda: WindowFilter(seconds=3600), as_bytes, BAD_KEYS),
    "slots, 1 way": Subject(lambda: SlotFilter(1 << 20, ways=1, fingerprint=128, seed=7), as_bytes, BAD_KEYS),
    "slots, 8 ways": Subject(lambda: SlotFilter(SLOTS, ways=8, seed=7, window=100), as_bytes, BAD_KEYS),
    "slots, 64 bits": Subject(lambda: SlotFilter(SLOTS, ways=8, fingerprint=64, seed=7), as_bytes, BAD_KEYS),
    "slots, 128 bits": Subject(lambda: SlotFilter(SLOTS, ways=16, fingerprint=128, seed=7), as_bytes, BAD_KEYS),
    "sequence": Subject(SequenceFilter, int, BAD_SEQUENCES),
    "sequence with holes": Subject(SequenceFilter, lambda n: 10 * n + 3, BAD_SEQUENCES),
    "dense chain": Subject(lambda: ChainFilter(dense=True), lambda n: Link("c", n), BAD_LINKS[:-4]),
    "chain of ints": Subject(ChainFilter, lambda n: Link("c", 10 * n + 10, 10 * n), BAD_LINKS),
    "chain of pairs": Subject(
        ChainFilter, lambda n: Link("c", (n // 3, n % 3), ((n - 1) // 3, (n - 1) % 3) if n else None), BAD_LINKS
    ),
    "chain without references": Subject(ChainFilter, lambda n: Link("c", n), BAD_LINKS),
}
ON_SERVERS: tuple[str, ...] = (
    "postgres_window",
    "sharded_window",
    "memcached_slots",
    "postgres_chain",
)
"""Names of fixtures."""
