"""Fixtures of the tests on containers; each test ends with the same check, the journal against a fresh scan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from exactly_once.ledger.migrate import migrate
from tests.chaos.conftest import MakeCrew
from tests.support.docker import Stack, compose_command, docker, engine_missing, stack
from tests.support.docker_worker import ContainerWorker, worker_image_missing
from tests.support.require import skip_unless
from tests.support.worker import Crew

BROKERS = ("kafka-1", "kafka-2", "kafka-3")
BROKER_PORTS = ("KAFKA_1_PORT", "KAFKA_2_PORT", "KAFKA_3_PORT")
INSIDE = {"bootstrap.servers": ",".join(f"{broker}:19092" for broker in BROKERS)}
DIRECT = "postgresql://postgres@primary:5432/postgres"
POOLED = "postgresql://postgres@pgbouncer:6432/postgres"
"""How workers in containers get to the servers."""

_images: set[str] = set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the first test of a stack the time to start it, on a busy machine."""
    for item in items:
        if "tests/docker/" in item.nodeid and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1800))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what the tests ran on."""
    if _images:
        terminalreporter.write_line(f"{compose_command()} ran {', '.join(sorted(_images))}")


@pytest.fixture(scope="session")
def engine() -> None:
    """An engine, or the reason why there is none."""
    skip_unless("docker", engine_missing())


@pytest.fixture(autouse=True)
def _remember_images(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if {"cluster", "prometheus", "secured", "spark", "versions"} & set(request.fixturenames):
        _images.update(docker("ps", "--format", "{{.Image}}").split())


@pytest.fixture(scope="session")
def cluster(engine: None) -> Iterator[Stack]:
    """Three brokers, a primary and its standby, a pooler, a cache."""
    skip_unless("docker", worker_image_missing())
    services = [*BROKERS, "primary", "standby", "pgbouncer", "memcached"]
    ports = [*BROKER_PORTS, "PRIMARY_PORT", "STANDBY_PORT", "PGBOUNCER_PORT", "MEMCACHED_PORT"]
    with stack("cluster", services, ports) as running:
        yield running


@pytest.fixture
def bootstrap_servers(cluster: Stack) -> str:
    """The three brokers, from this machine."""
    return cluster.bootstrap_servers(*BROKER_PORTS)


@pytest.fixture
def conninfo(cluster: Stack) -> str:
    """The primary, from this machine, with our schema."""
    primary = cluster.conninfo("PRIMARY_PORT")
    with psycopg.connect(primary, autocommit=True) as connection:
        migrate(connection)
    return primary


@pytest.fixture(params=[DIRECT, POOLED], ids=["direct", "pooled"])
def way(request: pytest.FixtureRequest) -> str:
    """The workers' way to the database: straight, and through a pooler in transaction mode."""
    return str(request.param)


def coordinator_of(bootstrap_servers: str, group: str) -> str:
    """The broker that leads a group."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    described = admin.describe_consumer_groups([group])[group].result(60)
    return f"kafka-{described.coordinator.id}"


def tell(crew: Crew) -> None:
    """Print what became of the workers; it is seen where the test fails."""
    for worker in crew.workers:
        print(worker.story())


@pytest.fixture
def make_crew(cluster: Stack, bootstrap_servers: str, conninfo: str, name: str) -> Iterator[MakeCrew]:
    """Make a crew whose workers are containers; the test itself looks from this machine."""
    with ExitStack() as exits:

        def make(*topics: str, **options: Any) -> Crew:
            options.setdefault("workers_conninfo", POOLED)
            options["kafka"] = {**INSIDE, **options.get("kafka", {})}
            launch = partial(ContainerWorker, cluster)
            crew = exits.enter_context(Crew(bootstrap_servers, conninfo, name, topics, launch=launch, **options))
            exits.callback(tell, crew)
            return crew

        yield make
