"""Frames that do not fit their table are refused before the first row, by the name of the column."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from exactly_once.writer.table import Table, read_table
from spark_sink import FrameError
from spark_sink.frame import check_key, fit
from spark_sink.ranges import PLACES
from tests.spark.attempts import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KAFKA = "topic string, partition int, offset bigint"


class Case:
    """A table, and frames to write into it."""

    def __init__(self, spark: SparkSession, place: Place, db: psycopg.Connection[Any]) -> None:
        self._spark = spark
        self._place = place
        self._db = db

    def table(self, columns: str) -> Table:
        self._db.execute(f"CREATE TABLE {self._place.name} ({columns})")
        with self._db.transaction():
            return read_table(self._db, self._place.name)

    def frame(self, columns: str) -> DataFrame:
        return self._spark.createDataFrame([], ", ".join(filter(None, (KAFKA, columns))))

    def options(self, **options: Any) -> Any:
        return self._place.options(**options)

    def fit(self, table: str, frame: str, **options: Any) -> tuple[DataFrame, tuple[str, ...]]:
        return fit(self.frame(frame), self.table(table), self._place.options(**options))


@pytest.fixture
def case(spark: SparkSession, conninfo: str, name: str, db: psycopg.Connection[Any]) -> Iterator[Case]:
    yield Case(spark, Place(conninfo, name), db)
    db.execute(f"DROP TABLE IF EXISTS {name}")


def test_columns_of_kafka_are_written_where_the_table_has_them(case: Case) -> None:
    frame, columns = case.fit('id int, "offset" bigint, note text', "id int")
    assert columns == ("offset", "id")
    assert frame.columns == ["offset", "id", *PLACES]


def test_nested_columns_go_into_json_as_json(case: Case) -> None:
    nested = "m map<string,int>, s struct<a:int>, l array<int>, i array<int>"
    frame, _ = case.fit("m jsonb, s json, l jsonb, i int[]", nested)
    assert [t for _, t in frame.dtypes][:4] == ["string", "string", "string", "array<int>"]


@pytest.mark.parametrize(
    ("table", "frame", "said"),
    [
        ("id int", "id int, extra int", "no column 'extra'.*add it to the table, or say evolve=\"add-columns\""),
        ("id int, needed int NOT NULL", "id int", "needs values for 'needed'"),
        (
            "id int, twice int GENERATED ALWAYS AS (id * 2) STORED",
            "id int, twice int",
            "'twice' is generated.*or change the table",
        ),
        ("note text", "", "no column of the frame"),
        ("m text", "m map<string,int>", "'m' is map<string,int>.*make that column jsonb"),
        ("s text", "s struct<a:int>", "'s' is struct<a:int>"),
        ("v text", "v variant", "'v' is variant"),
        ("l text", "l array<int>", "'l' is array<int>"),
        ("m jsonb", "m map<date,int>", "keys of type date"),
        ("s jsonb", "s array<struct<id:int,at:date,id:int>>", "several fields called 'id'"),
        ("s jsonb", "s struct<id:double,at:date,ID:int>", "apart that differ in upper and lower case only: .*`id`"),
        ('id int, "ID" int', "id int, ID int", "apart that differ in upper and lower case only: .*`id`"),
        ("l text[]", "l array<struct<a:int>>", "'l' is array<struct<a:int>>"),
        ("at timestamptz", "at timestamp_ntz", "'at' is timestamp_ntz.*time zone"),
        ("at timestamp", "at timestamp", "'at' is timestamp.*time zone"),
        ("n numeric(10,2)", "n decimal(38,2)", r"'n' is decimal\(38,2\).*digits"),
        ("n numeric(10,2)", "n decimal(10,3)", "digits"),
        ("n bigint", "n decimal(20,0)", "cast it to an integer"),
        ("n int", "n boolean", "'n' is boolean.*cast it"),
        ("n boolean", "n bigint", "cast it"),
        ("n varchar(9)", "n double", "cast it"),
        ("n text", "n decimal(9,2)", "cast it"),
        ("n text", "n timestamp", "cast it"),
        ("n timestamptz", "n date", "cast it"),
        ("n date", "n timestamp_ntz", "cast it"),
        ("n interval", "n interval year to month", "cast it"),
        ("n timestamp", "n date", "takes no such value; cast it"),
        ("n time", "n timestamp", "takes no such value; cast it"),
        ("n text", "n interval day to second", "takes no such value; cast it"),
        ("n bigint", "n interval day to second", "takes no such value; cast it"),
        ("n jsonb", "n interval day to second", "to_json"),
        ("n timestamp[]", "n array<timestamp>", "takes no such values; cast them"),
        ("n text[]", "n array<int>", "takes no such values; cast them"),
        ("n jsonb", "n decimal(9,2)", "to_json"),
    ],
)
def test_a_column_that_does_not_fit_is_refused_by_name(case: Case, table: str, frame: str, said: str) -> None:
    with pytest.raises(FrameError, match=said):
        case.fit(table, frame)


def test_a_session_that_minds_case_tells_names_apart(case: Case, spark: SparkSession) -> None:
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        _, columns = case.fit('id int, "ID" int, s jsonb', "id int, ID int, s struct<id:double,ID:double>")
    finally:
        spark.conf.set("spark.sql.caseSensitive", "false")
    assert columns == ("id", "ID", "s")


def test_an_upsert_cannot_change_what_postgres_numbers_always(case: Case) -> None:
    table = case.table("id int PRIMARY KEY, n int GENERATED ALWAYS AS IDENTITY")
    with pytest.raises(FrameError, match=r"numbers 'n' by itself .*BY DEFAULT"):
        fit(case.frame("id int, n int"), table, case.options(mode="upsert"), ("id",))
    for frame, key, mode in (
        ("id int", "id", "upsert"),
        ("id int, n int", "n", "upsert"),
        ("id int, n int", "n", "append"),
    ):
        fit(case.frame(frame), table, case.options(mode=mode), (key,))


@pytest.mark.parametrize(
    ("table", "frame"),
    [
        ("n numeric(10,2)", "n decimal(10,2)"),
        ("n numeric", "n decimal(38,10)"),
        ("at timestamptz", "at timestamp"),
        ("at timestamp", "at timestamp_ntz"),
        ("id int, n int NOT NULL DEFAULT 1, k int GENERATED ALWAYS AS IDENTITY", "id int"),
        ("id int", "id void"),
        ("s jsonb", "s struct<id:int,ID:bigint>"),
        ("t text, b bytea, j jsonb, i interval", "t string, b binary, j string, i interval day to second"),
        ("f real, d double precision, n numeric, x bigint", "f float, d double, n bigint, x int"),
        ("t timestamptz[], n int[], s text[]", "t array<timestamp>, n array<int>, s array<string>"),
    ],
)
def test_a_column_that_fits_is_taken(case: Case, table: str, frame: str) -> None:
    case.fit(table, frame)


def test_an_array_without_a_type_is_an_empty_one(case: Case) -> None:
    """Spark's array() has no elements, of which Arrow would say that they are nulls and none may be null."""
    given = case.frame("id int").selectExpr("*", "array() AS n", "array(null) AS t", "array(array()) AS j", "null AS v")
    frame, _ = fit(given, case.table("id int, n int[], t text[], j jsonb, v int"), case.options())
    assert frame.toArrow().column_names == ["id", "n", "t", "j", "v", *PLACES]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offset_column": "kafka_offset"}, r"no column 'kafka_offset' \(offset_column=\).*batch-id"),
        ({"topic_column": "id"}, r"'id' \(topic_column=\) is int"),
        ({"offset_column": "name"}, r"'name' \(offset_column=\) is string; Kafka's own is bigint"),
        ({"partition_column": "name"}, r"'name' \(partition_column=\) is string; Kafka's own is int$"),
    ],
)
def test_a_frame_without_kafkas_columns_is_refused(case: Case, options: dict[str, Any], said: str) -> None:
    with pytest.raises(FrameError, match=said):
        case.fit("id int, name text", "id int, name string", **options)


def test_without_offsets_every_column_is_written(case: Case) -> None:
    with pytest.raises(FrameError, match="no column 'topic', 'partition', 'offset'"):
        case.fit("id int", "id int", ledger="batch-id")


def test_two_columns_of_one_name_are_refused(case: Case, name: str) -> None:
    frame = case.frame("id int")
    with pytest.raises(FrameError, match="several columns called 'id'"):
        fit(frame.select("*", "id"), case.table("id int"), Place("", name).options())


@pytest.mark.parametrize("ledger", ["offsets", "batch-id"])
def test_a_column_that_is_called_like_one_of_the_sinks_is_refused(case: Case, ledger: str) -> None:
    """Spark would store what the sink has put there, or fail over two columns of one name."""
    columns = 'topic text, partition int, "offset" bigint, __exactly_once_end int'
    with pytest.raises(FrameError, match="'__exactly_once_end'; names with __exactly_once_ are the sink's own"):
        case.fit(columns, "__exactly_once_end int", ledger=ledger)


def test_a_key_that_the_frame_lacks_is_refused(case: Case) -> None:
    with pytest.raises(FrameError, match="lacks 'id'"):
        check_key(["id"], ["name"], case.table("id int PRIMARY KEY, name text"))


@pytest.mark.parametrize("zone", ["America/Chicago", "UTC"])
def test_what_goes_into_json_keeps_all_that_it_holds(case: Case, spark: SparkSession, zone: str) -> None:
    """Microseconds and nulls; NaN and infinity, which JSON lacks, are refused however deep.

    Instants have one form in every time zone: a window that is a key would be another row else.
    """
    at = (
        "named_struct('t', TIMESTAMP'2026-03-08 12:30:00.123456-05', 'n', timestamp_ntz'2026-03-08 02:30:00.1', "
        "'z', null, 'lmt', TIMESTAMP'1883-11-18 16:50:36Z')"
    )
    numbers = "map('a', array(named_struct('x', cast('{}' AS {}))))"
    table, options = case.table("at jsonb, more jsonb"), case.options(ledger="batch-id")
    before = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", zone)

    def sent(number: str, kind: str) -> Any:
        frame = spark.sql(f"SELECT {at} at, {numbers.format(number, kind)} more")
        return fit(frame, table, options)[0].collect()[0]

    try:
        row = sent("1.5", "double")
        assert json.loads(row.at) == {
            "t": "2026-03-08T17:30:00.123456Z",
            "n": "2026-03-08T02:30:00.100000",
            "z": None,
            "lmt": "1883-11-18T16:50:36.000000Z",
        }
        assert json.loads(row.more) == {"a": [{"x": 1.5}]}
        for number, kind in (("NaN", "float"), ("Infinity", "double"), ("-Infinity", "double")):
            assert sent(number, kind).more == f'NaN, or an infinity, in {{"a":[{{"x":"{number}"}}]}}'
        with pytest.raises(FrameError, match="keys of type timestamp"):
            fit(spark.sql(f"SELECT {at} at, map(TIMESTAMP'2026-01-01', 1) more"), table, options)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
