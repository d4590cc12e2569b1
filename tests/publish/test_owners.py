"""PublishOwner: a take-over's start moves on, and a name that is taken is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import Producer
from psycopg.conninfo import make_conninfo

from exactly_once import ConfigurationError, UnknownTopic
from exactly_once.kafka.admin import Cluster, Topic
from exactly_once.ledger.sql import grants
from exactly_once.publish import (
    DedupProducer,
    FilterUnavailable,
    NameTaken,
    OutcomeUnknown,
    PostgresWindow,
    PublishOwner,
    State,
    Store,
    TopicTakeOver,
    end_positions,
    tail,
)
from exactly_once.publish.headers import with_key
from exactly_once.publish.owners import TOPIC_ID
from tests.publish.conftest import WINDOW_SECONDS, MakeOwner
from tests.publish.test_postgres_window import end_lease
from tests.publish.test_sequences_on_broker import delete_all
from tests.support.roles import as_role
from tests.support.topics import create_topic
from tests.support.waiting import until


@pytest.fixture
def topic(bootstrap_servers: str, name: str) -> str:
    return create_topic(bootstrap_servers, 1, name=name)


def send(kafka: dict[str, Any], topic: str, key: str) -> None:
    client = Producer(kafka)
    client.produce(topic, key, headers=with_key(None, key))
    assert client.flush(60) == 0


def crash(owner: PublishOwner) -> None:
    """Have nobody renew the lease any more."""
    owner._closing.set()
    for thread in owner._threads:
        thread.join(30)
    owner.store.close()


def start_of(db: psycopg.Connection[Any], owner: PublishOwner) -> dict[str, dict[str, int]]:
    row = db.execute("SELECT positions FROM exactly_once.publish_owner WHERE id = %s", [owner.id]).fetchone()
    assert row is not None
    return {topic: {n: end for n, end in ends.items() if n != TOPIC_ID} for topic, ends in row[0].items()}


def test_a_topic_that_was_made_a_moment_ago_is_waited_for(
    kafka: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker that answers may not know of it yet; one that there is not is refused, in words of this side."""
    with pytest.raises(UnknownTopic, match=r"no topic .*; create it$"):
        end_positions(kafka, [name])
    monkeypatch.setattr(tail, "_BEHIND_SECONDS", 60)
    describe, is_asked = Cluster.describe, threading.Event()

    def told(self: Cluster, topics: Iterable[str]) -> dict[str, Topic]:
        try:
            return describe(self, topics)
        finally:
            is_asked.set()

    monkeypatch.setattr(Cluster, "describe", told)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(end_positions, kafka, [name])
        assert is_asked.wait(60)
        create_topic(kafka["bootstrap.servers"], 1, name=name)
        assert asking.result(60)[name].keys() == {TOPIC_ID, 0}


@pytest.mark.parametrize("name", ["", "a\0b", "caf\udce9", "\u00e9" * 513, b"x"])
def test_what_can_be_no_name_is_refused(make_owner: MakeOwner, conninfo: str, name: Any) -> None:
    for option in ("name", "transactional_id"):
        with pytest.raises(
            ConfigurationError, match=rf"{option}=.* (is not a str of UTF-8 of 1 to 1024 bytes|must be a str)"
        ):
            PublishOwner(conninfo, **{option: name})
    with pytest.raises(ConfigurationError, match=r"scope=.* (is not a str of UTF-8|must be a str)"):
        PostgresWindow(make_owner(), scope=name, seconds=WINDOW_SECONDS)


def test_the_start_of_a_take_over_moves_on_behind_what_is_settled_only(
    make_owner: MakeOwner, db: psycopg.Connection[Any], kafka: dict[str, Any], topic: str
) -> None:
    """A service that has run for longer than retention leaves keys that a take-over can still look for."""
    dead = make_owner(positions=lambda: end_positions(kafka, [topic]), lease_seconds=3)
    theirs = PostgresWindow(dead, scope=topic, seconds=WINDOW_SECONDS)
    assert theirs.reserve("early") is State.NEW
    send(kafka, topic, "early")
    until(
        lambda: (seen := dead._seen) is not None and any(seen[1]), 60, "a look at the topic's end with a key in flight"
    )
    rounds = dead._renewed_at
    until(lambda: dead._renewed_at > rounds + 1, 20, "some more renewals")
    assert start_of(db, dead) == {topic: {"0": 0}}, "its message stands at 0"
    theirs.confirm("early")
    until(lambda: start_of(db, dead) == {topic: {"0": 1}}, 20, "the start behind it")
    delete_all(kafka["bootstrap.servers"], topic)
    theirs.reserve_many(["sent", "not sent"])
    send(kafka, topic, "sent")
    crash(dead)
    end_lease(db, dead)
    ours = PostgresWindow(make_owner(), scope=topic, seconds=WINDOW_SECONDS, take_over=TopicTakeOver(kafka))
    assert ours.reserve_many(["sent", "not sent", "early"]) == [State.DUPLICATE, State.UNKNOWN, State.DUPLICATE]


def test_a_name_whose_owner_crashed_is_waited_for(
    make_owner: MakeOwner, db: psycopg.Connection[Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    crashed = make_owner(name=name, exclusive=True)
    crash(crashed)
    with pytest.raises(NameTaken):
        make_owner(name=name, exclusive=True)

    def waits() -> int:
        return [getattr(record, "action", "") for record in caplog.records].count("waits_for_name")

    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(make_owner, name=name, exclusive=True, wait_seconds=120)
        until(waits, 60, "a word about the wait")
        end_lease(db, crashed)
        assert starting.result(120).id != crashed.id
    assert waits() == 1


@pytest.mark.parametrize("positions", ["earliest", [("orders", 0)], {"orders": 5}, {"orders": {"offsets": 0}}])
def test_positions_that_nobody_could_read_are_refused(make_owner: MakeOwner, positions: Any) -> None:
    """The take-over failed in other processes, each time that one of them needed a key of the dead owner."""
    for given in (positions, lambda: positions):
        with pytest.raises(ConfigurationError, match=r"^positions=.* must be "):
            make_owner(positions=given)


def test_a_database_that_is_away_at_the_start_is_told_as_later() -> None:
    with pytest.raises(FilterUnavailable, match="cannot be asked"):
        PublishOwner("host=127.0.0.1 port=1 connect_timeout=2")


def test_a_database_that_takes_no_writes_is_away(conninfo: str, name: str) -> None:
    """As the old primary of a failover, and a standby: whoever asks is told as if nobody had answered."""
    store = Store(connect=lambda: psycopg.connect(conninfo, options="-c default_transaction_read_only=on"))
    with pytest.raises(FilterUnavailable, match="read-only"):
        store.run("publish_scope", name=name)
    store.close()


@pytest.mark.parametrize("setting", ["lock_timeout", "statement_timeout", "transaction_timeout"])
def test_each_time_out_of_the_server_is_told_as_its_absence(
    conninfo: str, db: psycopg.Connection[Any], setting: str
) -> None:
    store = Store(make_conninfo(conninfo, options=f"-c {setting}=100"))
    with db.transaction():
        db.execute("LOCK TABLE exactly_once.publish_scope")
        with pytest.raises(FilterUnavailable, match="timeout"):
            store.run("publish_scope", name="any")
    store.close()


@pytest.mark.parametrize("kind", [Store, PublishOwner])
def test_a_connection_in_an_open_transaction_is_refused(conninfo: str, kind: Callable[..., object]) -> None:
    """Nobody would commit what is marked there: after the end of the process it would all be sent again."""
    given: list[psycopg.Connection[Any]] = []

    def connect() -> psycopg.Connection[Any]:
        given.append(psycopg.connect(conninfo))
        given[-1].execute("SELECT 1")
        return given[-1]

    with pytest.raises(ConfigurationError, match="open transaction"):
        kind(connect=connect)
    assert [connection.closed for connection in given] == [True]


def test_a_role_without_grants_is_told_what_gives_them(
    make_owner: MakeOwner, db: psycopg.Connection[Any], own_schema: str, conninfo: str, name: str
) -> None:
    """At the start, and where they are taken away later: nothing is sent, and what was sent waits to be marked."""
    role = f"{name}_ungranted"
    db.execute(f'CREATE ROLE "{role}" LOGIN'.encode())
    theirs, command = as_role(conninfo, role), rf"lacks grants.*exactly-once migrate --schema {own_schema} --role NAME"
    with pytest.raises(FilterUnavailable, match=command):
        Store(theirs, schema=own_schema)
    db.execute(grants(own_schema, role))
    made = PostgresWindow(make_owner(conninfo=theirs, schema=own_schema), scope="t", seconds=WINDOW_SECONDS)
    nowhere = {"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 300, "log_level": 0}
    producer = DedupProducer(nowhere, dedup=made)
    sent = producer.produce("t", b"x", dedup_key=1)
    db.execute(f'REVOKE ALL ON ALL TABLES IN SCHEMA "{own_schema}" FROM "{role}"'.encode())
    with pytest.raises(FilterUnavailable, match=command):
        made.reserve(2)
    with pytest.raises(OutcomeUnknown):
        sent.result(60)
    assert producer._topics["t"].in_flight.keys() == {1}
    db.execute(grants(own_schema, role))
    until(lambda: producer.poll() or not producer._topics["t"].in_flight, 60, "the mark")
    assert made.reserve_many([1, 2]) == [State.UNKNOWN, State.NEW]
    producer.close()


def test_what_runs_on_a_connection_without_autocommit_lasts(
    conninfo: str, db: psycopg.Connection[Any], name: str
) -> None:
    store = Store(connect=lambda: psycopg.connect(conninfo))
    store.run("publish_scope", name=name)
    assert db.execute("SELECT FROM exactly_once.publish_scope WHERE name = %s", [name]).rowcount == 1
    store.close()


def test_a_connection_that_gives_no_text_is_refused(conninfo: str) -> None:
    """The names of chains would come back as bytes, and every number be new."""
    with pytest.raises(ConfigurationError, match="client_encoding=UTF8"):
        Store(connect=lambda: psycopg.connect(conninfo, client_encoding="SQL_ASCII"))


def test_the_threads_of_an_owner_outlive_every_error(
    make_owner: MakeOwner, db: psycopg.Connection[Any], own_schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without them a process that lives would be taken over, and its messages be sent twice."""
    asked = [0]

    def ends() -> dict[str, dict[int, int]]:
        asked[0] += 1
        if asked[0] in (2, 3):
            raise RuntimeError("as of the caller's own code")
        return {"t": {0: asked[0]}}

    def told(action: str) -> int:
        return [getattr(record, "action", "") for record in caplog.records].count(action)

    owner = make_owner(positions=ends, lease_seconds=0.6, schema=own_schema)
    table = f'ALTER TABLE "{own_schema}".publish_owner'
    until(lambda: asked[0] > 4, 20, "a third look at the ends, after two that failed")
    assert told("positions_stay") == 1
    db.execute(f"{table} RENAME TO away".encode())
    try:
        until(lambda: told("lease_not_renewed") == 1, 20, "an error that is no lost connection")
    finally:
        db.execute(f'ALTER TABLE "{own_schema}".away RENAME TO publish_owner'.encode())
    renewed = owner._renewed_at
    until(lambda: owner._renewed_at > renewed, 20, "a renewal")
    assert [thread.is_alive() for thread in owner._threads] == [True, True]


@pytest.mark.parametrize("seconds", [float("nan"), 1e12])
def test_a_lease_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="lease_seconds="):
        PublishOwner("host=127.0.0.1 port=1", lease_seconds=seconds)


def test_an_owner_that_is_closed_is_not_called_fenced(make_owner: MakeOwner) -> None:
    window = PostgresWindow(make_owner(), scope=uuid4().hex, seconds=WINDOW_SECONDS)
    window.owner.close()
    with pytest.raises(ConfigurationError, match="is closed"):
        window.reserve("a")


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_an_exclusive_name_is_exclusive_whatever_the_roles_isolation(
    conninfo: str, db: psycopg.Connection[Any], isolation: str
) -> None:
    """Two owners of an exclusive name: the second one waits for the first, and does not see it."""
    name, options = uuid4().hex, f"-c default_transaction_isolation={isolation.replace(' ', chr(92) + ' ')}"

    def connect() -> psycopg.Connection[Any]:
        return psycopg.connect(conninfo, options=options)

    with psycopg.connect(conninfo) as first, ThreadPoolExecutor(1) as pool:
        lock = "SELECT pg_advisory_xact_lock(hashtext('exactly_once.publish_owner'), hashtext(%s))"
        first.execute(lock, [name])
        starting = pool.submit(PublishOwner, connect=connect, name=name, exclusive=True)
        waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        until(lambda: starting.done() or db.execute(waits).fetchone() == (1,), 30, "the second to wait, or its refusal")
        first.execute(
            "INSERT INTO exactly_once.publish_owner (id, name, lease_until) "
            "VALUES ((random() * 1e15)::int8, %s, clock_timestamp() + interval '1 minute')",
            [name],
        )
        first.commit()
        with pytest.raises(NameTaken):
            starting.result(60).close()
