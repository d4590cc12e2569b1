"""Poison: finds the message that makes a batch fail: the error names it, or ever smaller batches are tried. No I/O.

Each try is a unit of its own, with the handler called as always: healthy messages before the poisonous one
commit on the way, in their order, and no savepoint is put under the handler's feet.
"""

from __future__ import annotations

# So many messages at least are tried behind one that was named: fewer would cost more commits than failures.
_LEAST = 64


class Bisection:
    """Halves what is under suspicion until one message is left; a message that was named is tried alone at once."""

    def __init__(self) -> None:
        self._suspects = 0  # so many of the next messages have the one at fault among them; 0: none is sought
        # How many messages come before the one that an error named, and are tried without it.
        self._before = 0
        # How many messages a unit may have after one was named. Where one is bad more are, and a large unit would
        # be handed out again and again for each; so it doubles with each commit, up to the size at which it failed.
        self._cautious: int | None = None
        self._full = 0  # that size; it counts while ``_cautious`` is set

    @property
    def max_messages(self) -> int | None:
        """How many messages the next unit may have at most; None while nothing is searched for."""
        if self._suspects == 0:
            return self._cautious
        return self._before or max(1, self._suspects // 2)

    def failed(self, messages: int) -> None:
        """Take note that among the next ``messages`` at least one cannot be applied."""
        self._suspects, self._before = messages, 0

    def named(self, messages: int, before: int) -> None:
        """Take note that of the next ``messages`` the one behind ``before`` others is said to be at fault."""
        self._suspects, self._before = before + 1, before
        self._full = max(messages, self._full if self._cautious is not None else 0)
        self._cautious = max(_LEAST, 2 * before)

    def committed(self, messages: int) -> None:
        """Take note that the first ``messages`` of them were committed."""
        if self._suspects == 0 and self._cautious is not None:
            self._cautious = 2 * self._cautious if 2 * self._cautious < self._full else None
        self._suspects = max(0, self._suspects - messages)
        self._before = max(0, self._before - messages)
