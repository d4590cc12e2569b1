"""Publication: the rows of a batch that tasks have staged, into the table, in one guarded transaction. On the driver.

Spark makes a new writer for every batch and another one for its commit, so a run cannot remember what it owns. The
database does, in a row of each run: that it owns the group, which rows of the ledger it has acquired, and how far it
has written each; read and written in the transaction of the batch. So whoever publishes needs no memory, and calling it
again, after an answer that was lost, finds everything done. The first task of a run registers it and takes the query's
row, before anything is staged. A run that is known and has lost that row was fenced, and never comes back, whatever it
was doing when it stood still.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]

from exactly_once._log import about
from exactly_once._model import Partition
from exactly_once.errors import Fenced
from exactly_once.ledger.conflict import Grant
from exactly_once.ledger.migrate import check
from exactly_once.ledger.rows import LOCK_SECONDS, Ledger
from exactly_once.ledger.session import Session, connector, cursor_on
from exactly_once.ledger.sql import query
from exactly_once.ledger.stale_owners import StaleBackendTerminator

from .attempt import Attempt, Part, Work
from .errors import RowsOutOfOrder
from .frame import check_key, columns_of
from .offset_filter import PLACES, OffsetFilter
from .offset_log import NotKafka, OffsetLog, on_disk
from .options import Options
from .owners import BatchGrant, Claim, Owners, claim, patiently, query_row, rotates_at
from .ranges import Range, looked_through, one_batch, refuse_older, remaining
from .run import log_set_aside, starter_of
from .staging import BATCH_JOB, ChunkRef, ObservedRange, RunBatch, Staged, fetch, in_order, placed
from .stream_query import refuse_kept_rows, refuse_lost_state

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)


def register(options: Options, batch: RunBatch) -> None:
    """Make this run the one that writes, if it was never seen before; whether it still is, its commit finds out.

    :raises QueryChanged: when the group counts the batches of another query.
    :raises LedgerBehindCheckpoint: when the query has published a batch that is not the one before this.
    :raises SchemaTooOld: when the database lacks what this needs.
    """
    patiently(options)(_register, options, batch)


def _register(options: Options, batch: RunBatch) -> None:
    # A run is one owner in all its processes.
    session = Session(connector(options.conninfo), schema=options.schema, instance=batch.run_id)
    watcher = StaleBackendTerminator(
        session.connect, schema=options.schema, group_id=options.group_id, instance=batch.run_id
    )
    owners = Owners(_ledger_of(options, batch, session), starter=None, counts=options.ledger == "batch-id")
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


def publish(options: Options, schema: StructType, staged: Sequence[Staged], *, releases: bool = False) -> None:
    """Write what the attempts have staged that Spark has counted; nothing of a batch that was written before.

    With ``releases`` the rows of the ledger are given back afterwards.

    :raises Fenced: when another run writes for this group by now.
    :raises FrameError: when the frame does not fit the table.
    :raises StageLost: when staged rows are gone.
    """
    patiently(options)(_publish, options, schema, staged, releases=releases)


def _publish(options: Options, schema: StructType, staged: Sequence[Staged], *, releases: bool) -> None:
    batch = staged[0].batch
    work = Work(options=options, batch_id=batch.batch_id, instance=batch.run_id)
    with Attempt(work, kin=batch.run_id) as attempt, contextlib.ExitStack() as stack:
        attempt.rotates = rotates_at(batch.batch_id)
        ledger = _ledger_of(options, batch, attempt.session)
        attempt.begin()
        inside = ledger.inside(attempt.unit.connection)
        starter = starter_of(options, inside) if options.ledger == "offsets" else None
        if starter is not None:
            stack.callback(starter.close)
        owners = Owners(inside, starter=starter)
        attempt.commit(StagedCommit(attempt, batch, owners).write(schema, staged))
        log_set_aside(options.group_id, attempt.result.set_aside)
        if releases:
            owners.release(ledger)


def _ledger_of(options: Options, batch: RunBatch, session: Session) -> Ledger:
    """Make the ledger as a run sees it."""
    return Ledger(
        session,
        group_id=options.group_id,
        owner_kind="spark",
        owner_name=options.name or f"query {batch.query_id}",
        take_over=options.take_over,
    )


class StagedCommit:
    """The transaction of one batch, from what its run remembers to the moves of the ledger."""

    def __init__(self, attempt: Attempt, batch: RunBatch, owners: Owners) -> None:
        self._attempt = attempt
        self._options = attempt.work.options
        self._batch = batch
        self._owners = owners
        self._query = query_row(batch.query_id)
        # What this query is called in the database; a batch job by its own name, as it has no checkpoint.
        job_id = self._options.job_id
        self._name = batch.query_id if job_id is None else f"job {job_id}"
        # How far the run has written each row of the ledger; :meth:`_recall` reads it, :meth:`write` moves it.
        self._ended: dict[Partition, int] = {}
        self._log: OffsetLog | None = None

    def write(self, schema: StructType, staged: Sequence[Staged]) -> dict[Partition, tuple[int, int]]:
        """Do everything but the COMMIT; return the moves that it must make."""
        options, batch, attempt, owners = self._options, self._batch, self._attempt, self._owners
        is_job = batch.query_id == BATCH_JOB
        found, published = self._recall()
        batch_id = found if is_job else batch.batch_id
        if published is not None and (is_job or batch_id < published):
            return {}  # done by a call whose answer was lost
        is_new = bool(remaining(one_batch(self._query, batch_id), {self._query: found}, group_id=options.group_id))
        if not is_job:
            self._log = on_disk(options.checkpoint_location, batch.query_id, warns=published is None)
        part, known = self._fit(schema, is_first=published is None)
        attempt.work = replace(attempt.work, parts=(part,))
        if known.is_known_query and options.job_id is not None and options.mode != "replace":
            self._run("spark_unstage", batch_id=batch.batch_id)
            logger.warning(
                "job %r of group %r had been written before, so nothing of it is written now; another jobId, or none, "
                "writes it",
                options.job_id,
                options.group_id,
                extra=about("job_skipped", group=options.group_id),
            )
            return {}
        fingerprint = None if self._log is None else self._log.fingerprint(batch_id)
        moves: dict[Partition, tuple[int, int]] = {}
        if options.ledger == "offsets":
            moves = self._write_offsets(staged)
        elif is_new:
            attempt.empty()
            for s in staged:
                for number, chunk in enumerate(s.chunks):
                    attempt.write(self._fetch(ChunkRef(s.attempt, number, chunk)))
        else:
            counted = self._run("spark_fingerprint", query_id=self._name, batch_id=found - 1)
            prints = counted[0][0] if counted else None, fingerprint
            refuse_older(found, batch_id, prints, group_id=options.group_id)
        # Where offsets tell what was written, an older copy of the checkpoint takes the batch ids back.
        self._ended[self._query] = batch_id + 1
        self._run("spark_hold", held=json.dumps(to_json(owners.held, self._ended)))
        self._run("spark_unstage", batch_id=batch.batch_id)
        self._run(
            "spark_report",
            query_id=self._name,
            batch_id=batch_id,
            name=options.name,
            row_count=attempt.result.rows,
            dropped=attempt.result.dropped,
            fingerprint=fingerprint,
        )
        attempt.work = replace(attempt.work, grants=tuple(owners.held.values()))
        return {self._query: (found, batch_id + 1), **moves}

    def _fit(self, schema: StructType, *, is_first: bool) -> tuple[Part, Claim]:
        connection, options, (writer,) = self._attempt.unit.connection, self._options, self._attempt.writers
        table = writer.table(connection)
        known = Claim(is_known_query=not is_first, has_others=False)
        if is_first:
            known = claim(connection, options, [table], self._name)
        if self._log is not None:
            refuse_lost_state(known, self._log.operators(), options)
        columns = columns_of(schema, table, options)
        if options.mode in ("upsert", "insert-ignore"):
            check_key((*writer.key(connection), *options.add), columns, table)
        return Part(options=options, columns=columns, has_places=options.ledger == "offsets"), known

    def _write_offsets(self, staged: Sequence[Staged]) -> dict[Partition, tuple[int, int]]:
        ranges = self._ranges(staged)
        next_offsets = self._owners.take(ranges, batch_id=self._batch.batch_id)
        self._attempt.work = replace(self._attempt.work, grants=tuple(self._owners.held.values()))
        todo = remaining(ranges, next_offsets, group_id=self._options.group_id)
        if todo:
            offsets = OffsetFilter(next_offsets, {r.partition: r for r in ranges})
            places, is_sorted = in_order(staged)
            tables: Iterator[pa.Table] = (placed(self._options, self._fetch(place)) for place in places)
            if self._options.mode != "append" and not is_sorted:  # it matters who comes last
                tables = iter([pa.concat_tables(tables).sort_by([(place, "ascending") for place in PLACES])])
            for table in tables:
                self._attempt.write(offsets.keep(table))
            self._attempt.result.dropped = offsets.dropped
        self._ended |= {r.partition: r.end for r in ranges}
        return {share.partition: (share.write_from, share.end) for share in todo}

    def _ranges(self, staged: Sequence[Staged]) -> list[Range]:
        """Return what the batch covers, from the checkpoint where it can be had."""
        if self._log is not None:
            refuse_kept_rows(self._log.keeps_rows())
            with contextlib.suppress(NotKafka):
                return self._log.ranges(self._batch.batch_id)
        spans = (span for s in staged for chunk in s.chunks for span in chunk.spans)
        return looked_through(_merged(spans, self._ended), self._ended)

    def _recall(self) -> tuple[int, int | None]:
        """Read what this run has acquired; return the query's next batch id, and the one that this run has left there.

        :raises Fenced: when another run has taken the query's row, or nothing is known of this one.
        """
        (found,) = self._run("spark_held") or ([None],)
        self._owners.held, self._ended = from_json(found[0] or [])
        if self._query not in self._owners.held:
            raise Fenced(
                f"the database of group {self._options.group_id!r} does not know this run any more: it was set back, "
                "or a thousand runs came since. Start the query again"
            )
        next_batch = self._owners.find([self._query])[self._query]
        published = self._ended.get(self._query)
        if published is None:
            for topic, number, ended in self._run(
                "spark_ended_before", query_id=self._name, batch_id=self._batch.batch_id
            ):
                self._ended[Partition(topic, number)] = ended
        return next_batch, published

    def _fetch(self, place: ChunkRef) -> pa.Table:
        return fetch(self._attempt.unit.connection, self._options.schema, place)

    def _run(self, name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        values: Mapping[str, Any] = {
            "group_id": self._options.group_id,
            "run_id": self._batch.run_id,
            **parameters,
        }
        cursor = cursor_on(self._attempt.unit.connection)
        cursor.execute(query(name, self._options.schema), values, prepare=False)
        return cursor.fetchall() if cursor.description is not None else []


def _merged(spans: Iterable[ObservedRange], ended: Mapping[Partition, int]) -> list[ObservedRange]:
    """Make one span of all that are of one partition; those that lack something stay as they are.

    :raises RowsOutOfOrder: for rows from in front of where this run's earlier batch has ended.
    """
    merged: dict[tuple[str | None, int | None], ObservedRange] = {}
    for topic, number, lowest, highest in spans:
        if topic is None or number is None or lowest is None or highest is None:
            return [(topic, number, lowest, highest)]
        if lowest < ended.get(Partition(topic, number), 0):
            raise RowsOutOfOrder(
                f"a row of {topic}[{number}] has offset {lowest}, an earlier batch of this run has ended at "
                f"{ended[Partition(topic, number)]}: something has kept it since (a join of streams, a window, a "
                "state), and the ledger would take it for written. Say ledger='batch-id'"
            )
        _, _, low, high = merged.get((topic, number), (topic, number, lowest, highest))
        merged[topic, number] = topic, number, min(low or 0, lowest), max(high or 0, highest)
    return list(merged.values())


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
