"""The example survives ``kill -9`` while it runs: the same command goes on, and table = topic."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

KILLED = """
import builtins, os, runpy, signal, sys

def told(*words, print=print, **more):
    print(*words, **more)
    if words and words[0].startswith("batch 1:"):
        os.kill(os.getpid(), signal.SIGKILL)

builtins.print = told
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program that gets killed between two batches: it would have written all of them before who reads it has."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the embedded Postgres may enter; pytest closes its own to all users but ours."""
    with tempfile.TemporaryDirectory(prefix="spark-orders-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.usefixtures("needs_spark")
def test_the_example_that_was_killed_goes_on_where_it_was(place: Path) -> None:
    from tests.support.spark import Driver  # noqa: PLC0415 - imports pyspark

    command = ["examples/spark_orders.py", "--orders", "40000", "--directory", str(place)]
    with Driver("-c", KILLED, *command) as first:
        assert first.wait_ended() == -signal.SIGKILL, first.story()
        assert first.lines[-1].startswith("batch 1:"), "killed in the middle"
    with Driver(*command) as second:
        assert second.wait_ended() == 0, second.story()
        assert second.lines[-1] == "40000 orders in the topic; 40000 rows, 0 lost, 0 doubled"
        batches = [line for line in second.lines if line.startswith("batch")]
        assert 0 < len(batches) < 5, "what was there was not written again"
