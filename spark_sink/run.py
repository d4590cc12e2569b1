"""Run: what the driver does for each micro-batch of one run of a query."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from exactly_once._log import about
from exactly_once._model import Partition
from exactly_once.errors import ConfigurationError
from exactly_once.ledger.migrate import check, refuse_lost
from exactly_once.ledger.retry import is_unavailable
from exactly_once.ledger.rows import LOCK_SECONDS
from exactly_once.writer import Table, TableWriter
from exactly_once.writer.table import read_shape

from .attempt import (
    REPORT,
    Part,
    Result,
    Work,
    log_set_aside,
    read_results,
    to_one_task,
    to_tasks,
    write_here,
    write_task,
)
from .define import define, log, new_columns
from .errors import FrameError, LedgerBehindCheckpoint, RowsOutOfOrder
from .frame import combine, fit, has_places, match
from .offset_log import GIVE, Failure, OffsetLog, reader
from .options import Options
from .owners import IF_MADE_AGAIN, Claim, Owners, ask, claim, tell_odd
from .ranges import KEPT, OFFSET, Range, not_written, one_batch, over_skipped, refuse_older, remaining
from .report import BatchReport
from .stream_query import StreamQuery, refuse_kept_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)

# What the driver collects at most, in its Java and its Python: as much as a task sends in one COPY.
SMALL_BYTES = 16 << 20

# The runs of this driver, whose queries may have ended.
_runs: weakref.WeakSet[Run] = weakref.WeakSet()
_lock = threading.Lock()


class Run:
    """One run: its connection, what it owns, and the batches that it writes."""

    def __init__(self, options: Options, query: StreamQuery | None, spark: SparkSession) -> None:
        self._options = options
        # What travels to the executors.
        self._sent = replace(options, on_report=None, kafka=None)
        self.query = query
        location = options.checkpoint_location or (None if query is None else query.checkpoint())
        if location is None:
            raise ConfigurationError(
                "Spark does not tell which query is calling, as over Spark Connect; give checkpoint_location=, the "
                "same as the query's option checkpointLocation"
            )
        storage = reader(location, spark)
        self._log = OffsetLog(location, storage, storage.write)
        # Spark's names of a query: one for its checkpoint, one for this start of it. Spark Connect tells neither.
        self.query_id = self._log.query_id()
        self.run_id = None if query is None else query.run_id
        # The calling query's own, or of all of the session, where Spark tells no more.
        possible = [str(each.id) for each in spark.streams.active] if query is None else [query.query_id]
        if self.query_id not in possible:
            raise ConfigurationError(
                f"checkpoint_location={location!r} belongs to query {self.query_id}, this is query "
                f"{' or '.join(possible) or 'of another session'}; {'' if query is None else 'leave it out, or '}{GIVE}"
            )
        # Calls what opens a transaction of its own, and waits for a database that is away.
        self._patiently = options.patiently
        self._session = options.session()
        self._short = partial(self._session.ledger_transaction, lock_timeout_seconds=LOCK_SECONDS)
        self._watcher = options.watcher(self._session, self._session.instance)
        self._ledger = options.ledger_in(self._session, self.query_id, self._watcher.acquiring)
        self._counts = options.ledger == "batch-id"
        starter = options.starter(self._ledger)
        self._owners = Owners(self._ledger, starter=starter, counts=self._counts)
        ends = ExitStack()
        ends.callback(self._session.close)
        ends.callback(self._watcher.close)
        if starter is not None:
            ends.callback(starter.close)
        # Queries end without telling their sink, which may live on: whoever comes next closes what they have left.
        self.close = weakref.finalize(self, ends.close)
        with _lock:
            for run in _runs:
                run.close_ended()
            _runs.add(self)
        # By its name what is known of each table: options, writer, itself, its key; empty before the first batch.
        self._tables: dict[str, tuple[Options, TableWriter, Table, tuple[str, ...]]] = {}
        # Of the last batch that was written; 0 until one was, when Spark's own limit of results is what guards.
        self._bytes_an_offset = 0.0
        self._known = Claim(is_known_query=True, has_others=False)

    def write(self, frames: Mapping[str, DataFrame], batch_id: int) -> BatchReport:
        """Write a batch, or find that it was written."""
        began_at = time.monotonic()
        if self.query is None:
            self._log.refuse_done(batch_id)
        try:
            frame, parts = self._fit(frames)
            result = self._write(frame, parts, batch_id)
        except psycopg.Error as error:
            refuse_lost(self._session, error)
            raise
        ends = None if self._counts else self._log.ends(batch_id)
        self._log.note(self._options.group_id, batch_id, ends or {})
        done = result or Result()
        numbers = asdict(done)
        del numbers["reached"], numbers["set_aside"]
        report = BatchReport(
            group_id=self._options.group_id,
            query_id=self.query_id,
            run_id=self.run_id,
            batch_id=batch_id,
            is_replay=result is None,
            batch_seconds=time.monotonic() - began_at,
            dead_letters=len(done.set_aside),
            **numbers,
        )
        log_set_aside(self._options.group_id, done.set_aside)
        if not self._counts:  # or it was written down in the transaction of the batch; nothing rests on it
            with suppress(psycopg.Error):
                self._ask("spark_report", **self._report(batch_id), row_count=report.rows, dropped=report.dropped)
        return report

    def note_failure(self, batch_id: int, error: BaseException, *, is_counted: bool = False) -> None:
        """Write down, beside the checkpoint, that a batch failed; its error is raised also where that cannot be.

        ``is_counted`` is of a call that was refused behind one that has written the batch.
        """
        try:
            ends: Mapping[Partition, int] = {Partition.of_query(self.query_id): batch_id + 1}
            if not self._counts:
                with suppress(ConfigurationError):  # where that is what failed
                    ends = self._log.ends(batch_id) or {}
            told = str(error).strip().splitlines() or [""]
            # What a task has raised stands at the end of its trace.
            line = told[-1 if any("Traceback" in each for each in told) else 0]
            failure = Failure(batch_id, f"{type(error).__name__}: {line}", dict(ends), is_counted)
            # Whoever catches the error may say nothing of it, and the batch that would be refused may not come.
            extra = about("batch_failed", group=self._options.group_id) | {"batch_id": batch_id}
            logger.error("batch %s of %s has failed: %s", batch_id, self._options.group, failure.error, extra=extra)
            self._log.note_failure(self._options.group_id, failure)
            with _lock:
                for run in _runs:  # of another sink of the group, which writes the next batch perhaps
                    if run is not self and run.query_id == self.query_id:
                        run._log.forget(self._options.group_id)  # noqa: SLF001 - of this class
        except Exception:
            said = "batch %s failed, and that cannot be written beside its checkpoint"
            logger.exception(said, batch_id, extra=about("failure_not_noted", group=self._options.group_id))
            raise error  # noqa: B904 - what failed behind it is its context

    def release(self) -> None:
        """Give back what is owned, over a connection of its own: a batch may be at work on the other one."""
        with closing(self._options.session()) as session:
            self._owners.release(self._options.ledger_in(session))
        self.close_ended()

    def close_ended(self) -> None:
        """Close the connections if the query has ended."""
        if self.query is not None and not self.query.is_active:
            self.close()

    def _fit(self, frames: Mapping[str, DataFrame]) -> tuple[DataFrame, tuple[Part, ...]]:
        """Compare frames with their tables; if one is altered after that, tasks find out."""
        options, is_first = self._options, not self._tables
        stateful: list[str] = []
        if is_first or options.transaction == "partition":
            # In parallel each time: the user's function may do something else.
            stateful = self._log.stateful() if self.query is None else self.query.stateful()
            refuse_kept_rows(stateful, options)
            if self.query is not None and options.transaction == "partition":
                self.query.refuse_choosing(next(iter(frames.values())), stateful)
        schemas = {name: frame.schema for name, frame in frames.items()}
        if (
            is_first
            or any(new_columns(each, *self._tables[name][::2]) for name, each in schemas.items())
            or self._patiently(self._is_altered)
        ):
            self._patiently(self._look_at_tables, schemas, stateful)
        parts, fitted = [], []
        for name, frame in frames.items():
            target, _, table, key = self._tables[name]
            prepared, columns = fit(frame, table, target, key)
            is_placed = has_places(frame.schema, target)
            parts.append(Part(options=target, table=str(table), columns=columns, has_places=is_placed))
            fitted.append(prepared)
        return combine(fitted), tuple(parts)

    def _is_altered(self) -> bool:
        tables = [table for _, _, table, _ in self._tables.values()]
        return any(read_shape(self._session.connection, table.identifier) != table.shape for table in tables)

    def _look_at_tables(self, schemas: Mapping[str, StructType], stateful: list[str]) -> None:
        if not self._tables:
            check(self._session.connection, self._options.schema)
        with self._short() as (connection, pid), self._watcher.acquiring(pid, ()):
            found, executed = {}, []
            for target in self._sent.targets:
                schema = schemas.get(str(target.table))
                executed += define(connection, target, schema)
                # By its full name from here on: the next session may look in other schemas.
                writer = target.writer(str(target.writer().table(connection, locks=False)))
                table = writer.table(connection, locks=False)  # the tasks look again before they write
                table.refuse_unlogged()
                key = writer.key(connection)
                if schema is not None:
                    match(schema, table, target, key)  # or nothing is defined
                found[str(target.table)] = target, writer, table, key
            tables = [table for _, _, table, _ in found.values()]
            known = claim(connection, self._options, tables, self.query_id, stateful)
            tell_odd(connection, self._options, tables, has_written=any(known))
        log(self._options, executed, has_written=any(known))
        if not self._tables:
            self._known = known
        self._tables = found

    def _take(self, batch_id: int) -> tuple[list[Range], list[Range], dict[Partition, int]]:
        """Own what a batch covers; return that, what of it is still to be written, and where the ledger stands.

        :raises LedgerBehindCheckpoint: where an earlier batch is missing.
        """
        group, group_id, row = self._options.group, self._options.group_id, Partition.of_query(self.query_id)
        mark, known = self._log.mark(group_id), self._known
        ranges = one_batch(row, batch_id) if self._counts else self._log.ranges(batch_id)
        written = mark.offsets
        if self._counts:
            written = {} if mark.batch_id is None else {row: mark.batch_id + 1}
        elif mark.batch_id is not None and mark.batch_id < batch_id:  # else it may be an older copy of the checkpoint
            self._patiently(self._owners.check_returned, ranges, written)
        failure = mark.failure if mark.failure is not None and mark.failure.batch_id < batch_id else None
        if failure is not None:
            if failure.is_counted:  # the ledger does not show it, and there is nothing to come again: said once
                self._log.settle_failure(group_id, replace_by=failure._replace(is_counted=False))
                raise ConfigurationError(
                    f"{group}: batch {failure.batch_id} was written but for a call that was refused, whose "
                    "error the function that foreachBatch was given has caught. The rows of that call are not in the "
                    f"table, and do not come again. The error was {failure.error}. Start the query again to go on "
                    "without them; to write them read the offsets of that batch by a query with another group_id"
                )
            written = failure.ends
            # A partition that the query does not read any more is looked at as well.
            gone = {p for p in written if p.counts_batches == self._counts} - {r.partition for r in ranges}
            ranges += [Range(partition=p, start=written[p], end=written[p]) for p in sorted(gone)]
        if self._counts:
            for trial in self._patiently if row not in self._owners.held else ():
                with trial, self._short() as (connection, pid):
                    self._owners.take_query(connection, pid, self.query_id, self._watcher, first=0)
        else:
            new = [r for r in ranges if r.partition not in written and r.partition not in self._owners.held]
            # Behind a batch that failed nothing that has a start is new.
            if new := [r for r in new if failure is None or r.start is None]:
                # Nothing of theirs was written from this checkpoint, so nothing can be missing: the ledger begins here.
                self._patiently(self._owners.take, new, batch_id=0)
                if batch_id > 0 and any(r.start for r in new) and not (known.is_known_query or known.has_others):
                    logger.warning(
                        "%s begins at batch %s of its query, %s: what earlier batches held was written "
                        "elsewhere, or by nobody, and not by this sink",
                        group,
                        batch_id,
                        ", ".join(f"{r.partition} offset {r.start}" for r in new),
                        extra=about("adopted", group=group_id, several=[r.partition for r in new]),
                    )
        next_offsets: dict[Partition, int] = {}
        try:
            next_offsets = self._patiently(self._owners.take, ranges, batch_id=batch_id)
            ranges = over_skipped(ranges, next_offsets, written)
            todo = remaining(ranges, next_offsets, group)
        except LedgerBehindCheckpoint:
            was_set_back = any(next_offsets.get(r.partition, 0) < mark.offsets.get(r.partition, 0) for r in ranges)
            if failure is None or was_set_back:
                raise
            existing, _ = self._patiently(self._ledger.known, {r.partition.topic for r in ranges})
            raise not_written(failure, batch_id, ranges, next_offsets, existing, group=group) from None
        if mark.batch_id == batch_id and any(next_offsets.get(p, end) < end for p, end in written.items()):
            logger.warning(
                "batch %s of %s was written, as its checkpoint has it, and the ledger does not have all of it: the "
                "rest is written again. That is right where the database was set back with its tables; where only the "
                "ledger was, these rows are in the table twice",
                batch_id,
                group,
                extra=about("written_again", group=group_id) | {"batch_id": batch_id},
            )
        if failure is not None:
            self._log.settle_failure(group_id)
        return ranges, todo, next_offsets

    def _write(self, frame: DataFrame, parts: tuple[Part, ...], batch_id: int) -> Result | None:
        ranges, todo, next_offsets = self._take(batch_id)
        known, starter = self._known, self._owners.starter
        below = {} if self._counts else {r: min(r.end, next_offsets[r.partition]) for r in ranges}
        below = {r: end for r, end in below.items() if r.first < end}
        if below and known.has_others and not known.is_known_query and starter is None:
            logger.warning(
                "a query with a new checkpoint brings %s, which the ledger of %s has as written: they are dropped. %s",
                ", ".join(f"offsets {r.first} to {end} of {r.partition}" for r, end in below.items()),
                self._options.group,
                IF_MADE_AGAIN,
                extra=about("new_checkpoint", group=self._options.group_id, several=[r.partition for r in below]),
            )
            self._known = known._replace(is_known_query=True)  # said once
        if not todo:
            return self._leave_out(frame, ranges, batch_id, next_offsets.get(Partition.of_query(self.query_id), 0))
        work = Work(
            options=self._sent,
            batch_id=batch_id,
            instance=self._session.instance,
            grants=tuple(self._owners.held[r.partition] for r in ranges),
            ranges={r.partition: r for r in ranges},
            parts=parts,
            report=self._report(batch_id) if self._counts else None,
        )
        whole = [str(part.options.table) for part in parts if not part.has_places]
        offsets = sum(share.end - share.first for share in todo)
        if whole and not self._counts and offsets < sum(r.end - r.first for r in ranges):
            # A frame without offsets cannot be without the part that the ledger has.
            raise FrameError(
                f"the ledger of {self._options.group} has a part of this batch, and the rows of {', '.join(whole)} do "
                "not say which message they come from, so that this part would be written again. Restore the old "
                f"checkpoint, or {self._options.group.anew()}"
            )
        # By the driver where rows are few, and by the batch before not large.
        is_small = offsets <= self._options.small_batch and offsets * self._bytes_an_offset <= SMALL_BYTES
        if is_small and not self._counts and hasattr(frame, "toArrow"):  # Spark 3.5 has not
            try:
                writers = [self._tables[str(part.options.table)][1] for part in parts]
                return self._weighed(write_here(work, frame.toArrow(), self._session, writers, next_offsets), offsets)
            # Where rows are too large, the connection is lost or the table was altered, a task may do it.
            except Exception as error:
                if not (is_unavailable(error) or "spark.driver.maxResultSize" in str(error)):
                    raise
                extra = about("left_to_task", group=self._options.group_id) | {"batch_id": batch_id}
                logger.warning(
                    "batch %s is left to a task, the driver could not write it: %s", batch_id, error, extra=extra
                )
        if self._options.transaction == "batch":
            in_order = any(part.has_places and part.options.minds_order for part in parts)
            frame = to_one_task(frame, order=[OFFSET] if in_order else [])
        else:
            frame = to_tasks(frame, [share.partition for share in todo])
        task = partial(write_task, replace(work, names=tuple(frame.columns)))
        numbered = frame.toDF(*map(str, range(len(frame.columns))))
        # The only action on the frame.
        result = self._weighed(read_results(numbered.mapInArrow(task, REPORT).collect()), offsets)
        # Only now: Spark says that every task has succeeded.
        reached = {Partition(topic, number): offset for topic, number, offset in result.reached}
        self._patiently(self._owners.finish, todo, reached, batch_id=batch_id)
        return result

    def _weighed(self, result: Result, offsets: int) -> Result:
        """Learn how large rows are; those that were left out, of events that came before, count as the others do."""
        if result.rows:
            self._bytes_an_offset = result.bytes * (1 + result.repeated / result.rows) / offsets
        return result

    def _leave_out(self, frame: DataFrame, ranges: list[Range], batch_id: int, next_batch: int) -> Result | None:
        """Write nothing of a batch; where there is a state run through it all the same, which brings that forward."""
        if self._counts:
            counted = self._patiently(self._ask, "spark_fingerprint", query_id=self.query_id, batch_id=next_batch - 1)
            refuse_older(next_batch, batch_id, counted, self._log.fingerprint(batch_id), self._options.group)
            _run_through(frame)
            return None
        if any(r.first < r.end for r in ranges):
            if self._log.stateful():
                _run_through(frame)
            return None
        if _run_through(frame):
            raise RowsOutOfOrder(f"the batch has rows and covers no offsets: {KEPT}")
        return Result()

    def _ask(self, name: str, /, **parameters: Any) -> psycopg.Cursor[Any]:
        """Execute one statement in a short transaction."""
        with self._short(is_durable=False) as (connection, _):
            return ask(connection, self._options.group, name, **parameters)

    def _report(self, batch_id: int) -> dict[str, Any]:
        fingerprint = self._log.fingerprint(batch_id) if self._counts else None
        return self._options.report(self.query_id, self.run_id or "", batch_id, fingerprint)


def _run_through(frame: DataFrame) -> int:
    """Run a batch of which nothing is to be written, and count its rows: what a query keeps as state is made so."""
    return frame.count()
