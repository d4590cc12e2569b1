"""Handler thread: lets a slow handler work while the consumer's own thread keeps polling Kafka."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

from exactly_once._log import about
from exactly_once.ledger.session import Session

from .unit import Unit

logger = logging.getLogger(__name__)

# How long a handler may take before Kafka is polled beside it: so quick ones cost nothing, far below a rebalance.
QUICK_SECONDS = 0.5
# How late a handler that has ended is noticed, at most.
_POLL_SECONDS = 0.1
# How long a handler may take to notice that its transaction was ended under it.
_NOTICE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerThread:
    """A handler, called in a thread of its own for each unit.

    ``poll(seconds, unit)`` polls and tells whether partitions of the unit were taken away.
    """

    handler: Callable[[Unit], object]
    poll: Callable[[float, Unit], bool]
    session: Session
    revoke_seconds: float

    def __call__(self, unit: Unit) -> object:
        """Call the handler and wait for it, polling."""
        done: Future[object] = Future()
        deadline: float | None = None
        is_aborted = False

        def work() -> None:
            unit.thread = threading.get_ident()
            try:
                done.set_result(self.handler(unit))
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
                done.set_exception(error)

        thread = threading.Thread(target=work, name="exactly_once-handler", daemon=True)
        try:
            thread.start()
            wait([done], QUICK_SECONDS)
            while not done.done():
                is_doomed = unit.is_taken = self.poll(_POLL_SECONDS, unit)
                if is_doomed and deadline is None:
                    deadline = time.monotonic() + self.revoke_seconds
                    extra = about("revoked_while_handling", group=unit.work.group_id, several=unit.advances)
                    text = "Kafka took partitions of %r: it may finish for %g s"
                    logger.warning(text, unit, self.revoke_seconds, extra=extra)
                if deadline is not None and time.monotonic() >= deadline and not is_aborted:
                    is_aborted = True
                    extra = about("unit_ended", group=unit.work.group_id, several=unit.advances)
                    logger.warning("%r did not finish in time; its transaction is ended", unit, extra=extra)
                    self._abort(unit)
        except BaseException:
            # A signal, or Kafka's client failed: nothing of the unit may be left to a thread nobody waits for.
            try:
                self._abort(unit)
                wait([done], _NOTICE_SECONDS)
            finally:
                if not done.done():
                    self.session.discard()  # else what it executes next would be in the next unit, or durable by itself
            raise
        return done.result()

    def _abort(self, unit: Unit) -> None:
        if unit.work.begun is not None:
            self.session.end(unit.work.begun)
