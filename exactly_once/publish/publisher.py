"""Publisher: what both producers share: a client, and for each topic a lane with its filter."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from exactly_once.errors import ConfigurationError

from .chain import Link
from .delivery import Callback, Delivery, Outcome
from .errors import KeyRefused, PublishError, Undelivered
from .filter import Filter, NoFilter, State
from .guard import Guard
from .headers import Headers, with_key, with_sequence
from .keys import GivenKey, checked_all
from .lane import Lane
from .owners import PublishOwner
from .recovery import SequenceLog
from .sequence import Sequence, SequenceFilter
from .settings import connection_settings
from .snapshot import SnapshotFile, SnapshotStore

_NEW, _UNKNOWN, _DUPLICATE = State.NEW, State.UNKNOWN, State.DUPLICATE
CLOSE_SECONDS = 30.0
_ROOM_SECONDS = 0.1
_NAMED = 3
"""So many failed messages are named in an error; the others are counted."""

AnyFilter = Filter[Any]


class ProducerRecord(NamedTuple):
    """A message that is to be sent; the fields are the arguments of ``produce``."""

    value: str | bytes | None = None
    key: str | bytes | None = None
    dedup_key: GivenKey | None = None
    sequence: int | None = None
    chain: Link | None = None
    partition: int = -1
    headers: Headers | None = None
    timestamp: int = 0
    on_delivery: Callback | None = None


Going = list[tuple[Delivery, ProducerRecord]]
"""What the filter has let through."""
Report = Callable[[KafkaError | None, Message], None]
"""What the client calls with its delivery report."""


class Publisher(ABC):
    """The common part of :class:`DedupProducer` and :class:`TransactionalProducer`."""

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
    ) -> None:
        self._settings = dict(kafka)
        self._kafka = connection_settings(kafka)
        if owner is not None and producer_name not in (None, owner.name):
            raise ConfigurationError(
                f"producer_name={producer_name!r} is not the owner's, {owner.name!r}; leave it out"
            )
        self._check_owner(owner)
        self._owner = owner
        self.producer_name = producer_name or (f"producer-{uuid4()}" if owner is None else owner.name)
        """Given or drawn; who publishes with sequences gives one, and the same after a restart."""
        self._dedup = dedup
        self._enabled = enabled
        self._patterns = dict(topics or {})
        self._recover = recover
        self._snapshots = _stores(snapshots, self.producer_name)
        self._snapshot_every = snapshot_every
        self._accept_trimmed = accept_trimmed
        self._lanes: dict[str, Lane] = {}
        self._opening = threading.Lock()
        self._bound: str | None = None
        self.calls: deque[Delivery] = deque()
        self._closed = False
        self._guard = Guard("the producer")
        self.is_ended = False
        """Whether it is closed and nothing more is reported."""
        self._client = self._connect()

    @abstractmethod
    def _fence_predecessor(self) -> bool:
        """See to it that nothing of an earlier life can arrive any more; tell whether that is so."""

    @abstractmethod
    def _connect(self) -> Producer:
        """Make the first client."""

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
        return 0 if self._closed else len(self._client)

    def __bool__(self) -> bool:
        """Be true also with nothing to wait for."""
        return True

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
        if self._closed:
            return 0
        self._commit(only_if_due=True)
        served = self._client.poll(timeout_seconds)
        self._settle()
        return served

    def hurry(self) -> None:
        """Send what waits for more to come: somebody waits for its outcome."""
        self._commit()

    def flush(self, timeout_seconds: float = -1) -> int:
        """Wait for all reports; return how many messages still have none: those may or may not be sent.

        :raises Undelivered: when messages failed and nobody has looked: they have no callback, nobody asked their
            ``result()`` or ``exception()``, and no later call delivered them. It is told once. What another process
            was sending is told by ``produce`` at once, and raised by ``close`` only.
        """
        if self._closed:
            return 0
        left = self._flush(timeout_seconds)
        if (failed := self._failures(all_of_them=False)) is not None:
            raise failed
        return left

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Flush, and fail what has no acknowledgement by then. May be called again.

        :raises Undelivered: when messages were left without one, or failed and nobody has looked, as ``flush`` says.
        """
        if self._closed or not self._guard.is_ours():  # a child has none of its parent's messages
            return
        self._closed = True
        errors: list[Exception] = []
        left = 0
        try:
            left = self._flush(timeout_seconds)
            if left:
                self._client.purge()
                self._flush(CLOSE_SECONDS)
        except (KafkaException, PublishError) as error:  # a fatal one; what has no report is told below
            errors.append(error)
        for lane in self._lanes.values():
            try:
                left += lane.finish()
            except Exception as error:  # noqa: BLE001 - the other lanes must be finished too
                errors.append(error)
            lane.filter.close()
        # Its callbacks refer to us: nothing but the garbage collector would end its threads and connections.
        del self._client
        self.is_ended = True
        if errors:
            raise errors[0]
        if left:
            raise Undelivered(f"{left} messages had no acknowledgement after {timeout_seconds:g} s")
        if (failed := self._failures(all_of_them=True)) is not None:
            raise failed

    def _failures(self, *, all_of_them: bool) -> Undelivered | None:
        """Return the failures that nobody has looked at, once; at the end also what others were to send."""
        found: list[Delivery] = []
        for lane in self._lanes.values():
            mine = [d for d in list(lane.failed.values()) if all_of_them or d.outcome is not Outcome.HELD_ELSEWHERE]
            for delivery in mine:
                lane.failed.pop(delivery.identity, None)
            found += mine
        if not found:
            return None
        named = "; ".join(f"{d.identity!r} to {d.lane.topic}: {d.error}" for d in found[:_NAMED])
        return Undelivered(
            f"{len(found)} messages failed, and no callback or result() has looked at them; {named}. They may be sent "
            "again under the same identity"
        )

    @abstractmethod
    def _commit(self, *, only_if_due: bool = False) -> None:
        """Publish what is collected, if anything is."""

    def _flush(self, timeout_seconds: float) -> int:
        self._commit()
        left = self._client.flush(timeout_seconds)
        self._settle()
        return left

    def _check_open(self) -> None:
        self._guard.check()
        if self._closed:
            raise ConfigurationError("the producer is closed: make a new one")

    def _reserve(self, lane: Lane, wanted: Many[ProducerRecord]) -> tuple[list[Delivery], Going]:
        """Ask the filter for the right to send; return all deliveries, and those with their messages that may go.

        When it raises, nothing is reserved.
        """
        if lane.takes == "dedup_key":
            return self._reserve_keys(lane, wanted)
        deliveries: list[Delivery] = []
        going: Going = []
        try:
            for given in wanted:
                delivery, goes = self._reserve_one(lane, given)
                deliveries.append(delivery)
                if goes:
                    going.append((delivery, given))
        except BaseException:
            take_back(going)
            raise
        return deliveries, going

    def _reserve_one(self, lane: Lane, given: ProducerRecord) -> tuple[Delivery, bool]:
        """Reserve one that has no dedup key; for sequences, the lane's lock is held."""
        identity: Any = object()
        if lane.takes == "sequence":
            only(given, "sequence")
            if given.sequence is None:
                raise KeyRefused(f"a message to {lane.topic!r} needs sequence=, because its filter knows numbers")
            identity = Sequence(self.producer_name, given.sequence)
        elif lane.takes == "chain":
            only(given, "chain")
            if given.chain is None:
                raise KeyRefused(f"a message to {lane.topic!r} needs chain=, because its filter knows chains")
            identity = given.chain
        delivery = Delivery(lane, identity, given.on_delivery)
        held = lane.in_flight.setdefault(identity, delivery)
        if held is not delivery:
            return held.attach(given.on_delivery), False
        try:
            state = lane.reserve(identity)
        except BaseException:
            lane.let_go(delivery, Outcome.NOT_PERSISTED)
            raise
        return delivery, state is _NEW or goes(delivery, state)

    def _reserve_keys(self, lane: Lane, wanted: Many[ProducerRecord]) -> tuple[list[Delivery], Going]:
        deliveries, asked = self._claim(lane, wanted)
        try:
            states = lane.filter.reserve_many([d.identity for d, _ in asked])
        except BaseException:
            for delivery, _ in asked:
                lane.let_go(delivery, Outcome.NOT_PERSISTED)
            raise
        return deliveries, [
            (d, m) for (d, m), state in zip(asked, states, strict=True) if state is _NEW or goes(d, state)
        ]

    def _claim(self, lane: Lane, wanted: Many[ProducerRecord]) -> tuple[list[Delivery], Going]:
        """Make the deliveries; return them, and those that the filter is to be asked about."""
        for message in wanted:
            if message.dedup_key is None or message.sequence is not None or message.chain is not None:
                only(message, "dedup_key")
                raise KeyRefused(f"a message to {lane.topic!r} needs dedup_key=, because its filter knows keys")
        keys = checked_all([m.dedup_key for m in wanted if m.dedup_key is not None])
        deliveries: list[Delivery] = []
        asked: Going = []
        for message, key in zip(wanted, keys, strict=True):
            delivery = Delivery(lane, key, message.on_delivery)
            held = lane.in_flight.setdefault(key, delivery)
            if held is delivery:
                asked.append((delivery, message))
                deliveries.append(delivery)
            else:
                deliveries.append(held.attach(message.on_delivery))
        return deliveries, asked

    def _hand_over(self, delivery: Delivery, given: ProducerRecord, report: Report) -> None:
        lane = delivery.lane
        headers = given.headers
        if lane.takes == "sequence":
            assert isinstance(lane.filter, SequenceFilter)
            identity: Sequence = delivery.identity
            headers = with_sequence(headers, identity.producer, lane.filter.predecessor(identity), identity.number)
        elif lane.writes_key:
            headers = with_key(headers, delivery.identity)
        if headers is None and not given.timestamp:  # the usual case, without keywords
            self._client.produce(lane.topic, given.value, given.key, given.partition, report)
            return
        self._client.produce(
            lane.topic,
            given.value,
            given.key,
            given.partition,
            report,
            timestamp=given.timestamp,
            headers=headers,  # type: ignore[arg-type]  # any pairs will do
        )

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
                is_fenced = self._fence_predecessor()
                log = SequenceLog(
                    self._kafka,
                    topic,
                    made,
                    producer=self.producer_name,
                    store=self._snapshots(topic),
                    every=self._snapshot_every,
                    accept_trimmed=self._accept_trimmed,
                    is_fenced=is_fenced,
                )
                log.recover()
            lane = self._lanes[topic] = Lane(self, topic, made, log)
            return lane

    def _make_filter(self, topic: str) -> AnyFilter:
        if not self._is_on(topic):
            return NoFilter()
        if not isinstance(self._dedup, Filter):
            made: AnyFilter = self._dedup(topic)
            self._check_owners(made)
            return made
        if self._bound not in (None, topic):
            raise ConfigurationError(
                f"dedup= is one filter and already serves {self._bound!r}: the same key on {topic!r} would be taken "
                "for a duplicate. Give a function that makes a filter for each topic: dedup=lambda topic: ..."
            )
        self._check_owners(self._dedup)
        self._bound = topic
        return self._dedup

    def _check_owners(self, made: object) -> None:
        for owner in getattr(made, "owners", (getattr(made, "owner", None),)):
            self._check_owner(owner)

    def _check_owner(self, owner: PublishOwner | None) -> None:
        """Refuse an owner who promises to take-overs that its messages are sent under another transactional id."""
        used = self._settings.get("transactional.id")
        if owner is not None and owner.transactional_id not in (None, used):
            raise ConfigurationError(
                f"the owner's transactional_id is {owner.transactional_id!r}, but this producer sends "
                + ("outside of transactions" if used is None else f"as {used!r}")
            )

    def _is_on(self, topic: str) -> bool:
        """Tell whether deduplication is on: the first pattern that matches decides."""
        if not self._enabled:
            return False
        return next((on for pattern, on in self._patterns.items() if fnmatchcase(topic, pattern)), True)


def _stores(
    given: Callable[[str], SnapshotStore] | str | Path | None, producer: str
) -> Callable[[str], SnapshotStore | None]:
    """Return what makes the store of a topic; in a directory each producer and topic has a file of its own."""
    if given is None:
        return lambda _: None
    if callable(given):
        return given
    folder = Path(given)

    def in_folder(topic: str) -> SnapshotStore:
        return SnapshotFile(folder / f"{topic}-{blake2b(producer.encode(), digest_size=8).hexdigest()}.snapshot")

    return in_folder


def goes(delivery: Delivery, state: State) -> bool:
    """Tell whether a message that is not new is sent nevertheless; settle its delivery if not."""
    if state is _UNKNOWN:
        delivery.may_repeat = True
        return True
    delivery.lane.let_go(delivery, Outcome.SKIPPED if state is _DUPLICATE else Outcome.HELD_ELSEWHERE)
    return False


def take_back(going: Going) -> None:
    """Undo the reservations of messages that the client did not take."""
    for delivery, _ in reversed(going):
        delivery.lane.filter.release(delivery.identity)
        delivery.lane.let_go(delivery, Outcome.NOT_PERSISTED)


def only(given: ProducerRecord, name: str) -> None:
    """Refuse a second identity."""
    others = {"dedup_key": given.dedup_key, "sequence": given.sequence, "chain": given.chain}
    for other, value in others.items():
        if other != name and value is not None:
            raise KeyRefused(f"{other}= was given, but the filter of this topic takes {name}=")
