"""Formats: lines of CSV, MessagePack, CloudEvents and Canal's events end as the rows that they say, or are refused."""

from __future__ import annotations

import base64
import json
import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import psycopg
import pytest
from confluent_kafka import Message

from exactly_once.cli.sink_flows import Flow
from exactly_once.errors import ConfigurationError
from exactly_once.writer import BadRow, Column, Table, TableSink
from exactly_once.writer.formats import FormatDecoder, format_of
from exactly_once.writer.from_json import JsonDecoder
from tests.writer.test_shaping import message, rows, write

Database = psycopg.Connection[Any]


def refused(db: Database, table: str, flow: dict[str, Any], one: Message, said: str) -> None:
    with pytest.raises(BadRow, match=rf"t\[0\] offset 7: .*{said}"):
        write(db, table, flow, one)
    assert rows(db, table) == []


CSV_TYPES = "(id int PRIMARY KEY, name text, price numeric, rate float8, is_on boolean, at timestamptz, more jsonb)"


def test_lines_of_csv_are_read_as_postgres_reads_them(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} {CSV_TYPES}; CREATE TABLE {name}_copy (LIKE {name})")
    lines = [
        '1,plain,1.50,0.1,t,2026-01-02T03:04:05Z,"{""a"": [1, null]}"',
        '2,"a ""quoted"", line\nof two",-3,1e10,f,2026-01-02 03:04:05.5+01:00,"""text"""',
        "3,,,,,,",
        '4,"",,,true,,""""""',
        "5, blank ,0,NaN,false,,17",
    ]
    sent = [message(f"{line}{end}".encode()) for line, end in zip(lines, ("", "\n", "\r\n", "", "\n"), strict=True)]
    write(db, name, {"format": "csv"}, *sent)
    with db.cursor().copy(f"COPY {name}_copy FROM STDIN (FORMAT csv)") as copying:
        copying.write("\n".join(lines))
    assert rows(db, name, "t::text") == rows(db, f"{name}_copy", "t::text")
    assert len(rows(db, name)) == 5


def test_a_message_may_hold_several_lines_of_fields_with_names(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, zip text, at int8)")
    flow = {
        "format": "csv",
        "csv_columns": ("zip", "junk", "number"),
        "csv_delimiter": ";",
        "fields": {"id": "number", "zip": "zip"},
        "metadata": {"at": "offset"},
        "mode": "upsert",
    }
    write(db, name, flow, message("\ufeff01234;x;1\n,,;x;2\n".encode()), message(b"8;;2"), message(None, key=b"1"))
    assert rows(db, name) == [(2, "8", 7)]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"1", "1 fields, not 2: id, name"),
        (b"1,a,b", "3 fields, not 2"),
        (b'1,a"b', "a quote in the middle of field 2"),
        (b'1,"a"b', "a quote in the middle of field 2"),
        (b'1,"a', "a quote in the middle of field 2"),
        (b"1,a\r2,b", "a carriage return without a line feed in the middle of field 2"),
        (b"x,a", "column id"),
        (b"\n", "no line of CSV"),
        (b"\xff,a", "utf-8"),
    ],
)
def test_a_line_that_is_none_is_refused(value: bytes, said: str, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, name text)")
    refused(db, name, {"format": "csv"}, message(value), said)


def test_what_is_no_json_in_a_line_is_refused_with_its_column(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, doc jsonb)")
    refused(db, name, {"format": "csv"}, message(b'1,""'), "column doc: ")


@pytest.mark.parametrize("number", ["1e400", "1" * 5000, "1" * 400 + ".5"])
def test_a_number_in_a_document_may_be_of_any_size(number: str, db: Database, name: str) -> None:
    """Beyond a double, too; Postgres keeps all digits."""
    db.execute(f"CREATE TABLE {name} (id text, data jsonb)")
    document = b'{"a": %b}' % number.encode()
    flow = {"format": "csv", "csv_columns": ("id", "data"), "csv_delimiter": ";"}
    write(db, name, flow, message(b'1;"' + document.replace(b'"', b'""') + b'"'))
    headers = [("ce_specversion", b"1.0"), ("ce_id", b"2"), ("ce_source", b"/"), ("ce_type", b"x")]
    write(db, name, {"format": "cloudevents"}, message(document, headers=headers))
    fields = [{"field": "id", "type": "string"}, {"field": "data", "type": "string", "name": "io.debezium.data.Json"}]
    wrapped = {"schema": {"type": "struct", "fields": fields}, "payload": {"id": "3", "data": document.decode()}}
    write(db, name, {"format": "connect"}, message(json.dumps(wrapped).encode()))
    # A value that was left out has all others looked at.
    left_out = b'{"payload": {"id": "4", "data": %b, "x": "__debezium_unavailable_value"}}' % document
    write(db, name, {"format": "connect", "drop": ("x",)}, message(left_out))
    same = f"data->'a' = to_jsonb('{number}'::numeric)"
    assert rows(db, name, f"id, {same}") == [("1", True), ("2", True), ("3", True), ("4", True)]


def test_lines_have_the_fields_that_the_table_had_when_the_sink_began() -> None:
    columns = [Column(name=n, type_name="text", base_name="text", type_oid=25) for n in "abc"]
    columns.append(Column(name="more", type_name="jsonb", base_name="jsonb", type_oid=3802))
    decoder = Flow(topics=("t",), table="t", format="csv", rest="more").decoder()
    for some in ([*columns[:2], columns[3]], columns):
        decoder.prepare(Table(schema="public", name="t", columns=some), mode="append", key=())
        (found,) = decoder.decode([message(b"A,B")])
        assert found[:2] == ("A", "B")


def test_a_delimiter_is_one_character() -> None:
    for wrong in ("", ";;", '"', "\n"):
        with pytest.raises(ConfigurationError, match="csv_delimiter"):
            format_of("csv", delimiter=wrong)


def test_maps_of_messagepack_become_rows_and_lose_nothing(db: Database, name: str) -> None:
    db.execute(f"""CREATE TABLE {name} (id numeric PRIMARY KEY, name text, raw bytea, at timestamptz, low float8,
        high float8, nan float8, list int[], deep jsonb)""")
    value = {"id": 2**64 - 1, "name": "ä", "raw": b"\0\xff", "at": datetime(2026, 1, 2, 3, 4, 5, 6, UTC)}
    value |= {"low": float("-inf"), "high": float("inf"), "nan": float("nan"), "list": [1, None]}
    value |= {"deep": {"raw": b"\1", "nan": float("nan"), "big": 2**60, "in": [{"a": None}]}}
    sent = [message(msgspec.msgpack.encode(value)), message(msgspec.msgpack.encode({"id": 2}))]
    write(db, name, {"format": "msgpack", "mode": "upsert"}, *sent, message(None, key=b"2"))
    ((*found, nan, numbers, deep),) = rows(db, name)
    assert found == [*list(value.values())[:4], float("-inf"), float("inf")]
    assert str(nan) == "nan"
    assert numbers == [1, None]
    assert deep == {"raw": "AQ==", "nan": "NaN", "big": 2**60, "in": [{"a": None}]}


def test_bytes_of_messagepack_in_a_column_of_text_are_text(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (name text, names varchar(3)[], raws bytea[])")
    sent = {"name": "ä".encode(), "names": [b"abc", None, "x"], "raws": [b"\0"]}
    refused(db, name, {"format": "msgpack"}, message(msgspec.msgpack.encode({"name": b"\xff"})), "column name: .*utf-8")
    write(db, name, {"format": "msgpack"}, message(msgspec.msgpack.encode(sent)))
    assert rows(db, name) == [("ä", ["abc", None, "x"], [b"\0"])]
    assert format_of("msgpack").types(message(msgspec.msgpack.encode(sent))) == {("name",): "bytea"}


EXTENSION = msgspec.msgpack.Ext(5, b"\0\xff")


def test_extensions_of_messagepack_are_json_and_hold_up_nothing_where_no_column_takes_them(
    db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id int, doc jsonb, list jsonb)")
    value = {"id": 1, "doc": EXTENSION, "list": [EXTENSION], "other": EXTENSION}
    sink = write(db, name, {"format": "msgpack"}, message(msgspec.msgpack.encode(value)))
    shown = {"extension": 5, "data": "AP8="}
    assert rows(db, name) == [(1, shown, [shown])]
    assert sink.unused_fields == {"other": 1}


def test_timestamps_of_messagepack_keep_their_nanoseconds(db: Database, name: str) -> None:
    """A column rounds them as Postgres does with the text of ISO 8601."""
    db.execute(f"CREATE TABLE {name} (id int, at timestamptz, told text, rest jsonb)")
    last = 999_999_999
    for number, (seconds, nanoseconds) in enumerate([(1, 123_456_789), (1, 500), (-1, last), (2**33, 1000)]):
        wide = msgspec.msgpack.Ext(-1, struct.pack(">Iq", nanoseconds, seconds))
        narrow = msgspec.msgpack.Ext(-1, (nanoseconds << 34 | seconds).to_bytes(8, "big")) if seconds > 0 else wide
        value = {"id": number, "at": wide, "told": narrow, "a": {"b": [wide, None, 1.5], "c": [{}]}}
        write(db, name, {"format": "msgpack", "rest": "rest"}, message(msgspec.msgpack.encode(value)))
    for number, text in enumerate(
        ["1970-01-01T00:00:01.123456789Z", "1970-01-01T00:00:01.000000500Z", f"1969-12-31T23:59:59.{last}Z"]
    ):
        found = rows(db, name, f"id, at = '{text}', told, rest")[number]
        assert found == (number, True, text, {"a": {"b": [text, None, 1.5], "c": [{}]}})
    assert rows(db, name, "id, told")[3] == (3, "2242-03-16T12:56:32.000001Z")


@pytest.mark.parametrize("value", ["test", "bob", ["bob"]])
def test_text_of_messagepack_is_not_read_as_base64(value: Any, db: Database, name: str) -> None:
    """MessagePack has bytes of its own, so text in a column of bytes is a mistake."""
    db.execute(f"CREATE TABLE {name} (id int, raw bytea{'[]' if isinstance(value, list) else ''})")
    refused(db, name, {"format": "msgpack"}, message(msgspec.msgpack.encode({"id": 1, "raw": value})), "column raw")


def test_bytes_of_messagepack_are_numbers_where_decimal_says_so(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, price numeric, note text)")
    flow = {"format": "msgpack", "decimal": {"price": 2}, "rename": {"price": "cost"}}
    sent = [{"id": 1, "cost": b"\x04\xd2", "note": b"x"}, {"id": 2, "cost": b"1234"}]
    write(db, name, flow, *(message(msgspec.msgpack.encode(each)) for each in sent))
    assert rows(db, name) == [(1, Decimal("12.34"), "x"), (2, Decimal(int.from_bytes(b"1234")).scaleb(-2), None)]


def test_bytes_in_maps_of_messagepack_are_base64(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (a_b text)")
    for flow in ({"fields": {"a_b": "a.b"}}, {"flatten": True}):
        write(db, name, {"format": "msgpack", **flow}, message(msgspec.msgpack.encode({"a": {"b": b"x"}})))
    assert rows(db, name) == [("eA==",)] * 2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (msgspec.msgpack.encode([1]), "a map of MessagePack is wanted"),
        (msgspec.msgpack.encode({1: 2}), "a field's name is no text: 1"),
        (msgspec.msgpack.encode({"id": {b"x": 2}}), "a field's name is no text"),
        (msgspec.msgpack.encode({"id": EXTENSION}), r'column id: .*"extension":5.*; jsonb takes it'),
        (msgspec.msgpack.encode({"raw": EXTENSION}), r'column raw: .*"extension":5.*; jsonb takes it'),
        (msgspec.msgpack.encode({"id": msgspec.msgpack.Ext(-1, b"x")}), "Invalid MessagePack timestamp"),
        (msgspec.msgpack.encode({"other": 1}), "no field of the message has a column"),
        (b"\x81", "truncated"),
        (b"", "truncated"),
        (b"{}", "trailing|a map"),
    ],
)
def test_what_is_no_row_of_messagepack_is_refused(value: bytes, said: str, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, raw bytea)")
    refused(db, name, {"format": "msgpack"}, message(value), said)


EVENT = {"specversion": "1.0", "id": "a1", "source": "/shop", "type": "paid", "time": "2026-01-02T03:04:05Z"}


def test_both_modes_of_cloudevents_are_one_row(db: Database, name: str) -> None:
    columns = "id text PRIMARY KEY, source text, type text, time timestamptz, tenant text, amount numeric, data jsonb"
    db.execute(f"CREATE TABLE {name} ({columns}, data_base64 bytea)")
    whole = {c: c for c in ("id", "source", "type", "time", "tenant", "data", "data_base64")}
    data = {"amount": 1.50, "deep": [1]}
    structured = json.dumps(EVENT | {"tenant": "x", "data": data}).encode()
    kind = "application/cloudevents+json; charset=UTF-8"
    headers: list[tuple[str, Any]] = [(f"ce_{k}", v.encode()) for k, v in (EVENT | {"id": "b2", "tenant": "x"}).items()]
    json_headers = [*headers, ("content-type", b" Application/JSON")]
    other = [("ce_id", b"c3") if k == "ce_id" else (k, v) for k, v in headers]
    plain = [(k, v.replace(b"b2", b"f6")) for k, v in headers]
    flow = {"format": "cloudevents", "fields": whole}
    write(
        db,
        name,
        flow,
        message(structured, headers=[("content-type", kind.encode())]),
        message(json.dumps(data).encode(), headers=json_headers),
        message(b"\0\1", headers=[*other, ("Content-Type", b"application/octet-stream")]),
        message(structured.replace(b"a1", b"d4")),  # a producer that sends no headers
        message(None, headers=[(k, v.replace(b"b2", b"e5")) for k, v in headers]),
        message("plain ä".encode("latin-1"), headers=[*plain, ("content-type", b"Text/Plain; charset=ISO-8859-1")]),
    )
    found = rows(db, name, "id, source, type, time, tenant, data, data_base64")
    same = ("/shop", "paid", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "x")
    assert found == [
        ("a1", *same, data, None),
        ("b2", *same, data, None),
        ("c3", *same, None, b"\0\1"),
        ("d4", *same, data, None),
        ("e5", *same, None, None),
        ("f6", *same, "plain ä", None),
    ]
    path = {"format": "cloudevents", "fields": {"id": "id", "amount": "data.amount"}, "mode": "upsert"}
    write(db, name, path, message(json.dumps({"amount": 9}).encode(), headers=json_headers), message(None, key=b"a1"))
    assert rows(db, name, "id, amount")[0] == ("b2", 9)


@pytest.mark.parametrize(
    ("value", "headers", "said"),
    [
        (b'{"id": 1}', None, "neither a header ce_specversion nor a field specversion"),
        (b"[]", [("content-type", b"application/cloudevents-batch+json")], "are not read"),
        (b"x", [("content-type", b"application/cloudevents+avro")], "are not read"),
        (b"no json", [("ce_specversion", b"1.0"), ("ce_id", b"1")], "malformed|invalid"),
        (b"\xff", [("ce_specversion", b"1.0"), ("content-type", b"text/plain")], "utf-8"),
        (b"x", [("ce_specversion", b"1.0"), ("content-type", b"text/plain; charset=x-nope")], "unknown charset"),
    ],
)
def test_what_is_no_cloudevent_is_refused(value: bytes, headers: Any, said: str, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id text, data jsonb)")
    refused(db, name, {"format": "cloudevents"}, message(value, headers=headers), said)


MYSQL = {"id": "int(11)", "name": "varchar(9)", "price": "decimal(9,2)", "is_on": "tinyint(1)", "at": "datetime(3)"}
MYSQL |= {"doc": "json", "raw": "blob"}


def canal(kind: str, *pairs: tuple[Any, Any], **more: Any) -> Message:
    data, old = [row for row, _ in pairs], [before for _, before in pairs]
    event = {"data": data or None, "database": "shop", "es": 1, "id": 1, "isDdl": False, "mysqlType": MYSQL}
    event |= {"old": old if any(old) else None, "pkNames": ["id"], "sql": "", "table": "customer", "ts": 2}
    return message(json.dumps(event | {"type": kind} | more).encode())


def source_row(number: int, **more: Any) -> dict[str, Any]:
    row = {"id": str(number), "name": "ä", "price": "1.50", "is_on": "1", "at": "2026-01-02 03:04:05.123"}
    return row | {"doc": '{"a": [1]}', "raw": b"\0\xff'".decode("latin-1")} | more


def test_events_of_canal_end_as_the_rows_of_the_source(db: Database, name: str, caplog: Any) -> None:
    db.execute(f"""CREATE TABLE {name} (id int PRIMARY KEY, name text, price numeric, is_on boolean, at timestamp,
        doc jsonb, raw bytea)""")
    sent = [
        canal("CREATE", isDdl=True, sql="CREATE TABLE customer"),
        canal("INSERT", (source_row(1), None), (source_row(2), None), (source_row(3, name=None), None)),
        canal("UPDATE", (source_row(2, name="b", is_on="0", doc=None, raw=None), {"name": "ä"})),
        canal("UPDATE", (source_row(30, name=None), {"id": "3"}), (source_row(1, price="2"), {"price": "1.50"})),
        canal("DELETE", (source_row(1), None)),
        canal("ALTER", isDdl=True, sql="ALTER TABLE customer ADD x int"),
    ]
    at = datetime.fromisoformat("2026-01-02T03:04:05.123")
    expected = [(2, "b", at, None, None, False), (30, None, at, {"a": [1]}, b"\0\xff'", True)]
    write(db, name, {"format": "canal", "mode": "upsert"}, *sent)
    assert rows(db, name, "id, name, at, doc, raw, is_on") == expected
    assert "the source's table met ALTER" in caplog.text
    for one in sent:
        write(db, name, {"format": "canal", "mode": "upsert"}, one)
    assert rows(db, name, "id, name, at, doc, raw, is_on") == expected


SENT = {
    "bit(4)": "10", "bit(1)": "1", "BIT(16)": "258",
    "varbinary(9)": "\xc3\xa9", "BLOB": "\xc3\xa9\xff", "binary(2)": "\0A", "geometry": "\0\xff",
    "varchar(9)": "\xe9", "text": "\u4e2d", "int(11)": "5",
    "enum('a','it''s','1,2')": "2", "ENUM('x','Y')": "0", "set('a','b','c,d')": "5",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "column", "stored"),
    [
        ("bit(4)", "bit(4)", "1010"),
        ("bit(4)", "int", "10"),
        ("bit(1)", "boolean", "true"),
        ("BIT(16)", "bit varying", "0000000100000010"),
        ("varbinary(9)", "bytea", r"\xc3a9"),
        ("varbinary(9)", "text", "é"),
        ("varbinary(9)", "jsonb", '"w6k="'),
        ("binary(2)", "bytea", r"\x0041"),
        ("BLOB", "bytea", r"\xc3a9ff"),
        ("geometry", "bytea", r"\x00ff"),
        ("varchar(9)", "text", "é"),
        ("text", "text", "中"),
        ("enum('a','it''s','1,2')", "text", "it's"),
        ("enum('a','it''s','1,2')", "int", "2"),
        ("ENUM('x','Y')", "text", ""),
        ("set('a','b','c,d')", "text", "a,c,d"),
        ("set('a','b','c,d')", "bigint", "5"),
    ],
)
def test_values_of_canal_are_read_by_the_types_of_mysql(
    kind: str, column: str, stored: str, db: Database, name: str
) -> None:
    """Canal sends bytes as the characters of ISO 8859-1, bits, enums and sets as decimal numbers."""
    db.execute(f"CREATE TABLE {name} (v {column})")
    one = canal("INSERT", ({"v": SENT[kind]}, None), mysqlType={"v": kind})
    write(db, name, {"format": "canal"}, one)
    assert rows(db, name, "v::text") == [(stored,)]
    (made,) = format_of("canal").types(one).values()
    assert made == "bytea" or column != "bytea", "a table that is made takes it"


@pytest.mark.parametrize(
    ("kind", "column", "said"),
    [
        *((kind, "bytea", "column v: .* no bytes") for kind in ("bit(4)", "varchar(9)", "text", "int(11)", None)),
        ("BLOB", "text", "column v: .* make the column bytea"),
        ("enum('a')", "text", "column v: .* has no number 2"),
        ("set('a')", "text", "column v: .* has no number 2"),
    ],
)
def test_values_of_canal_that_a_column_would_take_for_others_are_refused(
    kind: str | None, column: str, said: str, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (v {column})")
    one = canal("INSERT", ({"v": SENT.get(kind or "int(11)", "2")}, None), mysqlType={"v": kind} if kind else None)
    refused(db, name, {"format": "canal"}, one, said)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (canal("TRUNCATE", isDdl=True), "on_truncate"),
        (canal("ERASE", isDdl=True), "no change of rows by Canal"),
        (canal("RENAME", isDdl=True), "no change of rows by Canal"),
        (canal("INSERT"), "no change of rows by Canal"),
        (canal("INSERT", (source_row(1, price="1,5"), None)), "column price"),
        (message(b'{"id": 1}'), "no change of rows by Canal"),
        (message(None, key=b'{"no": 1}'), "a tombstone whose key has no id"),
    ],
)
def test_what_canal_says_and_cannot_be_done_is_refused(one: Message, said: str, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, price numeric)")
    refused(db, name, {"format": "canal", "mode": "upsert"}, one, said)


def test_the_key_of_a_delete_is_that_of_the_row_and_not_what_messages_are_spread_by(db: Database, name: str) -> None:
    """Canal's message key is a hash or a part of the row, Maxwell's may be a bare text."""
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, name text); INSERT INTO {name} VALUES (1, 'a'), (5, 'e')")
    (plain,) = (canal("DELETE", (source_row(1), None)),)
    write(db, name, {"format": "canal", "mode": "upsert"}, message(plain.value(), key=b"5"))
    assert rows(db, name) == [(5, "e")]


def test_a_tombstone_is_refused_where_rows_are_only_appended(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int)")
    for form in ("connect", "csv", "msgpack", "cloudevents", "canal", "maxwell", "debezium"):
        refused(db, name, {"format": form}, message(None, key=b"1"), "the message has no value")
        write(db, name, {"format": form, "on_tombstone": "skip"}, message(None, key=b"1"))


def test_the_own_key_of_a_message_fills_a_column_in_every_format(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, own bytea)")
    for form, value in (
        ("csv", b"1"),
        ("msgpack", msgspec.msgpack.encode({"id": 1})),
        ("connect", b'{"payload": {"id": 1}}'),
        ("cloudevents", b'{"specversion": "1.0", "id": 1}'),
    ):
        write(db, name, {"format": form, "metadata": {"own": "key"}}, message(value, key=b"\0k"))
    assert rows(db, name) == [(1, b"\0k")] * 4


def test_wire_format_without_a_registry_is_told(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int)")
    sink = TableSink(name, decoder=FormatDecoder(JsonDecoder(), guards=True))
    with pytest.raises(BadRow, match="--schema-registry"), db.transaction():
        sink.write(db, [message(b"\0\0\0\0\1" + base64.b64encode(b"x"))])
