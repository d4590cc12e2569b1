"""Imports point one way, and importing the library brings in nothing but its three dependencies."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import exactly_once
from tests.support.findings import nothing

PACKAGE = Path(exactly_once.__file__).parent

STEPS = (
    {"_failpoints", "_log", "_model", "_redaction", "errors"},
    {"kafka", "metrics"},
    {"ledger"},
    {"consumer", "publish", "writer"},
    {"testing"},
    {"embedded"},
    {"demo"},
    {"soak"},
    {"cli"},
)
"""A module imports from its own package and from steps above it only; on the first step they may know each other."""
EXCEPT = {
    ("writer.sink", "consumer.unit"),  # the type of an argument
    ("publish.delivery", "publish.topic"),  # the same
    ("publish.topic", "publish.publisher"),
    ("soak.worker", "cli.options"),  # the command's own worker is one of the processes of a soak
    ("soak.worker", "cli.sink_flows"),
    ("soak.worker", "cli.sink_worker"),
}

PURE = {
    "_failpoints": set[str](),
    "_log": set[str](),
    "_model": {"datetime"},
    "_redaction": {"re"},
    "consumer.bisection": set[str](),
    "consumer.buffer": {"bisect", "confluent_kafka", "functools"},
    "consumer.identity": set[str](),
    "consumer.outcomes": set[str](),
    "consumer.partitions": set[str](),
    "errors": {"psycopg"},
    "kafka.kinds": {"functools", "math", "types"},
    "kafka.origin": set[str](),
    "ledger.conflict": set[str](),
    "ledger.outcome": {"psycopg", "re"},
    "ledger.store": set[str](),
    "metrics.health": set[str](),
    "metrics.table": set[str](),
}
"""Modules without I/O, and the package whose types they need nevertheless."""
HARMLESS = {"__future__", "collections", "collections.abc", "contextlib", "dataclasses", "enum", "itertools"}
HARMLESS |= {"typing", "uuid"}


def sources() -> dict[str, Path]:
    """Return the file of each module, by its name below the package."""
    found = {path.relative_to(PACKAGE).with_suffix(""): path for path in PACKAGE.rglob("*.py")}
    return {".".join(p for p in name.parts if p != "__init__"): path for name, path in found.items()}


def imports_of(module: str) -> tuple[set[str], set[str]]:
    """Return the modules of the library that a module imports, and the other ones."""
    path = sources()[module]
    package = [*module.split("."), "x"] if path.name == "__init__.py" else module.split(".")
    own: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            others |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ["exactly_once", *package][: -node.level] if node.level else []
            name = ".".join([*above, *filter(None, [node.module])])
            here = name.partition(".")[2]
            deeper = {f"{here}.{alias.name}".lstrip(".") for alias in node.names} & set(sources())
            if name.partition(".")[0] == "exactly_once":
                own |= deeper or {here}
            else:
                others.add(name)
    return own, others


def top(module: str) -> str:
    return module.partition(".")[0]


def step_of(module: str) -> int:
    (step,) = [number for number, step in enumerate(STEPS) if top(module) in step]
    return step


def library() -> list[str]:
    return [module for module in sources() if not module.startswith("__") and module]


def test_every_package_has_its_step() -> None:
    known = [name for step in STEPS for name in step]
    assert sorted(known) == sorted({top(module) for module in library()}), "who may import it, and whom may it import?"


def test_modules_import_only_from_the_steps_above_them() -> None:
    wrong = {
        module: {
            other
            for other in imports_of(module)[0] - {""}
            if top(other) != top(module)
            and (module, other) not in EXCEPT
            and (step_of(other) >= step_of(module) > 0 or step_of(other) > step_of(module))
        }
        for module in library()
    }
    nothing(wrong, "imports from its own step or one below")


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = set(library())
    graph = {m: {other for other in imports_of(m)[0] & known if (m, other) not in EXCEPT} for m in known}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(f"a circle of imports: {' <- '.join(circle.args[1])}")


def test_pure_modules_import_no_io() -> None:
    found = {module: imports_of(module) for module in PURE}
    nothing({module: own - set(PURE) for module, (own, _) in found.items()}, "pure, and imports what is not")
    nothing({m: (others - HARMLESS) ^ PURE[m] for m, (_, others) in found.items()}, "pure, but for what it may import")


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
    nothing({str(path.relative_to(PACKAGE.parent)): _clock_readings(path) for path in sources}, "reads the wall clock")
