"""ChainFilter: per chain of messages, the intervals that were not seen yet. No I/O."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable
from itertools import repeat
from typing import Any, Literal, NamedTuple, cast, get_args

from exactly_once.errors import ConfigurationError

from .errors import InconsistentChain, KeyRefused, LimitReached, SnapshotCorrupted
from .intervals import Intervals, Links, Number, just_below
from .keys import INT64
from .protocol import State, Stats
from .reservations import Held
from .snapshot import pack, unpack

_NEW, _DUPLICATE, _IN_FLIGHT, _UNKNOWN = State.NEW, State.DUPLICATE, State.IN_FLIGHT, State.UNKNOWN
_CLEAN, _TAINTED, _DOUBTED, _FAILED = Held.CLEAN, Held.TAINTED, Held.UNKNOWN, Held.FAILED
_KIND = "ChainFilter"

GapPolicy = Literal["raise", "treat_as_new", "treat_as_seen"]


class Link(NamedTuple):
    """The identity of a message: its chain and number there; and the number of the message before it, if known."""

    chain: str
    number: Number
    previous: Number | None = None

    def __eq__(self, other: object) -> bool:
        """Compare the identity; a message with another reference is the same message."""
        return isinstance(other, Link) and self[:2] == other[:2]

    def __hash__(self) -> int:
        return hash(self[:2])


class ChainFilter:
    """Recognises messages of chains by what is missing: ``reserve(Link("sensor-7", (time, 0), previous=(time0, 3)))``.

    Numbers are pairs (timestamp, sequence_no) or ints that rise along a chain, with holes, and arrive in any order.
    ``dense=True`` is the simple case: ints without holes from ``first`` on, each the predecessor of the next, so that
    ``previous`` is not given. Where ``previous`` is left out otherwise, the service is best effort: a number not above
    the highest one seen is a duplicate, unless a gap is known to hold it; a message that was overtaken is then
    **lost**. Memory is a few numbers per gap, and per failed message that is not sent again.

    A chain may have ``max_gaps`` gaps. Beyond them ``on_full`` decides: ``treat_as_new`` (default) forgets what was
    seen between the two lowest gaps, so that a duplicate of that may pass; ``treat_as_seen`` closes the lowest gap, so
    that its messages are **lost**; ``raise`` refuses the message.

    What it promises after

    - a failed send: the number is absent again if the message surely is not in the log, else unknown;
    - a crash of the process: what the last ``to_bytes()`` held; with PostgresChain what was confirmed;
    - a second process: nothing, a chain belongs to one process at a time;
    - a key older than its window: there is no window but ``max_gaps``.

    Every method may be called from any thread.
    """

    takes: Literal["chain"] = "chain"

    def __init__(
        self, *, dense: bool = False, first: int = 0, max_gaps: int = 10_000, on_full: GapPolicy = "treat_as_new"
    ) -> None:
        if on_full not in get_args(GapPolicy):
            raise ConfigurationError(
                f"on_full={on_full!r} is not possible; choose one of {', '.join(get_args(GapPolicy))}"
            )
        if max_gaps < 1:
            raise ConfigurationError(f"max_gaps={max_gaps!r} must be at least 1")
        self._dense = dense
        self._first = first
        self._max_gaps = max_gaps
        self._on_full = on_full
        self._chains: dict[str, Intervals] = {}
        self._held: dict[str, dict[Number, Held]] = {}
        self._links: dict[str, Links] = {}
        self._lock = threading.Lock()
        self._duplicates = 0
        self._failed_open = 0
        self._lost = 0

    def reserve(self, key: Link) -> State:
        """Ask for the right to send a message."""
        if self._dense:
            chain, number, _ = key
            with self._lock:
                intervals = self._chains.get(chain)
                # In order: above everything seen, and nothing to be refused.
                if intervals is not None and type(number) is int and number == intervals.lowers[-1] + 1 < INT64:
                    held = self._held[chain]
                    if number not in held:
                        held[number] = _CLEAN
                        return _NEW
        self._check(key)
        with self._lock:
            return self._reserve(key)

    def confirm(self, key: Link) -> None:
        """Settle: the message is in the log."""
        if self._dense:
            chain, number, _ = key
            with self._lock:
                intervals = self._chains.get(chain)
                if intervals is not None and type(number) is int and number == intervals.lowers[-1] + 1 < INT64:
                    self._held[chain].pop(number, None)
                    intervals.lowers[-1] = number
                    return
        self._check(key)
        with self._lock:
            self._confirm(key)

    def release(self, key: Link) -> None:
        """Settle: the message is surely not in the log."""
        self.release_many((key,))

    def mark_unknown(self, key: Link) -> None:
        """Settle: nobody knows whether the message is in the log."""
        self.mark_unknown_many((key,))

    def reserve_many(self, keys: Iterable[Link]) -> list[State]:
        """Reserve several messages, in order.

        :raises InconsistentChain: for the first whose reference cannot be right; none is reserved then.
        """
        wanted = list(keys)
        with self._lock:
            if self._dense and self._reserve_run(wanted):
                return [_NEW] * len(wanted)
        for key in wanted:
            self._check(key)
        with self._lock:
            states: list[State] = []
            try:
                for key in wanted:
                    states.append(self._reserve(key))  # noqa: PERF401 - what was reserved before an error is needed
            except (KeyRefused, LimitReached):
                for key, state in zip(wanted, states, strict=False):
                    if state in (_NEW, _UNKNOWN):
                        self._forget(key)
                raise
            return states

    def confirm_many(self, keys: Iterable[Link]) -> None:
        """Confirm several messages."""
        found = list(keys)
        with self._lock:
            if self._dense and self._confirm_run(found):
                return
        for key in found:
            self._check(key)
        with self._lock:
            for key in found:
                self._confirm(key)

    def release_many(self, keys: Iterable[Link]) -> None:
        """Forget several messages."""
        with self._lock:
            for key in keys:
                self._forget(key)

    def mark_unknown_many(self, keys: Iterable[Link]) -> None:
        """Doubt several messages."""
        with self._lock:
            for chain, number, _ in keys:
                held = self._held.get(chain, {})
                if held.get(number, _FAILED) is not _FAILED:
                    held[number] = _DOUBTED

    def unseen(self, chain: str) -> list[tuple[Any, Any]]:
        """Return the intervals of a chain, lowest first: both ends belong to them where numbers are ints."""
        with self._lock:
            found = self._chains.get(chain)
            if found is None:
                return []
            is_int = isinstance(found.infinity, float)
            return [(lower + 1 if is_int else lower, upper) for lower, upper in found.pairs()]

    def drop(self, chain: str) -> None:
        """Forget a chain that has ended."""
        with self._lock:
            self._chains.pop(chain, None)
            self._held.pop(chain, None)
            self._links.pop(chain, None)

    def stats(self) -> Stats:
        """Return the figures of this moment; confirmed numbers are not counted, they are not kept."""
        with self._lock:
            states = [state for held in self._held.values() for state in held.values()]
            unknown = states.count(_DOUBTED)
            return Stats(
                confirmed=-1,
                in_flight=len(states) - unknown - states.count(_FAILED),
                unknown=unknown,
                duplicates=self._duplicates,
                evicted=self._failed_open + self._lost,
                failed_open=self._failed_open,
            )

    def close(self) -> None:
        """Do nothing; there is nothing to give back."""

    def to_bytes(self) -> bytes:
        """Return a snapshot of what is confirmed, and of what is in flight: that may be in the log, or not."""
        with self._lock:
            names = dict.fromkeys((*self._chains, *self._held))
            return pack(_KIND, {name: self._dump(name) for name in names})

    def load_bytes(self, data: bytes) -> None:
        """Load a snapshot, whole or not at all.

        :raises SnapshotCorrupted: when it is cut short, altered or not one of these.
        """
        try:
            loaded = {str(name): _loaded(**content) for name, content in unpack(_KIND, data).items()}
        except (TypeError, ValueError, KeyError) as error:
            raise SnapshotCorrupted(f"the snapshot is whole, but not a ChainFilter's: {error}") from error
        with self._lock:
            for chain, (intervals, links, held) in loaded.items():
                if intervals is not None:
                    self._chains[chain] = intervals
                self._links[chain] = links
                self._held.setdefault(chain, {}).update(held)

    def _dump(self, name: str) -> dict[str, Any]:
        """Return a chain as plain data."""
        intervals, held = self._chains.get(name), self._held.get(name, {})
        return {
            "is_int": intervals is None or isinstance(intervals.infinity, float),
            "pairs": None if intervals is None else [[_plain(a), _plain(b)] for a, b in intervals.pairs()],
            "links": list(self._links[name].previous.items()) if name in self._links else [],
            "unknown": [number for number, state in held.items() if state is not _FAILED],
            "failed": [number for number, state in held.items() if state is _FAILED],
        }

    def _reserve(self, key: Link) -> State:
        chain, number, previous = key
        held = self._held.setdefault(chain, {})
        if number in held:
            return _again(held, number)
        intervals = self._find(chain, number)
        if intervals is not None:
            place = intervals.find(number)
            if place < 0:
                if previous is not None and not self._dense:
                    intervals.check_seen(number, previous)
                    if chain in self._links:
                        self._links[chain].check(number, previous)
                self._duplicates += 1
                return _DUPLICATE
            if previous is not None and not self._dense:
                intervals.check(place, number, previous)
            if self._on_full == "raise":
                self._refuse_full(intervals, place, key)
        held[number] = _CLEAN
        return _NEW

    def _confirm(self, key: Link) -> None:
        chain, number, previous = key
        intervals = self._find(chain, number)
        self._held.setdefault(chain, {}).pop(number, None)
        if intervals is None:
            intervals = self._chains[chain] = self._intervals_for(number, previous)
        place = intervals.find(number)
        if place < 0:
            return
        named = previous
        # A message that was sent meanwhile may have moved the lower end above the reference.
        previous = max(self._previous(number, previous, intervals, place), intervals.lowers[place])
        intervals.mark(place, number, previous)
        if named is not None and not self._dense:
            self._links.setdefault(chain, Links()).add(number, named, intervals)
        while intervals.gaps() > self._max_gaps and self._on_full != "raise":
            if self._on_full == "treat_as_seen":
                self._lost += 1
                intervals.drop_lowest()
            else:
                self._failed_open += 1
                intervals.join_lowest()

    def _forget(self, key: Link) -> None:
        held = self._held.get(key.chain, {})
        state = held.get(key.number)
        if state is _TAINTED:
            held[key.number] = _DOUBTED
        elif state is not None and key.previous is None and not self._dense:
            # Its retry may come after a higher number, and must not look like a duplicate then.
            held[key.number] = _FAILED
        else:
            held.pop(key.number, None)

    def _reserve_run(self, keys: list[Link]) -> bool:
        """Reserve a run of a dense chain that goes on where it ends; tell whether it was one."""
        numbers, chain = _run(keys)
        intervals = self._chains.get(chain)
        if intervals is None or not numbers or numbers[0] <= intervals.lowers[-1] or self._on_full == "raise":
            return False
        held = self._held[chain]
        if held and not held.keys().isdisjoint(numbers):
            return False
        held.update(dict.fromkeys(numbers, _CLEAN))
        return True

    def _confirm_run(self, keys: list[Link]) -> bool:
        """Confirm a run of a dense chain that goes on where it ends; tell whether it was one."""
        numbers, chain = _run(keys)
        intervals = self._chains.get(chain)
        if intervals is None or not numbers or numbers[0] != intervals.lowers[-1] + 1:
            return False
        deque(map(self._held[chain].pop, numbers, repeat(None)), maxlen=0)
        intervals.lowers[-1] = numbers[-1]
        return True

    def _intervals_for(self, number: Number, previous: Number | None) -> Intervals:
        """Start a chain: without a reference nothing below its first message is expected."""
        if self._dense:
            return Intervals.of_ints(self._first)
        intervals = Intervals.of_ints() if isinstance(number, int) else Intervals.of_pairs()
        if previous is None:
            intervals.lowers[0] = just_below(number)
        return intervals

    def _previous(self, number: Number, previous: Number | None, intervals: Intervals, place: int) -> Any:
        """Return what lies directly before a number, as far as anybody knows."""
        if previous is not None and not self._dense:
            return previous
        if self._dense or place < intervals.gaps():
            return just_below(number)
        return intervals.lowers[place]  # best effort: nothing is expected between the highest one and this

    def _find(self, chain: str, number: Number) -> Intervals | None:
        intervals = self._chains.get(chain)
        if (
            intervals is not None
            and not self._dense
            and isinstance(number, int) is isinstance(intervals.infinity, tuple)
        ):
            raise KeyRefused(f"chain {chain!r} has other numbers than {number!r}: ints and pairs do not mix")
        return intervals

    def _refuse_full(self, intervals: Intervals, place: int, key: Link) -> None:
        chain, number, previous = key
        previous = self._previous(number, previous, intervals, place)
        if intervals.gaps() >= self._max_gaps and intervals.divides(place, number, previous):
            raise LimitReached(f"chain {chain!r} has {intervals.gaps()} gaps; {number} would make one more")

    def _check(self, key: Link) -> None:
        chain, number, previous = key
        if type(chain) is not str or not chain:
            raise KeyRefused(f"a chain's name is a str with something in it, not {chain!r}")
        if self._dense:
            if type(number) is not int or not self._first <= number < INT64:
                raise KeyRefused(f"a number of a dense chain is an int from {self._first} to 2**63 - 1, not {number!r}")
            return
        _check_number(number)
        if previous is not None:
            _check_number(previous)
            if isinstance(previous, int) is not isinstance(number, int):
                raise KeyRefused(f"{number!r} and {previous!r}: ints and pairs do not mix")
            if cast("Any", previous) >= number:
                raise InconsistentChain(f"the message {number} names {previous} as the one before it")


def _run(keys: list[Link]) -> tuple[list[int], str]:
    """Return the numbers and the chain of keys that are a run of ints of one chain; else no numbers."""
    if not keys:
        return [], ""
    chain = keys[0][0]
    numbers = [cast("int", key[1]) for key in keys]
    first, last = numbers[0], numbers[-1]
    if type(first) is not int or type(last) is not int or last - first + 1 != len(numbers) or last >= INT64:
        return [], chain
    is_run = numbers == list(range(first, last + 1)) and set(map(type, numbers)) == {int}
    return (numbers if is_run and {key[0] for key in keys} == {chain} else []), chain


def _again(held: dict[Number, Held], number: Number) -> State:
    """Answer a reservation of a number that is held."""
    state = held[number]
    if state is _DOUBTED:
        held[number] = _TAINTED
        return _UNKNOWN
    if state is _FAILED:
        held[number] = _CLEAN
        return _NEW
    return _IN_FLIGHT


def _check_number(number: object) -> None:
    parts = number if isinstance(number, tuple) and len(number) == 2 else (number,)
    if not all(type(part) is int and 0 <= part < INT64 for part in parts):
        raise KeyRefused(f"a number of a chain is an int or a pair of ints from 0 to 2**63 - 1, not {number!r}")


def _plain(end: Any) -> Any:
    """Write an end of an interval for a snapshot; infinities have no place in JSON."""
    if isinstance(end, tuple):
        return [_plain(part) for part in end]
    return str(end) if isinstance(end, float) else end


def _read(end: Any) -> Any:
    if isinstance(end, list):
        timestamp, sequence_no = end
        return (_read(timestamp), _read(sequence_no))
    if end in ("inf", "-inf"):
        return math.inf if end == "inf" else -math.inf
    return int(end)


def _loaded(
    *, is_int: bool, pairs: list[list[Any]] | None, links: list[list[Any]], unknown: list[Any], failed: list[Any]
) -> tuple[Intervals | None, Links, dict[Number, Held]]:
    held = {**dict.fromkeys(map(_read, unknown), _DOUBTED), **dict.fromkeys(map(_read, failed), _FAILED)}
    read_links = Links((_read(number), _read(previous)) for number, previous in links)
    if pairs is None:
        return None, read_links, held
    empty = Intervals.of_ints() if is_int else Intervals.of_pairs()
    read = [(_read(lower), _read(upper)) for lower, upper in pairs]
    flat = [end for pair in read for end in pair]
    if not read or sorted(flat) != flat or read[-1][1] != empty.infinity:
        raise ValueError("its intervals are not in order")
    return Intervals(empty.infinity, empty.floor, read), read_links, held
