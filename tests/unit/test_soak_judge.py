"""What the soak's observer says of one snapshot of one partition; pure."""

from __future__ import annotations

from collections import Counter

import pytest

from exactly_once.soak.observer import Anomaly, Row, View, judge
from exactly_once.soak.run import DECK, Nemesis
from exactly_once.soak.verdict import KINDS, counts, shown

KNOWN = [3, 4, 6, 7]
"""Messages that count; 5 is a marker or belongs to an aborted transaction."""


def kinds(effects: list[int], *, stands_at: int, upto: int = 8, was: Row | None = None) -> list[str]:
    view = View(row=was or Row(3, 1), compared=3)
    return [kind for kind, _ in judge(view, Row(stands_at, 1), effects, KNOWN, upto)]


def test_a_prefix_of_the_messages_and_an_offset_behind_it_agree() -> None:
    assert kinds([3, 4, 6], stands_at=7) == []
    assert kinds([3, 4], stands_at=6) == []
    assert kinds([], stands_at=3) == []


@pytest.mark.parametrize(
    ("effects", "stands_at", "found"),
    [
        ([3, 4, 4, 6], 7, "doubled"),
        ([3, 4, 6], 6, "offset_behind"),
        ([3, 6], 7, "offset_ahead"),
        ([3, 4, 5, 6], 7, "foreign"),
    ],
)
def test_what_disagrees_is_named(effects: list[int], stands_at: int, found: str) -> None:
    assert kinds(effects, stands_at=stands_at) == [found]


@pytest.mark.parametrize("was", [Row(5, 1), Row(3, 2)])
def test_an_offset_or_an_epoch_that_goes_back_is_named(was: Row) -> None:
    assert kinds([3], stands_at=4, was=was) == ["non_monotonic"]


def test_a_failover_may_take_an_offset_back_and_its_effects_with_it() -> None:
    was = Row(7, 2, timeline="1")
    view = View(row=was, compared=7)
    assert list(judge(view, Row(4, 1, timeline="2"), [], [], upto=8)) == []
    assert [kind for kind, _ in judge(view, Row(4, 1, timeline="2"), [7], [], upto=8)] == ["offset_behind"]
    assert [kind for kind, _ in judge(view, Row(4, 1, timeline="1"), [], [], upto=8)] == ["non_monotonic"]


def test_what_the_tail_does_not_know_yet_is_not_judged() -> None:
    """An effect beyond it may be of a message that it will read next."""
    assert kinds([3, 4, 5, 6], stands_at=7, upto=5) == []


def test_faults_of_a_seed_are_drawn_again_and_a_round_has_every_kind() -> None:
    one, other = Nemesis(4), Nemesis(4)
    drawn = [one.next_kind() for _ in range(sum(DECK.values()))]
    assert Counter(drawn) == DECK
    assert drawn == [other.next_kind() for _ in drawn]
    different = Nemesis(5)
    assert drawn != [different.next_kind() for _ in drawn]


def test_every_kind_is_counted_and_the_first_ones_are_shown() -> None:
    found = [Anomaly("lost", "group eager, t [0]", f"offset {n}") for n in range(20)]
    assert counts(found) == dict.fromkeys(KINDS, 0) | {"lost": 20}
    assert len(shown(found)) == 5
