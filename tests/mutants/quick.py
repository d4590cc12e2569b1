"""A plugin of pytest for runs with a mutant.

Hypothesis need not make a failure smaller, which can take minutes,
nor be fast: on a busy machine that is no mutant's fault.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def pytest_configure() -> None:
    """Leave out what comes after the first failure."""
    phases = [phase for phase in Phase if phase not in {Phase.shrink, Phase.explain}]
    settings.register_profile("mutants", settings(), phases=phases, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("mutants")
