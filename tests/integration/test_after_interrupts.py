"""What an interrupt leaves behind: an exception out of a signal handler may come between any two lines.

No signal can be timed so, so the exception is raised where it would come, or what it leaves is put there.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import Message

from exactly_once import TransactionAborted, Unit
from exactly_once._model import Advance, Partition
from exactly_once.consumer.rebalance import Assignment
from exactly_once.consumer.replay import Replay
from exactly_once.consumer.service import stopping_on_signals
from exactly_once.ledger import transaction
from exactly_once.ledger.dead_letters import find, store
from exactly_once.ledger.session import Session, connector
from exactly_once.ledger.transaction import UnitOfWork
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene
from tests.support.interrupts import SOCKET, Interrupt, Interrupter
from tests.support.waiting import until
from tests.support.worker import record

pytestmark = pytest.mark.fault("D2", more=True)


@pytest.fixture
def scene(make_scene: MakeScene) -> Scene:
    return make_scene(20)


def interrupted(*_: object, **__: object) -> Any:
    raise Interrupt


@pytest.mark.parametrize("moment", ["before it is waited for", "while it is waited for"])
def test_a_handler_that_is_left_in_its_thread_writes_nothing_more(
    moment: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its transaction cannot be ended from outside either, as on a server that takes no more connections."""
    go_on, over = threading.Event(), threading.Event()
    errors: list[psycopg.Error] = []

    def handler(unit: Unit) -> None:
        record(unit, "left")
        connection = unit.connection
        go_on.wait(30)
        try:
            connection.execute("INSERT INTO journal.entries SELECT * FROM journal.entries")
        except psycopg.Error as error:
            errors.append(error)
        over.set()

    monkeypatch.setattr(Session, "end", lambda *_: None)
    with scene.consumer() as consumer:
        if moment == "before it is waited for":
            start = threading.Thread.start

            def started(thread: threading.Thread) -> None:
                start(thread)
                if thread.name == "exactly_once-handler":
                    until(lambda: consumer._session.connection.pgconn.transaction_status, 10, "the handler's statement")
                    raise Interrupt

            monkeypatch.setattr(threading.Thread, "start", started)
        else:
            monkeypatch.setattr(consumer, "_poll_aside", interrupted)
        with pytest.raises(Interrupt):
            consumer.run(handler, in_thread=True, until_end=True)
        monkeypatch.undo()
        go_on.set()
        assert over.wait(30)
        assert errors
        scene.drain(consumer)
    scene.assert_exact()


def test_what_was_deferred_and_cut_short_is_not_committed_without(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time-out of the handler's own, say, which it catches."""
    before: Callable[..., Any] = vars(transaction)["query"]
    calls: list[tuple[Any, ...]] = []

    def cut(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise TimeoutError
        return before(*args)

    def handler(unit: Unit) -> None:
        unit.defer("INSERT INTO journal.counters VALUES (%s, 1)", ("deferred",))
        monkeypatch.setattr(transaction, "query", cut)
        with pytest.raises(TimeoutError):
            record(unit, "test")
        monkeypatch.setattr(transaction, "query", before)
        record(unit, "test")

    with scene.consumer() as consumer:
        with pytest.raises(TransactionAborted, match="cut short"), next(iter(consumer)) as unit:
            handler(unit)
        scene.drain(consumer)
    scene.assert_exact()


def test_a_question_that_was_cut_short_is_cleared_before_the_next(scene: Scene) -> None:
    with scene.consumer() as consumer:
        with next(iter(consumer)) as unit:
            record(unit, "test")
        consumer._read_only._since = time.monotonic()  # so whether the server takes writes is asked first
        consumer._session.connection.pgconn.send_query(b"SELECT 1")
        consumer._maintenance._next_run = 0
        scene.drain(consumer)
    scene.assert_exact()


def test_a_group_that_was_left_is_joined_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its database took no writes for a while; else the consumer would idle for ever."""
    with scene.consumer() as consumer:
        consumer._client.unsubscribe()
        consumer._read_only._since, consumer._read_only._has_left = time.monotonic(), True
        with monkeypatch.context() as patch:
            patch.setattr(Assignment, "join", interrupted)
            with pytest.raises(Interrupt):
                scene.drain(consumer)
        scene.drain(consumer)
    scene.assert_exact()


def test_a_client_that_was_closed_to_be_replaced_is(scene: Scene) -> None:
    with scene.consumer() as consumer:
        consumer._client.close()
        consumer._must_reopen, consumer._ownership.is_sound = "an interrupt came while it was replaced", False
        scene.drain(consumer)
    scene.assert_exact()


def test_a_block_that_the_garbage_collector_closes_ends_nobody_elses_transaction(conninfo: str) -> None:
    session = Session(connector(conninfo), schema="exactly_once")
    try:
        block = session.ledger_transaction(lock_timeout_seconds=1)
        block.__enter__()  # and the interrupt comes at its edge: nobody leaves it
        begun = session.begin("READ COMMITTED")
        del block
        assert session.status(begun) == "in progress"
    finally:
        session.close()


def test_a_replay_that_is_interrupted_behind_its_commit_is_interrupted_and_done(
    conninfo: str, db: psycopg.Connection[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Partition(name, 0)
    advance = Advance(
        partition=place,
        token=uuid4(),
        epoch=1,
        topic_id="a",
        expected=7,
        next_offset=8,
        leader_epoch=None,
    )
    where: Any = {"schema": "exactly_once", "group_id": name, "after_offset": 7, "attempts": 1}
    store(db, Message(topic=name, partition=0, offset=7, value=b"x", timestamp=(1, 1)), "bad", advance=advance, **where)
    commit = UnitOfWork.commit

    def cut(self: UnitOfWork, advances: Any) -> None:
        commit(self, advances)
        assert self._connection is not None
        self._connection.pgconn.send_query(b"SELECT 1")
        raise Interrupt

    monkeypatch.setattr(UnitOfWork, "commit", cut)
    replay = Replay(connector(conninfo), schema="exactly_once")
    try:
        (letter,) = find(db, schema="exactly_once", group_id=name)
        with pytest.raises(Interrupt):
            replay.replay(letter, lambda unit: unit.execute("SELECT 1"))
    finally:
        replay.close()
    assert [each.status for each in find(db, schema="exactly_once", group_id=name, status=None)] == ["replayed"]


def test_a_signal_that_comes_when_the_loop_is_over_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its alarm would send it again, to whoever handles signals by then."""
    stops: list[None] = []
    before: Callable[..., Any] = signal.signal
    alarms = {thread.ident for thread in threading.enumerate()}
    with stopping_on_signals(lambda: stops.append(None), 0.2) as received:

        def restore(number: int, handler: Any) -> Any:
            if not received:
                signal.raise_signal(signal.SIGTERM)
            return before(number, handler)

        monkeypatch.setattr(signal, "signal", restore)
    monkeypatch.undo()
    assert received == [signal.SIGTERM]
    assert {thread.ident for thread in threading.enumerate()} <= alarms


def test_a_handler_that_is_not_pythons_own_does_not_hide_how_the_loop_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a handler that what embeds Python has set nothing is known, so it cannot be put back."""
    own = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    set_handler: Callable[..., Any] = signal.signal

    def of_another_language(number: int, handler: Any) -> None:
        set_handler(number, handler)

    monkeypatch.setattr(signal, "signal", of_another_language)
    try:
        with pytest.raises(ZeroDivisionError), stopping_on_signals(lambda: None, 1):
            raise ZeroDivisionError
    finally:
        monkeypatch.undo()
        for number, handler in own.items():
            signal.signal(number, handler)


def interrupt_each_line_of(act: Callable[[], object]) -> Iterator[str]:
    """Do it again and again, each time interrupted one line later, until it gets through."""
    interrupter = Interrupter()
    for number in range(1, 1000):
        try:
            with interrupter.after(number, "session.py"):
                act()
        except Interrupt:
            yield interrupter.where[-1]
        else:
            return


@pytest.mark.filterwarnings(SOCKET)
def test_a_connection_that_an_interrupt_keeps_from_its_session_is_closed(conninfo: str) -> None:
    opened: list[weakref.ref[psycopg.Connection[Any]]] = []

    def connect() -> psycopg.Connection[Any]:
        made = psycopg.connect(conninfo)
        opened.append(weakref.ref(made))
        return made

    session = Session(connect, schema="exactly_once")

    def open_anew() -> None:
        session.discard()
        assert session.connection.autocommit

    for _ in interrupt_each_line_of(open_anew):
        assert session.connection.autocommit
        assert session.connection.isolation_level is not None
    assert len(opened) > 10
    gc.collect()
    left = [connection for ref in opened if (connection := ref()) is not None and not connection.closed]
    assert left == [session.connection]
    session.close()


def test_a_session_goes_on_wherever_its_end_of_a_connection_was_interrupted(conninfo: str) -> None:
    session = Session(connector(conninfo), schema="exactly_once")

    def discard() -> None:
        session.connection.execute("BEGIN")
        session.discard()

    with closing(session):
        for where in interrupt_each_line_of(discard):
            with session.cut_after(60):  # rather than for ever
                session.roll_back()
                (status,) = session.connection.execute("SELECT 1").fetchone() or (None,)
            assert status == 1, where
