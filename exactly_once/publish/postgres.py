"""PostgresWindow: keys of a sliding window, persistent and shared by all processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from hashlib import blake2b
from typing import Any, NamedTuple

from exactly_once._log import about
from exactly_once.errors import ConfigurationError

from .cache import ConfirmedKeys
from .filter import ANSWERS, DUPLICATE, IN_FLIGHT, NEW, UNKNOWN, Filter, KeyState, Resolved, State, Stats
from .keys import GivenKey, Key, checked_all, encoded
from .owners import DeadOwner, PublishOwner

logger = logging.getLogger(__name__)

# Bytes of an encoded key that are kept as they are; a row of the index has room for 2,704.
_LONGEST = 1025


def _stored(form: bytes) -> bytes:
    """Return an encoded key, or its digest if it is long: of characters that take several bytes."""
    return form if len(form) <= _LONGEST else b"d" + blake2b(form, digest_size=32).digest()


class Found(NamedTuple):
    """What a take-over found in the log."""

    keys: Collection[bytes]
    """Encoded keys that are there, as the header ``exactly-once-key`` has them."""
    is_sure: bool
    """Whether nothing of the dead owner can arrive any more: it was fenced at the brokers, too."""


TakeOver = Callable[[DeadOwner, str], Found]


class PostgresWindow(Filter[GivenKey]):
    """Recognises the keys of the last ``seconds``, in all processes: ``PostgresWindow(owner, scope="orders", ...)``.

    Every change is one statement per batch, durable when it returns. Keys are held for between one and two windows;
    they leave as a whole generation, never one by one. All windows of a schema have the same length, which the first
    one decides and one with ``changes_window=True`` changes: a longer one holds for what is still there. Scopes, mostly
    topics, do not share keys. It never takes a new key for a seen one.

    What it promises after

    - a failed send: the key is absent again if the message surely is not in the log, else unknown;
    - a crash of the process: its confirmed keys are there, its reservations are in flight until its lease is over. Then
      whoever wants one fences it and reads the topic (``take_over``): what is there is a duplicate. The rest is new
      if the owner was fenced at the brokers, too, by its ``transactional_id``; else unknown. Without ``take_over``
      all of it is unknown. So: at most one, unless a reserver without a transactional id outlives its lease;
    - a second process: one of them sends, the other is told IN_FLIGHT or DUPLICATE;
    - a key older than the window: nothing, it is new again;
    - a failover of the database: with synchronous replication everything; with asynchronous replication keys of the
      last moments are missing and may be sent again.

    Every method may be called from any thread.
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
        if not seconds > 0:
            raise ConfigurationError(f"the window must be positive, not {seconds!r}")
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
        ((number,),) = self._store.run("publish_scope", name=scope) or self._store.run("publish_scope", name=scope)
        self._scope: int = number
        self._store.run("publish_rotate")
        holding = owner.holding(self._scope)
        self._mine, self._lock = holding.keys, holding.lock
        self._duplicates = 0
        # ``cache_keys`` that were confirmed here: their duplicates cost no round trip; ``cache.hits`` counts them.
        self.cache = ConfirmedKeys(cache_keys, seconds)

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
            known = self.cache.of(wanted)
            states, holders = self._ask(sorted(set(wanted) - known), map_version)
            dead = self._take_over_from(holders) if holders else 0
            if dead:
                held = sorted(key for key, state in states.items() if state is IN_FLIGHT)
                again, _ = self._ask(held, map_version)
                states.update(again)
            self._mine.update(key for key, state in states.items() if state in (NEW, UNKNOWN))
            answers = []
            states.update(dict.fromkeys(known, DUPLICATE))
            for key in wanted:
                answers.append(states[key])
                if states[key] in (NEW, UNKNOWN):
                    states[key] = IN_FLIGHT  # for the second of two equal keys
            self._duplicates += answers.count(DUPLICATE)
            return answers

    def confirm_many(self, keys: Iterable[GivenKey]) -> None:
        """Confirm several keys with one statement."""
        found = sorted({self.form_of(key) for key in checked_all(keys)})
        with self._lock:
            self._settle("publish_confirm", found)
            self.cache.add(found)

    def release_many(self, keys: Iterable[GivenKey]) -> None:
        """Forget several keys."""
        lost = {self.form_of(key) for key in checked_all(keys)}
        with self._lock:
            held = lost & self._mine
            self._settle("publish_release", sorted(held), is_held=True)
            self._settle("publish_release", sorted(lost - held), is_held=False)

    def mark_unknown_many(self, keys: Iterable[GivenKey]) -> None:
        """Doubt several keys with one statement."""
        unsure = sorted({self.form_of(key) for key in checked_all(keys)})
        with self._lock:
            self._settle("publish_mark_unknown", unsure)

    def resolve(self, found: Collection[bytes], *, is_sure: bool) -> Resolved:
        """Settle unknown keys of the scope, whoever has left them; so what is not there may still arrive."""
        with self._lock:
            unknown = {key for (key,) in self._store.run("publish_unknown", scope=self._scope)}
            there = sorted(unknown.intersection(map(_stored, found)))
            self._settle("publish_confirm", there)
        return Resolved(len(there), 0, len(unknown) - len(there))

    def peek(self, keys: Iterable[GivenKey]) -> dict[bytes, str]:
        """Return the encoded forms of those that are there, and in which state; reserve none."""
        wanted = sorted({self.form_of(key) for key in checked_all(keys)})
        return dict(self._store.run("publish_peek", scope=self._scope, keys=wanted)) if wanted else {}

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
        counts: dict[str, int] = dict(self._store.run("publish_count", scope=self._scope))
        return Stats(
            confirmed=counts.get("c", 0),
            in_flight=counts.get("f", 0) + counts.get("t", 0),
            unknown=counts.get("u", 0),
            duplicates=self._duplicates,
            cache_hits=self.cache.hits,
        )

    def _ask(self, wanted: list[bytes], map_version: int | None) -> tuple[dict[bytes, State], set[int]]:
        """Reserve sorted, different keys; return what they are, and who else holds the ones in flight."""
        if not wanted:
            return {}, set()
        states = dict.fromkeys(wanted, NEW)
        holders: set[int] = set()
        rows = self._store.run(
            "publish_reserve",
            scope=self._scope,
            keys=wanted,
            owner=self.owner.id,
            token=self.owner.token,
            map_version=map_version,
        )
        for place, state, holder in rows:
            key = wanted[place - 1]
            states[key] = ANSWERS[KeyState(state)]
            if states[key] is IN_FLIGHT and holder != self.owner.id:
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
            ((confirmed, released, unknown),) = self._store.run(
                "publish_take_over",
                scope=self._scope,
                dead=owner.id,
                keys=sorted(map(_stored, found.keys)),
                is_sure=found.is_sure,
            )
            logger.warning(
                "took over from %r (%s) on %r: %s keys were in the log, %s were not, %s are unknown",
                owner.name,
                owner.id,
                self.scope,
                confirmed,
                released,
                unknown,
                extra=about("owner_taken_over") | {"topic": self.scope, "producer": owner.name, "owner": owner.id},
            )
        return len(dead)

    def _settle(self, name: str, keys: list[bytes], **more: Any) -> None:
        """Run a change of keys, under the lock: nobody may reserve one of them before ``_mine`` has changed, too."""
        if keys:
            self._store.run(name, scope=self._scope, keys=keys, owner=self.owner.id, **more)
            self._mine.difference_update(keys)
