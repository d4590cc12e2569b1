"""The guides in docs/migrate: the program before, on real servers, then the one after it from the same place.

The programs before need packages that do not go together with this project's, so each has an environment of its own,
which is made for the test. That takes packages and jars from elsewhere: these tests run only where they are asked for.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from psycopg.conninfo import conninfo_to_dict

from benchmarks.rivals.connect import standalone
from exactly_once import BrokerUnreachable
from exactly_once.demo.spark_driver import jdbc
from exactly_once.embedded import spark
from exactly_once.kafka.admin import Cluster
from tests.docs.programs import ROOT, code, placed, run
from tests.support.require import VARIABLE, required_parts
from tests.support.topics import create_topic, produce

if "other-packages" not in required_parts():
    pytest.skip(f"packages are installed if {VARIABLE} names other-packages", allow_module_level=True)

CONSTRAINTS = Path(__file__).with_name("migrate-constraints.txt")
PARTITIONS = 3
MESSAGES = 60
"""So many for each of the two programs."""

PROGRAMS = {
    "confluent-kafka": ("docs/migrate/from-a-confluent-kafka-loop.md", 0, [], []),
    "faststream": ("docs/migrate/from-faststream.md", 0, ["faststream[kafka]"], []),
    "aiokafka": ("docs/migrate/from-faststream.md", 1, ["aiokafka"], []),
    "quix": ("docs/migrate/from-quix.md", 0, ["quixstreams"], []),
    "faust": ("docs/migrate/from-faust.md", 0, ["faust-streaming"], ["worker", "--without-web"]),
}
"""A page, which of its programs before, what that needs beside this project's environment, and its arguments."""


def environment(directory: Path, packages: list[str]) -> Path:
    """Install packages, and psycopg, into an environment of their own, and return its Python; else this one's."""
    if not packages:
        return Path(sys.executable)
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", str(CONSTRAINTS), "psycopg[binary]", *packages], check=True, timeout=300)
    return python


def committed(bootstrap_servers: str, group: str, topic: str) -> int:
    """Sum up the offsets that a group has committed."""
    try:
        found = Cluster({"bootstrap.servers": bootstrap_servers}).committed(group, topic, PARTITIONS)
    except BrokerUnreachable:  # the group is new, and its coordinator not ready
        return -1
    return sum(each.offset for each in found.values())


@pytest.mark.parametrize(("page", "number", "packages", "arguments"), PROGRAMS.values(), ids=PROGRAMS)
def test_program_goes_over_and_every_message_is_applied_once(
    *,
    page: str,
    number: int,
    packages: list[str],
    arguments: list[str],
    bank: psycopg.Connection[Any],
    bootstrap_servers: str,
    conninfo: str,
    name: str,
    tmp_path: Path,
) -> None:
    *befores, after = code(page, "python")
    python = environment(tmp_path / "venv", packages)
    create_topic(bootstrap_servers, PARTITIONS, name=name)
    old = befores[number], [str(python), "payments.py", *arguments], signal.SIGINT
    new = after, [sys.executable, "payments.py"], signal.SIGTERM
    for count, (program, command, how_to_stop) in enumerate([old, new], start=1):
        text = placed(program, bootstrap_servers, conninfo).replace('"payments"', f'"{name}"')
        (tmp_path / "payments.py").write_text(text.replace('"accounts"', f'"{name}"'))
        produce(bootstrap_servers, name, MESSAGES, PARTITIONS, start=(count - 1) * MESSAGES)

        def is_done(produced: int = count * MESSAGES) -> bool:
            (balance,) = bank.execute("SELECT balance FROM account WHERE id = 1").fetchone() or (-1,)
            return int(balance) == sum(range(produced)) and committed(bootstrap_servers, name, name) == produced

        status = run(command, is_done, how_to_stop, tmp_path)
    assert status == 0


def in_java(conninfo: str) -> str:
    """Write where a database is as JDBC does."""
    return "jdbc:postgresql://{host}:{port}/{dbname}?user={user}&password={password}".format(
        **conninfo_to_dict(conninfo)
    )


@pytest.fixture
def payment(db: psycopg.Connection[Any]) -> Any:
    """Make the table that sinks write, and yield a function that tells whether it has the first so many, once each."""
    db.execute("CREATE TABLE payment (amount bigint NOT NULL)")
    seen = "SELECT count(*), count(DISTINCT amount) FROM payment"
    yield lambda count: db.execute(seen).fetchone() == (count, count)
    db.execute("DROP TABLE payment")


def test_connector_goes_over_and_every_message_is_stored_once(
    payment: Callable[[int], bool], bootstrap_servers: str, conninfo: str, name: str, tmp_path: Path
) -> None:
    page = "docs/migrate/from-a-jdbc-sink-connector.md"
    (before,) = code(page, "json")
    after, _ = code(page, "sh")
    connector = json.loads(before.replace('"payments', f'"{name}'))
    found = conninfo_to_dict(conninfo)
    place = {"connection.username": found["user"], "connection.password": found["password"]}
    connector["config"] |= {**place, "connection.url": in_java(conninfo)}
    (tmp_path / "connector.json").write_text(json.dumps(connector))
    worker = [f"bootstrap.servers={bootstrap_servers}", f"offset.storage.file.filename={tmp_path / 'offsets'}"]
    converters = [f"{each}.converter=org.apache.kafka.connect.json.JsonConverter" for each in ("key", "value")]
    (tmp_path / "worker").write_text("\n".join([*worker, *converters, "listeners=http://127.0.0.1:0"]))
    start = standalone(tmp_path / "worker", tmp_path / "connector.json")
    words = placed(after, bootstrap_servers, conninfo).replace("payments", name)
    sink = [sys.executable, "-m", "exactly_once", *shlex.split(words)[1:]]
    create_topic(bootstrap_servers, PARTITIONS, name=name)
    schema = {"type": "struct", "fields": [{"field": "amount", "type": "int64"}]}
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for count, command in enumerate([start, sink], start=1):
        for amount in range((count - 1) * MESSAGES, count * MESSAGES):
            value = {"schema": schema, "payload": {"amount": amount}}
            producer.produce(name, json.dumps(value), partition=amount % PARTITIONS)
        assert producer.flush(60) == 0
        run(command, lambda: payment(count * MESSAGES), signal.SIGTERM, tmp_path)  # noqa: B023 - called at once
        group = f"connect-{name}-to-table"
        assert committed(bootstrap_servers, group, name) == count * MESSAGES


def test_query_goes_over_and_every_message_is_stored_once(
    *,
    payment: Callable[[int], bool],
    bootstrap_servers: str,
    conninfo: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, after = code("docs/migrate/from-spark-jdbc.md", "python")
    jars = ",".join(map(str, [*spark.kafka_source(), *jdbc()]))
    settings = ["spark.ui.enabled=false", "spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1"]
    options = ["--master", "local[2]", "--jars", jars, *(word for each in settings for word in ("--conf", each))]
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", shlex.join([*options, "pyspark-shell"]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    for variable, value in spark.environment().items():
        monkeypatch.setenv(variable, value)
    create_topic(bootstrap_servers, PARTITIONS, name=name)
    for count, program in enumerate([before, after], start=1):
        produce(bootstrap_servers, name, MESSAGES, PARTITIONS, start=(count - 1) * MESSAGES)
        text = program.replace("jdbc:postgresql://localhost/bank", in_java(conninfo)).replace('"payments"', f'"{name}"')
        (tmp_path / "payments.py").write_text(placed(text, bootstrap_servers, conninfo))
        command = [sys.executable, "payments.py"]
        assert run(command, lambda: payment(count * MESSAGES), None, tmp_path) == 0  # noqa: B023 - called at once
