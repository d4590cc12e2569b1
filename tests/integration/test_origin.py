"""Which database told Kafka an offset: two databases, a copy, an old primary, lost commits, and the way on."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition
from psycopg import sql

from exactly_once import ExactlyOnceConsumer, OffsetsNotAdopted
from exactly_once.cli import main
from exactly_once.consumer import maintenance
from exactly_once.consumer.kafka_offsets import KafkaOffsets
from exactly_once.kafka.origin import Origin, origin_of
from exactly_once.ledger import migrate, rows
from exactly_once.ledger.rows import Ledger
from exactly_once.ledger.session import Session, connector, execute, hiding
from tests.conftest import MakeConsumer
from tests.support.roles import as_role
from tests.support.topics import create_topic, produce
from tests.support.waiting import until

PARTITIONS = 2
MESSAGES = 40

Db = psycopg.Connection[Any]
pytestmark = pytest.mark.usefixtures("unhurried")


@pytest.fixture
def topic(bootstrap_servers: str, name: str) -> str:
    """A topic with messages, called as the group."""
    create_topic(bootstrap_servers, PARTITIONS, name=name)
    produce(bootstrap_servers, name, MESSAGES, PARTITIONS)
    return name


@pytest.fixture
def databases(conninfo: str, name: str) -> Iterator[Callable[[str | None], str]]:
    """Make databases beside the tests' own, each with a schema or as a copy of another; return how to reach one."""
    made: list[str] = []

    def make(original: str | None = None) -> str:
        made.append(f"{name}_{len(made)}")
        template = psycopg.conninfo.conninfo_to_dict(original)["dbname"] if original else "template1"
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
        db.execute(statement.format(sql.Identifier(made[-1]), sql.Identifier(str(template))))
        reached = psycopg.conninfo.make_conninfo(conninfo, dbname=made[-1])
        if original is None:
            with psycopg.connect(reached, autocommit=True) as connection:
                migrate.migrate(connection)
        return reached

    with psycopg.connect(conninfo, autocommit=True) as db:
        yield make
        for database in made:
            db.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database)))


def apply(consumer: ExactlyOnceConsumer, topic: str, messages: int | None = None) -> int:
    """Subscribe and apply to the end, or so many messages; close, and return how many there were."""
    done = 0
    with consumer:
        consumer.subscribe([topic])
        for unit in consumer.units(until_end=True):
            with unit:
                done += len(unit.messages)
            if messages is not None and done >= messages:
                break
    return done


def told(bootstrap_servers: str, group: str) -> dict[int, tuple[int, Origin | None]]:
    """What Kafka holds, and who told it."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": group})
    answer = consumer.committed([TopicPartition(group, n) for n in range(PARTITIONS)], timeout=60)
    consumer.close()
    return {tp.partition: (tp.offset, origin_of(tp.metadata)) for tp in answer if tp.offset >= 0}


def reset(conninfo: str, topic: str) -> None:
    """Decide that this database is the one that goes on, as the error says."""
    arguments = ["reset", "--topic", topic, "--to-current", "--execute", "--conninfo", conninfo, "--group-id", topic]
    assert main(arguments) == 0


@pytest.mark.fault("B12")
def test_two_fresh_databases_notice_each_other(
    *,
    make_consumer: MakeConsumer,
    databases: Callable[..., str],
    bootstrap_servers: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has a partition before there is a message, and none of them moves."""
    monkeypatch.setattr(maintenance, "COMPARE_SECONDS", 0.3)
    create_topic(bootstrap_servers, PARTITIONS, name=name)
    refused: list[OffsetsNotAdopted] = []
    consumers = [make_consumer(conninfo=databases()) for _ in range(2)]

    def work(consumer: ExactlyOnceConsumer) -> None:
        try:
            with consumer:
                consumer.subscribe([name])
                consumer.run(lambda unit: None)
        except OffsetsNotAdopted as error:
            refused.append(error)

    threads = [threading.Thread(target=work, args=[consumer]) for consumer in consumers]
    for thread in threads:
        thread.start()
    until(lambda: all(len(c.health().owned) == 1 for c in consumers), 60, "a partition for each")
    produce(bootstrap_servers, name, MESSAGES, PARTITIONS)
    until(lambda: refused, 60, "a refusal")
    for consumer, thread in zip(consumers, threads, strict=True):
        consumer.stop()
        thread.join(60)
    assert "another database: the messages of one group go to two" in str(refused[0])
    assert f" --topic {name} --to-current" in str(refused[0])


def test_of_many_partitions_a_part_is_compared_each_time(
    make_consumer: MakeConsumer, databases: Callable[..., str], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new ones always: a copy is refused at the start, however few of the others are looked at."""
    monkeypatch.setattr(maintenance, "_COMPARED_AT_MOST", 0)
    original = databases()
    assert apply(make_consumer(conninfo=original, max_messages=5), topic, 10) == 10
    copy = databases(original)
    assert apply(make_consumer(conninfo=original), topic) == MESSAGES - 10
    with pytest.raises(OffsetsNotAdopted, match="a copy of this database that went on"):
        apply(make_consumer(conninfo=copy), topic)


def test_copy_is_refused_once_its_original_has_gone_on(
    *, make_consumer: MakeConsumer, databases: Callable[..., str], bootstrap_servers: str, topic: str
) -> None:
    """And goes on where an operator says so; then the original is refused."""
    original = databases()
    assert apply(make_consumer(conninfo=original, max_messages=5), topic, 10) == 10
    copy = databases(original)
    assert apply(make_consumer(conninfo=original), topic) == MESSAGES - 10
    for _ in range(2):
        with pytest.raises(OffsetsNotAdopted, match="a copy of this database that went on"):
            apply(make_consumer(conninfo=copy), topic)
    reset(copy, topic)
    assert apply(make_consumer(conninfo=copy), topic) == MESSAGES - 10
    assert apply(make_consumer(conninfo=copy), topic) == 0
    produce(bootstrap_servers, topic, 10, PARTITIONS, start=MESSAGES)
    assert apply(make_consumer(conninfo=copy), topic) == 10
    with pytest.raises(OffsetsNotAdopted, match="a copy of this database that went on"):
        apply(make_consumer(conninfo=original), topic)


def test_database_that_was_moved_goes_on_by_itself(
    *, make_consumer: MakeConsumer, databases: Callable[..., str], bootstrap_servers: str, topic: str
) -> None:
    """By dump and restore while nobody worked: an ordinary migration needs no command."""
    original = databases()
    assert apply(make_consumer(conninfo=original), topic) == MESSAGES
    produce(bootstrap_servers, topic, 10, PARTITIONS, start=MESSAGES)
    moved = databases(original)
    assert apply(make_consumer(conninfo=moved), topic) == 10
    servers = {origin.server for _, origin in told(bootstrap_servers, topic).values() if origin}
    with psycopg.connect(moved) as connection:
        (oid,) = connection.execute("SELECT oid FROM pg_database WHERE datname = current_database()").fetchone() or (0,)
    assert {str(server).split(".")[1] for server in servers} == {str(oid)}


def test_old_primary_is_refused(
    make_consumer: MakeConsumer, databases: Callable[..., str], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka was told by a later timeline of the same server. The timeline is a stand-in: docker/ has real failovers."""
    conninfo = databases()
    real = Ledger.origin

    def promoted(ledger: Ledger) -> Origin:
        origin = real(ledger)
        return Origin(origin.ledger_id, origin.server, (origin.timeline or 0) + 1)

    with monkeypatch.context() as later:
        later.setattr(Ledger, "origin", promoted)
        assert apply(make_consumer(conninfo=conninfo), topic) == MESSAGES
    with pytest.raises(OffsetsNotAdopted, match="the server here is the old primary"):
        apply(make_consumer(conninfo=conninfo), topic)


@pytest.mark.fault("B11", more=True)
def test_commits_that_were_lost_while_the_group_was_down_are_told(
    *,
    make_consumer: MakeConsumer,
    databases: Callable[..., str],
    topic: str,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not as an error: effects and offsets went back together. An operator's reset is none of it."""
    conninfo = databases()
    apply(make_consumer(conninfo=conninfo), topic)
    with psycopg.connect(conninfo, autocommit=True) as db:
        db.execute("UPDATE exactly_once.ledger SET next_offset = 4 WHERE group_id = %s", (name,))
    caplog.clear()
    consumer = make_consumer(conninfo=conninfo)
    assert apply(consumer, topic) == MESSAGES - 4 * PARTITIONS
    assert consumer.counters.rewound == PARTITIONS
    (record, _) = [r for r in caplog.records if getattr(r, "action", "") == "rewound"]
    assert record.levelno == logging.WARNING
    assert "lost commits" in record.getMessage()
    with psycopg.connect(conninfo, autocommit=True) as db:
        db.execute("UPDATE exactly_once.ledger SET next_offset = 4, moved_at = now() WHERE group_id = %s", (name,))
    consumer = make_consumer(conninfo=conninfo)
    assert apply(consumer, topic) == MESSAGES - 4 * PARTITIONS
    assert consumer.counters.rewound == 0


def test_mirrored_offset_that_comes_late_is_no_reason_to_refuse(
    *,
    make_consumer: MakeConsumer,
    databases: Callable[..., str],
    bootstrap_servers: str,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process that is killed has not told Kafka its last units."""
    conninfo = databases()
    apply(make_consumer(conninfo=conninfo, max_messages=5), topic, 10)
    before = told(bootstrap_servers, topic)
    with monkeypatch.context() as killed:
        killed.setattr(KafkaOffsets, "send", lambda *_, **__: None)
        apply(make_consumer(conninfo=conninfo, max_messages=5), topic, 10)
    assert told(bootstrap_servers, topic) == before
    consumer = make_consumer(conninfo=conninfo)
    assert apply(consumer, topic) == MESSAGES - 20
    assert consumer.counters.rewound == 0
    assert "lost commits" not in caplog.text


def test_worker_without_privileges_tells_its_database_from_others(
    *, make_consumer: MakeConsumer, databases: Callable[..., str], bootstrap_servers: str, topic: str, name: str
) -> None:
    conninfo = databases()
    role = f"{name}_worker"
    with psycopg.connect(conninfo, autocommit=True) as db:
        db.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        db.execute(migrate.as_sql(role=role).split("-- What a worker's role needs", 1)[1].split("\n", 1)[1].encode())
    own = as_role(conninfo, role)
    try:
        assert apply(make_consumer(conninfo=own), topic) == MESSAGES
        (origin,) = {origin for _, origin in told(bootstrap_servers, topic).values()}
        assert origin is not None
        assert origin.server is not None
        assert origin.timeline is not None
    finally:
        with psycopg.connect(conninfo, autocommit=True) as db:
            db.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
            db.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def test_role_that_may_not_ask_the_server_still_knows_its_ledger(
    databases: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """Some hardened servers revoke what is everybody's."""
    conninfo = databases()
    role = f"r{uuid4().hex[:8]}"
    with psycopg.connect(conninfo, autocommit=True) as db:
        db.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        db.execute("REVOKE EXECUTE ON FUNCTION pg_control_system FROM PUBLIC")
        grants = sql.SQL("GRANT USAGE ON SCHEMA exactly_once TO {0}; GRANT SELECT ON exactly_once.version TO {0}")
        db.execute(grants.format(sql.Identifier(role)))
    session = Session(connector(as_role(conninfo, role)), schema="exactly_once")
    ledger = Ledger(session, group_id="g", owner_kind="consumer")
    origins = {ledger.origin() for _ in range(2)}
    session.close()
    with psycopg.connect(conninfo, autocommit=True) as db:
        db.execute("GRANT EXECUTE ON FUNCTION pg_control_system TO PUBLIC")
        db.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
        db.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))
    (origin,) = origins
    assert origin.server is None
    assert caplog.text.count("cannot be distinguished from it") == 1


def test_coordinator_that_does_not_answer_keeps_nobody_from_work(
    make_consumer: MakeConsumer, databases: Callable[..., str], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is made up for. A time-out of no time stands for a coordinator that is slow."""
    conninfo = databases()
    with make_consumer(conninfo=conninfo) as consumer:
        consumer.subscribe([topic])
        done = 0
        with monkeypatch.context() as slow:
            slow.setattr(maintenance, "_COMMITTED_SECONDS", 0.0)
            for unit in consumer.units(until_end=True):
                with unit:
                    done += len(unit.messages)
        assert done == MESSAGES

        def has_compared() -> bool:
            consumer.health()
            next(iter(consumer.units(idle_seconds=0.1)), None)
            return any(h.compared_epoch == h.epoch for h in consumer._ownership.states.values())

        until(has_compared, 20, "a comparison")


@pytest.mark.parametrize("refusal", [psycopg.errors.ObjectNotInPrerequisiteState, psycopg.errors.FeatureNotSupported])
def test_a_server_that_never_says_which_one_it_is_is_told_by_its_ledger(
    refusal: type[psycopg.Error],
    conninfo: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stand-in for managed servers: none that runs here refuses its superuser."""
    session = Session(connector(conninfo), schema="exactly_once")
    ledger = Ledger(session, group_id=name, owner_kind="consumer")
    asked = []

    def refusing(connection: Db, schema: str, query: str, **parts: Any) -> Any:
        asked.append(query)
        if query == "origin":
            raise refusal("wal_level must be set to logical")
        return execute(connection, schema, query, **parts)

    monkeypatch.setattr(rows, "execute", refusing)
    first, second = ledger.origin(), ledger.origin()
    assert first == second
    assert (first.ledger_id is not None, first.server, first.timeline) == (True, None, None)
    assert asked == ["origin", "ledger_id", "ledger_id"]
    assert [vars(each)["action"] for each in caplog.records] == ["origin_unknown"]
    session.close()


def test_the_sockets_of_a_function_notice_a_server_that_is_gone(conninfo: str) -> None:
    """As those of a connection string; what its maker has said stays."""
    for given, expected in (
        ("", (15, 5, 3, 30000)),
        ("keepalives_idle=7 tcp_user_timeout=9000", (7, 5, 3, 9000)),
    ):
        where = psycopg.conninfo.make_conninfo(given, **psycopg.conninfo.conninfo_to_dict(conninfo))
        made = Session(partial(psycopg.connect, where, host="127.0.0.1"), schema="exactly_once")
        with socket.socket(fileno=os.dup(made.connection.fileno())) as side:
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            found = tuple(side.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
        made.close()
        assert found == expected


def test_a_connection_needs_no_home_directory(conninfo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services run under numbers that no password file has."""

    def home() -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    connector(conninfo)().close()


def test_a_function_may_give_a_connection_that_is_closed(conninfo: str) -> None:
    """Its first use says so, and the next one is asked for."""
    closed = connector(conninfo)()
    closed.close()
    assert hiding(lambda: closed)() is closed
