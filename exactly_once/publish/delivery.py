"""Batches of messages that were given together, and deliveries: what becomes of each, as a small future.

One object is made for a batch and none for a message of it: a million in flight are a million objects that every
collection of garbage looks at, and that have left the processor's cache when their report comes. A delivery is a view,
made when somebody asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from itertools import repeat
from typing import Any, Protocol, overload

from confluent_kafka import KafkaError, KafkaException, Message

from .errors import HeldElsewhere, NotDelivered, NotPersisted, OutcomeUnknown

Callback = Callable[[KafkaError | None, Message | None], object]

_PROOFS = frozenset(
    # The client or the broker refuses these for what they are, at every attempt, before anything is stored.
    (
        KafkaError._QUEUE_FULL,  # noqa: SLF001 - its public name
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.TOPIC_EXCEPTION,
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
FAILURES: dict[Outcome, tuple[int, type[NotDelivered]]] = {
    Outcome.NOT_PERSISTED: (KafkaError._FAIL, NotPersisted),  # noqa: SLF001 - its public name
    Outcome.UNKNOWN: (KafkaError._FAIL, OutcomeUnknown),  # noqa: SLF001
    Outcome.HELD_ELSEWHERE: (KafkaError._STATE, HeldElsewhere),
}
"""Of outcomes that are no success: the client's code for what it did not say itself, and what ``result`` raises.

An error of None would mean delivered. They are retriable: the same call may be made again.
"""


def outcome_of(error: KafkaError) -> Outcome:
    """Return what an error of the client proves. If in doubt, nothing.

    A purge or a time-out proves nothing: an earlier attempt of the client may have arrived.
    """
    return Outcome.NOT_PERSISTED if error.code() in _PROOFS else Outcome.UNKNOWN


class Serving(Protocol):
    """What a delivery needs of its producer."""

    is_ended: bool
    """Whether it is closed and nothing more is reported."""

    def poll(self, timeout_seconds: float = 0.0) -> int:
        """Serve delivery reports."""
        ...

    def hurry(self) -> None:
        """Send what waits for more to come."""
        ...


class Batch:
    """Messages of one topic that were given together; everything about them by their place."""

    __slots__ = (
        "__weakref__",
        "callbacks",
        "errors",
        "failed",
        "identities",
        "messages",
        "outcomes",
        "producer",
        "reported",
        "resent",
        "topic",
    )

    def __init__(self, producer: Serving, topic: str, failed: dict[Hashable, Delivery], reported: list[Entry]) -> None:
        self.producer = producer
        self.topic = topic
        self.failed = failed
        """Of the whole topic: failures that nobody has looked at."""
        self.reported = reported
        """Of the whole topic: what the client has reported."""
        self.identities: list[Any] = []
        """Dedup keys, Sequences or Links."""
        self.outcomes: list[Outcome] = []
        self.messages: list[Message | None] = []
        """The messages of the client's reports."""
        # The rest is about few of them, by place.
        self.errors: dict[int, KafkaError] = {}
        self.callbacks: dict[int, list[Callback | None]] = {}
        """The callbacks of the call that sends and of those that attached to it; None for one without.

        No entry: one call, without a callback.
        """
        self.resent: set[int] = set()
        """Of which an earlier attempt may be in the log."""

    def extend(self, identities: list[Any]) -> list[Entry]:
        """Add the messages of a batch that has none yet; return their entries."""
        self.identities += identities
        self.outcomes += [_PENDING] * len(identities)
        self.messages += [None] * len(identities)
        return list(zip(repeat(self), range(len(identities))))


Entry = tuple[Batch, int]
"""A message: its batch, and its place there. A batch has none of its own: the two would keep each other alive."""


class Deliveries(Sequence["Delivery"]):
    """The deliveries of one call of ``produce_many``, in the order of its messages; made when they are asked for."""

    __slots__ = ("_attached", "_batch")

    def __init__(self, batch: Batch, attached: dict[int, Entry]) -> None:
        self._batch = batch
        # Not in the batch: one in flight would keep the one before it alive, and that its own, without end.
        self._attached = attached

    def __len__(self) -> int:
        return len(self._batch.identities)

    @overload
    def __getitem__(self, index: int) -> Delivery: ...
    @overload
    def __getitem__(self, index: slice) -> list[Delivery]: ...
    def __getitem__(self, index: int | slice) -> Delivery | list[Delivery]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        entry = self._attached.get(place)
        return Delivery(self._batch, place) if entry is None else Delivery(*entry, is_attached=True)


def take(entry: Entry, error: KafkaError | None, message: Message | None) -> None:
    """Note a report of the client."""
    batch, place = entry
    batch.messages[place] = message
    if error is not None:
        batch.errors[place] = error
    elif batch.errors:
        batch.errors.pop(place, None)


def report(entry: Entry, error: KafkaError | None, message: Message | None) -> None:
    """Note a report of the client that is to be settled by itself; it is settled before anybody is told.

    Made a method of an entry, this is the client's callback: one small object for each message in flight.
    """
    take(entry, error, message)
    entry[0].reported.append(entry)


class Delivery:
    """What becomes of one call of ``produce``. Made by the producer."""

    __slots__ = ("_batch", "_place", "is_attached")

    def __init__(self, batch: Batch, place: int, *, is_attached: bool = False) -> None:
        self._batch = batch
        self._place = place
        self.is_attached = is_attached
        """Whether this call sent nothing, because an earlier one is sending the same key; it shares its outcome."""

    def __repr__(self) -> str:
        return f"<Delivery {self.identity!r} {self.outcome.name}{' duplicate' if self.duplicate else ''}>"

    @property
    def entry(self) -> Entry:
        """The message that is, or was, sent."""
        return self._batch, self._place

    @property
    def topic(self) -> str:
        """The topic."""
        return self._batch.topic

    @property
    def identity(self) -> Any:
        """The dedup key, Sequence or Link."""
        return self._batch.identities[self._place]

    @property
    def outcome(self) -> Outcome:
        """What is known of the message."""
        return self._batch.outcomes[self._place]

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
        return self._batch.messages[self._place]

    @property
    def duplicate(self) -> bool:
        """Whether this call sent nothing because the message is in the log already, by an earlier call or life."""
        return self.outcome is _SKIPPED or (self.is_attached and self.outcome is _DELIVERED)

    @property
    def offset(self) -> int | None:
        """Where it stands in the log; None while, or where, that is not known."""
        return None if self.message is None or self.outcome is not _DELIVERED else self.message.offset()

    @property
    def partition(self) -> int | None:
        """The partition it stands in; None while, or where, that is not known."""
        return None if self.message is None or self.outcome is not _DELIVERED else self.message.partition()

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
        """
        producer = self._batch.producer
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        if not self.done():
            producer.hurry()
        while not self.done():
            left = 0.1 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no delivery report for {self.identity!r} within {timeout_seconds:g} s")
            producer.poll(min(left, 0.1))
            if producer.is_ended and not self.done():  # made by another thread while it was being closed
                self._batch.outcomes[self._place] = Outcome.UNKNOWN
        error = self.exception()
        if error is not None:
            raise error
        return self.message

    def exception(self) -> NotDelivered | None:
        """Return why it was not delivered; None if it was, or is not known yet. ``flush`` does not tell it again."""
        if self.outcome not in FAILURES:
            return None
        self._batch.failed.pop(self.identity, None)
        said = f"{self.identity!r} to {self.topic}: {self.outcome.value} ({self.error or 'no error given'})"
        made = FAILURES[self.outcome][1](said)
        if self.error is not None:
            made.__cause__ = KafkaException(self.error)
        return made
