"""The pages on envelopes are followed with a real broker and a real Postgres: the source's rows are what is left."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from confluent_kafka import Producer

from exactly_once.cli.sink import add_parser
from exactly_once.cli.sink_flows import read_flows
from tests.cli.conftest import Command
from tests.support.topics import create_topic, delete_topic
from tests.writer.test_envelopes import CONNECT, DEBEZIUM, base64_of, change, connect, encoded, field
from tests.writer.test_formats import EVENT, canal, source_row
from tests.writer.test_registry import StandIn, avro, logical, optional, record, registry

__all__ = ["registry"]

Database = psycopg.Connection[Any]
Run = Callable[..., None]
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (HOW_TO / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def send(bootstrap_servers: str, topic: str, pairs: Iterable[tuple[Any, Any]], headers: Any = None) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for key, value in pairs:
        producer.produce(topic, encoded(value), encoded(key), partition=0, headers=headers)
    assert producer.flush(60) == 0


@pytest.fixture
def follow(command: Command, bootstrap_servers: str, conninfo: str, name: str, db: Database) -> Iterator[Run]:
    """Runs the command of a page, with more options; its topic and table are there for this test only."""
    topics: set[str] = set()
    tables: set[str] = set()

    def run(page: str, pairs: Iterable[tuple[Any, Any]], *more: str, registry: str = "", headers: Any = None) -> None:
        line = blocks(page, "sh")[-1]
        text = (
            line.replace("http://localhost:8081", registry)
            .replace("localhost:9092", bootstrap_servers)
            .replace("postgresql://localhost/bank", conninfo)
        )
        words = shlex.split(text)[1:]
        topic, table = words[words.index("--topic") + 1], words[words.index("--table") + 1]
        if topic not in topics:
            topics.add(create_topic(bootstrap_servers, 1, name=topic))
            tables.add(table)
            db.execute(f"DROP TABLE IF EXISTS {table}")  # that of another page
        send(bootstrap_servers, topic, pairs, headers)
        result = command(*words, *more, "--group-id", name)
        assert result.code == 0, result.err

    yield run
    for topic in topics:
        delete_topic(bootstrap_servers, topic)
    for table in tables:
        db.execute(f"DROP TABLE IF EXISTS {table}")


OWN = [
    field("id", "int32"),
    field("name", "string"),
    field("born", "int32", f"{DEBEZIUM}time.Date"),
    field("seen", "int64", f"{DEBEZIUM}time.MicroTimestamp"),
    field("at", "string", f"{DEBEZIUM}time.ZonedTimestamp"),
    field("balance", "bytes", f"{CONNECT}Decimal", parameters={"scale": "2"}),
    field("token", "string", f"{DEBEZIUM}data.Uuid"),
    field("vip", "boolean"),
]
TOKEN = "01234567-89ab-cdef-0123-456789abcdef"


def debezium(payload: Any, fields: list[dict[str, Any]]) -> dict[str, Any]:
    parts = [{"field": part, "type": "struct", "fields": fields} for part in ("before", "after")]
    return {"schema": {"type": "struct", "fields": [*parts, field("op", "string")]}, "payload": payload}


def key(number: int) -> dict[str, Any]:
    return {"schema": {"type": "struct", "fields": [field("id", "int32")]}, "payload": {"id": number}}


def customer(number: int, name: str, cents: int, **more: Any) -> dict[str, Any]:
    values = {"id": number, "name": name, "born": number, "seen": 1767323045000000 + number, "vip": number % 2 == 0}
    return values | {"at": "2026-01-02T03:04:05.5Z", "balance": base64_of(cents), "token": TOKEN} | more


def test_a_table_that_debezium_follows(follow: Run, db: Database) -> None:
    """Every kind of event of the connector, and a column that is added at the source."""
    first = [
        (key(1), debezium(change("r", None, customer(1, "a", 12345)), OWN)),
        (key(2), debezium(change("r", None, customer(2, "b", -5)), OWN)),
        (key(3), debezium(change("c", None, customer(3, "c", 0)), OWN)),
        (key(2), debezium(change("u", None, customer(2, "B", 10**20)), OWN)),
        (key(1), debezium(change("d", customer(1, "a", 12345), None), OWN)),
        (key(1), None),
        (key(3), debezium(change("d", {"id": 3}, None), OWN)),
        (key(3), None),
        (key(33), debezium(change("c", None, customer(33, "c", 1)), OWN)),
    ]
    follow("table-sink-debezium.md", first)
    kinds = "SELECT string_agg(format_type(atttypid, -1), ', ' ORDER BY attnum) FROM pg_attribute "
    kinds += "WHERE attrelid = 'customer'::regclass AND attnum > 0"
    assert db.execute(kinds).fetchone() == (
        "integer, text, date, timestamp without time zone, timestamp with time zone, numeric, uuid, boolean, jsonb",
    )
    found = db.execute(
        "SELECT id, name, born::text, seen::text, at = '2026-01-02 03:04:05.5Z', balance, token::text, vip "
        "FROM customer ORDER BY id"
    )
    assert found.fetchall() == [
        (2, "B", "1970-01-03", "2026-01-02 03:04:05.000002", True, Decimal(10**20) / 100, TOKEN, True),
        (33, "c", "1970-02-03", "2026-01-02 03:04:05.000033", True, Decimal("0.01"), TOKEN, False),
    ]
    wider = [*OWN, field("phone", "string"), field("since", "int32", f"{CONNECT}Date")]
    second = [
        (key(2), debezium(change("u", None, customer(2, "B", 7, phone="+49", since=1)), wider)),
        (key(40), debezium(change("u", customer(33, "c", 1), customer(40, "c", 2, phone=None, since=2)), wider)),
    ]
    follow("table-sink-debezium.md", second, "--add-columns")
    after = db.execute("SELECT id, balance, phone, since::text FROM customer ORDER BY id").fetchall()
    assert after == [(2, Decimal("0.07"), "+49", "1970-01-02"), (40, Decimal("0.02"), None, "1970-01-03")]


def test_a_large_value_that_the_table_never_had_is_set_aside(
    command: Command, bootstrap_servers: str, conninfo: str, name: str, db: Database
) -> None:
    """The sink began behind the create of 1; that of 2 is in its first batch, and the row of 3 in the table."""
    create_topic(bootstrap_servers, 1, name=name)
    db.execute(
        f"CREATE TABLE {name} (id int PRIMARY KEY, name text, body text); INSERT INTO {name} VALUES (3, 'c', 'x')"
    )
    gone = "__debezium_unavailable_value"
    events = [("u", 2, "b", "y"), ("u", 1, "A", gone), ("u", 2, "B", gone), ("u", 3, "C", gone), ("u", 4, "d", None)]
    fields = [field("id", "int32"), field("name", "string"), field("body", "string")]
    sent: list[tuple[str, Any]] = [
        (op, {"id": number, "name": called, "body": body}) for op, number, called, body in events
    ]
    send(bootstrap_servers, name, [(key(row["id"]), debezium(change(op, None, row), fields)) for op, row in sent])
    where = ("--bootstrap-servers", bootstrap_servers, "--conninfo", conninfo, "--group-id", name, "--until-end")
    how = ("--format", "debezium", "--mode", "upsert", "--missing", "keep", "--start", "earliest")
    refused = command("sink", "--topic", name, "--table", name, *where, *how)
    assert refused.code == 1
    assert f"{name}[0] offset 1: column body: a large value" in refused.err
    result = command("sink", "--topic", name, "--table", name, *where, *how, "--on-poison", "dead-letter")
    assert result.code == 0, result.err
    found = db.execute(f"SELECT * FROM {name} ORDER BY id").fetchall()
    assert found == [(2, "B", "y"), (3, "C", "x"), (4, "d", None)]
    letters = "SELECT partition, message_offset FROM exactly_once.dead_letter WHERE topic = %s"
    assert db.execute(letters, (name,)).fetchall() == [(0, 1)]


def test_a_topic_of_connect(follow: Run, db: Database) -> None:
    fields = [
        field("id", "string"),
        field("day", "int32", f"{CONNECT}Date"),
        field("at", "int64", f"{CONNECT}Timestamp"),
        field("price", "bytes", f"{CONNECT}Decimal", parameters={"scale": "3"}),
        field("count", "int16"),
        field("weight", "double"),
    ]

    def order(name: str, price: int) -> dict[str, Any]:
        payload = {"id": name, "day": 0, "at": 1767323045678, "price": base64_of(price), "count": 3, "weight": 0.5}
        return {"schema": {"type": "struct", "fields": fields}, "payload": payload}

    keys = {"schema": {"type": "struct", "fields": fields[:1]}}
    pairs = [({**keys, "payload": {"id": n}}, order(n, p)) for n, p in (("x", 1500), ("y", -1), ("x", 2000))]
    follow("table-sink-connect.md", [*pairs, ({**keys, "payload": {"id": "y"}}, None)])
    found = db.execute("SELECT id, day::text, at::text, price, count, weight FROM orders").fetchall()
    assert found == [("x", "1970-01-01", "2026-01-02 03:04:05.678", Decimal(2), 3, 0.5)]
    follow("table-sink-connect.md", [({**keys, "payload": {"id": "x"}}, connect(None))])
    assert db.execute("SELECT count(*) FROM orders").fetchone() == (0,)


def test_a_table_that_maxwell_follows(follow: Run, db: Database) -> None:
    def event(kind: str, number: int, called: str, **old: Any) -> tuple[Any, Any]:
        value = {"database": "shop", "table": "customer", "type": kind, "ts": 1, "xid": 2, "commit": True}
        value |= {"data": {"id": number, "name": called}} | ({"old": old} if old else {})
        return {"database": "shop", "table": "customer", "pk.id": number}, value

    events = [event("insert", 1, "a"), event("insert", 2, "b"), event("update", 1, "A", name="a")]
    events += [event("delete", 2, "b"), event("insert", 3, "c"), event("update", 30, "c", id=3)]
    follow("table-sink-maxwell.md", events)
    assert db.execute("SELECT id, name FROM customer ORDER BY id").fetchall() == [(1, "A"), (30, "c")]


def test_raw_messages_become_keys_and_values(
    command: Command, bootstrap_servers: str, conninfo: str, name: str, db: Database
) -> None:
    create_topic(bootstrap_servers, 1, name=name)
    send(bootstrap_servers, name, [(b"\0k", b"\xff\0"), (b"k", b"{}"), (b"\0k", None), (b"", b"")])
    where = ("--bootstrap-servers", bootstrap_servers, "--conninfo", conninfo, "--until-end", "--start", "earliest")
    how: dict[str, tuple[str, ...]] = {"log": ("--metadata", "o=offset"), "kept": ("--mode", "upsert", "--key", "key")}
    for table, more in how.items():
        made = ("--table", f"{name}_{table}", "--group-id", f"{name}-{table}", "--create-table")
        result = command("sink", "--topic", name, "--format", "raw", *made, *more, *where)
        assert result.code == 0, result.err
    log = db.execute(f"SELECT key, value FROM {name}_log ORDER BY o").fetchall()
    assert log == [(b"\0k", b"\xff\0"), (b"k", b"{}"), (b"\0k", None), (b"", b"")]
    assert db.execute(f"SELECT key, value FROM {name}_kept ORDER BY key").fetchall() == [(b"", b""), (b"k", b"{}")]


def test_an_envelope_that_is_not_named_is_refused_with_the_name_of_the_option(
    command: Command, bootstrap_servers: str, conninfo: str, name: str, db: Database
) -> None:
    create_topic(bootstrap_servers, 1, name=name)
    db.execute(f"CREATE TABLE {name} (id int, name text)")
    send(bootstrap_servers, name, [(key(1), debezium(change("c", None, customer(1, "a", 1)), OWN))])
    where = ("--bootstrap-servers", bootstrap_servers, "--conninfo", conninfo, "--group-id", name)
    result = command("sink", "--topic", name, "--table", name, "--until-end", *where)
    assert result.code == 1
    assert f"{name}[0] offset 0" in result.err
    assert "--format debezium" in result.err
    assert db.execute(f"SELECT count(*) FROM {name}").fetchone() == (0,)


def test_rows_are_shaped_without_code(follow: Run, db: Database, caplog: pytest.LogCaptureFixture) -> None:
    def event(number: int, kind: str) -> tuple[Any, Any]:
        who = {"name": "ä", "tags": [1]}
        return {"id": number}, {"type": kind, "customer": who, "zip": 10000 + number, "debug": {"x": 1}}

    sent = [event(1, "paid"), event(2, "open"), event(3, "refunded")]
    follow("table-sink-shape.md", sent, headers=[("trace-id", "t1")])
    assert "messages left out by where, where_not, on_tombstone or on_truncate: 1" in caplog.text
    found = db.execute("SELECT to_jsonb(t) - 'sent', sent IS NOT NULL FROM shop_event t ORDER BY order_id").fetchall()
    same = {"buyer": "ä", "customer_tags": [1], "shop": "berlin", "trace": "t1", "rest": {}}
    assert found == [
        ({"order_id": 1, "type": "paid", "zip": "10001", **same}, True),
        ({"order_id": 3, "type": "refunded", "zip": "10003", **same}, True),
    ]
    kinds = db.execute("SELECT pg_typeof(order_id)::text, pg_typeof(zip)::text FROM shop_event LIMIT 1").fetchall()
    assert kinds == [("bigint", "text")]


def test_the_command_and_the_file_of_the_page_on_shapes_say_the_same() -> None:
    (line,), (file,) = blocks("table-sink-shape.md", "sh"), blocks("table-sink-shape.md", "toml")
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    given = read_flows(parser.parse_args(shlex.split(line)[1:]), ())
    assert given == read_flows(argparse.Namespace(), tomllib.loads(file)["sink"])


@pytest.mark.parametrize("page", ["debezium", "cloudevents", "schema-registry"])
def test_the_file_of_a_page_is_understood(page: str) -> None:
    (file,) = blocks(f"table-sink-{page}.md", "toml")
    read = tomllib.loads(file)
    (flow,) = read_flows(argparse.Namespace(), read["sink"], read.get("schema_registry"))
    assert flow.format == page or flow.schema_registry == read["schema_registry"]


def test_a_table_that_canal_follows(follow: Run, db: Database) -> None:
    follow(
        "table-sink-canal.md",
        [
            (None, canal("CREATE", isDdl=True).value()),
            (None, canal("INSERT", (source_row(1), None), (source_row(2), None)).value()),
            (b"7", canal("UPDATE", (source_row(20, name="b"), {"id": "2"})).value()),
            (b"7", canal("DELETE", (source_row(1), None)).value()),
        ],
    )
    found = db.execute("SELECT id, name, price, at::text, doc, raw, pg_typeof(id)::text FROM customer").fetchall()
    assert found == [(20, "b", Decimal("1.50"), "2026-01-02 03:04:05.123", {"a": [1]}, b"\0\xff'", "integer")]


def test_lines_of_csv_and_maps_of_messagepack(follow: Run, db: Database) -> None:
    follow("table-sink-csv.md", [(None, b'1,"a, b",\n'), (None, b"02,,1.50")])
    assert db.execute("SELECT * FROM reading").fetchall() == [("1", "a, b", None), ("02", None, "1.50")]
    value = {"id": 1, "at": datetime(2026, 1, 2, tzinfo=UTC), "x": 1.5, "raw": b"\0"}
    follow("table-sink-messagepack.md", [(None, msgspec.msgpack.encode(value))])
    assert db.execute("SELECT id, at, x, raw FROM event").fetchall() == [(1, value["at"], Decimal("1.5"), b"\0")]


def test_cloudevents_of_both_modes(follow: Run, db: Database) -> None:
    headers = [(f"ce_{name}", text) for name, text in EVENT.items()]
    follow("table-sink-cloudevents.md", [(None, {"amount": 1})] * 2, headers=headers)
    follow("table-sink-cloudevents.md", [(None, {**EVENT, "id": "z", "data": {"amount": 2}})])
    found = db.execute("SELECT id, type, data, pg_typeof(time)::text FROM order_event ORDER BY id").fetchall()
    kind = "timestamp with time zone"
    assert found == [("a1", "paid", {"amount": 1}, kind), ("z", "paid", {"amount": 2}, kind)]


def test_avro_of_a_registry_that_is_away_at_first(
    follow: Run, db: Database, registry: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    schema = record("Account", id="int", name=optional("string"), at=logical("long", "timestamp-micros"))
    number, bare = registry.add(json.dumps(schema)), json.loads(json.dumps(schema).replace("logicalType", "other"))
    sent = [{"id": i, "name": None, "at": 1767323045678901} for i in (1, 2)]
    pairs: list[Any] = [(str(one["id"]).encode(), avro(number, bare, one)) for one in sent]
    registry.is_away_for = 2
    follow("table-sink-schema-registry.md", [*pairs, (b"1", None)], registry=registry.url)
    assert "does not answer for schema 1: HTTP Error 503" in caplog.text
    registry.is_away_for = 2
    pairs = [(b"3", avro(number, bare, {"id": 3, "name": "c", "at": 0})), (b"3", None)]
    follow("table-sink-schema-registry.md", pairs, registry=registry.url)
    assert "waiting (try 1): the Schema Registry" in caplog.text
    found = db.execute("SELECT id, name, at AT TIME ZONE 'UTC', pg_typeof(id)::text FROM account").fetchall()
    assert found == [(2, None, datetime(2026, 1, 2, 3, 4, 5, 678901), "integer")]  # noqa: DTZ001 - as it is stored
