"""Committer: numbered messages of a producer, published in Kafka transactions one after another.

Only a transactional producer can be fenced at the brokers: what a frozen predecessor still has does not arrive, and
what a killed one has put into a leader's log is decided before its successor reads it.
"""

from __future__ import annotations

import logging
import threading
import time

from confluent_kafka import KafkaError, KafkaException

from exactly_once._log import about
from exactly_once.errors import BrokerUnreachable

from .delivery import Outcome, proves_absence
from .errors import ProducerFenced, TailHidden
from .publisher import Going
from .transactional import TransactionalProducer, conclude

logger = logging.getLogger(__name__)

_SECONDS = 60.0
"""For one attempt: the brokers' default of how long a transaction may last."""
_PAUSE_SECONDS = 0.2
"""Between two attempts: brokers that refuse at once are not asked without end."""


class Committer:
    """Collects messages and publishes them together; those of a transaction that surely failed are sent again."""

    def __init__(self, producer: TransactionalProducer, *, messages: int, seconds: float, timeout: float) -> None:
        self.producer = producer
        self._messages = messages
        self._seconds = seconds
        self._timeout = timeout
        """For so long a message is tried."""
        producer.find_seconds = min(_SECONDS, timeout)
        self._going: Going = []
        self._since = 0.0
        """When the first of ``_going`` came."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._going)

    def add(self, going: Going) -> None:
        """Take messages that were reserved, and publish what has come together if it is many."""
        if not self._going:
            self._since = time.monotonic()
        self._going += going
        if len(self._going) >= self._messages:
            self.commit()

    def commit_if_due(self) -> None:
        """Publish what has come together if the first of it has waited for long enough."""
        if self._going and time.monotonic() - self._since >= self._seconds:
            self.commit()

    def commit(self) -> None:
        """Publish what has come together, and settle it.

        :raises ProducerFenced: when another producer has taken over; none of it was sent.
        """
        with self._lock:
            going = self._going[:]
            try:
                self._publish(going)
            finally:
                conclude(going, Outcome.UNKNOWN, None)  # those that an interruption has left
                del self._going[: len(going)]

    def _publish(self, going: Going) -> None:
        deadline = time.monotonic() + self._timeout
        while going:
            error: KafkaError | None = None
            try:
                verdict, error = self.producer.send(going, min(_SECONDS, max(0.1, deadline - time.monotonic())))
            except ProducerFenced:
                conclude(going, Outcome.NOT_PERSISTED, KafkaError(KafkaError._FENCED))  # noqa: SLF001 - its public name
                raise
            except (KafkaException, BufferError, BrokerUnreachable, TailHidden) as problem:  # nothing was committed
                verdict = Outcome.NOT_PERSISTED
                error = problem.args[0] if isinstance(problem, KafkaException) else None
                logger.warning("numbered messages could not be sent: %s", problem, extra=about("commit_failed"))
            going = self._settle(going, verdict, error, is_over=time.monotonic() >= deadline)
            if going:
                time.sleep(_PAUSE_SECONDS)

    def _settle(self, going: Going, verdict: Outcome, error: KafkaError | None, *, is_over: bool) -> Going:
        """Conclude what is decided; return what is to be sent again."""
        again: Going = []
        if verdict is Outcome.NOT_PERSISTED and not is_over:
            again = [pair for pair in going if not _is_refused(pair[0].error)]
            if len(again) == len(going) and error is not None and _is_refused(error):
                again = []  # the client itself refused one of them, and does not tell which
        kept = {id(delivery) for delivery, _ in again}
        conclude([pair for pair in going if id(pair[0]) not in kept], verdict, error)
        for delivery, _ in again:
            delivery.take(None, None)
        return again


def _is_refused(error: KafkaError | None) -> bool:
    return error is not None and proves_absence(error)
