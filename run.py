"""Install this clone into its own ``.venv`` and run the demo or the tests; standard library only.

python3 run.py demo [arguments]     e.g. --help
python3 run.py test [arguments]     those of pytest
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
# What each command installs, and what it then runs in the environment. The demo brings no test tools.
INSTALL = {
    "demo": ["--editable", ".[demo]"],
    "test": ["--editable", ".[demo,memcached,prometheus,sink,spark]", "--group", "dev"],
}
RUN = {
    "demo": ["-m", "exactly_once.cli", "demo"],
    "test": ["-m", "pytest"],
}


def main(arguments: list[str]) -> None:
    """Run one command; does not return."""
    if not arguments or arguments[0] not in INSTALL:
        sys.exit(__doc__)
    command, *rest = arguments
    check_python()
    if not is_installed(command):
        install(command)
    os.execv(PYTHON, [str(PYTHON), *RUN[command], *rest])  # noqa: S606  (no shell is the point)


def check_python() -> None:
    """Exit with a clear message where this Python cannot make the environment."""
    if sys.version_info < (3, 11):  # noqa: UP036  (this file is what an older Python is given)
        sys.exit("Python 3.11 or newer is needed; this is {}.{}".format(*sys.version_info))
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit("Python's venv module is incomplete here; on Debian or Ubuntu: apt install python3-venv")


def is_installed(command: str) -> bool:
    """Tell whether the environment holds what *command* needs, as the files describe it now."""
    # What the tests need includes what the demo needs.
    return any(stamp(each).exists() for each in {command, "test"})


def install(command: str) -> None:
    """Make the environment, if there is none, and install what *command* needs."""
    if not can_run(PYTHON):
        with Step("making .venv"):
            call(sys.executable, "-m", "venv", "--clear", str(VENV))
    # Older ones know no dependency groups; an installation without them keeps its pip.
    if pip_version() < (25, 1):
        with Step("updating pip"):
            pip("--upgrade", "pip")
    with Step("installing the packages, once"):
        pip("--constraint", "constraints.txt", *INSTALL[command])
    stamp(command).touch()


def stamp(command: str) -> Path:
    """Name the file that says: installed, from just these files."""
    digest = hashlib.sha256(repr(INSTALL[command]).encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return VENV / f"installed-{command}-{digest.hexdigest()[:16]}"


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


class Step:
    """Say what takes long, and then how long it took."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = time.monotonic()

    def __enter__(self) -> None:
        print(f"{self._title} ...", end="", file=sys.stderr, flush=True)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            print(f" {time.monotonic() - self._start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
