"""DedupProducer: confluent-kafka's producer behind a duplicate filter."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self, cast
from uuid import uuid4

from confluent_kafka import Producer

from exactly_once.errors import ConfigurationError

from .chain import Link
from .delivery import Callback, Delivery, Outcome
from .errors import KeyRefused, Undelivered
from .headers import Headers, with_key, with_sequence
from .keys import MAX_KEY_LENGTH, GivenKey, checked
from .lane import Lane, NoFilter
from .owners import PublishOwner
from .protocol import Filter, State
from .recovery import SequenceLog
from .sequence import Sequence, SequenceFilter
from .settings import client_settings
from .snapshot import SnapshotStore

_NEW, _UNKNOWN, _DUPLICATE = State.NEW, State.UNKNOWN, State.DUPLICATE
_CLOSE_SECONDS = 30.0
_ROOM_SECONDS = 0.1

AnyFilter = Filter[Any]


class Outgoing(NamedTuple):
    """A message of :meth:`DedupProducer.produce_many`; the fields are the arguments of ``produce``."""

    value: str | bytes | None = None
    key: str | bytes | None = None
    dedup_key: GivenKey | None = None
    sequence: int | None = None
    chain: Link | None = None
    partition: int = -1
    headers: Headers | None = None
    timestamp: int = 0
    on_delivery: Callback | None = None


class DedupProducer:
    """Produces what a filter has not seen: ``DedupProducer(kafka, dedup=lambda topic: WindowFilter(keys=1_000_000))``.

    ``dedup`` makes the filter of a topic; a filter itself may be given by who writes to one topic only, because the
    same key on two topics is two messages. ``topics={"audit.*": False}`` turns deduplication off for topics that match,
    ``enabled=False`` for all. The client is idempotent with ``acks=all``, which covers its own retries; the filter
    covers those of the application.

    A message is marked as sent when the broker has acknowledged it. A failed one can be sent again under the same key,
    and so can one whose outcome is unknown: then ``delivery.may_repeat`` says that it may be in the log twice. What
    survives a crash or holds between processes is the filter's promise.

    With a :class:`SequenceFilter` the numbers are recovered from the topic when it is first used, ``snapshots`` saves
    reading it from its beginning, and ``last_sequence_id(topic)`` tells where to go on. Whoever used the same
    ``producer_name`` before must have ended.

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
        initial_sequence_id: int = 0,
        enabled: bool = True,
        topics: Mapping[str, bool] | None = None,
        recover: bool = True,
        snapshots: Callable[[str], SnapshotStore] | None = None,
        snapshot_every: int = 1000,
        accept_trimmed: bool = False,
    ) -> None:
        self._kafka = dict(kafka)
        self._client = Producer(client_settings(kafka))
        if owner is not None and producer_name not in (None, owner.name):
            raise ConfigurationError(
                f"producer_name={producer_name!r} is not the owner's, {owner.name!r}; leave it out"
            )
        self._owner = owner
        self.producer_name = producer_name or (f"producer-{uuid4()}" if owner is None else owner.name)
        """Given or drawn; who publishes with sequences gives one, and the same after a restart."""
        self._dedup = dedup
        self._initial = initial_sequence_id
        self._enabled = enabled
        self._patterns = dict(topics or {})
        self._recover = recover
        self._snapshots = snapshots
        self._snapshot_every = snapshot_every
        self._accept_trimmed = accept_trimmed
        self._lanes: dict[str, Lane] = {}
        self._opening = threading.Lock()
        self._bound: str | None = None
        self.calls: deque[Delivery] = deque()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(Undelivered):  # it would hide why the block was left
            self.close()

    def __len__(self) -> int:
        """Return how many messages wait for their report."""
        return len(self._client)

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
        if state is not _NEW and not _goes(lane, delivery, state):
            return delivery
        if lane.writes_key:
            headers = with_key(headers, dedup_key)
        try:
            if headers is None and not timestamp:  # the usual case, without keywords
                self._client.produce(topic, value, key, partition, delivery.report)
            else:
                self._client.produce(
                    topic,
                    value,
                    key,
                    partition,
                    delivery.report,
                    timestamp=timestamp,
                    headers=headers,  # type: ignore[arg-type]  # any pairs will do
                )
        except BaseException:
            _take_back(lane, delivery)
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
        lane = self._lanes.get(topic) or self._open(topic)
        if lane.takes != "dedup_key":
            return [self._with_room(partial(self._produce_other, lane, m), room_seconds) for m in wanted]
        deliveries, asked = self._claim(lane, wanted)
        try:
            states = lane.filter.reserve_many([d.identity for d, _ in asked])
        except BaseException:
            for delivery, _ in asked:
                lane.release(delivery, Outcome.NOT_PERSISTED)
            raise
        pairs = zip(asked, states, strict=True)
        going = [(d, m) for (d, m), state in pairs if state is _NEW or _goes(lane, d, state)]
        for place, (delivery, message) in enumerate(going):
            try:
                self._with_room(partial(self._hand_over, lane, delivery, message), room_seconds)
            except BaseException:
                for left, _ in going[place:]:
                    _take_back(lane, left)
                raise
        return deliveries

    def last_sequence_id(self, topic: str) -> int:
        """Return the number up to which everything pushed is in the log, -1 if there is none; recovered at the start.

        :raises KeyRefused: when the topic's filter knows no sequences.
        """
        return self._sequences(topic).persisted(self.producer_name)

    def abandon(self, topic: str, sequence: int) -> None:
        """Give up a number that failed and will not be sent again."""
        self._sequences(topic).abandon(Sequence(self.producer_name, sequence))

    def filter_of(self, topic: str) -> AnyFilter:
        """Return the filter of a topic."""
        return (self._lanes.get(topic) or self._open(topic)).filter

    def poll(self, timeout_seconds: float = 0.0) -> int:
        """Serve delivery reports, mark them in the filters, call callbacks; return how many the client served."""
        served = self._client.poll(timeout_seconds)
        self._settle()
        return served

    def flush(self, timeout_seconds: float = -1) -> int:
        """Wait for all reports; return how many messages still have none: those may or may not be sent."""
        left = self._client.flush(timeout_seconds)
        self._settle()
        return left

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Flush, and fail what has no acknowledgement by then. May be called again.

        :raises Undelivered: when messages were left without one; their deliveries say the same.
        """
        if self._closed:
            return
        self._closed = True
        left = self.flush(timeout_seconds)
        if left:
            self._client.purge()
            self.flush(_CLOSE_SECONDS)
        errors = []
        for lane in self._lanes.values():
            try:
                left += lane.finish()
            except Exception as error:  # noqa: BLE001 - the other lanes must be finished too
                errors.append(error)
            lane.filter.close()
        if errors:
            raise errors[0]
        if left:
            raise Undelivered(f"{left} messages had no acknowledgement after {timeout_seconds:g} s")

    def _produce_other(self, lane: Lane, given: Outgoing) -> Delivery:
        if lane.takes == "sequence":
            _only(given, "sequence")
            with lane.lock:
                number = lane.next_number(given.sequence, self._initial)
                return self._send(lane, Sequence(self.producer_name, number), given)
        if lane.takes == "chain":
            _only(given, "chain")
            if given.chain is None:
                raise KeyRefused(f"a message to {lane.topic!r} needs chain=, because its filter knows chains")
            return self._send(lane, given.chain, given)
        if lane.takes == "dedup_key":
            raise KeyRefused(f"a message to {lane.topic!r} needs dedup_key=, because its filter knows keys")
        return self._send(lane, object(), given)

    def _send(self, lane: Lane, identity: Any, given: Outgoing) -> Delivery:
        delivery = Delivery(lane, identity, given.on_delivery)
        held = lane.in_flight.setdefault(identity, delivery)
        if held is not delivery:
            return held.attach(given.on_delivery)
        try:
            state = lane.reserve(identity)
        except BaseException:
            lane.release(delivery, Outcome.NOT_PERSISTED)
            raise
        if state is not _NEW and not _goes(lane, delivery, state):
            return delivery
        try:
            self._hand_over(lane, delivery, given)
        except BaseException:
            _take_back(lane, delivery)
            raise
        return delivery

    def _hand_over(self, lane: Lane, delivery: Delivery, given: Outgoing) -> None:
        headers = given.headers
        if lane.takes == "sequence":
            assert isinstance(lane.filter, SequenceFilter)
            identity: Sequence = delivery.identity
            headers = with_sequence(headers, identity.producer, lane.filter.before(identity), identity.number)
        elif lane.writes_key:
            headers = with_key(headers, delivery.identity)
        self._client.produce(
            lane.topic,
            given.value,
            given.key,
            given.partition,
            on_delivery=delivery.report,
            timestamp=given.timestamp,
            headers=headers,  # type: ignore[arg-type]  # any pairs will do
        )

    def _claim(self, lane: Lane, wanted: list[Outgoing]) -> tuple[list[Delivery], list[tuple[Delivery, Outgoing]]]:
        """Make the deliveries; return them, and those that the filter is to be asked about."""
        for message in wanted:
            _only(message, "dedup_key")
            if message.dedup_key is None:
                raise KeyRefused(f"a message to {lane.topic!r} needs dedup_key=, because its filter knows keys")
        keys = [checked(m.dedup_key) for m in wanted if m.dedup_key is not None]
        deliveries: list[Delivery] = []
        asked: list[tuple[Delivery, Outgoing]] = []
        for message, key in zip(wanted, keys, strict=True):
            delivery = Delivery(lane, key, message.on_delivery)
            held = lane.in_flight.setdefault(key, delivery)
            if held is delivery:
                asked.append((delivery, message))
                deliveries.append(delivery)
            else:
                deliveries.append(held.attach(message.on_delivery))
        return deliveries, asked

    def _with_room(self, send: Callable[[], Any], seconds: float) -> Any:
        """Call ``send``, serving reports while the client's queue is full."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return send()
            except BufferError:
                if time.monotonic() > deadline:
                    raise
                self.poll(_ROOM_SECONDS)

    def _settle(self) -> None:
        for lane in list(self._lanes.values()):
            lane.settle()
        while self.calls:
            with contextlib.suppress(IndexError):  # another thread may have taken the last one
                self.calls.popleft().call()

    def _sequences(self, topic: str) -> SequenceFilter:
        made = self.filter_of(topic)
        if not isinstance(made, SequenceFilter):
            raise KeyRefused(f"the filter of {topic!r} knows no sequences; it is a {type(made).__name__}")
        return made

    def _open(self, topic: str) -> Lane:
        """Make the lane of a topic at its first use."""
        with self._opening:
            if topic in self._lanes:
                return self._lanes[topic]
            made = self._make_filter(topic)
            log = None
            if isinstance(made, SequenceFilter) and self._recover:
                store = None if self._snapshots is None else self._snapshots(topic)
                log = SequenceLog(
                    self._kafka,
                    topic,
                    made,
                    store=store,
                    every=self._snapshot_every,
                    accept_trimmed=self._accept_trimmed,
                )
                log.recover()
            lane = self._lanes[topic] = Lane(self, topic, made, log)
            return lane

    def _make_filter(self, topic: str) -> AnyFilter:
        if not self._is_on(topic):
            return NoFilter()
        if not hasattr(self._dedup, "reserve"):
            return self._dedup(topic)
        if self._bound not in (None, topic):
            raise ConfigurationError(
                f"dedup= is one filter and already serves {self._bound!r}: the same key on {topic!r} would be taken "
                "for a duplicate. Give a function that makes a filter for each topic: dedup=lambda topic: ..."
            )
        self._bound = topic
        return cast("AnyFilter", self._dedup)

    def _is_on(self, topic: str) -> bool:
        """Tell whether deduplication is on: the first pattern that matches decides."""
        if not self._enabled:
            return False
        return next((on for pattern, on in self._patterns.items() if fnmatchcase(topic, pattern)), True)


def _goes(lane: Lane, delivery: Delivery, state: State) -> bool:
    """Tell whether a message that is not new is sent nevertheless; settle its delivery if not."""
    if state is _UNKNOWN:
        delivery.may_repeat = True
        return True
    delivery.duplicate = True
    lane.release(delivery, Outcome.SKIPPED if state is _DUPLICATE else Outcome.HELD_ELSEWHERE)
    return False


def _take_back(lane: Lane, delivery: Delivery) -> None:
    """Undo a reservation whose message the client did not take."""
    lane.take_back(delivery.identity)
    lane.release(delivery, Outcome.NOT_PERSISTED)


def _only(given: Outgoing, name: str) -> None:
    others = {"dedup_key": given.dedup_key, "sequence": given.sequence, "chain": given.chain}
    for other, value in others.items():
        if other != name and value is not None:
            raise KeyRefused(f"{other}= was given, but the filter of this topic takes {name}=")
