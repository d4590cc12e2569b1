"""PostgresChain: one multirange per chain."""

from __future__ import annotations

import random

import psycopg

from exactly_once.publish import Link, PostgresChain, State, Store

NEW, DUPLICATE = State.NEW, State.DUPLICATE


def links(chain: str, *numbers: int) -> list[Link]:
    return [Link(chain, number) for number in numbers]


def test_the_seeds_numbers_are_three_ranges(
    store: Store, name: str, db: psycopg.Connection[tuple[object, ...]]
) -> None:
    made = PostgresChain(store)
    numbers = links(name, 1, 2, 3, 4, 5, 6, 10, 11, 12, 18, 19, 20)
    assert made.reserve_many(numbers) == [NEW] * 12
    made.confirm_many(numbers)
    row = db.execute("SELECT seen::text FROM exactly_once.publish_chain WHERE chain = %s", [name]).fetchone()
    assert row == ("{[1,7),[10,13),[18,21)}",)
    assert made.ranges(name) == 3
    assert made.reserve_many(links(name, 6, 7, 9, 10, 13, 17, 20, 21)) == [
        DUPLICATE, NEW, NEW, DUPLICATE, NEW, NEW, DUPLICATE, NEW,
    ]  # fmt: skip


def test_another_process_knows_what_was_confirmed(store: Store, conninfo: str, name: str) -> None:
    PostgresChain(store).confirm_many(links(name, 1, 2, 3))
    other = Store(conninfo)
    assert PostgresChain(other).reserve_many(links(name, 2, 3, 4)) == [DUPLICATE, DUPLICATE, NEW]
    other.close()


def test_a_run_in_order_stays_one_range(store: Store, name: str) -> None:
    made = PostgresChain(store)
    for start in range(0, 5000, 500):
        batch = links(name, *range(start, start + 500))
        assert made.reserve_many(batch) == [NEW] * 500
        made.confirm_many(batch)
        assert made.ranges(name) == 1


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
