"""ChainFilter: per chain of messages, the intervals that were not seen yet. No I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

from exactly_once.errors import ConfigurationError

from .errors import InconsistentChain, KeyRefused, LimitReached, SnapshotCorrupted
from .filter import KeyState, MemoryFilter, State, Stats
from .intervals import Intervals, Links, Number, just_below
from .keys import INT64
from .snapshot import pack, unpack

_KIND = "ChainFilter"

# Chain and number: a link without its reference.
Pair = tuple[str, Number]
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


class ChainFilter(MemoryFilter[Link, Pair]):
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

    takes = "chain"

    def __init__(
        self, *, dense: bool = False, first: int = 0, max_gaps: int = 10_000, on_full: GapPolicy = "treat_as_new"
    ) -> None:
        super().__init__()
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
        self._links: dict[str, Links] = {}
        self._failed_open = 0

    def reserve_many(self, keys: Iterable[Link]) -> list[State]:
        """Reserve several messages, in order.

        :raises InconsistentChain: for the first whose reference cannot be right; none is reserved then.
        """
        wanted = list(keys)
        pairs = self._checked(wanted)
        with self._lock:
            if not self._dense or self._on_full == "raise":
                for key, pair in zip(wanted, pairs, strict=True):
                    if pair not in self._open:
                        self._check_reference(key)
            return self._reserve(pairs)

    def confirm_many(self, keys: Iterable[Link]) -> None:
        """Confirm several messages."""
        found = list(keys)
        pairs = self._checked(found)
        with self._lock:
            self._close(pairs)
            if not self._dense or not self._keep_run(pairs):
                for key in found:
                    self._mark(key)

    def release_many(self, keys: Iterable[Link]) -> None:
        """Release several messages."""
        with self._lock:
            for key in keys:
                # The retry of one without a reference may come after a higher number, and is no duplicate then.
                self._change("release", (key[:2],), keeps_absent=key.previous is None and not self._dense)

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
            self._links.pop(chain, None)
            self._close([pair for pair in self._open if pair[0] == chain])

    def stats(self) -> Stats:
        """Return the figures of this moment; confirmed numbers are not counted, they are not kept."""
        with self._lock:
            return self._stats(confirmed=-1, failed_open=self._failed_open)

    def to_bytes(self) -> bytes:
        """Return a snapshot of what is confirmed, and of what is in flight: that may be in the log, or not."""
        with self._lock:
            held: dict[str, dict[Number, KeyState]] = {name: {} for name in self._chains}
            for (chain, number), state in self._open.items():
                held.setdefault(chain, {})[number] = state
            return pack(_KIND, {name: self._dump(name, states) for name, states in held.items()})

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
                for number, state in held.items():
                    self._open[chain, number] = state
                    if state is KeyState.UNKNOWN:
                        self._unknown[chain, number] = 0

    def _dump(self, name: str, held: dict[Number, KeyState]) -> dict[str, Any]:
        """Return a chain as plain data."""
        intervals = self._chains.get(name)
        return {
            "is_int": intervals is None or isinstance(intervals.infinity, float),
            "pairs": None if intervals is None else [[_plain(a), _plain(b)] for a, b in intervals.pairs()],
            "links": list(self._links[name].previous.items()) if name in self._links else [],
            "unknown": [number for number, state in held.items() if state is not KeyState.ABSENT],
            "failed": [number for number, state in held.items() if state is KeyState.ABSENT],
        }

    def _seen(self, keys: Sequence[Pair]) -> Collection[Pair]:
        if (intervals := self._only(keys)) is not None and min(n for _, n in keys) > intervals.lowers[-1]:
            return ()
        chains = self._chains
        return {pair for pair in keys if pair[0] in chains and chains[pair[0]].find(pair[1]) < 0}

    def _keep(self, keys: Sequence[Pair]) -> None:
        for pair in keys:
            self._mark(Link(*pair))

    def _only(self, keys: Sequence[Pair]) -> Intervals | None:
        """Return the intervals of the chain that all these messages are of, if it is one that is known."""
        return self._chains.get(keys[0][0]) if keys and len({chain for chain, _ in keys}) == 1 else None

    def _keep_run(self, keys: Sequence[Pair]) -> bool:
        """Keep messages of a dense chain that go on where it ends; tell whether they do."""
        intervals = self._only(keys)
        if intervals is None:
            return False
        first = intervals.lowers[-1] + 1
        is_run = [n for _, n in keys] == list(range(first, first + len(keys)))
        if is_run:
            intervals.lowers[-1] = keys[-1][1]
        return is_run

    def _check_reference(self, key: Link) -> None:
        """Refuse a message that contradicts what was seen, or for whose gap there is no room."""
        chain, number, previous = key
        intervals = self._chains.get(chain)
        if intervals is None:
            return
        place = intervals.find(number)
        if previous is not None and not self._dense:
            if place >= 0:
                intervals.check(place, number, previous)
            else:
                intervals.check_seen(number, previous)
                if chain in self._links:
                    self._links[chain].check(number, previous)
        if place >= 0 and self._on_full == "raise" and intervals.gaps() >= self._max_gaps:
            previous = self._previous(number, previous, intervals, place)
            if intervals.divides(place, number, previous):
                raise LimitReached(f"chain {chain!r} has {intervals.gaps()} gaps; {number} would make one more")

    def _mark(self, key: Link) -> None:
        """Take note that a message is in the log."""
        chain, number, named = key
        intervals = self._chains.get(chain)
        if intervals is None:
            intervals = self._chains[chain] = self._intervals_for(number, named)
        place = intervals.find(number)
        if place < 0:
            return
        # A message that was sent meanwhile may have moved the lower end above the reference.
        previous = max(self._previous(number, named, intervals, place), intervals.lowers[place])
        intervals.mark(place, number, previous)
        if named is not None and not self._dense:
            self._links.setdefault(chain, Links()).add(number, named, intervals)
        while intervals.gaps() > self._max_gaps and self._on_full != "raise":
            self._evicted += 1
            if self._on_full == "treat_as_seen":
                intervals.drop_lowest()
            else:
                self._failed_open += 1
                intervals.join_lowest()

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

    def _checked(self, keys: Iterable[Link]) -> list[Pair]:
        given = list(keys)
        numbers: list[Any] = [key[1] for key in given]
        is_plain = self._dense and set(map(type, numbers)) == {int}
        if not (is_plain and self._first <= min(numbers) and max(numbers) < INT64):
            for key in given:
                self._check(key)
        for chain in {key[0] for key in given}:
            if type(chain) is not str or not chain:
                raise KeyRefused(f"a chain's name is a str with something in it, not {chain!r}")
        return [key[:2] for key in given]

    def _check(self, key: Link) -> None:
        chain, number, previous = key
        if self._dense:
            if type(number) is not int or not self._first <= number < INT64:
                raise KeyRefused(f"a number of a dense chain is an int from {self._first} to 2**63 - 1, not {number!r}")
            return
        _check_number(number)
        intervals = self._chains.get(chain)
        if intervals is not None and isinstance(number, int) is isinstance(intervals.infinity, tuple):
            raise KeyRefused(f"chain {chain!r} has other numbers than {number!r}: ints and pairs do not mix")
        if previous is not None:
            _check_number(previous)
            if isinstance(previous, int) is not isinstance(number, int):
                raise KeyRefused(f"{number!r} and {previous!r}: ints and pairs do not mix")
            if cast("Any", previous) >= number:
                raise InconsistentChain(f"the message {number} names {previous} as the one before it")


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
) -> tuple[Intervals | None, Links, dict[Number, KeyState]]:
    held = {
        **dict.fromkeys(map(_read, unknown), KeyState.UNKNOWN),
        **dict.fromkeys(map(_read, failed), KeyState.ABSENT),
    }
    read_links = Links((_read(number), _read(previous)) for number, previous in links)
    if pairs is None:
        return None, read_links, held
    empty = Intervals.of_ints() if is_int else Intervals.of_pairs()
    read = [(_read(lower), _read(upper)) for lower, upper in pairs]
    flat = [end for pair in read for end in pair]
    if not read or sorted(flat) != flat or read[-1][1] != empty.infinity:
        raise ValueError("its intervals are not in order")
    return Intervals(empty.infinity, empty.floor, read), read_links, held
