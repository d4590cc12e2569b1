"""``exactly-once soak`` as a user starts it, and that its checker finds what is there to find."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import psycopg
import pytest
from confluent_kafka import Producer
from psycopg import sql

from exactly_once.cli import main
from exactly_once.demo.journal import Record, scan
from exactly_once.embedded.errors import StartError
from exactly_once.soak import verdict
from exactly_once.soak.worker import COLUMNS, create_tables, table
from tests.support.seeds import seeds
from tests.support.topics import create_topic

MESSAGES = 12


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
@pytest.mark.parametrize("seed", seeds([1986294984], new=1))  # a failover before the groups have begun
def test_a_few_seconds_of_faults_lose_and_double_nothing(seed: int) -> None:
    command = [sys.executable, "-m", "exactly_once", "soak", "--minutes", "0.15", "--seed", str(seed), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=850)
    print(done.stderr)
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"], found["anomalies"]) == (0, True, [])
    assert {kind: found[kind] for kind in verdict.KINDS} == dict.fromkeys(verdict.KINDS, 0)
    assert found["seed"] == seed
    assert found["effects"] == found["messages"] * len(found["groups"]) > 0
    assert found["faults_total"] == sum(found["faults"].values()) > 0
    assert found["snapshots"] > 0
    assert found["versions"].keys() >= {"kafka-exactly-once", "confluent-kafka", "librdkafka", "postgres", "kafka"}


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_a_soak_that_is_interrupted_ends_with_what_it_counted() -> None:
    command = [sys.executable, "-m", "exactly_once", "soak", "--minutes", "10", "--seed", "7", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as soak:
        assert soak.stderr is not None
        assert any(re.search(r"\b[1-9][\d,]* messages, ", line) for line in soak.stderr)  # a look that has seen some
        soak.send_signal(signal.SIGINT)
        out, _ = soak.communicate(timeout=300)
    found = json.loads(out)
    assert (soak.returncode, found["ok"], found["seed"], found["cut_short"]) == (130, False, 7, "interrupted")
    assert found["messages"] > 0
    assert found["faults_total"] == sum(found["faults"].values())


@pytest.fixture
def applied(bootstrap_servers: str, db: psycopg.Connection[Any], name: str) -> Iterator[tuple[str, str]]:
    """A topic whose messages took effect once, in order, by a group whose row says so."""
    topic = create_topic(bootstrap_servers, 1)
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for number in range(MESSAGES):
        producer.produce(topic, json.dumps({"number": number}))
    assert producer.flush(60) == 0
    records = scan(bootstrap_servers, topic)
    create_tables(db, [name])
    _append(db, name, records)
    db.execute(
        "INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset) VALUES (%s, %s, 0, %s)",
        (name, topic, MESSAGES),
    )
    yield name, topic
    db.execute("DROP SCHEMA soak CASCADE")


def _append(db: psycopg.Connection[Any], group: str, records: list[Record]) -> None:
    with (
        db.cursor() as cursor,
        cursor.copy(
            sql.SQL("COPY {} ({}) FROM STDIN").format(table(group), sql.SQL(", ").join(map(sql.Identifier, COLUMNS)))
        ) as copy,
    ):
        for record in records:
            number = json.loads(record.value or b"")["number"]
            copy.write_row((record.topic, record.partition, record.offset, number, "worker"))


_AGAIN = """
    INSERT INTO {0} (topic, partition, "offset", number)
    SELECT topic, partition, "offset", number FROM {0} WHERE "offset" = 11
"""


@pytest.mark.parametrize(
    ("injury", "found"),
    [
        ("SELECT", {}),
        ('DELETE FROM {0} WHERE "offset" = 5', {"lost": 1}),
        (_AGAIN, {"doubled": 1}),
        ('UPDATE {0} SET "offset" = 100 WHERE "offset" = 11', {"lost": 1, "foreign": 1, "offset_behind": 1}),
        ('UPDATE {0} SET number = 100 WHERE "offset" = 11', {"altered": 1}),
        ('UPDATE {0} SET id = DEFAULT WHERE "offset" = 3', {"non_monotonic": 1}),
        ("UPDATE exactly_once.ledger SET next_offset = 10 WHERE group_id = {1}", {"offset_behind": 2}),
    ],
)
def test_checker_names_what_is_wrong(
    applied: tuple[str, str],
    db: psycopg.Connection[Any],
    request: pytest.FixtureRequest,
    injury: str,
    found: dict[str, int],
) -> None:
    group, topic = applied
    bootstrap_servers, conninfo = map(request.getfixturevalue, ("bootstrap_servers", "conninfo"))
    db.execute(sql.SQL(injury).format(table(group), group))
    messages, anomalies = verdict.check(bootstrap_servers, conninfo, [topic], [group], is_drained=True)
    assert messages == MESSAGES
    assert verdict.counts(anomalies) == dict.fromkeys(verdict.KINDS, 0) | found


@pytest.mark.parametrize(
    ("anomalies", "status"), [([], 3), (["lost: group eager, soak-singles [0]: offset 5"], 1)], ids=["none", "one"]
)
def test_a_soak_without_a_fault_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], anomalies: list[str], status: int
) -> None:
    """The real one draws too many faults to be without any, so this one has no servers and no groups."""

    class Calm:
        def __init__(self, *_: object, **__: object) -> None: ...

        def run(self) -> dict[str, Any]:
            counts = dict.fromkeys(verdict.KINDS, 0) | {"messages": 5, "faults_total": 0, "seconds": 6.0}
            return counts | {"ok": False, "groups": [], "anomalies": anomalies}

    monkeypatch.setattr("exactly_once.cli.soak.embedded.start", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr("exactly_once.cli.soak.Soak", Calm)
    assert main(["soak", "--minutes", "0.1"]) == status
    assert "nothing is shown: no fault struck" in capsys.readouterr().out


def test_servers_that_do_not_start_cut_a_soak_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(**_: object) -> NoReturn:
        raise StartError("Kafka did not come up")

    monkeypatch.setattr("exactly_once.cli.soak.embedded.start", start)
    assert main(["soak", "--seed", "7", "--json"]) == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"ok": False, "cut_short": "Kafka did not come up", "seed": 7}
    assert "Kafka did not come up" in printed.err
