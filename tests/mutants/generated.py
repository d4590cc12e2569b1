"""Generate mutants of modules without I/O: ``python -m tests.mutants.generated [MODULE ...]``.

Each expression and statement is changed in turn, and the module's tests must fail. What survives is printed with its
line and its change: exit status 1, unless :mod:`.equivalent` says why it changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import math
import os
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TextIO, TypeVar

import pytest

from .equivalent import EQUIVALENT

ROOT = Path(__file__).resolve().parents[2]
TESTS: dict[str, tuple[str, ...]] = {
    "exactly_once/consumer/bisection.py": ("tests/unit/test_poison.py",),
    "exactly_once/consumer/buffer.py": ("tests/unit/test_sent.py", "tests/unit/test_delivery.py"),
    "exactly_once/consumer/outcomes.py": ("tests/unit/test_outcomes.py",),
    "exactly_once/consumer/partitions.py": (
        "tests/unit/test_partition_state.py",
        "tests/unit/test_ownership.py",
        "tests/unit/test_delivery.py",
    ),
    "exactly_once/ledger/conflict.py": ("tests/unit/test_ownership.py",),
    "exactly_once/ledger/outcome.py": ("tests/unit/test_outcome.py", "tests/unit/test_retry.py"),
    "exactly_once/publish/window.py": ("tests/publish/test_window.py",),
}
"""Modules, and the tests that need no server and show what they do."""
_MOST_SECONDS = 600
"""Processor time after which even tests without a mutant are ended."""
_PYTEST = (
    *("-q", "-x", "-s", "--tier=pure", "--timeout=0", "-p", "no:cacheprovider"),
    *("-p", "tests.mutants.quick", "--hypothesis-seed=0"),
)

_SWAPS: dict[type[ast.AST], tuple[Any, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
}
"""What becomes of an operator: the other side of the boundary, and the contrary."""
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_Path = tuple[tuple[str, int | None], ...]
T = TypeVar("T")


class Change(NamedTuple):
    """One mutant of a module."""

    where: str
    """The function or class, and the change: what :mod:`.equivalent` names it by."""
    line: int
    statement: str
    """The statement of the module in which it is, with the change."""


@dataclass(frozen=True, slots=True)
class _Site:
    """A node that can be changed, and how to find it in a copy of the tree."""

    node: ast.AST
    path: _Path
    scope: str


def changes(source: str) -> list[Change]:
    """Return all mutants of a module."""
    tree, found, names = ast.parse(source), list[Change](), Counter[str]()
    for site in _sites(tree):
        for new in _variants(site.node):
            mutated = copy.deepcopy(tree)
            _put(mutated, site.path, new)
            statement = mutated.body[site.path[0][1] or 0]
            what = f"{site.scope}: {_text(site.node)} -> {_text(new)}"
            names[what] += 1
            name = what if names[what] == 1 else f"{what} #{names[what]}"
            found.append(Change(name, site.node.lineno, ast.unparse(ast.fix_missing_locations(statement))))  # type: ignore[attr-defined]
    return found


def _sites(node: ast.AST, path: _Path = (), scope: str = "", *, is_run: bool = False) -> Iterator[_Site]:
    """Find expressions, and statements of functions; docstrings, annotations and assertions stay as they are."""
    if isinstance(node, ast.Assert) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    if isinstance(node, ast.expr) or is_run:
        yield _Site(node, path, scope)
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        scope = f"{scope}.{node.name}".strip(".")
        is_run = isinstance(node, ast.FunctionDef)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_comment"):
            continue
        for at, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST):
                yield from _sites(child, (*path, (name, at if isinstance(value, list) else None)), scope, is_run=is_run)


def _put(tree: ast.AST, path: _Path, new: ast.AST) -> None:
    *way, (name, at) = path
    for step, index in way:
        tree = getattr(tree, step) if index is None else getattr(tree, step)[index]
    if at is None:
        setattr(tree, name, new)
    else:
        getattr(tree, name)[at] = new


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    """Return what a node is changed to."""
    if isinstance(node, ast.expr):
        yield from _expressions(node)
        return
    match node:
        case ast.If(test, body, orelse) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.Assign(targets, value) if len(targets) > 1:
            yield from (ast.Assign(left, value) for left in _without_one(targets))
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
            for names, left in zip(_without_one(targets), _without_one(values), strict=True):
                yield ast.Assign([ast.Tuple(names, ast.Store())], ast.Tuple(left, ast.Load()))
        case ast.AugAssign(target, op, value):
            yield ast.Pass()
            yield from (ast.AugAssign(target, other(), value) for other in _SWAPS.get(type(op), ()))
        case ast.Assign() | ast.Expr() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            yield ast.Pass()


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Compare(left, ops, others):
            for at, op in enumerate(ops):
                for other in _SWAPS[type(op)]:
                    yield ast.Compare(left, [*ops[:at], other(), *ops[at + 1 :]], others)
        case ast.BoolOp(op, values):
            yield from (ast.BoolOp(other(), values) for other in _SWAPS[type(op)])
            yield from (ast.BoolOp(op, rest) if len(rest) > 1 else rest[0] for rest in _without_one(values))
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.BinOp(left, op, right):
            yield from (ast.BinOp(left, other(), right) for other in _SWAPS.get(type(op), ()))
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Name(name, context) if name in _NAMES:
            yield ast.Name(_NAMES[name], context)
        case ast.Dict(keys, values):
            yield from map(ast.Dict, _without_one(keys), _without_one(values))
        case ast.GeneratorExp() | ast.ListComp() | ast.SetComp() | ast.DictComp():
            for at, loop in enumerate(node.generators):
                if loop.ifs:
                    new = copy.deepcopy(node)
                    new.generators[at].ifs = []
                    yield new


def _without_one(items: list[T]) -> Iterator[list[T]]:
    return (items[:at] + items[at + 1 :] for at in range(len(items)))


def _text(node: ast.AST) -> str:
    """Return the first line of a node, which shows what is changed."""
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).splitlines()[0]


def injure(module: ModuleType, change: Change) -> None:
    """Change a module that others have imported already: code, defaults and values, in what is there."""
    names = dict(vars(module))
    exec(compile(change.statement, f"<mutant of {module.__name__}>", "exec"), names)
    for name, new in names.items():
        if new is not vars(module).get(name):
            _replace(module, name, vars(module)[name], new)


def _replace(owner: Any, name: str, old: Any, new: Any) -> None:
    match new:
        case FunctionType():
            for cell, other, free in zip(
                old.__closure__ or (), new.__closure__ or (), new.__code__.co_freevars, strict=True
            ):
                if free not in ("__class__", "cls"):
                    cell.cell_contents = other.cell_contents
            old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
        case property():
            _replace(owner, name, old.fget, new.fget)
        case cached_property():
            _replace(owner, name, old.func, new.func)
        case classmethod() | staticmethod():
            _replace(owner, name, old.__func__, new.__func__)
        case type():
            for each, value in vars(new).items():
                if each in vars(old) and (each not in vars(object) or isinstance(value, FunctionType)):
                    _replace(old, each, vars(old)[each], value)
        case bool() | int() | float() | tuple() | dict() | None:
            setattr(owner, name, new)


class Runner:
    """A plugin of pytest: collects the tests once, and runs them in a child for each mutant."""

    def __init__(self, file: str, tried: Sequence[Change], processes: int, out: TextIO) -> None:
        self.is_child = False
        self.passes = False
        self.survived = 0
        self._file, self._tried, self._processes, self._out = file, tried, processes, out
        self._running: dict[int, Change | None] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool | None:
        """Return None in a child, which goes on to the tests."""
        if self._fork(None, _MOST_SECONDS):
            return None
        limit = 2 + math.ceil(3 * self._wait())
        for change in self._tried if self.passes else ():
            if len(self._running) == self._processes:
                self._wait()
            if self._fork(change, limit):
                return None
        while self._running:
            self._wait()
        return True

    def _fork(self, change: Change | None, cpu_seconds: int) -> bool:
        child = os.fork()
        if child:
            self._running[child] = change
            return False
        self.is_child = True
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))  # a mutant may have no end
        if change is not None:
            injure(importlib.import_module(self._file.removesuffix(".py").replace("/", ".")), change)
        return True

    def _wait(self) -> float:
        """Wait for a child; return the processor time that it took."""
        child, status, usage = os.wait3(0)
        change = self._running.pop(child)
        if change is None:
            self.passes = status == 0
        elif status == 0:
            self.survived += 1
            print(f"{self._file}:{change.line} {change.where}", file=self._out, flush=True)
        return usage.ru_utime


def try_module(file: str, only: str, processes: int, out: TextIO) -> int:
    """Try the mutants of one module; return 1 when one survives that is not known to be equivalent."""
    known, began = EQUIVALENT.get(file, {}), time.monotonic()
    mutants = changes(Path(file).read_text("utf-8"))
    tried = [mutant for mutant in mutants if mutant.where not in known and only in mutant.where]
    runner = Runner(file, tried, processes, out)
    status = pytest.main([*_PYTEST, *TESTS[file]], plugins=[runner])
    if runner.is_child:
        return status
    if not runner.passes:
        print(f"the tests of {file} fail without a mutant, so what they notice shows nothing", file=out)
        return 1
    print(
        f"{file}: {len(mutants)} mutants, {len(known)} equivalent; {runner.survived} of {len(tried)} survived, "
        f"{time.monotonic() - began:.0f} s",
        file=out,
    )
    return 1 if runner.survived else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Try them; return 1 when one survives."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.generated", description=about)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="as exactly_once/consumer/buffer.py; else all")
    parser.add_argument("--only", default="", metavar="TEXT", help="those with this text in their name")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N", help="so many at once")
    args = parser.parse_args(arguments)
    os.chdir(ROOT)
    with os.fdopen(os.dup(1), "w") as out:
        nothing = os.open(os.devnull, os.O_RDWR)  # for what pytest says
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        found = 0
        for file in args.modules or TESTS:
            child = os.fork()  # what one module's tests import does not reach the next
            if child == 0:
                status = 1
                try:
                    status = try_module(file, args.only, args.processes, out)
                except BaseException:  # noqa: BLE001 - the child ends here
                    traceback.print_exc(file=out)
                finally:
                    out.flush()
                    os._exit(status)
            found |= os.waitpid(child, 0)[1]
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
