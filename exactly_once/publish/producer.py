"""DedupProducer: confluent-kafka's producer behind a duplicate filter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from confluent_kafka import Producer

from .chain import Link
from .committer import Committer
from .delivery import Batch, Callback, Delivery, Payload
from .errors import KeyRefused
from .filter import NoFilter
from .headers import Headers
from .keys import GivenKey, checked
from .options import DedupKeywords, DedupOptions, client_settings
from .publisher import CLOSE_SECONDS, AnyFilter, ProducerRecord, Publisher
from .recovery import SequenceLog
from .topic import Columns, TopicPublisher
from .transactional import TransactionalProducer

# librdkafka's default of message.timeout.ms.
_TIMEOUT_MS = 300_000
_ANY_ORDER = contextlib.nullcontext()


class DedupProducer(Publisher):
    """Produces what a filter has not seen: ``DedupProducer(kafka, dedup=lambda topic: WindowFilter(keys=1_000_000))``.

    ``dedup`` makes the filter of a topic; a filter itself may be given by who writes to one topic only, because the
    same key on two topics is two messages. ``topics={"audit.*": False}`` turns deduplication off for topics that match,
    ``enabled=False`` for all. The client is idempotent with ``acks=all``, which covers its own retries; the filter
    covers those of the application.

    A message is marked as sent when the broker has acknowledged it. A failed one can be sent again under the same key,
    and so can one whose outcome is unknown: then ``delivery.may_repeat`` says that it may be in the log twice. What
    survives a crash or holds between processes is the filter's promise.

    With a :class:`SequenceFilter` the numbers are recovered from the topic when it is first used, ``snapshots`` (a
    directory, or a function that makes the store of a topic) saves
    reading it from its beginning, and ``last_sequence_id(topic)`` tells where to go on. Whoever used the same
    ``producer_name`` before must have ended. Numbered messages are published in Kafka transactions, by a client whose
    transactional id is ``exactly-once-<producer_name>``: when ``commit_messages`` have come together; when the first
    has waited for ``commit_seconds`` and ``produce`` or ``poll`` is called; at ``flush``, ``close`` and ``result``. So
    a predecessor that was taken for dead is fenced, and told with :class:`ProducerFenced`. A message is tried for
    ``message.timeout.ms``, and the call that publishes waits meanwhile. With ``transactions=False`` nobody is fenced,
    and recovery after an unclean end waits for the brokers' ``replica.lag.time.max.ms``.

    With ``owner=PublishOwner(conninfo, name=..., exclusive=True)`` a second producer under the name is refused while
    this one lives, and this one is told with :class:`ProducerFenced` when it was taken for dead.

    The other keywords are those of :class:`DedupOptions`. Reports are served by ``poll``, ``flush``, ``close`` and
    ``Delivery.result``, in the thread that calls them. Every method may be called from any thread.
    """

    _options: DedupOptions

    def __init__(
        self,
        kafka: Mapping[str, Any],
        *,
        dedup: AnyFilter | Callable[[str], AnyFilter],
        **options: Unpack[DedupKeywords],
    ) -> None:
        self._committer: Committer | None = None
        super().__init__(kafka, dedup=dedup, options=DedupOptions.of(options))

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
        extra = (partition, headers, timestamp) if headers or timestamp or partition != -1 else None
        if takes == "sequence":
            with ready.order:
                batch, place, delivery, may_go = ready.reserve((identity, value, key, extra, on_delivery))
                if may_go:
                    self._send(batch, (place,), 0.0)
            return delivery
        batch, place, delivery, may_go = ready.reserve((identity, value, key, extra, on_delivery))
        if may_go and (extra is not None or ready.filter.writes_key):
            self._send(batch, (place,), 0.0)
        elif may_go:
            try:
                self._client.produce(topic, value, key, -1, batch.callback_of(place))  # type: ignore[arg-type]
            except BaseException:
                ready.undo(batch, (place,))
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
        ready = self._ready(topic)
        given: list[Any] = list(messages)
        if dedup_keys is None and sequences is None:
            columns = self._columns(ready, given)
        else:
            nothing: list[Any] = [None] * len(given)
            names = [nothing if named is None else list(named) for named in (dedup_keys, sequences)]
            if any(len(column) != len(given) for column in names):
                raise KeyRefused(f"{len(given)} messages need as many identities, not {min(map(len, names))}")
            columns = Columns(self._identities(ready, (*names, nothing)), given, nothing, {}, {})
        with ready.order if ready.filter.takes == "sequence" else _ANY_ORDER:
            deliveries, batch, places = ready.reserve_many(columns)
            if places:
                self._send(batch, places, room_seconds)
        return deliveries

    def __len__(self) -> int:
        """Return how many messages wait for their report."""
        return super().__len__() + (0 if self._committer is None else len(self._committer))

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Publish and flush what is left, then end; raises as :meth:`flush`, and for what has no report by then."""
        try:
            super().close(timeout_seconds)
        finally:
            if self._committer is not None:
                self._committer.producer.close()

    def _send(self, batch: Batch, places: Sequence[int], room_seconds: float) -> None:
        if self._committer is not None and batch.topic.is_transactional:
            self._committer.add(batch, places)
        else:
            self._hand_over(batch, places, room_seconds)

    def _concludes(self, log: SequenceLog | None) -> bool:
        return self._committer is not None and log is not None

    def _connect(self) -> Producer:
        return Producer(client_settings(self._settings))

    def _fence_predecessor(self) -> bool:
        """Make the transactional client of this name: that fences the last one and ends what it left open."""
        if not self._options.transactions:
            return False
        if self._committer is None:
            timeout_ms = float(self._settings.get("message.timeout.ms", _TIMEOUT_MS))
            settings = {**self._settings, "transactional.id": f"exactly-once-{self.producer_name}"}
            if "message.timeout.ms" in settings:  # the client refuses a shorter one
                settings.setdefault("transaction.timeout.ms", max(60_000, int(timeout_ms)))
            inner = TransactionalProducer(settings, dedup=NoFilter(), producer_name=self.producer_name)
            inner.logs = lambda: [topic.log for topic in self._topics.values() if topic.log is not None]
            options = self._options
            self._committer = Committer(
                inner, messages=options.commit_messages, seconds=options.commit_seconds, timeout=timeout_ms / 1000
            )
        return True

    @contextlib.contextmanager
    def _nothing_arrives(self, topic: TopicPublisher) -> Iterator[bool]:
        if self._committer is None or not topic.is_transactional:
            yield False
            return
        with self._committer.producer.nothing_arrives():
            yield True

    def _commit(self, *, only_if_due: bool = False) -> None:
        if self._committer is not None:
            self._committer.commit_if_due() if only_if_due else self._committer.commit()
