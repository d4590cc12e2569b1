"""PostgresChain: dense chains of ints whose seen numbers are one row each in Postgres."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Literal

from .chain import Link
from .errors import KeyRefused
from .keys import INT64
from .protocol import State, Stats
from .reservations import CLEAN, Reservations
from .store import Store

_NEW, _DUPLICATE = State.NEW, State.DUPLICATE


class PostgresChain:
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

    takes: Literal["chain"] = "chain"

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reservations: Reservations[Link] = Reservations()
        self._lock = threading.Lock()
        self._duplicates = 0
        self._ranges: dict[str, int] = {}

    def reserve(self, key: Link) -> State:
        """Ask for the right to send a message."""
        return self.reserve_many((key,))[0]

    def confirm(self, key: Link) -> None:
        """Settle: the message is in the log."""
        self.confirm_many((key,))

    def release(self, key: Link) -> None:
        """Settle: the message is surely not in the log."""
        self.release_many((key,))

    def mark_unknown(self, key: Link) -> None:
        """Settle: nobody knows whether the message is in the log."""
        self.mark_unknown_many((key,))

    def reserve_many(self, keys: Iterable[Link]) -> list[State]:
        """Reserve several messages: one set difference per chain."""
        wanted = [_checked(key) for key in keys]
        with self._lock:
            unseen = {chain: self._unseen(chain, numbers) for chain, numbers in _by_chain(wanted).items()}
            return [self._reserve(key, unseen[key.chain]) for key in wanted]

    def confirm_many(self, keys: Iterable[Link]) -> None:
        """Confirm several messages: one union per chain."""
        found = [_checked(key) for key in keys]
        with self._lock:
            for chain, numbers in sorted(_by_chain(found).items()):
                ((self._ranges[chain],),) = self._store.run("publish_see", chain=chain, numbers=_ranges(numbers))
            for key in found:
                self._reservations.held.pop(key, None)

    def release_many(self, keys: Iterable[Link]) -> None:
        """Forget several messages."""
        with self._lock:
            for key in keys:
                self._reservations.release(key)

    def mark_unknown_many(self, keys: Iterable[Link]) -> None:
        """Doubt several messages."""
        with self._lock:
            for key in keys:
                self._reservations.mark_unknown(key)

    def ranges(self, chain: str) -> int:
        """Return how many ranges the row of a chain had when something was last confirmed; gaps are one less."""
        return self._ranges.get(chain, 0)

    def stats(self) -> Stats:
        """Return the figures of this process; confirmed numbers are not counted, they are not kept one by one."""
        with self._lock:
            in_flight, unknown = self._reservations.count()
            return Stats(confirmed=-1, in_flight=in_flight, unknown=unknown, duplicates=self._duplicates)

    def close(self) -> None:
        """Do nothing; the store is closed by who made it."""

    def _reserve(self, key: Link, unseen: list[tuple[int, int]]) -> State:
        if key in self._reservations.held:
            return self._reservations.again(key)
        number = key.number
        if not any(lower <= number <= upper for lower, upper in unseen):  # type: ignore[operator]  # it was checked
            self._duplicates += 1
            return _DUPLICATE
        self._reservations.held[key] = CLEAN
        return _NEW

    def _unseen(self, chain: str, numbers: list[int]) -> list[tuple[int, int]]:
        return [
            (lower, upper) for lower, upper in self._store.run("publish_unseen", chain=chain, numbers=_ranges(numbers))
        ]


def _by_chain(keys: list[Link]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for chain, number, _ in keys:
        assert isinstance(number, int)
        found.setdefault(chain, []).append(number)
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


def _checked(key: Link) -> Link:
    chain, number, _ = key
    if type(chain) is not str or not chain or "\0" in chain:
        raise KeyRefused(f"a chain's name is a str with something in it, not {chain!r}")
    if type(number) is not int or not 0 <= number < INT64 - 1:
        raise KeyRefused(f"a number of a dense chain is an int from 0 to 2**63 - 2, not {number!r}")
    return key
