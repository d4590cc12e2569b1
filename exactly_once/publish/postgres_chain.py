"""PostgresChain: dense chains of ints whose seen numbers are one row each in Postgres."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from .chain import Link, Pair, links
from .errors import KeyRefused
from .filter import MemoryFilter
from .keys import INT64, NAME, is_name
from .store import Rows, Store


class PostgresChain(MemoryFilter[Link, Pair]):
    """Recognises numbers of dense chains, durably: ``PostgresChain(store).reserve(Link("sensor-7", 4711))``.

    What a chain has seen is one multirange in one row, whatever its length: nothing grows but with gaps. A batch is
    looked up by one statement and confirmed by one. Up to a hundred gaps of a chain cost nothing, a thousand cost a few
    milliseconds per batch. A batch waits for whoever holds the row of one of its chains. It never takes a new number
    for a seen one. A producer's topics have chains of their own: the row of this one is ``<topic>/sensor-7`` then.

    Thread-safe. ``docs/publishing.md`` says what it promises after a failed send, a crash, beside a second process.
    """

    takes = "chain"
    is_remote = True

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def _checked(self, keys: Iterable[Link]) -> list[Pair]:
        given = links(keys)
        for chain, number, _ in given:
            if not is_name(chain):
                raise KeyRefused(f"a chain's name is {NAME}, not {chain!r}")
            if type(number) is not int or not 0 <= number < INT64 - 1:
                raise KeyRefused(f"a number of a dense chain is an int from 0 to 2**63 - 2, not {number!r}")
        return [key[:2] for key in given]

    def _seen(self, keys: Sequence[Pair]) -> Collection[Pair]:
        return {(chain.removeprefix(self._prefix), number) for chain, number in self._run("publish_seen", keys)}

    def _keep(self, keys: Sequence[Pair]) -> None:
        self._run("publish_see", keys)

    def _run(self, name: str, keys: Sequence[Pair]) -> Rows:
        if not keys:
            return []
        chains, numbers = [self._prefix + chain for chain, _ in keys], [number for _, number in keys]
        return self._store.run(name, chains=chains, numbers=numbers)

    @property
    def _prefix(self) -> str:
        """What tells the chains of topics apart; no topic's name has a slash."""
        return "" if self.topic is None else f"{self.topic}/"
