"""A stand-in for psycopg_pool's ConnectionPool, which is not among the tests' packages.

It has what the library touches, with the pool's own rules: the mark on its connections, how many there may be, that it
takes back its own only, that a connection's block does not close it, and that close() may give it back.
"""

from __future__ import annotations

import threading
from typing import Any

import psycopg


class Pool:
    """At most `size` connections at a time; `getconn` raises where the real one would have waited in vain."""

    def __init__(self, conninfo: str, *, size: int, close_returns: bool = False) -> None:
        self._conninfo = conninfo
        self._free = threading.Semaphore(size)
        self.size = size
        self.close_returns = close_returns
        self.out: set[psycopg.Connection[Any]] = set()
        self.made = 0

    def getconn(self) -> psycopg.Connection[Any]:
        """Open a connection; this pool keeps none in stock."""
        if not self._free.acquire(timeout=3):
            raise psycopg.OperationalError("couldn't get a connection after 3.00 sec")
        try:
            connection = psycopg.connect(self._conninfo)
        except BaseException:
            self._free.release()
            raise
        connection._pool = self
        self.out.add(connection)
        self.made += 1
        return connection

    def putconn(self, connection: psycopg.Connection[Any]) -> None:
        """Take a connection back; a closed one is replaced, one that is open goes to the next."""
        if connection._pool is not self:
            raise ValueError("can't return connection to pool: it doesn't come from this pool")
        connection._pool = None
        self.out.remove(connection)
        assert connection.closed, "whoever gets it next would meet what the library left on it"
        self._free.release()
