"""``exactly-once verify``: what it says of pipelines of which it is known what they do."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from exactly_once.cli import main
from exactly_once.demo import payments
from exactly_once.demo.display import Display
from exactly_once.soak import pipeline
from exactly_once.soak.pipeline import Pipeline, Verdict, compare, counted
from tests.cli.conftest import Command
from tests.support.topics import create_topic
from tests.support.waiting import until

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


Verify: TypeAlias = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def copy(db: psycopg.Connection[Any], name: str) -> Iterator[str]:
    """The table that a pipeline copies into, of the topic's name."""
    db.execute(f'CREATE TABLE "{name}" (n int)'.encode())
    yield name
    db.execute(f'DROP TABLE "{name}"'.encode())


@pytest.fixture
def verify(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, copy: str, bootstrap_servers: str, conninfo: str
) -> Verify:
    """Run the command on a pipeline: ``verify(program, *options)`` returns the status and the verdict."""

    def run(program: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        (tmp_path / "pipeline.py").write_text(program)
        start = f"{shlex.quote(sys.executable)} {tmp_path / 'pipeline.py'} {{bootstrap_servers}} {{conninfo}} {{topic}}"
        options = {
            "--start": start,
            "--bootstrap-servers": bootstrap_servers,
            "--conninfo": conninfo,
            "--topic": copy,
            "--effects": f'SELECT n, count(*) FROM "{copy}" GROUP BY 1',
            "--messages": "600",
            "--seed": "3",
            "--patience-seconds": "60",
            "--log": str(tmp_path / "log"),
        }
        status = main(["verify", "--json", *(word for option in options.items() for word in option), *arguments])
        out, err = capsys.readouterr()
        assert out, f"exit {status}: {err}"
        return status, json.loads(out.splitlines()[-1])

    return run


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_a_pipeline_that_is_exact_is_told_so(verify: Verify, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the queue of the client that publishes is full after each few messages."""
    monkeypatch.setattr(pipeline, "Producer", lambda given: Producer(given | {"queue.buffering.max.messages": 10}))
    faults = ["--fault", "kill", "--fault", "cut-before", "--fault", "cut-after"]
    status, verdict = verify(OURS, "--seconds", "12", *faults)
    assert (status, verdict["ok"], verdict["lost"], verdict["doubled"]) == (0, True, 0, 0), (
        tmp_path / "log"
    ).read_text()
    assert sum(verdict["faults"].values()) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_what_a_pipeline_leaves_out_and_repeats_is_counted(verify: Verify) -> None:
    status, verdict = verify(WITHOUT_COMMITS, "--seconds", "8", "--fault", "kill", "--processes", "1")
    assert status == 1
    assert verdict["lost"] == 60
    assert verdict["examples"]["lost"] == ["3", "13", "23", "33", "43"]
    assert verdict["doubled"] > 0


# Does nothing at first, as one whose group waits for the session of a killed member.
SLOW_TO_START = """
import json, os, sys, time
import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

open(f"started-{os.getpid()}", "w").close()
time.sleep(4)
servers, conninfo, topic = sys.argv[1:]
consumer = Consumer({"bootstrap.servers": servers, "group.id": topic, "auto.offset.reset": "earliest",
                     "enable.auto.commit": False})
consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(6)])
with psycopg.connect(conninfo, autocommit=True) as connection:
    while True:
        message = consumer.poll(0.1)
        if message is not None and not message.error():
            connection.execute(f'INSERT INTO "{topic}" VALUES (%s)', [json.loads(message.value())["n"]])
            open(f"worked-{os.getpid()}", "w").close()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_faults_strike_a_pipeline_that_works(verify: Verify, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What does nothing when it is struck doubles nothing: a plain loop passed 17 kills."""
    monkeypatch.chdir(tmp_path)
    options = ["--seconds", "16", "--fault", "kill", "--processes", "1"]
    status, verdict = verify(SLOW_TO_START, *options)
    started, worked = (len(list(tmp_path.glob(f"{what}-*"))) for what in ("started", "worked"))
    assert (status, verdict.get("lost")) == (1, 0), verdict
    assert worked >= 2
    assert started - worked <= 1  # the last fault comes when the time is over, whatever the pipeline does


# Leaves its parent, its session and its process group, as a service of old times does.
IN_THE_BACKGROUND = (
    """
import os, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
open(f"pid-{os.getpid()}", "w").close()
"""
    + OURS
)


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_a_pipeline_in_the_background_is_injured_and_ended(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    status, verdict = verify(IN_THE_BACKGROUND, "--seconds", "8", "--fault", "kill")
    assert (status, verdict["lost"], verdict["doubled"]) == (0, 0, 0), (tmp_path / "log").read_text()
    started = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert verdict["ended"] == 0
    # One that is killed before it is in the background leaves no file.
    assert 2 < len(started) <= 2 + verdict["faults"]["kill"]
    until(lambda: not any(map(psutil.pid_exists, started)), 120, "the processes to be reaped")


@pytest.mark.usefixtures("copy")
def test_a_pipeline_ends_with_verify_however_that_ends(
    tmp_path: Path, bootstrap_servers: str, conninfo: str, name: str
) -> None:
    """After a kill -9 its processes went on for ever, also those that had left their parents."""
    (tmp_path / "pipeline.py").write_text(IN_THE_BACKGROUND.replace(OURS, IDLE))
    words = [sys.executable, "-m", "exactly_once", "verify", "--start", f"{shlex.quote(sys.executable)} pipeline.py"]
    where = ["--bootstrap-servers", bootstrap_servers, "--conninfo", conninfo, "--topic", name]
    effects = ["--effects", f'SELECT n, count(*) FROM "{name}" GROUP BY 1']
    with subprocess.Popen([*words, *where, *effects], cwd=tmp_path) as process:
        until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, 120, "the pipeline to start")
        process.kill()
    started = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    until(lambda: not any(map(psutil.pid_exists, started)), 120, "the pipeline to end")


def test_a_process_that_has_ended_by_itself_is_not_taken_for_injured(tmp_path: Path) -> None:
    """A fault that struck nothing was counted, so a pipeline that ends at once was exact whatever it did."""
    chance = random.Random(1)
    with (tmp_path / "log").open("w+b") as log, Pipeline(["sleep", "600"], 1, log) as living:
        assert living.kill(chance)
        with Pipeline(["true"], 1, log) as ending:
            until(lambda: not ending.kill(chance), 120, "a process that has ended by itself")
            assert not ending.pause(chance)
            ending.work(0.1)
            assert ending.ended > 0
        assert living.kill(chance)
        assert living.ended == 0


def test_a_lock_that_nobody_gives_back_is_named(db: psycopg.Connection[Any], conninfo: str, copy: str) -> None:
    """The effects were waited for without an end."""
    plan = pipeline.Plan(
        bootstrap_servers="",
        topic=copy,
        conninfo=conninfo,
        start=[],
        effects=f'SELECT n, count(*) FROM "{copy}" GROUP BY 1',
        value="",
        processes=1,
        messages=1,
        seconds=1,
        patience_seconds=1,
        faults=[],
        seed=1,
    )
    with db.transaction():
        db.execute(f'LOCK TABLE "{copy}"'.encode())
        with pytest.raises(pipeline.NothingShown, match="--effects waited 1 s for a lock"):
            pipeline.effects(plan)
    assert pipeline.effects(plan) == {}


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
        # Two processes: the sixth and the seventh end may be found in one look.
        (FAILING, "280", "the pipeline failed [67] times before any message took effect"),
    ],
)
@pytest.mark.usefixtures("copy")
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
    assert re.search(reason, result.err)
    assert ("there is no such broker" in result.out) == (program is FAILING)
    assert "published" not in result.out  # what each fault is logged with


@pytest.mark.usefixtures("own_servers")
def test_without_a_fault_nothing_is_shown(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, conninfo: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conninfo").write_text(conninfo)
    options = ["--seconds", "1", "--fault", "cut-after", "--processes", "1", "--patience-seconds", "60"]
    status, verdict = verify(ELSEWHERE.replace("% 10 != 3", ">= 0"), *options)
    assert (status, verdict["ok"], verdict["lost"], verdict["faults"]) == (3, False, 0, {})


@pytest.mark.parametrize(
    ("struck", "hint"),
    [
        ({"pause": 1, "cut-after": 1}, "never struck: kill, cut-before; a longer run has more faults"),
        (
            {"pause": 1, "kill": 1},
            "never struck: cut-before, cut-after; cuts need the {conninfo} that --start is given",
        ),
    ],
)
def test_what_never_struck_has_a_reason_that_holds(
    verify: Verify,
    monkeypatch: pytest.MonkeyPatch,
    struck: dict[str, int],
    hint: str,
) -> None:
    """The verdict is given: which faults a short run draws is chance."""
    shown: list[str] = []
    monkeypatch.setattr(Display, "line", lambda _, text: shown.append(text))
    monkeypatch.setattr("exactly_once.cli.verify.verify", lambda *_: Verdict(messages=1, faults=Counter(struck)))
    assert verify(OURS)[0] == 0
    assert hint in shown


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
        ({"--conninfo": "host=127.0.0.1"}, "--conninfo: cuts need a postgresql:// URI with one TCP host"),
        ({"--conninfo": "postgresql://a/b?sslmode=require"}, "or choose --fault kill and --fault pause"),
        ({"--log": "/dev/null/log"}, "--log: [Errno 20] Not a directory: '/dev/null/log'"),
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
    assert name not in AdminClient({"bootstrap.servers": bootstrap_servers}).list_topics(timeout=60).topics


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


def test_half_an_effect_and_one_that_was_taken_back_are_none() -> None:
    verdict = Verdict(messages=5)
    rows = [(0, 1.0), (1, 0.5), (2, -1), (3, 1.5), (4, 1), (4, -1), (Decimal("Infinity"), 1)]
    compare(verdict, counted(rows))
    assert verdict.examples == {"lost": ["1", "2", "4"], "doubled": ["3"], "foreign": ["Infinity"]}


def test_the_program_of_the_examples_hides_no_module_of_python(command: Command) -> None:
    """It was copy.py: beside it `import psycopg` ends in the program itself, in place of the module copy."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "verify.md").read_text("utf-8")
    for text in (command("verify", "--help").out, page):
        names = re.findall(r"python (\w+)\.py", text)
        assert names
        assert not {*names} & sys.stdlib_module_names
