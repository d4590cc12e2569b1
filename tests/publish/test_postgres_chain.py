"""PostgresChain: one multirange per chain."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from exactly_once.publish import DedupProducer, Link, PostgresChain, State, Store
from tests.support.topics import create_topic
from tests.support.waiting import until

NEW, DUPLICATE = State.NEW, State.DUPLICATE


def links(chain: str, *numbers: int) -> list[Link]:
    return [Link(chain, number) for number in numbers]


def test_a_chain_on_two_topics_is_two_chains(store: Store, bootstrap_servers: str, name: str) -> None:
    topics = [create_topic(bootstrap_servers, 1, name=f"{name}-{n}") for n in range(2)]
    for life in range(2):
        with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=lambda _: PostgresChain(store)) as producer:
            for topic in topics:
                is_duplicate = producer.produce(topic, b"x", chain=Link(name, 1)).duplicate
                producer.flush(60)
                assert is_duplicate is bool(life)


def test_the_seeds_numbers_are_three_ranges(
    store: Store, name: str, db: psycopg.Connection[tuple[object, ...]]
) -> None:
    made = PostgresChain(store)
    numbers = links(name, 1, 2, 3, 4, 5, 6, 10, 11, 12, 18, 19, 20)
    assert made.reserve_many(numbers) == [NEW] * 12
    made.confirm_many(numbers)
    row = db.execute("SELECT seen::text FROM exactly_once.publish_chain WHERE chain = %s", [name]).fetchone()
    assert row == ("{[1,7),[10,13),[18,21)}",)
    assert made.reserve_many(links(name, 6, 7, 9, 10, 13, 17, 20, 21)) == [
        DUPLICATE, NEW, NEW, DUPLICATE, NEW, NEW, DUPLICATE, NEW,
    ]  # fmt: skip


def test_another_process_knows_what_was_confirmed(store: Store, conninfo: str, name: str) -> None:
    PostgresChain(store).confirm_many(links(name, 1, 2, 3))
    other = Store(conninfo)
    assert PostgresChain(other).reserve_many(links(name, 2, 3, 4)) == [DUPLICATE, DUPLICATE, NEW]
    other.close()


def test_a_run_in_order_stays_one_range(store: Store, name: str, db: psycopg.Connection[tuple[object, ...]]) -> None:
    made = PostgresChain(store)
    for start in range(0, 5000, 500):
        batch = links(name, *range(start, start + 500))
        assert made.reserve_many(batch) == [NEW] * 500
        made.confirm_many(batch)
    row = db.execute("SELECT seen::text FROM exactly_once.publish_chain WHERE chain = %s", [name]).fetchone()
    assert row == ("{[0,5000)}",)


def test_a_batch_of_several_chains_is_one_statement(store: Store, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked, run = PostgresChain(store), list[str](), store.run

    def counted(name: str, /, **given: object) -> object:
        asked.append(name)
        return run(name, **given)

    monkeypatch.setattr(store, "run", counted)
    batch = [Link(f"{name}-{n % 3}", n) for n in range(9)]
    made.reserve_many(batch)
    made.confirm_many(batch)
    assert asked == ["publish_seen", "publish_see"]
    assert made.reserve_many([Link(f"{name}-0", n) for n in range(9)]) == [DUPLICATE, NEW, NEW] * 3


def test_an_empty_batch_asks_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = PostgresChain(store)
    monkeypatch.setattr(store, "run", lambda *_, **__: pytest.fail("asked"))
    assert made.reserve_many([]) == []
    made.confirm_many([])


def test_a_batch_takes_its_chains_in_one_order(
    store: Store, conninfo: str, db: psycopg.Connection[tuple[object, ...]], name: str
) -> None:
    """Of two batches with the same chains none waits for the other with a chain that the other wants."""
    made, chains = PostgresChain(store), [f"{name}-{n:03}" for n in range(500)]
    made.confirm_many([Link(chain, 1) for chain in chains])
    rows = "SELECT FROM exactly_once.publish_chain WHERE chain = ANY(%s) FOR UPDATE"
    waiting = "SELECT FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
    with ThreadPoolExecutor(1) as pool, psycopg.connect(conninfo) as holder:
        holder.execute(rows, [chains[:1]])
        batch = pool.submit(made.confirm_many, [Link(chain, 2) for chain in reversed(chains)])
        until(lambda: db.execute(waiting, [holder.info.backend_pid]).rowcount or batch.done(), 20, "a batch that waits")
        free = db.execute(f"{rows} SKIP LOCKED".encode(), [chains[1:]]).rowcount
        holder.rollback()
        batch.result(60)
    assert free == 499


def test_any_order_equals_a_plain_set(store: Store, name: str) -> None:
    seed = 20260
    print("seed", seed)
    rng = random.Random(seed)
    made, model = PostgresChain(store), set[int]()
    for _ in range(40):
        batch = [rng.randrange(200) for _ in range(rng.randrange(1, 20))]
        batch = list(dict.fromkeys(batch))
        assert made.reserve_many(links(name, *batch)) == [DUPLICATE if n in model else NEW for n in batch]
        made.confirm_many(links(name, *batch))
        model.update(batch)
