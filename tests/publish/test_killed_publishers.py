"""Publishers of each kind, killed at random moments while a replica lags; ``tests.publish.killing`` does more of it."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from exactly_once import embedded
from exactly_once.embedded.kafka import Kafka
from exactly_once.ledger.migrate import migrate
from tests.publish.killing import BROKER, kill_all
from tests.support.seeds import first_seed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_kind_of_publisher_is_exact_when_it_is_killed(own_servers: None, tmp_path: Path) -> None:
    with Kafka(brokers=3, properties=BROKER) as kafka, embedded.Postgres() as postgres:
        with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
            migrate(connection)
        verdicts = kill_all(kafka, postgres.conninfo, tmp_path, kills=2, seed=first_seed())
    assert [verdict for verdict in verdicts if not verdict.is_right] == []
