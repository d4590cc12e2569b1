"""The writer beside real tables: columns, keys, names, alterations, errors and other writers."""

# ruff: noqa: PLR0917 - fixtures and parameters are positional

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal
from zoneinfo import ZoneInfo

import psycopg
import pytest
from confluent_kafka import Message
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.types.range import Range

from exactly_once.errors import ConfigurationError
from exactly_once.ledger.outcome import Fault, classify, sqlstate_of
from exactly_once.writer import MISSING, BadRow, TableError, TableSink, TableWriter, Tombstone
from exactly_once.writer.arrow import write_arrow
from exactly_once.writer.from_json import JsonDecoder
from tests.support.require import skip_unless
from tests.support.waiting import until
from tests.writer.conftest import Connection, MakeTable, messages, rows_of

BERLIN = ZoneInfo("Europe/Berlin")
WAYS = {"arrays": 500, "stage": 0}
"""How many rows are a small batch: all of them, or none."""
UNCOMPRESSED = "".join(chr(65 + i * i % 57) + str(i) for i in range(1000))
"""Text that compression does not make small enough for an index."""
TOO_LONG = "{" + ",".join(f"[{n**2},{n**2}]" for n in range(2, 3000)) + "}"
"""A key that no index takes."""


@pytest.fixture(params=WAYS)
def small_batch(request: pytest.FixtureRequest) -> int:
    return WAYS[request.param]


# Columns.


def test_generated_and_identity_columns_are_left_to_postgres(work: Connection, make_table: MakeTable) -> None:
    table = make_table(
        "(a int, twice int GENERATED ALWAYS AS (a * 2) STORED, id int GENERATED ALWAYS AS IDENTITY, b text DEFAULT 'x')"
    )
    TableWriter(table).write(work, [(1, None), (2, "y")])
    assert rows_of(work, table) == [(1, 2, 1, None), (2, 4, 2, "y")]


@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
def test_an_identity_column_can_be_filled_when_it_is_named(mode: Any, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, a int)")
    TableWriter(table, mode=mode, columns=["a", "id"]).write(work, [(5, 70)])
    assert rows_of(work, table) == [(70, 5)]


def test_a_key_that_postgres_numbers_says_that_it_can_be_named(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, a int)")
    with pytest.raises(TableError, match=r"Postgres numbers id by itself unless fields, rename or columns name it"):
        TableWriter(table, mode="upsert").write(work, [(5,)])


@pytest.mark.parametrize("definition", ["()", "(a int GENERATED ALWAYS AS (1) STORED)"])
def test_a_table_without_a_column_that_takes_values_is_refused(
    definition: str, work: Connection, make_table: MakeTable
) -> None:
    table = make_table(definition)
    with pytest.raises(TableError, match=f"{table} has no column that takes values"):
        TableSink(table, decoder=JsonDecoder()).write(work, messages(1))


def test_a_generated_column_that_is_named_is_refused(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a int, b int GENERATED ALWAYS AS (a) STORED)")
    with pytest.raises(TableError, match="'b' is generated"):
        TableWriter(table, columns=["a", "b"]).write(work, [(1, 2)])


def test_columns_may_come_in_any_order_and_only_some_of_them(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a int, b text, c int DEFAULT 7)")
    TableWriter(table, columns=["b", "a"]).write(work, [("x", 1)])
    assert rows_of(work, table) == [(1, "x", 7)]


def test_rows_with_gaps_become_null_and_no_value_of_another_row_is_lost(
    work: Connection, make_table: MakeTable
) -> None:
    """A rival takes the columns of the first row for those of all."""
    table = make_table("(a int, b text DEFAULT 'd')")
    TableWriter(table, missing="null").write(work, [(1, MISSING), (2, "keep"), (3, None)])
    assert rows_of(work, table) == [(1, None), (2, "keep"), (3, None)]


@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
def test_gaps_become_defaults_by_choice_and_null_stays_null(
    mode: Any, small_batch: int, work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(a int PRIMARY KEY, b text DEFAULT 'd', c serial)")
    writer = TableWriter(table, mode=mode, missing="default", small_batch=small_batch)
    writer.write(work, [(1, MISSING, 70), (2, "keep", MISSING), (3, None, 71), (4, MISSING, 72)])
    assert rows_of(work, table) == [(1, "d", 70), (2, "keep", 1), (3, None, 71), (4, "d", 72)]


def test_an_upsert_keeps_what_a_row_does_not_have(small_batch: int, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id int PRIMARY KEY, a text, b text)")
    writer = TableWriter(table, mode="upsert", missing="keep", small_batch=small_batch)
    writer.write(work, [(1, "a", "b"), (2, "a", MISSING)])
    writer.write(work, [(1, MISSING, "B"), (2, None, "b"), (1, "A", MISSING), (2, MISSING, "c")])
    assert rows_of(work, table) == [(1, "A", "B"), (2, None, "c")]


@pytest.mark.parametrize("rows", [[(1,)], [(1, 2, 3)], [(1, 2), (1,)]])
def test_a_row_of_another_width_is_refused(
    rows: Sequence[tuple[int, ...]], work: Connection, make_table: MakeTable
) -> None:
    with pytest.raises(BadRow, match="values for 2 columns"):
        TableWriter(make_table("(a int, b int)")).write(work, rows)


def test_no_rows_are_no_work(small_batch: int, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a int PRIMARY KEY)")
    for mode in ("append", "upsert", "insert-ignore"):
        assert TableWriter(table, mode=mode, small_batch=small_batch).write(work, []) == 0
        assert TableWriter(table, mode=mode, small_batch=small_batch).write(work, iter(())) == 0


def test_a_generator_is_read_once(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a int)")
    assert TableWriter(table).write(work, ((i,) for i in range(5))) == 5


@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
def test_the_default_of_a_domain_is_the_columns(
    mode: Any, small_batch: int, work: Connection, make_table: MakeTable, name: str
) -> None:
    """Of a domain that gets another one meanwhile, too."""
    work.execute(f"CREATE DOMAIN {name}_seven AS int DEFAULT 7")
    work.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, a {name}_seven, b int)")
    writer = TableWriter(name, mode=mode, small_batch=small_batch)
    writer.write(work, [(1, MISSING, 1), (2, None, 2), (3, 3, 3)])
    work.execute(f"ALTER DOMAIN {name}_seven DROP DEFAULT")
    writer.write(work, [(4, MISSING, 4)])
    assert rows_of(work, name) == [(1, 7, 1), (2, None, 2), (3, 3, 3), (4, None, 4)]


# Names.


@pytest.fixture
def odd_schema(work: Connection) -> str:
    name = 'odd %s " schema'
    work.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
    return name


@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
def test_odd_names_are_quoted(mode: Any, small_batch: int, odd_schema: str, work: Connection) -> None:
    table = sql.Identifier(odd_schema, "Odd.Table %(x)s")
    columns = ["Key %s", 'a"b', "%", "select"]
    definition = sql.SQL(", ").join(sql.SQL("{} int").format(sql.Identifier(c)) for c in columns)
    work.execute(sql.SQL("CREATE TABLE {} ({}, PRIMARY KEY ({}))").format(table, definition, sql.Identifier("Key %s")))
    for name in (table, table.as_string(None)):
        writer = TableWriter(name, mode=mode, small_batch=small_batch)
        writer.write(work, [(1, 2, 3, 4)])
        if mode == "upsert":
            writer.write(work, [(2, 0, 0, 0), (1, 5, 6, 7), Tombstone((2,))])
        assert work.execute(sql.SQL("SELECT * FROM {}").format(table)).fetchall()
        work.execute(sql.SQL("TRUNCATE {}").format(table))


def test_an_unknown_table_is_told_with_those_that_are_alike(work: Connection) -> None:
    work.execute('CREATE TABLE "Payment Table" (a int)')
    with pytest.raises(TableError, match=r'there is public."Payment Table"'):
        TableWriter('"payment table"').write(work, [(1,)])


@pytest.mark.parametrize(
    "name", ["no_such_table", "no_schema.t", "a.b.c.d", '"', "a b", "", "1259", "'a'", "pg_stat_activity"]
)
def test_what_is_no_table_is_refused_and_stops_the_worker(name: str, work: Connection) -> None:
    with pytest.raises(TableError) as caught:
        TableWriter(name).write(work, [(1,)])
    assert classify(caught.value, connection_lost=False) is Fault.OTHER


def test_a_name_that_needs_quotes_is_shown_with_them(work: Connection) -> None:
    work.execute('CREATE TABLE "a b" (a int)')
    told = 'a table that has just this name is written "a b"'
    with pytest.raises(TableError, match=told), work.transaction():
        TableWriter("a b").write(work, [(1,)])
    assert TableWriter('"a b"').write(work, [(1,)]) == 1


@pytest.mark.parametrize("end", ["y", '"', "é"])
def test_a_name_that_postgres_would_cut_is_refused(end: str, work: Connection) -> None:
    """Two of them would be one table."""
    whole = "y" * 63
    work.execute(sql.SQL("CREATE TABLE {} (a int)").format(sql.Identifier(whole)))
    assert TableWriter(whole).write(work, [(1,)]) == 1
    for name in ([whole + end], ["public", whole + end], [whole + end, "no_table"]):
        with pytest.raises(TableError, match=f"Postgres cuts the name {whole}"):
            TableWriter(sql.Identifier(*name)).write(work, [(2,)])


# Keys.


@pytest.mark.parametrize(
    ("definition", "key"),
    [
        ("(a int, b int)", None),
        ("(a int, b int)", ["a"]),
        ("(a int PRIMARY KEY, b int)", ["b"]),
        ("(a int PRIMARY KEY, b int)", ["a", "b"]),
        ("(a int PRIMARY KEY, b int)", ["nothing"]),
        ("(a int, b int, UNIQUE (a) DEFERRABLE)", ["a"]),
    ],
)
def test_an_upsert_needs_a_key_that_is_unique(
    definition: str, key: list[str] | None, work: Connection, make_table: MakeTable
) -> None:
    with pytest.raises(TableError):
        TableWriter(make_table(definition), mode="upsert", key=key).write(work, [(1, 2)])


@pytest.mark.parametrize("definition", ["(a int, b int UNIQUE)", "(a int PRIMARY KEY DEFERRABLE, b int, UNIQUE (b))"])
def test_only_the_primary_key_is_a_key_that_nobody_has_named(
    definition: str, small_batch: int, work: Connection, make_table: MakeTable
) -> None:
    """An upsert by another unique column would replace the rows of others."""
    table = make_table(definition)
    with pytest.raises(TableError, match=r"no primary key that is checked at once; say key=.*; there is one over b$"):
        TableWriter(table, mode="upsert").write(work, [(1, 1)])
    writer = TableWriter(table, mode="insert-ignore", small_batch=small_batch)
    assert writer.key(work) == ()
    if "DEFERRABLE" not in definition:
        assert writer.write(work, [(1, 1), (2, 1), (3, 2)]) == 2
        assert rows_of(work, table) == [(1, 1), (3, 2)]
    else:
        with pytest.raises(TableError, match=r"say key=COLUMNS.*; there is one over b \(ON CONFLICT does not support"):
            writer.write(work, [(1, 1)])


def test_a_partial_or_expression_index_is_no_key(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a int, b text)")
    work.execute(f"CREATE UNIQUE INDEX ON {table} (a) WHERE b IS NULL")
    work.execute(f"CREATE UNIQUE INDEX ON {table} (lower(b))")
    with pytest.raises(TableError, match="no unique index"):
        TableWriter(table, mode="upsert", key=["a"]).write(work, [(1, "x")])


def test_a_primary_key_without_overlaps_is_no_key_of_on_conflict(work: Connection, make_table: MakeTable) -> None:
    try:
        table = make_table("(a int4range, b int4range, PRIMARY KEY (a, b WITHOUT OVERLAPS))")
    except psycopg.errors.SyntaxError:
        skip_unless("postgres-18", "this server is older than Postgres 18, which brings WITHOUT OVERLAPS")
    with pytest.raises(TableError, match="has no primary key that is checked at once"):
        TableWriter(table, mode="upsert").write(work, [("[1,2)", "[1,5)")])
    ignoring = TableWriter(table, mode="insert-ignore")
    assert ignoring.write(work, [("[1,2)", "[1,5)"), ("[1,2)", "[4,6)"), ("[1,2)", "[6,7)")]) == 2


def test_an_index_with_further_columns_included_is_a_key(
    small_batch: int, work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(a int, b text, c int)")
    work.execute(f"CREATE UNIQUE INDEX ON {table} (b, a) INCLUDE (c)")
    writer = TableWriter(table, mode="upsert", key=["a", "b"], small_batch=small_batch)
    writer.write(work, [(1, "x", 1), (1, "x", 2), (2, "x", 3), Tombstone((2, "x"))])
    assert rows_of(work, table) == [(1, "x", 2)]


def test_columns_to_update_are_those_of_the_table(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id int PRIMARY KEY, name text)")
    with pytest.raises(TableError, match="has no column 'nmae'"):
        TableWriter(table, mode="upsert", update=["nmae"]).write(work, [(1, "a")])
    with pytest.raises(ConfigurationError, match="add names n, which update leaves as it is"):
        TableWriter(table, mode="upsert", update=["name"], add=["n"])


@pytest.mark.parametrize("kind", ["date", "text", "time", "jsonb", "int[]"])
def test_what_has_no_sum_is_not_added_to(kind: str, small_batch: int, work: Connection, make_table: MakeTable) -> None:
    table = make_table(f"(id int PRIMARY KEY, v {kind})")
    writer = TableWriter(table, mode="upsert", add=["v"], small_batch=small_batch)
    with pytest.raises(TableError, match=r"add=\['v'\] cannot be: operator "):
        writer.write(work, [(1, None)])


@pytest.mark.parametrize("kind", ["json", "point", "xml"])
@pytest.mark.parametrize("count", [1, 3])
def test_what_has_no_order_has_no_newest(
    kind: str, count: int, small_batch: int, work: Connection, make_table: MakeTable
) -> None:
    table = make_table(f"(id int PRIMARY KEY, v {kind}, n int)")
    writer = TableWriter(table, mode="upsert", newest_by="v", small_batch=small_batch)
    with pytest.raises(TableError, match=r"newest_by='v' cannot be: .*operator "):
        writer.write(work, [(n // 2, None, n) for n in range(count)])
    work.rollback()
    both = TableWriter(table, mode="upsert", newest_by="v", add=["n"], small_batch=small_batch)
    with pytest.raises(TableError, match=r"newest_by='v' cannot be: .*operator "):
        both.write(work, [(1, None, 1)])


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize(
    "row", [{"id": "1", "name": "a"}, {"id", "name"}, "ab", b"ab"], ids=lambda row: type(row).__name__
)
def test_a_row_is_a_sequence_of_values(row: Any, mode: Any, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id text PRIMARY KEY, name text)")
    with pytest.raises(TableError, match=rf"a row is a sequence of values for id, name, not a {type(row).__name__}"):
        TableWriter(table, mode=mode).write(work, [("1", "a"), row])


class _Made:
    """Rows that are made anew each time, in no collection."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{"id": "1", "name": "a"}, {"id": "2", "name": "b"}])


@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
def test_mappings_are_no_rows_wherever_they_come_from(mode: Any, work: Connection, make_table: MakeTable) -> None:
    """Their keys would be stored."""
    table = make_table("(id text PRIMARY KEY, name text)")
    for rows in (_Made(), iter(_Made()), list(_Made())):
        with pytest.raises(TableError, match="a row is a sequence of values for id, name, not a dict"):
            TableWriter(table, mode=mode).write(work, rows)


@pytest.mark.parametrize("change", [(None, "x"), Tombstone((None,)), (MISSING, "x")])
def test_a_key_without_a_value_is_refused(change: Any, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a int UNIQUE, b text)")
    with pytest.raises(BadRow, match=r"orders\[3\] offset 101: column a: the key has no value"):
        TableWriter(table, mode="upsert", key=["a"]).write(work, [(1, "x"), change], origins=messages(2))


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("char(5)", "a", "a  "),
        ("double precision", 0.0, -0.0),
        ("numeric", "1.0", "1.00"),
        ("numeric", Decimal("NaN"), Decimal("NaN")),
        ("interval", "1 day", "24 hours"),
        ("interval(0)", "1.3 seconds", "1.4 seconds"),
        ("inet", "10.0.0.1", "10.0.0.1/32"),
        ("inet", "::1", "0:0::1"),
        ("date", "infinity", "infinity"),
        ("date[]", ["2026-01-01"], "{20260101}"),
        ("jsonb", '{"a":1,"b":2}', '{"b":2,"a":1}'),
        ("timestamptz", "2026-01-01T00:00:00Z", "2026-01-01T01:00:00+01:00"),
        # No clock shows the first one: an hour is left out.
        ("timestamptz", datetime(2026, 3, 29, 2, 30, tzinfo=BERLIN), datetime(2026, 3, 29, 3, 30, tzinfo=BERLIN)),
        ("bytea", bytearray(b"a"), memoryview(b"a")),
        ("jsonb", '{"a": 1}', '{"a":1}'),
        ("int[]", [1], "{1}"),
        ("boolean", "yes", True),
    ],
)
def test_keys_that_postgres_finds_equal_are_one_key(
    kind: str, first: Any, second: Any, small_batch: int, work: Connection
) -> None:
    check_equal_keys(work, kind, first, second, small_batch)


def test_keys_under_a_collation_that_sees_no_case_are_one_key(small_batch: int, icu_conninfo: str) -> None:
    with psycopg.connect(icu_conninfo, prepare_threshold=None) as work:
        work.execute("CREATE COLLATION no_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
        check_equal_keys(work, "text COLLATE no_case", "ä", "Ä", small_batch)
        work.rollback()


def test_insert_ignore_keeps_the_first_of_keys_that_a_collation_finds_equal(
    small_batch: int, icu_conninfo: str
) -> None:
    """However they are spelled: in the database's own order another one may be the first."""
    with psycopg.connect(icu_conninfo, prepare_threshold=None) as work:
        work.execute('CREATE SCHEMA "Odd %"')
        work.execute(
            """CREATE COLLATION "Odd %"."No Case" (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"""
        )
        work.execute('CREATE TEMP TABLE t (k text COLLATE "Odd %"."No Case" PRIMARY KEY, v int)')
        writer = TableWriter("t", mode="insert-ignore", small_batch=small_batch)
        assert writer.write(work, [("B", 1), ("b", 2), ("a", 3), ("A", 4)]) == 2
        assert work.execute("SELECT k, v FROM t ORDER BY v").fetchall() == [("B", 1), ("a", 3)]
        work.rollback()


def test_an_index_of_another_collation_does_not_make_a_key(work: Connection, make_table: MakeTable) -> None:
    """What is equal for it, may not be for the column."""
    table = make_table("(k text, v int)")
    work.execute(f'CREATE UNIQUE INDEX ON {table} (k COLLATE "C")')
    with pytest.raises(TableError, match="nor one of another collation"):
        TableWriter(table, mode="upsert", key=["k"]).write(work, [("a", 1)])


def check_equal_keys(work: Connection, kind: str, first: Any, second: Any, small_batch: int) -> None:
    work.execute(f"CREATE TEMP TABLE equal_keys (k {kind} PRIMARY KEY, v int)")
    writer = TableWriter("equal_keys", mode="upsert", small_batch=small_batch)
    writer.write(work, [(first, 1), (second, 2)])
    assert work.execute("SELECT v FROM equal_keys").fetchall() == [(2,)]
    writer.write(work, [(first, 3), Tombstone((second,)), (first, 4), (second, 5)])
    assert work.execute("SELECT v FROM equal_keys").fetchall() == [(5,)]
    writer.write(work, [(first, 3), Tombstone((second,))])
    assert work.execute("SELECT v FROM equal_keys").fetchall() == []


def test_insert_ignore_keeps_the_first_row_of_a_key(small_batch: int, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a int PRIMARY KEY, b text)")
    writer = TableWriter(table, mode="insert-ignore", small_batch=small_batch)
    assert writer.write(work, [(1, "x"), (1, "y"), (2, "z")]) == 2
    assert writer.write(work, [(1, "later"), (3, "new")]) == 1
    assert rows_of(work, table) == [(1, "x"), (2, "z"), (3, "new")]


def test_an_internal_error_of_a_types_reader_is_about_the_row(db: Connection, work: Connection, name: str) -> None:
    """As hstore's is before Postgres 16, which is not in the embedded server; here that of a domain."""
    db.execute(f"""
        CREATE FUNCTION {name}_f(v text) RETURNS bool LANGUAGE plpgsql AS $$
            BEGIN IF v = 'b=>' THEN RAISE 'Unexpected end of string' USING ERRCODE = 'XX000'; END IF; RETURN true;
            END $$;
        CREATE DOMAIN {name}_d AS text CHECK ({name}_f(VALUE));
        CREATE TABLE {name} (id int, v {name}_d)""")
    try:
        with pytest.raises(BadRow, match="row 1: column v: Unexpected end of string"):
            TableWriter(name).write(work, [(1, "a=>1"), (2, "b=>"), (3, "c=>1")])
    finally:
        work.rollback()
        db.execute(f"DROP TABLE {name}; DROP DOMAIN {name}_d; DROP FUNCTION {name}_f")


@pytest.mark.parametrize("given", [None, ["id"]])
def test_another_primary_key_is_told_where_no_key_was_given(
    given: Any, db: Connection, work: Connection, make_table: MakeTable, caplog: pytest.LogCaptureFixture
) -> None:
    table = make_table("(id int PRIMARY KEY, v int)")
    db.execute(f"CREATE UNIQUE INDEX ON {table} (id)")
    writer = TableWriter(table, mode="upsert", key=given)
    for statement in ("", f"ALTER TABLE {table} DROP CONSTRAINT {table}_pkey, ADD PRIMARY KEY (id, v)"):
        assert "rows are told apart" not in caplog.text
        if statement:
            db.execute(statement)
        writer.write(work, [(1, 1)])
        work.commit()
    assert ("rows are told apart by id, v now, and no more by id;" in caplog.text) == (given is None)


def test_insert_ignore_needs_no_key(small_batch: int, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a int)")
    assert TableWriter(table, mode="insert-ignore", small_batch=small_batch).write(work, [(1,), (1,)]) == 2


def test_a_row_after_a_tombstone_inherits_nothing(small_batch: int, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id int PRIMARY KEY, a text, other text DEFAULT 'd')")
    work.execute(f"INSERT INTO {table} VALUES (1, 'old', 'old')")
    writer = TableWriter(table, mode="upsert", columns=["id", "a"], small_batch=small_batch)
    writer.write(work, [Tombstone((1,)), (1, "new")])
    assert rows_of(work, table) == [(1, "new", "d")]


def test_a_change_touches_only_the_columns_that_were_named(
    small_batch: int, work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(id int PRIMARY KEY, a int, made int)")
    writer = TableWriter(table, mode="upsert", update=["a"], small_batch=small_batch)
    writer.write(work, [(1, 1, 10), (1, 2, 20), (2, 1, 30)])
    writer.write(work, [(2, 5, 50)])
    assert rows_of(work, table) == [(1, 2, 10), (2, 5, 30)]


def test_a_row_that_is_older_is_ignored(small_batch: int, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id int PRIMARY KEY, version int, a text)")
    writer = TableWriter(table, mode="upsert", newest_by="version", small_batch=small_batch)
    writer.write(work, [(1, 5, "five"), (1, 4, "four"), (2, None, "none"), (2, 1, "one"), (3, None, "none")])
    writer.write(work, [(1, 4, "four again"), (1, 5, "five again"), (2, 0, "zero"), (3, 0, "zero")])
    assert rows_of(work, table) == [(1, 5, "five again"), (2, 1, "one"), (3, 0, "zero")]


def test_the_sum_of_a_number_and_nothing_is_the_number(
    small_batch: int, work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(id int PRIMARY KEY, n int)")
    writer = TableWriter(table, mode="upsert", add=["n"], small_batch=small_batch)
    writer.write(work, [(1, None), (2, 5), (3, None)])
    writer.write(work, [(1, 3), (2, None), (3, None)])
    assert rows_of(work, table) == [(1, 3), (2, 5), (3, None)]


def test_a_table_of_keys_only_can_be_upserted(small_batch: int, work: Connection, make_table: MakeTable) -> None:
    """A rival ends in a syntax error."""
    table = make_table("(a int, b int, PRIMARY KEY (a, b))")
    writer = TableWriter(table, mode="upsert", small_batch=small_batch)
    writer.write(work, [(1, 1), (1, 2), (1, 1)])
    writer.write(work, [(1, 1), Tombstone((1, 2))])
    assert rows_of(work, table) == [(1, 1)]


@pytest.mark.parametrize(
    "options",
    [{"mode": "replace"}, {"mode": "append", "update": ["a"]}, {"newest_by": "a"}, {"missing": "keep"}, {"missing": 1}],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        TableWriter("t", **options)


# Kinds of tables.


@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
def test_a_partitioned_table_takes_rows_of_all_partitions(
    mode: Any, small_batch: int, work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(id int, a text, PRIMARY KEY (id)) PARTITION BY RANGE (id)")
    work.execute(f"CREATE TABLE {table}_low PARTITION OF {table} FOR VALUES FROM (0) TO (10)")
    work.execute(f"CREATE TABLE {table}_high (a text, id int NOT NULL)")
    work.execute(f"ALTER TABLE {table} ATTACH PARTITION {table}_high FOR VALUES FROM (10) TO (20)")
    writer = TableWriter(table, mode=mode, small_batch=small_batch)
    writer.write(work, [(1, "x"), (11, "y")])
    if mode == "upsert":
        writer.write(work, [Tombstone((11,)), (1, "z"), (12, "new")])
        assert rows_of(work, table) == [(1, "z"), (12, "new")]
    with pytest.raises(BadRow, match="no partition"):
        writer.write(work, [(50, "x")])


def test_triggers_and_other_rules_of_the_table_hold(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id int PRIMARY KEY, a text)")
    work.execute(
        f"CREATE FUNCTION {table}_loud() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.id < 0 THEN RAISE EXCEPTION 'negative'; END IF; NEW.a = upper(NEW.a); RETURN NEW; END $$"
    )
    work.execute(f"CREATE TRIGGER loud BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION {table}_loud()")
    TableWriter(table).write(work, [(1, "x")])
    assert rows_of(work, table) == [(1, "X")]
    with pytest.raises(BadRow, match=r"orders\[3\] offset 101: negative") as caught:
        TableWriter(table).write(work, [(2, "x"), (-1, "x")], origins=messages(2))
    assert classify(caught.value, connection_lost=False) is Fault.HANDLER


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize(
    ("kinds", "row", "told"),
    [
        ("a {0}_mood, b text, c {0}_mood", ("glad", "glad", "sad"), 'column a: invalid input value for enum .*"glad"'),
        ("a {0}_mood, b text, c {0}_mood", ("sad", "x", "x"), 'column c: invalid input value for enum .*"x"'),
        ("a text, b {0}_small, c int", ("12", 12, 12), r"column b: value for domain .*_check\"(: 12)?$"),
        ("a text, b text, c {0}_short", ("long", "a", "long"), "column c: value for domain .*_check\"(: 'long')?$"),
        ("a inet, b inet, c text", ("10.0.0.1", "10.0.0.1/99", "10.0.0.1/99"), "column b: .*10.0.0.1/99"),
        ("a text, b pg_lsn, c text", ("x", "x", "y"), 'column b: .*"x"'),
    ],
)
def test_what_postgres_refuses_names_column_and_value_also_where_it_names_neither(
    kinds: str, row: tuple[Any, ...], told: str, mode: Literal["append", "upsert"], work: Connection, name: str
) -> None:
    """Beside COPY it does not say which parameter it was."""
    work.execute(f"CREATE TYPE {name}_mood AS ENUM ('sad')")
    work.execute(f"CREATE DOMAIN {name}_small AS int CHECK (VALUE < 10)")
    work.execute(f"CREATE DOMAIN {name}_short AS text CHECK (length(VALUE) < 3)")
    work.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, {kinds.format(name)})")
    with pytest.raises(BadRow, match=rf"^orders\[3\] offset 100: {told}"):
        TableWriter(name, mode=mode).write(work, [(1, *row)], origins=messages(1))


def test_a_table_with_policies_is_written_without_copy(work: Connection, make_table: MakeTable, name: str) -> None:
    table = make_table("(id int PRIMARY KEY, a text)")
    work.execute(f"CREATE ROLE {name}")
    work.execute(f"GRANT ALL ON {table} TO {name}")
    work.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    work.execute(f"CREATE POLICY p ON {table} USING (id < 10)")
    work.execute(f"SET LOCAL ROLE {name}")
    for small_batch in (0, 10):
        TableWriter(table, small_batch=small_batch).write(work, [(1 + small_batch // 5, "x")])
    assert rows_of(work, table) == [(1, "x"), (3, "x")]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_row_that_a_policy_refuses_is_no_sign_of_an_altered_table(
    mode: Any, small_batch: int, work: Connection, make_table: MakeTable, name: str
) -> None:
    table = make_table("(id int PRIMARY KEY, a text)")
    work.execute(f"CREATE ROLE {name}; GRANT ALL ON {table} TO {name}")
    work.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON {table} USING (id < 10)")
    work.execute(f"SET LOCAL ROLE {name}")
    with pytest.raises(BadRow, match="row-level security policy") as caught:
        TableWriter(table, mode=mode, small_batch=small_batch).write(work, [(1, "x"), (11, "x")])
    assert classify(caught.value, connection_lost=False) is Fault.HANDLER
    assert sqlstate_of(caught.value) == "42501"


@pytest.mark.parametrize("mode", ["append", "insert-ignore", "upsert"])
@pytest.mark.parametrize("granted", [[], ["USAGE"], ["USAGE", "INSERT (id, a), SELECT"], ["USAGE", "UPDATE"]])
def test_what_a_role_needs_to_write_is_told(
    mode: Any, granted: list[str], small_batch: int, work: Connection, name: str
) -> None:
    """Whether it is the schema, the lock or the statement that is refused; and what is told is enough."""
    work.execute(f"CREATE ROLE {name}; CREATE SCHEMA {name}; CREATE TABLE {name}.t (id int PRIMARY KEY, a text)")
    for right, target in zip(granted, (f"SCHEMA {name}", f"{name}.t"), strict=False):
        work.execute(f"GRANT {right} ON {target} TO {name}")
    writer = TableWriter(f"{name}.t", mode=mode, small_batch=small_batch)
    rows = [(1, "x"), (2, "y"), *([Tombstone((3,))] if mode == "upsert" else [])]
    work.execute(f"SAVEPOINT s; SET LOCAL ROLE {name}")
    with pytest.raises(TableError, match=r"^permission denied for (?:schema|table) ") as caught:
        writer.write(work, rows)
    work.execute("ROLLBACK TO s")
    needed = re.search(rf"in mode {mode} a role needs ([A-Z, ]+) on the table, and USAGE on its", str(caught.value))
    assert needed
    work.execute(f"GRANT USAGE ON SCHEMA {name} TO {name}; GRANT {needed[1]} ON {name}.t TO {name}")
    work.execute(f"SET LOCAL ROLE {name}")
    assert writer.write(work, rows) == 2


def test_of_what_a_default_uses_postgres_says_what_is_not_granted(
    work: Connection, make_table: MakeTable, name: str
) -> None:
    table = make_table("(id int PRIMARY KEY, number serial)")
    work.execute(f"CREATE ROLE {name}; GRANT ALL ON {table} TO {name}; SET LOCAL ROLE {name}")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=f"for sequence {table}_number_seq"):
        TableWriter(table, columns=["id"]).write(work, [(1,)])


def test_a_role_that_may_make_no_temporary_table_is_told(work: Connection, make_table: MakeTable, name: str) -> None:
    table = make_table("(id int PRIMARY KEY, a text)")
    work.execute(f"CREATE ROLE {name}; GRANT ALL ON {table} TO {name}")
    (database,) = work.execute("SELECT current_database()").fetchone() or ("",)
    work.execute(f'REVOKE TEMPORARY ON DATABASE "{database}" FROM PUBLIC')
    work.execute(f"SET LOCAL ROLE {name}")
    writer = TableWriter(table, mode="upsert", small_batch=10)
    with pytest.raises(TableError, match="GRANT TEMPORARY ON DATABASE to the role"), work.transaction():
        writer.write(work, [(i, "x") for i in range(11)])
    writer.write(work, [(1, "x")])
    assert rows_of(work, table) == [(1, "x")]


def test_a_view_is_refused(work: Connection) -> None:
    work.execute("CREATE TEMP VIEW v AS SELECT 1 AS a")
    with pytest.raises(TableError, match="not a table"):
        TableWriter("v").write(work, [(1,)])


# The transaction.


def test_nothing_is_committed_and_nothing_stays_behind(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a int PRIMARY KEY)")
    for mode in ("append", "upsert", "insert-ignore"):
        writer = TableWriter(table, mode=mode, small_batch=0)
        writer.write(work, [(1,)])
        writer.write(work, [(2,)])
        work.rollback()
    assert rows_of(work, table) == []
    assert work.execute("SELECT count(*) FROM pg_class WHERE relpersistence = 't'").fetchone() == (0,)


def test_a_connection_that_commits_each_statement_is_refused(db: Connection, make_table: MakeTable) -> None:
    with pytest.raises(ConfigurationError, match="transaction"):
        TableWriter(make_table("(a int)")).write(db, [(1,)])


def test_a_connection_with_another_encoding_is_refused(postgres_conninfo: str, make_table: MakeTable) -> None:
    table = make_table("(a text)")
    connection = psycopg.connect(postgres_conninfo, client_encoding="LATIN1")
    with connection, pytest.raises(ConfigurationError, match="UTF8"):
        TableWriter(table).write(connection, [("ä",)])


def test_a_bad_row_found_before_sending_leaves_the_transaction_usable(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a int)")
    writer = TableWriter(table)
    writer.write(work, [(1,)])
    with pytest.raises(BadRow, match=r"orders\[3\] offset 101: column a: 2147483648 is out of range"):
        writer.write(work, [(2,), (2**31,)], origins=messages(2))
    writer.write(work, [(3,)])
    assert rows_of(work, table) == [(1,), (3,)]


def test_a_bad_row_behind_rows_that_were_sent_is_named_and_nothing_stays(
    work: Connection, make_table: MakeTable
) -> None:
    """Behind two parts of a COPY: rows are encoded while others are being stored."""
    table = make_table("(a text)")
    good = [Message(topic="orders", partition=3, offset=i, value=b'{"a": "%s"}' % (b"x" * 1000)) for i in range(300)]
    bad = Message(topic="orders", partition=3, offset=300, value=b'{"a": true}')
    sink = TableSink(table, decoder=JsonDecoder())
    with pytest.raises(BadRow, match=r"orders\[3\] offset 300: column a: "):
        sink.write(work, [*good, bad])
    assert work.info.transaction_status is TransactionStatus.INERROR
    work.rollback()
    assert sink.write(work, good) == 300
    assert work.execute(f"SELECT count(*) FROM {table}").fetchone() == (300,)


# Errors of Postgres.


@pytest.mark.parametrize(
    ("definition", "bad", "column", "match"),
    [
        ("(id int, v text NOT NULL)", None, "v", "not-null"),
        ("(id int, v text UNIQUE)", "x0", None, r"already exists"),
        ("(id int, v text CHECK (v <> 'bad'))", "bad", None, "check"),
        ("(id int, v text)", "a\0", "v", "0x00"),
        ("(id int, v text UNIQUE)", UNCOMPRESSED, None, "index row size"),
    ],
)
def test_an_error_of_copy_names_the_message(
    definition: str, bad: Any, column: str | None, match: str, work: Connection, make_table: MakeTable
) -> None:
    table = make_table(definition)
    rows = [(i, f"x{i}") for i in range(3000)]
    rows[1234] = (1234, bad)
    with pytest.raises(BadRow, match=match) as caught:
        TableWriter(table).write(work, rows, origins=messages(3000))
    assert (caught.value.topic, caught.value.partition, caught.value.offset) == ("orders", 3, 100 + 1234)
    assert caught.value.column == column
    assert classify(caught.value, connection_lost=False) is Fault.HANDLER


@pytest.mark.parametrize("kind", ["json", "jsonb", "text", "varchar(9)", "jsonb[]", "text[]"])
@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
def test_bytes_that_are_no_text_are_bad_whatever_the_mode(
    mode: Any, kind: str, small_batch: int, work: Connection, make_table: MakeTable
) -> None:
    table = make_table(f"(id int PRIMARY KEY, v {kind})")
    good, bad = ([b"1"], [b'"\xff"']) if kind.endswith("[]") else (b"1", b'"\xff"')
    with pytest.raises(BadRow, match=r"orders\[3\] offset 101: column v: .*utf-8"):
        TableWriter(table, mode=mode, small_batch=small_batch).write(work, [(1, good), (2, bad)], origins=messages(2))


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        *((kind, value) for kind in ("json", "jsonb") for value in (b'"\0"', '"\0"')),
        *(("jsonb", value) for value in (b'{"a": "\\u0000"}', '"\\\\\\u0000"', {"a": ["\0"]})),
        *((kind, value) for kind in ("text", "varchar(9)", "name", '"char"') for value in (b"\0", "\0")),
        ("text[]", ["x", "a\0"]),
        ("text[]", '{"a\0"}'),
        ("jsonb[]", ['"x"', b'"\0"']),
        ("{0}_pair", ("a", "b\0")),
        ("{0}_pair[]", [("a", "b\0")]),
        ("{0}_words", "[a\0,b)"),
        ("{0}_words", Range("a", "b\0")),
        ("bit(3)", "10\0"),
        ("date", "2026-01-02\0"),
        ("interval", "1 day\0"),
        ("numeric", "1\0"),
        ("inet", "10.0.0.1\0"),
    ],
)
@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
def test_a_nul_is_bad_whatever_the_mode(
    mode: Any, kind: str, bad: Any, small_batch: int, name: str, work: Connection, make_table: MakeTable
) -> None:
    """The driver itself refuses it within a parameter, and names nothing."""
    work.execute(f"CREATE TYPE {name}_pair AS (a text, b text)")
    work.execute(f'CREATE TYPE {name}_words AS RANGE (subtype = text, collation = "C")')
    work.execute(f"CREATE TABLE {name}_nul (id int PRIMARY KEY, v {kind.format(name)})")
    writer = TableWriter(f"{name}_nul", mode=mode, small_batch=small_batch)
    with pytest.raises(BadRow, match=r"orders\[3\] offset 101: column v: "):
        writer.write(work, [(1, None), (2, bad)], origins=messages(2))


@pytest.mark.parametrize("language", ["de_DE.UTF-8", "C"])
def test_the_row_is_found_in_messages_of_any_language(language: str, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(v text)")
    try:
        work.execute(f"SET LOCAL lc_messages = '{language}'")
    except psycopg.Error:
        skip_unless("locales", f"this machine has no locale {language}: localedef -i de_DE -f UTF-8 de_DE.UTF-8")
    with pytest.raises(BadRow) as caught:
        TableWriter(table).write(work, [("a",), ("\0",)])
    assert (caught.value.row, caught.value.column) == (1, "v")


@pytest.mark.parametrize(
    ("definition", "good", "bad", "match"),
    [
        ("(id int, v text)", "x", "x" * 10_000, "row is too big"),
        ("(id int, v int4multirange PRIMARY KEY)", None, TOO_LONG, "index row requires"),
    ],
)
def test_a_row_that_no_page_holds_is_not_the_one_that_copy_read_last(
    definition: str, good: str | None, bad: str, match: str, work: Connection, make_table: MakeTable
) -> None:
    """What Postgres says of an index alone is as the other."""
    table = make_table(definition)
    work.execute(f"ALTER TABLE {table} ALTER v SET STORAGE {'PLAIN' if good else 'EXTENDED'}")
    many = [(n, bad if n == 1 else good or f"{{[{n},{n}]}}") for n in range(2000)]
    for rows in (many[:3], many):
        with pytest.raises(BadRow, match=match) as caught, work.transaction():
            TableWriter(table).write(work, rows, origins=messages(len(rows)))
        assert (caught.value.row, caught.value.offset) == (None, None)
    with pytest.raises(BadRow, match=match) as caught:
        TableWriter(table).write(work, many[1:2], origins=messages(1))
    assert caught.value.row == 0


def test_an_error_of_a_merge_is_the_messages_fault_without_naming_it(
    small_batch: int, work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(id int PRIMARY KEY, v int CHECK (v > 0))")
    with pytest.raises(BadRow, match="check constraint") as caught:
        TableWriter(table, mode="upsert", small_batch=small_batch).write(work, [(1, 1), (2, 0)], origins=messages(2))
    assert caught.value.offset is None
    assert classify(caught.value, connection_lost=False) is Fault.HANDLER


# Alterations.


@pytest.mark.parametrize(
    ("alter", "stored"),
    [
        ("ALTER COLUMN b TYPE float8 USING 0", "7"),
        ("ALTER COLUMN b TYPE timestamp USING NULL", None),
        ("ALTER COLUMN b TYPE int4", "7"),
        ("ALTER COLUMN b TYPE text", None),
        ("ALTER COLUMN c TYPE numeric(6,1)", "7"),
        ("RENAME COLUMN b TO bb", None),
        ("DROP COLUMN b", None),
    ],
)
def test_bytes_of_one_type_are_never_taken_for_another(
    alter: str, stored: str | None, db: Connection, work: Connection, make_table: MakeTable
) -> None:
    """A bigint, a double and a timestamp have the same length: binary COPY would store nonsense.

    What is stored is the value under the new type; None where that is refused.
    """
    table = make_table("(a int, b bigint, c numeric(6,2))")
    writer = TableWriter(table)
    writer.write(work, [(1, 5, 1)])
    work.commit()
    db.execute(f"ALTER TABLE {table} {alter}")
    if stored is None:
        with pytest.raises((TableError, BadRow), match=r"\bb\b"):
            writer.write(work, [(2, 7, "1.5")])
    else:
        writer.write(work, [(2, 7, "1.5")])
        assert work.execute(f"SELECT b::text, c FROM {table} WHERE a = 2").fetchone() == (stored, Decimal("1.5"))


@pytest.mark.parametrize("alter", ["ALTER COLUMN b TYPE float8 USING b", "ALTER COLUMN b TYPE text", "DROP COLUMN b"])
def test_an_upsert_notices_alterations_too(
    alter: str, small_batch: int, db: Connection, work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(a int PRIMARY KEY, b bigint)")
    writer = TableWriter(table, mode="upsert", small_batch=small_batch)
    writer.write(work, [(1, 5)])
    work.commit()
    db.execute(f"ALTER TABLE {table} {alter}")
    if alter.endswith("USING b"):
        writer.write(work, [(1, 2**40)])
        assert work.execute(f"SELECT b FROM {table}").fetchone() == (2**40,)
    else:
        with pytest.raises((TableError, BadRow), match=r"\bb\b"):
            writer.write(work, [(1, 2**40)])


LOGS_DELETES = """
    CREATE TABLE {0}_log (id int);
    CREATE FUNCTION {0}_log() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO {0}_log VALUES (OLD.id); RETURN OLD; END $$;
    CREATE TRIGGER log AFTER DELETE ON {1} FOR EACH ROW EXECUTE FUNCTION {0}_log()"""
REFERS = "CREATE TABLE {0}_log (id int REFERENCES {0} ON DELETE SET NULL, was int); INSERT INTO {0}_log VALUES (1, 1)"


@pytest.mark.parametrize(
    ("partitions", "ddl", "found"),
    [
        ("", LOGS_DELETES.replace("{1}", "{0}"), [(1,)]),
        ("PARTITION BY HASH (id)", LOGS_DELETES.replace("{1}", "{0}"), [(1,)]),
        ("PARTITION BY HASH (id)", LOGS_DELETES.replace("{1}", "{0}_0"), [(1,)]),
        ("", REFERS, [(None, 1)]),
        ("PARTITION BY HASH (id)", REFERS, [(None, 1)]),
        ("PARTITION BY HASH (id)", REFERS.replace("REFERENCES {0}", "REFERENCES {0}_0"), [(None, 1)]),
    ],
    ids=["trigger", "trigger above partitions", "trigger of a partition", "key", "key to partitions", "key to one"],
)
def test_what_is_made_to_notice_deletes_notices_those_of_the_next_batch(
    partitions: str, ddl: str, found: Any, db: Connection, work: Connection, make_table: MakeTable
) -> None:
    """A delete behind which the row comes again is no delete else."""
    table = make_table(f"(id int PRIMARY KEY, a text) {partitions}")
    if partitions:
        db.execute(f"CREATE TABLE {table}_0 PARTITION OF {table} FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
    writer = TableWriter(table, mode="upsert")
    writer.write(work, [(1, "a")])
    work.commit()
    db.execute(ddl.format(table))
    writer.write(work, [Tombstone((1,)), (1, "b")])
    work.commit()
    assert rows_of(work, f"{table}_log") == found
    assert rows_of(work, table) == [(1, "b")]
    work.commit()
    db.execute(f"DROP TABLE {table}_log CASCADE; DROP FUNCTION IF EXISTS {table}_log CASCADE")


def test_a_delete_takes_the_row_of_a_table_that_inherits(
    small_batch: int, db: Connection, work: Connection, make_table: MakeTable
) -> None:
    """Also behind which the row comes again, and of a table that is made meanwhile."""
    table = make_table("(id int PRIMARY KEY, a text)")
    writer = TableWriter(table, mode="upsert", small_batch=small_batch)
    writer.write(work, [])
    work.commit()
    db.execute(f"CREATE TABLE {table}_old () INHERITS ({table}); INSERT INTO {table}_old VALUES (1, 'old')")
    writer.write(work, [Tombstone((1,)), (1, "b")])
    assert rows_of(work, table) == [(1, "b")]


@pytest.mark.parametrize("is_partition", [False, True])
def test_a_sink_refuses_a_table_that_a_crash_would_empty(
    *, is_partition: bool, db: Connection, work: Connection, make_table: MakeTable
) -> None:
    """Rows of a unit would be gone then, and its messages would not come again."""
    table = make_table("(id int)" + " PARTITION BY LIST (id)" * is_partition)
    sink = TableSink(table, decoder=JsonDecoder())
    sink.write(work, [])
    work.commit()
    of_partition = f"CREATE UNLOGGED TABLE {table}_1 PARTITION OF {table} FOR VALUES IN (1)"
    db.execute(of_partition if is_partition else f"ALTER TABLE {table} SET UNLOGGED")
    with pytest.raises(TableError, match=r"is unlogged: a crash of the server would empty it.*SET LOGGED"):
        sink.write(work, [])


@pytest.mark.parametrize("is_partition", [False, True])
def test_a_sink_warns_of_a_foreign_table(
    *, is_partition: bool, db: Connection, work: Connection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    db.execute(f"CREATE FOREIGN DATA WRAPPER {name}; CREATE SERVER {name} FOREIGN DATA WRAPPER {name}")
    try:
        sink = TableSink(name, decoder=JsonDecoder())
        if is_partition:
            db.execute(f"CREATE TABLE {name} (id int) PARTITION BY LIST (id)")
            db.execute(f"CREATE TABLE {name}_2 PARTITION OF {name} FOR VALUES IN (2)")
            sink.write(work, [])
            work.commit()
            assert "is a foreign table" not in caplog.text
            db.execute(f"CREATE FOREIGN TABLE {name}_1 PARTITION OF {name} FOR VALUES IN (1) SERVER {name}")
        else:
            db.execute(f"CREATE FOREIGN TABLE {name} (id int) SERVER {name}")
        # A wrapper without a handler: nothing can be written there, nor, for a whole table, asked.
        refused = psycopg.errors.ObjectNotInPrerequisiteState
        with contextlib.nullcontext() if is_partition else pytest.raises(refused):
            sink.write(work, [])
        # Not in the text: loggers of pyspark may have given pytest's handler their JSON, in which quotes are escaped.
        warned = f'"{name}" or a partition of it is a foreign table: after a crash at COMMIT rows can'
        assert [message for message in caplog.messages if warned in message]
    finally:
        work.rollback()
        db.execute(f"DROP FOREIGN DATA WRAPPER {name} CASCADE; DROP TABLE IF EXISTS {name}")


@pytest.mark.parametrize(
    ("ddl", "fact", "before", "after"),
    [
        ("ALTER TABLE {0} ADD PRIMARY KEY (b)", "keys", [("a",), ("c",)], [("b",), ("a",), ("c",)]),
        ("ALTER TABLE {0} ADD PRIMARY KEY USING INDEX {0}_c", "keys", [("a",), ("c",)], [("c",), ("a",)]),
        ("CREATE UNIQUE INDEX ON {0} (b)", "keys", [("a",), ("c",)], [("a",), ("c",), ("b",)]),
        ("ALTER TABLE {0} DROP CONSTRAINT {0}_a_key", "keys", [("a",), ("c",)], [("c",)]),
        ("CREATE RULE r AS ON INSERT TO {0} DO ALSO NOTHING", "has_rules", False, True),
        ("CREATE SEQUENCE {0}_n; ALTER TABLE {0} ALTER n SET DEFAULT nextval('{0}_n')", "numbered", [], ["n"]),
    ],
)
def test_what_was_altered_about_a_table_is_known_in_the_next_batch(
    ddl: str, fact: str, before: Any, after: Any, db: Connection, work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(a int UNIQUE, b int NOT NULL, c int NOT NULL, n int DEFAULT 1)")
    db.execute(f"CREATE UNIQUE INDEX {table}_c ON {table} (c)")
    writer = TableWriter(table)

    def known() -> Any:
        found = writer.table(work)
        work.commit()
        return [c.name for c in found.columns if c.is_numbered] if fact == "numbered" else getattr(found, fact)

    assert known() == before
    db.execute(ddl.format(table))
    assert known() == after
    db.execute(f"DROP SEQUENCE IF EXISTS {table}_n CASCADE")


def test_policies_that_come_to_hold_are_known_in_the_next_batch(
    db: Connection, work: Connection, make_table: MakeTable, name: str
) -> None:
    table = make_table("(id int)")
    db.execute(f"CREATE ROLE {name}; GRANT ALL ON {table} TO {name}")
    writer = TableWriter(table)
    for id_ in (1, 2):
        work.execute(f"SET LOCAL ROLE {name}")
        writer.write(work, [(id_,)])
        work.commit()
        db.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY; DROP POLICY IF EXISTS p ON {table}")
        db.execute(f"CREATE POLICY p ON {table} USING (id < 10)")
    assert rows_of(work, table) == [(1,), (2,)]
    work.rollback()
    db.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def test_columns_that_moved_or_were_added_do_not_matter(
    db: Connection, work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(a int, gone int, b text)")
    writer = TableWriter(table, columns=["a", "b"])
    writer.write(work, [(1, "x")])
    work.commit()
    db.execute(f"ALTER TABLE {table} DROP COLUMN gone, ADD COLUMN c int DEFAULT 7")
    writer.write(work, [(2, "y")])
    assert rows_of(work, table) == [(1, "x", 7), (2, "y", 7)]


def test_a_table_that_was_made_anew_is_read_anew(db: Connection, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a int, b bigint)")
    writer = TableWriter(table)
    writer.write(work, [(1, 1)])
    work.commit()
    db.execute(f"DROP TABLE {table}; CREATE TABLE {table} (b float8, a int)")
    writer.write(work, [(1, 1)])
    assert rows_of(work, table) == [(1.0, 1)]


def test_a_table_that_is_gone_stops_the_worker(db: Connection, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a int)")
    writer = TableWriter(table)
    writer.write(work, [(1,)])
    work.commit()
    db.execute(f"DROP TABLE {table}")
    faults = []
    for _ in range(2):
        with pytest.raises(psycopg.Error) as caught:
            writer.write(work, [(1,)])
        faults.append(classify(caught.value, connection_lost=False))
        work.rollback()
    assert faults == [Fault.CONFLICT, Fault.OTHER]


# Other writers.


@contextlib.contextmanager
def upserting(
    changes: Sequence[Any], table: str, conninfo: str, work: Connection, db: Connection, **options: Any
) -> Iterator[TableWriter]:
    """Write from a thread, which waits for a lock of ``work`` when the block begins, and gets it behind the block."""
    writer = TableWriter(table, mode="upsert", **options)

    def write() -> None:
        with psycopg.connect(conninfo, application_name=table) as connection:
            writer.write(connection, changes)

    thread = threading.Thread(target=write)
    thread.start()
    waiting = f"SELECT 1 FROM pg_stat_activity WHERE application_name = '{table}' AND wait_event_type = 'Lock'"
    try:
        until(lambda: db.execute(waiting).fetchone(), 20, "the writer to wait for a row")
        yield writer
    finally:
        work.commit()
        thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("changes", [[(9, 1), (1, 1)], [Tombstone((9,)), Tombstone((1,))]], ids=["rows", "tombstones"])
def test_rows_are_locked_in_the_order_of_the_key(
    changes: Any, small_batch: int, postgres_conninfo: str, work: Connection, make_table: MakeTable, db: Connection
) -> None:
    """So two workers that bring the same keys in different orders never deadlock: who waits holds nothing behind."""
    table = make_table("(id int PRIMARY KEY, v int)")
    db.execute(f"INSERT INTO {table} VALUES (9, 0), (1, 0)")
    work.execute(f"SELECT 1 FROM {table} WHERE id = 1 FOR UPDATE")
    with upserting(changes, table, postgres_conninfo, work, db, small_batch=small_batch):
        assert db.execute(f"SELECT 1 FROM {table} WHERE id = 9 FOR UPDATE NOWAIT").fetchone() == (1,)


@pytest.mark.parametrize("rounds", [20])
def test_workers_that_write_the_same_keys_do_not_deadlock(
    rounds: int, small_batch: int, postgres_conninfo: str, make_table: MakeTable
) -> None:
    table = make_table("(id int PRIMARY KEY, v int)")
    failures: list[Exception] = []

    def worker(step: int) -> None:
        writer = TableWriter(table, mode="upsert", small_batch=small_batch)
        with psycopg.connect(postgres_conninfo) as connection:
            try:
                for n in range(rounds):
                    writer.write(connection, [(i, n) for i in list(range(60))[::step]])
                    connection.commit()
                    writer.write(connection, [Tombstone((i,)) for i in list(range(60))[::step]])
                    connection.commit()
            except psycopg.Error as error:
                failures.append(error)

    threads = [threading.Thread(target=worker, args=(step,)) for step in (1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_a_row_that_another_writer_is_inserting_is_waited_for_and_updated(
    small_batch: int, postgres_conninfo: str, work: Connection, make_table: MakeTable, db: Connection
) -> None:
    table = make_table("(id int PRIMARY KEY, v text)")
    work.execute(f"INSERT INTO {table} VALUES (1, 'other')")
    with upserting([(1, "ours")], table, postgres_conninfo, work, db, small_batch=small_batch):
        pass
    assert rows_of(work, table) == [(1, "ours")]


@pytest.mark.parametrize("shape", ["", "PARTITION BY HASH (id)"])
def test_a_row_that_another_writer_is_updating_is_waited_for_and_deleted(
    shape: str, postgres_conninfo: str, work: Connection, make_table: MakeTable, db: Connection
) -> None:
    table = make_table(f"(id int PRIMARY KEY, v text) {shape}")
    if shape:
        db.execute(f"CREATE TABLE {table}_0 PARTITION OF {table} FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
    db.execute(f"INSERT INTO {table} VALUES (1, 'here'), (2, 'here')")
    work.execute(f"UPDATE {table} SET v = 'other' WHERE id = 1")
    deletes = [Tombstone((key,)) for key in (1, 2, 3)]
    with upserting(deletes, table, postgres_conninfo, work, db) as writer:
        pass
    assert writer.missed_deletes == 1
    assert rows_of(work, table) == []


@pytest.mark.parametrize(
    "keeping_out",
    [
        "CREATE TRIGGER evens BEFORE INSERT ON {0} FOR EACH ROW WHEN (NEW.id % 2 = 1) EXECUTE FUNCTION {1}()",
        "CREATE RULE evens AS ON INSERT TO {0} WHERE NEW.id % 2 = 1 DO INSTEAD NOTHING",
    ],
    ids=["trigger", "rule"],
)
@pytest.mark.parametrize("form", ["rows", "messages", "arrow"])
def test_rows_that_the_table_keeps_out_are_told_once(
    *,
    db: Connection,
    work: Connection,
    make_table: MakeTable,
    caplog: pytest.LogCaptureFixture,
    keeping_out: str,
    form: str,
) -> None:
    table = make_table("(id bigint)")
    db.execute(f"CREATE FUNCTION {table}_no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    writer, sink = TableWriter(table), TableSink(table, decoder=JsonDecoder())

    def write() -> int:
        if form == "rows":
            return writer.write(work, [(number,) for number in range(10)])
        if form == "messages":
            return sink.write(work, [Message(topic="t", value=f'{{"id": {n}}}'.encode()) for n in range(10)])
        return write_arrow(writer, work, pytest.importorskip("pyarrow").table({"id": range(10)}))

    write()
    assert not caplog.records
    work.commit()
    db.execute(keeping_out.format(table, f"{table}_no"))
    for _ in range(2):
        write()
    (said,) = [each.getMessage() for each in caplog.records if getattr(each, "action", "") == "rows_kept_out"]
    assert f'"{table}": Postgres counts 5 of 10 rows as stored' in said
    stored = work.execute(f"SELECT count(*) FROM {table}").fetchone()
    assert stored == (20,), "the trigger has not kept rows out"


@pytest.mark.parametrize("small_batch", [0, 100])
@pytest.mark.parametrize("event", ["INSERT", "UPDATE"])
def test_rows_of_an_upsert_that_a_trigger_keeps_out_are_told(
    event: str,
    small_batch: int,
    db: Connection,
    work: Connection,
    make_table: MakeTable,
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = make_table("(id int PRIMARY KEY, v int)")
    db.execute(f"CREATE FUNCTION {table}_no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    when = f"BEFORE {event} ON {table} FOR EACH ROW WHEN (NEW.id % 2 = 1)"
    db.execute(f"CREATE TRIGGER odd {when} EXECUTE FUNCTION {table}_no()")
    if event == "UPDATE":
        db.execute(f"INSERT INTO {table} SELECT g, 0 FROM generate_series(0, 9) g")
    # Where Postgres leaves out what is older, or is to change nothing, it counts fewer by itself.
    unknown: list[dict[str, Any]] = [{"newest_by": "v"}, {"update": []}]
    for options in unknown:
        TableWriter(table, mode="upsert", small_batch=small_batch, **options).write(work, [(n, 1) for n in range(10)])
    assert not caplog.records
    writer = TableWriter(table, mode="upsert", small_batch=small_batch)
    for v in (2, 3):
        assert writer.write(work, [(n, v) for n in (*range(10), 0)]) == 6
    (said,) = [each.getMessage() for each in caplog.records if getattr(each, "action", "") == "rows_kept_out"]
    assert f'"{table}": Postgres counts 6 of 11 rows as stored' in said
