"""Client: take what it has, wait for more where a batch should be larger, and close it within a time."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from confluent_kafka import Consumer, Message

from .buffer import bytes_of


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


@dataclass(slots=True)
class Linger:
    """How long a batch that is not full waits for more: so many seconds after its first message came.

    ``max_bytes`` is what a batch may hold; one that has it waits no longer.
    """

    seconds: float
    max_bytes: int
    # When the first message of the batch came, on the monotonic clock; None while there is none.
    _began_at: float | None = field(default=None, init=False)
    _bytes: int = field(default=0, init=False)

    def weigh(self, messages: Sequence[Message]) -> None:
        """Count the bytes of what was fetched."""
        if self.seconds:
            self._bytes += bytes_of(messages)

    def left(self, waiting: int, count: int) -> float:
        """Return for how many seconds ``waiting`` messages should wait to become ``count``; ask after each fetch."""
        if not self.seconds or not waiting:
            self._began_at, self._bytes = None, 0
            return 0.0
        now = time.monotonic()
        if self._began_at is None:
            self._began_at = now
        is_full = waiting >= count or self._bytes >= self.max_bytes
        return 0.0 if is_full else max(0.0, self._began_at + self.seconds - now)


class Closing:
    """The end of one client, in a thread that is left behind where it does not come to its end.

    The client's own thread may stand still for ever, and its close waits for that.
    """

    def __init__(self, client: Consumer) -> None:
        # What closing raised; written by the thread before it ends.
        self._error: BaseException | None = None

        def close() -> None:
            try:
                client.close()
            except BaseException as error:  # noqa: BLE001 - raised by wait()
                self._error = error

        self._thread = threading.Thread(target=close, name="exactly_once-close", daemon=True)

    def wait(self, seconds: float) -> bool:
        """Return whether the client is closed, after so long at most; may be called again when it was interrupted.

        :raises Exception: what the client's own close raises.
        """
        if self._thread.ident is None:
            with contextlib.suppress(RuntimeError):  # an interrupted start that has started it
                self._thread.start()
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()
