"""ChainFilter: the seed's own interval lists, references, gaps."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactly_once import ConfigurationError
from exactly_once.publish import (
    ChainFilter,
    InconsistentChain,
    KeyRefused,
    LimitReached,
    Link,
    SnapshotCorrupted,
    State,
)
from exactly_once.publish.chain import GapPolicy
from exactly_once.publish.snapshot import pack

NEW, IN_FLIGHT, UNKNOWN, DUPLICATE = State.NEW, State.IN_FLIGHT, State.UNKNOWN, State.DUPLICATE


def send(made: ChainFilter, number: int | tuple[int, int], previous: int | tuple[int, int] | None = None) -> State:
    key = Link("chain", number, previous)
    state = made.reserve(key)
    if state is NEW:
        made.confirm(key)
    return state


def seed_example() -> ChainFilter:
    """The chain after 1,2,3,4,5,6,10,11,12,18,19,20."""
    made = ChainFilter(dense=True, first=1)
    for number in (1, 2, 3, 4, 5, 6, 10, 11, 12, 18, 19, 20):
        assert send(made, number) is NEW
    return made


def test_the_seeds_list_of_unseen_intervals() -> None:
    assert seed_example().unseen("chain") == [(7, 9), (13, 17), (21, inf)]


def test_the_seeds_message_10_is_a_duplicate() -> None:
    made = seed_example()
    assert send(made, 10) is DUPLICATE
    assert [send(made, n) for n in range(1, 7)] == [DUPLICATE] * 6
    assert made.unseen("chain") == [(7, 9), (13, 17), (21, inf)]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([7], [(8, 9), (13, 17), (21, inf)]),
        ([21], [(7, 9), (13, 17), (22, inf)]),
        ([17], [(7, 9), (13, 16), (21, inf)]),
        ([9], [(7, 8), (13, 17), (21, inf)]),
        ([15], [(7, 9), (13, 14), (16, 17), (21, inf)]),
        ([15, 40], [(7, 9), (13, 14), (16, 17), (21, 39), (41, inf)]),
        ([8], [(7, 7), (9, 9), (13, 17), (21, inf)]),
        ([8, 7], [(9, 9), (13, 17), (21, inf)]),
        ([8, 7, 9], [(13, 17), (21, inf)]),
    ],
    ids=["left", "left of the last", "right", "right of the first", "division", "division of the last", "division of 3",
         "full", "full twice"],
)  # fmt: skip
def test_the_seeds_four_changes(numbers: list[int], expected: list[tuple[int, float]]) -> None:
    made = seed_example()
    for number in numbers:
        assert send(made, number) is NEW
    assert made.unseen("chain") == expected


def test_a_reference_closes_an_interval_of_unknown_content() -> None:
    """300 says that 200 is before it; when 200 says the same of 100, nothing can be missing in between."""
    made = ChainFilter()
    send(made, 100, 0)
    send(made, 300, 200)
    assert made.unseen("chain")[1:] == [(101, 200), (301, inf)]
    assert send(made, 200, 100) is NEW
    assert made.unseen("chain")[1:] == [(301, inf)]
    with pytest.raises(InconsistentChain):
        made.reserve(Link("chain", 150, 100))


def test_pairs_of_timestamp_and_sequence_number() -> None:
    made = ChainFilter()
    assert send(made, (1000, 0), (999, 5)) is NEW
    assert send(made, (1000, 1), (1000, 0)) is NEW
    assert send(made, (1002, 0), (1001, 7)) is NEW
    assert made.unseen("chain")[1:] == [((1000, 1), (1001, 7)), ((1002, 0), (inf, inf))]
    assert send(made, (1001, 7), (1001, 6)) is NEW
    assert send(made, (1000, 1), (1000, 0)) is DUPLICATE
    assert send(made, (1001, 6), (1000, 1)) is NEW
    assert made.unseen("chain")[1:] == [((1002, 0), (inf, inf))]


def test_messages_from_before_the_first_one_seen_are_new() -> None:
    """A rival takes its first message for the floor and loses what was overtaken by it."""
    made = ChainFilter()
    send(made, 500, 400)
    assert send(made, 400, 300) is NEW
    assert send(made, 300, 200) is NEW
    assert send(made, 400, 300) is DUPLICATE


def test_without_references_the_highest_number_decides() -> None:
    made = ChainFilter()
    assert send(made, 10) is NEW
    assert send(made, 30) is NEW
    assert send(made, 20) is DUPLICATE
    assert send(made, 30) is DUPLICATE
    assert send(made, 31) is NEW
    assert len(made.unseen("chain")) == 1


def test_without_a_reference_a_known_gap_is_still_unseen() -> None:
    made = ChainFilter()
    send(made, 10, 5)
    send(made, 30, 20)
    assert send(made, 15) is NEW
    assert send(made, 15) is DUPLICATE
    assert send(made, 12) is NEW
    assert send(made, 20) is NEW
    assert send(made, 11) is NEW


@pytest.mark.parametrize(("number", "previous"), [(25, 5), (25, 9), (40, 10)])
def test_a_reference_across_something_seen_is_refused_and_marks_nothing(number: int, previous: int) -> None:
    made = ChainFilter()
    send(made, 10, 5)
    send(made, 30, 20) if number == 40 else send(made, 20, 10)
    before = made.unseen("chain")
    with pytest.raises(InconsistentChain, match="seen in between"):
        made.reserve(Link("chain", number, previous))
    with pytest.raises(InconsistentChain):
        made.reserve_many([Link("chain", 100, 99), Link("chain", number, previous)])
    assert made.unseen("chain") == before
    assert made.reserve(Link("chain", 100, 99)) is NEW, "of a batch that was refused nothing is reserved"


def test_ints_and_pairs_do_not_mix_in_a_chain() -> None:
    made = ChainFilter()
    send(made, 10, 5)
    with pytest.raises(KeyRefused, match="do not mix"):
        made.reserve(Link("chain", (11, 0), (10, 0)))


@pytest.mark.parametrize("is_restored", [False, True])
def test_ints_and_pairs_do_not_mix_while_the_first_ones_are_in_flight(*, is_restored: bool) -> None:
    """Both would be sent, and only one of them could be confirmed."""
    made = ChainFilter()
    with pytest.raises(KeyRefused, match="do not mix"):
        made.reserve_many([Link("chain", 10), Link("chain", (11, 0))])
    assert made.reserve(Link("chain", (11, 0))) is NEW, "of a batch that was refused nothing is reserved"
    if is_restored:
        made, data = ChainFilter(), made.to_bytes()
        made.load_bytes(data)
    with pytest.raises(KeyRefused, match="do not mix"):
        made.reserve(Link("chain", 10))
    made.confirm(Link("chain", (11, 0)))
    made.drop("chain")
    assert made.reserve(Link("chain", 10)) is NEW


def gappy(policy: GapPolicy, max_gaps: int = 3) -> ChainFilter:
    """A chain with as many gaps as it may have: 1, 3, 5 are missing."""
    made = ChainFilter(dense=True, max_gaps=max_gaps, on_full=policy)
    for number in (0, 2, 4, 6):
        send(made, number)
    return made


def test_beyond_the_cap_nothing_original_is_lost_by_default() -> None:
    made = gappy("treat_as_new")
    assert send(made, 8) is NEW
    assert [send(made, n) for n in (1, 3, 5, 7)] == [NEW] * 4
    assert made.stats().failed_open == 1


def test_beyond_the_cap_the_lowest_gap_may_be_closed_by_choice() -> None:
    made = gappy("treat_as_seen")
    assert send(made, 8) is NEW
    assert [send(made, n) for n in (1, 3, 5, 7)] == [DUPLICATE, NEW, NEW, NEW]
    assert made.stats().evicted == 1


def test_beyond_the_cap_a_message_may_be_refused_by_choice() -> None:
    made = gappy("raise")
    with pytest.raises(LimitReached, match="3 gaps"):
        send(made, 8)
    assert send(made, 7) is NEW, "what makes no new gap is not refused"
    assert send(made, 3) is NEW
    assert send(made, 9) is NEW


@pytest.mark.parametrize("policy", ["treat_as_new", "treat_as_seen"])
def test_gaps_stay_below_their_cap(policy: GapPolicy) -> None:
    made = ChainFilter(dense=True, max_gaps=10, on_full=policy)
    for number in range(0, 2000, 2):
        send(made, number)
        assert len(made.unseen("chain")) <= 11


def test_a_snapshot_restores_the_intervals() -> None:
    made = seed_example()
    pairs = ChainFilter()
    send(pairs, (1000, 1), (999, 5))
    send(pairs, (1002, 0), (1001, 7))
    for original in (made, pairs):
        again = ChainFilter(dense=original is made, first=1)
        again.load_bytes(original.to_bytes())
        assert again.unseen("chain") == original.unseen("chain")
    again = ChainFilter(dense=True, first=1)
    again.load_bytes(made.to_bytes())
    assert [send(again, n) for n in (6, 7, 12, 13, 20, 21)] == [DUPLICATE, NEW] * 3


def test_a_snapshot_that_was_cut_or_altered_is_refused_whole() -> None:
    data = seed_example().to_bytes()
    for broken in [data[:n] for n in range(len(data))] + [
        data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :] for n in range(len(data))
    ]:
        again = ChainFilter(dense=True, first=1)
        with pytest.raises(SnapshotCorrupted):
            again.load_bytes(broken)
        assert again.unseen("chain") == []


def test_a_snapshot_of_something_else_is_refused() -> None:
    with pytest.raises(SnapshotCorrupted, match="not of a ChainFilter"):
        ChainFilter().load_bytes(pack("sequences of a producer", {}))


@given(st.lists(st.integers(0, 60), max_size=150))
def test_a_dense_chain_equals_a_plain_set(numbers: list[int]) -> None:
    made = ChainFilter(dense=True)
    seen: set[int] = set()
    for number in numbers:
        assert send(made, number) is (DUPLICATE if number in seen else NEW)
        seen.add(number)
    expected = {n for n in range(100) if n not in seen}
    intervals = made.unseen("chain") or [(0, inf)]
    assert {n for n in range(100) if any(low <= n <= high for low, high in intervals)} == expected


@given(st.data())
def test_a_chain_of_any_numbers_in_any_order_equals_a_plain_set(data: st.DataObject) -> None:
    """The numbers of the chain are drawn first, then arrive in any order, several times, with true references."""
    pair = st.tuples(st.integers(0, 20), st.integers(0, 3))
    chain = sorted(data.draw(st.sets(pair, min_size=2, max_size=30)))
    before = dict(zip(chain[1:], chain, strict=False))
    arrivals = data.draw(st.lists(st.sampled_from(chain[1:]), max_size=80))
    made, seen = ChainFilter(), set()
    for number in arrivals:
        assert send(made, number, before[number]) is (DUPLICATE if number in seen else NEW)
        seen.add(number)
    for number in chain[1:]:
        send(made, number, before[number])
    assert len(made.unseen("chain")) == 2, "everything is there: below the first, above the last"


@given(st.lists(st.integers(0, 300), unique=True, max_size=150))
def test_treating_as_new_never_calls_an_original_a_duplicate(numbers: list[int]) -> None:
    made = ChainFilter(dense=True, max_gaps=2)
    assert [send(made, number) for number in numbers] == [NEW] * len(numbers)


@pytest.mark.parametrize(
    ("seen", "number", "previous"),
    [
        ([(10, 5)], 8, 5),
        ([(10, 5)], 10, 7),
        ([(10, 5)], 10, 3),
        ([(10, 5)], 7, 6),
        ([(10, 5), (5, 0)], 5, 1),
        ([(10, 5), (5, 0)], 8, 5),
        ([(5, 0), (10, 5), (15, 10)], 12, 10),
        ([(10, 5), (20, 15), (15, 10)], 12, 4),
        ([(10, 5), *((n, n - 1) for n in range(11, 400))], 8, 5),
    ],
)
@pytest.mark.parametrize("is_restored", [False, True])
def test_a_message_that_cannot_be_there_is_refused_and_no_duplicate(
    seen: list[tuple[int, int]], number: int, previous: int, *, is_restored: bool
) -> None:
    """A message that was never seen would be lost if a contradiction counted as a duplicate."""
    made = ChainFilter()
    for message in seen:
        assert send(made, *message) is NEW
    if is_restored:
        made, data = ChainFilter(), made.to_bytes()
        made.load_bytes(data)
    with pytest.raises(InconsistentChain):
        made.reserve(Link("chain", number, previous))
    with pytest.raises(InconsistentChain):
        made.reserve_many([Link("chain", 1000, 999), Link("chain", number, previous)])
    assert [send(made, *message) for message in seen[-50:]] == [DUPLICATE] * len(seen[-50:])
    assert send(made, 1000, 999) is NEW


def test_the_references_that_are_kept_stay_few() -> None:
    made = ChainFilter(max_gaps=50)
    for number in range(0, 10_000, 2):
        send(made, number + 1, number)
    assert len(made._links["chain"].numbers) <= 152
    made = ChainFilter()
    for number in range(10_000):
        send(made, number + 1, number)
    assert len(made._links["chain"].numbers) <= 102


@pytest.mark.parametrize("options", [{}, {"dense": True}])
def test_what_was_in_flight_belongs_to_the_snapshot(options: dict[str, Any]) -> None:
    """Its retry after a crash is behind higher numbers, and must not look like a duplicate."""
    made = ChainFilter(**options)
    for number in (1, 2, 3, 4, 5):
        made.reserve(Link("chain", number))
    made.reserve(Link("another", 7))
    made.confirm(Link("chain", 1))
    made.confirm(Link("chain", 5))
    made.mark_unknown(Link("chain", 3))
    made.release(Link("chain", 4))
    again = ChainFilter(**options)
    again.load_bytes(made.to_bytes())
    states = [again.reserve(Link("chain", number)) for number in (1, 2, 3, 4, 5)]
    assert states == [DUPLICATE, UNKNOWN, UNKNOWN, NEW, DUPLICATE]
    assert again.reserve(Link("another", 7)) is UNKNOWN
    assert again.reserve(Link("chain", 6)) is NEW


@pytest.mark.parametrize(("reference", "restarts"), [(None, 0), (5, 0), (None, 1), (5, 1)])
def test_a_message_that_failed_is_new_behind_a_higher_one_that_named_none(reference: int | None, restarts: int) -> None:
    links = ChainFilter()
    links.confirm(Link("c", 5, previous=4))
    failed, overtaker = Link("c", 8, previous=reference), Link("c", 9)
    assert links.reserve_many([failed, overtaker]) == [State.NEW, State.NEW]
    links.release(failed)
    if restarts:
        saved, links = links.to_bytes(), ChainFilter()
        links.load_bytes(saved)
    links.confirm(overtaker)
    assert links.reserve(failed) is State.NEW
    links.confirm(failed)
    assert links.reserve(failed) is State.DUPLICATE


def test_a_message_that_fails_behind_a_higher_one_is_new() -> None:
    links = ChainFilter()
    links.confirm(Link("c", 5, previous=4))
    links.reserve(slow := Link("c", 8, previous=5))
    links.confirm(Link("c", 9))
    links.release(slow)
    assert links.reserve(slow) is State.NEW


def test_a_chain_with_messages_in_flight_is_not_dropped() -> None:
    """Their confirmation would begin it anew, and another one of its name could not be confirmed beside them."""
    made = ChainFilter()
    made.reserve(Link("c", 5, 4))
    with pytest.raises(ConfigurationError, match=r"chain 'c' has messages in flight.* Link\('c', 5\)"):
        made.drop("c")
    assert made.reserve(Link("c", 5, 4)) is IN_FLIGHT
    made.mark_unknown(Link("c", 5, 4))
    with pytest.raises(KeyRefused, match="do not mix"):
        made.reserve(Link("c", (5, 0)))
    made.drop("c")
    assert made.reserve(Link("c", (5, 0))) is NEW
    made.confirm(Link("c", (5, 0)))
    assert made.reserve(Link("c", (5, 0))) is DUPLICATE


def test_messages_that_were_released_leave_nothing_of_their_chains() -> None:
    made = ChainFilter(dense=True, on_full="raise")
    for n in range(100):
        made.reserve(Link(f"c{n}", 0))
        made.release(Link(f"c{n}", 0))
    sizes = {name: len(found) for name, found in vars(made).items() if isinstance(found, dict)}
    assert set(sizes.values()) == {0}, sizes
