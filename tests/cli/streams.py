"""Streams with the documented shapes of their sources, and the rows that a table of each must have.

Values are generated; what is rare comes in the middle of a partition, where the sample of --create-table does not look.
"""

from __future__ import annotations

import base64
import json
import random
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from exactly_once.cli.sink_tables import SAMPLE
from tests.writer.test_envelopes import CONNECT, DEBEZIUM, base64_of, change
from tests.writer.test_envelopes import field as typed
from tests.writer.test_registry import framed

Row = dict[str, Any]

PARTITIONS = 3
COUNT = PARTITIONS * 4 * SAMPLE
RARE = COUNT // 2
"""In the middle of a partition: further from both ends than the sample goes."""
BEGIN = datetime(2026, 3, 1, 5, 59, 59, 999_000, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Sent:
    value: Any
    key: Any = None
    partition: int | None = None
    headers: Any = None


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What is sent, what the table must have in the end, and the options that the page of its format shows."""

    sent: list[Sent]
    rows: list[Row]
    options: tuple[str, ...] = ()
    refused: str = ""
    """What the first try says where it stops."""
    then: tuple[str, ...] = ()
    """The options that it named."""
    alter: str = ""
    """Or the statement that it named, of the table {0}."""


STREAMS: dict[str, Callable[[random.Random], Stream]] = {}


def stream(make: Callable[[random.Random], Stream]) -> Callable[[random.Random], Stream]:
    STREAMS[make.__name__] = make
    return make


def plain(rows: Iterable[Row], **more: Any) -> Stream:
    kept = list(rows)
    return Stream(sent=[Sent(value=row) for row in kept], rows=kept, **more)


def moment(number: int, *, digits: int = 3, zone: str = "Z") -> str:
    text = (BEGIN + timedelta(milliseconds=1337 * number)).strftime("%Y-%m-%dT%H:%M:%S.%f")
    return text.ljust(40, "7")[: 20 + digits] + zone


def word(chance: random.Random) -> str:
    return "".join(chance.choices("abcdefghi äß'\"\\", k=chance.randrange(1, 12)))


def source_rows(chance: random.Random) -> tuple[list[tuple[str, Row | None, Row | None]], dict[int, Row]]:
    """Changes of a table, as (op, before, after), and its rows at the end."""
    rows: dict[int, Row] = {}
    events: list[tuple[str, Row | None, Row | None]] = []
    for number in range(COUNT):
        key = chance.randrange(COUNT // 4)
        before = rows.get(key)
        if before is not None and chance.random() < 0.2:
            events.append(("d", rows.pop(key), None))
            continue
        rows[key] = {
            "id": key,
            "name": word(chance),
            "born": chance.randrange(-9000, 20000),
            "seen": 1_767_225_600_000_000 + chance.randrange(10**12),
            "balance": base64_of(chance.randrange(-(10**9), 10**9)),
            "vip": chance.random() < 0.5,
            "note": None if number < 3 * SAMPLE else word(chance),
        }
        events.append(("u" if before else "c", before, rows[key]))
    return events, rows


SOURCE = [
    typed("id", "int32"),
    typed("name", "string"),
    typed("born", "int32", f"{DEBEZIUM}time.Date"),
    typed("seen", "int64", f"{DEBEZIUM}time.MicroTimestamp"),
    typed("balance", "bytes", f"{CONNECT}Decimal", parameters={"scale": "2"}),
    typed("vip", "boolean"),
    typed("note", "string"),
]


def meant(row: Row) -> Row:
    """A row as it is at the source."""
    unscaled = int.from_bytes(base64.b64decode(row["balance"]), "big", signed=True)
    seen = datetime(1970, 1, 1) + timedelta(microseconds=row["seen"])  # noqa: DTZ001 - as it is stored
    born = (datetime(1970, 1, 1) + timedelta(days=row["born"])).date()  # noqa: DTZ001
    return row | {"born": str(born), "seen": seen.isoformat(), "balance": Decimal(unscaled) / 100}


def by_key(row: Row) -> int:
    return int(row["id"]) % PARTITIONS


def enveloped(chance: random.Random, *, has_schema: bool) -> tuple[list[Sent], list[Row]]:
    def wrap(payload: Any, fields: Any) -> Any:
        return {"schema": {"type": "struct", "fields": fields}, "payload": payload} if has_schema else payload

    events, rows = source_rows(chance)
    parts = [{"field": part, "type": "struct", "fields": SOURCE} for part in ("before", "after")]
    sent = []
    for op, before, after in events:
        of = after or before or {}
        key = wrap({"id": of["id"]}, SOURCE[:1])
        sent.append(Sent(key=key, value=wrap(change(op, before, after), parts), partition=by_key(of)))
        if op == "d":
            sent.append(Sent(key=key, value=None, partition=by_key(of)))
    return sent, [meant(row) for row in rows.values()]


UPSERT = ("--mode", "upsert")


@stream
def debezium(chance: random.Random) -> Stream:
    sent, rows = enveloped(chance, has_schema=False)
    rows = [row | {"seen": f"{row['seen']}Z"} for row in rows]
    options = ("--format", "debezium", *UPSERT, "--epoch", "born=days", "--epoch", "seen=us", "--decimal", "balance=2")
    return Stream(sent=sent, rows=rows, options=options)


@stream
def debezium_with_schema(chance: random.Random) -> Stream:
    sent, rows = enveloped(chance, has_schema=True)
    return Stream(sent=sent, rows=rows, options=("--format", "debezium", *UPSERT))


@stream
def debezium_flattened(chance: random.Random) -> Stream:
    events, rows = source_rows(chance)
    sent = [
        Sent(key={"id": (after or before or {})["id"]}, value=after, partition=by_key(after or before or {}))
        for _, before, after in events
    ]
    return Stream(sent=sent, rows=list(rows.values()), options=(*UPSERT, "--key", "id"))


@stream
def debezium_flattened_with_schema(chance: random.Random) -> Stream:
    events, rows = source_rows(chance)
    sent = []
    for _, before, after in events:
        of = after or before or {}
        key = {"schema": {"type": "struct", "fields": SOURCE[:1]}, "payload": {"id": of["id"]}}
        value = after and {"schema": {"type": "struct", "fields": SOURCE}, "payload": after}
        sent.append(Sent(key=key, value=value, partition=by_key(of)))
    return Stream(sent=sent, rows=[meant(r) for r in rows.values()], options=("--format", "connect", *UPSERT))


@stream
def connect(chance: random.Random) -> Stream:
    fields = [
        typed("orderid", "int32"),
        typed("ordertime", "int64", f"{CONNECT}Timestamp"),
        typed("itemid", "string"),
        typed("price", "bytes", f"{CONNECT}Decimal", parameters={"scale": "2"}),
        typed("orderunits", "double"),
        {"field": "address", "type": "struct", "fields": [typed("city", "string"), typed("zipcode", "int64")]},
    ]
    sent, rows = [], []
    for number in range(COUNT):
        cents, at = chance.randrange(10**6), 1_767_225_600_123 + number
        row: Row = {"orderid": number, "itemid": f"Item_{number % 7}", "orderunits": chance.randrange(1000) / 8}
        row["address"] = {"city": f"City_{number % 9}", "zipcode": 10000 + number}
        payload = row | {"ordertime": at, "price": base64_of(cents)}
        sent.append(Sent(value={"schema": {"type": "struct", "fields": fields}, "payload": payload}))
        when = (datetime(1970, 1, 1) + timedelta(milliseconds=at)).isoformat()  # noqa: DTZ001
        rows.append(row | {"ordertime": when, "price": Decimal(cents) / 100})
    return Stream(sent=sent, rows=rows, options=("--format", "connect"))


@stream
def github_events(chance: random.Random) -> Stream:
    def event(number: int) -> Row:
        kind = chance.choice(["PushEvent", "WatchEvent", "IssuesEvent"])
        payload: Row = {"action": "started"}
        if kind == "PushEvent":
            payload = {"push_id": 10**10 + number, "commits": [{"sha": f"{number:040x}", "message": word(chance)}] * 2}
        elif kind == "IssuesEvent":
            payload = {"action": "opened", "issue": {"labels": [], "assignee": None, "score": 1.0}}
        row: Row = {"id": str(3 * 10**10 + number), "type": kind, "public": True}
        row |= {"created_at": moment(number, digits=-1)}
        row |= {"actor": {"id": number, "login": f"u{number}"}, "repo": {"id": 7, "name": "a/b"}, "payload": payload}
        return row | ({"org": {"id": 5, "login": "org"}} if number % 50 == RARE % 50 else {})

    return plain(map(event, range(COUNT)))


@stream
def wikipedia(chance: random.Random) -> Stream:
    def edit(number: int) -> Row:
        row: Row = {"$schema": "/mediawiki/recentchange/1.0.0", "id": 10**9 + number, "type": "edit", "bot": False}
        row["meta"] = {"dt": moment(number, digits=-1), "id": str(uuid.UUID(int=number)), "offset": number}
        row |= {"title": word(chance), "comment": "", "timestamp": 1_767_225_600 + number, "user": f"U{number}"}
        if number % 40 == 3:
            params: Any = "" if number < RARE else chance.choice([[], {"userid": number}, ["a"]])
            return row | {"type": "log", "log_params": params, "log_id": number}
        return row | {"length": {"old": number, "new": number + 1}, "revision": {"old": 1, "new": 2}, "minor": True}

    return plain(map(edit, range(COUNT)))


@stream
def stripe(chance: random.Random) -> Stream:
    def event(number: int) -> Row:
        charge: Row = {"id": f"ch_{number}", "object": "charge", "amount": chance.randrange(10**6), "metadata": {}}
        charge |= {"refunds": {"data": []}, "failure_code": None if number < RARE else "card_declined"}
        row: Row = {"id": f"evt_{number}", "object": "event", "created": 1_767_225_600 + number}
        row |= {"data": {"object": charge}, "livemode": False, "pending_webhooks": number % 3, "type": "charge.failed"}
        return row | {"request": {"id": None, "idempotency_key": None} if number % 2 else None}

    return plain(map(event, range(COUNT)))


def event_of(number: int, chance: random.Random) -> tuple[Row, Row]:
    attributes: Row = {"specversion": "1.0", "id": f"A-{number}", "source": "/shop", "type": "com.shop.paid"}
    attributes |= {"time": moment(number, digits=9), "datacontenttype": "application/json", "traceid": f"{number:x}"}
    return attributes, {"amount": chance.randrange(1000) / 4, "name": word(chance)}


@stream
def cloudevents_structured(chance: random.Random) -> Stream:
    made = [event_of(number, chance) for number in range(COUNT)]
    rows: list[Row] = [attributes | {"data": data} for attributes, data in made]
    return Stream(sent=[Sent(value=row) for row in rows], rows=rows, options=("--format", "cloudevents"))


@stream
def cloudevents_binary(chance: random.Random) -> Stream:
    made = [event_of(number, chance) for number in range(COUNT)]
    sent = []
    for attributes, data in made:
        headers = [(f"ce_{name}", value) for name, value in attributes.items() if name != "datacontenttype"]
        sent.append(Sent(value=data, headers=[*headers, ("content-type", "application/json")]))
    return Stream(sent=sent, rows=[a | {"data": d} for a, d in made], options=("--format", "cloudevents"))


@stream
def otlp_logs(chance: random.Random) -> Stream:
    def batch(number: int) -> Row:
        record = {"timeUnixNano": str(10**18 + number), "body": {"stringValue": word(chance)}, "attributes": []}
        return {"resourceLogs": [{"resource": {"attributes": []}, "scopeLogs": [{"logRecords": [record] * 3}]}]}

    return plain(map(batch, range(COUNT)))


@stream
def otel_flat(chance: random.Random) -> Stream:
    def record(number: int) -> Row:
        row: Row = {"Timestamp": 1_767_225_600_000_000_001 + number, "ObservedTimestamp": moment(number, digits=9)}
        row |= {"SeverityNumber": 9, "TraceId": f"{number:032x}", "Resource": {"service.name": "shop"}}
        row["Body"] = word(chance) if number % 60 or number < RARE else {"event": "x", "code": number}
        return row | {"service.name": "shop", "Attributes": {"http.status_code": 200, "tags": ["a"]}}

    return plain(map(record, range(COUNT)))


@stream
def segment(chance: random.Random) -> Stream:
    def call(number: int) -> Row:
        row: Row = {"messageId": f"ajs-{number}", "type": "track", "anonymousId": str(uuid.UUID(int=number))}
        row |= {"userId": f"u{number}" if number < RARE + 50 else 4000 + number, "originalTimestamp": moment(number)}
        row |= {"receivedAt": moment(number + 1), "context": {"ip": "1.2.3.4", "page": {"path": "/"}}, "event": "Order"}
        return row | {"properties": {"revenue": chance.randrange(1000) / 4}, "integrations": {}}

    return plain(map(call, range(COUNT)))


@stream
def snowplow(chance: random.Random) -> Stream:
    long = "unstruct_event_com_example_shop_checkout_payment_method_selected_{}"
    assert len(long) > 63

    def event(number: int) -> Row:
        row: Row = {"app_id": "web", "event_id": str(uuid.UUID(int=number)), "br_viewwidth": None, "geo_latitude": 52.5}
        row |= {"collector_tstamp": moment(number, zone=""), "etl_tstamp": moment(number, zone="").replace("T", " ")}
        row |= {long.format(1): {"method": word(chance)}, "contexts_com_example_user_1": [{"id": number}]}
        return row | ({long.format(2): {"version": 2}} if number % 3 else {})

    return plain(map(event, range(COUNT)))


@stream
def shopify(chance: random.Random) -> Stream:
    rows: dict[int, Row] = {}
    sent = []
    for number in range(COUNT):
        key = 10**12 + chance.randrange(COUNT // 2)
        late = number > RARE
        rows[key] = {
            "id": key,
            "total_price": f"{chance.randrange(10**5) / 100:.2f}",
            "currency": "EUR",
            "created_at": moment(number, digits=-1, zone="+02:00"),
            "cancelled_at": moment(number) if late and number % 20 == 0 else None,
            "cancel_reason": chance.choice(["customer", "fraud"]) if late and number % 20 == 0 else None,
            "test": False,
            "line_items": [{"id": number, "price": "1.00", "properties": []}],
            "customer": {"id": 5, "note": None} if number % 2 else None,
            "tags": "",
        }
        sent.append(Sent(key=str(key).encode(), value=rows[key], partition=key % PARTITIONS))
    return Stream(sent=sent, rows=list(rows.values()), options=(*UPSERT, "--key", "id"))


def measurement(number: int, chance: random.Random) -> Row:
    temperature: Any = 20 + number % 5 if number < RARE else 20 + chance.randrange(40) / 8
    row: Row = {"device": f"d{number % 17}", "ts": 1_767_225_600_000 + number, "temperature": temperature}
    row |= {"status": number % 2 if number % 3 else number % 2 == 1, "battery": None if number < RARE else 0.5}
    return row | {"fw": 1 if number < RARE else "1.1.0"}


@stream
def iot(chance: random.Random) -> Stream:
    return plain(measurement(number, chance) for number in range(COUNT))


@stream
def iot_with_one_odd_value(chance: random.Random) -> Stream:
    """The sample knows of numbers only; the one text among them stops the sink, and a wider column takes it."""
    rows = [measurement(number, chance) | {"temperature": number} for number in range(COUNT)]
    rows[RARE]["temperature"] = "ERR"
    alter = "ALTER COLUMN temperature TYPE text"
    as_text = [row | {"temperature": str(row["temperature"])} for row in rows]
    sent = [Sent(value=row) for row in rows]
    return Stream(sent=sent, rows=as_text, refused=alter, alter=f"ALTER TABLE {{0}} {alter}")


@stream
def clickstream(chance: random.Random) -> Stream:
    def click(number: int) -> Row:
        row: Row = {"sessionId": f"s{number % 50}", "url": f"/{word(chance)}", "ts": moment(number)}
        row |= {"version": 1 if number < 3 * RARE // 2 else "1.1.0", "referrer": None if number % 2 else ""}
        row |= {"experiment": "b"} if RARE - 60 < number < RARE + 60 else {}
        return row | ({"screenWidth": 1920} if number > RARE + 60 else {})

    return plain(map(click, range(COUNT)))


@stream
def datagen_users(chance: random.Random) -> Stream:
    def user(number: int) -> Row:
        row: Row = {"registertime": 1_489_220_000_000 + number, "userid": f"User_{chance.randrange(9)}"}
        return row | {"regionid": f"Region_{number % 9}", "gender": chance.choice(["MALE", "FEMALE", "OTHER"])}

    return plain(map(user, range(COUNT)))


def kept_by_key(chance: random.Random, key_of: Callable[[int], Any]) -> tuple[list[Sent], list[Row]]:
    rows: dict[int, Row] = {}
    sent = []
    for number in range(COUNT):
        key = chance.randrange(COUNT // 5)
        rows[key] = {"id": f"k{key}", "v": number, "tags": [word(chance)]}
        value = rows[key] if chance.random() < 0.8 else rows.pop(key) and None
        sent.append(Sent(key=key_of(key), value=value, partition=key % PARTITIONS))
    return sent, list(rows.values())


@stream
def keys_in_avro(chance: random.Random) -> Stream:
    """Nothing but the registry can tell what such a key says: it is told, and which option reads it."""
    sent, rows = kept_by_key(chance, lambda key: framed(2, bytes([2 * len(f"k{key}")]) + f"k{key}".encode()))
    again = ("--schema-registry", "REGISTRY")
    return Stream(sent=sent, rows=rows, options=(*UPSERT, "--key", "id"), refused="--schema-registry", then=again)


@stream
def keys_as_json_strings(chance: random.Random) -> Stream:
    sent, rows = kept_by_key(chance, lambda key: f'"k{key}"'.encode())
    return Stream(sent=sent, rows=rows, options=(*UPSERT, "--key", "id"))


@stream
def json_of_a_registry(chance: random.Random) -> Stream:
    rows: list[Row] = [{"id": n, "name": word(chance), "price": n / 4, "at": moment(n)} for n in range(COUNT)]
    sent = [Sent(value=framed(1, json.dumps(row).encode())) for row in rows]
    return Stream(sent=sent, rows=rows, options=("--schema-registry", "REGISTRY"))


@stream
def spring(chance: random.Random) -> Stream:
    def order(number: int) -> Row:
        row: Row = {"id": str(uuid.UUID(int=number)), "createdAt": 1_767_225_600 + Decimal(number) / 10**9}
        at = moment(number)
        # Java leaves out seconds that are zero.
        row |= {"offsetDateTime": at[:16] + "Z" if number % 60 == 7 else at, "date": [2026, 1, 1 + number % 28]}
        row |= {"state": "PAID", "amount": Decimal(chance.randrange(10**6)) / 100, "items": [], "parent": None}
        return row | {"local": [2026, 1, 2, 3, 4, 5, number * 1000]}

    return plain(map(order, range(COUNT)))


@stream
def python_isoformat(chance: random.Random) -> Stream:
    def event(number: int) -> Row:
        at = (BEGIN + timedelta(seconds=number / 2)).replace(tzinfo=None)
        row: Row = {"id": str(uuid.UUID(int=number)), "created": at.isoformat(), "utc": at.isoformat() + "+00:00"}
        row |= {"hash": number if number < RARE else 2**64 - 1 - number, "ok": None}
        return row | {"price": str(Decimal(number) / 4)}

    return plain(map(event, range(COUNT)))


@stream
def fluent_bit(chance: random.Random) -> Stream:
    def line(number: int) -> Row:
        row: Row = {"@timestamp": 1_767_225_600.25 + number, "stream": "stdout", "log": word(chance) + "\n"}
        return row | {"kubernetes": {"labels": {"app.kubernetes.io/name": "x"}, "pod_name": f"p{number % 5}"}}

    return plain(map(line, range(COUNT)))


@stream
def fluent_bit_with_nul(chance: random.Random) -> Stream:
    """Postgres stores no NUL: the error names the option that takes it out."""
    rows = [{"date": n + 0.5, "log": word(chance), "kubernetes": {"pod": "p"}} for n in range(COUNT)]
    sent = [Sent(value=row) for row in rows]
    sent[RARE] = Sent(value=rows[RARE] | {"log": "a\0b", "kubernetes": {"pod": "\0p"}})
    rows[RARE]["log"] = "ab"
    return Stream(sent=sent, rows=rows, refused='nul = "strip"', then=("--nul", "strip"))


@stream
def arrays_of_events(chance: random.Random) -> Stream:
    """A message of several rows takes a function, or the column that keeps it whole."""
    sent = [Sent(value=[{"id": n, "v": word(chance)}, {"id": -n}]) for n in range(COUNT)]
    return Stream(sent=sent, rows=[], refused="FunctionDecoder")


@stream
def heartbeats(chance: random.Random) -> Stream:
    rows: list[Row] = [{"id": n, "name": word(chance), "at": moment(n)} for n in range(COUNT)]
    beats = [Sent(value=b"heartbeat", partition=n % PARTITIONS) for n in range(9)]
    sent = [Sent(value=row) for row in rows]
    sent[6:6], sent[RARE:RARE] = beats[:5], beats[5:]
    return Stream(sent=sent, rows=rows, refused="--on-poison dead-letter", then=("--on-poison", "dead-letter"))


@stream
def maxwell(chance: random.Random) -> Stream:
    rows: dict[int, Row] = {}
    sent = []
    for number in range(COUNT):
        key = chance.randrange(COUNT // 4)
        before = rows.get(key)
        value: Row = {"database": "shop", "table": "orders", "ts": 1_767_225_600, "xid": number, "commit": True}
        if before is not None and chance.random() < 0.25:
            value |= {"type": "delete", "data": rows.pop(key)}
        else:
            rows[key] = {"id": key, "total": chance.randrange(1000) / 4, "at": f"2026-01-02 03:04:{number % 60:02}"}
            value |= {"type": "update" if before else "insert", "data": rows[key]}
            value |= {"old": {"total": before["total"]}} if before else {}
        named = {"database": "shop", "table": "orders", "pk.id": key}
        sent.append(Sent(value=value, key=named, partition=key % PARTITIONS))
    return Stream(sent=sent, rows=list(rows.values()), options=("--format", "maxwell", *UPSERT, "--key", "id"))


@stream
def three_types_keyed_by_type(chance: random.Random) -> Stream:
    own: list[Row] = [
        {"total": 1.5, "currency": "EUR"},
        {"reason": "late", "refunded": True},
        {"items": [1], "email": "a@b"},
    ]
    rows: list[Row] = [{"type": n % 3, "id": n, **own[n % 3]} for n in range(COUNT)]
    return Stream(sent=[Sent(value=row, partition=row["type"]) for row in rows], rows=rows)


@stream
def empty_text_for_nothing(chance: random.Random) -> Stream:
    return plain(
        {"id": n, "at": "" if n % 2 else moment(n), "list": "" if n % 3 else [n], "n": str(n) if n < RARE else n}
        for n in range(COUNT)
    )
