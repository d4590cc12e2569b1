"""The data source's two phases: tasks stage rows in the database, and the driver publishes what Spark has counted.

A task cannot know whether its attempt will count, so it writes nothing into the table: it stages its rows as Arrow has
them, and returns their tag. Spark makes a new writer for every batch and for its commit, so the database remembers in
a row of each run what it owns and how far it has written, and a second call finds everything done. A run that is known
and has lost the query's row was fenced, and never comes back.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID, uuid4

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql.datasource import WriterCommitMessage

from exactly_once._log import about
from exactly_once._model import Advance, Partition
from exactly_once.errors import Fenced
from exactly_once.ledger.migrate import check
from exactly_once.ledger.rows import LOCK_SECONDS
from exactly_once.ledger.session import cursor_on, execute
from exactly_once.ledger.sql import query

from .attempt import Attempt, Part, Work, log_set_aside
from .define import define, log
from .errors import RowsOutOfOrder, StageLost
from .frame import columns_of
from .offset_log import NotKafka, OffsetLog, on_disk
from .options import Options
from .owners import Owners, ask, claim, grant_of, tell_odd
from .ranges import NO_PLACE, PLACES, ObservedRange, Range, looked_through, one_batch, refuse_older, remaining, spans
from .stream_query import refuse_kept_rows

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)

# About how much is staged at a time, and held in memory where it is published.
CHUNK_BYTES = 8 << 20
# What stands for the id of a query where there is none.
BATCH_JOB = "batch job"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatch:
    """Which run of which query writes which batch. A batch job is a run of one batch."""

    run_id: UUID
    query_id: str
    batch_id: int


class Chunk(NamedTuple):
    """What the driver must know of staged rows without reading them."""

    attempt: UUID
    number: int
    row_count: int
    spans: tuple[ObservedRange, ...]


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What an attempt returns to Spark, for the commit."""

    batch: RunBatch
    chunks: tuple[Chunk, ...]


def stage(options: Options, batch: RunBatch, batches: Iterable[pa.RecordBatch]) -> Staged:
    """Stage the rows of one attempt; no transaction holds them together."""
    attempt, chunks = uuid4(), list[Chunk]()
    has_places = options.ledger == "offsets"
    # Connects when the first rows come: most tasks behind a shuffle have none.
    with closing(options.session()) as session:
        for given in batches:
            rows = pa.Table.from_batches([given])
            if has_places:
                rows = placed(options, rows)
                if options.minds_order:
                    rows = rows.sort_by([(place, "ascending") for place in PLACES])
            size = max(1, given.num_rows * CHUNK_BYTES // max(given.nbytes, CHUNK_BYTES))
            for start in range(0, rows.num_rows, size):
                some = rows.slice(start, size)
                sent, out = some.select(given.schema.names), pa.BufferOutputStream()
                with pa.ipc.new_stream(out, sent.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
                    writer.write_table(sent)
                tag = {"attempt": attempt, "number": len(chunks), "run_id": batch.run_id, "batch_id": batch.batch_id}
                ask(session.connection, options.group, "spark_put", **tag, chunk=bytes(out.getvalue()))
                chunks.append(Chunk(attempt, len(chunks), some.num_rows, tuple(spans(some)) if has_places else ()))
    return Staged(batch, tuple(chunks))


def placed(options: Options, rows: pa.Table) -> pa.Table:
    """Add the columns that say where rows come from, under the names that the filter of offsets knows."""
    for name, place, kind in zip(options.place_columns, PLACES, (pa.string(), pa.int32(), pa.int64()), strict=True):
        rows = rows.append_column(place, rows.column(name).cast(kind))
    return rows


def reap(options: Options) -> None:
    """Delete what was staged so long ago that nobody will publish it, of any group; best effort."""
    with (
        closing(options.session()) as session,
        suppress(psycopg.Error),  # somebody else will
        session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _),
    ):
        execute(connection, options.schema, "spark_reap", seconds=options.reap_after_seconds)


def register(options: Options, batch: RunBatch) -> None:
    """Make this run the one that writes, if it was never seen before; whether it still is, its commit finds out.

    :raises QueryChanged: when the group counts the batches of another query.
    :raises LedgerBehindCheckpoint: when the query has published a batch that is not the one before this.
    :raises SchemaTooOld: when the database lacks what this needs.
    """
    for trial in options.patiently:
        with (
            trial,
            # A run is one owner in all its processes.
            closing(options.session(batch.run_id)) as session,
            closing(options.watcher(session, batch.run_id)) as watcher,
        ):
            ledger, row = options.ledger_in(session, batch.query_id), Partition.of_query(batch.query_id)
            owners = Owners(ledger, starter=None, counts=options.ledger == "batch-id")
            try:
                with session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, pid):
                    tell = partial(ask, connection, options.group, run_id=batch.run_id)
                    if tell("spark_register").rowcount:
                        # With offsets a query may have written elsewhere before, and an old run of it may have counted
                        # last: the driver, which reads the checkpoint, finds out what is missing.
                        first = 0 if options.ledger == "batch-id" else batch.batch_id
                        found = owners.take_query(connection, pid, batch.query_id, watcher, first=first)
                        if options.ledger == "batch-id":
                            remaining(one_batch(row, batch.batch_id), {row: found}, options.group)
                        tell("spark_hold", held=to_json(owners.held, {}))
                        tell("spark_forget")
            except psycopg.errors.UndefinedTable:
                check(session.connection, options.schema)
                raise


def publish(options: Options, schema: StructType, staged: Sequence[Staged], *, releases: bool = False) -> None:
    """Write what the attempts have staged that Spark has counted; nothing of a batch that was written before.

    With ``releases`` the rows of the ledger are given back afterwards.

    :raises Fenced: when another run writes for this group by now.
    :raises FrameError: when the frame does not fit the table.
    :raises StageLost: when staged rows are gone.
    """
    batch, chunks = staged[0].batch, [chunk for each in staged for chunk in each.chunks]
    work = Work(options=options, batch_id=batch.batch_id, instance=batch.run_id)
    for trial in options.patiently:
        with (
            trial,
            ExitStack() as stack,
            Attempt(work, writers=[options.writer()], kin=batch.run_id) as attempt,
        ):
            ledger = options.ledger_in(attempt.session, batch.query_id)
            attempt.begin()
            inside = ledger.inside(attempt.unit.connection)
            starter = options.starter(inside)
            if starter is not None:
                stack.callback(starter.close)
            owners = Owners(inside, starter=starter)
            attempt.commit(StagedCommit(attempt, batch, owners).write(schema, chunks))
            log_set_aside(options.group_id, attempt.result.set_aside)
            if attempt.result.dropped:
                logger.log(
                    logging.INFO if attempt.result.rows else logging.WARNING,  # of a batch that is dropped whole
                    "%s of %r: %s rows, %s dropped, whose offsets are below the ledger, as are all below the highest "
                    "that was ever written",
                    BATCH_JOB if batch.query_id == BATCH_JOB else f"batch {batch.batch_id}",
                    options.group_id,
                    attempt.result.rows,
                    attempt.result.dropped,
                    extra=about("dropped", group=options.group_id),
                )
            if releases:
                owners.release(ledger)


class StagedCommit:
    """The transaction of one batch, from what its run remembers to the moves of the ledger."""

    def __init__(self, attempt: Attempt, batch: RunBatch, owners: Owners) -> None:
        self._attempt = attempt
        self._options = attempt.work.options
        self._batch = batch
        self._owners = owners
        self._query = Partition.of_query(batch.query_id)
        # What this query is called in the database; a batch job by its own name, as it has no checkpoint.
        job_id = self._options.job_id
        self._name = batch.query_id if job_id is None else f"job {job_id}"
        self._ask = partial(ask, attempt.unit.connection, self._options.group, run_id=batch.run_id)
        # How far the run has written each row of the ledger; :meth:`_recall` reads it, :meth:`write` moves it.
        self._ended: dict[Partition, int] = {}
        self._log: OffsetLog | None = None

    def write(self, schema: StructType, chunks: Sequence[Chunk]) -> dict[Partition, tuple[int, int]]:
        """Do everything but the COMMIT; return the moves that it must make."""
        options, batch, attempt, owners = self._options, self._batch, self._attempt, self._owners
        is_job = batch.query_id == BATCH_JOB
        found, published = self._recall()
        batch_id = found if is_job else batch.batch_id
        if published is not None and (is_job or batch_id < published):
            return {}  # done by a call whose answer was lost
        if not is_job:
            self._log = on_disk(options.checkpoint_location, batch.query_id, warns=published is None)
        ranges, are_whole = self._ranges(chunks) if options.ledger == "offsets" else ([], False)
        todo: list[Range] = []
        if not are_whole:  # else they tell what is missing, also where an old run of the query has counted last
            todo = remaining(one_batch(self._query, batch_id), {self._query: found}, options.group)
        is_written = not todo
        part, is_known = self._fit(schema, is_first=published is None, is_job=is_job)
        if is_known and options.job_id is not None and options.mode != "replace":
            self._ask("spark_unstage", batch_id=batch.batch_id)
            logger.warning(
                "job %r of %s had been written before, so nothing of it is written; another jobId, or none, writes it",
                options.job_id,
                options.group,
                extra=about("job_skipped", group=options.group_id),
            )
            return {}
        fingerprint = None if self._log is None else self._log.fingerprint(batch_id)
        if is_job and options.mode != "replace":
            fingerprint = options.ledger  # what the group's next job is compared with
        next_offsets: dict[Partition, int] = {}
        if options.ledger == "offsets":
            owners.check_returned(ranges, self._ended)
            next_offsets = owners.take(ranges, batch_id=batch.batch_id)
            todo = remaining(ranges, next_offsets, options.group)
        elif is_written:
            told = self._ask("spark_fingerprint", query_id=self._name, batch_id=found - 1)
            refuse_older(found, batch_id, told, fingerprint, options.group)
        attempt.work = replace(
            attempt.work,
            grants=tuple(owners.held.values()),
            ranges={r.partition: r for r in ranges},
            parts=(part,),
        )
        if todo:
            attempt.fill(self._rows(chunks), next_offsets)
        # Where offsets tell what was written, an older copy of the checkpoint takes the batch ids back.
        self._ended |= {r.partition: r.end for r in ranges} | {self._query: batch_id + 1}
        self._ask("spark_hold", held=to_json(owners.held, self._ended))
        self._ask("spark_unstage", batch_id=batch.batch_id)
        done = {"row_count": attempt.result.rows, "dropped": attempt.result.dropped}
        report = options.report(self._name, batch.run_id, batch_id, fingerprint if is_job or not ranges else None)
        self._ask("spark_report", **report, **done)
        if ranges and not todo:  # such a batch is not read, and its report counts none; the log tells of it
            attempt.result.dropped = sum(chunk.row_count for chunk in chunks)
        moves = {r.partition: (r.first, r.end) for r in todo if r.partition != self._query}
        return {self._query: (found, batch_id + 1), **moves}

    def _fit(self, schema: StructType, *, is_first: bool, is_job: bool) -> tuple[Part, bool]:
        """Compare the frame with its table; tell as well whether this query, or job, has written before."""
        connection, options, (writer,) = self._attempt.unit.connection, self._options, self._attempt.writers
        defined = define(connection, options, schema) if options.create_table or options.evolve else []
        table = self._attempt.locked(writer)
        table.refuse_unlogged()
        stateful = [] if self._log is None else self._log.stateful()
        refuse_kept_rows(stateful, options)
        # Each time: this session may have found another table than the last one.
        claimed = claim(connection, options, [table], self._name, stateful, is_job=is_job)
        if is_first:
            tell_odd(connection, options, [table], has_written=any(claimed))
        is_known = not is_first or claimed.is_known_query
        columns = columns_of(schema, table, options, writer.key(connection))
        log(options, defined, has_written=is_known)
        return Part(
            options=options, table=str(table), columns=columns, has_places=options.ledger == "offsets"
        ), is_known

    def _ranges(self, chunks: Iterable[Chunk]) -> tuple[list[Range], bool]:
        """Return what the batch covers, and whether the checkpoint says it: it can be had, and has Kafka's offsets."""
        if self._log is not None:
            try:
                return self._log.ranges(self._batch.batch_id), True
            except NotKafka as error:
                if error.is_beside_kafka:
                    raise
        return looked_through((span for chunk in chunks for span in chunk.spans), self._ended), False

    def _rows(self, chunks: Iterable[Chunk]) -> Iterable[pa.Table]:
        """Read what was staged, in the order of offsets where that matters: in memory only where chunks overlap."""
        if any(None in (*partition, *ends) for chunk in chunks for partition, *ends in chunk.spans):
            raise RowsOutOfOrder(NO_PLACE)
        chunks = sorted(chunks, key=lambda chunk: chunk.spans)
        if self._options.ledger != "offsets":
            return map(self._fetch, chunks)
        tables = (placed(self._options, self._fetch(chunk)) for chunk in chunks)
        # Rows within a chunk are sorted; of one with rows of several partitions that says nothing.
        spans = [span for chunk in chunks for span in chunk.spans]
        overlap = any(a[0] == b[0] and a[2] >= b[1] for a, b in itertools.pairwise(spans))  # type: ignore[operator]
        if not self._options.minds_order or not (overlap or any(len(chunk.spans) != 1 for chunk in chunks)):
            return tables
        return [pa.concat_tables(tables).sort_by([(place, "ascending") for place in PLACES])]

    def _fetch(self, chunk: Chunk) -> pa.Table:
        statement = query("spark_get", self._options.schema)
        parameters = {"attempt": chunk.attempt, "number": chunk.number}
        cursor = cursor_on(self._attempt.unit.connection)
        row = cursor.execute(statement, parameters, prepare=False, binary=True).fetchone()
        rows = None if row is None else pa.ipc.open_stream(row[0]).read_all()
        if rows is None or rows.num_rows != chunk.row_count:
            raise StageLost(
                f"{chunk.row_count} rows that a task staged are gone: the server has crashed or failed over since, "
                "or the batch took longer than reapAfterSeconds. Nothing of it was written; start the query again"
            )
        return rows

    def _recall(self) -> tuple[int, int | None]:
        """Read what this run has acquired; return the query's next batch id, and the one this run has left there."""
        (held,) = self._ask("spark_held").fetchone() or ([],)
        for topic, number, token, epoch, topic_id, ended in held:
            partition = Partition(topic, number)
            self._owners.held[partition] = grant_of(partition, UUID(token), epoch, topic_id)
            if ended is not None:
                self._ended[partition] = ended
        if self._query not in self._owners.held:
            raise Fenced(
                f"the database of {self._options.group} does not know this run any more: it was set back, "
                "or a thousand runs came since. Start the query again"
            )
        next_batch = self._owners.find([self._query])[self._query]
        published = self._ended.get(self._query)
        if published is None:
            before = self._ask("spark_ended_before", query_id=self._name, batch_id=self._batch.batch_id)
            self._ended |= {Partition(topic, number): ended for topic, number, ended in before}
        return next_batch, published


def to_json(held: Mapping[Partition, Advance], ended: Mapping[Partition, int]) -> str:
    """Write down what a run has acquired, and how far it has written each row, for :meth:`StagedCommit._recall`."""
    return json.dumps([(*p, str(each.token), each.epoch, each.topic_id, ended.get(p)) for p, each in held.items()])
