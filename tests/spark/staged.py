"""Runs of the data source without Spark: staged and published as tasks and driver do it, on a real Postgres."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID, uuid4

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]
from psycopg import sql
from pyspark.sql.types import IntegerType, LongType, StringType, StructType

from spark_sink.options import Options, check_source_options
from spark_sink.publication import RunBatch, Staged, publish, register, stage

SCHEMA = (
    StructType()
    .add("topic", StringType())
    .add("partition", IntegerType())
    .add("offset", LongType())
    .add("value", StringType())
)


def rows(topic: str, partition: int, offsets: Sequence[int]) -> pa.RecordBatch:
    """Rows of one partition."""
    columns = {
        "topic": pa.array([topic] * len(offsets), pa.string()),
        "partition": pa.array([partition] * len(offsets), pa.int32()),
        "offset": pa.array(offsets, pa.int64()),
        "value": pa.array([f"v{offset}" for offset in offsets], pa.string()),
    }
    return pa.RecordBatch.from_pydict(columns)


class Target:
    """A table and the group that writes it, both of one name."""

    def __init__(self, conninfo: str, name: str) -> None:
        self.conninfo = conninfo
        self.name = name
        with psycopg.connect(conninfo) as connection:
            create = 'CREATE TABLE {} (topic text, partition int, "offset" bigint, value text)'
            connection.execute(sql.SQL(create).format(sql.Identifier(name)))

    def options(self, **options: str) -> Options:
        """Options as Spark would pass them on."""
        given = {"conninfo": self.conninfo, "table": self.name, "groupId": self.name, **options}
        return check_source_options(given)

    def written(self) -> list[tuple[int, int, str]]:
        """What is in the table."""
        with psycopg.connect(self.conninfo) as connection:
            look = sql.SQL('SELECT partition, "offset", value FROM {} ORDER BY 1, 2, 3').format(
                sql.Identifier(self.name)
            )
            return connection.execute(look).fetchall()

    def offsets(self) -> list[tuple[int, int]]:
        """Which messages are in the table."""
        return [(partition, offset) for partition, offset, _ in self.written()]

    def staged(self) -> int:
        """How many chunks lie in the stage."""
        with psycopg.connect(self.conninfo) as connection:
            look = "SELECT count(*) FROM exactly_once.spark_stage WHERE group_id = %s"
            row = connection.execute(look, (self.name,)).fetchone()
            assert row is not None
            return int(row[0])

    def ledger(self) -> list[int | None]:
        """Where the ledger stands, by partition."""
        with psycopg.connect(self.conninfo) as connection:
            look = """
                SELECT next_offset FROM exactly_once.ledger
                WHERE group_id = %s AND topic NOT LIKE 'query:%%' ORDER BY topic, partition
            """
            return [next_offset for (next_offset,) in connection.execute(look, (self.name,))]


class Run:
    """One run of a query."""

    def __init__(self, target: Target, *, query_id: str = "query", **options: str) -> None:
        self.target = target
        self.options = target.options(**options)
        self.run_id: UUID = uuid4()
        self.query_id = query_id

    def origin(self, batch_id: int = 0) -> RunBatch:
        """Which batch of this run."""
        return RunBatch(run_id=self.run_id, query_id=self.query_id, batch_id=batch_id)

    def register(self, batch_id: int = 0) -> None:
        """Do what the first task does first."""
        register(self.options, self.origin(batch_id))

    def stage(self, *batches: pa.RecordBatch, batch_id: int = 0) -> Staged:
        """Do what one task does."""
        self.register(batch_id)
        return stage(self.options, self.origin(batch_id), batches)

    def publish(self, *staged: Staged, schema: StructType = SCHEMA) -> None:
        """Do what the driver does when all tasks have succeeded."""
        publish(self.options, schema, staged)

    def write(self, *batches: pa.RecordBatch, batch_id: int = 0) -> None:
        """Do both, with a task for each batch of rows."""
        self.publish(*(self.stage(batch, batch_id=batch_id) for batch in batches))

    def rows(self, partition: int, offsets: Sequence[int]) -> pa.RecordBatch:
        """Rows of the topic that is called like the table."""
        return rows(self.target.name, partition, offsets)
