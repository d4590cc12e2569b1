"""Envelopes: what Debezium, Connect and Maxwell wrap ends as the rows of the source table."""

# ruff: noqa: E501, PLR0917 - a table of types; fixtures and parameters are positional

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from confluent_kafka import Message

from exactly_once.errors import ConfigurationError
from exactly_once.writer import BadRow, Column, Table, TableSink, Tombstone, statements
from exactly_once.writer.envelopes import EnvelopeName, recognised
from exactly_once.writer.formats import FormatDecoder, Shaped, format_of
from exactly_once.writer.from_json import JsonDecoder
from exactly_once.writer.plan import Plan

Database = psycopg.Connection[Any]
DEBEZIUM, CONNECT = "io.debezium.", "org.apache.kafka.connect.data."


def encoded(value: Any) -> bytes | None:
    return value if isinstance(value, bytes) or value is None else json.dumps(value).encode()


def messages(*pairs: tuple[Any, Any], start: int = 0) -> list[Message]:
    return [
        Message(
            topic="t", partition=0, offset=start + i, key=encoded(key), value=encoded(value), timestamp=(1, 1000 + i)
        )
        for i, (key, value) in enumerate(pairs)
    ]


def base64_of(number: int) -> str:
    size = number.bit_length() // 8 + 1
    return base64.b64encode(number.to_bytes(size, "big", signed=True)).decode()


def field(name: str, kind: str, logical: str | None = None, **more: Any) -> dict[str, Any]:
    return {"field": name, "type": kind, "optional": True} | ({"name": logical} if logical else {}) | more


def sink(table: str, envelope: EnvelopeName, mode: Any = "upsert", **options: Any) -> TableSink:
    missing = options.pop("missing", "null")
    own = {name: options.pop(name) for name in ("on_truncate",) if name in options}
    decoder = JsonDecoder(missing="null" if missing == "null" else "apart", **options)
    own |= {name: options[name] for name in ("decimal", "binary", "lax") if name in options}
    form = format_of(envelope, missing=missing, on_tombstone=options.get("on_tombstone"), **own)
    return TableSink(table, decoder=FormatDecoder(decoder, form), mode=mode, missing=missing)


@pytest.fixture
def table(db: Database, name: str) -> str:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, name text)")
    return name


def change(op: str, before: Any, after: Any) -> dict[str, Any]:
    return {"before": before, "after": after, "op": op, "source": {"table": "x"}, "ts_ms": 5, "transaction": None}


def rows(db: Database, table: str) -> list[tuple[Any, ...]]:
    return db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()


def write(db: Database, to: TableSink, batches: Sequence[Sequence[Message]]) -> None:
    for batch in batches:
        with db.transaction():
            to.write(db, batch)


def row(number: int, name: str) -> dict[str, Any]:
    return {"id": number, "name": name}


CHANGES: list[tuple[Any, Any]] = [
    ({"id": 1}, change("r", None, row(1, "a"))),
    ({"id": 2}, change("c", None, row(2, "b"))),
    ({"id": 3}, change("c", None, row(3, "c"))),
    ({"id": 4}, change("c", None, row(4, "d"))),
    ({"id": 2}, change("u", None, row(2, "B"))),
    ({"id": 1}, change("d", row(1, "a"), None)),
    ({"id": 1}, None),
    ({"id": 30}, change("u", row(3, "c"), row(30, "c"))),  # a change of the key in one event
    ({"id": 4}, change("d", {"id": 4, "name": None}, None)),  # and as Postgres's connector writes it: three events
    ({"id": 4}, None),
    ({"id": 40}, change("c", None, row(40, "d"))),
    ({"id": 50}, change("c", None, row(50, "e"))),
    ({"id": 50}, None),  # compaction left the tombstone of a delete
]
LEFT = [(2, "B"), (30, "c"), (40, "d")]


def with_schema(value: Any, *, key: bool = False) -> Any:
    if value is None:
        return None
    own = [field("id", "int32"), field("name", "string")]
    if key:
        return {"schema": {"type": "struct", "fields": own[:1]}, "payload": value}
    rows_of = [{"field": part, "type": "struct", "fields": own} for part in ("before", "after")]
    return {"schema": {"type": "struct", "fields": rows_of}, "payload": value}


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("has_schema", [False, True])
def test_changes_of_debezium_end_as_the_rows_of_the_source(
    has_schema: Any, size: int, table: str, db: Database
) -> None:
    pairs = [(with_schema(k, key=True), with_schema(v)) for k, v in CHANGES] if has_schema else CHANGES
    sent = messages(*pairs)
    write(db, sink(table, "debezium"), [sent[i : i + size] for i in range(0, len(sent), size)])
    assert rows(db, table) == LEFT


def test_a_delete_takes_its_key_from_the_row_where_the_message_has_none(table: str, db: Database) -> None:
    sent = messages(
        (None, change("c", None, row(1, "a"))),
        (b"\0\0\0\0\1\2", change("c", None, row(2, "b"))),
        ({"other": 5}, change("c", None, row(3, "c"))),
        (None, change("d", row(1, "a"), None)),
        (b"\0\0\0\0\1\2", change("d", row(2, "b"), None)),
        ({"other": 5}, change("d", row(3, "c"), None)),
    )
    write(db, sink(table, "debezium"), [sent[:3]])
    assert len(rows(db, table)) == 3
    write(db, sink(table, "debezium"), [sent[3:]])
    assert rows(db, table) == []


@pytest.mark.parametrize(
    ("envelope", "mode", "pair", "said"),
    [
        ("debezium", "upsert", ({"id": 1}, {"id": 1}), "no change event of Debezium"),
        ("debezium", "upsert", ({"id": 1}, b"[1]"), "Expected `object`"),
        ("debezium", "upsert", ({"id": "1"}, change("c", None, '{"_id": 1}')), "ExtractNewDocumentState"),
        ("debezium", "upsert", ({"id": "1"}, change("d", '{"_id": 1}', None)), "Debezium for MongoDB"),
        ("debezium", "upsert", (None, change("d", None, None)), "a delete without id: set REPLICA IDENTITY FULL"),
        ("debezium", "upsert", (None, change("t", None, None)), "on_truncate"),
        ("debezium", "append", ({"id": 1}, change("d", row(1, "a"), None)), "rows are only appended"),
        ("debezium", "upsert", (1, change("u", None, row(1, "__debezium_unavailable_value"))), 'missing = "keep"'),
        ("debezium", "append", (1, change("u", None, row(1, "__debezium_unavailable_value"))), "REPLICA IDENTITY FULL"),
        ("connect", "upsert", ({"id": 1}, {"id": 1}), "no schema and payload"),
        ("maxwell", "upsert", (None, {"type": "table-alter", "database": "d"}), "no change of a row by Maxwell"),
        ("connect", "upsert", ({"payload": {"no": 1}}, None), "a tombstone whose key has no id"),
        ("canal", "upsert", (None, {"type": "UPDATE", "data": [{}, {}], "old": [{}]}), "data holds 2 rows, and old 1"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(
    envelope: EnvelopeName, mode: Any, pair: tuple[Any, Any], said: str, table: str, db: Database
) -> None:
    with pytest.raises(BadRow, match=rf"t\[0\] offset 7: .*{said}"), db.transaction():
        sink(table, envelope, mode).write(db, messages(pair, start=7))
    assert rows(db, table) == []


def test_deletes_and_truncates_can_be_skipped(table: str, db: Database) -> None:
    sent = messages(*CHANGES[:7], (None, change("t", None, None)))
    skipping = sink(table, "debezium", "append", on_tombstone="skip", on_truncate="skip")
    write(db, skipping, [sent[:4], sent[5:]])
    assert rows(db, table) == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
    assert skipping.filtered_messages == 3  # the delete, its tombstone, the truncate


def test_deletes_that_are_skipped_are_counted_beside_a_filter() -> None:
    form = Shaped(format_of("debezium", on_tombstone="skip"), where={"name": ("a",)})
    decoder = FormatDecoder(JsonDecoder(on_tombstone="skip"), form)
    columns = [Column(name=n, type_name="", base_name="", type_oid=25) for n in ("id", "name")]
    decoder.prepare(Table(schema="public", name="t", columns=columns), mode="append", key=())
    sent = [(None, change("c", None, {"id": "1", "name": name})) for name in "ab"]
    decoded = decoder.decode(messages(*sent, (None, change("d", {"id": "1"}, None)), (None, None)))
    assert (list(decoded), decoded.filtered) == ([("1", "a")], 3)


def test_a_large_value_that_was_not_logged_stays(db: Database, table: str) -> None:
    db.execute(f"ALTER TABLE {table} ADD b bytea")
    gone = "__debezium_unavailable_value"
    long = "x" * 5000
    sent = messages(
        (1, change("c", None, {"id": 1, "name": long, "b": "AQI="})),
        (1, change("u", None, {"id": 1, "name": gone, "b": base64.b64encode(gone.encode()).decode()})),
        (1, change("u", None, {"id": 1, "name": gone + "!", "b": None})),
    )
    write(db, sink(table, "debezium", missing="keep"), [sent[:2]])
    assert rows(db, table) == [(1, long, b"\1\2")]
    moved = messages((1, change("u", {"id": 1}, {"id": 2, "name": gone, "b": None})), start=9)
    with pytest.raises(BadRow, match=r"offset 9: column name: .* and the key changed"), db.transaction():
        sink(table, "debezium", missing="keep").write(db, moved)
    write(db, sink(table, "debezium", missing="keep"), [sent[2:]])
    assert rows(db, table) == [(1, gone + "!", None)]


UNAVAILABLE = "__debezium_unavailable_value"
NOT_THERE = r"t\[0\] offset {}: column name: a large value .* no such row .* REPLICA IDENTITY FULL"


def test_a_large_value_of_a_row_that_is_not_there_is_refused(table: str, db: Database) -> None:
    """A column that was given no value gets none: the row is refused, unless the batch itself has the value."""
    lacking = (1, change("u", None, row(1, UNAVAILABLE)))
    known = (1, change("c", None, row(1, "a")))
    gone = (1, change("d", row(1, "a"), None))
    others = [(n, change("c", None, row(n, "b"))) for n in range(10, 40)]
    for before, at in (([], 0), (others, 30), ([known, gone], 2), ([known, lacking, gone, *others], 33)):
        with pytest.raises(BadRow, match=NOT_THERE.format(at)) as raised, db.transaction():
            sink(table, "debezium", missing="keep").write(db, messages(*before, lacking, *others))
        assert (raised.value.offset, raised.value.column) == (at, "name")
        assert rows(db, table) == []
    for sent in ([known, lacking], [known, gone, known, lacking, lacking], [lacking, known]):
        write(db, sink(table, "debezium", missing="keep"), [messages(*sent, *others)])
        assert rows(db, table)[0] == (1, "a")
        db.execute(f"DELETE FROM {table}")
    write(db, sink(table, "debezium", missing="keep"), [messages(known), messages(lacking, *others, lacking)])
    assert rows(db, table)[0] == (1, "a")


def test_a_flattened_topic_of_debezium_stores_no_value_that_it_lacks(table: str, db: Database) -> None:
    sent = messages((1, connect(row(1, UNAVAILABLE))))
    for missing, said in (("null", 'column name: .* say missing = "keep"'), ("keep", "no such row")):
        with pytest.raises(BadRow, match=said), db.transaction():
            sink(table, "connect", missing=missing).write(db, sent)
    write(db, sink(table, "connect", missing="keep"), [messages((1, connect(row(1, "a")))), sent])
    assert rows(db, table) == [(1, "a")]


PLACEHOLDERS = [
    # column, value of before, what stands for it, and the field's schema
    ("text", "a", UNAVAILABLE, None),
    ("bytea", "AQI=", base64.b64encode(UNAVAILABLE.encode()).decode(), None),
    ("bytea", "AQI=", UNAVAILABLE.encode().hex(), None),  # with binary.handling.mode=hex
    ("text[]", ["a"], [UNAVAILABLE], None),
    ("jsonb", '{"a": 1}', UNAVAILABLE, field("v", "string", f"{DEBEZIUM}data.Json")),
    ("jsonb", {"a": 1}, {UNAVAILABLE: UNAVAILABLE}, None),
    ("text", '{"a":"1"}', f'{{"{UNAVAILABLE}":"{UNAVAILABLE}"}}', None),
    ("numeric", base64_of(15), base64.b64encode(UNAVAILABLE.encode()).decode(), field("v", "bytes", f"{CONNECT}Decimal", parameters={"scale": "1"})),
    ("int[]", [1, 2], list(UNAVAILABLE.encode()), None),
    ("bigint[]", [1, 2], list(UNAVAILABLE.encode()), None),
    ("uuid[]", ["01234567-89ab-cdef-0123-456789abcdef"], ["b68a35a7-17ad-35b3-af2a-ae46edb4545a"], None),
    ("text", {"wkb": "AQEAAAAAAAAAAADwPwAAAAAAAABA", "srid": 4326}, {"wkb": "AQEAACDmEAAAAAAA/IPXl8EAAAD8g9eXwQ==", "srid": 4326}, field("v", "struct", f"{DEBEZIUM}data.geometry.Geometry")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "placeholder", "schema"), PLACEHOLDERS)
def test_what_stands_for_a_large_value_is_known_in_each_type(
    kind: str, value: Any, placeholder: Any, schema: Any, name: str, db: Database
) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v {kind})")

    def event(number: int, op: str, v: Any) -> tuple[Any, Any]:
        payload = change(op, None, {"id": number, "v": v})
        if schema is None:
            return number, payload
        after = {"field": "after", "type": "struct", "fields": [field("id", "int32"), schema]}
        return number, {"schema": {"type": "struct", "fields": [after]}, "payload": payload}

    write(db, sink(name, "debezium", missing="keep"), [messages(event(1, "c", value))])
    before = rows(db, name)
    write(db, sink(name, "debezium", missing="keep"), [messages(event(1, "u", placeholder))])
    assert rows(db, name) == before
    with pytest.raises(BadRow, match=r"offset 4: column v: .* no such row"), db.transaction():
        sink(name, "debezium", missing="keep").write(db, messages(event(2, "u", placeholder), start=4))


def test_a_key_of_several_columns_and_forms_finds_its_row(name: str, db: Database) -> None:
    db.execute(f'CREATE TABLE {name} (ordinal numeric, "k %" text, v text, at int, PRIMARY KEY (ordinal, "k %"))')

    def event(number: float, v: str, at: int) -> tuple[Any, Any]:
        return None, change("u", None, {"ordinal": number, "k %": "x", "v": v, "at": at})

    sent = [event(1, "a", 1), event(1.0, UNAVAILABLE, 2), event(2.5, "b", 3), event(1, UNAVAILABLE, 4)]
    write(db, sink(name, "debezium", missing="keep"), [messages(*sent), messages(event(1.00, UNAVAILABLE, 5))])
    assert rows(db, name) == [(Decimal(1), "x", "a", 5), (Decimal("2.5"), "x", "b", 3)]
    with pytest.raises(BadRow, match=r"offset 1: column v: .* no such row"), db.transaction():
        sink(name, "debezium", missing="keep").write(db, messages(sent[2], event(7, UNAVAILABLE, 1)))


def decoder_of(envelope: EnvelopeName, metadata: dict[str, str], *key: str) -> FormatDecoder:
    """Decodes for a table whose key is a text ``src`` and a number ``id``; needs no server."""
    oids = {"src": 25, "id": 20, "name": 25}
    columns = [Column(name=n, type_name="", base_name="", type_oid=oid) for n, oid in oids.items()]
    made = FormatDecoder(JsonDecoder(metadata=metadata), format_of(envelope))
    made.prepare(Table(schema="public", name="t", columns=columns, keys=[key]), mode="upsert", key=key)
    return made


MAXWELL_KEY = {"database": "d", "table": "t", "pk.id": 1}
CANAL: dict[str, Any] = {"database": "d", "table": "t", "mysqlType": {"id": "bigint"}}
WITH_METADATA: list[tuple[EnvelopeName, Any, Any]] = [
    ("debezium", {"id": 1}, change("d", row(1, "a"), None)),
    ("debezium", with_schema({"id": 1}, key=True), change("d", {"id": 1}, None)),
    ("debezium", {"tenant": 7}, change("d", row(1, "a"), None)),
    ("debezium", with_schema({"id": 1}, key=True), None),
    ("debezium", {"id": 2}, change("u", row(1, "a"), row(2, "a"))),
    ("connect", with_schema({"id": 1}, key=True), None),
    ("maxwell", MAXWELL_KEY, {"database": "d", "table": "t", "type": "delete", "data": row(1, "a")}),
    ("maxwell", MAXWELL_KEY, {"database": "d", "table": "t", "type": "update", "data": row(2, "a"), "old": {"id": 1}}),
    ("canal", None, CANAL | {"type": "DELETE", "data": [{"id": "1", "name": "a"}]}),
    ("canal", None, CANAL | {"type": "UPDATE", "data": [{"id": "2", "name": "a"}], "old": [{"id": "1"}]}),
]


@pytest.mark.parametrize(("envelope", "key", "value"), WITH_METADATA, ids=lambda each: str(each)[:60])
def test_metadata_in_the_key_changes_nothing_about_which_row_is_deleted(
    envelope: EnvelopeName, key: Any, value: Any
) -> None:
    found = list(decoder_of(envelope, {"src": "topic"}, "src", "id").decode(messages((key, value))))
    assert found[0] == Tombstone(("t", 1))
    assert all(each == (2, "a", "t") for each in found[1:])


@pytest.mark.parametrize("has_schema", [False, True])
def test_a_part_of_the_messages_key_and_a_field_are_one_key(has_schema: Any) -> None:
    keys: Any = [{"src": "x", "id": 1}, {"src": "x"}]
    for key in ({"schema": {"type": "struct"}, "payload": each} if has_schema else each for each in keys):
        made = decoder_of("debezium", {"src": "key:src"}, "src", "id")
        sent = messages((key, change("d", row(1, "a"), None)), (key, change("u", row(1, "a"), row(2, "a"))))
        assert list(made.decode(sent)) == [Tombstone(("x", 1)), Tombstone(("x", 1)), (2, "a", "x")]


def test_the_whole_key_of_a_message_is_that_of_one_row_only() -> None:
    made = decoder_of("debezium", {"src": "key"}, "src", "id")
    with pytest.raises(BadRow, match="offset 0: the key of the row changed, and a column of it is the message's"):
        made.decode(messages(({"id": 2}, change("u", row(1, "a"), row(2, "a")))))
    alone = decoder_of("debezium", {"src": "key"}, "src")
    sent = messages((b"k", change("u", row(1, "a"), row(2, "b"))), (b"k", change("d", row(2, "b"), None)))
    assert list(alone.decode(sent)) == [(2, "b", b"k"), Tombstone((b"k",))]


def test_numbers_in_texts_are_no_bits_and_no_money() -> None:
    oids = {"flags": 1560, "more": 1562, "price": 790}
    columns = [Column(name=n, type_name="", base_name="", type_oid=oid) for n, oid in oids.items()]
    into = Table(schema="public", name="t", columns=columns)
    made = FormatDecoder(JsonDecoder(), format_of("canal"))
    made.prepare(into, mode="append", key=())
    event = CANAL | {"type": "INSERT", "mysqlType": {"flags": "bit(4)", "more": "bit", "price": "decimal(9,2)"}}
    rows_of = [{"flags": "10", "more": "1", "price": price} for price in ("5", "12.50")]
    good, bad = (made.decode(messages((None, event | {"data": [each]}))) for each in rows_of)
    assert list(good) == [("1010", "1", "5")]
    assert "'12.50': money reads" in str(Plan(into, list(oids)).find_bad(bad, bad.origins))


@pytest.mark.parametrize("key", [{"tenant": 7}, 7, "7", {"schema": {"type": "int32"}, "payload": 7}])
def test_a_tombstone_of_another_key_than_the_rows_deletes_nothing(key: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Also where it comes again, because a batch failed, or is the first that a process reads."""
    deleted, tombstone = messages((key, change("d", row(1, "a"), None)), (key, None), start=5)
    made = decoder_of("debezium", {}, "id")
    assert list(made.decode([deleted])) == [Tombstone((1,))]
    assert [list(made.decode([tombstone])) for _ in range(3)] == [[], [], []]
    assert [list(decoder_of("debezium", {}, "id").decode([tombstone])) for _ in range(2)] == [[], []]
    told = [record.message for record in caplog.records]
    assert len(told) == 3  # once by each decoder
    assert all("t[0] offset 6: a tombstone is passed over" in text for text in told)


@pytest.mark.parametrize(("key", "value"), [(1, 1), ("a", "a"), (b"a", "a"), ("1", 1)])
def test_a_tombstone_alone_deletes_where_rows_show_that_their_bare_keys_are_theirs(key: Any, value: Any) -> None:
    column = "name" if isinstance(value, str) else "id"
    made = decoder_of("debezium", {}, column)
    stored, tombstone = messages((key, change("c", None, {**row(1, "x"), column: value})), (key, None))
    (other,) = messages((key, change("c", None, row(5, "other"))), start=2)
    assert [type(each) for each in made.decode([stored, tombstone, tombstone])] == [tuple, Tombstone, Tombstone]
    assert [type(each) for each in made.decode([other, tombstone])] == [tuple]


def test_a_delete_without_its_row_shows_nothing_of_bare_keys() -> None:
    made = decoder_of("debezium", {}, "id")
    sent = messages((1, change("c", None, row(1, "x"))), (2, change("d", None, None)), (3, None))
    assert [type(each) for each in made.decode(sent)] == [tuple, Tombstone, Tombstone]


def test_a_large_value_that_goes_nowhere_asks_for_no_row(table: str, db: Database) -> None:
    lacking = messages((1, change("u", None, row(1, "a") | {"body": UNAVAILABLE})))
    write(db, sink(table, "debezium", missing="keep"), [lacking])
    assert rows(db, table) == [(1, "a")]
    db.execute(f"ALTER TABLE {table} ADD rest jsonb")
    with pytest.raises(BadRow, match="offset 0: column rest: field body is not in the message"), db.transaction():
        sink(table, "debezium", missing="keep", rest="rest").write(db, lacking)


def test_an_object_that_is_not_in_the_message_lacks_all_its_fields(name: str, db: Database) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, doc_a int, doc_size int)")
    form = Shaped(format_of("debezium", missing="keep"), flatten="_")

    def shaped() -> TableSink:
        decoder = FormatDecoder(JsonDecoder(missing="apart"), form)
        return TableSink(name, decoder=decoder, mode="upsert", missing="keep")

    first, second = ((1, change("u", None, {"id": 1, "doc": doc, "doc_size": 5})) for doc in ({"a": 7}, UNAVAILABLE))
    with pytest.raises(BadRow, match=r"offset 0: column doc_a: .* no such row"), db.transaction():
        shaped().write(db, messages(second))
    write(db, shaped(), [messages(first), messages(second)])
    assert rows(db, name) == [(1, 7, 5)]


def test_only_a_batch_that_lacks_a_large_value_asks_for_its_rows(
    table: str, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def by_key(name: Any, connection: Any, key: Any, sought: Any) -> set[int]:
        asked.append(len(sought.rows))
        return statements.by_key(name, connection, key, sought)

    monkeypatch.setattr("exactly_once.writer.upsert.by_key", by_key)
    known, lacking = (messages((1, change("u", None, row(1, name)))) for name in ("a", UNAVAILABLE))
    write(db, sink(table, "debezium", missing="keep"), [known, messages((1, change("u", None, {"id": 1})))])
    assert asked == []
    write(db, sink(table, "debezium", missing="keep"), [lacking])
    assert asked == [1]


TYPES: list[tuple[str, dict[str, Any], Any, str]] = [
    # column, schema, value, and what Postgres itself reads
    ("date", field("v", "int32", f"{DEBEZIUM}time.Date"), 20455, "2026-01-02"),
    ("date", field("v", "int32", f"{CONNECT}Date"), -1, "1969-12-31"),
    ("int", field("v", "int32", f"{CONNECT}Date"), -1, "-1"),
    ("date", field("v", "string", f"{DEBEZIUM}time.IsoDate"), "2026-01-02Z", "2026-01-02"),
    ("time", field("v", "string", f"{DEBEZIUM}time.IsoTime"), "01:02:03.004Z", "01:02:03.004"),
    ("timestamp", field("v", "string", f"{DEBEZIUM}time.IsoTimestamp"), "2026-01-02T03:04:05Z", "2026-01-02 03:04:05"),
    ("timestamptz", field("v", "string", f"{DEBEZIUM}time.IsoTimestamp"), "2026-01-02T03:04:05Z", "2026-01-02 03:04:05+00"),
    ("text", field("v", "string", f"{DEBEZIUM}time.IsoDate"), "2026-01-02Z", "2026-01-02Z"),
    ("text", field("v", "int32", f"{DEBEZIUM}time.Date"), 0, "1970-01-01"),
    ("time", field("v", "int32", f"{DEBEZIUM}time.Time"), 3723004, "01:02:03.004"),
    ("time", field("v", "int64", f"{DEBEZIUM}time.MicroTime"), 86399999999, "23:59:59.999999"),
    ("time", field("v", "int64", f"{DEBEZIUM}time.NanoTime"), 1000, "00:00:00.000001"),
    ("time", field("v", "int32", f"{CONNECT}Time"), 0, "00:00"),
    ("timestamp", field("v", "int64", f"{DEBEZIUM}time.Timestamp"), 1767323045678, "2026-01-02 03:04:05.678"),
    ("timestamp", field("v", "int64", f"{DEBEZIUM}time.MicroTimestamp"), -1, "1969-12-31 23:59:59.999999"),
    ("timestamptz", field("v", "int64", f"{DEBEZIUM}time.NanoTimestamp"), 1_500, "1970-01-01 00:00:00.000002+00"),
    ("timestamptz", field("v", "int64", f"{CONNECT}Timestamp"), 1767323045678, "2026-01-02 03:04:05.678+00"),
    ("bigint", field("v", "int64", f"{CONNECT}Timestamp"), 1767323045678, "1767323045678"),
    ("timestamptz", field("v", "string", f"{DEBEZIUM}time.ZonedTimestamp"), "2026-01-02T03:04:05.1Z", "2026-01-02 03:04:05.1+00"),
    ("text", field("v", "int64", "avro.timestamp-millis"), 1, "1970-01-01T00:00:00.001Z"),
    ("timestamp", field("v", "int64", "avro.timestamp-millis"), 1, "1970-01-01 00:00:00.001"),
    ("interval", field("v", "int64", f"{DEBEZIUM}time.MicroDuration"), 90_000_001, "90.000001 seconds"),
    ("interval", field("v", "int64", f"{DEBEZIUM}time.MicroDuration"), -36 * 10**8, "-1 hours"),
    ("interval", field("v", "int64", f"{DEBEZIUM}time.MicroTime"), 838 * 36 * 10**8 + 1, "838 hours 1 microsecond"),
    ("interval", field("v", "int32", f"{DEBEZIUM}time.Time"), -1500, "-1.5 seconds"),
    ("interval", field("v", "string", f"{DEBEZIUM}time.Interval"), "P1Y2M3DT4H5M6S", "1 year 2 mons 3 days 04:05:06"),
    ("numeric", field("v", "bytes", f"{CONNECT}Decimal", parameters={"scale": "2"}), base64_of(-2658824), "-26588.24"),
    ("numeric", field("v", "bytes", f"{CONNECT}Decimal", parameters={"scale": "3"}), base64_of(5), "0.005"),
    ("numeric", field("v", "bytes", f"{CONNECT}Decimal", parameters={"scale": "0"}), "1234", "-2658824"),
    ("numeric", field("v", "bytes", f"{CONNECT}Decimal", parameters={"scale": "-2"}), base64_of(-7), "-700"),
    ("numeric", field("v", "bytes", f"{CONNECT}Decimal", parameters={"scale": "-2"}), base64_of(0), "0"),
    ("numeric", field("v", "bytes", f"{CONNECT}Decimal", parameters={"scale": "2"}), 1.5, "1.5"),
    ("numeric", field("v", "bytes", f"{CONNECT}Decimal", parameters={"scale": "40"}), base64_of(10**60 + 1), str(10**20) + "." + "0" * 39 + "1"),
    ("text", field("v", "bytes", f"{CONNECT}Decimal", parameters={"scale": "2"}), base64_of(150), "1.50"),
    ("jsonb", field("v", "bytes", f"{CONNECT}Decimal", parameters={"scale": "2"}), base64_of(150), "1.50"),
    ("bytea", field("v", "bytes", f"{DEBEZIUM}data.Bits", parameters={"length": "2147483647"}), "BQI=", "\\x0502"),
    ("numeric", field("v", "struct", f"{DEBEZIUM}data.VariableScaleDecimal"), {"scale": 1, "value": base64_of(15)}, "1.5"),
    ("text", field("v", "string", f"{DEBEZIUM}data.Json"), '{"lang": "de"}', '{"lang": "de"}'),
    ("uuid", field("v", "string", f"{DEBEZIUM}data.Uuid"), "01234567-89ab-cdef-0123-456789abcdef", "01234567-89ab-cdef-0123-456789abcdef"),
    ("bit(10)", field("v", "bytes", f"{DEBEZIUM}data.Bits", parameters={"length": "10"}), base64.b64encode(b"\x05\x02").decode(), "1000000101"),
    ("bit(1)", field("v", "boolean"), True, "1"),
    ("bit", field("v", "boolean"), False, "0"),
    ("boolean", field("v", "boolean"), False, "false"),
    ("bit(1)[]", field("v", "array", items={"type": "boolean"}), [True, None, False], "{1,NULL,0}"),
    ("point", field("v", "struct", f"{DEBEZIUM}data.geometry.Point"), {"x": 1.5, "y": -2, "wkb": "", "srid": None}, "(1.5,-2)"),
    ("jsonb", field("v", "struct", f"{DEBEZIUM}data.geometry.Point"), {"x": 1.5, "y": -2, "wkb": None, "srid": None}, '{"x": 1.5, "y": -2, "wkb": null, "srid": null}'),
    ("jsonb", field("v", "string", f"{DEBEZIUM}data.Json"), "null", "null"),
    ("json", field("v", "string", f"{DEBEZIUM}data.Json"), " null", "null"),
    ("jsonb[]", field("v", "array", items={"type": "string", "name": f"{DEBEZIUM}data.Json"}), ["null", '{"a": 1}'], '{"null", "{\\"a\\": 1}"}'),
    ("time", field("v", "int64", f"{DEBEZIUM}time.MicroTime"), 86400000000, "24:00:00"),
    ("date[]", field("v", "array", items={"type": "int32", "name": f"{DEBEZIUM}time.Date"}), [0, None, 1], '{1970-01-01,NULL,1970-01-02}'),
    ("bytea", field("v", "bytes"), "AQI=", "\\x0102"),
    ("numeric", field("v", "string"), "1234", "1234"),
]  # fmt: skip


@pytest.mark.parametrize(("column", "schema", "value", "meant"), TYPES, ids=lambda each: str(each)[:60])
@pytest.mark.parametrize("envelope", ["debezium", "connect"])
def test_a_value_of_a_logical_type_becomes_what_it_stands_for(
    envelope: EnvelopeName, column: str, schema: dict[str, Any], value: Any, meant: str, db: Database, name: str
) -> None:
    db.execute(f"SET timezone = 'UTC'; CREATE TABLE {name} (id int PRIMARY KEY, v {column})")
    struct = {"type": "struct", "fields": [field("id", "int32"), schema]}
    sent = {"id": 1, "v": value}
    if envelope == "connect":
        wrapped: Any = {"schema": struct, "payload": sent}
    else:
        parts = [{**struct, "field": "before"}, {**struct, "field": "after"}]
        wrapped = {"schema": {"type": "struct", "fields": parts}, "payload": change("c", None, sent)}
    null = json.loads(json.dumps(wrapped))
    (null["payload"] if envelope == "connect" else null["payload"]["after"]).update(id=2, v=None)
    write(db, sink(name, envelope), [messages(({"id": 1}, wrapped), ({"id": 2}, null))])
    found = db.execute(f"SELECT v::text, (%s::text::{column})::text FROM {name} ORDER BY id", (meant,)).fetchall()
    assert found[0][0] == found[0][1]
    assert found[1][0] is None


@pytest.mark.parametrize(("column", "schema", "value", "meant"), TYPES, ids=lambda each: str(each)[:60])
@pytest.mark.parametrize("is_bare", [False, True])
def test_a_value_of_a_logical_type_stands_for_the_same_in_a_key(
    is_bare: Any, column: str, schema: dict[str, Any], value: Any, meant: str, db: Database, name: str
) -> None:
    """A text, bytes or a document take a key that is one bare value as it was sent."""
    if is_bare and column in ("text", "bytea", "json", "jsonb", "jsonb[]"):
        return
    db.execute(f"SET timezone = 'UTC'; CREATE TABLE {name} (k {column}, v int)")
    struct, own = {"type": "struct", "fields": [schema]}, {"v": value}
    key = {"schema": schema, "payload": value} if is_bare else {"schema": struct, "payload": own}
    metadata = {"k": "key" if is_bare else "key:v"}
    write(db, sink(name, "connect", "append", metadata=metadata), [messages((key, connect({"v": 1})))])
    [found] = db.execute(f"SELECT k::text, (%s::text::{column})::text, v FROM {name}", (meant,)).fetchall()
    assert found == (found[1], found[1], 1)


def test_a_point_needs_nothing_but_its_place_where_no_table_is_known_yet() -> None:
    """As in the sample of a topic, of which a table is made."""
    kind = field("v", "struct", f"{DEBEZIUM}data.geometry.Point")
    point = {"schema": {"type": "struct", "fields": [kind]}, "payload": {"v": {"x": 1.5, "y": -2, "wkb": None}}}
    [(_, found)] = format_of("connect").read(messages((None, point))[0])
    assert found == b'{"v":"(1.5,-2)"}'


DECIMAL = field("price", "bytes", f"{CONNECT}Decimal", parameters={"scale": "2"})


@pytest.mark.parametrize("metadata", [{}, {"price": "key"}, {"price": "key:price"}])
def test_a_delete_finds_the_row_of_a_key_that_looks_like_another(
    metadata: dict[str, str], db: Database, name: str
) -> None:
    """1234 in base64 is -26588.24 of two digits behind the point."""
    db.execute(f"CREATE TABLE {name} (price numeric, day date, PRIMARY KEY (price)); INSERT INTO {name} VALUES (1234)")
    key: Any = {"schema": DECIMAL, "payload": "1234"}
    day = field("day", "int32", f"{CONNECT}Date")
    if metadata == {"price": "key:price"}:
        key = {"schema": {"type": "struct", "fields": [DECIMAL]}, "payload": {"price": "1234"}}
    row = {"schema": {"type": "struct", "fields": [DECIMAL, day]}, "payload": {"price": "1234", "day": 1}}
    write(db, sink(name, "connect", metadata=metadata), [messages((key, row))])
    assert [price for price, _ in rows(db, name)] == [Decimal("-26588.24"), Decimal(1234)]
    write(db, sink(name, "connect", metadata=metadata), [messages((key, None), start=1)])
    assert [price for price, _ in rows(db, name)] == [Decimal(1234)]


def test_a_key_of_a_field_and_a_part_of_the_messages_key_are_read_once_each(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (price numeric, day date, PRIMARY KEY (price, day))")
    fields = [DECIMAL, field("day", "int32", f"{CONNECT}Date")]
    key = {"schema": {"type": "struct", "fields": fields}, "payload": {"price": "1234", "day": 1}}
    row = {"schema": {"type": "struct", "fields": [DECIMAL]}, "payload": {"price": "1234"}}
    write(db, sink(name, "connect", metadata={"day": "key:day"}), [messages((key, row))])
    assert [str(day) for _, day in rows(db, name)] == ["1970-01-02"]
    write(db, sink(name, "connect", metadata={"day": "key:day"}), [messages((key, None), start=1)])
    assert rows(db, name) == []


@pytest.mark.parametrize(
    ("column", "text"), [("numeric", "1234"), ("numeric(30,2)", "12E00003"), ("bigint", "00000007")]
)
def test_a_text_that_may_be_a_number_or_its_base64_is_refused_where_no_schema_tells(
    column: str, text: str, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v {column})")
    sent = messages(({"id": 1}, change("c", None, {"id": 1, "v": text})))
    with pytest.raises(BadRow, match=r"offset 0: column v: .* say decimal with its scale, or lax"), db.transaction():
        sink(name, "debezium").write(db, sent)
    unscaled = int.from_bytes(base64.b64decode(text), "big", signed=True)
    for options, meant in (({"decimal": {"v": 2}}, Decimal(unscaled) / 100), ({"lax": True}, Decimal(text))):
        if column != "bigint" or "lax" in options:
            write(db, sink(name, "debezium", **options), [sent])
            assert rows(db, name) == [(1, meant)]
    certain = change("u", None, {"id": 1, "v": "-12" if column == "bigint" else "12.50"})
    write(db, sink(name, "debezium"), [messages(({"id": 1}, certain))])
    schema = [field("id", "int32"), field("v", "string")]
    parts = [{"field": part, "type": "struct", "fields": schema} for part in ("before", "after")]
    told = {"schema": {"type": "struct", "fields": parts}, "payload": change("u", None, {"id": 1, "v": text})}
    write(db, sink(name, "debezium"), [messages(({"id": 1}, told))])
    assert rows(db, name) == [(1, Decimal(text))]


def with_value(envelope: EnvelopeName, kind: dict[str, Any] | None, value: Any) -> Any:
    """Wrap a row of the fields ``id`` and ``v``, with a schema that has this for ``v``, or without one."""
    row, fields = {"id": 1, "v": value}, [field("id", "int32"), *([kind] if kind else [])]
    payload = change("c", None, row) if envelope == "debezium" else row
    struct: dict[str, Any] = {"type": "struct", "fields": fields}
    if envelope == "debezium":
        struct = {"type": "struct", "fields": [{**struct, "field": "before"}, {**struct, "field": "after"}]}
    return {"schema": struct, "payload": payload} if kind else payload


HEX = "00ff10ab"
SAID = r'column v: "00ff10ab" is hexadecimal or the base64 of other bytes, .*say binary = { v = "hex" }, or "base64"'


@pytest.mark.parametrize("has_schema", [True, False])
@pytest.mark.parametrize("envelope", ["debezium", "connect"])
def test_text_for_bytes_is_refused_where_it_may_be_hexadecimal_or_base64(
    envelope: EnvelopeName, has_schema: Any, table: str, db: Database
) -> None:
    """As with ``binary.handling.mode=hex`` and ``base64``, of both of which a schema says but that they are text."""
    if envelope == "connect" and not has_schema:
        return  # plain JSON, which has base64
    db.execute(f"ALTER TABLE {table} ADD v bytea")
    sent = messages((None, with_value(envelope, field("v", "string") if has_schema else None, HEX)))
    with pytest.raises(BadRow, match=rf"t\[0\] offset 0: {SAID}"), db.transaction():
        sink(table, envelope).write(db, sent)
    for form, meant in (("hex", bytes.fromhex(HEX)), ("base64", base64.b64decode(HEX))):
        write(db, sink(table, envelope, binary={"v": form}), [sent])
        assert db.execute(f"SELECT v FROM {table}").fetchall() == [(meant,)]
    # What can be but one of both, and what a schema says to be bytes.
    for kind, value in (("string", "AQI="), ("bytes", HEX)) if has_schema else ():
        write(db, sink(table, envelope), [messages((None, with_value(envelope, field("v", kind), value)))])
        assert db.execute(f"SELECT v FROM {table}").fetchall() == [(base64.b64decode(value),)]


def test_hexadecimal_for_bytes_is_refused_in_keys_and_lists_too(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (v bytea PRIMARY KEY); CREATE TABLE {name}_list (v bytea[])")
    text = field("v", "string")
    key = {"schema": {"type": "struct", "fields": [text]}, "payload": {"v": HEX}}
    many = {"schema": {"type": "struct", "fields": [field("v", "array", items=text)]}, "payload": {"v": [None, HEX]}}
    cases: list[tuple[TableSink, Any, Any]] = [
        (sink(name, "connect"), key, None),
        (sink(name, "connect"), {"schema": text, "payload": HEX}, None),
        (sink(name, "connect", "append", metadata={"v": "key:v"}), key, connect({"x": 1})),
        (sink(f"{name}_list", "connect", "append"), None, many),
    ]
    for to, sent_key, value in cases:
        with pytest.raises(BadRow, match=r"00ff10ab. is hexadecimal or the base64 of other bytes"), db.transaction():
            to.write(db, messages((sent_key, value)))
    db.execute(f"INSERT INTO {name} VALUES ('\\x{HEX}')")
    write(db, sink(name, "connect", binary={"v": "hex"}), [messages((key, None))])
    assert rows(db, name) == []


def test_what_is_no_base64_and_hexadecimal_says_which_option_takes_it(table: str, db: Database) -> None:
    db.execute(f"ALTER TABLE {table} ADD v bytea")
    sent = messages((None, with_value("connect", field("v", "string"), "ff")))
    with pytest.raises(BadRow, match=r'binary = \{ v = "hex" \} takes hexadecimal'), db.transaction():
        sink(table, "connect").write(db, sent)
    odd = messages((None, with_value("connect", field("v", "string"), "AQI=")))
    with pytest.raises(BadRow, match=r"column v: .* is no hex: "), db.transaction():
        sink(table, "connect", binary={"v": "hex"}).write(db, odd)
    with pytest.raises(ConfigurationError, match="the forms are base64, hex, not base32"):
        JsonDecoder(binary={"v": "base32"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (field("v", "bytes", f"{CONNECT}Decimal", parameters={"scale": "2"}), "no base64!", "no base64!"),
        (field("v", "struct", f"{DEBEZIUM}data.geometry.Geometry"), {"wkb": "", "srid": None}, "is not of the type"),
        # Postgres's bit varying without a length.
        (field("v", "bytes", f"{DEBEZIUM}data.Bits", parameters={"length": "2147483647"}), "BQI=", "make it bytea"),
    ],
)
def test_a_value_that_is_not_of_its_logical_type_names_its_field(
    kind: dict[str, Any], value: Any, said: str, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")
    wrapped = {"schema": {"type": "struct", "fields": [kind]}, "payload": {"id": 1, "v": value}}
    with pytest.raises(BadRow, match=rf"t\[0\] offset 0: column v: .*{said}"), db.transaction():
        sink(name, "connect").write(db, messages((None, wrapped)))


def test_a_decimal_is_no_interval_of_seconds(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v interval)")
    kind = field("v", "bytes", f"{CONNECT}Decimal", parameters={"scale": "2"})
    wrapped = {"schema": {"type": "struct", "fields": [kind]}, "payload": {"id": 1, "v": base64_of(150)}}
    with pytest.raises(BadRow, match=r"column v: .* not 1\.50"), db.transaction():
        sink(name, "connect").write(db, messages((None, wrapped)))


FAR: list[tuple[str, dict[str, Any], Any]] = [
    # what Postgres holds and Python does not: infinity as Debezium writes it, the year 10000, 44 BC
    ("timestamp", field("v", "int64", f"{DEBEZIUM}time.MicroTimestamp"), 9223372036825200000),
    ("timestamptz", field("v", "int64", f"{CONNECT}Timestamp"), 253402300800000),
    ("date", field("v", "int32", f"{DEBEZIUM}time.Date"), -735524),
    ("timestamptz", field("v", "string", f"{DEBEZIUM}time.ZonedTimestamp"), "+10000-01-01T04:59:59Z"),
    ("timestamptz", field("v", "string", f"{DEBEZIUM}time.ZonedTimestamp"), "9999-12-31T23:59:59.9999999Z"),
]


@pytest.mark.parametrize(("column", "kind", "value"), FAR, ids=lambda each: str(each)[:60])
def test_a_moment_that_is_too_far_says_so_and_what_takes_it(
    column: str, kind: dict[str, Any], value: Any, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v {column})")
    sent = messages((None, {"schema": {"type": "struct", "fields": [kind]}, "payload": {"id": 1, "v": value}}))
    with (
        pytest.raises(BadRow, match=r"offset 0: column v: .*is beyond the years 1 to 9999") as refused,
        db.transaction(),
    ):
        sink(name, "connect").write(db, sent)
    wider = "text" if isinstance(value, str) else "bigint"
    assert wider in str(refused.value)
    assert "not of the type" not in str(refused.value)
    db.execute(f"ALTER TABLE {name} ALTER v TYPE {wider} USING NULL")
    write(db, sink(name, "connect"), [sent])
    assert rows(db, name) == [(1, value)]


def connect(payload: Any) -> dict[str, Any]:
    return {"schema": None if payload is None else {"type": "struct", "fields": []}, "payload": payload}


def test_keys_and_values_of_connect_are_unwrapped(table: str, db: Database) -> None:
    sent = messages(
        (connect({"id": 1}), connect(row(1, "a"))),
        (connect({"id": 2}), connect(row(2, "b"))),
        (connect(3), connect(row(3, "c"))),
        (b"4", connect(row(4, "d"))),
        (connect({"id": 5}), connect(row(5, "e"))),
        (connect({"id": 1}), None),
        (connect({"id": 2}), connect(None)),
        (connect(3), None),
        (b"4", None),
    )
    write(db, sink(table, "connect"), [sent])
    assert rows(db, table) == [(5, "e")]


def test_changes_of_maxwell_end_as_the_rows_of_the_source(table: str, db: Database) -> None:
    def event(kind: str, data: Any, **more: Any) -> dict[str, Any]:
        return {"database": "d", "table": "t", "type": kind, "ts": 1, "xid": 2, "data": data} | more

    sent = messages(
        (None, event("bootstrap-start", {})),
        (None, event("bootstrap-insert", row(1, "a"))),
        (None, event("bootstrap-complete", {})),
        (None, event("insert", row(2, "b"))),
        (None, event("insert", row(3, "c"))),
        (None, event("update", row(1, "A"), old={"name": "a"})),
        (None, event("update", row(20, "b"), old={"id": 2})),
        (None, event("delete", row(3, "c"))),
    )
    for size in (1, 8):
        write(db, sink(table, "maxwell"), [sent[i : i + size] for i in range(0, 8, size)])
        assert rows(db, table) == [(1, "A"), (20, "b")]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (change("c", None, {}), "debezium"),
        ({"schema": {}, "payload": change("d", {}, None)}, "debezium"),
        (connect({"id": 1}), "connect"),
        ({"database": "d", "table": "t", "type": "insert", "data": {}}, "maxwell"),
        ({"op": "c", "after": {}}, None),
        ({"payload": {"id": 1}}, None),
        ({"id": 1}, None),
        ([1], None),
        (b"no json", None),
        (b"\xff\0", None),
        (None, None),
    ],
)
def test_an_envelope_is_recognised(value: Any, found: EnvelopeName | None, table: str, db: Database) -> None:
    (message,) = messages((None, value))
    assert recognised(message.value()) == found
    plain = TableSink(table, decoder=FormatDecoder(JsonDecoder(), guards=True))
    if found is not None:
        with pytest.raises(BadRow, match=rf"t\[0\] offset 0: .*--format {found}"), db.transaction():
            plain.write(db, [message])


def test_updates_are_not_left_out_by_a_mode_that_only_inserts(table: str, db: Database) -> None:
    modes: tuple[EnvelopeName, ...] = ("debezium", "maxwell")
    for envelope in modes:
        with pytest.raises(ConfigurationError, match="would leave out the updates"), db.transaction():
            sink(table, envelope, "insert-ignore").write(db, [])


def test_who_has_a_column_for_a_part_of_the_envelope_means_it(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, op text)")
    fields = {"id": "after.id", "op": "op"}
    plain = TableSink(name, decoder=FormatDecoder(JsonDecoder(fields), guards=True))
    write(db, plain, [messages((None, change("c", None, row(1, "a"))))])
    assert rows(db, name) == [(1, "c")]
