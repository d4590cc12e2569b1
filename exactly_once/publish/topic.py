"""TopicPublisher: asks the filter of a topic what may be sent, and tells it and the callers what became of that."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from confluent_kafka import KafkaError, KafkaException

from exactly_once._log import about

from .delivery import FAILURES, Batch, Callback, Deliveries, Delivery, Extra, Outcome, Payload, outcome_of
from .errors import FilterUnavailable
from .filter import DUPLICATE, NEW, UNKNOWN, Filter, State
from .recovery import SequenceLog

if TYPE_CHECKING:
    from .publisher import Publisher

logger = logging.getLogger(__name__)

# What the client raises for a message that it does not take. Anything else comes from a signal handler or from another
# thread, perhaps when the message is in the client's queue already.
_REFUSALS = (KafkaException, BufferError, TypeError, ValueError, OverflowError)
_PENDING, _DELIVERED = Outcome.PENDING, Outcome.DELIVERED
# How a filter is told of an outcome. What was delivered comes last: no snapshot must be made before the doubts of the
# same reports are known.
_MARKS = {Outcome.UNKNOWN: "mark_unknown_many", Outcome.NOT_PERSISTED: "release_many", _DELIVERED: "confirm_many"}
_SILENT = KafkaError(KafkaError._FAIL, "the client has no report of it")  # noqa: SLF001 - its public name
# For so long ``poll``, ``flush`` and ``result`` wait for a filter's server to take outcomes, then they go on.
MARK_SECONDS = 2.0
# So many messages that are given one by one share a batch: a delivery that is kept keeps the others' messages.
_SHARED = 100


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
        # From the call of ``produce`` until the outcome is marked in the filter; a second call attaches to it.
        self.in_flight: dict[Hashable, Batch] = {}
        # Batches in which there is something to settle.
        self.reported: list[Batch] = []
        # Messages of which an interrupt may have hidden whether the client took them, or what it reported.
        self.doubts: dict[tuple[Batch, Sequence[int]], None] = {}
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
        # What the filter is to be told.
        self._due: dict[Outcome, list[tuple[Batch, Sequence[int]]]] = {outcome: [] for outcome in _MARKS}
        # What the callers are to be told.
        self._to_tell: deque[tuple[Outcome, Batch, Sequence[int]]] = deque()
        # The last one that told the filter's server.
        self._marking = threading.Thread()
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
                        if (found := self.in_flight.get(identity)) is not None:
                            made.append(self._attach(found, identity, columns.callbacks.get(n)))
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
                if (found := self.in_flight.get(given[0])) is not None:
                    delivery = self._attach(found, given[0], given[4])
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
            self._doubt(batch, (places[0],))
            places = places[1:]
        if places:
            self.undo(batch, places)

    def serving_failed(self) -> None:
        """Doubt all that is in flight, where a callback of the client was interrupted: it is called once only."""
        for batch in () if self.is_transactional else set(self.in_flight.values()):
            self._doubt(batch, range(len(batch.identities)))

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

    def settle(self, unreported: Sequence[tuple[Batch, Sequence[int]]] = ()) -> None:
        """Mark in the filter what was reported, then make it known; a filter's server is waited for, not for long.

        ``unreported`` are doubts from before the client had nothing more to report.
        """
        if not (self.reported or self._to_tell or any(self._due.values()) or self._mark_error or unreported):
            return
        with self._settling:
            count = len(self.reported)
            if not self.is_transactional:
                for batch in dict.fromkeys(self.reported[:count]):
                    self._collect(batch)
            # Only now: whoever is interrupted between two lines does this twice, which is harmless, and never not.
            del self.reported[:count]
            self._mark_and_tell(MARK_SECONDS)
            for batch, places in unreported:
                self._give_up(batch, places)
                self._mark_and_tell(MARK_SECONDS)
                self.doubts.pop((batch, places), None)  # another thread may have done the same

    def conclude(self, batch: Batch, places: Sequence[int], verdict: Outcome, error: KafkaError | None) -> None:
        """Settle those without an outcome alike, whatever was reported: the transaction that they belong to is over."""
        with self._settling:
            self._tell_all()  # an interruption may have left some
            places = [place for place in places if batch.outcome(place) is _PENDING]
            if not places:
                return
            for place in places if batch.errors or error is not None else ():
                if verdict is _DELIVERED:
                    batch.errors.pop(place, None)
                elif error is not None:
                    batch.errors.setdefault(place, error)
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
                    if batch is self._batch:
                        self._batch = None  # first: whoever is interrupted here counts once more
                    rest = [place for place in range(count) if place not in settled] if settled else range(count)
                    self._take(_DELIVERED, batch, rest)
                    batch.told = None
                elif batch.is_watched or batch.errors:
                    found = batch.match()
                    self._take(_DELIVERED, batch, found)
                    del batch.arrived[: len(found)]  # only now, as with ``reported``
        for place in places:
            error = batch.errors.get(place)
            self._take(_DELIVERED if error is None else outcome_of(error), batch, (place,))
        del batch.reported[: len(places)]

    def _doubt(self, batch: Batch, places: Sequence[int]) -> None:
        """Take messages for unknown that have no outcome once the client has nothing more to report."""
        batch.is_watched = True
        self.reported.append(batch)
        self.doubts[batch, places] = None  # once, however often a callback raises

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

    def _attach(self, batch: Batch, identity: Any, callback: Callback | None) -> Delivery:
        """Attach a call to the message of the same identity that was in flight a moment ago."""
        place = batch.place_of(identity)
        self.filter.check_same(identity, batch.identities[place])
        self.attached += 1
        self._log_skipped(identity, "is being sent already")
        if batch.outcome(place) is _PENDING:
            batch.callbacks.setdefault(place, [None]).append(callback)
        else:  # settled while we came
            self._notify(batch, place, [callback])
        return Delivery(batch, place, is_attached=True)

    def _mark_and_tell(self, seconds: float) -> None:
        """Bring what is due into the filter, by a thread if its server may be frozen: ``poll`` has its bound."""

        def mark() -> None:
            try:
                self._mark()
            except BaseException as error:  # noqa: BLE001 - raised by who settles next
                self._mark_error = error

        deadline = time.monotonic() + seconds
        try:
            if not self.filter.is_remote:
                self._mark()
            elif self._marking.is_alive():  # what came behind it is not among its own
                self._marking.join(seconds)
            if self.filter.is_remote and any(self._due.values()) and not self._marking.is_alive():
                self._marking = threading.Thread(target=mark, name=f"marks of {self.topic}", daemon=True)
                self._marking.start()
                self._marking.join(max(0.0, deadline - time.monotonic()))
            if self._marking.is_alive():
                said = "outcomes on %r wait for the filter's server, which has not answered for %g s"
                self._log_waiting(said, seconds)
            error, self._mark_error = self._mark_error, None
            if error is not None:
                raise error
        finally:
            self._tell_all()

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
                getattr(self.filter, _MARKS[outcome])(keys)
            except (psycopg.Error, FilterUnavailable) as error:
                self._log_waiting("outcomes on %r wait for the filter's store: %s", error)
                continue
            deque(map(self.in_flight.pop, keys, repeat(None)), maxlen=0)
            if outcome is _DELIVERED and self.log is not None:
                with self.lock:
                    self.log.confirmed([m for batch, places in entries for m in batch.acknowledged(places)])
            del due[: len(entries)]
            self._is_waiting = False

    def _tell_all(self) -> None:
        while self._to_tell:  # it stays until it is done: an interruption leaves it to who settles next
            self._tell(*self._to_tell[0])
            self._to_tell.popleft()

    def _tell(self, outcome: Outcome, batch: Batch, places: Sequence[int], *, is_raised: bool = False) -> None:
        """Make an outcome known to all whose call waits for it."""
        self.counts[outcome] += len(places)
        with self.lock:
            is_rest = outcome is _DELIVERED and len(places) + len(batch.outcomes) == len(batch.identities)
            if is_rest and batch.outcomes.keys().isdisjoint(places):  # after an interruption some are told twice
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
