"""Ownership: the state machine alone, under any order of events, against a ledger of one line per partition."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID, uuid4

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from exactly_once._model import Advance, Partition, Row, Span
from exactly_once.consumer.partitions import Ownership, Phase, Report, Resolution
from exactly_once.ledger.conflict import Conflict, Grant, check
from tests.support.interrupts import Interrupt, Interrupter

PARTITIONS = [Partition("a", 0), Partition("a", 1), Partition("b", 0)]
P, Q = PARTITIONS[:2]


def conflict_of(advance: Advance, row: Row | None) -> Conflict:
    return check(row, Grant(advance.token, advance.epoch), advance.expected, advance.topic_id)


def row(partition: Partition, offset: int | None = 0, *, token: UUID | None = None, epoch: int = 1) -> Row:
    return Row(partition=partition, next_offset=offset, owner_token=token or uuid4(), owner_epoch=epoch)


def owning(*partitions: Partition, offset: int = 0) -> tuple[Ownership, dict[Partition, Row]]:
    """Make an ownership whose partitions flow from ``offset``."""
    ownership = Ownership()
    rows = {p: row(p, offset) for p in partitions}
    ownership.assigned(partitions)
    ownership.acquired(rows.values())
    for partition in partitions:
        ownership.started(partition, rows[partition])
    ownership.positioned(partitions)
    return ownership, rows


def in_doubt(*partitions: Partition) -> tuple[Ownership, dict[Partition, Row], list[Advance]]:
    """Make an ownership with a unit over offsets 0 to 9 whose COMMIT got no answer."""
    ownership, rows = owning(*partitions)
    advances = ownership.hand_out(dict.fromkeys(partitions, Span(0, 10, 3)))
    return ownership, rows, advances


def resolved(ownership: Ownership, advances: list[Advance], rows: list[Row]) -> Resolution:
    return ownership.resolved(advances, [a.token for a in advances], rows)


def test_a_partition_passes_through_its_states_to_where_messages_flow() -> None:
    ownership = Ownership()
    ownership.assigned([Q, P])
    assert ownership.to_acquire() == [P, Q], "in locking order"
    mine = row(P, 5)
    ownership.acquired([mine])
    assert ownership.states[P].phase is Phase.STARTING
    assert ownership.deliverable(P) is None
    ownership.started(P, mine)
    assert list(ownership.to_position()) == [P]
    assert ownership.deliverable(P) is None
    ownership.positioned([P])
    assert ownership.deliverable(P) is ownership.states[P]
    assert ownership.to_acquire() == [Q]


def test_an_advance_says_all_that_the_ledger_must_compare() -> None:
    ownership = Ownership()
    ownership.assigned([P])
    mine = replace(row(P, 5, epoch=9), topic_id="id", leader_epoch=2, generation=3)
    ownership.acquired([mine])
    ownership.started(P, mine)
    ownership.positioned([P])
    assert mine.owner_token is not None
    assert ownership.hand_out({P: Span(5, 8, 4)}) == [
        Advance(
            partition=P,
            token=mine.owner_token,
            epoch=9,
            topic_id="id",
            expected=5,
            next_offset=8,
            leader_epoch=4,
            generation=3,
            rotates=True,
        )
    ]


def test_who_had_a_row_and_did_not_release_it_is_known() -> None:
    """Its process may stand still with locks that we need."""
    ownership = Ownership()
    ownership.assigned([P])
    mine = replace(row(P), previous_instance=uuid4())
    ownership.acquired([mine])
    assert ownership.states[P].previous_instance == mine.previous_instance


@pytest.mark.parametrize("path", ["resolved", "classify", "seen"])
def test_a_row_that_is_followed_elsewhere_is_believed_in_all_that_an_advance_compares(path: str) -> None:
    ownership, rows, advances = in_doubt(P)
    moved = replace(rows[P], next_offset=5, generation=4, leader_epoch=2)
    if path == "resolved":
        resolved(ownership, advances, [moved])
    elif path == "classify":
        assert ownership.classify(advances, [moved]) == {P: Conflict.AHEAD}
    else:
        ownership.seen([P], [moved])
    ownership.positioned([P])
    assert ownership.states[P].leader_epoch == 2
    (advance,) = ownership.hand_out({P: Span(5, 6, 2)})
    assert (advance.expected, advance.generation, advance.after) == (5, 4, None)
    assert conflict_of(advance, moved) is Conflict.OK


def test_a_unit_that_was_not_accounted_for_stops_the_next() -> None:
    ownership, _ = owning(P)
    ownership.hand_out({P: Span(0, 3, None)})
    for span in (Span(3, 5, None), Span(0, 3, None)):
        with pytest.raises(AssertionError):
            ownership.hand_out({P: span})


def test_a_batch_that_leaves_out_what_was_not_applied_stops_the_loop() -> None:
    ownership, _ = owning(P, offset=5)
    with pytest.raises(AssertionError):
        ownership.hand_out({P: Span(7, 9, None)})
    ownership.states[P].gaps[7] = 5  # the log has nothing between
    ownership.committed(ownership.hand_out({P: Span(7, 9, None)}))
    assert ownership.states[P].gaps == {}
    with pytest.raises(AssertionError):
        ownership.hand_out({P: Span(8, 10, None)})
    ownership.states[P].gaps[12] = 10
    with pytest.raises(AssertionError):
        ownership.hand_out({P: Span(12, 13, None)})


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.STARTING, Phase.FENCED])
def test_nothing_is_handed_out_of_a_partition_that_is_not_owned(phase: Phase) -> None:
    ownership, _ = owning(P)
    ownership.states[P].phase = phase
    with pytest.raises(AssertionError):
        ownership.hand_out({P: Span(0, 3, None)})


def test_a_commit_moves_what_is_expected_and_an_abort_takes_back_what_was_handed_out() -> None:
    ownership, _ = owning(P)
    ownership.aborted(ownership.hand_out({P: Span(0, 3, 1)}))
    assert ownership.states[P].in_flight_until == ownership.states[P].next_offset == 0
    ownership.committed(ownership.hand_out({P: Span(0, 3, 1)}))
    assert (ownership.states[P].next_offset, ownership.states[P].leader_epoch) == (3, 1)


def test_what_becomes_of_a_unit_does_not_touch_a_later_acquisition() -> None:
    ownership, _ = owning(P)
    advances = ownership.hand_out({P: Span(0, 3, None)})
    ownership.assigned([P])
    mine = row(P, 7)
    ownership.acquired([mine])
    ownership.started(P, mine)
    ownership.positioned([P])
    ownership.committed(advances)
    ownership.aborted(advances)
    ownership.classify(advances, [])
    assert resolved(ownership, advances, []) is Resolution.FENCED
    assert ownership.states[P].phase is Phase.OWNED
    assert ownership.states[P].next_offset == 7


def test_a_row_that_comes_after_the_revocation_is_given_back() -> None:
    ownership = Ownership()
    ownership.assigned([P])
    ownership.revoked([P])
    mine = row(P)
    ownership.acquired([mine])
    assert ownership.releases == [(P, mine.owner_token)]
    assert not ownership.states


def test_what_cannot_be_started_is_given_back_and_pending_again() -> None:
    ownership = Ownership()
    ownership.assigned([P])
    mine = row(P)
    ownership.acquired([mine])
    ownership.not_started([P, Q])
    assert ownership.to_acquire() == [P]
    assert ownership.releases == [(P, mine.owner_token)]


def test_a_start_under_another_token_is_ignored() -> None:
    ownership = Ownership()
    ownership.assigned([P])
    ownership.acquired([row(P)])
    ownership.started(P, row(P, 3))
    ownership.started(Q, row(Q, 3))
    assert ownership.states[P].phase is Phase.STARTING


def test_distrusted_positions_are_placed_again_from_the_expected_offset() -> None:
    ownership, _ = owning(P, offset=4)
    ownership.states[P].position = 9
    ownership.invalidate_all()
    assert ownership.deliverable(P) is None
    assert {p: h.next_offset for p, h in ownership.to_position().items()} == {P: 4}
    ownership.positioned([P])
    assert ownership.states[P].position == 4


def test_a_unit_in_doubt_that_landed_moves_on_under_the_fresh_token() -> None:
    ownership, rows, advances = in_doubt(P)
    fresh = uuid4()
    assert resolved(ownership, advances, [replace(rows[P], next_offset=10, owner_token=fresh)]) is Resolution.COMMITTED
    state = ownership.states[P]
    assert (state.next_offset, state.in_flight_until, state.token, state.leader_epoch) == (10, 10, fresh, 3)


def test_a_unit_in_doubt_that_did_not_land_is_taken_back_under_the_fresh_token() -> None:
    ownership, rows, advances = in_doubt(P)
    fresh = uuid4()
    assert resolved(ownership, advances, [replace(rows[P], owner_token=fresh)]) is Resolution.ABORTED
    state = ownership.states[P]
    assert (state.next_offset, state.in_flight_until, state.token, state.positioned) == (0, 0, fresh, True)


def test_a_row_of_the_unit_in_doubt_that_is_gone_was_taken_by_somebody() -> None:
    ownership, _, advances = in_doubt(P)
    assert resolved(ownership, advances, []) is Resolution.FENCED
    assert ownership.to_confirm() == [P]


def test_one_row_that_is_still_ours_tells_of_the_whole_unit() -> None:
    ownership, rows, advances = in_doubt(P, Q)
    assert resolved(ownership, advances, [replace(rows[P], next_offset=10)]) is Resolution.COMMITTED
    assert ownership.to_confirm() == [Q]


def test_a_row_resolved_after_the_revocation_is_given_back_under_its_fresh_token() -> None:
    ownership, rows, advances = in_doubt(P)
    ownership.revoked([P])
    fresh = uuid4()
    assert resolved(ownership, advances, [replace(rows[P], owner_token=fresh)]) is Resolution.ABORTED
    assert ownership.releases == [(P, rows[P].owner_token), (P, fresh)]


@pytest.mark.parametrize("offset", [3, 99])
def test_a_row_in_doubt_that_moved_elsewhere_is_followed(offset: int) -> None:
    ownership, rows, advances = in_doubt(P)
    resolved(ownership, advances, [replace(rows[P], next_offset=offset)])
    assert ownership.to_position()[P].next_offset == offset


@pytest.mark.parametrize("path", ["resolved", "judge", "seen"])
def test_a_row_that_lost_its_start_in_a_failover_is_acquired_again(path: str) -> None:
    ownership, rows, advances = in_doubt(P)
    lost = replace(rows[P], next_offset=None)
    if path == "resolved":
        resolved(ownership, advances, [lost])
    elif path == "judge":
        assert ownership.classify(advances, [lost]) == {P: Conflict.REWOUND}
    else:
        ownership.seen([P], [lost])
    assert ownership.to_acquire() == [P]


@pytest.mark.parametrize("path", ["judge", "seen"])
def test_a_row_that_lost_its_acquisition_in_a_failover_is_told_as_that_and_acquired_anew(path: str) -> None:
    ownership, rows, advances = in_doubt(P)
    lost = replace(rows[P], next_offset=None, owner_epoch=rows[P].owner_epoch - 1, owner_token=uuid4())
    told = ownership.classify(advances, [lost]) if path == "judge" else ownership.seen([P], [lost])
    assert told == {P: Conflict.REWOUND}
    assert ownership.to_confirm() == [P]
    assert ownership.to_acquire() == []


def test_a_row_that_is_gone_is_told_as_that_between_units() -> None:
    ownership, _, _ = in_doubt(P)
    assert ownership.seen([P], []) == {P: Conflict.MISSING}
    assert ownership.to_confirm() == [P]


ADVANCE = Advance(partition=P, token=uuid4(), epoch=2, topic_id="id", expected=5, next_offset=8, leader_epoch=None)
STORED = Row(partition=P, next_offset=5, owner_epoch=2, owner_token=ADVANCE.token, topic_id="id")


@pytest.mark.parametrize(
    ("stored", "verdict"),
    [
        (STORED, Conflict.OK),
        (None, Conflict.MISSING),
        (replace(STORED, owner_token=uuid4()), Conflict.FENCED),
        (replace(STORED, owner_token=None), Conflict.FENCED),
        (replace(STORED, owner_epoch=3), Conflict.FENCED),
        (replace(STORED, owner_epoch=3, next_offset=4), Conflict.FENCED),
        (replace(STORED, owner_token=uuid4(), next_offset=4), Conflict.FENCED),
        (replace(STORED, owner_epoch=1), Conflict.FENCED),
        (replace(STORED, owner_epoch=1, owner_token=None, next_offset=4), Conflict.REWOUND),
        (replace(STORED, owner_epoch=1, owner_token=uuid4(), next_offset=None), Conflict.REWOUND),
        (replace(STORED, topic_id="other"), Conflict.RECREATED),
        (replace(STORED, topic_id=None), Conflict.RECREATED),
        (replace(STORED, next_offset=4), Conflict.REWOUND),
        (replace(STORED, next_offset=None), Conflict.REWOUND),
        (replace(STORED, next_offset=6), Conflict.AHEAD),
        (replace(STORED, next_offset=6, owner_token=uuid4(), topic_id="other"), Conflict.FENCED),
    ],
)
def test_a_row_that_did_not_advance_is_judged_by_its_token_first(stored: Row | None, verdict: Conflict) -> None:
    assert conflict_of(ADVANCE, stored) is verdict


@pytest.mark.parametrize("change", [{"owner_token": uuid4()}, {"owner_token": None}, {"owner_epoch": 5}])
def test_another_owner_is_seen_between_units(change: dict[str, UUID | int | None]) -> None:
    ownership, rows = owning(P, Q)
    ownership.seen([P, Q], [replace(rows[P], **change), rows[Q]])  # type: ignore[arg-type]
    assert ownership.to_confirm() == [P]
    assert ownership.deliverable(Q) is not None


def test_a_row_that_is_gone_is_seen_between_units() -> None:
    ownership, _ = owning(P)
    ownership.seen([P, Q], [])
    assert ownership.to_confirm() == [P]


def test_an_offset_that_moved_is_followed_between_units() -> None:
    ownership, rows = owning(P, Q, offset=7)
    ownership.seen([P, Q], [replace(rows[P], next_offset=4), rows[Q]])
    assert {p: h.next_offset for p, h in ownership.to_position().items()} == {P: 4}


def test_the_end_of_a_log_counts_only_behind_everything_that_was_fetched() -> None:
    ownership, _ = owning(P)
    state = ownership.states[P]
    ownership.reached_end(P, 12)
    assert [(a.expected, a.next_offset, a.leader_epoch) for a in ownership.at_end()] == [(0, 12, None)]
    state.position = 10
    assert ownership.at_end() == [], "messages were fetched that no unit was given"
    advances = ownership.hand_out({P: Span(0, 10, 3)})
    assert ownership.at_end() == []
    ownership.committed(advances)
    assert [(a.expected, a.next_offset) for a in ownership.at_end()] == [(10, 12)]
    ownership.moved_to_end(ownership.at_end())
    assert (state.next_offset, state.in_flight_until, state.position) == (12, 12, 12)
    assert ownership.at_end() == []


def test_a_move_to_the_end_does_not_pass_over_what_was_fetched_meanwhile() -> None:
    """The client goes on behind that: set back to the end, the position would have it lost as a gap of the log."""
    ownership, _ = owning(P)
    ownership.reached_end(P, 12)
    moves = ownership.at_end()
    state = ownership.states[P]
    state.position = 14
    ownership.moved_to_end(moves)
    assert (state.next_offset, state.in_flight_until, state.position) == (0, 0, 14)


def _place_again(ownership: Ownership) -> None:
    ownership.invalidate_all()
    ownership.positioned([P])


@pytest.mark.parametrize(
    "change",
    [
        Ownership.invalidate_all,
        _place_again,
        lambda ownership: ownership.unreadable(P, "damaged"),
        lambda ownership: ownership.rejected(P, ValueError()),
        lambda ownership: ownership.seen([P], []),
    ],
)
def test_the_end_of_a_log_is_forgotten_with_the_position_it_was_met_at(change: Callable[[Ownership], object]) -> None:
    ownership, _ = owning(P)
    ownership.reached_end(P, 12)
    change(ownership)
    assert ownership.at_end() == []
    ownership.revoked([P])
    assert ownership.last_ends == []


def test_what_was_logged_of_a_bad_partition_outlives_retries_and_ends_with_its_row_or_assignment() -> None:
    ownership, rows = owning(P)
    ownership.rejected(P, ValueError())
    report = ownership.states[P].report = Report(ValueError(), 30.0, 30.0)
    ownership.retried([P])
    assert ownership.states[P].report is report, "or the same error is logged at each try"
    ownership.acquired([replace(rows[P], owner_token=uuid4())])
    ownership.not_started([P])
    assert ownership.states[P].report is report
    ownership.rejected(P, ValueError())
    ownership.seen([P], [replace(rows[P], owner_epoch=2, next_offset=3)])
    assert ownership.states[P].report is None
    ownership.states[P].report = report
    ownership.assigned([P])
    assert ownership.states[P].report is None


def test_a_suspect_ends_with_the_position_it_was_found_at() -> None:
    ownership, _ = owning(P)
    ownership.suspect(Q, "not ours")
    ownership.suspect(P, "offset out of range")
    assert list(ownership.suspects()) == [P]
    ownership.invalidate_all()
    assert not ownership.suspects()
    ownership.suspect(P, "of before")
    assert not ownership.suspects(), "the client is not positioned"


def test_what_is_to_be_mirrored_goes_with_the_row() -> None:
    ownership, rows = owning(P, Q)
    ownership.committed(ownership.hand_out({P: Span(0, 3, 1), Q: Span(0, 3, 1)}))
    assert all(state.is_to_mirror for state in ownership.states.values())
    ownership.seen([P], [replace(rows[P], next_offset=3, owner_token=uuid4(), owner_epoch=2)])
    ownership.assigned([Q])
    assert not any(state.is_to_mirror for state in ownership.states.values()), "somebody else may have told Kafka more"


def test_a_resolution_that_was_interrupted_is_repeated_under_every_token_that_was_tried() -> None:
    ownership, rows, advances = in_doubt(P)
    first, second = uuid4(), uuid4()
    tokens = [advances[0].token, first]
    ownership.resolved(advances, tokens, [replace(rows[P], next_offset=10, owner_token=first)])
    tokens.append(second)
    landed = replace(rows[P], next_offset=10, owner_token=second)
    assert ownership.resolved(advances, tokens, [landed]) is Resolution.COMMITTED
    assert (ownership.states[P].next_offset, ownership.states[P].token) == (10, second)
    assert ownership.releases == [], "a row that is read on from is not given back"


def test_a_partition_that_is_given_back_at_its_end_leaves_the_move_to_be_made() -> None:
    ownership, rows = owning(P)
    ownership.reached_end(P, 12)
    ownership.revoked([P])
    assert [(a.token, a.expected, a.next_offset) for a in ownership.last_ends] == [(rows[P].owner_token, 0, 12)]


def test_a_bad_partition_is_released_and_waits_for_its_row_to_change() -> None:
    ownership, rows = owning(P, Q)
    ownership.rejected(P, ValueError("bad"))
    assert (ownership.bad(), ownership.to_acquire(), ownership.owned()) == ([P], [], [Q])
    assert ownership.releases == [(P, rows[P].owner_token)]
    assert not ownership.to_position()
    released = replace(rows[P], owner_token=None)
    assert ownership.suspicious([P, Q], [released, rows[Q]]) == []
    for changed in ({"owner_epoch": 2}, {"next_offset": 7}, {"halted": "why"}, {"topic_id": "other"}):
        assert ownership.suspicious([P, Q], [replace(released, **changed), rows[Q]]) == [P]
    assert ownership.suspicious([P, Q], [rows[Q]]) == [P], "the row was deleted"
    assert ownership.seen([P, Q], [replace(released, next_offset=7), rows[Q]]) == {}
    assert ownership.to_confirm() == [P], "somebody else may own it by now"


def test_a_bad_partition_without_a_row_waits_for_one() -> None:
    ownership = Ownership()
    ownership.assigned([P])
    ownership.rejected(P, ValueError("there is no row"))
    assert ownership.suspicious([P], []) == []
    assert ownership.suspicious([P], [row(P)]) == [P]


def test_a_row_that_was_taken_while_it_was_checked_needs_a_proof() -> None:
    ownership = Ownership()
    ownership.assigned([P])
    ownership.acquired([row(P)])
    ownership.taken([P])
    assert (ownership.to_confirm(), ownership.to_acquire()) == ([P], [])


def test_a_move_to_the_end_that_got_no_answer_is_no_surprise() -> None:
    ownership, rows = owning(P)
    ownership.reached_end(P, 12)
    moved = replace(rows[P], next_offset=12, leader_epoch=4)
    assert ownership.suspicious([P], [moved]) == [P]
    assert ownership.seen([P], [moved]) == {}
    assert (ownership.states[P].next_offset, ownership.states[P].leader_epoch) == (12, 4)
    assert ownership.deliverable(P) is not None, "nothing is fetched again"


class AnyOrder(RuleBasedStateMachine):
    """Kafka, the ledger and units in any order. The ledger is exact; only what we know of it may lag."""

    partitions = st.lists(st.sampled_from(PARTITIONS), unique=True, max_size=3)
    some = st.lists(st.sampled_from(PARTITIONS), unique=True, min_size=1, max_size=3)

    def __init__(self) -> None:
        super().__init__()
        self.ownership = Ownership()
        self.rows = {p: Row(partition=p, next_offset=0, owner_epoch=0) for p in PARTITIONS}
        self.unit: list[Advance] = []
        self.ours: dict[UUID, Partition] = {}
        self.released: list[UUID] = []

    @precondition(lambda self: not self.unit)
    @rule(partitions=some)
    def flow(self, partitions: list[Partition]) -> None:
        """The usual way in one step, or random steps would hardly ever get that far."""
        self.ownership.assigned([p for p in partitions if p not in self.ownership.states])
        self.check_membership()
        self.acquire([])
        self.start(PARTITIONS, works=True)
        self.place()

    @rule(partitions=partitions)
    def assign(self, partitions: list[Partition]) -> None:
        self.ownership.assigned(partitions)
        assert set(partitions) <= set(self.ownership.to_acquire())

    @rule(partitions=partitions)
    def revoke(self, partitions: list[Partition]) -> None:
        self.ownership.revoked(partitions)
        assert not set(partitions) & set(self.ownership.states)

    @rule(late=partitions)
    def acquire(self, late: list[Partition]) -> None:
        """``late`` partitions were revoked while the answer was under way."""
        pending = self.ownership.to_acquire()
        rows = [self._taken(p, uuid4()) for p in pending]
        self.ours |= {r.owner_token: r.partition for r in rows if r.owner_token}
        self.ownership.revoked(late)
        self.ownership.acquired(rows)

    @rule(partitions=some, works=st.booleans())
    def start(self, partitions: list[Partition], *, works: bool) -> None:
        starting = [p for p in partitions if self._is(p, Phase.STARTING)]
        for partition in starting if works else []:
            self.ownership.started(partition, self.rows[partition])
        self.ownership.not_started(starting)
        assert not any(self._is(p, Phase.STARTING) for p in starting)

    @rule()
    def check_membership(self) -> None:
        fenced = self.ownership.to_confirm()
        self.ownership.confirmed([*fenced, *PARTITIONS])
        assert self.ownership.to_confirm() == []
        assert set(fenced) <= set(self.ownership.to_acquire())

    @rule(partitions=some)
    def steal(self, partitions: list[Partition]) -> None:
        """Another member acquires rows and applies something."""
        for partition in partitions:
            taken = self._taken(partition, uuid4())
            self.rows[partition] = replace(taken, next_offset=(taken.next_offset or 0) + 2)

    @precondition(lambda self: not self.unit)
    @rule()
    def place(self) -> None:
        targets = self.ownership.to_position()
        self.ownership.positioned(targets)
        assert self.ownership.to_position() == {}

    @precondition(lambda self: not self.unit)
    @rule()
    def distrust(self) -> None:
        self.ownership.invalidate_all()

    @precondition(lambda self: not self.unit)
    @rule(length=st.integers(1, 3), partitions=some)
    def hand_out(self, length: int, partitions: list[Partition]) -> None:
        self.flow(partitions)
        spans: dict[Partition, Span] = {}
        for partition in partitions:
            state = self.ownership.deliverable(partition)
            if state is not None:
                state.position = max(state.position, state.next_offset + length)
                spans[partition] = Span(state.next_offset, state.next_offset + length, None)
        self.unit = self.ownership.hand_out(spans)

    @precondition(lambda self: self.unit)
    @rule(landed=st.booleans())
    def know_the_outcome(self, *, landed: bool) -> None:
        if landed and self._advance():
            self.ownership.committed(self.unit)
        else:
            self.ownership.aborted(self.unit)
        self.unit = []

    @precondition(lambda self: self.unit)
    @rule()
    def come_short(self) -> None:
        if not all(conflict_of(a, self.rows[a.partition]) is Conflict.OK for a in self.unit):
            conflicts = self.ownership.classify(self.unit, self.rows.values())
            assert set(conflicts) == {a.partition for a in self.unit}
            self.unit = []

    @precondition(lambda self: self.unit)
    @rule(landed=st.booleans(), revoked=partitions)
    def resolve(self, revoked: list[Partition], *, landed: bool) -> None:
        tokens = [a.token for a in self.unit]
        did_land = landed and self._advance()
        self.ownership.revoked(revoked)
        fresh = uuid4()
        found = [a.partition for a in self.unit if self.rows[a.partition].owner_token in tokens]
        for partition in found:
            self.rows[partition] = replace(self.rows[partition], owner_token=fresh)
        self.ours[fresh] = self.unit[0].partition
        resolution = self.ownership.resolved(self.unit, [*tokens, fresh], [self.rows[p] for p in found])
        if found:
            assert resolution is (Resolution.COMMITTED if did_land else Resolution.ABORTED)
        else:
            assert resolution is Resolution.FENCED
        self.unit = []

    @precondition(lambda self: not self.unit)
    @rule()
    def look(self) -> None:
        self.ownership.seen(PARTITIONS, self.rows.values())

    @rule()
    def release(self) -> None:
        releases, self.ownership.releases = self.ownership.releases, []
        for partition, token in releases:
            held = self.ownership.states.get(partition)
            assert held is None or held.token != token, "what is held is not given back"
            self.released.append(token)
            if self.rows[partition].owner_token == token:
                self.rows[partition] = replace(self.rows[partition], owner_token=None)

    @invariant()
    def offsets_are_in_order_where_messages_flow(self) -> None:
        for partition in PARTITIONS:
            state = self.ownership.deliverable(partition)
            if state is not None:
                assert 0 <= state.next_offset <= state.in_flight_until <= state.position

    @invariant()
    def whoever_still_has_the_token_knows_the_offset(self) -> None:
        for partition, state in self.ownership.states.items():
            stored = self.rows[partition]
            if state.phase is Phase.OWNED and stored.owner_token == state.token and not self.unit:
                assert state.next_offset == state.in_flight_until == stored.next_offset

    @invariant()
    def a_token_is_where_it_belongs_and_nowhere_else(self) -> None:
        for state in self.ownership.states.values():
            assert (state.token is not None) is (state.phase in (Phase.STARTING, Phase.OWNED))
        kept = [(p, h.token) for p, h in self.ownership.states.items() if h.token] + self.ownership.releases
        assert len(kept) == len(set(kept)), "nothing is released twice, nor while it is held"

    @invariant()
    def every_holding_has_something_to_be_done_next(self) -> None:
        """No state is a dead end: each is in one of the lists, or its messages flow."""
        for partition, state in self.ownership.states.items():
            next_steps = [
                partition in self.ownership.to_acquire(),
                partition in self.ownership.to_confirm(),
                partition in self.ownership.to_position(),
                state.phase is Phase.STARTING,
                self.ownership.deliverable(partition) is not None,
            ]
            assert sum(next_steps) == 1

    def teardown(self) -> None:
        """The right events lead from anywhere to where messages flow, and from there to nothing."""
        self.ownership.aborted(self.unit)
        self.unit = []
        self.start(PARTITIONS, works=True)
        self.look()
        self.check_membership()
        self.acquire([])
        self.start(PARTITIONS, works=True)
        self.place()
        assert all(self.ownership.deliverable(p) for p in self.ownership.states)
        self.ownership.revoked(PARTITIONS)
        self.release()
        assert not any(r.owner_token in self.ours for r in self.rows.values()), "all that was ours is given back"

    def _is(self, partition: Partition, phase: Phase) -> bool:
        state = self.ownership.states.get(partition)
        return state is not None and state.phase is phase

    def _taken(self, partition: Partition, token: UUID) -> Row:
        stored = self.rows[partition]
        self.rows[partition] = replace(stored, owner_epoch=stored.owner_epoch + 1, owner_token=token)
        return self.rows[partition]

    def _advance(self) -> bool:
        """Do what the server does with the unit: all of it or nothing."""
        if not all(conflict_of(a, self.rows[a.partition]) is Conflict.OK for a in self.unit):
            return False
        for a in self.unit:
            self.rows[a.partition] = replace(self.rows[a.partition], next_offset=a.next_offset)
        return True


AnyOrder.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase


# What a signal handler may cut short.


def told_by_kafka(ownership: Ownership) -> None:
    ownership.revoked([Q])
    ownership.assigned([Q])


def told_by_the_ledger(ownership: Ownership) -> None:
    ownership.seen([P], [row(P, 7)])
    ownership.confirmed([P])
    rows = [row(P, 7), row(Q, 3)]
    ownership.acquired(rows)
    ownership.rejected(P, ValueError("it cannot be read"), rows[0])
    ownership.started(Q, rows[1])
    ownership.not_started([P, Q])
    ownership.positioned(ownership.to_position())
    ownership.retried([P])
    ownership.acquired([row(P, 9)])
    ownership.not_started([P])


@pytest.mark.parametrize("change", [told_by_kafka, told_by_the_ledger])
def test_a_partition_is_left_to_nobody_by_an_interrupt_at_any_line(change: Callable[[Ownership], None]) -> None:
    for line in itertools.count(1):
        ownership, _ = owning(P, Q)
        interrupter = Interrupter()
        with contextlib.suppress(Interrupt), interrupter.after(line):
            change(ownership)
        if not interrupter.where:
            break
        if change is told_by_kafka:
            ownership.assigned([Q])  # an event stays until it was applied to its end
        ownership.invalidate_all()
        expected = {*ownership.to_acquire(), *ownership.to_confirm(), *ownership.to_position(), *ownership.bad()}
        assert expected == {P, Q}, interrupter.where
    assert line > 10, "interrupts at too few lines to mean anything"


def test_no_partition_is_owned_without_an_offset_after_an_interrupt_at_any_line() -> None:
    """-1 is the end of the log to the client: what is in it would be passed over."""
    for line in range(1, 100):
        ownership, interrupter = Ownership(), Interrupter()
        ownership.assigned([P])
        acquired = row(P, 5, token=uuid4())
        ownership.acquired([acquired])
        with contextlib.suppress(Interrupt), interrupter.after(line):
            ownership.started(P, acquired)
        if not interrupter.where:
            break
        ownership.invalidate_all()
        state = ownership.states[P]
        assert state.phase is Phase.PENDING or (state.phase is Phase.OWNED and state.next_offset == 5), line
    assert line > 5, "interrupts at too few lines to mean anything"


def test_rows_are_rotated_by_their_first_unit_and_by_each_256th_from_there() -> None:
    """All of a unit, where it is one's turn; what did not land does not count, and what is read is believed."""
    ownership = Ownership()
    other = Partition("a", 1)
    ownership.assigned([P, other])
    rows = {p: replace(row(p, 0), generation=7) for p in (P, other)}
    ownership.acquired(rows.values())
    for p, acquired in rows.items():
        ownership.started(p, acquired)
    ownership.positioned(rows)

    def unit(*partitions: Partition) -> list[Advance]:
        expected = {p: ownership.states[p].next_offset for p in partitions}
        return ownership.hand_out({p: Span(offset, offset + 1, 0) for p, offset in expected.items()})

    for _ in range(2):
        advances = unit(P)
        assert [(a.generation, a.rotates) for a in advances] == [(7, True)]
        ownership.aborted(advances)
    ownership.committed(unit(P))
    for _ in range(255):
        advances = unit(P)
        assert [(a.generation, a.rotates) for a in advances] == [(8, False)]
        ownership.committed(advances)
    advances = unit(P)
    assert [(a.generation, a.rotates) for a in advances] == [(8, True)]
    landed = replace(rows[P], next_offset=advances[0].next_offset, generation=9, owner_token=uuid4())
    assert resolved(ownership, advances, [landed]) is Resolution.COMMITTED
    advances = unit(P, other)
    assert [(a.partition, a.generation, a.rotates) for a in advances] == [(P, 9, False), (other, 7, True)]
    ownership.committed(advances)
    assert [(a.generation, a.rotates) for a in unit(P, other)] == [(10, False), (8, False)]
