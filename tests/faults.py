"""The tests column of docs/faults.md, written from the marks of the tests: ``python -m tests.faults``.

A test says which rows it provokes, ``@pytest.mark.fault("A1", "D9")``. A row without a test says why: "none: reason".
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"
_ROW = re.compile(r"^\| (?P<id>[A-F]\d+) \| .* \| (?P<tests>[^|]*) \|$", re.MULTILINE)
_REASON = re.compile(r"none: \w")


class Marked(NamedTuple):
    """A test that provokes a fault."""

    path: str
    name: str


def marked(tests: Path = ROOT / "tests") -> dict[str, list[Marked]]:
    """Find the tests of each row, in the order of their files."""
    found: dict[str, list[Marked]] = defaultdict(list)
    for file in sorted(tests.glob("**/test_*.py")):
        path = file.relative_to(tests.parent).as_posix()
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                for fault in _ids(node):
                    found[fault].append(Marked(path, node.name))
    return dict(found)


def _ids(function: ast.FunctionDef) -> Iterator[str]:
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
            yield from (str(ast.literal_eval(argument)) for argument in mark.args)


def rewritten(page: str, tests: Mapping[str, Iterable[Marked]]) -> str:
    """Return the page with the tests of each row; one without tests keeps its reason."""

    def row(match: re.Match[str]) -> str:
        links = ", ".join(f"[{test.name}](../{test.path})" for test in tests.get(match["id"], ()))
        kept = match["tests"] if _REASON.match(match["tests"]) else ""
        return f"{match[0][: match.start('tests') - match.start()]}{links or kept} |"

    return _ROW.sub(row, page)


def problems(page: str, tests: Mapping[str, Iterable[Marked]]) -> list[str]:
    """Say what is wrong with the page."""
    rows = {match["id"]: match["tests"] for match in _ROW.finditer(page)}
    counts = Counter(match["id"] for match in _ROW.finditer(page))
    last = {family: max(int(fault[1:]) for fault in rows if fault[0] == family) for family in {f[0] for f in rows}}
    expected = {f"{family}{number}" for family, most in last.items() for number in range(1, most + 1)}
    wrong = [f"{fault}: {count} rows" for fault, count in counts.items() if count > 1]
    wrong += [f"{fault}: no row, although the numbers go on" for fault in sorted(expected - set(rows))]
    wrong += [f"{fault}: no row, although a test has its mark" for fault in sorted(set(tests) - expected)]
    wrong += [f"{f}: neither a test nor a reason" for f in rows if f not in tests and not _REASON.match(rows[f])]
    if page != rewritten(page, tests):
        wrong.append("the tests are not those that have the marks; write them with: python -m tests.faults")
    return wrong


def main() -> None:
    """Write the column; exit with what is still wrong."""
    PAGE.write_text(rewritten(PAGE.read_text("utf-8"), marked()), "utf-8")
    if wrong := problems(PAGE.read_text("utf-8"), marked()):
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
