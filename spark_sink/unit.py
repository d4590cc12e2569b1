"""The unit that ``in_transaction=`` is called with: an open transaction of the sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from exactly_once._model import Partition
from exactly_once.ledger.session import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkUnit:
    """One open transaction of the sink, behind its rows; the ledger moves when ``in_transaction`` returns."""

    connection: Connection
    """psycopg's connection; the sink commits it."""
    batch_id: int
    rows: int
    """How many rows this transaction wrote."""
    offsets: Mapping[Partition, tuple[int, int]]
    """From where to where this transaction moves the ledger; empty with ``ledger="batch-id"``."""

    def execute(self, query: Any, parameters: Sequence[Any] | Mapping[str, Any] | None = None) -> psycopg.Cursor[Any]:
        """Run a statement in the transaction."""
        return self.connection.execute(query, parameters)
