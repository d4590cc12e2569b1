"""The simulated database is the real one: what schedules had it execute, a real Postgres answers in the same way.

``EXACTLY_ONCE_REPLAYS`` sets how many schedules of this commit are replayed, beside as many that stay.
"""

from __future__ import annotations

import os
import time

import pytest

from tests.support.seeds import seeds

from .database import Violation
from .replay import Replay
from .world import Plan, World

REPLAYS = int(os.environ.get("EXACTLY_ONCE_REPLAYS", "60"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0 if REPLAYS > 100 else 600)]


def test_postgres_answers_as_the_simulated_database_did(conninfo: str, name: str) -> None:
    began = time.perf_counter()
    replay = Replay(conninfo)
    tried = seeds(range(REPLAYS), new=REPLAYS)
    try:
        for seed in tried:
            world = World(seed, Plan(usurps=seed % 4 == 0))
            world.run()
            try:
                replay.run(f"{name}-{seed}", world.database.statements)
            except Violation as violation:
                raise Violation(f"seed {seed}: {violation}") from violation.__cause__
    finally:
        replay.close()
    seconds = time.perf_counter() - began
    print(f"{len(tried)} schedules, {replay.executed} statements: as Postgres; {len(tried) / seconds:.0f} schedules/s")
