"""PostgresChain: dense chains of ints whose seen numbers are one row each in Postgres."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import cast

from .chain import Link, Pair
from .errors import KeyRefused
from .filter import MemoryFilter
from .keys import INT64
from .store import Store


class PostgresChain(MemoryFilter[Link, Pair]):
    """Recognises numbers of dense chains, durably: ``PostgresChain(store).reserve(Link("sensor-7", 4711))``.

    What a chain has seen is one multirange in one row, whatever its length: nothing grows but with gaps. A batch is
    looked up by one set difference and confirmed by one union per chain. Up to a hundred gaps cost nothing, a thousand
    cost a few milliseconds per batch. It never takes a new number for a seen one.

    What it promises after

    - a failed send: the number is absent again if the message surely is not in the log, else unknown;
    - a crash of the process: what it confirmed is there; what it had in flight is absent, also what arrived;
    - a second process: nothing, a chain belongs to one process at a time; what both confirm is there;
    - a key older than its window: there is no window.

    Every method may be called from any thread.
    """

    takes = "chain"
    is_remote = True

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._ranges: dict[str, int] = {}

    def ranges(self, chain: str) -> int:
        """Return how many ranges the row of a chain had when something was last confirmed; gaps are one less."""
        return self._ranges.get(chain, 0)

    def _checked(self, keys: Iterable[Link]) -> list[Pair]:
        given = list(keys)
        for chain, number, _ in given:
            if type(chain) is not str or not chain or "\0" in chain:
                raise KeyRefused(f"a chain's name is a str with something in it, not {chain!r}")
            if type(number) is not int or not 0 <= number < INT64 - 1:
                raise KeyRefused(f"a number of a dense chain is an int from 0 to 2**63 - 2, not {number!r}")
        return [key[:2] for key in given]

    def _seen(self, keys: Sequence[Pair]) -> Collection[Pair]:
        """Ask for the set difference: one question for each chain."""
        unseen = {
            chain: self._store.run("publish_unseen", chain=chain, numbers=_ranges(numbers))
            for chain, numbers in _by_chain(keys).items()
        }
        return {
            (chain, number)
            for chain, number in keys
            if not any(lower <= number <= upper for lower, upper in unseen[chain])
        }

    def _keep(self, keys: Sequence[Pair]) -> None:
        """Add the numbers: one union for each chain."""
        for chain, numbers in sorted(_by_chain(keys).items()):
            ((self._ranges[chain],),) = self._store.run("publish_see", chain=chain, numbers=_ranges(numbers))


def _by_chain(keys: Sequence[Pair]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for chain, number in keys:
        found.setdefault(chain, []).append(cast("int", number))
    return found


def _ranges(numbers: list[int]) -> str:
    """Write numbers as a multirange, neighbours in one range."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return "{" + ",".join(f"[{lower},{upper}]" for lower, upper in ranges) + "}"
