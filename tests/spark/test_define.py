"""Tables that are made of a frame's schema, and columns that are added: what is executed, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from psycopg.conninfo import make_conninfo
from pyspark.sql import types as T  # noqa: N812

from exactly_once.writer import TableError
from exactly_once.writer.table import read_table
from spark_sink import FrameError
from spark_sink.define import define
from tests.spark.attempts import Place
from tests.spark.staged import SCHEMA, Run, Target
from tests.support.waiting import SPARK_SECONDS, until

Database = psycopg.Connection[Any]
KAFKA = (("topic", T.StringType()), ("partition", T.IntegerType()), ("offset", T.LongType()))
NAME = "x" * 64


def schema(*fields: tuple[str, T.DataType]) -> T.StructType:
    return T.StructType([T.StructField(name, kind) for name, kind in (*KAFKA, *fields)])


ID = ("id", T.LongType())
NOTE = ("note", T.StringType())


@pytest.fixture
def place(conninfo: str, name: str, db: Database) -> Iterator[Place]:
    yield Place(conninfo, name)
    db.execute(f"DROP TABLE IF EXISTS {name}")


def columns(db: Database, table: str) -> dict[str, str] | None:
    """The columns of a table; None where there is none."""
    if db.execute("SELECT to_regclass(%s)", (table,)).fetchone() == (None,):
        return None
    with db.transaction():
        return {column.name: column.type_name for column in read_table(db, table).columns}


def defined(db: Database, place: Place, *fields: tuple[str, T.DataType], **options: Any) -> list[str]:
    """Define what is lacking, and return the statements."""
    with db.transaction():
        return [each.as_string(None) for each in define(db, place.options(**options), schema(*fields))]


def test_a_table_is_made_once_without_the_columns_that_only_tell_where_a_row_comes_from(
    db: Database, place: Place
) -> None:
    options = {"mode": "upsert", "key": ["id", "partition"], "claim": "event", "create_table": True}
    event = ("event", T.StringType())
    (made,) = defined(db, place, ID, event, NOTE, **options)
    assert made == (
        f'CREATE TABLE IF NOT EXISTS "{place.name}" '
        '("partition" integer, "id" bigint, "note" text, PRIMARY KEY ("id", "partition"))'
    )
    with db.transaction():
        assert read_table(db, place.name).keys == [("id", "partition")]
    assert defined(db, place, ID, event, NOTE, ("more", T.StringType()), **options) == [], "there is one"
    (added,) = defined(db, place, ID, event, NOTE, ("more", T.DateType()), **options, evolve="add-columns")
    assert added.endswith('ADD COLUMN IF NOT EXISTS "more" date')
    assert columns(db, place.name) == {"partition": "integer", "id": "bigint", "note": "text", "more": "date"}


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        (T.ByteType(), "smallint"),
        (T.DecimalType(12, 3), "numeric(12,3)"),
        (T.ArrayType(T.DecimalType(12, 3)), "numeric(12,3)[]"),
        (T.ArrayType(T.ArrayType(T.LongType())), "jsonb"),
        (T.ArrayType(T.MapType(T.StringType(), T.LongType())), "jsonb"),
        (T.ArrayType(T.ArrayType(T.StructType())), "jsonb"),
        (T.DayTimeIntervalType(0, 1), "interval"),
    ],
)
def test_a_column_has_the_type_that_takes_each_value(db: Database, place: Place, kind: T.DataType, made: str) -> None:
    defined(db, place, ("x", kind), create_table=True)
    assert columns(db, place.name) == {"x": made}


def test_rows_without_offsets_keep_columns_of_such_names(db: Database, place: Place) -> None:
    defined(db, place, ledger="batch-id", create_table=True)
    assert columns(db, place.name) == {"topic": "text", "partition": "integer", "offset": "bigint"}


def test_nothing_that_is_there_is_changed(db: Database, place: Place) -> None:
    db.execute(f"CREATE TABLE {place.name} (id smallint NOT NULL, old text)")
    assert defined(db, place, ID, create_table=True, evolve="add-columns") == []
    assert columns(db, place.name) == {"id": "smallint", "old": "text"}


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        ([("x", T.NullType())], {}, "'x' is void.*cast it in the frame"),
        ([("x", T.ArrayType(T.NullType()))], {}, "'x' is array<void>"),
        ([("x", T.YearMonthIntervalType())], {}, "'x' is interval year to month"),
        ([("x", T.CalendarIntervalType())], {}, "'x' is interval"),
        ([("Note", T.StringType()), NOTE], {}, "'Note' and 'note' differ in upper and lower case only"),
        ([(NAME, T.StringType())], {}, f"name '{NAME}' .over 63 bytes.*rename it"),
        ([("ctid", T.StringType())], {}, "name 'ctid'"),
        ([ID], {"mode": "upsert"}, r"mode='upsert' needs a key: say key=\["),
        ([ID], {"mode": "insert-ignore"}, r"mode='insert-ignore' needs a key: say key=\["),
        ([NOTE], {"mode": "upsert", "key": ["id"]}, "the frame lacks 'id'"),
        ([NOTE], {"mode": "insert-ignore", "key": ["id"]}, "the frame lacks 'id'"),
    ],
)
def test_what_can_be_no_column_is_refused_by_name(
    db: Database, place: Place, fields: Any, options: Any, said: str
) -> None:
    for before in (None, {"id": "bigint"}):
        with pytest.raises(FrameError, match=said):
            defined(db, place, *fields, **options, create_table=True, evolve="add-columns")
        assert columns(db, place.name) == before
        if options:  # the key of a table that is there is its own
            return
        db.execute(f"CREATE TABLE IF NOT EXISTS {place.name} (id bigint)")


def test_a_column_that_differs_from_one_of_the_table_by_case_is_not_added_beside_it(db: Database, place: Place) -> None:
    db.execute(f"CREATE TABLE {place.name} (id bigint, amount numeric)")
    with pytest.raises(FrameError, match="'Amount' and 'amount' differ"):
        defined(db, place, ID, ("Amount", T.DecimalType(9, 2)), evolve="add-columns")


def test_without_the_option_a_missing_table_is_told_with_it(db: Database, place: Place) -> None:
    with pytest.raises(TableError, match=f"no table {place.name}; create_table=True makes one"):
        defined(db, place, ID, evolve="add-columns")
    db.execute(f"CREATE VIEW {place.name}_view AS SELECT 1 AS id")
    with pytest.raises(TableError, match="is not a table"):  # also where a table could not be made
        defined(db, place, ID, table=f"{place.name}_view", create_table=True, mode="upsert")
    db.execute(f"DROP VIEW {place.name}_view")


def test_what_is_no_name_of_a_table_leaves_none(db: Database, place: Place) -> None:
    """Newer versions of Postgres do not complain: there is none of that name, and a driver looks for it again."""
    name = f"{place.name} b"

    def looked_at() -> None:
        with db.transaction():
            define(db, place.options(table=name, create_table=True), schema(ID))
            read_table(db, name)

    with pytest.raises(TableError, match=name):
        looked_at()
    assert columns(db, f'"{name}"') is None


@pytest.mark.parametrize("table", ["pg_temp.t", "t"])
def test_a_table_that_would_end_with_its_connection_is_refused(
    conninfo: str, table: str, place: Place, db: Database
) -> None:
    """Also where the search path alone makes it temporary; its rows would be counted as written, and gone."""
    options = {"table": table, "conninfo": make_conninfo(conninfo, options="-c search_path=pg_temp")}
    with psycopg.connect(options["conninfo"]) as connection, pytest.raises(TableError, match="is a temporary table"):
        define(connection, place.options(**options, create_table=True), schema(ID))
    source = Run(Target(conninfo, place.name), **options, createTable="true")
    with pytest.raises(TableError, match=f"{table} is a temporary table"):
        source.write(source.rows(0, range(3)))
    assert source.target.ledger() == []


def test_who_may_not_is_told_what_to_have_executed(db: Database, place: Place) -> None:
    name = place.name
    db.execute(f"CREATE TABLE {name} (id bigint); CREATE ROLE {name}; GRANT ALL ON {name} TO {name}")
    db.execute(f"CREATE SCHEMA {name}; GRANT USAGE ON SCHEMA {name} TO {name}")

    def as_other(**options: Any) -> None:
        with db.transaction():
            db.execute(f"SET LOCAL ROLE {name}")
            define(db, place.options(**options), schema(ID, NOTE))

    try:
        with pytest.raises(TableError, match=f'owner of table {name}; .*who may: ALTER TABLE .* "note" text'):
            as_other(evolve="add-columns")
        as_other()  # nothing is to be done
        with pytest.raises(TableError, match=r"permission denied for schema.*who may: CREATE TABLE"):
            as_other(table=f"{name}.other", create_table=True)
        with pytest.raises(TableError, match='schema "nowhere" does not exist'):
            defined(db, place, ID, table="nowhere.other", create_table=True)
    finally:
        db.execute(f"DROP SCHEMA {name}; DROP TABLE {name}; DROP ROLE {name}")


def test_more_columns_than_a_table_can_have_are_told(db: Database, place: Place) -> None:
    more = [(f"c{n}", T.IntegerType()) for n in range(1601)]
    with pytest.raises(TableError, match=f"{place.name}: tables can have at most 1600 columns; leave columns out"):
        defined(db, place, *more, create_table=True)
    defined(db, place, *more[:1599], create_table=True)
    with pytest.raises(TableError, match="at most 1600 columns"):
        defined(db, place, *more, evolve="add-columns")
    assert len(columns(db, place.name) or ()) == 1599


@pytest.mark.parametrize(
    ("before", "theirs"), [(None, (ID, NOTE)), (None, (ID,)), ("CREATE TABLE {} (id bigint)", (ID, NOTE))]
)
def test_of_two_drivers_that_define_at_once_both_succeed(  # noqa: PLR0917 - most are fixtures
    db: Database, place: Place, conninfo: str, monkeypatch: pytest.MonkeyPatch, before: str | None, theirs: Any
) -> None:
    """The second waits for the first, whose table or column it finds then, and adds what a smaller table lacks."""
    # Who calls tries again after a lock time-out; here the first may take as long as the machine lets it.
    monkeypatch.setattr("exactly_once.writer.table.LOCK_SECONDS", SPARK_SECONDS)
    if before is not None:
        db.execute(before.format(place.name))
    failed: list[BaseException] = []

    def second(connection: Database) -> None:
        try:
            with connection.transaction():
                define(connection, place.options(create_table=True, evolve="add-columns"), schema(ID, NOTE))
                assert [c.name for c in read_table(connection, place.name).columns] == ["id", "note"]
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    with psycopg.connect(conninfo, autocommit=True) as first, psycopg.connect(conninfo, autocommit=True) as other:
        thread = threading.Thread(target=second, args=(other,))
        with first.transaction():
            define(first, place.options(create_table=True, evolve="add-columns"), schema(*theirs))
            thread.start()
            waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
            pid = (other.info.backend_pid,)
            until(lambda: db.execute(waits, pid).fetchone() == (True,), 30, "the second driver waits")
        thread.join(120)
    assert not failed
    assert columns(db, place.name) == {"id": "bigint", "note": "text"}


def test_the_data_source_defines_in_the_transaction_of_the_batch(
    conninfo: str, name: str, db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target(conninfo, name)
    db.execute(f"DROP TABLE {name}")
    with pytest.raises(TableError, match="there is no table"):
        Run(target).write(Run(target).rows(0, range(3)))
    run = Run(target, createTable="true", evolve="add-columns")
    staged = run.stage(run.rows(0, range(3)))
    nested = T.MapType(T.StringType(), T.StringType())
    with pytest.raises(FrameError, match="make it text with to_json"):
        run.publish(staged, schema=T.StructType([*SCHEMA, T.StructField("body", nested)]))
    assert columns(db, name) is None
    run.publish(staged)
    assert db.execute(f"SELECT count(*), count(value) FROM {name}").fetchone() == (3, 3)
    more = run.rows(0, range(3, 5)).append_column("n", pa.array([3, 4], pa.int64()))
    run.publish(run.stage(more, batch_id=1), schema=T.StructType([*SCHEMA, T.StructField("n", T.LongType())]))
    assert columns(db, name) == {"value": "text", "n": "bigint"}
    assert db.execute(f"SELECT n FROM {name} ORDER BY n").fetchall() == [(3,), (4,), (None,), (None,), (None,)]
    assert [caplog.text.count(each) for each in ("CREATE TABLE", "ADD COLUMN")] == [1, 1]
    db.execute(f"DROP TABLE {name}")


@pytest.mark.timeout(300)
def test_the_data_source_lets_readers_pass_while_it_waits_to_alter_the_table(
    conninfo: str, name: str, db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """They queue behind an ALTER TABLE that waits for one of them, for as long as that one is idle in a transaction."""
    target = Target(conninfo, name)
    run = Run(target, evolve="add-columns")
    more = run.rows(0, range(3)).append_column("n", pa.array([1, 2, 3], pa.int64()))
    staged, schema = run.stage(more), T.StructType([*SCHEMA, T.StructField("n", T.LongType())])
    with psycopg.connect(conninfo) as idle, ThreadPoolExecutor(1) as pool:
        idle.execute(f"TABLE {name}")
        publishing = pool.submit(run.publish, staged, schema=schema)
        until(lambda: "waiting (try 1)" in caplog.text, 60, "the data source tells what it waits for")
        db.execute(f"TABLE {name}")
        idle.rollback()
        publishing.result(60)
    assert "lock timeout" in caplog.text
    assert db.execute(f"SELECT sum(n) FROM {name}").fetchone() == (6,)
    # What waits for a lock behind it, such as a key that another transaction has written, waits as long as ever.
    with db.transaction():
        db.execute("SET LOCAL lock_timeout = '7s'")
        options = target.options(evolve="add-columns")
        define(db, options, T.StructType([*schema, T.StructField("m", T.LongType())]))
        assert db.execute("SHOW lock_timeout").fetchone() == ("7s",)
    db.execute(f"DROP TABLE {name}")
