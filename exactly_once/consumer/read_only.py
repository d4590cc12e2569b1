"""Read-only: a member whose database server takes no writes leaves the group after a while, and joins it again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from exactly_once._log import about
from exactly_once.ledger.session import Session

from .startup import refuse_read_only

logger = logging.getLogger(__name__)

# How long a member that cannot write keeps its partitions. A failover is over by then, as a rule; where this one was
# sent to a standby by mistake, a healthy member may be waiting for them.
LEAVE_SECONDS = 120.0


class ReadOnlyGuard:
    """Asks the server whether it takes writes once it has refused one, until it does."""

    def __init__(
        self, session: Session, *, group_id: str, leave: Callable[[], object], join: Callable[[], object]
    ) -> None:
        self._session = session
        self._group_id = group_id
        self._leave = leave
        self._join = join
        self._since: float | None = None
        self._has_left = False

    def met(self) -> None:
        """Take note that the server has refused to write.

        :raises ReadOnly: naming it, unless it takes writes by now.
        """
        self._since = self._since or time.monotonic()
        self.check()

    def check(self) -> None:
        """Let the loop go on only where it can write.

        :raises ReadOnly: else. After :data:`LEAVE_SECONDS` of that the group has been left.
        """
        if self._since is None:
            return
        extra = about("read_only", group=self._group_id)
        if not self._has_left and time.monotonic() - self._since > LEAVE_SECONDS:
            self._has_left = True
            logger.warning("the database takes no writes: leaving the group until it does", extra=extra)
            self._leave()
        refuse_read_only(self._session)
        self._since = None
        if self._has_left:
            self._has_left = False
            logger.warning("the database takes writes again: joining the group", extra=extra)
            self._join()
