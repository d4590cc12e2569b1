"""The data source: ``format("exactly_once_postgres")``, for streams, batch jobs and declarative pipelines.

    session.dataSource.register(ExactlyOncePostgres)
    frame.writeStream.format("exactly_once_postgres").option("conninfo", ...).option("table", "orders")...

A writer is made on the driver for every batch and sent to its tasks, which call ``write``; ``commit`` is called on the
driver, for a stream on another writer that Spark makes for it, in a process without a session. ``abort`` does nothing:
it may be called while tasks still write, and after a ``commit`` of which nobody knows what became. See
:mod:`.staging` and :mod:`.publication` for what happens in each.

Both writers take Arrow batches. Spark 4.1 has a stream writer for that; Spark 4.0 has only one for batch jobs, and
asks a stream's writer whether it is one of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage

from exactly_once.errors import ConfigurationError

from .frame import check_arrow, check_places
from .options import Options, check_source_options
from .publication import publish, register
from .staging import BATCH_JOB, RunBatch, Staged, reap, stage

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    StreamBase = DataSourceStreamWriter
else:
    StreamBase = getattr(datasource, "DataSourceStreamArrowWriter", None) or type(
        "StreamArrowWriter", (DataSourceStreamWriter, DataSourceArrowWriter), {}
    )

# Batches after which abandoned rows of other groups are looked for.
_REAP_EVERY = 100


@dataclass(frozen=True)
class Message(WriterCommitMessage):
    """What a task returns to Spark, for the commit."""

    staged: Staged


class ExactlyOncePostgres(DataSource):
    """Write a frame into a Postgres table, each row of Kafka once; its options are those of :class:`PostgresSink`."""

    @classmethod
    def name(cls) -> str:
        """Return what goes into ``format()``."""
        return "exactly_once_postgres"

    def writer(self, schema: StructType, overwrite: bool) -> JobWriter:  # noqa: FBT001
        """Make the writer of a batch job: each is a run of its own."""
        return JobWriter(*_checked(self.options, schema, overwrite=overwrite), uuid4())

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802, FBT001
        """Make the writer of a stream."""
        options, schema = _checked(self.options, schema, overwrite=overwrite)
        if options.job_id is not None:
            raise ConfigurationError("jobId is for batch jobs; a stream is known by its checkpoint")
        return StreamWriter(options, schema)


class JobWriter(DataSourceArrowWriter):
    """Writes the frame of a batch job."""

    def __init__(self, options: Options, schema: StructType, run_id: UUID) -> None:
        self._options = options
        self._schema = schema
        self._run_id = run_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        return _write(self._options, RunBatch(run_id=self._run_id, query_id=BATCH_JOB, batch_id=0), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish the attempts that count, and give the rows of the ledger back."""
        _commit(self._options, self._schema, messages, releases=True)


class StreamWriter(StreamBase):
    """Writes the micro-batches of a stream."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        local = _context().getLocalProperty
        batch = RunBatch(
            run_id=UUID(local("spark.jobGroup.id")),
            query_id=str(local("sql.streaming.queryId")),
            batch_id=int(local("streaming.sql.batchId") or 0),
        )
        return _write(self._options, batch, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Publish the attempts that count.

        :raises ConfigurationError: where no task has answered, which is what a continuous trigger does.
        """
        if not any(isinstance(message, Message) for message in messages):
            raise ConfigurationError(
                "no task has handed rows to the data source, nor said that there are none: so it is with "
                "trigger(continuous=...), under which nothing is ever written. Use another trigger"
            )
        _commit(self._options, self._schema, messages)


def _checked(given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> tuple[Options, StructType]:
    options = check_source_options(given)
    if overwrite != (options.mode == "replace"):
        raise ConfigurationError(
            f"mode={options.mode!r} does not go with this output mode: output mode complete, and mode('overwrite') of "
            "a batch job, replace the whole table, which is option mode=replace; everything else is append"
        )
    check_places(schema, options)
    check_arrow(schema)
    return options, schema


def _write(options: Options, batch: RunBatch, batches: Iterator[pa.RecordBatch]) -> Message:
    """Register the run and stage rows; the first task registers also where no task has rows."""
    batches = (batch for batch in batches if batch.num_rows)
    first = next(batches, None)
    if first is not None or _context().partitionId() == 0:
        register(options, batch)
    return Message(stage(options, batch, itertools.chain([] if first is None else [first], batches)))


def _commit(
    options: Options, schema: StructType, messages: Sequence[WriterCommitMessage | None], *, releases: bool = False
) -> None:
    staged = [message.staged for message in messages if isinstance(message, Message)]
    publish(options, schema, staged, releases=releases)
    if releases or staged[0].batch.batch_id % _REAP_EVERY == 0:
        reap(options)


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "called by Spark, in a task"
    return context
