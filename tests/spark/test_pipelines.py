"""Declarative pipelines, which know no foreachBatch: a sink of one is the data source."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest
from packaging.version import Version

from exactly_once.embedded import spark
from exactly_once.embedded.errors import package_directory
from tests.support.require import lacking, skip_unless

pytestmark = pytest.mark.slow

PIPELINE = """
from pyspark import pipelines
from pyspark.sql import SparkSession
from spark_sink import ExactlyOncePostgres

session = SparkSession.active()
session.dataSource.register(ExactlyOncePostgres)
pipelines.create_sink("orders_sink", "exactly_once_postgres", {options})


@pipelines.append_flow(target="orders_sink")
def orders():
    return session.readStream.schema("topic string, partition int, offset bigint").json("{source}")
"""


def reason() -> str | None:
    """Tell what pipelines would need."""
    if Version(spark.spark_version()) < Version("4.1"):
        return f"Spark {spark.spark_version()} has none, 4.1 has"
    missing = lacking("grpc", "grpc_status", "yaml", "zstandard")
    return f"{missing} not installed; pip install 'pyspark[pipelines]'" if missing else None


@pytest.mark.timeout(1200)
def test_a_declarative_pipeline_writes_into_a_sink_of_it(
    needs_spark: None, conninfo: str, name: str, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    skip_unless("spark-pipelines", reason())
    home = package_directory("pyspark")
    db.execute(f'CREATE TABLE {name} (topic text, partition int, "offset" bigint)')
    source = tmp_path / "input"
    source.mkdir()
    (source / "0.json").write_text("".join(f'{{"topic": "t", "partition": 0, "offset": {n}}}\n' for n in range(100)))
    options = {"conninfo": conninfo, "table": name, "groupId": name}
    (tmp_path / "orders.py").write_text(PIPELINE.format(options=options, source=source))
    spec = f"name: orders\nstorage: file://{tmp_path}/storage\nlibraries:\n  - glob:\n      include: orders.py\n"
    (tmp_path / "spark-pipeline.yml").write_text(spec)
    chosen = spark.environment()
    environment = {**os.environ, **chosen, "SPARK_HOME": str(home), "SPARK_SUBMIT_OPTS": chosen["SPARK_LAUNCHER_OPTS"]}
    for _ in range(2):
        command = [str(home / "bin" / "spark-pipelines"), "run"]
        done = subprocess.run(
            command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
        )
        # Not its exit code: 4.2.0 ends with UNKNOWN_RESPONSE behind a run that is complete.
        assert "Run is COMPLETED" in done.stdout + done.stderr, done.stdout + done.stderr
        look = f'SELECT count(*), count(DISTINCT "offset") FROM {name}'
        assert db.execute(look).fetchone() == (100, 100)
