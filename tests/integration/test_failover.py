"""A standby of Postgres that is promoted, with a worker there to see it and without; workers sent to the wrong one."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
import tenacity

from exactly_once import (
    ExactlyOnceConsumer,
    Fenced,
    LedgerRewound,
    OffsetsNotAdopted,
    ReadOnly,
    Redelivered,
    Unit,
    embedded,
)
from exactly_once._model import Partition
from exactly_once.consumer import maintenance
from exactly_once.ledger.rows import Ledger
from exactly_once.ledger.session import Connection, Session, connector
from tests.conftest import MakeConsumer
from tests.integration.scene import apply as apply_unit
from tests.support import journal
from tests.support.standby import Pair, ask, primary_and_standby
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import drain, record

pytestmark = pytest.mark.usefixtures("unhurried")

MESSAGES = 40


class Way:
    """How a consumer gets to the database: to the server that is the primary now, as a name or a proxy would lead."""

    def __init__(self, server: embedded.Postgres) -> None:
        self.server = server

    def __call__(self) -> Connection:
        return connector(self.server.conninfo)()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both running."""
    with primary_and_standby() as pair:
        yield pair


def apply(consumer: ExactlyOnceConsumer, topic: str, messages: int) -> int:
    """Apply about so many messages, and return how many there were."""
    done = 0
    with consumer:
        consumer.subscribe([topic])
        for unit in consumer.units(until_end=True):
            with unit:
                done += len(unit.messages)
            if done >= messages:
                break
    return done


@pytest.mark.fault("B11", "B12", more=True)
def test_lost_commits_are_told_and_the_old_primary_is_refused(
    *,
    make_consumer: MakeConsumer,
    pair: Pair,
    bootstrap_servers: str,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    primary, standby = pair
    create_topic(bootstrap_servers, 1, name=name)
    produce(bootstrap_servers, name, MESSAGES, 1)
    assert apply(make_consumer(conninfo=primary.conninfo, max_messages=10), name, 10) == 10
    until(pair.is_streaming, 30, "a standby that has everything")
    standby.stop()
    assert apply(make_consumer(conninfo=primary.conninfo, max_messages=10), name, 20) == 20
    primary.stop("immediate")
    standby.start()
    with psycopg.connect(standby.conninfo, autocommit=True) as connection:
        assert connection.execute("SELECT pg_promote()").fetchone() == (True,)
    caplog.clear()
    consumer = make_consumer(conninfo=standby.conninfo, max_messages=10)
    assert apply(consumer, name, 10) == 10
    assert consumer.counters.rewound == 1
    assert f"{name}[0]: Kafka holds offset 30, the ledger is at 10" in caplog.text
    # The old primary is back and takes writes. It has applied more than the new one, and is the wrong one nevertheless.
    primary.start()
    with pytest.raises(OffsetsNotAdopted, match="the server here is the old primary") as refused:
        apply(make_consumer(conninfo=primary.conninfo), name, 10)
    assert f"127.0.0.1:{primary.port}" in str(refused.value)
    assert apply(make_consumer(conninfo=standby.conninfo), name, MESSAGES) == MESSAGES - 20


@pytest.mark.fault("B13", more=True)
def test_worker_at_a_standby_does_not_start_and_at_both_hosts_finds_the_primary(
    make_consumer: MakeConsumer, pair: Pair, bootstrap_servers: str, name: str
) -> None:
    create_topic(bootstrap_servers, 1, name=name)
    with pytest.raises(ReadOnly, match=rf"127\.0\.0\.1:{pair.standby.port}/postgres takes no writes"):
        make_consumer(conninfo=pair.standby.conninfo, startup_seconds=1).subscribe([name])
    make_consumer(conninfo=pair.conninfo, startup_seconds=30).subscribe([name])


@pytest.fixture
def topic(bootstrap_servers: str, name: str, pair: Pair) -> str:
    """A topic with messages, called as the group; the primary has a journal."""
    create_topic(bootstrap_servers, 1, name=name)
    produce(bootstrap_servers, name, MESSAGES, 1)
    journal.create(pair.primary.conninfo)
    return name


@pytest.fixture
def at_the_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rows that changed found where a unit advances them; what looks at them now and then may come before that."""
    for limit in ("RECHECK_SECONDS", "COMPARE_SECONDS"):
        monkeypatch.setattr(maintenance, limit, 600.0)


def stored(server: embedded.Postgres) -> tuple[int, int, int]:
    """Return the ledger's offset, the number of effects and the counter, in one snapshot."""
    query = """
        SELECT (SELECT sum(next_offset)::int FROM exactly_once.ledger), (SELECT count(*)::int FROM journal.entries),
               (SELECT sum(total)::int FROM journal.counter)
    """
    with psycopg.connect(server.conninfo) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    return row


@pytest.mark.fault("B11")
@pytest.mark.parametrize("is_acquired_since", [False, True])
@pytest.mark.usefixtures("at_the_advance")
def test_a_running_consumer_makes_the_effects_again_that_a_promoted_standby_lacks(
    *, make_consumer: MakeConsumer, pair: Pair, bootstrap_servers: str, topic: str, is_acquired_since: bool
) -> None:
    way = Way(pair.primary)
    consumer = make_consumer(connect=way, max_messages=10)
    consumer.subscribe([topic])
    units = iter(consumer)
    apply_unit(next(units))
    pair.fall_behind()
    if is_acquired_since:  # so the new primary has neither the offsets nor this owner
        consumer.close()
        consumer = make_consumer(connect=way, max_messages=10)
        consumer.subscribe([topic])
        units = iter(consumer)
    apply_unit(next(units))
    apply_unit(next(units))
    assert stored(pair.primary) == (30, 30, 30)
    assert stored(pair.standby) == (10, 10, 10), "effects and offset went back together"
    pair.fail_over()
    way.server = pair.standby
    errors = []
    while not consumer.counters.rewound:
        with pytest.raises(Redelivered) as raised:
            apply_unit(next(units))
        errors.append(raised.type)
    assert errors[-1] is LedgerRewound
    before = consumer.counters.messages
    drain(consumer)
    assert consumer.counters.messages - before == MESSAGES - 10, "the lost ones came again"
    verdict = journal.check(pair.standby.conninfo, bootstrap_servers, topic)
    assert verdict.exact, str(verdict)


def test_run_tells_of_lost_commits_whatever_it_waited_for_before(
    make_consumer: MakeConsumer, pair: Pair, bootstrap_servers: str, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Waits are told at the tries 1, 2, 4, ...; that commits were lost is told at any."""
    way, refused = Way(pair.primary), []

    def connect() -> Connection:
        """Lead to the new primary from the third try on, so that none of those which are told finds what is lost."""
        try:
            return way()
        except psycopg.OperationalError as error:
            refused.append(error)
            if len(refused) == 2:
                way.server = pair.standby
            raise

    consumer = make_consumer(connect=connect, max_messages=10)
    consumer.subscribe([topic])
    calls: list[Unit] = []

    def handler(unit: Unit) -> None:
        calls.append(unit)
        if len(calls) == 2:
            pair.fall_behind()
        if len(calls) == 4:
            assert stored(pair.primary) == (30, 30, 30)
            pair.fail_over()
        record(unit, "test")

    consumer.run(handler, until_end=True, wait=tenacity.wait_fixed(0.01))
    told = [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "rewound"]
    assert len(told) == 1
    assert f"{topic}[0]" in told[0]
    assert consumer.counters.rewound == 1
    verdict = journal.check(pair.standby.conninfo, bootstrap_servers, topic)
    assert verdict.exact, str(verdict)


@pytest.mark.fault("B23")
@pytest.mark.usefixtures("at_the_advance")
def test_an_epoch_that_a_failover_gives_out_again_does_not_let_its_former_owner_in(
    make_consumer: MakeConsumer, pair: Pair, bootstrap_servers: str, topic: str
) -> None:
    """Epoch and offset of the zombie are those of the new owner; only the token tells them apart."""
    first = make_consumer(connect=Way(pair.primary), max_messages=10)
    assert apply(first, topic, 10) == 10
    pair.fall_behind()
    way = Way(pair.primary)
    zombie = make_consumer(connect=way, max_messages=10)
    zombie.subscribe([topic])
    units = iter(zombie)
    unit = next(units)
    row = "SELECT row(owner_epoch, next_offset) FROM exactly_once.ledger"
    token = "SELECT owner_token FROM exactly_once.ledger"
    held, held_token = ask(pair.primary, row), ask(pair.primary, token)
    assert held != ask(pair.standby, row), "the standby has seen the acquisition"
    with pytest.raises(Redelivered), unit:
        pair.fail_over()
        way.server = pair.standby
        record(unit, "zombie")
    # A member whose acquisition is the first that the new primary sees. Kafka gives the zombie no reason to doubt.
    session = Session(connector(pair.standby.conninfo), schema="exactly_once")
    Ledger(session, group_id=topic, owner_kind="consumer").acquire([Partition(topic, 0)])
    session.close()
    assert ask(pair.standby, row) == held, "the same epoch at the same offset"
    assert ask(pair.standby, token) != held_token
    with pytest.raises(Fenced), next(units) as again:
        record(again, "zombie")
    assert ask(pair.standby, "SELECT count(*) FROM journal.entries WHERE worker = 'zombie'") == 0
    drain(zombie)
    assert journal.counted(pair.standby.conninfo, topic) == MESSAGES - 10


@pytest.mark.fault("B13")
def test_a_running_consumer_that_is_led_to_a_standby_waits_for_the_primary(
    make_consumer: MakeConsumer, pair: Pair, bootstrap_servers: str, topic: str
) -> None:
    way = Way(pair.primary)
    consumer = make_consumer(connect=way, max_messages=10)
    consumer.subscribe([topic])
    units = iter(consumer)
    apply_unit(next(units))
    way.server = pair.standby
    ask(pair.primary, f"SELECT pg_terminate_backend({consumer._session.connection.info.backend_pid}, 10000)")
    causes = []
    for _ in range(3):
        with pytest.raises(Redelivered) as raised:
            apply_unit(next(units))
        causes.append(type(raised.value.__cause__))
    assert psycopg.errors.ReadOnlySqlTransaction in causes
    way.server = pair.primary
    drain(consumer)
    verdict = journal.check(pair.primary.conninfo, bootstrap_servers, topic)
    assert verdict.exact, str(verdict)
