"""Units: the iteration over units, and when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from exactly_once._log import about
from exactly_once.errors import BrokerUnreachable

from .maintenance import Maintenance
from .partitions import PartitionState, Phase
from .unit import Unit

logger = logging.getLogger(__name__)

# How long it is asked for what an open transaction hides, which is only told of.
_HIDDEN_SECONDS = 1.0


class Units:
    """An iterator that an exception does not end: iterate on, and the same messages come again."""

    def __init__(
        self,
        next_unit: Callable[[Units], Unit | None],
        maintenance: Maintenance,
        *,
        until_end: bool,
        idle_seconds: float | None,
        max_unit_seconds: float,
        read_committed: bool,
    ) -> None:
        self._next_unit = next_unit
        self._maintenance = maintenance
        self._cluster = maintenance.cluster
        # Whether messages of open transactions, and what is behind them, are no part of a log yet.
        self._read_committed = read_committed
        self._ownership = maintenance.ownership
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
        for state in self._ownership.states.values():
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
        # Before the others: else what arrives meanwhile would pass for hidden.
        of_all = self._cluster.ends_within(_HIDDEN_SECONDS, new, read_committed=False) if self._read_committed else {}
        try:
            for partition, end in self._cluster.ends(new, read_committed=self._read_committed).items():
                states[partition].stop_at = end
            if hidden := [p for p, end in of_all.items() if end > (states[p].stop_at or 0)]:
                text = "a transaction of a producer is open: the end is taken to be before it, so nothing is read of %s"
                extra = about("ends_at_open_transaction", several=hidden)
                logger.warning(text, ", ".join(f"{p} from offset {states[p].stop_at}" for p in hidden), extra=extra)
        except BrokerUnreachable as error:
            extra = about("ends_unknown", several=new)
            logger.warning("where the logs end is not known yet: %s", error, extra=extra)

    def has_reached_ends(self) -> bool:
        """Tell whether everything before the ends is applied, and there is anything."""
        return bool(self._ownership.states) and self.has_read_all(lambda state: state.applied)

    def refuse_bad(self) -> None:
        """Refuse to end as if all had been read.

        :raises StartError: of the first partition that cannot be read.
        :raises UnknownTopic: when the topic of one that was not read to its end is gone.
        """
        for partition in self._ownership.bad():
            error = self._ownership.states[partition].error
            assert error is not None
            raise error
        if (gone := self._gone()) is not None:
            raise gone

    def _gone(self) -> Exception | None:
        """Return why an end that is waited for cannot come, if its topic is gone."""
        if (not self.until_end and self._idle_seconds is None) or not (gone := self._maintenance.gone()):
            return None
        for partition, state in self._ownership.states.items():
            is_left = state.positioned and (state.stop_at is None or state.applied < state.stop_at)
            if is_left and partition.topic in gone:
                return gone[partition.topic]
        return None

    def has_read_all(self, until: Callable[[PartitionState], int] = lambda state: state.read) -> bool:
        """Tell whether nothing more is to come before the ends, be it applied or not.

        Compares positions, not counts: transactional and compacted logs end in offsets without messages.
        """
        return self.until_end and all(
            h.positioned and h.stop_at is not None and until(h) >= h.stop_at
            for h in self._ownership.states.values()
            if h.phase is not Phase.BAD
        )

    def is_left_without(self, *, since: float) -> bool:
        """Judge, at a moment when a fetch brought nothing, whether nothing will come any more.

        ``since`` is when partitions were paused for the last time.
        """
        if self._gone() is not None:
            return True  # which is refused
        # Nothing held is also what a member has before and between assignments, and says nothing of what is to come.
        states = self._ownership.states
        can_read = all(h.positioned or h.phase is Phase.BAD for h in states.values())
        if not (can_read if states else self._maintenance.is_left_idle):
            self.record_activity()
        elif self._idle_seconds is not None and time.monotonic() - max(self._busy_at, since) >= self._idle_seconds:
            # Of brokers that are away nothing comes, too.
            read = {p: h.read for p, h in states.items() if h.positioned}
            try:
                ends = self._cluster.ends(list(read), read_committed=self._read_committed)
                if all(read[p] >= end for p, end in ends.items()):
                    return True
            except BrokerUnreachable as error:
                extra = about("ends_unknown", several=read)
                logger.warning("nothing comes, and whether there is more is not known: %s", error, extra=extra)
            self.record_activity()
        self.ask_for_ends()
        return self.until_end and self._maintenance.is_left_idle
