"""Run registry: which runs of a query have written for a group. Each registers once, the latest one publishes.

Spark makes a new writer for every batch and another one for its commit, so a run cannot remember what it owns. The
database does: the first task of a run registers it and takes the query's row, before anything is staged. A run that is
known and has lost that row was fenced, and never comes back, whatever it was doing when it stood still.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from exactly_once._model import Partition
from exactly_once.ledger.conflict import Grant
from exactly_once.ledger.migrate import check
from exactly_once.ledger.rows import LOCK_SECONDS, Ledger
from exactly_once.ledger.session import Session, connector, cursor_on
from exactly_once.ledger.sql import query
from exactly_once.ledger.stale_owners import StaleBackendTerminator

from .options import Options
from .owners import BatchGrant, Owners, patiently, query_row
from .ranges import one_batch, remaining

BATCH_JOB = "batch job"
"""What stands for the id of a query where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatch:
    """Which run of which query writes which batch. A batch job is a run of one batch."""

    run_id: UUID
    query_id: str
    batch_id: int


def session_of(options: Options, batch: RunBatch) -> Session:
    """Make a session of a run, which is one owner in all its processes."""
    return Session(connector(options.conninfo), schema=options.schema, instance=batch.run_id)


def ledger_of(options: Options, batch: RunBatch, session: Session) -> Ledger:
    """Make the ledger as a run sees it."""
    return Ledger(
        session,
        group_id=options.group_id,
        owner_kind="spark",
        owner_name=options.name or f"query {batch.query_id}",
        take_over=options.take_over,
    )


def watching(options: Options, batch: RunBatch, session: Session) -> StaleBackendTerminator:
    """Make what ends the backend of a run that stands still and is waited for."""
    return StaleBackendTerminator(
        session.connect, schema=options.schema, group_id=options.group_id, instance=batch.run_id
    )


def register(options: Options, batch: RunBatch) -> None:
    """Make this run the one that writes, if it was never seen before; whether it still is, its commit finds out.

    :raises QueryChanged: when the group counts the batches of another query.
    :raises LedgerBehindCheckpoint: when the query has published a batch that is not the one before this.
    :raises SchemaTooOld: when the database lacks what this needs.
    """
    patiently(options)(_register, options, batch)


def _register(options: Options, batch: RunBatch) -> None:
    session = session_of(options, batch)
    watcher = watching(options, batch, session)
    owners = Owners(ledger_of(options, batch, session), starter=None, counts=options.ledger == "batch-id")
    parameters = {"group_id": options.group_id, "run_id": batch.run_id}
    row = query_row(batch.query_id)
    try:
        with session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, pid):
            cursor = cursor_on(connection)
            if cursor.execute(query("spark_register", options.schema), parameters, prepare=False).rowcount:
                # With offsets a query may have written elsewhere before: they tell what is missing.
                first = 0 if options.ledger == "batch-id" else batch.batch_id
                found = owners.take_query(connection, pid, batch.query_id, watcher, first=first)
                remaining(one_batch(row, batch.batch_id), {row: found}, group_id=options.group_id)
                held = json.dumps(to_json(owners.held, {}))
                cursor.execute(query("spark_hold", options.schema), {**parameters, "held": held}, prepare=False)
                cursor.execute(query("spark_forget", options.schema), parameters, prepare=False)
    except psycopg.errors.UndefinedTable:
        check(session.connection, options.schema)
        raise
    finally:
        watcher.close()
        session.close()


def to_json(held: Mapping[Partition, BatchGrant], ended: Mapping[Partition, int]) -> list[dict[str, Any]]:
    """Write down what a run has acquired, and how far it has written each row."""
    return [
        {
            "topic": partition.topic,
            "partition": partition.number,
            "token": str(each.grant.token),
            "epoch": each.grant.epoch,
            "topic_id": each.topic_id,
            "ended": ended.get(partition),
        }
        for partition, each in held.items()
    ]


def from_json(found: list[dict[str, Any]]) -> tuple[dict[Partition, BatchGrant], dict[Partition, int]]:
    """Read it again."""
    held, ended = {}, {}
    for each in found:
        partition = Partition(each["topic"], each["partition"])
        grant = Grant(UUID(each["token"]), each["epoch"])
        held[partition] = BatchGrant(partition=partition, grant=grant, topic_id=each["topic_id"])
        if each["ended"] is not None:
            ended[partition] = each["ended"]
    return held, ended
