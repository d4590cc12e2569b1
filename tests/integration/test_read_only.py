"""A database server that takes no writes: at the start, and below a worker that holds partitions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql

from exactly_once import ExactlyOnceConsumer, ReadOnly, StartError
from exactly_once.consumer import startup
from tests.conftest import MakeConsumer
from tests.support.roles import as_role
from tests.support.topics import create_topic, produce
from tests.support.waiting import until

Db = psycopg.Connection[Any]


@pytest.fixture
def role(db: Db, name: str) -> Iterator[str]:
    """A role to which the server can be made look like a standby."""
    quoted = sql.Identifier(name)
    db.execute(sql.SQL("CREATE ROLE {} LOGIN SUPERUSER").format(quoted))
    yield name
    db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (name,))
    db.execute(sql.SQL("DROP ROLE {}").format(quoted))


def set_read_only(db: Db, role: str, *, on: bool) -> None:
    value = sql.SQL("on" if on else "off")
    db.execute(sql.SQL("ALTER ROLE {} SET default_transaction_read_only = {}").format(sql.Identifier(role), value))
    db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (role,))


def test_worker_that_is_sent_to_a_standby_does_not_start(
    *, make_consumer: MakeConsumer, bootstrap_servers: str, conninfo: str, db: Db, role: str
) -> None:
    topic = create_topic(bootstrap_servers, 1)
    set_read_only(db, role, on=True)
    consumer = make_consumer(conninfo=as_role(conninfo, role), startup_seconds=1)
    with pytest.raises(
        ReadOnly, match=r"127\.0\.0\.1:\d+/\w+ takes no writes.*target_session_attrs=read-write"
    ) as caught:
        consumer.subscribe([topic])
    assert isinstance(caught.value, StartError)


def test_start_waits_for_a_promotion(
    *,
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    conninfo: str,
    db: Db,
    role: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = create_topic(bootstrap_servers, 1)
    set_read_only(db, role, on=True)
    consumer = make_consumer(conninfo=as_role(conninfo, role), startup_seconds=60)

    def promote() -> None:
        until(lambda: "takes no writes" in caplog.text, 30, "a word about the wait")
        with psycopg.connect(conninfo, autocommit=True) as own:
            set_read_only(own, role, on=False)

    thread = threading.Thread(target=promote)
    thread.start()
    consumer.subscribe([topic])
    thread.join()


def test_worker_that_cannot_write_any_more_leaves_its_partitions_to_others(
    *,
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    conninfo: str,
    db: Db,
    role: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And comes back when it can."""
    monkeypatch.setattr(startup, "LEAVE_SECONDS", 1.0)
    monkeypatch.setattr("exactly_once.consumer.maintenance.RECHECK_SECONDS", 0.5)
    topic = create_topic(bootstrap_servers, 2)
    good, bad = make_consumer(), make_consumer(conninfo=as_role(conninfo, role))
    with working(good, topic), working(bad, topic):
        until(lambda: len(good.health().owned) == len(bad.health().owned) == 1, 60, "a partition for each")
        set_read_only(db, role, on=True)
        until(lambda: len(good.health().owned) == 2, 60, "both partitions with the one that can write")
        assert not bad.health().is_ready
        assert any("takes no writes" in reason for reason in bad.health().reasons)
        produce(bootstrap_servers, topic, 10, 2)
        until(lambda: good.counters.messages == 10, 30, "every message applied")
        set_read_only(db, role, on=False)
        until(lambda: len(bad.health().owned) == 1, 60, "a partition for the one that came back")
    assert "127.0.0.1" in caplog.text


@contextmanager
def working(consumer: ExactlyOnceConsumer, topic: str) -> Iterator[None]:
    """Run a consumer in a thread of its own."""

    def work() -> None:
        with consumer:
            consumer.subscribe([topic])
            consumer.run(lambda unit: None)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        consumer.stop()
        thread.join(60)
