"""A real memcached on 127.0.0.1, from the system's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

from exactly_once.embedded.ports import accepts, free_port
from tests.support.waiting import until


def missing_memcached() -> str | None:
    """Say what is missing on this machine, or nothing."""
    return None if shutil.which("memcached") else "no program memcached; on Debian: apt install memcached"


class Memcached:
    """Runs one memcached; `with Memcached() as server: server.address`."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return "127.0.0.1", self.port

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, empty."""
        user = ["-u", "nobody"] if os.geteuid() == 0 else []
        command = ["memcached", "-l", "127.0.0.1", "-p", str(self.port), "-U", "0", "-m", "64", *user]
        self._process = subprocess.Popen(command)
        until(lambda: accepts(self.port), 10, "memcached")

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None
