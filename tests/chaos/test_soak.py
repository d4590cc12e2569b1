"""The soak in CI: about a minute of random faults; more with EXACTLY_ONCE_SOAK_SECONDS."""

from __future__ import annotations

import os

import psycopg
import pytest

from exactly_once.embedded import Kafka, Postgres
from exactly_once.schema import migrate
from tests.chaos.soak import PARTITIONS, Soak, show
from tests.support.proxy import PostgresProxy
from tests.support.seeds import VARIABLE, first_seed
from tests.support.topics import create_topic
from tests.support.worker import Crew

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("EXACTLY_ONCE_SOAK_SECONDS", "60"))


@pytest.mark.usefixtures("own_servers")
@pytest.mark.timeout(SECONDS * 2 + 300)
def test_soak_loses_and_doubles_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Servers of its own: others' tests need theirs unbroken."""
    seed = first_seed()
    with capsys.disabled():
        print(f"\nsoak: {VARIABLE}={seed}, {SECONDS:g} s", flush=True)
    with Kafka() as kafka, Postgres() as postgres:
        with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
            migrate(connection)
        topic = create_topic(kafka.bootstrap_servers, PARTITIONS)
        with (
            PostgresProxy(postgres.conninfo) as proxy,
            Crew(
                kafka.bootstrap_servers,
                postgres.conninfo,
                name,
                [topic],
                # A frozen unit may hold what a living one needs: nobody gets on before the latter has left the group.
                kafka={"max.poll.interval.ms": 10_000},
                workers_conninfo=proxy.conninfo,
            ) as crew,
        ):
            verdict = Soak(seed=seed, kafka=kafka, postgres=postgres, topic=topic, crew=crew, proxy=proxy).run(SECONDS)
    with capsys.disabled():
        print(show(verdict), flush=True)
    assert verdict["exact"], show(verdict)
