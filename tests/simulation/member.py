"""Member: the real consumer in a simulated process, with its ways to the database simulated too.

Only what talks to servers is replaced: session, SQL, admin client and Kafka client. Assignment,
ownership, buffer, units of work, commits, maintenance, mirrored offsets and start run as they are.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from unittest import mock
from uuid import UUID

import psycopg
from confluent_kafka import Message

from exactly_once import (
    AlreadyApplied,
    ExactlyOnceConsumer,
    Fenced,
    LedgerRewound,
    LedgerRowMissing,
    Redelivered,
    StartError,
)
from exactly_once._model import Advance, Partition, Row
from exactly_once.consumer.options import Options
from exactly_once.consumer.startup import Servers
from exactly_once.kafka.admin import Committed, Topic
from exactly_once.kafka.origin import Origin
from exactly_once.ledger.retry import retry_for
from exactly_once.ledger.rows import row_missing
from exactly_once.ledger.session import Begun

from .database import REGISTER, Connection, Database, ShortCount, Transaction, Violation, Waits
from .kafka import Client, Hiccup
from .scheduler import Killed

if TYPE_CHECKING:
    from .world import World


T = TypeVar("T")


class Unlucky(Exception):
    """What a handler raises by itself."""


class Member:
    """One process; a new one comes after a crash. ``connect=`` and the client's settings carry it along."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.world = world
        self.is_leaving = False
        self._is_handling = False
        self.connection: Connection | None = None
        self.client: Client
        self.actor = world.scheduler.spawn(name, self._run)
        settings = {
            "bootstrap.servers": "none",
            "group.id": "g",
            "group.protocol": "classic" if world.group.is_eager else "consumer",
            "simulated.member": self,
        }
        self.consumer = SimulatedConsumer(
            settings,
            connect=self,  # type: ignore[arg-type]
            start="earliest",
            startup_seconds=1e9,
            application="simulated",  # or each member looks for the program's file
            max_messages=world.rng.choice((1, 2, 3, 6)),
            linger_seconds=world.rng.choice((0.0, 0.0, 0.5)),
        )
        self.client = self.consumer._client  # type: ignore[assignment]

    def __call__(self) -> Connection:
        """Connect, as ``connect=`` does."""
        self.step("connects")
        if self.world.database.is_down or self.world.fault("no connection", 0.05):
            raise psycopg.OperationalError("connection refused")
        self.connection = Connection(self.world.database.incarnation)
        return self.connection

    @property
    def instance(self) -> UUID:
        """What it is called in the rows that it owns."""
        return self.consumer._session.instance

    def is_in_a_unit(self) -> bool:
        """Whether its handler is at work, in a transaction on the server that is there now."""
        connection = self.connection
        return (
            self._is_handling and connection is not None and connection.incarnation == self.world.database.incarnation
        )

    def step(self, what: str) -> None:
        """Let others go on before the next thing this member does."""
        self.world.note(self.name, what)
        self.world.scheduler.pause(self.actor)

    def die(self) -> None:
        """Kill the process; what it had sent may still arrive."""
        self.actor.is_dead = True
        self.lose_backend()

    def lose_backend(self) -> None:
        """End the connection on the server's side, except for a COMMIT that is under way there."""
        connection, self.connection = self.connection, None
        if connection is not None:
            _leave(self.world, connection)
            connection.incarnation = ""

    def _run(self) -> None:
        self.consumer.subscribe(["t"])
        units = self.consumer.units()
        while not self.is_leaving:
            try:
                unit = next(units)
                with unit:
                    self._handle(unit.connection, unit.messages)
            except (AlreadyApplied, LedgerRewound) as error:
                self._insist_on_upheaval(error)
            except Fenced as error:
                self._insist_on_thief(unit.advances, error)
            except (Redelivered, Unlucky, Hiccup) as error:
                self.world.note(self.name, type(error).__name__)
            except StartError as error:
                # The row went away with a failover; a real process would stop and be started again.
                self._insist_on_upheaval(error)
                break
            except (Killed, Violation):
                raise
            except psycopg.OperationalError as error:
                raise Violation(f"{self.name} was blamed for a connection that was lost: {error!r}") from error
            except BaseException as error:
                raise Violation(f"{self.name} broke: {error!r}") from error
        self.consumer.close()
        self.world.replace(self)

    def _handle(self, connection: Any, messages: Sequence[Message]) -> None:
        self._is_handling = True
        self.step("handles")
        self._is_handling = False
        effects = [(Partition(str(m.topic()), m.partition() or 0), m.offset() or 0) for m in messages]
        self.world.note(self.name, "effects", *(f"{p}@{o}" for p, o in effects))
        self.world.database.apply(_alive(self, connection), effects)
        if self.world.fault("the handler raises", 0.05):
            raise Unlucky

    def _insist_on_upheaval(self, error: Exception) -> None:
        """Without failover and reset no offset is ever a surprise: a second line of defence was needed."""
        self.world.note(self.name, type(error).__name__)
        if not self.world.database.upheavals:
            raise Violation(f"{self.name}: without failover or reset: {error!r}") from error

    def _insist_on_thief(self, advances: Sequence[Advance], error: Exception) -> None:
        """Being fenced needs somebody who fenced: a higher epoch, or a failover."""
        self.world.note(self.name, "Fenced")
        rows = self.world.database.rows
        if not self.world.database.upheavals and all(rows[a.partition].owner_epoch == a.epoch for a in advances):
            raise Violation(f"{self.name} was fenced by nobody: {error!r}") from error


def _alive(member: Member, connection: Connection) -> Transaction:
    """Return the open transaction, or find out that server or backend are gone."""
    transaction = connection.open_transaction
    if (
        connection.incarnation != member.world.database.incarnation
        or transaction is None
        or transaction.status != "in progress"
    ):
        connection.broken = True
        raise psycopg.OperationalError("server closed the connection unexpectedly")
    return transaction


def _leave(world: World, connection: Connection) -> None:
    """The client is gone: the server aborts, unless COMMIT is on its way already."""
    transaction, connection.open_transaction = connection.open_transaction, None
    if transaction is None or transaction.status != "in progress":
        return
    if transaction.is_commit_sent and world.rng.random() < 0.6:
        world.database.in_flight.append(transaction)
    else:
        world.database.abort(transaction)


class Session:
    """Stands for ``session.Session``."""

    def __init__(self, connect: Member, *, schema: str) -> None:
        self.member: Member = inspect.unwrap(connect)  # the consumer has wrapped it to hear of warnings
        self.schema = schema
        self.instance: UUID = self.member.world.uuid()
        self._connection: Connection | None = None

    @property
    def connection(self) -> Connection:
        if self._connection is None or self.lost:
            self.discard()
            self._connection = self.member()
        return self._connection

    @property
    def lost(self) -> bool:
        return self._connection is None or self._connection.broken or self._connection.closed

    def discard(self) -> None:
        if self._connection is not None:
            _leave(self.member.world, self._connection)
            self._connection.closed = True
        self._connection = None

    def begin(self, isolation: str, *, may_take: float = 60.0) -> Begun:
        connection = self.connection
        self.member.step("begins")
        if connection.incarnation != self.member.world.database.incarnation:
            connection.broken = True
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        connection.open_transaction = self.member.world.database.begin(self.instance)
        connection.is_in_error = False
        return Begun(connection.open_transaction.xid, 0, connection.incarnation)

    def join(self, connection: Connection, *, may_take: float = 60.0) -> NoReturn:
        raise Violation("no unit here is joined")

    def refuse_other_ledger(self, connection: Connection) -> NoReturn:
        raise Violation("no unit here is joined")

    def owns(self, connection: Connection) -> bool:
        return connection is self._connection

    def status(self, begun: Begun) -> NoReturn:
        raise Violation("only the outcome of joined units is asked for without ending them")

    def roll_back(self) -> None:
        if self._connection is None:
            return
        if self.lost:
            self.discard()
            return
        self.member.step("rolls back")
        if self._connection.open_transaction is not None and not self._connection.broken:
            self.member.world.database.abort(self._connection.open_transaction)
            self._connection.open_transaction = None

    def outcome(self, begun: Begun) -> str:
        connection = self.connection
        self.member.step("asks for the outcome")
        self._lose(connection, "asking for the outcome", 0.05)
        if connection.incarnation != begun.incarnation:
            return "aborted"
        database = self.member.world.database
        return database.outcome(database.transactions[begun.xid])

    def cut_after(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # no server stands still here, they only fail

    def close(self) -> None:
        self.discard()

    def lose(self, connection: Connection, what: str, probability: float) -> None:
        """Perhaps lose the connection here."""
        self._lose(connection, what, probability)

    def _lose(self, connection: Connection, what: str, probability: float) -> None:
        database = self.member.world.database
        if connection.incarnation != database.incarnation or self.member.world.fault(f"lost while {what}", probability):
            connection.broken = True
            raise psycopg.OperationalError(f"connection lost while {what}")


def _nothing(_: Transaction) -> list[Partition]:
    """Name no row: the statement waits for none."""
    return []


class Ledger:
    """Stands for ``ledger.Ledger``: the same changes, on the simulated database."""

    def __init__(self, session: Session, *, group_id: str, **options: Any) -> None:
        self.session = session
        self.group_id = group_id
        self.application: str | None = None
        self.own_time = b""
        self._member = session.member
        self._database: Database = session.member.world.database

    def known(self, topics: Iterable[str]) -> tuple[set[Partition], set[Partition]]:
        return self._change("known", _nothing, lambda _: (set(self._database.rows),) * 2, topics)

    def origin(self) -> Origin:
        return Origin("simulated")

    def offsets(self, topics: Iterable[str]) -> dict[Partition, tuple[int | None, bool]]:
        # Looked at as it is: with the one origin that there is here, the comparison only tells, and decides nothing.
        return {p: (row.next_offset, False) for p, row in self._database.rows.items()}

    def register(self, next_offsets: Mapping[Partition, int | None], **ids: Any) -> None:
        def body(transaction: Transaction) -> None:
            for p, offset in next_offsets.items():
                if p not in self._database.rows:
                    transaction.rows[p] = Row(partition=p, next_offset=offset, cluster_id="c", topic_id="id")

        self._change("register", lambda _: [REGISTER], body, next_offsets)

    def acquire(self, partitions: Sequence[Partition], *, lock_seconds: float = 4.0) -> list[Row]:
        token = self._member.world.uuid()

        def body(transaction: Transaction) -> list[Row]:
            for partition in partitions:
                if partition not in self._database.rows:
                    raise row_missing(self.group_id, self.session.schema, partition)  # lost in a failover
            return self._write(
                transaction,
                partitions,
                lambda row: replace(
                    row,
                    owner_epoch=row.owner_epoch + 1,
                    owner_token=token,
                    owner_kind="consumer",
                    owner_instance=self.session.instance,
                ),
            )

        return self._change("acquire", lambda _: partitions, body, partitions)

    def has_rows(self) -> bool:
        return self._change("has_rows", _nothing, lambda _: bool(self._database.rows))

    def identify(self, tokens: Mapping[Partition, UUID], topic_id: str, *, cluster_id: str | None) -> NoReturn:
        raise Violation("every row here has an id")

    def advance_statement(self, connection: Connection, advances: Sequence[Advance], *, xid: str) -> NoReturn:
        raise Violation("no handler here defers a statement")

    def topic_ids(self, topics: Iterable[str]) -> dict[str, set[str]]:
        return {topic: {"id"} for topic in topics}

    def existing(self, partitions: Sequence[Partition]) -> set[Partition]:
        return {row.partition for row in self.look(partitions)}

    def look(self, partitions: Sequence[Partition]) -> list[Row]:
        return self._change("look", _nothing, lambda _: self._found(partitions), partitions)

    def read(self, partitions: Sequence[Partition], *, lock_seconds: float = 4.0) -> list[Row]:
        return self._change("read", lambda _: partitions, lambda _: self._found(partitions), partitions)

    def start(self, rows: Iterable[Row]) -> set[Partition]:
        wanted = {r.partition: r for r in rows}

        def ours(_: Transaction) -> list[Partition]:
            rows = self._found(wanted)
            return [
                r.partition for r in rows if r.owner_token == wanted[r.partition].owner_token and r.next_offset is None
            ]

        def body(transaction: Transaction) -> set[Partition]:
            started = self._write(
                transaction, ours(transaction), lambda row: replace(row, next_offset=wanted[row.partition].next_offset)
            )
            return {row.partition for row in started}

        return self._change("start", ours, body, list(wanted.values()))

    def correct(self, row: Row, new_offset: int, *, reason: str) -> NoReturn:
        raise Violation(f"no offset is ever out of range here: {reason}")

    def resolve(self, partitions: Sequence[Partition], tokens: list[UUID], *, lock_seconds: float) -> list[Row]:
        tokens.append(self._member.world.uuid())

        def body(transaction: Transaction) -> list[Row]:
            ours = [p for p in partitions if p in self._database.rows]
            ours = [p for p in ours if self._database.rows[p].owner_token in tokens]
            return self._write(transaction, ours, lambda row: replace(row, owner_token=tokens[-1]))

        return self._change("resolve", lambda _: partitions, body, partitions, list(tokens))

    def release(self, held: Sequence[tuple[Partition, UUID]]) -> None:
        def body(transaction: Transaction) -> None:
            for partition, token in held:
                if self._database.try_lock(transaction, [partition]) and self._may_release(partition, token):
                    self._write(transaction, [partition], lambda row: replace(row, owner_token=None))

        self._change("release", _nothing, body, held)

    def halt(self, advances: Sequence[Advance], *, reason: str) -> NoReturn:
        raise Violation(f"no handler here commits by itself: {reason}")

    def advance(self, connection: Connection, advances: Sequence[Advance], *, xid: str, commit: bool) -> None:
        """Advance and COMMIT in one message, which may arrive late, or whose answer may be lost."""
        assert commit
        transaction = _alive(self._member, connection)
        transaction.advances, transaction.is_commit_sent = list(advances), True
        self._member.step("sends advance and COMMIT")
        self._part(connection, "sending COMMIT")
        try:
            self._execute(
                transaction,
                connection,
                "advance",
                advances,
                waiting=lambda transaction: self._database.moved_by(transaction, advances),
                body=lambda transaction: self._database.advance(transaction, advances),
            )
        except psycopg.Error as error:
            connection.is_in_error = True
            transaction.is_commit_sent = False
            if error.sqlstate:  # the server says so, and has let all locks go
                self._database.abort(transaction)
            raise
        self._member.step("waits for COMMIT")
        self._part(connection, "waiting for COMMIT")
        self._commit(connection)

    def move_to_ends(self, advances: Sequence[Advance], *, lock_seconds: float) -> None:
        """Advance without effects: what is between the offsets must be nothing but holes."""
        for a in advances:
            if found := self._member.world.logs[a.partition].between(a.expected, a.next_offset):
                raise Violation(f"{self._member.name} would skip {a.partition}@{found}")
        self._change(
            "move_to_ends",
            lambda transaction: self._database.moved_by(transaction, advances),
            lambda transaction: self._database.advance(transaction, advances),
            advances,
        )

    def _may_release(self, partition: Partition, token: UUID) -> bool:
        row = self._database.rows.get(partition)
        return row is not None and row.owner_token == token

    def _change(
        self,
        name: str,
        waiting: Callable[[Transaction], Iterable[Partition]],
        body: Callable[[Transaction], T],
        *arguments: Any,
    ) -> T:
        """One short transaction; its COMMIT too may land late, or its answer be lost."""
        connection = self.session.connection
        self._member.step(name)
        self.session.lose(connection, name, 0.04)
        connection.open_transaction = transaction = self._database.begin(self.session.instance)
        connection.is_in_error = False
        try:
            result = self._execute(transaction, connection, name, *arguments, waiting=waiting, body=body)
        except (psycopg.Error, LedgerRowMissing):
            self._database.abort(transaction)
            connection.open_transaction = None
            raise
        if transaction.rows:
            transaction.is_commit_sent = True
            self._member.step(f"{name}: waits for COMMIT")
            self._part(connection, f"waiting for COMMIT of {name}")
        self._commit(connection)
        return result

    def _execute(
        self,
        transaction: Transaction,
        connection: Connection,
        name: str,
        *arguments: Any,
        waiting: Callable[[Transaction], Iterable[Partition]],
        body: Callable[[Transaction], T],
    ) -> T:
        """Execute one statement, when the locks are free for which it waits."""
        for _ in range(6):
            if self._database.try_lock(transaction, waiting(transaction)):
                break
            self._database.record(transaction, name, Waits(), *arguments)
            self._member.step("waits for a lock")
            _alive(self._member, connection)
        else:
            raise psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")
        try:
            answer = body(transaction)
        except (ShortCount, LedgerRowMissing) as error:
            self._database.record(transaction, name, error, *arguments)
            raise
        self._database.record(transaction, name, answer, *arguments)
        return answer

    def _commit(self, connection: Connection) -> None:
        self._database.commit(_alive(self._member, connection))
        connection.open_transaction = None
        self._member.step("committed, answer under way")
        self.session.lose(connection, "waiting for the answer", 0.04)

    def _part(self, connection: Connection, what: str) -> None:
        """Perhaps lose the connection while COMMIT is on its way."""
        _alive(self._member, connection)
        if self._member.world.fault(f"lost while {what}", 0.05):
            connection.broken = True
            _leave(self._member.world, connection)
            raise psycopg.OperationalError(f"connection lost while {what}")

    def _found(self, partitions: Iterable[Partition]) -> list[Row]:
        return [self._database.rows[p] for p in partitions if p in self._database.rows]

    def _write(
        self, transaction: Transaction, partitions: Iterable[Partition], change: Callable[[Row], Row]
    ) -> list[Row]:
        rows = [change(row) for row in self._found(partitions)]
        transaction.rows.update({row.partition: row for row in rows})
        return rows


class Cluster:
    """Stands for ``cluster.Cluster``: the broker's answers never change here."""

    cluster_id = "c"

    def close(self) -> None: ...

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._world: World = settings["simulated.member"].world

    def identify(self) -> str:
        return self.cluster_id

    def ask(self, topics: Iterable[str]) -> dict[str, Future[Topic]]:
        answers: dict[str, Future[Topic]] = {topic: Future() for topic in topics}
        for answer in answers.values():
            answer.set_result(Topic("id", len(self._world.logs)))
        return answers

    def described(self, name: str, future: Future[Topic]) -> Topic:
        return future.result()

    def describe(self, topics: Iterable[str]) -> dict[str, Topic]:
        return {name: future.result() for name, future in self.ask(topics).items()}

    def leader_epochs(self, partitions: list[Partition]) -> dict[Partition, int]:
        return dict.fromkeys(partitions, 1)

    def ranges(self, partitions: Iterable[Partition]) -> dict[Partition, tuple[int, int]]:
        return {p: (0, self._world.logs[p].end) for p in partitions}

    def available_ranges(self, partitions: Iterable[Partition]) -> tuple[dict[Partition, tuple[int, int]], None]:
        return self.ranges(partitions), None

    def committed(self, group_id: str, topic: str, partitions: int) -> dict[Partition, Committed]:
        return {}  # a group that lost all of its rows is refused, which ends a schedule; real servers show that


class StaleBackendTerminator:
    """Stands for ``stale_owners.StaleBackendTerminator``: frozen owners are ended by the world, at any time."""

    def __init__(self, connect: Member, **options: Any) -> None: ...

    def acquiring(self, pid: int, partitions: Sequence[Partition]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def watch(self, pid: int, **who: Any) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


_really_sleep = time.sleep


class Clock:
    """The time that the code under test sees; it passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self._thread = threading.get_ident()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        # Threads that others have left in this process, such as one of Spark's, must not turn without a pause.
        if threading.get_ident() != self._thread:
            _really_sleep(seconds)
            return
        self.now += seconds


@contextlib.contextmanager
def simulated(clock: Clock, seed: int) -> Iterator[None]:
    """Let time and jitter be the schedule's."""
    random.seed(seed)
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            mock.patch.object(time, "monotonic", clock.monotonic),
            mock.patch.object(time, "sleep", clock.sleep),
        ):
            yield
    finally:
        logging.disable(level)


def _check_database(session: Session, options: Options) -> None:
    """Stand for the first contact: a connection, however long it takes."""
    retry_for(options.startup_seconds)(lambda: session.connection)


def _check_topics_exist(*_: object) -> None:
    """Stand for the first contact with Kafka, which never fails here."""


class _Closing:
    """Close the client at once, in the member's own thread: the scheduler knows no other."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def wait(self, _: float) -> bool:
        self._client.close()
        return True


class SimulatedConsumer(ExactlyOnceConsumer):
    """The real consumer, with everything simulated that talks to servers."""

    _servers = Servers(
        session=Session,  # type: ignore[arg-type]
        ledger=Ledger,
        terminator=StaleBackendTerminator,  # type: ignore[arg-type]
        cluster=Cluster,  # type: ignore[arg-type]
        client=Client,  # type: ignore[arg-type]
        closing=_Closing,  # type: ignore[arg-type]
        check_database=_check_database,  # type: ignore[arg-type]
        check_topics_exist=_check_topics_exist,
    )
