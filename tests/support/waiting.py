"""Waiting for something to become true, with a deadline and a name for what was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.02


def until(condition: Callable[[], T], timeout_seconds: float, what: str) -> T:
    """Poll `condition` until it is truthy and return its value; AssertionError naming `what` at the deadline.

    For states that send no signal (a row in another process's table, a server that starts). Where there is
    an event to wait on, wait on that.
    """
    deadline = time.monotonic() + timeout_seconds
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout_seconds:g} s in vain for {what} (last seen: {value!r})")
        time.sleep(POLL_SECONDS)
    return value
