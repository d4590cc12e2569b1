"""Claims: of events with one key the effects of one are stored, whoever meets them, and whatever happens in between."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, LiteralString
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from exactly_once import Redelivered, Unit, UnitNotFinished
from exactly_once.ledger import claims
from exactly_once.ledger.claims import Key
from exactly_once.ledger.sql import grants
from exactly_once.testing import message
from exactly_once.testing import unit as trial
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, actions
from tests.support.seeds import first_seed
from tests.support.waiting import until
from tests.support.worker import Crew, record, turn_until

Db = psycopg.Connection[Any]
Connect = Callable[[], Db]


@pytest.fixture
def connect(conninfo: str) -> Iterator[Connect]:
    """Open connections that begin a transaction with their first statement."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(psycopg.connect(conninfo))


def claim(connection: Db, group_id: str, *keys: Key) -> list[bool]:
    return claims.claim(connection, keys, schema="exactly_once", group_id=group_id)


def keep(db: Db, group_id: str, seconds: float | None) -> None:
    db.execute("SELECT exactly_once.claim_keep(%s, %s)", (group_id, seconds))


def turn(db: Db, group_id: str) -> None:
    """Have the window of a group turned now, however old it is."""
    keep(db, group_id, 1e-9)
    db.execute("SELECT exactly_once.claim_turn(%s)", (group_id,))


def waits(db: Db, connection: Db) -> bool:
    """Whether a connection waits for another one's transaction."""
    row = db.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", (connection.info.backend_pid,)).fetchone()
    return row == (True,)


# What a key is.

DIFFERENT: list[Key] = [
    *(b"1", "1", 1, UUID(int=1), UUID(int=1).bytes, str(UUID(int=1)), -1, b"\xff", 0, b"\0", "\0"),
    *("\u00e9", "e\u0301", b"\xc3\xa9", "\udc80", b"NULL", "NULL", " ", '"', "\\", "{}", "i\x01", b"i\x01"),
    *(127, 128, 255, 256, -128, -129, 2**63, 2**64, -(2**63), 10**400, 10**400 + 1),
    *(b"k" * 128, b"k" * 129, "k" * 128, "k" * 129, "k" * 5000, b"k" * 5000, "k" * 4999 + "l", "\U0001f511" * 1000),
]


@pytest.mark.parametrize("nulls", ["on", "off"])
def test_keys_of_every_type_and_size_are_told_apart(connect: Connect, name: str, nulls: str) -> None:
    connection = connect()
    connection.execute(sql.SQL("SET array_nulls = {}").format(nulls))
    assert claim(connection, name, *DIFFERENT) == [True] * len(DIFFERENT)
    assert claim(connection, name, *DIFFERENT) == [False] * len(DIFFERENT)
    for key in DIFFERENT:
        assert claim(connection, f"{name}-other", key, key) == [True, False]


def test_equal_keys_are_equal_however_they_are_held(connect: Connect, name: str) -> None:
    class Name(str):
        """An application's own."""

    connection = connect()
    assert claim(connection, name, "a", b"b", 3) == [True] * 3
    assert claim(connection, name, Name("a"), bytearray(b"b"), memoryview(b"b")) == [False] * 3  # type: ignore[arg-type]


@pytest.mark.parametrize(("key", "error"), [(None, TypeError), (1.0, TypeError), (True, TypeError), ("", ValueError)])
def test_what_is_no_key_is_refused_and_nothing_is_claimed(
    connect: Connect, name: str, key: Any, error: type[Exception]
) -> None:
    connection = connect()
    with pytest.raises(error, match="a key to claim is"):
        claim(connection, name, "a", key)
    assert claim(connection, name, "a") == [True]
    assert claim(connection, name) == []


def test_one_key_is_not_taken_for_several(connect: Connect, name: str) -> None:
    with trial(connect(), [message(name, b"a")], group_id=name) as unit:
        for key in (b"abc", bytearray(b"abc"), memoryview(b"abc"), "abc"):
            with pytest.raises(TypeError, match="several keys, not one"):
                unit.claim_many(key)
        assert unit.claim_many(["a", 97]) == [True, True]


# In a unit.


def test_unit_of_a_test_claims_and_leaves_nothing(connect: Connect, name: str) -> None:
    for _ in range(2):
        with trial(connect(), [message(name, b"a")], group_id=name) as unit:
            assert unit.claim_many(["a", "b", "a"]) == [True, True, False]
            assert [unit.claim("b"), unit.claim("c")] == [False, True]
    with pytest.raises(UnitNotFinished):
        unit.claim("a")


def test_claim_goes_with_its_savepoint(connect: Connect, name: str) -> None:
    with trial(connect(), [message(name, b"a")], group_id=name) as unit:
        with suppress(ZeroDivisionError), unit.connection.transaction():
            assert unit.claim("a")
            raise ZeroDivisionError
        assert unit.claim("a")


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_each_value_is_stored_once_beside_poison_and_duplicates(
    scene: Scene, isolation: str, *, in_thread: bool
) -> None:
    """Halves of the batch are tried again and again, and each time its keys are claimed anew."""
    values = [b"%d" % (number % 7) for number in range(50)]
    values[20] = b"poison"
    scene.produce_values(values)
    table = scene.table("value bytea")

    def handler(unit: Unit) -> None:
        record(unit, "test")
        for each, free in zip(unit.messages, unit.claim_many([m.value() or b"" for m in unit.messages]), strict=True):
            if free:
                unit.execute(f"INSERT INTO {table} VALUES (%s)".encode(), (each.value(),))
        if any(m.value() == b"poison" for m in unit.messages):
            raise ValueError("poison")

    consumer = scene.consumer(isolation=isolation, max_messages=30)
    consumer.run(handler, on_poison="dead-letter", in_thread=in_thread, until_end=True)
    assert len(scene.applied()) == 69
    stored = [bytes(value) for (value,) in scene.query(f"SELECT value FROM {table}")]
    assert sorted(stored) == sorted({*values, *(b"%d" % n for n in range(20))} - {b"poison"})


def test_joined_transaction_claims_with_the_grants_of_a_worker(scene: Scene, db: Db, name: str) -> None:
    """The functions run as the owner of the schema; the role may neither write to the tables nor make any."""
    role = sql.Identifier(name)
    db.execute(sql.SQL("CREATE ROLE {}").format(role))
    db.execute(grants("exactly_once", name))
    units = scene.consumer().units(until_end=True)
    try:
        for commits in (False, True):
            with psycopg.connect(scene.conninfo) as own:
                own.execute(sql.SQL("SET ROLE {}").format(role))
                with next(units).join(own) as unit:
                    assert unit.claim_many([b"a", b"a"]) == [True, False], "what was rolled back is free again"
                if not commits:
                    own.rollback()
        with psycopg.connect(scene.conninfo) as own:
            own.execute(sql.SQL("SET ROLE {}").format(role))
            assert claim(own, name, b"a") == [False]
            turn(own, name)
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                own.execute("UPDATE exactly_once.claim_window SET turns = 7")
    finally:
        db.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(role))
    for unit in units:
        with unit:
            record(unit, "test")


def test_fenced_owner_claims_nothing(scene: Scene, connect: Connect) -> None:
    unit = next(iter(scene.consumer()))
    with pytest.raises(Redelivered), unit:
        assert unit.claim("a")
        scene.query(
            "UPDATE exactly_once.ledger SET owner_epoch = owner_epoch + 1, owner_token = gen_random_uuid() "
            "WHERE group_id = %s"
        )
    assert claim(connect(), scene.topic, "a") == [True]


# Several at once.


@pytest.mark.parametrize("end", ["commit", "rollback", "killed"])
@pytest.mark.parametrize("known", [True, False], ids=["known group", "new group"])
def test_second_waits_for_the_first_and_gets_what_that_leaves(
    connect: Connect, db: Db, name: str, end: str, *, known: bool
) -> None:
    """A group that is new gets its tables from the first."""
    first, second = connect(), connect()
    if known:
        keep(db, name, None)
    assert claim(first, name, "a", "b") == [True, True]
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(claim, second, name, "b", "c")
        until(lambda: waits(db, second), 10, "the second to wait")
        if end == "killed":
            db.execute("SELECT pg_terminate_backend(%s)", (first.info.backend_pid,))
        else:
            getattr(first, end)()
        assert answer.result(60) == [end != "commit", True]
    if end == "killed":
        first.close()


def test_overlapping_calls_in_opposite_orders_do_not_deadlock(connect: Connect, name: str) -> None:
    """Without one order of keys this ends in a deadlock within a few rounds."""
    sides, keys = [connect(), connect()], [f"{name}-{number}" for number in range(3000)]
    claim(sides[0], name, "made")
    sides[0].commit()
    together = threading.Barrier(2)

    def work(side: int) -> int:
        got = 0
        for number in range(5):
            mine = [f"{number}-{key}" for key in keys]
            together.wait(60)
            got += sum(claim(sides[side], name, *(reversed(mine) if side else mine)))
            sides[side].commit()
        return got

    with ThreadPoolExecutor() as pool:
        assert sum(pool.map(work, range(2))) == 5 * len(keys)


@pytest.mark.parametrize("failpoint", [("handled", "kill"), ("advanced", "kill"), ("handled", "stop")])
def test_crash_between_claim_and_commit_loses_and_doubles_no_key(
    make_scene: MakeScene, db: Db, failpoint: tuple[str, str]
) -> None:
    """Two partitions bring the same keys to two workers, one of which dies or freezes; the other takes over."""
    scene = make_scene(400, partitions=2)
    table = scene.table("value bytea")
    scene.produce_values(str(number).encode() for number in range(1, 401))  # as every key of both, in partition 0
    with Crew(scene.bootstrap_servers, scene.conninfo, scene.topic, [scene.topic]) as crew:
        options: dict[str, Any] = {"options": {"max_messages": 20}, "claims_into": table}
        victim = crew.start(failpoint=[*failpoint, 3], **options)
        victim.wait("failpoint")
        heir = crew.start(**options)
        crew.until_applied(800)
        if failpoint[1] == "stop":
            victim.cont()
            victim.wait("redelivered", error="Fenced")
            crew.end_well(victim)
        crew.end_well(heir)
        crew.assert_exact()
    values = [int(bytes(value)) for (value,) in scene.query(f"SELECT value FROM {table}")]
    assert sorted(values) == list(range(401))


# The window.


def test_key_is_held_for_one_to_two_windows_and_leaves_with_its_table(connect: Connect, db: Db, name: str) -> None:
    one = connect()
    assert claim(one, name, "a") == [True]
    one.commit()
    files: LiteralString = (
        "SELECT pg_relation_filenode(younger::regclass), pg_relation_filenode(older::regclass) "
        "FROM exactly_once.claim_window WHERE group_id = %s"
    )
    (younger, older), *_ = db.execute(files, (name,)).fetchall()
    turn(db, name)
    (emptied, kept), *_ = db.execute(files, (name,)).fetchall()
    assert kept == younger
    assert emptied != older, "its rows were deleted one by one"
    assert claim(one, name, "a", "b") == [False, True]
    one.commit()
    turn(db, name)
    assert claim(one, name, "a", "b") == [True, False]


def test_turn_waits_for_units_that_have_claimed(connect: Connect, db: Db, name: str) -> None:
    """Else one that has looked into the older table, and one that looks into the next, could both get a key."""
    one, other, turner = connect(), connect(), connect()
    assert claim(one, name, "a") == [True]
    turner.execute("SET lock_timeout = '100ms'")
    keep_at_once = "UPDATE exactly_once.claim_window SET seconds = 1e-9 WHERE group_id = %s"
    one.commit()
    db.execute(keep_at_once, (name,))
    assert claim(one, name, "b") == [True]
    with pytest.raises(psycopg.errors.LockNotAvailable):
        turner.execute("SELECT exactly_once.claim_turn(%s)", (name,))
    turner.rollback()
    one.commit()
    turner.execute("SELECT exactly_once.claim_turn(%s)", (name,))
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(claim, one, name, "a", "b", "c")
        until(lambda: waits(db, one), 10, "the claim to wait for the turn")
        turner.commit()
        assert answer.result(60) == [False, False, True]
        answer = pool.submit(claim, other, name, "c")
        until(lambda: waits(db, other) or answer.done(), 10, "another one to meet the key")
        one.commit()
        assert answer.result(60) == [False], "the first one used the tables as they were before the turn"


def test_of_two_members_that_turn_at_once_one_does(connect: Connect, db: Db, name: str) -> None:
    first, second = connect(), connect()
    keep(db, name, 60)
    db.execute(
        "UPDATE exactly_once.claim_window SET turned_at = turned_at - interval '61 s' WHERE group_id = %s", (name,)
    )
    call: LiteralString = "SELECT exactly_once.claim_turn(%s)"
    assert first.execute(call, (name,)).fetchone() == (60,)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(second.execute, call, (name,))
        until(lambda: waits(db, second), 10, "the second to wait")
        first.commit()
        answer.result(60)
    second.commit()
    assert db.execute("SELECT turns FROM exactly_once.claim_window WHERE group_id = %s", (name,)).fetchone() == (1,)


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_snapshot_older_than_the_last_turn_does_not_claim(
    connect: Connect, db: Db, name: str, level: psycopg.IsolationLevel
) -> None:
    one, other = connect(), connect()
    claim(other, name, "made")
    other.commit()
    one.isolation_level = level
    one.execute("SELECT 1 FROM exactly_once.ledger")
    turn(db, name)
    assert claim(other, name, "a") == [True]
    other.commit()
    with pytest.raises(psycopg.errors.SerializationFailure):
        claim(one, name, "a")
    one.rollback()
    assert claim(one, name, "a") == [False]


def test_consumer_turns_its_window_between_units(
    scene: Scene, db: Db, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(claims, "_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(claims, "_LOCK_SECONDS", 0.01)
    monkeypatch.setattr(claims, "_TOLD_TRIES", 2)
    keep(db, scene.topic, 3600)
    consumer = scene.consumer(claims_window=0.2)
    with next(consumer.units()) as unit:
        assert unit.claim("a")
    turns = "SELECT turns FROM exactly_once.claim_window WHERE group_id = %s"
    ((since,),) = scene.query(turns)
    turn_until(consumer, lambda: scene.query(turns)[0][0] >= since + 2, 20, "two turns")
    with psycopg.connect(scene.conninfo) as long:
        assert claim(long, scene.topic, "a") == [True]
        turn_until(consumer, lambda: "claims_turn_postponed" in actions(caplog), 20, "a postponed turn to be told")
        (before,) = scene.query(turns)
    turn_until(consumer, lambda: scene.query(turns) > [before], 20, "the turn that was postponed")
    assert actions(caplog).count("claims_window_changed") == 1


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_a_changed_window_does_not_wait_for_units_that_have_claimed(
    scene: Scene,
    db: Db,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    level: psycopg.IsolationLevel,
) -> None:
    """Above READ COMMITTED those hold the window's row, and with several members one of them is always open."""
    monkeypatch.setattr(claims, "_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(claims, "_LOCK_SECONDS", 0.01)
    monkeypatch.setattr(claims, "_TOLD_TRIES", 2)
    keep(db, scene.topic, 3600)
    with psycopg.connect(scene.conninfo) as long:
        long.isolation_level = level
        assert claim(long, scene.topic, "a") == [True]
        consumer = scene.consumer(claims_window=1800)
        with next(consumer.units()) as unit:
            assert unit.claim("b")
        turn_until(consumer, lambda: "claims_turn_postponed" in actions(caplog), 20, "a postponed change to be told")
        assert "lock timeout" not in caplog.text, "the consumer itself waited"
    window = "SELECT seconds FROM exactly_once.claim_window WHERE group_id = %s"
    turn_until(consumer, lambda: scene.query(window) == [(1800,)], 20, "the change")
    assert actions(caplog).count("claims_window_changed") == 1


def test_without_a_window_keys_stay_whoever_turns(scene: Scene, db: Db) -> None:
    consumer = scene.consumer()
    with next(consumer.units()) as unit:
        assert unit.claim("a")
    assert db.execute("SELECT exactly_once.claim_turn(%s)", (scene.topic,)).fetchone() == (None,)
    with psycopg.connect(scene.conninfo) as connection:
        assert claim(connection, scene.topic, "a") == [False]


# Against a model.


class Model:
    """Two sets: what committed transactions have claimed, by generation."""

    def __init__(self) -> None:
        self.younger: set[tuple[type, Key]] = set()
        self.older: set[tuple[type, Key]] = set()

    def claim(self, mine: set[tuple[type, Key]], keys: list[Key]) -> list[bool]:
        answers = []
        for key in keys:
            typed = (type(key), key)
            answers.append(typed not in self.younger | self.older | mine)
            mine.add(typed)
        return answers


def test_claims_are_two_sets_of_a_model(connect: Connect, db: Db, name: str) -> None:
    """Transactions one after the other: claims, savepoints, ends and turns as chance has it, in two groups."""
    chance = random.Random(first_seed())
    connection, levels = connect(), list(psycopg.IsolationLevel)
    groups = {f"{name}-{number}": Model() for number in range(2)}

    def draw() -> list[Key]:
        kinds: list[Callable[[int], Key]] = [
            int,
            str,
            lambda n: b"%d" % n,
            lambda n: UUID(int=n),
            lambda n: str(n) * 200,
        ]
        return [chance.choice(kinds)(chance.randrange(12)) for _ in range(chance.randint(0, 8))]

    for _ in range(150):
        group_id, model = chance.choice(list(groups.items()))
        connection.isolation_level = chance.choice(levels)
        mine: set[tuple[type, Key]] = set()
        connection.execute("SELECT")  # begins the transaction: the blocks below are savepoints of it
        for _ in range(chance.randint(1, 3)):
            saved, keys, undone = set(mine), draw(), chance.random() < 0.2
            with connection.transaction(force_rollback=undone):
                assert claim(connection, group_id, *keys) == model.claim(mine, keys)
            mine = saved if undone else mine
        if chance.random() < 0.7:
            connection.commit()
            model.younger |= mine - model.older
        else:
            connection.rollback()
        if chance.random() < 0.2:
            turn(db, group_id)
            model.younger, model.older = set(), model.younger
