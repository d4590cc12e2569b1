"""Attempts without Spark: tasks called with Arrow batches, as a worker calls them, against a real Postgres."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]

from exactly_once._model import Partition
from exactly_once.ledger.commands import DEFAULT_SCHEMA
from exactly_once.ledger.rows import Ledger
from exactly_once.ledger.session import Session, connector
from exactly_once.ledger.stale_owners import StaleBackendTerminator
from spark_sink.attempt import END, Part, Work, write_task
from spark_sink.options import check_options
from spark_sink.owners import Owners
from spark_sink.ranges import OFFSET, PARTITION, TOPIC, Group, Range


class Place:
    """A table of offsets and the group that writes it, both of one name."""

    def __init__(self, conninfo: str, name: str) -> None:
        self.conninfo = conninfo
        self.name = name
        self.sessions: list[Session] = []

    @property
    def group(self) -> Group:
        """The group, as errors name it."""
        return Group(self.name, DEFAULT_SCHEMA)

    def close(self) -> None:
        """Close the connections of its drivers."""
        for session in self.sessions:
            session.close()

    def ranges(self, *ends: int, start: int = 0) -> list[Range]:
        """What a batch covers: one partition for each end."""
        return [Range(partition=Partition(self.name, n), start=start, end=end) for n, end in enumerate(ends)]

    def owners(self, *, take_over: bool = False, name: str = "test", counts: bool = False) -> Owners:
        """A driver."""
        session = Session(connector(self.conninfo), schema="exactly_once")
        self.sessions.append(session)
        ledger = Ledger(session, group_id=self.name, owner_kind="spark", owner_name=name, take_over=take_over)
        return Owners(ledger, starter=None, counts=counts)

    def options(self, **options: Any) -> Any:
        """Options as the sink makes them."""
        return check_options(
            **{"conninfo": self.conninfo, "table": self.name, "group_id": self.name, "small_batch": 0, **options}
        )

    def work(self, owners: Owners, ranges: list[Range], **options: Any) -> Work:
        """What a driver sends to its tasks."""
        owners.take(ranges, batch_id=0)
        chosen = self.options(**options)
        return Work(
            options=chosen,
            batch_id=0,
            instance=owners._ledger.session.instance,
            grants=tuple(owners.held[r.partition] for r in ranges),
            ranges={r.partition: r for r in ranges},
            parts=(Part(options=chosen, table=str(chosen.table), columns=("partition", "offset"), has_places=True),),
        )

    def rows(self, *offsets: Iterable[int]) -> pa.RecordBatch:
        """Rows of several partitions, as the driver prepares them."""
        pairs = [(number, offset) for number, some in enumerate(offsets) for offset in some]
        numbers, values = [n for n, _ in pairs], [o for _, o in pairs]
        columns = {
            "partition": pa.array(numbers, pa.int32()),
            "offset": pa.array(values, pa.int64()),
            TOPIC: pa.array([self.name] * len(pairs), pa.string()),
            PARTITION: pa.array(numbers, pa.int32()),
            OFFSET: pa.array(values, pa.int64()),
            END: pa.array([0] * len(pairs), pa.int32()),
        }
        return pa.RecordBatch.from_pydict(columns)

    def mark(self) -> pa.RecordBatch:
        """The end mark."""
        empty = self.rows()
        columns = [pa.nulls(1, field.type) for field in empty.schema][:-1]
        return pa.RecordBatch.from_arrays([*columns, pa.array([1], pa.int32())], schema=empty.schema)

    def input(self, transaction: str, *offsets: Iterable[int]) -> list[pa.RecordBatch]:
        """All rows that there are, and what tells a task so."""
        return [self.rows(*offsets), *([self.mark()] if transaction == "batch" else [])]

    def written(self) -> list[tuple[int, int]]:
        """What is in the table."""
        with psycopg.connect(self.conninfo) as connection:
            return connection.execute(f'SELECT partition, "offset" FROM {self.name} ORDER BY 1, 2').fetchall()

    def ledger(self) -> list[int | None]:
        """Where the ledger stands, by partition."""
        with psycopg.connect(self.conninfo) as connection:
            found = connection.execute(
                "SELECT next_offset FROM exactly_once.ledger WHERE group_id = %s ORDER BY topic, partition",
                (self.name,),
            )
            return [next_offset for (next_offset,) in found]


class CountingPlace(NamedTuple):
    """A group that counts batches, and its work on one of them."""

    place: Place
    query_id: str

    def driver(self) -> Owners:
        """A new driver, which has taken the query's row."""
        owners = self.place.owners(counts=True)
        session = owners._ledger.session
        watcher = StaleBackendTerminator(
            session.connect, schema="exactly_once", group_id=self.place.name, instance=session.instance
        )
        try:
            with session.ledger_transaction(lock_timeout_seconds=5) as (connection, pid):
                owners.take_query(connection, pid, self.query_id, watcher, first=0)
        finally:
            watcher.close()
        return owners

    def work(self, batch_id: int, owners: Owners | None = None, **options: Any) -> Work:
        """What a driver, or a new one, sends to the task that writes a batch."""
        owners = owners or self.driver()
        row = Partition.of_query(self.query_id)
        owners.find([row])
        chosen = self.place.options(ledger="batch-id", **options)
        return Work(
            options=chosen,
            batch_id=batch_id,
            instance=owners._ledger.session.instance,
            grants=(owners.held[row],),
            ranges={row: Range(partition=row, start=batch_id, end=batch_id + 1)},
            parts=(Part(options=chosen, table=str(chosen.table), columns=("partition", "offset"), has_places=False),),
            report={
                "group_id": self.place.name,
                "query_id": self.query_id,
                "run_id": "run",
                "batch_id": batch_id,
                "name": None,
                "fingerprint": None,
            },
        )


def run(transaction: Any, work: Work, batches: Iterable[pa.RecordBatch]) -> dict[str, Any]:
    """Run one attempt to its end and return what it reports."""
    work = replace(work, options=replace(work.options, transaction=transaction))
    results = [json.loads(batch.column(0)[0].as_py()) for batch in write_task(work, batches)]
    return results[0] if results else {}


def interrupted(batches: Iterable[pa.RecordBatch], then: Callable[[], object]) -> Iterator[pa.RecordBatch]:
    """Give batches, and do something before the input ends."""
    yield from batches
    then()
