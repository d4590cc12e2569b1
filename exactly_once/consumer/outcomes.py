"""What becomes of a unit: one table, from what was sent and what came back to a decision. No I/O."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from exactly_once._model import Sent

# A transaction of which the server does not know what became of it, and never will.
LOST = "lost"

# What is known of the unit's rows: the advance was refused (SQLSTATE EO001), or whether they moved.
Rows = Literal["short", "moved", "stayed"]


class Decision(Enum):
    """What is to be done with a unit that did not simply commit."""

    GIVE_BACK = "roll back; its messages come again"
    COMPARE = "read its rows, which tell by whom or by what the advance was refused"
    RESOLVE = "take its rows again under a new token, which waits for a late COMMIT and fences it; then look at them"
    WAIT = "its transaction is somebody else's, and open"
    HALT_COMMITTED = "effects are durable, the offset is not: no process may go on"
    HALT_UNKNOWN = "nobody will ever know whether effects are durable: no process may go on"


# What the rows say after RESOLVE is a partitions.Resolution.
_TABLE: dict[tuple[Sent, str | None, Rows | None], Decision] = {
    # sent         pg_xact_status rows
    (Sent.NOTHING, "aborted", None): Decision.GIVE_BACK,
    (Sent.NOTHING, "aborted", "short"): Decision.COMPARE,
    (Sent.NOTHING, "committed", None): Decision.HALT_COMMITTED,  # by the handler itself
    (Sent.NOTHING, "committed", "short"): Decision.HALT_COMMITTED,
    (Sent.NOTHING, LOST, None): Decision.HALT_UNKNOWN,
    (Sent.NOTHING, LOST, "short"): Decision.HALT_UNKNOWN,
    (Sent.COMMIT, None, None): Decision.RESOLVE,  # the server is not asked for its status: the rows tell more
    (Sent.JOINED, "in progress", None): Decision.WAIT,
    (Sent.JOINED, "prepared", None): Decision.WAIT,
    (Sent.JOINED, "aborted", None): Decision.RESOLVE,
    (Sent.JOINED, "committed", None): Decision.HALT_COMMITTED,  # without the advance
    (Sent.JOINED, LOST, None): Decision.HALT_UNKNOWN,
    (Sent.ADVANCE, "in progress", None): Decision.WAIT,
    (Sent.ADVANCE, "prepared", None): Decision.WAIT,
    (Sent.ADVANCE, "aborted", None): Decision.RESOLVE,
    (Sent.ADVANCE, "committed", "moved"): Decision.RESOLVE,
    (Sent.ADVANCE, "committed", "stayed"): Decision.HALT_COMMITTED,  # a savepoint before the advance was rolled back to
    (Sent.ADVANCE, LOST, None): Decision.HALT_UNKNOWN,
}


def decide(sent: Sent, status: str | None, rows: Rows | None = None) -> Decision:
    """Read the table; what it does not have is a mistake of the caller."""
    return _TABLE[sent, status, rows]
