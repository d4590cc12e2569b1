"""Reaper: finds all processes of a pipeline, and as a program kills them when whoever started it is gone.

    python reaper.py MARK

They bear a mark, a variable of the environment that is inherited by what leaves its parent and its session.
"""

from __future__ import annotations

import contextlib
import sys
import time

import psutil

MARK = "EXACTLY_ONCE_VERIFY"
_AGAIN_SECONDS = 0.05


def bearers(mark: str) -> set[psutil.Process]:
    """Return the processes whose mark begins so."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # one that is gone, or another user's
            if process.environ().get(MARK, "").startswith(mark):
                found.add(process)
    return found


def main() -> None:
    sys.stdin.read()  # until the other end is closed, which a kill -9 does as well
    while found := bearers(sys.argv[1]):  # again, for what they start meanwhile
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_AGAIN_SECONDS)


if __name__ == "__main__":
    main()
