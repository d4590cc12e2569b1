"""Guard: what a process holds is not its child's."""

from __future__ import annotations

import os

from exactly_once.errors import ConfigurationError


class Guard:
    """Remembers the process that made something: a child that was forked has the same reservations and sockets."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._process = os.getpid()

    def is_ours(self) -> bool:
        """Tell whether this is the process."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise :class:`ConfigurationError` in any other process."""
        if os.getpid() != self._process:
            raise ConfigurationError(
                f"{self._what} was made by process {self._process} and is used by its child {os.getpid()}: make one in "
                "each process, after the fork"
            )
