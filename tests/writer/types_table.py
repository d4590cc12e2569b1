"""The types that columns have: what the page says of them, and values that show it. One source for page and tests."""

# ruff: noqa: E501 - tables of values

from __future__ import annotations

from dataclasses import dataclass, field

OWN_TYPES = """
CREATE TYPE json_mood AS ENUM ('sad', 'happy');
CREATE DOMAIN json_percent AS int CHECK (value BETWEEN 0 AND 100);
CREATE DOMAIN json_short AS varchar(2);
CREATE TYPE json_place AS (name text, size int, more jsonb, price numeric(5,2), tags text[]);
CREATE TYPE json_trip AS (start json_place, stops json_place[], days date[]);
"""
Values = dict[str, list[tuple[str, str]]]
"""By type of a column: JSON, and what ``SELECT column::text`` shows of it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the page's table."""

    columns: str
    json: str
    python: str
    refused: str
    values: Values
    bad: dict[str, list[str]] = field(default_factory=dict)
    """By type, JSON that is refused."""


TYPES = [
    Row(
        columns="`smallint`, `integer`, `bigint`, `oid`",
        json="whole number, as text too",
        python="`int`, whole `float` or `Decimal`, text",
        refused="out of range, fractions, true",
        values={
            "smallint": [("-32768", "-32768"), ('"12"', "12")],
            "integer": [("2147483647", "2147483647")],
            "bigint": [("-9223372036854775808", "-9223372036854775808"), ('"9223372036854775807"', "9223372036854775807")],
            "oid": [("4294967295", "4294967295")],
        },
        bad={"smallint": ["32768", "1.0", "true", '"1.0"', '"x"', '"\\u0663"', "[1]"], "bigint": ["9223372036854775808"], "oid": ["-1", '"012"', '" +012"', '"0x1f"', '"-1"']},
    ),
    Row(
        columns="`real`, `double precision`",
        json='number; "NaN", "Infinity", "-Infinity"; as text too with `lax`',
        python="`float`, `int`, text",
        refused="out of range; what would become 0; an int that a double changes",
        values={
            "real": [("1.5", "1.5"), ("7", "7")],
            "double precision": [("0.1", "0.1"), ("-0", "-0"), ("-0.0", "-0"), ("0", "0"), ("5e-324", "5e-324"), ("9007199254740992", "9.007199254740992e+15"), ('"NaN"', "NaN"), ('"-Infinity"', "-Infinity")],
        },
        bad={"real": ["1e39", "1e-60"], "double precision": ["1e400", "1e-400", "9007199254740993", '"1.5"', "true"]},
    ),
    Row(
        columns="`numeric`",
        json="number or text, every digit kept; base64 with `decimal`",
        python="`Decimal`, `int`, `float` by its shortest digits",
        refused="more digits than the column's scale keeps; Postgres would round",
        values={
            "numeric": [("0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827"), ('"12.50"', "12.50"), ('"NaN"', "NaN"), ("1E+3", "1000")],
            "numeric(5,2)": [("999.99", "999.99"), ("1.5", "1.50")],
        },
        bad={"numeric": ['"sNaN"', '"-NaN"', '"NaN123"', '"1_000"', '"\\u0661\\u0662"', "true"], "numeric(5,2)": ["1.005", "1000"]},
    ),
    Row(
        columns="`boolean`",
        json='true, false; 1, 0, "true", "false", "t", "f" with `lax`',
        python="`bool`, text",
        refused="numbers",
        values={"boolean": [("true", "true"), ("false", "false")]},
        bad={"boolean": ["1", "0", '"true"', "[]"]},
    ),
    Row(
        columns='`text`, `varchar(n)`, `char(n)`, `name`, `"char"`',
        json="text, or a number by its own digits",
        python="`str`, UTF-8 bytes",
        refused='too long; NUL, unless `nul="strip"`',
        values={
            "text": [('"\\u00e4\\t\\\\N"', "ä\t\\N"), ('""', ""), ("1.50", "1.50"), ("12345678901234567890123", "12345678901234567890123")],
            "varchar(3)": [('"abc"', "abc"), ("123", "123")],
            "char(3)": [('"abc"', "abc")],
            "name": [('"n"', "n")],
            '"char"': [('"x"', "x"), ('""', "")],
        },
        bad={"text": ["true", "{}", '"a\\u0000b"', '"\\ud800"'], "varchar(3)": ['"abcd"', "1234"], "char(3)": ['"abcd"'], '"char"': ['"xy"', '"\\u00e4"']},
    ),
    Row(
        columns="`bytea`",
        json="base64",
        python="`bytes`",
        refused="text",
        values={"bytea": [('"AP8="', "\\x00ff"), ('""', "\\x")]},
        bad={"bytea": ['"?"', "1"]},
    ),
    Row(
        columns="`timestamptz`",
        json="ISO 8601 with a zone; a number with `epoch`",
        python='aware `datetime`, text, `"infinity"`',
        refused='no zone, unless `naive_timestamps="utc"`',
        values={
            "timestamptz": [('"2026-01-02T03:04:05.6+01:00"', "2026-01-02 02:04:05.6+00"), ('"2026-01-02T03:04Z"', "2026-01-02 03:04:00+00"), ('"2026-01-02T03:04:05.1234565Z"', "2026-01-02 03:04:05.123456+00"), ('"2026-01-02T23:59:59.9999999Z"', "2026-01-03 00:00:00+00"), ('"2025-12-31T24:00:00.000Z"', "2026-01-01 00:00:00+00"), ('"20251231T2400+01"', "2025-12-31 23:00:00+00")],
            "timestamptz(0)": [('"2026-01-02T03:04:05Z"', "2026-01-02 03:04:05+00")],
        },
        bad={"timestamptz": ['"2026-01-02T03:04:05"', "1767225600", '"tomorrow"', '"2026-02-30T00:00:00Z"', '"infinity"', '"2026-01-02T24:00:00.5Z"', '"2026-01-02T24:00:00.0000005Z"'], "timestamptz(0)": ['"2026-01-02T03:04:05.5Z"']},
    ),
    Row(
        columns="`timestamp`",
        json="ISO 8601 without a zone, or a list of its parts; a number with `epoch`",
        python="naive `datetime`, text",
        refused='a zone, unless `naive_timestamps="utc"`',
        values={"timestamp": [('"2026-01-02T03:04:05"', "2026-01-02 03:04:05"), ("[2026,1,2,3,4,5,6000]", "2026-01-02 03:04:05.000006"), ('"2026-01-02 03:04:05.1234575"', "2026-01-02 03:04:05.123458")]},
        bad={"timestamp": ['"2026-01-02T03:04:05Z"', "[2026,13,1]", "[2026,1,1,0,0,0,1]", '"2026-01-02x03:04:05"']},
    ),
    Row(
        columns="`date`, `time`, `timetz`",
        json="ISO 8601, or a list of its parts; a number with `epoch`",
        python="`date`, `time`, text",
        refused="a datetime for a date; a zone too many or too few",
        values={
            "date": [('"2026-01-02"', "2026-01-02"), ("[2026,1,2]", "2026-01-02")],
            "time": [('"03:04:05.1234565"', "03:04:05.123456"), ('"23:59:59.9999999"', "24:00:00"), ('"24:00:00"', "24:00:00"), ("[3,4]", "03:04:00")],
            "time(3)": [('"01:00:00.005"', "01:00:00.005")],
            "timetz": [('"01:00:00+02:00"', "01:00:00+02"), ('"23:59:59.9999999Z"', "24:00:00+00")],
        },
        bad={"date": ['"2026-02-30"', '"2026-01-02T00:00:00"', "20454"], "time": ['"03:04:05Z"', "5"], "time(3)": ['"01:00:00.0051"'], "timetz": ['"01:00:00"', '"24:00:00"']},
    ),
    Row(
        columns="`interval`",
        json="text: ISO 8601 or as Postgres writes it; a number with `epoch`",
        python="`timedelta`, text",
        refused="numbers, whose unit nothing says",
        values={"interval": [('"P1DT2H"', "1 day 02:00:00"), ('"1 mon -3 days"', "1 mon -3 days")], "interval(0)": [('"1 day"', "1 day")]},
        bad={"interval": ['"soon"', "[]", "3600000000", "1.5"]},
    ),
    Row(
        columns="`uuid`",
        json="text",
        python="`UUID`, text, 16 bytes",
        refused="",
        values={"uuid": [('"00000000-0000-0000-0000-000000000007"', "00000000-0000-0000-0000-000000000007"), ('"{00000000000000000000000000000008}"', "00000000-0000-0000-0000-000000000008")]},
        bad={"uuid": ['"7"', "7", '"urn:uuid:00000000-0000-0000-0000-000000000007"']},
    ),
    Row(
        columns="`json`, `jsonb`",
        json="anything but null, which is null; with `json_text` also text that holds JSON",
        python="anything that JSON can say; text is taken to be JSON",
        refused='NaN, infinity; `\\u0000` in `jsonb`, unless `nul="strip"`',
        values={
            "json": [('{"b":  1.50, "a":[]}', '{"b":  1.50, "a":[]}'), ('"x"', '"x"'), ("7", "7")],
            "jsonb": [('{"b":1.50,"a":{"c":[null,true,"\\u00e4"]}}', '{"a": {"c": [null, true, "ä"]}, "b": 1.50}'), ("[1,[2]]", "[1, [2]]"), ("true", "true"), ('"{}"', '"{}"')],
        },
        bad={"jsonb": ['"\\u0000"', '"\\ud800"', "[NaN]"], "json": ["{,}"]},
    ),
    Row(
        columns="`inet`, `cidr`",
        json="text",
        python="`ipaddress`, text",
        refused="zones; masks",
        values={"inet": [('"::1"', "::1/128"), ('"10.0.0.1/8"', "10.0.0.1/8")], "cidr": [('"10.0.0.0/8"', "10.0.0.0/8")]},
        bad={"inet": ['"fe80::1%eth0"', '"1.2.3.4/0.0.0.255"', '"1.2.3.4/255.255.255.0"', "5"], "cidr": ['"10.0.0.1/8"', "5"]},
    ),
    Row(
        columns="arrays",
        json="list, as deep as you like; text as Postgres writes it: `{1,2}`",
        python="`list`, as deep as you like, text",
        refused="what the element refuses; lists of different lengths",
        values={
            "integer[]": [("[1,null]", "{1,NULL}"), ("[[]]", "{}"), ("[]", "{}"), ("[[1,2],[3,4]]", "{{1,2},{3,4}}"), ('["5"]', "{5}"), ("[[],[]]", "{}")],
            "text[]": [('["a b",null,"NULL","q\\"",1.50]', '{"a b",NULL,"NULL","q\\"",1.50}')],
            "numeric(5,2)[]": [('[1.5,"2"]', "{1.50,2.00}")],
            "double precision[]": [("[1,-0,0.5]", "{1,-0,0.5}")],
            "boolean[]": [("[true,null]", "{t,NULL}")],
            "char(3)[]": [('["abc",null]', "{abc,NULL}")],
            "bytea[]": [('["AP8="]', '{"\\\\x00ff"}')],
            "timestamptz[]": [('["2026-01-02T03:04:05Z"]', '{"2026-01-02 03:04:05+00"}')],
            "interval[]": [('["1 day"]', '{"1 day"}')],
            "jsonb[]": [('[{"a":[1]},null,"x"]', '{"{\\"a\\": [1]}",NULL,"\\"x\\""}'), ("[1,[2]]", "{1,[2]}")],
            "json[]": [('[{"a":  1}]', '{"{\\"a\\":  1}"}')],
            "json_mood[]": [('["happy",null]', "{happy,NULL}")],
            "json_percent[]": [("[1,2]", "{1,2}")],
            "json_place[]": [('[{"name":"a b","size":1},null]', '{"(\\"a b\\",1,,,)",NULL}')],
            "int4range[]": [('["[1,2)",null]', '{"[1,2)",NULL}')],
        },
        bad={
            "numeric(5,2)[]": ['"{1.005}"'],
            "timestamptz[]": ['"{2026-01-01 10:00}"'],
            "integer[]": ["[1,[2]]", "[[1],[2,3]]", "[true]", "5", "[2147483648]"],
            "boolean[]": ["[true,[false]]", "[true,[]]"],
            "interval[]": ["[null,[]]", "[5]"],
            "char(3)[]": ['["abcd"]'],
            "json_percent[]": ["[101]"],
            "json_place[]": ['[{"nothing":1}]'],
        },
    ),
    Row(
        columns="ranges, multiranges",
        json="text: `[1,5)`",
        python="psycopg's `Range`, `Multirange`, text",
        refused="what the bound refuses",
        values={"int4range": [('"[1,2]"', "[1,3)")], "tstzrange": [('"[2026-01-01 00:00+00,)"', '["2026-01-01 00:00:00+00",)')], "int8multirange": [('"{[1,2),[5,9)}"', "{[1,2),[5,9)}")]},
        bad={"int4range": ['"[5,1)"', "[1,5]"], "tstzrange": ['"[2026-01-01 10:00,)"'], "daterange": ['"[01/02/2026,)"']},
    ),
    Row(
        columns="enums",
        json="label",
        python="`str`",
        refused="other labels (by Postgres)",
        values={"json_mood": [('"happy"', "happy")]},
        bad={"json_mood": ['"angry"', "true"]},
    ),
    Row(
        columns="domains",
        json="as the type below",
        python="",
        refused="what the constraint refuses (by Postgres)",
        values={"json_percent": [("100", "100")], "json_short": [('"ab"', "ab")]},
        bad={"json_percent": ["101"], "json_short": ['"abc"']},
    ),
    Row(
        columns="composite types",
        json="object; each attribute as a column of its type; text as Postgres writes it",
        python="`tuple`, mapping, text",
        refused="attributes that are not there",
        values={
            "json_place": [
                ('{"name":"q\\"\\\\, x","size":5,"more":{"c":[],"f":1.50,"t":true},"price":1.5,"tags":["a b",null]}', '("q""\\\\, x",5,"{""c"": [], ""f"": 1.50, ""t"": true}",1.50,"{""a b"",NULL}")'),
                ('{"more":[]}', "(,,[],,)"),
                ('{"name":""}', '("",,,,)'),
                ('{"more":null}', "(,,,,)"),
                ('{"name":1.50}', "(1.50,,,,)"),
                ('"(x,1,,,)"', "(x,1,,,)"),
            ],
            "json_trip": [('{"start":{"name":"a"},"stops":[{"name":"b","size":2}],"days":["2026-01-02"]}', '("(a,,,,)","{""(b,2,,,)""}",{2026-01-02})')],
        },
        bad={"json_place": ['{"nothing":1}', '{"size":"x"}', '"(,,,1.239,)"', '{"price":1.005}', '{"name":[1]}', "[1]", "5"]},
    ),
    Row(
        columns="all others: `money`, `bit`, `macaddr`, `xml`, `tsvector`, `point`, types of extensions, ...",
        json="text as Postgres reads it, for `money` by `lc_monetary` and rounded; numbers; of an extension lists and objects, too",
        python="text, numbers",
        refused="a fraction for `money`, which rounds; a number for `bit`; what Postgres refuses",
        values={"bit(3)": [('"101"', "101")], "macaddr": [('"08:00:2b:01:02:03"', "08:00:2b:01:02:03")], "tsvector": [("\"'a' 'b'\"", "'a' 'b'")], "point": [('"(1,2)"', "(1,2)")], "xid8": [("5", "5")], "money": [("-12", "-$12.00"), ("12.00", "$12.00")]},
        bad={"bit(3)": ['"11"'], "macaddr": ['"x"', "[1]", "112233445566"], "point": ["[1,2]"], "money": ["12.50", "12.345", "true"], "varbit": ["10"], "bit(2)": ["10"]},
    ),
]  # fmt: skip


def page() -> str:
    """Write the page's table."""
    lines = ["| column | from JSON | from Python besides | refused |", "|---|---|---|---|"]
    lines += [
        f"| {r.columns} | {r.json} | {r.python} | {r.refused} |".replace("|  |", "| |").replace("|  |", "| |")
        for r in TYPES
    ]
    return "\n".join(lines)
