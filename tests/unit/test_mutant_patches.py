"""The list of mutants fits the code: each patch finds what it takes away, and each test that it names is there."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

from tests.mutants.__main__ import patched
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
