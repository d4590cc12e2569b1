"""Retry: what is worth waiting for, and how long, as tenacity's objects."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import psycopg
import tenacity
from confluent_kafka import KafkaException

from exactly_once._log import about
from exactly_once.errors import AlreadyApplied, Fenced, LedgerRewound, ReadOnly, Redelivered, Unreachable

from .outcome import Fault, classify, is_mistaken

logger = logging.getLogger(__name__)

# Seconds between tries: up to 0.1, doubling up to 5, each time a random part of it.
BACKOFF = tenacity.wait_random_exponential(multiplier=0.1, max=5.0)
# What happens once, and the action of its record.
_TOLD_EACH_TIME = {LedgerRewound: "rewound", AlreadyApplied: "ahead", Fenced: "fenced"}
# After how long a start-up that waits logs it: no server that is well takes longer to answer.
TOLD_SECONDS = 1.0

T = TypeVar("T")


class Stop:
    """A request to stop. Not an Event, whose lock a signal handler may find taken by the very thread it interrupted."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        """Ask for the stop."""
        self.is_set = True


def is_retryable(error: BaseException) -> bool:
    """Tell whether the loop goes on after an error: a server is away or busy, or messages come again."""
    return isinstance(error, (Redelivered, ReadOnly)) or is_unavailable(error)


def is_unavailable(error: BaseException) -> bool:
    """Tell whether an error goes away by waiting and asking again: a server that is away or busy."""
    if isinstance(error, Redelivered):
        return False  # who asks again with what it holds gets the same answer
    if isinstance(error, Unreachable):
        return True
    if isinstance(error, KafkaException):
        return bool(error.args[0].retriable())
    if not isinstance(error, psycopg.Error):
        return False
    # Without a SQLSTATE the server did not answer: no connection, or a broken one.
    lost = error.sqlstate is None and isinstance(error, psycopg.OperationalError)
    return classify(error, connection_lost=lost) in (Fault.CONFLICT, Fault.ENVIRONMENT, Fault.DURATION)


def retry_forever(
    *, sleep: Callable[[float], None], stop: Stop, group_id: str, wait: tenacity.wait.wait_base = BACKOFF
) -> Callable[[Callable[[], T]], T]:
    """Return a retrier that waits by calling ``sleep`` until it works, or ``stop`` is set.

    A loop of its own: tenacity's takes 30 microseconds where nothing fails, and this is called for each unit.
    """

    def retrying(call: Callable[[], T]) -> T:
        state = tenacity.RetryCallState(None, None, (), {})  # type: ignore[arg-type]
        while True:
            try:
                return call()
            except BaseException as error:
                if stop.is_set or not is_retryable(error):
                    raise
                state.set_exception((type(error), error, error.__traceback__))
                _log(group_id, state)
            pause = wait(state)
            state.idle_for += pause
            state.prepare_for_next_attempt()
            sleep(pause)

    return retrying


def retry_for(seconds: float) -> tenacity.Retrying:
    """Return a retrier for servers that are away, which gives up after so long, with the error itself."""
    return _bounded(seconds, is_unavailable)


def waiting(seconds: float, *, group_id: str) -> tenacity.Retrying:
    """Return a retrier as :func:`retry_for` does, which logs what it waits for; what waiting does not mend is raised.

    It belongs around whole transactions: within one that is open a second try gets another error, or a lost connection.
    """
    return _bounded(seconds, _may_start_later, partial(_log, group_id))


def trying(count: int, is_worth: Callable[[BaseException], bool], *, group_id: str) -> tenacity.Retrying:
    """Return a retrier of whole transactions that calls so often while the error is worth it, and logs each wait."""
    return _retrier(tenacity.stop_after_attempt(count), is_worth, partial(_log, group_id))


def _bounded(
    seconds: float, retry: Callable[[BaseException], bool], before_sleep: Callable[..., None] | None = None
) -> tenacity.Retrying:
    return _retrier(tenacity.stop_after_delay(seconds), retry, before_sleep)


def _retrier(
    stop: tenacity.stop.stop_base,
    retry: Callable[[BaseException], bool],
    before_sleep: Callable[..., None] | None,
) -> tenacity.Retrying:
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(retry),
        wait=BACKOFF,
        stop=stop,
        before_sleep=before_sleep,
        reraise=True,
    )


def at_start(
    ask: Callable[[], T], *, seconds: float, what: str, group_id: str, reason: Callable[[], str | None] = lambda: None
) -> T:
    """Return what ``ask`` returns, waiting so long for a server as :func:`retry_for` does, and log what is waited for.

    What waiting does not mend, a wrong password or name, is raised at once. ``reason`` is called from another thread,
    while one try lasts, for what is known by then.
    """
    over, why = threading.Event(), "no answer yet"

    def failed(state: tenacity.RetryCallState) -> None:
        nonlocal why
        if state.outcome is not None:
            why = " ".join(str(state.outcome.exception()).split())

    def tell() -> None:
        waited, pause = 0.0, TOLD_SECONDS
        while not over.wait(pause):
            waited += pause
            text, extra = "waiting for %s for %.0f s: %s", about("waiting", group=group_id)
            logger.warning(text, what, waited, reason() or why, extra=extra)
            pause = waited  # logged after 1, 2, 4, 8, ... seconds

    # From a thread of its own, because one question may take long.
    threading.Thread(target=tell, name="exactly_once-start", daemon=True).start()
    try:
        return _bounded(seconds, _may_start_later, failed)(ask)
    finally:
        over.set()


def _may_start_later(error: BaseException) -> bool:
    return isinstance(error, ReadOnly) or (is_unavailable(error) and not is_mistaken(error))


def _log(group_id: str, state: tenacity.RetryCallState) -> None:
    """Log at once that something is waited for, then less and less often; what happens once is logged each time."""
    count, error = state.attempt_number, state.outcome.exception() if state.outcome is not None else None
    action = next((action for kind, action in _TOLD_EACH_TIME.items() if isinstance(error, kind)), None)
    if action is not None:
        logger.warning("%s: %s", type(error).__name__, error, extra=about(action, group=group_id))
    elif count & (count - 1) == 0 and error is not None:
        logger.warning("waiting (try %s): %s", count, error, extra=about("waiting", group=group_id))
