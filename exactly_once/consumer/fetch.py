"""Fetch: take from the client what it has, and wait for more where a batch should be larger."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

from confluent_kafka import Consumer, Message


def fetch(client: Consumer, timeout_seconds: float, count: int, *, fill: bool = False) -> list[Message]:
    """Take up to *count* messages: wait for the first one only, or with ``fill`` for all of them. Serves callbacks."""
    messages = client.consume(count if fill else 1, timeout_seconds)
    if fill or not messages or count <= 1:
        return messages
    # The garbage collector is left out while thousands of messages are made, all of which are in use. It would run
    # every 700 of them and, because they survive, look through the whole process: that took as long as the client did.
    was_on = gc.isenabled()
    gc.disable()
    try:
        messages += client.consume(count - 1, 0)
    finally:
        if was_on:
            gc.enable()
    return messages


class Linger:
    """How long a batch that is not full waits for more: so many seconds after its first message came.

    ``max_bytes`` is what a batch may hold; one that has it waits no longer.
    """

    def __init__(self, seconds: float, *, max_bytes: int) -> None:
        self._seconds = seconds
        self._max_bytes = max_bytes
        # When the first message of the batch came, on the monotonic clock; None while there is none.
        self._began_at: float | None = None
        self._bytes = 0

    def weigh(self, messages: Iterable[Message]) -> None:
        """Count the bytes of what was fetched."""
        if self._seconds:
            self._bytes += sum(map(len, messages))

    def left(self, waiting: int, count: int) -> float:
        """Return for how many seconds ``waiting`` messages should wait to become ``count``; ask after each fetch."""
        if not self._seconds or not waiting:
            self._began_at, self._bytes = None, 0
            return 0.0
        now = time.monotonic()
        if self._began_at is None:
            self._began_at = now
        is_full = waiting >= count or self._bytes >= self._max_bytes
        return 0.0 if is_full else max(0.0, self._began_at + self._seconds - now)
