"""The data source: ``format("exactly_once_postgres")``, for streams, batch jobs and declarative pipelines.

A writer is made on the driver for every batch and sent to its tasks, which call ``write``; ``commit`` is called on the
driver, for a stream on another writer that Spark makes for it, in a process without a session. ``abort`` does nothing:
it may be called while tasks still write, and after a ``commit`` of which nobody knows what became.

Both writers take Arrow batches. Spark 4.1 has a stream writer for that; Spark 4.0 has only one for batch jobs, and
asks a stream's writer whether it is one of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage

from exactly_once.errors import ConfigurationError

from .frame import check_arrow, check_places
from .options import Options, check_source_options
from .publication import BATCH_JOB, RunBatch, Staged, publish, reap, register, stage

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    StreamBase = DataSourceStreamWriter
else:
    StreamBase = getattr(datasource, "DataSourceStreamArrowWriter", None) or type(
        "StreamArrowWriter", (DataSourceStreamWriter, DataSourceArrowWriter), {}
    )

# Batches after which abandoned rows of other groups are looked for.
_REAP_EVERY = 100


class ExactlyOncePostgres(DataSource):
    """Write a frame into a Postgres table, each row of Kafka once; its options are those of :class:`PostgresSink`."""

    @classmethod
    def name(cls) -> str:
        """Return what goes into ``format()``."""
        return "exactly_once_postgres"

    def writer(self, schema: StructType, overwrite: bool) -> JobWriter:  # noqa: FBT001
        """Make the writer of a batch job."""
        return JobWriter(_checked(self.options, schema, overwrite=overwrite), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802, FBT001
        """Make the writer of a stream."""
        options = _checked(self.options, schema, overwrite=overwrite)
        if options.job_id is not None:
            raise ConfigurationError("jobId is for batch jobs; a stream is known by its checkpoint")
        return StreamWriter(options, schema)


class _Writer:
    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def _stage(self, batch: RunBatch, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Register the run and stage rows; the first task registers also where no task has rows."""
        batches = (batch for batch in batches if batch.num_rows)
        first = list(itertools.islice(batches, 1))
        if first or _context().partitionId() == 0:
            register(self._options, batch)
        return stage(self._options, batch, itertools.chain(first, batches))

    def _publish(self, messages: Sequence[WriterCommitMessage | None], *, releases: bool = False) -> None:
        staged = [message for message in messages if isinstance(message, Staged)]
        publish(self._options, self._schema, staged, releases=releases)
        if releases or staged[0].batch.batch_id % _REAP_EVERY == 0:
            reap(self._options)


class JobWriter(_Writer, DataSourceArrowWriter):
    """Writes the frame of a batch job: a run of its own."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self._batch = RunBatch(run_id=uuid4(), query_id=BATCH_JOB, batch_id=0)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        return self._stage(self._batch, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish the attempts that count, and give the rows of the ledger back."""
        self._publish(messages, releases=True)


class StreamWriter(_Writer, StreamBase):
    """Writes the micro-batches of a stream."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        local = _context().getLocalProperty
        batch = RunBatch(
            run_id=UUID(local("spark.jobGroup.id")),
            query_id=str(local("sql.streaming.queryId")),
            batch_id=int(local("streaming.sql.batchId") or 0),
        )
        return self._stage(batch, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Publish the attempts that count.

        :raises ConfigurationError: where no task has answered, which is what a continuous trigger does.
        """
        if not any(isinstance(message, Staged) for message in messages):
            raise ConfigurationError(
                "no task has handed rows to the data source, nor said that there are none: so it is with "
                "trigger(continuous=...), under which nothing is ever written. Use another trigger"
            )
        self._publish(messages)


def _checked(given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> Options:
    options = check_source_options(given)
    if overwrite != (options.mode == "replace"):
        raise ConfigurationError(
            f"mode={options.mode!r} does not go with this output mode: output mode complete, and mode('overwrite') of "
            "a batch job, replace the whole table, which is option mode=replace; everything else is append"
        )
    check_places(schema, options)
    check_arrow(schema)
    return options


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "called by Spark, in a task"
    return context
