"""The spark profile: the sink on a standalone cluster whose workers are killed while they write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, LiteralString

import psycopg
import pytest

from exactly_once.embedded import EmbeddedError
from exactly_once.embedded import spark as embedded_spark
from exactly_once.ledger.migrate import migrate
from tests.support import journal
from tests.support.docker import Container, Stack, docker, stack
from tests.support.require import skip_unless
from tests.support.topics import create_topic, produce
from tests.support.waiting import until

PARTITIONS = 2
MESSAGES = 2000
LONG = 240
WORKERS = ("spark-worker-1", "spark-worker-2")
PROGRAM = "/opt/exactly-once/copy_topic.py"
WAIT = """
    ALTER TABLE journal.entries ALTER worker SET DEFAULT 'spark';
    CREATE FUNCTION journal.wait() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END';
    CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON journal.entries
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION journal.wait();
"""
"""A COMMIT waits while somebody has the lock."""
HOLD: dict[str, LiteralString] = {
    "writing": "LOCK TABLE journal.entries IN SHARE ROW EXCLUSIVE MODE",
    "committing": "SELECT pg_advisory_xact_lock(1)",
}
"""What has the sink's transactions stand still before their first row, or when COMMIT has been sent."""


@pytest.fixture(scope="module")
def spark(engine: None) -> Iterator[Stack]:
    """A master and two workers beside a broker and a database with an empty journal."""
    try:
        embedded_spark.kafka_source()
    except EmbeddedError as error:
        skip_unless("docker", str(error))
    services = ["kafka", "postgres", "spark-master", *WORKERS]
    ports = ["KAFKA_PORT", "POSTGRES_PORT", "SPARK_PORT", "SPARK_UI_PORT"]
    with stack("minimal,spark", services, ports) as running:
        conninfo = running.conninfo("POSTGRES_PORT")
        with psycopg.connect(conninfo, autocommit=True) as connection:
            migrate(connection)
        journal.create(conninfo)
        with psycopg.connect(conninfo) as connection:
            connection.execute(WAIT)
        yield running


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transaction", ["batch", "partition"])
def test_workers_that_are_killed_while_they_write_lose_and_double_nothing(spark: Stack, transaction: str) -> None:
    """One before its first row is written, then one whose COMMIT goes through without it.

    Each is started again; the second time one of the two writes and the other is its heir, so that both work again.
    """
    bootstrap_servers, conninfo = spark.bootstrap_servers("KAFKA_PORT"), spark.conninfo("POSTGRES_PORT")
    topic = create_topic(bootstrap_servers, PARTITIONS)
    with copying(spark, topic, transaction), psycopg.connect(conninfo, autocommit=True) as looking:
        for before, moment in ((0, "writing"), (MESSAGES, "committing")):
            with psycopg.connect(conninfo) as holding:
                holding.execute(HOLD[moment])
                produce(bootstrap_servers, topic, MESSAGES, PARTITIONS, start=before)
                victim = kill_one_that_writes(spark, looking)
                assert written(looking, topic) == before
            everything = before + MESSAGES
            until(lambda: written(looking, topic) == everything, LONG, f"{everything} to be written")  # noqa: B023
            victim.start()
            victim.until_ready()
    verdict = journal.check(conninfo, bootstrap_servers, topic, counts=False)
    assert verdict.messages == 2 * MESSAGES
    assert verdict.exact, verdict


def test_the_image_has_the_data_source_where_spark_looks_for_it(spark: Stack) -> None:
    find = (
        "import sys, glob; sys.path[:0] = ['/opt/spark/python', *glob.glob('/opt/spark/python/lib/*.zip')]; "
        "from pyspark_exactly_once import DefaultSource; print(DefaultSource.name())"
    )
    assert spark["spark-master"].execute("python3", "-c", find).strip() == "exactly_once_postgres"


@contextlib.contextmanager
def copying(spark: Stack, topic: str, transaction: str) -> Iterator[None]:
    """Run the query of the README until the end of the block, by a driver in a container of its own."""
    master = spark["spark-master"]
    driver = Container(f"{spark.project}-driver-{transaction}")
    jars = embedded_spark.kafka_source()
    place = ["--name", driver.name, "--network", spark.network, "--volumes-from", master.name]
    place += ["--volume", f"{jars[0].parent}:/kafka-source:ro", master.image]
    submit = ["/opt/spark/bin/spark-submit", "--master", "spark://spark-master:7077", "--executor-memory", "512m"]
    for process in ("driver", "executor"):
        submit += ["--conf", f"spark.{process}.extraJavaOptions=-XX:+UseSerialGC -XX:TieredStopAtLevel=1"]
    submit += ["--jars", ",".join(f"/kafka-source/{jar.name}" for jar in jars)]
    # What tasks do is what is tested, also of few messages.
    query = [PROGRAM, topic, "journal.entries", "--group-id", topic, "--transaction", transaction, "--small-batch", "0"]
    docker("run", "--detach", *place, *submit, *query)
    try:
        yield
    except Exception as error:
        error.add_note(driver.log())
        raise
    finally:
        docker("rm", "--force", driver.name)


def kill_one_that_writes(spark: Stack, looking: psycopg.Connection[Any]) -> Container:
    """Kill a worker whose transaction stands still; return it when one of the other worker does, too."""
    workers = {spark[worker].address(): spark[worker] for worker in WORKERS}

    def writing() -> set[str]:
        query = """
            SELECT host(client_addr) FROM pg_stat_activity
            WHERE application_name LIKE 'exactly_once:%' AND wait_event_type = 'Lock'
        """
        return {address for (address,) in looking.execute(query)} & set(workers)

    one = until(writing, LONG, "a worker to write").pop()
    workers[one].kill()
    until(lambda: writing() - {one}, LONG, "the other worker to write")
    return workers[one]


def written(looking: psycopg.Connection[Any], topic: str) -> int:
    """Tell how many messages were written according to the ledger; each log starts at 0."""
    query = "SELECT coalesce(sum(next_offset), 0)::int FROM exactly_once.ledger WHERE group_id = %s"
    row = looking.execute(query, [topic]).fetchone()
    return row[0] if row else 0
