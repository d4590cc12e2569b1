"""ShardedWindow: who has which key, versions of the map, keys that have moved."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from exactly_once import ConfigurationError
from exactly_once.embedded.proxy import PostgresProxy
from exactly_once.ledger.migrate import migrate
from exactly_once.publish import (
    DedupProducer,
    FilterUnavailable,
    PostgresWindow,
    ProducerFenced,
    Resolved,
    ShardedWindow,
    State,
    TopicTakeOver,
    WindowFilter,
)
from exactly_once.publish.keys import encoded
from exactly_once.publish.shards import shard_of
from tests.publish.conftest import WINDOW_SECONDS, MakeOwner
from tests.publish.test_postgres_window import end_lease

NEW, IN_FLIGHT, UNKNOWN, DUPLICATE = State.NEW, State.IN_FLIGHT, State.UNKNOWN, State.DUPLICATE
MakeShard = Callable[..., PostgresWindow]
KEYS = [b"%d" % n for n in range(3000)]


@pytest.fixture
def shard(make_owner: MakeOwner, conninfo: str, name: str) -> MakeShard:
    """Make the window of a shard by its name: a schema of its own stands for a database of its own."""

    def make(which: str, conninfo: str = conninfo) -> PostgresWindow:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            migrate(connection, f"{name}_{which}")
        owner = make_owner(conninfo=conninfo, schema=f"{name}_{which}")
        return PostgresWindow(owner, scope="t", seconds=WINDOW_SECONDS)

    return make


def test_keys_spread_evenly() -> None:
    counts = Counter(shard_of(key, "abcd") for key in KEYS)
    assert all(count == pytest.approx(len(KEYS) / 4, rel=0.15) for count in counts.values())


def test_a_new_shard_takes_its_share_and_moves_nothing_else() -> None:
    before = {key: shard_of(key, "abc") for key in KEYS}
    after = {key: shard_of(key, "abcd") for key in KEYS}
    moved = {key for key in KEYS if before[key] != after[key]}
    assert {after[key] for key in moved} == {"d"}
    assert len(moved) == pytest.approx(len(KEYS) / 4, rel=0.15)


def test_each_key_is_in_one_shard(shard: MakeShard) -> None:
    windows = {which: shard(which) for which in "abc"}
    made = ShardedWindow(windows, version=1)
    keys = KEYS[:300]
    assert made.reserve_many(keys) == [NEW] * 300
    made.confirm_many(keys)
    assert ShardedWindow(windows, version=1).reserve_many(keys[::-1]) == [DUPLICATE] * 300
    parts = [window.stats().confirmed for window in windows.values()]
    assert sum(parts) == 300
    assert min(parts) > 50


def test_after_a_change_of_the_map_moved_keys_are_still_known(shard: MakeShard) -> None:
    old = {which: shard(which) for which in "ab"}
    before = ShardedWindow(old, version=1)
    keys = KEYS[:200]
    before.reserve_many(keys)
    before.confirm_many(keys[:100])
    before.mark_unknown_many(keys[100:150])
    new = {**old, "c": shard("c")}
    after = ShardedWindow(new, version=2, previous=old)
    states = after.reserve_many(keys)
    assert states == [DUPLICATE] * 100 + [UNKNOWN] * 50 + [IN_FLIGHT] * 50
    assert after.reserve_many(KEYS[200:210]) == [NEW] * 10


def test_after_two_changes_of_the_map_within_a_window_keys_are_still_known(shard: MakeShard) -> None:
    a, b, c = (shard(name) for name in "abc")
    first = ShardedWindow({"a": a, "b": b}, version=1)
    first.reserve_many(KEYS[:60])
    first.confirm_many(KEYS[:20])
    first.mark_unknown_many(KEYS[20:40])
    second = ShardedWindow({"a": a, "b": b, "c": c}, version=2, previous={"a": a, "b": b})
    assert second.reserve_many(KEYS[20:30]) == [UNKNOWN] * 10
    second.confirm_many(KEYS[20:30])
    third = ShardedWindow({"b": b, "c": c}, version=3, previous={"a": a, "b": b, "c": c})
    known = [DUPLICATE] * 30 + [UNKNOWN] * 10 + [IN_FLIGHT] * 20 + [NEW]
    assert third.reserve_many(KEYS[:61]) == known


def test_a_key_that_was_confirmed_elsewhere_meanwhile_is_not_sent_again(shard: MakeShard) -> None:
    """It has moved away and back: where it is looked for first, nobody has heard of that."""
    a, b = {"a": shard("a")}, {"b": shard("b")}
    keys = ["confirmed", "given up", "never sent again"]
    first = ShardedWindow(a, version=1)
    first.reserve_many(keys)
    first.mark_unknown_many(keys)
    second = ShardedWindow(b, version=2, previous=a)
    assert second.reserve_many(keys[:2]) == [UNKNOWN] * 2
    second.confirm("confirmed")
    second.release("given up")
    third = ShardedWindow(a, version=3, previous=b)
    assert third.reserve_many(keys) == [DUPLICATE, UNKNOWN, UNKNOWN]
    assert a["a"].reserve("confirmed") is DUPLICATE


def test_a_look_where_the_map_before_had_a_key_leaves_nothing_reserved_there(
    shard: MakeShard, db: psycopg.Connection[object], conninfo: str
) -> None:
    """The database goes away between the take-over there and the end of the look."""
    key = next(key for key in KEYS if shard_of(encoded(key), "ab") == "b")
    dead = shard("a")
    ShardedWindow({"a": dead}, version=1).reserve(key)
    end_lease(db, dead.owner)
    with PostgresProxy(conninfo) as proxy:
        old = {"a": shard("a", proxy.conninfo)}
        made = ShardedWindow({**old, "b": shard("b")}, version=2, previous=old)
        fault = proxy.hold("publish_(release|mark_unknown)", close_client=False)
        with ThreadPoolExecutor(1) as pool:
            reserving = pool.submit(made.reserve, key)
            fault.wait()
            proxy.refuse()
            with contextlib.suppress(FilterUnavailable):
                reserving.result(60)
                made.release(key)
        proxy.heal()
        assert made.reserve(key) is UNKNOWN


def test_what_is_found_in_the_topic_is_settled_in_a_shard_that_the_map_has_no_more(shard: MakeShard) -> None:
    a, b, c = (shard(which) for which in "abc")
    keys = [key for key in KEYS if shard_of(encoded(key), "ab") == "a"][:20]
    before = ShardedWindow({"a": a, "b": b}, version=1)
    before.reserve_many(keys)
    before.mark_unknown_many(keys)
    after = ShardedWindow({"b": b, "c": c}, version=2, previous={"a": a, "b": b})
    assert after.resolve(set(map(encoded, keys[:15])), is_sure=False) == Resolved(15, 0, 5)
    assert after.reserve_many(keys) == [DUPLICATE] * 15 + [UNKNOWN] * 5


def test_a_window_under_another_name_is_refused(shard: MakeShard) -> None:
    """Keys that move from the one name to the other would be found in flight: by the call that asks for them."""
    a, b = shard("a"), shard("b")
    ShardedWindow({"a": a, "b": b}, version=1)
    for names in ("xb", "ba"):
        with pytest.raises(ConfigurationError, match=r"the window that previous= calls 'a'"):
            ShardedWindow(dict(zip(names, (a, b), strict=True)), version=2, previous={"a": a, "b": b})
    odd: Any
    for odd in ({"x": "postgresql:///x"}, {"x": WindowFilter(keys=10)}, {2: a}):
        for given, previous in ((odd, None), ({"a": a}, odd)):
            with pytest.raises(ConfigurationError, match=r"with a PostgresWindow each, not (2|'x') with a "):
                ShardedWindow(given, version=2, previous=previous)
    for version in (0, 1 << 31):
        with pytest.raises(ConfigurationError, match="an int of 32 bits"):
            ShardedWindow({"a": a, "b": b}, version=version)
    assert ShardedWindow({"a": a, "b": b}, version=1).reserve("k") is NEW


def test_a_process_with_an_older_map_is_refused(shard: MakeShard) -> None:
    old = {which: shard(which) for which in "ab"}
    before = ShardedWindow(old, version=1)
    ShardedWindow({**old, "c": shard("c")}, version=2, previous=old)
    with pytest.raises(ProducerFenced, match="version 2"):
        before.reserve_many(KEYS[:10])
    with pytest.raises(ProducerFenced):
        ShardedWindow(old, version=1)
    with pytest.raises(ConfigurationError, match="other shards"):
        ShardedWindow(old, version=2)


def test_a_reservation_under_way_is_seen_by_who_brings_a_new_map(shard: MakeShard, conninfo: str, name: str) -> None:
    """The old map is checked where the key is reserved: one that came in between would be new in two shards."""
    old = {"a": shard("a")}
    before = ShardedWindow(old, version=1)
    new = {**old, "c": shard("c")}
    moved = next(key for key in KEYS if shard_of(encoded(key), new) == "c")
    window = old["a"]
    number = f'"{name}_a".publish_scope_number(%s)'
    reserve = f'SELECT * FROM "{name}_a".publish_reserve({number}, %s, %s, 1)'.encode()
    with psycopg.connect(conninfo) as connection, ThreadPoolExecutor(1) as pool:
        connection.execute(reserve, [window.scope, [encoded(moved)], window.owner.id])
        starting = pool.submit(ShardedWindow, new, version=2, previous={"a": shard("a")})
        with pytest.raises(TimeoutError):
            starting.result(0.3)
        connection.commit()
        after = starting.result(60)
    assert after.reserve(moved) is IN_FLIGHT
    with pytest.raises(ProducerFenced, match="version 2"):
        before.reserve(moved)
    with pytest.raises(ProducerFenced, match="version 2"):
        window.reserve_many([moved], map_version=1)


def test_a_moved_key_whose_holder_died_is_not_stuck(shard: MakeShard, db: psycopg.Connection[object]) -> None:
    """The one who holds it has the map before; nobody else would ever take over from it."""
    dead = {which: shard(which) for which in "ab"}
    keys = [key for key in KEYS if shard_of(encoded(key), "abc") == "c"][:60]
    ShardedWindow(dead, version=1).reserve_many(keys)
    for window in dead.values():
        end_lease(db, window.owner)
    old = {which: shard(which) for which in "ab"}
    after = ShardedWindow({**old, "c": shard("c")}, version=2, previous=old)
    assert after.reserve_many(keys) == [UNKNOWN] * 60
    after.confirm_many(keys)
    assert after.reserve_many(keys) == [DUPLICATE] * 60


def test_an_owner_that_promises_a_transactional_id_is_refused_in_a_shard_too(make_owner: MakeOwner, name: str) -> None:
    owner = make_owner(transactional_id=name)
    shards = ShardedWindow({"a": PostgresWindow(owner, scope=name, seconds=WINDOW_SECONDS)}, version=1)
    for dedup in (shards, lambda _: shards):
        made = DedupProducer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, dedup=dedup)
        with pytest.raises(ConfigurationError, match="outside of transactions"):
            made.produce("t", b"x", dedup_key="a")
        made.close()


def test_a_window_whose_take_over_looks_in_another_topic_is_refused(make_owner: MakeOwner, name: str) -> None:
    """What it does not find there was never sent, it would say of what a dead process had sent in a transaction."""
    kafka = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    owner, take_over = make_owner(), TopicTakeOver(kafka)
    before, after = (PostgresWindow(owner, scope=n, seconds=WINDOW_SECONDS, take_over=take_over) for n in (name, "t"))
    shards = ShardedWindow({"a": after}, version=1, previous={"b": before})
    for dedup in (before, shards):
        made = DedupProducer(kafka, dedup=dedup)
        with pytest.raises(ConfigurationError, match=f"scope='{name}' of a window that serves topic 't'"):
            made.produce("t", b"x", dedup_key="a")
        made.close()
    after.check_topic("t")
    PostgresWindow(owner, scope=name, seconds=WINDOW_SECONDS).check_topic("t")


def test_a_shard_that_is_away_undoes_the_batch(shard: MakeShard, conninfo: str) -> None:
    keys = sorted(KEYS[:20], key=lambda key: shard_of(encoded(key), "ab"))  # first those of the one that is there
    with PostgresProxy(conninfo) as proxy:
        made = ShardedWindow({"a": shard("a"), "b": shard("b", proxy.conninfo)}, version=1)
        proxy.refuse()
        proxy.cut_all()
        with pytest.raises(FilterUnavailable):
            made.reserve_many(keys)
        proxy.heal()
        assert made.reserve_many(keys) == [NEW] * 20


def test_shards_that_go_away_together_leave_nothing_reserved(shard: MakeShard, conninfo: str) -> None:
    """The one that has reserved cannot be told that the other one has not."""
    keys = sorted(KEYS[:20], key=lambda key: shard_of(encoded(key), "ab"))
    with PostgresProxy(conninfo) as proxy:
        made = ShardedWindow({"a": shard("a", proxy.conninfo), "b": shard("b", proxy.conninfo)}, version=1)
        fault = proxy.hold(r"_b\"?\.publish_reserve", close_client=False)
        with ThreadPoolExecutor(1) as pool:
            reserving = pool.submit(made.reserve_many, keys)
            fault.wait()
            proxy.refuse()
            with pytest.raises(FilterUnavailable):
                reserving.result(60)
        proxy.heal()
        assert made.reserve_many(keys) == [NEW] * 20


def test_a_release_that_is_tried_again_takes_nothing_from_another_process(shard: MakeShard, conninfo: str) -> None:
    """One shard was away: in the other one it got through the first time, and another process may have sent the key."""
    keys = sorted(KEYS[:20], key=lambda key: shard_of(encoded(key), "ab"))
    there, away = keys[0], keys[-1]
    with PostgresProxy(conninfo) as proxy:
        made = ShardedWindow({"a": shard("a"), "b": shard("b", proxy.conninfo)}, version=1)
        other = ShardedWindow({"a": shard("a"), "b": shard("b")}, version=1)
        assert made.reserve_many([there, away]) == [NEW, NEW]
        proxy.refuse()
        proxy.cut_all()
        with pytest.raises(FilterUnavailable):
            made.release_many([there, away])
        assert other.reserve(there) is NEW
        other.mark_unknown(there)
        proxy.heal()
        made.release_many([there, away])
        assert other.reserve_many([there, away]) == [UNKNOWN, NEW]
        other.mark_unknown(there)
        made.release(there)  # by somebody who has read the log
        assert other.reserve(there) is NEW
