"""The model of ownership and commit: every schedule within small bounds, and each guard is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.require import skip_unless

MODEL = Path(__file__).resolve().parents[2] / "model/consumer.pml"
BOUNDS = {
    "faults and rebalances": {"FAULTS": 1, "REBALANCES": 1, "FAILOVERS": 0},
    "rebalances and failovers": {"FAULTS": 0, "REBALANCES": 1, "FAILOVERS": 1},
    "faults and failovers": {"FAULTS": 1, "REBALANCES": 0, "FAILOVERS": 1},
    "all, one message": {"FAULTS": 1, "REBALANCES": 1, "FAILOVERS": 1, "MESSAGES": 1},
}
SAFETY, LIVENESS = ("-DSAFETY", "-DNOCLAIM"), ()
MUTANTS = {
    "NO_TOKEN": SAFETY,
    "NO_OFFSET": SAFETY,
    "RESOLVE_BY_READ": SAFETY,
    "EPOCH_ONLY": SAFETY,
    "NOT_TOGETHER": SAFETY,
    "TRUST_MEMORY": LIVENESS,
}
"""What finds each: a loss or a doubling, or that somebody waits for ever."""


def search(directory: Path, mode: tuple[str, ...], **macros: int) -> str:
    """Search all states within the bounds; return what Spin reports."""
    skip_unless("spin", None if shutil.which("spin") and shutil.which("gcc") else "needs spin and gcc")
    values = [f"-D{name}={value}" for name, value in macros.items()]

    def call(*command: str) -> str:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call("spin", "-a", *values, str(MODEL))
    # The state vector and the bound of weak fairness have to hold two workers.
    call("gcc", "-w", "-O2", "-DVECTORSZ=2048", "-DNFAIR=4", *mode, "-o", "pan", "pan.c")
    report = call("./pan", "-m1000000", "-w22", *(() if mode else ("-a", "-f")))
    assert "error: max search depth" not in report
    return report


def errors(report: str) -> int:
    found = re.search(r"errors: (\d+)", report)
    assert found is not None, report
    return int(found[1])


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("mode", [SAFETY, LIVENESS], ids=["safety", "liveness"])
def test_no_schedule_loses_doubles_or_starves(bounds: dict[str, int], mode: tuple[str, ...], tmp_path: Path) -> None:
    assert errors(report := search(tmp_path, mode, **bounds)) == 0, report


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_guard_is_needed(mutant: str, tmp_path: Path) -> None:
    number = [*MUTANTS].index(mutant) + 1
    assert re.search(rf"#define {mutant} {number}\b", MODEL.read_text("utf-8"))
    assert errors(search(tmp_path, MUTANTS[mutant], MUTANT=number, **BOUNDS["faults and failovers"])) == 1
