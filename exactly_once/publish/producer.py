"""DedupProducer: confluent-kafka's producer behind a duplicate filter."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

from confluent_kafka import KafkaError, KafkaException

from exactly_once._log import about
from exactly_once.errors import BrokerUnreachable, ClientFailed

from .chain import Link
from .delivery import Batch, Callback, Delivery, Outcome, Payload, outcome_of
from .errors import KeyRefused, ProducerFenced, TailHidden
from .filter import NoFilter
from .headers import Headers, kept
from .keys import GivenKey, checked
from .options import DedupOptions, check_options
from .publisher import AnyFilter, ProducerRecord, Publisher, ToSend, check_fatal, error_of
from .topic import Columns
from .transactional import TransactionalProducer, conclude

logger = logging.getLogger(__name__)

# For one attempt: the brokers' default of how long a transaction may last.
_SECONDS = 60.0
# Between two attempts: brokers that refuse at once are not asked without end.
_PAUSE_SECONDS = 0.2
_ANY_ORDER = contextlib.nullcontext()
_UNSENT = (KafkaException, ClientFailed, BufferError, BrokerUnreachable, TailHidden, TypeError, ValueError)


class DedupProducer(Publisher):
    """Produces what a filter has not seen: ``DedupProducer(kafka, dedup=lambda topic: WindowFilter(keys=1_000_000))``.

    ``dedup`` makes the filter of a topic; a filter itself may be given by who writes to one topic only, because the
    same key on two topics is two messages. The client is idempotent with ``acks=all``, which covers its own retries;
    the filter covers those of the application. What survives a crash or holds between processes is its promise.

    A message is marked as sent when the broker has acknowledged it. A failed one can be sent again under the same key,
    and so can one whose outcome is unknown: then ``delivery.may_repeat`` says that it may be in the log twice.

    With a :class:`SequenceFilter` the numbers are recovered from the topic when it is first used, and
    ``last_sequence_id(topic)`` tells where to go on. Numbered messages are published in Kafka transactions: so an
    earlier producer of the name is fenced, and told with :class:`ProducerFenced`. ``docs/publishing.md`` says when.

    The other keywords are those of :class:`DedupOptions`. Reports are served by ``poll``, ``flush``, ``close`` and
    ``Delivery.result``, in the thread that calls them. Every method may be called from any thread.
    """

    _options: DedupOptions

    def __init__(
        self,
        kafka: Mapping[str, Any],
        *,
        dedup: AnyFilter | Callable[[str], AnyFilter],
        **options: Unpack[DedupOptions],
    ) -> None:
        check_options(kafka, options, DedupOptions)
        self._committer: Committer | None = None
        super().__init__(kafka, dedup=dedup, options=options)

    def produce(
        self,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        *,
        dedup_key: GivenKey | None = None,
        sequence: int | None = None,
        chain: Link | None = None,
        partition: int = -1,
        headers: Headers | None = None,
        timestamp: int = 0,
        on_delivery: Callback | None = None,
    ) -> Delivery:
        """Send a message unless its identity was sent before; return what becomes of it.

        ``on_delivery(error, message)`` is called as by confluent-kafka, for duplicates too; the message is None where
        nothing was sent.

        :raises BufferError: when the client's queue is full; nothing was marked. Call ``poll`` and try again.
        :raises KeyRefused: when the identity is missing or cannot be one.
        """
        ready = self._ready(topic)
        takes = ready.filter.takes
        if takes == "dedup_key" and dedup_key is not None and sequence is None and chain is None:
            identity: Any = checked(dedup_key)
        else:
            (identity,) = self._identities(ready, ((dedup_key,), (sequence,), (chain,)))
        extra = (partition, kept(headers), timestamp) if headers or timestamp or partition != -1 else None
        with ready.order if takes == "sequence" else _ANY_ORDER:
            batch, place, delivery, may_go = ready.reserve((identity, value, key, extra, on_delivery))
            if may_go and (extra is not None or ready.filter.writes_key):
                self._send(batch, (place,), 0.0)
            elif may_go:
                try:
                    self._client.produce(topic, value, key, -1, batch.callback_of(place))  # type: ignore[arg-type]
                except BaseException as error:
                    ready.hand_over_failed(batch, (place,), error)
                    check_fatal(error)
                    raise
        return delivery

    def produce_many(
        self,
        topic: str,
        messages: Iterable[ProducerRecord] | Iterable[Payload],
        *,
        dedup_keys: Iterable[GivenKey] | None = None,
        sequences: Iterable[int] | None = None,
        room_seconds: float = 60.0,
    ) -> Sequence[Delivery]:
        """Send several messages with one question to the filter; return a delivery for each, in their order.

        ``messages`` are :class:`ProducerRecord`, or the values alone where ``dedup_keys`` or ``sequences`` name them:
        that is the fastest way. Where the client's queue is full, reports are served until there is room.

        :raises BufferError: when there is none within ``room_seconds``; what was not handed over is not marked.
        :raises KeyRefused: when an identity is missing or cannot be one; nothing was marked.
        """
        for several in (messages, dedup_keys):
            if isinstance(several, (str, bytes, bytearray, memoryview)):
                kind = type(several).__name__
                raise TypeError(
                    f"produce_many takes several messages and keys, not one {kind}, whose parts would be sent"
                )
        ready = self._ready(topic)
        given: list[Any] = list(messages)
        if dedup_keys is None and sequences is None:
            if odd := [type(each).__name__ for each in given if not isinstance(each, ProducerRecord)]:
                raise KeyRefused(f"a {odd[0]} has no identity: give dedup_keys= or sequences=, or take ProducerRecord")
            columns = self._columns(ready, given)
        else:
            nothing: list[Any] = [None] * len(given)
            names = [nothing if named is None else list(named) for named in (dedup_keys, sequences)]
            for column in names:
                if len(column) != len(given):
                    raise KeyRefused(f"{len(given)} messages need as many identities, not {len(column)}")
            columns = Columns(self._identities(ready, (*names, nothing)), given, nothing, {}, {})
        with ready.order if ready.filter.takes == "sequence" else _ANY_ORDER:
            deliveries, batch, places = ready.reserve_many(columns)
            if places:
                self._send(batch, places, room_seconds)
        return deliveries

    def __len__(self) -> int:
        """Return how many messages wait for their report."""
        return super().__len__() + (0 if self._committer is None else len(self._committer))

    def hurry(self, *, only_if_due: bool = False) -> None:
        """Publish what waits for more to come, or what has waited for long enough."""
        super().hurry(only_if_due=only_if_due)
        if self._committer is not None:
            self._committer.commit(only_if_due=only_if_due)

    def _close_others(self) -> None:
        if self._committer is not None:
            self._committer.producer.close()

    def _send(self, batch: Batch, places: Sequence[int], room_seconds: float) -> None:
        if self._committer is not None and batch.topic.is_transactional:
            self._committer.add(batch, places)
        else:
            self._hand_over(batch, places, room_seconds)

    def _fence_predecessor(self) -> bool:
        """Make the transactional client of this name: that fences the last one and ends what it left open."""
        options = self._options
        if not options.get("transactions", True):
            return False
        if self._committer is None:
            settings = {**self._settings, "transactional.id": f"exactly-once-{self.producer_name}"}
            # Of one transaction: the client refuses more. Those of one that failed are sent again.
            limit_ms = float(settings.get("transaction.timeout.ms", 1000 * _SECONDS))
            settings["message.timeout.ms"] = round(min(1000 * self.send_seconds, limit_ms))
            inner = TransactionalProducer(settings, dedup=NoFilter(), producer_name=self.producer_name)
            inner.find_seconds = min(_SECONDS, self.send_seconds)
            inner.logs = self._logs
            self._committer = Committer(
                inner,
                messages=options.get("commit_messages", 5000),
                seconds=options.get("commit_seconds", 0.5),
                timeout=self.send_seconds,
            )
        return True

    def nothing_arrives(self) -> contextlib.AbstractContextManager[None]:
        """See to it that nothing of its numbered messages arrives meanwhile."""
        return super().nothing_arrives() if self._committer is None else self._committer.producer.nothing_arrives()


class Committer:
    """Collects numbered messages and publishes them in transactions; those of one that surely failed are sent again.

    Only a transactional producer can be fenced at the brokers: what a frozen predecessor still has does not arrive, and
    what a killed one has put into a leader's log is decided before its successor reads it.
    """

    def __init__(self, producer: TransactionalProducer, *, messages: int, seconds: float, timeout: float) -> None:
        self.producer = producer
        self.messages, self.seconds = messages, seconds
        # In seconds: for so long a message is tried.
        self.timeout = timeout
        self._collected: list[tuple[Batch, list[int]]] = []
        # What is being published, or was by somebody who was interrupted; cleared when all of it is concluded.
        self._publishing: list[tuple[Batch, list[int]]] = []
        # How many messages are in the two.
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
        """Take messages that were reserved, and publish what has come together if it is many or has waited for long."""
        with self._adding:
            if not self._collected:
                self._since = time.monotonic()
            if self._collected and self._collected[-1][0] is batch:
                self._collected[-1][1].extend(places)
            else:
                self._collected.append((batch, list(places)))
            self._count += len(places)
        self.commit(only_if_due=self._count < self.messages)

    def commit(self, *, only_if_due: bool = False) -> None:
        """Publish what has come together, and settle it; or do so if the first of it has waited for long enough.

        :raises ProducerFenced: when another producer has taken over; none of it was sent.
        """
        is_interrupted = bool(self._publishing) and not self._lock.locked()
        is_due = self._collected and time.monotonic() - self._since >= self.seconds
        if only_if_due and not is_due and not is_interrupted:
            return
        with self._lock:
            self._end()
            with self._adding:
                self._publishing, self._collected = self._collected, []
            deadline = time.monotonic() + self.timeout
            left: Sequence[ToSend] = self._publishing
            try:
                while left:
                    left = self._send(left, deadline)
                    if left:
                        time.sleep(_PAUSE_SECONDS)
            finally:
                self._end()

    def _end(self) -> None:
        """Be done with what was published; what an interruption has left is unknown."""
        problem: Exception | None = None
        try:
            conclude(self._publishing, Outcome.UNKNOWN, None)
        except Exception as error:  # noqa: BLE001 - of a mark, which is made with the next ones
            problem = error
        with self._adding:
            self._count = sum(len(places) for _, places in self._collected)
            self._publishing = []
        if problem is not None:
            raise problem

    def _send(self, to_send: Sequence[ToSend], deadline: float) -> list[ToSend]:
        """Publish messages and conclude what is decided; return what is to be sent again."""
        error: KafkaError | None = None
        try:
            verdict, error = self.producer.send(to_send, min(_SECONDS, max(0.1, deadline - time.monotonic())))
        except ProducerFenced:
            conclude(to_send, Outcome.NOT_PERSISTED, KafkaError(KafkaError._FENCED))  # noqa: SLF001 - its public name
            raise
        except _UNSENT as problem:
            # Nothing was committed. The last two are of a message that is none: it has its error, the others go.
            verdict = Outcome.NOT_PERSISTED
            error = error_of(problem)
            logger.warning("numbered messages could not be sent: %s", problem, extra=about("commit_failed"))
        over, again = list(to_send), list[ToSend]()
        if verdict is Outcome.NOT_PERSISTED and time.monotonic() < deadline:
            refused = {
                (batch, place)
                for batch, places in to_send
                for place in places
                if place in batch.errors and outcome_of(batch.errors[place]) is Outcome.NOT_PERSISTED
            }
            # Where the client itself has refused one of them, and does not tell which, none is sent again.
            if refused or error is None or outcome_of(error) is not Outcome.NOT_PERSISTED:
                over = [(batch, [p for p in places if (batch, p) in refused]) for batch, places in to_send]
                again = [(batch, [p for p in places if (batch, p) not in refused]) for batch, places in to_send]
        conclude(over, verdict, error)
        for batch, places in again:
            batch.send_again(places)
        return [(batch, places) for batch, places in again if places]
