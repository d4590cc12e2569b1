"""The ledger: the changes of its rows, each one statement over all partitions concerned.

Every method but :meth:`Ledger.advance` opens its own short transaction, in which waiting for a lock is bounded: a lock
time-out surfaces as ``psycopg.errors.LockNotAvailable``. :meth:`Ledger.inside` is for a transaction that is open.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg import sql

from exactly_once._log import about, ago
from exactly_once._model import Advance, OwnerKind, Partition, Row
from exactly_once.errors import LedgerRowMissing, OwnedByConsumer, OwnedBySpark
from exactly_once.kafka.origin import Origin

from .commands import command, reset_command
from .libpq import send
from .session import ADAPTERS, Connection, Session, cursor_on, execute, last_row, storable
from .sql import query

logger = logging.getLogger(__name__)

# How long a change of the ledger waits for rows that another transaction has locked.
LOCK_SECONDS = 4.0
# How servers refuse to report which one they are: for a grant that lacks, or for good, as managed ones do.
_REFUSALS = (
    psycopg.errors.InsufficientPrivilege,
    psycopg.errors.FeatureNotSupported,
    psycopg.errors.ObjectNotInPrerequisiteState,  # Aurora without logical replication
    psycopg.errors.UndefinedFunction,
)

Watch = Callable[[int, Sequence[Partition]], AbstractContextManager[None]]


class Ledger:
    """The rows of one consumer group, seen by one owner.

    ``watch`` is entered around every statement that may wait for another owner's transaction.
    """

    def __init__(
        self,
        session: Session,
        *,
        group_id: str,
        owner_kind: OwnerKind,
        owner_name: str | None = None,
        take_over: bool = False,
        application: str | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.session = session
        self.group_id = group_id
        self._owner_kind = owner_kind
        self._owner_name = owner_name
        self._take_over = take_over
        # Which program applies the messages: written into each row that is acquired.
        self.application = application
        self._can_identify = True  # False once the server has refused to tell which one it is
        self._inside: Connection | None = None  # see inside(): whose transaction the changes are part of
        self._watch = watch or (lambda pid, partitions: contextlib.nullcontext())
        # The statement of an advance and the group's name in it, by the encoding of the connection that they are for.
        self._advance: dict[str, tuple[bytes, bytes]] = {}
        # A time-out of the role is for what the handler executes. Here it could end a wait for our own row, or cut
        # short COMMIT's wait for a synchronous standby, after which it has committed all the same.

        # What goes before the advance and the COMMIT of a unit.
        self.own_time = b"SET LOCAL statement_timeout = 0"

    def inside(self, connection: Connection) -> Ledger:
        """Return this ledger with changes that become part of the transaction that is open there.

        Whoever has opened that tries again, the whole of it: a second try inside could only meet what the first broke.
        """
        joined = copy(self)
        joined._inside = connection  # noqa: SLF001 - our own
        return joined

    def known(self, topics: Iterable[str]) -> tuple[set[Partition], set[Partition]]:
        """Return which partitions have rows, and which were ever given one."""
        found = self._ask("known", topics=list(topics))
        return {Partition(*place) for *place, has_row in found if has_row}, {Partition(*place) for *place, _ in found}

    def existing(self, partitions: Sequence[Partition]) -> set[Partition]:
        """Return those of the partitions that have a row, and nothing of what is in it."""
        return {Partition(*place) for place in self._ask("existing", **_keys(partitions))}

    def has_rows(self) -> bool:
        """Tell whether the group has a row of any topic."""
        ((has_rows,),) = self._ask("has_rows")
        return bool(has_rows)

    def topic_ids(self, topics: Iterable[str]) -> dict[str, set[str]]:
        """Return the ids under which the group has rows of topics, where they are known."""
        found: dict[str, set[str]] = {}
        for topic, topic_id in self._ask("topic_ids", topics=list(topics)):
            found.setdefault(topic, set()).add(topic_id)
        return found

    def origin(self) -> Origin:
        """Ask which database this is. Behind a pooler it may be another server from one question to the next."""
        name = "origin" if self._can_identify else "ledger_id"
        try:
            _, cursor = self.session.after_a_pause(lambda connection: execute(connection, self.session.schema, name))
        except _REFUSALS as error:
            self._can_identify = False
            logger.warning(
                "copies of this database and its old primaries cannot be distinguished from it: %s. Where a grant "
                "lacks: GRANT EXECUTE ON FUNCTION pg_control_system, pg_walfile_name, pg_current_wal_lsn TO the role "
                "of the workers",
                error,
                extra=about("origin_unknown", group=self.group_id),
            )
            return self.origin()
        ledger_id, server, timeline = last_row(cursor)
        return Origin(ledger_id, server, None if timeline is None else int(timeline, 16))

    def offsets(self, topics: Iterable[str]) -> dict[Partition, tuple[int | None, bool]]:
        """Look at the offsets of topics, and whether an operator has moved each since it was last advanced."""
        found = self._ask("offsets", topics=list(topics))
        return {Partition(topic, number): (offset, is_moved) for topic, number, offset, is_moved in found}

    def register(
        self,
        next_offsets: Mapping[Partition, int | None],
        *,
        cluster_id: str | None,
        topic_ids: Mapping[str, str | None],
    ) -> None:
        """Make the rows of partitions; those that exist stay as they are."""
        with self._changing([]) as cursor:
            self._run(cursor, "register_lock")
            self._run(
                cursor,
                "register",
                **_keys(next_offsets),
                next_offsets=list(next_offsets.values()),
                topic_ids=[topic_ids.get(p.topic) for p in next_offsets],
                cluster_id=cluster_id,
            )

    def acquire(self, partitions: Sequence[Partition], *, lock_seconds: float = LOCK_SECONDS) -> list[Row]:
        """Become the owner of rows and return them.

        Waits for a transaction of the old owner that has advanced, so it never returns a stale offset.

        :raises OwnedBySpark: when a Spark job owns a row; nothing is acquired then. Likewise
        :raises OwnedByConsumer: when this is a Spark job, and
        :raises LedgerRowMissing: when there is no row.
        """
        schema = self.session.schema
        with self._changing(partitions, lock_seconds=lock_seconds) as cursor:
            before = {row.partition: row for row in self._rows(cursor, "read_locked", _keys(partitions))}
            for partition in sorted(partitions):
                row = before.get(partition)
                if row is None:
                    raise row_missing(self.group_id, schema, partition)
                if row.owner_token is None or row.owner_kind == self._owner_kind or self._take_over:
                    continue
                owner = f"{row.owner_name or row.owner_instance}, owner epoch {row.owner_epoch}"
                since = ago(row.acquired_seconds_ago), ago(row.advanced_seconds_ago) or "never"
                error = OwnedBySpark if row.owner_kind == "spark" else OwnedByConsumer
                raise error(
                    f"{partition} of group {self.group_id!r} is owned by {row.owner_kind} ({owner}; acquired "
                    f"{since[0]}, last advanced {since[1]}) and was not released. If that owner has stopped for good, "
                    "start with take_over=True, or release its rows with: "
                    + command("hand-over", self.group_id, schema, "--to", self._owner_kind, "--topic", partition.topic)
                )
            rows = self._rows(
                cursor,
                "acquire",
                _row_keys(before.values()),
                token=uuid4(),
                owner_kind=self._owner_kind,
                owner_instance=self.session.instance,
                owner_name=None if self._owner_name is None else storable(self._owner_name, cursor.connection),
                application=None if self.application is None else storable(self.application, cursor.connection),
            )
        return [
            replace(
                row,
                # Whoever released it is well; only what is taken from somebody may be held up by him.
                previous_instance=old.owner_instance if old.owner_token is not None else None,
                previous_application=old.application,
                advanced_seconds_ago=old.advanced_seconds_ago,
            )
            for row in rows
            for old in [before[row.partition]]
        ]

    def look(self, partitions: Sequence[Partition]) -> list[Row]:
        """Read rows without a lock and without writing: enough for a suspicion, never for an offset."""
        with self._changing([]) as cursor:
            return self._rows(cursor, "look", _keys(partitions))

    def read(self, partitions: Sequence[Partition], *, lock_seconds: float = LOCK_SECONDS) -> list[Row]:
        """Read rows under lock: after every transaction that could still change them."""
        with self._changing(partitions, lock_seconds=lock_seconds, is_durable=False) as cursor:
            return self._rows(cursor, "read_locked", _keys(partitions))

    def start(self, rows: Iterable[Row]) -> set[Partition]:
        """Commit chosen starting offsets and ids; return the partitions that were still ours."""
        rows = list(rows)
        with self._changing([r.partition for r in rows]) as cursor:
            self._run(
                cursor,
                "start",
                **_row_keys(rows),
                tokens=[r.owner_token for r in rows],
                next_offsets=[r.next_offset for r in rows],
                leader_epochs=[r.leader_epoch for r in rows],
                topic_ids=[r.topic_id for r in rows],
                cluster_id=rows[0].cluster_id if rows else None,
            )
            return {Partition(*place) for place in cursor}

    def correct(self, row: Row, new_offset: int, *, reason: str) -> bool:
        """Move one row of ours that is out of range, with an entry in the audit table.

        Return False, with nothing changed, when the row is not ours any more or has moved.
        """
        with self._changing([row.partition]) as cursor:
            self._run(
                cursor,
                "correct",
                topic=row.partition.topic,
                partition=row.partition.number,
                generation=row.generation,
                token=row.owner_token,
                old_offset=row.next_offset,
                new_offset=new_offset,
                reason=reason,
            )
            return cursor.rowcount == 1

    def identify(self, tokens: Mapping[Partition, UUID], topic_id: str, *, cluster_id: str | None) -> None:
        """Fill in the topic id of rows of ours that have none, with an entry in the audit table."""
        with self._changing(list(tokens)) as cursor:
            rows = self._rows(cursor, "read_locked", _keys(tokens))
            self._run(
                cursor,
                "identify",
                **_row_keys(rows),
                tokens=[tokens[row.partition] for row in rows],
                topic_ids=[topic_id] * len(rows),
                cluster_id=cluster_id,
            )

    def advance(self, connection: Connection, advances: Sequence[Advance], *, xid: str, commit: bool) -> None:
        """Move the rows of one unit inside its open transaction; COMMIT in the same round trip if asked.

        The server itself raises on a short count, so that a COMMIT behind it is never reached.

        :raises psycopg.Error: with SQLSTATE EO001 for a short count, EO002 in a foreign transaction.
        """
        statement = self.advance_statement(connection, advances, xid=xid)
        send(connection, b"; ".join((self.own_time, statement, b"COMMIT")) if commit else statement)

    def advance_statement(self, connection: Connection, advances: Sequence[Advance], *, xid: str) -> bytes:
        """Write the one statement that :meth:`advance` executes, for whoever sends others with it."""
        # Written out instead of bound: only without parameters may two statements share one message.
        encoding = connection.info.encoding
        if encoding not in self._advance:
            parts = query("advance", self.session.schema), sql.Literal(self.group_id)
            statement, group_id = (part.as_bytes(cursor_on(connection)) for part in parts)
            self._advance[encoding] = statement, group_id
        statement, group_id = self._advance[encoding]
        values = {
            b"xid": b"'%d'" % int(xid),
            b"group_id": group_id,
            b"topics": _literals(tuple([a.partition.topic for a in advances])),
            b"partitions": _array([a.partition.number for a in advances]),
            b"generations": _array([a.generation for a in advances]),
            b"tokens": _literals(tuple([a.token for a in advances])),
            b"epochs": _array([a.epoch for a in advances]),
            b"topic_ids": _literals(tuple([a.topic_id for a in advances])),
            b"expected": _array([a.expected for a in advances]),
            b"next_offsets": _array([a.next_offset for a in advances]),
            b"leader_epochs": _array([a.leader_epoch for a in advances]),
            b"rotates": b"true" if any(a.rotates for a in advances) else b"false",
        }
        return statement % values

    def move_to_ends(self, advances: Sequence[Advance], *, lock_seconds: float) -> None:
        """Move rows to the ends of their logs, behind offsets without messages, in a transaction of its own.

        :raises psycopg.Error: with SQLSTATE EO001, and nothing moved, when one of them is not as it was left.
        """
        with self._changing([], lock_seconds=lock_seconds) as cursor:
            self._run(cursor, "current_xid")
            self.advance(cursor.connection, advances, xid=last_row(cursor)[0], commit=False)
            self._run(
                cursor,
                "move_dead_letters",
                **_keys(a.partition for a in advances),
                expected=[a.expected for a in advances],
                next_offsets=[a.next_offset for a in advances],
            )

    def resolve(self, partitions: Sequence[Partition], tokens: list[UUID], *, lock_seconds: float) -> list[Row]:
        """Acquire our own rows under a fresh token; return those that were still ours.

        The token is added to ``tokens`` before it is sent, so that the call can be repeated when
        its answer was lost.
        """
        tokens.append(uuid4())
        with self._changing(partitions, lock_seconds=lock_seconds) as cursor:
            keys = _row_keys(self._rows(cursor, "read_locked", _keys(partitions)))
            return self._rows(cursor, "resolve", keys, token=tokens[-1], tokens=tokens)

    def release(self, held: Sequence[tuple[Partition, UUID]]) -> None:
        """Give rows back. Rows that are locked or not ours any more are left alone."""
        with self._changing([]) as cursor:
            self._run(cursor, "release", **_keys(p for p, _ in held), tokens=[token for _, token in held])

    def halt(self, advances: Sequence[Advance], *, reason: str) -> set[Partition]:
        """Forbid anybody to acquire these rows until an operator has reset them, and fence whoever owns them.

        Return which were halted: not those that have moved beyond what was expected of them.
        """
        with self._changing([a.partition for a in advances]) as cursor:
            rows = self._rows(cursor, "read_locked", _keys(a.partition for a in advances))
            by_partition = {a.partition: a for a in advances}
            found = [by_partition[row.partition] for row in rows]
            self._run(
                cursor,
                "halt",
                **_row_keys(rows),
                tokens=[a.token for a in found],
                topic_ids=[a.topic_id for a in found],
                expected=[a.expected for a in found],
                reason=reason,
            )
            return {Partition(*place) for place in cursor}

    @contextlib.contextmanager
    def _changing(
        self, waiting: Sequence[Partition], *, lock_seconds: float = LOCK_SECONDS, is_durable: bool = True
    ) -> Iterator[psycopg.Cursor[tuple[Any, ...]]]:
        if self._inside is not None:
            yield cursor_on(self._inside)
            return
        opening = self.session.ledger_transaction(lock_timeout_seconds=lock_seconds, is_durable=is_durable)
        with opening as (connection, pid), self._watch(pid, waiting) if waiting else contextlib.nullcontext():
            yield cursor_on(connection)

    def _ask(self, name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        """Read without a lock and without writing."""
        with self._changing([], is_durable=False) as cursor:
            self._run(cursor, name, **parameters)
            return cursor.fetchall()

    def _run(self, cursor: psycopg.Cursor[tuple[Any, ...]], name: str, /, **parameters: Any) -> None:
        statement = query(name, self.session.schema)
        cursor.execute(statement, {"group_id": self.group_id, **parameters}, prepare=False)

    def _rows(
        self,
        cursor: psycopg.Cursor[tuple[Any, ...]],
        name: str,
        keys: Mapping[str, Any],
        **parameters: Any,
    ) -> list[Row]:
        self._run(cursor, name, **keys, **parameters)
        assert cursor.description is not None
        columns = [column.name for column in cursor.description][2:]
        return [
            Row(partition=Partition(topic, number), **dict(zip(columns, rest, strict=True)))
            for topic, number, *rest in cursor
        ]


def row_missing(group_id: str, schema: str, partition: Partition) -> LedgerRowMissing:
    """Describe a row that should be there."""
    return LedgerRowMissing(
        f"the ledger has no row of {partition} for group {group_id!r}, and has had one or has others of the topic: it "
        "was deleted, a failover lost it, or a policy of row-level security hides it from this role. One that a "
        "failover lost is made again; if it stays away, restore it, or give it an offset with: "
        f"{reset_command(group_id, schema, partition)}"
    )


def _keys(partitions: Iterable[Partition]) -> dict[str, Any]:
    """Split partitions into the two arrays that every statement takes."""
    partitions = list(partitions)
    return {"topics": [p.topic for p in partitions], "partitions": [p.number for p in partitions]}


def _row_keys(rows: Iterable[Row]) -> dict[str, Any]:
    """Split rows into the arrays that statements take behind a lock, or by a grant: the key with its generation."""
    rows = list(rows)
    return {**_keys(row.partition for row in rows), "generations": [row.generation for row in rows]}


def _array(values: list[int] | list[int | None]) -> bytes:
    """Write numbers and nulls as a literal array."""
    return f"'{{{','.join(['NULL' if value is None else str(value) for value in values])}}}'".encode()


@lru_cache(maxsize=192)  # three for each set of partitions that units are of
def _literals(values: tuple[UUID | str | None, ...]) -> bytes:
    """Write tokens, or Kafka's names and ids, which are ASCII, as a literal array. Many units have the same."""
    return b"ARRAY[%b]" % b",".join([sql.Literal(value).as_bytes(ADAPTERS) for value in values]) if values else b"'{}'"
