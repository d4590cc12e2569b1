"""What topics really hold: other fields than the table has, keys in JSON, tables that change, options that help."""

from __future__ import annotations

import enum
import json
from collections import Counter
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from confluent_kafka import Message

from exactly_once.errors import ConfigurationError
from exactly_once.writer import MISSING, BadRow, TableError, TableSink, TableWriter, Tombstone
from exactly_once.writer.from_json import JsonDecoder
from exactly_once.writer.statements import Mode
from tests.writer.conftest import Connection, MakeTable, rows_of
from tests.writer.test_from_json import messages


def stored(work: Connection, table: str, *values: Any, decoder: JsonDecoder | None = None, **options: Any) -> list[Any]:
    TableSink(table, decoder=decoder or JsonDecoder(), **options).write(work, messages(*values))
    return rows_of(work, table)


# Fields and columns that do not meet.


def test_the_rest_is_what_no_column_takes_at_any_depth(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id int, city text, more jsonb)")
    decoder = JsonDecoder({"id": "id", "city": "customer.address.city"}, rest="more")
    address = {"city": "Bern", "street": "Gasse"}
    given = [
        {"id": 1, "customer": {"name": "A", "vat": "V", "address": address}, "note": "x"},
        {"id": 2, "customer": {"address": {"city": "Wil"}}},
        {"id": 3, "customer": None, "a": [1.50]},
        {"id": 4, "customer": {}},
    ]
    assert stored(work, table, *given, decoder=decoder) == [
        (1, "Bern", {"customer": {"name": "A", "vat": "V", "address": {"street": "Gasse"}}, "note": "x"}),
        (2, "Wil", {}),
        (3, None, {"customer": None, "a": [1.5]}),
        (4, None, {"customer": {}}),
    ]


@pytest.mark.parametrize(
    ("value", "shows"),
    [
        ({}, "no fields"),
        ({"before": None, "after": {"id": 1}, "op": "c"}, "before, after.*, op|before, after, op"),
        ({"ID": 1, "Message_Id": "x"}, 'rename = { id = "ID", messageid = "Message_Id" }'),
    ],
)
def test_a_message_that_fills_no_column_is_refused(
    value: Any, shows: str, work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(id int, messageid text)")
    with pytest.raises(BadRow, match=r"t\[1\] offset 1: no field of the message has a column") as caught:
        stored(work, table, {"id": 1}, value)
    assert any(part in str(caught.value) for part in shows.split("|"))


def test_fields_without_a_column_and_columns_without_a_field_are_told(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id int, a text, b jsonb, never text, late text)")
    sink = TableSink(table, decoder=JsonDecoder())
    sink.write(work, messages({"id": 1, "a": "x"}, {"id": 2, "z": 1, "y": {"x": 1}}, {"id": 3, "z": None, "b": []}))
    assert sink.unused_fields == Counter(z=2, y=1)
    assert sink.unfilled_columns == {"never", "late"}
    # What was rolled back is not counted twice by the look for the bad row.
    with pytest.raises(BadRow):
        sink.write(work, messages({"id": 4, "z": 1}, {"id": "x", "z": 1}))
    work.rollback()
    sink.write(work, messages({"id": 5, "z": 1, "late": "x"}, {"id": "6", "w": 1}))
    assert sink.unused_fields == Counter(z=3, y=1, w=1)
    assert sink.unfilled_columns == {"never"}


def test_of_deletes_alone_no_column_is_told(work: Connection, make_table: MakeTable) -> None:
    sink = TableSink(make_table("(id int PRIMARY KEY, a text)"), mode="upsert", decoder=JsonDecoder())
    sink.write(work, messages(None, None, key=b'{"id": 1}'))
    assert sink.unfilled_columns == set()
    sink.write(work, messages({"id": 1}, None, key=b'{"id": 1}'))
    assert sink.unfilled_columns == {"a"}


def test_nested_fields_without_a_column_are_told_by_their_paths(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id int, city text)")
    sink = TableSink(table, decoder=JsonDecoder({"id": "id", "city": "c.city"}))
    sink.write(work, messages({"id": 1, "c": {"city": "x", "zip": 1}}, {"id": 2, "c": {"zip": 1, "deep": {"a": 1}}}))
    assert sink.unused_fields == Counter({"c.zip": 2, "c.deep": 1})


def test_a_name_that_postgres_cuts_is_filled_from_the_whole_one(work: Connection, make_table: MakeTable) -> None:
    name = "unstruct_event_com_example_" + "ä" * 30
    table = make_table(f'(id int, "{name}" text)')
    assert stored(work, table, {"id": 1, name: "x"}, {"id": 2, name: "y"}) == [(1, "x"), (2, "y")]
    with pytest.raises(BadRow, match="where Postgres cuts them"):
        stored(work, table, {"id": 3, name: "x"}, {"id": 4, name + "_2": "z"})


def test_a_field_that_has_exactly_the_name_of_a_column_has_the_column(work: Connection, make_table: MakeTable) -> None:
    """A longer name that Postgres would cut to it is another field: it goes to rest, whichever of them comes first."""
    name, longer = "y" * 63, "y" * 64
    sent = [{"id": 1, name: 1, longer: 2}, {"id": 2, longer: 3}, {"id": 3, name: 4}]
    expected = [(1, 1, {longer: 2}), (2, None, {longer: 3}), (3, 4, {})]
    for order in ([0, 1, 2], [0, 2, 1]):
        table = make_table(f"(id int, {name} int, rest jsonb)")
        sink = TableSink(table, decoder=JsonDecoder(rest="rest"))
        for index in order:
            sink.write(work, messages(sent[index]))
        assert rows_of(work, table) == expected
        assert not sink.unfilled_columns
    table = make_table(f"(id int, {name} int)")
    sink = TableSink(table, decoder=JsonDecoder())
    sink.write(work, messages({"id": 1, longer: 3}, {"id": 2, name: 1, longer: 2}, {"id": 3, longer: 3}))
    assert rows_of(work, table) == [(1, 3), (2, 1), (3, None)]
    assert sink.unused_fields == {longer: 2}
    assert not sink.unfilled_columns


def test_a_message_with_two_names_that_postgres_cuts_to_one_spoils_no_other(
    work: Connection, make_table: MakeTable
) -> None:
    name, one, other = "y" * 63, "y" * 64, "y" * 63 + "zz"
    table = make_table(f"(id int, {name} int)")
    sink = TableSink(table, decoder=JsonDecoder())
    with pytest.raises(BadRow, match="where Postgres cuts them"), work.transaction():
        sink.write(work, messages({"id": 1, one: 1, other: 2}))
    sink.write(work, messages({"id": 2, one: 5}, {"id": 3, one: 6}))
    assert rows_of(work, table) == [(2, 5), (3, 6)]


def test_a_name_that_postgres_cuts_is_filled_after_the_table_was_altered_too(
    work: Connection, make_table: MakeTable
) -> None:
    name, longer = "y" * 63, "y" * 64
    table = make_table(f"(id int, {name} int)")
    sink = TableSink(table, decoder=JsonDecoder())
    sink.write(work, messages({"id": 1, longer: 1}))
    work.execute(f"ALTER TABLE {table} ADD COLUMN more int")
    sink.write(work, messages({"id": 2, longer: 2, "more": 5}))
    assert rows_of(work, table) == [(1, 1, None), (2, 2, 5)]
    assert sink.unused_fields == {}
    sink.write(work, messages({"id": 3, longer: 3, name: 4}))
    work.execute(f"ALTER TABLE {table} ADD COLUMN other int")
    sink.write(work, messages({"id": 4, longer: 3, name: 4}, {"id": 5, longer: 3}))
    assert rows_of(work, table, f"id, {name}") == [(1, 1), (2, 2), (3, 4), (4, 4), (5, None)]
    assert sink.unused_fields == {longer: 3}


def test_a_tombstone_names_a_column_with_a_cut_name_as_its_rows_do(work: Connection, make_table: MakeTable) -> None:
    name, longer = "y" * 63, "y" * 64
    table = make_table(f"({name} int PRIMARY KEY, v int)")
    sink = TableSink(table, mode="upsert", decoder=JsonDecoder())
    for column in ("more", "other"):
        sink.write(work, messages({longer: 1, "v": 1}, {longer: 2, "v": 2}))
        sink.write(work, [Message(topic="t", partition=0, offset=9, key=json.dumps({longer: 1}).encode(), value=None)])
        assert rows_of(work, table, name) == [(2,)]
        work.execute(f"ALTER TABLE {table} ADD COLUMN {column} int")


def test_rules_of_a_table_apply_to_what_is_appended(work: Connection, make_table: MakeTable) -> None:
    """COPY would pass them by; one that is made while the sink runs counts from the next batch on."""
    table = make_table("(id int PRIMARY KEY, v text)")
    sink = TableSink(table, decoder=JsonDecoder(), small_batch=3)
    sink.write(work, messages({"id": 0, "v": "secret"}))
    work.execute("CREATE TEMP TABLE log (id int) ON COMMIT DROP")
    work.execute(f"CREATE RULE quiet AS ON INSERT TO {table} WHERE new.v = 'secret' DO INSTEAD NOTHING")
    work.execute(f"CREATE RULE logged AS ON INSERT TO {table} DO ALSO INSERT INTO pg_temp.log VALUES (new.id)")
    sink.write(work, messages({"id": 1, "v": "a"}, {"id": 2, "v": "secret"}))
    sink.write(work, messages(*({"id": n, "v": "b"} for n in range(3, 8))))
    assert rows_of(work, table, "id") == [(n,) for n in (0, 1, 3, 4, 5, 6, 7)]
    assert rows_of(work, "pg_temp.log") == [(n,) for n in range(1, 8)]
    for mode in ("upsert", "insert-ignore"):
        with pytest.raises(TableError, match="has rules for INSERT or UPDATE"):
            TableSink(table, decoder=JsonDecoder(), mode=mode).write(work, messages({"id": 1}))


def test_a_rule_that_does_not_fire_forbids_no_upsert(work: Connection, make_table: MakeTable) -> None:
    """As ON CONFLICT has it: a rule for UPDATE counts even so; one that is enabled counts from the next batch on."""
    table, log = make_table("(id int PRIMARY KEY, v text)"), make_table("(id int)")
    work.execute(f"CREATE RULE one AS ON INSERT TO {table} DO ALSO INSERT INTO {log} VALUES (new.id)")
    sink, appending = (TableSink(table, decoder=JsonDecoder(), mode=mode) for mode in ("upsert", "append"))

    def is_taken(statement: str, take: Any) -> bool:
        work.execute("SAVEPOINT s")
        work.execute(statement)
        try:
            with work.transaction():
                take()
        except (TableError, psycopg.errors.FeatureNotSupported):
            return False
        finally:
            work.execute("ROLLBACK TO s")
        return True

    def by_hand() -> None:
        work.execute(f"INSERT INTO {table} VALUES (1, 'a') ON CONFLICT (id) DO UPDATE SET v = 'b'")

    def by_sink() -> None:
        TableSink(table, decoder=JsonDecoder(), mode="upsert").write(work, messages({"id": 1, "v": "a"}))

    other, replica = (
        f"CREATE RULE two AS ON UPDATE TO {table} DO ALSO NOTHING",
        "SET session_replication_role = replica",
    )
    for statement, expected in (
        (f"ALTER TABLE {table} ENABLE RULE one", False),
        (f"ALTER TABLE {table} ENABLE ALWAYS RULE one", False),
        (f"ALTER TABLE {table} DISABLE RULE one", True),
        (f"ALTER TABLE {table} ENABLE REPLICA RULE one", True),
        (f"ALTER TABLE {table} ENABLE REPLICA RULE one; {replica}", False),
        (replica, True),
        (f"ALTER TABLE {table} DISABLE RULE one; {other}; ALTER TABLE {table} DISABLE RULE two", False),
    ):
        assert [is_taken(statement, by_hand), is_taken(statement, by_sink)] == [expected] * 2, statement
    work.execute(f"ALTER TABLE {table} DISABLE RULE one")
    sink.write(work, messages({"id": 1}))
    appending.write(work, messages({"id": 2}))
    work.execute(f"ALTER TABLE {table} ENABLE RULE one")
    appending.write(work, messages({"id": 3}, {"id": 4}))
    assert rows_of(work, log) == [(3,), (4,)]
    with pytest.raises(TableError, match="has rules for INSERT or UPDATE"):
        sink.write(work, messages({"id": 5}))


def test_names_with_quotes_are_fields_like_others(work: Connection, make_table: MakeTable) -> None:
    table = make_table('(id int, "a""b\\c" text)')
    assert stored(work, table, {"id": 1, 'a"b\\c': "x"}, {"id": 2}) == [(1, "x"), (2, None)]


def test_a_byte_order_mark_is_passed_over(work: Connection, make_table: MakeTable) -> None:
    assert stored(work, make_table("(id int)"), b'\xef\xbb\xbf{"id":1}') == [(1,)]


# Columns with defaults.


def test_a_column_with_a_default_keeps_to_it_where_the_field_is_missing(
    work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(a int, made int DEFAULT 7, id bigserial, n int GENERATED BY DEFAULT AS IDENTITY)")
    given = [{"a": 1}, {"a": 2, "made": None}, {"a": 3, "made": 5, "id": 50, "n": 60}, {"a": 4}]
    # Rows go by the columns that they have, so the second one is the last to be numbered.
    assert stored(work, table, *given) == [(1, 7, 1, 1), (2, None, 3, 3), (3, 5, 50, 60), (4, 7, 2, 2)]


def test_null_for_what_is_missing_is_a_choice_but_not_where_null_is_impossible(
    work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(a int, made int DEFAULT 7, n int GENERATED BY DEFAULT AS IDENTITY)")
    decoder = JsonDecoder(missing="null")
    assert stored(work, table, {"a": 1}, {"a": 2, "n": 9}, decoder=decoder, missing="null") == [
        (1, None, 1),
        (2, None, 9),
    ]


@pytest.mark.parametrize("small_batch", [0, 500], ids=["stage", "arrays"])
def test_an_identity_is_a_key_like_any_other(small_batch: int, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id int GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, v text, made int DEFAULT 7)")
    sink = TableSink(table, decoder=JsonDecoder(), mode="upsert", small_batch=small_batch)
    sink.write(work, messages({"id": 77, "v": "x", "made": 1}, {"id": 78, "v": "y"}))
    sink.write(work, messages({"id": 77, "v": "z"}, {"id": 78, "v": "w", "made": 2}, {"id": 78, "v": "u"}))
    assert rows_of(work, table) == [(77, "z", 1), (78, "u", 2)]


# Keys and deletes.


@pytest.mark.parametrize(
    ("kind", "given", "key"),
    [
        ("text", "k1", b'"k1"'),
        ("text", "k1", b"k1"),
        ("text", '"k', b'"k'),
        ("text", "5", b"5"),
        ("uuid", "00000000-0000-0000-0000-000000000007", b'"00000000-0000-0000-0000-000000000007"'),
        ("int", 5, b"5"),
        ("int", 5, b'"5"'),
        ("int", 5, b' {"id": "5"}'),
    ],
)
def test_a_tombstone_finds_its_row_by_a_key_in_json_or_text(
    kind: str, given: Any, key: bytes, work: Connection, make_table: MakeTable
) -> None:
    table = make_table(f"(id {kind} PRIMARY KEY)")
    sink = TableSink(table, decoder=JsonDecoder(), mode="upsert")
    sink.write(work, messages({"id": given}))
    sink.write(work, messages(None, key=key))
    assert (rows_of(work, table), sink.missed_deletes) == ([], 0)
    sink.write(work, messages(None, key=key))
    assert sink.missed_deletes == 1


def test_a_key_that_is_no_text_is_refused_by_name(work: Connection, make_table: MakeTable) -> None:
    sink = TableSink(make_table("(id text PRIMARY KEY)"), decoder=JsonDecoder(), mode="upsert")
    with pytest.raises(BadRow, match=r"t\[1\] offset 0: column id: .*NUL"):
        sink.write(work, messages(None, key=b"\0\0\0\0\1\x02a"))


def test_a_key_in_json_that_holds_nul_is_refused_by_its_message(work: Connection, make_table: MakeTable) -> None:
    sink = TableSink(make_table("(id text PRIMARY KEY)"), decoder=JsonDecoder(), mode="upsert")
    with pytest.raises(BadRow, match=r"t\[1\] offset 0: .*NUL.*a.x00"):
        sink.write(work, messages(None, key=b'{"id": "a\\u0000"}'))


def test_many_keys_that_only_postgres_compares_take_few_statements(
    work: Connection, make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table("(k double precision PRIMARY KEY, v int)")
    asked: list[Any] = []
    execute = psycopg.Cursor.execute

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(args)
        return execute(self, *args, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", counted)
    TableWriter(table, mode="upsert").write(work, [(float(i % 1000), i) for i in range(2000)])
    assert len(asked) < 20
    assert rows_of(work, table) == [(float(i), 1000 + i) for i in range(1000)]


NEWEST: list[tuple[str, Any, Any]] = [
    ("step", "begun", "ended"),
    ("interval", "9 hours", "1 day"),
    ("numeric", Decimal(1), Decimal("NaN")),
    ("int4range", "[1,2)", "[1,20)"),
    ("timestamptz", "2026-01-01T00:00:00Z", "infinity"),
]


@pytest.mark.parametrize(("kind", "older", "newer"), NEWEST, ids=[kind for kind, _, _ in NEWEST])
def test_the_newest_is_the_same_in_one_batch_and_in_two(kind: str, older: Any, newer: Any, work: Connection) -> None:
    work.execute("CREATE TYPE pg_temp.step AS ENUM ('begun', 'ended', 'closed')")
    check_newest(work, kind, older, newer)


def test_the_newest_is_the_same_under_a_collation_of_icu(icu_conninfo: str) -> None:
    with psycopg.connect(icu_conninfo, prepare_threshold=None) as work:
        check_newest(work, 'text COLLATE "und-x-icu"', "a", "B")


def check_newest(work: Connection, kind: str, older: Any, newer: Any) -> None:
    work.execute(f"CREATE TEMP TABLE newest_of (id int PRIMARY KEY, v int, at {kind.replace('step', 'pg_temp.step')})")
    for changes in ([(1, 1, newer), (1, 2, older)], [(2, 1, older), (2, 2, newer)]):
        writer = TableWriter("newest_of", mode="upsert", newest_by="at")
        writer.write(work, changes)
        together = work.execute("DELETE FROM newest_of RETURNING v, at::text").fetchall()
        for change in changes:
            writer.write(work, [change])
        assert work.execute("DELETE FROM newest_of RETURNING v, at::text").fetchall() == together
        assert together[0][0] == (1 if changes[0][2] is newer else 2)
    work.rollback()


def test_a_delete_between_two_rows_is_done_where_something_hangs_on_it(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id int PRIMARY KEY, v int)")
    child = make_table(f"(parent int REFERENCES {table} ON DELETE CASCADE)")
    writer = TableWriter(table, mode="upsert")
    writer.write(work, [(1, 1)])
    work.execute(f"INSERT INTO {child} VALUES (1)")
    writer.write(work, [(1, 2), Tombstone((1,)), (1, 3)])
    assert (rows_of(work, table), rows_of(work, child)) == ([(1, 3)], [])


# Values of other kinds.


def test_kinds_of_text_are_text_and_not_what_the_driver_makes_of_their_memory(
    work: Connection, make_table: MakeTable
) -> None:
    class Word(enum.StrEnum):
        NO = "false"
        DAY = "1 day"

    table = make_table("(id int PRIMARY KEY, b boolean, i interval)")
    modes: list[Mode] = ["append", "upsert"]
    for mode in modes:
        TableWriter(table, mode=mode).write(work, [(1, Word.NO, Word.DAY)])
        assert rows_of(work, table, "b, i::text") == [(False, "1 day")]
        work.execute(f"DELETE FROM {table}")


def test_numpy_has_numbers_too(work: Connection, make_table: MakeTable) -> None:
    numpy = pytest.importorskip("numpy")
    table = make_table("(n numeric, f float8, i int, b boolean, t text, a int[])")
    row = (
        numpy.float64(0.1),
        numpy.float64(1.5),
        numpy.int64(7),
        numpy.bool_(1),
        numpy.str_("x"),
        numpy.array([1, 2]),
    )
    TableWriter(table).write(work, [row])
    assert rows_of(work, table) == [(Decimal("0.1"), 1.5, 7, True, "x", [1, 2])]


def test_numbers_can_be_dates_times_and_the_bytes_of_decimals(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(d date, t time, ts timestamp, n numeric, m numeric(9,2), doc jsonb)")
    decoder = JsonDecoder(
        epoch={"d": "days", "t": "us", "ts": "ns"}, decimal={"n": 2, "m": 2}, json_text=["doc"], nul="strip"
    )
    first = {"d": 20454, "t": 11045000006, "ts": 1767225600000000501, "n": "12E3", "m": "AQ==", "doc": '{"a":[1.50]}'}
    second = {"d": -1, "n": {"scale": 3, "value": "1234"}, "doc": '"a\\u0000b"'}
    assert stored(work, table, first, second, decoder=decoder) == [
        (date(1969, 12, 31), None, None, Decimal("-2658.824"), None, "ab"),
        (
            date(2026, 1, 1),
            time(3, 4, 5, 6),
            datetime(2026, 1, 1, microsecond=1),  # noqa: DTZ001
            Decimal("-26620.89"),
            Decimal("0.01"),
            {"a": [1.5]},
        ),
    ]
    assert stored(work, make_table("(n numeric)"), {"n": 5.50}, decoder=JsonDecoder(decimal={"n": 2})) == [(5.5,)]
    with pytest.raises(BadRow, match="base64"):
        stored(work, table, {"n": "5.5"}, decoder=decoder)


def test_nul_can_be_taken_out_of_text_and_json(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a text, b jsonb, more jsonb)")
    value = b'{"a":"x\\u0000y","b":{"k\\u0000":"\\\\u0000 \\\\\\u0000"},"z":"\\u0000"}'
    decoder = JsonDecoder(rest="more", nul="strip")
    assert stored(work, table, value, decoder=decoder) == [("xy", {"k": "\\u0000 \\"}, {"z": ""})]
    with pytest.raises(BadRow, match='nul = "strip"'):
        stored(work, table, b'{"a":"x\\u0000y"}')


@pytest.mark.parametrize("value", ["1_700_000_000", "\u0661\u0667"])
def test_a_text_that_postgres_takes_for_no_number_is_no_time(
    value: str, work: Connection, make_table: MakeTable
) -> None:
    with pytest.raises(BadRow, match="column t"):
        stored(work, make_table("(t timestamptz)"), {"t": value}, decoder=JsonDecoder(epoch={"t": "s"}))


ADVICE: list[tuple[str, str, str]] = [
    ("timestamptz", "1767225600000", 'epoch = { v = "ms" }'),
    ("timestamptz", "1686089970", 'epoch = { v = "s" }'),
    ("timestamp", "1e999999999", "epoch = { v = UNIT }"),
    ("time", "1686089970", "epoch = { v = UNIT }"),
    ("date", "19782", 'epoch = { v = "days" }'),
    ("date", "1686089970", "and in a day: ALTER TABLE ... ALTER COLUMN v TYPE timestamptz"),
    ("date", "1686009600", 'epoch = { v = "s" }'),
    ("date", "2024", "epoch = { v = UNIT } takes a number, with s, ms, us, ns, days for UNIT"),
    ("numeric(10,2)", '"tmn9Lg=="', "decimal = { v = 2 } takes base64"),
    ("timestamptz", '"2026-01-02T03:04:05"', 'naive_timestamps="utc"'),
    ("timestamp", '"2026-01-02T03:04:05Z"', 'naive_timestamps="utc"'),
    ("boolean", "1", "lax = true"),
    ("int", '"abc"', "ALTER COLUMN v TYPE text"),
    ("int", "1.5", "ALTER COLUMN v TYPE numeric"),
    ("int", "true", "text or a number is wanted, not true; jsonb takes it"),
    ("text", "false", "ALTER COLUMN v TYPE jsonb"),
    ("text", '{"a":1}', "ALTER COLUMN v TYPE jsonb"),
]


@pytest.mark.parametrize(("kind", "value", "remedy"), ADVICE)
def test_an_error_shows_value_place_and_remedy(
    kind: str, value: str, remedy: str, work: Connection, make_table: MakeTable
) -> None:
    table = make_table(f"(id int, v {kind})")
    decoder = JsonDecoder({"id": "id", "v": "payload.amount"})
    filler = ", ".join(f'"filler{i}": "{"x" * 50}"' for i in range(5))
    bad = f'{{"id": 2, {filler}, "payload": {{"amount": {value}}}}}'.encode()
    with pytest.raises(BadRow, match=r"t\[1\] offset 1: column v: field payload\.amount: ") as caught:
        stored(work, table, {"id": 1, "payload": {"amount": None}}, bad, decoder=decoder)
    assert remedy in str(caught.value)
    shown = value.strip('"').rstrip("Z")
    assert shown in str(caught.value)
    assert "filler" not in str(caught.value)


def test_options_for_columns_of_another_kind_are_refused(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(a int)")
    for options in ({"epoch": {"a": "s"}}, {"decimal": {"a": 2}}, {"json_text": ["a"]}, {"rest": "a"}):
        with pytest.raises(TableError, match=r"\ba\b"):
            stored(work, table, decoder=JsonDecoder(**options))
    with pytest.raises(ConfigurationError, match="nul"):
        JsonDecoder(nul="drop")  # type: ignore[arg-type]


# Tables that change.


@pytest.mark.parametrize("mode", ["append", "upsert", "insert-ignore"])
@pytest.mark.parametrize(
    "change",
    [
        ("numeric(10,2)", "numeric(10,1)", 1.25, BadRow),
        ("double precision", "integer", 2.5, BadRow),
        ("text", "varchar(3)", "abcdef", BadRow),
        ("timestamptz", "date", "2026-01-02T03:04:05Z", BadRow),
        ("integer", "bigint", 3000000000, "3000000000"),
        ("varchar(3)", "text", "abcdef", "abcdef"),
        ("jsonb", "text", "x", "x"),
    ],
)
def test_a_table_that_was_altered_is_seen_before_the_batch_in_every_mode(
    mode: Any, change: tuple[str, str, Any, Any], work: Connection, make_table: MakeTable, db: Connection
) -> None:
    before, after, value, expected = change
    table = make_table(f"(id int PRIMARY KEY, v {before})")
    sink = TableSink(table, decoder=JsonDecoder(), mode=mode, key=["id"] if mode != "append" else None)
    sink.write(work, messages({"id": 1}))
    work.commit()
    db.execute(f"ALTER TABLE {table} ALTER v TYPE {after} USING NULL, ADD COLUMN late text")
    if expected is BadRow:
        with pytest.raises(BadRow):
            sink.write(work, messages({"id": 2, "v": value}))
    else:
        sink.write(work, messages({"id": 2, "v": value, "late": "x"}))
        assert rows_of(work, table, "id, v::text, late")[1] == (2, expected, "x")
    work.rollback()


@pytest.mark.parametrize(
    ("kind", "around"),
    [
        ("dot", "{}"),
        ("dot[]", "[{}]"),
        ("dots", "[{}]"),
        ("dot_of", '{{"name": "a", "dot": {}}}'),
        ("dot_of[]", '[{{"name": "a", "dot": {}}}]'),
    ],
)
@pytest.mark.parametrize(
    ("statement", "then"),
    [
        ("ADD ATTRIBUTE y int", '{"x": 1, "y": 3, "z": 2}'),
        ("DROP ATTRIBUTE x", '{"z": 2}'),
        ("RENAME ATTRIBUTE x TO t", '{"t": 1, "z": 2}'),
        ("ALTER ATTRIBUTE x TYPE text", '{"x": "1", "z": 2}'),
    ],
)
def test_what_was_altered_about_a_type_is_known_in_the_next_batch(
    *, kind: str, around: str, statement: str, then: str, work: Connection, make_table: MakeTable, db: Connection
) -> None:
    db.execute("DROP TYPE IF EXISTS dot, dots, dot_of CASCADE")
    db.execute("CREATE TYPE dot AS (x int, z int); CREATE DOMAIN dots AS dot[]")
    db.execute("CREATE TYPE dot_of AS (name text, dot dot)")
    table = make_table("(id int)")
    db.execute(f"ALTER TABLE {table} ADD v {kind}")
    sink = TableSink(table, decoder=JsonDecoder())
    values = [json.loads(around.format(dot)) for dot in ('{"x": 1, "z": 2}', then)]
    sink.write(work, messages({"id": 1, "v": values[0]}))
    work.commit()
    if "TYPE" in statement:  # Postgres refuses it while a column has such values
        db.execute(f"ALTER TABLE {table} DROP v; ALTER TYPE dot {statement}; ALTER TABLE {table} ADD v {kind}")
    else:
        db.execute(f"ALTER TYPE dot {statement}")
    sink.write(work, messages({"id": 2, "v": values[1]}))
    assert rows_of(work, table, "id, to_jsonb(v)")[1] == (2, values[1])


@pytest.mark.parametrize(
    ("kind", "around"), [("dot_range", "{}"), ("dot_range[]", "[{}]"), ("dot_ranges", "{}"), ("dot_ranges[]", "[{}]")]
)
def test_an_attribute_that_is_added_to_the_bounds_of_a_range_is_known(
    kind: str, around: str, work: Connection, make_table: MakeTable, db: Connection
) -> None:
    db.execute("DROP TYPE IF EXISTS dot, dot_range CASCADE; CREATE TYPE dot AS (x int, z int)")
    db.execute("CREATE TYPE dot_range AS RANGE (subtype = dot, multirange_type_name = dot_ranges)")
    table = make_table("(id int)")
    db.execute(f"ALTER TABLE {table} ADD v {kind}")
    sink = TableSink(table, decoder=JsonDecoder())
    for number, text in enumerate(['["(1,0)","(2,0)")', '["(1,0,5)","(2,0,0)")']):
        value = f"{{{text}}}" if "ranges" in kind else text
        sink.write(work, messages({"id": number, "v": json.loads(around.format(json.dumps(value)))}))
        work.commit()
        db.execute("ALTER TYPE dot ADD ATTRIBUTE y int" if number == 0 else "")
    assert rows_of(work, table, "count(*)") == [(2,)]


def test_attributes_that_exchange_their_names_exchange_their_places(
    work: Connection, make_table: MakeTable, db: Connection
) -> None:
    db.execute("DROP TYPE IF EXISTS dot CASCADE; CREATE TYPE dot AS (x int, z int)")
    table = make_table("(id int, v dot)")
    sink = TableSink(table, decoder=JsonDecoder())
    sink.write(work, messages({"id": 1, "v": {"x": 1, "z": 2}}))
    work.commit()
    for before, after in (("x", "t"), ("z", "x"), ("t", "z")):
        db.execute(f"ALTER TYPE dot RENAME ATTRIBUTE {before} TO {after}")
    sink.write(work, messages({"id": 2, "v": {"x": 1, "z": 2}}))
    assert rows_of(work, table, "id, v::text") == [(1, "(1,2)"), (2, "(2,1)")]


def test_missing_in_a_row_of_the_program_follows_the_same_rule(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id int PRIMARY KEY, v int DEFAULT 7, w int)")
    writer = TableWriter(table, mode="upsert")
    writer.write(work, [(1, 5, 5), (1, MISSING, MISSING), (2, MISSING, 1)])
    assert rows_of(work, table) == [(1, 5, None), (2, 7, 1)]
