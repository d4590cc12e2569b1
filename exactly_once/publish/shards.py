"""Shards: keys spread over several databases by rendezvous hashing, with a versioned map."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from hashlib import blake2b
from typing import Any

from exactly_once.errors import ConfigurationError
from exactly_once.kafka.kinds import check_kinds

from .errors import ProducerFenced
from .filter import ANSWERS, DUPLICATE, IN_FLIGHT, NEW, UNKNOWN, Change, Filter, KeyState, Resolved, State, Stats
from .keys import GivenKey, Key, checked_all, encoded
from .postgres import PostgresWindow

# Where two databases know a key, what the later one here says holds.
_SURER = (NEW, UNKNOWN, IN_FLIGHT, DUPLICATE)
_INT32 = 1 << 31


def shard_of(key: bytes, names: Iterable[str]) -> str:
    """Return the shard of an encoded key: the name with the highest digest together with the key.

    Taking a name away moves only its own keys, adding one takes an equal share from each.
    """
    return max(names, key=lambda name: blake2b(key, digest_size=8, key=blake2b(name.encode()).digest()[:32]).digest())


class ShardedWindow(Filter[GivenKey]):
    """Spreads keys over windows in several databases: ``ShardedWindow({"a": window_a, "b": window_b}, version=1)``.

    Every process must use the same map. A changed map gets a higher ``version`` and, for one window, ``previous``: all
    windows of the maps that held meanwhile, which are looked into for keys that have moved. Start one process with it,
    and those that still have the lower version are refused with :class:`ProducerFenced` at their next call.

    Promises what its windows promise. A shard that is away makes the keys of that shard unavailable, and a batch with
    such a key; reservations that the batch made in other shards are undone.
    """

    writes_key = True
    is_remote = True

    def __init__(
        self,
        windows: Mapping[str, PostgresWindow],
        *,
        version: int,
        previous: Mapping[str, PostgresWindow] | None = None,
    ) -> None:
        check_kinds(ShardedWindow.__init__, locals())
        if not windows:
            raise ConfigurationError("a map of shards needs at least one")
        given: list[tuple[Any, Any]] = [*windows.items(), *(previous or {}).items()]
        for name, window in given:
            if not (isinstance(name, str) and isinstance(window, PostgresWindow)):
                found = f"{name!r} with a {type(window).__name__}"  # whose text may hold a password
                raise ConfigurationError(f"a map of shards has names with a PostgresWindow each, not {found}")
        if not 0 < version < _INT32:
            raise ConfigurationError(
                f"version={version!r} must be at least 1, and an int of 32 bits; raise it with every change of the map"
            )
        self._windows = dict(windows)
        self._previous = dict(previous or {})
        # Keys that move between two names of one window would be found there at once: reserved, by this very call.
        names_before = {(id(window.owner), window.scope): name for name, window in self._previous.items()}
        for name, window in self._windows.items():
            before = names_before.get((id(window.owner), window.scope), name)
            if before != name:
                raise ConfigurationError(
                    f"the shard {name!r} is the window that previous= calls {before!r}: leave it its name, which "
                    "decides where keys are"
                )
        self.version = version
        # Keys of a release that is under way, or that a shard did not take.
        self._releasing: set[Key] = set()
        self.owners = tuple(window.owner for window in (*self._windows.values(), *self._previous.values()))
        names = "\0".join(sorted(windows)).encode()
        self._digest = blake2b(names, digest_size=16).digest()
        for window in {**self._previous, **self._windows}.values():
            latest, digest = window.map_version(version, self._digest)
            if latest > version:
                raise ProducerFenced(f"the map of shards has version {latest} by now; this process has {version}")
            if digest != self._digest:
                raise ConfigurationError(f"version {version} of the map of shards has other shards; raise version=")

    def reserve_many(self, keys: Iterable[GivenKey]) -> list[State]:
        """Reserve several keys, each in its shard: one statement per shard."""
        wanted = checked_all(keys)
        answers: list[State] = [NEW] * len(wanted)
        done: list[tuple[PostgresWindow, list[Key]]] = []
        try:
            for name, places in self._by_shard(wanted, self._windows).items():
                window = self._windows[name]
                mine = [wanted[place] for place in places]
                states = window.reserve_many(mine, map_version=self.version)
                done.append((window, [key for key, state in zip(mine, states, strict=True) if state in (NEW, UNKNOWN)]))
                for place, state in zip(places, states, strict=True):
                    answers[place] = state
            self._ask_previous(wanted, answers)
        except BaseException:
            for window, keys_of_it in done:
                window.undo_many(keys_of_it)
            raise
        return answers

    def check_topic(self, topic: str) -> None:
        """Ask each shard."""
        for window in (*self._windows.values(), *self._previous.values()):
            window.check_topic(topic)

    def stats(self) -> Stats:
        """Return the sums over the shards."""
        parts = [window.stats() for window in self._windows.values()]
        return Stats(**{each.name: sum(getattr(part, each.name) for part in parts) for each in fields(Stats)})

    def resolve(self, found: Collection[bytes], *, is_sure: bool) -> Resolved:
        """Settle unknown keys in every shard, in those of the maps before as well: keys that have moved are there."""
        windows = {**self._previous, **self._windows}.values()
        parts = [window.resolve(found, is_sure=is_sure) for window in windows]
        return Resolved(*map(sum, zip(*parts, strict=True)))

    def _ask_previous(self, wanted: list[Key], answers: list[State]) -> None:
        """Look up keys where the maps before had them; what is there settles the reservation that was made here.

        Also unknown ones: a map between may have had them elsewhere, and there they may have been confirmed since.
        """
        if not self._previous:
            return
        reserved = [key for key, state in zip(wanted, answers, strict=True) if state in (NEW, UNKNOWN)]
        found: dict[Key, State] = {}
        # In each of them: where the map has changed twice, a key may be where the first one had it.
        for name, previous in self._previous.items():
            moved = [key for key in reserved if shard_of(encoded(key), self._windows) != name]
            there = previous.peek(moved)
            states = {key: ANSWERS[KeyState(there[form])] for key in moved if (form := previous.form_of(key)) in there}
            held = [key for key, state in states.items() if state is IN_FLIGHT]  # perhaps by somebody who died
            states.update(zip(held, previous.reserve_many(held, map_version=self.version), strict=True))
            # Not by a release, which leaves them here for good where the database is away by now.
            previous.undo_many([key for key in held if states[key] in (NEW, UNKNOWN)])
            found |= {key: max(state, found.get(key, NEW), key=_SURER.index) for key, state in states.items()}
        for place, key in enumerate(wanted):
            if answers[place] in (NEW, UNKNOWN) and found.get(key, NEW) is not NEW:
                window = self._windows[shard_of(encoded(key), self._windows)]
                answers[place] = found[key]
                if found[key] is DUPLICATE:
                    window.confirm(key)
                elif found[key] is IN_FLIGHT:  # whoever holds it settles it there
                    window.release(key)

    def _settle(self, change: Change, keys: Iterable[GivenKey]) -> None:
        given = checked_all(keys)
        # Where a release got through the last time, another process may have left doubts since, which this one would
        # settle as somebody who has read the log.
        again = self._releasing.intersection(given if change == "release" else ())
        self._releasing.update(given if change == "release" else ())
        for name, places in self._by_shard(given, self._windows).items():
            window = self._windows[name]
            mine = [given[n] for n in places if given[n] not in again or window.holds(given[n])]
            window._settle(change, mine)  # noqa: SLF001 - of a Filter, too
        self._releasing.difference_update(given)

    def _by_shard(self, keys: list[Key], windows: Mapping[str, PostgresWindow]) -> dict[str, list[int]]:
        places: dict[str, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(shard_of(encoded(key), windows), []).append(place)
        return places
