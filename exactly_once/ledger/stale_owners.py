"""Terminate the backend of a frozen owner that one of our transactions waits for, and show that ours is none.

A process that was stopped inside a transaction keeps its row locks, and no server time-out ends it
while it is inside COPY. Its partitions are ours by then, but our handler waits for its rows.
A process that is only slow must not be taken for one: while its unit takes long, it renews a second transaction that
names the backend of the first, which a stopped process cannot do. For whom else a unit waits is logged.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from exactly_once._log import about
from exactly_once._model import Partition

from .session import Connection, dispose, execute, hiding, is_lost, tag_of

logger = logging.getLogger(__name__)

# How long a transaction of ours may take before its blockers are looked at.
FROZEN_AFTER_SECONDS = 2.0
# How long a process may show no sign of life before it passes for stopped.
STILL_SECONDS = 10.0
# How long a unit without a bound is left alone that shows no sign of life: its server may be full.
UNBOUNDED_SECONDS = 60.0
# How long a transaction is too young for a sign of life to be missed: the first needs a connection.
_YOUNG_SECONDS = 3 * FROZEN_AFTER_SECONDS
# How often the thread looks whether it has anything to do; half of :data:`FROZEN_AFTER_SECONDS`.
_TURN_SECONDS = 1.0
# How often life is shown: a few times within :data:`STILL_SECONDS`.
_SIGN_SECONDS = 2.0
# Between two looks at what a transaction waits for, which read pg_locks: they double up to this.
_LONGEST_PAUSE_SECONDS = 4.0
# How long a look that is under way is waited for; it is a daemon's, and closes its connection by itself.
_CLOSE_SECONDS = 2.0
# How long the connection is kept after the last use, so that one slow unit after the other opens one.
_KEPT_SECONDS = 30.0


@dataclass(eq=False, slots=True)
class _Watched:
    """A transaction of ours."""

    pid: int
    partitions: Sequence[Partition] = ()
    taken: Sequence[tuple[Partition, UUID]] = ()
    connection: Connection | None = None
    may_take: float | None = None
    since: float = field(default_factory=time.monotonic)
    next_look: float = 0.0
    pause: float = 0.0
    next_sign: float = 0.0
    is_told: bool = False  # whether it was logged for whom it waits

    @property
    def status(self) -> TransactionStatus | None:
        """How the transaction stands, where its connection is known."""
        return None if self.connection is None else self.connection.info.transaction_status


class StaleBackendTerminator:
    """One daemon thread with a connection of its own, opened when something waits or takes long, and kept meanwhile."""

    def __init__(self, connect: Callable[[], Connection], *, schema: str, group_id: str, instance: UUID) -> None:
        self._connect = hiding(connect)
        self._schema = schema
        self._parameters: dict[str, Any] = {
            "group_id": group_id,
            "instance": str(instance),
            "tag": tag_of(instance, schema),
            "still": STILL_SECONDS,
            "young": _YOUNG_SECONDS,
            "unbounded": UNBOUNDED_SECONDS,
        }
        # The transaction that is open; written by the consumer's thread, read by ours in one step.
        self._watched: _Watched | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        # The thread's own.
        self._connection: Connection | None = None
        self._shown: _Watched | None = None  # whose sign of life is the open transaction
        self._used_at = 0.0  # when the connection was, on the monotonic clock
        self._has_failed = False  # whether that was logged; until it works again
        self.ended = 0  # how many backends

    @contextlib.contextmanager
    def acquiring(self, pid: int, partitions: Sequence[Partition]) -> Iterator[None]:
        """Watch backend ``pid`` while it takes the rows of ``partitions`` from their owners."""
        self._watch(_Watched(pid, partitions=partitions))
        try:
            yield
        finally:
            self.clear()

    def watch(
        self,
        pid: int,
        *,
        connection: Connection | None = None,
        may_take: float = math.inf,
        taken: Sequence[tuple[Partition, UUID]] = (),
    ) -> None:
        """Watch the unit in backend ``pid`` until :meth:`clear`, and show that it lives where it takes long.

        ``taken`` are partitions of it that we took from an instance that had not released them.
        """
        # Peers know the limit in whole seconds; one without a limit shows life from the start.
        self._watch(_Watched(pid, connection=connection, may_take=0 if math.isinf(may_take) else may_take, taken=taken))

    def clear(self) -> None:
        """Stop watching: the transaction is over."""
        self._watched = None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=_CLOSE_SECONDS)

    def _watch(self, watched: _Watched) -> None:
        self._watched = watched
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="exactly_once-watcher", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(_TURN_SECONDS):
            watched = self._watched
            try:
                self._turn(watched, time.monotonic())
            except Exception as error:  # noqa: BLE001 - connect= may be the application's; and the thread must go on
                self._discard()
                if watched is not None:
                    watched.next_sign = watched.next_look = 0.0  # the sign went with the connection
                # Between two looks the server may have ended the session for idling: the next turn opens another.
                if not self._has_failed and not isinstance(error, psycopg.errors.IdleSessionTimeout):
                    self._has_failed = True
                    # The transaction that waits may see the same trouble, but on a full server it does not.
                    logger.warning(
                        "could not look for a frozen owner, nor show that this process lives: %s; trying on. Beside "
                        "its own, each worker needs a connection for that while a unit takes long",
                        error,
                        extra=about("watch_failed", group=self._parameters["group_id"]),
                    )
        self._discard()

    def _turn(self, watched: _Watched | None, now: float) -> None:
        if watched is not None and watched.status in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
            watched = None  # it has ended: a joined one is watched until the next iteration
        if self._shown is not None and self._shown is not watched:
            self._shown = None
            if self._connection is not None and not is_lost(self._connection):
                self._connection.execute("COMMIT", prepare=False)
        if watched is None or now - watched.since <= FROZEN_AFTER_SECONDS:
            if self._connection is not None and now - self._used_at > _KEPT_SECONDS:
                self._discard()
            return
        # Before peers may begin to doubt, which let a unit alone for the time that it may take.
        is_long = watched.may_take is not None and now - watched.since > watched.may_take / 2
        if is_long and now >= watched.next_sign:
            watched.next_sign = now + _SIGN_SECONDS
            # Open a transaction that names the backend of ours, or say it again.
            connection = self._connection_now()
            is_shown = self._shown is watched and connection.info.transaction_status is TransactionStatus.INTRANS
            sign = sql.Literal(f"exactly_once_alive:{watched.pid}")
            execute(connection, self._schema, "renew_sign" if is_shown else "show_sign", sign=sign)
            self._shown, self._has_failed = watched, False
        # Without a statement under way nothing waits for a lock.
        if watched.status in (None, TransactionStatus.ACTIVE) and now >= watched.next_look:
            watched.pause = min(max(_TURN_SECONDS, 2 * watched.pause), _LONGEST_PAUSE_SECONDS)
            watched.next_look = now + watched.pause
            self._end_blockers(watched)

    def _end_blockers(self, watched: _Watched) -> None:
        """End those of frozen owners; name the others, once, where a unit waits for long."""
        connection = self._connection_now()
        if connection.info.transaction_status is TransactionStatus.INTRANS:
            execute(connection, self._schema, "look_anew")
        found = execute(connection, self._schema, "blockers", schema=self._schema, pid=watched.pid).fetchall()
        ended: dict[int, str] = {}
        # Where nobody blocks it any more, the ledger may still be in the making.
        if found and all(is_readable for *_, is_readable in found):  # or the look at the ledger would wait as well
            cursor = execute(
                connection,
                self._schema,
                "end_stale_blockers",
                **self._parameters,
                pid=watched.pid,
                topics=[p.topic for p in watched.partitions],
                partitions=[p.number for p in watched.partitions],
                taken_topics=[p.topic for p, _ in watched.taken],
                taken_partitions=[p.number for p, _ in watched.taken],
                taken_from=[str(instance) for _, instance in watched.taken],
            )
            ended = {blocker: tag for blocker, tag, _ in cursor}
        self._has_failed = False
        for blocker, tag in ended.items():
            self.ended += 1
            logger.warning(
                "ended backend %s of %s: it stood still in a transaction that ours waited for",
                blocker,
                tag,
                extra=about("blocker_ended", group=self._parameters["group_id"], several=watched.partitions),
            )
        if watched.partitions or watched.is_told or time.monotonic() - watched.since <= STILL_SECONDS:
            return  # who acquires rows logs that himself
        prepared = "a prepared transaction has it (pg_prepared_xacts names it)"
        if said := [
            f"backend {pid} has it (user {user}, application_name {name!r})" if pid else prepared
            for pid, user, name, _ in found
            if pid not in ended
        ]:
            watched.is_told = True
            logger.warning(
                "our backend %s waits for a lock, by now for more than %g s: %s",
                watched.pid,
                STILL_SECONDS,
                "; ".join(said),
                extra=about("unit_blocked", group=self._parameters["group_id"]),
            )

    def _connection_now(self) -> Connection:
        if self._connection is None or is_lost(self._connection):
            self._discard()
            self._connection = self._connect()
            if self._connection.info.transaction_status is TransactionStatus.IDLE:
                self._connection.autocommit = True
        self._used_at = time.monotonic()
        return self._connection

    def _discard(self) -> None:
        connection, self._connection, self._shown = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                dispose(connection)
