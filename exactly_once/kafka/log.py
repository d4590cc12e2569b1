"""Kafka log: the lines that librdkafka would write to stderr, in Python's logging and without their repetitions."""

from __future__ import annotations

import logging
import re
import time

# The logger that clients get unless the settings name another one by ``logger``.
NAME = "exactly_once.kafka"
# How long a line that repeats is left out after it was logged; twice as long each time.
_FIRST_PAUSE_SECONDS = 60.0
# How many different lines are remembered; numbers in them do not count, so there are few.
_MOST_LINES = 1000
_NUMBER = re.compile(r"\d+")


class Unrepeated(logging.Filter):
    """Lets a line pass when it is new, then after 1, 2, 4, ... minutes, with the number of those in between.

    Clients that cannot reach a broker write dozens of lines a second that differ in numbers only.
    """

    def __init__(self) -> None:
        super().__init__()
        # By the line without its numbers: when it may pass again, the pause until then, how many were left out since.
        self._seen: dict[str, tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide about one line."""
        text, now = record.getMessage(), time.monotonic()
        key = _NUMBER.sub("0", text)
        again_at, pause, left_out = self._seen.get(key, (0.0, _FIRST_PAUSE_SECONDS / 2, 0))
        if now < again_at:
            self._seen[key] = again_at, pause, left_out + 1
            return False
        if len(self._seen) >= _MOST_LINES:
            self._seen.clear()
        self._seen[key] = now + 2 * pause, 2 * pause, 0
        if left_out:
            record.msg, record.args = f"{text} ({left_out} more like this since)", ()
        record.action = "kafka_log"
        return True


def kafka_logger() -> logging.Logger:
    """Return the logger for Kafka clients."""
    found = logging.getLogger(NAME)
    if not found.filters:
        found.addFilter(Unrepeated())
    return found
