"""Imports point one way: publish knows the lower layers, never the consumer; and the filters in memory do no I/O."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from exactly_once import publish
from tests.support.findings import nothing

FOLDER = Path(publish.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))
LOWER = {"_failpoints", "_log", "_model", "errors", "kafka", "ledger"}
PURE = {
    "filter",
    "keys",
    "window",
    "slots",
    "chain",
    "sequence",
}
HARMLESS = {"__future__", "abc", "array", "bisect", "collections", "collections.abc", "dataclasses", "enum", "hashlib"}
HARMLESS |= {"contextlib", "itertools", "math", "operator", "secrets", "threading", "time", "types", "typing", "uuid"}


def imports_of(module: str) -> tuple[set[str], set[str], set[str]]:
    """Return what a module imports: of its package, of the library, of others."""
    near, library, others = set[str](), set[str](), set[str]()
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text("utf-8"))):
        if isinstance(node, ast.Import):
            others |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
            if node.level == 0 and str(node.module).startswith("exactly_once."):
                library.add(str(node.module).removeprefix("exactly_once."))
            else:
                (others, near, library)[node.level].update({str(node.module)} if node.level == 0 else names)
    return near, library, others


def test_publish_imports_only_the_lower_layers() -> None:
    layers = {module: {name.split(".")[0] for name in imports_of(module)[1]} for module in MODULES}
    nothing({module: found - LOWER for module, found in layers.items()}, "imports a higher layer")


def test_filters_in_memory_do_no_io() -> None:
    allowed = (PURE | {"errors", "snapshot"}, {"errors", "kafka.kinds"}, HARMLESS)
    imported = {module: zip(imports_of(module), allowed, strict=True) for module in sorted(PURE)}
    wrong = {module: set().union(*(found - good for found, good in pairs)) for module, pairs in imported.items()}
    nothing(wrong, "pure, and imports what is not")


def test_no_module_of_the_library_imports_publish() -> None:
    for path in FOLDER.parent.glob("*.py"):
        assert ".publish" not in path.read_text("utf-8"), path.name


def test_importing_publish_brings_in_the_three_dependencies_only() -> None:
    program = (
        "import sys; before = set(sys.modules); import exactly_once.publish; "
        "print(*{m.partition('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    known = {"exactly_once", "confluent_kafka", "psycopg", "psycopg_binary", "tenacity", "typing_extensions"}
    assert {name for name in done.stdout.split() if not name.startswith("_")} - {"cython_runtime"} <= known


def test_all_is_sorted_and_there() -> None:
    assert publish.__all__ == sorted(publish.__all__)
    assert all(getattr(publish, name).__doc__ for name in publish.__all__)
