"""Observer: looks at the parts of one consumer from outside, for its metrics and its health.

The parts only count; nothing here is called more than once per unit, and what is read from other threads
is copied in one step first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from exactly_once._log import about, named
from exactly_once._model import Partition
from exactly_once.kafka.settings import poll_interval_seconds
from exactly_once.metrics import table as m
from exactly_once.metrics.health import Health

from .buffer import FetchBuffer
from .commit import CommitProtocol
from .maintenance import Maintenance
from .partitions import PartitionState, Phase

logger = logging.getLogger(__name__)

# How long one look at the gauges waits for Kafka to report where the logs end.
LAG_SECONDS = 1.0


class Observer:
    """Publishes what the parts have counted; answers whether the consumer lives and works."""

    def __init__(
        self,
        metrics: m.Metrics | None,
        kafka: Mapping[str, Any],
        maintenance: Maintenance,
        *,
        owner_name: str | None,
    ) -> None:
        self._metrics = metrics
        self._common = (str(kafka["group.id"]), owner_name or "")
        self._poll_interval_seconds = poll_interval_seconds(kafka)
        self._maintenance = maintenance
        self._commits = maintenance.commits
        self._made_at = self._polled_at = time.monotonic()
        self._has_failed = False  # whether metrics have failed once, which was logged then
        # What the loop waits for to go away.
        self.trouble: BaseException | None = None
        # What of each counter was published. None before the first time, which has all there before anything happens.
        self._published: list[int | None] = [None] * len(_COUNTED)
        if metrics is not None:
            self._contain(self._publish, metrics)
            self._contain(metrics.attach, self.read)

    def record_poll(self) -> None:
        """Take note that the loop polls Kafka, and publish what happened since it did the last time."""
        self._polled_at = time.monotonic()
        if self._metrics is not None:
            self._contain(self._publish, self._metrics)

    def close(self) -> None:
        """Publish the rest, and be read no more."""
        if self._metrics is not None:
            self._contain(self._publish, self._metrics)
            self._contain(self._metrics.detach, self.read)

    def read(self) -> Iterator[m.Sample]:
        """Read the gauges, from any thread; lag takes up to :data:`LAG_SECONDS`."""
        states = self._states()
        owned = {p: h for p, h in states.items() if h.phase is Phase.OWNED}
        yield m.Sample(m.OWNED, self._common, len(owned))
        yield m.Sample(m.WAITING, self._common, len(states) - len(owned))
        yield m.Sample(m.BAD, self._common, sum(h.phase is Phase.BAD for h in states.values()))
        yield m.Sample(m.SINCE_COMMIT, self._common, self._since_commit())
        yield m.Sample(m.SINCE_POLL, self._common, time.monotonic() - self._polled_at)
        # Of all messages, be they in a transaction that is open: one that hangs holds up what is behind it.
        ends = self._maintenance.cluster.ends_within(LAG_SECONDS, list(owned), read_committed=False)
        for partition, end in ends.items():
            labels = (*self._common, partition.topic, str(partition.number))
            yield m.Sample(m.LAG, labels, max(0, end - owned[partition].applied))

    def health(self, *, is_subscribed: bool, is_stopping: bool) -> Health:
        """Report how the consumer is, from any thread and without asking any server."""
        states = self._states()
        since_poll = time.monotonic() - self._polled_at
        is_alive = since_poll <= self._poll_interval_seconds or not is_subscribed
        waiting = tuple(sorted(p for p, h in states.items() if h.phase is not Phase.OWNED))
        bad = {p: named(states[p].error) for p in waiting if states[p].phase is Phase.BAD}
        # What keeps the consumer from its work.
        reasons: list[str] = []
        if is_stopping:
            reasons.append("it is stopping or has ended")
        elif not is_subscribed:
            reasons.append("it has not subscribed yet")
        else:
            trouble, unreachable = self._commits.failed or self.trouble, self._maintenance.unreachable
            others = [str(p) for p in waiting if p not in bad]
            reasons += [named(trouble)] if trouble is not None else []
            reasons += [f"waiting for {', '.join(others)}"] if others else []
            reasons += [f"{partition} is not read: {error}" for partition, error in bad.items()]
            reasons += [unreachable] if unreachable is not None else []
            reasons += [f"nothing comes of topic {topic}: {error}" for topic, error in self._maintenance.gone().items()]
            reasons += [] if self._maintenance.is_member else ["Kafka has not assigned partitions yet"]
        if not is_alive:
            reasons.append(f"the loop has not polled for {since_poll:.0f} s, which is beyond max.poll.interval.ms")
        return Health(
            is_alive=is_alive,
            is_ready=not reasons,
            reasons=tuple(reasons),
            owned=tuple(sorted(states.keys() - set(waiting))),
            waiting=waiting,
            bad=tuple((*p, error) for p, error in bad.items()),
            seconds_since_commit=self._since_commit(),
            seconds_since_poll=since_poll,
        )

    def _states(self) -> dict[Partition, PartitionState]:
        return self._maintenance.ownership.states.copy()  # in one step: the loop goes on in its own thread

    def _since_commit(self) -> float:
        return time.monotonic() - (self._commits.committed_at or self._made_at)

    def _publish(self, metrics: m.Metrics) -> None:
        for number, (metric, values, count) in enumerate(_COUNTED):
            known, now = self._published[number], count(self._commits, self._commits.buffer)
            if now != known:
                self._published[number] = now
                metrics.add(metric, now - (known or 0), (*self._common, *values))
                if metric is m.UNITS and now:
                    unit_seconds, commit_seconds = self._commits.timing
                    metrics.observe(m.UNIT_SECONDS, unit_seconds, self._common)
                    if commit_seconds is not None:
                        metrics.observe(m.COMMIT_SECONDS, commit_seconds, self._common)

    def _contain(self, call: Callable[..., object], argument: object) -> None:
        """Call what is not ours: it may fail, and no unit is to suffer from that."""
        try:
            call(argument)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                extra = about("metrics_failed", group=self._common[0])
                logger.exception("metrics could not be published; this is logged once", extra=extra)


_Count = Callable[[CommitProtocol, FetchBuffer], int]

# Every counter: metric, values of its labels beyond the common ones, and where the parts count it.
_COUNTED: tuple[tuple[m.Metric, tuple[str, ...], _Count], ...] = (
    (m.UNITS, (), lambda s, _: s.counters.committed),
    (m.MESSAGES, (), lambda s, _: s.counters.messages),
    (m.REDELIVERED, (), lambda s, _: s.counters.redelivered),
    (m.FENCED, (), lambda s, _: s.counters.fenced),
    (m.REWOUND, (), lambda s, _: s.counters.rewound),
    (m.MISSING, (), lambda s, _: s.counters.missing),
    (m.DEAD_LETTERS, (), lambda s, _: s.counters.dead_letters),
    (m.UNKNOWN_COMMITS, ("committed",), lambda s, _: s.counters.resolved_committed),
    (m.UNKNOWN_COMMITS, ("aborted",), lambda s, _: s.counters.resolved_aborted),
    (m.UNKNOWN_COMMITS, ("fenced",), lambda s, _: s.counters.resolved_fenced),
    (m.GAPS, (), lambda _, d: d.gaps),
    (m.DROPPED, ("applied",), lambda _, d: d.dropped - d.not_owned),
    (m.DROPPED, ("not_owned",), lambda _, d: d.not_owned),
)
