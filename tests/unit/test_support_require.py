"""Skipping where a part is missing, failing where the run insists on it, and waiting with a deadline."""

from __future__ import annotations

from itertools import count

import pytest

from tests.support.require import VARIABLE, skip_unless
from tests.support.waiting import until


def test_a_part_that_is_there_lets_the_test_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "spark")
    skip_unless("spark", None)


def test_a_missing_part_skips_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "docker")
    with pytest.raises(pytest.skip.Exception, match="spark: no Java"):
        skip_unless("spark", "no Java")


def test_a_missing_part_fails_where_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "docker, Spark")
    with pytest.raises(pytest.fail.Exception, match="no Java"):
        skip_unless("spark", "no Java")


def test_until_returns_the_first_true_value() -> None:
    numbers = count()
    assert until(lambda: next(numbers) == 2, 10, "the third number")
    assert next(numbers) == 3


def test_until_names_what_it_waited_for() -> None:
    with pytest.raises(AssertionError, match="a miracle"):
        until(lambda: 0, 0.01, "a miracle", is_exact=True)
