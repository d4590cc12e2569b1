"""Leaks: what a test leaves behind in this process: Kafka clients, connections to Postgres, threads.

A process has 1,024 thread-local keys and each Kafka client takes one, so a suite that forgets its clients ends in
errors that no test has caused.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psycopg

_GRACE_SECONDS = 60.0
"""How long what a test has closed may take to end on a busy machine; only a test that leaves something waits."""
_TASKS = Path("/proc/self/task")
_POOLED = ("simulation", "proxy-", "kafka-proxy")
"""Threads that tests share, by the beginning of their names: the simulator's, and those of proxies, which end with them
and not with each connection that a fault has left half open."""
_FOREIGN = ("py4j", "pyspark")
"""Whose threads come and go as the JVM of a session calls, in whatever test that happens."""

_connections: weakref.WeakSet[psycopg.Connection[Any]] = weakref.WeakSet()


@dataclass(frozen=True)
class Census:
    """How many there are of each, now."""

    kafka_clients: int
    connections: int
    threads: int

    def exceeds(self, other: Census) -> str:
        """Name what there is more of than in *other*, with figures; empty if there is nothing."""
        names = [f.name for f in fields(self)]
        pairs = [(name, getattr(other, name), getattr(self, name)) for name in names]
        return ", ".join(f"{name.replace('_', ' ')} {old} -> {new}" for name, old, new in pairs if new > old)


def watch_connections() -> None:
    """Count every connection of psycopg from now on."""
    make = psycopg.Connection.__init__

    def made(self: psycopg.Connection[Any], *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        _connections.add(self)

    psycopg.Connection.__init__ = made  # type: ignore[method-assign]


def census() -> Census:
    """Count; clients are 0 where there is no /proc."""
    return Census(
        kafka_clients=_kafka_clients() if _TASKS.exists() else 0,
        connections=sum(not connection.closed for connection in _connections),
        threads=len(_threads()),
    )


def left_since(before: Census, let_go: Callable[[], None] = lambda: None) -> str:
    """Say what was left behind since *before*, after a moment of grace; empty if nothing was.

    *let_go* is called if something was, and drops what refers to it and is nobody's fault.
    """
    if not census().exceeds(before):
        return ""
    let_go()
    gc.collect()  # an exception that was caught may hold a closed client in a cycle
    deadline = time.monotonic() + _GRACE_SECONDS
    while (left := census().exceeds(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return f"{left}; threads now: {', '.join(_threads())}" if "threads" in left else left


def _threads() -> list[str]:
    """Name the threads that a test may have started."""
    found = []
    for thread in threading.enumerate():
        modules = {type(thread).__module__, getattr(getattr(thread, "_target", None), "__module__", "")}
        if not (thread.name.startswith(_POOLED) or any((name or "").startswith(_FOREIGN) for name in modules)):
            found.append(thread.name)
    return found


def _kafka_clients() -> int:
    """Count librdkafka's main threads: each client has one, as long as it lives."""
    count = 0
    for task in _TASKS.iterdir():
        try:
            count += (task / "comm").read_text() == "rdk:main\n"
        except OSError:  # the thread has ended meanwhile
            continue
    return count
