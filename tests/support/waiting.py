"""Waiting for something to become true, with a deadline and a name for what was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.02
SPARK_SECONDS = 600
"""For a query or a driver of Spark: ten seconds on an idle machine, minutes where ten others work beside it."""
_LEAST_SECONDS = 40.0
"""Shorter limits are raised to this: a machine at load 20 takes so long for what takes a second on an idle one, and
a wait that succeeds costs nothing. It is below the 45 s after which Kafka takes the partitions of a dead member."""


def until(
    condition: Callable[[], T],
    timeout_seconds: float,
    what: str,
    *,
    is_exact: bool = False,
    poll_seconds: float = POLL_SECONDS,
) -> T:
    """Poll `condition` until it is truthy and return its value; AssertionError naming `what` at the deadline.

    A limit that is part of what is tested is exact; any other one is generous.
    For states that send no signal (a row in another process's table, a server that starts). Where there is
    an event to wait on, wait on that.
    """
    if not is_exact:
        timeout_seconds = max(timeout_seconds, _LEAST_SECONDS)
    deadline = time.monotonic() + timeout_seconds
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout_seconds:g} s in vain for {what} (last seen: {value!r})")
        time.sleep(poll_seconds)
    return value
