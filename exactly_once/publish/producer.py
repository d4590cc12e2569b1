"""DedupProducer: confluent-kafka's producer behind a duplicate filter."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from confluent_kafka import Producer

from .chain import Link
from .delivery import Callback, Delivery, Outcome
from .errors import KeyRefused
from .headers import Headers, with_key
from .keys import MAX_KEY_LENGTH, GivenKey, checked
from .lane import Lane
from .protocol import State
from .publisher import Going, Outgoing, Publisher, goes, take_back
from .settings import client_settings

_NEW = State.NEW


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
    ``producer_name`` before must have ended.

    With ``owner=PublishOwner(conninfo, name=..., exclusive=True)`` a second producer under the name is refused while
    this one lives, and this one is told with :class:`ProducerFenced` when it was taken for dead.

    Reports are served by ``poll``, ``flush``, ``close`` and ``Delivery.result``, in the thread that calls them. Every
    method may be called from any thread.
    """

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
        if lane.takes != "dedup_key" or dedup_key is None:
            given = Outgoing(value, key, dedup_key, sequence, chain, partition, headers, timestamp, on_delivery)
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
            lane.release(delivery, Outcome.NOT_PERSISTED)
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
            lane.filter.forget(dedup_key)
            lane.release(delivery, Outcome.NOT_PERSISTED)
            raise
        return delivery

    def produce_many(self, topic: str, messages: Iterable[Outgoing], *, room_seconds: float = 60.0) -> list[Delivery]:
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

    def _connect(self) -> Producer:
        return Producer(client_settings(self._settings))

    def _produce_other(self, lane: Lane, given: Outgoing) -> Delivery:
        if lane.takes == "dedup_key":
            raise KeyRefused(f"a message to {lane.topic!r} needs dedup_key=, because its filter knows keys")
        with lane.lock:
            delivery, goes_on = self._reserve_one(lane, given)
            if goes_on:
                going: Going = [(delivery, given)]
                try:
                    self._hand_over(delivery, given, delivery)
                except BaseException:
                    take_back(going)
                    raise
            return delivery
