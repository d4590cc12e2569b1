"""Run: what the driver does for each micro-batch of one run of a query."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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

from .attempt import REPORT, Result, Work, read_results, writer_of
from .by_batch import BatchTask, to_one_task
from .by_partition import PartitionTask, to_tasks
from .claim import Claim, claim, refuse_lost_state
from .errors import RowsOutOfOrder
from .frame import check_key, fit
from .offset_filter import OFFSET
from .offset_log import OffsetLog, reader
from .options import Options
from .owners import Owners, patiently, query_row
from .ranges import Range, RemainingRange, one_batch, over_skipped, refuse_older, remaining
from .report import BatchReport
from .stream_query import StreamQuery, check_plan, refuse_kept_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

T = TypeVar("T")

SMALL_BYTES = 16 << 20
"""What the driver collects at most, in its Java and its Python: as much as a task sends in one COPY."""


@dataclass(frozen=True, slots=True)
class Ids:
    """Spark's names of a query: one for its checkpoint, one for this start of it. Spark Connect tells neither."""

    query_id: str | None
    run_id: str | None


def ids_of(query: StreamQuery | None) -> Ids:
    """Return the names of the query that calls."""
    return Ids(None, None) if query is None else Ids(query.query_id, query.run_id)


class Run:
    """One run: its connection, what it owns, and the batches that it writes."""

    def __init__(self, options: Options, query: StreamQuery | None, spark: SparkSession) -> None:
        self._options = options
        self.query = query
        self._log = _offset_log(options, query, spark)
        ids = ids_of(query)
        self.ids = ids if ids.query_id else replace(ids, query_id=self._log.query_id())
        self._name = options.name or f"query {self.ids.query_id}"
        self._session = Session(connector(options.conninfo), schema=options.schema)
        self._watcher = StaleBackendTerminator(
            self._session.connect,
            schema=options.schema,
            group_id=options.group_id,
            instance=self._session.instance,
        )
        ledger = self._ledger()
        self._counts = options.ledger == "batch-id"
        starter = None if self._counts else starter_of(options, ledger)
        self._owners = Owners(ledger, starter=starter, counts=self._counts)
        # Queries end without telling their sink.
        self.close = weakref.finalize(self, _end, self._session, starter)
        check(self._session.connection, options.schema)
        self._writer = writer_of(options)
        self._table: tuple[Table, tuple[str, ...]] | None = None
        self._bytes_an_offset = 0.0
        """Of the last batch that was written; 0 until one was, when Spark's own limit of results is what guards."""
        self._known = Claim(is_known_query=True, has_others=False)

    def write(self, frame: DataFrame, batch_id: int) -> BatchReport:
        """Write a batch, or find that it was written."""
        began_at = time.monotonic()
        prepared, columns = self._fit(frame)
        result = self._write(prepared, columns, batch_id)
        ends = {} if self._counts else self._log.ends(batch_id)
        self._log.note(self._options.group_id, batch_id, ends)
        report = BatchReport(
            group_id=self._options.group_id,
            query_id=self.ids.query_id,
            run_id=self.ids.run_id,
            batch_id=batch_id,
            is_replay=result is None,
            batch_seconds=time.monotonic() - began_at,
            **({} if result is None else result.as_dict()),
        )
        if not self._counts:  # or it was written down in the transaction of the batch
            self._tell(report)
        return report

    def release(self) -> None:
        """Give back what is owned, over a connection of its own: a batch may be at work on the other one."""
        session = Session(connector(self._options.conninfo), schema=self._options.schema)
        try:
            self._owners.release(Ledger(session, group_id=self._options.group_id, owner_kind="spark"))
        finally:
            session.close()

    def _ledger(self) -> Ledger:
        return Ledger(
            self._session,
            group_id=self._options.group_id,
            owner_kind="spark",
            owner_name=self._name,
            take_over=self._options.take_over,
            watch=self._watcher.acquiring,
        )

    def _fit(self, frame: DataFrame) -> tuple[DataFrame, tuple[str, ...]]:
        """Compare the frame with the table as the run has found it; if it is altered, tasks find out."""
        options = self._options
        if self._table is None:
            stateful = self._check_plan(frame)
            self._table = self._patiently(self._look_at_table, stateful)
        elif options.transaction == "partition":
            self._check_plan(frame)  # the user's function may do something else each time
        table, key = self._table
        prepared, columns = fit(frame, table, options)
        if options.mode in ("upsert", "insert-ignore"):
            check_key(key, columns, table)
        return prepared, columns

    def _look_at_table(self, stateful: list[str]) -> tuple[Table, tuple[str, ...]]:
        with self._session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _):
            table = self._writer.table(connection, locks=False)  # the tasks look again before they write
            self._known = claim(connection, self._options, table, self.ids.query_id or "")
            refuse_lost_state(self._known, stateful, self._options)
            return table, self._writer.key(connection)

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

    def _write(self, frame: DataFrame, columns: tuple[str, ...], batch_id: int) -> Result | None:
        mark = self._log.mark(self._options.group_id)
        if self._counts:
            row = self._take_query()
            ranges = one_batch(row, batch_id)
            written = {} if mark is None else {row: mark.batch_id + 1}
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
        if not todo and self._counts:
            self._patiently(self._refuse_older, next_offsets[row], batch_id)
            _run_through(frame)
            return None
        if not todo and any(r.first < r.end for r in ranges):
            self._tell_of_new_checkpoint(ranges)
            if self._log.has_state():
                _run_through(frame)
            return None
        if not todo:
            return _no_rows(frame)
        work = self._work(columns, batch_id, ranges={r.partition: r for r in ranges})
        if self._is_small(todo) and hasattr(frame, "toArrow"):  # Spark 3.5 has not
            try:
                rows = frame.toArrow()
                result = BatchTask(work).write_here(rows, self._session, self._writer, next_offsets)
                self._bytes_an_offset = result.bytes / _count(todo)
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
        self._bytes_an_offset = result.bytes / _count(todo)
        # Only now: Spark says that every task has succeeded.
        reached = {Partition(topic, number): offset for topic, number, offset in result.reached}
        self._patiently(self._owners.finish, todo, reached, batch_id=batch_id)
        return result

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

    def _is_small(self, todo: list[RemainingRange]) -> bool:
        """Tell whether the driver may collect the rows: they are few, and by the batch before not large."""
        offsets = _count(todo)
        return (
            not self._counts and offsets <= self._options.small_batch and offsets * self._bytes_an_offset <= SMALL_BYTES
        )

    def _take_query(self) -> Partition:
        """Own the row of this query's batch ids, once."""
        assert self.ids.query_id is not None
        row = query_row(self.ids.query_id)
        if row not in self._owners.held:
            self._patiently(self._acquire_query, self.ids.query_id)
        return row

    def _acquire_query(self, query_id: str) -> None:
        with self._session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, pid):
            self._owners.take_query(connection, pid, query_id, self._watcher, first=0)

    def _refuse_older(self, next_batch: int, batch_id: int) -> None:
        """See that a batch that was counted is the one that was written."""
        options, now = self._options, self._log.fingerprint(batch_id)
        parameters = {"group_id": options.group_id, "query_id": self.ids.query_id, "batch_id": next_batch - 1}
        with self._session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS) as (connection, _):
            cursor = cursor_on(connection)
            cursor.execute(query("spark_fingerprint", options.schema), parameters, prepare=False)
            (counted,) = cursor.fetchone() or (None,)
        refuse_older(next_batch, batch_id, (counted, now), group_id=options.group_id)

    def _work(self, columns: tuple[str, ...], batch_id: int, *, ranges: dict[Partition, Range]) -> Work:
        return Work(
            options=replace(self._options, on_report=None, kafka=None),
            batch_id=batch_id,
            instance=self._session.instance,
            grants=tuple(self._owners.held[p] for p in ranges),
            ranges=ranges,
            columns=columns,
            report=self._report(batch_id, fingerprint=self._log.fingerprint(batch_id)) if self._counts else None,
        )

    def _report(self, batch_id: int, **rest: Any) -> dict[str, Any]:
        return {
            "group_id": self._options.group_id,
            "query_id": self.ids.query_id or "",
            "run_id": self.ids.run_id or "",
            "batch_id": batch_id,
            "name": self._options.name,
            **rest,
        }

    def _act(self, frame: DataFrame, work: Work, partitions: Sequence[Partition]) -> Result:
        """Have the tasks write: the only action on the frame."""
        task: Callable[[Iterable[Any]], Iterable[Any]]
        if self._options.transaction == "batch":
            in_order = self._options.mode != "append" and self._options.ledger == "offsets"
            frame, task = to_one_task(frame, order=[OFFSET] if in_order else []), BatchTask(work).run
        else:
            frame, task = to_tasks(frame, partitions), PartitionTask(work).run
        return read_results(frame.mapInArrow(task, REPORT).collect())

    def _tell(self, report: BatchReport) -> None:
        """Write down what was done, for `exactly-once status`; nothing rests on it."""
        parameters = self._report(report.batch_id, row_count=report.rows, dropped=report.dropped, fingerprint=None)
        with (
            suppress(psycopg.Error),
            self._session.ledger_transaction(lock_timeout_seconds=LOCK_SECONDS, is_durable=False) as (connection, _),
        ):
            cursor_on(connection).execute(query("spark_report", self._options.schema), parameters, prepare=False)


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


def _count(todo: list[RemainingRange]) -> int:
    return sum(share.end - share.write_from for share in todo)


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


def _no_rows(frame: DataFrame) -> Result:
    """See that a batch without offsets has no rows either.

    :raises RowsOutOfOrder: when it has, out of some state.
    """
    if _run_through(frame):
        raise RowsOutOfOrder(
            "the batch has rows and covers no offsets: something has kept them since an earlier batch (a join of "
            "streams, a window, a state). Say ledger='batch-id'"
        )
    return Result()


def _run_through(frame: DataFrame) -> int:
    """Run a batch of which nothing is to be written, and count its rows: what a query keeps as state is made so."""
    return frame.count()
