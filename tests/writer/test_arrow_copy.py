"""Batches that go by pgpq's bytes store what rows would store, to the last bit, or go by rows."""

# ruff: noqa: DTZ001, DTZ901, E501, PLR0917 - naive timestamps are a type, too; tables of values; many parameters

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from exactly_once.writer import BadRow, TableWriter, arrow
from exactly_once.writer.table import read_table
from tests.writer.conftest import Connection, MakeTable, messages, rows_of

pa = pytest.importorskip("pyarrow")
arrow_copy = pytest.importorskip("exactly_once.writer.arrow_copy", exc_type=ImportError)

LAST = datetime(9999, 12, 31, 23, 59, 59, 999999)
TEXTS = ["", "ä\t\n\\N\r\b\v", "\\.", "𝄞", "NULL"]
BIG = 10**38 - 1


def scaled(digits: int, scale: int) -> Decimal:
    """A decimal of all these digits; arithmetic would round it to 28."""
    return Decimal(f"{digits}e-{scale}")


# Postgres's type, Arrow's type, values.
CERTAIN: list[tuple[str, Any, list[Any]]] = [
    ("smallint", pa.int16(), [-(2**15), 2**15 - 1, 0]),
    ("smallint", pa.int64(), [-(2**15), 2**15 - 1]),
    ("integer", pa.int32(), [-(2**31), 2**31 - 1]),
    ("integer", pa.int8(), [-128, 127]),
    ("integer", pa.uint64(), [2**31 - 1]),
    ("bigint", pa.int64(), [-(2**63), 2**63 - 1]),
    ("bigint", pa.uint64(), [2**63 - 1]),
    ("bigint", pa.int32(), [-(2**31)]),
    ("real", pa.float32(), [1.5, math.nan, -math.inf, -0.0, 2.0**-149, 3.4028234663852886e38]),
    ("double precision", pa.float64(), [0.1, math.nan, math.inf, -0.0, 5e-324, 1.7976931348623157e308]),
    ("double precision", pa.float32(), [1.5, 2.0**-149]),
    ("numeric", pa.decimal128(38, 0), [BIG, -BIG, 0, 1, 10_000, 10**37]),
    ("numeric", pa.decimal128(38, 38), [scaled(BIG, 38), Decimal("1e-38"), 0]),
    ("numeric", pa.decimal128(38, 18), [scaled(BIG, 18), scaled(-BIG, 18), Decimal("0.5"), Decimal("9999.0001"), Decimal(10000), 0]),
    ("numeric(5,2)", pa.decimal128(5, 2), [Decimal("999.99"), Decimal("-999.99"), Decimal("0.00"), Decimal("-0.01")]),
    ("numeric(5,2)", pa.decimal128(38, 1), [Decimal("999.9")]),
    ("numeric(8,3)", pa.decimal128(5, 2), [Decimal("999.99")]),
    ("boolean", pa.bool_(), [True, False]),
    ("text", pa.string(), TEXTS),
    ("text", pa.large_string(), TEXTS),
    ("text", pa.string_view(), [*TEXTS, "longer than twelve bytes"]),
    ("varchar", pa.string(), TEXTS),
    ("varchar(3)", pa.string(), ["abc", "ä𝄞 ", ""]),
    ("char(3)", pa.string(), ["abc", "a"]),
    ("bytea", pa.binary(), [b"\x00\xff", b""]),
    ("bytea", pa.large_binary(), [b"\x00\xff", b""]),
    ("bytea", pa.binary(2), [b"\x00\xff"]),
    ("json", pa.string(), ['{"b":  1.50}', "null"]),
    ("jsonb", pa.string(), ['{"b":  1.50}', "null", '"x"']),
    ("uuid", pa.string(), [str(UUID(int=1)), str(UUID(int=2**128 - 1)).upper()]),
    ("uuid", pa.binary(16), [UUID(int=2**127).bytes]),
    ("date", pa.date32(), [date.min, date.max, date(2000, 1, 1), date(1999, 12, 31)]),
    ("timestamp", pa.timestamp("us"), [datetime.min, LAST, datetime(2000, 1, 1)]),
    ("timestamp", pa.timestamp("s"), [datetime(1969, 12, 31, 23, 59, 59)]),
    ("timestamp", pa.timestamp("ns"), [datetime(2026, 1, 2, 3, 4, 5, 678901)]),
    ("timestamptz", pa.timestamp("us", "UTC"), [datetime(1, 1, 1, tzinfo=UTC), LAST.replace(tzinfo=UTC)]),
    ("timestamptz", pa.timestamp("ms", "Asia/Kolkata"), [datetime(2026, 1, 2, tzinfo=UTC)]),
    ("integer[]", pa.list_(pa.int32()), [[1, None, -(2**31)], []]),
    ("bigint[]", pa.large_list(pa.int64()), [[2**63 - 1], []]),
    ("double precision[]", pa.list_(pa.float64()), [[math.nan, None, 0.1]]),
    ("boolean[]", pa.list_(pa.bool_()), [[True, None, False]]),
    ("text[]", pa.list_(pa.string()), [[*TEXTS, None]]),
    ("weather", pa.string(), ["sun"]),
    ("share", pa.int64(), [100, 0]),
]  # fmt: skip
# What pgpq and Postgres would change without a word, or cannot do.
UNCERTAIN: list[tuple[str, Any, list[Any]]] = [
    ("numeric(5,2)", pa.decimal128(6, 3), [Decimal("1.500")]),
    ("numeric(5,2)", pa.decimal128(38, 18), [Decimal("1.50")]),
    ("numeric", pa.decimal256(50, 1), [Decimal("1.5")]),
    ("numeric", pa.int64(), [5]),
    ("real", pa.float64(), [1.5]),
    ("double precision", pa.int64(), [2**53]),
    ("timestamptz(0)", pa.timestamp("us", "UTC"), [datetime(2026, 1, 2, tzinfo=UTC)]),
    ("date", pa.string(), ["2026-01-02"]),
    ("time", pa.time64("us"), [datetime(2026, 1, 2, 3).time()]),
    ("bigint[]", pa.list_(pa.int32()), [[1]]),
    ("varchar(3)[]", pa.list_(pa.string()), [["abc"]]),
    ("text", pa.dictionary(pa.int8(), pa.string()), ["a", "b"]),
    ("jsonb", pa.struct([("a", pa.int64())]), [{"a": 1}]),
    ("jsonb", pa.map_(pa.string(), pa.int64()), [{"a": 1}]),
    ("inet", pa.string(), ["10.0.0.1"]),
    ("bigint", pa.null(), []),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _own_types(postgres_conninfo: str) -> None:
    with psycopg.connect(postgres_conninfo) as connection:
        connection.execute("CREATE TYPE weather AS ENUM ('rain', 'sun')")
        connection.execute("CREATE DOMAIN share AS int CHECK (value <= 100)")


def batch_of(kind: Any, values: Sequence[Any]) -> Any:
    """A batch with the values and nulls around them, of a slice that begins in the middle of a byte's bits."""
    padded = [None, None, None, *values, None]
    numbers = pa.array(range(len(padded)), pa.int64())
    return pa.record_batch({"id": numbers, "v": pa.array(padded, kind)}).slice(2)


def shown(connection: Connection, table: str) -> list[Any]:
    return rows_of(connection, table, "id, v::text")


def is_certain(connection: Connection, table: str, batch: Any) -> bool:
    columns = read_table(connection, table).pick(batch.schema.names)
    return arrow_copy.encode(batch, columns) is not None


def names_of(cases: list[tuple[str, Any, list[Any]]]) -> list[str]:
    return [f"{kind}-{arrow_kind}" for kind, arrow_kind, _ in cases]


@pytest.mark.parametrize(("kind", "arrow_kind", "values"), CERTAIN, ids=names_of(CERTAIN))
def test_a_type_that_is_certain_goes_by_its_bytes_and_stores_what_rows_store(
    kind: str, arrow_kind: Any, values: list[Any], work: Connection, make_table: MakeTable
) -> None:
    table, reference = make_table(f"(id bigint, v {kind})"), make_table(f"(id bigint, v {kind})")
    batch = batch_of(arrow_kind, values)
    assert is_certain(work, table, batch)
    assert arrow.write_arrow(TableWriter(table), work, batch) == len(values) + 2
    TableWriter(reference).write(work, arrow.rows_of(batch))
    assert shown(work, table) == shown(work, reference)
    assert [v for _, v in shown(work, table)].count(None) == 2


@pytest.mark.parametrize(("kind", "arrow_kind", "values"), UNCERTAIN, ids=names_of(UNCERTAIN))
def test_a_type_that_is_not_certain_goes_by_rows(
    kind: str, arrow_kind: Any, values: list[Any], work: Connection, make_table: MakeTable
) -> None:
    table = make_table(f"(id bigint, v {kind})")
    batch = batch_of(arrow_kind, values)
    assert not is_certain(work, table, batch)
    assert arrow.write_arrow(TableWriter(table), work, batch) == len(values) + 2
    assert len(shown(work, table)) == len(values) + 2


# Of a table's type and an Arrow type: a value that does not fit, and a word of the complaint.
BAD: list[tuple[str, Any, Any, str]] = [
    ("smallint", pa.int64(), 2**15, "out of range"),
    ("bigint", pa.uint64(), 2**63, "out of range"),
    ("real", pa.float64(), 1e300, "out of range"),
    ("numeric(5,2)", pa.decimal128(38, 18), Decimal("1.005"), "more digits"),
    ("numeric(5,2)", pa.decimal128(38, 18), Decimal(1000), "out of range"),
    ("numeric(5,2)", pa.decimal128(38, 1), Decimal("1000.1"), "overflow"),
    ("varchar(3)", pa.string(), "abc ", "too long"),
    ("char(3)", pa.string(), "abc ", "too long"),
    ("text", pa.string(), "a\0b", "0x00"),
    ("jsonb", pa.string(), "{", "json"),
    ("uuid", pa.string(), "no uuid", "no UUID"),
    ("weather", pa.string(), "snow", "enum"),
    ("share", pa.int32(), 101, "share"),
    ("timestamptz", pa.timestamp("us"), datetime(2026, 1, 2), "no time zone"),
    ("timestamp", pa.timestamp("us", "UTC"), datetime(2026, 1, 2, tzinfo=UTC), "a time zone"),
    ("timestamptz(0)", pa.timestamp("us", "UTC"), datetime(2026, 1, 2, microsecond=1, tzinfo=UTC), "digits"),
    ("timestamp", pa.timestamp("ns"), 1, "nanosecond"),
    ("timestamp", pa.timestamp("us"), 2**63 - 1, "9223372036854775807>: date value out of range"),
    ("timestamptz", pa.timestamp("us", "UTC"), -(2**56), "-0314-08-02 .*Z: date value out of range"),
    ("date", pa.date32(), 3_000_000, "10183-09-21: date value out of range"),
    ("date", pa.date32(), 2**31 - 1, "magnitude"),
    ("bigint NOT NULL", pa.int64(), None, "null"),
    ("integer", pa.bool_(), True, "no number"),
    ("boolean", pa.int32(), 1, "true or false"),
    ("bytea", pa.string(), "a", "bytes"),
    ("jsonb", pa.map_(pa.int64(), pa.int64()), [(1, 2), (1, 3)], "1"),
]


@pytest.mark.parametrize(
    ("kind", "arrow_kind", "value", "reason"), BAD, ids=[f"{k}-{a}-{v!r:.9}" for k, a, v, _ in BAD]
)
def test_a_value_that_does_not_fit_is_refused_by_row_and_column(
    kind: str, arrow_kind: Any, value: Any, reason: str, work: Connection, make_table: MakeTable
) -> None:
    table = make_table(f"(id bigint, v {kind})")
    batch = pa.record_batch({"id": pa.array([7], pa.int64()), "v": pa.array([value], arrow_kind)})
    with pytest.raises(BadRow, match=reason) as caught:
        arrow.write_arrow(TableWriter(table), work, batch, origins=messages(1))
    assert (caught.value.row or 0, caught.value.offset) in {(0, 100), (0, None)}
    assert caught.value.column == "v" or "share" in str(caught.value)


def test_of_many_rows_the_one_that_postgres_refuses_is_named(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(v bigint NOT NULL)")
    batch = pa.record_batch({"v": pa.array([1, 2, None, 4], pa.int64())})
    with pytest.raises(BadRow, match="null") as caught:
        arrow.write_arrow(TableWriter(table), work, batch, origins=messages(4))
    assert (caught.value.row, caught.value.column, caught.value.offset) == (2, "v", 102)


def test_what_lies_under_a_null_is_not_stored_though_the_field_claims_to_have_none(
    work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(v bigint, w int[])")
    inner = pa.list_(pa.field("item", pa.int32(), nullable=False))
    fields = [pa.field("v", pa.int64(), nullable=False), pa.field("w", inner, nullable=False)]
    batch = pa.RecordBatch.from_arrays(
        [pa.array([1, None], pa.int64()), pa.array([[1], None], inner)], schema=pa.schema(fields)
    )
    arrow.write_arrow(TableWriter(table), work, batch)
    assert rows_of(work, table) == [(1, [1]), (None, None)]


def test_a_table_of_several_batches_is_one_copy(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(v bigint)")
    parts = [pa.record_batch({"v": pa.array([n], pa.int64())}) for n in range(3)]
    assert arrow.write_arrow(TableWriter(table), work, pa.Table.from_batches(parts)) == 3
    empty = pa.table({"v": pa.array([], pa.int64())})
    assert arrow.write_arrow(TableWriter(table), work, empty) == 0
    assert arrow.write_arrow(TableWriter(table), work, empty.schema.empty_table().slice(0)) == 0
    assert rows_of(work, table) == [(0,), (1,), (2,)]


def test_a_table_that_was_altered_meanwhile_is_noticed_before_the_bytes_are_sent(
    work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(v bigint)")
    writer = TableWriter(table)
    batch = pa.record_batch({"v": pa.array([1], pa.int64())})
    arrow.write_arrow(writer, work, batch)
    work.execute(f"ALTER TABLE {table} ALTER v TYPE float8")
    # The table is read anew, and eight bytes of an integer are not taken for a float's.
    arrow.write_arrow(writer, work, batch)
    assert rows_of(work, table) == [(1.0,), (1.0,)]


@pytest.mark.parametrize("mode", ["upsert", "insert-ignore"])
def test_other_modes_go_by_rows(mode: Any, work: Connection, make_table: MakeTable) -> None:
    table = make_table("(id bigint PRIMARY KEY, v text)")
    batch = pa.record_batch({"id": pa.array([1, 1], pa.int64()), "v": pa.array(["a", "b"])})
    arrow.write_arrow(TableWriter(table, mode=mode), work, batch)
    assert rows_of(work, table) == [(1, "b" if mode == "upsert" else "a")]


def test_without_pgpq_rows_are_made(work: Connection, make_table: MakeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_encode", lambda: lambda _batch, _columns: None)
    table = make_table("(v bigint)")
    assert arrow.write_arrow(TableWriter(table), work, pa.record_batch({"v": pa.array([5], pa.int64())})) == 1
    assert rows_of(work, table) == [(5,)]


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
GENERATED: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int2": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "int4": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "int8": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float4": (pa.float32(), st.floats(width=32)),
    "float8": (pa.float64(), st.floats()),
    "numeric": (pa.decimal128(38, 9), st.integers(-(10**38) + 1, 10**38 - 1).map(lambda n: scaled(n, 9))),
    "numeric(38,30)": (pa.decimal128(38, 30), st.integers(-(10**38) + 1, 10**38 - 1).map(lambda n: scaled(n, 30))),
    "bool": (pa.bool_(), st.booleans()),
    "text": (pa.string(), ANY_TEXT),
    "bytea": (pa.binary(), st.binary()),
    "uuid": (pa.string(), st.uuids().map(str)),
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us"), st.datetimes()),
    "timestamptz": (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    "int8[]": (pa.list_(pa.int64()), st.lists(st.none() | st.integers(-(2**63), 2**63 - 1))),
    "text[]": (pa.list_(pa.string()), st.lists(st.none() | ANY_TEXT)),
}  # fmt: skip


@settings(
    max_examples=40, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_generated_values_of_every_type_come_back_as_they_were(data: st.DataObject, work: Connection) -> None:
    work.rollback()
    work.execute("SET LOCAL TimeZone = 'UTC'")
    definition = ", ".join(f"c{i} {kind}" for i, kind in enumerate(GENERATED))
    work.execute(f"CREATE TEMP TABLE generated (id int, {definition}) ON COMMIT DROP")
    row = st.tuples(*(st.none() | values for _, values in GENERATED.values()))
    rows = data.draw(st.lists(row, min_size=1, max_size=4))
    columns = {"id": pa.array(range(len(rows)), pa.int32())}
    for i, ((arrow_kind, _), values) in enumerate(zip(GENERATED.values(), zip(*rows, strict=True), strict=True)):
        columns[f"c{i}"] = pa.array(values, arrow_kind)
    batch = pa.record_batch(columns)
    assert is_certain(work, "generated", batch)
    arrow.write_arrow(TableWriter("generated"), work, batch)
    # Text shows fewer digits of a float4 than it has.
    names = ", ".join(f"c{i}{'::float8' if kind == 'float4' else ''}" for i, kind in enumerate(GENERATED))
    cursor = psycopg.Cursor(work)
    found = cursor.execute(f"SELECT {names} FROM generated ORDER BY id", binary=True).fetchall()
    for wanted, got in zip(rows, found, strict=True):
        assert list(map(_identity, wanted)) == list(map(_identity, got))


def _identity(value: Any) -> Any:
    """What two values have in common only if they are the same, to the bit."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value.hex()
    if isinstance(value, list):
        return list(map(_identity, value))
    return str(value) if isinstance(value, UUID) else value
