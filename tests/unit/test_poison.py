"""The search for the message that makes a batch fail."""

from __future__ import annotations

import math
from collections.abc import Set

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactly_once.consumer.bisection import Bisection

BATCH = 500


def tries(messages: int, poisonous: Set[int]) -> tuple[list[int], list[int], int]:
    """Apply messages as the service does; return what was applied, what was set aside, and the number of units."""
    search, queue, units = Bisection(), list(range(messages)), 0
    applied: list[int] = []
    aside: list[int] = []
    while queue:
        units += 1
        batch = queue[: search.max_messages or BATCH]
        if poisonous.isdisjoint(batch):
            applied += batch
        elif len(batch) > 1:
            search.failed(len(batch))
            continue
        else:
            search.failed(1)
            aside += batch
        queue = queue[len(batch) :]
        search.committed(len(batch))
    return applied, aside, units


@given(st.integers(1, 1500), st.sets(st.integers(0, 1499), max_size=12))
def test_sets_exactly_the_poison_aside_and_keeps_the_order(messages: int, poisonous: set[int]) -> None:
    there = {number for number in poisonous if number < messages}
    applied, aside, units = tries(messages, there)
    assert aside == sorted(there)
    assert applied == [number for number in range(messages) if number not in there]
    batches = math.ceil(messages / BATCH)
    assert units <= batches + len(there) * (2 * math.log2(BATCH) + 2), "the search takes too many units"


def test_a_batch_that_fails_once_only_is_applied_whole() -> None:
    """What failed for a passing reason leaves no suspicion behind."""
    search = Bisection()
    search.failed(8)
    for expected in (4, 2, 1, 1):
        assert search.max_messages == expected
        search.committed(expected)
    assert search.max_messages is None


@given(st.integers(1, 3000), st.sets(st.integers(0, 2999), max_size=40))
def test_messages_that_errors_name_cost_two_failures_each(messages: int, poisonous: set[int]) -> None:
    """Every unit that fails names its first poisonous message, as the writer's errors do."""
    there = {number for number in poisonous if number < messages}
    search, applied, aside, failures, handed_out, done = Bisection(), 0, [], 0, 0, 0
    while done < messages:
        batch = range(done, min(messages, done + (search.max_messages or BATCH)))
        handed_out += len(batch)
        bad = sorted(there.intersection(batch))
        failures += bool(bad)
        if bad and len(batch) > 1:
            search.named(len(batch), bad[0] - done)
            continue
        aside += bad
        if bad:
            search.failed(1)
        else:
            applied += len(batch)
        done += len(batch)
        search.committed(len(batch))
    assert aside == sorted(there)
    assert applied == messages - len(there)
    assert failures <= 2 * len(there)
    assert handed_out <= 4 * messages + (BATCH + 66) * (len(there) + 1)


def growing(search: Bisection) -> list[int]:
    """Commit units of the size that is allowed, until any size is; return the sizes."""
    sizes = []
    while (size := search.max_messages) is not None:
        sizes.append(size)
        search.committed(size)
    return sizes


@pytest.mark.parametrize(("messages", "sizes"), [(1000, [200, 400, 800]), (800, [200, 400]), (101, [200])])
def test_behind_a_message_that_was_named_units_double_up_to_the_size_that_failed(
    messages: int, sizes: list[int]
) -> None:
    search = Bisection()
    search.named(messages, 100)
    assert search.max_messages == 100, "those before it"
    search.committed(40)
    assert search.max_messages == 60
    search.committed(60)
    assert search.max_messages == 1, "it alone"
    search.committed(1)
    assert growing(search) == sizes


def test_the_next_one_that_is_named_begins_anew_with_the_size_that_failed_first() -> None:
    search = Bisection()
    search.named(1000, 100)
    search.committed(101)
    search.named(200, 0)
    assert growing(search) == [1, 64, 128, 256, 512]
    search.named(10, 0)
    assert growing(search) == [1, 64], "nothing of an earlier one counts"


def test_messages_before_the_one_that_was_named_may_fail_too() -> None:
    search = Bisection()
    search.named(1000, 100)
    search.failed(100)
    assert search.max_messages == 50
