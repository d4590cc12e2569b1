"""Fixtures of the publish side: the filters that the conformance suite runs against."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import KafkaError

from exactly_once.embedded.kafka import Kafka
from exactly_once.ledger.migrate import migrate
from exactly_once.publish import (
    Link,
    Outcome,
    PostgresChain,
    PostgresWindow,
    PublishOwner,
    ShardedWindow,
    SharedSlotFilter,
    Store,
    TransactionalProducer,
)
from exactly_once.publish.publisher import ToSend
from tests.publish.subjects import BAD_KEYS, BAD_LINKS, IN_MEMORY, ON_SERVERS, Subject, as_bytes
from tests.support.kafka_proxy import KafkaProxy
from tests.support.memcached import Memcached, missing_memcached
from tests.support.require import skip_unless
from tests.support.topics import create_topic

WINDOW_SECONDS = 3600.0
# The last one has no room in an index of Postgres.
BAD_NAMES = tuple(Link(chain, 1) for chain in ("a\0b", "caf\udce9", "\u00e9" * 513))

MakeOwner = Callable[..., PublishOwner]


@pytest.fixture(params=[*IN_MEMORY, *(pytest.param(name, marks=pytest.mark.postgres) for name in ON_SERVERS)])
def subject(request: pytest.FixtureRequest) -> Subject:
    """Every filter in turn."""
    if request.param in IN_MEMORY:
        return IN_MEMORY[request.param]
    found: Subject = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def kafka(bootstrap_servers: str) -> dict[str, Any]:
    """Settings of a client."""
    return {"bootstrap.servers": bootstrap_servers}


@pytest.fixture
def topic(bootstrap_servers: str, name: str) -> str:
    """A topic of two partitions."""
    return create_topic(bootstrap_servers, 2, name=name)


@pytest.fixture
def make_owner(conninfo: str) -> Iterator[MakeOwner]:
    """Make owners; they are closed after the test."""
    made: list[PublishOwner] = []

    def make(**options: Any) -> PublishOwner:
        if "connect" not in options:
            options.setdefault("conninfo", conninfo)
        made.append(PublishOwner(**options))
        return made[-1]

    yield make
    for owner in made:
        owner.close()


@pytest.fixture
def own_schema(conninfo: str, name: str) -> str:
    """A schema of the test's own: windows of another length, or a clock that is moved."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        migrate(connection, name)
    return name  # it stays: its owners end after this


@pytest.fixture
def postgres_window(make_owner: MakeOwner) -> Subject:
    """Keys in Postgres."""

    def make() -> PostgresWindow:
        return PostgresWindow(make_owner(), scope=uuid4().hex, seconds=WINDOW_SECONDS)

    return Subject(make, as_bytes, BAD_KEYS)


@pytest.fixture
def sharded_window(make_owner: MakeOwner, own_schema: str) -> Subject:
    """Keys in two places that take turns as databases would."""

    def make() -> ShardedWindow:
        scope = uuid4().hex
        windows = {
            "a": PostgresWindow(make_owner(schema=own_schema), scope=scope, seconds=WINDOW_SECONDS),
            "b": PostgresWindow(make_owner(schema=own_schema), scope=scope + "b", seconds=WINDOW_SECONDS),
        }
        return ShardedWindow(windows, version=1)

    return Subject(make, as_bytes, BAD_KEYS)


@pytest.fixture
def store(conninfo: str) -> Iterator[Store]:
    """A connection of filters to Postgres."""
    made = Store(conninfo)
    yield made
    made.close()


@pytest.fixture(scope="session")
def memcached() -> Iterator[Memcached]:
    """A real memcached."""
    skip_unless("memcached", missing_memcached())
    with Memcached() as server:
        yield server


@pytest.fixture
def memcached_slots(memcached: Memcached) -> Iterator[Subject]:
    """Shared slots in memcached."""
    made: list[SharedSlotFilter] = []

    def make() -> SharedSlotFilter:
        made.append(SharedSlotFilter(memcached.address, prefix=uuid4().hex, slots=1 << 32, timeout_seconds=60))
        return made[-1]

    yield Subject(make, as_bytes, BAD_KEYS)
    for each in made:
        each.close()


@pytest.fixture
def postgres_chain(store: Store) -> Subject:
    """Dense chains in a table; each filter that is made begins another one."""
    chains = [""]

    def make() -> PostgresChain:
        chains.append(uuid4().hex)
        return PostgresChain(store)

    return Subject(make, lambda n: Link(chains[-1], n), (*BAD_LINKS[:-4], *BAD_NAMES))


@pytest.fixture(scope="session")
def proxy_and_broker(own_servers: None) -> Iterator[KafkaProxy]:
    """A broker whose clients all come through a proxy."""
    with KafkaProxy() as proxy, Kafka(properties={"advertised.listeners": proxy.listener}) as kafka:
        proxy.upstream = kafka.port()
        yield proxy


@pytest.fixture
def proxied_broker(proxy_and_broker: KafkaProxy) -> Iterator[KafkaProxy]:
    """The same, with no fault left armed."""
    yield proxy_and_broker
    proxy_and_broker.disarm()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait five seconds for the end of a transaction, and for all before it as long as it takes.

    A limit for the whole of it would be over before the end is asked for, where the machine stands still for a moment.
    """
    commit_all = TransactionalProducer._commit_all

    def commit(self: TransactionalProducer, to_send: Sequence[ToSend], _: float) -> tuple[Outcome, KafkaError | None]:
        self._client.flush(60)
        return commit_all(self, to_send, time.monotonic() + 5)

    monkeypatch.setattr(TransactionalProducer, "_commit_all", commit)
