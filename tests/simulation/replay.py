"""Replay: a schedule's statements on a real Postgres, in the order in which the simulated one executed them.

Each is sent by the real ledger on a connection of its own transaction. Every row, every SQLSTATE, who waits for a lock,
what became of a transaction, and what is committed must be as the simulated database said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import fields, replace
from typing import Any, NamedTuple
from unittest import mock
from uuid import UUID, uuid4

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from exactly_once._model import Advance, Partition, Row
from exactly_once.errors import ExactlyOnceError
from exactly_once.ledger import rows
from exactly_once.ledger.outcome import SHORT_COUNT
from exactly_once.ledger.session import Begun, Session, connector
from exactly_once.ledger.sql import query
from tests.support.waiting import until

from .database import Effect, State, Statement, Transaction, Violation, Waits

_SCHEMA = "exactly_once"
_WAITS = Waits.__name__
_TABLE = "simulated_effects"
_PREPARE = f"CREATE TABLE IF NOT EXISTS {_TABLE} (group_id text, topic text, partition int, at bigint)"
_APPLY = f"INSERT INTO {_TABLE} VALUES (%s, %s, %s, %s)"
_LOOK = f"""
    SELECT (SELECT jsonb_agg(l) FROM {_SCHEMA}.ledger l WHERE group_id = %(group_id)s),
           (SELECT jsonb_agg(e) FROM {_TABLE} e WHERE group_id = %(group_id)s),
           (SELECT coalesce(max(id), 0) FROM {_SCHEMA}.audit WHERE group_id = %(group_id)s)
"""
_CLEAR = (
    f"DELETE FROM {_SCHEMA}.ledger WHERE group_id = %(group_id)s",
    f"DELETE FROM {_TABLE} WHERE group_id = %(group_id)s",
    f"DELETE FROM {_SCHEMA}.audit WHERE group_id = %(group_id)s AND id > %(audit)s",
)
_RESTORE = (
    *_CLEAR,
    f"INSERT INTO {_SCHEMA}.ledger SELECT * FROM jsonb_populate_recordset(NULL::{_SCHEMA}.ledger, %(rows)s)",
    f"INSERT INTO {_TABLE} SELECT * FROM jsonb_populate_recordset(NULL::{_TABLE}, %(effects)s)",
)


_WRONG: tuple[Callable[[Advance], Advance], ...] = (
    lambda a: replace(a, token=uuid4()),
    lambda a: replace(a, epoch=a.epoch + 1),
    lambda a: replace(a, epoch=a.epoch - 1),
    lambda a: replace(a, topic_id="other"),
    lambda a: replace(a, topic_id=None),
    lambda a: replace(a, expected=a.expected + 1),
    lambda a: replace(a, expected=a.expected - 1),
    lambda a: replace(a, generation=a.generation + 1),
    lambda a: replace(a, partition=Partition(a.partition.topic, 99)),
)
"""What is wrong with an advance that is tried before each that moves something: every condition by itself counts."""


_HARMLESS = {"begin", "apply", "known", "has_rows", "look", "commit", "abort"}
"""What takes no locks."""


# How long a statement that waits for nobody may take before the server is asked whether it waits.
_USUAL_SECONDS = 0.01


class _Committed(NamedTuple):
    """What is committed on the real server, as it can be put back."""

    rows: list[dict[str, Any]]
    effects: list[dict[str, Any]]
    audit: int

    def state(self) -> State:
        effects: dict[Partition, list[int]] = {}
        for e in self.effects:
            effects.setdefault(Partition(e["topic"], e["partition"]), []).append(e["at"])
        return State(
            {Partition(r["topic"], r["partition"]): _row(r) for r in self.rows},
            {p: tuple(sorted(offsets)) for p, offsets in effects.items()},
        )


class _Backend:
    """A connection to the real server, and the transaction of ours that runs there."""

    def __init__(self, conninfo: str) -> None:
        self.session = Session(connector(conninfo), schema=_SCHEMA)
        self.begun = Begun("", 0, "")


class Replay:
    """The real server, for one schedule after another."""

    def __init__(self, conninfo: str) -> None:
        self._conninfo = make_conninfo(conninfo, options="-c lock_timeout=60s -c synchronous_commit=off")
        self._looker = psycopg.connect(self._conninfo, autocommit=True)
        self._looker.execute(_PREPARE)
        self._asker = Session(connector(self._conninfo), schema=_SCHEMA)
        self._free: list[_Backend] = []
        self._busy: dict[int, _Backend] = {}
        self._begun: dict[int, Begun] = {}
        self._history: list[_Committed] = []
        self._group_id = ""
        self._token = UUID(int=0)
        self._thread = ThreadPoolExecutor(1)
        self._waiting: tuple[Transaction | None, Future[Any]] | None = None
        self.executed = 0

    def close(self) -> None:
        self._thread.shutdown()
        self._looker.close()
        for session in (self._asker, *(b.session for b in (*self._free, *self._busy.values()))):
            session.close()

    def run(self, group_id: str, statements: Sequence[Statement]) -> None:
        """Execute the statements of one schedule.

        :raises Violation: at the first answer that is another than the simulated one.
        """
        self._group_id = group_id
        self._history = [_Committed([], [], 0)]
        with mock.patch.object(rows, "uuid4", self._draw):
            awaited = _awaited(statements)
            for number, statement in enumerate(statements):
                self.executed += 1
                if number in awaited:
                    self._wait(statement, awaited[number])
                    continue
                expected, found = self._execute(statement)
                if expected != found:
                    before = "\n".join(map(_told, statements[max(0, number - 60) : number + 1]))
                    raise Violation(f"statement {number}: expected {expected}\nPostgres says {found}\n{before}")
        for backend in [*self._busy.values()]:
            backend.session.roll_back()
        self._free += self._busy.values()
        self._busy.clear()
        self._begun.clear()
        self._set(_CLEAR, audit=0)

    def _execute(self, statement: Statement) -> tuple[Any, Any]:
        """Execute one; return what is expected and what was found."""
        transaction, name, arguments, answer = statement
        if transaction is None or name in {"begin", "apply", "abort", "outcome"}:
            return answer, getattr(self, f"_{name}")(*[transaction] if transaction else [], *arguments)
        if name == "commit":
            backend = self._end(transaction)
            backend.session.connection.execute("COMMIT", prepare=False)
            has_changed = transaction.rows or transaction.effects
            self._history.append(self._look() if has_changed else self._history[-1])
            return answer, self._history[-1].state() if has_changed else answer
        if self._waiting is not None and self._waiting[0] is transaction:
            (_, future), self._waiting = self._waiting, None
            return _plain(answer), future.result()
        backend = self._busy[id(transaction)]
        method = self._method(backend, name, arguments, answer)
        if isinstance(answer, Waits):
            return _WAITS, self._undone(backend, method, *arguments)
        if name in {"advance", "move_to_ends"} and answer is None:
            # The last of them is the one that is wrong: all that were right before must not have moved then.
            *right, last = arguments[0]
            wrong = _WRONG[self.executed % len(_WRONG)](last)
            if (refused := self._undone(backend, method, [*right, wrong])) != SHORT_COUNT:
                raise Violation(f"{wrong} in place of {last}: {refused}")
        return _plain(answer), _answer(method, *arguments)

    def _wait(self, statement: Statement, answer: Any) -> None:
        """Have a statement wait indeed, until the transactions have ended that it waits for."""
        transaction, name, arguments, _ = statement
        backend = self._busy[id(transaction)]
        future = self._begin_statement(backend, self._method(backend, name, arguments, answer), *arguments)
        self._waiting = transaction, future
        if future.done():
            raise Violation(f"{name}{arguments} does not wait: {future.result()}")

    def _begin_statement(self, backend: _Backend, method: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Execute a statement, until its answer is there or it waits for one of our transactions.

        What it waits for otherwise passes: VACUUM, say, which locks the table for moments.
        """
        future = self._thread.submit(_answer, method, *arguments)
        ours = [each.begun.pid for each in self._busy.values()]

        def waits() -> bool:
            blocked = "SELECT WHERE pg_blocking_pids(%s) && %s::int[]"
            return self._looker.execute(blocked, [backend.begun.pid, ours]).rowcount > 0

        wait([future], _USUAL_SECONDS)
        until(lambda: future.done() or waits(), 30, "an answer, or a statement that waits for a lock")
        return future

    def _undone(self, backend: _Backend, method: Callable[..., Any], *arguments: Any) -> Any:
        """Try what must be refused or wait, and leave everything as it was."""
        connection = backend.session.connection
        connection.execute("SAVEPOINT tried", prepare=False)
        try:
            future = self._begin_statement(backend, method, *arguments)
            if future.done():
                return future.result()
            connection.cancel_safe()
            return _WAITS if future.result() == psycopg.errors.QueryCanceled.sqlstate else future.result()
        finally:
            connection.execute("ROLLBACK TO SAVEPOINT tried; RELEASE SAVEPOINT tried", prepare=False)

    def _draw(self) -> UUID:
        """Draw what was drawn in the schedule."""
        return self._token

    def _begin(self, transaction: Transaction) -> None:
        backend = self._free.pop() if self._free else _Backend(self._conninfo)
        backend.session.instance = transaction.instance
        backend.begun = self._begun[id(transaction)] = backend.session.begin("READ COMMITTED")
        self._busy[id(transaction)] = backend

    def _apply(self, transaction: Transaction, effects: Sequence[Effect]) -> None:
        values = [(self._group_id, *partition, offset) for partition, offset in effects]
        self._busy[id(transaction)].session.connection.cursor().executemany(_APPLY, values)

    def _abort(self, transaction: Transaction) -> None:
        self._end(transaction).session.roll_back()

    def _outcome(self, transaction: Transaction) -> str:
        return self._asker.outcome(self._begun[id(transaction)])

    def _end(self, transaction: Transaction) -> _Backend:
        self._free.append(self._busy.pop(id(transaction)))
        return self._free[-1]

    def _method(self, backend: _Backend, name: str, arguments: tuple[Any, ...], answer: Any) -> Callable[..., Any]:
        """Return the real ledger's method, in its transaction, as it is called to give this answer."""
        connection = backend.session.connection
        ledger = rows.Ledger(backend.session, group_id=self._group_id, owner_kind="consumer").inside(connection)
        if name == "resolve":
            self._token = arguments[1][-1]
        elif name == "acquire":
            self._token = answer[0].owner_token if isinstance(answer, list) else uuid4()
        methods: dict[str, Callable[..., Any]] = {
            "register": lambda offsets: ledger.register(
                offsets, cluster_id="c", topic_ids={p.topic: "id" for p in offsets}
            ),
            "advance": lambda advances: ledger.advance(connection, advances, xid=backend.begun.xid, commit=False),
            "move_to_ends": lambda advances: ledger.move_to_ends(advances, lock_seconds=1),
            "resolve": lambda partitions, tokens: ledger.resolve(partitions, tokens[:-1], lock_seconds=1),
        }
        return methods.get(name) or getattr(ledger, name)

    def _fail_over(self, lost_commits: int) -> State:
        """Put back what was committed before; a real failover would take a minute, and its rows are the same."""
        del self._history[max(1, len(self._history) - lost_commits) :]
        self._set(_RESTORE, **self._history[-1]._asdict())
        return self._look().state()

    def _reset(self, partition: Partition, offset: int, effects: Iterable[int]) -> State:
        """Move an offset as an operator does, who has set the effects right."""
        with self._looker.transaction():
            self._looker.execute(
                f"DELETE FROM {_TABLE} WHERE group_id = %s AND topic = %s AND partition = %s",
                (self._group_id, *partition),
            )
            for at in effects:
                self._looker.execute(_APPLY, (self._group_id, *partition, at))
            parameters = {"topics": [partition.topic], "partitions": [partition.number], "next_offsets": [offset]}
            self._looker.execute(
                query("reset", _SCHEMA), {**parameters, "group_id": self._group_id, "reason": "simulated"}
            )
        self._history.append(self._look())
        return self._history[-1].state()

    def _look(self) -> _Committed:
        found = self._looker.execute(_LOOK, {"group_id": self._group_id}).fetchone()
        assert found is not None
        return _Committed(found[0] or [], found[1] or [], found[2])

    def _set(self, statements: Iterable[str], **committed: Any) -> None:
        values = {name: Jsonb(value) if isinstance(value, list) else value for name, value in committed.items()}
        with self._looker.transaction():
            for statement in statements:
                self._looker.execute(statement, {**values, "group_id": self._group_id})


def _awaited(statements: Sequence[Statement]) -> dict[int, Any]:
    """Return which statements can be left waiting, and the answers that they have to get in the end.

    Those that are executed before anybody else does anything that their having the locks would change.
    """
    found = {}
    for number, (transaction, name, _, answer) in enumerate(statements):
        if isinstance(answer, Waits):
            for other in statements[number + 1 :]:
                if other.transaction is transaction:
                    if other.name == name and not isinstance(other.answer, Waits):
                        found[number] = other.answer
                    break
                if other.name not in _HARMLESS:
                    break
    return found


def _answer(method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return _plain(method(*arguments))
    except (psycopg.Error, ExactlyOnceError) as error:
        return _plain(error)


def _row(row: dict[str, Any]) -> Row:
    """Make what a statement would have returned of what is in the table."""
    ids = {name: row[name] and UUID(row[name]) for name in ("owner_token", "owner_instance")}
    seen = {field.name: row[field.name] for field in fields(Row) if field.name in row and field.name not in ids}
    return Row(**{**seen, **ids, "partition": Partition(row["topic"], row["partition"])})


def _plain(answer: Any) -> Any:
    """Write an answer so that two can be compared."""
    if isinstance(answer, (Waits, psycopg.errors.LockNotAvailable)):
        return _WAITS
    if isinstance(answer, psycopg.Error):
        return answer.sqlstate or repr(answer)
    if isinstance(answer, ExactlyOnceError):
        return type(answer).__name__
    if isinstance(answer, list):
        return sorted((_plain(each) for each in answer), key=lambda row: row.partition)
    if isinstance(answer, Row):
        return replace(
            answer,
            previous_instance=None,
            previous_application=None,
            acquired_seconds_ago=None,
            advanced_seconds_ago=None,
        )
    return answer


def _told(statement: Statement) -> str:
    transaction, name, arguments, answer = statement
    said = "" if isinstance(answer, State) else f" -> {_plain(answer)}"
    return f"{transaction.xid if transaction else '-'} {name} {arguments}{said}"
