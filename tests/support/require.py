"""Parts that a machine may lack: a test skips without them, unless the run insists."""

from __future__ import annotations

import importlib.util
import os

import pytest

VARIABLE = "EXACTLY_ONCE_REQUIRE"


def required_parts() -> frozenset[str]:
    """The parts this run insists on, such as {"docker", "spark"}, from the environment's comma list."""
    parts = (part.strip().lower() for part in os.environ.get(VARIABLE, "").split(","))
    return frozenset(part for part in parts if part)


def skip_unless(part: str, reason: str | None) -> None:
    """Go on if `reason` is None (nothing is missing); else skip with it, or fail where `part` is required."""
    if reason is None:
        return
    if part in required_parts():
        pytest.fail(f"{part} is required by {VARIABLE} but missing: {reason}", pytrace=False)
    pytest.skip(f"{part}: {reason}")


def lacking(*modules: str) -> str:
    """Name those that are not installed, with "and" between; empty if all are."""
    return " and ".join(name for name in modules if importlib.util.find_spec(name) is None)
