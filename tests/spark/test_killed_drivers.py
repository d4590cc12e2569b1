"""Drivers killed at random moments under a query of each mode at once; ``tests.spark.killing`` does more of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.spark.killing import ROWS, SUMS, kill_drivers
from tests.support.seeds import first_seed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("needs_spark")
def test_each_mode_is_exact_when_its_drivers_are_killed(
    bootstrap_servers: str, conninfo: str, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    try:
        verdicts = kill_drivers(bootstrap_servers, conninfo, tmp_path, kills=1, seed=first_seed())
    finally:
        for mode in (*ROWS, *SUMS):
            db.execute(f"DROP TABLE IF EXISTS killed_{mode}")
    assert [verdict for verdict in verdicts if verdict.lost or verdict.doubled] == []
