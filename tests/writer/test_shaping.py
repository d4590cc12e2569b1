"""Shaping: what becomes of fields, keys and headers on their way into columns, without code."""

# ruff: noqa: PLR0917 - fixtures and parameters are positional

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from confluent_kafka import Message

from exactly_once.cli.sink_flows import Flow
from exactly_once.writer import MISSING, BadRow, Column, Table, TableError, TableSink
from tests.writer.test_envelopes import field

Database = psycopg.Connection[Any]


def message(value: Any, key: Any = None, *, headers: Any = None, offset: int = 7) -> Message:
    sent = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    key = key if key is None or isinstance(key, bytes) else json.dumps(key).encode()
    return Message(topic="t", partition=0, offset=offset, key=key, value=sent, headers=headers, timestamp=(1, 5))


def write(db: Database, table: str, flow: dict[str, Any], *messages: Message) -> TableSink:
    sink = Flow(topics=("t",), table=table, **flow).sink()
    with db.transaction():
        sink.write(db, messages)
    return sink


def rows(db: Database, table: str, what: str = "*") -> list[tuple[Any, ...]]:
    return db.execute(f"SELECT {what} FROM {table} t ORDER BY 1").fetchall()


def test_some_fields_are_renamed_and_the_others_go_by_their_names(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, city text, plain text, rest jsonb)")
    value = {"ID": 1, "address": {"city": "x", "zip": 5}, "plain": "p", "more": True}
    write(db, name, {"rename": {"id": "ID", "city": "address.city"}, "rest": "rest"}, message(value))
    assert rows(db, name) == [(1, "x", "p", {"address": {"zip": 5}, "more": True})]


@pytest.mark.parametrize("flat", [{}, {"flatten": True}])
def test_names_with_dots_of_their_own_are_found_by_filters_and_dropped(
    db: Database, name: str, flat: dict[str, Any]
) -> None:
    db.execute(f'CREATE TABLE {name} (id int, "service.name" text, rest jsonb)')
    flow = {"where": {"service.name": "shop"}, "drop": ("host.ip",), "rest": "rest", **flat}
    messages = [{"id": i, "service.name": s, "host.ip": "::1", "n": i} for i, s in enumerate(["shop", "bank", "shop"])]
    write(db, name, flow, *map(message, messages))
    assert rows(db, name) == [(0, "shop", {"n": 0}), (2, "shop", {"n": 2})]


@pytest.mark.parametrize("flat", [{}, {"flatten": True}])
def test_names_with_dots_are_found_by_filters_and_dropped_within_objects(
    db: Database, name: str, flat: dict[str, Any]
) -> None:
    db.execute(f"CREATE TABLE {name} (id int, rest jsonb)")
    flow = {"where": {"a.service.name": "x"}, "where_not": {"a.b.host.ip": "::1"}, "drop": ("a", "c.d.e"), **flat}
    values: list[Any] = [
        {"id": 0, "a": {"service.name": "x", "b": {"host.ip": "::2"}}, "c": {"d.e": 1, "f": 2}},
        {"id": 1, "a": {"service": {"name": "x"}, "b.host": {"ip": "::2"}}, "c.d": {"e": 1}},
        {"id": 2, "a.service": {"name": "x"}, "a": {"b.host.ip": "::2"}},
        {"id": 3, "a": {"service.name": "x", "b": {"host.ip": "::1"}}},
        {"id": 4, "a": {"service.name": "y"}},
        {"id": 5, "a.service": 5, "a": {"service.name": "x"}},
    ]
    sink = write(db, name, {**flow, "rest": "rest"}, *map(message, values))
    assert [row[0] for row in rows(db, name)] == [0, 1, 2, 5]
    assert sink.filtered_messages == 2
    assert "e" not in json.dumps([rest for _, rest in rows(db, name)][:2])


def test_a_field_that_is_dropped_may_be_left_out_by_the_source(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, rest jsonb)")
    event = {"op": "u", "before": None, "after": {"id": 1, "body": "__debezium_unavailable_value"}, "source": {}}
    with pytest.raises(BadRow, match="column body: a large value that did not change"):
        write(db, name, {"format": "debezium"}, message(event))
    for flow in ({}, {"rest": "rest"}, {"flatten": True}):
        write(db, name, {"format": "debezium", "drop": ("body",), **flow}, message(event))
    assert [row[0] for row in rows(db, name)] == [1, 1, 1]


@pytest.mark.parametrize(("form", "sent"), [("maxwell", "data"), ("canal", "data")])
def test_a_time_of_mysql_is_an_interval_or_a_time_of_day(form: Any, sent: str, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (t time, i interval)")
    base: dict[str, Any] = {"database": "d", "table": "t", "mysqlType": {"t": "time(3)", "i": "time(3)"}}

    def event(t: str, i: str) -> Message:
        row = {"t": t, "i": i}
        return message(base | {"type": "INSERT", "data": [row]} if form == "canal" else {
            "database": "d", "table": "t", "type": "insert", "data": row
        })  # fmt: skip

    write(db, name, {"format": form}, event("23:59:59.123", "-838:59:59"), event("00:00:00", "25:00:00.500"))
    assert rows(db, name, "t::text, i::text") == [("00:00:00", "25:00:00.5"), ("23:59:59.123", "-838:59:59")]
    for beyond in ("25:00:00", "-01:00:00"):
        with pytest.raises(BadRow, match="column t: "):
            write(db, name, {"format": form}, event(beyond, "1:00"))


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("kind", ["jsonb", "json"])
def test_a_partial_update_keeps_what_the_rest_has(db: Database, name: str, kind: str, at_once: int) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, name text, more {kind})")
    flow = {"mode": "upsert", "missing": "keep", "rest": "more"}
    sent = [{"id": 1, "name": "a", "vat": "V1", "n": 1}, {"id": 1, "name": "b"}, {"id": 2}, {"id": 1, "n": 2}]
    messages = [message(value, offset=i) for i, value in enumerate(sent)]
    for start in range(0, len(messages), at_once):
        write(db, name, flow, *messages[start : start + at_once])
    assert rows(db, name) == [(1, "b", {"vat": "V1", "n": 2}), (2, None, {})]
    write(db, name, {**flow, "missing": None}, message({"id": 1, "name": "c", "x": 1}))
    assert rows(db, name)[0] == (1, "c", {"x": 1}), "a whole row"


@pytest.mark.parametrize("option", ["where", "where_not"])
def test_a_filter_does_not_decide_by_a_value_that_the_source_left_out(db: Database, name: str, option: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, body text)")
    flow = {"format": "debezium", "mode": "upsert", "missing": "keep", option: {"body": "long"}}
    event = {"op": "u", "before": None, "after": {"id": 1, "body": "__debezium_unavailable_value"}, "source": {}}
    with pytest.raises(BadRow, match=r"leaves body out, .* REPLICA IDENTITY FULL"):
        write(db, name, flow, message(event, key={"id": 1}))


def test_fields_that_are_dropped_go_nowhere_and_are_not_reported(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, secret text, rest jsonb)")
    value = {"id": 1, "secret": "s", "meta": {"junk": {"x": 1}, "kept": 2}, "all": {"gone": 1}}
    flow: dict[str, Any] = {"drop": ("secret", "meta.junk", "all", "never")}
    write(db, name, {**flow, "rest": "rest"}, message(value))
    assert rows(db, name) == [(1, None, {"meta": {"kept": 2}})]
    sink = write(db, name, flow, message({"id": 2, "secret": "s"}), message({**value, "id": 3}))
    assert rows(db, name, "id, secret") == [(1, None), (2, None), (3, None)]
    assert sink.unused_fields == {"meta.kept": 1}
    with pytest.raises(BadRow, match="no field of the message has a column"):
        write(db, name, flow, message({"secret": "only"}))
    with pytest.raises(TableError, match=r"cannot be both a value \(nothing\) and an object \(column id\)"):
        write(db, name, {"drop": ("a",), "fields": {"id": "a.id"}}, message({"a": {"id": 1}}))
    # Of what is no object nothing need be dropped.
    write(db, name, {**flow, "rest": "rest"}, message({"id": 4, "meta": [1]}), message({"id": 5, "meta": "x"}))
    assert rows(db, name, "id, rest")[-2:] == [(4, {"meta": [1]}), (5, {"meta": "x"})]
    with pytest.raises(TableError, match="column secret takes field 'secret' whole, so that nothing within it can be"):
        write(db, name, {"drop": ("secret.pin",)}, message({"id": 6, "secret": {"pin": 1}}))


def test_objects_become_their_fields(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, a_b text, a_c_d int, a_list jsonb, a_empty jsonb)")
    value = {"id": 1, "a": {"b": "x", "c": {"d": 2, "e": 3}, "list": [{"x": 1}], "empty": {}}}
    sink = write(db, name, {"flatten": True}, message(value))
    assert rows(db, name) == [(1, "x", 2, [{"x": 1}], {})]
    assert sink.unused_fields == {"a_c_e": 1}
    write(db, name, {"flatten": "-", "rename": {"a_b": "a-b"}}, message({"id": 2, "a": {"b": "y"}}))
    assert rows(db, name, "id, a_b") == [(1, "x"), (2, "y")]
    dropped = write(db, name, {"flatten": True, "drop": ("a.c", "a.list", "x")}, message({**value, "x": {"y": 1}}))
    assert rows(db, name, "id, a_b, a_c_d")[-1] in {(2, "y", None), (1, "x", None)}
    assert dropped.unused_fields == {}
    with pytest.raises(BadRow, match=r"t\[0\] offset 7: two fields become a_b when they are flattened"):
        write(db, name, {"flatten": True}, message({"id": 3, "a": {"b": 1}, "a_b": 2}))


def decoded(table: Table, flow: dict[str, Any], *values: Any, key: Sequence[str] = ()) -> list[Any]:
    """Decode without a server."""
    decoder = Flow(topics=("t",), table="t", **flow).decoder()
    decoder.prepare(table, mode="upsert" if key else "append", key=key)
    return list(decoder.decode([message(value) for value in values]))


def of_text(*names: str, **more: Any) -> Table:
    columns = [Column(name=n, type_name="text", base_name="text", type_oid=25, **more) for n in names]
    return Table(schema="public", name="t", columns=columns)


@pytest.mark.parametrize("missing", [None, "keep", "null"])
@pytest.mark.parametrize("envelope", [False, True])
def test_an_object_that_is_null_makes_its_fields_null(missing: Any, envelope: Any) -> None:
    into = of_text("id", "a_b", "a_c_d", "a_c_gone", "ab_c", has_default=True)
    flow = {"flatten": True, "missing": missing, "drop": ("a.c.gone",)} | ({"format": "debezium"} if envelope else {})
    sent = [{"id": "1", "a": None, "ab": {"c": "x"}}, {"id": "1", "a": {"b": "y", "c": None}, "ab": {}}]
    wrapped = [{"op": "c", "after": each} for each in sent] if envelope else sent
    absent = None if missing == "null" else MISSING
    expected = [("1", None, None, absent, "x"), ("1", "y", None, absent, absent)]
    assert decoded(into, flow, *wrapped, key=("id",)) == expected
    assert decoded(of_text("a_b"), {"flatten": True}, {"a": None}) == [(None,)]


def test_a_value_that_is_null_is_no_object_of_which_a_longer_name_is_a_field() -> None:
    into = of_text("id", "status", "status_at", "address_city", has_default=True)
    sent = {"id": "1", "status": None, "address": None}
    assert decoded(into, {"flatten": True, "missing": "keep"}, sent, key=("id",)) == [("1", None, MISSING, None)]


def test_a_field_within_an_object_is_dropped_before_that_is_flattened() -> None:
    into = of_text("id", "a", "a_b")
    sent = [{"id": "1", "a": {"b": "x", "c": "y"}}, {"id": "2", "a": "text"}]
    found = decoded(into, {"flatten": True, "drop": ("a.c",)}, *sent)
    assert found == [("1", None, "x"), ("2", "text", None)]


def test_messages_that_are_not_wanted_are_left_out_and_counted(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id text PRIMARY KEY)")
    flow: dict[str, Any] = {"where": {"type": ("paid", "refunded"), "meta.n": 5}}
    flow |= {"where_not": {"test": True, "id": ("bad", "null")}, "mode": "upsert"}
    sent = [
        {"id": "a", "type": "paid", "meta": {"n": 5}},
        {"id": "b", "type": "refunded", "meta": {"n": 5}, "test": False},
        {"id": "c", "type": "paid", "meta": {"n": 5}, "test": True},
        {"id": "d", "type": "paid", "meta": {"n": 5.0}},
        {"id": "e", "type": "paid", "meta": 5},
        {"id": "f", "type": "open", "meta": {"n": 5}},
        {"id": "g", "meta": {"n": 5}},
        {"id": "bad", "type": "paid", "meta": {"n": 5}},
        {"id": None, "type": "paid", "meta": {"n": 5}},
        {"type": "open"},
    ]
    sink = write(db, name, flow, *map(message, sent))
    assert rows(db, name) == [("a",), ("b",)]
    assert sink.filtered_messages == 8
    assert sink.unmet_fields == set()
    misspelt = flow | {"where_not": {"tset": True, "meta.n.x": 1}}
    assert write(db, name, misspelt, *map(message, sent[:2])).unmet_fields == {"tset", "meta.n.x"}
    write(db, name, flow, message(None, key=b"a"))  # a delete has no fields
    assert rows(db, name) == [("b",)]
    with pytest.raises(BadRow, match=r"t\[0\] offset 7: "):
        write(db, name, flow, message(b"no json"))
    again = Flow(topics=("t",), table=name, **flow).sink()
    batch = [message({"type": "open"}, offset=0), message(b"no json", offset=1), message(sent[0], offset=2)]
    bad: list[Any] = []
    for set_aside in (None, bad.append):  # of a batch that comes again nothing is counted twice
        with contextlib.suppress(BadRow), db.transaction():
            again.write(db, batch, set_aside=set_aside)
    assert again.filtered_messages == 1


def test_a_field_that_is_dropped_and_never_comes_is_told(db: Database, name: str) -> None:
    """A misspelt one would be in the column for the rest, which is what dropping it was to prevent."""
    db.execute(f"CREATE TABLE {name} (id text, rest jsonb)")
    drop = ("ssn", "snn", "who.mail", "who.mial", "a.b", 'ab"c', "größe")
    flow: dict[str, Any] = {"rest": "rest", "drop": drop}
    texts = [
        b'{"id": "1", "ssn": null, "who": {"mail": 1, "x": {"mial": 1}}, "a.b": 2}',
        b"no json, snn",
        b'\xef\xbb\xbf{"id": "snn", "ab\\u0022c": 1, "gr\\u00F6\\u00dfe": 1}',
    ]
    sent = [message(text, offset=offset) for offset, text in enumerate(texts)]
    sink = Flow(topics=("t",), table=name, **flow).sink()
    for _ in "ab":  # of a batch with a bad message the first one is raised, and it comes again
        with contextlib.suppress(BadRow), db.transaction():
            sink.write(db, sent, set_aside=lambda error: None)
    assert sink.unmet_fields == {"snn", "who.mial"}
    with db.transaction():
        sink.write(db, [message({"id": "3", "snn": 1})])
    assert sink.unmet_fields == {"who.mial"}


def test_of_objects_that_become_their_fields_the_same_is_told(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id text, who_name text, rest jsonb)")
    drop = ("who.mail", "who_age", "who.mial", "x", "y", "kind")
    flow = {"rest": "rest", "drop": drop, "flatten": True, "where": {"kind": "a"}}
    sink = write(db, name, flow, message({"id": "1", "who": {"name": "n", "mail": "m", "age": 3}, "x": 1, "kind": "a"}))
    assert sink.unmet_fields == {"who.mial", "y"}
    assert rows(db, name) == [("1", "n", {})]


def test_rows_of_an_envelope_are_shaped_as_others(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, a_b int)")
    flow = {"format": "debezium", "mode": "upsert", "where": {"kind": "x"}, "flatten": True}

    def event(number: int, kind: str) -> Message:
        after = {"id": number, "kind": kind, "a": {"b": number}}
        return message({"before": None, "after": after, "op": "c", "source": {}}, key={"id": number})

    write(db, name, flow, event(1, "x"), event(2, "y"), event(3, "x"), message(None, key={"id": 3}))
    assert rows(db, name) == [(1, 1)]


@pytest.mark.parametrize("column", ["jsonb", None])
def test_a_document_that_is_null_is_seen_by_filters_and_in_what_is_left(
    column: str | None, db: Database, name: str
) -> None:
    """Whatever its column is; so no marker of the decoder's own is stored."""
    db.execute(f"CREATE TABLE {name} (id int, rest jsonb{', doc jsonb' if column else ''})")
    fields = [field("id", "int32"), *(field(n, "string", "io.debezium.data.Json") for n in ("doc", "rest"))]

    def event(number: int, doc: str) -> Message:
        row = {"id": number, "doc": doc, "rest": "null"}
        return message({"schema": {"type": "struct", "fields": fields}, "payload": row})

    for where in ("where", "where_not"):
        flow = {"format": "connect", "rest": "rest", where: {"doc": "null"}}
        write(db, name, flow, event(1 if where == "where" else 3, "null"), event(2, "[1]"))
    assert rows(db, name, "id, rest->'rest'") == [(1, None), (2, None)]
    assert not [text for (text,) in rows(db, name, "rest::text") if "null" not in text]


COLUMNS = """(id int, trace text, raw bytea, n int, at timestamptz, own bigint, city text, price numeric, deep jsonb,
    shop text, fixed int, since date, is_on boolean, doc jsonb)"""


def test_headers_parts_of_keys_and_constants_fill_columns(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} {COLUMNS}")
    metadata = {"trace": "header:trace", "raw": "header:raw", "n": "header:n", "at": "header:at", "own": "key:id"}
    metadata |= {"city": "key:a.city", "price": "key:price", "deep": "key:a"}
    constants = {"shop": "here", "fixed": "5", "since": "2026-01-02", "is_on": True, "doc": '{"a": 1}'}
    headers = [
        ("trace", b"old"),
        ("trace", "ä".encode()),
        ("raw", b"\0\xff"),
        ("n", b"17"),
        ("at", b"2026-01-02T03:04Z"),
    ]
    key = {"id": 2**53 + 1, "a": {"city": "x"}, "price": 0.1}
    wrapped = {"schema": {"type": "struct"}, "payload": key}
    sent = [
        message({"id": 1}, key=key, headers=headers),
        message({"id": 2}, key=wrapped),
        message({"id": 3, "shop": "not from here"}, headers=[("trace", None)]),
    ]
    sink = write(db, name, {"metadata": metadata, "constants": constants}, *sent)
    found = rows(db, name, "id, trace, raw, n, at = '2026-01-02 03:04Z', own, city, price::text, deep")
    assert found == [
        (1, "ä", b"\0\xff", 17, True, 2**53 + 1, "x", "0.1", {"city": "x"}),
        (2, None, None, None, None, 2**53 + 1, "x", "0.1", {"city": "x"}),
        (3, *[None] * 8),
    ]
    same = ("here", 5, "2026-01-02", True, {"a": 1})
    assert rows(db, name, "id, shop, fixed, since::text, is_on, doc") == [(i, *same) for i in (1, 2, 3)]
    assert sink.unused_fields == {"shop": 1}
    with pytest.raises(TableError, match="the constant of column fixed: "):
        write(db, name, {"constants": {"fixed": "x"}}, message({"id": 1}))
    for bad, said in (
        (message({"id": 1}, headers=[("n", b"x")]), "column n"),
        (message({"id": 1}, headers=[("trace", b"\xff")]), "utf-8"),
        (message({"id": 1}, key=b"plain"), "no object in JSON"),
        (message({"id": 1}, key=b"5"), "the key is no object in JSON"),
    ):
        with pytest.raises(BadRow, match=rf"t\[0\] offset 7: .*{said}"):
            write(db, name, {"metadata": metadata}, bad)


def test_a_key_may_be_of_the_messages_key_and_a_constant(db: Database, name: str) -> None:
    """As where the key is not in the value, and several sources share a table."""
    db.execute(f"CREATE TABLE {name} (source text, id int, v int, PRIMARY KEY (source, id))")
    db.execute(f"INSERT INTO {name} VALUES ('b', 1, 0)")
    flow = {"mode": "upsert", "metadata": {"id": "key:id"}, "constants": {"source": "a"}}
    sent = [message({"v": i}, key={"id": i}) for i in (1, 2)]
    write(db, name, flow, *sent, message({"v": 9}, key={"id": 2}), message(None, key={"id": 1}))
    assert rows(db, name) == [("a", 2, 9), ("b", 1, 0)]
    write(db, name, {**flow, "format": "connect"}, message({"payload": {"v": 5}}, key={"payload": {"id": 5}}))
    write(db, name, {**flow, "format": "connect"}, message(None, key={"id": 2}))
    assert rows(db, name) == [("a", 5, 5), ("b", 1, 0)]


@pytest.mark.parametrize(
    ("kind", "part", "stored"),
    [
        ("jsonb", b"1.50", "1.50"),
        ("jsonb", b'{"a": 12345678901234567890.10, "b": [1e2]}', '{"a": 12345678901234567890.10, "b": [100]}'),
        ("jsonb", b'"5"', '"5"'),
        ("jsonb", b'"x"', '"x"'),
        ("json", b'{"b":  1.50}', '{"b":  1.50}'),
        ("text", b"1.50", "1.50"),
        ("text", b"7", "7"),
        ("numeric", b"0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827"),
        ("double precision", b"-0", "-0"),
        ("bytea", b'"AP8="', r"\x00ff"),
        ("numeric[]", b"[1.50, null]", "{1.50,NULL}"),
        ("timestamp", b'"2026-01-02T03:04:05"', "2026-01-02 03:04:05"),
    ],
)
@pytest.mark.parametrize("has_schema", [False, True])
def test_a_part_of_a_key_is_read_as_a_value_is(
    kind: str, part: bytes, stored: str, has_schema: Any, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id int, v {kind}, k {kind})")
    key = b'{"a": {"v": %b}}' % part
    key = b'{"schema": {"type": "struct"}, "payload": %b}' % key if has_schema else key
    write(db, name, {"metadata": {"k": "key:a.v"}}, message(b'{"id": 1, "v": %b}' % part, key=key))
    assert rows(db, name, "v::text, k::text") == [(stored, stored)]


@pytest.mark.parametrize(("kind", "part"), [("int", b"1e2"), ("boolean", b'"true"'), ("interval", b"5"), ("int", b"[")])
def test_a_part_of_a_key_that_no_field_could_be_is_refused(kind: str, part: bytes, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, k {kind})")
    with pytest.raises(BadRow, match=r"t\[0\] offset 7: column k: key:k: "):
        write(db, name, {"metadata": {"k": "key:k"}}, message({"id": 1}, key=b'{"k": %b}' % part))


def test_options_of_a_column_hold_for_a_part_of_a_key_and_a_header(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, at timestamptz, sent timestamptz, doc jsonb, price numeric)")
    flow = {
        "metadata": {"at": "key:at", "sent": "header:sent", "doc": "key:doc", "price": "key:price"},
        "epoch": {"at": "ms", "sent": "s"}, "json_text": ("doc",), "decimal": {"price": 2},
    }  # fmt: skip
    key = {"at": 1000, "doc": '{"a": 1}', "price": "AP8="}
    write(db, name, flow, message({"id": 1}, key=key, headers=[("sent", b"5")]))
    found = rows(db, name, "extract(epoch FROM at)::int, extract(epoch FROM sent)::int, doc, price::text")
    assert found == [(1, 5, {"a": 1}, "2.55")]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_headers_and_parts_of_keys_that_never_came_are_columns_that_nothing_fills(
    mode: Any, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, a int, h text, k int, at timestamptz, c text, rest jsonb)")
    flow = {"metadata": {"h": "header:x", "k": "key:k", "at": "timestamp"}, "constants": {"c": "c"}, "mode": mode}
    sink = Flow(topics=("t",), table=name, rest="rest", **flow).sink()
    for id_, more, key, headers, unfilled in (
        (1, {}, None, None, {"a", "h", "k"}),
        (2, {"x": 5}, {"k": 1}, None, {"a", "h"}),
        (3, {"a": 1}, {}, [("x", b"")], set()),
        (4, {}, None, None, set()),
    ):
        with db.transaction():
            sink.write(db, [message({"id": id_, **more}, key=key, headers=headers)])
        assert sink.unfilled_columns == unfilled
