"""Observer: what is true while the soak runs. It follows the logs, and compares ledger and effects with them."""

from __future__ import annotations

import contextlib
import logging
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psycopg
from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition
from psycopg import sql

from exactly_once.demo.journal import plain_consumer

from .worker import table

logger = logging.getLogger(__name__)

# Topic and partition.
Place = tuple[str, int]

_LEDGER = "SELECT group_id, topic, partition, coalesce(next_offset, 0), owner_epoch, halted FROM exactly_once.ledger"
# Of the primary: another one after a failover, which may have lost what was committed last.
_TIMELINE = "SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)"
_EFFECTS = """
    SELECT e.topic, e.partition, e."offset"
    FROM unnest(%s::text[], %s::int[], %s::bigint[]) AS s(topic, partition, compared),
         LATERAL (SELECT * FROM {table} e
                  WHERE e.topic = s.topic AND e.partition = s.partition AND e."offset" >= s.compared) e
"""
_PAUSE_SECONDS = 1.0  # between two snapshots: partitions move several times meanwhile


class Tail(threading.Thread):
    """Follows the logs, committed messages only. Offsets up to `upto` are complete."""

    def __init__(self, bootstrap_servers: str, topics: Mapping[str, int]) -> None:
        super().__init__(name="tail", daemon=True)
        self.places: list[Place] = [(topic, number) for topic, count in topics.items() for number in range(count)]
        # Written by this thread, read by others without a lock: an offset is in its list before `_upto` goes beyond it.
        self._offsets: dict[Place, list[int]] = {place: [] for place in self.places}
        self._upto: dict[Place, int] = dict.fromkeys(self.places, 0)
        self._stopping = threading.Event()
        self._consumer = plain_consumer(bootstrap_servers, "read_committed")

    def run(self) -> None:
        self._consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for topic, number in self.places])
        while not self._stopping.is_set():
            for message in self._consumer.consume(1000, 0.2):
                error = message.error()
                place = (message.topic() or "", message.partition() or 0)
                offset = message.offset() or 0
                if error is None:
                    self._offsets[place].append(offset)
                    self._upto[place] = offset + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    # What lies between the last message and here is markers and aborted messages, and never counts.
                    self._upto[place] = max(self._upto[place], offset)
                else:
                    logger.info("tail: %s", error)
        self._consumer.close()

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def upto(self, place: Place) -> int:
        return self._upto[place]

    def between(self, place: Place, first: int, end: int) -> list[int]:
        """Return the offsets of messages from ``first`` on and below ``end``."""
        offsets = self._offsets[place]
        return offsets[bisect_left(offsets, first) : bisect_left(offsets, end)]

    def last(self, place: Place) -> int:
        """Return the offset of the last message, -1 without one."""
        offsets = self._offsets[place]
        return offsets[-1] if offsets else -1

    @property
    def messages(self) -> int:
        return sum(map(len, self._offsets.values()))


class Anomaly(NamedTuple):
    """One thing that must not be."""

    kind: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}"


class Row(NamedTuple):
    """A row of the ledger."""

    next_offset: int
    epoch: int
    halted: str | None = None
    timeline: str | None = None  # of the server that has it; None before the first snapshot


@dataclass(slots=True)
class View:
    """One partition of one group, as the last snapshot had it."""

    row: Row = field(default_factory=lambda: Row(0, 0))
    compared: int = 0
    """Below this offset everything was compared."""


def judge(view: View, row: Row, effects: Sequence[int], known: Sequence[int], upto: int) -> Iterator[tuple[str, str]]:
    """Compare one snapshot of one partition with the log, from ``view.compared`` on; yield kinds and what is wrong.

    ``known`` has the offsets of the messages that count, complete below ``upto``.
    """
    is_same = row.timeline == view.row.timeline
    if is_same and (row.next_offset < view.row.next_offset or row.epoch < view.row.epoch):
        yield "non_monotonic", f"{view.row} became {row}"
    times = Counter(effects)
    for offset in sorted(times):
        if times[offset] > 1:
            yield "doubled", f"offset {offset} has {times[offset]} effects"
        if offset >= row.next_offset:
            yield "offset_behind", f"offset {offset} has an effect and the ledger stands at {row.next_offset}"
    # Behind it the ledger promises nothing yet, or the tail does not know what counts.
    horizon = min(row.next_offset, upto)
    counts = set(known)
    for offset in known:
        if offset < horizon and offset not in times:
            yield "offset_ahead", f"offset {offset} has no effect and the ledger stands at {row.next_offset}"
    for offset in times:
        if offset < horizon and offset not in counts:
            yield "foreign", f"offset {offset} has an effect and is no message that counts"


class Observer(threading.Thread):
    """Looks once a second; while the database is away it waits."""

    def __init__(self, conninfo: Callable[[], str], groups: Sequence[str], tail: Tail) -> None:
        super().__init__(name="observer", daemon=True)
        self._conninfo = conninfo
        self._groups = groups
        self._tail = tail
        self._stopping = threading.Event()
        # These three are written by this thread and read by the soak's.
        self.views = {(group, place): View() for group in groups for place in tail.places}
        self.snapshots = 0  # each compared all partitions of all groups
        self.anomalies: set[Anomaly] = set()

    def run(self) -> None:
        while not self._stopping.wait(_PAUSE_SECONDS):
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self._conninfo()) as connection:
                # The ledger and the effects of one moment: between two snapshots a unit may commit.
                connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                connection.read_only = True
                while not self._stopping.wait(_PAUSE_SECONDS):
                    self._look(connection)

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        places = self._tail.places
        effects: dict[tuple[str, Place], list[int]] = {}
        with connection.transaction():
            timeline = str(connection.execute(_TIMELINE).fetchall()[0][0])
            found = connection.execute(_LEDGER).fetchall()
            ledger = {(group, (topic, partition)): columns for group, topic, partition, *columns in found}
            for group in self._groups:
                compared = [self.views[group, place].compared for place in places]
                parameters = ([topic for topic, _ in places], [number for _, number in places], compared)
                rows = connection.execute(sql.SQL(_EFFECTS).format(table=table(group)), parameters)
                for topic, partition, offset in rows:
                    effects.setdefault((group, (topic, partition)), []).append(offset)
        for (group, place), view in self.views.items():
            # Without a row there was no owner yet, or a failover has lost it.
            next_offset, epoch, halted = ledger.get((group, place), (0, 0, None))
            row = Row(next_offset, epoch, halted, timeline)
            seen = effects.get((group, place), [])
            # First how far it is complete, then what is there: the tail goes on meanwhile.
            upto = self._tail.upto(place)
            known = self._tail.between(place, view.compared, max(upto, row.next_offset))
            where = f"group {group}, {place[0]} [{place[1]}]"
            if row.halted:
                self.anomalies.add(Anomaly("halted", where, row.halted))
            self.anomalies |= {Anomaly(kind, where, what) for kind, what in judge(view, row, seen, known, upto)}
            reached = min(upto, row.next_offset)
            view.compared = max(view.compared, reached) if row.timeline == view.row.timeline else reached
            view.row = row
        self.snapshots += 1
