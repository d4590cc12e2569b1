"""Listener: releases the sink's rows when its query has ended. Best effort: a killed driver calls nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.sql.streaming.listener import StreamingQueryListener

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import QueryProgressEvent, QueryStartedEvent, QueryTerminatedEvent


class ReleaseListener(StreamingQueryListener):
    """Calls with the run id of each query that has ended."""

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Nothing: rows are acquired by the first batch."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Nothing: the sink reports by itself."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Release what the ended run owned."""
        self._ended(str(event.runId))
