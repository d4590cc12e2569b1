"""A standby of Postgres, promoted while no worker was there to see it; and workers that are sent to the wrong one."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from exactly_once import ExactlyOnceConsumer, ReadOnly, StartRefused
from tests.conftest import MakeConsumer
from tests.support.standby import Pair, primary_and_standby
from tests.support.topics import create_topic, produce
from tests.support.waiting import until

MESSAGES = 40


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
    assert f"{name}[0]: Kafka was told offset 30, the ledger is at 10" in caplog.text
    # The old primary is back and takes writes. It has applied more than the new one, and is the wrong one nevertheless.
    primary.start()
    with pytest.raises(StartRefused, match="the server here is the old primary") as refused:
        apply(make_consumer(conninfo=primary.conninfo), name, 10)
    assert f"127.0.0.1:{primary.port}" in str(refused.value)
    assert apply(make_consumer(conninfo=standby.conninfo), name, MESSAGES) == MESSAGES - 20


def test_worker_at_a_standby_does_not_start_and_at_both_hosts_finds_the_primary(
    make_consumer: MakeConsumer, pair: Pair, bootstrap_servers: str, name: str
) -> None:
    create_topic(bootstrap_servers, 1, name=name)
    with pytest.raises(ReadOnly, match=rf"127\.0\.0\.1:{pair.standby.port}/postgres takes no writes"):
        make_consumer(conninfo=pair.standby.conninfo, startup_seconds=1).subscribe([name])
    both = (
        f"postgresql://postgres@127.0.0.1:{pair.standby.port},127.0.0.1:{pair.primary.port}/postgres"
        "?target_session_attrs=read-write"
    )
    make_consumer(conninfo=both, startup_seconds=30).subscribe([name])
