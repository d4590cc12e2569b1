"""Rows that take each other's place, so that an advance costs the same however long somebody holds a snapshot."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from exactly_once._model import ROTATE_EVERY, Advance, Partition, Row
from exactly_once.ledger.conflict import Conflict, Grant, check
from exactly_once.ledger.migrate import migrate
from exactly_once.ledger.outcome import SHORT_COUNT
from exactly_once.ledger.rows import Ledger
from exactly_once.ledger.session import Session, connector
from exactly_once.ledger.sql import grants
from tests.conftest import MakeConsumer
from tests.support.roles import as_role
from tests.support.seeds import first_seed
from tests.support.topics import create_topic, produce
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("unhurried_locks")

Db = psycopg.Connection[Any]
Submit = Callable[..., Future[Any]]


@pytest.fixture
def make_owner(conninfo: str, name: str) -> Iterator[Callable[[], Ledger]]:
    """Make owners of the rows of group ``name``, each with a connection of its own, which is open."""
    sessions: list[Session] = []

    def make() -> Ledger:
        sessions.append(Session(connector(conninfo), schema="exactly_once"))
        assert not sessions[-1].connection.closed
        return Ledger(sessions[-1], group_id=name, owner_kind="consumer")

    yield make
    for session in sessions:
        session.close()


@pytest.fixture
def submit() -> Iterator[Submit]:
    """Run a call in another thread."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def register(owner: Ledger, topic: str, count: int = 1) -> list[Partition]:
    partitions = [Partition(topic, number) for number in range(count)]
    owner.register(dict.fromkeys(partitions, 0), cluster_id="c", topic_ids={topic: "id"})
    return partitions


def to(row: Row, next_offset: int, *, rotates: bool = True) -> Advance:
    assert row.owner_token is not None
    return Advance(
        partition=row.partition,
        token=row.owner_token,
        epoch=row.owner_epoch,
        topic_id=row.topic_id,
        expected=row.next_offset or 0,
        next_offset=next_offset,
        leader_epoch=None,
        generation=row.generation,
        rotates=rotates,
    )


def advance(owner: Ledger, *advances: Advance, commit: bool = True, isolation: str = "READ COMMITTED") -> None:
    """Advance in a unit's transaction; leave it open unless ``commit``."""
    begun = owner.session.begin(isolation)
    try:
        owner.advance(owner.session.connection, advances, xid=begun.xid, commit=commit)
    except BaseException:
        owner.session.roll_back()
        raise


def wait_until_blocked(db: Db, owner: Ledger) -> None:
    pid = owner.session.connection.info.backend_pid
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = %s"
    until(lambda: db.execute(waits, (pid,)).fetchone() != (0,), 10, "a lock to be waited for")


def stored(db: Db, group: str) -> list[tuple[int, int, int]]:
    found = "SELECT partition, generation, next_offset FROM exactly_once.ledger WHERE group_id = %s ORDER BY 1, 2"
    return db.execute(found, (group,)).fetchall()


def test_a_rotation_keeps_every_column(make_owner: Callable[[], Ledger], name: str, db: Db) -> None:
    owner = make_owner()
    (row,) = owner.acquire(register(owner, name))
    db.execute(
        "UPDATE exactly_once.ledger SET owner_name = 'n', application = 'a', halted = 'h', moved_at = now(), "
        "leader_epoch = 1, advanced_at = now() WHERE group_id = %s",
        (name,),
    )
    look = "SELECT to_jsonb(l) FROM exactly_once.ledger l WHERE group_id = %s"
    ((before,),) = db.execute(look, (name,)).fetchall()
    assert None not in before.values(), "a column that this test does not know"
    advance(owner, replace(to(row, 7), leader_epoch=2))
    ((after,),) = db.execute(look, (name,)).fetchall()
    assert after.pop("advanced_at") > before.pop("advanced_at")
    assert after == before | {"generation": 1, "next_offset": 7, "leader_epoch": 2}


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("call", ["acquire", "resolve", "read", "halt"])
def test_who_waits_for_a_rotation_finds_the_row_that_it_left(
    make_owner: Callable[[], Ledger], name: str, db: Db, submit: Submit, *, call: str, end: str
) -> None:
    """Of 200 partitions, in the midst of them; the statement that waited sees no row at all."""
    old, new = make_owner(), make_owner()
    partitions = register(old, name, 200)
    rows = sorted(old.acquire(partitions), key=lambda row: row.partition)
    advance(old, *(to(row, 5) for row in rows[90:110]), commit=False)
    unit = to(rows[100], 5)
    calls: dict[str, Callable[[], Any]] = {
        "acquire": lambda: new.acquire(partitions),
        "resolve": lambda: new.resolve(partitions, [unit.token], lock_seconds=60),
        "read": lambda: new.read(partitions, lock_seconds=60),
        "halt": lambda: new.halt([unit], reason="a test"),
    }
    answer = submit(calls[call])
    wait_until_blocked(db, new)
    old.session.connection.execute(end)
    if call == "halt":
        assert answer.result(60) == {partitions[100]}
    else:
        found = {row.partition: (row.generation, row.next_offset) for row in answer.result(60)}
        moved = (1, 5) if end == "COMMIT" else (0, 0)
        assert found == {p: moved if 90 <= p.number < 110 else (0, 0) for p in partitions}
    assert len(stored(db, name)) == 200


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_of_twins_with_one_token_one_lands_and_the_other_finds_the_row_ahead(
    make_owner: Callable[[], Ledger], name: str, db: Db, submit: Submit, *, first: bool, second: bool
) -> None:
    """An attempt whose connection was lost, and the one that came after it; either may rotate."""
    one, other = make_owner(), make_owner()
    (row,) = one.acquire(register(one, name))
    advance(one, to(row, 10, rotates=first), commit=False)
    twin = to(row, 10, rotates=second)
    answer = submit(advance, other, twin)
    wait_until_blocked(db, other)
    one.session.connection.execute("COMMIT")
    with pytest.raises(psycopg.Error) as failure:
        answer.result(60)
    assert failure.value.sqlstate == SHORT_COUNT
    assert (
        check(other.read([row.partition])[0], Grant(twin.token, twin.epoch), twin.expected, twin.topic_id)
        is Conflict.AHEAD
    )
    assert stored(db, name) == [(0, int(first), 10)]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("is_rotated", [True, False])
def test_in_stricter_isolation_a_row_that_was_replaced_is_a_conflict(
    make_owner: Callable[[], Ledger], name: str, *, isolation: str, is_rotated: bool
) -> None:
    one, other = make_owner(), make_owner()
    (row,) = one.acquire(register(one, name))
    begun = one.session.begin(isolation)
    one.session.connection.execute("SELECT 1")  # its snapshot
    advance(other, to(row, 10, rotates=is_rotated))
    with pytest.raises(psycopg.errors.SerializationFailure):
        one.advance(one.session.connection, [to(row, 10)], xid=begun.xid, commit=True)
    one.session.roll_back()
    advance(one, to(one.read([row.partition])[0], 20), isolation=isolation)


def test_a_row_of_a_later_generation_is_not_made_a_second_time(
    make_owner: Callable[[], Ledger], name: str, db: Db
) -> None:
    owner = make_owner()
    partitions = register(owner, name, 2)
    rows = owner.acquire(partitions)
    advance(owner, to(rows[0], 5))
    register(owner, name, 3)
    assert [(n, offset) for n, _, offset in stored(db, name)] == [
        (n, 5 if n == rows[0].partition.number else 0) for n in range(3)
    ]


def test_who_makes_rows_waits_for_another_who_does_and_sees_what_became_of_his(
    make_owner: Callable[[], Ledger], name: str, db: Db, submit: Submit
) -> None:
    """With a snapshot from before it would make the first generation again, once the second is there."""
    late = make_owner()
    with psycopg.connect(db.info.dsn, password=db.info.password) as first:
        lock = "SELECT pg_advisory_xact_lock(hashtext('exactly_once.register'), hashtext(%s))"
        first.execute(lock, (name,))
        answer = submit(register, late, name)
        wait_until_blocked(db, late)
        make = "INSERT INTO exactly_once.ledger (group_id, topic, partition, generation, next_offset)"
        first.execute(f"{make} VALUES (%s, %s, 0, 1, 5)", (name, name))
    answer.result(60)
    assert stored(db, name) == [(0, 1, 5)]


def test_a_worker_may_rotate_without_the_right_to_delete(
    make_owner: Callable[[], Ledger], conninfo: str, name: str, db: Db
) -> None:
    db.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
    db.execute(grants("exactly_once", name))
    try:
        with closing(Session(connector(as_role(conninfo, name)), schema="exactly_once")) as s:
            worker = Ledger(s, group_id=name, owner_kind="consumer")
            (row,) = worker.acquire(register(worker, name))
            advance(worker, to(row, 5))
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                s.connection.execute("DELETE FROM exactly_once.ledger")
    finally:
        db.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))
    assert stored(db, name) == [(0, 1, 5)]


def test_a_row_that_may_be_read_and_not_locked_is_no_endless_loop(conninfo: str, name: str, db: Db) -> None:
    """A policy of row-level security for SELECT is none for FOR UPDATE."""
    worker, ledger = sql.Identifier(name), sql.Identifier(name, "ledger")
    migrate(db, name)
    db.execute(sql.SQL("CREATE ROLE {} LOGIN").format(worker))
    try:
        db.execute(grants(name, name))
        db.execute(sql.SQL("ALTER TABLE {} ENABLE ROW LEVEL SECURITY").format(ledger))
        db.execute(sql.SQL("CREATE POLICY reads ON {} FOR SELECT USING (true)").format(ledger))
        db.execute(sql.SQL("CREATE POLICY makes ON {} FOR INSERT WITH CHECK (true)").format(ledger))
        with closing(Session(connector(as_role(conninfo, name)), schema=name)) as session:
            owner = Ledger(session, group_id=name, owner_kind="consumer")
            partitions = register(owner, name)
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="read but not locked"):
                owner.acquire(partitions)
    finally:
        db.execute(sql.SQL("DROP SCHEMA {0} CASCADE; DROP OWNED BY {0}; DROP ROLE {0}").format(worker))


def test_there_is_one_row_of_each_partition_whoever_is_killed(
    make_owner: Callable[[], Ledger], name: str, db: Db
) -> None:
    """Owners that take rows from each other, advance, rotate, are killed on the way, and make rows again."""
    rng = random.Random(first_seed())
    partitions = register(make_owner(), name, 3)
    owners = [make_owner() for _ in range(3)]
    is_over = threading.Event()
    advanced = [0]

    def work(owner: Ledger, seed: int) -> None:
        mine = random.Random(seed)
        while not is_over.is_set():
            try:
                rows = owner.acquire(mine.sample(partitions, mine.randint(1, 3)))
                if mine.random() < 0.1:
                    register(owner, name, 3)
                for _ in range(mine.randint(1, 5)):
                    rotates = mine.random() < 0.5
                    advance(owner, *(to(row, (row.next_offset or 0) + 1, rotates=rotates) for row in rows))
                    advanced[0] += 1
                    rows = [
                        replace(row, next_offset=(row.next_offset or 0) + 1, generation=row.generation + rotates)
                        for row in rows
                    ]
                if mine.random() < 0.2:
                    owner.release([(row.partition, row.owner_token or uuid4()) for row in rows])
            except psycopg.Error:
                owner.session.roll_back()

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(work, owner, rng.randrange(2**31)) for owner in owners]
        try:
            for kills in range(30):
                until(lambda goal=(kills + 1) * 5: advanced[0] >= goal, 30, "advances")  # type: ignore[misc]
                kill = """
                    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                    WHERE pid = ANY(%s) AND state <> 'idle' LIMIT 1
                """
                db.execute(kill, ([c.info.backend_pid for o in owners if (c := o.session._connection) is not None],))
                assert [number for number, _, _ in stored(db, name)] == [0, 1, 2]
        finally:
            is_over.set()
        for worker in workers:
            worker.result(60)
    assert [number for number, _, _ in stored(db, name)] == [0, 1, 2]


def test_what_an_advance_costs_does_not_grow_under_a_held_snapshot(
    make_owner: Callable[[], Ledger], conninfo: str, name: str, db: Db
) -> None:
    """Counted in buffers. With one row for ever it is a page more for every thirty units."""
    owner = make_owner()
    (row,) = owner.acquire(register(owner, name))

    def units(first: int, count: int) -> None:
        """Execute units on the server, each a transaction of its own, rotated as an owner rotates them."""
        body = """
            DO $$ BEGIN FOR n IN {first}..{last} LOOP
                PERFORM exactly_once.advance(pg_current_xact_id(), {group}, ARRAY[{group}], ARRAY[0],
                    ARRAY[(SELECT max(generation) FROM exactly_once.ledger WHERE group_id = {group})],
                    ARRAY[{token}]::uuid[], ARRAY[{epoch}]::bigint[], ARRAY['id'], ARRAY[n]::bigint[],
                    ARRAY[n + 1]::bigint[], ARRAY[0], n % {every} = 0);
                COMMIT;
            END LOOP; END $$
        """
        values = {"first": first, "last": first + count - 1, "group": name, "every": ROTATE_EVERY}
        values |= {"token": str(row.owner_token), "epoch": row.owner_epoch}
        db.execute(sql.SQL(body).format(**{key: sql.Literal(value) for key, value in values.items()}))

    def buffers(statement: str, *values: Any) -> int:
        """Count what one execution reads and writes, once its plans are made."""
        with psycopg.connect(conninfo) as connection:
            for _ in range(2):
                connection.execute("SAVEPOINT before")
                explain = f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, SUMMARY OFF) {statement}"
                plan = "\n".join(line for (line,) in connection.execute(explain, values))
                connection.execute("ROLLBACK TO before")
            found = re.search(r"Buffers:.*?shared hit=(\d+)(?: read=(\d+))?", plan)
            assert found is not None, plan
            return int(found[1]) + int(found[2] or 0)

    def costs() -> tuple[int, int]:
        offset, generation = db.execute(
            "SELECT next_offset, generation FROM exactly_once.ledger WHERE group_id = %s", (name,)
        ).fetchone() or (0, 0)
        move = """
            SELECT exactly_once.advance(pg_current_xact_id(), %s, %s, '{0}', %s, %s, %s, '{id}', %s, %s, '{0}', false)
        """
        arrays = [[generation], [row.owner_token], [row.owner_epoch], [offset], [offset + 1]]
        return (
            buffers("SELECT * FROM exactly_once.lock_row(%s, %s, 0)", name, name),
            buffers(move, name, [name], *arrays),
        )

    with psycopg.connect(conninfo) as snapshot:
        snapshot.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        snapshot.execute("SELECT 1")
        units(0, 2 * ROTATE_EVERY)
        few = costs()
        units(2 * ROTATE_EVERY, 38 * ROTATE_EVERY)
        many = costs()
    assert stored(db, name)[0][1:] == (40, 40 * ROTATE_EVERY)
    bound = 40  # 256 versions are on about ten pages, each found once by each of its look-ups
    assert max(few) < bound, (few, many)
    assert max(many) < bound, (few, many)
    assert all(later <= earlier + 6 for earlier, later in zip(few, many, strict=True)), (few, many)


def test_a_consumer_rotates_its_rows_with_its_first_unit_and_then_now_and_then(
    make_consumer: MakeConsumer, bootstrap_servers: str, name: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, because nobody knows how often an earlier owner has advanced them."""
    monkeypatch.setattr("exactly_once.consumer.partitions.ROTATE_EVERY", 4)
    topic = create_topic(bootstrap_servers, 1, name=name)
    produce(bootstrap_servers, topic, 12, 1)
    with make_consumer(max_messages=1) as consumer:
        consumer.subscribe([topic])
        seen = []
        for unit in consumer.units(until_end=True):
            with unit:
                unit.execute("SELECT 1")
            seen.append(stored(db, topic)[0][1])
    assert seen == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
