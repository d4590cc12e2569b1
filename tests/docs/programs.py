"""The code of a page, and running it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.support.waiting import until

ROOT = Path(__file__).parents[2]


def code(page: str, language: str) -> list[str]:
    """Return the fenced blocks of one language in a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def placed(block: str, bootstrap_servers: str, conninfo: str) -> str:
    """Give a program the addresses of the tests' servers."""
    return block.replace("localhost:9092", bootstrap_servers).replace("postgresql://localhost/bank", conninfo)


def run(
    command: list[str],
    is_done: Callable[[], bool],
    how_to_stop: signal.Signals | None,
    directory: Path,
    *,
    is_right: Callable[[], bool] | None = None,
    **env: str,
) -> int:
    """Run a program until it is done, or to its end where it is not to be stopped, and return its exit status.

    What is to be so when it has ended: ``is_right``, else the same.
    """
    variables = {**os.environ, **env}
    with (directory / "log").open("w+") as log:
        with subprocess.Popen(command, cwd=directory, env=variables, stdout=log, stderr=log) as process:
            try:
                if how_to_stop is not None:
                    until(lambda: is_done() or process.poll() is not None, 300, f"the work of {command}")
                    process.send_signal(how_to_stop)
                process.wait(600)
            finally:
                process.kill()
        log.seek(0)
        assert (is_right or is_done)(), log.read()
    return process.returncode
