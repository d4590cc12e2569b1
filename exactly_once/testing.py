"""Testing: messages and units for tests of your handlers, and crashes at a chosen moment of the protocol.

    with unit(connection, [message("payments", b"12")]) as u:
        apply(u)
        assert connection.execute("SELECT balance FROM account").fetchone() == (12,)

Nothing here needs a broker, nor the ledger's tables.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from uuid import UUID

import psycopg
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_NOT_AVAILABLE, Message
from psycopg.pq import TransactionStatus

from . import _failpoints
from ._model import Advance, Partition, Sent
from .consumer.unit import EndsUnits, Unit
from .errors import HandlerCommitted, UnitNotUsed
from .ledger.dead_letters import as_bytes
from .ledger.rows import Ledger
from .ledger.session import Connection, Session, execute, is_lost, last_row, psycopg_connection
from .ledger.transaction import UnitOfWork, transaction_ended

# The moments that every unit passes, in their order: for :func:`crash_at` and :func:`failing_at`.
FAILPOINTS = _failpoints.OF_A_UNIT

# The cluster of every unit made here; its topics have their names as ids. See :meth:`Unit.identity`.
CLUSTER_ID = "test-cluster"

_NOBODY = UUID(int=0)
_offsets = itertools.count()


def message(
    topic: str,
    value: str | bytes | None = None,
    *,
    key: str | bytes | None = None,
    headers: Sequence[tuple[str, str | bytes | None]] | None = None,
    partition: int = 0,
    offset: int | None = None,
    timestamp: int | None = None,
) -> Message:
    """Make a message as a consumer delivers it: text is encoded, ``timestamp`` is in milliseconds.

    Without ``offset`` it has a higher one than every message that was made so before.
    """
    return Message(
        topic=topic,
        partition=partition,
        offset=next(_offsets) if offset is None else offset,
        key=as_bytes(key),
        value=as_bytes(value),
        headers=None if headers is None else [(name, as_bytes(content)) for name, content in headers],
        timestamp=(TIMESTAMP_NOT_AVAILABLE, 0) if timestamp is None else (TIMESTAMP_CREATE_TIME, timestamp),
    )


@contextlib.contextmanager
def unit(
    connection: Connection,
    messages: Iterable[Message],
    *,
    attempt: int = 1,
    group_id: str = "test",
    schema: str = "exactly_once",
    unused_ok: bool = False,
) -> Iterator[Unit]:
    """Give a real unit in a transaction on your connection, and roll it back afterwards.

    Look at the effects inside the block, through the unit, which then executes what was deferred. At its end everything
    is checked as before a real COMMIT, deferred constraints too. What you did before in an open transaction of your own
    stays. ``schema`` is needed only by handlers that claim keys or make dead letters.

    :raises HandlerCommitted: when the handler sent COMMIT by itself; your test database keeps its effects.
    :raises UnitNotUsed: when nobody used the unit, so that what the handler did went elsewhere; ``unused_ok`` allows
        that, for handlers that do nothing with these messages.
    :raises HandlerError: when it called ``commit()`` or ``rollback()``, swallowed a SQL error, rolled back, or left a
        COPY, a pipeline or a block of ``transaction()`` open.
    """
    messages = list(messages)
    trial = _Trial(connection, group_id=group_id, schema=schema, unused_ok=unused_ok)
    with Unit(messages, _advances(messages), attempt=attempt, work=trial.work, commits=trial) as made:
        yield made


def crash_at(failpoint: str, *, nth: int = 1) -> None:
    """Have this process killed, as by ``kill -9``, when it passes the failpoint for the nth time.

    Call it in the worker process that your test starts.

    :raises ValueError: for a name that is not in :data:`FAILPOINTS`, or one of the rarer ones.
    """
    _arm(failpoint, nth, lambda: os.kill(os.getpid(), signal.SIGKILL))


@contextlib.contextmanager
def failing_at(failpoint: str, error: BaseException, *, nth: int = 1) -> Iterator[None]:
    """Raise ``error`` where this process passes the failpoint for the nth time inside the block.

    :raises AssertionError: when it was not passed so often, so that a test cannot pass in vain.
    """
    struck: list[bool] = []

    def strike() -> None:
        struck.append(True)
        raise error

    _arm(failpoint, nth, strike)
    try:
        yield
    finally:
        _failpoints.disarm()
    if not struck:
        raise AssertionError(f"the failpoint {failpoint!r} was not passed {nth} times")


class _Trial(EndsUnits):
    """EndsUnits a unit on a test's connection: guards and constraints as in production, then ROLLBACK."""

    def __init__(self, connection: Connection, *, group_id: str, schema: str, unused_ok: bool) -> None:
        self._connection = psycopg_connection(connection, "unit() was given")
        self._unused_ok = unused_ok
        self._written = 0
        self._is_nested = False
        session = self._session = Session(lambda: connection, schema=schema, owns_rows=False)
        self.work = UnitOfWork(Ledger(session, group_id=group_id, owner_kind="consumer"))

    def begin(self, unit: Unit) -> None:
        status = self._connection.info.transaction_status
        self._is_nested = status is TransactionStatus.INTRANS
        if self._is_nested:
            self._execute("savepoint")
        elif self._connection.autocommit:
            self._connection.execute("BEGIN", prepare=False)
        self.work.join(self._connection)
        self._written = self._rows_written()
        self.work.sent = Sent.NOTHING  # the guards are to speak as in production

    def finish(self, unit: Unit) -> None:
        try:
            self.work.guard()
            self.work.flush()
            if self._fate() == "aborted":
                raise transaction_ended()
            self._execute("check_constraints")
            # The test itself may look at effects over the connection; only what is written tells of a framework.
            is_used = unit.is_touched or self._rows_written() > self._written
            if unit.messages and not is_used and not self._unused_ok:
                raise UnitNotUsed(
                    f"nothing was done through {unit!r}: effects on another connection, or elsewhere, are not in its "
                    "transaction and happen again at each redelivery. Use unit.execute or unit.connection; or pass "
                    "unused_ok=True if the handler has nothing to do for these messages"
                )
        except BaseException as error:
            self.abandon(unit, error)
            raise
        self.abandon(unit, None)

    def abandon(self, unit: Unit, error: BaseException | None) -> None:
        """Roll back to where the unit began; a connection that cannot do it is closed."""
        connection = self._connection
        status = connection.info.transaction_status
        if not is_lost(connection) and status is TransactionStatus.ACTIVE:
            connection.close()
        elif not is_lost(connection) and status is not TransactionStatus.IDLE:
            try:
                if not self._is_nested:
                    connection.execute("ROLLBACK", prepare=False)
                else:
                    self._execute("to_savepoint")
            except psycopg.errors.InvalidSavepointSpecification:
                # The handler ended the test's own transaction, and began another one.
                connection.execute("ROLLBACK", prepare=False)
        if not is_lost(connection) and self._fate() == "committed":
            raise HandlerCommitted(
                f"the handler committed by itself with the messages of {unit!r}: in production its effects would be "
                "durable and the offset not. Take COMMIT out of the handler and of what it calls"
            ) from error

    def _rows_written(self) -> int:
        rows: int = last_row(execute(self._connection, self.work.schema, "written"))[0]
        return rows

    def _execute(self, name: str) -> None:
        execute(self._connection, self.work.schema, name)

    def _fate(self) -> str | None:
        """Ask what became of the transaction; leaves no other one open."""
        assert self.work.begun is not None
        is_idle = self._connection.info.transaction_status is TransactionStatus.IDLE
        status = self._session.status(self.work.begun, on=self._connection)
        if is_idle and not self._connection.autocommit:
            self._connection.execute("ROLLBACK", prepare=False)
        return status


def _arm(failpoint: str, nth: int, action: Callable[[], object]) -> None:
    passes = itertools.count(1)

    def strike() -> None:
        if next(passes) == nth:
            action()

    _failpoints.arm(failpoint, strike)


def _advances(messages: Sequence[Message]) -> list[Advance]:
    """Say how far each partition would move.

    :raises ValueError: when the offsets of a partition do not increase; no consumer delivers that.
    """
    spans: dict[Partition, tuple[int, int]] = {}
    for each in messages:
        partition, offset = Partition.of(each), each.offset() or 0
        first, last = spans.get(partition, (offset, -1))
        if offset <= last:
            raise ValueError(f"offset {offset} of {partition} comes after {last}; offsets of a partition increase")
        spans[partition] = (first, offset)
    return [
        Advance(
            partition=partition,
            token=_NOBODY,
            epoch=0,
            topic_id=partition.topic,
            cluster_id=CLUSTER_ID,
            expected=first,
            next_offset=last + 1,
            leader_epoch=None,
        )
        for partition, (first, last) in sorted(spans.items())
    ]
