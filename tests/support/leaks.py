"""Leaks: what a test leaves behind in this process: Kafka clients, threads, connections.

A process has 1,024 thread-local keys and each Kafka client takes one, so a suite that forgets its clients ends in
errors that no test has caused.
"""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path

_GRACE_SECONDS = 5.0
"""How long what a test has closed may take to end: threads, and sockets that the other side closes."""
_TASKS = Path("/proc/self/task")
_FILES = Path("/proc/self/fd")


@dataclass(frozen=True)
class Census:
    """How many there are of each, now."""

    kafka_clients: int
    threads: int
    sockets: int

    def exceeds(self, other: Census) -> str:
        """Name what there is more of than in *other*, with figures; empty if there is nothing."""
        names = [f.name for f in fields(self)]
        pairs = [(name, getattr(other, name), getattr(self, name)) for name in names]
        return ", ".join(f"{name.replace('_', ' ')} {old} -> {new}" for name, old, new in pairs if new > old)


def census() -> Census:
    """Count; everything is 0 where there is no /proc."""
    if not _TASKS.exists():
        return Census(0, 0, 0)
    return Census(_kafka_clients(), len(threading.enumerate()), _sockets())


def left_since(before: Census) -> str:
    """Say what was left behind since *before*, after a moment of grace; empty if nothing was."""
    if not (left := census().exceeds(before)):
        return ""
    gc.collect()  # an exception that was caught may hold a closed client in a cycle
    deadline = time.monotonic() + _GRACE_SECONDS
    while (left := census().exceeds(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _kafka_clients() -> int:
    """Count librdkafka's main threads: each client has one, as long as it lives."""
    count = 0
    for task in _TASKS.iterdir():
        try:
            count += (task / "comm").read_text() == "rdk:main\n"
        except OSError:  # the thread has ended meanwhile
            continue
    return count


def _sockets() -> int:
    count = 0
    for file in _FILES.iterdir():
        try:
            count += str(file.readlink()).startswith("socket:")
        except OSError:
            continue
    return count
