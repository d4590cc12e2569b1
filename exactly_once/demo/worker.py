"""Worker: what a process of a :class:`~.crew.Crew` gets to do, what it reports, and how it is injured.

It reads its order from the first line of standard input, then faults to arm, and reports in lines of
JSON on standard output. When standard input ends, its parent is gone, and it goes too.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

from exactly_once import _failpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a worker is to do, in one line of JSON."""

    number: int
    """Whose place the worker takes."""

    @classmethod
    def from_line(cls, line: str) -> Self:
        return cls(**json.loads(line))

    def to_line(self) -> str:
        return json.dumps(asdict(self))


def report(event: str, **details: Any) -> None:
    """Write one line for the parent, in one piece and at once: the next moment may be the last."""
    os.write(1, json.dumps({"event": event, "time": time.monotonic(), **details}).encode() + b"\n")


class Injury:
    """Kills or freezes this process at a failpoint, by the signals that nobody can catch."""

    def __init__(self) -> None:
        # Whether the process was frozen with the batch that it still has in hand.
        self.was_frozen = False

    def arm(self, kind: str, at: str, after: int) -> None:
        """Do it when the failpoint ``at`` has been passed ``after`` times from now on."""
        passes = iter(range(after))

        def action() -> None:
            # Disarmed before it strikes: what is frozen goes on through the same failpoint.
            if next(passes, None) is not None:
                return
            _failpoints.disarm()
            if kind == "kill":
                report("dying", at=at)
                os.kill(os.getpid(), signal.SIGKILL)
            self.was_frozen = True
            report("frozen", at=at)
            os.kill(os.getpid(), signal.SIGSTOP)
            report("resumed")

        _failpoints.disarm()
        _failpoints.arm(at, action)


def serve(work: Callable[[str, Injury], None]) -> None:
    """Wait for an order, the first line of standard input, and do the work; without an order there is none."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    line = sys.stdin.readline()
    if not line:
        return
    injury = Injury()

    def listen() -> None:
        for line in sys.stdin:
            fault = json.loads(line)
            if fault is None:
                _failpoints.disarm()
            else:
                injury.arm(**fault)
        # The parent is gone: whatever the main thread does, nobody wants it.
        os.kill(os.getpid(), signal.SIGKILL)

    # A daemon: it waits in a read that only the parent ends.
    threading.Thread(target=listen, daemon=True).start()
    work(line, injury)
