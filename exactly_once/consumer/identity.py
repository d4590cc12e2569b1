"""Identity: the name of a message that stays the same at every redelivery, for idempotency keys of outside APIs."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID, uuid5

# Users hand both forms to payment providers: with another namespace or another text, what is redelivered across an
# upgrade would be paid twice. Never change them.
_NAMESPACE = UUID("5f0c7a52-8d0e-4c56-9b0e-2f5d7a1c3e64")


@dataclass(frozen=True, slots=True)
class Identity:
    """Which message of which log it is, whatever the topic is called and whoever consumes it.

    ``text`` and ``uuid`` say the same. Two deliveries of one message have the same identity; a message that a
    producer sent twice is two messages; a topic that was deleted and made again has other ones.
    """

    cluster_id: str
    topic_id: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        """The identity as a string: Kafka's ids of cluster and topic, the partition, the offset."""
        return f"{self.cluster_id}:{self.topic_id}:{self.partition}:{self.offset}"

    @property
    def uuid(self) -> UUID:
        """The identity as a UUID (version 5, of :attr:`text`)."""
        return uuid5(_NAMESPACE, self.text)
