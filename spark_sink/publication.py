"""Publication: the rows of a batch that tasks have staged, into the table, in one guarded transaction. On the driver.

All that a run must remember from batch to batch is in the database, and read and written in the same transaction:
that it owns the group, which rows of the ledger it has acquired, and how far it has written each. So whoever calls this
needs no memory, and calling it again, after an answer that was lost, finds everything done.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa  # type: ignore[import-untyped]

from exactly_once._log import about
from exactly_once._model import Advance, Partition
from exactly_once.ledger.rows import Ledger
from exactly_once.ledger.session import Session, cursor_on
from exactly_once.ledger.sql import query
from exactly_once.ledger.transaction import UnitOfWork
from exactly_once.writer import TableWriter
from exactly_once.writer.arrow import write_arrow

from . import batch_ledger
from .attempt import writer_of
from .batch_ledger import BatchIdLedger
from .claim import Claim, claim, refuse_lost_state
from .errors import RowsOutOfOrder
from .fence import BATCH_JOB, Origin, not_next, session_of, watching
from .frame import check_key, columns_of
from .offset_log import NotKafka, OffsetLog, on_disk
from .options import Options
from .owners import Holding, Owners, patiently, rotates_at
from .ranges import Range, looked_through, shares
from .run import starter_of
from .screen import PLACES, Screen, naming
from .staging import Place, Span, Staged, fetch, in_order, placed, unstage
from .stream_query import refuse_kept_rows

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)


def publish(options: Options, schema: StructType, staged: Sequence[Staged], *, releases: bool = False) -> None:
    """Write what the attempts have staged that Spark has counted; nothing of a batch that was written before.

    With ``releases`` the rows of the ledger are given back afterwards.

    :raises Fenced: when another run writes for this group by now.
    :raises FrameError: when the frame does not fit the table.
    :raises StageLost: when staged rows are gone.
    """
    patiently(options)(_publish, options, schema, staged, releases=releases)


def _publish(options: Options, schema: StructType, staged: Sequence[Staged], *, releases: bool) -> None:
    origin = staged[0].origin
    session = session_of(options, origin)
    watcher = watching(options, origin, session)
    ledger = Ledger(
        session,
        group_id=options.group_id,
        owner_kind="spark",
        owner_name=options.name or f"query {origin.query_id}",
        take_over=options.take_over,
    )
    unit = UnitOfWork(ledger)
    starter = None
    try:
        unit.begin()
        assert unit.begun is not None
        watcher.watch(unit.begun.pid)
        ledger = ledger.inside(unit.connection)
        starter = starter_of(options, ledger)
        publication = Publication(options, origin, session, Owners(ledger, starter=starter), unit)
        advances = publication.write(schema, staged)
        unit.commit(advances)
        watcher.clear()
        if releases:
            publication.release()
    finally:
        if starter is not None:
            starter.close()
        watcher.close()
        session.close()


class Publication:
    """The transaction of one batch, from its fence to the moves of the ledger."""

    def __init__(self, options: Options, origin: Origin, session: Session, owners: Owners, unit: UnitOfWork) -> None:
        self._options = options
        self._origin = origin
        self._session = session
        self._unit = unit
        self._owners = owners
        self._ended: dict[Partition, int] = {}
        self._log: OffsetLog | None = None
        self._writer: TableWriter = writer_of(options)
        self._columns: tuple[str, ...] = ()
        self._rows = 0
        self._dropped = 0

    def write(self, schema: StructType, staged: Sequence[Staged]) -> list[Advance]:
        """Do everything but the COMMIT; return the moves that it must make."""
        options, origin = self._options, self._origin
        counted = batch_ledger.owned(
            self._unit.connection, options.schema, group_id=options.group_id, token=origin.run_id
        )
        published, is_first = self._recall()
        if published >= origin.batch_id:
            return []  # done by a call whose answer was lost
        if published != origin.batch_id - 1:
            raise not_next(options, published, origin.batch_id)
        if origin.query_id != BATCH_JOB:
            self._log = on_disk(options.checkpoint_location, origin.query_id, warns=is_first)
        known = self._fit(schema, is_first=is_first)
        if known.is_known_query and options.job_id is not None and options.mode != "replace":
            self._skip_job()
            return []
        advances: list[Advance] = []
        if options.ledger == "offsets":
            advances = self._write_offsets(staged)
        elif origin.query_id == BATCH_JOB:
            self._write_counted(staged, counted, counted.batch_id + 1)
        elif not batch_ledger.is_replay(counted, origin.batch_id, self._fingerprint(), group_id=options.group_id):
            self._write_counted(staged, counted, origin.batch_id)
        self._remember()
        unstage(self._unit.connection, options, origin)
        self._tell()
        return advances

    def release(self) -> None:
        """Give the rows of the ledger back, after the COMMIT."""
        session = session_of(self._options, self._origin)
        try:
            self._owners.release(Ledger(session, group_id=self._options.group_id, owner_kind="spark"))
        finally:
            session.close()

    def _fit(self, schema: StructType, *, is_first: bool) -> Claim:
        connection, options = self._unit.connection, self._options
        table = self._writer.table(connection)
        known = Claim(is_known_query=not is_first, has_others=False)
        if is_first:
            known = claim(connection, options, table, self._name())
        if self._log is not None:
            refuse_lost_state(known, self._log.operators(), options)
        self._columns = columns_of(schema, table, options)
        if options.mode in ("upsert", "insert-ignore"):
            check_key(self._writer.key(connection), self._columns, table)
        return known

    def _name(self) -> str:
        """Return what this query is called in the database; a batch job by its own name, as it has no checkpoint."""
        return f"job {self._options.job_id}" if self._options.job_id is not None else self._origin.query_id

    def _skip_job(self) -> None:
        unstage(self._unit.connection, self._options, self._origin)
        logger.warning(
            "job %r of group %r had been written before, so nothing of it is written now; another jobId, or none, "
            "writes it",
            self._options.job_id,
            self._options.group_id,
            extra=about("job_skipped", group=self._options.group_id),
        )

    # With offsets.

    def _write_offsets(self, staged: Sequence[Staged]) -> list[Advance]:
        ranges = self._ranges(staged)
        rows = self._owners.take(ranges, batch_id=self._origin.batch_id)
        next_offsets = {p: row.next_offset or 0 for p, row in rows.items()}
        moves = {
            share.partition: (share.write_from, share.end)
            for share in shares(ranges, next_offsets, group_id=self._options.group_id)
        }
        if moves:
            screen = Screen(next_offsets, {r.partition: r for r in ranges})
            for table in self._sorted(staged):
                self._store(screen.keep(table))
            self._dropped = screen.dropped
        self._ended |= {r.partition: r.end for r in ranges}
        rotates = rotates_at(self._origin.batch_id)
        return [self._owners.held[p].advance(*move, rotates=rotates) for p, move in moves.items()]

    def _ranges(self, staged: Sequence[Staged]) -> list[Range]:
        """Return what the batch covers, from the checkpoint where it can be had."""
        if self._log is not None:
            refuse_kept_rows(self._log.keeps_rows())
            with contextlib.suppress(NotKafka):
                return self._log.ranges(self._origin.batch_id)
        spans = (span for s in staged for chunk in s.chunks for span in chunk.spans)
        return looked_through(_merged(spans, self._ended), self._ended)

    def _sorted(self, staged: Sequence[Staged]) -> Iterator[pa.Table]:
        """Read rows; in the order of their offsets where it matters who comes last."""
        places, is_sorted = in_order(staged)
        tables = (placed(self._options, self._fetch(place)) for place in places)
        if self._options.mode == "append" or is_sorted:
            yield from tables
        else:
            yield pa.concat_tables(tables).sort_by([(place, "ascending") for place in PLACES])

    def _recall(self) -> tuple[int, bool]:
        """Read what this run has acquired in earlier batches; return the batch before this, and if it was another's."""
        ((batch_id, held),) = self._run("spark_held")
        for each in held or ():
            partition = Partition(each["topic"], each["partition"])
            self._owners.held[partition] = Holding(
                partition=partition, token=UUID(each["token"]), epoch=each["epoch"], topic_id=each["topic_id"]
            )
            if each["ended"] is not None:
                self._ended[partition] = each["ended"]
        if held is None:
            parameters = {"query_id": self._origin.query_id, "batch_id": self._origin.batch_id}
            for topic, number, ended in self._run("spark_ended_before", **parameters):
                self._ended[Partition(topic, number)] = ended
        return int(batch_id), held is None

    def _remember(self) -> None:
        held = [
            {
                "topic": partition.topic,
                "partition": partition.number,
                "token": str(holding.token),
                "epoch": holding.epoch,
                "topic_id": holding.topic_id,
                "ended": self._ended.get(partition),
            }
            for partition, holding in self._owners.held.items()
        ]
        self._run("spark_hold", batch_id=self._origin.batch_id, held=json.dumps(held))

    # With batch ids.

    def _write_counted(self, staged: Sequence[Staged], counted: batch_ledger.Counted, batch_id: int) -> None:
        options, unit = self._options, self._unit
        if options.mode == "replace":
            table = self._writer.table(unit.connection).identifier
            unit.connection.execute(query("spark_empty", "", table=table), prepare=False)
        for s in staged:
            for number, chunk in enumerate(s.chunks):
                self._store(self._fetch(Place(s.attempt, number, chunk)))
        now = replace(counted, batch_id=batch_id, fingerprint=self._fingerprint())
        ledger = BatchIdLedger(self._session, group_id=options.group_id, counted=now)
        assert unit.begun is not None
        ledger.advance(unit.connection, [], xid=unit.begun.xid, commit=False)

    # Both.

    def _fetch(self, place: Place) -> pa.Table:
        return fetch(self._unit.connection, self._options.schema, place)

    def _fingerprint(self) -> str | None:
        return None if self._log is None else self._log.fingerprint(self._origin.batch_id)

    def _store(self, rows: pa.Table) -> None:
        if rows.num_rows:
            with naming(rows):
                write_arrow(self._writer, self._unit.connection, rows.select(self._columns))
            self._rows += rows.num_rows

    def _tell(self) -> None:
        """Write down what was done, for `exactly-once status`."""
        self._run(
            "spark_report",
            query_id=self._name(),
            run_id=str(self._origin.run_id),
            batch_id=self._origin.batch_id,
            name=self._options.name,
            row_count=self._rows,
            dropped=self._dropped,
        )

    def _run(self, name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        values: Mapping[str, Any] = {
            "group_id": self._options.group_id,
            "run_id": self._origin.run_id,
            **parameters,
        }
        cursor = cursor_on(self._unit.connection)
        cursor.execute(query(name, self._options.schema), values, prepare=False)
        return cursor.fetchall() if cursor.description is not None else []


def _merged(spans: Iterable[Span], ended: Mapping[Partition, int]) -> list[Span]:
    """Make one span of all that are of one partition; those that lack something stay as they are.

    :raises RowsOutOfOrder: for rows from in front of where this run's earlier batch has ended.
    """
    merged: dict[tuple[str | None, int | None], Span] = {}
    for topic, number, lowest, highest in spans:
        if topic is None or number is None or lowest is None or highest is None:
            return [(topic, number, lowest, highest)]
        if lowest < ended.get(Partition(topic, number), 0):
            raise RowsOutOfOrder(
                f"a row of {topic}[{number}] has offset {lowest}, an earlier batch of this run has ended at "
                f"{ended[Partition(topic, number)]}: something has kept it since (a join of streams, a window, a "
                "state), and the ledger would take it for written. Say ledger='batch-id'"
            )
        _, _, low, high = merged.get((topic, number), (topic, number, lowest, highest))
        merged[topic, number] = topic, number, min(low or 0, lowest), max(high or 0, highest)
    return list(merged.values())
