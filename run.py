"""Install this clone into its own ``.venv`` and run the demo or the tests; standard library only.

python3 run.py demo [arguments]     the main job on embedded servers; --help lists the arguments
python3 run.py demo spark           the same for Spark's sink
python3 run.py check                lint, types and every test that needs no server, in a minute
python3 run.py test                 these tests, and one of each kind of fault on real servers, in minutes
python3 run.py test --all           every test but those with containers
python3 run.py test [arguments]     just what pytest selects by these arguments
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
# What each command installs. The demo brings no test tools.
INSTALL = {
    "demo": ["--editable", ".[demo]"],
    "demo spark": ["--editable", ".[demo,spark]"],
    "test": ["--editable", ".[demo,memcached,prometheus,registry,sink,spark]", "--group", "dev"],
}
# How many processes run tests for each core. Those with servers wait most of the time; each process starts servers of
# its own, which takes up to 3 GB of memory, so there are at most eight.
PURE, WITH_SERVERS, MOST = 1, 3, 8


def main(arguments: list[str]) -> None:
    """Run one command; does not return."""
    if not arguments or arguments[0] not in ("demo", "check", "test"):
        sys.exit(__doc__)
    command, *rest = arguments
    check_python()
    kind = " ".join(arguments[:2]) if arguments[:2] == ["demo", "spark"] else command if command == "demo" else "test"
    if not is_installed(kind):
        install(kind)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of hundreds of processes compiles the same files anew
    if command == "demo":
        become("-m", "exactly_once", "demo", *rest)
    if command == "check":
        for linter in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
            call(str(PYTHON), "-m", *linter)
        become("-m", "pytest", "--tier=pure", *beside_each_other(PURE), *rest)
    if not rest:
        become("-m", "pytest", "--tier=short", *beside_each_other(WITH_SERVERS))
    if "--all" in rest:
        rest.remove("--all")
        become("-m", "pytest", "--tier=all", *beside_each_other(WITH_SERVERS), *rest)
    become("-m", "pytest", *rest)


def beside_each_other(per_core: int) -> list[str]:
    """Return pytest's arguments for running files of tests in several processes, in the order of their collection."""
    processes = min(MOST, per_core * (os.cpu_count() or 1))
    return [f"--numprocesses={processes}", "--dist=loadfile", "--no-loadscope-reorder"]


def become(*arguments: str) -> NoReturn:
    """Go on as a program of the environment."""
    os.execv(PYTHON, [str(PYTHON), *arguments])  # noqa: S606  (no shell is the point)


def check_python() -> None:
    """Exit with a clear message where this Python cannot make the environment."""
    if sys.version_info < (3, 11):  # noqa: UP036  (this file is what an older Python is given)
        sys.exit("Python 3.11 or newer is needed; this is {}.{}".format(*sys.version_info))
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit("Python's venv module is incomplete here; on Debian or Ubuntu: apt install python3-venv")


def is_installed(kind: str) -> bool:
    """Tell whether the environment holds what is to be run, as the files describe it now."""
    # What the tests need includes what the demo needs.
    return any(stamp(each).exists() for each in {kind, "test"})


def install(kind: str) -> None:
    """Make the environment, if there is none, and install what is to be run."""
    if not can_run(PYTHON):
        with step("making .venv"):
            call(sys.executable, "-m", "venv", "--clear", str(VENV))
    # Older ones know no dependency groups; an installation without them keeps its pip.
    if pip_version() < (25, 1):
        with step("updating pip"):
            pip("--upgrade", "pip")
    with step("installing the packages, once"):
        pip("--constraint", "constraints.txt", *INSTALL[kind])
    stamp(kind).touch()


def stamp(kind: str) -> Path:
    """Name the file that says: installed, from just these files."""
    digest = hashlib.sha256(repr(INSTALL[kind]).encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return VENV / f"installed-{kind}-{digest.hexdigest()[:16]}"


def can_run(python: Path) -> bool:
    """Tell whether the environment's Python is there, is new enough and has pip."""
    check = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    try:
        return subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def pip_version() -> tuple[int, ...]:
    """Return the first two numbers of the version of the environment's pip."""
    command = [str(PYTHON), "-c", "import pip; print(pip.__version__)"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(int(number) for number in answer.strip().split(".")[:2])


def pip(*arguments: str) -> None:
    """Run ``pip install`` in the environment."""
    call(str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def call(*command: str) -> None:
    """Run a program in the clone; exit with its status if it fails."""
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status:
        sys.exit(f"\nfailed with status {status}: {' '.join(command)}")


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Say what takes long, and then how long it took."""
    start = time.monotonic()
    print(f"{title} ...", end="", file=sys.stderr, flush=True)
    yield
    print(f" {time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
