"""Messages in batches, and deliveries: what becomes of each message, as a small future.

One object and one callback are made for a batch, and none for a message: a million in flight would be a million
objects for every collection of garbage. A report finds its message by the payload, and a delivery is a view.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, overload

from confluent_kafka import KafkaError, KafkaException, Message

from .errors import HeldElsewhere, NotDelivered, NotPersisted, OutcomeUnknown
from .headers import Kept
from .keys import CheckedKeys

if TYPE_CHECKING:
    from .topic import TopicPublisher

Callback = Callable[[KafkaError | None, Message | None], object]
Payload = str | bytes | None
# Partition, headers and timestamp of a message.
Extra = tuple[int, Kept | None, int]
# A payload of more bytes costs more to compare and to keep than a callback of its own.
_LONG = 1024

_PROOFS = frozenset(
    # The client or the broker refuses these for what they are, at every attempt, before anything is stored.
    (
        KafkaError._QUEUE_FULL,  # noqa: SLF001 - its public name
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    )
)


class Outcome(Enum):
    """What is known of a message."""

    PENDING = "not known yet"
    DELIVERED = "acknowledged"
    SKIPPED = "was acknowledged before; nothing was sent"
    NOT_PERSISTED = "surely not in the log"
    UNKNOWN = "may be in the log"
    HELD_ELSEWHERE = "another process is sending it; nothing was sent"


_PENDING, _DELIVERED, _SKIPPED = Outcome.PENDING, Outcome.DELIVERED, Outcome.SKIPPED
# Of outcomes that are no success: the client's code for what it did not say itself, and what ``result`` raises.
#
# An error of None would mean delivered. They are retriable: the same call may be made again.
FAILURES: dict[Outcome, tuple[int, type[NotDelivered]]] = {
    Outcome.NOT_PERSISTED: (KafkaError._FAIL, NotPersisted),  # noqa: SLF001 - its public name
    Outcome.UNKNOWN: (KafkaError._FAIL, OutcomeUnknown),  # noqa: SLF001
    Outcome.HELD_ELSEWHERE: (KafkaError._STATE, HeldElsewhere),
}


def outcome_of(error: KafkaError) -> Outcome:
    """Return what an error of the client proves. If in doubt, nothing.

    A purge or a time-out proves nothing: an earlier attempt of the client may have arrived.
    """
    return Outcome.NOT_PERSISTED if error.code() in _PROOFS else Outcome.UNKNOWN


Call = tuple[Callback, KafkaError | None, Message | None]


class Batch:
    """Messages of one topic that share a callback; everything about one of them by its place."""

    def __init__(self, topic: TopicPublisher) -> None:
        self.topic = topic
        # Dedup keys, numbers or Links.
        self.identities: list[Any] = CheckedKeys()
        self.values: list[Payload] = []
        self.keys: list[Payload] = []
        # What else is given with the few messages that have more than value and key.
        self.extras: dict[int, Extra] = {}
        # The outcome of all that are not in ``outcomes``.
        self.rest = _PENDING
        self.outcomes: dict[int, Outcome] = {}
        # Places of messages that share the callback: their payload is bytes, and no other one's here.
        self.by_payload: dict[bytes, int] = {}
        # Reports of success among these that are not matched with their places.
        self.arrived: list[Message] = []
        # Places with a report of their own that is not settled.
        self.reported: list[int] = []
        self.errors: dict[int, KafkaError] = {}
        # The messages of the reports that are matched.
        self.messages: dict[int, Message | None] = {}
        # The callbacks of the call that sends and of those that attached to it; None for one without.
        #
        # No entry: one call, without a callback.
        self.callbacks: dict[int, list[Callback | None]] = {}
        # Where identities are, of as many of them as are counted: none until a call attaches to one.
        self.places: dict[Any, int] = {}
        self.counted = 0
        # Of which an earlier attempt may be in the log.
        self.resent: set[int] = set()
        # Whether somebody waits for one of them: then reports are settled before all are there.
        self.is_watched = False
        # Whether the topic knows that there is something to settle. In a transaction the commit tells that.
        self.is_reported = topic.is_transactional
        arrived, reported = self.arrived, topic.reported

        def told(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self.report(self.by_payload[message.value()], error, message)  # type: ignore[index]
                return
            arrived.append(message)
            if not self.is_reported:
                self.is_reported = True
                reported.append(self)

        # The callback that they share; None once it has done its work: it refers to the batch.
        self.told: Callback | None = told  # type: ignore[assignment]  # the client gives a message with each report

    def place_of(self, identity: Any) -> int:
        """Return the place of the last message of an identity: one before it may have failed. Under the lock."""
        for place in range(self.counted, len(self.identities)):
            self.places[self.identities[place]] = place
        self.counted = len(self.identities)
        return self.places[identity]

    def callback_of(self, place: int) -> Callback:
        """Return what the client calls with the report of a message."""
        value = self.values[place]
        # A report that is found by its payload needs no object of its own.
        if (
            type(value) is bytes
            and len(value) <= _LONG
            and place not in self.callbacks
            and self.by_payload.setdefault(value, place) == place
            and self.told is not None
        ):
            return self.told
        return partial(self.report, place)

    def callbacks_of(self, places: Sequence[int]) -> Iterable[Callback]:
        """Return them for several messages."""
        values: Any = self.values
        if not self.callbacks and not self.by_payload and self.told and set(map(type, values)) == {bytes}:
            self.by_payload = dict(zip(values, range(len(values)), strict=True))
            if len(self.by_payload) == len(values) and max(map(len, values)) <= _LONG:
                return repeat(self.told, len(places))
            self.by_payload = {}
        return map(self.callback_of, places)

    def report(self, place: int, error: KafkaError | None, message: Message | None) -> None:
        """Note the report of one message; it is settled before anybody is told."""
        self.messages[place] = message
        if error is not None:
            self.errors[place] = error
        else:
            self.errors.pop(place, None)
        self.reported.append(place)
        if not self.is_reported:
            self.is_reported = True
            self.topic.reported.append(self)

    def match(self) -> list[int]:
        """Find the places of the reports that have arrived, and return them. Under the lock of the topic."""
        found = {self.by_payload[m.value()]: m for m in self.arrived[:]}  # type: ignore[index]
        self.messages.update(found)
        return list(found)

    def match_if_settled(self) -> None:
        """Be done with them unless they are still needed to see that all are there. Under the lock of the topic."""
        if self.arrived and (self.told is None or self.topic.is_transactional):
            del self.arrived[: len(self.match())]  # others may have arrived meanwhile

    def acknowledged(self, places: Sequence[int]) -> Iterable[Message]:
        """Return the messages of these reports, in any order. Under the lock of the topic."""
        if self.topic.is_transactional and len(self.arrived) == len(places):
            return self.arrived[:]
        self.match_if_settled()
        return [message for place in places if (message := self.messages.get(place)) is not None]

    def outcome(self, place: int) -> Outcome:
        """Return what is known of a message; who asks too early is somebody who waits."""
        found = self.outcomes.get(place, self.rest)
        if found is _PENDING and not self.is_watched:
            self.is_watched = True
            self.topic.reported.append(self)
        return found

    def message(self, place: int) -> Message | None:
        """Return the message of a report, if there was one."""
        if self.arrived:
            with self.topic.lock:
                self.match_if_settled()
        return self.messages.get(place)

    def send_again(self, places: Iterable[int]) -> None:
        """Forget the reports of an attempt that is over."""
        with self.topic.lock:
            self.match_if_settled()
        for place in places:
            self.errors.pop(place, None)
            self.messages.pop(place, None)


class Delivery:
    """What becomes of one call of ``produce``. Made by the producer."""

    __slots__ = ("_batch", "_place", "is_attached")

    def __init__(self, batch: Batch, place: int, *, is_attached: bool = False) -> None:
        self._batch = batch
        self._place = place
        # Whether this call sent nothing, because an earlier one is sending the same key; it shares its outcome.
        self.is_attached = is_attached

    def __repr__(self) -> str:
        return f"<Delivery {self.identity!r} {self.outcome.name}{' duplicate' if self.duplicate else ''}>"

    @property
    def entry(self) -> tuple[Batch, int]:
        """The message that is, or was, sent."""
        return self._batch, self._place

    @property
    def topic(self) -> str:
        """The topic."""
        return self._batch.topic.topic

    @property
    def identity(self) -> Any:
        """The dedup key, number or Link."""
        return self._batch.identities[self._place]

    @property
    def outcome(self) -> Outcome:
        """What is known of the message."""
        return self._batch.outcome(self._place)

    @property
    def may_repeat(self) -> bool:
        """Whether an earlier attempt of this key may be in the log, so that it may be there twice now."""
        return self._place in self._batch.resent

    @property
    def error(self) -> KafkaError | None:
        """Why it was not delivered: the client's error, or one that says the outcome. None for what is in the log."""
        return self._batch.errors.get(self._place)

    @property
    def message(self) -> Message | None:
        """The message of the client's report, if there was one."""
        return self._batch.message(self._place)

    @property
    def duplicate(self) -> bool:
        """Whether this call sent nothing because the message is in the log already, by an earlier call or life."""
        return self.outcome is _SKIPPED or (self.is_attached and self.outcome is _DELIVERED)

    @property
    def offset(self) -> int | None:
        """Where it stands in the log; None while, or where, that is not known."""
        return None if self.outcome is not _DELIVERED or self.message is None else self.message.offset()

    @property
    def partition(self) -> int | None:
        """The partition it stands in; None while, or where, that is not known."""
        return None if self.outcome is not _DELIVERED or self.message is None else self.message.partition()

    def done(self) -> bool:
        """Tell whether the outcome is known."""
        return self.outcome is not _PENDING

    def result(self, timeout_seconds: float | None = None) -> Message | None:
        """Serve the producer until the outcome is known; return the message as the log has it.

        None is returned for a duplicate of something acknowledged earlier: that message is not here any more.

        :raises NotPersisted: when it is surely not in the log.
        :raises OutcomeUnknown: when it may be.
        :raises HeldElsewhere: when another process is sending it.
        :raises TimeoutError: when nothing is known after so long; nothing changes by that.
        :raises ConfigurationError: in a callback that ``close`` calls, where nothing more would become known.
        """
        producer = self._batch.topic.producer
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        if not self.done():
            producer.hurry()
        while not self.done():
            left = 0.1 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no delivery report for {self.identity!r} within {timeout_seconds:g} s")
            producer.wait(min(left, 0.1))
            if producer.is_ended and not self.done():  # made by another thread while it was being closed
                self._batch.outcomes[self._place] = Outcome.UNKNOWN
        error = self.exception()
        if error is not None:
            raise error
        return self.message

    def exception(self) -> NotDelivered | None:
        """Return why it was not delivered; None if it was, or is not known yet. ``flush`` does not tell it again."""
        outcome = self.outcome
        if outcome not in FAILURES:
            return None
        self._batch.topic.failed.pop(self.identity, None)
        said = f"{self.identity!r} to {self.topic}: {outcome.value} ({self.error or 'no error given'})"
        made = FAILURES[outcome][1](said)
        if self.error is not None:
            made.__cause__ = KafkaException(self.error)
        return made


class Deliveries(Sequence[Delivery]):
    """The deliveries of one batch, in the order of its messages; made when they are asked for."""

    __slots__ = ("_batch",)

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch.identities)

    @overload
    def __getitem__(self, index: int) -> Delivery: ...
    @overload
    def __getitem__(self, index: slice) -> list[Delivery]: ...
    def __getitem__(self, index: int | slice) -> Delivery | list[Delivery]:
        places = range(len(self))[index]
        return Delivery(self._batch, places) if isinstance(places, int) else [Delivery(self._batch, p) for p in places]
