"""Attempt: one try of one task to write its rows, in one guarded transaction. Runs on executors.

An attempt can be killed at any moment, run twice at the same time, or lose the answer to its COMMIT. It changes no
owner and resolves nothing: it reads where the ledger stands, writes what is above, and its advance matches only
if the ledger still stands there. So of two attempts one lands, and the next one starts from what has landed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]

from exactly_once._model import Partition
from exactly_once.errors import AlreadyApplied, HandlerCommitted
from exactly_once.ledger.outcome import SHORT_COUNT
from exactly_once.ledger.rows import Ledger
from exactly_once.ledger.session import Session, connector
from exactly_once.ledger.sql import query
from exactly_once.ledger.stale_owners import StaleBackendTerminator
from exactly_once.ledger.transaction import UnitOfWork
from exactly_once.writer import TableWriter
from exactly_once.writer.arrow import write_arrow

from .offset_filter import naming
from .options import Options
from .owners import BatchGrant, checked_rows, patiently, rotates_at
from .ranges import Range
from .unit import SinkUnit

REPORT = "report string"
"""The schema of what a task returns."""

ROWS, BYTES = 100_000, 16 * 1024 * 1024
"""The size of a COPY: ten thousand rows each, which is what Spark hands over, took a sixth longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What travels from the driver to the tasks of a batch."""

    options: Options
    batch_id: int
    instance: UUID
    grants: tuple[BatchGrant, ...]
    ranges: Mapping[Partition, Range]
    """What the batch covers: of partitions, or of batch ids its own."""
    columns: tuple[str, ...]
    """The columns that are written; a task sees more."""
    report: Mapping[str, Any] | None = None
    """What is written down of a batch in its transaction; None leaves it to the driver."""
    rows_a_copy: int = field(default_factory=lambda: ROWS)


@dataclass(slots=True)
class Result:
    """What an attempt did, for the driver."""

    rows: int = 0
    dropped: int = 0
    bytes: int = 0
    transactions: int = 0
    copy_seconds: float = 0.0
    commit_seconds: float = 0.0
    reached: list[tuple[str, int, int]] = field(default_factory=list)
    """Topic, partition, and the offset up to which the ledger has moved, by this attempt or one before it."""

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        numbers = asdict(self)
        del numbers["reached"]
        return numbers

    def as_batch(self) -> pa.RecordBatch:
        """Pack it as the row that a task returns."""
        return pa.RecordBatch.from_pydict({"report": [json.dumps(asdict(self))]})


class Attempt:
    """A context in which rows are written; whatever leaves it without :meth:`commit` leaves nothing behind."""

    def __init__(self, work: Work, session: Session | None = None, writer: TableWriter | None = None) -> None:
        self.work = work
        options = work.options
        self._own = Session(connector(options.conninfo), schema=options.schema, instance=work.instance)
        self.session = session or self._own
        self.ledger = Ledger(self.session, group_id=options.group_id, owner_kind="spark")
        self.unit = UnitOfWork(self.ledger)
        self.result = Result()
        self._writer = writer or writer_of(options)
        # Of another instance: its siblings are no lost connections of its own.
        self._watcher = StaleBackendTerminator(
            self.session.connect, schema=options.schema, group_id=options.group_id, instance=UUID(int=0)
        )
        self._may_have_committed = False
        self._rotates = session is not None and rotates_at(work.batch_id)  # the driver's own session

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.clear()
        try:
            if error is not None and self.unit.begun is not None and not self.unit.is_unknown:
                self.unit.roll_back()
                self._halt_if_committed(error)
        finally:
            self._watcher.close()
            self._own.close()

    def standing(self) -> dict[Partition, int]:
        """Return where the ledger stands now, after every transaction that could still move it.

        :raises Fenced: when another run owns a partition.
        :raises LedgerBehindCheckpoint: when a failover has lost what the driver had found. Token and epoch survive one.
        """
        rows = patiently(self.work.options)(checked_rows, self.ledger, self.work.grants)
        return {partition: row.next_offset or 0 for partition, row in rows.items()}

    def begin(self) -> None:
        """Open the transaction."""
        self.unit.begin()
        assert self.unit.begun is not None
        self._watcher.watch(self.unit.begun.pid)
        if self.work.options.mode == "replace":
            table = self._writer.table(self.unit.connection).identifier
            self.unit.connection.execute(query("spark_empty", "", table=table), prepare=False)

    def write(self, rows: pa.Table) -> None:
        """Write rows; the columns that say where they come from stay behind if the table lacks them."""
        if rows.num_rows == 0:
            return
        began_at = time.monotonic()
        with naming(rows):
            rows = rows.select(self.work.columns)
            write_arrow(self._writer, self.unit.connection, rows)
        self.result.copy_seconds += time.monotonic() - began_at
        self.result.rows += rows.num_rows
        self.result.bytes += rows.nbytes

    def commit(self, moves: Mapping[Partition, tuple[int, int]]) -> None:
        """Call ``in_transaction``, move the ledger, COMMIT; an attempt that another one has outrun leaves no trace.

        :raises Fenced: when another run owns a partition.
        :raises AlreadyApplied: when another attempt has landed a part; the next attempt writes the rest.
        """
        self._call_in_transaction(moves)
        grants = [each for each in self.work.grants if each.partition in moves]
        advances = [each.advance(*moves[each.partition], rotates=self._rotates) for each in grants]
        if self.work.report is not None:
            report = {**self.work.report, "row_count": self.result.rows, "dropped": 0}
            # With the COMMIT: another attempt must not wait here for one that stands still.
            self.unit.defer(query("spark_report", self.session.schema), report)
        began_at = time.monotonic()
        try:
            self.unit.commit(advances)
        except psycopg.Error as error:
            if error.sqlstate != SHORT_COUNT:
                raise
            self.unit.roll_back()
            self._judge(moves, error)
            return
        self.result.commit_seconds += time.monotonic() - began_at
        self.result.transactions += 1
        self.reached({partition: end for partition, (_, end) in moves.items()})

    def reached(self, offsets: Mapping[Partition, int]) -> None:
        """Tell the driver up to where the ledger has moved, which it compares with what it finds afterwards."""
        self.result.reached = [(*partition, offset) for partition, offset in offsets.items()]

    def _call_in_transaction(self, moves: Mapping[Partition, tuple[int, int]]) -> None:
        function = self.work.options.in_transaction
        if function is None:
            return
        self._may_have_committed = True
        connection, batch_id = self.unit.connection, self.work.batch_id
        try:
            function(SinkUnit(connection=connection, batch_id=batch_id, rows=self.result.rows, offsets=moves))
        except SystemExit as error:
            # On the driver it would end the thread whose answer Java waits for, and not the process.
            raise RuntimeError(f"in_transaction= called sys.exit({error.code})") from error

    def _judge(self, moves: Mapping[Partition, tuple[int, int]], error: psycopg.Error) -> None:
        """Tell an attempt that came second from one that is a zombie's."""
        standing = self.standing()
        landed = {p: standing[p] for p in moves}
        if any(landed[p] < end for p, (_, end) in moves.items()):
            told = ", ".join(f"{partition} {offset}" for partition, offset in landed.items())
            raise AlreadyApplied(f"another attempt of this task has moved the ledger meanwhile, to {told}") from error
        self.result = Result(dropped=self.result.dropped + self.result.rows)
        self.reached(landed)

    def _halt_if_committed(self, error: BaseException) -> None:
        """Stop the group where ``in_transaction`` has committed by itself: a retry would double what it stored."""
        if not self._may_have_committed or self.unit.outcome() != "committed":
            return
        reason = (
            "in_transaction= ended the transaction with a COMMIT of its own: rows are stored, the ledger was not moved"
        )
        self.ledger.halt([each.advance(0, 0) for each in self.work.grants], reason=reason)
        raise HandlerCommitted(f"{reason}; nothing goes on until an operator has looked") from error


def writer_of(options: Options) -> TableWriter:
    """Make the writer of the sink's table; rows that replace others are appended to the emptied table."""
    mode = "append" if options.mode == "replace" else options.mode
    return TableWriter(options.table, mode=mode, key=options.key)


def tables(batches: Iterable[pa.RecordBatch], *, rows_a_copy: int = ROWS) -> Iterator[pa.Table]:
    """Join record batches to tables of so many rows, or of :data:`BYTES`: each is one COPY."""
    joined: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        joined.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= rows_a_copy or size >= BYTES:
            yield pa.Table.from_batches(joined)
            joined, rows, size = [], 0, 0
    if joined:
        yield pa.Table.from_batches(joined)


def read_results(rows: Iterable[Any]) -> Result:
    """Add up what the tasks of a batch returned."""
    total = Result()
    for row in rows:
        for name, value in json.loads(row["report"]).items():
            setattr(total, name, getattr(total, name) + value)
    return total
