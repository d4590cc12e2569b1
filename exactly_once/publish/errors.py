"""Errors of the publish side: one class per decision that a caller can take."""

from __future__ import annotations

from exactly_once.errors import ExactlyOnceError


class PublishError(ExactlyOnceError):
    """Base of the errors of the publish side."""


class KeyRefused(PublishError, ValueError):
    """A dedup key, sequence number or chain link that cannot be one; nothing was marked."""


class InconsistentChain(KeyRefused):
    """A reference to the previous message contradicts what this chain has seen."""


class LimitReached(PublishError):
    """A bound of the filter was reached; the message says which, and what frees it."""


class SnapshotCorrupted(PublishError):
    """A snapshot was cut short or altered, or belongs to something else. Nothing of it was loaded."""


class TailLost(PublishError):
    """Retention removed messages that recovery must read; an operator has to decide."""


class TailHidden(PublishError):
    """An open transaction of another producer hides the end of the log, for longer than was to be waited."""


class FilterUnavailable(PublishError):
    """The store of a shared filter cannot be asked, and the filter was told to fail closed."""


class ProducerFenced(PublishError):
    """Another producer took over this name: this one must stop."""


class NameTaken(PublishError):
    """Another producer lives under this name."""


class Undelivered(PublishError):
    """Messages have no acknowledgement, or failed and nobody looked at them; none of them counts as sent."""


class NotDelivered(PublishError):
    """A message was not acknowledged; the client's own error is the cause."""


class NotPersisted(NotDelivered):
    """The message is surely not in the log. Its key is absent again: send it again, or do not."""


class OutcomeUnknown(NotDelivered):
    """The message may be in the log. Sending it again under the same key may put it there twice."""


class HeldElsewhere(NotDelivered):
    """Another process holds the reservation of this key. Nothing was sent here; try again later."""
