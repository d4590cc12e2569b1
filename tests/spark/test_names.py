"""Columns of every name that Postgres and Spark can have, on every path: exact, or refused with the name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark_sink import PostgresSink
from tests.spark.scene import Scene, each_mode
from tests.spark.source import write_stream
from tests.support.spark import drain, read_topic

Db = psycopg.Connection[Any]
NAMES = (
    *(
        "a.b",
        ".a",
        "[0]",
        "it's",
        "with space",
        " edges ",
        "größe",
        "列",
        "Upper",
        "a`b",
        "``",
        "{x}",
        "{}",
        "50%",
        "%s",
    ),
    *("a,b", "a;b", "--", "$1", ":a", "select", "order", "a\tb", "a\nb", "=", "*", "?", "1", "e\u0301"),
)
"""Those that the sink makes columns of."""
QUOTED = ('a"b', '"', "a\\b")
"""Those that only somebody else has made columns of."""


@pytest.fixture
def table(name: str, db: Db) -> Iterator[str]:
    yield name
    db.execute(f"DROP TABLE IF EXISTS {name}")


def spark_name(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def stream(scene: Scene, names: Sequence[str], *more: str) -> DataFrame:
    """Each column has its number, and the message's, so that one that came into another is seen."""
    topic = read_topic(scene.spark, scene.bootstrap_servers, scene.topic)
    values = [f"concat('{n} ', partition, ' ', offset) AS {spark_name(name)}" for n, name in enumerate(names)]
    return topic.selectExpr("topic", "partition", "offset", *values, *more)


def write(scene: Scene, frame: DataFrame, sink: PostgresSink) -> None:
    """Run a query; where the ledger counts batches, without the columns that say where rows come from."""
    if sink._options.ledger == "batch-id":
        frame = frame.drop("topic", "partition", "offset")
    drain(frame, sink, scene.checkpoint)


def make(db: Db, table: str, names: Sequence[str]) -> None:
    columns = sql.SQL(", ").join(sql.SQL("{} text").format(sql.Identifier(name)) for name in names)
    db.execute(sql.SQL("CREATE TABLE {} ({})").format(sql.Identifier(table), columns))


def check(db: Db, table: str, names: Sequence[str], messages: int) -> None:
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    found = db.execute(sql.SQL("SELECT {} FROM {}").format(columns, sql.Identifier(table))).fetchall()
    assert len(found) == messages
    for row in found:
        message = row[0].removeprefix("0 ")
        assert list(row) == [f"{n} {message}" for n in range(len(names))]


@each_mode
def test_columns_that_are_there(scene: Scene, table: str, db: Db, options: dict[str, Any]) -> None:
    scene.produce(4)
    names = (*NAMES, *QUOTED)
    make(db, table, names)
    write(scene, stream(scene, names), scene.sink(table=table, **options))
    check(db, table, names, 4)


def test_columns_by_the_data_source(scene: Scene, table: str, db: Db) -> None:
    scene.produce(4)
    names = (*NAMES, *QUOTED)
    make(db, table, names)
    write_stream(scene, stream(scene, names), table=table)
    check(db, table, names, 4)


@each_mode
def test_columns_that_are_made_and_keys(scene: Scene, table: str, db: Db, options: dict[str, Any]) -> None:
    """Of the first frame, and of a second that has more; in an upsert by several of them."""
    scene.produce(4)
    key = [".a", "Upper", "50%", "a`b"]
    sink = scene.sink(table=table, mode="upsert", key=key, create_table=True, evolve="add-columns", **options)
    half = [*key, *(name for name in NAMES[:15] if name not in key)]
    more = [*half, *(name for name in NAMES if name not in half)]
    write(scene, stream(scene, half), sink)
    check(db, table, half, 4)
    scene.produce(4)
    write(scene, stream(scene, more), sink)
    db.execute(f"DELETE FROM {table} WHERE \"Upper\" LIKE '1 % 0' OR \"Upper\" LIKE '1 % 1'")
    check(db, table, more, 4)


@pytest.mark.parametrize("odd", QUOTED)
def test_a_name_that_the_sink_makes_no_column_of_is_told(scene: Scene, table: str, odd: str) -> None:
    scene.produce(2)
    sink = scene.sink(table=table, create_table=True)
    with pytest.raises(Exception, match="FrameError: no column can have the name"):
        drain(stream(scene, [odd]), sink, scene.checkpoint)


@pytest.mark.parametrize("claim", [".a", "a.b", "a`b", "列", "50%"])
def test_the_key_to_claim(scene: Scene, table: str, db: Db, claim: str) -> None:
    """Several rows come of a message, whose keys differ in this column, and not in one of nearly its name."""
    scene.produce(4)
    make(db, table, ["v"])
    topic = read_topic(scene.spark, scene.bootstrap_servers, scene.topic)
    rows = topic.select("*", F.explode(F.array(F.lit("x"), F.lit("y"))).alias("v"))
    key = f"concat(partition, offset, v) AS {spark_name(claim)}"
    frame = rows.selectExpr("topic", "partition", "offset", "v", "'same' AS a", key).drop(
        *[] if claim == ".a" else ["a"]
    )
    db.execute(f"ALTER TABLE {table} ADD COLUMN a text")
    sink = scene.sink(table=table, claim=claim)
    drain(frame, sink, scene.checkpoint)
    assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (8,)
    scene.lose_checkpoint()
    drain(frame, scene.sink(table=table, claim=claim, small_batch=1000), scene.checkpoint)
    assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (8,)


@each_mode
def test_nested_fields(scene: Scene, table: str, db: Db, options: dict[str, Any]) -> None:
    """In JSON they keep their names; what JSON has not is found under any of them."""
    scene.produce(2)
    db.execute(f"CREATE TABLE {table} (doc jsonb, list jsonb, by_name jsonb)")
    names = (*NAMES, *QUOTED)
    fields = ", ".join(f"{n}D AS {spark_name(name)}" for n, name in enumerate(names))
    keys = ", ".join(f"named_struct('k', {n}D)" for n in range(len(names)))
    columns = f"struct({fields}) AS doc", f"array(struct({fields})) AS list", f"map('%s', array({keys})) AS by_name"
    write(scene, stream(scene, [], *columns), scene.sink(table=table, **options))
    wanted = {name: float(n) for n, name in enumerate(names)}
    for doc, several, _ in db.execute(f"SELECT * FROM {table}").fetchall():
        assert doc == wanted
        assert several == [wanted]
    scene.produce(2)
    nan = f"array(struct({fields}, double('NaN') AS `last{{}}`)) AS list"
    with pytest.raises(Exception, match="column list: invalid input syntax for type json"):
        write(scene, stream(scene, [], nan), scene.sink(table=table, **options))


@each_mode
def test_columns_for_json_of_any_name(scene: Scene, table: str, db: Db, options: dict[str, Any]) -> None:
    scene.produce(2)
    names = (*NAMES, *QUOTED)
    columns = sql.SQL(", ").join(sql.SQL("{} jsonb").format(sql.Identifier(name)) for name in names)
    db.execute(sql.SQL("CREATE TABLE {} ({})").format(sql.Identifier(table), columns))
    more = [f"array({n}D) AS {spark_name(name)}" for n, name in enumerate(names)]
    write(scene, stream(scene, [], *more), scene.sink(table=table, **options))
    assert db.execute(f"SELECT * FROM {table}").fetchall() == 2 * [tuple([float(n)] for n in range(len(names)))]


@pytest.mark.parametrize("transaction", ["batch", "partition"])
def test_several_tables_and_the_columns_of_places(scene: Scene, table: str, db: Db, transaction: str) -> None:
    scene.produce(4)
    names = (*NAMES, *QUOTED)
    make(db, table, names)
    places = {"topic_column": "To.pic", "partition_column": "par`tition", "offset_column": "%s offset"}
    frame = stream(scene, names)
    for old, new in zip(("topic", "partition", "offset"), places.values(), strict=True):
        frame = frame.withColumnRenamed(old, new)
    sink: Any = scene.sink(table=table, transaction=transaction, **places)
    if transaction == "batch":
        other = f"{table}_2"
        make(db, other, names)
        several: PostgresSink = scene.sink(table=None, tables={table: {}, other: {}}, **places)

        def sink(frame: DataFrame, batch_id: int) -> None:
            several.write({table: frame, other: frame}, batch_id)

    drain(frame, sink, scene.checkpoint)
    check(db, table, names, 4)
    if transaction == "batch":
        check(db, other, names, 4)
        db.execute(f"DROP TABLE {other}")
