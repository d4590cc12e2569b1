"""Every code block and every command of README.md and docs/ is run, or known to be run elsewhere.

A block of Python that names a broker is a program; others are excerpts of programs in examples/ and tests/, which have
tests of their own.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition

from exactly_once import embedded
from exactly_once.cli import main
from exactly_once.demo.journal import scan
from exactly_once.ledger.migrate import migrate
from tests.conftest import MakeConsumer
from tests.docs.programs import ROOT, code, placed
from tests.support.findings import nothing
from tests.support.topics import create_topic, delete_topic, produce
from tests.support.waiting import until
from tests.support.worker import drain, ensure_journal

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MESSAGES = 1000


def blocks(language: str, documents: list[Path] = DOCUMENTS) -> Iterator[Any]:
    """Find the fenced blocks of one language, each with a readable name."""
    for document in documents:
        for number, block in enumerate(code(str(document.relative_to(ROOT)), language), 1):
            yield pytest.param(block, id=f"{document.relative_to(ROOT)}-{number}")


def is_program(block: Any) -> bool:
    """Tell whether a block can be run as it is, but for the addresses of its servers."""
    return "localhost:9092" in block.values[0]


def is_consumer(block: Any) -> bool:
    """Tell whether a program applies payments, and does not end by itself."""
    return is_program(block) and "ExactlyOnceConsumer" in block.values[0]


README = [block.values[0] for block in blocks("python", DOCUMENTS[:1])]


def commands() -> Iterator[str]:
    """Find every command line."""
    for parameters in blocks("console"):
        yield from (line for line in parameters.values[0].splitlines() if line.strip())


@pytest.fixture(scope="module")
def payments(bootstrap_servers: str) -> Iterator[str]:
    """The topic that the documents read: numbers, as text."""
    topic = create_topic(bootstrap_servers, 3, name="payments")
    produce(bootstrap_servers, topic, MESSAGES, 3)
    yield topic
    delete_topic(bootstrap_servers, topic)


CONSUMERS = {each.values[0]: each for each in blocks("python") if is_consumer(each)}.values()
"""Each once: the guides in docs/migrate come to the same program."""


@pytest.mark.parametrize("block", CONSUMERS)
def test_code_block_applies_every_payment_once(
    *, block: str, payments: str, bank: psycopg.Connection[Any], bootstrap_servers: str, conninfo: str, name: str
) -> None:
    program = re.sub(r'(?<="group.id": )"[^"]+"', repr(name), placed(block, bootstrap_servers, conninfo))
    if 'start="committed"' in program:
        commit_start(bootstrap_servers, name, payments)
    total = sum(range(MESSAGES))

    def balance() -> int:
        row = bank.execute("SELECT balance FROM account WHERE id = 1").fetchone()
        assert row is not None
        return int(row[0])

    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: balance() >= total or process.poll() is not None, 120, "every payment")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert balance() == total, errors


def test_first_program_survives_restarts_of_the_database(bootstrap_servers: str) -> None:
    """Under load, as it stands in the README; what it has no code for is what `run` is for."""
    with embedded.Postgres() as postgres:
        with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
            migrate(connection)
            connection.execute("CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL)")
            connection.execute("INSERT INTO account VALUES (1, 0)")
        topic = create_topic(bootstrap_servers, 3)
        program = placed(README[0], bootstrap_servers, postgres.conninfo).replace('"payments"', repr(topic))
        program = program.replace('"accounts"', repr(topic))
        with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
            try:
                until(lambda: _balance(postgres.conninfo) is not None, 10, "a table")
                for number in range(3):
                    produce(bootstrap_servers, topic, MESSAGES, 3, start=number * MESSAGES)
                    goal = sum(range(number * MESSAGES + 1))
                    until(lambda goal=goal: _balance(postgres.conninfo) >= goal, 120, "a beginning")  # type: ignore[misc]
                    postgres.restart("immediate" if number % 2 else "fast")
                until(lambda: _balance(postgres.conninfo) == sum(range(3 * MESSAGES)), 120, "every payment")
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=120)
            finally:
                process.kill()
        assert process.returncode == 0, errors


def _balance(conninfo: str) -> int:
    with psycopg.connect(conninfo) as connection:
        (balance,) = connection.execute("SELECT balance FROM account WHERE id = 1").fetchone() or (-1,)
    return int(balance)


PUBLISHING = [block for block in blocks("python", [ROOT / "docs/publishing.md"]) if is_program(block)]


@pytest.mark.parametrize("block", PUBLISHING)
def test_program_that_publishes_sends_once(
    block: str, bootstrap_servers: str, postgres_conninfo: str, name: str, tmp_path: Path
) -> None:
    """Twice, as after a restart; in a database in which the window has a length of its own."""
    with psycopg.connect(postgres_conninfo, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    program = placed(block, bootstrap_servers, f"{postgres_conninfo.rsplit('/', 1)[0]}/{name}")
    made = []
    for topic in ("orders", "audit"):
        if f'"{topic}"' in block:  # other tests have topics of these names
            made.append(create_topic(bootstrap_servers, 3, name=f"{topic}-{name}"))
            program = program.replace(f'"{topic}"', f'"{made[-1]}"')
    try:
        counts = []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", program],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            counts.append(sum(1 for topic in made for _ in scan(bootstrap_servers, topic)))
    finally:
        for topic in made:
            delete_topic(bootstrap_servers, topic)
    kept = "SequenceFilter" in block or "PostgresWindow" in block
    (sent,) = {len(re.findall(r'b"', block)) if "again" not in block else 1}
    assert counts == [sent, sent if kept else 2 * sent]


CHECKERS = {
    "mypy": ["-m", "mypy", "--strict", "--config-file="],
    "pyright": ["-m", "basedpyright", "--pythonpath", sys.executable, "--project", "pyrightconfig.json"],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_code_of_users_is_typed(checker: str, tmp_path: Path) -> None:
    """As their own checkers see it, at their strictest: the programs of all pages, and a use of the whole surface."""
    programs = [each.values[0] for each in blocks("python") if is_program(each) and "exactly_once" in each.values[0]]
    assert README[0] in programs
    for number, program in enumerate(programs):
        (tmp_path / f"program_{number}.py").write_text(program)
    shutil.copy(ROOT / "tests/typing/public_api.py", tmp_path)
    # What a test ignores on purpose counts as an error if it is none; and a package in a checkout is not installed.
    settings = {"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": True, "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, *CHECKERS[checker], *map(str, tmp_path.glob("*.py"))]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def commit_start(bootstrap_servers: str, group: str, topic: str) -> None:
    """Be the program before, which has read nothing yet."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": group})
    consumer.commit(offsets=[TopicPartition(topic, number, 0) for number in range(3)], asynchronous=False)
    consumer.close()


def test_excerpts_are_parts_of_tested_programs() -> None:
    """However they are indented and wrapped there: the formatter does both by what is around."""
    files = [*ROOT.glob("examples/**/*.py"), *ROOT.glob("tests/**/*.py")]
    programs = ["".join(path.read_text("utf-8").split()) for path in files]
    excerpts = {str(each.id): each.values[0] for each in blocks("python") if not is_program(each)}
    assert excerpts
    unknown = [name for name, text in excerpts.items() if not any("".join(text.split()) in p for p in programs)]
    nothing(unknown, "no program in examples/ or tests/ has the lines of this block")


@pytest.mark.parametrize("block", list(blocks("diff")))
def test_diff_is_the_difference_of_the_examples(block: str) -> None:
    before, after = re.findall(r"^(?:---|\+\+\+) (\S+)$", block, re.MULTILINE)
    old, new = ((ROOT / name).read_text("utf-8").splitlines() for name in (before, after))
    real = difflib.unified_diff(old, new, before, after, lineterm="", n=2)
    assert block.splitlines() == [line.rstrip() for line in real]


@pytest.mark.parametrize("block", list(blocks("diff", [ROOT / "docs/how-to/wrap-an-existing-consumer.md"])))
def test_wrapping_a_consumer_needs_five_lines_at_most(block: str) -> None:
    written = [line for line in block.splitlines() if re.match(r"\+(?!\+\+ )\s*\S", line)]
    assert 0 < len(written) <= 5


@pytest.fixture
def letter(db: psycopg.Connection[Any]) -> Iterator[int]:
    """A dead letter of a group that has a row in the ledger; its id."""
    db.execute(
        "INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset) "
        "VALUES ('accounts', 'payments', 0, 8)"
    )
    row = db.execute(
        "INSERT INTO exactly_once.dead_letter (group_id, topic, partition, message_offset, timestamp_type, "
        "timestamp_ms, error_class, error, attempts) VALUES ('accounts', 'payments', 0, 7, 0, -1, 'x', 'x', 1) "
        "RETURNING id"
    ).fetchone()
    assert row is not None
    yield row[0]
    db.execute("DELETE FROM exactly_once.dead_letter WHERE id = %s", [row[0]])
    db.execute("DELETE FROM exactly_once.ledger WHERE group_id = 'accounts' AND topic = 'payments'")


@pytest.mark.parametrize("command", list(commands()))
def test_command_works(
    command: str, conninfo: str, letter: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "payments.py").write_text("def apply(unit): ...")
    words = shlex.split(command)
    match words:
        case ["python3", "run.py", "demo" | "check" | "test", *_]:
            # The tests are run by this very command, the demo by its own tests.
            usage = subprocess.run([sys.executable, "run.py"], cwd=ROOT, capture_output=True, text=True, check=False)
            assert f"run.py {words[2]}" in usage.stderr
        case [".venv/bin/exactly-once", "sink", *_] | ["exactly-once", "soak" | "verify", *_]:
            pass  # run by tests/demo on the servers that it is for, and by tests/cli for a few seconds
        case ["spin" | "gcc" | "./pan", *_]:
            # tests/model runs them with other bounds.
            known = (ROOT / "tests/model/test_model.py").read_text("utf-8")
            assert all(word in known for word in words[1:] if word in ("-a", "-w", "-O2", "-DVECTORSZ=2048"))
        case ["bash", ".ci/run"]:
            assert os.access(ROOT / ".ci" / "run", os.R_OK)
        case ["pip", "install", requirement]:
            distribution, _, extra = requirement.rstrip("]").partition("[")
            project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
            assert distribution == project["name"]
            assert not extra or extra in project["optional-dependencies"]
        case ["exactly-once", *arguments]:
            monkeypatch.chdir(tmp_path)
            arguments = [str(letter) if argument == "17" else argument for argument in arguments]
            assert main([a.replace("postgresql://localhost/bank", conninfo) for a in arguments]) == 0
        case ["python3", program, *_] if program.startswith("benchmarks/"):
            text = [sys.executable, program, "--help"]
            assert subprocess.run(text, cwd=ROOT, capture_output=True, check=False).returncode == 0
        case _:
            pytest.fail(f"nobody runs this command: {command}")


def test_sequences_are_set_beyond_rows_that_a_replication_has_copied(db: psycopg.Connection[Any], name: str) -> None:
    migrate(db, name)
    copied = (
        "(id, action, reason, group_id, topic, partition) OVERRIDING SYSTEM VALUE VALUES (500, 'a', 'r', 'g', 't', 0)"
    )
    db.execute(f"INSERT INTO {name}.audit {copied}")
    (text,) = (block for block in code("docs/how-to/deploy.md", "sql") if "gexec" in block)
    statements = db.execute(text.replace("'exactly_once'", f"'{name}'").replace("\\gexec", "")).fetchall()
    assert len(statements) == 4, "as many as there are identity columns"
    for (statement,) in statements:
        db.execute(statement)
    row = db.execute(
        f"INSERT INTO {name}.audit (action, reason, group_id, topic, partition) VALUES ('a', 'r', 'g', 't', 0) "
        "RETURNING id"
    ).fetchone()
    assert row == (501,)
    db.execute(f"DROP SCHEMA {name} CASCADE")


def test_a_renamed_group_goes_on_where_it_was(
    db: psycopg.Connection[Any], make_consumer: MakeConsumer, bootstrap_servers: str, conninfo: str, name: str
) -> None:
    ensure_journal(conninfo)
    (text,) = (block for block in code("docs/how-to/deploy.md", "sql") if "SET group_id" in block)
    tables = db.execute(
        "SELECT table_name::text FROM information_schema.columns WHERE table_schema = 'exactly_once' "
        "AND column_name = 'group_id' AND table_name NOT LIKE 'spark%'"
    ).fetchall()
    assert {table for (table,) in tables} == set(re.findall(r"UPDATE exactly_once\.(\w+)", text))
    topic = create_topic(bootstrap_servers, 2)
    for group, messages in ((name, 20), (f"{name}-new", 10)):
        produce(bootstrap_servers, topic, messages, 2)
        with make_consumer({"group.id": group}) as consumer:
            consumer.subscribe([topic])
            assert drain(consumer) == messages
        db.execute(text.replace("'old'", f"'{name}'").replace("'new'", f"'{name}-new'"))
