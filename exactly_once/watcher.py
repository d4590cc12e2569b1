"""Watcher: ends the backend of a frozen owner that one of our transactions waits for.

A process that was stopped inside a transaction keeps its row locks, and no server time-out ends it
while it is inside COPY. Its partitions are ours by then, but our handler waits for its rows.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

import psycopg

from .logs import about
from .model import Partition
from .session import Connection, cursor_on, hiding, marker_of
from .sql import query

logger = logging.getLogger(__name__)

FROZEN_AFTER_SECONDS = 2.0
"""How long a transaction of ours may take before its blockers are looked at, and how often after that."""
STILL_SECONDS = 10.0
"""How long a transaction may stand still while ours waits for it, even if its instance owns rows."""


class Watcher:
    """One daemon thread with a connection of its own, opened only when something waits."""

    def __init__(self, connect: Callable[[], Connection], *, schema: str, group_id: str, instance: UUID) -> None:
        self._connect = hiding(connect)
        self._statement = query("end_stale_blockers", schema)
        self._parameters: dict[str, Any] = {
            "group_id": group_id,
            "instance": str(instance),
            "marker": marker_of(instance, schema),
            "still": STILL_SECONDS,
        }
        self._waiting: tuple[float, int, Sequence[Partition], Sequence[UUID]] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.ended = 0

    @contextlib.contextmanager
    def acquiring(self, pid: int, partitions: Sequence[Partition]) -> Iterator[None]:
        """Watch backend ``pid`` while it takes the rows of ``partitions`` from their owners."""
        self.watch(pid, partitions=partitions)
        try:
            yield
        finally:
            self.clear()

    def watch(self, pid: int, *, partitions: Sequence[Partition] = (), previous: Sequence[UUID] = ()) -> None:
        """Watch backend ``pid`` until :meth:`clear`; ``previous`` are the instances we took rows from."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="exactly_once-watcher", daemon=True)
            self._thread.start()
        self._waiting = (time.monotonic(), pid, partitions, previous)

    def clear(self) -> None:
        """Stop watching: the transaction is over."""
        self._waiting = None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=FROZEN_AFTER_SECONDS)

    def _run(self) -> None:
        while not self._closed.wait(FROZEN_AFTER_SECONDS / 2):
            waiting = self._waiting
            if waiting is not None and time.monotonic() - waiting[0] > FROZEN_AFTER_SECONDS:
                self._end_blockers(*waiting[1:])

    def _end_blockers(self, pid: int, partitions: Sequence[Partition], previous: Sequence[UUID]) -> None:
        parameters = self._parameters | {
            "pid": pid,
            "topics": [p.topic for p in partitions],
            "partitions": [p.number for p in partitions],
            "previous": [str(instance) for instance in previous],
        }
        try:
            with self._connect() as connection:
                cursor = cursor_on(connection).execute(self._statement, parameters, prepare=False)
                for blocker, marker, _ in cursor.fetchall():
                    self.ended += 1
                    logger.warning(
                        "ended backend %s of %s: it stood still in a transaction that ours waited for",
                        blocker,
                        marker,
                        extra=about("blocker_ended", group=self._parameters["group_id"], several=partitions),
                    )
        except psycopg.Error as error:
            # The transaction that waits will see the same trouble, and reports it.
            extra = about("watch_failed", group=self._parameters["group_id"], several=partitions)
            logger.warning("could not look for a frozen owner: %s", error, extra=extra)
