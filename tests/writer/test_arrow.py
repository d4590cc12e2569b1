"""Arrow batches are rows like others, and imports stay where they belong."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from exactly_once.writer import BadRow, TableWriter
from exactly_once.writer.arrow import write_arrow
from tests.writer.conftest import Connection, MakeTable, rows_of


def batch(**columns: Any) -> Any:
    arrow = pytest.importorskip("pyarrow")
    return arrow.record_batch({name: arrow.array(*given) for name, given in columns.items()})


def test_a_batch_is_written_by_the_names_of_its_columns(work: Connection, make_table: MakeTable) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = make_table("(id bigint, at timestamptz, price numeric(8,2), tags text[], doc jsonb, note text)")
    given = batch(
        doc=([{"a": 1}, None],),
        tags=([["x", None], []],),
        price=([Decimal("1.50"), None], arrow.decimal128(8, 2)),
        at=([datetime(2026, 1, 2, tzinfo=UTC), None], arrow.timestamp("us", "UTC")),
        id=([1, 2], arrow.uint64()),
    )
    assert write_arrow(TableWriter(table), work, given) == 2
    assert rows_of(work, table) == [
        (1, datetime(2026, 1, 2, tzinfo=UTC), Decimal("1.50"), ["x", None], {"a": 1}, None),
        (2, None, None, [], None, None),
    ]


def test_what_does_not_fit_is_refused_here_too(work: Connection, make_table: MakeTable) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = make_table("(id bigint)")
    with pytest.raises(BadRow, match=r"row 1: column id: .* out of range"):
        write_arrow(TableWriter(table), work, batch(id=([1, 2**64 - 1], arrow.uint64())))


_WITHOUT = """
import sys
sys.modules["msgspec"] = None
import exactly_once.writer, exactly_once.writer.arrow
import exactly_once.cli.sink
try:
    import exactly_once.writer.from_json
except ImportError as error:
    print(error)
"""


def test_only_the_json_decoder_needs_its_extra() -> None:
    found = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True, timeout=60)
    assert "kafka-exactly-once[sink]" in found.stdout


@pytest.mark.parametrize("zone", ["America/Chicago", "Europe/Berlin", "Asia/Kolkata"])
def test_instants_are_the_same_whatever_time_zone_a_batch_names(zone: str) -> None:
    """The first and the last that Python has are beyond its years in another time zone."""
    arrow = pytest.importorskip("pyarrow")
    from exactly_once.writer.arrow import rows_of as rows_of_batch  # noqa: PLC0415

    instants = [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), None]
    single = arrow.array(instants, arrow.timestamp("us", "UTC")).cast(arrow.timestamp("us", zone))
    several = arrow.array([instants, [], None], arrow.list_(arrow.timestamp("us", "UTC")))
    several = several.cast(arrow.list_(arrow.timestamp("us", zone)))
    table = arrow.table({"one": single, "several": several})
    assert rows_of_batch(table) == list(zip(instants, [instants, [], None], strict=True))
