"""Connections out of a pool: every one goes back, however it ends."""

from __future__ import annotations

import psycopg
import pytest

from exactly_once import Redelivered, Unit
from exactly_once.ledger import stale_owners
from tests.integration.conftest import MakeScene
from tests.support.pool import Pool
from tests.support.waiting import until
from tests.support.worker import record


@pytest.mark.parametrize("close_returns", [False, True])
def test_lost_connections_do_not_drain_the_pool(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch, *, close_returns: bool
) -> None:
    """psycopg_pool's own getconn as connect=; a stand-in, because that package is not installed here."""
    monkeypatch.setattr(stale_owners, "FROZEN_AFTER_SECONDS", 600.0)  # the watcher's would be counted, too
    scene = make_scene(40)
    pool = Pool(scene.proxy.conninfo, size=2, close_returns=close_returns)
    consumer = scene.consumer(connect=pool.getconn, max_messages=5)
    units = consumer.units(until_end=True)
    lost = 0
    while True:
        try:
            for unit in units:
                with unit:
                    record(unit, "test")
                    if unit.attempt == 1:
                        lost += 1
                        scene.proxy.cut_all()
            break
        except Redelivered:
            continue
    assert lost >= 8
    assert len(pool.out) == 1
    scene.assert_exact()
    consumer.close()
    assert pool.out == set()


def test_the_watchers_connection_and_that_of_an_aborted_handler_go_back(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stale_owners, "FROZEN_AFTER_SECONDS", 0.1)
    monkeypatch.setattr(stale_owners, "_TURN_SECONDS", 0.05)
    scene = make_scene(4)
    pool = Pool(scene.conninfo, size=3)
    consumer = scene.consumer(connect=pool.getconn, max_messages=2)
    opened: list[int] = []

    def handler(unit: Unit) -> None:
        record(unit, "test")
        until(lambda: len(pool.out) == 2, 10, "the watcher to show that this process lives")
        opened.append(pool.made)
        if unit.attempt == 1 and len(opened) == 1:
            assert unit.work.begun is not None
            consumer._session.end(unit.work.begun)

    consumer.run(handler, in_thread=True, until_end=True)
    scene.assert_exact()
    consumer.close()
    assert pool.out == set()


def test_a_connection_of_nobodys_pool_is_closed(make_scene: MakeScene) -> None:
    scene = make_scene(4)
    made: list[psycopg.Connection] = []

    def connect() -> psycopg.Connection:
        made.append(psycopg.connect(scene.conninfo))
        return made[-1]

    with scene.consumer(connect=connect) as consumer:
        scene.drain(consumer)
    assert all(connection.closed for connection in made)
