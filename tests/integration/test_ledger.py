"""The ledger's statements against each other: interleavings of owners on real rows, without Kafka."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from exactly_once import LedgerRowMissing, OwnedByConsumer, OwnedBySpark
from exactly_once._model import Advance, OwnerKind, Partition, Row
from exactly_once.kafka.admin import Cluster
from exactly_once.ledger.rows import LOCK_SECONDS, Ledger
from exactly_once.ledger.session import Session, connector, cursor_on
from exactly_once.ledger.sql import query
from exactly_once.ledger.start import StartOffsets
from tests.support.seeds import first_seed
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("unhurried_locks")

MakeOwner = Callable[..., Ledger]


@pytest.fixture
def make_owner(conninfo: str, name: str) -> Iterator[MakeOwner]:
    """Make owners of the rows of group ``name``, each with a connection of its own."""
    sessions: list[Session] = []

    def make(kind: OwnerKind = "consumer", *, take_over: bool = False, group_id: str = name) -> Ledger:
        sessions.append(Session(connector(conninfo), schema="exactly_once"))
        return Ledger(sessions[-1], group_id=group_id, owner_kind=kind, take_over=take_over)

    yield make
    for session in sessions:
        session.close()


@pytest.fixture
def in_background() -> Iterator[Callable[..., Future[Any]]]:
    """Run a call in another thread."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def rows_of(owner: Ledger, topic: str, count: int = 1, *, offset: int | None = 0) -> list[Partition]:
    """Register ``count`` partitions."""
    partitions = [Partition(topic, number) for number in range(count)]
    owner.register(dict.fromkeys(partitions, offset), cluster_id="c", topic_ids={topic: "id"})
    return partitions


def to(row: Row, next_offset: int) -> Advance:
    """Ask for one row to go on to ``next_offset``."""
    assert row.owner_token is not None
    return Advance(
        partition=row.partition,
        token=row.owner_token,
        epoch=row.owner_epoch,
        topic_id=row.topic_id,
        expected=row.next_offset or 0,
        next_offset=next_offset,
        leader_epoch=None,
    )


def advance(owner: Ledger, advances: Sequence[Advance], *, commit: bool = True) -> None:
    """Advance in a unit's transaction; leave it open unless ``commit``."""
    begun = owner.session.begin("READ COMMITTED")
    try:
        owner.advance(owner.session.connection, advances, xid=begun.xid, commit=commit)
    except BaseException:
        owner.session.roll_back()
        raise


def wait_until_blocked(db: psycopg.Connection[Any], owner: Ledger) -> None:
    """Return when a statement of ``owner`` waits for a lock."""
    pid = owner.session.connection.info.backend_pid
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = %s"
    until(lambda: db.execute(waits, (pid,)).fetchone() != (0,), 10, "a lock to be waited for")


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_acquire_waits_for_an_advance_and_returns_what_became_of_it(
    make_owner: MakeOwner,
    name: str,
    db: psycopg.Connection[Any],
    in_background: Callable[..., Future[list[Row]]],
    end: str,
) -> None:
    old, new = make_owner(), make_owner()
    partitions = rows_of(old, name)
    (row,) = old.acquire(partitions)
    advance(old, [to(row, 10)], commit=False)
    assert not new.session.connection.closed  # opened here, so that two threads do not open it at once
    taken = in_background(new.acquire, partitions)
    wait_until_blocked(db, new)
    assert not taken.done()
    old.session.connection.execute(end.encode())
    (found,) = taken.result(60)
    assert found.next_offset == (10 if end == "COMMIT" else 0)
    assert found.owner_epoch == row.owner_epoch + 1
    assert found.previous_instance == old.session.instance


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_read_waits_for_an_advance_that_is_open(
    make_owner: MakeOwner, name: str, db: psycopg.Connection[Any], in_background: Callable[..., Future[Any]], end: str
) -> None:
    """A snapshot would show the offset before a transaction that is still going to commit."""
    owner, reader = make_owner(), make_owner()
    partitions = rows_of(owner, name)
    (row,) = owner.acquire(partitions)
    advance(owner, [to(row, 10)], commit=False)
    assert not reader.session.connection.closed  # opened here, so that two threads do not open it at once
    reading = in_background(reader.read, partitions)
    wait_until_blocked(db, reader)
    assert not reading.done()
    owner.session.connection.execute(end.encode())
    (found,) = reading.result(60)
    assert found.next_offset == (10 if end == "COMMIT" else 0)


def test_who_released_a_row_is_not_taken_for_one_it_was_taken_from(make_owner: MakeOwner, name: str) -> None:
    """What it runs by then is in good order, so the watcher must not hold it against it."""
    old, new = make_owner(), make_owner()
    partitions = rows_of(old, name)
    (row,) = old.acquire(partitions)
    assert row.owner_token is not None
    old.release([(row.partition, row.owner_token)])
    (found,) = new.acquire(partitions)
    assert found.previous_instance is None


def test_acquire_waits_for_a_bounded_time(make_owner: MakeOwner, name: str) -> None:
    old, new = make_owner(), make_owner()
    partitions = rows_of(old, name)
    (row,) = old.acquire(partitions)
    advance(old, [to(row, 10)], commit=False)
    with pytest.raises(psycopg.errors.LockNotAvailable):
        new.acquire(partitions, lock_seconds=LOCK_SECONDS)
    old.session.connection.execute("COMMIT")
    (found,) = new.acquire(partitions)
    assert (found.next_offset, found.owner_epoch) == (10, row.owner_epoch + 1)


def test_an_advance_behind_an_acquisition_is_refused(make_owner: MakeOwner, name: str) -> None:
    old, new = make_owner(), make_owner()
    partitions = rows_of(old, name)
    (row,) = old.acquire(partitions)
    new.acquire(partitions)
    with pytest.raises(psycopg.Error) as raised:
        advance(old, [to(row, 10)])
    assert raised.value.sqlstate == "EO001"
    assert old.read(partitions)[0].next_offset == 0


def test_an_advance_that_waits_for_an_acquisition_is_refused(
    make_owner: MakeOwner, name: str, db: psycopg.Connection[Any], in_background: Callable[..., Future[None]]
) -> None:
    """It read the row when it was still its own; under the lock it must look again."""
    old = make_owner()
    partitions = rows_of(old, name)
    (row,) = old.acquire(partitions)
    with db.transaction():
        db.execute("UPDATE exactly_once.ledger SET owner_token = gen_random_uuid() WHERE group_id = %s", (name,))
        late = in_background(advance, old, [to(row, 10)])
        with psycopg.connect(db.info.dsn, password=db.info.password, autocommit=True) as looking:
            wait_until_blocked(looking, old)
    error = late.exception(60)
    assert isinstance(error, psycopg.Error)
    assert error.sqlstate == "EO001"


@pytest.mark.parametrize("rotates", [False, True], ids=["in place", "rotation"])
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize(
    "wrong",
    [{"token": uuid4()}, {"epoch": 99}, {"topic_id": "another"}, {"topic_id": None}, {"expected": 1}],
    ids=["token", "epoch", "topic id", "no topic id", "expected"],
)
def test_one_wrong_partition_refuses_the_whole_advance(
    *, make_owner: MakeOwner, name: str, wrong: dict[str, Any], partitions: int, rotates: bool
) -> None:
    """Each condition by itself, in each of the three statements that advance."""
    owner = make_owner()
    rows = owner.acquire(rows_of(owner, name, partitions))
    advances = [replace(to(row, 10), rotates=rotates) for row in rows]
    advances[-1] = replace(advances[-1], **wrong)
    with pytest.raises(psycopg.Error) as raised:
        advance(owner, advances)
    assert raised.value.sqlstate == "EO001"
    assert {row.next_offset for row in owner.read([row.partition for row in rows])} == {0}


def test_an_advance_in_a_foreign_transaction_is_refused(make_owner: MakeOwner, name: str) -> None:
    owner = make_owner()
    partitions = rows_of(owner, name)
    (row,) = owner.acquire(partitions)
    begun = owner.session.begin("READ COMMITTED")
    connection = owner.session.connection
    connection.execute("ROLLBACK")
    connection.execute("SELECT 1")
    with pytest.raises(psycopg.Error) as raised:
        owner.advance(connection, [to(row, 10)], xid=begun.xid, commit=True)
    assert raised.value.sqlstate == "EO002"
    owner.session.roll_back()
    assert owner.read(partitions)[0].next_offset == 0


def test_a_missing_topic_id_matches_only_a_missing_one(make_owner: MakeOwner, name: str) -> None:
    owner = make_owner()
    partition = Partition(name, 0)
    owner.register({partition: 0}, cluster_id=None, topic_ids={})
    (row,) = owner.acquire([partition])
    assert row.topic_id is None
    with pytest.raises(psycopg.Error):
        advance(owner, [replace(to(row, 5), topic_id="id")])
    advance(owner, [to(row, 5)])
    assert owner.read([partition])[0].next_offset == 5


def test_resolve_fences_an_advance_that_is_still_on_its_way(make_owner: MakeOwner, name: str) -> None:
    owner, late = make_owner(), make_owner()
    partitions = rows_of(owner, name)
    (row,) = owner.acquire(partitions)
    assert row.owner_token is not None
    begun = late.session.begin("READ COMMITTED")
    tokens = [row.owner_token]
    (resolved,) = owner.resolve(partitions, tokens, lock_seconds=1)
    assert resolved.next_offset == 0
    assert resolved.owner_epoch == row.owner_epoch
    with pytest.raises(psycopg.Error) as raised:
        late.advance(late.session.connection, [to(row, 10)], xid=begun.xid, commit=True)
    assert raised.value.sqlstate == "EO001"
    advance(owner, [to(resolved, 10)])


def test_resolve_waits_for_an_advance_that_came_first(
    make_owner: MakeOwner, name: str, db: psycopg.Connection[Any], in_background: Callable[..., Future[list[Row]]]
) -> None:
    owner, old_backend = make_owner(), make_owner()
    partitions = rows_of(owner, name)
    (row,) = owner.acquire(partitions)
    assert row.owner_token is not None
    advance(old_backend, [to(row, 10)], commit=False)
    assert not owner.session.connection.closed
    resolving = in_background(owner.resolve, partitions, [row.owner_token], lock_seconds=60)
    wait_until_blocked(db, owner)
    old_backend.session.connection.execute("COMMIT")
    (resolved,) = resolving.result(60)
    assert resolved.next_offset == 10


def test_resolve_can_be_repeated_when_its_answer_was_lost(make_owner: MakeOwner, name: str) -> None:
    owner = make_owner()
    partitions = rows_of(owner, name)
    (row,) = owner.acquire(partitions)
    assert row.owner_token is not None
    tokens = [row.owner_token]
    for times in (1, 2, 3):
        (resolved,) = owner.resolve(partitions, tokens, lock_seconds=1)
        assert len(tokens) == times + 1
        assert resolved.owner_token == tokens[-1]
    make_owner().acquire(partitions)
    assert owner.resolve(partitions, tokens, lock_seconds=1) == []


def test_release_leaves_locked_rows_and_those_of_others_alone(make_owner: MakeOwner, name: str) -> None:
    owner, other = make_owner(), make_owner()
    partitions = rows_of(owner, name, 3)
    rows = owner.acquire(partitions)
    (taken,) = other.acquire([partitions[2]])
    held = [(row.partition, row.owner_token) for row in rows if row.owner_token]
    advance(other, [to(rows[0], 7)], commit=False)  # whoever it is, the row is being decided about
    owner.release(held)
    other.session.connection.execute("COMMIT")
    found = {row.partition.number: row.owner_token for row in owner.read(partitions)}
    assert found == {0: rows[0].owner_token, 1: None, 2: taken.owner_token}


def test_epochs_only_rise_whoever_acquires(make_owner: MakeOwner, name: str, conninfo: str) -> None:
    owners = [make_owner() for _ in range(4)]
    partitions = rows_of(owners[0], name, 5)
    seen: list[tuple[int, Partition]] = []
    lock = threading.Lock()

    def fight(owner: Ledger) -> None:
        for _ in range(25):
            rows = owner.acquire(partitions)
            with lock:
                seen.extend((row.owner_epoch, row.partition) for row in rows)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fight, owners))
    assert len(seen) == len(set(seen)) == 500
    assert {row.owner_epoch for row in owners[0].read(partitions)} == {100}


def test_registering_is_idempotent_and_written_down_once(
    make_owner: MakeOwner, name: str, db: psycopg.Connection[Any]
) -> None:
    """Eight members meet the topic at once, in different orders."""
    owners = [make_owner() for _ in range(8)]
    barrier = threading.Barrier(8)

    def register(owner: Ledger) -> None:
        partitions = [Partition(name, number) for number in range(50)]
        random.Random(owner.session.instance.int).shuffle(partitions)
        barrier.wait()
        owner.register(dict.fromkeys(partitions, 3), cluster_id="c", topic_ids={name: "id"})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(register, owners))
    found = db.execute("SELECT count(*), min(next_offset) FROM exactly_once.ledger WHERE group_id = %s", (name,))
    assert found.fetchone() == (50, 3)
    audited = db.execute(
        "SELECT count(*), count(DISTINCT partition) FROM exactly_once.audit "
        "WHERE group_id = %s AND action = 'register'",
        (name,),
    )
    assert audited.fetchone() == (50, 50)


def test_registering_again_moves_nothing(make_owner: MakeOwner, name: str) -> None:
    owner = make_owner()
    partitions = rows_of(owner, name)
    (row,) = owner.acquire(partitions)
    advance(owner, [to(row, 10)])
    rows_of(owner, name, 2)
    assert [row.next_offset for row in owner.read([Partition(name, 0), Partition(name, 1)])] == [10, 0]


def test_two_hundred_partitions_in_opposite_orders_do_not_deadlock(
    make_owner: MakeOwner, name: str, db: psycopg.Connection[Any]
) -> None:
    """Two advance the same rows in opposite orders, two more acquire them: losers are fenced or wait, no more."""
    partitions = rows_of(make_owner(), name, 200)
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = db.execute(deadlocks).fetchone()
    errors: list[str | None] = []

    def work(owner: Ledger, order: Callable[[list[Any]], list[Any]]) -> int:
        done = 0
        for _ in range(15):
            try:
                rows = owner.acquire(order(partitions))
                advance(owner, order([to(row, (row.next_offset or 0) + 1) for row in rows]))
                done += 1
            except psycopg.Error as error:
                errors.append(error.sqlstate)
        return done

    shuffled = random.Random(first_seed())
    orders: list[Callable[[list[Any]], list[Any]]] = [
        list,
        lambda items: list(reversed(items)),
        lambda items: shuffled.sample(items, len(items)),
        list,
    ]
    with ThreadPoolExecutor(4) as pool:
        done = sum(pool.map(work, [make_owner() for _ in orders], orders))
    assert set(errors) <= {"EO001", "55P03"}  # fenced, or waited too long on a busy machine; never 40P01
    assert db.execute(deadlocks).fetchone() == before
    assert {row.next_offset for row in make_owner().read(partitions)} == {done}


@pytest.mark.parametrize(
    ("first", "second", "error"), [("consumer", "spark", OwnedByConsumer), ("spark", "consumer", OwnedBySpark)]
)
def test_neither_side_takes_the_others_rows_unless_released_or_told_to(
    make_owner: MakeOwner, name: str, first: OwnerKind, second: OwnerKind, error: type[Exception]
) -> None:
    owner, other = make_owner(first), make_owner(second)
    partitions = rows_of(owner, name, 2)
    rows = owner.acquire([partitions[1]])
    told = rf"owned by {first} \(.*owner epoch 1; acquired \d+\.\d s ago, last advanced never\) and was not released"
    with pytest.raises(error, match=told):
        other.acquire(partitions)
    # All or nothing: the free row was not acquired either.
    assert [row.owner_epoch for row in owner.read(partitions)] == [0, 1]
    (taken,) = make_owner(second, take_over=True).acquire([partitions[1]])
    assert (taken.owner_epoch, taken.owner_kind) == (2, second)
    owner.release([(row.partition, row.owner_token) for row in rows if row.owner_token])
    assert owner.read([partitions[1]])[0].owner_token == taken.owner_token


def test_a_released_row_is_free_for_either_side(make_owner: MakeOwner, name: str) -> None:
    owner = make_owner("consumer")
    partitions = rows_of(owner, name)
    (row,) = owner.acquire(partitions)
    assert row.owner_token is not None
    owner.release([(row.partition, row.owner_token)])
    (taken,) = make_owner("spark").acquire(partitions)
    assert taken.owner_epoch == 2


def test_a_missing_row_is_told_and_nothing_is_acquired(make_owner: MakeOwner, name: str) -> None:
    owner = make_owner()
    partitions = rows_of(owner, name, 2)
    with pytest.raises(LedgerRowMissing, match=r"no row of .*\[7\]"):
        owner.acquire([*partitions, Partition(name, 7)])
    assert [row.owner_epoch for row in owner.read(partitions)] == [0, 0]


@pytest.mark.parametrize("action", ["reset", "adopt"])
def test_an_operators_change_fences_the_live_owner_and_is_written_down(
    make_owner: MakeOwner, name: str, db: psycopg.Connection[Any], action: str
) -> None:
    owner = make_owner()
    partitions = rows_of(owner, name, 2)
    rows = owner.acquire(partitions)
    parameters = {
        "group_id": name,
        "topics": [name],
        "partitions": [1],
        "next_offsets": [0],
        "topic_ids": ["id"],
        "cluster_id": "c",
        "reason": "a test",
    }
    changed = db.execute(query(action, "exactly_once"), parameters).fetchall()
    assert changed == [(name, 1, 0, 0)]
    with pytest.raises(psycopg.Error) as raised:
        advance(owner, [to(row, 10) for row in rows])
    assert raised.value.sqlstate == "EO001"
    (row,) = owner.read([partitions[1]])
    assert (row.owner_token, row.owner_epoch) == (None, 2)
    written = db.execute("SELECT reason FROM exactly_once.audit WHERE group_id = %s AND action = %s", (name, action))
    assert written.fetchall() == [("a test",)]


def changed(db: psycopg.Connection[Any], action: str, group_id: str, topic: str, next_offset: int | None) -> None:
    """Do to partition 0 what an operator's command does."""
    parameters = {"next_offsets": [next_offset], "topic_ids": ["id"], "owner_epochs": [0], "cluster_id": "c"}
    of_row = {"group_id": group_id, "topics": [topic], "partitions": [0], "reason": "a test"}
    db.execute(query(action, "exactly_once"), {**parameters, **of_row})


@pytest.mark.parametrize("action", ["reset", "adopt"])
def test_an_operators_change_that_keeps_an_offset_keeps_it_and_lets_the_row_go_on(
    make_owner: MakeOwner, name: str, db: psycopg.Connection[Any], action: str
) -> None:
    owner = make_owner()
    partitions = rows_of(owner, name, offset=7)
    (row,) = owner.acquire(partitions)
    assert owner.halt([to(row, 10)], reason="a test") == set(partitions)
    changed(db, action, name, name, None)
    (found,) = owner.read(partitions)
    assert (found.next_offset, found.halted) == (7, None)


@pytest.mark.parametrize("action", ["reset", "adopt"])
def test_an_offset_that_an_operator_moves_has_no_leader_epoch(
    make_owner: MakeOwner, name: str, db: psycopg.Connection[Any], action: str
) -> None:
    """That of another offset, or of another log, would have the log taken for rewritten below it."""
    owner = make_owner()
    partitions = rows_of(owner, name)
    for next_offset, expected in ((None, 5 if action == "reset" else None), (3, None)):
        (row,) = owner.acquire(partitions)
        advance(owner, [replace(to(row, 10), leader_epoch=5)])
        changed(db, action, name, name, next_offset)
        assert [row.leader_epoch for row in owner.read(partitions)] == [expected]


def test_an_operators_move_counts_until_the_next_advance(
    make_owner: MakeOwner, name: str, db: psycopg.Connection[Any]
) -> None:
    """Until then what Kafka holds may be anything; from then on it tells of another database."""
    owner = make_owner()
    partitions = rows_of(owner, name)
    assert owner.offsets([name]) == {partitions[0]: (0, False)}
    changed(db, "reset", name, name, 7)
    assert owner.offsets([name]) == {partitions[0]: (7, True)}
    (row,) = owner.acquire(partitions)
    advance(owner, [to(row, 10)])
    assert owner.offsets([name]) == {partitions[0]: (10, False)}
    changed(db, "reset", name, name, None)
    assert owner.offsets([name]) == {partitions[0]: (10, True)}


def test_what_somebody_forgot_on_purpose_was_never_there(
    make_owner: MakeOwner, name: str, db: psycopg.Connection[Any]
) -> None:
    owner = make_owner()
    for _ in range(2):
        (partition,) = rows_of(owner, name)
        assert owner.known([name]) == ({partition}, {partition})
        changed(db, "forget", name, name, None)
        assert owner.known([name]) == (set(), set())
    rows_of(owner, name)
    db.execute("DELETE FROM exactly_once.ledger WHERE group_id = %s", (name,))
    assert owner.known([name]) == (set(), {partition}), "a row that somebody deleted is missed"


def test_ids_that_are_known_stay_and_those_of_others_too(make_owner: MakeOwner, name: str) -> None:
    """Else a topic that was made again would be taken for the one before, with its offsets."""
    owner = make_owner()
    known, unknown, lost = (Partition(name, number) for number in range(3))
    owner.register({known: 0}, cluster_id="c", topic_ids={name: "id"})
    owner.register({unknown: 0, lost: 0}, cluster_id="c", topic_ids={})
    tokens = {row.partition: row.owner_token for row in owner.acquire([known, unknown, lost]) if row.owner_token}
    make_owner().acquire([lost])
    owner.identify(tokens, "new", cluster_id="c")
    assert [row.topic_id for row in owner.read([known, unknown, lost])] == ["id", "new", None]


def test_a_hand_over_fences_owners_of_the_other_kind_only(
    make_owner: MakeOwner, name: str, db: psycopg.Connection[Any]
) -> None:
    consumer, spark = make_owner(), make_owner("spark")
    partitions = rows_of(consumer, name, 3)
    rows = [*consumer.acquire(partitions[:1]), *spark.acquire(partitions[1:2]), *consumer.acquire(partitions[2:])]
    assert rows[2].owner_token is not None
    consumer.release([(rows[2].partition, rows[2].owner_token)])
    of_rows = {"group_id": name, "topics": [name] * 3, "partitions": [0, 1, 2]}
    db.execute(query("hand_over", "exactly_once"), {**of_rows, "owner_kind": "spark", "reason": "a test"})
    found = [(row.owner_token, row.owner_epoch) for row in consumer.read(partitions)]
    assert found == [(None, 2), (rows[1].owner_token, 1), (None, 1)]
    written = db.execute(
        "SELECT partition FROM exactly_once.audit WHERE group_id = %s AND action = 'hand-over'", (name,)
    )
    assert written.fetchall() == [(0,)]


def test_a_late_halt_leaves_the_row_of_another_topic_of_that_name_alone(make_owner: MakeOwner, name: str) -> None:
    owner = make_owner()
    partitions = rows_of(owner, name)
    (row,) = owner.acquire(partitions)
    late = replace(to(row, 10), token=uuid4())
    assert owner.halt([replace(late, topic_id="of before")], reason="a test") == set()
    assert owner.halt([late], reason="a test") == set(partitions)


def test_start_commits_an_offset_once_and_only_for_the_owner(make_owner: MakeOwner, name: str) -> None:
    owner, other = make_owner(), make_owner()
    partitions = rows_of(owner, name, offset=None)
    (stale,) = owner.acquire(partitions)
    (row,) = other.acquire(partitions)
    assert owner.start([replace(stale, next_offset=5)]) == set()
    assert other.start([replace(row, next_offset=7)]) == set(partitions)
    assert other.start([replace(row, next_offset=9)]) == set()
    assert owner.read(partitions)[0].next_offset == 7


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1"])
def test_any_name_of_a_group_reaches_its_own_row(conninfo: str, name: str, encoding: str) -> None:
    """Names are written into the advance as literals: whatever is in them must stay a name."""
    group_id = f'{name} it\'s 100% \\ "{{x}}" $1 %s %(xid)s -- gr\u00fc\u00dfe; COMMIT'
    session = Session(connector(f"{conninfo}?client_encoding={encoding}"), schema="exactly_once")
    owner = Ledger(session, group_id=group_id, owner_kind="consumer")
    try:
        partitions = rows_of(owner, name, 2)
        advance(owner, [to(row, 10) for row in owner.acquire(partitions)])
        assert [row.next_offset for row in owner.read(partitions)] == [10, 10]
    finally:
        session.close()


@pytest.mark.parametrize("stale", ["token", "offset"])
def test_an_offset_out_of_range_is_corrected_only_by_its_owner_and_from_where_it_stands(
    make_owner: MakeOwner, name: str, db: psycopg.Connection[Any], stale: str
) -> None:
    """A fenced member with a policy must not move the offset of the living owner: what lies between would be lost."""
    owner = make_owner()
    partitions = rows_of(owner, name, offset=7)
    (row,) = owner.acquire(partitions)
    if stale == "token":
        make_owner().acquire(partitions)
    else:
        advance(owner, [to(row, 9)])
    before = db.execute("SELECT * FROM exactly_once.ledger WHERE group_id = %s", (name,)).fetchall()
    assert owner.correct(row, 100, reason="a test") is False
    assert db.execute("SELECT * FROM exactly_once.ledger WHERE group_id = %s", (name,)).fetchall() == before
    audit = "SELECT FROM exactly_once.audit WHERE group_id = %s AND action = 'out of range'"
    assert db.execute(audit, (name,)).rowcount == 0
    (now,) = owner.acquire(partitions)
    assert owner.correct(now, 100, reason="a test") is True
    assert db.execute(audit, (name,)).rowcount == 1


def test_a_row_that_was_taken_while_it_was_corrected_is_not_read_from(make_owner: MakeOwner, name: str) -> None:
    """The correction would else be believed, and messages fetched from an offset that the ledger does not have."""
    owner = make_owner()
    partitions = rows_of(owner, name, offset=7)
    (row,) = owner.acquire(partitions)
    make_owner().acquire(partitions)
    starter = StartOffsets(owner, Cluster({"bootstrap.servers": "127.0.0.1:1"}), start=None, on_out_of_range="latest")
    assert starter.in_range(row, (20, 30)) is None


def test_moves_to_the_end_of_a_log_are_guarded_like_a_unit(make_owner: MakeOwner, name: str) -> None:
    owner = make_owner()
    partitions = rows_of(owner, name, 2, offset=7)
    rows = owner.acquire(partitions)
    make_owner().acquire([partitions[1]])
    with pytest.raises(psycopg.Error) as raised:
        owner.move_to_ends([to(row, 9) for row in rows], lock_seconds=1)
    assert raised.value.sqlstate == "EO001"
    owner.move_to_ends([to(rows[0], 9)], lock_seconds=1)
    assert [row.next_offset for row in owner.read(partitions)] == [9, 7]


@pytest.mark.parametrize("standard", ["on", "off"])
def test_bytes_in_lists_are_kept_whatever_the_server_makes_of_backslashes(conninfo: str, standard: str) -> None:
    """As header values of dead letters, and keys of claims and windows."""
    given = [b"\x00\xfe", b"\\x41", b"", None]
    options = f"-c standard_conforming_strings={standard}"
    with psycopg.connect(conninfo, options=options) as connection:
        assert cursor_on(connection).execute("SELECT %s::bytea[]", (given,)).fetchone() == (given,)
        assert cursor_on(connection).execute("SELECT %s", (given[0],)).fetchone() == (given[0],)
