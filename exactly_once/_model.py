"""The nouns of the protocol: partitions, rows of the ledger, moves of an offset. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Literal, NamedTuple
from uuid import UUID

# How the metadata of offsets begins that this library told Kafka: they are no place to start from.
MIRRORED = "exactly_once"

# After how many advances of a row another one takes its place.
#
# Each advance leaves a dead version behind. While anybody holds an older snapshot they stay, and all of them are
# reached by the key, so an advance would cost more and more. A rotation costs about two advances: with one in 256
# nobody can measure it, and 256 versions are few.
ROTATE_EVERY = 256

# How the topic begins of a row that has the next batch id of a Spark query: Kafka allows no colon in a name.
QUERY = "query:"

OwnerKind = Literal["consumer", "spark"]
StartPolicy = Literal["earliest", "latest", "committed"] | datetime
RangePolicy = Literal["fail", "earliest", "latest"]


class Partition(NamedTuple):
    """One partition of one topic; sorts in the order in which rows are locked."""

    topic: str
    number: int

    @classmethod
    def of(cls, message: Any) -> Partition:
        """Return where a message of the Kafka client is from."""
        return cls(str(message.topic()), message.partition() or 0)

    @classmethod
    def of_query(cls, query_id: str) -> Partition:
        """Return the name of the row that has the next batch id of a Spark query in place of an offset."""
        return cls(f"{QUERY}{query_id}", 0)

    def __str__(self) -> str:
        return f"{self.topic}[{self.number}]"

    @property
    def counts_batches(self) -> bool:
        """Whether it is the row of a query."""
        return self.topic.startswith(QUERY)


class Sent(Enum):
    """What the server was sent last that may become durable without our hearing of it."""

    NOTHING = "nothing: what is open can only be rolled back"
    COMMIT = "a COMMIT that was not answered"
    JOINED = "effects, in a transaction that somebody else ends"
    ADVANCE = "effects and the advance, in a transaction that somebody else ends"


class Span(NamedTuple):
    """What a batch has of one partition: its first offset, and the offset and leader epoch after its last message."""

    begin: int
    end: int
    leader_epoch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the ledger, as a locking statement returned it."""

    partition: Partition
    next_offset: int | None
    generation: int = 0
    """Which of the rows that followed each other in one place of the table this is; see :data:`ROTATE_EVERY`."""
    leader_epoch: int | None = None
    cluster_id: str | None = None
    topic_id: str | None = None
    owner_epoch: int = 0
    owner_token: UUID | None = None
    owner_kind: OwnerKind | None = None
    owner_instance: UUID | None = None
    owner_name: str | None = None
    halted: str | None = None
    application: str | None = None
    previous_instance: UUID | None = None
    previous_application: str | None = None
    acquired_seconds_ago: float | None = None
    advanced_seconds_ago: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """What a unit of work asks of one row: to go from ``expected`` to ``next_offset``."""

    partition: Partition
    token: UUID
    epoch: int
    topic_id: str | None
    expected: int
    next_offset: int
    leader_epoch: int | None
    cluster_id: str | None = None
    generation: int = 0
    """The row's, which the owner of the row knows."""
    rotates: bool = False
    """Whether the unit puts new rows in place of its rows, for all of which that holds; see :data:`ROTATE_EVERY`."""
    after: int | None = None
    """The offset after the message that this owner applied last; None where it does not know.

    The ledger may have moved on from there, behind offsets without messages.
    """
