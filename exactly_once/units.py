"""Units: the iteration over units, and when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from .cluster import Cluster
from .errors import BrokerUnreachable
from .model import Partition
from .ownership import Ownership, State
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
        self._until_end = until_end
        self._idle_seconds = idle_seconds
        self._ends: dict[Partition, int] = {}
        self._busy_at = time.monotonic()

    def __iter__(self) -> Units:
        return self

    def __next__(self) -> Unit:
        unit = self._next_unit(self)
        if unit is None:
            raise StopIteration
        return unit

    def came(self) -> None:
        """Take note that there is something to do."""
        self._busy_at = time.monotonic()

    def is_over(self) -> bool:
        """Judge whether this is the end, at a moment when a fetch brought nothing."""
        if self._idle_seconds is not None and time.monotonic() - self._busy_at >= self._idle_seconds:
            return True
        return self._until_end and self._has_reached_ends()

    def _has_reached_ends(self) -> bool:
        """Compare positions, not counts: transactional and compacted logs end in offsets without messages."""
        holdings = self._ownership.holdings
        if not holdings:
            # Nothing is also what a member holds between two assignments; only the group can tell.
            return self._is_left_idle()
        if any(h.state is not State.OWNED or not h.placed for h in holdings.values()):
            return False
        try:
            self._ends |= self._cluster.ends(p for p in holdings if p not in self._ends)
        except BrokerUnreachable as error:
            logger.warning("where the logs end is not known yet: %s", error)
            return False
        return all(
            max(holding.expected, self._upkeep.eof.get(partition, 0)) >= self._ends[partition]
            for partition, holding in holdings.items()
        )
