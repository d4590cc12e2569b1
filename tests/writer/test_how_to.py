"""What the how-to of the table sink shows is run as it stands there."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from exactly_once.cli import main
from exactly_once.cli.sink_flows import read_flows
from tests.support.topics import create_topic

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "table-sink.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def topics(bootstrap_servers: str) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for name in ("payments", "customers"):
        create_topic(bootstrap_servers, 1, name=name)
        for i in range(100):
            producer.produce(name, json.dumps({"id": i % 40, "amount": 1.5}).encode(), str(i % 40).encode())
    assert producer.flush(30) == 0


def adapted(text: str, bootstrap_servers: str, conninfo: str) -> str:
    return text.replace("localhost:9092", bootstrap_servers).replace("postgresql://localhost/bank", conninfo)


@pytest.mark.usefixtures("topics")
def test_every_command_and_program_of_the_page_does_what_it_says(
    bootstrap_servers: str, conninfo: str, db: psycopg.Connection[Any]
) -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("exactly-once")]
    assert len(lines) == 4
    for line in lines:
        assert main(shlex.split(adapted(line, bootstrap_servers, conninfo))[1:]) == 0, line
    assert db.execute("SELECT count(*), sum(amount) FROM payment").fetchone() == (100, 150)
    assert db.execute("SELECT count(*) FROM customer").fetchone() == (40,)
    db.execute("TRUNCATE payment; CREATE UNIQUE INDEX ON payment (id); CREATE TABLE total AS SELECT 0 AS messages")
    (program,) = blocks("py")
    exec(compile(adapted(program, bootstrap_servers, conninfo), "table-sink.md", "exec"), {})
    assert db.execute("SELECT count(*) FROM payment").fetchone() == (40,)
    assert db.execute("SELECT messages FROM total").fetchone() == (100,)


def test_the_file_of_the_page_is_understood() -> None:
    class Nothing:
        topics = table = mode = key = format = None

    (file,) = blocks("toml")
    flows = read_flows(Nothing(), tomllib.loads(file)["sink"])  # type: ignore[arg-type]
    assert [flow.table for flow in flows] == ["bank.payment", "customer"]
    for flow in flows:
        flow.sink()
