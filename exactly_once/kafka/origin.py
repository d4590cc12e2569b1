"""Origin: which database committed an offset to Kafka, and whether that can have been ours. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from exactly_once._model import MIRRORED

# In place of what the worker's role may not read.
_UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Origin:
    """The identity of a ledger, as far as a worker's role may read it."""

    ledger_id: str
    """Drawn when the schema was made. A copy by dump and restore has the same."""
    server: str | None = None
    """The server's system identifier and the database's oid, which distinguish such a copy from its original."""
    timeline: int | None = None
    """Raised by each promotion of a standby, which distinguishes a new primary from the old one."""

    def __str__(self) -> str:
        return f"{MIRRORED} {self.ledger_id} {self.server or _UNKNOWN} {self.timeline or _UNKNOWN}"


class Relation(Enum):
    """What an offset that Kafka holds shows about the ledger."""

    OURS = "committed by this database, or by an unknown one"
    REWOUND = "committed by this database, which has lost commits since"
    OTHER = "committed by another database"
    COPY = "committed by a copy of this database, which has applied more"
    OUTLIVED = "committed by this database after a failover that this server has missed"


def origin_of(metadata: str | None) -> Origin | None:
    """Read the origin from the metadata of a committed offset; None where there is none."""
    # Others commit for a group, too, with words of their own or none; what we do not know we take for no origin.
    words = (metadata or "").split()
    if len(words) < 4 or words[0] != MIRRORED:
        return None
    server, timeline = (None if word == _UNKNOWN else word for word in words[2:4])
    return Origin(words[1], server, int(timeline) if timeline is not None and timeline.isdecimal() else None)


def relate(own: Origin, found: Origin | None, *, mirrored: int, stored: int | None) -> Relation:
    """Compare who committed the offset ``mirrored`` to Kafka with ourselves, whose ledger is at ``stored``.

    Kafka gets it afterwards, so a ledger that is ahead of it is as it should be, and one that is behind is not.
    """
    is_behind = mirrored > (stored or 0)
    if found is None:
        return Relation.OURS
    if found.ledger_id != own.ledger_id:
        return Relation.OTHER
    if None not in (found.server, own.server) and found.server != own.server:
        # Moved by dump and restore, or by pg_upgrade: fine if nobody went on with the original.
        return Relation.COPY if is_behind else Relation.OURS
    if found.timeline is not None and own.timeline is not None and found.timeline > own.timeline:
        return Relation.OUTLIVED
    return Relation.REWOUND if is_behind else Relation.OURS
