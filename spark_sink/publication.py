"""Publication: the rows of a batch that tasks have staged, into the table, in one guarded transaction. On the driver.

All that a run must remember from batch to batch is in the database, and read and written in the same transaction:
that it owns the group, which rows of the ledger it has acquired, and how far it has written each. So whoever calls this
needs no memory, and calling it again, after an answer that was lost, finds everything done.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]

from exactly_once._log import about
from exactly_once._model import Advance, Partition
from exactly_once.errors import Fenced
from exactly_once.ledger.session import Connection, cursor_on
from exactly_once.ledger.sql import query
from exactly_once.ledger.transaction import UnitOfWork
from exactly_once.writer import TableWriter
from exactly_once.writer.arrow import write_arrow

from .attempt import writer_of
from .claim import Claim, claim, refuse_lost_state
from .errors import RowsOutOfOrder
from .frame import check_key, columns_of
from .offset_filter import PLACES, OffsetFilter, naming
from .offset_log import NotKafka, OffsetLog, on_disk
from .options import Options
from .owners import Owners, patiently, query_row, rotates_at
from .ranges import Range, looked_through, one_batch, refuse_older, remaining
from .registry import BATCH_JOB, RunBatch, from_json, ledger_of, session_of, to_json, watching
from .run import starter_of
from .staging import ChunkRef, ObservedRange, Staged, fetch, in_order, placed, unstage
from .stream_query import refuse_kept_rows

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)


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
    session = session_of(options, batch)
    watcher = watching(options, batch, session)
    ledger = ledger_of(options, batch, session)
    unit = UnitOfWork(ledger)
    starter = None
    try:
        unit.begin()
        assert unit.begun is not None
        watcher.watch(unit.begun.pid)
        ledger = ledger.inside(unit.connection)
        starter = starter_of(options, ledger) if options.ledger == "offsets" else None
        commit = StagedCommit(options, batch, Owners(ledger, starter=starter), unit.connection)
        unit.commit(commit.write(schema, staged))
        watcher.clear()
        if releases:
            commit.release()
    finally:
        if starter is not None:
            starter.close()
        watcher.close()
        session.close()


class StagedCommit:
    """The transaction of one batch, from what its run remembers to the moves of the ledger."""

    def __init__(self, options: Options, batch: RunBatch, owners: Owners, connection: Connection) -> None:
        self._options = options
        self._batch = batch
        self._connection = connection
        self._owners = owners
        self._query = query_row(batch.query_id)
        self._ended: dict[Partition, int] = {}
        self._log: OffsetLog | None = None
        self._writer: TableWriter = writer_of(options)
        self._columns: tuple[str, ...] = ()
        self._rows = 0
        self._dropped = 0

    def write(self, schema: StructType, staged: Sequence[Staged]) -> list[Advance]:
        """Do everything but the COMMIT; return the moves that it must make."""
        options, batch = self._options, self._batch
        is_job = batch.query_id == BATCH_JOB
        found, published = self._recall()
        batch_id = found if is_job else batch.batch_id
        if published is not None and (is_job or batch_id < published):
            return []  # done by a call whose answer was lost
        is_new = bool(remaining(one_batch(self._query, batch_id), {self._query: found}, group_id=options.group_id))
        if not is_job:
            self._log = on_disk(options.checkpoint_location, batch.query_id, warns=published is None)
        known = self._fit(schema, is_first=published is None)
        if known.is_known_query and options.job_id is not None and options.mode != "replace":
            self._skip_job()
            return []
        fingerprint = None if self._log is None else self._log.fingerprint(batch_id)
        advances: list[Advance] = []
        if options.ledger == "offsets":
            advances = self._write_offsets(staged)
        elif is_new:
            self._write_counted(staged)
        else:
            counted = self._run("spark_fingerprint", query_id=self._name(), batch_id=found - 1)
            prints = counted[0][0] if counted else None, fingerprint
            refuse_older(found, batch_id, prints, group_id=options.group_id)
        # Where offsets tell what was written, an older copy of the checkpoint takes the batch ids back.
        self._ended[self._query] = batch_id + 1
        held = to_json(self._owners.held, self._ended)
        self._run("spark_hold", held=json.dumps(held))
        unstage(self._connection, options, batch)
        self._run(
            "spark_report",
            query_id=self._name(),
            batch_id=batch_id,
            name=options.name,
            row_count=self._rows,
            dropped=self._dropped,
            fingerprint=fingerprint,
        )
        rotates = rotates_at(batch.batch_id)
        return [self._owners.held[self._query].advance(found, batch_id + 1, rotates=rotates), *advances]

    def release(self) -> None:
        """Give the rows of the ledger back, after the COMMIT."""
        session = session_of(self._options, self._batch)
        try:
            self._owners.release(ledger_of(self._options, self._batch, session))
        finally:
            session.close()

    def _fit(self, schema: StructType, *, is_first: bool) -> Claim:
        connection, options = self._connection, self._options
        table = self._writer.table(connection)
        known = Claim(is_known_query=not is_first, has_others=False)
        if is_first:
            known = claim(connection, options, table, self._name())
        if self._log is not None:
            refuse_lost_state(known, self._log.operators(), options)
        self._columns = columns_of(schema, table, options)
        if options.mode in ("upsert", "insert-ignore"):
            check_key(self._writer.key(connection), self._columns, table)
        return known

    def _name(self) -> str:
        """Return what this query is called in the database; a batch job by its own name, as it has no checkpoint."""
        return f"job {self._options.job_id}" if self._options.job_id is not None else self._batch.query_id

    def _skip_job(self) -> None:
        unstage(self._connection, self._options, self._batch)
        logger.warning(
            "job %r of group %r had been written before, so nothing of it is written now; another jobId, or none, "
            "writes it",
            self._options.job_id,
            self._options.group_id,
            extra=about("job_skipped", group=self._options.group_id),
        )

    def _write_offsets(self, staged: Sequence[Staged]) -> list[Advance]:
        ranges = self._ranges(staged)
        next_offsets = self._owners.take(ranges, batch_id=self._batch.batch_id)
        moves = {
            share.partition: (share.write_from, share.end)
            for share in remaining(ranges, next_offsets, group_id=self._options.group_id)
        }
        if moves:
            offsets = OffsetFilter(next_offsets, {r.partition: r for r in ranges})
            for table in self._sorted(staged):
                self._store(offsets.keep(table))
            self._dropped = offsets.dropped
        self._ended |= {r.partition: r.end for r in ranges}
        rotates = rotates_at(self._batch.batch_id)
        return [self._owners.held[p].advance(*move, rotates=rotates) for p, move in moves.items()]

    def _ranges(self, staged: Sequence[Staged]) -> list[Range]:
        """Return what the batch covers, from the checkpoint where it can be had."""
        if self._log is not None:
            refuse_kept_rows(self._log.keeps_rows())
            with contextlib.suppress(NotKafka):
                return self._log.ranges(self._batch.batch_id)
        spans = (span for s in staged for chunk in s.chunks for span in chunk.spans)
        return looked_through(_merged(spans, self._ended), self._ended)

    def _sorted(self, staged: Sequence[Staged]) -> Iterator[pa.Table]:
        """Read rows; in the order of their offsets where it matters who comes last."""
        places, is_sorted = in_order(staged)
        tables = (placed(self._options, self._fetch(place)) for place in places)
        if self._options.mode == "append" or is_sorted:
            yield from tables
        else:
            yield pa.concat_tables(tables).sort_by([(place, "ascending") for place in PLACES])

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
                "spark_ended_before", query_id=self._name(), batch_id=self._batch.batch_id
            ):
                self._ended[Partition(topic, number)] = ended
        return next_batch, published

    def _write_counted(self, staged: Sequence[Staged]) -> None:
        if self._options.mode == "replace":
            table = self._writer.table(self._connection).identifier
            self._connection.execute(query("spark_empty", "", table=table), prepare=False)
        for s in staged:
            for number, chunk in enumerate(s.chunks):
                self._store(self._fetch(ChunkRef(s.attempt, number, chunk)))

    def _fetch(self, place: ChunkRef) -> pa.Table:
        return fetch(self._connection, self._options.schema, place)

    def _store(self, rows: pa.Table) -> None:
        if rows.num_rows:
            with naming(rows):
                write_arrow(self._writer, self._connection, rows.select(self._columns))
            self._rows += rows.num_rows

    def _run(self, name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        values: Mapping[str, Any] = {
            "group_id": self._options.group_id,
            "run_id": self._batch.run_id,
            **parameters,
        }
        cursor = cursor_on(self._connection)
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
