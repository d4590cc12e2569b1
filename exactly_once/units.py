"""Units: the iteration over units, and when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from .cluster import Cluster
from .errors import BrokerUnreachable
from .logs import about
from .model import Partition
from .ownership import Holding, Ownership
from .unit import Unit
from .upkeep import Upkeep

logger = logging.getLogger(__name__)


class Units:
    """An iterator that an exception does not end: iterate on, and the same messages come again."""

    def __init__(
        self,
        next_unit: Callable[[Units], Unit | None],
        cluster: Cluster,
        ownership: Ownership,
        upkeep: Upkeep,
        *,
        is_left_idle: Callable[[], bool],
        until_end: bool,
        idle_seconds: float | None,
    ) -> None:
        self._next_unit = next_unit
        self._cluster = cluster
        self._ownership = ownership
        self._upkeep = upkeep
        self._is_left_idle = is_left_idle
        self.until_end = until_end
        """Whether the iteration ends where the logs end."""
        self._idle_seconds = idle_seconds
        self._ends: dict[Partition, int] = {}
        self._busy_at = time.monotonic()
        self.max_messages: int | None = None
        """How many messages a unit may have at most, below what the consumer's options allow."""

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

    def came(self) -> None:
        """Take note that there is something to do."""
        self._busy_at = time.monotonic()

    def note_ends(self) -> None:
        """Ask where the logs of partitions that were placed since the last time end now."""
        holdings = self._ownership.holdings
        new = [p for p, h in holdings.items() if h.placed and p not in self._ends] if self.until_end else []
        if not new:
            return
        try:
            self._ends |= self._cluster.ends(new)
        except BrokerUnreachable as error:
            extra = about("ends_unknown", several=new)
            logger.warning("where the logs end is not known yet: %s", error, extra=extra)

    def has_reached_ends(self) -> bool:
        """Compare positions, not counts: transactional and compacted logs end in offsets without messages."""
        holdings = self._ownership.holdings
        if not self.until_end or not holdings:
            return False
        return all(partition in self._ends and self._has_reached(partition, h) for partition, h in holdings.items())

    def has_read_all(self) -> bool:
        """Tell whether nothing more is to come before the ends, be it applied or not."""
        holdings = self._ownership.holdings
        return self.until_end and all(
            holding.placed and p in self._ends and max(holding.fetched, self._upkeep.eof.get(p, 0)) >= self._ends[p]
            for p, holding in holdings.items()
        )

    def is_left_without(self) -> bool:
        """Judge, at a moment when a fetch brought nothing, whether nothing will come any more."""
        if self._idle_seconds is not None and time.monotonic() - self._busy_at >= self._idle_seconds:
            return True
        self.note_ends()
        # Nothing held is also what a member has between two assignments; only the group can tell.
        return self.until_end and not self._ownership.holdings and self._is_left_idle()

    def _has_reached(self, partition: Partition, holding: Holding) -> bool:
        if not holding.placed:
            return False
        return self._upkeep.applied(partition, holding) >= self._ends[partition]
