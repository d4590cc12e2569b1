"""A real table is the source: what Debezium's Postgres connector writes of its changes makes the same table again.

The encodings are those of the connector's documentation, made here of what Postgres itself shows of each value; columns
of xml and of extensions are left out, which the embedded server lacks.
"""

# ruff: noqa: E501 - a table of types

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import psycopg
from confluent_kafka import Producer

from tests.cli.conftest import Command
from tests.support.seeds import first_seed
from tests.support.topics import create_topic
from tests.writer.test_envelopes import CONNECT, DEBEZIUM, base64_of, change
from tests.writer.test_envelopes import field as typed

Database = psycopg.Connection[Any]
Encode = Callable[[str], Any]
EVENTS = 400


def unscaled(scale: int) -> Encode:
    return lambda text: base64_of(int(Decimal(text).scaleb(scale)))


def variable(text: str) -> Any:
    scale = -int(Decimal(text).as_tuple().exponent)
    return {"scale": scale, "value": unscaled(scale)(text)}


def bits(text: str) -> str:
    return base64.b64encode(int(text, 2).to_bytes(-(-len(text) // 8), "little")).decode()


def point(text: str) -> Any:
    x, y = json.loads(text.replace("(", "[").replace(")", "]"))
    return {"x": x, "y": y, "wkb": None, "srid": None}


def decimal(scale: int) -> dict[str, Any]:
    return {"type": "bytes", "name": f"{CONNECT}Decimal", "parameters": {"scale": str(scale)}}


def array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "name": f"{DEBEZIUM}{name}", **more}


STRING, INT32 = {"type": "string"}, {"type": "int32"}
EPOCH = "(extract(epoch FROM {}) * %d)::bigint"
COLUMNS: dict[str, tuple[dict[str, Any], str, Encode, list[str]]] = {
    # by type: the connector's schema, how Postgres is asked for the value, what becomes of its text, and values
    "boolean": ({"type": "boolean"}, "{}", json.loads, ["true", "false"]),
    "bit(1)": ({"type": "boolean"}, "{} = B'1'", json.loads, ["0", "1"]),
    "bit(12)": (logical("bytes", "data.Bits", parameters={"length": "12"}), "{}", bits, ["0" * 12, "100000000011"]),
    "smallint": ({"type": "int16"}, "{}", int, ["-32768", "7"]),
    "bigint": ({"type": "int64"}, "{}", int, ["9223372036854775807", "-9223372036854775808"]),
    "real": ({"type": "float"}, "{}", float, ["1.5", "-3.4028235e38"]),
    "double precision": ({"type": "double"}, "{}", float, ["0.1", "1e-300"]),
    "numeric(12,4)": (decimal(4), "{}", unscaled(4), ["0", "-99999999.9999", "1.5"]),
    "numeric": (logical("struct", "data.VariableScaleDecimal"), "{}", variable, ["1e40", "-0.00000000000000000001", "0"]),
    "money": (decimal(2), "{}::numeric", unscaled(2), ["12.50", "-0.01"]),
    "varchar(20)": (STRING, "{}", str, ["", "ä\t\\N 'x'"]),
    "char(5)": (STRING, "{}", lambda text: text.ljust(5), ["abc", "abcde"]),
    "text": (STRING, "{}", str, ["NULL", "12", '{"a"}']),
    "json": (logical("string", "data.Json"), "{}", str, ['{"b":  1.50, "a": null}', "[]", "null"]),
    "jsonb": (logical("string", "data.Json"), "{}", str, ['{"b": 1.50}', '"text"', "7"]),
    "date": (logical("int32", "time.Date"), "{} - date '1970-01-01'", int, ["2026-01-02", "0001-01-01", "1969-12-31"]),
    "time": (logical("int64", "time.MicroTime"), EPOCH % 10**6, int, ["00:00", "23:59:59.999999", "24:00"]),
    "timetz": (logical("string", "time.ZonedTime"), "{}", lambda text: text.replace("+00", "Z"), ["03:04:05.5+00"]),
    "timestamp": (logical("int64", "time.MicroTimestamp"), EPOCH % 10**6, int, ["1969-12-31 23:59:59.999999", "9999-12-31"]),
    "timestamp(3)": (logical("int64", "time.Timestamp"), EPOCH % 10**3, int, ["2026-01-02 03:04:05.678"]),
    "timestamptz": (
        logical("string", "time.ZonedTimestamp"),
        """to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')""",
        str,
        ["2026-01-02 03:04:05.000006+13", "1900-01-01 00:00-01"],
    ),
    "interval": (logical("int64", "time.MicroDuration"), EPOCH % 10**6, int, ["1 day 02:00:00.000001", "-3 hours"]),
    "bytea": ({"type": "bytes"}, "encode({}, 'base64')", str, ["\\x", "\\x00ff27"]),
    "uuid": (logical("string", "data.Uuid"), "{}", str, ["00000000-0000-0000-0000-00000000000a"]),
    "point": (logical("struct", "data.geometry.Point"), "{}", point, ["(1.5,-2)", "(0,1e20)"]),
    "inet": (STRING, "{}", str, ["10.0.0.1", "::1/64"]),
    "cidr": (STRING, "{}", str, ["10.0.0.0/8"]),
    "macaddr": (STRING, "{}", str, ["08:00:2b:01:02:03"]),
    "int4range": (STRING, "{}", str, ["[1,5)", "empty"]),
    "tstzrange": (STRING, "{}", str, ["[2026-01-01 00:00+00,)"]),
    "tsvector": (logical("string", "data.Tsvector"), "{}", str, ["'a':1A 'b''c'"]),
    "mood": (logical("string", "data.Enum", parameters={"allowed": "sad,happy"}), "{}", str, ["sad", "happy"]),
    "integer[]": (array(INT32), "to_json({})", json.loads, ["{}", "{1,NULL,-5}"]),
    "text[]": (array(STRING), "to_json({})", json.loads, ['{"a b",NULL,"q\\""}']),
    "date[]": (array(logical("int32", "time.Date")), "(SELECT to_json(array_agg(d - date '1970-01-01')) FROM unnest({}) d)", json.loads, ["{2026-01-02,1969-12-31}"]),
    "numeric(6,2)[]": (array(decimal(2)), "to_json({}::text[])", lambda text: [unscaled(2)(n) for n in json.loads(text)], ["{1.50,-0.01}"]),
}  # fmt: skip
LATER = ("timestamp(3)", "numeric(12,4)", "jsonb")
"""Types of columns that are added at the source while it is followed."""


class Source:
    """A table that is changed, and the events that its connector writes."""

    def __init__(self, db: Database, table: str, chance: random.Random) -> None:
        self.db, self.table, self.chance = db, table, chance
        self.columns = {f"c{number}": kind for number, kind in enumerate(COLUMNS)}
        self.keys: set[int] = set()

    def add_columns(self) -> None:
        for kind in LATER:
            self.columns[column := f"later{len(self.columns)}"] = kind
            self.db.execute(f"ALTER TABLE {self.table} ADD {column} {self.ddl(kind)}")

    def ddl(self, kind: str) -> str:
        return f"{self.table}_mood" if kind == "mood" else kind

    def value(self, kind: str) -> str | None:
        return self.chance.choice([None, *COLUMNS[kind][3]])

    def wrapped(self, op: str, row: Any) -> Any:
        fields = [typed("id", "int32"), *({"field": c, **COLUMNS[kind][0]} for c, kind in self.columns.items())]
        parts = [{"field": part, "type": "struct", "fields": fields} for part in ("before", "after")]
        before, after = (row, None) if op == "d" else (None, row)
        return {"schema": {"type": "struct", "fields": parts}, "payload": change(op, before, after)}

    def stored(self, op: str, key: int) -> tuple[str, Any]:
        """An event of a row as it is now."""
        asked = ", ".join(f"({COLUMNS[kind][1].format(c)})::text" for c, kind in self.columns.items())
        found = self.db.execute(f"SELECT {asked} FROM {self.table} WHERE id = {key}").fetchone() or ()
        row = {
            column: None if text is None else COLUMNS[kind][2](text)
            for (column, kind), text in zip(self.columns.items(), found, strict=True)
        }
        return self.key(key), self.wrapped(op, {"id": key} | row)

    def deleted(self, key: int) -> list[tuple[str, Any]]:
        """With the default replica identity only the key of the old row is known; a tombstone follows."""
        return [(self.key(key), self.wrapped("d", {"id": key} | dict.fromkeys(self.columns))), (self.key(key), None)]

    def key(self, number: int) -> str:
        return json.dumps({"schema": {"type": "struct", "fields": [typed("id", "int32")]}, "payload": {"id": number}})

    def change(self) -> list[tuple[str, Any]]:
        """Change a row; of a key that changes the connector writes a delete and a create."""
        key = self.chance.randrange(60)
        if key not in self.keys:
            self.keys.add(key)
            values = [self.value(kind) for kind in self.columns.values()]
            marks = ", ".join(f"%s::text::{self.ddl(kind)}" for kind in self.columns.values())
            self.db.execute(f"INSERT INTO {self.table} (id, {', '.join(self.columns)}) VALUES ({key}, {marks})", values)
            return [self.stored(self.chance.choice("cr"), key)]
        what = self.chance.random()
        if what < 0.2:
            self.keys.remove(key)
            self.db.execute(f"DELETE FROM {self.table} WHERE id = {key}")
            return self.deleted(key)
        if what < 0.35 and (moved := key + 100) not in self.keys:
            self.keys = self.keys - {key} | {moved}
            self.db.execute(f"UPDATE {self.table} SET id = {moved} WHERE id = {key}")
            return [*self.deleted(key), self.stored("c", moved)]
        for column in self.chance.sample(sorted(self.columns), 5):
            kind = self.columns[column]
            text = self.value(kind)
            statement = f"UPDATE {self.table} SET {column} = %s::text::{self.ddl(kind)} WHERE id = {key}"
            self.db.execute(statement, (text,))
        return [self.stored("u", key)]

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        """Every value as Postgres shows it; a duration that is as long is the same."""
        ways = {"interval": "extract(epoch FROM {})", "money": "{}::numeric"}
        shown = ", ".join(f"({ways.get(kind, '{}').format(c)})::text" for c, kind in self.columns.items())
        return self.db.execute(f"SELECT id, {shown} FROM {table} ORDER BY id").fetchall()


def test_a_table_of_every_type_is_followed_through_every_kind_of_event(
    operate: Command, bootstrap_servers: str, name: str, db: Database
) -> None:
    db.execute("SET timezone = 'UTC'")
    db.execute(f"CREATE TYPE {name}_mood AS ENUM ('sad', 'happy')")
    source = Source(db, name, random.Random(first_seed()))
    columns = ", ".join(f"{column} {source.ddl(kind)}" for column, kind in source.columns.items())
    copy, money = f"{name}_copy", next(c for c, kind in source.columns.items() if kind == "money")
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, {columns}); CREATE TABLE {copy} (LIKE {name} INCLUDING ALL)")
    db.execute(f"ALTER TABLE {copy} ALTER {money} TYPE numeric")  # money itself rounds, and is read by a locale
    create_topic(bootstrap_servers, 2, name=name)
    command = ["sink", "--topic", name, "--table", copy, "--format", "debezium", "--mode", "upsert"]
    command += ["--evolve", "add-columns", "--until-end"]
    for is_wider in (False, True):
        if is_wider:
            source.add_columns()
        producer = Producer({"bootstrap.servers": bootstrap_servers})
        for key, value in (event for _ in range(EVENTS) for event in source.change()):
            place = json.loads(key)["payload"]["id"] % 2
            producer.produce(name, None if value is None else json.dumps(value).encode(), key.encode(), partition=place)
        assert producer.flush(60) == 0
        result = operate(*command)
        assert result.code == 0, result.err
        assert len(source.keys) > 20
        assert source.rows(copy) == source.rows(name)
