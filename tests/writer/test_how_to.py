"""What the how-tos of the table sink show is run as it stands there."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from exactly_once.cli import main
from exactly_once.cli.sink_flows import read_flows
from tests.support.topics import create_topic, delete_topic

Database = psycopg.Connection[Any]
Run = Callable[[str], None]
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"


def blocks(page: str, language: str) -> list[str]:
    text = (HOW_TO / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("exactly-once")]


@pytest.fixture(scope="module")
def topics(bootstrap_servers: str) -> Iterator[None]:
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for name in ("payments", "customers"):
        create_topic(bootstrap_servers, 1, name=name)
        for i in range(100):
            amount = 1.5 if name == "payments" else i
            producer.produce(name, json.dumps({"id": i % 40, "amount": amount}).encode(), str(i % 40).encode())
    producer.produce("customers", None, b"39")
    assert producer.flush(60) == 0
    yield
    for name in ("payments", "customers"):
        delete_topic(bootstrap_servers, name)


@pytest.fixture
def run(bootstrap_servers: str, conninfo: str, topics: None) -> Run:
    """Runs programs and commands of a page on the test's servers."""

    def adapted(text: str) -> str:
        return text.replace("localhost:9092", bootstrap_servers).replace("postgresql://localhost/bank", conninfo)

    def run(text: str) -> None:
        if text.startswith("exactly-once"):
            assert main(shlex.split(adapted(text))[1:]) == 0, text
        else:
            exec(compile(adapted(text), "a page", "exec"), {})

    return run


def test_copying_a_topic_into_a_table_goes_as_the_page_says(run: Run, db: Database) -> None:
    migrate, dry_run, sink = commands("table-sink.md")
    run(migrate)
    run(dry_run)
    assert db.execute("SELECT to_regclass('payment')").fetchone() == (None,)
    run(sink)
    assert db.execute("SELECT count(*), sum(amount) FROM payment").fetchone() == (100, 150)
    db.execute("TRUNCATE payment; CREATE UNIQUE INDEX ON payment (id); CREATE TABLE total AS SELECT 0 AS messages")
    (program,) = blocks("table-sink.md", "py")
    run(program)
    assert db.execute("SELECT count(*) FROM payment").fetchone() == (40,)
    assert db.execute("SELECT messages FROM total").fetchone() == (100,)


def test_upserting_by_key_goes_as_the_page_says(run: Run, db: Database) -> None:
    (sink,) = commands("upsert-by-key.md")
    run(sink)
    wanted = [(i, i + 80 if i < 20 else i + 40) for i in range(40) if i != 39]
    assert db.execute("SELECT id, amount FROM customer ORDER BY id").fetchall() == wanted
    db.execute("TRUNCATE customer; CREATE TABLE customer_count AS SELECT 0 AS customers")
    with_a_handler, with_rows = blocks("upsert-by-key.md", "py")
    run(with_a_handler)
    assert db.execute("SELECT id, amount FROM customer ORDER BY id").fetchall() == wanted
    assert db.execute("SELECT customers FROM customer_count").fetchone() == (39,)
    run(with_rows)
    assert db.execute("SELECT id, amount FROM customer WHERE id < 4 ORDER BY id").fetchall() == [
        (0, 80),
        (1, 25),
        (2, 35),
    ]


@pytest.mark.parametrize(
    ("page", "tables"), [("table-sink.md", ["bank.payment", "customer"]), ("upsert-by-key.md", ["customer"])]
)
def test_the_file_of_a_page_is_understood(page: str, tables: list[str]) -> None:
    class Nothing:
        topics = table = mode = key = format = None

    (file,) = blocks(page, "toml")
    flows = read_flows(Nothing(), tomllib.loads(file)["sink"])  # type: ignore[arg-type]
    assert [flow.table for flow in flows] == tables
    for flow in flows:
        flow.sink()
