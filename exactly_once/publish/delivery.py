"""Delivery: what becomes of one message, as a small future."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, Message

from .errors import HeldElsewhere, NotDelivered, NotPersisted, OutcomeUnknown

if TYPE_CHECKING:
    from .lane import Lane
    from .publisher import Publisher

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
_GIVEN = {
    # The client's codes for what it did not say itself; retriable: the same call may be made again.
    Outcome.NOT_PERSISTED: KafkaError._FAIL,  # noqa: SLF001 - its public name
    Outcome.UNKNOWN: KafkaError._FAIL,  # noqa: SLF001
    Outcome.HELD_ELSEWHERE: KafkaError._STATE,
}
"""Of outcomes that are no success: the code of the error where the client gave none. None would mean delivered."""


def proves_absence(error: KafkaError) -> bool:
    """Tell whether an error proves that the message is not in the log. If in doubt, it does not.

    A purge or a time-out proves nothing: an earlier attempt of the client may have arrived.
    """
    return error.code() in _PROOFS


class Delivery:
    """What becomes of one call of ``produce``. Made by the producer."""

    # Defaults of the class: one object is made for every message, and most never differ from these.
    is_attached = False
    """Whether this call sent nothing because the same key is being sent by an earlier call, whose outcome it shares."""
    may_repeat = False
    """Whether an earlier attempt of this key may be in the log, so that it may be there twice now."""
    outcome = _PENDING
    """What is known of the message."""
    error: KafkaError | None = None
    """Why it was not delivered: the client's own error, or one that says the outcome. None for what is in the log."""
    message: Message | None = None
    """The message of the client's report, if there was one."""
    callback: Callback | None = None
    """The caller's own."""
    twins: list[Delivery] | None = None
    """The deliveries of duplicates that attached while this one was in flight."""

    def __init__(self, lane: Lane, identity: Any, callback: Callback | None) -> None:
        self.lane = lane
        self.identity = identity
        """The dedup key, Sequence or Link."""
        if callback is not None:
            self.callback = callback

    def __repr__(self) -> str:
        return f"<Delivery {self.identity!r} {self.outcome.name}{' duplicate' if self.duplicate else ''}>"

    @property
    def duplicate(self) -> bool:
        """Whether this call sent nothing because the message is in the log already, by an earlier call or life."""
        return self.outcome is _SKIPPED or (self.is_attached and self.outcome is _DELIVERED)

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
        producer: Publisher = self.lane.producer
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        if self.outcome is _PENDING:
            producer.hurry()
        while self.outcome is _PENDING:
            left = 0.1 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no delivery report for {self.identity!r} within {timeout_seconds:g} s")
            producer.poll(min(left, 0.1))
            if producer.is_ended and self.outcome is _PENDING:  # made by another thread while it was being closed
                self.fail(None, Outcome.UNKNOWN)
        error = self.exception()
        if error is not None:
            raise error
        return self.message

    def exception(self) -> NotDelivered | None:
        """Return why it was not delivered; None if it was, or is not known yet. ``flush`` does not tell it again."""
        kind = _ERRORS.get(self.outcome)
        if kind is None:
            return None
        self.lane.failed.pop(self.identity, None)
        made = kind(f"{self.identity!r} to {self.lane.topic}: {self.outcome.value} ({self.error or 'no error given'})")
        if self.error is not None:
            made.__cause__ = KafkaException(self.error)
        return made

    @property
    def offset(self) -> int | None:
        """Where it stands in the log; None while, or where, that is not known."""
        return None if self.message is None or self.outcome is not Outcome.DELIVERED else self.message.offset()

    @property
    def partition(self) -> int | None:
        """The partition it stands in; None while, or where, that is not known."""
        return None if self.message is None or self.outcome is not Outcome.DELIVERED else self.message.partition()

    # The producer's side.

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        """Take the client's delivery report; the producer settles it before anybody is told.

        The delivery is itself the client's callback: a bound method for each message in flight is one more object that
        every collection of garbage has to look at.
        """
        if error is not None:
            self.error = error
        self.message = message
        self.lane.reported.append(self)

    def take(self, error: KafkaError | None, message: Message | None) -> None:
        """Have the same report as another one."""
        self.error = error
        self.message = message

    def attach(self, callback: Callback | None) -> Delivery:
        """Return the delivery of a duplicate of this one: it has the same outcome."""
        twin = Delivery(self.lane, self.identity, callback)
        twin.is_attached = True
        twin.may_repeat = self.may_repeat
        if self.twins is None:
            self.twins = []
        self.twins.append(twin)
        if self.outcome is not Outcome.PENDING:  # settled while we came; the settling may have missed us
            self.settle(self.outcome)
        return twin

    def settle(self, outcome: Outcome) -> None:
        """Make the outcome known, here and to the duplicates that attached."""
        if self.error is None and outcome in _GIVEN:
            self.error = KafkaError(_GIVEN[outcome], f"{self.identity!r}: {outcome.value}", retriable=True)
        was_pending, self.outcome = self.outcome is _PENDING, outcome
        if self.callback is not None and was_pending:
            self.lane.producer.calls.append(self)
        elif self.is_attached and outcome in _GIVEN:  # the lane notes the failures of those that it sent
            self.lane.failed[self.identity] = self
        # After the outcome: whoever attaches now sees it, and whoever came before is in the list.
        while self.twins:
            try:
                twin = self.twins.pop()
            except IndexError:  # another thread was faster
                return
            twin.take(self.error, self.message)
            twin.settle(outcome)

    def fail(self, error: KafkaError | None, outcome: Outcome) -> None:
        """Settle without a report of the client."""
        self.error = error
        self.settle(outcome)

    def call(self) -> None:
        """Call the callback of the caller, who has looked at a failure by that."""
        if self.callback is not None:
            self.lane.failed.pop(self.identity, None)
            self.callback(self.error, self.message)


_ERRORS: dict[Outcome, type[NotDelivered]] = {
    Outcome.NOT_PERSISTED: NotPersisted,
    Outcome.UNKNOWN: OutcomeUnknown,
    Outcome.HELD_ELSEWHERE: HeldElsewhere,
}
