"""Failpoints: nothing happens unless armed, and then exactly at the moment named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import exactly_once
from exactly_once import _failpoints

PACKAGE = Path(exactly_once.__file__).parent


def test_an_unarmed_failpoint_does_nothing() -> None:
    for name in _failpoints.NAMES:
        assert not _failpoints.is_armed(name)
        _failpoints.failpoint(name)


def test_an_armed_failpoint_acts_each_time_and_alone() -> None:
    acted: list[str] = []
    _failpoints.arm("begun", lambda: acted.append("begun"))
    for name in [*_failpoints.NAMES, "begun"]:
        _failpoints.failpoint(name)
    assert acted == ["begun", "begun"]
    assert [name for name in _failpoints.NAMES if _failpoints.is_armed(name)] == ["begun"]


def test_disarm_disarms_everything() -> None:
    for name in _failpoints.NAMES:
        _failpoints.arm(name, pytest.fail)
    _failpoints.disarm()
    for name in _failpoints.NAMES:
        _failpoints.failpoint(name)


def test_what_a_failpoint_raises_comes_out_of_it() -> None:
    def injure() -> None:
        raise KeyboardInterrupt

    _failpoints.arm("handled", injure)
    with pytest.raises(KeyboardInterrupt):
        _failpoints.failpoint("handled")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no failpoint 'begin'; there are polled, begun"):
        _failpoints.arm("begin", pytest.fail)


def test_each_name_marks_a_moment_of_the_library_and_no_moment_has_another_name() -> None:
    """Some are marked twice: units that commit by themselves and joined ones pass them in different places."""
    passed = {
        str(node.args[0].value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "failpoint"
        and isinstance(node.args[0], ast.Constant)
    }
    assert passed == set(_failpoints.NAMES)
