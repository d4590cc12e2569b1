"""Service: what ``run`` adds to the loop: retries, poison, and an orderly end on signals."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Literal

import tenacity
from confluent_kafka import Message

from .dead_letters import DeadLetterLimit, enforce, place_of
from .errors import PoisonMessage, Redelivered, TransactionAborted
from .logs import about
from .outcome import Fault, driver_error
from .poison import Search
from .retry import Stop
from .unit import Unit, apply
from .units import Units

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_IN_FAILED_TRANSACTION = "25P02"
_HOW_ON = 'on_poison="dead-letter" sets such messages aside'
_SWALLOWED = "it cannot be set aside, because a SQL error was swallowed, and nobody knows whose fault that was"


OnPoison = Literal["stop", "dead-letter"] | Callable[[Unit, Message, Exception], object]
"""What becomes of a message that cannot be applied. A callable is called in the transaction that skips it."""


class Service:
    """Calls the handler unit by unit; tries again what is nobody's fault, and sets poison aside."""

    def __init__(
        self,
        units: Units,
        handler: Callable[[Unit], object],
        *,
        retrying: tenacity.Retrying,
        stopping: Stop,
        on_poison: OnPoison,
        attempts: int,
        limit: DeadLetterLimit,
    ) -> None:
        self._units = units
        self._handler = handler
        self._retrying = retrying
        self._stopping = stopping
        self._on_poison = on_poison
        self._attempts = attempts
        self._limit = limit
        self._search = Search()
        self._failures = 0
        self._poison: tuple[str, Exception] | None = None

    def run(self) -> None:
        """Serve until the iteration ends."""
        try:
            while self._retrying(self._one):
                pass
        except Redelivered:
            # Stopped while waiting for a server: nothing was stored, the next owner goes on from there.
            if not self._stopping.is_set:
                raise

    def _one(self) -> bool:
        """Serve one unit; return whether there was one."""
        self._units.max_messages = self._search.max_messages
        unit = next(self._units, None)
        if unit is None:
            return False
        if self._poison is not None and len(unit.messages) == 1 and place_of(unit.messages[0]) == self._poison[0]:
            self._set_aside(unit, self._poison[1])
        elif not self._apply(unit):
            return True
        self._poison, self._failures = None, 0
        self._search.landed(len(unit.messages))
        return True

    def _apply(self, unit: Unit) -> bool:
        """Call the handler; return False when its messages are to be tried in smaller units, or set aside."""
        try:
            apply(self._handler, unit)
        except Exception as error:
            if unit.fault is not Fault.HANDLER:
                raise
            self._search.failed(len(unit.messages))
            if len(unit.messages) > 1:
                extra = about("poison_sought", group=unit.work.group_id, several=unit.advances)
                logger.warning("%s: %s; looking for the message in %r", type(error).__name__, error, unit, extra=extra)
            else:
                self._condemn(unit, error)
            return False
        return True

    def _condemn(self, unit: Unit, error: Exception) -> None:
        """Decide about a message that failed alone.

        :raises Redelivered: when it is to be tried again after a wait.
        :raises PoisonMessage: when it stops the service.
        """
        (message,) = unit.messages
        told = f"{place_of(message)}: {type(error).__name__}: {error}"
        self._failures += 1
        if self._failures < self._attempts:
            raise Redelivered(f"{told} (attempt {self._failures} of {self._attempts})") from error
        why = _SWALLOWED if _is_consequence(error) else _HOW_ON if self._on_poison == "stop" else None
        if why is not None:
            raise PoisonMessage(
                f"{told}. Everything before it is committed; {why}",
                topic=message.topic(),
                partition=message.partition(),
                offset=message.offset(),
            ) from error
        self._poison = place_of(message), error

    def _set_aside(self, unit: Unit, error: Exception) -> None:
        (message,) = unit.messages
        with unit:
            if callable(self._on_poison):
                self._on_poison(unit, message, error)
            else:
                unit.dead_letter(message, error)
                work = unit.work
                enforce(self._limit, unit.connection, message, schema=work.schema, group_id=work.group_id)
        (advance,) = unit.advances
        extra = about(
            "set_aside",
            group=unit.work.group_id,
            partition=advance.partition,
            offset=message.offset(),
            owner_epoch=advance.epoch,
        )
        logger.error("%s was set aside: %s: %s", place_of(message), type(error).__name__, error, extra=extra)


class _Stopped(BaseException):
    """Becomes SystemExit, at which psycopg would ask the server for 10 seconds to cancel a statement."""


@contextlib.contextmanager
def stopping_on_signals(stop: Callable[[], None], stop_seconds: float) -> Iterator[None]:
    """Stop on the first SIGTERM or SIGINT; raise SystemExit after ``stop_seconds`` or on the second.

    Wherever the second finds the loop: what waits for a server that stands still would wait for ever, and everything
    is made to be interrupted between any two lines.

    Does nothing outside of the main thread, where Python allows no signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    alarms: list[threading.Timer] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            stop()
            name = signal.Signals(number).name
            logger.info("%s: stopping after the unit in hand", name, extra=about("stopping"))
            alarm = threading.Timer(stop_seconds, signal.pthread_kill, [threading.get_ident(), number])
            alarm.daemon = True
            alarm.start()
            alarms.append(alarm)
        else:
            for alarm in alarms:
                alarm.cancel()  # what is undone now is not to be interrupted by the clock, too
            raise _Stopped

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        with contextlib.suppress(_Stopped):
            yield
    finally:
        for alarm in alarms:
            alarm.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
    # Also where the driver has made another error of it, which is waited for or ends the service as a stop does.
    if len(received) > 1:
        raise SystemExit(128 + received[0])


def _is_consequence(error: Exception) -> bool:
    """Tell whether an error only says that an earlier one was swallowed."""
    driver = driver_error(error)
    return isinstance(error, TransactionAborted) or (driver is not None and driver.sqlstate == _IN_FAILED_TRANSACTION)
