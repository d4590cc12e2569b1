"""Attempt: one try to write the rows of a batch, in one guarded transaction. Runs on executors and on the driver.

An attempt can be killed at any moment, run twice at the same time, or lose the answer to its COMMIT. It changes no
owner and resolves nothing: it reads where the ledger stands, writes what is above, and its advance matches only
if the ledger still stands there. So of two attempts one lands, and the next one starts from what has landed.

The end of a task's input proves nothing (docs/architecture.md). In one task an **end mark** comes behind all rows, in
the same iterator; in several, what an attempt commits is a prefix of each partition.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from exactly_once._log import about
from exactly_once._model import Advance, Partition
from exactly_once.errors import AlreadyApplied, HandlerCommitted
from exactly_once.ledger import claims, dead_letters
from exactly_once.ledger.outcome import SHORT_COUNT, Fault, classify
from exactly_once.ledger.retry import at_start
from exactly_once.ledger.session import Session, cursor_on, last_row
from exactly_once.ledger.sql import query
from exactly_once.ledger.transaction import UnitOfWork
from exactly_once.writer import BadRow, Column, Table, TableError, TableWriter
from exactly_once.writer.arrow import rows_of, write_arrow
from exactly_once.writer.errors import TableChanged

from .errors import IncompleteInput
from .frame import FRAME, ROW
from .options import Options
from .owners import checked_rows, rotates_at
from .ranges import OFFSET, PARTITION, PLACES, RESERVED, TOPIC, OffsetFilter, Range, naming
from .report import SinkUnit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

# The column that is 1 in the end mark, and nowhere else.
END = f"{RESERVED}end"
# By which rows are sorted that one message has.
NUMBER = f"{RESERVED}number"
# The schema of what a task returns.
REPORT = "report string"
ROWS, BYTES = 100_000, 16 * 1024 * 1024
"""The size of a COPY: ten thousand rows each, which is what Spark hands over, took a sixth longer."""
# The header of a dead letter that is a row, as JSON, and not what the broker has; its value is the table.
ROW_HEADER = "exactly_once.row_of"
# The header of a dead letter with the key that its row has to claim before it is stored after all.
CLAIM_HEADER = "exactly_once.claim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows that go into one table."""

    options: Options
    table: str
    """The full name of the table that the driver has found: a task's session may find another one."""
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
    grants: tuple[Advance, ...] = ()
    ranges: Mapping[Partition, Range] = field(default_factory=dict)
    """What the batch covers: of partitions, or of batch ids its own."""
    parts: tuple[Part, ...] = ()
    report: Mapping[str, Any] | None = None
    """What is written down of a batch in its transaction; None leaves it to the driver."""
    rows_a_copy: int = field(default_factory=lambda: ROWS)
    names: tuple[str, ...] = ()
    """What the columns are called that a task sees under numbers: pyspark's ``mapInArrow`` fails for dots in names."""


@dataclass(slots=True)
class Result:
    """What an attempt did, for the driver."""

    rows: int = 0
    dropped: int = 0
    repeated: int = 0
    ignored: int = 0
    bytes: int = 0
    transactions: int = 0
    copy_seconds: float = 0.0
    commit_seconds: float = 0.0
    reached: list[tuple[str, int, int]] = field(default_factory=list)
    """Topic, partition, and the offset up to which the ledger has moved, by this attempt or one before it."""
    set_aside: list[str] = field(default_factory=list)
    """What the dead letters are of, and why."""


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
        self._own = work.options.session(work.instance)
        self.session = session or self._own
        self.ledger = work.options.ledger_in(self.session)
        self.unit = UnitOfWork(self.ledger)
        self.result = Result()
        self.writers = writers or [part.options.writer(part.table) for part in work.parts]
        self._watcher = work.options.watcher(self.session, kin)
        self._may_have_committed = False
        # Whether the ledger's rows are rotated: on the driver, who brings writers, now and then; in tasks never.
        self._rotates = bool(writers) and rotates_at(work.batch_id)

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
                    self.ledger.halt([replace(each, expected=0) for each in self.work.grants], reason=reason)
                    raise HandlerCommitted(f"{reason}; nothing goes on until an operator has looked") from error
        finally:
            self._watcher.close()
            self._own.close()

    def standing(self) -> dict[Partition, int]:
        """Return where the ledger stands now, after every transaction that could still move it."""
        rows = self.work.options.patiently(checked_rows, self.ledger, self.work.grants)
        return {partition: row.next_offset or 0 for partition, row in rows.items()}

    def begin(self) -> None:
        """Open the transaction."""
        self.unit.begin()
        assert self.unit.begun is not None
        self._watcher.watch(self.unit.begun.pid)

    def run(self, rows: Iterable[pa.Table], standing: Mapping[Partition, int], *, is_whole: bool) -> None:
        """Write what the ledger has not, and move it: to the ends of the batch, or as far as the rows go."""
        moves = {p: (standing[p], r.end) for p, r in self.work.ranges.items() if is_whole and standing[p] < r.end}
        if is_whole and not moves:
            self.reached(standing)  # an earlier attempt has landed, and its answer was lost
            return
        self.begin()
        last = self.fill(rows, standing)
        if not is_whole:
            moves = {p: (standing[p], offset + 1) for p, offset in last.items() if offset >= standing[p]}
            if not moves:
                self.unit.roll_back()  # an earlier attempt has landed, and its answer was lost
                self.reached({partition: standing[partition] for partition in last})
                return
        self.commit(moves)

    def fill(self, rows: Iterable[pa.Table], standing: Mapping[Partition, int]) -> Mapping[Partition, int]:
        """Write what the ledger has not; return the highest offset that the first table was given of each partition."""
        work = self.work
        # What transaction="partition" would refuse in a large batch, it refuses in a small one.
        strictly = work.options.transaction == "partition"
        offsets = [
            OffsetFilter(standing, work.ranges, strictly=strictly, claim=p.options.claim) if p.has_places else None
            for p in work.parts
        ]
        for part, writer in zip(work.parts, self.writers, strict=True):
            table = self.locked(writer)
            if part.options.mode == "replace":
                if table.has_row_security:
                    raise TableError(
                        f"{table}: row security decides which rows this role deletes, so mode='replace' could "
                        "leave some, and add new ones. Use a role to which no policy applies (BYPASSRLS, the owner)"
                    )
                emptying = query("spark_empty", "", table=table.identifier)
                if last_row(cursor_on(self.unit.connection).execute(emptying, prepare=False)) == (True,):
                    raise TableError(
                        f"{table}: rows are left behind DELETE, so mode='replace' would add to them: a "
                        "rule or a trigger keeps them, or another program has just written some. Drop it"
                    )
        for together in rows:
            for number, some in split(together, work.parts):
                known = offsets[number]
                self.write(some if known is None else known.keep(some), number)
        self.result.dropped = sum(known.dropped for known in offsets if known is not None)
        return {} if offsets[0] is None else offsets[0].last

    def locked(self, writer: TableWriter) -> Table:
        """Lock a table as who writes does, for as long as it takes, as where an index is made; a wait is logged."""
        what, group_id = f"the lock of table {writer.name}", self.work.options.group_id
        # A transaction has one try.
        return at_start(partial(writer.table, self.unit.connection), seconds=0, what=what, group_id=group_id)

    def write(self, rows: pa.Table, number: int = 0) -> None:
        """Write rows of one part; the columns that say where they come from stay behind if the table lacks them.

        :raises BadRow: with its topic, partition and offset, unless bad rows are set aside.
        """
        if rows.num_rows == 0:
            return
        began_at, part = time.monotonic(), self.work.parts[number]
        sets_aside = part.has_places and part.options.on_bad_row == "dead-letter"
        todo, doubted = [rows], None
        while todo:
            some = todo.pop()
            kept, stored, ignored = some, 0, self.writers[number].ignored_rows
            try:
                with self.unit.connection.transaction():  # what cannot be stored has claimed nothing
                    if part.options.claim is not None:
                        with naming(some):
                            kept = self._first(some, part.options.claim, number)
                    if kept.num_rows:
                        with naming(kept):
                            stored = write_arrow(self.writers[number], self.unit.connection, kept.select(part.columns))
                            # It may be another one than the driver has looked at when the run began.
                            self.writers[number].table(self.unit.connection, locks=False).refuse_unlogged()
            except TableChanged:
                # A value that does not fit or an altered table: only a COPY, by which the writer goes now, tells which.
                if doubted is some:
                    raise
                doubted = some
                todo.append(some)
            except BadRow as error:
                if some.num_rows == 1:
                    if not sets_aside:
                        raise
                    self._set_aside(number, some, rows, error)
                    continue
                # In their order, whichever row it was: in an upsert the last one wins. It may be none of them: a value
                # that must be unique goes from row to row, and COPY and merge go by the order of keys.
                bad = error.row if kept is some else None  # else it counts only those that were left
                middle = some.num_rows // 2
                cuts = (0, middle, some.num_rows) if bad is None else (0, bad, bad + 1, some.num_rows)
                pieces = [some.slice(cut, end - cut) for cut, end in itertools.pairwise(cuts)]
                todo += [piece for piece in reversed(pieces) if piece.num_rows]
            else:
                # What else than an append counts is rows that were touched, twice where a key comes twice.
                self.result.rows += stored if self.writers[number].mode == "append" else kept.num_rows
                self.result.repeated += some.num_rows - kept.num_rows
                self.result.ignored += self.writers[number].ignored_rows - ignored
                self.result.bytes += kept.nbytes
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
                stored = self.result.rows - self.result.ignored
                function(SinkUnit(connection=connection, batch_id=batch_id, rows=stored, offsets=dict(moves)))
            except SystemExit as error:
                # On the driver it would end the thread whose answer Java waits for, and not the process.
                raise RuntimeError(f"in_transaction= called sys.exit({error.code})") from error
        advances = [
            replace(each, expected=moves[p][0], next_offset=moves[p][1], rotates=self._rotates)
            for each in self.work.grants
            if (p := each.partition) in moves
        ]
        if self.work.report is not None:
            done = {"row_count": self.result.rows, "dropped": self.result.dropped}
            report = {"group_id": self.work.options.group_id, **self.work.report, **done}
            # With the COMMIT: another attempt must not wait here for one that stands still.
            self.unit.defer(query("spark_report", self.session.schema), report)
        began_at = time.monotonic()
        try:
            self.unit.commit(advances)
        except psycopg.Error as error:
            if error.sqlstate != SHORT_COUNT:
                is_by_data = classify(error, connection_lost=self.unit.is_lost) is Fault.HANDLER
                if not (is_by_data and self.unit.is_unknown):
                    raise
                # All before COMMIT has passed.
                tables = ", ".join(str(part.options.table) for part in self.work.parts)
                places = [f"{p} offsets {a} to {b - 1}" for p, (a, b) in moves.items() if not p.counts_batches]
                raise type(error)(
                    f"batch {self.work.batch_id} of {self.work.options.group} into {tables}: COMMIT, at which deferred "
                    f"constraints are checked, refuses {', '.join(places) or 'its rows'}: {error}"
                ) from error
            self.unit.roll_back()
            standing = self.standing()  # or it is a zombie's
            landed = {p: standing[p] for p in moves}
            if any(landed[p] < end for p, (_, end) in moves.items()):
                told = ", ".join(f"{partition} {offset}" for partition, offset in landed.items())
                raise AlreadyApplied(f"another attempt of this task has moved the ledger, to {told}") from error
            # What this one has found claimed was claimed by the one that has landed, or by an earlier batch.
            self.result = Result(dropped=self.result.dropped + self.result.rows + self.result.repeated)
            self.reached(landed)
            return
        self.result.commit_seconds += time.monotonic() - began_at
        self.result.transactions += 1
        self.reached({partition: end for partition, (_, end) in moves.items()})

    def reached(self, offsets: Mapping[Partition, int]) -> None:
        """Tell the driver up to where the ledger has moved, which it compares with what it finds afterwards."""
        self.result.reached = [(*partition, offset) for partition, offset in offsets.items()]

    def _first(self, rows: pa.Table, claim: str, number: int) -> pa.Table:
        """Claim the keys of rows; return those that are the first of their event, and the table itself if all are."""
        keys = [key for (key,) in rows_of(rows.select([claim]))]
        if (none := next((row for row, key in enumerate(keys) if key in (None, "")), None)) is not None:
            raise BadRow(f"the key to claim is text or a whole number, not {keys[none]!r}", row=none, column=claim)
        table = self.writers[number].table(self.unit.connection)
        named = [_claimed(table, key) for key in keys]
        answers = claims.claim(self.unit.connection, named, **asdict(self.work.options.group))
        # All are, mostly, and a filter copies all values.
        return rows if all(answers) else rows.filter(pa.array(answers))

    def _set_aside(self, number: int, row: pa.Table, among: pa.Table, error: BadRow) -> None:
        """Keep a row as a dead letter, in the transaction that skips it."""
        part = self.work.parts[number]
        headers: list[tuple[str, str | bytes | None]] = [(ROW_HEADER, str(part.options.table).encode())]
        table = self.writers[number].table(self.unit.connection, locks=False)
        if (claim := part.options.claim) is not None and (key := _shown(row.column(claim)[0])) not in (None, ""):
            headers.append((CLAIM_HEADER, _claimed(table, key).encode()))
        columns = {column.name: column for column in table.columns}
        fields = [f"{json.dumps(name)}: {_in_json(row.column(name)[0], columns.get(name))}" for name in part.columns]
        topic, partition, offset = (row.column(name)[0].as_py() for name in (TOPIC, PARTITION, OFFSET))
        of_partition = pc.and_(pc.equal(among.column(TOPIC), topic), pc.equal(among.column(PARTITION), partition))
        before = among.filter(pc.and_(of_partition, pc.less(among.column(OFFSET), offset))).column(OFFSET)
        message = Message(
            topic=topic,
            partition=partition,
            offset=offset,
            value=f"{{{', '.join(fields)}}}".encode(),
            headers=headers,
            timestamp=(TIMESTAMP_NOT_AVAILABLE, 0),
        )
        (grant,) = (each for each in self.work.grants if each.partition == (topic, partition))
        where = asdict(part.options.group)
        dead_letters.store(
            self.unit.connection,
            message,
            error,
            advance=grant,
            # Of rows the stream may have dropped nothing is known: the one before is the next lower of its COPY.
            after_offset=(pc.max(before).as_py() if len(before) else offset - 1) + 1,
            attempts=1,
            once=False,
            **where,
        )
        limit = part.options.dead_letter_limit or dead_letters.DeadLetterLimit()
        dead_letters.enforce(limit, self.unit.connection, message, **where)
        self.result.set_aside.append(str(error))


def _claimed(table: Table, key: str | int) -> str:
    """Name a key as the sink command does, so that both know each other's."""
    return f"{table} {json.dumps(key)}"


def log_set_aside(group_id: str, dead_letters: Iterable[str]) -> None:
    """Name each row that was stored as a dead letter, once it is."""
    for each in dead_letters:
        logger.error("a row is a dead letter: %s", each, extra=about("set_aside", group=group_id))


def read_results(rows: Iterable[Any]) -> Result:
    """Add up what the tasks of a batch returned."""
    total = Result()
    for row in rows:
        for name, value in json.loads(row["report"]).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def _shown(value: Any) -> Any:
    """Return a value as Python has it; what it cannot hold, such as a far year, by Arrow's own words."""
    try:
        found = value.as_py(maps_as_pydicts="strict")
    except UnicodeDecodeError:  # Spark makes text of any bytes; these stay what they are in JSON, and in Python's str
        return value.cast(pa.binary()).as_py().decode(errors="surrogateescape")
    except (ValueError, OverflowError, KeyError):
        return str(value.cast(pa.string()))
    return json.dumps(found) if isinstance(found, float) and not math.isfinite(found) else found


def _in_json(value: Any, column: Column | None) -> str:
    """Write a value as the sink command reads it for this column, so that it replays the row unchanged."""
    if value.is_valid and (pa.types.is_list(value.type) or pa.types.is_large_list(value.type)):
        return f"[{', '.join(_in_json(each, column and column.element) for each in value.values)}]"
    found, kind = _shown(value), column and column.base_name
    if pa.types.is_decimal(value.type) and kind in ("real", "double precision") and found is not None:
        return str(found)  # for these a number in text is none
    if isinstance(found, bytes):
        if kind == "bytea":
            found = base64.b64encode(found).decode()
        elif kind == "uuid" and len(found) == 16:
            found = str(UUID(bytes=found))
        else:
            found = found.decode(errors="surrogateescape")
    text = json.dumps(found, default=str)
    if kind in ("json", "jsonb") and isinstance(found, str):
        # JSON within the row, not text that holds it. What is no JSON, which int() says of NaN, makes none of the row,
        # so that it is refused again: as text it would be stored.
        try:
            json.loads(found.encode(), parse_constant=int, parse_int=str, parse_float=str)
        except (ValueError, RecursionError):
            return f"no JSON: {text}"
        return found
    return text


def to_one_task(frame: DataFrame, *, order: Sequence[str]) -> DataFrame:
    """Bring all rows to one task, in this order, the end mark behind them."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - executors do without

    rows = frame.withColumn(END, F.lit(0))
    if order:
        # Rows that an explode makes of a message stay in their order: a sort that spills keeps none among equals.
        numbered = rows.withColumn(NUMBER, F.monotonically_increasing_id()).repartition(1)
        rows = numbered.sortWithinPartitions(*order, NUMBER).drop(NUMBER)
    nothing = [F.lit(None).cast(f.dataType).alias(f.name) for f in frame.schema.fields]
    mark = frame.sparkSession.range(0, 1, 1, 1).select(*nothing, F.lit(1).alias(END))
    # One after the other in one task; a sort with the mark as its last row would hold up all of them.
    return (rows if order else rows.repartition(1)).union(mark).coalesce(1)


def to_tasks(frame: DataFrame, partitions: Sequence[Partition]) -> DataFrame:
    """Send the rows of each of these partitions to a task of its own, in the order of their offsets; others anywhere.

    For each partition rows are hashed by a number that Spark's hash sends to its own task: by topic and number
    themselves, twelve partitions would keep seven or eight of twelve tasks busy. How many tasks is said, because
    adaptive execution leaves only such a shuffle as it is.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - executors do without

    count = len(partitions)
    # To which task Spark's hash sends each number: with 32 numbers for each task none is left without one.
    sent = frame.sparkSession.sql(f"SELECT transform(sequence(0, {32 * count}), n -> pmod(hash(n), {count}))").collect()
    keys = {task: key for key, task in enumerate(sent[0][0])}
    topics: dict[str, dict[int, int]] = {}
    for task, partition in enumerate(partitions):
        topics.setdefault(partition.topic, {})[partition.number] = keys[task]
    cases = [
        f"WHEN {TOPIC} = '{topic}' THEN try_element_at(array("  # Kafka allows no quotes in names of topics
        + ", ".join(str(numbers.get(n, 0)) for n in range(max(numbers) + 1))
        + f"), {PARTITION} + 1)"
        for topic, numbers in topics.items()
    ]
    number = F.expr(f"coalesce(CASE {' '.join(cases)} END, 0)")
    return frame.repartition(count, number).sortWithinPartitions(OFFSET)


def write_task(work: Work, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Do what a task does: the whole batch or nothing of it, or what comes of some partitions.

    Return one row that tells what was done; none where no row came.
    """
    is_whole = work.options.transaction == "batch"
    stream = (table for table in tables(batches, rows_a_copy=work.rows_a_copy) if is_whole or table.num_rows)
    if work.names:
        stream = (table.rename_columns(list(work.names)) for table in stream)
    # No transaction stands open while rows are still read and sorted.
    first = list(itertools.islice(stream, 1))
    if not (first or is_whole):
        return
    rows = itertools.chain(first, stream)
    with Attempt(work) as attempt:
        attempt.run(up_to_mark(rows) if is_whole else rows, attempt.standing(), is_whole=is_whole)
    yield pa.RecordBatch.from_pydict({"report": [json.dumps(asdict(attempt.result))]})


def write_here(
    work: Work, rows: pa.Table, session: Session, writers: Sequence[TableWriter], standing: Mapping[Partition, int]
) -> Result:
    """Write the rows of a small batch on the driver, whose action has brought all of them or raised.

    ``standing`` is where the ledger stood before; an advance from anywhere else matches nothing.
    """
    rows = rows.sort_by(OFFSET) if OFFSET in rows.column_names else rows
    with Attempt(work, session, writers) as attempt:
        attempt.run([rows], standing, is_whole=True)
    return attempt.result


def split(rows: pa.Table, parts: Sequence[Part]) -> Iterator[tuple[int, pa.Table]]:
    """Return the rows of each table by themselves; of one table they come as they are."""
    if len(parts) == 1:
        yield 0, rows
        return
    for number, part in enumerate(parts):
        some = rows.filter(pc.equal(rows.column(FRAME), number))
        if some.num_rows:
            row = some.column(f"{ROW}{number}")
            columns = dict(zip((field.name for field in row.type), row.flatten(), strict=True))
            places = {name: some.column(name) for name in PLACES if part.has_places}
            yield number, pa.table(columns | places)


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


def up_to_mark(stream: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows in front of the end mark."""
    seen = 0
    for table in stream:
        marks = pc.sum(table.column(END)).as_py() or 0
        rows = table.slice(0, table.num_rows - marks)
        if (seen and table.num_rows) or pc.sum(rows.column(END)).as_py():
            raise IncompleteInput("rows came behind the end mark of this batch: Spark has not kept them in order")
        seen += marks
        yield rows
    if seen == 1:
        return
    raise IncompleteInput(
        "the rows of this batch ended before their end mark: the attempt was killed, or what feeds it failed. "
        "Nothing of it was kept; Spark runs it again"
    )
