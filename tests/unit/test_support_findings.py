"""A check over many names lists all that it finds."""

from __future__ import annotations

import pytest

from tests.support.findings import nothing


def test_nothing_found_is_silent() -> None:
    nothing([], "no docstring")
    nothing({"module": set()}, "imports")


def test_everything_found_is_listed() -> None:
    with pytest.raises(AssertionError) as failed:
        nothing((f"name{number}" for number in range(100)), "no docstring")
    assert str(failed.value).splitlines()[0] == "no docstring:"
    assert {f"  name{number}" for number in range(100)} <= set(str(failed.value).splitlines())
    with pytest.raises(AssertionError, match=r"a: \{'b'\}"):
        nothing({"a": {"b"}, "c": set[str]()}, "imports")
