"""A plugin of pytest for runs with a mutant: Hypothesis need not make a failure smaller, which can take minutes."""

from __future__ import annotations

from hypothesis import Phase, settings


def pytest_configure() -> None:
    """Leave out what comes after the first failure."""
    phases = [phase for phase in Phase if phase not in {Phase.shrink, Phase.explain}]
    settings.register_profile("mutants", settings(), phases=phases)
    settings.load_profile("mutants")
