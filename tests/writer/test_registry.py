"""Schema Registry: Avro, Protobuf and JSON Schema in its wire format end as rows.

The registry is a stand-in: the answers over HTTP that a client asks for, as Confluent's documentation shows them.
A real one takes a Java service and a minute.
"""

# ruff: noqa: PLR0917 - fixtures and parameters are positional

from __future__ import annotations

import base64
import json
import re
import struct
import sys
import threading
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any
from uuid import UUID

import psycopg
import pytest
from confluent_kafka import Message

from exactly_once.cli.sink_flows import Flow
from exactly_once.errors import ConfigurationError
from exactly_once.writer import BadRow, TableError
from exactly_once.writer.errors import RegistryAway
from exactly_once.writer.from_json import JsonDecoder
from exactly_once.writer.registry import Registry
from tests.cli.test_sink_claim import Claimed
from tests.support.require import lacking, skip_unless
from tests.writer.test_envelopes import change
from tests.writer.test_shaping import message, rows

Database = psycopg.Connection[Any]


class StandIn:
    """Schemas by id, and by subject and version for those that others refer to."""

    def __init__(self) -> None:
        self.schemas: dict[int, dict[str, Any]] = {}
        self.subjects: dict[tuple[str, int], int] = {}
        self.asked: list[str] = []
        self.status = 200
        self.body: Any = ...  # what it answers in place of a schema
        self.is_away_for = 0
        """So many requests are answered with 503 first."""
        self.authorization = ""
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stand_in.authorization = self.headers.get("Authorization", "")
                status, body = stand_in.answer(self.path)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def add(self, text: str, kind: str = "AVRO", *, serialized: bytes = b"", references: Any = ()) -> int:
        number = len(self.schemas) + 1
        self.schemas[number] = {"schema": text, "schemaType": kind, "references": list(references)}
        self.schemas[number] |= {"serialized": base64.b64encode(serialized).decode()}
        self.subjects[f"subject{number}", 1] = number
        return number

    def reference(self, name: str, number: int) -> dict[str, Any]:
        return {"name": name, "subject": f"subject{number}", "version": 1}

    def answer(self, path: str) -> tuple[int, Any]:
        self.asked.append(path)
        self.is_away_for -= 1
        if self.is_away_for >= 0:
            return 503, "starting"
        if self.body is not ...:
            return 200, self.body
        if self.status != 200:
            return self.status, {"error_code": self.status, "message": "not now"}
        if found := re.match(r"/schemas/ids/(\d+)", path):
            schema = self.schemas.get(int(found[1]))
        else:
            found = re.match(r"/subjects/(\w+)/versions/(\d+)", path)
            assert found is not None, path
            number = self.subjects[found[1], int(found[2])]
            schema = self.schemas[number] | {"id": number, "subject": found[1], "version": int(found[2])}
        if schema is None:
            return 404, {"error_code": 40403, "message": "Schema not found"}
        return 200, schema | ({"schema": schema["serialized"]} if "format=serialized" in path else {})

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def registry() -> Iterator[StandIn]:
    skip_unless("registry", lacking("fastavro", "google") or None)
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


def avro(number: int, schema: Any, value: Any, *named: Any) -> bytes:
    import fastavro  # noqa: PLC0415 - the tests of a machine without it are skipped

    types: dict[str, Any] = {}
    for each in named:
        fastavro.parse_schema(each, named_schemas=types)
    out = BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema, named_schemas=types), value)
    return framed(number, out.getvalue())


def framed(number: int, data: bytes) -> bytes:
    return struct.pack(">bI", 0, number) + data


def write(db: Database, table: str, registry: StandIn, *messages: Message, **flow: Any) -> None:
    sink = Flow(topics=("t",), table=table, schema_registry=registry.url, **flow).sink()
    with db.transaction():
        sink.write(db, messages)


def record(called: str, /, **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": called, "fields": [{"name": n, "type": t} for n, t in fields.items()]}


def optional(kind: Any) -> list[Any]:
    return ["null", kind]


def logical(kind: str, called: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": called, **more}


PAYMENT = record(
    "bank.Payment",
    id="long",
    name=optional("string"),
    amount=optional(logical("bytes", "decimal", precision=20, scale=2)),
    fixed=logical("fixed", "decimal", precision=9, scale=1, name="Nine", size=4),
    day=logical("int", "date"),
    clock=logical("long", "time-micros"),
    at=logical("long", "timestamp-millis"),
    plain=logical("long", "local-timestamp-micros"),
    token=logical("string", "uuid"),
    short_token=logical("fixed", "uuid", name="Sixteen", size=16),
    raw="bytes",
    low="double",
    single="float",
    color={"type": "enum", "name": "Color", "symbols": ["RED", "GREEN"]},
    list={"type": "array", "items": optional("int")},
    deep={"type": "map", "values": "double"},
    again=optional("Color"),
    either=["null", "string", "int"],
)
COLUMNS = """(id bigint PRIMARY KEY, name text, amount numeric, fixed numeric, day date, clock time, at timestamptz,
    plain timestamp, token uuid, short_token uuid, raw bytea, low float8, single real, color text, list int[],
    deep jsonb, again text, either text)"""
TOKEN = "01234567-89ab-cdef-0123-456789abcdef"


def test_avro_of_every_type_ends_as_what_it_stands_for(registry: StandIn, db: Database, name: str) -> None:
    db.execute(f"SET timezone = 'UTC'; CREATE TABLE {name} {COLUMNS}")
    number = registry.add(json.dumps(PAYMENT))
    value: dict[str, Any] = {"id": 2**62, "name": None}
    # What Avro writes, not what a library of Python makes of it.
    bare = json.loads(json.dumps(PAYMENT).replace("logicalType", "other"))
    unscaled = (-1234567890123456789).to_bytes(9, signed=True)
    value |= {"amount": unscaled, "fixed": (-1).to_bytes(4, signed=True), "day": -1, "clock": 3723000001}
    value |= {"at": 1767323045678, "plain": 1767323045678901, "token": TOKEN, "raw": b"\0\xff", "low": float("nan")}
    value |= {"short_token": UUID(TOKEN).bytes}
    value |= {"single": 0.1, "color": "GREEN", "list": [1, None], "deep": {"a": float("inf")}, "again": "RED"}
    value |= {"either": 5}
    zero = {**value, "id": 1, "amount": None, "fixed": bytes(4), "low": -0.0, "either": None, "name": ""}
    write(db, name, registry, message(avro(number, bare, value)), message(avro(number, bare, zero)))
    (first, second) = rows(db, name, "t::text")
    assert second[0] == (
        f'({2**62},,-12345678901234567.89,-0.1,1969-12-31,01:02:03.000001,"2026-01-02 03:04:05.678+00",'
        f'"2026-01-02 03:04:05.678901",{TOKEN},{TOKEN},"\\\\x00ff",NaN,0.1,GREEN,'
        f'"{{1,NULL}}","{{""a"": ""Infinity""}}",RED,5)'
    )
    assert first[0].startswith('(1,"",,0.0,1969-12-31,')
    assert ",-0,0.1," in first[0]
    assert registry.asked == [f"/schemas/ids/{number}"] or len(registry.asked) == 1


def test_a_logical_type_of_a_type_that_it_cannot_be_of_is_nothing(registry: StandIn, db: Database, name: str) -> None:
    """As Avro has it; some producers name the text of a time so."""
    schema = record(
        "V",
        at=logical("string", "timestamp-millis"),
        price=logical("string", "decimal", precision=9, scale=2),
        short=logical("fixed", "uuid", name="Four", size=4),
        long=logical("bytes", "uuid"),
    )
    plain = record("V", at="string", price="string", short={"type": "fixed", "name": "Four", "size": 4}, long="bytes")
    value = {"at": "2026-01-02T03:04:05Z", "price": "1.50", "short": b"1234", "long": b"\0"}
    sent = message(avro(registry.add(json.dumps(schema)), plain, value))
    db.execute(f"SET timezone = 'UTC'; CREATE TABLE {name} (at timestamptz, price numeric, short bytea, long bytea)")
    write(db, name, registry, sent)
    assert rows(db, name, "at::text, price::text, short, long") == [("2026-01-02 03:04:05+00", "1.50", b"1234", b"\0")]
    decoder = Flow(topics=("t",), table=name, schema_registry=registry.url).unwrapping(JsonDecoder())
    assert decoder.types([sent]) == {"at": "text", "price": "text", "short": "bytea", "long": "bytea"}


def test_logical_types_within_objects_lists_and_maps(registry: StandIn, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, a jsonb)")
    cents, day = logical("bytes", "decimal", precision=9, scale=2), logical("int", "date")
    inner = record("In", day=optional(day), days={"type": "array", "items": optional(day)})
    inner["fields"].append({"name": "prices", "type": {"type": "map", "values": optional(cents)}})
    schema = record("Out", id="int", a=optional(inner))
    number, bare = registry.add(json.dumps(schema)), json.loads(json.dumps(schema).replace("logicalType", "other"))
    value = {"id": 1, "a": {"day": 1, "days": [0, None], "prices": {"x": b"\0\x96", "y": None}}}
    write(db, name, registry, message(avro(number, bare, value)))
    expected = {"day": "1970-01-02", "days": ["1970-01-01", None], "prices": {"x": 1.5, "y": None}}
    assert rows(db, name) == [(1, expected)]


def test_types_that_another_schema_brings_are_known(registry: StandIn, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int, city text, born date)")
    person = record("org.Person", born=logical("int", "date"), home=optional("org.Address"))
    address = record("org.Address", city="string")
    inner = registry.add(json.dumps(address))
    middle = registry.add(json.dumps(person), references=[registry.reference("org.Address", inner)])
    outer = record("org.Order", id="int", who="Person", tree=optional("Order"))
    number = registry.add(json.dumps(outer), references=[registry.reference("org.Person", middle)])
    value = {"id": 1, "who": {"born": 1, "home": {"city": "x"}}, "tree": None}
    bare = json.loads(json.dumps(person).replace("logicalType", "other"))
    sent = avro(number, outer, value, address, bare)
    write(db, name, registry, message(sent), fields={"id": "id", "city": "who.home.city", "born": "who.born"})
    assert rows(db, name, "id, city, born::text") == [(1, "x", "1970-01-02")]


def test_change_events_of_debezium_in_avro_with_keys_in_avro(registry: StandIn, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, at timestamp, price numeric)")
    fields = {
        "id": "int",
        "at": optional({"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"}),
        "price": optional(
            {
                **logical("bytes", "decimal", scale=2, precision=9),
                "connect.name": "org.apache.kafka.connect.data.Decimal",
                "connect.parameters": {"scale": "2"},
            }
        ),
    }
    row = record("Value", **fields)
    envelope = record("Envelope", before=optional(row), after=optional("Value"), op="string", source="string")
    keys = record("Key", id="int")
    value_id, key_id = registry.add(json.dumps(envelope)), registry.add(json.dumps(keys))
    bare = json.loads(json.dumps(envelope).replace("logicalType", "other"))

    def event(op: str, number: int, before: Any, after: Any) -> Message:
        whole = {**change(op, before, after), "source": ""}
        return message(avro(value_id, bare, whole), avro(key_id, keys, {"id": number}))

    one, two = ({"id": i, "at": 1767323045678901, "price": (150 + i).to_bytes(2)} for i in (1, 2))
    sent = [event("c", 1, None, one), event("r", 2, None, two), event("u", 2, two, {**two, "at": None})]
    sent += [event("d", 1, one, None), message(None, avro(key_id, keys, {"id": 1}))]
    for size in (1, len(sent)):
        for i in range(0, len(sent), size):
            write(db, name, registry, *sent[i : i + size], format="debezium", mode="upsert")
        assert rows(db, name, "id, at, price") == [(2, None, Decimal("1.52"))]


def test_an_upsert_deletes_by_keys_in_avro_and_by_plain_ones(registry: StandIn, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id text PRIMARY KEY, v int)")
    number, key = registry.add(json.dumps(record("V", id="string", v="int"))), registry.add('"string"')
    sent = [message(avro(number, record("V", id="string", v="int"), {"id": i, "v": 1}), b"k") for i in "abcd"]
    gone = [message(None, avro(key, "string", "a")), message(None, b"b"), message(None, b'"c"')]
    write(db, name, registry, *sent, *gone, mode="upsert")
    assert rows(db, name) == [("d", 1)]


def test_bytes_of_a_schema_are_no_text_to_which_an_option_applies(registry: StandIn, db: Database, name: str) -> None:
    """Their base64 may look like hexadecimal; the topic has text in messages of an earlier schema."""
    db.execute(f"CREATE TABLE {name} (id bytea PRIMARY KEY, v bytea)")
    text, kept = record("V", id="string", v=optional("string")), record("V", id="bytes", v=optional("bytes"))
    looks_like_hex = base64.b64decode("00ff10ab")
    sent = [
        avro(registry.add(json.dumps(schema)), schema, {"id": value, "v": value})
        for schema, value in ((text, "00ff10ab"), (kept, looks_like_hex))
    ]
    flow: dict[str, Any] = {"mode": "upsert", "binary": {"id": "hex", "v": "hex"}}
    write(db, name, registry, *(message(value, b"k") for value in sent), **flow)
    assert rows(db, name) == [(bytes.fromhex("00ff10ab"),) * 2, (looks_like_hex,) * 2]
    key = record("K", id="bytes")
    gone = avro(registry.add(json.dumps(key)), key, {"id": looks_like_hex})
    write(db, name, registry, message(None, gone), **flow)
    assert rows(db, name) == [(bytes.fromhex("00ff10ab"),) * 2]


def test_the_bytes_of_a_decimal_are_none_of_an_option(registry: StandIn, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (v bytea)")
    schema = record("V", v=logical("bytes", "decimal", precision=9, scale=2))
    sent = avro(registry.add(json.dumps(schema)), schema, {"v": Decimal("-150.25")})
    with pytest.raises(BadRow, match=r"column v: .*-150\.25"):
        write(db, name, registry, message(sent), binary={"v": "hex"})


@pytest.mark.parametrize(
    ("kind", "text", "options"),
    [
        ("int", "1234", {}),
        ("numeric", "1234", {}),
        ("time", "1234", {}),
        ("date", "20231114", {}),
        ("boolean", "true", {"lax": True}),
        ("float8", "1234", {"lax": True}),
        ("timestamptz", "1234", {"epoch": {"v": "s"}}),
        ("uuid", "a0eebc999c0b4ef8bb6d6bb9bd380a11", {}),
        ("bit varying", "1010", {}),
    ],
)
def test_bytes_of_a_schema_are_no_value_that_their_base64_looks_like(
    kind: str, text: str, options: dict[str, Any], registry: StandIn, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (v {kind})")
    schema = record("V", v="bytes")
    sent = avro(registry.add(json.dumps(schema)), schema, {"v": base64.b64decode(text)})
    with pytest.raises(BadRow, match=f'column v: "{text}" are bytes, as the schema says, and .* make the column bytea'):
        write(db, name, registry, message(sent), **options)


@pytest.mark.parametrize(
    ("kind", "unit", "told", "sent", "expected"),
    [
        ("timestamptz", "s", logical("long", "timestamp-millis"), 5_001, "5.001"),
        ("timestamp", "s", logical("long", "local-timestamp-micros"), 10**6, "1"),
        ("date", "days", logical("int", "date"), 2, "172800"),
        ("time", "us", logical("int", "time-millis"), 7, "0.007"),
    ],
)
def test_a_time_that_a_later_schema_tells_is_not_one_of_the_option(
    kind: str, unit: str, told: Any, sent: int, expected: str, registry: StandIn, db: Database, name: str
) -> None:
    db.execute(f"SET timezone = 'UTC'; CREATE TABLE {name} (v {kind})")
    pairs = (record("V", v="long"), 0), (record("V", v=told), sent)
    both = [message(avro(registry.add(json.dumps(schema)), schema, {"v": value})) for schema, value in pairs]
    write(db, name, registry, *both, epoch={"v": unit})
    assert rows(db, name, "extract(epoch FROM v)") == [(0,), (Decimal(expected),)]


def test_a_decimal_that_a_later_schema_tells_is_not_one_of_the_option(
    registry: StandIn, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id int, v numeric)")
    schemas = [record("V", id="int", v=kind) for kind in ("bytes", logical("bytes", "decimal", precision=9, scale=3))]
    sent = [avro(registry.add(json.dumps(each)), each, {"id": n, "v": b"\x04\xd2"}) for n, each in enumerate(schemas)]
    write(db, name, registry, *map(message, sent), decimal={"v": 2})
    assert rows(db, name) == [(0, Decimal("12.34")), (1, Decimal("1.234"))]


@pytest.mark.parametrize("data", [b"\x02a", b"\x80"])
def test_a_key_whose_schema_nobody_knows_is_named_with_its_number(
    data: bytes, registry: StandIn, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id text PRIMARY KEY)")
    with pytest.raises(BadRow, match="say --schema-registry URL, which has to know schema 777"):
        write(db, name, registry, message(None, framed(777, data)), mode="upsert")


def test_json_schema_is_the_json_behind_the_id(registry: StandIn, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id bigint, deep jsonb)")
    number = registry.add('{"type": "object"}', "JSON")
    write(db, name, registry, message(framed(number, b'{"id": 9007199254740993, "deep": {"a": 1.50, "b": 1e400}}')))
    assert rows(db, name, "id, deep::text") == [(2**53 + 1, '{"a": 1.50, "b": 1' + "0" * 400 + "}")]


def test_values_may_be_plain_json_where_keys_are_in_avro(registry: StandIn, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id text PRIMARY KEY, v numeric)")
    key = registry.add('"string"')
    sent = [message(f'{{"id":"{i}","v":1.50}}'.encode(), avro(key, "string", i)) for i in "abc"]
    write(db, name, registry, *sent, message(None, avro(key, "string", "b")), mode="upsert")
    assert rows(db, name, "id, v::text") == [("a", "1.50"), ("c", "1.50")]
    for value, said in ((b'{"id":"d"},"schema":{}', "nor JSON"), (b"[1]", "Expected `object`")):
        with pytest.raises(BadRow, match=said):
            write(db, name, registry, message(value, avro(key, "string", "d")), mode="upsert")
    with pytest.raises(BadRow, match="not in the wire format"):
        write(db, name, registry, message(b'{"id":"d"}', b"d"), mode="upsert")


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_keys_that_are_numbers_are_not_asked_for_one_by_one(
    mode: Any, registry: StandIn, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY)")
    schema = record("V", id="long")
    number = registry.add(json.dumps(schema))
    sent = [message(avro(number, schema, {"id": i}), (i + 2**24 * 77).to_bytes(8, "big")) for i in range(100)]
    write(db, name, registry, *sent, mode=mode)
    assert registry.asked == (
        [f"/schemas/ids/{number}"] if mode == "append" else ["/schemas/ids/77", f"/schemas/ids/{number}"]
    )
    assert len(rows(db, name)) == 100
    registry.status = 403
    with pytest.raises(BadRow, match="key of a message without a value"):
        write(db, name, registry, message(None, (5).to_bytes(8, "big")), mode="upsert")


def test_changes_of_maxwell_and_canal_are_read_behind_a_schema(registry: StandIn, db: Database, name: str) -> None:
    number = registry.add('{"type": "object"}', "JSON")
    events: list[tuple[Any, Any]] = [
        ("maxwell", {"type": "insert", "data": {"id": 1}}),
        ("canal", {"type": "INSERT", "data": [{"id": "1"}], "mysqlType": {"id": "int"}, "pkNames": ["id"]}),
    ]
    for form, event in events:
        db.execute(f"DROP TABLE IF EXISTS {name}; CREATE TABLE {name} (id int PRIMARY KEY)")
        sent = framed(number, json.dumps({"database": "d", "table": "t"} | event).encode())
        write(db, name, registry, message(sent), format=form, mode="upsert")
        assert rows(db, name) == [(1,)]


def test_a_key_in_the_wire_format_is_claimed(registry: StandIn, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id int)")
    schema = record("V", id="int")
    number = registry.add(json.dumps(schema))
    pairs = [(avro(number, schema, {"id": i}), avro(number, schema, {"id": i // 2})) for i in range(4)]
    sent = [message(value, key, offset=offset) for offset, (value, key) in enumerate(pairs)]
    sink = Flow(topics=("t",), table=name, schema_registry=registry.url, claim="key:id").sink()
    claimed = Claimed()
    with db.transaction():
        sink.write(db, sent, claim=claimed)
    assert rows(db, name) == [(0,), (2,)]
    assert len(claimed.keys) == 2


def test_the_whole_key_of_a_row_is_that_of_its_delete(registry: StandIn, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (own bytea PRIMARY KEY, v int)")
    schema = record("V", v="int")
    number, key = registry.add(json.dumps(schema)), registry.add('"string"')
    flow: dict[str, Any] = {"mode": "upsert", "metadata": {"own": "key"}}
    stored = [message(avro(number, schema, {"v": 1}), avro(key, "string", each)) for each in "ab"]
    write(db, name, registry, *stored, message(None, avro(key, "string", "a")), **flow)
    assert rows(db, name) == [(avro(key, "string", "b"), 1)]


@pytest.mark.parametrize("more", [{}, {"id": "key:id"}])
@pytest.mark.parametrize("claim", [None, "key:id"])
def test_a_key_stays_as_it_was_sent_whatever_else_looks_into_it(
    more: dict[str, str], claim: str | None, registry: StandIn, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (own bytea PRIMARY KEY, id int)")
    schema = record("V", id="int")
    number = registry.add(json.dumps(schema))
    value, key = (avro(number, schema, {"id": 1}) for _ in "vk")
    flow: dict[str, Any] = {"mode": "upsert", "metadata": {"own": "key", **more}, "claim": claim}
    sink = Flow(topics=("t",), table=name, schema_registry=registry.url, **flow).sink()
    with db.transaction():
        sink.write(db, [message(value, key)], claim=Claimed() if claim else None)
    assert rows(db, name) == [(key, 1)]


@pytest.mark.parametrize(
    ("kind", "schema", "value", "stored"),
    [
        ("bigint", "long", 7, 7),
        ("uuid", "string", TOKEN, UUID(TOKEN)),
        ("date", logical("int", "date"), 1, date(1970, 1, 2)),
        ("numeric", logical("bytes", "decimal", precision=9, scale=2), b"\xd7\x6d\xf8", Decimal("-26588.24")),
    ],
)
def test_a_bare_key_in_the_wire_format_fills_a_column_of_its_type(
    kind: str, schema: Any, value: Any, stored: Any, registry: StandIn, db: Database, name: str
) -> None:
    """And its delete finds the row."""
    db.execute(f"CREATE TABLE {name} (k {kind} PRIMARY KEY, v int)")
    plain = schema if isinstance(schema, str) else schema["type"]
    key = avro(registry.add(json.dumps(schema)), plain, value)
    one = avro(registry.add(json.dumps(record("V", v="int"))), record("V", v="int"), {"v": 1})
    flow: dict[str, Any] = {"mode": "upsert", "metadata": {"k": "key"}}
    write(db, name, registry, message(one, key), **flow)
    assert rows(db, name) == [(stored, 1)]
    write(db, name, registry, message(None, key), **flow)
    assert rows(db, name) == []


def protobuf_file() -> Any:
    from google.protobuf import descriptor_pb2  # noqa: PLC0415

    file = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    file.dependency.extend(["google/protobuf/timestamp.proto", "customer.proto"])
    file.message_type.add(name="Other").field.add(name="x", number=1, type=5, label=1)
    order = file.message_type.add(name="Order")
    fields: list[tuple[str, int, dict[str, Any]]] = [
        ("id", 3, {}),
        ("user_name", 9, {}),
        ("count", 5, {}),
        ("is_on", 8, {}),
        ("raw", 12, {}),
        ("low", 1, {}),
        ("at", 11, {"type_name": ".google.protobuf.Timestamp"}),
        ("who", 11, {"type_name": ".shop.Customer"}),
        ("tags", 9, {"label": 3}),
        ("huge", 4, {}),
    ]
    for number, (field, kind, more) in enumerate(fields, 1):
        order.field.add(name=field, number=number, type=kind, **{"label": 1, **more})
    inner = order.nested_type.add(name="Line")
    inner.field.add(name="id", number=1, type=3, label=1)
    customer = descriptor_pb2.FileDescriptorProto(name="customer.proto", package="shop", syntax="proto3")
    customer.message_type.add(name="Customer").field.add(name="vip_name", number=1, type=9, label=1)
    return file, customer


def test_protobuf_of_a_message_of_the_file_and_of_one_within_it(registry: StandIn, db: Database, name: str) -> None:
    """Fields that are zero are not sent; they are zero all the same, and not null."""
    db.execute(f"""SET timezone = 'UTC'; CREATE TABLE {name} (id bigint, user_name text, count int, is_on boolean,
        raw bytea, low float8, at timestamptz, who jsonb, tags text[], huge numeric)""")
    file, customer = protobuf_file()
    refers = registry.add("", "PROTOBUF", serialized=customer.SerializeToString())
    number = registry.add(
        "",
        "PROTOBUF",
        serialized=file.SerializeToString(),
        references=[registry.reference("customer.proto", refers)],
    )

    order = b"\x08\x05" + b"\x12\x02hi" + b"\x2a\x02\0\xff" + b"\x31" + struct.pack("<d", float("-inf"))
    order += b"\x3a\x02\x08\x01" + b"\x42\x03\x0a\x01v" + b"\x4a\x01a\x4a\x01b" + b"\x50" + b"\xff" * 9 + b"\x01"
    sent = [message(framed(number, b"\x02\x02" + order)), message(framed(number, b"\x02\x02"))]
    sent += [message(framed(number, b"\x04\x02\x00\x08\x07"))]
    write(db, name, registry, *sent)
    assert rows(db, name, "t::text") == [
        ('(0,"",0,f,"\\\\x",0,,,{},0)',),
        (f'(5,hi,0,f,"\\\\x00ff",-Infinity,"1970-01-01 00:00:01+00","{{""vip_name"": ""v""}}","{{a,b}}",{2**64 - 1})',),
        ("(7,,,,,,,,,)",),
    ]


def protobuf_that_imports(*files: str, **fields: str) -> bytes:
    from google.protobuf import descriptor_pb2  # noqa: PLC0415

    file = descriptor_pb2.FileDescriptorProto(name="x.proto", syntax="proto3", dependency=files)
    kind = file.message_type.add(name="X")
    for number, (field, type_name) in enumerate(fields.items(), 1):
        kind.field.add(name=field, number=number, type=11, label=1, type_name=type_name)
    serialized: bytes = file.SerializeToString()
    return serialized


def test_files_that_schemas_of_protobuf_import_without_a_reference_are_known(
    registry: StandIn, db: Database, name: str
) -> None:
    """Those of Connect and Flink, and types that say whether a value was sent."""
    imports = [f"confluent/{each}.proto" for each in ("meta", "type/decimal")] + ["google/protobuf/wrappers.proto"]
    fields = {"price": ".confluent.type.Decimal", "many": ".google.protobuf.Int64Value"}
    number = registry.add("", "PROTOBUF", serialized=protobuf_that_imports(*imports, **fields))
    db.execute(f"CREATE TABLE {name} (price numeric, many bigint)")
    price = message(framed(number, b"\0" + b"\x0a\x06\x0a\x02\xcf\xc7\x18\x02"))  # -12345, of scale 2
    many = message(framed(number, b"\0" + b"\x12\x02\x08\x07"))
    write(db, name, registry, price, many)
    assert rows(db, name, "price::text, many") == [("-123.45", None), (None, 7)]
    decoder = Flow(topics=("t",), table=name, schema_registry=registry.url).unwrapping(JsonDecoder())
    assert decoder.types([price]) == {"price": "numeric", "many": "bigint"}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("AVRO", "schema 1 of .* cannot be read: UnknownType: Missing"),
        ("PROTOBUF", "schema 1 of .* cannot be read: .*imports other.proto, to which it has no reference"),
    ],
)
def test_a_schema_that_cannot_be_read_is_named(
    kind: str, said: str, registry: StandIn, db: Database, name: str
) -> None:
    registry.add(json.dumps(record("V", id="Missing")), kind, serialized=protobuf_that_imports("other.proto"))
    db.execute(f"CREATE TABLE {name} (id int)")
    with pytest.raises(BadRow, match=rf"t\[0\] offset 7: {said}"):
        write(db, name, registry, message(framed(1, b"\2")))


@pytest.mark.parametrize("unknown", [b"\x58\x07", b"\x42\x02\x10\x01"], ids=["of the message", "of one within it"])
def test_a_field_that_a_schema_of_protobuf_lacks_is_not_dropped(
    unknown: bytes, registry: StandIn, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id bigint)")
    file, customer = protobuf_file()
    refers = registry.add("", "PROTOBUF", serialized=customer.SerializeToString())
    references = [registry.reference("customer.proto", refers)]
    number = registry.add("", "PROTOBUF", serialized=file.SerializeToString(), references=references)
    with pytest.raises(BadRow, match=rf"not as schema {number} says: it has fields, or numbers of an enum, that"):
        write(db, name, registry, message(framed(number, b"\x02\x02" + unknown)))


@pytest.mark.parametrize("text", [b"\xff\xfe", b"'\xff", b'"\xff', b"b'\xff"])
@pytest.mark.parametrize("place", [b"\x12", b"\x1a"], ids=["one", "of several"])
def test_a_text_of_proto2_that_is_not_utf_8_is_bad(
    place: bytes, text: bytes, registry: StandIn, db: Database, name: str
) -> None:
    """The format does not check it there; text that only looks like Python's bytes is stored as it is."""
    from google.protobuf import descriptor_pb2  # noqa: PLC0415

    db.execute(f"CREATE TABLE {name} (id float8, v text, several text[])")
    file = descriptor_pb2.FileDescriptorProto(name="v.proto", syntax="proto2")
    made = file.message_type.add(name="V")
    for index, (field, kind, label) in enumerate((("id", 1, 1), ("v", 9, 1), ("several", 9, 3)), 1):
        made.field.add(name=field, number=index, type=kind, label=label)
    number = registry.add("", "PROTOBUF", serialized=file.SerializeToString())
    nan = b"\x09" + struct.pack("<d", float("nan"))
    write(db, name, registry, message(framed(number, b"\0" + nan + b"\x12\x05b'\\x'" + b'\x1a\x02b"')))
    assert rows(db, name, "id::text, v, several") == [("NaN", "b'\\x'", ['b"'])]
    with pytest.raises(BadRow, match=r"t\[0\] offset 7: .*a text in it is not UTF-8"):
        write(db, name, registry, message(framed(number, b"\0" + place + bytes([len(text)]) + text)))


@pytest.mark.parametrize("path", [b"\x02\x01", b"\x04\x02\x01", b"\x01"])
def test_an_index_of_protobuf_that_is_negative_is_bad(path: bytes, registry: StandIn, db: Database, name: str) -> None:
    db.execute(f"CREATE TABLE {name} (id bigint)")
    file, customer = protobuf_file()
    refers = registry.add("", "PROTOBUF", serialized=customer.SerializeToString())
    references = [registry.reference("customer.proto", refers)]
    number = registry.add("", "PROTOBUF", serialized=file.SerializeToString(), references=references)
    with pytest.raises(BadRow, match="the index of its message is negative"):
        write(db, name, registry, message(framed(number, path + b"\x08\x01")))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b'{"id": 1}', "not in the wire format of a Schema Registry"),
        (b"\0\0\0", "not in the wire format"),
        (framed(77, b"\2"), "knows no schema 77"),
        (framed(1, b""), "the data is not as schema 1 says"),
        (framed(1, b"\2\2"), "1 bytes are left"),
        (framed(2, b"no json"), "the data is not as schema 2 says"),
        (framed(3, b"\2a"), "Expected `object`"),
    ],
)
def test_a_message_that_its_schema_does_not_fit_is_bad(
    value: bytes, said: str, registry: StandIn, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id int)")
    registry.add(json.dumps(record("V", id="int")))
    registry.add("{}", "JSON")
    registry.add('"string"')
    with pytest.raises(BadRow, match=rf"t\[0\] offset 7: .*{said}"):
        write(db, name, registry, message(value))
    with pytest.raises(BadRow, match=rf"t\[0\] offset 7: .*{said}"):
        write(db, name, registry, message(value))
    assert rows(db, name) == []


def test_a_registry_that_is_away_or_refuses_is_not_the_messages_fault(
    registry: StandIn, db: Database, name: str
) -> None:
    db.execute(f"CREATE TABLE {name} (id int)")
    number = registry.add(json.dumps(record("V", id="int")))
    sent = message(avro(number, record("V", id="int"), {"id": 1}))
    for status, kind in ((503, RegistryAway), (429, RegistryAway), (401, TableError), (404, TableError)):
        registry.status = status
        with pytest.raises(kind, match=f"schema {number}"):
            write(db, name, registry, sent)
    registry.status = 200
    answers: list[Any] = [{"status": "maintenance"}, {"error_code": 50001}, {"schema": None}, [], None, "x"]
    for registry.body in answers:  # of a gateway
        with pytest.raises(RegistryAway, match=f"does not answer for schema {number}: it is no schema: "):
            write(db, name, registry, sent)
    registry.close()
    with pytest.raises(RegistryAway, match="does not answer"):
        write(db, name, registry, sent)
    assert rows(db, name) == []


def test_a_registry_that_lets_nobody_in_is_not_taken_for_one_without_the_schema_of_a_key(
    registry: StandIn, db: Database, name: str
) -> None:
    """Or the tombstone would be bad, or passed over, until a password is mended."""
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY)")
    registry.status = 401
    with pytest.raises(TableError, match=r"refuses to give schema 7: .*basic\.auth\.user\.info or bearer\.auth\.token"):
        write(db, name, registry, message(None, key=framed(7, b"\2")), mode="upsert", key=("id",))


def test_a_package_that_is_missing_is_not_the_messages_fault(
    registry: StandIn, db: Database, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.execute(f"CREATE TABLE {name} (id int)")
    number = registry.add(json.dumps(record("V", id="int")))
    monkeypatch.setitem(sys.modules, "fastavro", None)
    with pytest.raises(TableError, match=r"pip install 'kafka-exactly-once\[registry\]'"):
        write(db, name, registry, message(framed(number, b"\2")))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "say url ="),
        ({"url": "ftp://x"}, "say url ="),
        ({"url": "http://"}, "say url ="),
        ({"url": "http://x", "basic.auth.user": "x"}, "there is no basic.auth.user; there are basic.auth.user.info, "),
        ({"url": "https://x", "ssl.ca.location": "/no/such/file"}, "the files of ssl cannot be read"),
    ],
)
def test_settings_are_checked_and_not_shown(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Registry(settings)


def test_a_password_goes_to_the_registry_and_nowhere_else(registry: StandIn) -> None:
    registry.status = 403
    url = registry.url.replace("http://", "http://me:pass%40word@")
    for settings in (
        {"url": f"http://127.0.0.1:1,{url}"},
        {"url": registry.url, "basic.auth.user.info": "me:pass@word"},
    ):
        with pytest.raises(TableError) as caught:
            Registry(settings).opened(message(framed(1, b"")))
        assert base64.b64decode(registry.authorization.split()[1]) == b"me:pass@word"
        assert "word" not in str(caught.value)
