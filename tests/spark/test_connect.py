"""The sink over Spark Connect: the client has no JVM, and Spark tells no query id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from exactly_once.embedded.ports import free_port
from tests.support import journal
from tests.support.require import lacking, skip_unless
from tests.support.spark import Driver
from tests.support.topics import create_topic, produce

pytestmark = pytest.mark.slow

Client = Callable[..., Driver]


@pytest.fixture(scope="module")
def server(needs_spark: None) -> Iterator[int]:
    """The port of a server."""
    missing = lacking("grpc", "grpc_status")
    skip_unless("spark-connect", f"{missing} not installed; pip install 'pyspark[connect]'" if missing else None)
    port = free_port()
    with Driver("-m", "tests.spark.connect", "serve", str(port)) as process:
        process.wait("serving")
        yield port


@pytest.fixture
def client(server: int, bootstrap_servers: str, journaled: str, name: str, tmp_path: Path) -> Client:
    """Make a client that writes this test's topic."""
    create_topic(bootstrap_servers, 2, name=name)
    produce(bootstrap_servers, name, 1000, 2)

    def make(*options: str) -> Driver:
        where = (str(server), bootstrap_servers, journaled, name, str(tmp_path))
        return Driver("-m", "tests.spark.connect", "run", *where, *options)

    return make


@pytest.mark.parametrize(
    "options", [["small_batch=0"], ["small_batch=1000"], ["small_batch=0", "transaction=partition"]]
)
def test_the_sink_writes_each_message_once(
    client: Client, options: list[str], bootstrap_servers: str, journaled: str, name: str
) -> None:
    with client(*options) as running:
        assert running.wait_ended() == 0, running.story()
    verdict = journal.check(journaled, bootstrap_servers, name, counts=False)
    assert verdict.messages == 1000
    assert verdict.exact, str(verdict)


def test_the_sink_makes_its_table(client: Client, name: str, db: psycopg.Connection[Any]) -> None:
    with client(f"table={name}_made", "create_table=1", "evolve=add-columns") as running:
        assert running.wait_ended() == 0, running.story()
    counted = f"SELECT count(*), count(DISTINCT value), count(DISTINCT worker) FROM {name}_made"
    assert db.execute(counted).fetchone() == (1000, 1000, 1)
    db.execute(f"DROP TABLE {name}_made")


def test_a_sink_that_cannot_find_the_checkpoint_is_refused_with_what_mends_it(client: Client) -> None:
    with client("checkpoint_location=") as running:
        assert running.wait_ended() == 1, running.story()
        said = running.logged()
    assert "as over Spark Connect" in said
    assert "give checkpoint_location=" in said


def test_the_checkpoint_of_another_query_is_refused(client: Client, name: str, db: psycopg.Connection[Any]) -> None:
    """Its batches are others, so that messages would count as written that no batch of this query has brought."""
    with client("other") as running:
        assert running.wait_ended() == 1, running.story()
        said = running.logged()
    assert "belongs to query" in said
    found = db.execute("SELECT count(*) FROM exactly_once.ledger WHERE group_id = %s", (f"{name}-2",)).fetchone()
    assert found == (0,)
