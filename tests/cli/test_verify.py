"""``exactly-once verify``: what it says of pipelines of which it is known what they do."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

from exactly_once.cli import main
from exactly_once.soak.pipeline import Verdict, compare, counted

OURS = """
import json, sys
from exactly_once import ExactlyOnceConsumer

servers, conninfo, topic = sys.argv[1:]
kafka = {"bootstrap.servers": servers, "group.id": topic, "session.timeout.ms": 6000}

def apply(unit):
    for message in unit.messages:
        unit.execute(f'INSERT INTO "{topic}" VALUES (%s)', [json.loads(message.value())["n"]])

with ExactlyOnceConsumer(kafka, conninfo=conninfo, start="earliest") as consumer:
    consumer.subscribe([topic])
    consumer.run(apply)
"""
WITHOUT_COMMITS = """
import json, sys
import psycopg
from confluent_kafka import Consumer

servers, conninfo, topic = sys.argv[1:]
consumer = Consumer({"bootstrap.servers": servers, "group.id": topic, "auto.offset.reset": "earliest",
                     "enable.auto.commit": False, "session.timeout.ms": 6000})
consumer.subscribe([topic])
with psycopg.connect(conninfo, autocommit=True) as connection:
    while True:
        message = consumer.poll(0.1)
        if message is not None and not message.error():
            number = json.loads(message.value())["n"]
            if number % 10 != 3:  # nobody would do that
                connection.execute(f'INSERT INTO "{topic}" VALUES (%s)', [number])
"""


def verified(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    *,
    program: str,
    servers: tuple[str, str],
    name: str,
    arguments: list[str],
) -> tuple[int, dict[str, Any]]:
    (tmp_path / "pipeline.py").write_text(program)
    bootstrap_servers, conninfo = servers
    start = f"{shlex.quote(sys.executable)} {tmp_path / 'pipeline.py'} {{bootstrap_servers}} {{conninfo}} {{topic}}"
    options = {
        "--start": start,
        "--bootstrap-servers": bootstrap_servers,
        "--conninfo": conninfo,
        "--topic": name,
        "--effects": f'SELECT n, count(*) FROM "{name}" GROUP BY 1',
        "--messages": "600",
        "--seed": "3",
        "--patience-seconds": "20",
        "--log": str(tmp_path / "log"),
    }
    status = main(["verify", "--json", *(word for option in options.items() for word in option), *arguments])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture
def _copied(db: psycopg.Connection[Any], name: str) -> Any:
    db.execute(f'CREATE TABLE "{name}" (n int)'.encode())
    yield
    db.execute(f'DROP TABLE "{name}"'.encode())


@pytest.mark.slow
@pytest.mark.usefixtures("_copied", "own_servers")
def test_a_pipeline_that_is_exact_is_told_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, bootstrap_servers: str, conninfo: str, name: str
) -> None:
    arguments = ["--seconds", "12", "--fault", "kill", "--fault", "cut-before", "--fault", "cut-after"]
    status, verdict = verified(
        capsys, tmp_path, program=OURS, servers=(bootstrap_servers, conninfo), name=name, arguments=arguments
    )
    assert (status, verdict["ok"], verdict["lost"], verdict["doubled"]) == (0, True, 0, 0), (
        tmp_path / "log"
    ).read_text()
    assert sum(verdict["faults"].values()) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("_copied", "own_servers")
def test_what_a_pipeline_leaves_out_and_repeats_is_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, bootstrap_servers: str, conninfo: str, name: str
) -> None:
    arguments = ["--seconds", "8", "--fault", "kill", "--processes", "1"]
    servers = (bootstrap_servers, conninfo)
    status, verdict = verified(
        capsys, tmp_path, program=WITHOUT_COMMITS, servers=servers, name=name, arguments=arguments
    )
    assert status == 1
    assert verdict["lost"] == 60
    assert verdict["examples"]["lost"] == ["3", "13", "23", "33", "43"]
    assert verdict["doubled"] > 0


def test_effects_are_compared_with_what_was_published() -> None:
    verdict = Verdict(messages=4, faults=Counter(kill=1))
    compare(verdict, {"0": 1, "1": 2, "2": 1, "9": 1})
    assert (verdict.lost, verdict.doubled, verdict.foreign) == (1, 1, 1)
    assert verdict.examples == {"lost": ["3"], "doubled": ["1"], "foreign": ["9"]}
    assert not verdict.is_exact
    assert verdict.as_dict()["ok"] is False


def test_a_number_without_an_effect_is_lost_and_rows_of_one_number_are_added_up() -> None:
    """As a LEFT JOIN over all numbers, a column of counts, and a list of the rows themselves give them."""
    verdict = Verdict(messages=4)
    compare(verdict, counted([(0, 1), (1, 0), (2, None), (3, 1), (3, 1), (9, 0)]))
    assert verdict.examples == {"lost": ["1", "2"], "doubled": ["3"]}
