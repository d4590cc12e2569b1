"""Poison: finds the message that makes a batch fail, by trying ever smaller batches. No I/O.

Each try is a unit of its own, with the handler called as always: healthy messages before the poisonous one
commit on the way, in their order, and no savepoint is put under the handler's feet.
"""

from __future__ import annotations


class Search:
    """Halves what is under suspicion until one message is left."""

    def __init__(self) -> None:
        self._suspects = 0

    @property
    def max_messages(self) -> int | None:
        """How many messages the next unit may have at most; None while nothing is searched for."""
        return None if self._suspects == 0 else max(1, self._suspects // 2)

    def failed(self, messages: int) -> None:
        """Take note that among the next ``messages`` at least one cannot be applied."""
        self._suspects = messages

    def landed(self, messages: int) -> None:
        """Take note that the first ``messages`` of them were committed."""
        self._suspects = max(0, self._suspects - messages)
