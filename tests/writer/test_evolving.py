"""Tables that evolve: a field that comes while the sink runs gets a column, in the transaction that first fills it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import msgspec
import psycopg
import pytest
from confluent_kafka import Message, Producer

from exactly_once import ExactlyOnceConsumer
from exactly_once.cli.sink_flows import Flow
from exactly_once.writer import BadRow, TableError, TableSink, table
from exactly_once.writer.errors import TableChanged
from tests.support.topics import create_topic
from tests.writer.test_envelopes import CONNECT, change, field

Database = psycopg.Connection[Any]
TYPES = """SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
    WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped"""


def message(value: Any, offset: int = 0) -> Message:
    return Message(topic="t", partition=0, offset=offset, key=b"k", value=json.dumps(value).encode(), timestamp=(1, 5))


def sink(table: str, **flow: Any) -> TableSink:
    return Flow(topics=("t",), table=table, evolve="add-columns", **flow).sink()


def types(db: Database, table: str) -> dict[str, str]:
    return dict(db.execute(TYPES, (table,)).fetchall())


def write(db: Database, to: TableSink, *messages: Message) -> None:
    """Write as the consumer does: what finds the table changed comes again."""
    for attempt in (1, 2):
        try:
            with db.transaction():
                to.write(db, messages)
        except TableChanged:
            assert attempt == 1
        else:
            return


@pytest.mark.parametrize("rest", [None, "rest"])
def test_a_field_gets_a_column_of_the_type_of_all_its_values(rest: str | None, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int{', rest jsonb' if rest else ''})")
    to = sink(name, rest=rest, types={"zip": "text", "unused": "int"})
    write(db, to, message({"id": 1}))
    sent = [
        {"id": 2, "a": 1, "b": None, "zip": 5},
        {"id": 3, "a": 1.5, "c": {"x": 1}},
        {"id": 4, "d": "2026-01-02T03:04:05Z"},
    ]
    write(db, to, *map(message, sent))
    kept = {"rest": "jsonb"} if rest else {}
    found = {"a": "numeric", "c": "jsonb", "d": "timestamp with time zone", "zip": "text"}
    assert types(db, name) == {"id": "integer", **found, **kept}
    write(db, to, message({"id": 5, "b": True, "a": None}))
    assert types(db, name)["b"] == "boolean"
    rows = db.execute(f"SELECT id, a, b, c, d IS NULL, zip FROM {name} ORDER BY id").fetchall()
    assert [(r[0], r[1] and float(r[1]), *r[2:]) for r in rows] == [
        (1, None, None, None, True, None),
        (2, 1, None, None, True, "5"),
        (3, 1.5, None, {"x": 1}, True, None),
        (4, None, None, None, False, None),
        (5, None, True, None, True, None),
    ]


def test_what_the_schema_of_a_message_says_goes_before_its_value(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY)")
    fields = [field("id", "int32"), field("day", "int32", f"{CONNECT}Date"), field("n", "int16")]
    parts = [{"field": part, "type": "struct", "fields": fields} for part in ("before", "after")]
    event = {"schema": {"type": "struct", "fields": parts}, "payload": change("c", None, {"id": 1, "day": 1, "n": 2})}
    write(db, sink(name, format="debezium", mode="upsert"), message(event))
    assert types(db, name) == {"id": "integer", "day": "date", "n": "smallint"}
    assert db.execute(f"SELECT id, day::text, n FROM {name}").fetchall() == [(1, "1970-01-02", 2)]


NESTED = field(
    "a",
    "struct",
    fields=[
        field("day", "int32", f"{CONNECT}Date"),
        field("raw", "bytes"),
        field("n", "int16"),
        field("gone", "int16"),
        field("deep", "struct", fields=[field("at", "int64", f"{CONNECT}Timestamp")]),
        field("free", "map", keys={"type": "string"}, values={"type": "int32"}),
    ],
)


def test_what_the_schema_says_of_fields_in_objects_goes_before_their_values_when_they_are_flattened(
    db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id int)")
    value = {"day": 1, "raw": "AQI=", "n": 2, "gone": 3, "deep": {"at": 5}, "free": {"x": 7}}
    sent = {
        "schema": {"type": "struct", "fields": [field("id", "int32"), NESTED]},
        "payload": {"id": 1, "a": value},
    }
    write(db, sink(name, format="connect", flatten=True, drop=("a.gone",)), message(sent))
    told = {"a_day": "date", "a_raw": "bytea", "a_n": "smallint", "a_free_x": "bigint"}
    assert types(db, name) == {"id": "integer", **told, "a_deep_at": "timestamp without time zone"}
    found = db.execute(f"SELECT a_day::text, a_raw, a_n, a_deep_at::text, a_free_x FROM {name}").fetchall()
    assert found == [("1970-01-02", b"\1\2", 2, "1970-01-01 00:00:00.005", 7)]


IN_CONNECT = json.dumps(
    {
        "schema": {"type": "struct", "fields": [field("id", "int32"), field("v", "int16")]},
        "payload": {"id": 1, "v": 5},
    }
).encode()
IN_CANAL = json.dumps(
    {"type": "INSERT", "data": [{"id": "1", "v": "5"}], "pkNames": ["id"], "mysqlType": {"v": "smallint"}}
).encode()


@pytest.mark.parametrize(
    ("form", "kind", "values"),
    [
        ("msgpack", "bytea", [b"\x81", msgspec.msgpack.encode({"id": 1, "v": b"x"}), b"", b"\x01", b"\xa1\xff"]),
        ("connect", "smallint", [b"{", IN_CONNECT, b'{"schema": {"fields": 5}, "payload": {}}', b"\xff"]),
        ("canal", "smallint", [b"{", IN_CANAL, b'{"type": "INSERT", "data": 1, "mysqlType": 5}', b"\xff"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages_that_are_set_aside_tell_no_types(
    form: str, kind: str, values: list[bytes], db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id int)")
    to = sink(name, format=form)
    sent = [Message(topic="t", partition=0, offset=i, value=v) for i, v in enumerate(values)]
    aside: list[Any] = []
    with pytest.raises(BadRow), db.transaction():  # the first bad message is tried alone
        to.write(db, sent, set_aside=aside.append)
    with pytest.raises(TableChanged), db.transaction():
        to.write(db, sent, set_aside=aside.append)
    with db.transaction():
        to.write(db, sent, set_aside=aside.append)
    assert types(db, name) == {"id": "integer", "v": kind}
    assert [m.offset() for m, _ in aside[-1]] == [i for i in range(len(sent)) if i != 1]
    assert db.execute(f"SELECT id, v IS NOT NULL FROM {name}").fetchall() == [(1, True)]


@pytest.mark.parametrize("values", [[b"anna", "test", None], ["test", b"anna", 5], [5, b"anna"]])
def test_a_field_that_is_bytes_in_some_messages_only_is_text(values: list[Any], db: Database, name: str) -> None:
    """In a column of bytes the texts would be taken for base64."""
    db.execute(f"CREATE TABLE {name} (id int)")
    to = sink(name, format="msgpack")
    sent = [
        Message(topic="t", partition=0, offset=i, value=msgspec.msgpack.encode({"id": i, "v": v}))
        for i, v in enumerate(values)
    ]
    with pytest.raises(TableChanged), db.transaction():
        to.write(db, sent)
    with db.transaction():
        to.write(db, sent)
    expected = [v.decode() if isinstance(v, bytes) else None if v is None else str(v) for v in values]
    assert db.execute(f"SELECT v FROM {name} ORDER BY id").fetchall() == [(v,) for v in expected]


def test_messages_that_are_not_stored_make_no_type_of_a_column(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int)")
    to = sink(name, format="msgpack", where={"kind": "x"})
    rows = [
        {"id": "no id", "v": b"a", "kind": "x"},
        {"id": 2, "v": b"b", "kind": "y"},
        {"id": 3, "v": "c", "kind": "x"},
    ]
    sent = [Message(topic="t", partition=0, offset=i, value=msgspec.msgpack.encode(row)) for i, row in enumerate(rows)]
    aside: list[Any] = []
    with pytest.raises(BadRow), db.transaction():
        to.write(db, sent, set_aside=aside.append)
    with pytest.raises(TableChanged), db.transaction():
        to.write(db, sent, set_aside=aside.append)
    with db.transaction():
        to.write(db, sent, set_aside=aside.append)
    assert db.execute(f"SELECT id, v FROM {name}").fetchall() == [(3, "c")]


def test_a_message_that_is_too_deep_is_refused_by_name(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int)")
    deep = b'{"id": 1, "a": %b}' % (b"[" * 2000 + b"]" * 2000)
    for options in ({}, {"format": "debezium"}, {"format": "connect"}, {"format": "cloudevents"}):
        value = b'{"payload": %b}' % deep if options == {"format": "connect"} else deep
        sent = [Message(topic="t", partition=0, offset=7, value=value)]
        with pytest.raises(BadRow, match=r"t\[0\] offset 7: .*recursion"), db.transaction():
            sink(name, **options).write(db, sent)


@pytest.mark.parametrize("odd", ["1e999", "1" * 5000])
def test_a_new_field_that_nothing_can_read_does_not_stop_its_message(odd: str, db: Database, name: str) -> None:
    """A table without the field takes the message; with it, Postgres says what is wrong with the value."""
    db.execute(f"CREATE TABLE {name} (id int)")
    to = sink(name)
    sent = [Message(topic="t", partition=0, offset=7, value=f'{{"id": 1, "a": {odd}}}'.encode())]
    with pytest.raises(TableChanged), db.transaction():
        to.write(db, sent)
    with contextlib.suppress(BadRow), db.transaction():
        to.write(db, sent)
    assert types(db, name) == {"id": "integer", "a": "jsonb"}


def test_what_can_be_no_column_is_told_once(db: Database, name: str, caplog: pytest.LogCaptureFixture) -> None:
    db.execute(f"CREATE TABLE {name} (id int, made int GENERATED ALWAYS AS (id + 1) STORED)")
    to = sink(name)
    for _ in range(3):
        write(db, to, message({"id": 1, "ctid": 2, "made": 7, 'q"': 1}))
    assert types(db, name) == {"id": "integer", "made": "integer"}
    assert caplog.text.count("no column can have such a name") == 1
    assert to.unused_fields == {"ctid": 3, "made": 3, 'q"': 3}


def test_a_name_that_the_database_cannot_encode_gets_no_column(
    db: Database, conninfo: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    db.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING LATIN1 LOCALE 'C'")
    try:
        with psycopg.connect(conninfo, dbname=name, client_encoding="UTF8", autocommit=True) as latin:
            latin.execute("CREATE TABLE t (id int)")
            to = sink("t")
            for _ in range(2):  # the columns are asked for, and one of them cannot be
                with pytest.raises(TableChanged), latin.transaction():
                    to.write(latin, [message({"id": 1, "price_€": 2, "ä": 3})])
            with latin.transaction():
                to.write(latin, [message({"id": 1, "price_€": 2, "ä": 3})])
            assert types(latin, "t") == {"id": "integer", "ä": "bigint"}
            assert to.unused_fields == {"price_€": 1}
            assert "t gets no column for 'price_€'" in "".join(caplog.messages).replace('"', "")
    finally:
        db.execute(f"DROP DATABASE {name}")


def test_who_does_not_own_the_table_is_told(db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int); CREATE ROLE {name}; GRANT ALL ON {name} TO {name}")
    to = sink(name)

    def write_as_other(value: Any) -> None:
        with db.transaction():
            db.execute(f"SET LOCAL ROLE {name}")
            to.write(db, [message(value)])

    try:
        write_as_other({"id": 1})
        with pytest.raises(TableChanged, match="gets columns that the messages bring: 'x' bigint"):
            write_as_other({"id": 1, "x": 1})
        with pytest.raises(TableError, match="only its owner adds columns"):
            write_as_other({"id": 1, "x": 1})
        assert db.execute(f"SELECT count(*) FROM {name}").fetchone() == (1,)
    finally:
        db.execute(f"DROP TABLE {name}; DROP ROLE {name}")


def test_a_consumer_stores_each_message_once_while_the_table_evolves(
    bootstrap_servers: str, conninfo: str, db: Database, name: str, make_consumer: Callable[..., ExactlyOnceConsumer]
) -> None:
    """Two sinks of a group find the same fields; the transaction that adds a column is the one that first fills it."""
    topic = create_topic(bootstrap_servers, 1, name=name)
    db.execute(f"CREATE TABLE {name} (id int)")
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for i in range(400):
        producer.produce(topic, json.dumps({"id": i, f"f{i // 100}": i, "late": i if i == 399 else None}).encode())
    assert producer.flush(60) == 0
    with make_consumer(start="earliest", max_messages=50) as consumer:
        consumer.subscribe([topic])
        consumer.run(sink(name), until_end=True)
    counted = db.execute(f"SELECT count(*), count(DISTINCT id), count(f0), count(f3), sum(late) FROM {name}").fetchone()
    assert counted == (400, 400, 100, 100, 399)
    assert types(db, name) == {"id": "integer", **dict.fromkeys(("f0", "f1", "f2", "f3", "late"), "bigint")}


def test_a_column_waits_for_the_table_no_longer_than_readers_may(
    db: Database, name: str, conninfo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind an ALTER TABLE that waits for a forgotten reader all others wait, too."""
    monkeypatch.setattr(table, "LOCK_SECONDS", 0.2)
    db.execute(f"CREATE TABLE {name} (id int)")
    to = sink(name)
    with pytest.raises(TableChanged, match="gets columns"), db.transaction():
        to.write(db, [message({"id": 1, "a": 1})])
    with psycopg.connect(conninfo) as reader:
        reader.execute(f"SELECT FROM {name}")
        with pytest.raises(TableChanged, match="is locked, and gets its columns once it is not"), db.transaction():
            to.write(db, [message({"id": 1, "a": 1})])
    with db.transaction():
        db.execute("SET LOCAL lock_timeout = '77s'")
        to.write(db, [message({"id": 1, "a": 1})])
        assert db.execute("SHOW lock_timeout").fetchone() == ("77s",), "as it was before"
    assert db.execute(f"SELECT * FROM {name}").fetchall() == [(1, 1)]


@pytest.mark.parametrize("definition", ["PARTITION OF {0}_all FOR VALUES IN (1)", "OF {0}_kind"])
def test_a_table_that_gets_its_columns_elsewhere_is_refused_with_the_place(
    definition: str, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name}_all (id int) PARTITION BY LIST (id)")
    db.execute(f"CREATE TYPE {name}_kind AS (id int)")
    db.execute(f"CREATE TABLE {name} {definition.format(name)}")
    with pytest.raises(TableError, match=r"cannot add column.*; add a, b to the table that it is a partition of, or"):
        write(db, sink(name), message({"id": 1, "a": 1, "b": 2}))
    db.execute(f"DROP TYPE {name}_kind CASCADE")
