"""Retry: what is worth waiting for, and how long, as tenacity's objects."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import psycopg
import tenacity
from confluent_kafka import KafkaException

from .errors import Redelivered, Unreachable
from .logs import about
from .outcome import Fault, classify, driver_error

logger = logging.getLogger(__name__)

BACKOFF = tenacity.wait_random_exponential(multiplier=0.1, max=5.0)
"""Seconds between tries: up to 0.1, doubling up to 5, each time a random part of it."""


class Stop:
    """A request to stop. Not an Event, whose lock a signal handler may find taken by the very thread it interrupted."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        """Ask for the stop."""
        self.is_set = True


def is_passing(error: BaseException) -> bool:
    """Tell whether the loop goes on after an error: a server is away or busy, or messages come again."""
    return isinstance(error, Redelivered) or is_away(error)


def is_away(error: BaseException) -> bool:
    """Tell whether an error goes away by waiting and asking again: a server that is away or busy."""
    if isinstance(error, Redelivered):
        return False  # who asks again with what it holds gets the same answer
    if isinstance(error, Unreachable):
        return True
    if isinstance(error, KafkaException):
        return bool(error.args[0].retriable())
    driver = driver_error(error) if isinstance(error, psycopg.Error) else None
    if driver is None:
        return False
    # Without a SQLSTATE the server did not answer: no connection, or a broken one.
    lost = driver.sqlstate is None and isinstance(driver, psycopg.OperationalError)
    return classify(driver, connection_lost=lost) in (Fault.CONFLICT, Fault.ENVIRONMENT, Fault.DURATION)


def patiently(
    *, sleep: Callable[[float], None], stop: Stop, group_id: str, wait: tenacity.wait.wait_base = BACKOFF
) -> tenacity.Retrying:
    """Return a retrier that waits by calling ``sleep`` until it works, or ``stop`` is set."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_passing),
        wait=wait,
        stop=lambda _: stop.is_set,
        sleep=sleep,
        before_sleep=partial(_log, group_id),
        reraise=True,
    )


def briefly(seconds: float) -> tenacity.Retrying:
    """Return a retrier for servers that are away, which gives up after so long, with the error itself."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_away),
        wait=BACKOFF,
        stop=tenacity.stop_after_delay(seconds),
        reraise=True,
    )


def _log(group_id: str, state: tenacity.RetryCallState) -> None:
    """Say at once that something is waited for, then less and less often."""
    count = state.attempt_number
    if count & (count - 1) == 0 and state.outcome is not None:
        extra = about("waiting", group=group_id)
        logger.warning("waiting (try %s): %s", count, state.outcome.exception(), extra=extra)
