"""Several frames of one batch in one transaction: the rows, and what is added up of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pyspark.sql import functions as F  # noqa: N812

from exactly_once.errors import ConfigurationError
from exactly_once.writer.table import read_table
from spark_sink.options import check_options
from spark_sink.owners import tell_odd
from tests.spark.scene import Scene

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_sink import PostgresSink, SinkUnit

TOTALS = {"mode": "upsert", "key": ["partition"], "add": ["n", "bytes"]}


@pytest.fixture
def tables(name: str, db: psycopg.Connection[Any]) -> Iterator[str]:
    """Two tables: of rows, and of how many there are of each partition."""
    db.execute(f'CREATE TABLE {name} (partition int, "offset" bigint, body jsonb)')
    db.execute(f"CREATE TABLE {name}_totals (partition int PRIMARY KEY, n bigint, bytes numeric)")
    yield name
    db.execute(f"DROP TABLE {name}, {name}_totals")


def both(sink: PostgresSink, tables: str) -> Any:
    """Write the rows of a batch, with a struct among their columns, and add up how many they are."""

    def write(frame: DataFrame, batch_id: int) -> None:
        rows = frame.select("topic", "partition", "offset", F.struct(F.col("value").alias("text")).alias("body"))
        counted = frame.groupBy("partition").agg(F.count("*").alias("n"), F.lit(1).cast("decimal").alias("bytes"))
        sink.write({tables: rows, f"{tables}_totals": counted}, batch_id)

    return write


def stored(db: psycopg.Connection[Any], tables: str) -> tuple[Any, Any, Any]:
    """Return how many rows there are, how many of them different ones, and what was added up."""
    rows = db.execute(f'SELECT count(*), count(DISTINCT (partition, "offset")) FROM {tables}').fetchone()
    assert rows is not None
    return *rows, db.execute(f"SELECT partition, n FROM {tables}_totals ORDER BY 1").fetchall()


def test_rows_and_their_sums_are_written_together_or_not_at_all(
    scene: Scene, tables: str, db: psycopg.Connection[Any]
) -> None:
    """By a task and by the driver, with an attempt that fails behind both and a batch that comes again."""

    def fail_once(unit: SinkUnit) -> None:
        from pyspark import TaskContext  # noqa: PLC0415

        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0:
            raise RuntimeError("fails behind its rows")

    def sink(small_batch: int) -> PostgresSink:
        given = {tables: {}, f"{tables}_totals": TOTALS}
        return scene.sink(table=None, tables=given, small_batch=small_batch, in_transaction=fail_once)

    scene.produce(40)
    scene.run(both(sink(0), tables), per_trigger=20)
    assert stored(db, tables) == (40, 40, [(0, 20), (1, 20)])
    assert scene.reports[0].rows == 22
    scene.forget_last_commit()
    scene.produce(20)
    scene.run(both(sink(1000), tables))
    assert stored(db, tables) == (60, 60, [(0, 30), (1, 30)])
    assert db.execute(f"SELECT jsonb_typeof(body -> 'text') FROM {tables} LIMIT 1").fetchone() == ("string",)
    # Other batches than before: the ledger has a part of the first one, and a sum has no offsets to take it out by.
    scene.lose_checkpoint()
    scene.produce(20)
    with pytest.raises(Exception, match="has a part of this batch"):
        scene.run(both(sink(0), tables))
    assert stored(db, tables) == (60, 60, [(0, 30), (1, 30)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"table": "t", "tables": {"a": {}}}, "tables= has for each table"),
        ({"tables": {"a": {"small_batch": 1}}}, "takes mode, key, add, claim, create_table, evolve, not small_batch"),
        ({"tables": {"a": {"mode": "merge"}}}, "mode='merge' is not possible"),
        ({"tables": {"a": {"add": ["n"]}}}, "add= is about rows that exist"),
        ({"tables": {"a": {}, "b": {}}, "transaction": "partition"}, "tables= need transaction='batch'"),
        ({"table": "t", "mode": "upsert", "add": "n"}, r"add=\['n'\]"),
        ({}, "table= is needed"),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_options(conninfo="", group_id="g", **options)


def test_of_a_table_that_each_batch_replaces_it_is_not_told_that_it_is_empty(
    conninfo: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    tables: dict[str, dict[str, Any]] = {f"{name}_a": {"mode": "replace"}, f"{name}_b": {}}
    options = check_options(conninfo=conninfo, group_id=name, ledger="batch-id", tables=tables)
    with psycopg.connect(conninfo) as connection:
        for table in tables:
            connection.execute(f"CREATE TABLE {table} (n int)")
        tell_odd(connection, options, [read_table(connection, table) for table in tables], has_written=True)
        connection.rollback()
    (told,) = [r.getMessage() for r in caplog.records if getattr(r, "action", None) == "applied_before"]
    assert told.startswith(f'"public"."{name}_b" is empty')
