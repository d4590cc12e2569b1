"""Guard: what a process holds is not its child's."""

from __future__ import annotations

import ctypes
import os
import weakref

from exactly_once.errors import ConfigurationError

# One for each fork between the first process and this one: cheaper to look at than the process id.
_forks: list[None] = []
os.register_at_fork(after_in_child=lambda: _forks.append(None))


# What holds a client of Kafka, unless it is closed.
_holders: weakref.WeakSet[object] = weakref.WeakSet()


def leave_in_children(holder: object) -> None:
    """See to it that no forked child frees ``holder._client``: it would crash, or wait for threads that it has not."""
    _holders.add(holder)


def _leave() -> None:
    for holder in _holders:
        if (client := getattr(holder, "_client", None)) is not None:
            # One reference that nothing ever gives back, not even the end of the interpreter.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(after_in_child=_leave)


class Guard:
    """Remembers the process that made something: a child that was forked has the same reservations and sockets."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._made_by = os.getpid()
        self._made_in = len(_forks)

    def is_ours(self) -> bool:
        """Tell whether this is the process."""
        return self._made_in == len(_forks)

    def check(self) -> None:
        """Raise :class:`ConfigurationError` in any other process."""
        if not self.is_ours():
            raise ConfigurationError(
                f"{self._what} was made by process {self._made_by} and is used by its child {os.getpid()}: make one in "
                "each process, after the fork"
            )
