"""Who may move an offset, from where: the one rule, for consumers, Spark's offsets and Spark's batch ids. No I/O."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple
from uuid import UUID

from exactly_once._model import Row


class Grant(NamedTuple):
    """What acquiring a row gave its owner; whoever acquires it later has another one."""

    token: UUID
    epoch: int


class Conflict(Enum):
    """Why a row does not allow an advance."""

    OK = "nothing wrong with this row"
    FENCED = "token or epoch differ"
    AHEAD = "the row is above what was expected"
    REWOUND = "the row is below what was expected"
    MISSING = "there is no row"
    RECREATED = "the topic id differs"


def check(row: Row | None, grant: Grant, next_offset: int, topic_id: str | None) -> Conflict:
    """Compare a row, read under lock, with what its owner expects of it: the grant first.

    ``next_offset`` is what the owner found when it acquired the row, or left there since; never what it reads now.
    """
    if row is None:
        return Conflict.MISSING
    # Before the rest: topic and offset of a row that is somebody else's say nothing about us.
    is_below = row.next_offset is None or row.next_offset < next_offset
    if (row.owner_token, row.owner_epoch) != grant:
        # Epochs only rise: where the row is older than its grant, the database has lost that acquisition, too.
        return Conflict.REWOUND if is_below and row.owner_epoch < grant.epoch else Conflict.FENCED
    if row.topic_id != topic_id:
        return Conflict.RECREATED
    if is_below:
        return Conflict.REWOUND
    return Conflict.OK if row.next_offset == next_offset else Conflict.AHEAD
