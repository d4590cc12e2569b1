"""Lane: one topic of a producer, with its filter and its messages in flight."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Hashable
from itertools import repeat
from typing import TYPE_CHECKING, Any

import psycopg
from confluent_kafka import KafkaError, Message

from exactly_once._log import about

from .delivery import Delivery, Outcome, proves_absence
from .errors import FilterUnavailable
from .filter import Filter, Takes
from .recovery import SequenceLog

if TYPE_CHECKING:
    from .publisher import Publisher

logger = logging.getLogger(__name__)

_DELIVERED = Outcome.DELIVERED
_SILENT = KafkaError(KafkaError._FAIL, "the client is closed and gave no report")  # noqa: SLF001 - its public name


class Lane:
    """One topic. ``reported`` is filled by the client's callbacks and emptied by ``settle``, one thread at a time."""

    def __init__(self, producer: Publisher, topic: str, made: Filter[Any], log: SequenceLog | None) -> None:
        self.producer = producer
        self.topic = topic
        self.filter = made
        self.takes: Takes = made.takes
        self.writes_key = made.writes_key
        self.reserve = made.reserve
        self.in_flight: dict[Hashable, Delivery] = {}
        self.reported: list[Delivery] = []
        self.failed: dict[Hashable, Delivery] = {}
        """By identity: failures that nobody has looked at, and that no later call has made good."""
        self.lock = threading.Lock()
        """Held from the reservation of a number until the client has it, so that both happen in the same order."""
        self.log = log
        self._settling = threading.Lock()
        self._due: dict[Outcome, list[Delivery]] = {}
        self._to_tell: list[tuple[Outcome, list[Delivery]]] = []

    def let_go(self, delivery: Delivery, outcome: Outcome) -> None:
        """Settle a delivery that was never handed to the client."""
        self.in_flight.pop(delivery.identity, None)
        delivery.fail(None, outcome)
        if outcome is Outcome.SKIPPED:
            self.failed.pop(delivery.identity, None)
        elif outcome is Outcome.HELD_ELSEWHERE and delivery.callback is None:
            self.failed[delivery.identity] = delivery

    def settle(self) -> None:
        """Mark in the filter what was reported, then make it known."""
        if not self.reported and not self._due:
            return
        with self._settling:
            batch = self.reported[:]
            delivered = [d for d in batch if d.error is None]
            if delivered:
                self._take(_DELIVERED, delivered)
            if len(delivered) < len(batch):
                for delivery in batch:
                    if delivery.error is not None:
                        self._take(_outcome_of(delivery.error), [delivery])
            # Only now: whoever is interrupted between two lines does this twice, which is harmless, and never not.
            del self.reported[: len(batch)]
            self._mark_and_tell()

    def conclude(self, deliveries: list[Delivery], verdict: Outcome, error: KafkaError | None) -> None:
        """Settle all alike, whatever was reported: the transaction that they belong to is over."""
        for delivery in deliveries:
            delivery.error = None if verdict is _DELIVERED else delivery.error or error
        with self._settling:
            self._take(verdict, deliveries)
            self._mark_and_tell()

    def finish(self) -> int:
        """Mark what is left and make a last snapshot, before the producer is gone; return how many had no report.

        :raises FilterUnavailable: when marks could not be stored.
        """
        self.settle()
        # The client has no more to tell. A report whose callback was interrupted would leave its message here.
        silent = [delivery for delivery in list(self.in_flight.values()) if not delivery.done()]
        self.reported.extend(silent)
        for delivery in silent:
            delivery.take(_SILENT, None)
        self.settle()
        if self.log is not None:
            self.log.save(is_clean=True)
        if self._due:
            left = sum(map(len, self._due.values()))
            raise FilterUnavailable(f"{left} outcomes on {self.topic!r} could not be stored in the filter")
        return len(silent)

    def _take(self, outcome: Outcome, deliveries: list[Delivery]) -> None:
        self._due.setdefault(outcome, []).extend(deliveries)
        self._to_tell.append((outcome, deliveries))

    def _mark_and_tell(self) -> None:
        try:
            self._mark()
        finally:
            for outcome, deliveries in self._to_tell:
                for delivery in deliveries:
                    delivery.settle(outcome)
                if outcome is not _DELIVERED:
                    self.failed.update((d.identity, d) for d in deliveries if d.callback is None)
                elif self.failed:
                    for delivery in deliveries:
                        self.failed.pop(delivery.identity, None)
            self._to_tell.clear()

    def _mark(self) -> None:
        """Bring what is due into the filter; what a store refuses now is tried again with the next reports."""
        # What was delivered comes last: a snapshot must not be made before the doubts of the same batch are known.
        for outcome, deliveries in sorted(self._due.items(), key=lambda due: due[0] is _DELIVERED):
            keys = [d.identity for d in deliveries]
            try:
                if outcome is Outcome.DELIVERED:
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
                    extra=about("outcomes_wait") | {"topic": self.topic, "producer": self.producer.producer_name},
                )
                continue
            del self._due[outcome]
            deque(map(self.in_flight.pop, keys, repeat(None)), maxlen=0)
            if outcome is Outcome.DELIVERED and self.log is not None:
                self.log.confirmed(_messages(deliveries))


def _outcome_of(error: KafkaError) -> Outcome:
    return Outcome.NOT_PERSISTED if proves_absence(error) else Outcome.UNKNOWN


def _messages(deliveries: list[Delivery]) -> list[Message]:
    return [d.message for d in deliveries if d.message is not None]
