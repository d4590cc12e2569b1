"""Session fixtures with a real Kafka and a real Postgres, for users' own tests.

Name it in a ``conftest.py``: ``pytest_plugins = ["exactly_once.embedded.pytest_plugin"]``. Each server
starts when a test first asks for it. To bring your own, set EXACTLY_ONCE_TEST_BOOTSTRAP_SERVERS or
EXACTLY_ONCE_TEST_CONNINFO: that server is then used and none is started in its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from .jars import KAFKA_VERSION
from .kafka import Kafka
from .postgres import Postgres
from .programs import server_version

_BOOTSTRAP_SERVERS = "EXACTLY_ONCE_TEST_BOOTSTRAP_SERVERS"
_CONNINFO = "EXACTLY_ONCE_TEST_CONNINFO"


@dataclass(frozen=True)
class TestServers:
    """Name the servers of a test session; *kafka* and *postgres* are None for those you brought."""

    __test__ = False  # a class of fixtures' values, not of tests

    bootstrap_servers: str
    conninfo: str
    kafka: Kafka | None
    postgres: Postgres | None


def pytest_report_header() -> str:
    """Say which servers the tests will meet."""
    # A connection string may hold a password: it is named, never shown.
    kafka, postgres = f"from {_BOOTSTRAP_SERVERS}", f"from {_CONNINFO}"
    if not os.environ.get(_BOOTSTRAP_SERVERS):
        kafka = f"{KAFKA_VERSION}, embedded"
    if not os.environ.get(_CONNINFO):
        postgres = f"{server_version()}, embedded"
    return f"servers: Kafka {kafka}; Postgres {postgres}"


# The objects have fixtures of their own, so that a test that asks for one server's address starts one server.


@pytest.fixture(scope="session")
def _embedded_kafka() -> Iterator[Kafka | None]:
    if os.environ.get(_BOOTSTRAP_SERVERS):
        yield None
        return
    with Kafka() as kafka:
        yield kafka


@pytest.fixture(scope="session")
def _embedded_postgres() -> Iterator[Postgres | None]:
    if os.environ.get(_CONNINFO):
        yield None
        return
    with Postgres() as postgres:
        yield postgres


@pytest.fixture(scope="session")
def exactly_once_kafka(_embedded_kafka: Kafka | None) -> str:
    """Return Kafka's bootstrap servers."""
    return _embedded_kafka.bootstrap_servers if _embedded_kafka else os.environ[_BOOTSTRAP_SERVERS]


@pytest.fixture(scope="session")
def exactly_once_postgres(_embedded_postgres: Postgres | None) -> str:
    """Return the conninfo of a Postgres superuser."""
    return _embedded_postgres.conninfo if _embedded_postgres else os.environ[_CONNINFO]


@pytest.fixture(scope="session")
def exactly_once_servers(
    exactly_once_kafka: str,
    exactly_once_postgres: str,
    _embedded_kafka: Kafka | None,
    _embedded_postgres: Postgres | None,
) -> TestServers:
    """Return both servers, with the objects that stop and break the embedded ones."""
    return TestServers(exactly_once_kafka, exactly_once_postgres, _embedded_kafka, _embedded_postgres)
