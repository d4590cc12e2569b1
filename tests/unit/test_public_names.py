"""The public surface: what is exported, how it presents itself, and the tree of errors."""

from __future__ import annotations

import inspect
import pickle
import re

import psycopg

import exactly_once
from exactly_once import errors
from tests.support.findings import nothing

PUBLIC = [getattr(exactly_once, name) for name in exactly_once.__all__ if name != "__version__"]
ERRORS = [e for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, errors.ExactlyOnceError)]


def test_all_is_what_is_visible() -> None:
    visible = {
        name
        for name, value in vars(exactly_once).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert visible | {"__version__"} == set(exactly_once.__all__)


def test_all_is_sorted() -> None:
    assert exactly_once.__all__ == sorted(exactly_once.__all__)


def test_every_public_name_presents_itself() -> None:
    nothing((p.__name__ for p in PUBLIC if p.__doc__ in ("", None, (p.__base__ or object).__doc__)), "no docstring")
    nothing((p for p in PUBLIC if p.__module__ != "exactly_once"), "presents another module than exactly_once")


def test_every_public_method_has_a_docstring() -> None:
    members = [(public, name, member) for public in PUBLIC for name, member in vars(public).items() if name[0] != "_"]
    without = [
        f"{public.__name__}.{name}"
        for public, name, member in members
        if not isinstance(member, str) and not inspect.ismemberdescriptor(member) and not inspect.getdoc(member)
    ]
    nothing(without, "no docstring")


def drawn_tree() -> list[tuple[int, str]]:
    """Read depth and name of every error that the docstring of the module draws."""
    lines = (re.match(r"^([│├└─ ]*)([A-Z]\w+)( |$)", line) for line in (errors.__doc__ or "").splitlines())
    drawn = [(len(found[1]) // 4, found[2]) for found in lines if found]
    return drawn[drawn.index((0, "ExactlyOnceError")) :]


def test_the_drawn_tree_has_every_error_in_the_order_of_the_module() -> None:
    assert [name for _, name in drawn_tree()] == [error.__name__ for error in ERRORS]


def test_every_error_hangs_where_it_is_drawn() -> None:
    above: list[str] = []
    for depth, name in drawn_tree():
        above[depth:] = [name]
        assert getattr(errors, name).__base__.__name__ == ([*["Exception"], *above])[depth]


def test_the_second_base_that_is_drawn_is_there() -> None:
    drawn = dict(re.findall(r"(\w+) \(([\w.]+)\) ", errors.__doc__ or ""))
    real = {
        error.__name__: f"{base.__module__}.{base.__qualname__}".removeprefix("builtins.")
        for error in ERRORS
        for base in error.__bases__[1:]
    }
    assert drawn == real


def test_every_error_is_exported() -> None:
    assert {error.__name__ for error in ERRORS} <= set(exactly_once.__all__)


def test_redelivered_is_caught_as_the_driver_error_it_is() -> None:
    assert issubclass(exactly_once.Redelivered, psycopg.OperationalError)
    assert exactly_once.Redelivered("again").sqlstate is None


def test_every_error_survives_pickling() -> None:
    """It may cross a process boundary, as in a pool of workers."""
    copies = {error: pickle.loads(pickle.dumps(error("what happened"))) for error in ERRORS}
    changed = [e.__name__ for e, copy in copies.items() if (type(copy), copy.args) != (e, ("what happened",))]
    nothing(changed, "another error after pickling")
