"""docs/faults.md names, for each fault, the tests that have its mark, or says why there is none."""

from __future__ import annotations

import pytest

from tests import faults
from tests.faults import Marked

ROW = "| A1 | a fault | what happens |{}|\n"
TESTS = {"A1": [Marked("tests/chaos/test_a.py", "test_it")]}
LINK = " [test_it](../tests/chaos/test_a.py) "


def test_page_and_marks_agree() -> None:
    assert faults.problems(faults.PAGE.read_text("utf-8"), faults.marked()) == []


def test_column_is_written_from_the_marks_and_a_reason_is_kept() -> None:
    assert faults.rewritten(ROW.format("  "), TESTS) == ROW.format(LINK)
    assert faults.rewritten(ROW.format(" none: out of reach "), TESTS) == ROW.format(LINK)
    assert faults.rewritten(ROW.format(" none: out of reach "), {}) == ROW.format(" none: out of reach ")
    assert faults.rewritten(ROW.format(LINK), {}) == ROW.format("  ")
    assert faults.problems(ROW.format(LINK), TESTS) == []


@pytest.mark.parametrize(
    ("page", "tests", "problem"),
    [
        (ROW.format("  "), {}, "A1: neither a test nor a reason"),
        (ROW.format(" none: "), {}, "A1: neither a test nor a reason"),
        (ROW.format(" [test_gone](../tests/chaos/test_a.py) "), TESTS, "the tests are not those that have the marks"),
        (ROW.format(LINK) * 2, TESTS, "A1: 2 rows"),
        (ROW.format(LINK).replace("A1", "A2"), {"A2": TESTS["A1"]}, "A1: no row, although the numbers go on"),
        (ROW.format(LINK), {**TESTS, "A2": TESTS["A1"]}, "A2: no row, although a test has its mark"),
    ],
)
def test_what_is_wrong_is_told(page: str, tests: dict[str, list[Marked]], problem: str) -> None:
    assert any(wrong.startswith(problem) for wrong in faults.problems(page, tests))
