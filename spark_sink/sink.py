"""The sink: what ``foreachBatch`` calls, on the driver, once for each micro-batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exactly_once._log import about
from exactly_once.errors import ConfigurationError
from exactly_once.ledger.dead_letters import DeadLetterLimit
from exactly_once.writer.sink import Evolve

from .options import LedgerKind, Mode, OnBadRow, Options, Transaction, check_options
from .report import BatchReport, SinkUnit
from .run import Run
from .stream_query import StreamQuery, find

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryListener

logger = logging.getLogger(__name__)

# The last batch of each run and group, and the frames of it as long as they are not written; over Spark Connect a run
# has no id, and a process of its own.
_last: dict[tuple[str | None, str], tuple[int, Mapping[str, DataFrame] | None]] = {}
# Held by each call, also of another sink of the group: of frames that come from several threads, one must have been
# written, or have failed, before the next is looked at. The function of ``on_report`` may call again.
_locks: dict[tuple[str | None, str], threading.RLock] = {}


class PostgresSink:
    """Write micro-batches into a Postgres table, each row of Kafka once.

        sink = PostgresSink(conninfo, table="orders", group_id="orders")
        frame.writeStream.foreachBatch(sink).option("checkpointLocation", "/srv/checkpoints/orders").start()

    The frame carries the columns ``topic``, ``partition`` and ``offset`` of Kafka's source, under the names given
    here; the table may have them or not. From the query's checkpoint the sink learns which offsets a batch covers; it
    asks Spark where that is, and only Spark Connect, which does not tell, needs ``checkpoint_location``. With
    ``bootstrap_servers`` the ids of cluster and topics are checked when the query starts; ``kafka`` has settings of
    librdkafka for it, such as ``security.protocol``.

    ``transaction="batch"`` makes the whole micro-batch one transaction in one task; ``"partition"`` one for each task,
    in parallel, not atomic across Kafka partitions. A batch of up to ``small_batch`` offsets is collected and
    written by the driver, which is quicker; 0 is for never. ``in_transaction`` is called in each of these transactions,
    where it runs, after the rows were written.

    In ``mode="upsert"`` the last row of each ``key`` wins, but for the columns in ``add``, whose values are added to
    what is stored. ``claim`` names the column with the id of an event: of all rows with one id the first is stored, as
    ``exactly-once sink --claim`` does; the table may have the column or not.

    ``create_table`` makes a table that is not there, of the columns of the first batch, with ``key`` as its primary
    key; ``evolve="add-columns"`` adds columns that a batch has and the table lacks. Neither drops or changes anything.

    ``tables`` says of several tables, by name, the ``mode``, ``key``, ``add``, ``claim``, ``create_table`` and
    ``evolve`` of each; :meth:`write` takes a frame for each then, and writes them in one transaction.

    ``ledger="batch-id"`` is for aggregations, whose rows have no offsets: output mode update goes with
    ``mode="upsert"``, complete with ``"replace"``.

    A row that cannot be stored fails the batch; with ``on_bad_row="dead-letter"`` it is set aside, as JSON, in the
    transaction that skips it, where ``exactly-once dead-letters`` shows it, up to ``dead_letter_limit``.

    A group writes one table, or the same several, and another one is refused; ``previous_table`` names, with its
    schema, the one that it wrote before. ``take_over`` takes rows of the ledger that a plain consumer has not released.

    ``patience_seconds`` (120) is how long each step of a batch waits for a database that is away or busy.

    Options are checked here and raise :class:`exactly_once.ConfigurationError`; servers are first contacted by the
    first batch. One sink serves one query at a time.

    What cannot be exact raises :class:`FrameError`, before the first row is written: a query that keeps rows in a state
    needs ``ledger="batch-id"``, one that picks rows by looking at others ``transaction="batch"``.
    """

    def __init__(
        self,
        conninfo: str,
        *,
        group_id: str,
        table: str | None = None,
        tables: Mapping[str, Mapping[str, Any]] | None = None,
        mode: Mode = "append",
        transaction: Transaction = "batch",
        ledger: LedgerKind = "offsets",
        key: Sequence[str] | None = None,
        add: Sequence[str] = (),
        claim: str | None = None,
        create_table: bool = False,
        evolve: Evolve | None = None,
        checkpoint_location: str | None = None,
        bootstrap_servers: str | None = None,
        kafka: Mapping[str, str] | None = None,
        topic_column: str = "topic",
        partition_column: str = "partition",
        offset_column: str = "offset",
        in_transaction: Callable[[SinkUnit], object] | None = None,
        on_report: Callable[[BatchReport], object] | None = None,
        on_bad_row: OnBadRow = "fail",
        dead_letter_limit: DeadLetterLimit | None = None,
        small_batch: int = 1000,
        take_over: bool = False,
        previous_table: str | None = None,
        patience_seconds: float = 120.0,
        schema: str = "exactly_once",
        name: str | None = None,
    ) -> None:
        given = {option: value for option, value in locals().items() if option != "self"}  # in front of all other names
        self._options: Options = check_options(**given)
        self._run: Run | None = None
        # What the last batch has raised; Spark makes a StreamingQueryException of it, which has only its text.
        self.error: Exception | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write one micro-batch; a replay of one that was written writes nothing.

        A frame that has failed may be written again.

        :raises exactly_once.ConfigurationError: for a second frame of a batch, which nobody could tell from a replay.
        """
        self.write({self._options.table or "": frame}, batch_id)

    def write(self, frames: Mapping[str, DataFrame], batch_id: int) -> None:
        """Write the frames of one micro-batch, each into the table of its name, in one transaction.

        With ``ledger="offsets"`` a frame without Kafka's columns, such as an aggregate of the batch, is written whole;
        a batch of which the ledger has a part is refused then. Raises as a call does.
        """
        from pyspark.sql import SparkSession  # noqa: PLC0415 - not needed to make a sink

        try:
            session = next((frame.sparkSession for frame in frames.values()), None) or SparkSession.active()
            query = find(session)
            run_id = None if query is None else query.run_id
            with _locks.setdefault((run_id, self._options.group_id), threading.RLock()):
                self._write(self._run_of(query, session, batch_id), frames, batch_id)
        except Exception as error:
            self.error = error
            raise
        self.error = None

    def release(self) -> None:
        """Give the rows of the ledger back, best effort: for a hand-over to the plain consumer.

        A batch that is still being written is fenced by it.
        """
        if self._run is not None:
            self._run.release()

    def listener(self) -> StreamingQueryListener:
        """Return a listener for ``spark.streams.addListener`` that releases when the query has ended.

        Best effort: a killed driver calls nobody.
        """
        from pyspark.sql.streaming.listener import StreamingQueryListener  # noqa: PLC0415 - not needed to make a sink

        def ended(_: StreamingQueryListener, event: Any) -> None:
            if self._run is not None and self._run.run_id == str(event.runId):
                self.release()

        def nothing(_: StreamingQueryListener, event: Any) -> None:
            pass

        names = {"onQueryStarted": nothing, "onQueryProgress": nothing, "onQueryTerminated": ended}
        return type("Listener", (StreamingQueryListener,), names)()  # type: ignore[no-any-return]

    def _write(self, run: Run, frames: Mapping[str, DataFrame], batch_id: int) -> None:
        """Write a batch, and keep what came of it for the next call."""
        writes = run.run_id, self._options.group_id
        last_batch, failed = _last.get(writes, (None, None))
        try:
            if last_batch == batch_id and not (failed is not None and _are_alike(frames, failed)):
                first = "was written" if failed is None else "has failed"
                raise ConfigurationError(
                    f"a second frame of batch {batch_id} came for group {self._options.group_id!r}, of this sink or "
                    "another one, into whichever database; the ledger "
                    f"counts batches as a whole, and the first frame {first}, "
                    "so that the rows of one would be dropped as a replay. Call one sink once a batch, with all "
                    "rows; for several tables say tables= and call its write(), or make another sink, with a "
                    "group_id of its own"
                )
            _last[writes] = batch_id, frames
            tables = [str(each.table) for each in self._options.targets]
            if not frames or not frames.keys() <= {*tables}:
                raise ConfigurationError(
                    f"the sink writes {', '.join(map(repr, tables))}, and was given frames for "
                    f"{', '.join(map(repr, frames)) or 'none of them'}; call its write() with a frame for each "
                    "table, by their names"
                )
            report = run.write(frames, batch_id)
        except BaseException as error:
            run.note_failure(batch_id, error, is_counted=_last.get(writes) == (batch_id, None))
            raise
        _last[writes] = batch_id, None
        level = logging.WARNING if report.is_replay else logging.INFO
        logger.log(level, "%s", report, extra=about("spark_batch", group=report.group_id) | {"batch_id": batch_id})
        if self._options.on_report is not None:
            self._options.on_report(report)

    def _run_of(self, query: StreamQuery | None, session: SparkSession, batch_id: int) -> Run:
        """Return the run that calls; each start of a query is a new owner."""
        run_id = None if query is None else query.run_id
        if self._run is None or self._run.run_id != run_id:
            if self._run is not None:
                if self._run.query is not None and self._run.query.is_active:
                    error = ConfigurationError(
                        f"this sink writes for query {self._run.query_id}, which still runs, and query "
                        f"{query and query.query_id} calls it as well: each would take the group from the other. Make "
                        "a sink for each query, with a group_id of its own"
                    )
                    Run(self._options, query, session).note_failure(batch_id, error)
                    raise error
                self._run.close()
            self._run = None
            self._run = Run(self._options, query, session)
        return self._run

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run behind: over Spark Connect the sink is sent to another process."""
        return self.__dict__ | {"_run": None}


def _are_alike(frames: Mapping[str, DataFrame], others: Mapping[str, DataFrame]) -> bool:
    """Tell whether frames hold the same rows: one that failed may come again, also if it is made anew."""
    return frames.keys() == others.keys() and all(
        frame is others[name] or frame.sameSemantics(others[name]) for name, frame in frames.items()
    )
