"""ChainFilter: per chain of messages, the intervals that were not seen yet, as a sorted list. No I/O."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

from exactly_once.errors import ConfigurationError
from exactly_once.kafka.kinds import check_choice, check_kinds

from .errors import InconsistentChain, KeyRefused, LimitReached
from .filter import KeyState, MemoryFilter, State
from .keys import INT64
from .snapshot import pack, unpack

_KIND = "ChainFilter"

Number = int | tuple[int, int]
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


# What a chain may have of ints and of pairs, all of it unseen: the lower end and the upper one.
_ALL_INTS: tuple[Any, Any] = (-math.inf, math.inf)
_ALL_PAIRS: tuple[Any, Any] = ((-math.inf, -math.inf), (math.inf, math.inf))


class Intervals:
    """What one chain has *not* seen, as sorted intervals. The filter's lock protects it.

    An interval (lower, upper] leaves ``lower`` out and holds ``upper``. Its lower end is a number that was seen, its
    upper end one that is known to exist because a later message named it as its predecessor; the last interval has no
    end. Numbers are ints or pairs (timestamp, sequence_no); both compare, and infinity compares with both.
    """

    __slots__ = ("lowers", "uppers")

    def __init__(self, *pairs: tuple[Any, Any]) -> None:
        self.lowers = [lower for lower, _ in pairs]
        self.uppers = [upper for _, upper in pairs]

    def is_int(self) -> bool:
        """Tell whether numbers are ints."""
        return isinstance(self.uppers[-1], float)

    def find(self, number: Any) -> int:
        """Return the place of the interval that holds ``number``, or -1 if it was seen."""
        lowers = self.lowers
        if number > lowers[-1]:
            return len(lowers) - 1
        place = bisect_left(lowers, number) - 1
        return place if place >= 0 and number <= self.uppers[place] else -1

    def between(self, place: int, number: Any, previous: Any) -> str | None:
        """Tell what is known to lie between a number, whose place this is, and the one before it."""
        if place >= 0:
            return f"{self.lowers[place]} was seen in between" if previous < self.lowers[place] else None
        place = bisect_left(self.lowers, number) - 1
        return f"{self.uppers[place]} lies in between" if place >= 0 and previous < self.uppers[place] else None

    def mark(self, place: int, number: Any, previous: Any) -> None:
        """Take note that ``number`` was seen, and that nothing lies between it and ``previous``."""
        has_left = previous > self.lowers[place]
        has_right = number < self.uppers[place]
        if has_left and has_right:  # division
            self.lowers.insert(place + 1, number)
            self.uppers.insert(place, previous)
        elif has_right:  # left contraction
            self.lowers[place] = number
        elif has_left:  # right contraction
            self.uppers[place] = previous
        else:  # full contraction
            del self.lowers[place], self.uppers[place]

    def gaps(self) -> int:
        """Return how many intervals there are before the last one."""
        return len(self.lowers) - 1

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return (lower, upper] of every interval, lowest first."""
        return list(zip(self.lowers, self.uppers, strict=True))


# So many references of a chain are kept beside those of its gaps: 10 kB, and further back than messages overtake.
_LINKS = 100


class Links:
    """What the latest messages of a chain named as the one before them, by number. The filter's lock protects it.

    Intervals do not tell a message that was seen from one that cannot exist, because a reference jumped over it. Kept
    for good are the references to messages that are missing: whoever names one of those once more is another message.
    """

    __slots__ = ("numbers", "previous")

    def __init__(self, pairs: Iterable[tuple[Any, Any]] = ()) -> None:
        # Oldest first.
        self.previous: dict[Any, Any] = dict(pairs)
        self.numbers = sorted(self.previous)

    def contradiction(self, number: Any, previous: Any) -> str | None:
        """Tell what another message says against a number and the one before it."""
        before = self.previous.get(number)
        if before is not None:
            return None if before == previous else f"named {before} earlier"
        place = bisect_right(self.numbers, number)
        above = self.numbers[place] if place < len(self.numbers) else None
        if above is not None and self.previous[above] < number:
            return f"{above} names {self.previous[above]}, so that nothing lies in between"
        is_seen = place and previous < self.numbers[place - 1]
        return f"{self.numbers[place - 1]} was seen in between" if is_seen else None

    def add(self, number: Any, previous: Any, intervals: Intervals) -> None:
        """Keep a reference, and let the oldest go whose predecessor was seen."""
        if number not in self.previous:
            insort(self.numbers, number)
        self.previous[number] = previous
        while len(self.numbers) > _LINKS + intervals.gaps() + 1:
            oldest = next(iter(self.previous))
            named = self.previous.pop(oldest)
            gap = intervals.find(named)
            if gap >= 0 and intervals.uppers[gap] == named:
                self.previous[oldest] = named  # once more round: there are fewer of these than are kept
            else:
                del self.numbers[bisect_left(self.numbers, oldest)]


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

    Thread-safe. ``docs/publishing.md`` says what it promises after a failed send, a crash, beside a second process.
    """

    takes = "chain"

    def __init__(
        self, *, dense: bool = False, first: int = 0, max_gaps: int = 10_000, on_full: GapPolicy = "treat_as_new"
    ) -> None:
        check_kinds(ChainFilter.__init__, locals())
        super().__init__()
        check_choice("on_full", on_full, get_args(GapPolicy))
        if max_gaps < 1:
            raise ConfigurationError(f"max_gaps={max_gaps!r} must be at least 1")
        self._dense = dense
        # The retry of a failed one may come after a higher number that named no reference, and is no duplicate then.
        self.keeps_absent = not dense
        self._first = first
        self._max_gaps = max_gaps
        self._on_full = on_full
        self._chains: dict[str, Intervals] = {}
        self._links: dict[str, Links] = {}
        # Of chains with messages seen or open: whether their numbers are ints. Of dense ones they all are.
        self._has_ints: dict[str, bool] = {}
        self._failed_open = 0

    def reserve_many(self, keys: Iterable[Link]) -> list[State]:
        """Reserve several messages, in order.

        :raises InconsistentChain: for the first whose reference contradicts what was seen; none is reserved then.
        :raises LimitReached: for the first that would make a gap too many, with ``on_full="raise"``; likewise.
        """
        wanted = list(keys)
        pairs = self._checked(wanted)
        with self._lock:
            has_ints: dict[str, bool] = {}
            for chain, number, previous in wanted if not self._dense or self._on_full == "raise" else ():
                if not self._dense:
                    is_int = isinstance(number, int)
                    if has_ints.setdefault(chain, self._has_ints.get(chain, is_int)) is not is_int:
                        raise _mixed(chain, number)  # now: what is sent must be confirmed then
                intervals = self._chains.get(chain)
                if intervals is None or (chain, number) in self._open:
                    continue
                place = intervals.find(number)
                if previous is not None and not self._dense:
                    why = intervals.between(place, number, previous)
                    if place < 0 and chain in self._links:
                        why = why or self._links[chain].contradiction(number, previous)
                    if why is not None:
                        raise _inconsistent(Link(chain, number, previous), why)
                if place >= 0 and self._on_full == "raise" and intervals.gaps() >= self._max_gaps:
                    before = self._previous(number, previous, intervals, place)
                    if before > intervals.lowers[place] and number < intervals.uppers[place]:
                        raise LimitReached(f"chain {chain!r} has {intervals.gaps()} gaps; {number} would make one more")
            self._has_ints |= has_ints
            return self._reserve(pairs)

    def confirm_many(self, keys: Iterable[Link]) -> None:
        """Confirm several messages."""
        found = list(keys)
        pairs = self._checked(found)
        with self._lock:
            self._close(pairs)
            intervals = self._only(pairs) if self._dense else None
            numbers = [number for _, number in pairs]
            if intervals is not None and numbers == list(range(first := intervals.lowers[-1] + 1, first + len(pairs))):
                intervals.lowers[-1] = numbers[-1]  # they go on where the chain ends
                return
            for key in found:
                self._mark(key)

    def check_same(self, key: Link, other: Link) -> None:
        """Refuse a message that names another predecessor than one with its number that is in flight."""
        if not self._dense and None not in (key.previous, other.previous) and key.previous != other.previous:
            raise _inconsistent(key, f"named {other.previous} earlier")

    def unseen(self, chain: str) -> list[tuple[Any, Any]]:
        """Return the intervals of a chain, lowest first: both ends belong to them where numbers are ints."""
        with self._lock:
            found = self._chains.get(chain)
            if found is None:
                return []
            return [(lower + 1 if found.is_int() else lower, upper) for lower, upper in found.pairs()]

    def drop(self, chain: str) -> None:
        """Forget a chain that has ended.

        :raises ConfigurationError: while messages of it are in flight: their confirmation would begin it anew.
        """
        with self._lock:
            for pair, state in self._open.items():
                if pair[0] == chain and state in (KeyState.IN_FLIGHT, KeyState.RESENT):
                    raise ConfigurationError(
                        f"chain {chain!r} has messages in flight, such as Link{pair!r}: drop it when they are settled"
                    )
            self._chains.pop(chain, None)
            self._links.pop(chain, None)
            self._has_ints.pop(chain, None)
            self._close([pair for pair in self._open if pair[0] == chain])

    def to_bytes(self) -> bytes:
        """Return a snapshot of what is confirmed, and of what is in flight: that may be in the log, or not."""
        content: dict[str, dict[str, list[Any]]]
        content = defaultdict(lambda: {"pairs": [], "links": [], "unknown": [], "failed": []})
        with self._lock:
            for name, intervals in self._chains.items():
                content[name]["pairs"] = intervals.pairs()
            for name, links in self._links.items():
                content[name]["links"] = list(links.previous.items())
            for (name, number), state in self._open.items():
                content[name]["failed" if state is KeyState.ABSENT else "unknown"].append(number)
        return pack(_KIND, content)

    def load_bytes(self, data: bytes) -> None:
        """Load a snapshot, whole or not at all.

        :raises SnapshotCorrupted: when it is cut short, altered or not one of these.
        """
        chains: dict[str, Intervals] = {}
        links: dict[str, Links] = {}
        held: dict[Pair, KeyState] = {}
        for name, content in unpack(_KIND, data).items():
            if content["pairs"]:
                chains[name] = Intervals(*((_read(lower), _read(upper)) for lower, upper in content["pairs"]))
            links[name] = Links((_read(number), _read(previous)) for number, previous in content["links"])
            held |= {(name, _read(number)): KeyState.UNKNOWN for number in content["unknown"]}
            held |= {(name, _read(number)): KeyState.ABSENT for number in content["failed"]}
        with self._lock:
            self._chains |= chains
            self._links |= links
            self._has_ints |= {chain: isinstance(number, int) for chain, number in held}
            self._has_ints |= {chain: intervals.is_int() for chain, intervals in chains.items()}
            self._open |= held
            self._unknown |= {pair: 0 for pair, state in held.items() if state is KeyState.UNKNOWN}

    def _figures(self) -> dict[str, int]:
        return {"failed_open": self._failed_open}

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

    def _mark(self, key: Link) -> None:
        """Take note that a message is in the log."""
        chain, number, named = key
        intervals = self._chains.get(chain)
        if intervals is None:
            if self._dense:
                lower, upper = self._first - 1, math.inf
            else:
                lower, upper = _ALL_INTS if isinstance(number, int) else _ALL_PAIRS
                if named is None:  # nothing below its first message is expected
                    lower = just_below(number)
            intervals = self._chains[chain] = Intervals((lower, upper))
            if not self._dense:
                self._has_ints[chain] = intervals.is_int()
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
                del intervals.lowers[0], intervals.uppers[0]
            else:  # what was seen between the two lowest is unseen again
                self._failed_open += 1
                del intervals.lowers[1], intervals.uppers[0]

    def _previous(self, number: Number, previous: Number | None, intervals: Intervals, place: int) -> Any:
        """Return what lies directly before a number, as far as anybody knows."""
        if previous is not None and not self._dense:
            return previous
        if self._dense or place < intervals.gaps():
            return just_below(number)
        return intervals.lowers[place]  # best effort: nothing is expected between the highest one and this

    def _checked(self, keys: Iterable[Link]) -> list[Pair]:
        given = links(keys)
        numbers: list[Any] = [key[1] for key in given]
        is_plain = self._dense and set(map(type, numbers)) == {int}
        is_fine = is_plain and self._first <= min(numbers) and max(numbers) < INT64
        for chain, number, previous in () if is_fine else given:
            if self._dense:
                if type(number) is not int or not self._first <= number < INT64:
                    span = f"{self._first} to 2**63 - 1"
                    raise KeyRefused(f"a number of a dense chain is an int from {span}, not {number!r}")
                continue
            _check_number(number)
            if self._has_ints.get(chain, isinstance(number, int)) is not isinstance(number, int):
                raise _mixed(chain, number)
            if previous is not None:
                _check_number(previous)
                if isinstance(previous, int) is not isinstance(number, int):
                    raise KeyRefused(f"{number!r} and {previous!r}: ints and pairs do not mix")
                if cast("Any", previous) >= number:
                    raise InconsistentChain(f"the message {number} names {previous} as the one before it")
        for chain in {key[0] for key in given}:
            if type(chain) is not str or not chain:
                raise KeyRefused(f"a chain's name is a str with something in it, not {chain!r}")
        return [key[:2] for key in given]


def links(keys: Iterable[Link]) -> list[Link]:
    """Return messages of chains, or raise for one that is a tuple of another kind.

    :raises KeyRefused: now: what was sent could not be confirmed.
    """
    given = list(keys)
    for key in given:
        if not isinstance(key, Link):
            raise KeyRefused(f"a message of a chain is named by a Link(chain, number), not by {key!r}")
    return given


def _inconsistent(key: Link, why: str) -> InconsistentChain:
    return InconsistentChain(f"the message {key.number} names {key.previous} as the one before it, but {why}")


def _mixed(chain: str, number: Number) -> KeyRefused:
    return KeyRefused(f"chain {chain!r} has other numbers than {number!r}: ints and pairs do not mix")


def _check_number(number: object) -> None:
    parts = number if isinstance(number, tuple) and len(number) == 2 else (number,)
    if not all(type(part) is int and 0 <= part < INT64 for part in parts):
        raise KeyRefused(f"a number of a chain is an int or a pair of ints from 0 to 2**63 - 1, not {number!r}")


def _read(end: Any) -> Any:
    """Read a number or an infinity of a snapshot: JSON makes lists of pairs."""
    return tuple(end) if isinstance(end, list) else end


def just_below(number: Any) -> Any:
    """Return the highest number below this one."""
    if isinstance(number, int):
        return number - 1
    timestamp, sequence_no = number
    return (timestamp, sequence_no - 1) if sequence_no > 0 else (timestamp - 1, math.inf)
