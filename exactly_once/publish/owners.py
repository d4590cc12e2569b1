"""Owners: the lives of sending processes in Postgres, with leases and fences."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self
from uuid import uuid4

from exactly_once._log import about, named
from exactly_once.errors import ConfigurationError
from exactly_once.kafka.guard import Guard
from exactly_once.kafka.kinds import check_kinds
from exactly_once.ledger.session import Connection

from .errors import FilterUnavailable, NameTaken, ProducerFenced
from .keys import NAME, is_name
from .store import Store

logger = logging.getLogger(__name__)

_LEASE_SECONDS = 60.0
# As many as every reader of JSON keeps.
_ID_BITS = 53
# Between two looks at a name that is taken.
_WAIT_SECONDS = 0.5
# Beside the partitions of a topic in ``Positions``.
TOPIC_ID = "topic id"
# By topic and partition: an offset. And by topic, which one of its name that was.
Positions = Mapping[str, Mapping[int, int] | Mapping[int | str, int | str | None]]


class DeadOwner(NamedTuple):
    """An owner that was fenced in the database, and what is needed to find out what it sent."""

    id: int
    name: str
    transactional_id: str | None
    positions: Mapping[str, Mapping[str, Any]]
    """By scope: where the partitions of the topic ended when its life began, and the id that it had."""


class Holding(NamedTuple):
    """The keys of one scope that a process holds. What the database calls its own beyond that is from a lost answer."""

    keys: set[bytes]
    lock: threading.Lock


class PublishOwner:
    """A life of this process in the database: ``PublishOwner(conninfo, name="orders-service")``.

    It holds a lease, which a thread of its own renews; a frozen or dead process does not. Whoever finds the lease over
    may fence it: then everything that is asked under it raises :class:`ProducerFenced`. With ``exclusive=True`` a name
    has one owner: while the lease of another runs, starting is refused with :class:`NameTaken`; after that the other is
    fenced.

    The fence stops what asks the database. What a fenced process has handed to its Kafka client already may still
    arrive; only a transactional producer can be fenced there as well (``transactional_id``).

    ``positions`` say where a take-over of its keys must begin to read: where topics end now, or a function that returns
    that and is asked again and again, ``positions=lambda: end_positions(kafka, [topic])``. With ``wait_seconds`` a name
    whose last owner crashed is waited for: its lease runs for ``lease_seconds`` at most.
    """

    def __init__(
        self,
        conninfo: str | None = None,
        *,
        connect: Callable[[], Connection] | None = None,
        name: str | None = None,
        exclusive: bool = False,
        transactional_id: str | None = None,
        positions: Positions | Callable[[], Positions] | None = None,
        wait_seconds: float = 0.0,
        lease_seconds: float = _LEASE_SECONDS,
        schema: str = "exactly_once",
        migrate: bool = False,
    ) -> None:
        check_kinds(PublishOwner.__init__, locals())
        if not 0 < lease_seconds <= threading.TIMEOUT_MAX:
            raise ConfigurationError(
                f"lease_seconds={lease_seconds!r} must be positive, at most {threading.TIMEOUT_MAX:.0f}"
            )
        for option, given in (("name", name), ("transactional_id", transactional_id)):
            if given is not None and not is_name(given):
                raise ConfigurationError(f"{option}={given!r} is not {NAME}; leave it out, or give one")
        if exclusive and name is None:
            raise ConfigurationError("exclusive=True needs name=: a drawn name is nobody else's")
        self._positions = _as_json((positions() if callable(positions) else positions) or {})
        self.store = Store(conninfo, connect=connect, schema=schema, migrate=migrate)
        self.name = name or f"publisher-{uuid4()}"
        self.is_named = bool(name)
        self.lease_seconds = lease_seconds
        self.transactional_id = transactional_id
        self._given = positions
        # Where topics ended, and what was held then.
        self._seen: tuple[Positions, list[set[bytes]]] | None = None
        self._renewed_at = time.monotonic()
        self._fenced = False
        self._closing = threading.Event()
        self._guard = Guard(f"the owner {self.name!r}")
        self._holdings: dict[str, Holding] = {}
        # Drawn, so that no other owner ever has it, even if a failover loses that there was this one.
        self.id = secrets.randbits(_ID_BITS)
        self._start(exclusive=exclusive, wait_seconds=wait_seconds)
        repeated = [(self._keep, "the lease", "cannot be renewed:", self._about("lease_not_renewed"))]
        if callable(positions):  # apart from the lease, which must not wait for brokers
            repeated.append((self._advance, "the positions", "stay where they are:", self._about("positions_stay")))
        self._threads = [
            threading.Thread(target=self._repeat, args=(*given,), name=f"{given[1]} of {self.name}", daemon=True)
            for given in repeated
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"<PublishOwner {self.name!r} {self.id}{' fenced' if self._fenced else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def holding(self, scope: str) -> Holding:
        """Return what this process holds in a scope; all its windows share that."""
        return self._holdings.setdefault(scope, Holding(set(), threading.Lock()))

    def check(self) -> None:
        """Make sure that the lease runs; cheap while it does.

        :raises ProducerFenced: when somebody has taken over.
        :raises FilterUnavailable: when the lease is over and the database cannot be asked.
        """
        self._guard.check()
        if self._closing.is_set():
            raise ConfigurationError(
                f"the owner {self.name!r} is closed: close it after its producers, or make a new one"
            )
        if self._fenced or time.monotonic() - self._renewed_at > self.lease_seconds:
            self.renew()

    def renew(self) -> None:
        """Extend the lease; raises as :meth:`check`."""
        asked_at = time.monotonic()
        if self._fenced or not self.store.run("publish_renew", owner=self.id, seconds=self.lease_seconds):
            self._fenced = True
            raise ProducerFenced(f"{self.name!r} ({self.id}) was fenced; stop, or start anew")
        self._renewed_at = asked_at

    def fence(self, owners: Iterable[int]) -> list[DeadOwner]:
        """End the lives of those whose lease is over; return those that are ended now."""
        return [DeadOwner(*row) for row in self.store.run("publish_fence", owners=list(owners))]

    def close(self) -> None:
        """End this life in good order. May be called again; in a child of the process it does nothing."""
        if self._closing.is_set() or not self._guard.is_ours():
            return
        self._closing.set()
        for thread in self._threads:
            thread.join()
        try:
            self.store.run("publish_end_owner", owner=self.id)
        except FilterUnavailable as error:
            logger.warning("the lease of %r ends by itself: %s", self.name, error, extra=self._about("lease_left"))
        self.store.close()

    def _start(self, *, exclusive: bool, wait_seconds: float) -> None:
        """Begin this life; a name that is taken is waited for."""

        def start(connection: Connection) -> None:
            with connection.transaction():
                if self.store.on(connection, "publish_find_owner", owner=self.id):
                    return  # the answer to the first attempt was lost
                if exclusive:
                    self.store.on(connection, "publish_lock_name", name=self.name)
                    living = self.store.on(connection, "publish_living", name=self.name)
                    for other, seconds in living:
                        if seconds > 0:
                            raise NameTaken(
                                f"a producer named {self.name!r} ({other}) lives: its lease runs for {seconds:.0f} s "
                                "more. Stop it, or wait if it has crashed"
                            )
                    self.store.on(connection, "publish_fence", owners=[other for other, _ in living])
                self.store.on(
                    connection,
                    "publish_start_owner",
                    owner=self.id,
                    name=self.name,
                    transactional_id=self.transactional_id,
                    positions=self._positions,
                    seconds=self.lease_seconds,
                )

        deadline = time.monotonic() + wait_seconds
        is_told = False
        while True:
            try:
                return self.store.each(start)
            except NameTaken as error:
                if time.monotonic() >= deadline:
                    self.store.close()
                    raise
                if not is_told:
                    said = "waiting for %g s at most: %s"
                    logger.warning(said, wait_seconds, error, extra=self._about("waits_for_name"))
                    is_told = True
            time.sleep(min(_WAIT_SECONDS, max(0.0, deadline - time.monotonic())))

    def _repeat(self, work: Callable[[], None], what: str, why: str, extra: Mapping[str, Any]) -> None:
        """Do something three times in a lease, until the end; what goes wrong is told once, and tried again."""
        is_told = False
        while not self._closing.wait(self.lease_seconds / 3):
            try:
                work()
                is_told = False
            except ProducerFenced:
                logger.error("%r was fenced by another process", self.name, extra=self._about("owner_fenced"))
                return
            except Exception as error:  # noqa: BLE001 - whatever it is: without this thread a living process is taken over
                if not is_told:
                    said = what, self.name, why, named(error)
                    logger.warning("%s of %r %s %s", *said, extra=extra)
                is_told = True

    def _keep(self) -> None:
        """Renew the lease and turn the generations of keys."""
        self.renew()
        self.store.run("publish_rotate")

    def _advance(self) -> None:
        """Move the start of a take-over to where topics ended before anything was reserved that is in flight now."""
        if self._seen is None and callable(self._given):
            # The ends first: what is reserved after this stands behind them.
            found = self._given()
            self._seen = found, [holding.keys.copy() for holding in list(self._holdings.values())]
        held = [holding.keys.copy() for holding in list(self._holdings.values())]
        if self._seen and all(old.isdisjoint(now) for old, now in zip(self._seen[1], held, strict=False)):
            self.store.run("publish_advance", owner=self.id, positions=_as_json(self._seen[0]))
            self._seen = None

    def _about(self, action: str) -> dict[str, object]:
        return about(action) | {"producer": self.name, "owner": self.id}


def _as_json(positions: Positions) -> str:
    """Return positions as they are stored.

    :raises ConfigurationError: for what nobody could read: no process could take over then.
    """
    given: object = positions
    of_topics = given.values() if isinstance(given, Mapping) else [None]
    if not all(
        isinstance(of_topic, Mapping) and all(each[0] == TOPIC_ID or is_position(each) for each in of_topic.items())
        for of_topic in of_topics
    ):
        raise ConfigurationError(
            f"positions={given!r} must be what end_positions() returns: {{topic: {{partition: offset}}}}"
        )
    return json.dumps(positions)


def is_position(given: tuple[object, object]) -> bool:
    """Tell whether these are a partition and an offset of it."""
    return all(type(number) is int and number >= 0 for number in given)
