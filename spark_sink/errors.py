"""Errors of the sink: one class per decision that a caller can take.

They end the query; what to do is in their text. ``Fenced``, ``OwnedByConsumer``, ``TopicRecreated`` and the like are
those of :mod:`exactly_once.errors`.
"""

from __future__ import annotations

from exactly_once.errors import ConfigurationError, ExactlyOnceError


class FrameError(ConfigurationError):
    """The frame does not fit the table, lacks columns or has rows too many of a message; nothing of it is written."""


class LedgerBehindCheckpoint(ExactlyOnceError):
    """Spark counts offsets as written that the ledger does not know: going on would lose them silently."""


class IncompleteInput(ExactlyOnceError):
    """The input of a task ended before its end mark: an attempt that was killed, or whose upstream failed."""


class StageLost(ExactlyOnceError):
    """Rows that tasks had staged are gone: the server crashed in between. Nothing of the batch was written."""


class RowsOutOfOrder(ExactlyOnceError):
    """Offsets that do not rise strictly, or rows from outside of the range that the batch covers."""


class QueryChanged(ExactlyOnceError):
    """With ``ledger="batch-id"``: the batch ids of this query are not those that the ledger counts."""
