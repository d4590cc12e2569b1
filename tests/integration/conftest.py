"""Fixtures of the integration tests: a scene with a topic, a journal and a faulty way to the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import unwrap
from typing import Any

import psycopg
import pytest

from exactly_once import ExactlyOnceConsumer
from exactly_once.embedded.proxy import PostgresProxy
from exactly_once.ledger.rows import Ledger
from tests.conftest import MakeConsumer
from tests.integration.scene import Scene
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import ensure_journal

MakeScene = Callable[..., Scene]


@pytest.fixture
def make_scene(bootstrap_servers: str, conninfo: str, name: str, make_consumer: MakeConsumer) -> Iterator[MakeScene]:
    """Make the scene: ``make_scene(messages, partitions=1)``; its consumers go through a recording proxy."""
    with PostgresProxy(conninfo, record=True) as proxy:

        def make(messages: int = 20, *, partitions: int = 1) -> Scene:
            create_topic(bootstrap_servers, partitions, name=name)
            produce(bootstrap_servers, name, messages, partitions)
            return Scene(bootstrap_servers, conninfo, name, proxy, make_and_remember)

        def make_and_remember(*args: Any, **options: Any) -> ExactlyOnceConsumer:
            made.append(make_consumer(*args, **options))
            return made[-1]

        made: list[ExactlyOnceConsumer] = []
        ensure_journal(conninfo)
        yield make
        # Before the proxy ends, or every close would wait for a database that is gone.
        for consumer in made:
            consumer.close()


@pytest.fixture
def scene(make_scene: MakeScene) -> Scene:
    """Twenty messages in one partition."""
    return make_scene()


@pytest.fixture
def unhurried_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ledger wait for locks as long as a busy machine may keep them: for who asserts what comes behind one."""
    for call in (unwrap(Ledger._changing), Ledger.acquire, Ledger.read):
        monkeypatch.setattr(call, "__kwdefaults__", {**(call.__kwdefaults__ or {}), "lock_seconds": 60.0})


@pytest.fixture
def without_autovacuum(db: psycopg.Connection[Any]) -> Iterator[None]:
    """Autovacuum takes transaction ids of its own, for the statistics of tables."""
    db.execute("ALTER SYSTEM SET autovacuum = off")
    db.execute("SELECT pg_reload_conf()")
    workers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'autovacuum%'"
    until(lambda: db.execute(workers).fetchone() == (0,), 30, "the end of autovacuum")
    yield
    db.execute("ALTER SYSTEM RESET autovacuum")
    db.execute("SELECT pg_reload_conf()")
