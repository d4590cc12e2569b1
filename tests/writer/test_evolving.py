"""Tables that evolve: a field that comes while the sink runs gets a column, in the transaction that first fills it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from confluent_kafka import Message, Producer

from exactly_once import ExactlyOnceConsumer
from exactly_once.cli.sink_flows import Flow
from exactly_once.writer import TableError, TableSink
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


def test_what_can_be_no_column_is_told_once(db: Database, name: str, caplog: pytest.LogCaptureFixture) -> None:
    db.execute(f"CREATE TABLE {name} (id int, made int GENERATED ALWAYS AS (id + 1) STORED)")
    to = sink(name)
    for _ in range(3):
        write(db, to, message({"id": 1, "ctid": 2, "made": 7, 'q"': 1}))
    assert types(db, name) == {"id": "integer", "made": "integer"}
    assert caplog.text.count("no column can have such a name") == 1
    assert to.unused_fields == {"ctid": 3, "made": 3, 'q"': 3}


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
    assert producer.flush(30) == 0
    with make_consumer(start="earliest", max_messages=50) as consumer:
        consumer.subscribe([topic])
        consumer.run(sink(name), until_end=True)
    counted = db.execute(f"SELECT count(*), count(DISTINCT id), count(f0), count(f3), sum(late) FROM {name}").fetchone()
    assert counted == (400, 400, 100, 100, 399)
    assert types(db, name) == {"id": "integer", **dict.fromkeys(("f0", "f1", "f2", "f3", "late"), "bigint")}
