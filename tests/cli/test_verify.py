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
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from exactly_once.cli import main
from exactly_once.demo import payments
from exactly_once.soak import pipeline
from exactly_once.soak.pipeline import Verdict, compare, counted
from tests.cli.conftest import Command
from tests.support.topics import create_topic

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
        "--patience-seconds": "60",
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
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    bootstrap_servers: str,
    conninfo: str,
    name: str,
) -> None:
    """Also where the queue of the client that publishes is full after each few messages."""
    monkeypatch.setattr(pipeline, "Producer", lambda given: Producer(given | {"queue.buffering.max.messages": 10}))
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


IDLE = """
import time
time.sleep(600)
"""
FAILING = "raise SystemExit('there is no such broker')"
# Its COMMITs do not pass where they could be cut.
ELSEWHERE = WITHOUT_COMMITS.replace("psycopg.connect(conninfo,", "psycopg.connect(open('conninfo').read(),")


@pytest.mark.parametrize(
    ("program", "patience", "reason"),
    [
        (IDLE, "5", "no message took effect within 5 s, without a fault"),
        (FAILING, "60", "the pipeline failed 6 times before any message took effect"),
    ],
)
@pytest.mark.usefixtures("_copied")
def test_faults_do_not_begin_before_the_pipeline_works(
    command: Command,
    tmp_path: Path,
    *,
    bootstrap_servers: str,
    conninfo: str,
    name: str,
    program: str,
    patience: str,
    reason: str,
) -> None:
    (tmp_path / "pipeline.py").write_text(program)
    result = command(
        *("verify", "--bootstrap-servers", bootstrap_servers, "--conninfo", conninfo, "--topic", name),
        *("--effects", f'SELECT n, count(*) FROM "{name}" GROUP BY 1', "--patience-seconds", patience),
        *("--start", f"{shlex.quote(sys.executable)} {tmp_path / 'pipeline.py'}", "--messages", "20"),
    )
    assert result.code == 3
    assert reason in result.err
    assert ("there is no such broker" in result.out) == (program is FAILING)
    assert "published" not in result.out  # what each fault is logged with


@pytest.mark.usefixtures("_copied", "own_servers")
def test_without_a_fault_nothing_is_shown(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    bootstrap_servers: str,
    conninfo: str,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conninfo").write_text(conninfo)
    status, verdict = verified(
        capsys,
        tmp_path,
        program=ELSEWHERE.replace("% 10 != 3", ">= 0"),
        servers=(bootstrap_servers, conninfo),
        name=name,
        arguments=["--seconds", "1", "--fault", "cut-after", "--processes", "1", "--patience-seconds", "30"],
    )
    assert (status, verdict["ok"], verdict["lost"], verdict["faults"]) == (3, False, 0, {})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"--start": "no-such-program {topic}"}, "--start: there is no program 'no-such-program'"),
        ({"--start": "cat {group}"}, "--start: 'group' in cat {group}: quotes come in pairs, there are"),
        ({"--start": "cat 'x"}, "--start: No closing quotation"),
        ({"--start": ""}, "--start: there is no program ''"),
        (
            {"--effects": "SELECT n, count(*) FROM no_such_table GROUP BY 1"},
            '--effects: relation "no_such_table" does not',
        ),
        ({"--effects": "SELECT 1"}, "--effects returns int4; two columns are needed"),
        ({"--effects": "SELECT 1, 'x'"}, "--effects returns int4 and text; two columns are needed"),
        ({"--effects": "SELECT now(), 1"}, "--effects returns timestamptz and int4; two"),
        ({"--effects": "CREATE TABLE never_made (n int)"}, "--effects returns nothing; two columns are needed"),
        ({"--effects": "SELECT 5, 1"}, "--effects finds 1 numbers before there is a message, 5 for instance"),
        ({"--setup": "CREATE TABEL x ()"}, '--setup: syntax error at or near "TABEL"'),
        ({"--topic": "exists"}, "already exists"),
        ({"--topic": "no/topic"}, "--topic: "),
        ({"--conninfo": "no conninfo"}, "conninfo is not a connection string"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_anything_begins(
    command: Command,
    db: psycopg.Connection[Any],
    *,
    bootstrap_servers: str,
    conninfo: str,
    name: str,
    options: dict[str, str],
    reason: str,
) -> None:
    if options.get("--topic") == "exists":
        options = {"--topic": create_topic(bootstrap_servers, 1)}
    given = {
        "--start": "cat",
        "--setup": f'CREATE TABLE "{name}" (n int)',
        "--effects": f'SELECT n, count(*) FROM "{name}" GROUP BY 1',
        "--bootstrap-servers": bootstrap_servers,
        "--conninfo": conninfo,
        "--topic": name,
        # For a program that is not refused.
        "--seconds": "1",
        "--messages": "10",
        "--patience-seconds": "1",
    }
    result = command("verify", *(word for option in (given | options).items() for word in option))
    assert result.code == 2
    assert reason in result.err
    assert result.err.count("\n") == 1
    # The next try meets nothing of this one.
    assert db.execute("SELECT to_regclass(%s), to_regclass('never_made')", (f'"{name}"',)).fetchone() == (None, None)
    assert name not in AdminClient({"bootstrap.servers": bootstrap_servers}).list_topics(timeout=30).topics


@pytest.mark.parametrize("where", ["--bootstrap-servers", "--conninfo"])
def test_a_server_that_is_away_is_named(command: Command, bootstrap_servers: str, conninfo: str, where: str) -> None:
    given = {"--bootstrap-servers": bootstrap_servers, "--conninfo": conninfo}
    away = {"--bootstrap-servers": "127.0.0.1:1", "--conninfo": "postgresql://me:secret@127.0.0.1:1/nowhere"}
    words = [word for option in (given | {where: away[where]}).items() for word in option]
    result = command("verify", "--start", "cat", "--effects", "SELECT 1, 0", *words)
    assert result.code == 3
    assert "127.0.0.1:1" in result.err
    assert "secret" not in result.err


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_the_postgres_that_it_starts_has_the_ledger(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text(OURS)
    start = f"{shlex.quote(sys.executable)} {tmp_path / 'pipeline.py'} {{bootstrap_servers}} {{conninfo}} {{topic}}"
    arguments = [
        *("--start", start, "--setup", "CREATE TABLE own (n int)", "--topic", "own"),
        *("--effects", "SELECT n, count(*) FROM own GROUP BY 1"),
        *("--messages", "200", "--seconds", "3", "--fault", "kill", "--log", str(tmp_path / "log"), "--json"),
    ]
    assert main(["verify", *arguments]) == 0, (tmp_path / "log").read_text()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ok"]


def test_a_payment_waits_for_room_in_the_clients_queue(
    monkeypatch: pytest.MonkeyPatch, bootstrap_servers: str, name: str
) -> None:
    monkeypatch.setattr(payments, "Producer", lambda given: Producer(given | {"queue.buffering.max.messages": 10}))
    payments.create_topic(bootstrap_servers, name)
    publisher = payments.Publisher(bootstrap_servers, name, seed=1)
    publisher.publish(500)
    assert (publisher.published, len(publisher.last)) == (500, payments.BRANCHES)


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
