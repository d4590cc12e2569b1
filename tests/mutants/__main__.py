"""Run mutants: ``python -m tests.mutants [--only NAME ...] [--dozen] [--table FILE]``.

Each is tried in a copy of the tree, by its own tests; one that they do not notice has survived: exit status 1.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.patches import MUTANTS
from tests.support.seeds import VARIABLE, first_seed

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("exactly_once", "spark_sink", "tests", "examples", "pyproject.toml")
_PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.mutants.quick", "--no-header")
_NOTHING_FAILED, _TESTS_FAILED = 0, 1
_HANGS_SECONDS = 240
"""What takes longer than the tests of any mutant hangs: as it may hold the interpreter's lock, pytest cannot tell."""
_DOZEN_SECONDS = 200
"""No more mutant is begun after that: on a busy machine a dozen would take longer than it is worth in CI."""


def patched(text: str, mutant: Mutant) -> str:
    """Return the file with the mutant in it.

    :raises ValueError: when what is taken away is not there: the list is older than the code.
    """
    parts = text.split(mutant.old)
    if len(parts) <= mutant.nth:
        raise ValueError(
            f"{mutant.name}: {mutant.file} has {len(parts) - 1} of {mutant.old!r}, number {mutant.nth} is asked"
        )
    return mutant.old.join(parts[: mutant.nth]) + mutant.new + mutant.old.join(parts[mutant.nth :])


@contextmanager
def tree() -> Iterator[Path]:
    """Make a copy to injure."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        for name in COPIED:
            source, target = ROOT / name, Path(directory, name)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        yield Path(directory)


def run(directory: Path, mutant: Mutant | None, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests in the copy, with a mutant or without; return pytest's status and the first test that failed."""
    if mutant is not None:
        file = directory / mutant.file
        whole = file.read_text("utf-8")
        file.write_text(patched(whole, mutant), "utf-8")
    try:
        environment = {**os.environ, "PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, *_PYTEST, *tests]
        limit = None if mutant is None else _HANGS_SECONDS
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return _TESTS_FAILED, "a time-out"
    finally:
        if mutant is not None:
            file.write_text(whole, "utf-8")
    failed = next(
        (line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))), ""
    )
    if done.returncode not in (_NOTHING_FAILED, _TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.returncode, failed


def main() -> int:
    """Try them; return 1 when one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants")
    parser.add_argument("--dozen", action="store_true", help="twelve of them, drawn by the commit, in about 4 minutes")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table there")
    args = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if args.only is None or mutant.name in args.only]
    if args.dozen:
        print(f"drawn by seed {first_seed()} ({VARIABLE} repeats it)")
        mutants = random.Random(first_seed()).sample(mutants, min(12, len(mutants)))
    lines = ["| mutant | what is wrong then | noticed by | s |", "|---|---|---|---|"]
    survivors = []
    until = time.monotonic() + (_DOZEN_SECONDS if args.dozen else math.inf)
    with tree() as directory:
        if not args.dozen:  # CI has just run all tests
            status, failed = run(directory, None, sorted({killer for mutant in mutants for killer in mutant.killers}))
            if status != _NOTHING_FAILED:
                print(f"{failed} fails without a mutant, so what it notices shows nothing")
                return 1
        for number, mutant in enumerate(mutants, 1):
            began_at = time.monotonic()
            if began_at > until:
                print(f"no time for {', '.join(left.name for left in mutants[number - 1 :])}")
                mutants = mutants[: number - 1]
                break
            status, failed = run(directory, mutant, mutant.killers)
            seconds = time.monotonic() - began_at
            if status == _NOTHING_FAILED:
                survivors.append(mutant.name)
            found = f"`{failed.removeprefix('tests/')}`" if failed else "**nobody**"
            lines.append(f"| {mutant.name} | {mutant.what} | {found} | {seconds:.0f} |")
            print(f"{number}/{len(mutants)} {lines[-1]}", flush=True)
    if args.table is not None:
        args.table.write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} noticed; survived: {', '.join(survivors) or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
