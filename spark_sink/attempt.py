"""Attempt: one try to write the rows of a batch, in one guarded transaction. Runs on executors and on the driver.

An attempt can be killed at any moment, run twice at the same time, or lose the answer to its COMMIT. It changes no
owner and resolves nothing: it reads where the ledger stands, writes what is above, and its advance matches only
if the ledger still stands there. So of two attempts one lands, and the next one starts from what has landed.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from exactly_once._model import Partition
from exactly_once.errors import AlreadyApplied, HandlerCommitted
from exactly_once.ledger import dead_letters
from exactly_once.ledger.outcome import SHORT_COUNT
from exactly_once.ledger.rows import Ledger
from exactly_once.ledger.session import Session, connector
from exactly_once.ledger.sql import query
from exactly_once.ledger.stale_owners import StaleBackendTerminator
from exactly_once.ledger.transaction import UnitOfWork
from exactly_once.writer import BadRow, TableWriter
from exactly_once.writer.arrow import write_arrow

from .offset_filter import OFFSET, PARTITION, TOPIC, naming
from .options import Options
from .owners import BatchGrant, checked_rows, patiently, rotates_at
from .ranges import Range
from .report import SinkUnit

# The schema of what a task returns.
REPORT = "report string"
ROWS, BYTES = 100_000, 16 * 1024 * 1024
"""The size of a COPY: ten thousand rows each, which is what Spark hands over, took a sixth longer."""
# The header of a dead letter that is a row, as JSON, and not what the broker has; its value is the table.
ROW_HEADER = "exactly_once.row_of"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows that go into one table."""

    options: Options
    columns: tuple[str, ...]
    """The columns that are written; a task sees more."""
    has_places: bool
    """Whether rows say which message they came from, so that the ledger can tell what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What travels from the driver to the tasks of a batch."""

    options: Options
    batch_id: int
    instance: UUID
    grants: tuple[BatchGrant, ...] = ()
    ranges: Mapping[Partition, Range] = field(default_factory=dict)
    """What the batch covers: of partitions, or of batch ids its own."""
    parts: tuple[Part, ...] = ()
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
    set_aside: list[str] = field(default_factory=list)
    """What the dead letters are of, and why."""

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        numbers = asdict(self) | {"dead_letters": len(self.set_aside)}
        del numbers["reached"], numbers["set_aside"]
        return numbers

    def as_batch(self) -> pa.RecordBatch:
        """Pack it as the row that a task returns."""
        return pa.RecordBatch.from_pydict({"report": [json.dumps(asdict(self))]})


class Attempt:
    """A context in which rows are written; whatever leaves it without :meth:`commit` leaves nothing behind.

    ``session`` and ``writers`` are the driver's, who keeps them from batch to batch. ``kin`` is the instance whose
    other backends pass for lost connections of this attempt's own; by default none do, as siblings are alive.
    """

    def __init__(
        self,
        work: Work,
        session: Session | None = None,
        writers: Sequence[TableWriter] = (),
        *,
        kin: UUID = UUID(int=0),  # noqa: B008 - it does not change
    ) -> None:
        # The publication learns grants and parts within its transaction, and puts them in then.
        self.work = work
        options = work.options
        self._own = Session(connector(options.conninfo), schema=options.schema, instance=work.instance)
        self.session = session or self._own
        self.ledger = Ledger(self.session, group_id=options.group_id, owner_kind="spark")
        self.unit = UnitOfWork(self.ledger)
        self.result = Result()
        self.writers = writers or [writer_of(target) for target in [part.options for part in work.parts] or [options]]
        self._watcher = StaleBackendTerminator(
            self.session.connect, schema=options.schema, group_id=options.group_id, instance=kin
        )
        self._may_have_committed = False
        # Whether the ledger's rows are rotated: on the driver now and then, in tasks never.
        self.rotates = session is not None and rotates_at(work.batch_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.clear()
        try:
            if error is not None and self.unit.begun is not None and not self.unit.is_unknown:
                self.unit.roll_back()
                # Where in_transaction= has committed by itself a retry would double what it stored.
                if self._may_have_committed and self.unit.outcome() == "committed":
                    reason = (
                        "in_transaction= ended the transaction with a COMMIT of its own: rows are stored, the ledger "
                        "was not moved"
                    )
                    self.ledger.halt([each.advance(0, 0) for each in self.work.grants], reason=reason)
                    raise HandlerCommitted(f"{reason}; nothing goes on until an operator has looked") from error
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

    def empty(self) -> None:
        """Delete what is in the tables that this batch replaces."""
        for part, writer in zip(self.work.parts, self.writers, strict=True):
            if part.options.mode == "replace":
                table = writer.table(self.unit.connection).identifier
                self.unit.connection.execute(query("spark_empty", "", table=table), prepare=False)

    def write(self, rows: pa.Table, number: int = 0) -> None:
        """Write rows of one part; the columns that say where they come from stay behind if the table lacks them.

        :raises BadRow: with its topic, partition and offset, unless bad rows are set aside.
        """
        if rows.num_rows == 0:
            return
        began_at, part = time.monotonic(), self.work.parts[number]
        sets_aside = part.has_places and part.options.on_bad_row == "dead-letter"
        todo = [rows]
        while todo:
            some = todo.pop()
            try:
                if not sets_aside:
                    self._store(some, number)
                else:
                    with self.unit.connection.transaction():  # a savepoint
                        self._store(some, number)
            except BadRow as error:
                if not sets_aside:
                    raise
                if some.num_rows == 1:
                    self._set_aside(part, some, rows, error)
                    continue
                # In their order, whichever row it was: in an upsert the last one wins.
                middle = some.num_rows // 2
                cuts = (0, middle, some.num_rows) if error.row is None else (0, error.row, error.row + 1, some.num_rows)
                pieces = [some.slice(cut, end - cut) for cut, end in itertools.pairwise(cuts)]
                todo += [piece for piece in reversed(pieces) if piece.num_rows]
            else:
                self.result.rows += some.num_rows
                self.result.bytes += some.nbytes
        self.result.copy_seconds += time.monotonic() - began_at

    def commit(self, moves: Mapping[Partition, tuple[int, int]]) -> None:
        """Call ``in_transaction``, move the ledger, COMMIT; an attempt that another one has outrun leaves no trace.

        :raises Fenced: when another run owns a partition.
        :raises AlreadyApplied: when another attempt has landed a part; the next attempt writes the rest.
        """
        if (function := self.work.options.in_transaction) is not None:
            self._may_have_committed = True
            connection, batch_id = self.unit.connection, self.work.batch_id
            try:
                function(SinkUnit(connection=connection, batch_id=batch_id, rows=self.result.rows, offsets=moves))
            except SystemExit as error:
                # On the driver it would end the thread whose answer Java waits for, and not the process.
                raise RuntimeError(f"in_transaction= called sys.exit({error.code})") from error
        grants = [each for each in self.work.grants if each.partition in moves]
        advances = [each.advance(*moves[each.partition], rotates=self.rotates) for each in grants]
        if self.work.report is not None:
            report = {**self.work.report, "row_count": self.result.rows, "dropped": self.result.dropped}
            # With the COMMIT: another attempt must not wait here for one that stands still.
            self.unit.defer(query("spark_report", self.session.schema), report)
        began_at = time.monotonic()
        try:
            self.unit.commit(advances)
        except psycopg.Error as error:
            if error.sqlstate != SHORT_COUNT:
                raise
            self.unit.roll_back()
            standing = self.standing()  # or it is a zombie's
            landed = {p: standing[p] for p in moves}
            if any(landed[p] < end for p, (_, end) in moves.items()):
                told = ", ".join(f"{partition} {offset}" for partition, offset in landed.items())
                raise AlreadyApplied(f"another attempt of this task has moved the ledger, to {told}") from error
            self.result = Result(dropped=self.result.dropped + self.result.rows)
            self.reached(landed)
            return
        self.result.commit_seconds += time.monotonic() - began_at
        self.result.transactions += 1
        self.reached({partition: end for partition, (_, end) in moves.items()})

    def reached(self, offsets: Mapping[Partition, int]) -> None:
        """Tell the driver up to where the ledger has moved, which it compares with what it finds afterwards."""
        self.result.reached = [(*partition, offset) for partition, offset in offsets.items()]

    def _store(self, rows: pa.Table, number: int) -> None:
        with naming(rows):
            columns = self.work.parts[number].columns
            write_arrow(self.writers[number], self.unit.connection, rows.select(columns))

    def _set_aside(self, part: Part, row: pa.Table, among: pa.Table, error: BadRow) -> None:
        """Keep a row as a dead letter, in the transaction that skips it.

        :raises TooManyDeadLetters: when it is hardly the row's fault.
        """
        topic, partition, offset = (row.column(name)[0].as_py() for name in (TOPIC, PARTITION, OFFSET))
        of_partition = pc.and_(pc.equal(among.column(TOPIC), topic), pc.equal(among.column(PARTITION), partition))
        before = among.filter(pc.and_(of_partition, pc.less(among.column(OFFSET), offset))).column(OFFSET)
        message = Message(
            topic=topic,
            partition=partition,
            offset=offset,
            value=json.dumps({name: _shown(row.column(name)[0]) for name in part.columns}, default=str).encode(),
            headers=[(ROW_HEADER, str(part.options.table).encode())],
            timestamp=(TIMESTAMP_NOT_AVAILABLE, 0),
        )
        (grant,) = (each for each in self.work.grants if each.partition == (topic, partition))
        where = {"schema": self.session.schema, "group_id": part.options.group_id}
        dead_letters.store(
            self.unit.connection,
            message,
            error,
            advance=grant.advance(0, 0),
            # Of rows the stream may have dropped nothing is known: the one before is the next lower of its COPY.
            after_offset=(pc.max(before).as_py() if len(before) else offset - 1) + 1,
            attempts=1,
            **where,
        )
        limit = part.options.dead_letter_limit or dead_letters.DeadLetterLimit()
        dead_letters.enforce(limit, self.unit.connection, message, **where)
        self.result.set_aside.append(str(error))


def writer_of(options: Options) -> TableWriter:
    """Make the writer of one table; rows that replace others are appended to the emptied table."""
    assert options.table is not None
    mode = "append" if options.mode == "replace" else options.mode
    return TableWriter(options.table, mode=mode, key=options.key, add=options.add)


def read_results(rows: Iterable[Any]) -> Result:
    """Add up what the tasks of a batch returned."""
    total = Result()
    for row in rows:
        for name, value in json.loads(row["report"]).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def _shown(value: Any) -> Any:
    """Return a value as JSON can have it; what Python cannot hold, such as a far year, by Arrow's own words."""
    try:
        found = value.as_py(maps_as_pydicts="strict")
    except (ValueError, OverflowError, KeyError):
        return str(value.cast(pa.string()))
    return found.hex() if isinstance(found, bytes) else found
