"""Fence: which run of a query writes for a group. Each run registers once, the latest one publishes.

Spark makes a new writer for every batch and another one for its commit, so a run cannot remember what it owns. The
database does: the first task of a run registers it and takes the group's row, before anything is staged. A run that is
known and has lost that row was fenced, and never comes back, whatever it was doing when it stood still.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

import psycopg

from exactly_once.ledger import LOCK_SECONDS
from exactly_once.retry import briefly
from exactly_once.schema import check
from exactly_once.session import Begun, Connection, Session, connector, cursor_on
from exactly_once.sql import query
from exactly_once.watcher import Watcher

from . import batch_ledger
from .options import Options

PATIENCE_SECONDS = 30.0
"""How long a short outage of the database may last, and a run that is fenced may take to let go."""


BATCH_JOB = "batch job"
"""What stands for the id of a query where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Which run of which query writes which batch. A batch job is a run of one batch."""

    run_id: UUID
    query_id: str
    batch_id: int


class OneTransaction(Session):
    """A session whose changes of the ledger join the transaction that is open."""

    def __init__(self, options: Options, origin: Origin) -> None:
        super().__init__(connector(options.conninfo), schema=options.schema, instance=origin.run_id)
        self._open: Connection | None = None

    def begin(self, isolation: str, *, may_take: float = math.inf) -> Begun:
        """Open a transaction for everything up to :meth:`close`."""
        begun = super().begin(isolation, may_take=may_take)
        self._open = self.connection
        return begun

    @contextlib.contextmanager
    def ledger_transaction(
        self, *, lock_timeout_seconds: float, is_durable: bool = True
    ) -> Iterator[tuple[Connection, int]]:
        """Join what is open, or open a short transaction."""
        if self._open is not None:
            yield self._open, self._open.info.backend_pid
            return
        opening = super().ledger_transaction(lock_timeout_seconds=lock_timeout_seconds, is_durable=is_durable)
        with opening as (connection, pid):
            self._open = connection
            try:
                yield connection, pid
            finally:
                self._open = None


def register(options: Options, origin: Origin) -> None:
    """Make this run the one that writes, if it was never seen before; whether it still is, its commit finds out.

    :raises QueryChanged: when the group counts the batches of another query.
    :raises SchemaTooOld: when the database lacks what this needs.
    """
    briefly(PATIENCE_SECONDS)(_register, options, origin)


def watching(options: Options, origin: Origin, session: Session) -> Watcher:
    """Make what ends the backend of a run that stands still and is waited for."""
    return Watcher(session.connect, schema=options.schema, group_id=options.group_id, instance=origin.run_id)


def _register(options: Options, origin: Origin) -> None:
    session = OneTransaction(options, origin)
    watcher = watching(options, origin, session)
    parameters = {"group_id": options.group_id, "run_id": origin.run_id}
    try:
        with session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, pid):
            cursor = cursor_on(connection)
            if cursor.execute(query("spark_register", options.schema), parameters, prepare=False).rowcount:
                with watcher.acquiring(pid, ()):
                    _acquire(session, options, origin)
                cursor.execute(query("spark_forget", options.schema), parameters, prepare=False)
    except psycopg.errors.UndefinedTable:
        check(session.connection, options.schema)
        raise
    finally:
        watcher.close()
        session.close()


def _acquire(session: Session, options: Options, origin: Origin) -> None:
    """Take the group's row, after a publication of the run that had it."""
    batch_ledger.acquire(
        session,
        group_id=options.group_id,
        query_id=origin.query_id,
        name=options.name or f"query {origin.query_id}",
        token=origin.run_id,
    )
