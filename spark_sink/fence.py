"""Fence: which run of a query writes for a group. Each run registers once, the latest one publishes.

Spark makes a new writer for every batch and another one for its commit, so a run cannot remember what it owns. The
database does: the first task of a run registers it and takes the group's row, before anything is staged. A run that is
known and has lost that row was fenced, and never comes back, whatever it was doing when it stood still.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from exactly_once.ledger.migrate import check
from exactly_once.ledger.rows import LOCK_SECONDS
from exactly_once.ledger.session import Connection, Session, connector, cursor_on
from exactly_once.ledger.sql import query
from exactly_once.ledger.stale_owners import StaleBackendTerminator

from . import batch_ledger
from .errors import LedgerBehindCheckpoint
from .options import Options
from .owners import patiently

BATCH_JOB = "batch job"
"""What stands for the id of a query where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Which run of which query writes which batch. A batch job is a run of one batch."""

    run_id: UUID
    query_id: str
    batch_id: int


def session_of(options: Options, origin: Origin) -> Session:
    """Make a session of a run, which is one owner in all its processes."""
    return Session(connector(options.conninfo), schema=options.schema, instance=origin.run_id)


def register(options: Options, origin: Origin) -> None:
    """Make this run the one that writes, if it was never seen before; whether it still is, its commit finds out.

    :raises QueryChanged: when the group counts the batches of another query.
    :raises LedgerBehindCheckpoint: when the query has published a batch that is not the one before this.
    :raises SchemaTooOld: when the database lacks what this needs.
    """
    patiently(options)(_register, options, origin)


def watching(options: Options, origin: Origin, session: Session) -> StaleBackendTerminator:
    """Make what ends the backend of a run that stands still and is waited for."""
    return StaleBackendTerminator(
        session.connect, schema=options.schema, group_id=options.group_id, instance=origin.run_id
    )


def _register(options: Options, origin: Origin) -> None:
    session = session_of(options, origin)
    watcher = watching(options, origin, session)
    parameters = {"group_id": options.group_id, "run_id": origin.run_id, "batch_id": origin.batch_id}
    try:
        with session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, pid):
            cursor = cursor_on(connection)
            if cursor.execute(query("spark_register", options.schema), parameters, prepare=False).rowcount:
                with watcher.acquiring(pid, ()):
                    _acquire(connection, session, options, origin)
                _compare(cursor, options, origin)
                cursor.execute(query("spark_forget", options.schema), parameters, prepare=False)
    except psycopg.errors.UndefinedTable:
        check(session.connection, options.schema)
        raise
    finally:
        watcher.close()
        session.close()


def _compare(cursor: psycopg.Cursor[tuple[Any, ...]], options: Options, origin: Origin) -> None:
    """Refuse a run that would leave out batches of its query: the registration may be lost as well."""
    parameters = {"group_id": options.group_id, "query_id": origin.query_id}
    last = cursor.execute(query("spark_last", options.schema), parameters, prepare=False).fetchone()
    if last is not None and last[0] < origin.batch_id - 1:
        raise not_next(options, last[0], origin.batch_id)


def not_next(options: Options, last: int, batch_id: int) -> LedgerBehindCheckpoint:
    """Describe a batch in front of which some are missing."""
    if options.ledger == "batch-id":
        return batch_ledger.lost_batches(options.group_id, last, batch_id)
    mend = "To read them again start the query with a new checkpoint and startingOffsets from the ledger"
    return batch_ledger.lost_batches(options.group_id, last, batch_id, mend=mend)


def _acquire(connection: Connection, session: Session, options: Options, origin: Origin) -> None:
    """Take the group's row, after a publication of the run that had it."""
    batch_ledger.acquire_inside(
        connection,
        session,
        group_id=options.group_id,
        query_id=origin.query_id,
        name=options.name or f"query {origin.query_id}",
        token=origin.run_id,
    )
