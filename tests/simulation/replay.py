"""Replay: a schedule's statements on a real Postgres, in the order in which the simulated one executed them.

Each is sent by the real ledger on a connection of its own transaction. Every row, every SQLSTATE, who waits for a lock,
what became of a transaction, and what is committed must be as the simulated database said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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


class _Committed(NamedTuple):
    """What is committed on the real server, as it can be put back."""

    rows: list[dict[str, Any]]
    effects: list[dict[str, Any]]
    audit: int

    def state(self) -> tuple[dict[Partition, tuple[Any, ...]], list[Effect]]:
        return (
            {
                Partition(r["topic"], r["partition"]): (
                    r["next_offset"],
                    r["generation"],
                    r["leader_epoch"],
                    r["topic_id"],
                    r["cluster_id"],
                    r["owner_epoch"],
                    r["owner_token"] and UUID(r["owner_token"]),
                    r["owner_instance"] and UUID(r["owner_instance"]),
                )
                for r in self.rows
            },
            sorted((Partition(e["topic"], e["partition"]), e["at"]) for e in self.effects),
        )


class _Backend:
    """A connection to the real server, and the transaction of ours that runs there."""

    def __init__(self, conninfo: str, group_id: str) -> None:
        self.session = Session(connector(conninfo), schema=_SCHEMA)
        self.ledger = rows.Ledger(self.session, group_id=group_id, owner_kind="consumer")
        self.begun = Begun("", 0, "")


class Replay:
    """The real server, for one schedule after another."""

    def __init__(self, conninfo: str) -> None:
        # The locks are free when a statement is executed; who has to wait says so at once.
        self._conninfo = make_conninfo(conninfo, options="-c lock_timeout=5s -c synchronous_commit=off")
        self._looker = psycopg.connect(self._conninfo, autocommit=True)
        self._looker.execute(_PREPARE)
        self._asker = Session(connector(self._conninfo), schema=_SCHEMA)
        self._free: list[_Backend] = []
        self._busy: dict[int, _Backend] = {}
        self._begun: dict[int, Begun] = {}
        self._history: list[_Committed] = []
        self._group_id = ""
        self._token = UUID(int=0)
        self.executed = 0

    def close(self) -> None:
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
            for number, statement in enumerate(statements):
                expected, found = self._execute(statement)
                self.executed += 1
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
        if transaction is None:
            if name == "fail_over":
                del self._history[len(self._history) - min(*arguments, len(self._history) - 1) :]
                self._set(_RESTORE, **self._history[-1]._asdict())
            else:
                self._reset(*arguments)
            return _expected(answer), self._look().state()
        if name == "begin":
            self._begin(transaction)
            return None, None
        if name == "outcome":
            return answer, self._asker.outcome(self._begun[id(transaction)])
        backend = self._busy[id(transaction)]
        if name == "apply":
            effects = [(self._group_id, *partition, offset) for partition, offset in arguments[0]]
            backend.session.connection.cursor().executemany(_APPLY, effects)
            return None, None
        if name in {"commit", "abort"}:
            self._free.append(self._busy.pop(id(transaction)))
            if name == "abort":
                backend.session.roll_back()
                return None, None
            backend.session.connection.execute("COMMIT", prepare=False)
            if not transaction.rows and not transaction.effects:
                self._history.append(self._history[-1])
                return None, None
            self._history.append(self._look())
            return _expected(answer), self._history[-1].state()
        return _plain(answer), self._call(backend, name, arguments, answer)

    def _draw(self) -> UUID:
        """Draw what was drawn in the schedule."""
        return self._token

    def _begin(self, transaction: Transaction) -> None:
        backend = self._free.pop() if self._free else _Backend(self._conninfo, self._group_id)
        backend.session.instance, backend.ledger.group_id = transaction.instance, self._group_id
        backend.begun = self._begun[id(transaction)] = backend.session.begin("READ COMMITTED")
        self._busy[id(transaction)] = backend

    def _call(self, backend: _Backend, name: str, arguments: tuple[Any, ...], answer: Any) -> Any:
        """Execute a method of the real ledger inside of its transaction."""
        connection = backend.session.connection
        ledger = backend.ledger.inside(connection)
        call: dict[str, Callable[..., Any]] = {
            "register": lambda offsets: ledger.register(
                offsets, cluster_id="c", topic_ids={p.topic: "id" for p in offsets}
            ),
            "advance": lambda advances: ledger.advance(connection, advances, xid=backend.begun.xid, commit=False),
            "move_to_ends": lambda advances: ledger.move_to_ends(advances, lock_seconds=1),
            "resolve": lambda partitions, tokens: ledger.resolve(partitions, tokens[:-1], lock_seconds=1),
        }
        if name == "resolve":
            self._token = arguments[1][-1]
        elif name == "acquire":
            self._token = answer[0].owner_token if isinstance(answer, list) else uuid4()
        method = call.get(name, getattr(ledger, name))
        if isinstance(answer, Waits):
            return _undone(connection, method, *arguments)
        if name in {"advance", "move_to_ends"} and answer is None:
            # The last of them is the one that is wrong: all that were right before must not have moved then.
            *right, last = arguments[0]
            wrong = _WRONG[self.executed % len(_WRONG)](last)
            if (refused := _undone(connection, method, [*right, wrong])) != SHORT_COUNT:
                raise Violation(f"{wrong} in place of {last}: {refused}")
        return _answer(method, *arguments)

    def _reset(self, partition: Partition, offset: int, effects: Iterable[int]) -> None:
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

    def _look(self) -> _Committed:
        found = self._looker.execute(_LOOK, {"group_id": self._group_id}).fetchone()
        assert found is not None
        return _Committed(found[0] or [], found[1] or [], found[2])

    def _set(self, statements: Iterable[str], **committed: Any) -> None:
        values = {name: Jsonb(value) if isinstance(value, list) else value for name, value in committed.items()}
        with self._looker.transaction():
            for statement in statements:
                self._looker.execute(statement, {**values, "group_id": self._group_id})


def _undone(connection: psycopg.Connection[Any], method: Callable[..., Any], *arguments: Any) -> Any:
    """Try what must be refused, and leave everything as it was."""
    connection.execute("SAVEPOINT tried; SET LOCAL lock_timeout = '2ms'", prepare=False)
    try:
        return _answer(method, *arguments)
    finally:
        connection.execute("ROLLBACK TO SAVEPOINT tried; RELEASE SAVEPOINT tried", prepare=False)


def _answer(method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return _plain(method(*arguments))
    except (psycopg.Error, ExactlyOnceError) as error:
        return _plain(error)


def _expected(state: State) -> tuple[dict[Partition, tuple[Any, ...]], list[Effect]]:
    """Write what is committed in the simulated database as :meth:`_Committed.state` does."""
    return (
        {
            p: (
                row.next_offset,
                row.generation,
                row.leader_epoch,
                row.topic_id,
                row.cluster_id,
                row.owner_epoch,
                row.owner_token,
                row.owner_instance,
            )
            for p, row in state.rows.items()
        },
        sorted((p, offset) for p, offsets in state.effects.items() for offset in offsets),
    )


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
