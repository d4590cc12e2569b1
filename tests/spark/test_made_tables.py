"""The sink makes its table, and adds columns: every type of Spark's, and what comes on the second day."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import string
import struct
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from exactly_once.ledger.session import tag_of
from exactly_once.writer.table import read_table
from tests.spark.attempts import Place
from tests.spark.scene import JOURNAL, Scene
from tests.support.seeds import drawn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_sink import PostgresSink, SinkUnit

Database = psycopg.Connection[Any]
Make = Callable[[random.Random], Any]

VARIANT = """parse_json('[1.5, {"a": null}]') AS v"""
FIRST, LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)

both = pytest.mark.parametrize("transaction", ["batch", "partition"])


@pytest.fixture
def table(name: str, db: Database) -> Iterator[str]:
    """The name of a table that is not there."""
    yield name
    db.execute(f"DROP TABLE IF EXISTS {name}, {name}_totals, {name}_theirs")


def columns(db: Database, table: str) -> dict[str, str]:
    with db.transaction():
        return {column.name: column.type_name for column in read_table(db, table).columns}


def made(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of statements, at a level that is shown by default."""
    return [
        r.getMessage() for r in caplog.records if getattr(r, "action", "") == "ddl" and r.levelno >= logging.WARNING
    ]


def writing(sink: PostgresSink, *expressions: str) -> Callable[[DataFrame, int], None]:
    """A function that writes the columns of Kafka and some of its own."""

    def write(frame: DataFrame, batch_id: int) -> None:
        sink(frame.selectExpr("topic", "partition", "offset", *expressions), batch_id)

    return write


def moment(r: random.Random) -> datetime:
    """A moment that Python knows, often an odd one."""
    drawn = FIRST + timedelta(days=r.randrange(3_652_058), microseconds=r.randrange(86_400_000_000))
    return r.choice([FIRST, LAST, datetime(1969, 12, 31, 23, 59, 59, 999999, UTC), drawn])


def single(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def whole(bits: int) -> Make:
    return lambda r: r.choice([-(1 << bits), (1 << bits) - 1, 0, r.randrange(-(1 << bits), 1 << bits)])


def decimal(precision: int, scale: int) -> Make:
    def make(r: random.Random) -> Decimal:
        digits = r.choice([10**precision - 1, 1, 0, r.randrange(10**precision)])
        return Decimal((r.randrange(2), tuple(map(int, str(digits))), -scale))

    return make


def text(r: random.Random) -> str:
    return "".join(r.choices(string.printable + "äß€\\\\\"'\u2028😀", k=r.randrange(12)))


def some(make: Make, r: random.Random) -> list[Any]:
    return [None if r.random() < 0.2 else make(r) for _ in range(r.randrange(4))]


FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0)
INTERVALS = (timedelta(), timedelta(microseconds=-1), timedelta(days=-1, seconds=1), timedelta(days=99_999))
SCALARS: dict[str, tuple[str, Make]] = {
    "boolean": ("boolean", lambda r: r.random() < 0.5),
    "tinyint": ("smallint", whole(7)),
    "smallint": ("smallint", whole(15)),
    "int": ("integer", whole(31)),
    "bigint": ("bigint", whole(63)),
    "float": ("real", lambda r: r.choice([*FLOATS, single(r.uniform(-9e30, 9e30)), single(r.random())])),
    "double": ("double precision", lambda r: r.choice([*FLOATS, 5e-324, 1.7976931348623157e308, r.random()])),
    "decimal(10,2)": ("numeric(10,2)", decimal(10, 2)),
    "decimal(38,0)": ("numeric(38,0)", decimal(38, 0)),
    "decimal(38,38)": ("numeric(38,38)", decimal(38, 38)),
    "string": ("text", text),
    "binary": ("bytea", lambda r: r.randbytes(r.randrange(9))),
    "date": ("date", lambda r: moment(r).date()),
    "timestamp": ("timestamp with time zone", moment),
    "timestamp_ntz": ("timestamp without time zone", lambda r: moment(r).replace(tzinfo=None)),
    "interval day to second": ("interval", lambda r: r.choice([*INTERVALS, timedelta(seconds=r.uniform(-1e9, 1e9))])),
}
# Of Spark 4.1 and later, where it is switched on.
TIMES: dict[str, tuple[str, Make]] = {
    "time": ("time without time zone", lambda r: r.choice([time.min, time.max, moment(r).time()]))
}
NESTED: dict[str, Make] = {
    "struct<a:string,b:bigint,c:array<int>>": lambda r: {
        "a": text(r),
        "b": whole(63)(r),
        "c": [1, None, r.randrange(9)],
    },
    "map<string,decimal(9,3)>": lambda r: {text(r): decimal(9, 3)(r)},
    "array<struct<a:boolean,b:string>>": lambda r: [{"a": r.random() < 0.5, "b": text(r)}, None],
    "array<array<bigint>>": lambda r: [[whole(63)(r)], [], None],
}


def literal(value: Any) -> Any:
    """What Postgres reads a value from: text, or a list of texts."""
    if isinstance(value, list):
        return [literal(each) for each in value]
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, timedelta):
        return f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds"
    return None if value is None else repr(value) if isinstance(value, float) else str(value)


@pytest.mark.parametrize("which", ["plain", "all"])
def test_every_type_is_stored_as_postgres_itself_stores_its_text(
    scene: Scene, table: str, db: Database, which: str
) -> None:
    """A table that the sink has made, and one like it into which Postgres has read the same values as text.

    Plain ones go as Arrow has them, with the others all go as rows.
    """
    r = random.Random(drawn()[0])
    count, is_plain = 60, which == "plain"
    scalars = {spark: each for spark, each in SCALARS.items() if not (is_plain and each[0] == "interval")}
    with contextlib.suppress(Exception):  # not in this version, or switched off
        scene.spark.sql("SELECT current_time()").collect()
        scalars |= {} if is_plain else TIMES
    kinds = {f"s {n}": (spark, kind, make) for n, (spark, (kind, make)) in enumerate(scalars.items())}
    kinds |= {f"Größe {n}": (spark, "jsonb", make) for n, (spark, make) in enumerate(NESTED.items())}
    for n, (spark, (element, make)) in enumerate({} if is_plain else scalars.items()):
        kinds[f"Array{n}"] = f"array<{spark}>", f"{element}[]", partial(some, make)
    rows = [[None if r.random() < 0.1 else make(r) for _, _, make in kinds.values()] for _ in range(count)]
    spark_types = ", ".join(f"`{name.replace('`', '``')}` {spark}" for name, (spark, _, _) in kinds.items())
    values = scene.spark.createDataFrame([(n, *row) for n, row in enumerate(rows)], f"n bigint, {spark_types}")
    chosen: dict[str, Any] = {} if is_plain else {"mode": "insert-ignore", "key": ["n"], "small_batch": 1000}
    sink = scene.sink(table=table, create_table=True, **chosen)

    def write(frame: DataFrame, batch_id: int) -> None:
        places = frame.selectExpr("topic", "partition", "offset", "offset * 2 + partition AS n")
        sink(places.join(values, "n"), batch_id)

    scene.produce(count)
    scene.run(write, per_trigger=40)
    assert columns(db, table) == {"n": "bigint", **{name: kind for name, (_, kind, _) in kinds.items()}}
    db.execute(f"SET TIME ZONE 'UTC'; CREATE TABLE {table}_theirs (LIKE {table})")
    casts = ["%s"]
    for _, kind, _ in kinds.values():
        casts.append(f"%s::text[]::{kind}" if kind.endswith("[]") else f"%s::text::{kind}")
    for n, row in enumerate(rows):
        sent = [
            value if value is None else json.dumps(value, default=float) if kind == "jsonb" else literal(value)
            for value, (_, kind, _) in zip(row, kinds.values(), strict=True)
        ]
        db.execute(f"INSERT INTO {table}_theirs VALUES ({', '.join(casts)})", [n, *sent])
    for name, (spark, _, _) in kinds.items():
        compare = sql.SQL(
            "SELECT n, o.{0}::text, t.{0}::text FROM {1} o FULL JOIN {2} t USING (n) WHERE o.{0} IS DISTINCT FROM t.{0}"
        ).format(*(sql.Identifier(each) for each in (name, table, f"{table}_theirs")))
        assert db.execute(compare).fetchall() == [], f"{spark} {name}"
    assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (count,)


@both
def test_the_second_day_brings_a_column(
    scene: Scene, table: str, db: Database, caplog: pytest.LogCaptureFixture, transaction: str
) -> None:
    """A table is made; a restart with another column adds it, with `evolve`, and one within a run as well."""
    options: dict[str, Any] = {"table": table, "transaction": transaction, "create_table": True}
    value = "cast(cast(value AS string) AS int) AS id"
    scene.produce(20)
    scene.run(writing(scene.sink(**options), value))
    assert [text.split(" (")[1] for text in made(caplog)] == ['"id" integer)']
    scene.produce(20)
    with pytest.raises(Exception, match=r"no column 'day'.*evolve="):
        scene.run(writing(scene.sink(**options), value, "current_date() AS day"))
    assert columns(db, table) == {"id": "integer"}
    sink = scene.sink(**options, evolve="add-columns")

    def write(frame: DataFrame, batch_id: int) -> None:
        more = ["array(partition) AS places"] if batch_id > 1 else []
        writing(sink, value, "current_date() AS day", *more)(frame, batch_id)

    scene.produce(20)
    scene.run(write, per_trigger=20)
    assert columns(db, table) == {"id": "integer", "day": "date", "places": "integer[]"}
    counted = f"SELECT count(*), count(DISTINCT id), count(day), count(places) FROM {table}"
    assert db.execute(counted).fetchone() == (60, 60, 40, 20)
    assert [text.partition("ADD")[2] for text in made(caplog)[1:]] == [
        ' COLUMN IF NOT EXISTS "day" date',
        ' COLUMN IF NOT EXISTS "places" integer[]',
    ]


@pytest.mark.parametrize("small_batch", [0, 1000])
def test_a_table_that_is_altered_within_a_run_is_looked_at_again(
    scene: Scene, table: str, db: Database, small_batch: int
) -> None:
    """A column is dropped in front of batch 1, and one is added in front of batch 2 that frames fill from then on."""
    db.execute(f"CREATE TABLE {table} (id bigint, gone int)")
    options: dict[str, Any] = {"table": table, "small_batch": small_batch}

    def altering(sink: PostgresSink) -> Callable[[DataFrame, int], None]:
        def write(frame: DataFrame, batch_id: int) -> None:
            if batch_id == 1:
                db.execute(f"ALTER TABLE {table} DROP COLUMN IF EXISTS gone")
            elif batch_id == 2:
                db.execute(f"ALTER TABLE {table} ADD partition int")
            writing(sink, "offset * 2 + partition AS id", "1 AS gone")(frame, batch_id)

        return write

    scene.produce(60)
    with pytest.raises(Exception, match=r"FrameError: .* has no column 'gone'; .*say evolve="):
        scene.run(altering(scene.sink(**options)), per_trigger=20)
    scene.run(altering(scene.sink(**options, evolve="add-columns")), per_trigger=20)
    counted = f"SELECT count(*), count(DISTINCT id), count(gone), count(partition) FROM {table}"
    assert db.execute(counted).fetchone() == (60, 60, 40, 20)


def test_a_batch_that_fails_behind_its_ddl_comes_again_whole(
    scene: Scene, table: str, db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """The table is made in a transaction of its own, and the rows are written once, by whoever comes."""

    def fail(_: SinkUnit) -> None:
        raise ZeroDivisionError

    scene.produce(20)
    options: dict[str, Any] = {"table": table, "create_table": True, "evolve": "add-columns"}
    with pytest.raises(Exception, match="ZeroDivisionError"):
        scene.run(writing(scene.sink(**options, in_transaction=fail), "value"))
    assert columns(db, table) == {"value": "bytea"}
    with pytest.raises(Exception, match="ZeroDivisionError"):
        scene.run(writing(scene.sink(**options, in_transaction=fail), "value", "1 AS one"))
    for _ in range(2):
        scene.run(writing(scene.sink(**options), "value", "1 AS one"))
        scene.forget_last_commit()
        assert db.execute(f"SELECT count(*), count(DISTINCT value), sum(one) FROM {table}").fetchone() == (20, 20, 20)
    assert len(made(caplog)) == 2
    assert "does not come again" not in caplog.text
    # Somebody drops the table, and the group goes on behind what it had.
    db.execute(f"DROP TABLE {table}")
    scene.produce(20)
    scene.run(writing(scene.sink(**options), "value"))
    assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (20,)
    assert "what the group has written before does not come again" in made(caplog)[-1]


def test_a_driver_that_was_replaced_adds_a_column_at_most(scene: Scene, table: str, db: Database) -> None:
    sink = scene.sink(table=table, create_table=True, evolve="add-columns")
    place = Place(scene.conninfo, scene.topic)

    def write(frame: DataFrame, batch_id: int) -> None:
        if batch_id == 1:
            place.owners().take(place.ranges(20, 20, start=10), batch_id=1)
        writing(sink, "value", *(["1 AS one"] if batch_id else []))(frame, batch_id)

    scene.produce(40)
    try:
        with pytest.raises(Exception, match="Fenced"):
            scene.run(write, per_trigger=20)
    finally:
        place.close()
    assert columns(db, table) == {"value": "bytea", "one": "integer"}
    assert db.execute(f"SELECT count(*), count(one) FROM {table}").fetchone() == (20, 0)
    scene.run(writing(scene.sink(table=table, evolve="add-columns"), "value", "1 AS one"))
    assert db.execute(f"SELECT count(*), count(one) FROM {table}").fetchone() == (40, 20)


def test_what_is_refused_leaves_no_table_behind(scene: Scene, table: str, db: Database) -> None:
    there = "SELECT to_regclass(%s)"
    scene.produce(10)
    with pytest.raises(Exception, match="keys of type date"):
        scene.run(writing(scene.sink(table=table, create_table=True), "map(current_date(), 1) AS days"))
    assert db.execute(there, (table,)).fetchone() == (None,)
    scene.lose_checkpoint()
    scene.run()
    scene.produce(10)
    with pytest.raises(Exception, match=rf"(?s)ConfigurationError.*{JOURNAL}"):
        scene.run(writing(scene.sink(table=table, create_table=True), "value"))
    assert db.execute(there, (table,)).fetchone() == (None,)


def test_each_of_several_tables_has_its_own_options(scene: Scene, table: str, db: Database) -> None:
    db.execute(f"CREATE TABLE {table} (value bytea)")
    totals = {"mode": "upsert", "key": ["partition"], "add": ["n"], "create_table": True}
    sink = scene.sink(table=None, tables={table: {"evolve": "add-columns"}, f"{table}_totals": totals})

    def write(frame: DataFrame, batch_id: int) -> None:
        rows = frame.selectExpr("topic", "partition", "offset", "value", "named_struct('at', offset) AS body", VARIANT)
        sums = frame.groupBy("partition").count().selectExpr("partition", "count AS n")
        sink.write({table: rows, f"{table}_totals": sums}, batch_id)

    scene.produce(40)
    scene.run(write, per_trigger=20)
    assert columns(db, table) == {"value": "bytea", "body": "jsonb", "v": "jsonb"}
    assert db.execute(f"SELECT count(*), sum((body ->> 'at')::int) FROM {table}").fetchone() == (40, 2 * sum(range(20)))
    assert db.execute(f"SELECT DISTINCT v FROM {table}").fetchall() == [([1.5, {"a": None}],)]
    assert db.execute(f"SELECT * FROM {table}_totals ORDER BY 1").fetchall() == [(0, 20), (1, 20)]


def test_an_attempt_that_stands_still_does_not_keep_the_table_from_its_columns(
    scene: Scene, table: str, db: Database
) -> None:
    """A twin of a task holds the table's lock, and would for ever."""
    sink = scene.sink(table=table, create_table=True, evolve="add-columns")
    frozen = psycopg.connect(scene.conninfo)

    def write(frame: DataFrame, batch_id: int) -> None:
        if batch_id == 1:
            assert sink._run is not None
            tag = tag_of(sink._run._session.instance, "exactly_once")
            frozen.execute("SELECT set_config('application_name', %s, true)", (tag,))
            frozen.execute(f"LOCK TABLE {table} IN ROW EXCLUSIVE MODE")
        writing(sink, "value", *(["1 AS one"] if batch_id else []))(frame, batch_id)

    scene.produce(40)
    try:
        scene.run(write, per_trigger=20)
        with pytest.raises(psycopg.OperationalError):
            frozen.execute("SELECT 1")
    finally:
        frozen.close()
    assert db.execute(f"SELECT count(*), count(one) FROM {table}").fetchone() == (40, 20)
