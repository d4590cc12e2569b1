"""TopicPublisher: one topic of a producer, with its filter and its messages in flight."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from typing import Any

import psycopg
from confluent_kafka import KafkaError, Message

from exactly_once._log import about

from .delivery import FAILURES, Batch, Callback, Deliveries, Delivery, Entry, Outcome, Serving, outcome_of, take
from .errors import FilterUnavailable
from .filter import DUPLICATE, NEW, UNKNOWN, Filter, State
from .recovery import SequenceLog

logger = logging.getLogger(__name__)
_is_on = logger.isEnabledFor

_PENDING, _DELIVERED = Outcome.PENDING, Outcome.DELIVERED
_SILENT = KafkaError(KafkaError._FAIL, "the client is closed and gave no report")  # noqa: SLF001 - its public name
MARK_SECONDS = 2.0
"""For so long ``poll``, ``flush`` and ``result`` wait for a filter's server to take outcomes, then they go on."""
_SHARED = 50
"""So many messages that are given one by one share a batch: a delivery that is kept keeps the others' messages."""
Call = tuple[Callback, KafkaError | None, Message | None]


class TopicPublisher:
    """One topic. ``reported`` is filled by the client's callbacks and emptied by ``settle``, one thread at a time."""

    def __init__(
        self, producer: Serving, topic: str, made: Filter[Any], log: SequenceLog | None, calls: deque[Call]
    ) -> None:
        self._producer = producer
        self.topic = topic
        self.filter = made
        self.log = log
        self._calls = calls
        """Of the producer: callbacks that are to be called, with what they are told."""
        self.in_flight: dict[Hashable, Entry] = {}
        """From the call of ``produce`` until the outcome is marked in the filter; a second call attaches to it."""
        self.reported: list[Entry] = []
        self.failed: dict[Hashable, Delivery] = {}
        """By identity: failures that nobody has looked at, and that no later call has made good."""
        self._batch = Batch(producer, topic, self.failed, self.reported)
        """The one of messages that are given one by one."""
        self.counts: Counter[Outcome] = Counter()
        """How many messages ended how."""
        self.attached = 0
        """How many calls shared the outcome of one in flight."""
        self.order = threading.RLock()
        """Held from the reservation of a number until the client has it, so that both happen in the same order."""
        self._lock = threading.Lock()
        """For additions to ``in_flight``, and for callbacks: who attaches comes before who settles, or after."""
        self._settling = threading.Lock()
        self._due: dict[Outcome, list[Entry]] = {Outcome.UNKNOWN: [], Outcome.NOT_PERSISTED: [], _DELIVERED: []}
        """What the filter is to be told. What was delivered comes last: a snapshot must not be made before the doubts
        of the same reports are known."""
        self._to_tell: list[tuple[Outcome, list[Entry]]] = []
        """What the callers are to be told."""
        self._marking: threading.Thread | None = None
        self._mark_error: BaseException | None = None

    def reserve(self, identities: list[Any], callbacks: Sequence[Callback | None]) -> tuple[Deliveries, list[Entry]]:
        """Ask for the right to send; return all deliveries, and the messages that may go.

        What is in flight here is attached to; the filter is asked for the others. When it raises, nothing is reserved.
        """
        batch = Batch(self._producer, self.topic, self.failed, self.reported)
        entries = batch.extend(identities)
        attached: dict[int, Entry] = {}
        deliveries = Deliveries(batch, attached)
        batch.callbacks.update((place, [given]) for place, given in enumerate(callbacks) if given is not None)
        mine = dict(zip(identities, entries, strict=True))
        with self._lock:
            if len(mine) == len(identities) and self.in_flight.keys().isdisjoint(mine):
                self.in_flight.update(mine)
            else:
                attached.update((e[1], held) for e in entries if (held := self._attach(e)) is not None)
                entries = [entry for entry in entries if entry[1] not in attached]
                identities = [batch.identities[place] for _, place in entries]
        try:
            states = self.filter.reserve_many(identities) if identities else []
        except BaseException:
            self.let_go(entries, Outcome.NOT_PERSISTED)
            raise
        if states.count(NEW) == len(states):
            return deliveries, entries
        return deliveries, [
            e for e, state in zip(entries, states, strict=True) if state is NEW or self._may_go(e, state)
        ]

    def reserve_one(self, identity: Any, callback: Callback | None) -> tuple[Delivery, bool]:
        """Ask for the right to send one message, as :meth:`reserve` and faster; tell whether it may go."""
        with self._lock:
            batch = self._batch
            if len(batch.identities) >= _SHARED:
                batch = self._batch = Batch(self._producer, self.topic, self.failed, self.reported)
            entry = batch, len(batch.identities)
            batch.identities.append(identity)
            batch.outcomes.append(_PENDING)
            batch.messages.append(None)
            if callback is not None:
                batch.callbacks[entry[1]] = [callback]
            if (held := self._attach(entry)) is not None:
                return Delivery(*held, is_attached=True), False
        try:
            state = self.filter.reserve(identity)
        except BaseException:
            self.let_go([entry], Outcome.NOT_PERSISTED)
            raise
        return Delivery(*entry), state is NEW or self._may_go(entry, state)

    def undo(self, entries: list[Entry]) -> None:
        """Undo the reservations of messages that the client did not take."""
        self.filter.release_many([batch.identities[place] for batch, place in entries])
        self.let_go(entries, Outcome.NOT_PERSISTED)

    def let_go(self, entries: list[Entry], outcome: Outcome) -> None:
        """Settle messages that were never handed to the client; their caller is told by what ``produce`` does."""
        for batch, place in entries:
            self.in_flight.pop(batch.identities[place], None)
        self._tell(outcome, entries, is_raised=outcome is Outcome.NOT_PERSISTED)

    def settle(self, seconds: float | None = None) -> None:
        """Mark in the filter what was reported, then make it known; a filter's server is waited for so long."""
        if not self.reported and not any(self._due.values()) and self._mark_error is None:
            return
        with self._settling:
            entries = self.reported[:]
            delivered = [(batch, place) for batch, place in entries if not batch.errors or place not in batch.errors]
            if delivered:
                self._take(_DELIVERED, delivered)
            if len(delivered) < len(entries):
                for batch, place in entries:
                    if place in batch.errors:
                        self._take(outcome_of(batch.errors[place]), [(batch, place)])
            # Only now: whoever is interrupted between two lines does this twice, which is harmless, and never not.
            del self.reported[: len(entries)]
            self._mark_and_tell(MARK_SECONDS if seconds is None else seconds)

    def conclude(self, entries: list[Entry], verdict: Outcome, error: KafkaError | None) -> None:
        """Settle all alike, whatever was reported: the transaction that they belong to is over."""
        for batch, place in entries:
            if verdict is _DELIVERED:
                batch.errors.pop(place, None)
            elif error is not None:
                batch.errors.setdefault(place, error)
        with self._settling:
            self._take(verdict, entries)
            self._mark_and_tell(MARK_SECONDS)

    def finish(self, seconds: float) -> int:
        """Mark what is left and make a last snapshot, before the producer is gone; return how many had no report.

        :raises FilterUnavailable: when marks could not be stored within so long.
        """
        self.settle()
        # The client has no more to tell. A report whose callback was interrupted would leave its message here.
        silent = [(batch, place) for batch, place in list(self.in_flight.values()) if batch.outcomes[place] is _PENDING]
        for batch, place in silent:
            take((batch, place), _SILENT, None)
        self.reported.extend(silent)
        self.settle(seconds)
        if self.log is not None:
            self.log.save(is_clean=True)
        if left := sum(map(len, self._due.values())):
            raise FilterUnavailable(f"{left} outcomes on {self.topic!r} could not be stored in the filter")
        return len(silent)

    def _may_go(self, entry: Entry, state: State) -> bool:
        """Tell whether a message that is not new is sent nevertheless; settle it if not."""
        if state is UNKNOWN:
            entry[0].resent.add(entry[1])
            return True
        self.let_go([entry], Outcome.SKIPPED if state is DUPLICATE else Outcome.HELD_ELSEWHERE)
        return False

    def _attach(self, entry: Entry) -> Entry | None:
        """Attach a call to the message of the same identity that is in flight; return that, if there is one."""
        batch, place = entry
        identity = batch.identities[place]
        held = self.in_flight.setdefault(identity, entry)
        if held is entry:
            return None
        other, there = held
        given = batch.callbacks.pop(place, [None])
        self.attached += 1
        if _is_on(logging.DEBUG):
            self._log_skipped(identity, "is being sent already")
        if other.outcomes[there] is _PENDING:
            other.callbacks.setdefault(there, [None]).extend(given)
        else:  # settled while we came
            self._notify(other, there, given)
        return held

    def _take(self, outcome: Outcome, entries: list[Entry]) -> None:
        self._due[outcome].extend(entries)
        self._to_tell.append((outcome, entries))

    def _mark_and_tell(self, seconds: float) -> None:
        try:
            if self.filter.is_remote:
                self._mark_within(seconds)
            else:
                self._mark()
        finally:
            for outcome, entries in self._to_tell:
                self._tell(outcome, entries)
            self._to_tell.clear()

    def _mark_within(self, seconds: float) -> None:
        """Have a thread bring what is due into the filter: its server may be frozen, and ``poll`` has its bound."""
        if any(self._due.values()) and (self._marking is None or not self._marking.is_alive()):
            self._marking = threading.Thread(target=self._mark_apart, name=f"marks of {self.topic}", daemon=True)
            self._marking.start()
        if self._marking is not None:
            self._marking.join(seconds)
            if self._marking.is_alive():
                logger.warning(
                    "outcomes on %r wait for the filter's server, which has not answered for %g s",
                    self.topic,
                    seconds,
                    extra=about("outcomes_wait") | {"topic": self.topic},
                )
        error, self._mark_error = self._mark_error, None
        if error is not None:
            raise error

    def _mark_apart(self) -> None:
        try:
            self._mark()
        except BaseException as error:  # noqa: BLE001 - raised by who settles next
            self._mark_error = error

    def _mark(self) -> None:
        """Bring what is due into the filter; what a store refuses now is tried again with the next reports."""
        for outcome, due in self._due.items():
            entries = due[:]
            if not entries:
                continue
            keys = [batch.identities[place] for batch, place in entries]
            try:
                if outcome is _DELIVERED:
                    self.filter.confirm_many(keys)
                elif outcome is Outcome.NOT_PERSISTED:
                    self.filter.release_many(keys)
                else:
                    self.filter.mark_unknown_many(keys)
            except (psycopg.Error, FilterUnavailable) as error:
                logger.warning(
                    "%s outcomes on %r wait for the filter's store: %s",
                    len(keys),
                    self.topic,
                    error,
                    extra=about("outcomes_wait") | {"topic": self.topic},
                )
                continue
            deque(map(self.in_flight.pop, keys, repeat(None)), maxlen=0)
            if outcome is _DELIVERED and self.log is not None:
                self.log.confirmed(m for batch, place in entries if (m := batch.messages[place]) is not None)
            del due[: len(entries)]

    def _tell(self, outcome: Outcome, entries: list[Entry], *, is_raised: bool = False) -> None:
        """Make an outcome known to all whose call waits for it."""
        self.counts[outcome] += len(entries)
        for batch, place in entries:
            batch.outcomes[place] = outcome
        is_failure = outcome in FAILURES
        with self._lock:
            for batch, place in entries:
                if is_failure and place not in batch.errors:
                    said = f"{batch.identities[place]!r}: {outcome.value}"
                    batch.errors[place] = KafkaError(FAILURES[outcome][0], said, retriable=True)
                if is_failure or batch.callbacks:
                    callbacks = batch.callbacks.pop(place, [None])
                    if is_raised and callbacks[0] is None:
                        del callbacks[0]
                    self._notify(batch, place, callbacks)
        if self.failed and not is_failure:
            for batch, place in entries:
                self.failed.pop(batch.identities[place], None)
        if outcome is Outcome.SKIPPED and _is_on(logging.DEBUG):
            for batch, place in entries:
                self._log_skipped(batch.identities[place], "was acknowledged before")

    def _notify(self, batch: Batch, place: int, callbacks: Iterable[Callback | None]) -> None:
        """Have callbacks called; note a failure of which no callback is told."""
        for callback in callbacks:
            if callback is not None:
                self.failed.pop(batch.identities[place], None)
                self._calls.append((callback, batch.errors.get(place), batch.messages[place]))
        if None in callbacks and batch.outcomes[place] in FAILURES:
            self.failed[batch.identities[place]] = Delivery(batch, place)

    def _log_skipped(self, identity: object, why: str) -> None:
        extra = about("duplicate_skipped") | {"topic": self.topic}
        logger.debug("%r on %r is not sent: it %s", identity, self.topic, why, extra=extra)
