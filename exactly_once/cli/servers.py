"""Servers: a command's connections to Postgres and Kafka, and what they report of partitions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import uuid4

import psycopg
from psycopg.rows import class_row

from exactly_once._model import Partition
from exactly_once.errors import ConfigurationError, DatabaseUnreachable, UnknownTopic
from exactly_once.kafka.admin import Cluster, Topic
from exactly_once.ledger import migrate as schemas
from exactly_once.ledger.session import Connection, Session, cursor_on, server_of
from exactly_once.ledger.sql import query
from exactly_once.ledger.stale_owners import StaleBackendTerminator

from .options import Settings
from .problems import CommandError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A row of the ledger as a snapshot showed it; the columns of the query ``status``."""

    group_id: str
    topic: str
    partition: int
    next_offset: int | None
    leader_epoch: int | None
    cluster_id: str | None
    topic_id: str | None
    owner_epoch: int
    owner_kind: str | None
    owner_name: str | None
    owner_instance: str | None
    owned: bool
    halted: str | None
    acquired_at: datetime | None
    advanced_at: datetime | None
    advanced_seconds_ago: float | None

    @property
    def place(self) -> Partition:
        return Partition(self.topic, self.partition)

    @property
    def owner(self) -> str | None:
        """Who owns the row now, by name if it has one."""
        return (self.owner_name or self.owner_instance) if self.owned else None

    @property
    def note(self) -> str | None:
        """What else a change of the row does."""
        fences = f"fences {self.owner_kind} {self.owner}" if self.owned else None
        goes_on = f"no longer halted: {self.halted}" if self.halted else None
        return "; ".join(filter(None, (fences, goes_on))) or None


class Log(NamedTuple):
    """The first offset of a partition's log and the one after its last."""

    start: int
    end: int


class CommandCluster(Cluster):
    """A cluster as commands ask it."""

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        found = {}
        # A topic that is gone is a problem of its rows, and is no reason to show nothing of the others.
        for name, future in self.ask(names).items():
            with contextlib.suppress(UnknownTopic):
                found[name] = self.described(name, future)
        return found

    def topic(self, name: str) -> Topic | None:
        """Return a topic that is about to be changed; None where the cluster has none.

        :raises CommandError: for one whose partitions this principal may not see.
        """
        found = self.topics([name]).get(name)
        if found is not None and not found.partitions:
            raise CommandError(
                f"Kafka does not report how many partitions {name!r} has: may this principal DESCRIBE the topic?"
            )
        return found

    def logs(self, partitions: Iterable[Partition]) -> dict[Partition, Log]:
        """Return where the logs of partitions that exist start and end."""
        return {partition: Log(*found) for partition, found in self.ranges(partitions).items()}


@contextlib.contextmanager
def naming_blockers(settings: Settings, connection: Connection, group_id: str) -> Iterator[None]:
    """Log for whom a statement of the connection waits: another session may have locked its table."""
    watcher = StaleBackendTerminator(settings.opener(), schema=settings.schema, group_id=group_id, instance=uuid4())
    with contextlib.closing(watcher), watcher.acquiring(connection.info.backend_pid, ()):
        yield


@contextlib.contextmanager
def open_database(settings: Settings, *, check: bool = True) -> Iterator[Session]:
    """Connect to Postgres and look whether the schema fits.

    :raises DatabaseUnreachable: naming host and port, or the function that was to connect.
    """
    # Without rows of its own: workers must not take this session for an owner that they have fenced.
    session = Session(settings.opener(), schema=settings.schema, owns_rows=False)
    try:
        try:
            connection = session.connection
        except psycopg.OperationalError as error:
            where = f"by {settings.connect}" if settings.connect else f"at {server_of(settings.required('conninfo'))}"
            raise DatabaseUnreachable(f"no connection to Postgres {where}: {error}") from error
        with naming_blockers(settings, connection, settings.group_id or ""):
            if check:
                schemas.check(connection, settings.schema)
            yield session
    finally:
        session.close()


def open_cluster(settings: Settings) -> CommandCluster:
    """Connect to Kafka.

    :raises BrokerUnreachable: naming the brokers, and why if the client knows.
    """
    try:
        cluster = CommandCluster(settings.admin())
        # Asked first: an error of the connection is reported here, once, instead of by what is asked next.
        cluster.identify()
    except ConfigurationError as error:
        raise UsageError(str(error)) from None
    return cluster


def stored_rows(
    session: Session, *, group_id: str | None, topic: str | None = None, counts_batches: bool = False
) -> list[Stored]:
    """Read rows of the ledger, a snapshot for looking: those of offsets, or those of batch ids, which Kafka ignores."""
    with cursor_on(session.connection, class_row(Stored)) as cursor:
        # Not prepared, as behind a pooler the next statement may run on another connection. Binary, as psycopg reads
        # times that are text in the usual DateStyle only.
        cursor.execute(query("status", session.schema), {"group_id": group_id}, prepare=False, binary=True)
        rows = [row for row in cursor if topic in (None, row.topic)]
    return [row for row in rows if row.place.counts_batches == counts_batches]
