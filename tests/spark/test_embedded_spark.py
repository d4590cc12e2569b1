"""The embedded Spark runs the Kafka source and Python workers, and leaves no process behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from exactly_once.embedded import jars
from exactly_once.embedded import spark as embedded_spark
from tests.support.topics import create_topic, produce

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def test_a_stream_of_a_topic_reaches_python_workers(
    spark: SparkSession, bootstrap_servers: str, tmp_path: Path
) -> None:
    from tests.support.spark import drain, read_topic  # noqa: PLC0415

    topic = create_topic(bootstrap_servers, 2)
    produce(bootstrap_servers, topic, 10, 2)
    seen: list[tuple[int, int]] = []

    def sink(frame: DataFrame, _: int) -> None:
        copied = frame.select("partition", "offset").mapInArrow(lambda batches: batches, "partition int, offset long")
        seen.extend((row.partition, row.offset) for row in copied.collect())

    drain(read_topic(spark, bootstrap_servers, topic), sink, tmp_path / "checkpoint")
    assert sorted(seen) == [(p, o) for p in range(2) for o in range(5)]


def test_a_session_has_the_classes_that_an_earlier_one_has_parsed(spark: SparkSession) -> None:
    if sys.platform != "linux" or embedded_spark._archive() is None:
        pytest.skip("only Linux tells which files a process has mapped, and only Java 17 takes the archive")
    java = cast("Any", spark.sparkContext)._gateway.proc.pid
    mapped = Path(f"/proc/{java}/maps").read_text()
    assert str(jars.cache_directory() / "spark-classes") in mapped


@pytest.mark.parametrize(
    ("release", "taken"),
    [
        ('JAVA_VERSION="17.0.15"\nMODULES="java.base jdk.incubator.vector"\n', "the installed"),
        ('IMPLEMENTOR="x"\nJAVA_VERSION="21"\nMODULES="jdk.incubator.vector"\n', "the installed"),
        ('JAVA_VERSION="25.0.1"\nMODULES="java.base jdk.incubator.vector"\n', "the fetched"),
        ('JAVA_VERSION="1.8.0_402"\n', "the fetched"),
        ('JAVA_VERSION="21.0.8"\nMODULES="java.base"\n', "the fetched"),
        (None, "the fetched"),
    ],
    ids=["17", "21", "25, which Hadoop does not run on", "8", "without a module of Spark's", "none"],
)
def test_an_installed_java_is_taken_if_it_runs_spark(
    release: str | None, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if release is not None:
        (tmp_path / "release").write_text(release)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fetched = jars.cache_directory() / embedded_spark._JAVA_PACKAGE.replace("==", "-")
    fetched.mkdir(parents=True)
    assert embedded_spark.java_home() == {"the installed": tmp_path}.get(taken, fetched)


@pytest.mark.usefixtures("needs_spark")
def test_the_java_that_is_fetched_takes_what_spark_says_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.setenv("PATH", "")
    java = embedded_spark.java_home() / "bin" / "java"
    command = [
        str(java),
        "--add-modules=jdk.incubator.vector",
        "-Dtwo=two words",
        "-XshowSettings:properties",
        "-version",
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr
    assert "two = two words" in told
    assert "java.specification.version = 21" in told
