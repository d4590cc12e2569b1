"""JSON becomes rows of exactly what the columns take, and anything else an error that names the message."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import Message
from psycopg.postgres import types as registry

from exactly_once.errors import ConfigurationError
from exactly_once.writer import MISSING, BadRow, Column, Table, TableError, TableSink, Tombstone
from exactly_once.writer.formats import FormatDecoder
from exactly_once.writer.from_json import JsonDecoder
from exactly_once.writer.plan import Plan
from exactly_once.writer.raw import FunctionDecoder, RawDecoder
from tests.support.seeds import seeds


def table(**types: str) -> Table:
    columns = []
    for name, type_name in types.items():
        info = registry[type_name.removesuffix("[]")]
        is_array = type_name.endswith("[]")
        columns.append(
            Column(
                name=name,
                type_name=type_name,
                base_name=type_name,
                type_oid=info.array_oid if is_array else info.oid,
                part=Column(name="", type_name="", base_name="", type_oid=info.oid) if is_array else None,
            )
        )
    return Table(schema="public", name="t", columns=columns)


def messages(*values: Any, key: bytes | None = None) -> list[Message]:
    encoded = [v if isinstance(v, (bytes, type(None))) else json.dumps(v).encode() for v in values]
    return [Message(topic="t", partition=1, offset=i, key=key, value=v) for i, v in enumerate(encoded)]


def test_a_number_that_is_too_far_from_the_epoch_is_not_told_to_say_epoch() -> None:
    with pytest.raises(BadRow, match=r"ms is beyond the years 1 .*; a column of bigint without epoch takes it$"):
        rows(JsonDecoder(epoch={"a": "ms"}), table(a="timestamp"), {"a": 253402300800000})


def rows(decoder: Any, into: Table, *values: Any, mode: Any = "append", key: Sequence[str] = ()) -> list[Any]:
    decoder.prepare(into, mode=mode, key=key)
    return list(decoder.decode(messages(*values)))


ACCEPTED: list[tuple[str, str, Any]] = [
    ("int2", "-32768", -32768),
    ("int8", "9223372036854775807", 2**63 - 1),
    ("numeric", "0.1000000000000000055511151231257827", Decimal("0.1000000000000000055511151231257827")),
    ("numeric", '"12.50"', Decimal("12.50")),
    ("float8", "1", 1.0),
    ("text", '"\\u00e4"', "ä"),
    ("bool", "true", True),
    ("bytea", '"aGk="', b"hi"),
    ("uuid", '"00000000-0000-0000-0000-000000000007"', UUID(int=7)),
    ("date", '"2026-01-02"', date(2026, 1, 2)),
    ("timestamptz", '"2026-01-02T03:04:05.6+01:00"', datetime(2026, 1, 2, 2, 4, 5, 600000, UTC)),
    ("timestamp", '"2026-01-02T03:04:05"', datetime(2026, 1, 2, 3, 4, 5)),  # noqa: DTZ001
    ("int4[]", "[1,null,2]", [1, None, 2]),
    ("int4[]", "[[1,null],[2,3]]", [[1, None], [2, 3]]),
    ("int4", '"1"', 1),
    ("int8[]", '["9223372036854775807"]', [2**63 - 1]),
    ("text", "1.50", "1.50"),
    ("text", "12345678901234567890123", "12345678901234567890123"),
    ("timestamptz", '"2026-01-02T03:04Z"', datetime(2026, 1, 2, 3, 4, tzinfo=UTC)),
    ("timestamp", "[2026,1,2,3,4,5,6000]", datetime(2026, 1, 2, 3, 4, 5, 6)),  # noqa: DTZ001
    ("numeric[]", "[1.10]", [Decimal("1.10")]),
    ("interval", '"P1DT2H"', "P1DT2H"),
]


@pytest.mark.parametrize(("type_name", "text", "expected"), ACCEPTED)
def test_a_field_becomes_what_its_column_takes(type_name: str, text: str, expected: Any) -> None:
    assert rows(JsonDecoder(), table(a=type_name), b'{"a":' + text.encode() + b"}") == [(expected,)]


REFUSED = [
    ("int2", "32768"),
    ("int8", "9223372036854775808"),
    ("int4", "1.0"),
    ("int4", "true"),
    ("float8", "1e400"),
    ("float8", '"1"'),
    ("bool", "1"),
    ("text", '"\\ud800"'),
    ("date", '"2026-02-30"'),
    ("timestamptz", '"2026-01-02T03:04:05"'),
    ("timestamptz", "1767225600"),
    ("timestamp", '"2026-01-02T03:04:05Z"'),
    ("uuid", '"7"'),
    ("bytea", '"?"'),
    ("int4", '"1.0"'),
    ("int4", '"\\u0663"'),
    ("text", "true"),
    ("float8", "9007199254740993"),
    ("float8", "1e-400"),
    ("numeric", '"sNaN"'),
    ("numeric", '"-NaN"'),
    ("numeric", '"NaN123"'),
    ("numeric", '"1_000"'),
    ("int4[]", "[1,[2]]"),
    ("bool[]", "[true,[false]]"),
    ("bool[]", "[true,[]]"),
    ("interval[]", "[null,[]]"),
    ("inet", '"fe80::1%eth0"'),
    ("inet", '"1.2.3.4/0.0.0.255"'),
    ("time", '"03:04:05Z"'),
    ("date", '"2026-01-02T00:00:00"'),
    ("time", "[3,4,5,6001]"),
    ("money", "12.50"),
    ("money", "true"),
    ("money[]", "[12.345]"),
    ("varbit", "10"),
    ("bit[]", "[10]"),
    ("bytea", "1234"),
    ("bytea[]", "[1234]"),
    ("macaddr", "112233445566"),
    ("interval", "5"),
    ("interval", "-1.5"),
    ("interval[]", "[5]"),
]


@pytest.mark.parametrize(("type_name", "text"), REFUSED)
def test_a_field_of_another_kind_is_refused(type_name: str, text: str) -> None:
    decoder = JsonDecoder()
    into = table(a=type_name)
    decoder.prepare(into, mode="append", key=())
    decoded = decoder.decode(messages({"a": None}, b'{"a":' + text.encode() + b"}"))
    bad = Plan(into, ["a"]).find_bad(decoded, decoded.origins)
    assert bad is not None
    assert (bad.topic, bad.partition, bad.offset) == ("t", 1, 1)
    assert str(bad).startswith("t[1] offset 1: ")


@pytest.mark.parametrize("value", [b"", b"null", b"[]", b"{", b'{"a":1}{"a":2}', b"\xff", b'{"a":1},', b"{" * 100_000])
def test_what_is_no_object_is_refused(value: bytes) -> None:
    decoder = JsonDecoder()
    decoder.prepare(table(a="int4"), mode="append", key=())
    decoded = decoder.decode(messages({"a": 1}, value))
    bad = Plan(table(a="int4"), ["a"]).find_bad(decoded, decoded.origins)
    assert bad is not None
    assert bad.offset == 1


def test_an_error_names_the_column_and_shows_the_value_but_not_all_of_it() -> None:
    decoder = JsonDecoder()
    decoder.prepare(table(a="int4"), mode="append", key=())
    decoded = decoder.decode(messages({"a": "x" * 10_000}))
    bad = Plan(table(a="int4"), ["a"]).find_bad(decoded, decoded.origins)
    assert bad is not None
    assert bad.column == "a"
    assert "no whole number" in str(bad)
    assert "xxx" in str(bad)
    assert len(str(bad)) < 400


def test_missing_and_null_fields_are_null_and_unknown_ones_ignored() -> None:
    found = rows(JsonDecoder(), table(a="int4", b="text"), {"a": 1}, {"b": "x", "z": 1}, {"a": None})
    assert found == [(1, None), (None, "x"), (None, None)]


def test_missing_fields_can_be_told_from_null() -> None:
    decoder = JsonDecoder({"a": "a", "b": "x.b"}, missing="apart")
    found = rows(decoder, table(a="int4", b="text"), {"a": None}, {"a": 1, "x": {}}, {"x": None}, {"x": {"b": None}})
    assert found == [(None, MISSING), (1, MISSING), (MISSING, None), (MISSING, None)]


def test_fields_can_be_renamed_and_lie_deep() -> None:
    decoder = JsonDecoder({"a": "x.y.z", "b": "x.b", "c": ("a.b", "odd näme")})
    deep = {"x": {"y": {"z": 1}, "b": "s"}, "a.b": {"odd näme": 2}}
    into = table(a="int4", b="text", c="int4", d="int4")
    found = rows(decoder, into, deep, {"x": {"y": None, "b": "t"}}, {"x": {"b": "u"}})
    assert found == [(1, "s", 2), (None, "t", None), (None, "u", None)]


def test_one_column_alone_is_a_row_too() -> None:
    assert rows(JsonDecoder({"a": "x"}), table(a="int4"), {"x": 1}) == [(1,)]


def test_unknown_fields_can_be_collected_as_they_are() -> None:
    decoder = JsonDecoder(rest="more")
    value = b'{"a":1,"z":1.50,"y":{"x":[1,2]},"b":null}'
    ((a, more),) = rows(decoder, table(a="int4", more="jsonb"), value)
    assert a == 1
    assert json.loads(more, parse_float=Decimal) == {"z": Decimal("1.50"), "y": {"x": [1, 2]}, "b": None}


@pytest.mark.parametrize(
    ("unit", "number", "microseconds"),
    [
        ("s", "1767225600", 1767225600_000000),
        ("s", "1767225600.000001", 1767225600_000001),
        ("ms", "1767225600123", 1767225600_123000),
        ("ms", "-62135596800000", -62135596800_000000),
        ("us", "1767225600123456", 1767225600_123456),
        ("ns", "1767225600123456000", 1767225600_123456),
        ("ns", "1767225600000000001", 1767225600_000000),
        ("ns", "1767225600000000999", 1767225600_000001),
        ("s", "1767225610.2485697", 1767225610_248570),
        ("days", "20454", 20454 * 86400_000000),
    ],
)
def test_timestamps_can_be_numbers(unit: Any, number: str, microseconds: int) -> None:
    decoder = JsonDecoder(epoch={"a": unit})
    ((found,),) = rows(decoder, table(a="timestamptz"), f'{{"a":{number}}}'.encode())
    assert found == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)


@pytest.mark.parametrize(("unit", "number"), [("s", "1e300"), ("s", "x"), ("s", "true"), ("ms", '"NaN"')])
def test_a_number_that_is_no_moment_is_refused(unit: Any, number: str) -> None:
    decoder = JsonDecoder(epoch={"a": unit})
    with pytest.raises((ValueError, OverflowError)):
        rows(decoder, table(a="timestamptz"), f'{{"a":{number}}}'.encode())


@pytest.mark.parametrize(
    ("unit", "number", "text"),
    [("us", "3600000000", "1:00:00.000000"), ("ms", "-1500", "-0:00:01.500000"), ("days", "400", "9600:00:00.000000")],
)
def test_a_number_is_an_interval_where_its_unit_is_said(unit: Any, number: str, text: str) -> None:
    sent = f'{{"a":{number}}}'.encode()
    assert rows(JsonDecoder(epoch={"a": unit}), table(a="interval"), sent) == [(text,)]
    with pytest.raises(BadRow, match=rf"interval: .*not {number}; epoch = \{{ a = "):
        rows(JsonDecoder(), table(a="interval"), sent)


@pytest.mark.parametrize(("kind", "text"), [("time", "24:00:00"), ("timetz", "24:00:00+00:00")])
def test_a_number_may_be_the_last_time_of_a_day(kind: str, text: str) -> None:
    """As Debezium sends it without a schema."""
    into = table(a=kind)
    [row] = rows(JsonDecoder(epoch={"a": "us"}), into, {"a": 86_400_000_000})
    assert row == (text,)
    assert Plan(into, ["a"]).find_bad([row], messages({})) is None
    for number in (-1, 86_400_000_001):
        with pytest.raises(BadRow, match="us is no time of a day; a column of interval takes it"):
            rows(JsonDecoder(epoch={"a": "us"}), into, {"a": number})


def test_a_date_is_a_number_of_whole_days() -> None:
    decoder = JsonDecoder(epoch={"a": "s"})
    assert rows(decoder, table(a="date"), {"a": 2 * 86400}) == [(date(1970, 1, 3),)]
    with pytest.raises(ValueError, match="no whole day"):
        rows(decoder, table(a="date"), {"a": 2 * 86400 + 1})


def test_signs_of_numbers_are_kept() -> None:
    assert rows(JsonDecoder(decimal={"a": 2}), table(a="numeric"), {"a": "/w=="}) == [(Decimal("-0.01"),)]
    ((zero,),) = rows(JsonDecoder(), table(a="float8"), b'{"a":-0}')
    assert str(float(zero)) == "-0.0"


def test_numbers_in_strings_are_taken_where_that_was_chosen() -> None:
    assert rows(JsonDecoder(lax=True), table(a="int4", b="bool"), {"a": "7", "b": "true"}) == [(7, True)]


def test_the_envelope_fills_columns() -> None:
    metadata: Mapping[str, Any] = {"t": "topic", "p": "partition", "o": "offset", "k": "key", "ts": "timestamp"}
    into = table(a="int4", t="text", p="int4", o="int8", k="bytea", ts="timestamptz")
    assert rows(JsonDecoder(metadata=metadata), into, {"a": 1}, {"a": 2}) == [
        (1, "t", 1, 0, None, None),
        (2, "t", 1, 1, None, None),
    ]


UUID_TEXT = "00000000-0000-0000-0000-000000000007"


@pytest.mark.parametrize(
    ("type_name", "key", "expected"),
    [
        ("int8", b"42", "42"),
        ("numeric", b'{"schema": {"type": "double"}, "payload": 1.50}', Decimal("1.50")),
        ("int4", b'"42"', "42"),
        ("uuid", UUID_TEXT.encode(), UUID_TEXT),
        ("uuid", f'"{UUID_TEXT}"'.encode(), UUID_TEXT),
        ("uuid", UUID(int=7).bytes, UUID(int=7).bytes),
        ("date", b"2026-01-02", "2026-01-02"),
        ("text", b'"42"', b'"42"'),
        ("bytea", b"\0\xff", b"\0\xff"),
        ("jsonb", b'{"a": 1}', b'{"a": 1}'),
        ("int8", b"\xff", None),
        ("int8", b"forty", None),
        ("int8", b'{"id": 1}', None),
    ],
)
def test_a_bare_key_fills_a_column_of_its_type(type_name: str, key: bytes, expected: Any) -> None:
    """In a row and in a delete."""
    into = table(id=type_name, v="int4")
    decoder = JsonDecoder(metadata={"id": "key"})
    decoder.prepare(into, mode="upsert", key=["id"])
    for sent in (messages({"v": 1}, key=key), messages(None, key=key)):
        decoded = decoder.decode(sent)
        bad = Plan(into, ["v", "id"]).find_bad(((1, row[-1]) for row in decoded), sent)
        if expected is None:
            assert str(bad).startswith("t[1] offset 0: column id: ")
        else:
            assert bad is None
            assert [row[-1] for row in decoded] == [expected]


def test_a_timestamp_beyond_the_years_is_the_fault_of_its_message() -> None:
    decoder, (sent,) = JsonDecoder(metadata={"at": "timestamp"}), messages({"v": 1})
    decoder.prepare(table(v="int4", at="timestamptz"), mode="append", key=())
    far = Message(topic="t", partition=1, offset=5, value=sent.value(), timestamp=(1, 1767225600_000000))
    with pytest.raises(BadRow, match=r"t\[1\] offset 5: column at: timestamp: "):
        list(decoder.decode([far]))


@pytest.mark.parametrize("text", ["2", '"yes"', "1"])
def test_what_is_advised_for_a_boolean_takes_its_other_values_too(text: str) -> None:
    with pytest.raises(BadRow, match=r'"t" and "f"; jsonb takes all: ALTER .* TYPE jsonb USING to_jsonb\(a\)'):
        rows(JsonDecoder(), table(a="bool"), f'{{"a":{text}}}'.encode())
    for value in (text, "true"):
        assert rows(JsonDecoder(), table(a="jsonb"), f'{{"a":{value}}}'.encode()) == [(value.encode(),)]


def test_text_is_advised_where_booleans_come_in_text() -> None:
    """As in CSV, of which jsonb would take JSON only."""
    with pytest.raises(BadRow, match=r'"yes".*; text takes it: ALTER .* TYPE text'):
        rows(JsonDecoder(lax=True), table(a="bool"), b'{"a":"yes"}')


def test_headers_need_a_column_for_json() -> None:
    with pytest.raises(TableError, match="json or jsonb"):
        rows(JsonDecoder(metadata={"h": "headers"}), table(a="int4", h="text"))
    decoder = JsonDecoder(metadata={"h": "headers"})
    decoder.prepare(table(a="int4", h="jsonb"), mode="append", key=())
    headers: Any = [("x", b"1"), ("x", b"\xff"), ("y", None)]
    message = Message(topic="t", partition=0, offset=0, value=b'{"a":1}', headers=headers)
    assert list(decoder.decode([message])) == [(1, [["x", "1"], ["x", {"base64": "/w=="}], ["y", None]])]


@pytest.mark.parametrize(("key", "expected"), [(b'{"a":5,"z":1}', 5), (b"5", "5")])
def test_a_message_without_a_value_deletes_by_its_key(key: bytes, expected: Any) -> None:
    decoder = JsonDecoder()
    decoder.prepare(table(a="int4", b="text"), mode="upsert", key=["a"])
    found = list(decoder.decode([*messages({"a": 1}), *messages(None, key=key), *messages({"a": 2})]))
    assert found == [(1, None), (expected,), (2, None)]
    assert [type(row) is Tombstone for row in found] == [False, True, False]


@pytest.mark.parametrize(
    ("options", "type_name", "key", "expected"),
    [
        ({"epoch": {"a": "ms"}}, "timestamptz", b"1767225600000", datetime(2026, 1, 1, tzinfo=UTC)),
        ({"decimal": {"a": 2}}, "numeric", b"1234", Decimal("-26588.24")),
        ({"decimal": {"a": 2}}, "numeric", b'"1234"', Decimal("-26588.24")),
        ({}, "bytea", b"AQI=", b"\1\2"),
        ({}, "bytea", b'"AQI="', b"\1\2"),
    ],
)
def test_a_bare_key_is_read_as_the_field_of_its_column(
    options: dict[str, Any], type_name: str, key: bytes, expected: Any
) -> None:
    decoder = JsonDecoder(**options)
    decoder.prepare(table(a=type_name), mode="upsert", key=["a"])
    assert list(decoder.decode(messages(None, key=key))) == [Tombstone((expected,))]


def test_a_tombstone_with_a_key_of_several_columns() -> None:
    decoder = JsonDecoder()
    decoder.prepare(table(a="int4", b="text"), mode="upsert", key=["b", "a"])
    assert list(decoder.decode(messages(None, key=b'{"a":1,"b":"x"}'))) == [("x", 1)]
    for key in (b"1", None, b""):
        with pytest.raises(BadRow):
            list(decoder.decode(messages(None, key=key)))


@pytest.mark.parametrize("kind", ["int8", "oid"])
@pytest.mark.parametrize("quote", ["", '"'])
def test_a_number_of_thousands_of_digits_is_out_of_range(kind: str, quote: str) -> None:
    """Of which Python says what setting of its own it exceeds."""
    decoder = JsonDecoder()
    decoder.prepare(table(a=kind), mode="append", key=())
    sent = f'{{"a": {quote}{"9" * 5000}{quote}}}'.encode()
    with pytest.raises(BadRow, match=r"offset 0: column a: .*9\.\.\. \(500[02] characters\) is out of range"):
        list(decoder.decode(messages(sent)))


@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00", "\\ud83d\\u0041", "\\ud83d\\ud83d\\ude00"])
def test_half_of_a_character_is_told(half: str) -> None:
    decoder = JsonDecoder()
    decoder.prepare(table(a="int4", b="jsonb"), mode="append", key=())
    with pytest.raises(BadRow, match=r"offset 0: .*; \\u[dD]\w{3} is half of a character"):
        list(decoder.decode(messages(b'{"a": 1, "b": {"smile": "\\ud83d\\ude00 %b"}}' % half.encode())))


def test_a_tombstone_is_refused_in_other_modes_or_skipped_by_choice() -> None:
    decoder = JsonDecoder()
    decoder.prepare(table(a="int4"), mode="append", key=())
    with pytest.raises(BadRow, match=r"offset 1: .*no value"):
        list(decoder.decode(messages({"a": 1}, None)))
    decoded = JsonDecoder(on_tombstone="skip")
    decoded.prepare(table(a="int4"), mode="append", key=())
    found = decoded.decode(messages({"a": 1}, None, {"a": 2}))
    assert list(found) == [(1,), (2,)]
    assert [m.offset() for m in found.origins] == [0, 2]
    assert found.filtered == 1


@pytest.mark.parametrize(
    "fields", [{"a": "x", "b": "x"}, {"a": "x", "b": "x.y"}, {"b": "x.y", "a": "x"}, {"nothing": "x"}]
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, str]) -> None:
    with pytest.raises(TableError):
        JsonDecoder(fields).prepare(table(a="int4", b="int4"), mode="append", key=())


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="units"):
        JsonDecoder(epoch={"a": "hours"})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="there is no place"):
        JsonDecoder(metadata={"a": "place"})


def test_raw_messages_are_stored_as_they_are() -> None:
    found = rows(RawDecoder(metadata={"o": "offset"}), table(key="bytea", value="text", o="int8"), b"x", None)
    assert found == [(b"x", None, 0), (None, None, 1)]


def test_a_raw_message_without_value_deletes_in_an_upsert() -> None:
    decoder = RawDecoder()
    decoder.prepare(table(key="bytea", value="text"), mode="upsert", key=["key"])
    found = list(decoder.decode([*messages(b"x", key=b"k"), *messages(None, key=b"k")]))
    assert found == [(b"x", b"k"), (b"k",)]
    assert type(found[1]) is Tombstone
    with pytest.raises(TableError, match="cannot fill"):
        decoder.prepare(table(key="bytea", value="text", z="int4"), mode="upsert", key=["z"])


def test_a_function_may_return_no_row_one_or_several() -> None:
    answers: list[Any] = [None, {"a": 1}, [{"b": "x"}, {"a": 2}], Tombstone((3,))]
    decoder = FunctionDecoder(lambda m: answers[m.offset() or 0])
    decoder.prepare(table(a="int4", b="text"), mode="upsert", key=["a"])
    decoded = decoder.decode(messages(*range(4)))
    assert list(decoded) == [(1, MISSING), (MISSING, "x"), (2, MISSING), (3,)]
    assert [m.offset() for m in decoded.origins] == [1, 2, 2, 3]


@pytest.mark.parametrize("answer", [{"nothing": 1}, 5])
def test_a_function_that_returns_something_else_is_told_for_which_message(answer: Any) -> None:
    decoder = FunctionDecoder(lambda m: answer)
    decoder.prepare(table(a="int4"), mode="append", key=())
    with pytest.raises(BadRow, match=r"t\[1\] offset 0"):
        decoder.decode(messages({}))


AT_ONCE = table(id="int8", name="text", amount="float8", price="numeric", at="timestamptz", doc="jsonb", rest="jsonb")


def drawn_object(rng: random.Random) -> bytes:
    """Draw an object of which some need a closer look."""
    choices: dict[str, list[str]] = {
        "id": ["1", "2", "null", '"3"'],
        "name": ['"a"', "7", "null"],
        "amount": ["0", "0.5", "-0.0", "1e-3", "0e5", '"NaN"'],
        "price": ["1.50", '"2"', "null"],
        "at": ['"2026-01-02T03:04:05Z"', '"2026-01-02T03:04:05.1234565Z"', '"2026-01-02T03:04Z"'],
        "doc": ["{}", "null", "[1]"],
        "more": ["1"],
        "other": ['{"a": null}'],
        'o"dd': ["1"],
        f"new{rng.randrange(150)}": ["null"],
    }
    common = 0.97 if rng.random() < 0.9 else 0.5
    parts = []
    for name, values in choices.items():
        is_odd = name[:3] in ("mor", "oth", 'o"d', "new")
        if rng.random() < (0.1 * (1 - common) if is_odd else 1 - (1 - common) / 2):
            parts.append(f"{json.dumps(name)}: {values[0] if rng.random() < common else rng.choice(values)}")
    return f"{{{', '.join(parts)}}}".encode()


def as_stored(row: Any) -> str:
    """Show a row; a closer look leaves texts for the server to read, and -0.0 is not 0.0."""

    def one(value: Any) -> Any:
        if isinstance(value, str):
            with suppress(ValueError):
                return float(value)
            with suppress(ValueError):
                return datetime.fromisoformat(value)
        return float(value) if isinstance(value, int) else value

    return repr([*map(one, row)])


@pytest.mark.parametrize("seed", seeds([1, 2, 3], new=2))
@pytest.mark.parametrize("options", [{}, {"rest": "rest"}, {"missing": "apart"}, {"metadata": {"name": "topic"}}])
def test_many_messages_at_once_are_what_each_of_them_is(options: dict[str, Any], seed: int) -> None:
    """The loops for many are a way of their own, with the same rows, counts and complaints."""
    rng = random.Random(seed)
    sent = messages(*(drawn_object(rng) for _ in range(700)))
    many, alone = JsonDecoder(**options), JsonDecoder(**options)
    for decoder in (many, alone):
        decoder.prepare(AT_ONCE, mode="append", key=())
    counted: Counter[str] = Counter()
    expected: list[Any] = []
    good: list[Message] = []
    for message in sent:
        decoded = alone.decode([message])
        try:
            expected += list(decoded)
        except BadRow as error:
            with pytest.raises(BadRow, match=f"^{re.escape(str(error))}$"):
                list(many.decode([*good[-3:], message]))
            continue
        good.append(message)
        counted += decoded.unused
    for _ in range(2):
        decoded = many.decode(good)
        found = list(decoded)
        assert [*map(as_stored, found)] == [*map(as_stored, expected)]
        assert decoded.unused == counted
        assert list(decoded.unfilled) == list(alone.decode([]).unfilled)
    assert len(good) > 500


@pytest.mark.parametrize("missing", ["keep", "default"])
def test_a_decoder_that_makes_null_of_a_missing_field_is_refused_where_that_is_not_null(missing: Any) -> None:
    """The table would lose the value that it was to keep."""
    for decoder in (JsonDecoder(), FormatDecoder(JsonDecoder(missing="null"))):
        with pytest.raises(ConfigurationError, match=r'JsonDecoder\(missing="apart"\)'):
            TableSink("customer", decoder=decoder, mode="upsert", missing=missing)
    TableSink("customer", decoder=JsonDecoder(missing="apart"), mode="upsert", missing=missing)


@pytest.mark.parametrize("missing", [None, "null"])
def test_a_missing_field_that_is_told_apart_for_nothing_is_refused(missing: Any) -> None:
    for decoder in (JsonDecoder(missing="apart"), FormatDecoder(JsonDecoder(missing="apart"))):
        with pytest.raises(ConfigurationError, match='say missing="keep" or "default", too'):
            TableSink("customer", decoder=decoder, missing=missing)
