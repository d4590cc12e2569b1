"""The minimal profile with servers of several versions: its README works, and the heir of a killed worker finishes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg
import pytest
from confluent_kafka import Producer

from exactly_once.cli import main
from exactly_once.ledger.migrate import migrate
from tests.conftest import PROTOCOLS
from tests.support.docker import FOLDER, Stack, local_image, stack
from tests.support.topics import create_topic, produce
from tests.support.worker import Crew

MESSAGES = 600


class Versions(NamedTuple):
    """A pair of servers as local images, and the protocol by which workers share a group on them."""

    kafka: str
    postgres: str
    protocol: str

    @property
    def official(self) -> dict[str, str]:
        """The official images of the same versions."""
        older = {"KAFKA_IMAGE": "apache/kafka:3.9.1"} if self.kafka == "kafka:older" else {}
        return older | {"POSTGRES_IMAGE": self.postgres}


PAIRS = [
    Versions("kafka:older", "postgres:14", "cooperative"),
    Versions("kafka:older", "postgres:15", "eager"),
    Versions("kafka:current", "postgres:16", "consumer"),
    Versions("kafka:current", "postgres:17", "cooperative"),
]
"""The other tests run the current Kafka with 18 (the cluster) and 15 (TLS)."""


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: f"{pair.kafka}-{pair.postgres}")
def pair(request: pytest.FixtureRequest) -> Versions:
    """Each pair in turn."""
    chosen: Versions = request.param
    return chosen


@pytest.fixture(scope="module")
def versions(engine: None, pair: Versions) -> Iterator[Stack]:
    """A broker and a Postgres of these versions."""
    local = local_image("KAFKA_IMAGE", pair.kafka) | local_image("POSTGRES_IMAGE", pair.postgres)
    with stack("minimal", ["kafka", "postgres"], ["KAFKA_PORT", "POSTGRES_PORT"], pair.official | local) as running:
        yield running


def test_killed_worker_has_an_heir_that_finishes(versions: Stack, pair: Versions, name: str) -> None:
    bootstrap_servers, conninfo = versions.bootstrap_servers("KAFKA_PORT"), versions.conninfo("POSTGRES_PORT")
    with psycopg.connect(conninfo, autocommit=True) as connection:
        migrate(connection)
        assert str(connection.info.server_version // 10_000) == pair.postgres.removeprefix("postgres:")
    topic = create_topic(bootstrap_servers, 3)
    produce(bootstrap_servers, topic, MESSAGES, 3)
    options: dict[str, Any] = {"max_messages": 50}
    with Crew(bootstrap_servers, conninfo, name, [topic], kafka=PROTOCOLS[pair.protocol]) as crew:
        crew.start(options=options, failpoint=["advanced", "kill", 3]).wait_exit()
        crew.start(options=options, until_end=True).finish()
        assert None not in [row[0] for row in crew.look("SELECT topic_id FROM exactly_once.ledger WHERE group_id = %s")]
        crew.assert_exact()


def test_commands_of_the_readme_copy_a_topic_into_a_table(versions: Stack) -> None:
    bootstrap_servers, conninfo = versions.bootstrap_servers("KAFKA_PORT"), versions.conninfo("POSTGRES_PORT")
    _produce_payments(bootstrap_servers)
    text = (FOLDER / "README.md").read_text("utf-8")
    text = text.replace("localhost:9092", bootstrap_servers)
    text = text.replace("postgresql://postgres@localhost/postgres", conninfo)
    commands = re.findall(r"^    exactly-once (.*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert main(command.split()) == 0
    with psycopg.connect(conninfo) as connection:
        rows = connection.execute("SELECT id::int, amount::text FROM payment ORDER BY id").fetchall()
    assert rows == [(number, f"{number}.50") for number in range(MESSAGES)]


def _produce_payments(bootstrap_servers: str) -> None:
    create_topic(bootstrap_servers, 3, name="payments")
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for number in range(MESSAGES):
        producer.produce("payments", f'{{"id": {number}, "amount": {number}.50}}'.encode())
    assert producer.flush(60) == 0
