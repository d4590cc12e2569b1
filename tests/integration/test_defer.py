"""unit.defer: statements that go with the offsets and COMMIT in one round trip, and none without the others."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

import datetime
import decimal
import random
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, LiteralString
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import tenacity
from psycopg import sql
from psycopg.types.json import Jsonb
from psycopg.types.range import Range

from exactly_once import (
    Fenced,
    HandlerCommitted,
    OutcomePending,
    Redelivered,
    TransactionAborted,
    TransactionBusy,
    TransactionEnded,
    TransactionNotYours,
    Unit,
    UnitNotFinished,
)
from exactly_once.ledger import stale_owners
from exactly_once.testing import message
from exactly_once.testing import unit as trial
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, armed, interrupt, offsets, text
from tests.support import journal
from tests.support.worker import record

Break = Callable[[Unit], object]
FAILING = "INSERT INTO journal.entries (topic) VALUES (NULL)"


def effects(unit: Unit) -> None:
    """The effects that the oracle checks, all deferred."""
    for each in unit.messages:
        unit.defer(journal.APPEND, journal.entry(each, "test"))
    unit.defer(journal.COUNT, (unit.messages[0].topic(), len(unit.messages)))


def apply(unit: Unit) -> None:
    with unit:
        effects(unit)


def drain(scene: Scene, consumer: Any) -> None:
    """Apply the rest, as the documented loop does, and ask the oracle."""
    units = consumer.units(until_end=True)
    while True:
        try:
            for unit in units:
                apply(unit)
            break
        except Redelivered:
            continue
    scene.assert_exact()


def test_effects_offsets_and_commit_are_one_round_trip(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale_owners, "FROZEN_AFTER_SECONDS", 600.0)  # else the watcher asks, too, where this is slow
    consumer = scene.consumer()
    units = iter(consumer)
    unit = next(units)
    scene.proxy.statements.clear()
    before = scene.proxy.round_trips
    apply(unit)
    assert scene.proxy.round_trips - before == 2, "BEGIN, and all the rest"
    _, *sent = scene.proxy.statements
    words = [statement.split()[0] for statement in sent]
    assert words == ["INSERT"] * 2 + ["SET", "SELECT", "COMMIT"], "equal ones are one"
    assert ".advance(" in sent[-2]
    assert scene.applied() == offsets(unit)
    drain(scene, consumer)


def test_what_is_deferred_within_a_pipeline_of_somebody_else_keeps_its_place(scene: Scene) -> None:
    """Of a framework that has the connection from ``connect=``: two pipelines in one would lose their answers."""
    made: list[psycopg.Connection[Any]] = []

    def connect() -> psycopg.Connection[Any]:
        made.append(psycopg.connect(scene.conninfo))
        return made[-1]

    table = scene.table("place serial, said text")
    say = text(f"INSERT INTO {table} (said) VALUES (%s)")
    consumer = scene.consumer(connect=connect)
    with next(iter(consumer)) as unit:
        effects(unit)
        (connection,) = [each for each in made if each is unit.work.connection]
        with connection.pipeline():
            connection.execute(say, ["one"])
            unit.defer(say, ["two"])
            unit.execute(say, ["three"])
        unit.defer(say, ["four"])
    assert scene.query(f"SELECT said FROM {table} ORDER BY place") == [("one",), ("two",), ("three",), ("four",)]
    drain(scene, consumer)


@pytest.mark.parametrize("position", [0, 5, 10, 11])
@pytest.mark.parametrize("early", [False, True], ids=["with COMMIT", "before a statement"])
def test_an_error_at_any_place_undoes_all(scene: Scene, position: int, *, early: bool) -> None:
    consumer = scene.consumer()
    units = iter(consumer)
    unit = next(units)
    with pytest.raises(psycopg.errors.NotNullViolation) as raised, unit:
        for number, each in enumerate(unit.messages):
            if number == position:
                unit.defer(FAILING)
            unit.defer(journal.APPEND, journal.entry(each, "test"))
        if position == 10:
            unit.defer(FAILING)
        unit.defer(journal.COUNT, (scene.topic, 10))
        if position == 11:
            unit.defer(FAILING)
        if early:
            unit.execute("SELECT 1")
    (note,) = raised.value.__notes__
    assert f"statement {position + 1} of 12" in note
    assert "journal.entries (topic)" in note
    assert raised.value.diag.table_name == "entries"
    assert not isinstance(raised.value, Redelivered)
    assert (scene.applied(), scene.ledger("next_offset")) == ([], [0])
    again = next(units)
    assert (offsets(again), again.attempt) == (offsets(unit), 2)
    apply(again)
    drain(scene, consumer)


@pytest.mark.parametrize("lent", [False, True], ids=["through the unit", "beside unit.connection"])
def test_statements_keep_the_order_of_the_calls(scene: Scene, *, lent: bool) -> None:
    table = scene.table("n int GENERATED ALWAYS AS IDENTITY, what text")
    insert = text(f"INSERT INTO {table} (what) VALUES (%s)")
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with unit:
        connection = unit.connection if lent else None
        unit.defer(insert, ("1",))
        unit.defer(insert, ("2",))
        assert unit.execute(text(f"SELECT count(*) FROM {table}")).fetchone() == (2,)
        unit.defer(insert, ("3",))
        unit.executemany(insert, [("4",), ("5",)])
        unit.defer(insert, ("6",))
        unit.copy(table.strip('"'), ["what"], [["7"]])
        unit.defer(insert, ("8",))
        (connection or unit.connection).execute(insert, ("9",))
        unit.defer(insert, ("10",))
        if connection is not None:
            connection.execute(insert, ("11",))
    expected = [str(n) for n in range(1, 12 if lent else 11)]
    assert [what for (what,) in scene.query(f"SELECT what FROM {table} ORDER BY n")] == expected


def test_who_has_the_connection_from_elsewhere_comes_behind_what_was_deferred(scene: Scene) -> None:
    """As a framework does, whose models use what it gave by `connect=` and never ask the unit."""
    table = scene.table("n int GENERATED ALWAYS AS IDENTITY, what text")
    insert, count = text(f"INSERT INTO {table} (what) VALUES (%s)"), text(f"SELECT count(*) FROM {table}")
    made: list[psycopg.Connection[Any]] = []

    def connect() -> psycopg.Connection[Any]:
        made.append(psycopg.connect(scene.proxy.conninfo, autocommit=True, prepare_threshold=None))
        return made[-1]

    consumer = scene.consumer(connect=connect)
    unit = next(iter(consumer))
    with unit:
        own = next(each for each in made if each.info.backend_pid == unit.work.connection.info.backend_pid)
        effects(unit)
        unit.defer(insert, ("1",))
        assert own.execute(count).fetchone() == (1,)
        unit.defer(insert, ("2",))
        with suppress(ZeroDivisionError), own.transaction():
            own.execute(insert, ("undone",))
            raise ZeroDivisionError  # which takes nothing along that was deferred before
        unit.defer(insert, ("3",))
        with suppress(psycopg.Error), own.transaction():
            own.cursor().execute("SELECT 1 / 0")
        with own.cursor().copy(f"COPY {table} (what) FROM STDIN") as copy:
            unit.defer(insert, ("5",))
            copy.write_row(["4"])
            own.cursor().close()  # sends nothing into the COPY
    expected = ["1", "2", "3", "4", "5"]
    assert [what for (what,) in scene.query(f"SELECT what FROM {table} ORDER BY n")] == expected
    drain(scene, consumer)


def test_dead_letters_go_behind_what_was_deferred(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with unit:
        effects(unit)
        unit.dead_letter(unit.messages[0], "no use")
    order = [number for number, sent in enumerate(scene.proxy.statements) if "dead_letter" in sent or "journal" in sent]
    assert ["dead_letter" in scene.proxy.statements[number] for number in order] == [False, False, True]
    assert scene.applied() == offsets(unit)
    drain(scene, consumer)


def test_a_unit_that_was_fenced_stores_nothing_of_it(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(Fenced), unit:
        effects(unit)
        scene.query(
            "UPDATE exactly_once.ledger SET owner_epoch = owner_epoch + 1, owner_token = NULL WHERE group_id = %s"
        )
    assert scene.applied() == []


# Everything that must not get durable without its offset.


def _deferred(*statements: LiteralString) -> Break:
    """Defer these, where `*` stands for the effects, `!` for something that is executed at once."""

    def handler(unit: Unit) -> None:
        for statement in statements:
            if statement == "*":
                effects(unit)
            elif statement.startswith("!"):
                unit.execute(statement[1:])
            else:
                unit.defer(statement)

    return handler


def _roll_back_by_the_connection(unit: Unit) -> None:
    unit.connection.rollback()
    effects(unit)


COPY_FROM = "COPY journal.entries FROM STDIN"
TRICKS: dict[str, tuple[Break, type[Exception]]] = {
    "COMMIT": (_deferred("*", "COMMIT"), HandlerCommitted),
    "COMMIT, then more": (_deferred("*", "COMMIT", "*"), HandlerCommitted),
    "COMMIT, then an error": (_deferred("*", "COMMIT", FAILING), HandlerCommitted),
    "COMMIT and BEGIN": (_deferred("*", "COMMIT", "BEGIN", "*"), HandlerCommitted),
    "COMMIT AND CHAIN": (_deferred("*", "COMMIT AND CHAIN", "*"), HandlerCommitted),
    "COMMIT, sent early": (_deferred("*", "COMMIT", "*", "!SELECT 1"), HandlerCommitted),
    "COMMIT and BEGIN, sent early": (_deferred("*", "COMMIT", "BEGIN", "*", "!SELECT 1"), HandlerCommitted),
    "ROLLBACK": (_deferred("*", "ROLLBACK"), TransactionEnded),
    "ROLLBACK, then more": (_deferred("ROLLBACK", "*"), TransactionEnded),
    "ROLLBACK, then more, sent early": (_deferred("ROLLBACK", "*", "!SELECT 1"), TransactionEnded),
    "ROLLBACK and BEGIN": (_deferred("ROLLBACK", "BEGIN", "*"), TransactionEnded),
    "ROLLBACK and BEGIN, sent early": (_deferred("ROLLBACK", "BEGIN", "*", "!SELECT 1"), TransactionEnded),
    "deferred behind a ROLLBACK": (_deferred("!ROLLBACK", "*"), TransactionEnded),
    "deferred behind a ROLLBACK, sent early": (_deferred("!ROLLBACK", "*", "!SELECT 1"), TransactionEnded),
    "ROLLBACK by the connection": (_roll_back_by_the_connection, TransactionNotYours),
    "several statements": (_deferred("SELECT 1; COMMIT"), psycopg.errors.SyntaxError),
    "an open quote": (_deferred("*", "SELECT '", "'"), psycopg.errors.SyntaxError),
    "an open comment": (_deferred("*", "SELECT 1 /*"), psycopg.errors.SyntaxError),
    "COPY FROM": (_deferred("*", COPY_FROM), TransactionBusy),
    "COPY FROM, sent early": (_deferred("*", COPY_FROM, "!SELECT 1"), TransactionBusy),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_nothing_becomes_durable_without_its_offset(scene: Scene, trick: str) -> None:
    handler, expected = TRICKS[trick]
    consumer = scene.consumer()
    units = iter(consumer)
    unit = next(units)
    with pytest.raises(expected) as raised, unit:
        handler(unit)
    assert not isinstance(raised.value, Redelivered)
    assert scene.ledger("next_offset") == [0]
    if expected is HandlerCommitted:
        assert scene.applied() == offsets(unit)
        with pytest.raises(HandlerCommitted):
            next(units)
        return
    assert scene.applied() == []
    again = next(units)
    assert (offsets(again), again.attempt) == (offsets(unit), 2)
    apply(again)
    drain(scene, consumer)


def test_a_copy_to_the_client_is_thrown_away_and_nothing_is_doubled(scene: Scene) -> None:
    """The server finishes it by itself and goes on to COMMIT; what came of it is found out."""
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with suppress(TransactionBusy), unit:
        effects(unit)
        unit.defer("COPY (SELECT 1) TO STDOUT")
    drain(scene, consumer)


def test_a_swallowed_error_is_found_before_anything_is_sent(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(TransactionAborted), unit:
        with suppress(psycopg.Error):
            unit.execute("SELECT 1 / 0")
        effects(unit)
        scene.proxy.statements.clear()
    assert not any("journal" in statement for statement in scene.proxy.statements)
    drain(scene, consumer)


def test_a_swallowed_error_of_a_deferred_statement_stores_nothing(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(TransactionAborted), unit:
        effects(unit)
        unit.defer(FAILING)
        with suppress(psycopg.errors.NotNullViolation):
            unit.execute("SELECT 1")
    assert scene.applied() == []
    drain(scene, consumer)


def test_a_deferred_constraint_that_fails_at_commit_is_the_handlers_error(scene: Scene) -> None:
    table = scene.table("id int UNIQUE DEFERRABLE INITIALLY DEFERRED")
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(psycopg.errors.UniqueViolation), unit:
        effects(unit)
        unit.defer(text(f"INSERT INTO {table} VALUES (1), (1)"))
    assert scene.applied() == []
    drain(scene, consumer)


def test_a_conflict_runs_the_batch_again(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(Redelivered) as raised, unit:
        effects(unit)
        unit.defer("DO $$ BEGIN RAISE 'as asked' USING ERRCODE = '40001'; END $$")
    assert isinstance(raised.value.__cause__, psycopg.errors.SerializationFailure)
    drain(scene, consumer)


def test_poison_is_found_and_set_aside(make_scene: MakeScene) -> None:
    scene = make_scene(40, partitions=2)

    def handler(unit: Unit) -> None:
        for each in unit.messages:
            unit.defer("SELECT 1 / (%s::int - 3)", (each.offset(),))
        effects(unit)

    consumer = scene.consumer(max_messages=20)
    consumer.run(handler, until_end=True, wait=tenacity.wait_fixed(0.01), on_poison="dead-letter")
    dead = scene.query(
        "SELECT partition, message_offset, error FROM exactly_once.dead_letter WHERE group_id = %s ORDER BY 1"
    )
    assert [(partition, offset) for partition, offset, _ in dead] == [(0, 3), (1, 3)]
    assert "division by zero" in dead[0][2]
    assert len(scene.applied()) == 38
    assert scene.ledger("next_offset") == [20, 20]


# Values.

VALUES: list[Any] = [
    None,
    1,
    -1,
    2**40,
    1.5,
    float("nan"),
    True,
    "it's; -- '%%' \\ $$ü€😀",
    b"\x00\xff'",
    decimal.Decimal("1.10"),
    datetime.date(2026, 1, 2),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC),
    datetime.timedelta(days=1, seconds=2),
    uuid.UUID(int=7),
    Jsonb({"a": [1, None, "ü"]}),
    [1, 2, None],
    ["a", 'b"{},', None],
    [],
    Range(1, 5),
]


def test_values_arrive_as_with_execute(scene: Scene) -> None:
    table = scene.table("n int, how text, type text, value text")
    statement = text(f"INSERT INTO {table} SELECT %s, %s, pg_typeof(x)::text, x::text FROM (SELECT %s AS x) v")
    consumer = scene.consumer()
    with next(iter(consumer)) as unit:
        for number, value in enumerate(VALUES):
            unit.execute(statement, (number, "execute", value))
        for number, value in enumerate(VALUES):
            unit.defer(statement, (number, "defer", value))
        unit.defer(text(f"INSERT INTO {table} VALUES (%(n)s, '100%%', %(n)s, %(n)s)"), {"n": 99})
        unit.defer(text(f"INSERT INTO {table} VALUES (100, '100%', '', '')"))
    for number, value in enumerate(VALUES):
        found = scene.query(f"SELECT type, value FROM {table} WHERE n = {number}")
        assert len(found) == 2
        assert found[0] == found[1], value
    assert scene.query(f"SELECT n FROM {table} WHERE how = '100%' ORDER BY n") == [(99,), (100,)]


@pytest.mark.parametrize("encoding", ["LATIN1", "UTF8"])
def test_values_are_encoded_as_the_connection_wants_them(scene: Scene, encoding: str) -> None:
    table = scene.table("value text")
    consumer = scene.consumer(connect=lambda: psycopg.connect(scene.proxy.conninfo, client_encoding=encoding))
    with next(iter(consumer)) as unit:
        unit.defer(text(f"INSERT INTO {table} VALUES (%s)"), ("größe",))
        unit.defer(sql.SQL("INSERT INTO {} VALUES ('weiß')").format(sql.Identifier(table.strip('"'))))
    assert scene.query(f"SELECT value FROM {table} ORDER BY 1") == [("größe",), ("weiß",)]


@pytest.mark.parametrize(
    ("factory", "placeholder"), [(psycopg.RawCursor, "$1"), (psycopg.ClientCursor, "%s"), (psycopg.Cursor, "%s")]
)
def test_parameters_are_written_as_the_cursors_of_the_connection_want_them(
    scene: Scene, factory: type[psycopg.Cursor[Any]], placeholder: str
) -> None:
    """A statement like SET takes no parameters of the protocol, so only one kind of cursor can execute it with some."""
    table = scene.table("value text")
    consumer = scene.consumer(connect=lambda: psycopg.connect(scene.proxy.conninfo, cursor_factory=factory))
    with next(iter(consumer)) as unit:
        unit.defer(text(f"INSERT INTO {table} VALUES ({placeholder})"), ["it's"])
        if factory is psycopg.ClientCursor:
            unit.defer("SET LOCAL application_name = %s", ["ours"])
            unit.defer(text(f"INSERT INTO {table} VALUES (current_setting('application_name'))"))
    expected = [("it's",), ("ours",)] if factory is psycopg.ClientCursor else [("it's",)]
    assert scene.query(f"SELECT value FROM {table} ORDER BY 1") == expected


def test_types_may_change_from_one_call_to_the_next(scene: Scene) -> None:
    """Equal statements are parsed once, but only where the server would infer the same of them."""
    table = scene.table("n int GENERATED ALWAYS AS IDENTITY, type text, value text")
    statement = text(f"INSERT INTO {table} (type, value) SELECT pg_typeof(x)::text, x::text FROM (SELECT %s AS x) v")
    values: list[Any] = [1, 2, 70_000, 2**40, 1, "a", "b", None, 1.5, 1, True, None]
    with next(iter(scene.consumer())) as unit:
        for value in values:
            unit.execute(statement, (value,))
        for value in values:
            unit.defer(statement, (value,))
    found = scene.query(f"SELECT type, value FROM {table} ORDER BY n")
    assert found[: len(values)] == found[len(values) :]


def test_values_are_those_of_the_call(scene: Scene) -> None:
    table = scene.table("value bytea, list int[]")
    given, numbers = bytearray(b"before"), [1]
    with next(iter(scene.consumer())) as unit:
        unit.defer(text(f"INSERT INTO {table} VALUES (%s, %s)"), (given, numbers))
        given[:] = b"behind"
        numbers.append(2)
    assert scene.query(f"SELECT * FROM {table}") == [(b"before", [1])]


@pytest.mark.parametrize(
    ("query", "params", "error"),
    [
        (b"SELECT %s", ("a\0b",), psycopg.DataError),
        (b"SELECT '\0'", None, psycopg.ProgrammingError),
        (b"SELECT %s", (object(),), psycopg.ProgrammingError),
        (b"SELECT %s", (1, 2), psycopg.ProgrammingError),
        (b"SELECT %(a)s", {"b": 1}, psycopg.ProgrammingError),
        (b"SELECT " + b",".join([b"%s"] * 65_536), [1] * 65_536, psycopg.ProgrammingError),
    ],
    ids=["NUL in a text", "NUL in the statement", "no adapter", "too many", "another name", "above the limit"],
)
def test_what_cannot_be_sent_is_refused_at_once(
    scene: Scene, query: bytes, params: Sequence[Any] | dict[str, Any] | None, error: type[Exception]
) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with unit:
        with pytest.raises(error):
            unit.defer(query, params)
        effects(unit)
    assert scene.applied() == offsets(unit)
    drain(scene, consumer)


def test_it_is_for_an_open_unit_only(scene: Scene) -> None:
    unit = next(iter(scene.consumer()))
    with pytest.raises(UnitNotFinished):
        unit.defer("SELECT 1")
    apply(unit)
    with pytest.raises(UnitNotFinished):
        unit.defer("SELECT 1")


def test_thousands_of_statements_with_large_answers_do_not_block(scene: Scene) -> None:
    """Both sides fill their buffers: whoever only sent would wait for a server that waits for a reader."""
    consumer = scene.consumer()
    with next(iter(consumer)) as unit:
        for _ in range(300):
            unit.defer("SELECT repeat('x', 50000), %s", ("y" * 50_000,))
        effects(unit)
    drain(scene, consumer)


# The wire.


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "did not land"])
def test_an_unknown_commit_is_resolved(scene: Scene, *, landed: bool) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    fault = scene.proxy.cut_after() if landed else scene.proxy.cut_before()
    if landed:
        apply(unit)
    else:
        with pytest.raises(Redelivered):
            apply(unit)
    fault.wait()
    assert scene.applied() == (offsets(unit) if landed else [])
    drain(scene, consumer)


def test_ctrl_c_while_the_answer_is_late_keeps_what_landed(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    fault = scene.proxy.hold_answer()

    def press() -> None:
        fault.wait()
        interrupt()
        fault.release()

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        apply(unit)
    thread.join()
    assert scene.applied() == offsets(unit)
    drain(scene, consumer)


def test_a_backend_that_is_ended_before_commit_is_nobodys_fault(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(Redelivered) as raised, unit:
        effects(unit)
        unit.defer("SELECT pg_terminate_backend(pg_backend_pid())")
    assert isinstance(raised.value.__cause__, psycopg.OperationalError)
    assert scene.applied() == []
    drain(scene, consumer)


def test_the_moment_between_advance_and_commit_is_there_for_tests(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))

    def leave() -> None:
        raise ValueError("between")

    with armed("advanced", leave), pytest.raises(ValueError, match="between"):
        apply(unit)
    assert scene.applied() == []
    drain(scene, consumer)


class Wire:
    """A TCP relay that, once armed, closes both sides after so many bytes of one direction."""

    def __init__(self, conninfo: str) -> None:
        self._uri = urlsplit(conninfo)
        self._left: dict[str, int] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        account, at, _ = self._uri.netloc.rpartition("@")
        self.conninfo = urlunsplit(self._uri._replace(netloc=f"{account}{at}127.0.0.1:{port}"))
        self.passed = {"up": 0, "down": 0}
        self._pool = ThreadPoolExecutor(200)
        self._pool.submit(self._accept)

    def arm(self, direction: str, left: int) -> None:
        """Let so many more bytes pass."""
        self._left = {direction: left}

    def disarm(self) -> None:
        """Let all pass."""
        self._left = {}

    def close(self) -> None:
        """Wait until all connections are closed."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._pool.submit(self._connect, client)

    def _connect(self, client: socket.socket) -> None:
        address = (self._uri.hostname or "", self._uri.port or 5432)
        with client, socket.create_connection(address) as server:
            answers = self._pool.submit(self._relay, "down", server, client)
            self._relay("up", client, server)
            answers.result()

    def _relay(self, direction: str, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                left = self._left.get(direction, len(data))
                target.sendall(data[:left])
                self.passed[direction] += len(data)
                if left < len(data):
                    self.disarm()
                    break
                if direction in self._left:
                    self._left[direction] = left - len(data)
        for side in (source, target):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def wire(conninfo: str) -> Iterator[Wire]:
    wire = Wire(conninfo)
    yield wire
    wire.close()


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_connection_lost_at_any_byte_loses_and_doubles_nothing(
    make_scene: MakeScene, wire: Wire, direction: str, seed: int
) -> None:
    print("seed", seed)
    chance = random.Random(seed)
    scene = make_scene(60)
    consumer = scene.consumer(conninfo=wire.conninfo, max_messages=3)
    size, cuts = 0, 0
    for unit in consumer.units(until_end=True):
        try:
            with unit:
                effects(unit)
                before = wire.passed[direction]
                if size and chance.random() < 0.6 and cuts < 12:
                    wire.arm(direction, chance.randrange(size))
                    cuts += 1
            size = size or wire.passed[direction] - before
        except Redelivered:
            continue
        finally:
            wire.disarm()
    print(size, "bytes a flush,", cuts, "cuts;", consumer.counters)
    consumer.close()
    assert cuts > 5
    scene.assert_exact()


# Around the unit.


def test_a_joined_unit_executes_at_once(scene: Scene) -> None:
    consumer = scene.consumer()
    units = consumer.units()
    unit = next(units)
    count = "SELECT count(*) FROM journal.entries WHERE topic = %s"
    with psycopg.connect(scene.conninfo) as own, unit.join(own):
        effects(unit)
        assert own.execute(count, [scene.topic]).fetchone() == (10,)
    drain(scene, consumer)


def test_a_trial_unit_shows_and_checks_what_was_deferred(conninfo: str) -> None:
    with psycopg.connect(conninfo) as own:
        own.execute("CREATE TEMP TABLE t (id int PRIMARY KEY)")
        with trial(own, [message("m", b"1")]) as unit:
            unit.defer("INSERT INTO t VALUES (%s)", (1,))
            assert unit.execute("SELECT id FROM t").fetchall() == [(1,)]
        with pytest.raises(psycopg.errors.UniqueViolation), trial(own, [message("m", b"1")]) as unit:
            unit.defer("INSERT INTO t VALUES (1)")
            unit.defer("INSERT INTO t VALUES (1)")
        with pytest.raises(TransactionEnded), trial(own, [message("m", b"1")]) as unit:
            unit.defer("ROLLBACK TO SAVEPOINT exactly_once")
            unit.defer("ROLLBACK")


def test_a_handler_may_do_both(scene: Scene) -> None:
    consumer = scene.consumer()
    for unit in consumer.units(until_end=True):
        with unit:
            if unit.messages[0].offset():
                record(unit, "test")
            else:
                effects(unit)
    scene.assert_exact()


def test_threads_of_a_handler_may_do_both_at_once(scene: Scene) -> None:
    """No statement is lost, none meets another one on the connection, and those of a thread keep their order."""
    table = scene.table("id serial, thread int, step text")
    insert = text(f"INSERT INTO {table} (thread, step) VALUES (%s, %s)")

    def work(unit: Unit, thread: int) -> None:
        for step in range(40):
            # A thread's types are not those of the others.
            values = (thread, str(step)) if thread % 2 else (decimal.Decimal(thread), step)
            (unit.execute if step % 4 == 3 else unit.defer)(insert, values)

    unit = next(iter(scene.consumer()))
    with unit, ThreadPoolExecutor(4) as pool:
        effects(unit)
        for done in [pool.submit(work, unit, thread) for thread in range(4)]:
            done.result()
    for thread in range(4):
        steps = scene.query(f"SELECT step::int FROM {table} WHERE thread = {thread} ORDER BY id")
        assert [step for (step,) in steps] == list(range(40))


def test_a_connection_that_an_interrupt_has_left_locked_is_replaced(scene: Scene) -> None:
    """The interrupt comes at the end of the block that holds the lock, where Python does not release it."""
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(KeyboardInterrupt), unit:
        effects(unit)
        unit.connection.lock.acquire()
        raise KeyboardInterrupt
    drain(scene, consumer)


def test_a_consumer_that_cannot_ask_resolves_later(scene: Scene) -> None:
    is_shut = False

    def connect() -> psycopg.Connection[Any]:
        if is_shut:
            raise psycopg.OperationalError("shut")
        return psycopg.connect(scene.proxy.conninfo)

    consumer = scene.consumer(connect=connect)
    unit = next(iter(consumer))
    fault = scene.proxy.cut_after()
    with pytest.raises(OutcomePending), unit:
        effects(unit)
        is_shut = True
    fault.wait()
    is_shut = False
    drain(scene, consumer)
