"""PostgresWindow: keys of a sliding window, persistent and shared by all processes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable
from hashlib import blake2b
from typing import Any

import psycopg

from exactly_once._log import about
from exactly_once.errors import ConfigurationError
from exactly_once.kafka.kinds import check_kinds

from .errors import PublishError
from .filter import ANSWERS, DUPLICATE, IN_FLIGHT, NEW, UNKNOWN, Change, Filter, KeyState, Resolved, State, Stats
from .keys import NAME, GivenKey, Key, checked_all, encoded, is_name
from .owners import PublishOwner
from .take_over import Found, TakeOver, TopicTakeOver
from .window import Generations

logger = logging.getLogger(__name__)

# Bytes of an encoded key that are kept as they are; a row of the index has room for 2,704.
_LONGEST = 1025
# More would be agreed on for everybody; and the database could not add what is much more to a time.
_LONGEST_WINDOW = 100 * 366 * 24 * 3600


def _stored(form: bytes) -> bytes:
    """Return an encoded key, or its digest if it is long: of characters that take several bytes."""
    return form if len(form) <= _LONGEST else b"d" + blake2b(form, digest_size=32).digest()


class PostgresWindow(Filter[GivenKey]):
    """Recognises the keys of the last ``seconds``, in all processes: ``PostgresWindow(owner, scope="orders", ...)``.

    Every change is one statement per batch, durable when it returns. Keys are held for between one and two windows;
    they leave as a whole generation, never one by one. All windows of a schema have the same length, which the first
    one decides and one with ``changes_window=True`` changes: a longer one holds for what is still there. Scopes, mostly
    topics, do not share keys. It never takes a new key for a seen one. What a dead process had in flight is looked for
    by ``take_over``, and unknown without.

    Thread-safe. ``docs/publishing.md`` says what it promises after a failed send, a crash, beside a second process.
    """

    writes_key = True
    is_remote = True

    def __init__(
        self,
        owner: PublishOwner,
        *,
        scope: str,
        seconds: float,
        changes_window: bool = False,
        take_over: TakeOver | None = None,
        cache_keys: int = 0,
    ) -> None:
        check_kinds(PostgresWindow.__init__, locals())
        if not 0 < seconds <= _LONGEST_WINDOW:
            raise ConfigurationError(
                f"seconds={seconds!r}: the window must be positive, and {_LONGEST_WINDOW} s (100 years) at most"
            )
        if not is_name(scope):
            raise ConfigurationError(f"scope={scope!r} is not {NAME}; give the topic's name")
        if seconds < (turned_every := owner.lease_seconds / 3):
            # Of two windows that passed since the last turn, the second one may have begun to fill a moment ago.
            raise ConfigurationError(
                f"seconds={seconds!r}: the owner drops old keys every {turned_every:g} s, a third of its lease, and "
                "would drop new ones with them: give a longer window, or the owner a shorter lease_seconds="
            )
        self.owner = owner
        self.scope = scope
        self._take_over = take_over
        self._store = owner.store
        ((agreed,),) = self._store.run("publish_window", seconds=seconds, changes=changes_window)
        if agreed != seconds:
            raise ConfigurationError(
                f"seconds={seconds!r}, but the window of schema {self._store.schema!r} is {agreed:g} s for everybody. "
                "changes_window=True changes it, also for those that run"
            )
        self._store.run("publish_scope", name=scope)
        self._store.run("publish_rotate")
        holding = owner.holding(scope)
        self._mine, self._lock = holding.keys, holding.lock
        self._duplicates = 0
        # The last keys that were confirmed here, none for longer than a window: their duplicates cost no round trip. Of
        # a key that is not in here nothing is known, because other processes confirm keys, too.
        self._cache: Generations[bytes] = Generations((cache_keys + 1) // 2, seconds / 2)
        self._has_cache = cache_keys > 0
        self._cache_hits = 0

    def reserve_many(self, keys: Iterable[GivenKey], *, map_version: int | None = None) -> list[State]:
        """Reserve several keys with one statement, which also checks the version of the map of shards.

        :raises ProducerFenced: when this process was fenced; it must stop.
        :raises FilterUnavailable: when the database cannot be asked; nothing is sent then.
        """
        wanted = [self.form_of(key) for key in checked_all(keys)]
        if not wanted:
            return []
        self.owner.check()
        with self._lock:
            self._cache.age()
            known = self._cache.of(wanted)
            self._cache_hits += len(known)
            states, holders = self._ask(sorted(set(wanted) - known), map_version)
            try:
                dead = self._take_over_from(holders) if holders else 0
                if dead:
                    held = sorted(key for key, state in states.items() if state is IN_FLIGHT)
                    again, _ = self._ask(held, map_version)
                    states.update(again)
            except BaseException:
                self._undo({key for key, state in states.items() if state in (NEW, UNKNOWN)})
                raise
            self._mine.update(key for key, state in states.items() if state in (NEW, UNKNOWN))
            answers = []
            states.update(dict.fromkeys(known, DUPLICATE))
            for key in wanted:
                answers.append(states[key])
                if states[key] in (NEW, UNKNOWN):
                    states[key] = IN_FLIGHT  # for the second of two equal keys
            self._duplicates += answers.count(DUPLICATE)
            return answers

    def check_topic(self, topic: str) -> None:
        """Raise for a topic in which a take-over would not look: what it did not find elsewhere would be sent again."""
        if isinstance(self._take_over, TopicTakeOver) and topic != self.scope:
            raise ConfigurationError(
                f"scope={self.scope!r} of a window that serves topic {topic!r}: TopicTakeOver looks for the keys of a "
                "dead process in the topic that the scope names. Give scope=topic"
            )

    def undo_many(self, keys: Iterable[GivenKey]) -> None:
        """Undo reservations whose caller gets an error instead: no other process would wait for them in vain."""
        with self._lock:
            self._undo({self.form_of(key) for key in checked_all(keys)})

    def resolve(self, found: Collection[bytes], *, is_sure: bool) -> Resolved:
        """Settle unknown keys of the scope, whoever has left them; so what is not there may still arrive."""
        with self._lock:
            unknown = {key for (key,) in self._store.run("publish_unknown", scope=self.scope)}
            there = unknown.intersection(map(_stored, found))
            self._run("publish_confirm", there)
        return Resolved(len(there), 0, len(unknown) - len(there))

    def peek(self, keys: Iterable[GivenKey]) -> dict[bytes, str]:
        """Return the encoded forms of those that are there, and in which state; reserve none."""
        wanted = sorted({self.form_of(key) for key in checked_all(keys)})
        return dict(self._store.run("publish_peek", scope=self.scope, keys=wanted)) if wanted else {}

    def holds(self, key: Key) -> bool:
        """Tell whether this process has reserved a key and not settled it."""
        return self.form_of(key) in self._mine

    @staticmethod
    def form_of(key: Key) -> bytes:
        """Return the form of a key in the table."""
        return _stored(encoded(key))

    def map_version(self, version: int, digest: bytes) -> tuple[int, bytes]:
        """Agree on the map of shards; return version and digest of the latest."""
        ((latest, of),) = self._store.run("publish_map_now")
        if version > latest:
            ((latest, of),) = self._store.run("publish_map", number=version, digest=digest)
        return latest, of

    def stats(self) -> Stats:
        """Return the figures of this moment: a scan of the scope's keys, of all processes."""
        counts: dict[str, int] = dict(self._store.run("publish_count", scope=self.scope))
        return Stats(
            confirmed=counts.get("c", 0),
            in_flight=counts.get("f", 0) + counts.get("t", 0),
            unknown=counts.get("u", 0),
            duplicates=self._duplicates,
            cache_hits=self._cache_hits,
        )

    def _ask(self, wanted: list[bytes], map_version: int | None) -> tuple[dict[bytes, State], set[int]]:
        """Reserve sorted, different keys; return what they are, and who else holds the ones in flight."""
        if not wanted:
            return {}, set()
        states = dict.fromkeys(wanted, NEW)
        holders: set[int] = set()
        owner = self.owner.id
        rows = self._store.run("publish_reserve", scope=self.scope, keys=wanted, owner=owner, map_version=map_version)
        for place, state, holder in rows:
            key = wanted[place - 1]
            states[key] = ANSWERS[KeyState(state)]
            if states[key] is IN_FLIGHT and holder != owner:
                holders.add(holder)
            elif states[key] is IN_FLIGHT and key not in self._mine:
                # Reserved by ourselves, in a call whose answer was lost.
                states[key] = NEW if state == KeyState.IN_FLIGHT.value else UNKNOWN
        return states, holders - {None, 0}

    def _take_over_from(self, holders: set[int]) -> int:
        """Take over from those holders whose lease is over; return how many there were."""
        dead = self.owner.fence(holders)
        for owner in dead:
            found = Found((), is_sure=False) if self._take_over is None else self._take_over(owner, self.scope)
            (counts,) = self._store.run(
                "publish_take_over",
                scope=self.scope,
                dead=owner.id,
                keys=sorted(map(_stored, found.keys)),
                is_sure=found.is_sure,
            )
            said = "took over from %r (%s) on %r: %s keys were in the log, %s were not, %s are unknown"
            extra = about("owner_taken_over") | {"topic": self.scope, "producer": owner.name, "owner": owner.id}
            logger.warning(said, owner.name, owner.id, self.scope, *counts, extra=extra)
        return len(dead)

    def _settle(self, change: Change, keys: Iterable[GivenKey]) -> None:
        settled = {self.form_of(key) for key in checked_all(keys)}
        with self._lock:
            if change == "confirm":
                self._run("publish_confirm", settled)
                self._cache.age()
                for key in settled if self._has_cache else ():  # one by one: a batch may be larger than the cache
                    self._cache.add((key,))
            elif change == "mark_unknown":
                self._run("publish_mark_unknown", settled)
            else:
                held = settled & self._mine
                # First: those that are held are not any more after theirs, and the whole may have to be repeated.
                self._run("publish_release", settled - held, is_held=False)
                self._run("publish_release", held, is_held=True)

    def _undo(self, forms: set[bytes]) -> None:
        """Release keys; where that cannot be done now, they are given to this process again, as after a lost answer."""
        try:
            with contextlib.suppress(psycopg.Error, PublishError):
                self._run("publish_release", forms, is_held=True)
        finally:
            self._mine.difference_update(forms)

    def _run(self, name: str, keys: set[bytes], **more: Any) -> None:
        """Run a change of keys, under the lock: nobody may reserve one of them before ``_mine`` has changed, too."""
        if keys:
            self._store.run(name, scope=self.scope, keys=sorted(keys), owner=self.owner.id, **more)
            self._mine.difference_update(keys)
