"""One server process under its guard, seen from the process that started it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import EmbeddedError, StartError

_GUARD = Path(__file__).with_name("guard.py")

_FREEZE_SECONDS = 60.0  # a thread stops when it next leaves the kernel: at once, unless it waits for a disk
_POLL_SECONDS = 0.002  # it takes about as long
_TAIL_LINES = 20  # an error of Postgres, or the head of a stack trace of Kafka


class ServerProcess:
    """Run *command* under a guard that ends it when this process is gone.

    Both live in a session of their own: Ctrl-C in a terminal does not reach the server, so its owner decides
    when it stops. The guard ends it by *end_signal* and then deletes *remove*. Raises `StartError` if the
    program cannot be run at all.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        end_signal: signal.Signals = signal.SIGKILL,
        user: str | None = None,
        group: int | None = None,
        remove: Path | None = None,
    ) -> None:
        self.log = log
        order = {
            "command": [str(word) for word in command],
            "directory": str(log.parent),
            "end_signal": int(end_signal),
            "group": group,
            "log": str(log),
            "parent": os.getpid(),
            "remove": None if remove is None else str(remove),
            "user": user,
        }
        # By path, isolated and without site: "-m" would import the whole package first.
        with log.open("ab") as errors:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", _GUARD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(json.dumps(order).encode() + b"\n")
            self._guard.stdin.flush()
        pid = self._guard.stdout.readline()
        self._guard.stdout.close()
        if not pid:
            self._guard.wait()
            self._close()
            raise StartError(f"the server could not be run; the end of {self.log}:\n{self.log_tail()}")
        self.pid = int(pid)

    def __repr__(self) -> str:
        state = "running" if self.is_running() else "ended"
        return f"<{type(self).__name__} pid={self.pid} {state}>"

    def is_running(self) -> bool:
        """Return whether the server has not ended; a stopped (paused) one is running."""
        return self._guard.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the server; do nothing if it has ended."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def freeze(self) -> None:
        """Stop the server where it is, and return when it stands still; do nothing if it has ended."""
        if self.is_running():
            freeze(self.pid)

    def end(self, number: signal.Signals, *, timeout_seconds: float) -> None:
        """End the server by a signal, and by SIGKILL when it does not obey in time."""
        self.send(signal.SIGCONT)
        self.send(number)
        try:
            self._guard.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self._guard.wait()
        self._close()

    def log_tail(self) -> str:
        """Return the end of the server's log."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def come_up(self, name: str, is_up: Callable[[], bool], *, deadline: float, poll_seconds: float) -> None:
        """Wait until the server is up, till ``deadline`` by the monotonic clock.

        Raises `StartError`, with the tail of the log, if it ended or takes longer.
        """
        while not is_up():
            problem = None if time.monotonic() <= deadline else "did not come up in time"
            if not self.is_running():
                problem = "ended while it started"
            if problem is not None:
                raise StartError(f"{name} {problem}; the end of {self.log}:\n{self.log_tail()}")
            time.sleep(poll_seconds)

    def _close(self) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()


def freeze(pid: int) -> None:
    """Stop a process, and return when all its threads stand still; do nothing if it has ended.

    Raises `EmbeddedError` if it goes on for 10 seconds.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _FREEZE_SECONDS
    while not is_frozen(pid):
        if time.monotonic() > deadline:
            raise EmbeddedError(f"process {pid} was stopped and still runs after {_FREEZE_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


def is_frozen(pid: int) -> bool:
    """Return whether a process does nothing any more: each of its threads is stopped, or it has ended.

    The signal that stops a process is only sent when `os.kill` returns; until a thread takes note it goes on, and
    may still answer a request.
    """
    if Path("/proc/self/task").exists():
        # psutil knows the state of the first thread only; the others may still run when that one stands.
        states = set[str]()
        for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                states.add(thread.read_text(errors="replace").rpartition(")")[2].split()[0])
        return states <= set("TtZX")  # stopped, stopped by a tracer, a zombie, dead
    import psutil  # noqa: PLC0415  (an extra brings it)

    try:
        return psutil.Process(pid).status() in {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}
    except psutil.NoSuchProcess:
        return True
