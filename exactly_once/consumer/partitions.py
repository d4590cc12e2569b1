"""Ownership: what this member may do with each partition. A pure state machine, no I/O.

Events come in as method calls; :attr:`Ownership.releases` and the ``to_…`` methods say what has to
be done next. The consumer's loop does it, and so does the simulator of the tests.

    assigned ──> PENDING ──acquired──> STARTING ──started──> OWNED ─(positioned)─> messages flow
                    ^                      │                   │
                    └────confirmed───── FENCED <───fenced──────┘
                                          ^
             found unreadable ──> BAD ────┘ when its row was changed
    revoked or lost: forgotten from any state, its row is released
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID

from exactly_once._model import ROTATE_EVERY, Advance, Partition, Row, Span
from exactly_once.ledger.conflict import Conflict, Grant, check


class Phase(Enum):
    """How far this member has come with a partition that Kafka assigned to it."""

    PENDING = "assigned by Kafka, not acquired in the ledger"
    STARTING = "acquired, its starting offset is being checked"
    OWNED = "acquired and checked"
    FENCED = "somebody else acquired it; Kafka must confirm our membership first"
    BAD = "it cannot be read until somebody mends it"


class Left(NamedTuple):
    """What of a row tells that an operator has changed it."""

    epoch: int
    next_offset: int | None
    topic_id: str | None
    is_halted: bool


@dataclass(slots=True)
class Report:
    """What was logged of a bad partition, and when to log it again."""

    error: Exception
    pause_seconds: float
    again_at: float


@dataclass(slots=True)
class PartitionState:
    """All that this member keeps of one partition that Kafka assigned to it.

    Every assignment and every new try to acquire makes a new object, so nothing of an earlier one is believed; only
    ``report`` and ``stop_at`` go from one try to the next. A unit starts only where ``next_offset`` and
    ``in_flight_until`` agree.
    """

    phase: Phase = Phase.PENDING

    # The row, as it was acquired or as a commit of ours has left it. Written by Ownership alone; without a token it is
    # somebody else's, and none of it counts.
    token: UUID | None = None
    epoch: int = 0
    generation: int = 0
    """The row's, as it was read last or as a rotation of ours has left it."""
    advances: int = ROTATE_EVERY
    """How often the row was advanced since it was rotated. Those of earlier owners are not known: our first rotates."""
    topic_id: str | None = None
    cluster_id: str | None = None
    leader_epoch: int | None = None
    """That of the last applied message."""
    next_offset: int = -1
    """The ledger's offset: everything below it is applied."""
    was_advanced: bool = False
    """Whether anything was applied when the row was acquired."""
    previous_instance: UUID | None = None
    """Who had the row and did not release it: a process that may stand still with locks of rows that we need."""

    # Where the client is. Written by Ownership when the client is positioned, and by the buffer with each fetch. Valid
    # while ``positioned``; :meth:`invalidate` ends that.
    positioned: bool = False
    """Whether the client fetches this partition, from ``position``."""
    in_flight_until: int = -1
    """The end of what units were given."""
    position: int = -1
    """The end of what the client delivered."""
    log_end: int = -1
    """Where the client met the end of the log since it was positioned, or -1."""
    log_ended_at: float = 0.0
    """When it did, on the monotonic clock."""
    hidden: tuple[int, float] | None = None
    """At which end of the log for us it holds more, in a transaction that is open or behind it; seen since when."""
    is_hidden_told: bool = False
    """Whether such a transaction was logged."""
    gaps: dict[int, int] = field(default_factory=dict)
    """Where the log has gaps in what was fetched and not committed: the offset after each, and the one before it."""
    unreadable: str | None = None
    """Why the client cannot read on behind ``position``; what it delivers all the same is dropped."""
    suspect: str | None = None
    """Why the client could not read at its offset; maintenance finds out what is wrong with it."""

    last_applied: int | None = None
    """The offset after the message that was applied last, if that was since the offset was read from the ledger."""
    is_to_mirror: bool = False
    """Whether ``next_offset`` is to be committed to Kafka: set by commits, cleared once it is sent or the row lost."""
    compared_epoch: int = -1
    """The owner epoch under which the ledger was compared with what Kafka holds: a new owner compares anew."""
    checked_at: int | None = None
    """Where the partition stood when the id of its topic was last found to be the right one."""
    stop_at: int | None = None
    """Where the log ended when an iteration with ``until_end`` asked; each iteration asks anew."""

    error: Exception | None = None
    """Why a partition in the state BAD is there."""
    left: Left | None = None
    """How the row of a partition in the state BAD looked, or None where there was no row."""
    report: Report | None = None
    """What was logged of it while it was BAD. Survives retries, so that the same error is not logged at each; ends when
    the row is changed or the partition is assigned anew."""

    def invalidate(self) -> None:
        """Distrust all that is known of the client's position: it is positioned again before anything is delivered."""
        self.positioned, self.log_end, self.suspect = False, -1, None

    @property
    def read(self) -> int:
        """Up to where the client has read the log."""
        return max(self.position, self.log_end)

    @property
    def applied(self) -> int:
        """Up to where the log is applied: transactional and compacted ones end in offsets without messages."""
        return max(self.next_offset, self.log_end) if self.next_offset == self.position else self.next_offset

    def count_advance(self, generation: int) -> None:
        """Take note that the row was advanced and is of this generation now."""
        self.advances = 1 if generation != self.generation else self.advances + 1
        self.generation = generation

    @property
    def is_at_end(self) -> bool:
        """Whether the ledger may move on to the end of the log, behind offsets that hold no message for us."""
        return (
            self.phase is Phase.OWNED
            and self.positioned
            and self.unreadable is None
            and self.applied > self.next_offset
        )


class Resolution(Enum):
    """What became of a unit that was in doubt."""

    COMMITTED = "it had committed"
    ABORTED = "it will never commit"
    FENCED = "the rows belong to somebody else by now"


class Ownership:
    """The partitions of one member, what it keeps of each, and what must be done next."""

    def __init__(self) -> None:
        self.states: dict[Partition, PartitionState] = {}  # what Kafka has assigned to us, and not taken away
        # Rows to be given back, by the token that they were ours under.
        self.releases: list[tuple[Partition, UUID]] = []
        # Moves to the end of the log of partitions that are to be released; to be made before that.
        self.last_ends: list[Advance] = []
        # Whether anything in the ``to_…`` methods or :attr:`releases` may have to be done, or a partition be examined.
        self.has_changed = True
        # Whether no :meth:`changing` was cut short; :meth:`invalidate_all` makes it sound again.
        self.is_sound = True

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Enclose a change of positions. An exception in it, of a signal handler say, leaves them unsound."""
        before, self.is_sound = self.is_sound, False
        yield
        self.is_sound = before

    @property
    def is_accounted(self) -> bool:
        """Whether it is known of every unit what became of it."""
        return all(h.in_flight_until == h.next_offset for h in self.states.values() if h.positioned)

    # What Kafka reports.

    def assigned(self, partitions: Iterable[Partition]) -> None:
        """Take note of new partitions; they are pending until their rows are acquired."""
        for partition in partitions:
            self._replace(partition, PartitionState())

    def revoked(self, partitions: Iterable[Partition]) -> None:
        """Forget partitions that were revoked or lost; their rows are to be released."""
        for partition in partitions:
            self._let_go(partition, self.states.pop(partition, None))

    # What the ledger has.

    def acquired(self, rows: Iterable[Row]) -> None:
        """Take note of rows that are ours now. They are not read from before :meth:`started`."""
        for row in rows:
            state = self.states.get(row.partition)
            if state is None:
                assert row.owner_token is not None
                self.releases.append((row.partition, row.owner_token))
                continue
            state.phase = Phase.STARTING
            state.token, state.epoch = row.owner_token, row.owner_epoch
            state.previous_instance, state.was_advanced = row.previous_instance, row.advanced_seconds_ago is not None
            state.invalidate()

    def started(self, partition: Partition, row: Row) -> None:
        """Own a partition whose row was checked and has an offset."""
        state = self.states.get(partition)
        if state is None or state.token != row.owner_token or row.next_offset is None:
            return
        state.topic_id, state.cluster_id = row.topic_id, row.cluster_id
        self._go_to(state, row)
        # Last: one that an interrupt had left owned without an offset would be read from the end of its log.
        state.phase = Phase.OWNED

    def not_started(self, partitions: Iterable[Partition]) -> None:
        """Give back what was acquired and cannot be started; it is pending again."""
        for partition, state in self._of(partitions, Phase.STARTING):
            self._replace(partition, _again(state))

    def confirmed(self, partitions: Iterable[Partition]) -> None:
        """Allow fenced partitions to be acquired again: Kafka still counts us as their member."""
        for _, state in self._of(partitions, Phase.FENCED):
            state.phase = Phase.PENDING

    def taken(self, partitions: Iterable[Partition]) -> None:
        """Take note of rows that somebody took from us while they were checked."""
        for _, state in self._of(partitions, Phase.STARTING):
            self._fence(state)

    def rejected(self, partition: Partition, error: Exception, row: Row | None = None) -> None:
        """Stop reading one partition, whose row is to be released, until that row is changed.

        ``row`` is what was acquired; without it the row is as it was left, or there is none.
        """
        state = self.states.get(partition)
        if state is None:
            return
        left = _left(row) if row is not None else None
        if left is None and state.phase is Phase.OWNED:
            left = Left(state.epoch, state.next_offset, state.topic_id, is_halted=False)
        state.invalidate()
        self._replace(partition, _again(state, phase=Phase.BAD, error=error, left=left))

    def retried(self, partitions: Iterable[Partition]) -> None:
        """Acquire bad partitions again, in spite of their error."""
        for partition, state in self._of(partitions, Phase.BAD):
            self._replace(partition, _again(state))

    # What the client did.

    def reached_end(self, partition: Partition, offset: int, now: float = 0.0) -> None:
        """Take note that the client met the end of the log, after all messages before it."""
        state = self.deliverable(partition)
        if state is not None and state.unreadable is None:
            state.log_end, state.log_ended_at = offset, now

    def suspect(self, partition: Partition, reason: str) -> None:
        """Take note that the client could not read on at its offset, for a reason that is still to be found."""
        state = self.deliverable(partition)
        if state is not None:
            state.suspect, self.has_changed = reason, True

    def unreadable(self, partition: Partition, reason: str) -> None:
        """Take note that the client cannot read on; what was fetched before is applied."""
        state = self.deliverable(partition)
        if state is not None and state.unreadable is None:
            state.unreadable, self.has_changed = reason, True

    def positioned(self, partitions: Iterable[Partition]) -> None:
        """Take note that the client now fetches from the expected offset."""
        for partition in partitions:
            state = self.states[partition]
            state.invalidate()
            state.in_flight_until = state.position = state.checked_at = state.next_offset
            state.unreadable = None
            state.gaps.clear()
            state.positioned = True

    def invalidate_all(self) -> None:
        """Distrust every position of the client, after an exception out of poll or consume, or between two lines."""
        self.has_changed = True
        for state in self.states.values():
            state.invalidate()
        # Nobody goes on with a start that was cut short: what was acquired for it is acquired again.
        self.not_started(list(self.states))
        self.is_sound = True

    # What becomes of units.

    def hand_out(self, spans: Mapping[Partition, Span]) -> list[Advance]:
        """Give a batch, which has these spans, to a unit.

        :raises AssertionError: when an earlier unit of a partition was not accounted for, or when the batch does not
            begin with the first message that was not applied yet.
        """
        advances = []
        for partition in sorted(spans):
            state, (begin, end, leader_epoch) = self.states[partition], spans[partition]
            assert state.phase is Phase.OWNED and state.token is not None, partition
            is_next = state.gaps.get(begin, begin) <= state.next_offset <= begin < end
            if state.in_flight_until != state.next_offset or not is_next:
                # Not by assert: python -O must not lose messages.
                raise AssertionError((partition, state, spans[partition]))
            state.in_flight_until = end
            advances.append(_advance(partition, state, end, leader_epoch, after=state.last_applied))
        return advances

    def committed(self, advances: Sequence[Advance]) -> None:
        """Move on: the unit and its offsets are durable."""
        generations = _generations(advances)
        for advance, state in self._held(advances):
            self._move_on(state, advance, generations[advance.partition])

    def moved_to_end(self, advances: Sequence[Advance]) -> None:
        """Move on to the end of the log, which no unit was needed for."""
        generations = _generations(advances)
        for advance, state in self._held(advances):
            if state.position == advance.expected:
                state.next_offset = state.in_flight_until = state.position = advance.next_offset
                state.leader_epoch, state.is_to_mirror = advance.leader_epoch, True
                state.count_advance(generations[advance.partition])

    def doubted(self, advances: Iterable[Advance]) -> None:
        """Acquire again what was to be moved to its end. The answer is lacking: it may have committed, or may yet."""
        for advance, state in self._held(advances):
            self._replace(advance.partition, _again(state))

    def aborted(self, advances: Iterable[Advance]) -> None:
        """Take back what a unit was given: it will never commit."""
        for _, state in self._held(advances):
            state.in_flight_until = state.next_offset

    def resolved(self, advances: Iterable[Advance], tokens: Container[UUID], rows: Iterable[Row]) -> Resolution:
        """Read the outcome of a unit from its rows, acquired under a fresh token.

        ``tokens`` are all under which that was tried, so that a call that was interrupted can be repeated.
        """
        found = {row.partition: row for row in rows}
        resolution = Resolution.FENCED
        for advance in advances:
            row, state = found.get(advance.partition), self.states.get(advance.partition)
            if state is not None and state.token not in tokens:
                state = None  # a newer one of the partition, which the unit does not touch
            if row is None:
                self._fence(state)
                continue
            landed = row.next_offset == advance.next_offset
            resolution = Resolution.COMMITTED if landed else Resolution.ABORTED
            if state is None:
                assert row.owner_token is not None
                self.releases.append((row.partition, row.owner_token))
                continue
            state.token = row.owner_token
            if landed:
                self._move_on(state, advance, row.generation)
            elif row.next_offset == advance.expected:
                state.in_flight_until = state.next_offset
            else:
                self._go_to(state, row)
        return resolution

    def classify(self, advances: Iterable[Advance], rows: Iterable[Row]) -> dict[Partition, Conflict]:
        """Say for each partition of a short advance what is wrong, and act on it."""
        found = {row.partition: row for row in rows}
        conflicts = {}
        for advance in advances:
            row = found.get(advance.partition)
            conflict = conflicts[advance.partition] = check(
                row, Grant(advance.token, advance.epoch), advance.expected, advance.topic_id
            )
            for _, state in self._held([advance]):
                state.in_flight_until = state.next_offset
                if conflict is Conflict.OK and row is not None:
                    state.generation = row.generation
                elif conflict in (Conflict.AHEAD, Conflict.REWOUND) and row is not None:
                    self._go_to(state, row)
                else:
                    self._fence(state)  # where it is missing, or of another topic, acquiring it tells so
        return conflicts

    def suspicious(self, partitions: Iterable[Partition], rows: Iterable[Row]) -> list[Partition]:
        """Return the partitions whose rows, read without a lock, seem not to be as they were left."""
        found = {row.partition: row for row in rows}
        return sorted(
            p for p in partitions if (h := self.states.get(p)) is not None and not _is_as_left(h, found.get(p))
        )

    def seen(self, partitions: Iterable[Partition], rows: Iterable[Row]) -> dict[Partition, Conflict]:
        """Compare rows that were read under lock between units: a reset or a failover shows here first.

        Act on what is wrong and return it.
        """
        found = {row.partition: row for row in rows}
        conflicts = {}
        for partition in partitions:
            row, state = found.get(partition), self.states.get(partition)
            if state is None or _is_as_left(state, row):
                continue
            if state.phase is Phase.BAD:
                state.report = None
                self._fence(state)
            elif (conflict := _compare(state, row)) is Conflict.FENCED or row is None:
                conflicts[partition] = conflict
                self._fence(state)
            elif state.is_at_end and row.next_offset == state.applied:
                # Our own move to the end of the log, of which no answer came.
                state.next_offset = state.in_flight_until = state.position = state.applied
                state.leader_epoch = row.leader_epoch
                state.count_advance(row.generation)
            else:
                conflicts[partition] = conflict
                self._go_to(state, row)
        return conflicts

    # What to do next.

    def to_acquire(self) -> list[Partition]:
        """Return the partitions whose rows must be acquired, in locking order."""
        return self._in_phase(Phase.PENDING)

    def to_confirm(self) -> list[Partition]:
        """Return the partitions for which membership must be confirmed before they are acquired."""
        return self._in_phase(Phase.FENCED)

    def to_position(self) -> dict[Partition, PartitionState]:
        """Return what the client must fetch, or fetch from elsewhere."""
        return {p: h for p, h in self.states.items() if h.phase is Phase.OWNED and not h.positioned}

    def owned(self) -> list[Partition]:
        """Return the partitions that are acquired and checked, in locking order."""
        return self._in_phase(Phase.OWNED)

    def suspects(self) -> dict[Partition, PartitionState]:
        """Return the partitions that the client could not read, for a reason that is still to be found."""
        return {p: h for p, h in self.states.items() if h.suspect is not None}

    def bad(self) -> list[Partition]:
        """Return the partitions that cannot be read until somebody mends them."""
        return self._in_phase(Phase.BAD)

    def at_end(self) -> list[Advance]:
        """Return the moves to the end of the log that are left to be made."""
        return [_advance(p, h, h.applied, None) for p, h in sorted(self.states.items()) if h.is_at_end]

    def deliverable(self, partition: Partition) -> PartitionState | None:
        """Return the state if messages of this partition may be handed to units now."""
        state = self.states.get(partition)
        return state if state is not None and state.phase is Phase.OWNED and state.positioned else None

    def tokens(self) -> list[tuple[Partition, UUID]]:
        """Return all that is ours in the ledger, for a release at the end."""
        held = [(p, h.token) for p, h in self.states.items() if h.token is not None]
        return sorted(held + self.releases)

    def _in_phase(self, phase: Phase) -> list[Partition]:
        return sorted(p for p, h in self.states.items() if h.phase is phase)

    def _replace(self, partition: Partition, new: PartitionState) -> None:
        """Begin anew with a partition. In one step: one that an exception left without a state is read by nobody."""
        old, self.states[partition] = self.states.get(partition), new
        self._let_go(partition, old)

    def _let_go(self, partition: Partition, state: PartitionState | None) -> None:
        self.has_changed = True
        if state is not None and state.token is not None:
            if state.is_at_end:
                self.last_ends.append(_advance(partition, state, state.applied, None))
            self.releases.append((partition, state.token))

    def _held(self, advances: Iterable[Advance]) -> Iterator[tuple[Advance, PartitionState]]:
        """Find the states under which the unit began; a newer one of a partition does not count."""
        for advance in advances:
            state = self.states.get(advance.partition)
            if state is not None and state.token == advance.token:
                yield advance, state

    def _of(self, partitions: Iterable[Partition], phase: Phase) -> Iterator[tuple[Partition, PartitionState]]:
        for partition in partitions:
            state = self.states.get(partition)
            if state is not None and state.phase is phase:
                yield partition, state

    def _fence(self, state: PartitionState | None) -> None:
        self.has_changed = True
        if state is not None:
            state.invalidate()
            state.phase, state.token, state.is_to_mirror = Phase.FENCED, None, False
            state.error = state.left = None

    def _move_on(self, state: PartitionState, advance: Advance, generation: int) -> None:
        state.count_advance(generation)
        state.next_offset = state.last_applied = advance.next_offset
        state.leader_epoch, state.is_to_mirror = advance.leader_epoch, True
        if state.gaps:
            state.gaps = {after: before for after, before in state.gaps.items() if after >= advance.next_offset}

    def _go_to(self, state: PartitionState, row: Row) -> None:
        if row.owner_token != state.token:
            self._fence(state)  # a failover lost the acquisition, too
            return
        self.has_changed = True
        state.invalidate()
        if row.next_offset is None:
            # A failover lost the chosen start: acquire and choose again.
            state.phase, state.token = Phase.PENDING, None
            return
        state.next_offset = state.in_flight_until = state.position = row.next_offset
        state.generation, state.leader_epoch, state.last_applied = row.generation, row.leader_epoch, None


def _is_as_left(state: PartitionState, row: Row | None) -> bool:
    """Compare a row with what this member knows of it; what is being acquired is not compared."""
    if state.phase is Phase.BAD:
        return (None if row is None else _left(row)) == state.left
    return state.phase is not Phase.OWNED or _compare(state, row) is Conflict.OK


def _compare(state: PartitionState, row: Row | None) -> Conflict:
    """Compare a row with what this member left; which topic it is of is found out where topics are asked for."""
    assert state.token is not None
    return check(row, Grant(state.token, state.epoch), state.next_offset, None if row is None else row.topic_id)


def _left(row: Row) -> Left:
    return Left(row.owner_epoch, row.next_offset, row.topic_id, row.halted is not None)


def _again(state: PartitionState, **known: Any) -> PartitionState:
    """Begin anew, with what goes from one try to the next."""
    return PartitionState(report=state.report, stop_at=state.stop_at, **known)


def _advance(
    partition: Partition, state: PartitionState, next_offset: int, leader_epoch: int | None, *, after: int | None = None
) -> Advance:
    """Make the move of a unit, or to the end of the log: the leader epoch of that is not the last message's."""
    assert state.token is not None
    return Advance(
        partition=partition,
        token=state.token,
        epoch=state.epoch,
        topic_id=state.topic_id,
        expected=state.next_offset,
        next_offset=next_offset,
        leader_epoch=leader_epoch,
        cluster_id=state.cluster_id,
        generation=state.generation,
        rotates=state.advances >= ROTATE_EVERY,
        after=after,
    )


def _generations(advances: Sequence[Advance]) -> dict[Partition, int]:
    """Say which generations the rows of a unit are of behind it: where one must be rotated, all are."""
    rotates = any(advance.rotates for advance in advances)
    return {advance.partition: advance.generation + rotates for advance in advances}
