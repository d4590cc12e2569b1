"""Injury: a worker's side of a fault. It says where it is, and then is killed or frozen there."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from exactly_once import _failpoints


def report(event: str, **details: Any) -> None:
    """Write one line for the parent, in one piece and at once: the next moment may be the last."""
    os.write(1, json.dumps({"event": event, "time": time.monotonic(), **details}).encode() + b"\n")


class Injury:
    """Kills or freezes this process at a failpoint, by the signals that nobody can catch."""

    def __init__(self) -> None:
        self.was_frozen = False
        """Whether the process was frozen with the batch that it still has in hand."""

    def arm(self, kind: str, at: str, after: int) -> None:
        """Do it when the failpoint ``at`` has been passed ``after`` times from now on."""
        passes = iter(range(after))

        def action() -> None:
            if next(passes, None) is None:
                _failpoints.disarm()
                self._inflict(kind, at)

        _failpoints.disarm()
        _failpoints.arm(at, action)

    def disarm(self) -> None:
        """Let the process live."""
        _failpoints.disarm()

    def _inflict(self, kind: str, at: str) -> None:
        if kind == "kill":
            report("dying", at=at)
            os.kill(os.getpid(), signal.SIGKILL)
        self.was_frozen = True
        report("frozen", at=at)
        os.kill(os.getpid(), signal.SIGSTOP)
        report("resumed")
