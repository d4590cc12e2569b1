"""Seeds: the same for one commit, chosen by the variable, and shown."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import hypothesis.core
import pytest

from tests.support.seeds import VARIABLE, drawn, first_seed, pytest_configure, pytest_report_header, seeds

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    first_seed.cache_clear()
    yield
    first_seed.cache_clear()


def test_a_commit_has_seeds_of_its_own_and_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("tests.support.seeds._commit", lambda: "c94f1be")
    one = first_seed()
    assert seeds([1, 2], new=2) == [1, 2, one, one + 1]
    first_seed.cache_clear()
    assert first_seed() == one
    first_seed.cache_clear()
    monkeypatch.setattr("tests.support.seeds._commit", lambda: "eecdc08")
    assert first_seed() != one


def test_without_a_commit_there_is_a_seed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("tests.support.seeds._commit", lambda: "")
    assert list(drawn(2)) == [first_seed(), first_seed() + 1]


def test_the_variable_chooses_all_of_them_and_the_header_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "31337")
    assert seeds([1, 2], new=2) == [31337, 31338]
    assert f"31337 ({VARIABLE}" in pytest_report_header()


def test_a_run_shows_its_seed_and_so_does_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_luck.py").write_text("def test_luck(): assert False")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.seeds", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, VARIABLE: "31337"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    assert f"seed: 31337 ({VARIABLE} repeats it)" in run.stdout
    assert f"\n{VARIABLE}=31337\n" in run.stdout


def test_hypothesis_draws_from_the_seed_where_it_would_repeat_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own profile for CI tries the same examples in every run of every commit."""
    monkeypatch.setattr(hypothesis.core, "global_force_seed", None)
    before = hypothesis.settings.get_current_profile_name()
    found: list[list[int]] = []

    def draw(number: int) -> None:
        found[-1].append(number)

    try:
        for seed in ("1", "1", "2"):
            first_seed.cache_clear()
            monkeypatch.setenv(VARIABLE, seed)
            hypothesis.settings.load_profile("ci")
            pytest_configure()
            found.append([])
            hypothesis.given(hypothesis.strategies.integers())(draw)()
    finally:
        hypothesis.settings.load_profile(before)
    assert found[0] == found[1] != found[2]
