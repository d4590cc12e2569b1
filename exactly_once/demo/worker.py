"""Worker: the process that applies payments until it is told to stop.

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
from collections.abc import Callable

from . import loops
from .injury import Injury
from .order import Order


def main() -> None:
    """Wait for the order and carry it out."""
    serve(_apply_payments)


def serve(work: Callable[[str, Injury], None]) -> None:
    """Wait for an order, the first line of standard input, and do the work; without an order there is none."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    line = sys.stdin.readline()
    if not line:
        return
    injury = Injury()
    threading.Thread(target=_listen, args=[injury], daemon=True).start()
    work(line, injury)


def _apply_payments(line: str, injury: Injury) -> None:
    order = Order.from_line(line)
    loop = {"exactly_once": loops.exactly_once, "at_least_once": loops.at_least_once}[order.loop]
    loop(order, injury)


def _listen(injury: Injury) -> None:
    """Arm what the parent asks for; end with the parent, whatever the main thread does."""
    for line in sys.stdin:
        fault = json.loads(line)
        if fault is None:
            injury.disarm()
        else:
            injury.arm(**fault)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
