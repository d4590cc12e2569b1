"""DedupProducer: confluent-kafka's producer behind a duplicate filter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from .chain import Link
from .committer import Committer
from .delivery import Callback, Delivery, Outcome
from .errors import KeyRefused
from .filter import NoFilter, State
from .headers import Headers, with_key
from .keys import MAX_KEY_LENGTH, GivenKey, checked
from .lane import Lane
from .owners import PublishOwner
from .publisher import CLOSE_SECONDS, AnyFilter, Going, ProducerRecord, Publisher, goes, only, take_back
from .settings import client_settings
from .snapshot import SnapshotStore
from .transactional import TransactionalProducer

_NEW = State.NEW
_TIMEOUT_MS = 300_000
"""librdkafka's default of message.timeout.ms."""


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

    Reports are served by ``poll``, ``flush``, ``close`` and ``Delivery.result``, in the thread that calls them. Every
    method may be called from any thread.
    """

    def __init__(
        self,
        kafka: Mapping[str, Any],
        *,
        dedup: AnyFilter | Callable[[str], AnyFilter],
        producer_name: str | None = None,
        owner: PublishOwner | None = None,
        enabled: bool = True,
        topics: Mapping[str, bool] | None = None,
        recover: bool = True,
        snapshots: Callable[[str], SnapshotStore] | str | Path | None = None,
        snapshot_every: int = 1000,
        accept_trimmed: bool = False,
        transactions: bool = True,
        commit_messages: int = 5000,
        commit_seconds: float = 0.5,
    ) -> None:
        self._commits = (commit_messages, commit_seconds) if transactions else None
        self._committer: Committer | None = None
        super().__init__(
            kafka,
            dedup=dedup,
            producer_name=producer_name,
            owner=owner,
            enabled=enabled,
            topics=topics,
            recover=recover,
            snapshots=snapshots,
            snapshot_every=snapshot_every,
            accept_trimmed=accept_trimmed,
        )

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
        if self._owner is not None:
            self._owner.check()
        self._check_open()
        lane = self._lanes.get(topic) or self._open(topic)
        if lane.takes != "dedup_key" or dedup_key is None or sequence is not None or chain is not None:
            given = ProducerRecord(value, key, dedup_key, sequence, chain, partition, headers, timestamp, on_delivery)
            return self._produce_other(lane, given)
        if (type(dedup_key) is not bytes and type(dedup_key) is not str) or not 0 < len(dedup_key) <= MAX_KEY_LENGTH:
            dedup_key = checked(dedup_key)
        delivery = Delivery(lane, dedup_key, on_delivery)
        held = lane.in_flight.setdefault(dedup_key, delivery)
        if held is not delivery:
            return held.attach(on_delivery)
        try:
            state = lane.reserve(dedup_key)
        except BaseException:
            lane.let_go(delivery, Outcome.NOT_PERSISTED)
            raise
        if state is not _NEW and not goes(delivery, state):
            return delivery
        if lane.writes_key:
            headers = with_key(headers, dedup_key)
        try:
            if headers is None and not timestamp:  # the usual case, without keywords
                self._client.produce(topic, value, key, partition, delivery)
            else:
                self._client.produce(
                    topic,
                    value,
                    key,
                    partition,
                    delivery,
                    timestamp=timestamp,
                    headers=headers,  # type: ignore[arg-type]  # any pairs will do
                )
        except BaseException:
            lane.filter.release(dedup_key)
            lane.let_go(delivery, Outcome.NOT_PERSISTED)
            raise
        return delivery

    def produce_many(
        self, topic: str, messages: Iterable[ProducerRecord], *, room_seconds: float = 60.0
    ) -> list[Delivery]:
        """Send several messages with one question to the filter: for filters that ask a server.

        Where the client's queue is full, reports are served until there is room.

        :raises BufferError: when there is none within ``room_seconds``; what was not handed over is not marked.
        """
        wanted = list(messages)
        if self._owner is not None:
            self._owner.check()
        self._check_open()
        lane = self._lanes.get(topic) or self._open(topic)
        if lane.takes != "dedup_key":
            return [self._with_room(partial(self._produce_other, lane, m), room_seconds) for m in wanted]
        deliveries, going = self._reserve(lane, wanted)
        for place, (delivery, message) in enumerate(going):
            try:
                try:
                    self._hand_over(delivery, message, delivery)
                except BufferError:
                    self._with_room(partial(self._hand_over, delivery, message, delivery), room_seconds)
            except BaseException:
                take_back(going[place:])
                raise
        return deliveries

    def __len__(self) -> int:
        """Return how many messages wait for their report."""
        return super().__len__() + (0 if self._committer is None else len(self._committer))

    def _connect(self) -> Producer:
        return Producer(client_settings(self._settings))

    def _fence_predecessor(self) -> bool:
        """Make the transactional client of this name: that fences the last one and ends what it left open."""
        if self._commits is None:
            return False
        if self._committer is None:
            timeout_ms = float(self._settings.get("message.timeout.ms", _TIMEOUT_MS))
            settings = {**self._settings, "transactional.id": f"exactly-once-{self.producer_name}"}
            if "message.timeout.ms" in settings:  # the client refuses a shorter one
                settings.setdefault("transaction.timeout.ms", max(60_000, int(timeout_ms)))
            inner = TransactionalProducer(settings, dedup=NoFilter(), producer_name=self.producer_name)
            inner.logs = lambda: [lane.log for lane in self._lanes.values() if lane.log is not None]
            messages, seconds = self._commits
            self._committer = Committer(inner, messages=messages, seconds=seconds, timeout=timeout_ms / 1000)
        return True

    def _commit(self, *, only_if_due: bool = False) -> None:
        if self._committer is not None:
            self._committer.commit_if_due() if only_if_due else self._committer.commit()

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Publish and flush what is left, then end; raises as :meth:`flush`, and for what has no report by then."""
        try:
            super().close(timeout_seconds)
        finally:
            if self._committer is not None:
                self._committer.producer.close()

    def _produce_other(self, lane: Lane, given: ProducerRecord) -> Delivery:
        if lane.takes == "dedup_key":
            only(given, "dedup_key")
            raise KeyRefused(f"a message to {lane.topic!r} needs dedup_key=, because its filter knows keys")
        with lane.lock:
            delivery, goes_on = self._reserve_one(lane, given)
            if goes_on:
                going: Going = [(delivery, given)]
                if self._committer is not None and lane.log is not None:
                    self._committer.add(going)
                    return delivery
                try:
                    self._hand_over(delivery, given, delivery)
                except BaseException:
                    take_back(going)
                    raise
            return delivery
