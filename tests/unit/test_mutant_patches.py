"""The list of mutants fits the code: each patch finds what it takes away, and each test that it names is there."""

from __future__ import annotations

import random
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
    killers = {killer.partition("::")[0] for mutant in MUTANTS for killer in mutant.killers}
    nothing((killer for killer in killers if not (ROOT / killer).is_file()), "no such test")


def test_an_occurrence_is_chosen_by_its_number() -> None:
    mutant = random.Random(1).choice(MUTANTS)
    text = f"a {mutant.old} b " * mutant.nth
    assert patched(text, mutant).count(mutant.old) == mutant.nth - 1
