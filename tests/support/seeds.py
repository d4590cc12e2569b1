"""Seeds of random tests: some that stay, and some that every commit draws anew.

A commit is tried with seeds of its own, so that the schedules of all the commits together are many; and two runs of one
commit are alike. ``EXACTLY_ONCE_SEED`` repeats or chooses: it is the first seed, of every test. The header of a run
shows it, and so does a failure.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from functools import cache
from pathlib import Path

import hypothesis
import hypothesis.core
import pytest

VARIABLE = "EXACTLY_ONCE_SEED"
_RANGE = 1_000_000_000
"""Drawn seeds lie between this and its double: none is ever one of those that stay."""
_UNKNOWN = 2_026_000_000
"""Where there is neither the variable nor a commit, as in an unpacked archive."""


@cache
def first_seed() -> int:
    """Return the seed of this run."""
    if given := os.environ.get(VARIABLE):
        return int(given)
    commit = _commit()
    return _RANGE + int(commit, 16) % _RANGE if commit else _UNKNOWN


def drawn(count: int = 1) -> range:
    """Return seeds of this run."""
    return range(first_seed(), first_seed() + count)


def seeds(fixed: range | list[int], *, new: int) -> list[int]:
    """Return the seeds that stay, and as many new ones as wanted; only new ones where the first was chosen."""
    return list(drawn(new or 1)) if VARIABLE in os.environ else [*fixed, *drawn(new)]


def pytest_configure() -> None:
    """Let Hypothesis draw from this seed where it would try the same examples for ever, as it does in CI.

    No example has a time limit of its own, and drawing none either: on a busy machine any of them may take long.
    """
    is_repeated = hypothesis.settings().derandomize
    hypothesis.settings.register_profile(
        "seeded",
        hypothesis.settings(),
        derandomize=False,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("seeded")
    if is_repeated:  # what --hypothesis-seed sets
        hypothesis.core.global_force_seed = first_seed()  # type: ignore[assignment]


def pytest_report_header() -> str:
    """Show the seed of this run at its beginning."""
    return f"seed: {first_seed()} ({VARIABLE} repeats it)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show it with each failure, too: the header is far away then, or cut off."""
    report = yield
    if report.failed:
        report.sections.append(("seed", f"{VARIABLE}={first_seed()}"))
    return report


def _commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return ""
    return asked.stdout.strip()
