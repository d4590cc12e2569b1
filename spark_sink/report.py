"""Report: what became of one micro-batch, for logs and for whoever asked."""

from __future__ import annotations

from dataclasses import dataclass


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
        return (
            f"batch {self.batch_id} of {self.group_id!r}: {self.rows} rows, {self.dropped} dropped, {self.bytes} "
            f"bytes, {self.transactions} transactions, copy {self.copy_seconds:.3f} s, "
            f"commit {self.commit_seconds:.3f} s, all {self.batch_seconds:.3f} s"
        )
