"""Health: what a consumer reports of itself to whoever must decide about its process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state of a consumer at one moment.

    ``is_alive`` is false only when the loop has not polled Kafka for longer than ``max.poll.interval.ms``, which a
    restart may mend. ``is_ready`` is false, with ``reasons``, whenever it is not doing all of its work: also while a
    server is away or a partition is bad, which a restart would not mend.
    """

    is_alive: bool
    is_ready: bool
    reasons: tuple[str, ...]
    owned: tuple[tuple[str, int], ...]
    """Topic and number of the partitions that are acquired and checked."""
    waiting: tuple[tuple[str, int], ...]
    """Of those that Kafka has assigned and that cannot be read from yet, or not any more."""
    bad: tuple[tuple[str, int, str], ...]
    """Of those that wait: topic, number and why it cannot be read until somebody mends it. The rest is read on."""
    seconds_since_commit: float
    """Since the last unit was committed, or since the consumer was made while there is none."""
    seconds_since_poll: float
    """Since the loop last polled Kafka, or since the consumer was made."""
