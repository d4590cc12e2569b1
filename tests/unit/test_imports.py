"""Imports point one way, and importing the library brings in nothing but its three dependencies."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import exactly_once
from tests.support.findings import nothing

PACKAGE = Path(exactly_once.__file__).parent

LAYERS = (
    {
        "errors",
        "failpoints",
        "fetch",
        "health",
        "identity",
        "kafka_log",
        "libpq",
        "metrics",
        "model",
        "outcome",
        "poison",
        "redaction",
        "sql",
    },
    {"logs", "origin"},
    {"ownership", "session", "retry"},
    {"config"},
    {"assignment", "cluster", "dead_letters", "delivery", "ledger", "mirror", "replication", "schema", "watcher"},
    {"start", "startup", "unit_of_work"},
    {"read_only", "unit"},
    {"handler_thread", "replay", "settlement", "testing"},
    {"upkeep"},
    {"observer", "units"},
    {"service"},
    {"consumer"},
    {"endpoints", "prometheus"},
)
"""A module imports from layers above its own only; within one layer nothing is imported, except here:"""
WITHIN_A_LAYER: set[tuple[str, str]] = set()

PURE = {
    "failpoints": set[str](),
    "health": set[str](),
    "identity": set[str](),
    "logs": set[str](),
    "metrics": set[str](),
    "model": set[str](),
    "origin": set[str](),
    "ownership": set[str](),
    "delivery": {"confluent_kafka"},
    "outcome": {"psycopg", "re"},
    "poison": set[str](),
    "redaction": {"re"},
}
"""Modules without I/O, and the package whose types they need nevertheless."""
HARMLESS = {"__future__", "collections", "collections.abc", "contextlib", "dataclasses", "enum", "itertools"}
HARMLESS |= {"typing", "uuid"}


def imports_of(module: str) -> tuple[set[str], set[str]]:
    """Return the modules of the library that a module imports, and the other ones."""
    path = PACKAGE / f"{module}.py"
    if not path.exists():
        path = PACKAGE / module / "__init__.py"
    own: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            others |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            others.add(str(node.module))
        elif isinstance(node, ast.ImportFrom):
            own |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return own, others


def modules() -> set[str]:
    return {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")} | {"sql"}


def test_every_module_has_its_layer() -> None:
    known = [name for layer in LAYERS for name in layer]
    assert len(known) == len(set(known))
    assert modules() <= set(known), "a new module: which may import it, and whom may it import?"


def allowed(module: str) -> set[str]:
    """Return what a module may import of the library."""
    (depth,) = [depth for depth, layer in enumerate(LAYERS) if module in layer]
    return set().union(*LAYERS[:depth]) | {there for here, there in WITHIN_A_LAYER if here == module}


def test_modules_import_only_from_the_layers_above_them() -> None:
    wrong = {module: imports_of(module)[0] - allowed(module) for module in sorted(modules())}
    nothing(wrong, "imports from its own layer or one below")


def test_pure_modules_import_no_io() -> None:
    found = {module: imports_of(module) for module in PURE}
    nothing({module: own - set(PURE) for module, (own, _) in found.items()}, "pure, and imports what is not")
    nothing({m: (others - HARMLESS) ^ PURE[m] for m, (_, others) in found.items()}, "pure, but for what it may import")


def test_subpackages_are_not_imported_by_the_library() -> None:
    apart = {"cli", "demo", "embedded", "publish", "soak", "writer"}
    nothing({module: imports_of(module)[0] & apart for module in modules()}, "imports a subpackage")


_FRESH = """
import sys
import tomllib
before = set(sys.modules)
import exactly_once
print(*sorted({name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names}))
"""


def test_importing_the_library_imports_its_three_dependencies_only() -> None:
    fresh = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, text=True, check=True, timeout=60)
    imported = fresh.stdout.split()
    # What psycopg brings along itself; the underscore is the standard library's and Cython's.
    theirs = {"cython_runtime", "psycopg_binary", "psycopg_c", "typing_extensions"}
    packages = {name.partition(".")[0] for name in imported} - theirs
    assert {name for name in packages if not name.startswith("_")} == {
        "exactly_once",
        "confluent_kafka",
        "psycopg",
        "tenacity",
    }
    assert not [name for name in imported if name.startswith(("exactly_once.cli", "exactly_once.embedded"))]


def test_only_commands_describe_groups() -> None:
    """Where the coordinator is lost, librdkafka aborts the process that asks (its issue 4605): no worker may."""
    sources = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "spark_sink").rglob("*.py")]
    asking = {path for path in sources if "describe_consumer_groups" in path.read_text("utf-8")}
    assert not [path for path in asking if "cli" not in path.relative_to(PACKAGE.parent).parts]


def test_the_lowest_versions_that_are_tested_are_those_that_are_promised() -> None:
    root = PACKAGE.parent
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    promised = dict(each.split(">=") for each in project["dependencies"])
    lines = (root / "constraints-lowest.txt").read_text("utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert tested.pop("psycopg-binary") == tested["psycopg"]
    assert promised.keys() == tested.keys()
    assert [name for name, version in promised.items() if not f"{tested[name]}.0".startswith(f"{version}.")] == []


def _clock_readings(path: Path) -> set[str]:
    wall = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow"}
    wall |= {"datetime.today", "date.today", "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.date.today"}
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            found |= {ast.unparse(node)} & wall
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {f"time.{alias.name}" for alias in node.names} & wall
    return found


@pytest.mark.fault("D10")
def test_no_module_reads_the_wall_clock() -> None:
    """Waits are monotonic, and times that are stored are those of the server: ours may jump."""
    sources = {*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "spark_sink").rglob("*.py")}
    sources -= {PACKAGE / "cli/dead_letters.py"}  # it shows people how long ago something was
    nothing({str(path.relative_to(PACKAGE.parent)): _clock_readings(path) for path in sources}, "reads the wall clock")
