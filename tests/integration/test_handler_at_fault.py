"""What a handler can do wrong short of ending the transaction: to its messages, by its statements, and elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import tenacity
from confluent_kafka import Message, Producer
from psycopg import sql

from exactly_once import (
    DeadLetterLimit,
    ExactlyOnceConsumer,
    NoProgress,
    PoisonMessage,
    Redelivered,
    TooManyDeadLetters,
    TransactionNotYours,
    Unit,
)
from exactly_once.consumer import commit
from exactly_once.ledger import outcome
from exactly_once.ledger.dead_letters import DeadLetter, find
from exactly_once.ledger.outcome import TRIES
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, offsets, text
from tests.support.worker import record

AT_ONCE = tenacity.wait_fixed(0.01)
Facts = tuple[Any, ...]


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that refuse are asked again at once."""
    monkeypatch.setattr(commit, "_TROUBLE_SECONDS", 0.01)


def run(consumer: ExactlyOnceConsumer, handler: Callable[[Unit], object], **options: Any) -> None:
    consumer.run(handler, until_end=True, wait=AT_ONCE, **options)


def loop(consumer: ExactlyOnceConsumer, handler: Callable[[Unit], object], *also: type[Exception]) -> None:
    """The documented loop, which may go on after other errors, too."""
    units = consumer.units(until_end=True)
    while True:
        with contextlib.suppress(Redelivered, *also):
            for unit in units:
                with unit:
                    handler(unit)
            return


def stubborn_loop(consumer: ExactlyOnceConsumer, handler: Callable[[Unit], object]) -> None:
    loop(consumer, handler, ValueError)


def in_thread(consumer: ExactlyOnceConsumer, handler: Callable[[Unit], object], **options: Any) -> None:
    run(consumer, handler, in_thread=True, **options)


def letters(scene: Scene) -> list[DeadLetter]:
    with psycopg.connect(scene.conninfo) as connection:
        return find(connection, schema="exactly_once", group_id=scene.topic)


def dead(scene: Scene) -> list[int]:
    return [letter.message_offset for letter in letters(scene)]


# What it does to its messages.


def facts(message: Message) -> Facts:
    headers = message.headers()
    return (
        *(message.topic(), message.partition(), message.offset(), message.key(), message.value()),
        *(None if headers is None else list(headers), message.timestamp(), message.leader_epoch(), message.error()),
    )


def spoil(message: Message) -> None:
    """Change all that can be changed, as deserialisers and careless handlers do."""
    headers = message.headers()
    if isinstance(headers, list):
        headers.clear()
    message.set_headers([("spoilt", b"")])
    decoded: Any = {"decoded": 1}
    message.set_key(decoded)
    message.set_value(decoded)
    if hasattr(message, "set_topic"):
        message.set_topic("spoilt")


def produce_with_headers(scene: Scene, count: int, *, partitions: int = 1) -> None:
    producer = Producer({"bootstrap.servers": scene.bootstrap_servers})
    for number in range(count):
        headers: Any = [("n", str(number).encode()), ("n", None)] if number % 3 else None
        producer.produce(
            scene.topic, b"%d" % number, b"key" if number % 2 else None, number % partitions, headers=headers
        )
    assert producer.flush(30) == 0


@pytest.mark.parametrize("form", [stubborn_loop, run, in_thread])
@pytest.mark.parametrize("trouble", [psycopg.errors.DeadlockDetected, ValueError])
def test_every_try_sees_what_the_broker_sent(
    make_scene: MakeScene, form: Callable[..., None], trouble: type[Exception]
) -> None:
    """With messages behind the unit, and with `run` searching for the message that fails."""
    scene = make_scene(0, partitions=2)
    produce_with_headers(scene, 30, partitions=2)
    seen: dict[tuple[int, int], set[str]] = {}
    left = [trouble("again"), trouble("and again")]

    def handler(unit: Unit) -> None:
        assert isinstance(unit.messages, tuple)
        record(unit, "test")
        for message in unit.messages:
            what = seen.setdefault((message.partition() or 0, message.offset() or 0), set())
            what.add(repr(facts(message)))
            spoil(message)
        if left:
            raise left.pop()

    form(scene.consumer(max_messages=7), handler)
    scene.assert_exact()
    assert [len(what) for what in seen.values()] == [1] * 30
    assert "spoilt" not in repr(seen)
    assert "decoded" not in repr(seen)


def test_dead_letters_are_what_the_broker_sent(make_scene: MakeScene) -> None:
    scene = make_scene(0)
    produce_with_headers(scene, 10)

    def handler(unit: Unit) -> None:
        for message in unit.messages:
            spoil(message)
            if message.offset() == 2:
                unit.dead_letter(message, "not now")
        if 5 in offsets(unit):
            raise ValueError

    run(scene.consumer(), handler, on_poison="dead-letter")
    two, five = letters(scene)
    assert (two.message_offset, two.key, two.value) == (2, None, b"2")
    assert (two.header_names, two.header_values) == (["n", "n"], [b"2", None])
    assert (five.message_offset, five.key, five.value) == (5, b"key", b"5")
    assert (five.header_names, five.header_values) == (["n", "n"], [b"5", None])


def test_a_unit_counts_how_often_its_messages_were_handed_out(scene: Scene) -> None:
    tries: dict[int, int] = {}

    def handler(unit: Unit) -> None:
        for offset in offsets(unit):
            tries[offset] = tries.get(offset, 0) + 1
        assert unit.attempt == max(tries[offset] for offset in offsets(unit))
        if {3, 4, 8} & set(offsets(unit)):
            raise ValueError

    run(scene.consumer(), handler, on_poison="dead-letter")
    assert dead(scene) == [3, 4, 8]
    assert max(tries.values()) < 10
    assert [letter.attempts for letter in letters(scene)] == [1, 1, 1]


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_dead_letter_tells_how_often_the_message_was_tried_alone(scene: Scene, attempts: int) -> None:
    alone: dict[int, int] = {}
    conflicts = [1]

    def handler(unit: Unit) -> None:
        if {3, 15} & set(offsets(unit)):
            if len(unit.messages) == 1:
                alone[offsets(unit)[0]] = alone.get(offsets(unit)[0], 0) + 1
                if conflicts:
                    conflicts.pop()
                    raise psycopg.errors.DeadlockDetected
            raise ValueError

    run(scene.consumer(), handler, on_poison="dead-letter", attempts=attempts)
    assert [letter.attempts for letter in letters(scene)] == [alone[3], alone[15]] == [attempts + 1, attempts]


# What the server says of its statements.

SQLSTATES = ["21000", "38001", "39004", "44000", "54000", "P0002", "P0003", "P0004", "MY001", "U0001"]
# Of no fault of the server's either, raised by functions of an application.
SQLSTATES += ["01004", "02000", "09000", "10608", "20000", "27000", "2F002", "2F005"]
RAISE = "DO $$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{}'; END $$"


def failing(statement: str, *bad: int) -> Callable[[Unit], None]:
    """A handler that has its effects, and executes this where one of these offsets is among its messages."""

    def handler(unit: Unit) -> None:
        record(unit, "test")
        if set(bad) & set(offsets(unit)):
            unit.execute(text(statement))

    return handler


@pytest.mark.parametrize("state", SQLSTATES)
def test_a_sqlstate_of_bad_data_is_the_messages_fault(scene: Scene, state: str) -> None:
    run(scene.consumer(), failing(RAISE.format(state), 3, 4, 16), on_poison="dead-letter")
    assert dead(scene) == [3, 4, 16]
    assert {letter.sqlstate for letter in letters(scene)} == {state}
    assert scene.applied() == [n for n in range(20) if n not in (3, 4, 16)]


# What the server itself refuses in that way, be it by a value of a message or in a branch that one takes.
CAUSES = {
    "20000": "DO $$ BEGIN CASE 5 WHEN 1 THEN NULL; END CASE; END $$",
    "2F005": "SELECT pg_temp.gives_nothing()",
    "27000": "UPDATE twice SET n = 1",
    "0A000": "SELECT * FROM other_database.public.payments",
    "24000": "DO $$ DECLARE c CURSOR FOR SELECT 1; BEGIN OPEN c; UPDATE twice SET n = 2 WHERE CURRENT OF c; END $$",
    "2D000": "DO $$ BEGIN COMMIT; END $$",
    "34000": "FETCH FROM was_never_opened",
    "3B001": "ROLLBACK TO SAVEPOINT was_never_set",
    "3F000": "CREATE TABLE is_no_schema.never_made ()",
    "55000": "SELECT currval('pg_temp.never_drawn')",
}
SETUP = """
CREATE FUNCTION pg_temp.gives_nothing() RETURNS int LANGUAGE plpgsql AS $$ BEGIN END $$;
CREATE TEMP TABLE twice (n int);
CREATE FUNCTION pg_temp.again() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN UPDATE twice SET n = 2; RETURN new; END $$;
INSERT INTO twice VALUES (0);
CREATE TRIGGER again BEFORE UPDATE ON twice FOR EACH ROW WHEN (new.n = 1) EXECUTE FUNCTION pg_temp.again();
CREATE TEMP SEQUENCE never_drawn
"""


@pytest.mark.parametrize("state", CAUSES)
def test_what_the_server_says_of_a_value_or_a_branch_of_the_handler_is_bounded(scene: Scene, state: str) -> None:
    def handler(unit: Unit) -> None:
        if {3, 4, 16} & set(offsets(unit)):
            unit.execute(text(SETUP))
        failing(CAUSES[state], 3, 4, 16)(unit)

    run(scene.consumer(), handler, on_poison="dead-letter")
    assert {(letter.message_offset, letter.sqlstate) for letter in letters(scene)} == {(n, state) for n in (3, 4, 16)}
    assert scene.applied() == [n for n in range(20) if n not in (3, 4, 16)]


def test_two_messages_of_one_key_in_an_upsert_are_applied_one_after_the_other(scene: Scene) -> None:
    """SQLSTATE 21000: nothing is wrong with either of them."""
    table = scene.table("k int PRIMARY KEY, o bigint")

    def handler(unit: Unit) -> None:
        record(unit, "test")
        unit.execute(
            text(
                f"INSERT INTO {table} SELECT o / 2, o FROM unnest(%s::bigint[]) AS m(o) "
                "ON CONFLICT (k) DO UPDATE SET o = excluded.o"
            ),
            (offsets(unit),),
        )

    run(scene.consumer(), handler, on_poison="dead-letter")
    assert dead(scene) == []
    scene.assert_exact()
    assert scene.query(f"SELECT k, o FROM {table} ORDER BY k") == [(k, 2 * k + 1) for k in range(10)]


@pytest.mark.parametrize("state", ["42501", "0A000", "28000", "55000", "HV000", "XX000"])
def test_a_doubtful_error_of_some_messages_is_their_fault(scene: Scene, state: str) -> None:
    """A grant that one of several tables lacks, a value that is no query: it vanishes with fewer messages."""
    run(scene.consumer(), failing(RAISE.format(state), 3, 4, 7), on_poison="dead-letter")
    assert dead(scene) == [3, 4, 7]
    assert scene.applied() == [n for n in range(20) if n not in (3, 4, 7)]


@pytest.fixture
def role(scene: Scene, name: str) -> Iterator[str]:
    """A role that may do nothing with tables."""
    with psycopg.connect(scene.conninfo, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name}_r; GRANT USAGE ON SCHEMA exactly_once TO {name}_r")
        yield f"{name}_r"
        connection.execute(f"DROP OWNED BY {name}_r; DROP ROLE {name}_r")


def test_a_row_that_a_policy_refuses_is_the_messages_fault_whatever_others_meet(scene: Scene, role: str) -> None:
    """It has the state of a missing grant, which nobody's message mends."""
    table = scene.table("n int")
    with psycopg.connect(scene.conninfo, autocommit=True) as connection:
        connection.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY; GRANT INSERT ON {table} TO {role}")
        connection.execute(f"CREATE POLICY p ON {table} WITH CHECK (n > 7)")

    def handler(unit: Unit) -> None:
        unit.execute(f"SET LOCAL ROLE {role}".encode())
        unit.execute(f"INSERT INTO {table} VALUES (%s)".encode(), [offsets(unit)[0]])
        unit.execute("RESET ROLE")
        record(unit, "test")

    run(scene.consumer(max_messages=1), handler, on_poison="dead-letter")
    assert dead(scene) == list(range(8))
    assert {letter.sqlstate for letter in letters(scene)} == {"42501"}
    assert scene.applied() == list(range(8, 20))


def test_what_a_role_needs_to_store_a_dead_letter_is_told(scene: Scene, role: str) -> None:
    def handler(unit: Unit) -> None:
        unit.execute(f"SET LOCAL ROLE {role}".encode())
        unit.dead_letter(unit.messages[0], "bad")

    with pytest.raises(psycopg.errors.InsufficientPrivilege) as raised:
        run(scene.consumer(), handler)
    assert any("migrate --schema exactly_once --role NAME" in note for note in raised.value.__notes__)


def test_class_42_of_the_first_messages_is_their_fault_once_another_is_applied(scene: Scene) -> None:
    run(scene.consumer(), failing(RAISE.format("42501"), 0, 1, 10, 19), on_poison="dead-letter")
    assert dead(scene) == [0, 1, 10, 19]
    assert [letter.attempts for letter in letters(scene)] == [1, 1, 1, 1]
    assert scene.applied() == [n for n in range(20) if n not in (0, 1, 10, 19)]


def test_messages_in_doubt_are_told_each_time_they_have_doubled(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    run(scene.consumer(), failing(RAISE.format("42501"), *range(9)), on_poison="dead-letter")
    told = [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "poison_doubted"]
    assert [line.partition(" fails alone, as ")[2].partition(" before")[0] for line in told] == ["0", "1", "3", "7"]
    assert all("InsufficientPrivilege" in line for line in told)
    assert dead(scene) == list(range(9))


def refused_then(fail: Callable[[Unit], object]) -> Callable[[Unit], None]:
    """A handler that is refused with message 0, which may be everybody's trouble, and fails with message 1."""

    def handler(unit: Unit) -> None:
        record(unit, "test")
        if 0 in offsets(unit):
            unit.execute(RAISE.format("42501"))
        if 1 in offsets(unit):
            fail(unit)

    return handler


def test_a_message_behind_one_in_doubt_is_tried_as_often_as_asked(scene: Scene) -> None:
    run(scene.consumer(), refused_then(lambda unit: int("no number")), on_poison="dead-letter", attempts=3)
    assert [(letter.message_offset, letter.attempts) for letter in letters(scene)] == [(0, 1), (1, 3)]
    assert scene.applied() == list(range(2, 20))


def test_a_message_behind_one_in_doubt_is_named_where_it_stops_the_service(scene: Scene) -> None:
    def swallow(unit: Unit) -> None:
        with contextlib.suppress(psycopg.Error):
            unit.execute("SELECT 1 / 0")

    with pytest.raises(PoisonMessage, match=r"offset 1: TransactionAborted.*before .* offset 0 is committed"):
        run(scene.consumer(), refused_then(swallow), on_poison="dead-letter")
    assert dead(scene) == scene.applied() == []


def test_what_on_poison_raises_is_not_the_fault_of_the_message_behind_one_in_doubt(scene: Scene) -> None:
    trouble = [ValueError("of the callable")]

    def aside(unit: Unit, message: Message, error: Exception) -> None:
        if trouble:
            raise trouble.pop()
        unit.dead_letter(message, error)

    consumer, handler = scene.consumer(), refused_then(lambda unit: None)
    with pytest.raises(ValueError, match="of the callable"):
        run(consumer, handler, on_poison=aside)
    run(consumer, handler, on_poison=aside)
    assert dead(scene) == [0]
    assert scene.applied() == list(range(1, 20))


@pytest.mark.parametrize("count", [1, 3])
def test_a_doubtful_message_whose_partition_is_taken_leaves_no_other_in_its_place(
    make_scene: MakeScene, count: int
) -> None:
    """While the first ones are in doubt, the partition of the last of them is reset; then one more is refused."""
    scene = make_scene(6, partitions=3)
    bad: list[tuple[int | None, int | None]] = []
    calls, expected, was_reset = itertools.count(), count, False

    def handler(unit: Unit) -> None:
        nonlocal expected, was_reset
        assert next(calls) < 100, "the same messages again and again"
        record(unit, "test")
        places = [(message.partition(), message.offset()) for message in unit.messages]
        if len(bad) < expected or not set(places).isdisjoint(bad):
            if len(places) == 1 and places[0] not in bad:
                bad.append(places[0])
            unit.execute(RAISE.format("42501"))
        elif not was_reset:
            was_reset, expected = True, count + 1
            scene.query(
                "UPDATE exactly_once.ledger SET owner_token = NULL, owner_epoch = owner_epoch + 1 "
                f"WHERE group_id = %s AND partition = {bad[-1][0]}"
            )

    # All are there before the first is refused: the doubts need one more than they are, whichever partition is first.
    run(scene.consumer(linger_seconds=60), handler, on_poison="dead-letter")
    assert sorted((letter.partition, letter.message_offset) for letter in letters(scene)) == sorted(bad)
    assert len(bad) == count + 1
    assert len(scene.applied()) == 6 - len(bad)


def in_a_task_group(call: Callable[[], object]) -> None:
    async def task() -> None:
        call()

    async def tasks() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(task())

    asyncio.run(tasks())


@pytest.mark.parametrize("form", [run, in_thread])
@pytest.mark.parametrize("kind", [Redelivered, psycopg.errors.DeadlockDetected])
def test_what_is_nobodys_fault_is_that_in_a_task_group_too(
    scene: Scene, form: Callable[..., None], kind: type[Exception]
) -> None:
    tries = itertools.count()

    def call() -> None:
        if next(tries) < 8:
            raise kind("away")

    def handler(unit: Unit) -> None:
        record(unit, "test")
        in_a_task_group(call)

    form(scene.consumer(), handler, on_poison="dead-letter")
    assert dead(scene) == []
    scene.assert_exact()


def test_a_dead_letter_says_what_a_task_group_had(scene: Scene) -> None:
    def handler(unit: Unit) -> None:
        record(unit, "test")
        if 2 in offsets(unit):
            in_a_task_group(lambda: int("no number"))

    run(scene.consumer(), handler, on_poison="dead-letter")
    ((offset, error),) = [(letter.message_offset, letter.error) for letter in letters(scene)]
    assert offset == 2
    assert error.endswith("; ValueError: invalid literal for int() with base 10: 'no number'")


def test_a_broken_contract_stops_in_a_task_group_too(scene: Scene) -> None:
    with pytest.raises(TransactionNotYours):
        run(scene.consumer(), lambda unit: in_a_task_group(unit.connection.commit), on_poison="dead-letter")
    assert dead(scene) == scene.applied() == []


@pytest.mark.parametrize("statement", ["SELECT * FROM is_not_there", CAUSES["0A000"], CAUSES["3F000"]])
def test_a_doubtful_error_of_all_messages_stops_and_sets_nothing_aside(scene: Scene, statement: str) -> None:
    expected = (psycopg.errors.UndefinedTable, psycopg.errors.FeatureNotSupported, psycopg.errors.InvalidSchemaName)
    consumer = scene.consumer()
    for _ in range(2):  # who goes on after it gets it again
        with pytest.raises(expected):
            run(consumer, failing(statement, *range(20)), on_poison="dead-letter")
    assert dead(scene) == scene.applied() == []


@pytest.mark.parametrize("way", ["left", "joined", "taken back"])
def test_a_role_that_a_handler_leaves_behind_is_named(scene: Scene, db: psycopg.Connection[Any], way: str) -> None:
    """The offsets are moved as the role that is set then, which for row-level security is a tenant's."""
    role = sql.Identifier(f"tenant-{scene.topic}")
    db.execute(sql.SQL("CREATE ROLE {}").format(role))
    try:
        unit = next(iter(scene.consumer()))
        set_role = sql.SQL("SET LOCAL ROLE {}").format(role)

        def handle() -> None:
            if way == "joined":
                with psycopg.connect(scene.conninfo) as own, unit.join(own):
                    own.execute(set_role)
                return
            with unit:
                unit.execute(set_role)
                if way == "taken back":
                    unit.execute("RESET ROLE")

        if way == "taken back":
            handle()
            assert scene.ledger("next_offset") == [unit.advances[0].next_offset]
            return
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as raised:
            handle()
        (note,) = raised.value.__notes__
        assert "SET LOCAL ROLE" in note
        assert scene.ledger("next_offset") == [0]
    finally:
        db.execute(sql.SQL("DROP ROLE {}").format(role))


def test_corrupted_data_stops_at_once(scene: Scene) -> None:
    calls: list[int] = []

    def handler(unit: Unit) -> None:
        calls.append(len(unit.messages))
        unit.execute(text(RAISE.format("XX001")))

    with pytest.raises(psycopg.errors.DataCorrupted):
        run(scene.consumer(), handler, on_poison="dead-letter")
    assert len(calls) == 1


STATEMENTS = {
    "25006": "SET TRANSACTION READ ONLY; CREATE TABLE never_made ()",
    "26000": "EXECUTE was_never_prepared",
    "58P01": "COPY journal.entries FROM '/is/not/there'",
    "53400": RAISE.format("53400"),
}


@pytest.mark.parametrize("way", STATEMENTS)
def test_a_statement_that_can_never_succeed_is_found(scene: Scene, way: str, caplog: pytest.LogCaptureFixture) -> None:
    run(scene.consumer(), failing(STATEMENTS[way], 3, 12), on_poison="dead-letter")
    assert dead(scene) == [3, 12]
    assert scene.applied() == [n for n in range(20) if n not in (3, 12)]
    assert [letter.attempts for letter in letters(scene)] == [TRIES, TRIES]
    assert any("while the database server answers" in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("way", STATEMENTS)
def test_a_statement_that_can_never_succeed_ends_the_documented_loop(scene: Scene, way: str) -> None:
    calls: list[Unit] = []

    def handler(unit: Unit) -> None:
        calls.append(unit)
        failing(STATEMENTS[way], 3)(unit)

    with pytest.raises(psycopg.Error) as raised:
        loop(scene.consumer(), handler)
    assert not isinstance(raised.value, Redelivered)
    assert len(calls) == TRIES
    assert scene.applied() == []


def test_a_statement_that_fails_with_the_sqlstate_of_the_ledger_ends_the_documented_loop(scene: Scene) -> None:
    """It says that the offsets could not be moved, which is tried again; but nothing is wrong with them."""
    calls: list[Unit] = []

    def handler(unit: Unit) -> None:
        calls.append(unit)
        failing(RAISE.format("EO001"), 3)(unit)

    with pytest.raises(psycopg.Error, match="refused"):
        loop(scene.consumer(), handler)
    assert len(calls) == TRIES
    assert scene.applied() == []


@pytest.mark.parametrize("form", [run, in_thread])
def test_message_is_not_to_blame_for_connections_that_are_cut_under_it(scene: Scene, form: Callable[..., None]) -> None:
    """More often than any batch or message is tried for other reasons; each of the first units meets it."""
    cuts = list(range(4 * TRIES))

    def handler(unit: Unit) -> None:
        record(unit, "test")
        if cuts and offsets(unit)[0] <= 3 <= offsets(unit)[-1]:
            cuts.pop()
            scene.query(f"SELECT pg_terminate_backend({unit.connection.info.backend_pid})")
            unit.execute("SELECT 1")

    form(scene.consumer(), handler, on_poison="dead-letter")
    assert not cuts
    assert dead(scene) == []
    scene.assert_exact()


def end_patience(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the time for failures be over once the message at fault is tried alone, however long that took."""
    if offsets(unit) == [3]:
        monkeypatch.setattr(outcome, "PATIENCE_SECONDS", 0.0)


def test_statement_that_ends_its_own_backend_stops_the_service_in_the_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell it from an administrator who ends backends; what comes before it is applied."""

    def handler(unit: Unit) -> None:
        end_patience(unit, monkeypatch)
        failing("SELECT pg_terminate_backend(pg_backend_pid())", 3)(unit)

    with pytest.raises(NoProgress, match=r"nothing could be committed for .*1 messages, .* 3\.\.3"):
        run(scene.consumer(), handler, on_poison="dead-letter")
    assert dead(scene) == []
    assert scene.applied() == [0, 1, 2]


def test_poison_names_the_error_of_the_statement(scene: Scene) -> None:
    with pytest.raises(PoisonMessage, match=r"offset 3: InvalidSqlStatementName: .*was_never_prepared"):
        run(scene.consumer(), failing(STATEMENTS["26000"], 3))
    assert scene.applied() == [0, 1, 2]


def test_conflicts_that_never_end_stop_the_service_and_are_no_dead_letter(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def handler(unit: Unit) -> None:
        end_patience(unit, monkeypatch)
        sizes.append(len(unit.messages))
        failing(RAISE.format("40P01"), 3)(unit)

    with pytest.raises(NoProgress, match=r"nothing could be committed for .* refused") as raised:
        run(scene.consumer(), handler, on_poison="dead-letter")
    assert isinstance(raised.value.__cause__, psycopg.errors.DeadlockDetected)
    assert dead(scene) == []
    assert sizes[:TRIES] == [10] * TRIES
    assert sizes[TRIES] == 5, "smaller units collide less"
    assert scene.applied() == [0, 1, 2]


# How many of its messages may be set aside.


@pytest.fixture
def transactional(make_scene: MakeScene) -> Scene:
    """Twelve messages, each in a transaction of its own, so that every second offset is a marker."""
    scene = make_scene(0)
    producer = Producer({"bootstrap.servers": scene.bootstrap_servers, "transactional.id": scene.topic})
    producer.init_transactions(30)
    for number in range(12):
        producer.begin_transaction()
        producer.produce(scene.topic, b"%d" % number, partition=0)
        producer.commit_transaction(30)
    return scene


def test_dead_letters_in_a_row_are_counted_across_offsets_without_messages(transactional: Scene) -> None:
    scene, limit = transactional, DeadLetterLimit(in_a_row=3)
    refuse = failing(RAISE.format("22000"), *range(4, 24))
    expected = "offset 10 would be dead letter 4 in a row, 3 are allowed"
    for _ in range(2):  # a restart does not begin to count anew
        with scene.consumer() as consumer, pytest.raises(TooManyDeadLetters, match=expected):
            run(consumer, refuse, on_poison="dead-letter", dead_letter_limit=limit)
        assert dead(scene) == [4, 6, 8]
    assert scene.applied() == [0, 2]


def test_dead_letters_in_a_row_are_counted_across_a_restart_at_the_end_of_the_log(make_scene: MakeScene) -> None:
    """There the ledger stands behind the marker, and the message before it is known to nobody."""
    scene, limit = make_scene(0), DeadLetterLimit(in_a_row=3)
    producer = Producer({"bootstrap.servers": scene.bootstrap_servers, "transactional.id": scene.topic})
    producer.init_transactions(30)

    def send_and_run(*bad: int) -> None:
        producer.begin_transaction()
        producer.produce(scene.topic, b"1", partition=0)
        producer.commit_transaction(30)
        with scene.consumer() as consumer:
            run(consumer, failing(RAISE.format("22000"), *bad), on_poison="dead-letter", dead_letter_limit=limit)

    for offset in range(0, 14, 2):
        send_and_run(offset if offset != 6 else -1)
        ((stored,),) = scene.query("SELECT next_offset FROM exactly_once.ledger WHERE group_id = %s")
        assert stored % 2 == 0
    assert dead(scene) == [0, 2, 4, 8, 10, 12]
    with pytest.raises(TooManyDeadLetters, match="offset 14 would be dead letter 4 in a row, 3 are allowed"):
        send_and_run(14)
    assert scene.applied() == [6]


def test_what_is_applied_between_or_settled_ends_the_row(transactional: Scene) -> None:
    scene = transactional
    bad = (0, 2, 4, 8, 10, 12, 14, 16, 18, 20)

    def set_aside(in_a_row: int) -> None:
        limit = DeadLetterLimit(in_a_row=in_a_row)
        with scene.consumer() as consumer:
            run(consumer, failing(RAISE.format("22000"), *bad), on_poison="dead-letter", dead_letter_limit=limit)

    with pytest.raises(TooManyDeadLetters, match="offset 20 would be dead letter 7 in a row"):
        set_aside(6)
    assert dead(scene) == [0, 2, 4, 8, 10, 12, 14, 16, 18]
    scene.query("UPDATE exactly_once.dead_letter SET status = 'dropped' WHERE group_id = %s AND message_offset = 16")
    set_aside(3)
    assert dead(scene)[-2:] == [18, 20]
    assert scene.applied() == [6, 22]


# What is told of it.


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What people see, of the library; without what it waits for at the start, which depends on the machine."""
    records = [each for each in caplog.records if each.levelno >= logging.WARNING]
    texts = [each.getMessage() for each in records if each.name.startswith("exactly_once")]
    return [text for text in texts if not text.startswith("waiting for ")]


def test_a_search_is_told_once_and_so_is_what_it_finds(make_scene: MakeScene, caplog: pytest.LogCaptureFixture) -> None:
    scene = make_scene(200)
    run(scene.consumer(max_messages=200), failing(RAISE.format("22000"), 77, 78, 120), on_poison="dead-letter")
    begun, *found = told(caplog)
    assert "looking for the message in smaller units than <Unit failed: 200 messages" in begun
    assert [
        "offset 77 was stored as a dead letter" in found[0],
        "offset 120 was stored as a dead letter" in found[2],
        len(found),
    ] == [
        True,
        True,
        3,
    ]
    assert not any("<Unit done" in each for each in told(caplog))


def test_a_search_that_finds_nothing_is_told(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    failures = [1]

    def handler(unit: Unit) -> None:
        record(unit, "test")
        if failures:
            failures.pop()
            raise ValueError("once")

    run(scene.consumer(), handler)
    begun, ended = told(caplog)
    assert "looking for the message" in begun
    assert "the search is over: none of the messages failed alone" in ended
    scene.assert_exact()


UNUSED = "the handler did not use its unit"


def unused(caplog: pytest.LogCaptureFixture) -> int:
    return sum(UNUSED in message for message in told(caplog))


@pytest.mark.parametrize("form", [loop, run, in_thread])
def test_a_handler_that_never_uses_its_units_is_told_once(
    scene: Scene, caplog: pytest.LogCaptureFixture, form: Callable[..., None]
) -> None:
    with psycopg.connect(scene.conninfo, autocommit=True) as own:
        for kafka in ({}, {"group.id": f"{scene.topic}-few"}):
            caplog.clear()
            with scene.consumer(kafka, max_messages=100 if kafka else 2) as consumer:
                form(consumer, lambda _: own.execute("SELECT 1"))
            assert unused(caplog) == 1


def test_a_handler_that_uses_some_of_its_units_is_not_told(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    def handler(unit: Unit) -> None:
        if 5 in offsets(unit):
            unit.execute("SELECT 1")

    with scene.consumer(max_messages=2) as consumer:
        loop(consumer, handler)
    with scene.consumer({"group.id": f"{scene.topic}-join"}) as consumer, psycopg.connect(scene.conninfo) as own:
        for unit in consumer.units(until_end=True):
            with own.transaction(), unit.join(own):
                pass
    with scene.consumer({"group.id": f"{scene.topic}-none"}) as consumer:
        consumer.stop()  # so that it gets no unit
        consumer.run(lambda _: None, wait=AT_ONCE)
    assert unused(caplog) == 0
