"""A value gets to Postgres as it is, or is refused: what columns take, without a server."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from psycopg.postgres import types as registry
from psycopg.types.json import Jsonb
from psycopg.types.multirange import Multirange
from psycopg.types.range import Range

from exactly_once.writer.codec import Codec, Naive
from exactly_once.writer.codecs import codec_of
from exactly_once.writer.plan import encode_binary, encode_text
from exactly_once.writer.table import Column

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
RANGES = {"int4range": "int4", "int8range": "int8", "numrange": "numeric", "tsrange": "timestamp"}
RANGES |= {"tstzrange": "timestamptz", "daterange": "date"}


def codec(name: str, typmod: int = -1, naive: Naive = "refuse") -> Codec:
    return codec_of(column_of(name, typmod), naive)


def column_of(name: str, typmod: int = -1) -> Column:
    is_array = name.endswith("[]")
    info = registry[name.removesuffix("[]")]
    oid, kind, part = info.oid, "b", RANGES.get(name)
    if is_array:
        oid, part = info.array_oid, info.name
    elif name.endswith("multirange"):
        kind, part = "m", name.replace("multirange", "range")
    elif part is not None:
        kind = "r"
    made = None if part is None else column_of(part, typmod)
    return Column(name="c", type_name=name, base_name=name, type_oid=oid, typmod=typmod, kind=kind, part=made)


def attributes(*names: str) -> list[Column]:
    return [Column(name=n, type_name="x", base_name="x", type_oid=999998) for n in names]


def numeric(precision: int, scale: int) -> int:
    return ((precision << 16) | (scale & 0x7FF)) + 4


TAKEN_AS_THEY_ARE: list[tuple[str, list[Any]]] = [
    ("int2", [-(2**15), 2**15 - 1]),
    ("int4", [-(2**31), 2**31 - 1]),
    ("int8", [-(2**63), 2**63 - 1]),
    ("oid", [0, 2**32 - 1]),
    ("float4", [0.0, 1.5, float("inf"), float("nan"), 3.4e38]),
    ("float8", [1.5, 5e-324, float("-inf"), float("nan")]),
    ("numeric", [Decimal("1.50"), 10**400, Decimal("NaN"), Decimal("-Infinity"), Decimal("1E-16383")]),
    ("bool", [True, False]),
    ("text", ["", "ä\t\n\\"]),
    ("bytea", [b"\x00\xff", bytearray(b"x"), memoryview(b"y")]),
    ("uuid", [UUID(int=5)]),
    ("date", [date.min, date.max]),
    ("time", [time.max]),
    ("timetz", [time(1, tzinfo=UTC)]),
    ("timestamp", [NOW.replace(tzinfo=None)]),
    ("timestamptz", [NOW]),
    ("interval", [timedelta(days=-3, microseconds=1)]),
    ("inet", [ipaddress.ip_address("::1"), ipaddress.ip_interface("10.0.0.1/8")]),
    ("cidr", [ipaddress.ip_network("10.0.0.0/8")]),
]


def test_values_of_the_columns_own_type_are_dumped_as_they_are(subtests: pytest.Subtests) -> None:
    for name, values in TAKEN_AS_THEY_ARE:
        with subtests.test(name):
            c = codec(name)
            assert c.wire is not None
            assert c.accepts(values)
            assert c.accepts([None, *values])
            assert c.accepts([None])
            assert [c.convert(v) for v in values] == values or name in ("float4", "float8", "numeric")
            assert b"".join(encode_binary([(v,) for v in values], [c.wire]))


class Nanosecond(datetime):
    """One as of pandas, finer than a microsecond."""

    nanosecond = 1


REFUSED: list[tuple[str, int, list[Any]]] = [
    ("int2", -1, [2**15, -(2**15) - 1, True, 1.5, "1.5", Decimal("1.5"), float("nan"), float("inf"), "x", b"1"]),
    ("int4", -1, [2**31, -(2**31) - 1, True]),
    ("int8", -1, [2**63, -(2**63) - 1, 2**70, Decimal("NaN")]),
    ("oid", -1, [-1, 2**32, "007"]),
    ("float4", -1, [1e300, -1e39, 1e-60, True, "x", 2**2000]),
    ("float8", -1, [2**53 + 1, 2**2000, True, "1e400", Decimal("1E400"), "x"]),
    ("numeric", -1, [Decimal("1E131073"), Decimal("1E-20000"), True, "x", Decimal("-NaN"), Decimal("NaN1")]),
    ("numeric", numeric(5, 2), [Decimal(1000), Decimal("1.005"), 1000, 1.005, Decimal("Infinity")]),
    ("numeric", numeric(3, -2), [Decimal(150), 150, 100000]),
    ("numeric", numeric(2, 5), [Decimal("0.001"), Decimal("0.0000001")]),
    ("bool", -1, [1, 0, b"t"]),
    ("text", -1, [1, b"\xff", None.__class__]),
    ("varchar", 3 + 4, ["abcd", "ab  "]),
    ("bpchar", 3 + 4, ["abcd"]),
    ("name", -1, ["x" * 64, "ä" * 32]),
    ("bytea", -1, ["x", 1]),
    ("uuid", -1, ["x", 5]),
    ("date", -1, [NOW, "2026-13-01", "1267011008", 5]),
    ("time", -1, [time(1, tzinfo=UTC), 5]),
    ("timetz", -1, [time(1)]),
    ("timestamp", -1, [NOW, "2026-01-01T00:00:00Z", 5, date(2026, 1, 1), "44-03-15 00:00:00Z BC"]),
    ("timestamptz", -1, [NOW.replace(tzinfo=None), "2026-01-01T00:00:00", "0044-03-15 00:00:00 BC", "tomorrow"]),
    ("timestamptz", 3, [NOW]),
    ("timestamptz", 0, [NOW]),
    ("timestamptz", -1, [Nanosecond(2026, 1, 2, tzinfo=UTC)]),
    ("interval", -1, [5]),
    ("interval", 0x7FFF0000, [5]),
    ("money", -1, [Decimal("12.345"), Decimal("12.50"), 0.1, True, float("inf"), b"1"]),
    ("bit", -1, [10, Decimal(10), True]),
    ("varbit", -1, [10]),
    ("json", -1, [{1, 2}, float("nan"), ...]),
    ("jsonb", -1, [{"a": float("inf")}, {"a": b"x"}]),
    ("inet", -1, ["x", 5]),
    ("cidr", -1, ["10.0.0.1/8"]),
    ("int4[]", -1, [[2**31], ["x"], 5, [[True]]]),
    ("numeric[]", numeric(5, 2), [[Decimal("1.005")]]),
    ("int4range", -1, [Range(0, 2**31), 5, "[1, ]", "[ ,2]"]),
    ("tstzrange", -1, [Range(NOW.replace(tzinfo=None), None), "[2024-01-01 10:00,2024-01-01 11:00)", "[1,", "1,2"]),
    ("tsrange", -1, ["[2024-01-01T10:00Z,)", "(,2024-01-01T10:00+05:00]", '["2024-01-01 10:00:00+05",)']),
    ("daterange", -1, ["[01/02/2024,)", "[,1 Jan 2024]", "[2024-01-01,2024-01-02),"]),
    ("tstzmultirange", -1, ["{[2024-01-01 10:00+00,2024-01-01 11:00)}", "[1,2)", "{[1,2)"]),
    ("date[]", -1, ["{01/02/2024}", "{2024-01-01,{2024-01-02}}", "{2024-01-01", "{2024-01-01,}", "[0:0]={01/02/2024}"]),
    ("timestamptz[]", -1, ["{2024-01-01 10:00:00}", '{"2024-01-01 10:00:00"}', "{{2024-01-01 10:00:00}}", "{" * 9999]),
    ("numeric[]", numeric(10, 2), ["{1.239}", "{1} x", "1"]),
    ("bytea[]", -1, ["{abc}", '{"\\\\xa"}']),
]


def test_a_value_that_would_not_survive_is_refused(subtests: pytest.Subtests) -> None:
    for name, typmod, value in ((name, typmod, value) for name, typmod, values in REFUSED for value in values):
        with subtests.test(f"{name}({typmod}) <- {value!r:.30}"):
            c = codec(name, typmod)
            assert not c.accepts([value])
            with pytest.raises(ValueError, match=r"\w"):
                c.convert(value)


CONVERTED: list[tuple[str, int, Any, Any]] = [
    ("int4", -1, "12", 12),
    ("int4", -1, 3.0, 3),
    ("int8", -1, Decimal(7), 7),
    ("float8", -1, 3, 3.0),
    ("float8", -1, "inf", float("inf")),
    ("numeric", -1, 0.1, Decimal("0.1")),
    ("money", -1, Decimal("12.00"), "12"),
    ("money", -1, "$12.50", "$12.50"),
    ("numeric", numeric(5, 2), Decimal("1.5000"), Decimal("1.5000")),
    ("numeric", numeric(5, 2), "999.99", Decimal("999.99")),
    ("numeric", numeric(3, -2), 12300, 12300),
    ("numeric", numeric(2, 5), Decimal("0.00012"), Decimal("0.00012")),
    ("text", -1, b"\xc3\xa4", "ä"),
    ("uuid", -1, str(UUID(int=7)), UUID(int=7)),
    ("uuid", -1, UUID(int=7).bytes, UUID(int=7)),
    ("date", -1, "2026-01-02", date(2026, 1, 2)),
    ("timestamptz", -1, "2026-01-02T03:04:05.678901Z", NOW),
    ("timestamptz", -1, "2026-01-02T03:04:05.6789006Z", NOW),
    ("timestamptz", -1, "2025-12-31T24:00:00Z", datetime(2026, 1, 1, tzinfo=UTC)),
    ("timestamptz", -1, "infinity", "infinity"),
    ("timestamptz", -1, "0044-03-15 00:00:00+00 BC", "0044-03-15 00:00:00+00 bc"),
    ("json", -1, '{"a": 1}', b'{"a": 1}'),
    ("jsonb", -1, {"a": ["ä", None]}, b'\x01{"a":["\xc3\xa4",null]}'),
    ("jsonb", -1, Jsonb([1]), b"\x01[1]"),
    ("jsonb", -1, 5, b"\x015"),
    ("inet", -1, "10.0.0.1", ipaddress.ip_address("10.0.0.1")),
    ("int8[]", -1, (1, None, "3"), [1, None, 3]),
    ("timestamptz[]", -1, ["infinity"], '{infinity}'),
    ("int4range", -1, Range("1", 5), Range(1, 5)),
    ("int4range", -1, " (1, 5] ", Range(1, 5, "(]")),
    ("int4range", -1, "empty", Range(empty=True)),
    ("tstzrange", -1, '["2026-01-02 03:04:05.678901+00",)', Range(NOW, None)),
    ("tstzrange", -1, "[-infinity,2026-01-02 03:04:05.678901+00]", "[-infinity,\"2026-01-02 03:04:05.678901+00:00\"]"),
    ("int4multirange", -1, "{[1,2), (5,]}", Multirange([Range(1, 2), Range(5, None, "(]")])),
    ("int4multirange", -1, "{}", Multirange([])),
    ("int8[]", -1, "{1, NULL,3}", [1, None, 3]),
    ("int8[]", -1, "{{1,2},{3,4}}", [[1, 2], [3, 4]]),
    ("int8[]", -1, "{}", []),
    ("text[]", -1, '{"a,\\"b","NULL",null, c d ,"","{"}', ['a,"b', "NULL", None, "c d", "", "{"]),
    ("date[]", -1, "[0:0]={2024-01-01}", "[0:0]={2024-01-01}"),
    ("bytea[]", -1, '{"\\\\x00ff"}', [b"\0\xff"]),
    ("timestamptz[]", -1, '{"2026-01-02 03:04:05.678901+00"}', [NOW]),
]  # fmt: skip


def test_a_value_of_another_type_is_converted_where_nothing_is_lost(subtests: pytest.Subtests) -> None:
    for name, typmod, value, expected in CONVERTED:
        with subtests.test(f"{name}({typmod}) <- {value!r:.30}"):
            found = codec(name, typmod).convert(value)
            assert found == expected
            assert type(found) is type(expected)


def test_timestamps_are_taken_as_utc_where_that_was_chosen() -> None:
    assert codec("timestamptz", naive="utc").convert(NOW.replace(tzinfo=None)) == NOW
    in_tokyo = NOW.astimezone(datetime.fromisoformat("2026-01-01T00:00:00+09:00").tzinfo)
    assert codec("timestamp", naive="utc").convert(in_tokyo) == NOW.replace(tzinfo=None)


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ({"kind": "c", "attributes": attributes("a", "b", "c")}, {"a": 1, "b": 'x"\\,'}, '(1,"x""\\\\,",)'),
        ({"kind": "c", "attributes": attributes("a", "b")}, ("", None), '("",)'),
        (
            {"part": replace(column_of("text"), kind="e", type_oid=1)},
            ["a", None, "NULL", "x y", 'q"'],
            '{a,NULL,"NULL","x y","q\\""}',
        ),
        ({}, 5, "5"),
        ({}, Decimal("1.50"), "1.50"),
    ],
)
def test_what_has_no_binary_form_goes_as_the_literal_that_postgres_reads(
    column: dict[str, Any], value: Any, expected: str
) -> None:
    c = codec_of(Column(name="c", type_name="t", base_name="t", type_oid=999999, **column))
    assert c.wire is None
    assert c.as_text(c.convert(value)) == expected


def test_a_composite_with_an_unknown_attribute_is_refused() -> None:
    c = codec_of(Column(name="c", type_name="t", base_name="t", type_oid=999999, kind="c", attributes=attributes("a")))
    for value in ({"b": 1}, (1, 2)):
        with pytest.raises(ValueError, match="attribute"):
            c.convert(value)


PARTS = [
    Column(name=n, type_name=n, base_name=n, type_oid=registry[n].oid, typmod=typmod)
    for n, typmod in (("timestamptz", -1), ("numeric", numeric(10, 2)), ("text", -1), ("bytea", -1))
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('("2026-01-02 03:04:05+00",1.5,,)', '("2026-01-02 03:04:05+00:00",1.5,,)'),
        ('(,,"a ""b"" \\\\,","\\\\x00")', '(,,"a ""b"" \\\\,","\\\\x00")'),
        ("(,,,)", "(,,,)"),
        ('(,,"",)', '(,,"",)'),
        ('(,,"xy""z)",)', '(,,"xy""z)",)'),
        ("(2026-01-02 03:04:05,,,)", None),
        ("(,1.239,,)", None),
        ("(,,,abc)", None),
        ("(,,)", None),
        ("(,,,,)", None),
        ("(,,,", None),
        ("(,,,)x", None),
        ("x", None),
        ('(,,",)', None),
    ],
)
def test_the_text_of_a_composite_value_is_looked_at_by_its_parts(text: str, expected: str | None) -> None:
    composite: dict[str, Any] = {"kind": "c", "attributes": PARTS}
    c = codec_of(Column(name="c", type_name="t", base_name="t", type_oid=999999, **composite))
    if expected is not None:
        assert c.as_text(c.convert(text)) == expected
        return
    with pytest.raises(ValueError, match=r"\w"):
        c.convert(text)


def test_text_copy_escapes_what_separates() -> None:
    take: list[Callable[[Any], str | None]] = [str, lambda v: v]
    assert encode_text([("a\tb\\", None), ("\n\r", "x")], take) == b"a\\tb\\\\\t\\N\n\\n\\r\tx\n"


@pytest.mark.parametrize("blank", [chr(n) for n in (0x1C, 0x1F, 0x85, 0xA0, 0x2003, 0x2028, 0x3000)])
def test_what_only_unicode_takes_for_a_blank_is_text(blank: str) -> None:
    """Postgres writes it without quotes."""
    texts = codec("text[]", -1)
    assert texts.convert(f"{{{blank}foo,bar{blank}}}") == [f"{blank}foo", f"bar{blank}"]
    assert texts.convert(f"{{{blank}}}") == [blank]
