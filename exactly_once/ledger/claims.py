"""Claims: keys of events, each of which one unit of a group may have, in the transaction of its effects.

A key is bytes, str, int or UUID, and keeps its type: ``b"1"``, ``"1"`` and ``1`` are three keys. The window of time in
which they are held is agreed on when a consumer starts, and turned between its units.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from uuid import UUID

import psycopg

from exactly_once._log import about

from .session import Connection, Session, execute, last_row

logger = logging.getLogger(__name__)

Key = bytes | str | int | UUID

# Bytes of a key that are kept as they are: what keys mostly have. An entry of an index would hold 2,704 of them.
_LONGEST = 128
# Of longer ones: two keys with one digest of 256 bits will not be met, nor can anybody make them.
_DIGEST_BYTES = 32
# How long a turn, or a change of the window, may wait for the units that have claimed, while others wait behind it and
# this member's next unit does: below ``deadlock_timeout``, so that it is the turn that gives up.
_LOCK_SECONDS = 0.5
# When a turn that had to give up is tried again.
_AGAIN_SECONDS = 10.0
# After how many such tries in a row that is logged: one or two are usual where units take seconds.
_TOLD_TRIES = 6
# How long the window is not looked at at most: another member may have made it shorter.
_LONGEST_SECONDS = 3600.0
# The members of a group are not to come together.
_JITTER = 0.2


def claim(connection: Connection, keys: Iterable[Key], *, schema: str, group_id: str) -> list[bool]:
    """Claim keys in the open transaction, in one statement; tell for each, in order, whether this is its first claim.

    :raises TypeError: or :raises ValueError: for what cannot be a key; nothing is claimed then.
    """
    forms = [_form(key) for key in keys]
    wanted = sorted(set(forms))
    if not wanted:
        return []
    (places,) = last_row(execute(connection, schema, "claim", group_id=group_id, keys=wanted))
    taken = {wanted[int(place) - 1] for place in (places or "").split()}
    answers = []
    for form in forms:
        answers.append(form not in taken)
        taken.add(form)  # a second one of equal keys comes too late, too
    return answers


def _form(key: object) -> bytes:
    """Return the one form of a key as bytes: a letter for its type, then the key, or the digest of a long one."""
    if isinstance(key, (bytes, bytearray, memoryview)):
        kind, form = b"b", bytes(key)
    elif isinstance(key, str):
        kind, form = b"s", key.encode("utf-8", "surrogatepass")
    elif isinstance(key, UUID):
        kind, form = b"u", key.bytes
    elif isinstance(key, int) and not isinstance(key, bool):
        kind, form = b"i", key.to_bytes(key.bit_length() // 8 + 1, "big", signed=True)
    else:
        raise TypeError(f"a key to claim is bytes, str, int or UUID, not {type(key).__name__}")
    if not form:
        raise ValueError("a key to claim is empty; the first message without a key would stand for all of them")
    if len(form) <= _LONGEST:
        return kind + form
    return kind.upper() + blake2b(form, digest_size=_DIGEST_BYTES).digest()


@dataclass(slots=True, kw_only=True)
class ClaimsWindow:
    """Has the keys of a group emptied, generation by generation, as long as this consumer runs.

    Without ``seconds`` this member turns nothing: keys are held for ever.
    """

    session: Session
    group_id: str
    seconds: float | None
    _is_agreed: bool = field(default=False, init=False)
    # How often in a row the turn had to give up.
    _postponed: int = field(default=0, init=False)
    # When the next turn may be due, on the monotonic clock.
    _next_turn: float = field(default=0.0, init=False)

    def turn(self) -> None:
        """Turn the window if it is time. What another member or a long unit holds up is tried again later.

        :raises psycopg.Error: when the database cannot be asked now; call again.
        """
        if self.seconds is None or time.monotonic() < self._next_turn:
            return
        try:
            if not self._is_agreed:
                before = self._ask("claim_keep", seconds=self.seconds)
                self._is_agreed = True
                if before not in (None, self.seconds):
                    text = (
                        "claims_window=%g: the group's keys were held for %g s until now; the last member to start "
                        "decides"
                    )
                    extra = about("claims_window_changed", group=self.group_id)
                    logger.warning(text, self.seconds, before, extra=extra)
            left = self._ask("claim_turn")
            self._postponed = 0
        except psycopg.errors.LockNotAvailable:
            # Also of another window than before: above READ COMMITTED a unit that has claimed holds the row of that.
            left = _AGAIN_SECONDS
            self._postponed += 1
            if self._postponed == _TOLD_TRIES:
                text = (
                    "claimed keys are held beyond twice claims_window, or a new claims_window is not in force: some "
                    "unit that has claimed is always open"
                )
                logger.warning(text, extra=about("claims_turn_postponed", group=self.group_id))
        wait = _LONGEST_SECONDS if left is None else min(left, _LONGEST_SECONDS)
        self._next_turn = time.monotonic() + wait * random.uniform(1, 1 + _JITTER)  # noqa: S311

    def _ask(self, name: str, **parameters: Any) -> float | None:
        with self.session.ledger_transaction(lock_timeout_seconds=_LOCK_SECONDS) as (connection, _):
            cursor = execute(connection, self.session.schema, name, group_id=self.group_id, **parameters)
            seconds: float | None = last_row(cursor)[0]
            return seconds
