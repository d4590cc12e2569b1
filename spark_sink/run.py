"""Run: what the driver does for each micro-batch of one run of a query."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from exactly_once._log import about
from exactly_once._model import Partition
from exactly_once.errors import ConfigurationError
from exactly_once.kafka.admin import Cluster
from exactly_once.ledger.migrate import check
from exactly_once.ledger.retry import is_unavailable
from exactly_once.ledger.rows import LOCK_SECONDS, Ledger
from exactly_once.ledger.session import Session, connector, cursor_on
from exactly_once.ledger.sql import query
from exactly_once.ledger.stale_owners import StaleBackendTerminator
from exactly_once.ledger.start import StartOffsets
from exactly_once.writer import Table

from .attempt import REPORT, Part, Result, Work, read_results, writer_of
from .errors import FrameError, RowsOutOfOrder
from .frame import check_key, combine, fit, has_places
from .offset_filter import OFFSET
from .offset_log import OffsetLog, reader
from .options import Options
from .owners import Claim, Owners, claim, patiently, query_row
from .ranges import Range, RemainingRange, one_batch, over_skipped, refuse_older, remaining
from .report import BatchReport
from .stream_query import StreamQuery, check_plan, refuse_kept_rows, refuse_lost_state
from .tasks import BatchTask, PartitionTask, to_one_task, to_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What the driver collects at most, in its Java and its Python: as much as a task sends in one COPY.
SMALL_BYTES = 16 << 20


class Run:
    """One run: its connection, what it owns, and the batches that it writes."""

    def __init__(self, options: Options, query: StreamQuery | None, spark: SparkSession) -> None:
        self._options = options
        # What travels to the executors.
        self._sent = replace(options, on_report=None, kafka=None)
        self.query = query
        self._log = _offset_log(options, query, spark)
        # Spark's names of a query: one for its checkpoint, one for this start of it. Spark Connect tells neither.
        self.query_id = self._log.query_id() if query is None else query.query_id
        self.run_id = None if query is None else query.run_id
        self._session = Session(connector(options.conninfo), schema=options.schema)
        self._watcher = StaleBackendTerminator(
            self._session.connect,
            schema=options.schema,
            group_id=options.group_id,
            instance=self._session.instance,
        )
        ledger = Ledger(
            self._session,
            group_id=options.group_id,
            owner_kind="spark",
            owner_name=options.name or f"query {self.query_id}",
            take_over=options.take_over,
            watch=self._watcher.acquiring,
        )
        self._counts = options.ledger == "batch-id"
        starter = None if self._counts else starter_of(options, ledger)
        self._owners = Owners(ledger, starter=starter, counts=self._counts)
        # Queries end without telling their sink.
        self.close = weakref.finalize(self, _end, self._session, starter)
        check(self._session.connection, options.schema)
        self._writers = {str(each.table): writer_of(each) for each in options.targets}
        # By its name what is known of each table: its options, itself, its key; empty before the first batch.
        self._tables: dict[str, tuple[Options, Table, tuple[str, ...]]] = {}
        # Of the last batch that was written; 0 until one was, when Spark's own limit of results is what guards.
        self._bytes_an_offset = 0.0
        self._known = Claim(is_known_query=True, has_others=False)

    def write(self, frames: Mapping[str, DataFrame], batch_id: int) -> BatchReport:
        """Write a batch, or find that it was written."""
        began_at = time.monotonic()
        frame, parts = self._fit(frames)
        result = self._write(frame, parts, batch_id)
        ends = {} if self._counts else self._log.ends(batch_id)
        self._log.note(self._options.group_id, batch_id, ends)
        report = BatchReport(
            group_id=self._options.group_id,
            query_id=self.query_id,
            run_id=self.run_id,
            batch_id=batch_id,
            is_replay=result is None,
            batch_seconds=time.monotonic() - began_at,
            **({} if result is None else result.as_dict()),
        )
        log_set_aside(self._options.group_id, [] if result is None else result.set_aside)
        if not self._counts:  # or it was written down in the transaction of the batch; nothing rests on it
            with suppress(psycopg.Error):
                self._ask("spark_report", **self._report(batch_id, row_count=report.rows, dropped=report.dropped))
        return report

    def release(self) -> None:
        """Give back what is owned, over a connection of its own: a batch may be at work on the other one."""
        session = Session(connector(self._options.conninfo), schema=self._options.schema)
        try:
            self._owners.release(Ledger(session, group_id=self._options.group_id, owner_kind="spark"))
        finally:
            session.close()

    def _fit(self, frames: Mapping[str, DataFrame]) -> tuple[DataFrame, tuple[Part, ...]]:
        """Compare frames with their tables as the run has found them; if one is altered, tasks find out."""
        options = self._options
        if not self._tables or options.transaction == "partition":
            # In parallel each time: the user's function may do something else.
            operators = self._check_plan(next(iter(frames.values())))
            if not self._tables:
                self._patiently(self._look_at_tables, operators)
        parts, fitted = [], []
        for name, frame in frames.items():
            target, table, key = self._tables[name]
            prepared, columns = fit(frame, table, target)
            if target.mode in ("upsert", "insert-ignore"):
                check_key((*key, *target.add), columns, table)
            parts.append(Part(options=target, columns=columns, has_places=has_places(frame.schema, target)))
            fitted.append((prepared, columns))
        return combine(fitted), tuple(parts)

    def _look_at_tables(self, operators: list[str]) -> None:
        with self._session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _):
            found = {}
            for target in self._sent.targets:
                writer = self._writers[str(target.table)]
                table = writer.table(connection, locks=False)  # the tasks look again before they write
                found[str(target.table)] = target, table, writer.key(connection)
            tables = [table for _, table, _ in found.values()]
            self._known = claim(connection, self._options, tables, self.query_id)
            refuse_lost_state(self._known, operators, self._options)
        self._tables = found

    def _patiently(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call what opens a transaction of its own, and wait for a database that is away."""
        return patiently(self._options)(call, *arguments, **options)

    def _check_plan(self, frame: DataFrame) -> list[str]:
        """Refuse what cannot be exact; return the operators with a state."""
        if self.query is not None:
            return check_plan(self.query, frame, self._options)
        if self._options.ledger == "offsets":
            refuse_kept_rows(self._log.keeps_rows())
        return self._log.operators()

    def _write(self, frame: DataFrame, parts: tuple[Part, ...], batch_id: int) -> Result | None:
        mark = self._log.mark(self._options.group_id)
        row = query_row(self.query_id)
        if self._counts:
            ranges = one_batch(row, batch_id)
            written = {} if mark is None else {row: mark.batch_id + 1}
            if row not in self._owners.held:
                self._patiently(self._acquire_query)
        else:
            ranges = self._log.ranges(batch_id)
            written = {} if mark is None else mark.offsets
            if new := [r for r in ranges if r.partition not in written and r.partition not in self._owners.held]:
                # Nothing of theirs was written from this checkpoint, so nothing can be missing: the ledger begins here.
                self._patiently(self._owners.take, new, batch_id=0)
                self._tell_of_earlier_batches(new, batch_id)
        next_offsets = self._patiently(self._owners.take, ranges, batch_id=batch_id)
        ranges = over_skipped(ranges, next_offsets, written)
        todo = remaining(ranges, next_offsets, group_id=self._options.group_id)
        if not todo:
            return self._leave_out(frame, ranges, batch_id, next_offsets.get(row, 0))
        work = Work(
            options=self._sent,
            batch_id=batch_id,
            instance=self._session.instance,
            grants=tuple(self._owners.held[r.partition] for r in ranges),
            ranges={r.partition: r for r in ranges},
            parts=parts,
            report=self._report(batch_id, fingerprint=self._log.fingerprint(batch_id)) if self._counts else None,
        )
        self._refuse_half(work, todo)
        offsets = sum(share.end - share.write_from for share in todo)
        # By the driver where rows are few, and by the batch before not large.
        is_small = offsets <= self._options.small_batch and offsets * self._bytes_an_offset <= SMALL_BYTES
        if is_small and not self._counts and hasattr(frame, "toArrow"):  # Spark 3.5 has not
            try:
                writers = [self._writers[str(part.options.table)] for part in parts]
                result = BatchTask(work).write_here(frame.toArrow(), self._session, writers, next_offsets)
                self._bytes_an_offset = result.bytes / offsets
                return result
            # Where rows are too large, the connection is lost or the table was altered, a task may do it.
            except Exception as error:
                if not (is_unavailable(error) or "spark.driver.maxResultSize" in str(error)):
                    raise
                extra = about("left_to_task", group=self._options.group_id) | {"batch_id": batch_id}
                logger.warning(
                    "batch %s is left to a task, the driver could not write it: %s", batch_id, error, extra=extra
                )
        result = self._act(frame, work, [share.partition for share in todo])
        self._bytes_an_offset = result.bytes / offsets
        # Only now: Spark says that every task has succeeded.
        reached = {Partition(topic, number): offset for topic, number, offset in result.reached}
        self._patiently(self._owners.finish, todo, reached, batch_id=batch_id)
        return result

    def _leave_out(self, frame: DataFrame, ranges: list[Range], batch_id: int, next_batch: int) -> Result | None:
        """Write nothing of a batch; where there is a state run through it all the same, which brings that forward.

        :raises QueryChanged: when it is not the batch that was counted under this number.
        :raises RowsOutOfOrder: when it covers no offsets and has rows, out of some state.
        """
        if self._counts:
            counted = self._patiently(self._ask, "spark_fingerprint", query_id=self.query_id, batch_id=next_batch - 1)
            prints = counted[0][0] if counted else None, self._log.fingerprint(batch_id)
            refuse_older(next_batch, batch_id, prints, group_id=self._options.group_id)
            _run_through(frame)
            return None
        if any(r.first < r.end for r in ranges):
            self._tell_of_new_checkpoint(ranges)
            if self._log.has_state():
                _run_through(frame)
            return None
        if _run_through(frame):
            raise RowsOutOfOrder(
                "the batch has rows and covers no offsets: something has kept them since an earlier batch (a join of "
                "streams, a window, a state). Say ledger='batch-id'"
            )
        return Result()

    def _refuse_half(self, work: Work, todo: list[RemainingRange]) -> None:
        """Refuse a frame without offsets where the ledger has a part of the batch, which it cannot be without.

        :raises FrameError: with the ways out.
        """
        whole = [str(part.options.table) for part in work.parts if not part.has_places]
        written = [share for share in todo if share.write_from > work.ranges[share.partition].first]
        has_more = len(todo) < sum(r.first < r.end for r in work.ranges.values())
        if whole and not self._counts and (written or has_more):
            raise FrameError(
                f"the ledger of group {self._options.group_id!r} has a part of this batch, and the rows of "
                f"{', '.join(whole)} do not say which message they come from, so that this part would be written "
                "again. Start the query with a new checkpoint and the startingOffsets that "
                "`exactly-once hand-over --to spark` prints, or restore the old checkpoint"
            )

    def _tell_of_earlier_batches(self, new: list[Range], batch_id: int) -> None:
        if batch_id > 0 and any(r.start for r in new) and not (self._known.is_known_query or self._known.has_others):
            logger.warning(
                "group %r begins at batch %s of its query, %s: what earlier batches held was written elsewhere, or by "
                "nobody, and not by this sink",
                self._options.group_id,
                batch_id,
                ", ".join(f"{r.partition} offset {r.start}" for r in new),
                extra=about("adopted", group=self._options.group_id, several=[r.partition for r in new]),
            )

    def _tell_of_new_checkpoint(self, ranges: list[Range]) -> None:
        """Say that a new checkpoint brings what is written; that looks alike where the topic was made again."""
        if self._known.is_known_query or not self._known.has_others or self._owners.checks_topics:
            return
        logger.warning(
            "a query with a new checkpoint brings %s, which the ledger of group %r has as written: they are dropped. "
            "That is right if they are the same messages. If the topic was deleted and made again they are lost: give "
            "bootstrap_servers= or kafka=, with which topics are told apart",
            ", ".join(f"offsets {r.first} to {r.end} of {r.partition}" for r in ranges if r.first < r.end),
            self._options.group_id,
            extra=about("new_checkpoint", group=self._options.group_id, several=[r.partition for r in ranges]),
        )
        self._known = self._known._replace(is_known_query=True)

    def _acquire_query(self) -> None:
        with self._session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, pid):
            self._owners.take_query(connection, pid, self.query_id, self._watcher, first=0)

    def _ask(self, name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        """Execute one statement in a short transaction."""
        values = {"group_id": self._options.group_id, **parameters}
        with self._session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS, is_durable=False) as (connection, _):
            cursor = cursor_on(connection).execute(query(name, self._options.schema), values, prepare=False)
            return cursor.fetchall() if cursor.description is not None else []

    def _report(self, batch_id: int, **rest: Any) -> dict[str, Any]:
        """Return what is written down of a batch, for `exactly-once status`."""
        return {
            "group_id": self._options.group_id,
            "query_id": self.query_id,
            "run_id": self.run_id or "",
            "batch_id": batch_id,
            "name": self._options.name,
            "fingerprint": None,
            **rest,
        }

    def _act(self, frame: DataFrame, work: Work, partitions: list[Partition]) -> Result:
        """Have the tasks write: the only action on the frame."""
        task: Callable[[Iterable[Any]], Iterable[Any]]
        if self._options.transaction == "batch":
            in_order = any(part.has_places and part.options.mode != "append" for part in work.parts)
            frame, task = to_one_task(frame, order=[OFFSET] if in_order else []), BatchTask(work).run
        else:
            frame, task = to_tasks(frame, partitions), PartitionTask(work).run
        return read_results(frame.mapInArrow(task, REPORT).collect())


def _offset_log(options: Options, query: StreamQuery | None, spark: SparkSession) -> OffsetLog:
    """Open the checkpoint, and see that it is this query's.

    :raises ConfigurationError: when it is another one's, or nobody says where it is.
    """
    location = options.checkpoint_location or (None if query is None else query.checkpoint())
    if location is None:
        raise ConfigurationError(
            "Spark does not tell which query is calling, as over Spark Connect; give checkpoint_location=, the same as "
            "the query's option checkpointLocation"
        )
    storage = reader(location, spark)
    log = OffsetLog(location, storage, storage.write)
    if query is not None and log.query_id() != query.query_id:
        raise ConfigurationError(
            f"checkpoint_location={location!r} belongs to query {log.query_id()}, this is query {query.query_id}; "
            "leave it out, or give the sink what the query is given as option checkpointLocation"
        )
    return log


def _end(session: Session, starter: StartOffsets | None) -> None:
    session.close()
    if starter is not None:
        starter.close()


def starter_of(options: Options, ledger: Ledger) -> StartOffsets | None:
    """Return what checks ids of cluster and topics, where the cluster is known."""
    settings = dict(options.kafka or {})
    if options.bootstrap_servers is not None:
        settings["bootstrap.servers"] = options.bootstrap_servers
    if not settings:
        return None
    # Spark chooses where to start, whatever another program of the group has committed to Kafka.
    return StartOffsets(ledger, Cluster(settings), start="earliest", on_out_of_range="fail")


def log_set_aside(group_id: str, dead_letters: Iterable[str]) -> None:
    """Name each row that was set aside, once it is."""
    for each in dead_letters:
        logger.error("a row was set aside: %s", each, extra=about("set_aside", group=group_id))


def _run_through(frame: DataFrame) -> int:
    """Run a batch of which nothing is to be written, and count its rows: what a query keeps as state is made so."""
    return frame.count()
