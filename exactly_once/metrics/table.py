"""Metrics: everything that a consumer measures, each defined once, and what a monitoring system offers to take it.

Counters and histograms are pushed, once per unit at most; gauges are read when somebody looks. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Kind = Literal["counter", "gauge", "histogram"]

_COMMON = ("group", "owner")
_PLACE = ("topic", "partition")


# Compared by identity: a metric is looked up for every unit.
@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric. Every one has the labels ``group`` (the consumer group) and ``owner`` (the consumer's ``name``)."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = _COMMON
    buckets: tuple[float, ...] = ()


class Sample(NamedTuple):
    """What a gauge shows now; ``labels`` are the values of the metric's labels, in their order."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


# Reads every gauge of one consumer, from any thread. It may take a second, while Kafka is asked for the log ends.
Read = Callable[[], Iterable[Sample]]


class Metrics(Protocol):
    """What takes the measurements: :class:`exactly_once.metrics.prometheus.PrometheusMetrics`, or your own.

    An error in it is logged and otherwise ignored. ``labels`` are values, in the order of ``metric.labels``.
    """

    def add(self, metric: Metric, amount: float, labels: tuple[str, ...]) -> None:
        """Raise a counter; by 0 when the consumer is made, so that it is there before anything happens."""

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        """Add a value to a histogram."""

    def attach(self, read: Read) -> None:
        """Call ``read`` whenever somebody looks at the gauges."""

    def detach(self, read: Read) -> None:
        """Do not call it any more: the consumer is closed."""


UNITS = Metric("exactly_once_units_total", "counter", "units", "Units committed.")
MESSAGES = Metric("exactly_once_messages_total", "counter", "messages", "Messages of committed units.")
REDELIVERED = Metric(
    "exactly_once_redelivered_units_total",
    "counter",
    "units",
    "Units that did not take effect and whose messages came again, or went to another owner.",
)
DROPPED = Metric(
    "exactly_once_dropped_messages_total",
    "counter",
    "messages",
    "Messages that Kafka delivered and that went into no unit: "
    "already applied (reason=applied), or of a partition that was not owned then (reason=not_owned).",
    (*_COMMON, "reason"),
)
GAPS = Metric(
    "exactly_once_gaps_total",
    "counter",
    "gaps",
    "Holes between consecutive offsets, left by compaction and by markers and aborted messages of transactions.",
)
# Up to 300 seconds, Kafka's default for `max.poll.interval.ms`.
UNIT_SECONDS = Metric(
    "exactly_once_unit_seconds",
    "histogram",
    "seconds",
    "From BEGIN until a unit was known to be committed, handler included.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
# From what an answer takes on one machine, to ten seconds, by which a COMMIT waits for a lock or a standby.
COMMIT_SECONDS = Metric(
    "exactly_once_commit_seconds",
    "histogram",
    "seconds",
    "From sending the offsets, deferred statements and COMMIT until the answer. Joined transactions have none.",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
FENCED = Metric(
    "exactly_once_fenced_total",
    "counter",
    "times",
    "Times that rows were found to belong to another owner, or to have been reset by an operator.",
)
REWOUND = Metric(
    "exactly_once_rewound_total",
    "counter",
    "times",
    "Times that the ledger was behind what had been committed: the database lost commits in a failover.",
)
MISSING = Metric(
    "exactly_once_missing_rows_total",
    "counter",
    "times",
    "Times that the ledger had no row of a partition any more: it was deleted, or a failover lost it.",
)
UNKNOWN_COMMITS = Metric(
    "exactly_once_unknown_commits_total",
    "counter",
    "units",
    "COMMITs without an answer, by the outcome that was found: outcome=committed, aborted, "
    "or fenced (another owner has the rows).",
    (*_COMMON, "outcome"),
)
DEAD_LETTERS = Metric("exactly_once_dead_letters_total", "counter", "messages", "Messages committed as dead letters.")
LAG = Metric(
    "exactly_once_lag",
    "gauge",
    "offsets",
    "From the ledger's next offset to the log's end, open transactions included, for each owned partition; absent "
    "while Kafka does not answer.",
    (*_COMMON, *_PLACE),
)
OWNED = Metric("exactly_once_owned_partitions", "gauge", "partitions", "Partitions that are acquired and checked.")
WAITING = Metric(
    "exactly_once_waiting_partitions",
    "gauge",
    "partitions",
    "Partitions that Kafka has assigned and that are not acquired yet, or not any more.",
)
BAD = Metric(
    "exactly_once_bad_partitions",
    "gauge",
    "partitions",
    "Waiting partitions that cannot be read until an operator mends them; the log and health() give the reason.",
)
SINCE_COMMIT = Metric(
    "exactly_once_seconds_since_commit",
    "gauge",
    "seconds",
    "Since the last unit was committed, or since the start while there is none. Grows while there is nothing to do.",
)
SINCE_POLL = Metric(
    "exactly_once_seconds_since_poll",
    "gauge",
    "seconds",
    "Since the loop last polled Kafka; above max.poll.interval.ms the partitions go to other members.",
)

# Every metric there is.
METRICS = tuple(each for each in list(globals().values()) if isinstance(each, Metric))
