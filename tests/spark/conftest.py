"""Fixtures of the tests with a real Spark: one session for all of them, and topics to read."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from tests.support.require import skip_unless
from tests.support.waiting import SPARK_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.attempts import Place
    from tests.spark.scene import Scene

HERE = Path(__file__).parent
# The one that is left says why it is skipped.
collect_ignore_glob = [] if importlib.util.find_spec("pyspark") else ["test_[!e]*.py", "test_ex*.py"]


def pytest_report_header() -> str:
    """Say which Spark the tests will meet."""
    return f"Spark {importlib.metadata.version('pyspark')}" if importlib.util.find_spec("pyspark") else "no Spark"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give Spark time, for it takes seconds where others take milliseconds, and let it forget to close sockets."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(2 * SPARK_SECONDS))


@pytest.fixture(scope="session")
def needs_spark() -> None:
    """Skip where Spark cannot be had, or fail where it is required."""
    from exactly_once.embedded import EmbeddedError, spark  # noqa: PLC0415  (not before it is asked for)

    reason = None
    try:
        spark.environment()
        spark.kafka_source()
    except EmbeddedError as error:
        reason = str(error)
    skip_unless("spark", reason)


@pytest.fixture(scope="session")
def spark(needs_spark: None) -> Iterator[SparkSession]:
    """A session in this process, with two task threads; a task that fails is tried again, as on a cluster."""
    from exactly_once.embedded import spark as embedded_spark  # noqa: PLC0415  (not before it is asked for)

    before = signal.getsignal(signal.SIGINT)
    with embedded_spark.session("tests", master="local[2,4]") as session:
        signal.signal(signal.SIGINT, before)  # PySpark's handler asks the JVM, in forked children of other tests, too
        yield session


@pytest.fixture(scope="session")
def journaled(conninfo: str) -> str:
    """A Postgres with our schema and an empty journal."""
    from tests.support import journal  # noqa: PLC0415

    journal.create(conninfo)
    return conninfo


@pytest.fixture
def place(conninfo: str, name: str, db: psycopg.Connection[Any]) -> Iterator[Place]:
    """A table of offsets and the group that writes it, for tasks that are called without Spark."""
    from tests.spark.attempts import Place  # noqa: PLC0415  (imports pyarrow)

    db.execute(f'CREATE TABLE {name} (partition int NOT NULL, "offset" bigint NOT NULL)')
    place = Place(conninfo, name)
    yield place
    place.close()
    db.execute(f"DROP TABLE {name}")


@pytest.fixture
def scene(spark: SparkSession, bootstrap_servers: str, journaled: str, tmp_path: Path) -> Scene:
    """A topic of two partitions, to be written into the journal."""
    from tests.spark.scene import Scene  # noqa: PLC0415  (imports pyspark)

    return Scene(spark, bootstrap_servers, journaled, tmp_path)
