"""Committer: numbered messages of a producer, published in Kafka transactions one after another.

Only a transactional producer can be fenced at the brokers: what a frozen predecessor still has does not arrive, and
what a killed one has put into a leader's log is decided before its successor reads it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException

from exactly_once._log import about
from exactly_once.errors import BrokerUnreachable

from .delivery import Batch, Outcome, outcome_of
from .errors import ProducerFenced, TailHidden
from .publisher import ToSend
from .transactional import TransactionalProducer, conclude

logger = logging.getLogger(__name__)

# For one attempt: the brokers' default of how long a transaction may last.
_SECONDS = 60.0
# Between two attempts: brokers that refuse at once are not asked without end.
_PAUSE_SECONDS = 0.2


class Committer:
    """Collects messages and publishes them together; those of a transaction that surely failed are sent again."""

    def __init__(self, producer: TransactionalProducer, *, messages: int, seconds: float, timeout: float) -> None:
        self.producer = producer
        self._messages = messages
        self._seconds = seconds
        # For so long a message is tried.
        self._timeout = timeout
        producer.find_seconds = min(_SECONDS, timeout)
        self._collected: list[tuple[Batch, list[int]]] = []
        # How many are collected or being published.
        self._count = 0
        # When the first of ``_collected`` came.
        self._since = 0.0
        # For ``_collected``.
        self._adding = threading.Lock()
        # Held while messages are published.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def add(self, batch: Batch, places: Sequence[int]) -> None:
        """Take messages that were reserved, and publish what has come together if it is many."""
        with self._adding:
            if not self._collected:
                self._since = time.monotonic()
            if self._collected and self._collected[-1][0] is batch:
                self._collected[-1][1].extend(places)
            else:
                self._collected.append((batch, list(places)))
            self._count += len(places)
        if self._count >= self._messages:
            self.commit()

    def commit_if_due(self) -> None:
        """Publish what has come together if the first of it has waited for long enough."""
        if self._collected and time.monotonic() - self._since >= self._seconds:
            self.commit()

    def commit(self) -> None:
        """Publish what has come together, and settle it.

        :raises ProducerFenced: when another producer has taken over; none of it was sent.
        """
        with self._lock:
            with self._adding:
                to_send, self._collected = self._collected, []
            try:
                self._publish(to_send)
            finally:
                with self._adding:
                    self._count -= sum(len(places) for _, places in to_send)
                conclude(to_send, Outcome.UNKNOWN, None)  # those that an interruption has left

    def _publish(self, to_send: Sequence[ToSend]) -> None:
        deadline = time.monotonic() + self._timeout
        while to_send:
            error: KafkaError | None = None
            try:
                verdict, error = self.producer.send(to_send, min(_SECONDS, max(0.1, deadline - time.monotonic())))
            except ProducerFenced:
                conclude(to_send, Outcome.NOT_PERSISTED, KafkaError(KafkaError._FENCED))  # noqa: SLF001 - its public name
                raise
            except (KafkaException, BufferError, BrokerUnreachable, TailHidden, TypeError, ValueError) as problem:
                # Nothing was committed. The last two are of a message that is none: it has its error, the others go.
                verdict = Outcome.NOT_PERSISTED
                error = problem.args[0] if isinstance(problem, KafkaException) else None
                logger.warning("numbered messages could not be sent: %s", problem, extra=about("commit_failed"))
            to_send = self._settle(to_send, verdict, error, is_over=time.monotonic() >= deadline)
            if to_send:
                time.sleep(_PAUSE_SECONDS)

    def _settle(
        self, to_send: Sequence[ToSend], verdict: Outcome, error: KafkaError | None, *, is_over: bool
    ) -> list[ToSend]:
        """Conclude what is decided; return what is to be sent again."""
        again: list[ToSend] = []
        if verdict is Outcome.NOT_PERSISTED and not is_over:
            for batch, places in to_send:
                kept = [place for place in places if not _is_refused(batch.errors.get(place))]
                again += [(batch, kept)] if kept else []
            count = sum(len(places) for _, places in to_send)
            if sum(len(places) for _, places in again) == count and error is not None and _is_refused(error):
                again = []  # the client itself refused one of them, and does not tell which
        waits = {(batch, place) for batch, places in again for place in places}
        conclude([(b, [p for p in places if (b, p) not in waits]) for b, places in to_send], verdict, error)
        for batch, places in again:
            batch.send_again(places)
        return again


def _is_refused(error: KafkaError | None) -> bool:
    return error is not None and outcome_of(error) is Outcome.NOT_PERSISTED
