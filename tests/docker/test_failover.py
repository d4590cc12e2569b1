"""The primary is lost and its standby promoted: with synchronous replication nothing goes back, without it all does.

Workers find the new primary by a connection string with both hosts and `target_session_attrs=read-write`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, LiteralString, NamedTuple

import psycopg
import pytest

from exactly_once.ledger.migrate import migrate
from tests.docker.conftest import INSIDE, tell
from tests.support.docker import Stack
from tests.support.docker_worker import ContainerWorker
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import Crew

PARTITIONS = 3
MESSAGES = 600
LONG = 120
SLOW: dict[str, Any] = {"options": {"max_messages": 20}, "handler_seconds": 0.3}
BOTH = "postgresql://postgres@primary:5432,standby:5432/postgres?target_session_attrs=read-write&connect_timeout=2"
"""The documented connection string, as a worker has it."""


class Pair:
    """A primary and its standby, new for each test."""

    def __init__(self, cluster: Stack) -> None:
        self._cluster = cluster
        ports = cluster.ports["PRIMARY_PORT"], cluster.ports["STANDBY_PORT"]
        self.standby = cluster.conninfo("STANDBY_PORT")
        self.conninfo = (
            f"postgresql://postgres@127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/postgres"
            "?target_session_attrs=read-write&connect_timeout=2"
        )

    def ask(self, port: str, statement: LiteralString) -> Any:
        """Ask one of the two."""
        with psycopg.connect(self._cluster.conninfo(port), autocommit=True) as connection:
            cursor = connection.execute(statement)
            row = cursor.fetchone() if cursor.description else None
            return row[0] if row else None

    def replicate_synchronously(self) -> None:
        """Have each COMMIT wait for the standby."""
        self.ask("PRIMARY_PORT", "ALTER SYSTEM SET synchronous_standby_names = 'standby'")
        self.ask("PRIMARY_PORT", "SELECT pg_reload_conf()")
        query: LiteralString = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        until(lambda: self.ask("PRIMARY_PORT", query), 30, "a synchronous standby")

    def stop_replicating(self) -> None:
        """Have the standby fall behind: what is committed from now on will be lost with the primary."""
        self.ask("STANDBY_PORT", "ALTER SYSTEM SET primary_conninfo = ''")
        self.ask("STANDBY_PORT", "SELECT pg_reload_conf()")
        query: LiteralString = "SELECT count(*) = 0 FROM pg_stat_replication"
        until(lambda: self.ask("PRIMARY_PORT", query), 30, "the replication to end")

    def lose_primary(self) -> None:
        """Kill the primary; it will not come back."""
        self._cluster["primary"].kill()

    def promote(self) -> None:
        """Make the standby a primary."""
        assert self.ask("STANDBY_PORT", "SELECT pg_promote(true, 60)")


@pytest.fixture
def pair(cluster: Stack) -> Iterator[Pair]:
    """A primary with our schema and a standby that has it too; the next test finds a new pair."""
    pair = Pair(cluster)
    with psycopg.connect(pair.conninfo, autocommit=True) as connection:
        migrate(connection)
    yield pair
    cluster.renew("primary", volumes=["primary"])
    cluster.renew("standby", volumes=["standby"])


@pytest.fixture
def topic(bootstrap_servers: str) -> str:
    """A topic with messages."""
    topic = create_topic(bootstrap_servers, PARTITIONS, replication=3)
    produce(bootstrap_servers, topic, MESSAGES, PARTITIONS)
    return topic


@pytest.fixture
def crew(cluster: Stack, pair: Pair, bootstrap_servers: str, name: str, topic: str) -> Iterator[Crew]:
    """A crew whose workers know both databases."""
    launch = partial(ContainerWorker, cluster)
    ways: dict[str, Any] = {"kafka": INSIDE, "workers_conninfo": BOTH, "launch": launch}
    with Crew(bootstrap_servers, pair.conninfo, name, [topic], **ways) as crew:
        yield crew
        tell(crew)


def test_synchronous_standby_has_everything_that_was_committed(pair: Pair, crew: Crew, topic: str) -> None:
    pair.replicate_synchronously()
    worker = crew.start(**SLOW)
    crew.until_applied(120, LONG)
    before = crew.applied()
    pair.lose_primary()
    assert _stored(pair, topic).offsets >= before
    pair.promote()
    crew.reconnect()
    crew.until_applied(MESSAGES, LONG)
    worker.term()
    assert worker.finish()["rewound"] == 0
    crew.assert_exact()


@pytest.mark.fault("B11")
def test_lagging_standby_lost_effects_and_offsets_together(
    pair: Pair, crew: Crew, topic: str, bootstrap_servers: str
) -> None:
    """The worker notices that the ledger is behind what it committed, and makes the lost effects again."""
    worker = crew.start(**SLOW)
    crew.until_applied(60, LONG)
    pair.stop_replicating()
    replicated = crew.applied()
    # Meanwhile the worker may have applied all that there was.
    produce(bootstrap_servers, topic, 900, PARTITIONS, start=MESSAGES)
    crew.until_applied(replicated + 100, LONG)
    before = crew.applied()
    pair.lose_primary()
    stored = _stored(pair, topic)
    assert stored.offsets == stored.entries == stored.counter
    assert stored.entries < before
    pair.promote()
    crew.reconnect()
    worker.wait("redelivered", LONG)
    crew.until_applied(MESSAGES + 900, LONG)
    worker.term()
    assert worker.finish()["rewound"] > 0
    crew.assert_exact()


@pytest.mark.fault("B23")
def test_change_of_owners_that_the_standby_lost(pair: Pair, crew: Crew, topic: str) -> None:
    """After the failover the frozen first worker is the owner again by token and epoch, and the second one is not."""
    zombie = crew.start(**SLOW)
    crew.until_applied(60, LONG)
    pair.stop_replicating()
    zombie.stop()
    heir = crew.start(**SLOW)
    until(lambda: crew.owners() == {heir.name: PARTITIONS}, LONG, "the second worker to own every row")
    crew.until_applied(180, LONG)
    pair.lose_primary()
    assert _stored(pair, topic).owner == zombie.name
    pair.promote()
    crew.reconnect()
    zombie.cont()
    crew.until_applied(MESSAGES, LONG)
    crew.end_well(zombie, heir)
    crew.assert_exact()


class Stored(NamedTuple):
    """What a database has of one topic."""

    offsets: int
    entries: int
    counter: int
    owner: str


def _stored(pair: Pair, topic: str) -> Stored:
    """Look into the standby, in one snapshot, before anybody can write to it."""
    query = """
        SELECT (SELECT sum(next_offset)::int FROM exactly_once.ledger WHERE topic = %(topic)s),
               (SELECT count(*)::int FROM journal.entries WHERE topic = %(topic)s),
               (SELECT total::int FROM journal.counter WHERE topic = %(topic)s),
               (SELECT string_agg(DISTINCT owner_name, ' ') FROM exactly_once.ledger WHERE topic = %(topic)s)
    """
    with psycopg.connect(pair.standby) as connection:
        row = connection.execute(query, {"topic": topic}).fetchone()
    assert row is not None
    return Stored(*row)
