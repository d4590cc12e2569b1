"""Every type of Postgres takes its values unchanged, by each of the writer's ways, or refuses them."""

# ruff: noqa: E501, FBT001, PLR0917 - tables of values; fixtures and parameters are positional

from __future__ import annotations

import ipaddress
import math
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg.types.multirange import Multirange
from psycopg.types.range import Range

from exactly_once.ledger.session import last_row
from exactly_once.writer import BadRow, TableError, TableWriter
from tests.writer.conftest import Connection, MakeTable

NOON = datetime(2026, 1, 2, 12, 0, 0, 1, UTC)

# What is given, and what SELECT ...::text shows of it; the same where they are left out.
TYPES: list[tuple[str, list[Any], list[str | None]]] = [
    ("smallint", [-32768, 32767], ["-32768", "32767"]),
    ("integer", [-(2**31), "7"], ["-2147483648", "7"]),
    ("bigint", [-(2**63), 2**63 - 1], ["-9223372036854775808", "9223372036854775807"]),
    ("oid", [2**32 - 1], ["4294967295"]),
    ("real", [1.5, float("nan"), float("-inf")], ["1.5", "NaN", "-Infinity"]),
    ("double precision", [0.1, 5e-324, float("inf")], ["0.1", "5e-324", "Infinity"]),
    ("numeric", [Decimal("1.50"), 10**100, "NaN", Decimal("-Infinity")], ["1.50", str(10**100), "NaN", "-Infinity"]),
    ("numeric(5,2)", [Decimal("999.99"), 1.5, -1], ["999.99", "1.50", "-1.00"]),
    ("money", ["12.34"], ["$12.34"]),
    ("boolean", [True, False, "yes"], ["true", "false", "true"]),
    ("text", ["", "ä\t\n\\N\r\b\v", "\\."], ["", "ä\t\n\\N\r\b\v", "\\."]),
    ("varchar(3)", ["abc", "ä"], ["abc", "ä"]),
    ("char(3)", ["abc", "a"], ["abc", "a"]),
    ("name", ["n"], ["n"]),
    ('"char"', ["x"], ["x"]),
    ("bytea", [b"\x00\xff", b""], ["\\x00ff", "\\x"]),
    ("date", [date.min, date.max, "infinity", "0044-03-15 BC"], ["0001-01-01", "9999-12-31", "infinity", "0044-03-15 BC"]),
    ("time", [time.min, time.max], ["00:00:00", "23:59:59.999999"]),
    ("time(3)", [time(1, microsecond=5000)], ["01:00:00.005"]),
    ("timetz", [time(1, tzinfo=timezone(timedelta(hours=2)))], ["01:00:00+02"]),
    ("timestamp", [datetime.min, "-infinity"], ["0001-01-01 00:00:00", "-infinity"]),  # noqa: DTZ901
    ("timestamptz", [NOON, "infinity", "2026-01-02T13:00:00+01:00"], ["2026-01-02 12:00:00.000001+00", "infinity", "2026-01-02 12:00:00+00"]),
    ("timestamptz(0)", [NOON.replace(microsecond=0)], ["2026-01-02 12:00:00+00"]),
    ("interval", [timedelta(days=-1, microseconds=3), "1 mon -3 days"], ["-1 days +00:00:00.000003", "1 mon -3 days"]),
    ("uuid", [UUID(int=1), str(UUID(int=2))], [str(UUID(int=1)), str(UUID(int=2))]),
    ("json", [{"a": [1, None]}, '{"b":  1.50}'], ['{"a":[1,null]}', '{"b":  1.50}']),
    ("jsonb", [{"a": 'q"\\'}, "[1.50]", b"null", True], ['{"a": "q\\"\\\\"}', "[1.50]", "null", "true"]),
    ("inet", [ipaddress.ip_address("::1"), "10.0.0.1/8"], ["::1/128", "10.0.0.1/8"]),
    ("cidr", [ipaddress.ip_network("10.0.0.0/8"), "::/0"], ["10.0.0.0/8", "::/0"]),
    ("macaddr", ["08:00:2b:01:02:03"], ["08:00:2b:01:02:03"]),
    ("macaddr8", ["08:00:2b:01:02:03:04:05"], ["08:00:2b:01:02:03:04:05"]),
    ("bit(3)", ["101"], ["101"]),
    ("bit varying(5)", ["1"], ["1"]),
    ("tsvector", ["'a' 'b'"], ["'a' 'b'"]),
    ("tsquery", ["'a' & 'b'"], ["'a' & 'b'"]),
    ("point", ["(1,2)"], ["(1,2)"]),
    ("box", ["(1,2),(0,0)"], ["(1,2),(0,0)"]),
    ("pg_lsn", ["16/B374D848"], ["16/B374D848"]),
    ("jsonpath", ["$.a"], ['$."a"']),
    ("regclass", ["pg_class"], ["pg_class"]),
    ("xid8", [5], ["5"]),
    ("int4range", [Range(1, 5), Range(empty=True), "[1,2]", Range(None, 3)], ["[1,5)", "empty", "[1,3)", "(,3)"]),
    ("numrange", [Range(Decimal("1.5"), 2, "[]")], ["[1.5,2]"]),
    ("tstzrange", [Range(NOON, None)], ['["2026-01-02 12:00:00.000001+00",)']),
    ("daterange", [Range("-infinity", date(2026, 1, 1))], ["[-infinity,2026-01-01)"]),
    ("int8multirange", [[Range(1, 2), Range(5, 9)], Multirange()], ["{[1,2),[5,9)}", "{}"]),
    ("nummultirange", [[Range(1, Decimal("2.5"))], [Range(Decimal("0.5"), 7)]], ["{[1,2.5)}", "{[0.5,7)}"]),
    ("integer[]", [[1, None], [], [[1, 2], [3, 4]], "{5}"], ["{1,NULL}", "{}", "{{1,2},{3,4}}", "{5}"]),
    ("text[]", [["a", None, "NULL", 'q"\\', "", "x y"]], ['{a,NULL,"NULL","q\\"\\\\","","x y"}']),
    (
        "box[]",
        [["(1,2),(0,0)", None, "(3,4),(1,1)"], [["(1,2),(0,0)"]], []],
        ["{(1,2),(0,0);NULL;(3,4),(1,1)}", "{{(1,2),(0,0)}}", "{}"],
    ),
    ("numeric(5,2)[]", [[Decimal("1.50")]], ["{1.50}"]),
    ("timestamptz[]", [[NOON, "infinity"], [NOON]], ['{"2026-01-02 12:00:00.000001+00",infinity}', '{"2026-01-02 12:00:00.000001+00"}']),
    ("jsonb[]", [[{"a": 1}, None, '"x"']], ['{"{\\"a\\": 1}",NULL,"\\"x\\""}']),
    ("bytea[]", [[b"\x00"]], ['{"\\\\x00"}']),
    ("uuid[]", [[UUID(int=1)]], [f"{{{UUID(int=1)}}}"]),
    ("money[]", [["1.00"]], ["{$1.00}"]),
    ("int4range[]", [[Range(1, 2), None]], ['{"[1,2)",NULL}']),
    ("mood", ["happy", None], ["happy", None]),
    ("mood[]", [["happy", None]], ["{happy,NULL}"]),
    ("percent", [100, 0], ["100", "0"]),
    ("small_percent", [5], ["5"]),
    ("percent[]", [[1, 2]], ["{1,2}"]),
    ("place", [("a,b", 5), {"name": 'q"\\', "size": None}, "(x,1)"], ['("a,b",5)', '("q""\\\\",)', "(x,1)"]),
    ("place[]", [[("a b", 1)]], ['{"(\\"a b\\",1)"}']),
    ("short", ["ab"], ["ab"]),
    ('"Odd Type"', ["a%s"], ["a%s"]),
    ("moments", [Range(NOON, None), "(,2026-01-02T12:00Z]", Range(empty=True)], ['["2026-01-02 12:00:00.000001+00",)', '(,"2026-01-02 12:00:00+00"]', "empty"]),
    ("moments[]", [["(,2026-01-02T12:00Z]", None]], ['{"(,\\"2026-01-02 12:00:00+00\\"]",NULL}']),
    ("shorts[]", [["{ab}", None], [["{a}"], ["{b,NULL}"]]], ['{{ab},NULL}'.replace("{ab}", '"{ab}"'), '{{"{a}"},{"{b,NULL}"}}']),
    ("shorts", [["ab", None]], ["{ab,NULL}"]),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _own_types(postgres_conninfo: str) -> None:
    with psycopg.connect(postgres_conninfo) as connection:
        connection.execute("SET search_path = public")
        connection.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
        connection.execute("CREATE DOMAIN percent AS int CHECK (value BETWEEN 0 AND 100)")
        connection.execute("CREATE DOMAIN small_percent AS percent CHECK (value < 50)")
        connection.execute("CREATE DOMAIN short AS varchar(2)")
        connection.execute("CREATE TYPE place AS (name text, size int)")
        connection.execute("""CREATE TYPE "Odd Type" AS ENUM ('a%s')""")
        connection.execute("CREATE TYPE moments AS RANGE (subtype = timestamptz); CREATE DOMAIN shorts AS varchar(2)[]")


WAYS: dict[str, dict[str, Any]] = {
    "append": {"mode": "append"},
    "arrays": {"mode": "upsert"},
    "stage": {"mode": "upsert", "small_batch": 0},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "given", "shown"), TYPES, ids=[kind for kind, _, _ in TYPES])
def test_a_type_takes_its_values_unchanged(
    way: str, kind: str, given: list[Any], shown: list[str], work: Connection, make_table: MakeTable
) -> None:
    table = make_table(f"(id int PRIMARY KEY, v {kind})")
    work.execute("SET LOCAL TimeZone = 'UTC'")
    # Each value alone and then all together: a value that goes as text takes its whole batch along.
    batches = [[(i, v)] for i, v in enumerate(given)] + [[(100 + i, v) for i, v in enumerate([*given, None])]]
    writer = TableWriter(table, **WAYS[way])
    for batch in batches:
        assert writer.write(work, batch) == len(batch)
    cast = "v::text" if kind != "char(3)" else "rtrim(v)"
    found = [text for (text,) in work.execute(f"SELECT {cast} FROM {table} ORDER BY id").fetchall()]
    found = [text.replace("$", "") if kind.startswith("money") and text else text for text in found]
    shown = [text.replace("$", "") if kind.startswith("money") and text else text for text in shown]
    assert found == [*shown, *shown, None]


scalars: dict[str, st.SearchStrategy[Any]] = {
    "int2": st.integers(-(2**15), 2**15 - 1),
    "int4": st.integers(-(2**31), 2**31 - 1),
    "int8": st.integers(-(2**63), 2**63 - 1),
    "float4": st.floats(width=32),
    "float8": st.floats(),
    "numeric": st.one_of(st.decimals(-10**30, 10**30, places=20), st.integers(), st.just(Decimal("Infinity"))),
    "bool": st.booleans(),
    "text": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    "bytea": st.binary(),
    "date": st.dates(),
    "time": st.times(),
    "timestamp": st.datetimes(),
    "timestamptz": st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30), timezones=st.just(UTC)),  # noqa: DTZ001
    "interval": st.timedeltas(timedelta(days=-10**6), timedelta(days=10**6)),
    "uuid": st.uuids(),
    "inet": st.ip_addresses(),
    "int8[]": st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))),
    "text[]": st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))),
}  # fmt: skip
documents = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


@settings(
    max_examples=12, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
@pytest.mark.parametrize("is_text", [False, True], ids=["binary", "text"])
@pytest.mark.parametrize("way", WAYS)
def test_generated_values_of_every_type_come_back_as_they_were(
    way: str, is_text: bool, data: st.DataObject, work: Connection
) -> None:
    columns = {f"c{i}": kind for i, kind in enumerate(scalars)}
    row = st.tuples(*(st.none() | strategy for strategy in scalars.values()), st.none() | documents.filter(lambda d: not isinstance(d, (str, type(None)))))  # fmt: skip
    rows = data.draw(st.lists(row, min_size=1, max_size=3))
    work.rollback()
    extra = ", t macaddr" if is_text else ""
    definition = ", ".join(f"{name} {kind}" for name, kind in columns.items())
    work.execute(f"CREATE TEMP TABLE every_type (id int PRIMARY KEY, {definition}, doc jsonb{extra}) ON COMMIT DROP")
    given = [(i, *values, *(["08:00:2b:01:02:03"] if is_text else [])) for i, values in enumerate(rows)]
    TableWriter("every_type", **WAYS[way]).write(work, given)
    # What text shows of a float4 is a shorter number.
    shown = [f"{name}::float8" if kind == "float4" else name for name, kind in columns.items()]
    names = ", ".join(["id", *shown, "doc", *(["t"] if is_text else [])])
    found = work.execute(f"SELECT {names} FROM every_type ORDER BY id").fetchall()
    for wanted, got in zip(given, found, strict=True):
        assert all(map(same, wanted, got)), (wanted, got)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("moments", "[2026-01-02 12:00,)"),
        ("moments", Range(NOON.replace(tzinfo=None), None)),
        ("moments[]", ["[01/02/2026,)"]),
        ("shorts[]", ['{"a  "}', "{b}"]),
        ("shorts[]", [['{"a  "}']]),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_parts_of_parts_are_looked_at(way: str, kind: str, value: Any, work: Connection, make_table: MakeTable) -> None:
    """Postgres would read them by the session's time zone, or cut them."""
    table = make_table(f"(id int PRIMARY KEY, v {kind})")
    with pytest.raises(BadRow, match="column v: "):
        TableWriter(table, **WAYS[way]).write(work, [(0, value)])


@pytest.mark.parametrize("way", WAYS)
def test_a_session_that_reads_null_in_arrays_as_text_is_refused(
    way: str, work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(id int PRIMARY KEY, v text, w char(5)[])")
    writer = TableWriter(table, **WAYS[way])
    writer.write(work, [(1, None, [None])])
    work.execute("SET LOCAL array_nulls = off")
    with pytest.raises(TableError, match="SET array_nulls = on"):
        writer.write(work, [(2, None, [None])])


REFUSED_BY_POSTGRES: list[tuple[str, Any, str]] = [
    ("text", "a\0b", "v"),
    ("mood", "angry", "v"),
    ("percent", 101, ""),
    ("small_percent", 50, ""),
    ("short", "abc", "v"),
    ("jsonb", "{", "v"),
    ("jsonb", '"\\u0000"', "v"),
    ("integer[]", [[1], [2, 3]], "v"),
    ("place", "(1", "v"),
    ("macaddr", "x", "v"),
    ("boolean", "perhaps", "v"),
    ("interval", "soon", "v"),
    ("int4range", Range(5, 1), "v"),
    ("int NOT NULL", None, "v"),
    ("int CHECK (v > 0)", 0, ""),
    ("bit(3)", "11", ""),
    ("date", "infinity BC", ""),
    ("numeric(5,2)", "1.005", "v"),
    ("text", "\ud800", "v"),
]


@pytest.mark.parametrize(
    ("kind", "value", "column"), REFUSED_BY_POSTGRES, ids=[f"{k}-{v!r:.12}" for k, v, _ in REFUSED_BY_POSTGRES]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_value_that_the_column_refuses_is_an_error_that_names_it(
    way: str, kind: str, value: Any, column: str, work: Connection, make_table: MakeTable
) -> None:
    table = make_table(f"(id int PRIMARY KEY, v {kind})")
    with pytest.raises(BadRow) as caught:
        TableWriter(table, **WAYS[way]).write(work, [(0, value)])
    if column and way == "append":
        assert caught.value.column == column
        assert caught.value.row == 0


@pytest.mark.parametrize("way", WAYS)
def test_blanks_in_the_bounds_of_a_range_are_what_postgres_makes_of_them(
    way: str, name: str, work: Connection, make_table: MakeTable
) -> None:
    """A part of a text, and nothing to a number."""
    work.execute(f'CREATE TYPE {name}_words AS RANGE (subtype = text, collation = "C")')
    work.commit()
    table = make_table(f"(id int PRIMARY KEY, words {name}_words, numbers int4range)")
    texts = ["[ 1 , 5 )", "( 1 ,x)", "[a\tb ,]", '[ "a,b" ,"c d" ]', "[ ,b)", '["\\\\ ",)']
    TableWriter(table, **WAYS[way]).write(work, [(i, text, "[ 1 , 5 )") for i, text in enumerate(texts)])
    expected = [work.execute(f"SELECT %s::{name}_words::text", [text]).fetchone() for text in texts]
    assert work.execute(f"SELECT words::text FROM {table} ORDER BY id").fetchall() == expected
    assert work.execute(f"SELECT DISTINCT numbers::text FROM {table}").fetchall() == [("[1,5)",)]
    work.execute(f"DROP TYPE {name}_words CASCADE")
    work.commit()


@pytest.mark.parametrize("style", ["postgres", "sql_standard", "iso_8601", "postgres_verbose"])
def test_a_time_that_is_negative_is_the_same_in_every_style(
    style: str, work: Connection, make_table: MakeTable
) -> None:
    """A sign counts for all that follows in one of them, where a value goes as text."""
    work.execute(f"SET LOCAL intervalstyle = {style}")
    table = make_table("(i interval, more interval[], price money)")
    values = [timedelta(seconds=-1), timedelta(days=-2, microseconds=5), timedelta(days=1, seconds=7)]
    TableWriter(table).write(work, [(value, [value], None) for value in values])
    TableWriter(table, columns=["i"]).write(work, [(value,) for value in values])
    seconds = work.execute(f"SELECT EXTRACT(epoch FROM i)::float8, EXTRACT(epoch FROM more[1])::float8 FROM {table}")
    expected = [value.total_seconds() for value in values]
    assert seconds.fetchall() == [*((e, e) for e in expected), *((e, None) for e in expected)]


@pytest.mark.parametrize("fields", ["day", "hour", "day to hour", "minute to second", "day to second(1)", "(0)"])
@pytest.mark.parametrize("way", WAYS)
def test_what_an_interval_of_fields_keeps_of_a_timedelta_is_what_postgres_keeps(
    way: str, fields: str, work: Connection, make_table: MakeTable
) -> None:
    """Cut as Postgres cuts the same time in hours: Python splits a second before nothing into a day less and the rest."""
    table = make_table(f"(id int PRIMARY KEY, i interval {fields}, more interval {fields}[])")
    values = [timedelta(seconds=-1), timedelta(days=-1, hours=-2, minutes=-3, seconds=-4.5), timedelta(days=1, hours=5)]
    TableWriter(table, **WAYS[way]).write(work, [(i, value, [value]) for i, value in enumerate(values)])
    texts = ["-00:00:01", "-1 days -02:03:04.5", "1 day 05:00:00"]
    kept = [str(last_row(work.execute(f"SELECT '{text}'::interval {fields}::text"))[0]) for text in texts]
    found = work.execute(f"SELECT i::text, more[1]::text FROM {table} ORDER BY id").fetchall()
    assert found == [(text, text) for text in kept]


@pytest.mark.parametrize("style", ["postgres", "sql_standard"])
@pytest.mark.parametrize("way", WAYS)
def test_the_text_of_an_interval_is_the_same_in_every_style(
    way: str, style: str, work: Connection, make_table: MakeTable
) -> None:
    work.execute(f"SET LOCAL intervalstyle = {style}")
    table = make_table("(id int PRIMARY KEY, i interval, more interval[], short interval(0))")
    texts = [
        "-1 days 02:00:00",
        " @-1 2:00",
        "-1 year 2 mons",
        "-1-2 3 4:05:06",
        "-1 day +2:00",
        "-1 day 2:00 ago",
        "-1d2h",
    ]
    texts += ["-1.5 days .5 hours", "-1 hour", "P-1DT2H", "1 day -2:00"]
    rows = [(i, text, [text], text) for i, text in enumerate(texts)]
    TableWriter(table, **WAYS[way]).write(work, rows)
    work.execute("SET LOCAL intervalstyle = postgres")
    expected = [text for (text,) in work.execute("SELECT unnest(%s::interval[])::text", [texts]).fetchall()]
    for what in ("i", "more[1]", "short"):
        found = work.execute(f"SELECT {what}::text FROM {table} ORDER BY id").fetchall()
        assert found == [(text,) for text in expected], what
