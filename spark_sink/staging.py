"""Staging: rows go from a task to the driver by way of the database. Runs on executors, and is read on the driver.

A task that reads Kafka cannot know whether its attempt will count, so it writes nothing into the table: it stages
its rows, tagged with its attempt, and returns the tag. They are staged as Arrow has them and not in a table of the
target's columns: nothing has to be created, altered or dropped while queries run, and what publishes them is the same
writer that ``foreachBatch`` uses, with the same types, modes and complaints.

Staging an attempt is no transaction. What it leaves behind, if it dies, nobody will ask for.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]

from exactly_once.ledger.rows import LOCK_SECONDS
from exactly_once.ledger.session import Connection, Session, connector, cursor_on
from exactly_once.ledger.sql import query

from .errors import StageLost
from .offset_filter import PLACES, spans
from .options import Options

# About how much is staged at a time, and held in memory where it is published.
CHUNK_BYTES = 8 << 20

# Topic, partition, lowest and highest offset; None where a row lacks one.
ObservedRange = tuple[str | None, int | None, int | None, int | None]


# What stands for the id of a query where there is none.
BATCH_JOB = "batch job"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatch:
    """Which run of which query writes which batch. A batch job is a run of one batch."""

    run_id: UUID
    query_id: str
    batch_id: int


class Chunk(NamedTuple):
    """What the driver must know of rows without reading them."""

    row_count: int
    spans: tuple[ObservedRange, ...]


@dataclass(frozen=True, slots=True)
class Staged:
    """What an attempt returns."""

    batch: RunBatch
    attempt: UUID
    chunks: tuple[Chunk, ...]


class ChunkRef(NamedTuple):
    """Where a chunk lies."""

    attempt: UUID
    number: int
    chunk: Chunk


def stage(options: Options, batch: RunBatch, batches: Iterable[pa.RecordBatch]) -> Staged:
    """Stage the rows of one attempt."""
    attempt = uuid4()
    chunks = []
    with contextlib.ExitStack() as stack:
        connection: Connection | None = None
        for number, rows in enumerate(_in_chunks(options, batches)):
            if connection is None:  # most tasks behind a shuffle have nothing to stage
                connection = stack.enter_context(connector(options.conninfo)())
            out = pa.BufferOutputStream()
            with pa.ipc.new_stream(out, rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
                writer.write_table(rows)
            parameters = {
                "attempt": attempt,
                "number": number,
                "group_id": options.group_id,
                "run_id": batch.run_id,
                "batch_id": batch.batch_id,
                "chunk": bytes(out.getvalue()),
            }
            cursor_on(connection).execute(query("spark_put", options.schema), parameters, prepare=False)
            found = spans(placed(options, rows)) if options.ledger == "offsets" else ()
            chunks.append(Chunk(rows.num_rows, tuple((*partition, first, last) for partition, first, last in found)))
    return Staged(batch, attempt, tuple(chunks))


def fetch(connection: Connection, schema: str, place: ChunkRef) -> pa.Table:
    """Read staged rows.

    :raises StageLost: when they are not there, or not all of them.
    """
    parameters = {"attempt": place.attempt, "number": place.number}
    cursor: psycopg.Cursor[Any] = connection.cursor(binary=True)
    row = cursor.execute(query("spark_get", schema), parameters, prepare=False).fetchone()
    rows = None if row is None else pa.ipc.open_stream(row[0]).read_all()
    if rows is None or rows.num_rows != place.chunk.row_count:
        raise StageLost(
            f"{place.chunk.row_count} rows that a task staged are gone: the server has crashed or failed over since, "
            "or the batch took longer than reapAfterSeconds. Nothing of it was written; start the query again"
        )
    return rows


def in_order(staged: Sequence[Staged]) -> tuple[list[ChunkRef], bool]:
    """Sort chunks by where their rows come from; tell whether that puts all rows in order.

    Rows within a chunk are sorted. Where chunks overlap, or have rows of several partitions, it does not.
    """
    places = [ChunkRef(s.attempt, number, chunk) for s in staged for number, chunk in enumerate(s.chunks)]
    if any(len(place.chunk.spans) != 1 for place in places):
        return places, False
    places.sort(key=lambda place: place.chunk.spans[0])
    ends = [place.chunk.spans[0] for place in places]
    overlap = any(
        before[:2] == after[:2] and before[3] >= after[2]  # type: ignore[operator]
        for before, after in itertools.pairwise(ends)
    )
    return places, not overlap


def placed(options: Options, rows: pa.Table) -> pa.Table:
    """Add the columns that say where rows come from, under the names that the filter of offsets knows."""
    for name, place, kind in zip(options.place_columns, PLACES, (pa.string(), pa.int32(), pa.int64()), strict=True):
        rows = rows.append_column(place, rows.column(name).cast(kind))
    return rows


def reap(options: Options) -> None:
    """Delete what was staged so long ago that nobody will publish it, of any group; best effort."""
    session = Session(connector(options.conninfo), schema=options.schema)
    try:
        with session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _):
            parameters = {"seconds": options.reap_after_seconds}
            cursor_on(connection).execute(query("spark_reap", options.schema), parameters, prepare=False)
    except psycopg.Error:
        return  # somebody else will
    finally:
        session.close()


def _in_chunks(options: Options, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    for batch in batches:
        rows = pa.Table.from_batches([batch])
        if options.ledger == "offsets" and options.mode != "append":
            sortable = placed(options, rows).sort_by([(place, "ascending") for place in PLACES])
            rows = sortable.drop_columns(list(PLACES))
        size = max(1, rows.num_rows * CHUNK_BYTES // max(rows.nbytes, CHUNK_BYTES))
        yield from (rows.slice(start, size) for start in range(0, rows.num_rows, size))
