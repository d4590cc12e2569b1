"""Service: what ``run`` adds to the loop: retries, and an orderly end on signals."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import tenacity

from .errors import Redelivered
from .retry import Stop
from .unit import Stage, Unit
from .units import Units

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(units: Units, handler: Callable[[Unit], object], retrying: tenacity.Retrying, stopping: Stop) -> None:
    """Call the handler unit by unit until the iteration ends; try again what is nobody's fault."""

    def one() -> bool:
        unit = next(units, None)
        if unit is None:
            return False
        with unit:
            handler(unit)
        return True

    try:
        while retrying(one):
            pass
    except Redelivered:
        # Stopped while waiting for a server: nothing was stored, the next owner goes on from there.
        if not stopping.is_set:
            raise


@contextlib.contextmanager
def stopping_on_signals(
    stop: Callable[[], None], current: Callable[[], Unit | None], stop_seconds: float
) -> Iterator[None]:
    """Stop on the first SIGTERM or SIGINT; roll the unit in hand back after ``stop_seconds`` or on the second.

    Does nothing outside of the main thread, where Python allows no signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    alarms: list[threading.Timer] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        unit = current()
        if len(received) == 1:
            stop()
            logger.info("%s: stopping after the unit in hand", signal.Signals(number).name)
            alarm = threading.Timer(stop_seconds, signal.pthread_kill, [threading.get_ident(), number])
            alarm.daemon = True
            alarm.start()
            alarms.append(alarm)
        elif unit is not None and unit.stage in (Stage.OPEN, Stage.FINISHING):
            raise SystemExit(128 + received[0])

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for alarm in alarms:
            alarm.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
