"""The simulated database is the real one: what schedules had it execute, a real Postgres answers in the same way.

``EXACTLY_ONCE_REPLAYS`` sets how many schedules of this commit are replayed, beside as many that stay.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.support.seeds import seeds

from .database import Violation
from .replay import Replay
from .world import Plan, World

REPLAYS = int(os.environ.get("EXACTLY_ONCE_REPLAYS", "60"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0 if REPLAYS > 100 else 600)]


def test_postgres_answers_as_the_simulated_database_did(conninfo: str, name: str) -> None:
    began = time.perf_counter()
    tried = seeds(range(REPLAYS), new=REPLAYS)
    executed = _replay(conninfo, name, tried)
    seconds = time.perf_counter() - began
    print(f"{len(tried)} schedules, {executed} statements: as Postgres; {len(tried) / seconds:.0f} schedules/s")


def test_a_lock_of_somebody_else_is_no_answer(conninfo: str, name: str) -> None:
    """VACUUM locks the table for moments to give its last pages back; it does not queue for that, either."""
    is_over = threading.Event()
    times = 0

    def lock() -> None:
        nonlocal times
        with psycopg.connect(conninfo, autocommit=True) as other:
            while not is_over.is_set():
                with contextlib.suppress(psycopg.errors.LockNotAvailable), other.transaction():
                    other.execute("LOCK TABLE exactly_once.ledger IN ACCESS EXCLUSIVE MODE NOWAIT")
                    other.execute("SELECT pg_sleep(0.01)")
                    times += 1

    def is_wanted(seed: int) -> bool:
        return seed < 20 or (times <= 20 and not locking.done())

    with ThreadPoolExecutor(1) as thread:
        locking = thread.submit(lock)
        try:
            # Until it has had the lock often: a busy machine gives it little time beside a few schedules.
            _replay(conninfo, name, itertools.takewhile(is_wanted, itertools.count()))
        finally:
            is_over.set()
        locking.result()


def _replay(conninfo: str, name: str, tried: Iterable[int]) -> int:
    """Replay the schedules of these seeds; return how many statements they have."""
    replay = Replay(conninfo)
    try:
        for seed in tried:
            world = World(seed, Plan(usurps=seed % 4 == 0))
            world.database.keeps_statements = True
            world.run()
            try:
                replay.run(f"{name}-{seed}", world.database.statements)
            except Violation as violation:
                raise Violation(f"seed {seed}: {violation}") from violation.__cause__
    finally:
        replay.close()
    return replay.executed
