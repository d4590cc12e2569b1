"""Units: the iteration over units, and when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from exactly_once._log import about
from exactly_once.errors import BrokerUnreachable
from exactly_once.kafka.admin import Cluster

from .maintenance import Maintenance
from .partitions import Ownership, Phase
from .unit import Unit

logger = logging.getLogger(__name__)


class Units:
    """An iterator that an exception does not end: iterate on, and the same messages come again."""

    def __init__(
        self,
        next_unit: Callable[[Units], Unit | None],
        cluster: Cluster,
        ownership: Ownership,
        maintenance: Maintenance,
        *,
        until_end: bool,
        idle_seconds: float | None,
        max_unit_seconds: float,
    ) -> None:
        self._next_unit = next_unit
        self._cluster = cluster
        self._ownership = ownership
        self._maintenance = maintenance
        # Whether the iteration ends where the logs end.
        self.until_end = until_end
        self._idle_seconds = idle_seconds
        self._busy_at = time.monotonic()
        # Whether the iteration has come to an end of its own, and was not only stopped.
        self.is_over = False
        # How many messages a unit may have at most, below what the consumer's options allow.
        self.max_messages: int | None = None
        # After a unit that took longer the next one is halved.
        self.max_unit_seconds = max_unit_seconds
        for state in ownership.states.values():
            state.stop_at = None

    def __iter__(self) -> Units:
        return self

    def __next__(self) -> Unit:
        try:
            unit = self._next_unit(self)
        except SystemError as error:
            # The Kafka client wraps what a signal handler raised during some of its calls.
            raise error.__cause__ or error from None
        if unit is None:
            raise StopIteration
        return unit

    def record_activity(self) -> None:
        """Take note that there is something to do."""
        self._busy_at = time.monotonic()

    def ask_for_ends(self) -> None:
        """Ask where the logs of partitions that were placed since the last time end now."""
        states = self._ownership.states
        new = [p for p, h in states.items() if h.positioned and h.stop_at is None] if self.until_end else []
        if not new:
            return
        try:
            for partition, end in self._cluster.ends(new).items():
                states[partition].stop_at = end
        except BrokerUnreachable as error:
            extra = about("ends_unknown", several=new)
            logger.warning("where the logs end is not known yet: %s", error, extra=extra)

    def has_reached_ends(self) -> bool:
        """Compare positions, not counts: transactional and compacted logs end in offsets without messages."""
        states = self._ownership.states
        if not self.until_end or not states:
            return False
        return all(
            h.positioned and h.stop_at is not None and h.applied >= h.stop_at
            for h in states.values()
            if h.phase is not Phase.BAD
        )

    def refuse_bad(self) -> None:
        """Refuse to end as if all had been read.

        :raises StartError: of the first partition that cannot be read.
        """
        for partition in self._ownership.bad():
            error = self._ownership.states[partition].error
            assert error is not None
            raise error

    def has_read_all(self) -> bool:
        """Tell whether nothing more is to come before the ends, be it applied or not."""
        states = self._ownership.states
        return self.until_end and all(
            h.positioned and h.stop_at is not None and max(h.position, h.log_end) >= h.stop_at
            for h in states.values()
            if h.phase is not Phase.BAD
        )

    def is_left_without(self, *, since: float) -> bool:
        """Judge, at a moment when a fetch brought nothing, whether nothing will come any more.

        ``since`` is when partitions were paused for the last time.
        """
        # Nothing held is also what a member has before and between assignments, and says nothing of what is to come.
        states = self._ownership.states
        can_read = all(h.positioned or h.phase is Phase.BAD for h in states.values())
        if not (can_read if states else self._maintenance.is_left_idle):
            self.record_activity()
        elif self._idle_seconds is not None and time.monotonic() - max(self._busy_at, since) >= self._idle_seconds:
            # Of brokers that are away nothing comes, too.
            read = {p: max(h.position, h.log_end) for p, h in states.items() if h.positioned}
            try:
                if not read or all(read[p] >= end for p, end in self._cluster.ends(list(read)).items()):
                    return True
            except BrokerUnreachable as error:
                extra = about("ends_unknown", several=read)
                logger.warning("nothing comes, and whether there is more is not known: %s", error, extra=extra)
            self.record_activity()
        self.ask_for_ends()
        return self.until_end and self._maintenance.is_left_idle
