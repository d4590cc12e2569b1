"""SharedSlotFilter: slots of a fixed number in memcached, overwritten on collision; several processes share them."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from exactly_once._log import about, named
from exactly_once.errors import ConfigurationError
from exactly_once.kafka.guard import Guard
from exactly_once.kafka.kinds import check_choice, check_kinds

from .errors import FilterUnavailable
from .filter import ANSWERS, CHANGES, DUPLICATE, NEW, UNKNOWN, Change, Filter, KeyState, State, Stats
from .keys import GivenKey, checked_all, encoded

if TYPE_CHECKING:
    from pymemcache.client.base import Client  # type: ignore[import-untyped]

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 16
_OWNER_BYTES = 8
# A key of memcached has 250 characters, of which a slot's number needs up to 20.
_PREFIX = 230
_LONGEST_LEASE = 30 * 24 * 3600
_OPEN = frozenset((KeyState.IN_FLIGHT, KeyState.RESENT))
_STATES = {state.value.encode(): state for state in KeyState}
_MISSING = object()
# What a released slot holds in memcached, as in the original: a delete could not be compared.
_EMPTY = b"-"


class Slot(NamedTuple):
    """What a slot holds: whose digest, and what is known of that key."""

    digest: bytes
    state: KeyState
    owner: bytes
    """Whose reservation it is."""


class SharedSlotFilter(Filter[GivenKey]):
    """Recognises most recent keys, in several processes: ``SharedSlotFilter(("10.0.0.7", 11211), slots=10**7, ...)``.

    Each key has one slot in memcached (needs pymemcache) and overwrites what is there. A slot is changed by
    compare-and-set, so that of two processes with the same key one is told NEW and the other is not. Slots hold digests
    of 128 bits: a new key is taken for a seen one, and its message **lost**, with a probability of 2**-128 per message.
    Keys that share a slot push each other out, also while they are in flight: a duplicate may pass then, with the
    probability of :func:`loss_probability`. Memcached drops what it has no room for, everything when it restarts, and a
    reservation after ``lease_seconds``, which must be longer than a message may be in flight: duplicates may pass then,
    too. Filters of one ``prefix`` share their slots, and those of one topic their keys. Who can choose keys can also
    choose ones that share a slot, unless ``hash_key`` is a secret; it is the same in all processes, as ``slots`` is:
    with another number all keys are new.

    Where memcached cannot be asked, ``on_unavailable="raise"`` (default) raises :class:`FilterUnavailable` and nothing
    is sent; ``"treat_as_new"`` lets everything through and counts it (``stats().failed_open``).

    Thread-safe. ``docs/publishing.md`` says what it promises after a failed send, a crash, beside a second process.
    """

    is_remote = True

    def __init__(
        self,
        server: tuple[str, int],
        *,
        prefix: str,
        slots: int,
        lease_seconds: int = 600,
        timeout_seconds: float = 3.0,
        on_unavailable: Literal["raise", "treat_as_new"] = "raise",
        hash_key: bytes = b"",
    ) -> None:
        check_kinds(SharedSlotFilter.__init__, locals())
        if slots < 1:
            raise ConfigurationError(f"slots={slots!r} must be positive")
        if len(prefix) > _PREFIX or not all("!" <= character <= "~" for character in prefix):
            raise ConfigurationError(f"prefix={prefix!r}: memcached takes up to {_PREFIX} ASCII characters, no blanks")
        if not 0 < lease_seconds <= _LONGEST_LEASE:
            raise ConfigurationError(
                f"lease_seconds={lease_seconds!r} must lie between 1 and {_LONGEST_LEASE} (30 days): memcached "
                "takes more for a date"
            )
        # With 0 memcached is never asked, and "treat_as_new" lets everything through.
        if not 0 < timeout_seconds <= _LONGEST_LEASE:
            raise ConfigurationError(f"timeout_seconds={timeout_seconds!r} must be positive, {_LONGEST_LEASE} at most")
        check_choice("on_unavailable", on_unavailable, ("raise", "treat_as_new"))
        try:
            from pymemcache.client.base import Client  # noqa: PLC0415 - only who uses it needs it
            from pymemcache.exceptions import MemcacheError  # type: ignore[import-untyped]  # noqa: PLC0415
        except ImportError:
            raise ConfigurationError("pymemcache is missing: pip install 'kafka-exactly-once[memcached]'") from None
        self._errors = (MemcacheError, OSError)
        self._server = server
        self._client: Client = Client(
            server, connect_timeout=timeout_seconds, timeout=timeout_seconds, no_delay=True, default_noreply=False
        )
        self._prefix = prefix
        self.reserved_seconds = lease_seconds
        self.slots = slots
        self._lets_through = on_unavailable == "treat_as_new"
        self._hash_key = blake2b(hash_key).digest()[:32]
        self._me = secrets.token_bytes(_OWNER_BYTES)
        self._guard = Guard("this filter")
        # What this process holds. A slot that is ours and is not in here is from a lost answer.
        self._held: dict[bytes, KeyState] = {}
        self._lock = threading.Lock()
        # Whether the connection is being closed: a batch in another thread ends behind the command that it waits for.
        self._is_closing = False
        self._duplicates = self._evicted = self._failed_open = 0

    def reserve_many(self, keys: Iterable[GivenKey]) -> list[State]:
        """Reserve several keys: one question for all, and one compare-and-set for each that is not a duplicate."""
        answers = [state or NEW for state in self._settle("reserve", keys)]
        self._duplicates += answers.count(DUPLICATE)
        return answers

    def stats(self) -> Stats:
        """Return what this process holds and what happened in it; the slots themselves are not counted."""
        states = list(self._held.values())
        return Stats(
            confirmed=-1,
            in_flight=sum(state in _OPEN for state in states),
            unknown=states.count(KeyState.UNKNOWN),
            duplicates=self._duplicates,
            evicted=self._evicted,
            failed_open=self._failed_open,
        )

    def close(self) -> None:
        """Close the connection."""
        if self._guard.is_ours():
            self._is_closing = True
            try:
                with self._lock:
                    self._client.close()
            finally:
                self._is_closing = False

    def _settle(self, change: Change, keys: Iterable[GivenKey]) -> list[State | None]:
        self._guard.check()
        scope = b"" if self.topic is None else f"{self.topic}/".encode()
        places = [self._slot_of(scope + encoded(key)) for key in checked_all(keys)]
        answers: list[State | None] = [None] * len(places)
        todo = list(range(len(places)))
        with self._lock:
            began_at = time.monotonic()
            try:
                while todo:
                    todo = self._pass(change, places, todo, answers)
                seconds = time.monotonic() - began_at
                if change == "reserve" and seconds > self.reserved_seconds / 2:  # the rest is for messages in flight
                    raise FilterUnavailable(
                        f"memcached took {seconds:.1f} s to reserve {len(places)} keys, over half of lease_seconds="
                        f"{self.reserved_seconds:g}: others may have the first ones by now. Give it fewer keys at a "
                        "time, or a longer lease"
                    )
            except FilterUnavailable as error:
                if not self._lets_through:
                    # Nobody is told that these are reserved: asked for again, they come back as from a lost answer.
                    for (_, digest), answer in zip(places, answers, strict=True):
                        if change == "reserve" and (answer is NEW or answer is UNKNOWN):
                            self._held.pop(digest, None)
                    raise
                # Nobody tells the slots again, unless this process is asked for the key once more. To the others it
                # is in flight until the end of its lease.
                for _, digest in places if change != "reserve" else ():
                    self._settle_held(change, digest, is_told=False)
                left, what = answers.count(None), "outcomes are not stored"
                if change == "reserve":
                    self._failed_open += left
                    what = "keys are let through"
                said = "the shared slots are away: %s %s: %s"
                logger.warning(said, left, what, error, extra=about("keys_let_through"))
        return answers

    def _pass(
        self, change: Change, places: list[tuple[int, bytes]], todo: list[int], answers: list[State | None]
    ) -> list[int]:
        """Change each slot once; return the places that must be tried again."""
        found = self._read(sorted({places[n][0] for n in todo}))
        again: list[int] = []
        touched: set[int] = set()
        for n in todo:
            slot, digest = places[n]
            if slot in touched:  # changed by an earlier key of this batch: read it again
                again.append(n)
                continue
            touched.add(slot)
            held, proof = found[slot]
            answer, new, changes = step(change, held, digest, self._me, self._held.get(digest))
            if changes and not self._swap(slot, proof, new):
                again.append(n)
                continue
            answers[n] = answer
            self._evicted += changes and new is not None and held is not None and held.digest != digest
            if answer is NEW or answer is UNKNOWN:
                self._held[digest] = KeyState.IN_FLIGHT if answer is NEW else KeyState.RESENT
            elif answer is DUPLICATE:
                self._held.pop(digest, None)
            elif change != "reserve":
                self._settle_held(change, digest)
        return again

    def _settle_held(self, change: Change, digest: bytes, *, is_told: bool = True) -> None:
        """Take note of what became of a key that this process held, and of what its slot was not told."""
        after = CHANGES[change][self._held.pop(digest, KeyState.ABSENT)]
        is_kept = after is KeyState.UNKNOWN or (after is KeyState.CONFIRMED and not is_told)
        if is_kept and len(self._held) < self.slots:
            self._held[digest] = after

    def _read(self, slots: list[int]) -> dict[int, tuple[Slot | None, object]]:
        """Return what the slots hold, each with memcached's own mark of the change."""
        names = {self._name(slot): slot for slot in slots}
        found = self._ask("gets_many", list(names))
        answers: dict[int, tuple[Slot | None, object]] = {}
        for name, slot in names.items():
            value, mark = found.get(name, (None, _MISSING))
            if value in (None, _EMPTY):
                answers[slot] = None, mark
                continue
            state = value[_DIGEST_BYTES:][:1]
            if len(value) != _DIGEST_BYTES + 1 + _OWNER_BYTES or state not in _STATES:
                raise FilterUnavailable(
                    f"memcached holds under {name!r} what no filter has put there: another program uses "
                    f"prefix={self._prefix!r}. Choose another prefix"
                )
            answers[slot] = Slot(value[:_DIGEST_BYTES], _STATES[state], value[_DIGEST_BYTES + 1 :]), mark
        return answers

    def _swap(self, slot: int, proof: object, new: Slot | None) -> bool:
        """Put something else into a slot if it is unchanged."""
        value = _EMPTY if new is None else new.digest + new.state.value.encode() + new.owner
        expire = self.reserved_seconds if new is not None and new.state in _OPEN else 0
        if proof is _MISSING:
            return bool(self._ask("add", self._name(slot), value, expire))
        # None means that memcached has dropped the slot meanwhile: read it again.
        return bool(self._ask("cas", self._name(slot), value, proof, expire))

    def _ask(self, command: str, *arguments: Any) -> Any:
        if self._is_closing:
            raise FilterUnavailable("memcached cannot be asked: the filter is being closed")
        try:
            return getattr(self._client, command)(*arguments)
        except self._errors as error:
            self._client.close()
            host, port = self._server
            raise FilterUnavailable(f"memcached at {host}:{port} cannot be asked: {named(error)}") from error

    def _name(self, slot: int) -> str:
        return f"{self._prefix}:{slot}"

    def _slot_of(self, form: bytes) -> tuple[int, bytes]:
        whole = blake2b(form, digest_size=_DIGEST_BYTES + 8, key=self._hash_key).digest()
        return int.from_bytes(whole[_DIGEST_BYTES:], "big") % self.slots, whole[:_DIGEST_BYTES]


def step(
    change: Change, held: Slot | None, digest: bytes, me: bytes, holds: KeyState | None
) -> tuple[State | None, Slot | None, bool]:
    """Return the answer to a change of a key, what its slot holds afterwards, and whether that is something else.

    ``holds`` is what this process knows of the key, if it holds it. Pure: the protocol of one slot.
    """
    before = found = held.state if held is not None and held.digest == digest else KeyState.ABSENT
    is_mine = before in _OPEN and held is not None and held.owner == me
    was_not_told = holds is KeyState.CONFIRMED or (is_mine and holds is KeyState.UNKNOWN)
    if change == "reserve" and holds is not None and was_not_told:
        before = holds
    elif change == "reserve" and is_mine and holds is None:  # our own, of which we never heard that it had worked
        before = KeyState.ABSENT if before is KeyState.IN_FLIGHT else KeyState.UNKNOWN
    elif change in ("release", "mark_unknown") and before in _OPEN and not is_mine:
        return None, None, False  # our lease was over, and another process has reserved it since
    after = CHANGES[change][before]
    new = None if after is KeyState.ABSENT else Slot(digest, after, me)
    return ANSWERS[before] if change == "reserve" else None, new, after is not before or before is not found
