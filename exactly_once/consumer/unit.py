"""Unit: one batch of messages and the transaction in which they take effect, as a user meets it."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from enum import Enum
from itertools import chain
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, LiteralString, Protocol, Self

from confluent_kafka import Message
from psycopg import sql
from psycopg.pq import PipelineStatus

from exactly_once._failpoints import failpoint
from exactly_once._log import text_of
from exactly_once._model import Advance
from exactly_once.errors import ConfigurationError, UnitNotFinished, WrongThreadOrProcess
from exactly_once.ledger import claims, dead_letters
from exactly_once.ledger.outcome import Fault
from exactly_once.ledger.session import Connection, lend, take_back
from exactly_once.ledger.transaction import UnitOfWork

from .buffer import Sent
from .identity import Identity

if TYPE_CHECKING:
    import psycopg
    from psycopg.abc import Params

# What psycopg executes; a string must be a literal, so that no value gets into it but as a parameter.
Statement = LiteralString | bytes | sql.SQL | sql.Composed


class Stage(Enum):
    """How far a unit has come."""

    NEW = "not entered"
    OPEN = "open"
    FINISHING = "finishing"
    JOINED = "in a joined transaction, to be resolved by the next iteration"
    DONE = "done"
    FAILED = "failed"


class EndsUnits(Protocol):
    """What brings a unit to its end."""

    def begin(self, unit: Unit) -> None:
        """Open the unit's transaction."""

    def join(self, unit: Unit, connection: Connection) -> None:
        """Have the unit take part in somebody else's transaction."""
        raise AssertionError("the unit was entered before the handler got it")

    def leave(self, unit: Unit) -> None:
        """Move the offsets in the joined transaction."""
        raise AssertionError("no unit of ours was joined")

    def finish(self, unit: Unit) -> None:
        """Commit the unit, or raise what became of it."""

    def abandon(self, unit: Unit, error: BaseException) -> None:
        """Undo the unit; raise instead of ``error`` where that says more."""

    def used_late(self, unit: Unit) -> None:
        """Take note that a thread has used a unit that was committed."""
        return


class Unit:
    """A batch of messages in one transaction: ``with unit:`` commits on leaving.

    An exception in the block rolls everything back, the same messages come again in a new unit, and
    it always propagates. What is nobody's fault is raised as :class:`~exactly_once.Redelivered`.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        advances: Sequence[Advance],
        *,
        attempt: int,
        work: UnitOfWork,
        commits: EndsUnits,
    ) -> None:
        topics = {advance.partition.topic for advance in advances}
        # The messages as the broker sent them.
        self.sent = Sent(messages, only_topic=topics.pop() if len(topics) == 1 else None)
        self.messages = self.sent.messages
        # How many the handler is given, which may put something else in ``messages``.
        self.given = len(self.sent)
        self.attempt = attempt
        self._advances = tuple(advances)
        self.work = work
        self.stage = Stage.NEW
        # Whose fault it was that the unit failed.
        self.fault: Fault | None = None
        # What it has made dead letters of, and why, for the log when it has committed.
        self.letters: list[tuple[Message, str]] = []
        # Whether the handler has asked the unit for its connection, or for what goes over it.
        self.is_touched = False
        # Whether the handler has claimed a key that was claimed already.
        self.is_claim_refused = False
        # Whether its connection was used, be it by a framework that has it from elsewhere.
        self.is_connection_used = False
        # Whether a thread of the handler has used it behind the block; if it commits, that is lost.
        self.is_used_late = False
        # Whether that was logged.
        self.is_loss_told = False
        # Whether its owner was told that the next one was asked for before its end.
        self.is_told = False
        # Whether Kafka took partitions of it while it was open.
        self.is_taken = False
        # How often its only message was tried alone, where somebody counts.
        self.tries_alone: int | None = None
        # Which thread the handler runs in; it may have others use the unit.
        self.thread = 0
        # Whether somebody else holds the connection too, so that the order of statements is not ours to keep.
        self.is_lent = False
        self._commits = commits
        self._process = 0  # that has entered it; a child of it must not end the transaction

    @property
    def advances(self) -> tuple[Advance, ...]:
        """How far the unit moves each of its partitions; a handler cannot change it."""
        return self._advances

    def __repr__(self) -> str:
        span = ", ".join(f"{a.partition} {a.expected}..{a.next_offset - 1}" for a in self.advances)
        return f"<Unit {self.stage.value}: {len(self.sent)} messages, {span}, attempt {self.attempt}>"

    def __enter__(self) -> Self:
        self._enter()
        self._commits.begin(self)
        lend(self.work.connection, self._note_use)
        self.stage = Stage.OPEN
        return self

    def _note_use(self) -> None:
        """Keep the order of statements also for a framework that has the connection from elsewhere."""
        self._check_process("used")
        self.is_connection_used = True
        self.work.is_shared |= get_ident() != self.thread
        if self.stage is Stage.OPEN and self.work.can_flush:
            self.work.flush()

    def _enter(self) -> None:
        if self.stage is not Stage.NEW:
            raise UnitNotFinished(f"this unit was entered before: {self!r}; iterate on for the next one")
        self.stage = Stage.FAILED  # unless it gets further
        self._process, self.thread = os.getpid(), get_ident()

    def _check_process(self, done: str) -> None:
        """Keep a child of ours, which has the same connection, from using it, and from ending the transaction."""
        if os.getpid() != self._process:
            raise WrongThreadOrProcess(
                f"{self!r} was entered by process {self._process} and {done} by its child {os.getpid()}: it has the "
                "same connection, so answers would get mixed up. Have children compute only, and the handler write "
                "what they return. What a handler forks must end with os._exit() there; better use subprocess, or "
                "multiprocessing with spawn"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._check_process("left")
        elif os.getpid() != self._process:
            return  # a child of the handler ends by an error of its own, sys.exit() perhaps
        self.stage = Stage.FAILED if error is not None else Stage.FINISHING
        try:
            take_back(self.work.connection)
            if error is not None:
                self._commits.abandon(self, error)
            else:
                failpoint("handled")
                self._commits.finish(self)
                self.settle()
        finally:
            if self.stage is Stage.FINISHING:
                self.stage = Stage.FAILED

    def settle(self) -> None:
        """Take note that it is committed."""
        self.stage = Stage.DONE
        if self.is_used_late:  # set before the stage is looked at, so that one of both sees the other
            self._commits.used_late(self)

    @contextlib.contextmanager
    def join(self, connection: Connection) -> Iterator[Self]:
        """Take part in a transaction that you opened on ``connection`` and will end yourself.

        Instead of ``with unit:``. On leaving the block the offsets have moved in your transaction, and nothing
        is committed. The next iteration finds out what became of it: committed, and the next messages come;
        rolled back, and the same ones come again. Savepoints must enclose the block entirely.

        :raises UnitNotFinished: by the next iteration, when your transaction is still open then.
        :raises HandlerCommitted: by the next iteration, when you committed although the block had failed.
        :raises Redelivered: when another owner has taken the partitions, or the offsets meet a conflict; roll back.
        """
        self._enter()
        self.is_lent = True
        self._commits.join(self, connection)
        self.is_touched = True  # what is done in it goes past the unit
        self.stage = Stage.OPEN
        try:
            yield self
            self._check_process("left")
            self.stage = Stage.FINISHING
            failpoint("handled")
            self._commits.leave(self)
        finally:
            self.stage = Stage.JOINED

    @property
    def connection(self) -> Connection:
        """The psycopg connection with the open transaction, for everything that has no shortcut here.

        Savepoints (``with connection.transaction():``) are fine. Inside ``with unit:`` its ``commit()``,
        ``rollback()``, ``close()`` and ``autocommit`` raise :class:`~exactly_once.TransactionNotYours`.

        What was deferred is executed first, and what is deferred from now on is executed at once.

        :raises UnitNotFinished: outside of the ``with`` block.
        """
        connection = self._flushed()
        self.is_lent = True
        return connection

    def _flushed(self) -> Connection:
        """Return the connection after everything that was deferred."""
        self._check_open()
        self.work.flush()
        return self.work.connection

    def _check_open(self) -> None:
        if self.stage is not Stage.OPEN:
            self.is_used_late |= get_ident() != self.thread
            if self.stage is Stage.DONE and self.is_used_late:
                self._commits.used_late(self)  # perhaps nobody looks at what is raised there
            raise UnitNotFinished(f"this unit is not open: {self!r}; use it inside `with unit:`")
        self._check_process("used")
        self.is_touched = True

    def execute(self, query: Statement, params: Params | None = None) -> psycopg.Cursor[Any]:
        """Execute one statement in the transaction and return its cursor."""
        return self._flushed().execute(query, params)

    def executemany(self, query: Statement, params: Iterable[Params]) -> None:
        """Execute one statement for each set of parameters, in few round trips."""
        self._flushed().cursor().executemany(query, params)

    def defer(self, query: Statement, params: Params | None = None) -> None:
        """Execute one statement later, without its results: with the offsets and COMMIT, in one round trip for all.

        Parameters are converted now, by the server's types as :meth:`execute` does. Statements keep the order of the
        calls: what was deferred goes before whatever the unit executes next, and at once where ``unit.connection``
        was used before. Its error is the handler's error, raised then or on leaving the block.

        :raises psycopg.Error: for a value that no adapter takes, or parameters that do not fit the placeholders.
        :raises UnitNotFinished: outside of the ``with`` block.
        """
        self._check_open()
        # Within a pipeline of somebody who has the connection from elsewhere it is in one already.
        if self.is_lent or self.work.connection.pgconn.pipeline_status != PipelineStatus.OFF:
            self.work.connection.execute(query, params)
        else:
            self.work.defer(query, params)

    def claim(self, key: claims.Key) -> bool:
        """Claim the key of an event in the transaction; return False where a unit of the group has it already.

        Of events with the same key, at whatever offset, partition or topic of the group, one gets True: the first whose
        unit commits. While another unit with it is open this waits for its end. What comes again after a rollback
        gets True again. ``b"1"``, ``"1"`` and ``1`` are three keys. Keys are held for ever, or as long as the
        consumer's ``claims_window`` says.

        :raises TypeError: for what is no bytes, str, int or UUID.
        :raises ValueError: for an empty key.
        :raises UnitNotFinished: outside of the ``with`` block.
        """
        return self.claim_many((key,))[0]

    def claim_many(self, keys: Iterable[claims.Key]) -> list[bool]:
        """Claim several keys as :meth:`claim` does, in one statement; return an answer for each, in order.

        Of equal keys among them the first can get True. Raises as :meth:`claim`, and nothing is claimed then.

        :raises TypeError: also for one key in place of several.
        """
        if isinstance(keys, bytes | bytearray | memoryview | str):
            raise TypeError(
                f"claim_many takes several keys, not one {type(keys).__name__}, whose parts would be claimed"
            )
        answers = claims.claim(self._flushed(), keys, schema=self.work.schema, group_id=self.work.group_id)
        self.is_claim_refused |= not all(answers)
        return answers

    def dead_letter(self, message: Message, error: BaseException | str) -> None:
        """Make a message of this unit a dead letter, in the transaction: it counts as applied once the unit commits.

        What is stored is what the broker sent, also after ``message.set_value()`` and the like. What is a dead letter
        already stays the one that it is, and a warning says so. Each is logged (ERROR) once the unit has committed.

        :raises ValueError: when the message's partition is not one of this unit.
        """
        message, connection = self.sent.of(message), self._flushed()
        advance, before = self._advance_of(message), self.sent.before(message)
        # The offset after the message that comes before this one, in whichever unit that was.
        after = before + 1 if before is not None else advance.expected if advance.after is None else advance.after
        is_new = dead_letters.store(
            connection,
            message,
            error,
            schema=self.work.schema,
            group_id=self.work.group_id,
            advance=advance,
            after_offset=after,
            attempts=self.attempt if self.tries_alone is None else self.tries_alone,
        )
        if is_new:
            self.letters.append((message, text_of(error)))

    def identity(self, message: Message) -> Identity:
        """Name a message of this unit so that every redelivery has the same name: an idempotency key.

        :raises ConfigurationError: when the broker gives no ids; the topic's name alone would not be enough.
        :raises ValueError: when the message's partition is not one of this unit.
        """
        advance = self._advance_of(message := self.sent.of(message))
        if advance.cluster_id is None or advance.topic_id is None:
            raise ConfigurationError(
                f"{dead_letters.place_of(message)} has no identity: the broker gives no id of its topic or cluster. "
                "Grant DESCRIBE on the topic, or make a key of the content of the message"
            )
        return Identity(advance.cluster_id, advance.topic_id, advance.partition.number, message.offset() or 0)

    def _advance_of(self, message: Message) -> Advance:
        for advance in self.advances:
            if advance.partition == (message.topic(), message.partition()):
                return advance
        raise ValueError(f"{dead_letters.place_of(message)} does not belong to {self!r}")

    def copy(self, table: str | sql.Identifier, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Append rows to a table by COPY. ``table`` may be qualified: ``"bank.payment"``.

        ``rows`` is read to its end before COPY starts, so that an error in it costs no connection.
        """
        rows = list(rows)
        name = sql.Identifier(*table.split(".")) if isinstance(table, str) else table
        names = sql.SQL(", ").join(map(sql.Identifier, columns))
        statement = sql.SQL("COPY {} ({}) FROM STDIN").format(name, names)
        with self._flushed().cursor() as cursor, cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row(row)


def apply(handler: Callable[[Unit], object], unit: Unit) -> None:
    """Call a handler inside of a unit.

    :raises ConfigurationError: when it gave a coroutine, an iterator or a future: nothing is done yet.
    """
    with unit:
        call(handler, unit)


def call(handler: Callable[[Unit], object], unit: Unit) -> None:
    """Call a handler with a unit that is open; raise as :func:`apply` does."""
    refuse_undone(handler(unit), "the handler")


def refuse_undone(result: object, what: str) -> None:
    """Refuse what a function has returned in place of its effects, or that within two levels; as :func:`apply` does."""
    parts = _parts(result)
    results = [result, *parts, *chain.from_iterable(map(_parts, parts))]
    undone = [each for each in results if inspect.isawaitable(each) or isinstance(each, Future) or _is_lazy(each)]
    for each in undone:
        if inspect.iscoroutine(each):
            each.close()
    if undone:
        raise ConfigurationError(
            f"{what} returned {type(undone[0]).__name__} {undone[0]!r} instead of having its effects: "
            "write it with def, not async def, and without yield; wait for a future, and iterate over a map"
        )


def _parts(result: object) -> Iterable[object]:
    if isinstance(result, dict):
        return result.values()
    return result if isinstance(result, (list, tuple, set)) else ()


def _is_lazy(result: object) -> bool:
    """Tell an iterator of Python's own: a cursor, which is one too, has had its effects."""
    return isinstance(result, (Iterator, AsyncIterator)) and type(result).__module__ in ("builtins", "itertools")
