"""What is kept of each partition, field by field, and what tells the loop that there is something to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from uuid import uuid4

import pytest

from exactly_once._model import ROTATE_EVERY, Partition, Span
from exactly_once.consumer.partitions import Left, Ownership, PartitionState, Phase, Resolution
from exactly_once.ledger.conflict import Conflict

from .test_ownership import P, Q, in_doubt, owning, resolved, row

OTHER = Partition("b", 0)


def acquiring() -> Ownership:
    """Make an ownership with a row that is acquired and not checked yet."""
    ownership = Ownership()
    ownership.assigned([P])
    ownership.acquired([row(P)])
    return ownership


def test_nothing_is_known_of_a_partition_that_was_just_assigned() -> None:
    ownership = Ownership()
    assert ownership.has_changed
    assert ownership.is_sound
    assert ownership.is_accounted
    ownership.assigned([P])
    state = ownership.states[P]
    assert state == PartitionState(
        phase=Phase.PENDING,
        token=None,
        epoch=0,
        generation=0,
        advances=ROTATE_EVERY,
        next_offset=-1,
        positioned=False,
        in_flight_until=-1,
        position=-1,
        log_end=-1,
        log_ended_at=0.0,
        is_to_mirror=False,
        compared_epoch=-1,
    )
    assert not state.is_at_end


@pytest.mark.parametrize(
    "event",
    [
        lambda ownership, _: ownership.assigned([OTHER]),
        lambda ownership, _: ownership.revoked([P]),
        lambda ownership, _: ownership.invalidate_all(),
        lambda ownership, _: ownership.rejected(P, ValueError()),
        lambda ownership, rows: ownership.started(P, rows[P]),
        lambda ownership, rows: ownership.seen([P], [replace(rows[P], owner_epoch=5)]),
        lambda ownership, rows: ownership.seen([P], [replace(rows[P], next_offset=5)]),
        lambda ownership, _: ownership.classify(ownership.hand_out({P: Span(0, 1, None)}), []),
    ],
)
def test_what_leaves_something_to_do_says_so(event: Callable[[Ownership, object], object]) -> None:
    ownership, rows = owning(P, Q)
    ownership.has_changed = False
    event(ownership, rows)
    assert ownership.has_changed


@pytest.mark.parametrize("event", [Ownership.not_started, Ownership.taken])
def test_what_could_not_be_started_says_so(event: Callable[[Ownership, list[Partition]], object]) -> None:
    ownership = acquiring()
    ownership.has_changed = False
    event(ownership, [P])
    assert ownership.has_changed


def test_a_change_that_was_cut_short_leaves_positions_unsound_until_none_is_trusted() -> None:
    ownership, _ = owning(P)
    sound = []
    with ownership.changing():
        with ownership.changing():
            pass
        sound.append(ownership.is_sound)
    sound.append(ownership.is_sound)

    def cut_short() -> None:
        with ownership.changing():
            raise ValueError

    with contextlib.suppress(ValueError):
        cut_short()
    sound.append(ownership.is_sound)
    ownership.invalidate_all()
    assert [*sound, ownership.is_sound] == [False, True, False, True]


def test_a_unit_is_accounted_for_once_its_outcome_is_known() -> None:
    ownership, _ = owning(P, Q)
    for known in (ownership.aborted, ownership.committed):
        advances = ownership.hand_out({P: Span(0, 3, None)})
        assert not ownership.is_accounted
        known(advances)
        assert ownership.is_accounted
    ownership.hand_out({P: Span(3, 4, None)})
    ownership.invalidate_all()
    assert ownership.is_accounted, "it is fetched again from where the ledger stands"


def test_all_that_is_ours_in_the_ledger_is_released_at_the_end() -> None:
    ownership, rows = owning(Q, P)
    ownership.revoked([Q])
    ownership.assigned([OTHER])
    assert ownership.tokens() == [(P, rows[P].owner_token), (Q, rows[Q].owner_token)]


def test_what_is_started_knows_its_row() -> None:
    ownership = Ownership()
    ownership.assigned([P])
    mine = replace(row(P, 5, epoch=4), topic_id="id", cluster_id="c", generation=3, leader_epoch=2)
    ownership.acquired([mine])
    ownership.started(P, replace(mine, next_offset=None))
    assert ownership.states[P].phase is Phase.STARTING, "no start was chosen yet"
    ownership.started(P, mine)
    state = ownership.states[P]
    assert (state.topic_id, state.cluster_id, state.generation, state.leader_epoch) == ("id", "c", 3, 2)
    ownership.positioned([P])
    assert (state.in_flight_until, state.position, state.checked_at) == (5, 5, 5)


def test_a_unit_tells_up_to_where_this_owner_has_applied() -> None:
    ownership, _ = owning(P)
    advances = ownership.hand_out({P: Span(0, 3, 1)})
    ownership.states[P].position = 3
    ownership.committed(advances)
    ownership.reached_end(P, 5)
    ownership.moved_to_end(ownership.at_end())
    (advance,) = ownership.hand_out({P: Span(5, 6, 1)})
    assert (advance.expected, advance.after) == (5, 3), "there was no message from 3 to 4"


def test_the_end_of_a_log_is_kept_with_when_it_was_met() -> None:
    ownership, _ = owning(P)
    ownership.reached_end(Q, 12, 7.5)
    ownership.reached_end(P, 12, 7.5)
    state = ownership.states[P]
    assert (state.log_end, state.log_ended_at, state.read) == (12, 7.5, 12)
    state.position = 14
    assert state.read == 14
    ownership.unreadable(P, "damaged")
    ownership.reached_end(P, 15, 8.5)
    assert state.log_end == 12, "what is behind the damage was not read"


def test_why_a_partition_cannot_be_read_is_what_was_found_first() -> None:
    ownership, _ = owning(P)
    ownership.unreadable(Q, "not ours")
    for reason in ("damaged", "and again"):
        ownership.unreadable(P, reason)
    assert ownership.states[P].unreadable == "damaged"
    ownership.states[P].gaps[7] = 5
    ownership.positioned([P])
    assert (ownership.states[P].unreadable, ownership.states[P].gaps) == (None, {})


def test_a_move_to_the_end_counts_as_any_other() -> None:
    ownership, _ = owning(P)
    ownership.reached_end(P, 12)
    (move,) = ownership.at_end()
    assert move.rotates
    ownership.moved_to_end([replace(move, leader_epoch=4)])
    state = ownership.states[P]
    assert (state.leader_epoch, state.is_to_mirror, state.generation, state.advances) == (4, True, 1, 1)


def test_a_move_to_the_end_that_is_found_in_the_row_counts_as_any_other() -> None:
    ownership, rows = owning(P)
    ownership.reached_end(P, 12)
    assert ownership.seen([P], [replace(rows[P], next_offset=12, generation=1)]) == {}
    state = ownership.states[P]
    assert (state.in_flight_until, state.position, state.generation, state.advances) == (12, 12, 1, 1)


def test_a_move_to_the_end_without_an_answer_is_acquired_again() -> None:
    ownership, rows = owning(P, Q)
    ownership.reached_end(P, 12)
    moves = ownership.at_end()
    ownership.states[P].stop_at = 7
    ownership.doubted(moves)
    assert (ownership.to_acquire(), ownership.owned()) == ([P], [Q])
    assert ownership.releases == [(P, rows[P].owner_token)]
    assert ownership.states[P].stop_at == 7, "where the log ended when the iteration began stays"
    again = ownership.states[P]
    ownership.doubted(moves)
    assert ownership.states[P] is again


def test_of_a_short_advance_only_what_is_wrong_is_given_up() -> None:
    ownership, rows, advances = in_doubt(P, Q)
    found = [replace(rows[P], generation=5), replace(rows[Q], owner_token=uuid4())]
    assert ownership.classify(advances, found) == {P: Conflict.OK, Q: Conflict.FENCED}
    assert ownership.to_confirm() == [Q]
    (advance,) = ownership.hand_out({P: Span(0, 3, None)})
    assert (advance.expected, advance.generation) == (0, 5)


def test_a_row_that_is_missing_from_a_short_advance_is_asked_for_again() -> None:
    ownership, _, advances = in_doubt(P)
    assert ownership.classify(advances, []) == {P: Conflict.MISSING}
    assert ownership.to_confirm() == [P]


@pytest.mark.parametrize(
    ("change", "conflict"),
    [
        ({"next_offset": 4}, Conflict.REWOUND),
        ({"next_offset": None}, Conflict.REWOUND),
        ({"next_offset": 9}, Conflict.AHEAD),
        ({"owner_epoch": 9}, Conflict.FENCED),
    ],
)
def test_what_was_seen_between_units_is_told_by_its_name(change: dict[str, int | None], conflict: Conflict) -> None:
    ownership, rows = owning(P, Q, offset=7)
    ownership.assigned([OTHER])
    seen = [replace(rows[P], **change), rows[Q], row(OTHER)]  # type: ignore[arg-type]
    assert ownership.seen([P, Q, OTHER], seen) == {P: conflict}
    assert ownership.to_acquire() == ([OTHER] if change != {"next_offset": None} else [P, OTHER])


def test_rows_to_be_looked_at_come_in_locking_order() -> None:
    ownership, _ = owning(P, Q)
    ownership.assigned([OTHER])
    assert ownership.suspicious([Q, OTHER, P, Partition("c", 0)], []) == [P, Q]


def test_a_bad_partition_keeps_its_error_until_its_row_is_changed() -> None:
    ownership = acquiring()
    error = ValueError("why")
    ownership.rejected(Q, error)
    ownership.rejected(P, error, replace(row(P, 3, epoch=2), topic_id="id", halted="why"))
    state = ownership.states[P]
    assert (state.phase, state.error, state.left) == (Phase.BAD, error, Left(2, 3, "id", is_halted=True))
    ownership.seen([P], [])
    assert (state.phase, state.error, state.left) == (Phase.FENCED, None, None)
    ownership.retried([P])
    assert ownership.to_confirm() == [P], "it is bad no more"


def test_a_landed_unit_is_of_the_generation_that_its_row_tells() -> None:
    ownership, rows, advances = in_doubt(P)
    landed = replace(rows[P], next_offset=10, generation=6)
    assert resolved(ownership, advances, [landed]) is Resolution.COMMITTED
    state = ownership.states[P]
    assert (state.generation, state.advances, state.last_applied, state.is_to_mirror) == (6, 1, 10, True)


def test_nothing_is_handed_out_without_an_offset_in_it() -> None:
    ownership, _ = owning(P, offset=5)
    with pytest.raises(AssertionError):
        ownership.hand_out({P: Span(5, 5, None)})


def test_what_becomes_of_a_unit_does_not_matter_to_a_partition_that_is_gone() -> None:
    ownership, _, advances = in_doubt(P, Q)
    ownership.revoked([P])
    ownership.committed(advances)
    assert {p: state.next_offset for p, state in ownership.states.items()} == {Q: 10}


def test_a_member_that_is_confirmed_acquires_again() -> None:
    ownership, _ = owning(P)
    ownership.seen([P], [])
    assert (ownership.states[P].positioned, ownership.states[P].token) == (False, None)
    ownership.confirmed([P, Q])
    assert (ownership.to_confirm(), ownership.to_acquire()) == ([], [P])


def test_a_bad_partition_that_is_tried_again_is_acquired() -> None:
    ownership, _ = owning(P)
    ownership.rejected(P, ValueError())
    ownership.retried([P])
    assert (ownership.bad(), ownership.to_acquire()) == ([], [P])


def test_a_bad_row_is_left_as_it_was_read() -> None:
    ownership, rows = owning(P)
    ownership.rejected(P, ValueError(), replace(rows[P], next_offset=3))
    assert ownership.states[P].left == Left(1, 3, None, is_halted=False)


def test_a_start_that_was_cut_short_begins_anew() -> None:
    ownership = acquiring()
    token = ownership.states[P].token
    ownership.invalidate_all()
    assert (ownership.to_acquire(), ownership.releases) == ([P], [(P, token)])


def test_a_position_that_is_set_again_is_new_in_all_that_is_known_of_it() -> None:
    ownership, _ = owning(P)
    ownership.hand_out({P: Span(0, 3, None)})
    ownership.reached_end(P, 12)
    assert ownership.states[P].log_ended_at == 0.0
    ownership.suspect(P, "out of range")
    ownership.positioned([P])
    state = ownership.states[P]
    assert (state.in_flight_until, state.position, state.log_end, state.suspect) == (0, 0, -1, None)


@pytest.mark.parametrize("offset", [4, 20])
def test_a_row_that_moved_elsewhere_than_to_the_end_is_followed(offset: int) -> None:
    ownership, rows = owning(P, offset=6)
    ownership.reached_end(P, 12)
    assert list(ownership.seen([P], [replace(rows[P], next_offset=offset)])) == [P]
    assert ownership.states[P].next_offset == ownership.states[P].in_flight_until == offset


def test_what_was_applied_before_a_row_moved_is_not_told_of() -> None:
    ownership, rows = owning(P)
    ownership.committed(ownership.hand_out({P: Span(0, 3, 1)}))
    ownership.seen([P], [replace(rows[P], next_offset=9)])
    ownership.positioned([P])
    assert [advance.after for advance in ownership.hand_out({P: Span(9, 10, 1)})] == [None]


def test_a_row_without_a_start_is_not_ours_any_more() -> None:
    ownership, rows = owning(P)
    ownership.seen([P], [replace(rows[P], next_offset=None)])
    assert (ownership.states[P].phase, ownership.states[P].token) == (Phase.PENDING, None)


def test_a_row_at_an_end_behind_what_cannot_be_read_was_moved_by_somebody_else() -> None:
    ownership, rows = owning(P)
    ownership.reached_end(P, 12)
    ownership.unreadable(P, "damaged")
    assert ownership.seen([P], [replace(rows[P], next_offset=12)]) == {P: Conflict.AHEAD}
