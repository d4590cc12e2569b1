"""What others see of a batch: the report of what became of it, and the open transaction of ``in_transaction=``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from exactly_once._model import Partition
from exactly_once.ledger.session import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What one micro-batch did. Seconds of tasks are sums, so that they can exceed the batch's own."""

    group_id: str
    query_id: str | None
    run_id: str | None
    batch_id: int
    rows: int = 0
    """Rows that were written by this call."""
    dropped: int = 0
    """Rows below the ledger that reached the sink again; a batch that was written whole is not read at all."""
    repeated: int = 0
    """Rows that were left out because their event was claimed before."""
    ignored: int = 0
    """Rows among ``rows`` that the table had already, as ``mode="insert-ignore"`` leaves them. Not counted by the data
    source."""
    dead_letters: int = 0
    """Rows that could not be stored and were set aside."""
    bytes: int = 0
    """Size of the written rows as Arrow has them."""
    transactions: int = 0
    copy_seconds: float = 0.0
    commit_seconds: float = 0.0
    batch_seconds: float = 0.0
    is_replay: bool = False
    """Whether the whole batch had been written before, so that nothing was read."""

    def __str__(self) -> str:
        if self.is_replay:
            return f"batch {self.batch_id} of {self.group_id!r} had been written before"
        repeated = f"{self.repeated} claimed before, " if self.repeated else ""
        ignored = f"{self.ignored} of them there already, " if self.ignored else ""
        aside = f"{self.dead_letters} set aside as dead letters, " if self.dead_letters else ""
        return (
            f"batch {self.batch_id} of {self.group_id!r}: {self.rows} rows, {ignored}{self.dropped} dropped, {repeated}"
            f"{aside}{self.bytes} bytes, {self.transactions} transactions, copy {self.copy_seconds:.3f} s, "
            f"commit {self.commit_seconds:.3f} s, all {self.batch_seconds:.3f} s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkUnit:
    """One open transaction of the sink, behind its rows; the ledger moves when ``in_transaction`` returns."""

    connection: Connection
    """psycopg's connection; the sink commits it."""
    batch_id: int
    rows: int
    """How many rows this transaction wrote; not those that ``insert-ignore`` found there."""
    offsets: Mapping[Partition, tuple[int, int]]
    """From where to where this transaction moves the ledger; empty with ``ledger="batch-id"``."""

    def execute(self, query: Any, parameters: Sequence[Any] | Mapping[str, Any] | None = None) -> psycopg.Cursor[Any]:
        """Run a statement in the transaction."""
        return self.connection.execute(query, parameters)
