"""PostgresWindow: shared by processes, durable, taken over from the dead, dropped in generations."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from exactly_once import ConfigurationError
from exactly_once.embedded.proxy import PostgresProxy
from exactly_once.ledger.sql import grants
from exactly_once.publish import (
    DeadOwner,
    FilterUnavailable,
    Found,
    Link,
    NameTaken,
    PostgresChain,
    PostgresWindow,
    ProducerFenced,
    PublishOwner,
    State,
    TailHidden,
)
from exactly_once.publish.keys import encoded
from tests.publish.conftest import WINDOW_SECONDS, MakeOwner
from tests.support.roles import as_role
from tests.support.waiting import until

NEW, IN_FLIGHT, UNKNOWN, DUPLICATE = State.NEW, State.IN_FLIGHT, State.UNKNOWN, State.DUPLICATE


def window(owner: PublishOwner, scope: str, **options: Any) -> PostgresWindow:
    options.setdefault("seconds", WINDOW_SECONDS)
    return PostgresWindow(owner, scope=scope, **options)


def end_lease(db: psycopg.Connection[Any], owner: PublishOwner) -> None:
    """Let an owner's lease be over, as after a freeze."""
    query = f"UPDATE \"{owner.store.schema}\".publish_owner SET lease_until = now() - interval '1 s' WHERE id = %s"
    db.execute(query.encode(), [owner.id])


def pass_window(db: psycopg.Connection[Any], schema: str, windows: float = 1) -> None:
    """Let so many windows pass, as far as the database knows."""
    query = f"UPDATE \"{schema}\".publish_window SET turned_at = turned_at - %s * seconds * interval '1 s'"
    db.execute(query.encode(), [windows])


@pytest.fixture
def two(make_owner: MakeOwner, name: str) -> tuple[PostgresWindow, PostgresWindow]:
    """The windows of two processes."""
    return window(make_owner(), name), window(make_owner(), name)


@pytest.mark.fault("E3", more=True)
def test_two_processes_share_what_they_know(two: tuple[PostgresWindow, PostgresWindow]) -> None:
    """Fault E3."""
    one, other = two
    assert one.reserve("a") is NEW
    assert other.reserve("a") is IN_FLIGHT
    one.confirm("a")
    assert other.reserve("a") is DUPLICATE
    one.reserve("b")
    one.mark_unknown("b")
    assert other.reserve("b") is UNKNOWN
    assert one.reserve("b") is IN_FLIGHT


def test_nobody_settles_what_another_holds(two: tuple[PostgresWindow, PostgresWindow]) -> None:
    one, other = two
    one.reserve("a")
    other.release("a")
    assert other.reserve("a") is IN_FLIGHT
    other.mark_unknown("a")
    assert other.reserve("a") is IN_FLIGHT


def test_a_second_attempt_that_failed_leaves_its_doubt_to_everybody(two: tuple[PostgresWindow, PostgresWindow]) -> None:
    one, other = two
    one.reserve("a")
    one.mark_unknown("a")
    assert one.reserve("a") is UNKNOWN
    one.release("a")
    assert other.reserve("a") is UNKNOWN


def test_scopes_do_not_share_keys(make_owner: MakeOwner, name: str) -> None:
    owner = make_owner()
    assert window(owner, name).reserve("a") is NEW
    assert window(owner, name + "-other").reserve("a") is NEW


@pytest.fixture(params=["read committed", "repeatable read", "serializable"])
def isolated(request: pytest.FixtureRequest, conninfo: str) -> str:
    """How to connect as a role whose transactions are isolated so by themselves."""
    level = request.param.replace(" ", "\\ ")
    return make_conninfo(conninfo, options=f"-c default_transaction_isolation={level}")


def test_batches_of_many_processes_in_any_order_do_not_deadlock(
    make_owner: MakeOwner, isolated: str, name: str
) -> None:
    seed = 4711
    print("seed", seed)
    keys = list(range(400))
    windows = [window(make_owner(conninfo=isolated), name) for _ in range(4)]
    barrier = threading.Barrier(len(windows))

    def run(number: int) -> Counter[State]:
        mine = random.Random(seed + number).sample(keys, len(keys))
        barrier.wait(60)
        counts: Counter[State] = Counter()
        for start in range(0, len(mine), 100):
            batch = mine[start : start + 100]
            states = windows[number].reserve_many(batch)
            counts.update(states)
            windows[number].confirm_many([k for k, s in zip(batch, states, strict=True) if s is NEW])
        return counts

    with ThreadPoolExecutor(len(windows)) as pool:
        total = sum(pool.map(run, range(len(windows))), Counter[State]())
    assert total[NEW] == len(keys)
    assert windows[0].stats().confirmed == len(keys)


def test_a_lost_answer_to_a_reservation_loses_no_key(make_owner: MakeOwner, conninfo: str, name: str) -> None:
    """The keys are reserved by ourselves, and nobody holds them: they must come back as new."""
    with PostgresProxy(conninfo) as proxy:
        made = window(make_owner(conninfo=proxy.conninfo), name)
        assert made.reserve("held") is NEW
        fault = proxy.cut_after("publish_reserve")
        assert made.reserve_many(["a", "b", "held"]) == [NEW, NEW, IN_FLIGHT]
        assert fault.fired.is_set()
        fault = proxy.cut_after("publish_confirm")
        made.confirm_many(["a", "b"])
        assert fault.fired.is_set()
        assert made.reserve_many(["a", "b"]) == [DUPLICATE, DUPLICATE]


def test_a_repeated_forget_does_not_forget_the_doubt(make_owner: MakeOwner, conninfo: str, name: str) -> None:
    with PostgresProxy(conninfo) as proxy:
        made = window(make_owner(conninfo=proxy.conninfo), name)
        made.reserve("a")
        made.mark_unknown("a")
        assert made.reserve("a") is UNKNOWN
        fault = proxy.cut_after("publish_release")
        made.release("a")
        assert fault.fired.is_set()
        assert made.reserve("a") is UNKNOWN


def test_a_database_that_is_away_is_told_and_nothing_is_new(make_owner: MakeOwner, conninfo: str, name: str) -> None:
    with PostgresProxy(conninfo) as proxy:
        made = window(make_owner(conninfo=proxy.conninfo), name)
        proxy.refuse()
        proxy.cut_all()
        with pytest.raises(FilterUnavailable):
            made.reserve("a")
        proxy.heal()
        assert made.reserve("a") is NEW


def test_a_dead_owners_reservations_wait_for_its_lease(
    make_owner: MakeOwner, db: psycopg.Connection[Any], name: str
) -> None:
    dead = make_owner()
    window(dead, name).reserve_many(["a", "b"])
    other = window(make_owner(), name)
    assert other.reserve("a") is IN_FLIGHT
    end_lease(db, dead)
    assert other.reserve("a") is UNKNOWN, "nobody looked into the log"
    with pytest.raises(ProducerFenced):
        window(dead, name).reserve("c")


def test_what_a_living_owner_has_in_flight_is_not_settled(
    make_owner: MakeOwner, db: psycopg.Connection[Any], name: str
) -> None:
    """Whoever takes over fences first; the function refuses who has not, such as after a fence that was rolled back."""
    living = make_owner()
    window(living, name).reserve("a")
    schema = living.store.schema
    query = (
        f'SELECT "{schema}".publish_take_over(s.id, %s, ARRAY[]::bytea[], true) '
        f'FROM "{schema}".publish_scope s WHERE s.name = %s'
    )
    with pytest.raises(psycopg.Error) as refused:
        db.execute(query.encode(), [living.id, name])
    assert refused.value.sqlstate == "EO004"
    assert window(make_owner(), name).reserve("a") is IN_FLIGHT


def test_a_take_over_asks_the_log(make_owner: MakeOwner, db: psycopg.Connection[Any], name: str) -> None:
    dead = make_owner(name="crashed", transactional_id="tx-1", positions={name: {0: 17}})
    window(dead, name).reserve_many(["in the log", "not there", "confirmed"])
    window(dead, name).confirm("confirmed")
    asked: list[tuple[DeadOwner, str]] = []

    def take_over(owner: DeadOwner, scope: str) -> Found:
        asked.append((owner, scope))
        return Found({encoded("in the log"), encoded("somebody else's")}, is_sure=True)

    other = window(make_owner(), name, take_over=take_over)
    assert other.reserve("not there") is IN_FLIGHT
    assert asked == []
    end_lease(db, dead)
    keys = ["in the log", "not there", "confirmed", "fresh"]
    assert other.reserve_many(keys) == [DUPLICATE, NEW, DUPLICATE, NEW]
    assert asked == [(DeadOwner(dead.id, "crashed", "tx-1", {name: {"0": 17}}), name)]


def test_a_take_over_that_fails_leaves_nothing_reserved(
    make_owner: MakeOwner, db: psycopg.Connection[Any], name: str
) -> None:
    dead, living, third = (make_owner() for _ in range(3))
    window(dead, name).reserve("of the dead")
    end_lease(db, dead)

    def take_over(*_: object) -> Found:
        raise TailHidden("a transaction is open")

    other = window(living, name, take_over=take_over)
    other.reserve("unsure")
    other.mark_unknown("unsure")
    with pytest.raises(TailHidden):
        other.reserve_many(["of the dead", "new", "unsure"])
    assert window(third, name).reserve_many(["new", "unsure"]) == [NEW, UNKNOWN]


def test_without_a_fence_at_the_brokers_absence_proves_nothing(
    make_owner: MakeOwner, db: psycopg.Connection[Any], name: str
) -> None:
    dead = make_owner()
    window(dead, name).reserve_many(["in the log", "not there"])
    other = window(make_owner(), name, take_over=lambda *_: Found({encoded("in the log")}, is_sure=False))
    end_lease(db, dead)
    assert other.reserve_many(["in the log", "not there"]) == [DUPLICATE, UNKNOWN]


def test_a_second_attempt_that_died_stays_unknown_even_if_it_is_not_in_the_log(
    make_owner: MakeOwner, db: psycopg.Connection[Any], name: str
) -> None:
    """The first attempt was somebody else's; who knows whether that one can still arrive."""
    first, second = window(make_owner(), name), window(dead := make_owner(), name)
    first.reserve("a")
    first.mark_unknown("a")
    assert second.reserve("a") is UNKNOWN
    end_lease(db, dead)
    third = window(make_owner(), name, take_over=lambda *_: Found((), is_sure=True))
    assert third.reserve("a") is UNKNOWN


def test_a_frozen_owner_that_wakes_up_is_told_and_cannot_reserve(
    make_owner: MakeOwner, db: psycopg.Connection[Any], name: str
) -> None:
    frozen = window(owner := make_owner(), name)
    frozen.reserve("a")
    end_lease(db, owner)
    other = window(make_owner(), name, take_over=lambda *_: Found((), is_sure=True))
    assert other.reserve("a") is NEW
    with pytest.raises(ProducerFenced):
        frozen.reserve("b")
    frozen.release("a")
    frozen.mark_unknown("a")
    assert window(make_owner(), name).reserve("a") is IN_FLIGHT, "it is the other's by now"


def test_a_lease_is_renewed_while_the_process_lives(make_owner: MakeOwner, db: psycopg.Connection[Any]) -> None:
    owner = make_owner(lease_seconds=3)
    until_of = b"SELECT lease_until FROM exactly_once.publish_owner WHERE id = %s"
    first = db.execute(until_of, [owner.id]).fetchone()
    until(lambda: db.execute(until_of, [owner.id]).fetchone() != first, 10, "a renewal")
    owner.check()


def test_a_name_has_one_living_producer(make_owner: MakeOwner, db: psycopg.Connection[Any], name: str) -> None:
    first = make_owner(name=name, exclusive=True)
    with pytest.raises(NameTaken, match="lives"):
        make_owner(name=name, exclusive=True)
    end_lease(db, first)
    second = make_owner(name=name, exclusive=True)
    with pytest.raises(ProducerFenced):
        first.renew()
    with pytest.raises(ProducerFenced):
        first.check()
    second.close()
    make_owner(name=name, exclusive=True)


def test_of_many_that_start_under_one_name_one_lives(make_owner: MakeOwner, isolated: str, name: str) -> None:
    barrier = threading.Barrier(6)

    def start(_: int) -> bool:
        barrier.wait(60)
        try:
            make_owner(conninfo=isolated, name=name, exclusive=True)
        except NameTaken:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(start, range(6))) == 1


def test_keys_leave_after_one_to_two_windows_as_a_generation(
    make_owner: MakeOwner, db: psycopg.Connection[Any], own_schema: str, name: str
) -> None:
    """Fault E5."""
    made = window(make_owner(schema=own_schema), name, seconds=100)

    def send(key: str) -> State:
        state = made.reserve(key)
        if state is NEW:
            made.confirm(key)
        return state

    def turn(windows: float) -> None:
        pass_window(db, own_schema, windows)
        made._store.run("publish_rotate")

    assert send("first") is NEW
    turn(0.5)
    assert send("first") is DUPLICATE
    turn(0.6)
    assert send("second") is NEW
    assert send("first") is DUPLICATE
    turn(1.1)
    assert send("first") is NEW, "two windows have passed"
    assert send("second") is DUPLICATE
    turn(3)
    assert made.stats().confirmed == 0


def test_reservations_do_not_leave_with_their_generation_and_unknown_keys_do(
    make_owner: MakeOwner, db: psycopg.Connection[Any], own_schema: str, name: str
) -> None:
    dead = window(make_owner(schema=own_schema), name, seconds=100)
    dead.reserve("of a dead one")
    dead.owner.close()
    made = window(make_owner(schema=own_schema), name, seconds=100)
    made.reserve_many(["slow", "unsure"])
    made.mark_unknown("unsure")
    pass_window(db, own_schema, 1.1)
    made._store.run("publish_rotate")
    assert made.stats().unknown == 1, "for a window at least"
    for _ in range(4):
        pass_window(db, own_schema, 1.1)
        made._store.run("publish_rotate")
    stats = made.stats()
    assert (stats.in_flight, stats.unknown) == (1, 0)
    assert made.reserve_many(["slow", "unsure", "of a dead one"]) == [IN_FLIGHT, NEW, NEW]
    made.confirm("slow")
    assert made.reserve("slow") is DUPLICATE, "in the older generation, too"


def test_owners_leave_when_no_key_can_name_them(
    make_owner: MakeOwner, db: psycopg.Connection[Any], own_schema: str, name: str
) -> None:
    """A service that starts a thousand times leaves no thousand rows."""
    for _ in range(3):
        window(make_owner(schema=own_schema), name, seconds=100).owner.close()
    made = window(make_owner(schema=own_schema), name, seconds=100)
    owners = f'"{own_schema}".publish_owner'
    db.execute(f"UPDATE {owners} SET ended_at = ended_at - interval '301 s' WHERE ended_at IS NOT NULL".encode())
    pass_window(db, own_schema, 1.1)
    made._store.run("publish_rotate")
    assert db.execute(f"SELECT id FROM {owners}".encode()).fetchall() == [(made.owner.id,)]
    made.confirm("slow")
    assert made.reserve("slow") is DUPLICATE


def test_generations_turn_under_load_without_losing_a_key_of_the_window(
    make_owner: MakeOwner, db: psycopg.Connection[Any], own_schema: str, name: str
) -> None:
    windows = [window(make_owner(schema=own_schema), name, seconds=1000) for _ in range(3)]
    stop, numbers, wrong = threading.Event(), itertools.count(), list[object]()
    begun = over = turned = judged = 0

    def run(made: PostgresWindow) -> None:
        nonlocal judged
        while not stop.is_set():
            keys = [next(numbers) for _ in range(20)]
            if made.reserve_many(keys) != [NEW] * 20:
                wrong.append(keys)
            over_before = over
            made.confirm_many(keys)
            found = made.reserve_many(keys)
            # Where this thread stood still for two turns the keys have left rightly. One turn cannot do that.
            if begun - over_before <= 1:
                judged += 1
                wrong.extend([keys] if found != [DUPLICATE] * 20 else [])

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(run, made) for made in windows]
        while turned < 30:
            # One turn at a time: what was confirmed just before is in the older generation then, and must be found.
            reached = next(numbers)
            until(lambda reached=reached: next(numbers) > reached + 200, 20, "progress")  # type: ignore[misc]
            begun += 1
            pass_window(db, own_schema, 1.01)
            turned += windows[0]._store.run("publish_rotate")[0][0]
            over = begun
        stop.set()
        for each in running:
            each.result(60)
    assert wrong == []
    assert judged > 100


def test_another_length_of_the_window_is_refused(make_owner: MakeOwner, own_schema: str, name: str) -> None:
    window(make_owner(schema=own_schema), name, seconds=100)
    with pytest.raises(ConfigurationError, match="100 s"):
        window(make_owner(schema=own_schema), name, seconds=200)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e13])
def test_a_window_that_the_database_cannot_add_to_a_time_is_refused(
    make_owner: MakeOwner, own_schema: str, name: str, seconds: float
) -> None:
    with pytest.raises(ConfigurationError, match=r"seconds=.*must be (positive, and .* at most|a number)"):
        window(make_owner(schema=own_schema), name, seconds=seconds)
    window(make_owner(schema=own_schema), name, seconds=100)  # nothing was agreed on


def test_the_length_of_the_window_may_be_changed(
    make_owner: MakeOwner, db: psycopg.Connection[Any], own_schema: str, name: str
) -> None:
    before = window(make_owner(schema=own_schema), name, seconds=100)
    before.reserve("a")
    before.confirm("a")
    after = window(make_owner(schema=own_schema), name, seconds=200, changes_window=True)
    pass_window(db, own_schema, 0.9)
    after.owner.store.run("publish_rotate")
    assert after.reserve("a") is DUPLICATE
    with pytest.raises(ConfigurationError, match="200 s"):
        window(make_owner(schema=own_schema), name, seconds=100)


def test_a_window_that_becomes_much_shorter_keeps_what_was_just_confirmed(
    make_owner: MakeOwner, db: psycopg.Connection[Any], own_schema: str, name: str
) -> None:
    """Two of the new windows have passed since the last turn, but not since the key was confirmed."""
    before = window(make_owner(schema=own_schema), name, seconds=10_000)
    pass_window(db, own_schema, 0.5)
    before.reserve("a")
    before.confirm("a")
    after = window(make_owner(schema=own_schema), name, seconds=1000, changes_window=True)
    assert after.reserve("a") is DUPLICATE
    pass_window(db, own_schema, 0.9)
    after.owner.store.run("publish_rotate")
    assert after.reserve("a") is DUPLICATE
    pass_window(db, own_schema, 0.2)
    after.owner.store.run("publish_rotate")
    assert after.reserve("a") is NEW


def test_a_window_that_is_turned_too_seldom_is_refused(make_owner: MakeOwner, own_schema: str, name: str) -> None:
    owner = make_owner(schema=own_schema, lease_seconds=60)
    with pytest.raises(ConfigurationError, match="every 20 s"):
        window(owner, name, seconds=19)
    window(owner, name, seconds=20)


def test_duplicates_of_what_was_confirmed_here_need_no_question(
    make_owner: MakeOwner, db: psycopg.Connection[Any], own_schema: str, name: str
) -> None:
    """Also after the generations have turned. What others confirm is asked for."""
    made = window(make_owner(schema=own_schema), name, seconds=100, cache_keys=1000)
    other = window(make_owner(schema=own_schema), name, seconds=100)
    assert made.reserve_many("ab") == [NEW, NEW]
    assert made.reserve_many("ab") == [IN_FLIGHT, IN_FLIGHT]
    made.confirm_many("ab")
    other.reserve("c")
    other.confirm("c")
    for _ in range(2):
        asked = CountingStore(made)
        assert made.reserve_many(["a", "b", "a"]) == [DUPLICATE] * 3
        assert asked.count == 0
        assert made.reserve_many(["c", "a", "d", "d"])[:2] == [DUPLICATE, DUPLICATE]
        pass_window(db, own_schema, 1.1)
        other._store.run("publish_rotate")
    assert made.stats().cache_hits == 6
    assert made.reserve_many(["d", "d"]) == [IN_FLIGHT] * 2


class CountingStore:
    """Counts the statements of a window from now on."""

    def __init__(self, made: PostgresWindow) -> None:
        self.count = 0
        run = made._store.run

        def counted(name: str, /, **parameters: Any) -> Any:
            self.count += 1
            return run(name, **parameters)

        made._store.run = counted  # type: ignore[method-assign]


def test_the_cache_holds_few_keys(make_owner: MakeOwner, name: str) -> None:
    made = window(make_owner(), name, cache_keys=100)
    made.confirm_many(range(1000))
    assert 50 <= len(made._cache.younger) + len(made._cache.older) <= 100
    off = window(make_owner(), name)
    off.confirm_many(range(10))
    assert not off._cache.younger | off._cache.older


def test_the_cache_has_no_key_for_longer_than_a_window(make_owner: MakeOwner, name: str) -> None:
    """The database may have dropped it by then, so here it would be a duplicate of nothing, and be lost."""
    made = window(make_owner(), name, cache_keys=100)
    now, cache = [0.0], made._cache
    cache._clock, cache._began = lambda: now[0], 0.0
    for part, key in ((0.0, "early"), (0.49, "late")):
        now[0] = part * WINDOW_SECONDS
        made.confirm(key)
    for part, asks in ((0.99, False), (1.01, True)):
        now[0] = part * WINDOW_SECONDS
        asked = CountingStore(made)
        assert made.reserve_many(["early", "late"]) == [DUPLICATE] * 2
        assert bool(asked.count) is asks, part


@pytest.mark.usefixtures("own_servers")
@pytest.mark.parametrize("settings", [{}, {"synchronous_commit": "off", "wal_writer_delay": "10s"}], ids=["on", "off"])
def test_keys_are_there_after_a_crash_of_the_server(settings: dict[str, str]) -> None:
    """Also where the server does not wait for its disk by itself: what was sent would be sent again."""
    from exactly_once import embedded  # noqa: PLC0415 - only here

    link = Link("sensor", 0)
    with embedded.Postgres(settings=settings) as server, PublishOwner(server.conninfo, migrate=True) as owner:
        made, chain = window(owner, "t"), PostgresChain(owner.store)
        chain.reserve(link)
        chain.confirm(link)
        made.reserve_many(["a", "b"])
        made.confirm("a")
        server.stop("immediate")
        with pytest.raises(FilterUnavailable):
            made.reserve("a")
        server.start()
        assert made.reserve_many(["a", "b", "c"]) == [DUPLICATE, IN_FLIGHT, NEW]
        assert chain.reserve(link) is DUPLICATE


def test_two_windows_of_one_process_exclude_each_other(make_owner: MakeOwner, name: str) -> None:
    """What the database calls our own and one window does not know may be the other's, not from a lost answer."""
    owner = make_owner()
    one, other = window(owner, name), window(owner, name)
    assert one.reserve("a") is NEW
    assert other.reserve("a") is IN_FLIGHT
    other.confirm("a")
    assert one.reserve("a") is DUPLICATE


def test_a_large_batch_with_a_duplicate_is_not_slow(make_owner: MakeOwner, name: str) -> None:
    """Comparing each key with each took seconds."""
    made = window(make_owner(), name)
    made.reserve(0)
    made.confirm(0)
    began = time.thread_time()  # what others do on the machine does not count
    assert made.reserve_many(range(20_000)) == [DUPLICATE] + [NEW] * 19_999
    assert time.thread_time() - began < 5


def test_starting_an_owner_whose_first_answer_was_lost_starts_one(conninfo: str, name: str) -> None:
    with PostgresProxy(conninfo) as proxy:
        fault = proxy.cut_after()
        owner = PublishOwner(proxy.conninfo, name=name, exclusive=True)
        assert fault.fired.is_set()
        assert len(owner.store.run("publish_living", name=name)) == 1
        owner.close()


def test_a_role_with_the_printed_grants_is_enough(
    make_owner: MakeOwner, db: psycopg.Connection[Any], own_schema: str, conninfo: str, name: str
) -> None:
    role = f"{name}_publisher"
    db.execute(f'CREATE ROLE "{role}" LOGIN'.encode())
    db.execute(grants(own_schema, role))
    owner = make_owner(conninfo=as_role(conninfo, role), schema=own_schema)
    made = window(owner, name, seconds=100)
    assert made.reserve_many("abc") == [NEW] * 3
    made.confirm("a")
    made.release("b")
    made.mark_unknown("c")
    assert made.reserve_many("abc") == [DUPLICATE, NEW, UNKNOWN]
    pass_window(db, own_schema, 1.1)
    assert owner.store.run("publish_rotate") == [(1,)]
    assert PostgresChain(owner.store).reserve(Link(name, 1)) is NEW
    PostgresChain(owner.store).confirm(Link(name, 1))


def chinese(length: int) -> str:
    return "".join(map(chr, random.Random(length).choices(range(0x4E00, 0x9FFF), k=length)))


def test_long_keys_are_told_apart(two: tuple[PostgresWindow, PostgresWindow]) -> None:
    """A character may take three bytes, and a row of the index has room for 2,704."""
    one, other = two
    text = chinese(1023)  # no repetition, which Postgres would compress
    keys: list[str | bytes] = [text + "\u4e16", text + "\u754c", b"x" * 1024, "short"]
    assert one.reserve_many(keys) == [NEW] * 4
    one.confirm_many(keys[:3:2])
    one.mark_unknown(keys[1])
    assert other.reserve_many(keys) == [DUPLICATE, UNKNOWN, DUPLICATE, IN_FLIGHT]


def test_a_take_over_finds_long_keys(make_owner: MakeOwner, db: psycopg.Connection[Any], name: str) -> None:
    """The topic has them whole."""
    dead = make_owner(transactional_id=name)
    keys = [chinese(1000) + last for last in "ab"]
    window(dead, name).reserve_many(keys)
    end_lease(db, dead)
    made = window(make_owner(), name, take_over=lambda *_: Found([encoded(keys[0])], is_sure=True))
    assert made.reserve_many(keys) == [DUPLICATE, NEW]


def refusal(use: Callable[[], object]) -> str:
    try:
        return f"it returned {use()}"
    except ConfigurationError as error:
        return str(error)


def test_a_child_is_another_process(make_owner: MakeOwner, name: str) -> None:
    """It has what its parent has reserved, and would take it for a reservation of its own whose answer was lost."""
    owner = make_owner()
    made = window(owner, name)
    assert made.reserve("held") is NEW
    uses = [lambda: made.reserve("held"), lambda: made.confirm("held"), owner.renew, owner.check]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = [refusal(use) for use in uses]
            owner.close()
            owner.store.close()
            os.write(write, repr(["each process" in text for text in said]).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 1000) == b"[True, True, True, True]"
    os.close(read)
    made.confirm("held")
    assert made.reserve("held") is DUPLICATE, "the child has ended nothing of its parent's"
