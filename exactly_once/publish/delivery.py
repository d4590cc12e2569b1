"""Messages of a topic, in batches, and deliveries: what becomes of each message, as a small future.

One object and one callback are made for a batch, and none for a message: a million in flight would be a million
objects for every collection of garbage. A report finds its message by the payload, and a delivery is a view.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import psycopg
from confluent_kafka import KafkaError, KafkaException, Message

from exactly_once._log import about

from .errors import FilterUnavailable, HeldElsewhere, NotDelivered, NotPersisted, OutcomeUnknown
from .filter import DUPLICATE, NEW, UNKNOWN, Filter, State
from .headers import Headers
from .keys import CheckedKeys
from .recovery import SequenceLog

if TYPE_CHECKING:
    from .publisher import Publisher

logger = logging.getLogger(__name__)

Callback = Callable[[KafkaError | None, Message | None], object]
Payload = str | bytes | None
# Partition, headers and timestamp of a message.
Extra = tuple[int, Headers | None, int]
# A payload of more bytes costs more to compare and to keep than a callback of its own.
_LONG = 1024

_PROOFS = frozenset(
    # The client or the broker refuses these for what they are, at every attempt, before anything is stored.
    (
        KafkaError._QUEUE_FULL,  # noqa: SLF001 - its public name
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    )
)


# What the client raises for a message that it does not take. Anything else comes from a signal handler or from another
# thread, perhaps when the message is in the client's queue already.
_REFUSALS = (KafkaException, BufferError, TypeError, ValueError, OverflowError)


class Outcome(Enum):
    """What is known of a message."""

    PENDING = "not known yet"
    DELIVERED = "acknowledged"
    SKIPPED = "was acknowledged before; nothing was sent"
    NOT_PERSISTED = "surely not in the log"
    UNKNOWN = "may be in the log"
    HELD_ELSEWHERE = "another process is sending it; nothing was sent"


_PENDING, _DELIVERED, _SKIPPED = Outcome.PENDING, Outcome.DELIVERED, Outcome.SKIPPED
# Of outcomes that are no success: the client's code for what it did not say itself, and what ``result`` raises.
#
# An error of None would mean delivered. They are retriable: the same call may be made again.
FAILURES: dict[Outcome, tuple[int, type[NotDelivered]]] = {
    Outcome.NOT_PERSISTED: (KafkaError._FAIL, NotPersisted),  # noqa: SLF001 - its public name
    Outcome.UNKNOWN: (KafkaError._FAIL, OutcomeUnknown),  # noqa: SLF001
    Outcome.HELD_ELSEWHERE: (KafkaError._STATE, HeldElsewhere),
}


def outcome_of(error: KafkaError) -> Outcome:
    """Return what an error of the client proves. If in doubt, nothing.

    A purge or a time-out proves nothing: an earlier attempt of the client may have arrived.
    """
    return Outcome.NOT_PERSISTED if error.code() in _PROOFS else Outcome.UNKNOWN


Call = tuple[Callback, KafkaError | None, Message | None]


class Interest:
    """Held by all who hold a delivery of a batch: without them nobody can ask where its messages stand."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Batch:
    """Messages of one topic that share a callback; everything about one of them by its place."""

    topic: TopicPublisher
    # Dedup keys, numbers or Links.
    identities: list[Any] = field(init=False, default_factory=CheckedKeys)
    values: list[Payload] = field(init=False, default_factory=list)
    keys: list[Payload] = field(init=False, default_factory=list)
    # What else is given with the few messages that have more than value and key.
    extras: dict[int, Extra] = field(init=False, default_factory=dict)
    # The outcome of all that are not in ``outcomes``.
    rest: Outcome = field(init=False, default=_PENDING)
    outcomes: dict[int, Outcome] = field(init=False, default_factory=dict)
    # Places of messages that share the callback: their payload is bytes, and no other one's here.
    by_payload: dict[bytes, int] = field(init=False, default_factory=dict)
    # Reports of success among these that are not matched with their places; None where nobody can ask.
    arrived: list[Message | None] = field(init=False, default_factory=list)
    # Places with a report of their own that is not settled.
    reported: list[int] = field(init=False, default_factory=list)
    errors: dict[int, KafkaError] = field(init=False, default_factory=dict)
    # The messages of the reports that are matched.
    messages: dict[int, Message | None] = field(init=False, default_factory=dict)
    # The callbacks of the call that sends and of those that attached to it; None for one without.
    #
    # No entry: one call, without a callback.
    callbacks: dict[int, list[Callback | None]] = field(init=False, default_factory=dict)
    # Where identities are, of as many of them as are counted: none until a call attaches to one.
    places: dict[Any, int] = field(init=False, default_factory=dict)
    counted: int = field(init=False, default=0)
    # Of which an earlier attempt may be in the log.
    resent: set[int] = field(init=False, default_factory=set)
    # Whether somebody waits for one of them: then reports are settled before all are there.
    is_watched: bool = field(init=False, default=False)
    # Whether the topic knows that there is something to settle. In a transaction the commit tells that.
    is_reported: bool = field(init=False)
    interest: Callable[[], Interest | None] = field(init=False)
    # The callback that they share; None once it has done its work: it refers to the batch.
    told: Callback | None = field(init=False)

    def __post_init__(self) -> None:
        self.is_reported = self.topic.is_transactional
        self.interest = _ALWAYS if self.topic.keeps_reports else _NEVER
        arrived, reported = self.arrived, self.topic.reported

        def told(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self.report(self.by_payload[message.value()], error, message)  # type: ignore[index]
                return
            arrived.append(None if self.interest() is None else message)
            if not self.is_reported:
                self.is_reported = True
                reported.append(self)

        self.told = told  # type: ignore[assignment]  # the client gives a message with each report

    def watched(self) -> Interest:
        """Return what a delivery holds."""
        held = self.interest()
        if held is None:
            held = Interest()
            self.interest = weakref.ref(held)
        return held

    def place_of(self, identity: Any) -> int:
        """Return the place of the last message of an identity: one before it may have failed. Under the lock."""
        for place in range(self.counted, len(self.identities)):
            self.places[self.identities[place]] = place
        self.counted = len(self.identities)
        return self.places[identity]

    def callback_of(self, place: int) -> Callback:
        """Return what the client calls with the report of a message."""
        value = self.values[place]
        # A report that is found by its payload needs no object of its own.
        if (
            type(value) is bytes
            and len(value) <= _LONG
            and place not in self.callbacks
            and self.by_payload.setdefault(value, place) == place
            and self.told is not None
        ):
            return self.told
        return partial(self.report, place)

    def callbacks_of(self, places: Sequence[int]) -> Iterable[Callback]:
        """Return them for several messages."""
        values: Any = self.values
        if not self.callbacks and not self.by_payload and self.told and set(map(type, values)) == {bytes}:
            self.by_payload = dict(zip(values, range(len(values)), strict=True))
            if len(self.by_payload) == len(values) and max(map(len, values)) <= _LONG:
                return repeat(self.told, len(places))
            self.by_payload = {}
        return map(self.callback_of, places)

    def report(self, place: int, error: KafkaError | None, message: Message | None) -> None:
        """Note the report of one message; it is settled before anybody is told."""
        self.messages[place] = message
        if error is not None:
            self.errors[place] = error
        else:
            self.errors.pop(place, None)
        self.reported.append(place)
        if not self.is_reported:
            self.is_reported = True
            self.topic.reported.append(self)

    def match(self) -> list[int]:
        """Find the places of the reports that have arrived, and return them. Under the lock of the topic.

        Others may arrive meanwhile, and those that were not kept still count.
        """
        reports = self.arrived[:]
        found = {self.by_payload[m.value()]: m for m in reports if m is not None}  # type: ignore[index]
        self.messages.update(found)
        self.arrived[: len(reports)] = [None] * (len(reports) - len(found))
        return list(found)

    def match_if_settled(self) -> None:
        """Do so unless their number is still needed to see that all are there. Under the lock of the topic."""
        if self.arrived and (self.told is None or self.topic.is_transactional):
            self.match()

    def acknowledged(self, places: Sequence[int]) -> Iterable[Message]:
        """Return the messages of these reports, in any order. Under the lock of the topic."""
        if self.topic.is_transactional and len(self.arrived) == len(places):
            return [message for message in self.arrived if message is not None]
        self.match_if_settled()
        return [message for place in places if (message := self.messages.get(place)) is not None]

    def outcome(self, place: int) -> Outcome:
        """Return what is known of a message; who asks too early is somebody who waits."""
        found = self.outcomes.get(place, self.rest)
        if found is _PENDING and not self.is_watched:
            self.is_watched = True
            self.topic.reported.append(self)
        return found

    def message(self, place: int) -> Message | None:
        """Return the message of a report, if there was one."""
        if self.arrived:
            with self.topic.lock:
                self.match_if_settled()
        return self.messages.get(place)

    def send_again(self, places: Iterable[int]) -> None:
        """Forget the reports of an attempt that is over."""
        with self.topic.lock:
            self.match_if_settled()
        for place in places:
            self.errors.pop(place, None)
            self.messages.pop(place, None)


_FOREVER = Interest()
_ALWAYS: Callable[[], Interest | None] = lambda: _FOREVER  # noqa: E731 - called like a weak reference
_NEVER: Callable[[], Interest | None] = lambda: None  # noqa: E731


class Delivery:
    """What becomes of one call of ``produce``. Made by the producer."""

    __slots__ = ("_batch", "_interest", "_place", "is_attached")

    def __init__(self, batch: Batch, place: int, *, is_attached: bool = False) -> None:
        self._batch = batch
        self._interest = batch.watched()
        self._place = place
        # Whether this call sent nothing, because an earlier one is sending the same key; it shares its outcome.
        self.is_attached = is_attached

    def __repr__(self) -> str:
        return f"<Delivery {self.identity!r} {self.outcome.name}{' duplicate' if self.duplicate else ''}>"

    @property
    def entry(self) -> tuple[Batch, int]:
        """The message that is, or was, sent."""
        return self._batch, self._place

    @property
    def topic(self) -> str:
        """The topic."""
        return self._batch.topic.topic

    @property
    def identity(self) -> Any:
        """The dedup key, number or Link."""
        return self._batch.identities[self._place]

    @property
    def outcome(self) -> Outcome:
        """What is known of the message."""
        return self._batch.outcome(self._place)

    @property
    def may_repeat(self) -> bool:
        """Whether an earlier attempt of this key may be in the log, so that it may be there twice now."""
        return self._place in self._batch.resent

    @property
    def error(self) -> KafkaError | None:
        """Why it was not delivered: the client's error, or one that says the outcome. None for what is in the log."""
        return self._batch.errors.get(self._place)

    @property
    def message(self) -> Message | None:
        """The message of the client's report, if there was one."""
        return self._batch.message(self._place)

    @property
    def duplicate(self) -> bool:
        """Whether this call sent nothing because the message is in the log already, by an earlier call or life."""
        return self.outcome is _SKIPPED or (self.is_attached and self.outcome is _DELIVERED)

    @property
    def offset(self) -> int | None:
        """Where it stands in the log; None while, or where, that is not known."""
        return None if self.outcome is not _DELIVERED or self.message is None else self.message.offset()

    @property
    def partition(self) -> int | None:
        """The partition it stands in; None while, or where, that is not known."""
        return None if self.outcome is not _DELIVERED or self.message is None else self.message.partition()

    def done(self) -> bool:
        """Tell whether the outcome is known."""
        return self.outcome is not _PENDING

    def result(self, timeout_seconds: float | None = None) -> Message | None:
        """Serve the producer until the outcome is known; return the message as the log has it.

        None is returned for a duplicate of something acknowledged earlier: that message is not here any more.

        :raises NotPersisted: when it is surely not in the log.
        :raises OutcomeUnknown: when it may be.
        :raises HeldElsewhere: when another process is sending it.
        :raises TimeoutError: when nothing is known after so long; nothing changes by that.
        """
        producer = self._batch.topic.producer
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        if not self.done():
            producer.hurry()
        while not self.done():
            left = 0.1 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no delivery report for {self.identity!r} within {timeout_seconds:g} s")
            producer.poll(min(left, 0.1))
            if producer.is_ended and not self.done():  # made by another thread while it was being closed
                self._batch.outcomes[self._place] = Outcome.UNKNOWN
        error = self.exception()
        if error is not None:
            raise error
        return self.message

    def exception(self) -> NotDelivered | None:
        """Return why it was not delivered; None if it was, or is not known yet. ``flush`` does not tell it again."""
        outcome = self.outcome
        if outcome not in FAILURES:
            return None
        self._batch.topic.failed.pop(self.identity, None)
        said = f"{self.identity!r} to {self.topic}: {outcome.value} ({self.error or 'no error given'})"
        made = FAILURES[outcome][1](said)
        if self.error is not None:
            made.__cause__ = KafkaException(self.error)
        return made


class Deliveries(Sequence[Delivery]):
    """The deliveries of one batch, in the order of its messages; made when they are asked for."""

    __slots__ = ("_batch", "_interest")

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._interest = batch.watched()

    def __len__(self) -> int:
        return len(self._batch.identities)

    @overload
    def __getitem__(self, index: int) -> Delivery: ...
    @overload
    def __getitem__(self, index: slice) -> list[Delivery]: ...
    def __getitem__(self, index: int | slice) -> Delivery | list[Delivery]:
        places = range(len(self))[index]
        return Delivery(self._batch, places) if isinstance(places, int) else [Delivery(self._batch, p) for p in places]


_SILENT = KafkaError(KafkaError._FAIL, "the client has no report of it")  # noqa: SLF001 - its public name
# For so long ``poll``, ``flush`` and ``result`` wait for a filter's server to take outcomes, then they go on.
MARK_SECONDS = 2.0
# So many messages that are given one by one share a batch: a delivery that is kept keeps the others' messages.
_SHARED = 100


class Doubt(NamedTuple):
    """A message of which an interrupt has hidden whether the client took it: its report tells, if there is one."""

    batch: Batch
    place: int
    # So that the report is kept: among those that are not, all are of other messages.
    interest: Interest


class Columns(NamedTuple):
    """Messages that are to be sent, by column."""

    identities: list[Any]
    values: list[Payload]
    keys: list[Payload]
    extras: dict[int, Extra]
    callbacks: dict[int, Callback]


# A message that is to be sent: identity, value, key, extra and callback.
Given = tuple[Any, Payload, Payload, Extra | None, Callback | None]


class TopicPublisher:
    """One topic. ``reported`` is filled by the client's callbacks and emptied by ``settle``, one thread at a time."""

    def __init__(
        self, producer: Publisher, topic: str, made: Filter[Any], log: SequenceLog | None, *, is_transactional: bool
    ) -> None:
        self.producer = producer
        self.topic = topic
        self.filter = made
        self.log = log
        # Whether messages are settled by :meth:`conclude`, and not as they are reported.
        self.is_transactional = is_transactional
        self.keeps_reports = is_transactional or log is not None
        # From the call of ``produce`` until the outcome is marked in the filter; a second call attaches to it.
        self.in_flight: dict[Hashable, Batch] = {}
        # Batches in which there is something to settle.
        self.reported: list[Batch] = []
        self.doubts: list[Doubt] = []
        # By identity: failures that nobody has looked at, and that no later call has made good.
        self.failed: dict[Hashable, Delivery] = {}
        # The one that takes messages that are given one by one.
        self._batch: Batch | None = None
        # How many messages ended how.
        self.counts: Counter[Outcome] = Counter()
        # How many calls shared the outcome of one in flight.
        self.attached = 0
        # Held from the reservation of a number until the client has it, so that both happen in the same order.
        self.order = threading.RLock()
        # For additions to ``in_flight`` and to the batch, and for callbacks: who attaches comes before who settles, or
        # after.
        self.lock = threading.Lock()
        self._settling = threading.Lock()
        # What the filter is to be told. What was delivered comes last: a snapshot must not be made before the doubts
        # of the same reports are known.
        self._due: dict[Outcome, list[tuple[Batch, Sequence[int]]]] = {
            Outcome.UNKNOWN: [],
            Outcome.NOT_PERSISTED: [],
            _DELIVERED: [],
        }
        # What the callers are to be told.
        self._to_tell: list[tuple[Outcome, Batch, Sequence[int]]] = []
        self._marking: threading.Thread | None = None
        self._mark_error: BaseException | None = None
        # Whether it was told that outcomes wait.
        self._is_waiting = False

    def reserve_many(self, columns: Columns) -> tuple[Sequence[Delivery], Batch, Sequence[int]]:
        """Ask for the right to send; return all deliveries, a batch, and its places that may go.

        What is in flight here is attached to; the filter is asked for the others. When it raises, nothing is reserved.
        """
        batch = Batch(self)
        identities = columns.identities
        deliveries: Sequence[Delivery] = Deliveries(batch)
        places: Sequence[int] = range(len(identities))
        mine = dict.fromkeys(identities, batch)
        try:
            with self.lock:
                if len(mine) == len(identities) and self.in_flight.keys().isdisjoint(mine):
                    batch.identities, batch.values, batch.keys, batch.extras, calls = columns
                    batch.callbacks = {place: [callback] for place, callback in calls.items()}
                    self.in_flight.update(mine)
                else:
                    made = []
                    for n, identity in enumerate(identities):
                        if identity in self.in_flight:
                            made.append(self._attach(identity, columns.callbacks.get(n)))
                        else:
                            given = identity, columns.values[n], columns.keys[n], columns.extras.get(n)
                            place = self._add(batch, (*given, columns.callbacks.get(n)))
                            made.append(Delivery(batch, place))
                    deliveries, places = made, range(len(batch.identities))
            states = self.filter.reserve_many(batch.identities) if places else []
        except BaseException:  # a signal handler may raise between any two lines
            self.let_go(batch, range(len(batch.identities)), Outcome.NOT_PERSISTED)
            raise
        if states.count(NEW) < len(states):
            places = [p for p, state in enumerate(states) if state is NEW or self._may_go(batch, p, state)]
        return deliveries, batch, places

    def reserve(self, given: Given) -> tuple[Batch, int, Delivery, bool]:
        """Ask for the right to send one message, as :meth:`reserve_many` and faster; tell whether it may go."""
        batch = place = None
        try:
            with self.lock:
                batch = self._batch
                if given[0] in self.in_flight:
                    delivery = self._attach(given[0], given[4])
                    return *delivery.entry, delivery, False
                if batch is None or len(batch.identities) >= _SHARED:
                    batch = self._batch = Batch(self)
                place = self._add(batch, given)
            delivery = Delivery(batch, place)
            state = self.filter.reserve(given[0])
        except BaseException:
            if batch is not None and place is not None:
                self.let_go(batch, (place,), Outcome.NOT_PERSISTED)
            raise
        return batch, place, delivery, state is NEW or self._may_go(batch, place, state)

    def hand_over_failed(self, batch: Batch, places: Sequence[int], error: BaseException) -> None:
        """Undo the reservations of messages behind an error of ``produce``; the first one may be in the queue."""
        if places and not isinstance(error, _REFUSALS):
            batch.is_watched = True
            self.doubts.append(Doubt(batch, places[0], batch.watched()))
            places = places[1:]
        if places:
            self.undo(batch, places)

    def undo(self, batch: Batch, places: Sequence[int]) -> None:
        """Undo the reservations of messages that the client did not take."""
        try:
            self.filter.release_many([batch.identities[place] for place in places])
        except (psycopg.Error, FilterUnavailable) as error:
            self._log_waiting("outcomes on %r wait for the filter's store: %s", error)
            self._owe(Outcome.NOT_PERSISTED, batch, places)
            self._tell(Outcome.NOT_PERSISTED, batch, places, is_raised=True)
        else:
            self.let_go(batch, places, Outcome.NOT_PERSISTED)

    def let_go(self, batch: Batch, places: Sequence[int], outcome: Outcome) -> None:
        """Settle messages that were never handed to the client; their caller is told by what ``produce`` does."""
        for place in places:
            self.in_flight.pop(batch.identities[place], None)
        self._tell(outcome, batch, places, is_raised=outcome is Outcome.NOT_PERSISTED)

    def settle(self, unreported: Sequence[Doubt] = ()) -> None:
        """Mark in the filter what was reported, then make it known; a filter's server is waited for, not for long.

        ``unreported`` are doubts from before the client had nothing more to report.
        """
        if not self.reported and not any(self._due.values()) and self._mark_error is None and not unreported:
            return
        with self._settling:
            count = len(self.reported)
            if not self.is_transactional:
                for batch in dict.fromkeys(self.reported[:count]):
                    self._collect(batch)
            # Only now: whoever is interrupted between two lines does this twice, which is harmless, and never not.
            del self.reported[:count]
            self._mark_and_tell(MARK_SECONDS)
            for doubt in unreported:
                self._give_up(doubt.batch, (doubt.place,))
                self._mark_and_tell(MARK_SECONDS)
                if doubt in self.doubts:  # another thread may have done the same
                    self.doubts.remove(doubt)

    def conclude(self, batch: Batch, places: Sequence[int], verdict: Outcome, error: KafkaError | None) -> None:
        """Settle messages alike, whatever was reported: the transaction that they belong to is over."""
        for place in places if batch.errors or error is not None else ():
            if verdict is _DELIVERED:
                batch.errors.pop(place, None)
            elif error is not None:
                batch.errors.setdefault(place, error)
        with self._settling:
            self._take(verdict, batch, places)
            self._mark_and_tell(MARK_SECONDS)

    def finish(self, seconds: float) -> int:
        """Mark what is left and make a last snapshot, before the producer is gone; return how many had no report.

        :raises FilterUnavailable: when marks could not be stored within so long.
        """
        left = set(self.in_flight.values())
        for batch in left:
            batch.is_watched = True
        self.reported += left
        silent = 0
        try:
            self.settle()
        finally:
            # The client has no more to tell. A report whose callback was interrupted would leave its message here.
            with self._settling:
                for batch in left:
                    silent += self._give_up(batch, range(len(batch.identities)))
                self._mark_and_tell(seconds)
        if self.log is not None:
            self.log.save(is_clean=True)
        if waiting := sum(len(places) for due in self._due.values() for _, places in due):
            raise FilterUnavailable(f"{waiting} outcomes on {self.topic!r} could not be stored in the filter")
        return silent

    def _collect(self, batch: Batch) -> None:
        """Take what was reported of a batch: all of it at once, or what is there if somebody waits."""
        batch.is_reported = False  # before anything is read: what is reported from here on is told again
        with self.lock:
            places = batch.reported[:]
            if batch.arrived and batch.rest is _PENDING:
                count = len(batch.identities)
                settled = batch.outcomes.keys() | set(places) if batch.outcomes or places else ()
                if len(batch.arrived) + len(settled) == count:
                    batch.told = None
                    if batch is self._batch:
                        self._batch = None
                    rest = [place for place in range(count) if place not in settled] if settled else range(count)
                    self._take(_DELIVERED, batch, rest)
                elif batch.is_watched or batch.errors:
                    found = batch.match()
                    if doubtful := {doubt.place for doubt in self.doubts if doubt.batch is batch}:
                        rest = [p for p in range(count) if p not in settled and p not in found and p not in doubtful]
                        if len(rest) == len(batch.arrived):
                            batch.arrived.clear()
                            found += rest
                    self._take(_DELIVERED, batch, found)
        for place in places:
            error = batch.errors.get(place)
            self._take(_DELIVERED if error is None else outcome_of(error), batch, (place,))
        del batch.reported[: len(places)]

    def _give_up(self, batch: Batch, places: Sequence[int]) -> int:
        """Take those of the messages for unknown that have no outcome; return how many they are."""
        places = [place for place in places if batch.outcome(place) is _PENDING]
        batch.errors.update(dict.fromkeys(places, _SILENT))
        self._take(Outcome.UNKNOWN, batch, places)
        return len(places)

    def _take(self, outcome: Outcome, batch: Batch, places: Sequence[int]) -> None:
        if places:
            self._owe(outcome, batch, places)
            self._to_tell.append((outcome, batch, places))

    def _owe(self, outcome: Outcome, batch: Batch, places: Sequence[int]) -> None:
        """Have the filter told; until then nobody sends these again."""
        if outcome is Outcome.NOT_PERSISTED and not batch.resent.isdisjoint(places):
            # An earlier attempt may be in the log: released it is unknown, and absent if that is done twice.
            self._due[Outcome.UNKNOWN].append((batch, [place for place in places if place in batch.resent]))
            self._due[outcome].append((batch, [place for place in places if place not in batch.resent]))
        else:
            self._due[outcome].append((batch, places))

    def _may_go(self, batch: Batch, place: int, state: State) -> bool:
        """Tell whether a message that is not new is sent nevertheless; settle it if not."""
        if state is UNKNOWN:
            batch.resent.add(place)
            return True
        self.let_go(batch, (place,), Outcome.SKIPPED if state is DUPLICATE else Outcome.HELD_ELSEWHERE)
        return False

    def _add(self, batch: Batch, given: Given) -> int:
        """Add a message to a batch, under the lock; return its place."""
        identity, value, key, extra, callback = given
        place = len(batch.identities)
        self.in_flight[identity] = batch
        batch.identities.append(identity)
        batch.values.append(value)
        batch.keys.append(key)
        if extra is not None:
            batch.extras[place] = extra
        if callback is not None:
            batch.callbacks[place] = [callback]
        return place

    def _attach(self, identity: Any, callback: Callback | None) -> Delivery:
        """Attach a call to the message of the same identity that is in flight."""
        batch = self.in_flight[identity]
        place = batch.place_of(identity)
        self.attached += 1
        self._log_skipped(identity, "is being sent already")
        if batch.outcome(place) is _PENDING:
            batch.callbacks.setdefault(place, [None]).append(callback)
        else:  # settled while we came
            self._notify(batch, place, [callback])
        return Delivery(batch, place, is_attached=True)

    def _mark_and_tell(self, seconds: float) -> None:
        try:
            if self.filter.is_remote:
                self._mark_within(seconds)
            else:
                self._mark()
        finally:
            for outcome, batch, places in self._to_tell:
                self._tell(outcome, batch, places)
            self._to_tell.clear()

    def _mark_within(self, seconds: float) -> None:
        """Have a thread bring what is due into the filter: its server may be frozen, and ``poll`` has its bound."""

        def mark() -> None:
            try:
                self._mark()
            except BaseException as error:  # noqa: BLE001 - raised by who settles next
                self._mark_error = error

        if any(self._due.values()) and (self._marking is None or not self._marking.is_alive()):
            self._marking = threading.Thread(target=mark, name=f"marks of {self.topic}", daemon=True)
            self._marking.start()
        if self._marking is not None:
            self._marking.join(seconds)
            if self._marking.is_alive():
                said = "outcomes on %r wait for the filter's server, which has not answered for %g s"
                self._log_waiting(said, seconds)
        error, self._mark_error = self._mark_error, None
        if error is not None:
            raise error

    def _mark(self) -> None:
        """Bring what is due into the filter; what a store refuses now is tried again with the next reports."""
        for outcome, due in self._due.items():
            entries = due[:]
            if not entries:
                continue
            keys = type(entries[0][0].identities)()
            for batch, places in entries:
                is_whole = len(places) == len(batch.identities)
                keys += batch.identities if is_whole else [batch.identities[place] for place in places]
            try:
                if outcome is _DELIVERED:
                    self.filter.confirm_many(keys)
                elif outcome is Outcome.NOT_PERSISTED:
                    self.filter.release_many(keys)
                else:
                    self.filter.mark_unknown_many(keys)
            except (psycopg.Error, FilterUnavailable) as error:
                self._log_waiting("outcomes on %r wait for the filter's store: %s", error)
                continue
            deque(map(self.in_flight.pop, keys, repeat(None)), maxlen=0)
            if outcome is _DELIVERED and self.log is not None:
                with self.lock:
                    self.log.confirmed([m for batch, places in entries for m in batch.acknowledged(places)])
            del due[: len(entries)]
            self._is_waiting = False

    def _tell(self, outcome: Outcome, batch: Batch, places: Sequence[int], *, is_raised: bool = False) -> None:
        """Make an outcome known to all whose call waits for it."""
        self.counts[outcome] += len(places)
        with self.lock:
            if outcome is _DELIVERED and len(places) + len(batch.outcomes) == len(batch.identities):
                batch.rest, batch.told = _DELIVERED, None
                if batch is self._batch:
                    self._batch = None  # what is added from here on is not delivered
            else:
                batch.outcomes.update(dict.fromkeys(places, outcome))
            if outcome in FAILURES:
                code = FAILURES[outcome][0]
                for place in places:
                    if place not in batch.errors:
                        said = f"{batch.identities[place]!r}: {outcome.value}"
                        batch.errors[place] = KafkaError(code, said, retriable=True)
                    callbacks = batch.callbacks.pop(place, [None])
                    if is_raised and callbacks[0] is None:
                        del callbacks[0]
                    self._notify(batch, place, callbacks)
                return
            for place in places if batch.callbacks else ():
                self._notify(batch, place, batch.callbacks.pop(place, ()))
        for place in places if self.failed else ():
            self.failed.pop(batch.identities[place], None)
        if outcome is Outcome.SKIPPED:
            for place in places:
                self._log_skipped(batch.identities[place], "was acknowledged before")

    def _notify(self, batch: Batch, place: int, callbacks: Iterable[Callback | None]) -> None:
        """Have callbacks called; note a failure of which no callback is told."""
        for callback in callbacks:
            if callback is not None:
                self.failed.pop(batch.identities[place], None)
                batch.match_if_settled()
                self.producer.calls.append((callback, batch.errors.get(place), batch.messages.get(place)))
        if None in callbacks and batch.outcomes.get(place) in FAILURES:
            self.failed[batch.identities[place]] = Delivery(batch, place)

    def _log_skipped(self, identity: object, why: str) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            extra = about("duplicate_skipped") | {"topic": self.topic, "producer": self.producer.producer_name}
            logger.debug("%r on %r is not sent: it %s", identity, self.topic, why, extra=extra)

    def _log_waiting(self, said: str, why: object) -> None:
        """Tell once that outcomes wait, until they have been taken."""
        if self._is_waiting:
            return
        self._is_waiting = True
        logger.warning(said, self.topic, why, extra=about("outcomes_wait") | {"topic": self.topic})
