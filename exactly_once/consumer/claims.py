"""The window of claimed keys: agreed on when a consumer starts, and turned between its units."""

from __future__ import annotations

import logging
import random
import time
from typing import Any

import psycopg

from exactly_once._log import about
from exactly_once.ledger.session import Session, cursor_on, last_row
from exactly_once.ledger.sql import query

logger = logging.getLogger(__name__)

# How long a turn may wait for the units that have claimed, while others wait behind it: below ``deadlock_timeout``, so
# that it is the turn that gives up.
_LOCK_SECONDS = 0.5
# When a turn that had to give up is tried again.
_AGAIN_SECONDS = 10.0
# After how many such tries in a row that is told of: one or two are usual where units take seconds.
_TOLD_TRIES = 6
# How long the window is not looked at at most: another member may have made it shorter.
_LONGEST_SECONDS = 3600.0
# The members of a group are not to come together.
_JITTER = 0.2


class ClaimsWindow:
    """Has the keys of a group emptied, generation by generation, as long as this consumer runs."""

    def __init__(self, session: Session, *, group_id: str, seconds: float | None) -> None:
        """Without ``seconds`` this member turns nothing: keys are held for ever."""
        self._session = session
        self._group_id = group_id
        self._seconds = seconds
        self._is_agreed = False
        # How often in a row the turn had to give up.
        self._postponed = 0
        # When the next turn may be due, on the monotonic clock.
        self._next_turn = 0.0

    def turn(self) -> None:
        """Turn the window if it is time. What another member or a long unit holds up is tried again later.

        :raises psycopg.Error: when the database cannot be asked now; call again.
        """
        if self._seconds is None or time.monotonic() < self._next_turn:
            return
        if not self._is_agreed:
            before = self._ask("claim_keep", seconds=self._seconds)
            self._is_agreed = True
            if before not in (None, self._seconds):
                text = (
                    "claims_window=%g: the group's keys were held for %g s until now; the last member to start decides"
                )
                extra = about("claims_window_changed", group=self._group_id)
                logger.warning(text, self._seconds, before, extra=extra)
        try:
            left = self._ask("claim_turn", lock_seconds=_LOCK_SECONDS)
            self._postponed = 0
        except psycopg.errors.LockNotAvailable:
            left = _AGAIN_SECONDS
            self._postponed += 1
            if self._postponed == _TOLD_TRIES:
                text = (
                    "claimed keys are held beyond twice claims_window: some long unit that has claimed is always open"
                )
                logger.warning(text, extra=about("claims_turn_postponed", group=self._group_id))
        wait = _LONGEST_SECONDS if left is None else min(left, _LONGEST_SECONDS)
        self._next_turn = time.monotonic() + wait * random.uniform(1, 1 + _JITTER)  # noqa: S311

    def _ask(self, name: str, *, lock_seconds: float = _AGAIN_SECONDS, **parameters: Any) -> float | None:
        with self._session.ledger_transaction(lock_timeout_seconds=lock_seconds) as (connection, _):
            cursor = cursor_on(connection)
            values = {"group_id": self._group_id, **parameters}
            cursor.execute(query(name, self._session.schema), values, prepare=False)
            seconds: float | None = last_row(cursor)[0]
            return seconds
