"""Fixtures of all tests: real servers, and names that no other test uses."""

from __future__ import annotations

import gc
import itertools
import logging
import signal
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from exactly_once import ExactlyOnceConsumer, _failpoints
from exactly_once.ledger.migrate import migrate
from tests.support.leaks import census, left_since, watch_connections

pytest_plugins = [
    "exactly_once.embedded.pytest_plugin",
    "tests.support.scheduling",
    "tests.support.seeds",
    "tests.support.tiers",
]

# A shell starts what runs in its background with SIGINT ignored, and children inherit that; tests send it to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

PROTOCOLS: dict[str, dict[str, Any]] = {
    "eager": {"partition.assignment.strategy": "range"},
    "cooperative": {"partition.assignment.strategy": "cooperative-sticky"},
    "consumer": {"group.protocol": "consumer"},
}
"""The three rebalance protocols, as settings of the client."""

_LOGGERS = (None, "exactly_once", "spark_sink")

MakeConsumer = Callable[..., ExactlyOnceConsumer]


watch_connections()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test that leaves Kafka clients, threads or connections behind; set up before what the test asks for."""

    def forget_errors() -> None:
        # A record of the log keeps an error, that keeps its frames, and those keep what the test had.
        for record in (record for when in ("setup", "call") for record in caplog.get_records(when)):
            record.msg, record.args, record.exc_info = record.getMessage(), None, None

    before = census()
    yield
    if request.node.get_closest_marker("spark"):
        return  # a session keeps the functions that its queries called, with all that these hold, until it ends
    if left := left_since(before, forget_errors):
        pytest.fail(f"the test left something behind: {left}", pytrace=False)


@pytest.fixture(scope="session")
def own_servers() -> None:
    """Say that a test starts servers of its own, or has them started by a program."""


@pytest.fixture(scope="session")
def bootstrap_servers(exactly_once_kafka: str) -> str:
    """A real broker."""
    return exactly_once_kafka


@pytest.fixture(scope="session")
def postgres_conninfo(exactly_once_postgres: str) -> str:
    """A real Postgres, without our schema."""
    return exactly_once_postgres


@pytest.fixture(scope="session")
def conninfo(postgres_conninfo: str) -> str:
    """A real Postgres with our schema."""
    with psycopg.connect(postgres_conninfo, autocommit=True) as connection:
        migrate(connection)
    return postgres_conninfo


@pytest.fixture
def name() -> str:
    """A name for topic, group and table that no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of each rebalance protocol in turn."""
    return PROTOCOLS[request.param]


@pytest.fixture
def db(conninfo: str) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """A plain connection, for looking and for interfering."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        yield connection


@pytest.fixture
def make_consumer(bootstrap_servers: str, conninfo: str, name: str) -> Iterator[MakeConsumer]:
    """Make consumers of group ``name``; they are closed after the test.

    ``make_consumer(kafka_settings, **options)``; both may be left out, ``conninfo`` can be replaced.
    """
    made: list[ExactlyOnceConsumer] = []
    numbers = itertools.count(1)

    def make(kafka: dict[str, Any] | None = None, /, **options: Any) -> ExactlyOnceConsumer:
        if "connect" not in options:
            options.setdefault("conninfo", conninfo)
        options.setdefault("name", f"{name}-{next(numbers)}")
        settings = {"bootstrap.servers": bootstrap_servers, "group.id": name, **(kafka or {})}
        made.append(ExactlyOnceConsumer(settings, **options))
        return made[-1]

    yield make
    for consumer in made:
        consumer.close()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for those answers of Kafka that the library does without where they take longer: tests look at them."""
    monkeypatch.setattr("exactly_once.consumer.consumer.CLOSE_SECONDS", 120.0)
    for limit in (
        "consumer.consumer._GOODBYE_SECONDS",
        "consumer.maintenance._COMMITTED_SECONDS",
        "consumer.startup._LAGGING_SECONDS",
        "consumer.units._HIDDEN_SECONDS",
        "kafka.admin._QUICK_SECONDS",
    ):
        monkeypatch.setattr(f"exactly_once.{limit}", 60.0)


@pytest.fixture(autouse=True)
def _nothing_stays_armed() -> Iterator[None]:
    yield
    _failpoints.disarm()


@pytest.fixture(autouse=True)
def _no_interrupt_is_lost() -> None:
    """Hypothesis times the collector by a callback of its own; what a signal's handler raises there is only printed."""
    gc.callbacks.clear()


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was() -> Iterator[None]:
    """A command that is run in this process sets up the log of a process that is its own."""
    before = [(log, log.level, log.propagate, log.handlers[:]) for log in map(logging.getLogger, _LOGGERS)]
    yield
    for log, level, propagate, handlers in before:
        log.setLevel(level)
        log.propagate, log.handlers[:] = propagate, handlers
