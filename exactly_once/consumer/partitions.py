"""Ownership: what this member may do with each partition. A pure state machine, no I/O.

Events come in as method calls; :attr:`Ownership.releases` and the ``to_…`` methods say what has to
be done next. The consumer's loop does it, and so does the simulator of the tests.

    assigned ──> PENDING ──acquired──> STARTING ──started──> OWNED ──(placed)──> messages flow
                    ^                      │                   │
                    └──────proved────── FENCED <───fenced──────┘
                                          ^
             found unreadable ──> BAD ────┘ when its row was changed
    revoked or lost: forgotten from any state, its row is released
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple
from uuid import UUID

from exactly_once._model import ROTATE_EVERY, Advance, Partition, Row, Span
from exactly_once.ledger.conflict import Conflict, Grant, check


class State(Enum):
    """How far this member has come with a partition that Kafka assigned to it."""

    PENDING = "assigned by Kafka, not acquired in the ledger"
    STARTING = "acquired, its starting offset is being checked"
    OWNED = "acquired and checked"
    FENCED = "somebody else acquired it; membership must be proved first"
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
    """All that this member knows of one partition that Kafka assigned to it.

    Every assignment and every new try to acquire makes a new object, so nothing of an earlier one is believed; only
    ``report`` and ``stop_at`` go from one try to the next. A unit starts only where ``expected`` and ``handed_out``
    agree.
    """

    state: State = State.PENDING

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
    expected: int = -1
    """The ledger's offset: everything below it is applied."""
    previous_instance: UUID | None = None
    """Who had the row and did not release it: a process that may stand still with locks of rows that we need."""

    # Where the client is. Written by Ownership when the client is positioned, and by the buffer with each fetch. Valid
    # while ``placed``; :meth:`invalidate` ends that.
    placed: bool = False
    """Whether the client fetches this partition, from ``fetched``."""
    handed_out: int = -1
    """The end of what units were given."""
    fetched: int = -1
    """The end of what the client delivered."""
    log_end: int = -1
    """Where the client met the end of the log since it was positioned, or -1."""
    log_ended_at: float = 0.0
    """When it did, on the monotonic clock."""
    gaps: dict[int, int] = field(default_factory=dict)
    """Where the log has gaps in what was fetched and not committed: the offset after each, and the one before it."""
    unreadable: str | None = None
    """Why the client cannot read on behind ``fetched``; what it delivers all the same is dropped."""
    suspect: str | None = None
    """Why the client could not read at its offset; maintenance finds out what is wrong with it."""

    last_applied: int | None = None
    """The offset after the message that was applied last, if that was since the offset was read from the ledger."""
    is_to_mirror: bool = False
    """Whether Kafka was not told ``expected`` yet. Set by commits, cleared when it is sent and when the row is lost."""
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
        self.placed, self.log_end, self.suspect = False, -1, None

    @property
    def applied(self) -> int:
        """Up to where the log is applied: transactional and compacted ones end in offsets without messages."""
        return max(self.expected, self.log_end) if self.expected == self.fetched else self.expected

    def note_advance(self, generation: int) -> None:
        """Take note that the row was advanced and is of this generation now."""
        self.advances = 1 if generation != self.generation else self.advances + 1
        self.generation = generation

    @property
    def is_at_end(self) -> bool:
        """Whether the ledger may move on to the end of the log, behind offsets that hold no message for us."""
        return self.state is State.OWNED and self.placed and self.unreadable is None and self.applied > self.expected


class Resolution(Enum):
    """What became of a unit that was in doubt."""

    COMMITTED = "it had landed"
    ABORTED = "it will never land"
    FENCED = "the rows belong to somebody else by now"


class Ownership:
    """The partitions of one member, what it knows of each, and what must be done next."""

    def __init__(self) -> None:
        self.holdings: dict[Partition, PartitionState] = {}
        self.releases: list[tuple[Partition, UUID]] = []
        self.last_ends: list[Advance] = []
        """Moves to the end of the log of partitions that are to be released; to be made before that."""
        self.is_unsettled = True
        """Whether anything in the ``to_…`` methods or :attr:`releases` may have to be done."""
        self.is_sound = True
        """Whether no :meth:`changing` was cut short; :meth:`misplaced` makes it sound again."""

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Enclose a change of positions. An exception in it, of a signal handler say, leaves them unsound."""
        before, self.is_sound = self.is_sound, False
        yield
        self.is_sound = before

    @property
    def is_accounted(self) -> bool:
        """Whether it is known of every unit what became of it."""
        return all(h.handed_out == h.expected for h in self.holdings.values() if h.placed)

    # What Kafka says.

    def assigned(self, partitions: Iterable[Partition]) -> None:
        """Take note of new partitions; they are pending until their rows are acquired."""
        for partition in partitions:
            self._replace(partition, PartitionState())

    def revoked(self, partitions: Iterable[Partition]) -> None:
        """Forget partitions that were revoked or lost; their rows are to be released."""
        for partition in partitions:
            self._let_go(partition, self.holdings.pop(partition, None))

    # What the ledger says.

    def acquired(self, rows: Iterable[Row]) -> None:
        """Take note of rows that are ours now. They are not read from before :meth:`started`."""
        for row in rows:
            holding = self.holdings.get(row.partition)
            if holding is None:
                assert row.owner_token is not None
                self.releases.append((row.partition, row.owner_token))
                continue
            holding.state = State.STARTING
            holding.token, holding.epoch, holding.generation = row.owner_token, row.owner_epoch, row.generation
            holding.previous_instance = row.previous_instance
            holding.invalidate()

    def started(self, partition: Partition, row: Row) -> None:
        """Own a partition whose row was checked and has an offset."""
        holding = self.holdings.get(partition)
        if holding is None or holding.token != row.owner_token or row.next_offset is None:
            return
        holding.topic_id, holding.cluster_id = row.topic_id, row.cluster_id
        self._go_to(holding, row)
        # Last: one that an interrupt had left owned without an offset would be read from the end of its log.
        holding.state = State.OWNED

    def not_started(self, partitions: Iterable[Partition]) -> None:
        """Give back what was acquired and cannot be started; it is pending again."""
        for partition in partitions:
            holding = self.holdings.get(partition)
            if holding is not None and holding.state is State.STARTING:
                self._replace(partition, PartitionState(report=holding.report, stop_at=holding.stop_at))

    def proved(self, partitions: Iterable[Partition]) -> None:
        """Allow fenced partitions to be acquired again: Kafka still counts us as their member."""
        for partition in partitions:
            holding = self.holdings.get(partition)
            if holding is not None and holding.state is State.FENCED:
                holding.state = State.PENDING

    def taken(self, partitions: Iterable[Partition]) -> None:
        """Take note of rows that somebody took from us while they were checked."""
        for partition in partitions:
            holding = self.holdings.get(partition)
            if holding is not None and holding.state is State.STARTING:
                self._fence(holding)

    def rejected(self, partition: Partition, error: Exception, row: Row | None = None) -> None:
        """Stop reading one partition, whose row is to be released, until that row is changed.

        ``row`` is what was acquired; without it the row is as it was left, or there is none.
        """
        holding = self.holdings.get(partition)
        if holding is None:
            return
        left = _left(row) if row is not None else None
        if left is None and holding.state is State.OWNED:
            left = Left(holding.epoch, holding.expected, holding.topic_id, is_halted=False)
        holding.invalidate()
        new = PartitionState(state=State.BAD, error=error, left=left, report=holding.report, stop_at=holding.stop_at)
        self._replace(partition, new)

    def retried(self, partitions: Iterable[Partition]) -> None:
        """Acquire bad partitions again, in spite of their error."""
        for partition in partitions:
            holding = self.holdings.get(partition)
            if holding is not None and holding.state is State.BAD:
                self.holdings[partition] = PartitionState(report=holding.report, stop_at=holding.stop_at)
                self.is_unsettled = True

    # What the client did.

    def reached_end(self, partition: Partition, offset: int, now: float = 0.0) -> None:
        """Take note that the client met the end of the log, after all messages before it."""
        holding = self.deliverable(partition)
        if holding is not None and holding.unreadable is None:
            holding.log_end, holding.log_ended_at = offset, now

    def suspect(self, partition: Partition, reason: str) -> None:
        """Take note that the client could not read on at its offset, for a reason that is still to be found."""
        holding = self.deliverable(partition)
        if holding is not None:
            holding.suspect = reason

    def unreadable(self, partition: Partition, reason: str) -> None:
        """Take note that the client cannot read on; what was fetched before is applied."""
        holding = self.deliverable(partition)
        if holding is not None and holding.unreadable is None:
            holding.unreadable = reason

    def placed(self, partitions: Iterable[Partition]) -> None:
        """Take note that the client now fetches from the expected offset."""
        for partition in partitions:
            holding = self.holdings[partition]
            holding.invalidate()
            holding.handed_out = holding.fetched = holding.checked_at = holding.expected
            holding.unreadable = None
            holding.gaps.clear()
            holding.placed = True

    def misplaced(self) -> None:
        """Distrust every position of the client, after an exception out of poll or consume, or between two lines."""
        self.is_unsettled = True
        for holding in self.holdings.values():
            holding.invalidate()
        # Nobody goes on with a start that was cut short: what was acquired for it is acquired again.
        self.not_started(list(self.holdings))
        self.is_sound = True

    # What becomes of units.

    def hand_out(self, spans: Mapping[Partition, Span]) -> list[Advance]:
        """Give a batch, which has these spans, to a unit.

        :raises AssertionError: when an earlier unit of a partition was not accounted for, or when the batch does not
            begin with the first message that was not applied yet.
        """
        advances = []
        for partition in sorted(spans):
            holding, (begin, end, leader_epoch) = self.holdings[partition], spans[partition]
            assert holding.state is State.OWNED and holding.token is not None, partition
            is_next = holding.gaps.get(begin, begin) <= holding.expected <= begin < end
            if holding.handed_out != holding.expected or not is_next:
                # Not by assert: python -O must not lose messages.
                raise AssertionError((partition, holding, spans[partition]))
            holding.handed_out = end
            advances.append(
                Advance(
                    partition=partition,
                    token=holding.token,
                    epoch=holding.epoch,
                    topic_id=holding.topic_id,
                    expected=holding.expected,
                    next_offset=end,
                    leader_epoch=leader_epoch,
                    cluster_id=holding.cluster_id,
                    generation=holding.generation,
                    rotates=holding.advances >= ROTATE_EVERY,
                    after=holding.last_applied,
                )
            )
        return advances

    def committed(self, advances: Sequence[Advance]) -> None:
        """Move on: the unit and its offsets are durable."""
        generations = _generations(advances)
        for advance in advances:
            holding = self._held(advance)
            if holding is not None:
                self._move_on(holding, advance, generations[advance.partition])

    def moved_to_end(self, advances: Sequence[Advance]) -> None:
        """Move on to the end of the log, which no unit was needed for."""
        generations = _generations(advances)
        for advance in advances:
            holding = self._held(advance)
            if holding is not None and holding.fetched == advance.expected:
                holding.expected = holding.handed_out = holding.fetched = advance.next_offset
                holding.leader_epoch, holding.is_to_mirror = advance.leader_epoch, True
                holding.note_advance(generations[advance.partition])

    def aborted(self, advances: Iterable[Advance]) -> None:
        """Take back what a unit was given: it will never land."""
        for advance in advances:
            holding = self._held(advance)
            if holding is not None:
                holding.handed_out = holding.expected

    def resolved(self, advances: Iterable[Advance], tokens: Container[UUID], rows: Iterable[Row]) -> Resolution:
        """Read the outcome of a unit from its rows, acquired under a fresh token.

        ``tokens`` are all under which that was tried, so that a call that was interrupted can be repeated.
        """
        found = {row.partition: row for row in rows}
        resolution = Resolution.FENCED
        for advance in advances:
            row, holding = found.get(advance.partition), self.holdings.get(advance.partition)
            if holding is not None and holding.token not in tokens:
                holding = None  # a newer one of the partition, which the unit does not touch
            if row is None:
                self._fence(holding)
                continue
            landed = row.next_offset == advance.next_offset
            resolution = Resolution.COMMITTED if landed else Resolution.ABORTED
            if holding is None:
                assert row.owner_token is not None
                self.releases.append((row.partition, row.owner_token))
                continue
            holding.token = row.owner_token
            if landed:
                self._move_on(holding, advance, row.generation)
            elif row.next_offset == advance.expected:
                holding.handed_out = holding.expected
            else:
                self._go_to(holding, row)
        return resolution

    def judge(self, advances: Iterable[Advance], rows: Iterable[Row]) -> dict[Partition, Conflict]:
        """Say for each partition of a short advance what is wrong, and act on it."""
        found = {row.partition: row for row in rows}
        verdicts = {}
        for advance in advances:
            row = found.get(advance.partition)
            verdict = verdicts[advance.partition] = check(
                row, Grant(advance.token, advance.epoch), advance.expected, advance.topic_id
            )
            holding = self._held(advance)
            if holding is None:
                continue
            holding.handed_out = holding.expected
            if verdict is Conflict.OK and row is not None:
                holding.generation = row.generation
            elif verdict is Conflict.FENCED:
                self._fence(holding)
            elif verdict in (Conflict.AHEAD, Conflict.REWOUND):
                assert row is not None
                self._go_to(holding, row)
            elif verdict in (Conflict.MISSING, Conflict.RECREATED):
                self._fence(holding)  # acquiring it tells what is wrong with it
        return verdicts

    def suspicious(self, partitions: Iterable[Partition], rows: Iterable[Row]) -> list[Partition]:
        """Return the partitions whose rows, read without a lock, seem not to be as they were left."""
        found = {row.partition: row for row in rows}
        return sorted(
            p for p in partitions if (h := self.holdings.get(p)) is not None and not _is_as_left(h, found.get(p))
        )

    def seen(self, partitions: Iterable[Partition], rows: Iterable[Row]) -> dict[Partition, Conflict]:
        """Compare rows that were read under lock between units: a reset or a failover shows here first.

        Act on what is wrong and return it.
        """
        found = {row.partition: row for row in rows}
        verdicts = {}
        for partition in partitions:
            row, holding = found.get(partition), self.holdings.get(partition)
            if holding is None or holding.state not in (State.OWNED, State.BAD) or _is_as_left(holding, row):
                continue
            if holding.state is State.BAD:
                holding.report = None
                self._fence(holding)
            elif row is None or row.owner_token != holding.token or row.owner_epoch != holding.epoch:
                verdicts[partition] = Conflict.FENCED
                self._fence(holding)
            elif holding.is_at_end and row.next_offset == holding.applied:
                # Our own move to the end of the log, of which no answer came.
                holding.expected = holding.handed_out = holding.fetched = holding.applied
                holding.leader_epoch = row.leader_epoch
                holding.note_advance(row.generation)
            else:
                is_behind = row.next_offset is None or row.next_offset < holding.expected
                verdicts[partition] = Conflict.REWOUND if is_behind else Conflict.AHEAD
                self._go_to(holding, row)
        return verdicts

    # What to do next.

    def to_acquire(self) -> list[Partition]:
        """Return the partitions whose rows must be acquired, in locking order."""
        return self._in_state(State.PENDING)

    def to_prove(self) -> list[Partition]:
        """Return the partitions for which membership must be proved before they are acquired."""
        return self._in_state(State.FENCED)

    def to_place(self) -> dict[Partition, PartitionState]:
        """Return what the client must be told to fetch, or to fetch from elsewhere."""
        return {p: h for p, h in self.holdings.items() if h.state is State.OWNED and not h.placed}

    def owned(self) -> list[Partition]:
        """Return the partitions that are acquired and checked, in locking order."""
        return self._in_state(State.OWNED)

    def suspects(self) -> dict[Partition, PartitionState]:
        """Return the partitions that the client could not read, for a reason that is still to be found."""
        return {p: h for p, h in self.holdings.items() if h.suspect is not None}

    def bad(self) -> list[Partition]:
        """Return the partitions that cannot be read until somebody mends them."""
        return self._in_state(State.BAD)

    def at_end(self) -> list[Advance]:
        """Return the moves to the end of the log that are left to be made."""
        return [_to_end(p, h) for p, h in sorted(self.holdings.items()) if h.is_at_end]

    def deliverable(self, partition: Partition) -> PartitionState | None:
        """Return the holding if messages of this partition may be handed to units now."""
        holding = self.holdings.get(partition)
        return holding if holding is not None and holding.state is State.OWNED and holding.placed else None

    def tokens(self) -> list[tuple[Partition, UUID]]:
        """Return all that is ours in the ledger, for a release at the end."""
        held = [(p, h.token) for p, h in self.holdings.items() if h.token is not None]
        return sorted(held + self.releases)

    def _in_state(self, state: State) -> list[Partition]:
        return sorted(p for p, h in self.holdings.items() if h.state is state)

    def _replace(self, partition: Partition, new: PartitionState) -> None:
        """Begin anew with a partition. In one step: one that an exception left without a holding is read by nobody."""
        old, self.holdings[partition] = self.holdings.get(partition), new
        self._let_go(partition, old)

    def _let_go(self, partition: Partition, holding: PartitionState | None) -> None:
        self.is_unsettled = True
        if holding is not None and holding.token is not None:
            if holding.is_at_end:
                self.last_ends.append(_to_end(partition, holding))
            self.releases.append((partition, holding.token))

    def _held(self, advance: Advance) -> PartitionState | None:
        """Find the holding under which the unit began; a newer one of the partition does not count."""
        holding = self.holdings.get(advance.partition)
        return holding if holding is not None and holding.token == advance.token else None

    def _fence(self, holding: PartitionState | None) -> None:
        self.is_unsettled = True
        if holding is not None:
            holding.invalidate()
            holding.state, holding.token, holding.is_to_mirror = State.FENCED, None, False
            holding.error = holding.left = None

    def _move_on(self, holding: PartitionState, advance: Advance, generation: int) -> None:
        holding.note_advance(generation)
        holding.expected = holding.last_applied = advance.next_offset
        holding.leader_epoch, holding.is_to_mirror = advance.leader_epoch, True
        if holding.gaps:
            holding.gaps = {after: before for after, before in holding.gaps.items() if after >= advance.next_offset}

    def _go_to(self, holding: PartitionState, row: Row) -> None:
        self.is_unsettled = True
        holding.invalidate()
        if row.next_offset is None:
            # A failover lost the chosen start: acquire and choose again.
            holding.state, holding.token = State.PENDING, None
            return
        holding.expected = holding.handed_out = holding.fetched = row.next_offset
        holding.generation, holding.leader_epoch, holding.last_applied = row.generation, row.leader_epoch, None


def _is_as_left(holding: PartitionState, row: Row | None) -> bool:
    """Compare a row with what this member knows of it; what is being acquired is not compared."""
    if holding.state is State.BAD:
        return (None if row is None else _left(row)) == holding.left
    if holding.state is not State.OWNED:
        return True
    is_ours = row is not None and row.owner_token == holding.token and row.owner_epoch == holding.epoch
    return is_ours and row is not None and row.next_offset == holding.expected


def _left(row: Row) -> Left:
    return Left(row.owner_epoch, row.next_offset, row.topic_id, row.halted is not None)


def _to_end(partition: Partition, holding: PartitionState) -> Advance:
    """Make the move to the end of the log. Its leader epoch is not that of the last message."""
    assert holding.token is not None
    return Advance(
        partition=partition,
        token=holding.token,
        epoch=holding.epoch,
        topic_id=holding.topic_id,
        expected=holding.expected,
        next_offset=holding.applied,
        leader_epoch=None,
        cluster_id=holding.cluster_id,
        generation=holding.generation,
        rotates=holding.advances >= ROTATE_EVERY,
    )


def _generations(advances: Sequence[Advance]) -> dict[Partition, int]:
    """Say which generations the rows of a unit are of behind it: where one must be rotated, all are."""
    rotates = any(advance.rotates for advance in advances)
    return {advance.partition: advance.generation + rotates for advance in advances}
