"""The screen, against a plain loop over rows. No servers, no Spark."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exactly_once._model import Partition
from spark_sink import FrameError, RowsOutOfOrder
from spark_sink.ranges import OFFSET, PARTITION, TOPIC, OffsetFilter, Range

Places = list[tuple[str, int, int]]
places = st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(0, 9))
ledgers = st.fixed_dictionaries({Partition(t, n): st.integers(0, 9) for t in "ab" for n in (0, 1)})
ENDS = {p: Range(partition=p, start=None, end=10) for p in (Partition(t, n) for t in "ab" for n in (0, 1))}


def table(rows: Places) -> pa.Table:
    topics, numbers, offsets = ([row[i] for row in rows] for i in range(3))
    arrays = [pa.array(topics, pa.string()), pa.array(numbers, pa.int32()), pa.array(offsets, pa.int64())]
    return pa.table(arrays, names=[TOPIC, PARTITION, OFFSET])


def back(kept: pa.Table) -> Places:
    return list(zip(*(kept.column(name).to_pylist() for name in (TOPIC, PARTITION, OFFSET)), strict=True))


@given(st.lists(st.lists(places, max_size=12), max_size=4), ledgers)
def test_rows_at_or_above_the_ledger_pass_in_any_order(batches: list[Places], ledger: dict[Partition, int]) -> None:
    screen = OffsetFilter(ledger, ENDS)
    kept = [row for rows in batches for row in back(screen.keep(table(rows)))]
    rows = [row for rows in batches for row in rows]
    wanted = [(t, n, o) for t, n, o in rows if o >= ledger[Partition(t, n)]]
    assert sorted(kept) == sorted(wanted)
    assert screen.dropped == len(rows) - len(wanted)


@given(st.lists(st.lists(places, max_size=12), max_size=4), ledgers)
@example([[("a", 0, 3), ("a", 0, 3)]], dict.fromkeys(ENDS, 0))
@example([[("a", 0, 3)], [("a", 0, 3)]], dict.fromkeys(ENDS, 0))
@example([[("a", 0, 3)], [("a", 0, 2), ("a", 0, 4)]], dict.fromkeys(ENDS, 0))
def test_strictly_every_row_must_rise_within_its_partition(batches: list[Places], ledger: dict[Partition, int]) -> None:
    last: dict[tuple[str, int], int] = {}
    rises = True
    for topic, number, offset in (row for rows in batches for row in rows):
        rises &= offset > last.get((topic, number), -1)
        last[topic, number] = offset
    screen = OffsetFilter(ledger, ENDS, strictly=True)
    if not rises:
        with pytest.raises(RowsOutOfOrder):
            _ = [screen.keep(table(rows)) for rows in batches]
        return
    kept = [row for rows in batches for row in back(screen.keep(table(rows)))]
    assert kept == [(t, n, o) for rows in batches for t, n, o in rows if o >= ledger[Partition(t, n)]]
    assert screen.last == {Partition(*key): offset for key, offset in last.items()}


@given(
    st.lists(st.tuples(places, st.sampled_from(["x", "y", "", None])), max_size=12),
    st.lists(st.integers(0, 12), max_size=4),
    ledgers,
)
@example([(("a", 0, 1), "x")] * 2, [1], dict.fromkeys(ENDS, 0))
def test_rows_of_one_message_must_not_claim_one_key(
    rows: list[tuple[tuple[str, int, int], str | None]], cuts: list[int], ledger: dict[Partition, int]
) -> None:
    """Wherever COPYs are cut; a row without a key is nobody's twin, and what the ledger has is not looked at."""
    rows = sorted(rows, key=lambda row: row[0][2])
    claiming = [(place, key) for place, key in rows if key and place[2] >= ledger[Partition(*place[:2])]]
    screen = OffsetFilter(ledger, ENDS, claim="event")
    whole = table([place for place, _ in rows]).append_column("event", pa.array([key for _, key in rows], pa.string()))
    edges = sorted({0, len(rows), *(min(cut, len(rows)) for cut in cuts)})
    copies = [whole.slice(start, end - start) for start, end in pairwise(edges)]
    if len(set(claiming)) < len(claiming):
        with pytest.raises(FrameError, match="have one key to claim"):
            _ = [screen.keep(copy) for copy in copies]
        return
    kept = sum(screen.keep(copy).num_rows for copy in copies)
    assert kept == len([place for place, _ in rows if place[2] >= ledger[Partition(*place[:2])]])


@pytest.mark.parametrize("row", [("a", 5, 0), ("c", 0, 0), ("a", 0, 10), ("a", 0, -1)])
def test_a_row_from_outside_of_the_batch_is_refused(row: tuple[str, int, int]) -> None:
    with pytest.raises(RowsOutOfOrder):
        OffsetFilter(dict.fromkeys(ENDS, 0), ENDS).keep(table([("a", 0, 0), row]))


def test_a_row_without_an_offset_is_refused() -> None:
    rows = table([("a", 0, 0)]).set_column(2, OFFSET, pa.array([None], pa.int64()))
    with pytest.raises(RowsOutOfOrder):
        OffsetFilter(dict.fromkeys(ENDS, 0), ENDS).keep(rows)


def test_a_row_that_was_kept_since_an_earlier_batch_is_refused() -> None:
    """A join of streams gives it late: the ledger stands above it, and would take it for written."""
    p = Partition("a", 0)
    screen = OffsetFilter({p: 5}, {p: Range(partition=p, start=5, end=10)})
    with pytest.raises(RowsOutOfOrder, match="batch-id"):
        screen.keep(table([("a", 0, 4), ("a", 0, 6)]))
