"""The list of mutants fits the code: each patch finds what it takes away, and each test that it names is there."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

from tests.mutants.__main__ import patched
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.generated import changes
from tests.mutants.patches import MUTANTS
from tests.support.findings import nothing

ROOT = Path(__file__).parents[2]


def test_names_are_different() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_every_patch_changes_its_file() -> None:
    for mutant in MUTANTS:
        whole = (ROOT / mutant.file).read_text("utf-8")
        assert patched(whole, mutant) != whole, mutant.name


def test_every_killer_is_there() -> None:
    killers = {killer for mutant in MUTANTS for killer in mutant.killers}
    nothing((killer for killer in killers if not is_there(*killer.split("::"))), "no such test")


def is_there(file: str, *names: str) -> bool:
    """Tell whether there is such a file, and in it a test of this name."""
    whole = (ROOT / file).read_text("utf-8") if (ROOT / file).is_file() else None
    return whole is not None and all(f" {name.partition('[')[0]}(" in whole for name in names)


def test_an_occurrence_is_chosen_by_its_number() -> None:
    mutant = random.Random(1).choice(MUTANTS)
    text = f"a {mutant.old} b " * mutant.nth
    assert patched(text, mutant).count(mutant.old) == mutant.nth - 1


def test_the_page_counts_them_by_the_directory_that_is_patched() -> None:
    found = Counter(str(Path(mutant.file).parent).removesuffix("/migrations") for mutant in MUTANTS)
    page = (ROOT / "docs" / "mutants.md").read_text("utf-8")
    told = {name: int(count) for name, count in re.findall(r"^\| `([\w/]+)` \| (\d+) \|$", page, re.MULTILINE)}
    assert told == dict(found)


def test_each_equivalent_mutant_is_still_generated() -> None:
    for file, known in EQUIVALENT.items():
        generated = {change.where for change in changes((ROOT / file).read_text("utf-8"))}
        nothing(known.keys() - generated, f"{file} has no such mutant")


def test_generated_mutants_change_conditions_boundaries_and_statements() -> None:
    assert [
        change.where for change in changes("def f(a, b):\n    if a < 1 and not b:\n        g()\n    return a\n")
    ] == [
        "f: if a < 1 and (not b): -> if not (a < 1 and (not b)):",
        "f: a < 1 and (not b) -> a < 1 or not b",
        "f: a < 1 and (not b) -> not b",
        "f: a < 1 and (not b) -> a < 1",
        "f: a < 1 -> a <= 1",
        "f: a < 1 -> a >= 1",
        "f: 1 -> 2",
        "f: 1 -> 0",
        "f: not b -> b",
        "f: g() -> pass",
        "f: return a -> return None",
    ]
