"""Changes of one key become one, and that has the effect of applying them one after the other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactly_once.writer.changes import MISSING, Row, Rules, Tombstone, collapse, keys_of, rounds

Stored = dict[int, tuple[Any, ...]]

COLUMNS = 4
"""Key, a version, two values; the last one can be a column that only an insert fills."""
values = st.one_of(st.none(), st.integers(0, 3))
versions = st.one_of(st.none(), st.integers(0, 3))
keys = st.integers(0, 2)
tombstones = keys.map(lambda k: Tombstone((k,)))
full_rows = st.tuples(keys, versions, values, values)
gaps = st.one_of(st.just(MISSING), values)
rows_with_gaps = st.tuples(keys, versions, gaps, gaps)


def replaces(new: int | None, old: int | None) -> bool:
    """Say it as the statement does: ``t.version IS NULL OR EXCLUDED.version >= t.version``."""
    return True if old is None else False if new is None else new >= old


def store(table: Stored, row: Row, rules: Rules) -> None:
    """Do to a table what the statement does for one row."""
    old = table.get(row[0])
    if old is None:
        table[row[0]] = tuple(None if v is MISSING else v for v in row)
        return
    if rules.newest_by is not None and not replaces(row[rules.newest_by], old[rules.newest_by]):
        return
    table[row[0]] = tuple(
        before if position in rules.inserted_only or now is MISSING else now
        for position, (before, now) in enumerate(zip(old, row, strict=True))
    )


def one_by_one(table: Stored, changes: list[Row], rules: Rules) -> None:
    for change in changes:
        if isinstance(change, Tombstone):
            table.pop(change[0], None)
        else:
            store(table, change, rules)


def collapsed(table: Stored, changes: list[Row], rules: Rules) -> None:
    left = collapse(changes, rules)
    for key in left.deletes:
        table.pop(key[0], None)
    assert len({row[0] for row in left.rows}) == len(left.rows), "a statement may meet each row once only"
    for row in left.rows:
        store(table, row, rules)


def check(batches: list[list[Row]], rules: Rules) -> None:
    expected: Stored = {}
    found: Stored = {}
    for batch in batches:
        one_by_one(expected, batch, rules)
        collapsed(found, batch, rules)
        assert found == expected


full_batches = st.lists(st.lists(st.one_of(full_rows, tombstones), min_size=1, max_size=12), max_size=4)
batches_with_gaps = st.lists(st.lists(st.one_of(rows_with_gaps, tombstones), min_size=1, max_size=12), max_size=4)


@given(full_batches)
def test_the_last_change_of_a_key_wins(batches: list[list[Row]]) -> None:
    check(batches, Rules(key=(0,)))


@given(full_batches)
def test_columns_that_are_not_updated_keep_the_value_of_the_insert(batches: list[list[Row]]) -> None:
    check(batches, Rules(key=(0,), inserted_only=(3,), replaces_all=False))


@given(full_batches)
def test_of_two_rows_the_one_that_is_not_older_wins(batches: list[list[Row]]) -> None:
    check(batches, Rules(key=(0,), newest_by=1, replaces_all=False))


@given(full_batches)
def test_versions_and_columns_that_are_not_updated_go_together(batches: list[list[Row]]) -> None:
    check(batches, Rules(key=(0,), newest_by=1, inserted_only=(3,), replaces_all=False))


@given(batches_with_gaps)
def test_a_missing_field_leaves_what_was_there(batches: list[list[Row]]) -> None:
    check(batches, Rules(key=(0,), keeps_missing=True, replaces_all=False))


@given(batches_with_gaps)
def test_missing_fields_and_columns_that_are_not_updated_go_together(batches: list[list[Row]]) -> None:
    check(batches, Rules(key=(0,), keeps_missing=True, inserted_only=(3,), replaces_all=False))


@given(st.lists(st.one_of(full_rows, tombstones), max_size=20))
def test_rounds_keep_the_order_of_each_key_and_meet_it_once(changes: list[Row]) -> None:
    found = rounds(keys_of(changes, (0,)))
    for indexes in found:
        met = [changes[i][0] for i in indexes]
        assert len(set(met)) == len(met)
    for key in range(3):
        in_rounds = [i for indexes in found for i in indexes if changes[i][0] == key]
        assert in_rounds == [i for i, change in enumerate(changes) if change[0] == key]


def test_a_row_after_a_tombstone_is_deleted_first_where_something_could_outlive_it() -> None:
    changes = [Tombstone((1,)), (1, None, 5, 6)]
    assert collapse(changes, Rules(key=(0,), replaces_all=False)).deletes == [(1,)]
    assert collapse(changes, Rules(key=(0,), replaces_all=True)).deletes == []


def test_a_key_of_several_columns_is_one_key() -> None:
    changes = [(1, 1, "a"), (1, 2, "b"), Tombstone((1, 1)), (1, 2, "c")]
    left = collapse(changes, Rules(key=(0, 1)))
    assert left.deletes == [(1, 1)]
    assert left.rows == [(1, 2, "c")]


@pytest.mark.parametrize("rules", [Rules(key=(0,)), Rules(key=(0,), newest_by=1)])
def test_a_delete_behind_a_row_of_the_same_changes_is_told_from_one_that_should_find_a_row(rules: Rules) -> None:
    changes = [(1, 5), Tombstone((2,)), Tombstone((1,)), (3, 5), Tombstone((2,)), (4, 5), Tombstone((4,)), (4, 6)]
    left = collapse(changes, rules)
    assert [left.deletes[i] for i in left.follows if left.deletes[i] != (4,)] == [(1,)]
    assert (2,) in left.deletes
