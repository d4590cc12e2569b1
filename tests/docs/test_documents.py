"""Every code block and every command of README.md and docs/ is run, or known to be run elsewhere."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from exactly_once.cli import main
from tests.support.topics import create_topic, produce
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MESSAGES = 1000


def blocks(language: str) -> Iterator[Any]:
    """Find the fenced blocks of one language, each with a readable name."""
    for document in DOCUMENTS:
        found = re.findall(rf"^```{language}\n(.*?)^```", document.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        for number, block in enumerate(found, 1):
            yield pytest.param(block, id=f"{document.relative_to(ROOT)}-{number}")


def commands() -> Iterator[str]:
    """Find every command line."""
    for parameters in blocks("console"):
        yield from (line for line in parameters.values[0].splitlines() if line.strip())


@pytest.fixture(scope="module")
def payments(bootstrap_servers: str) -> str:
    """The topic that the documents read: numbers, as text."""
    topic = create_topic(bootstrap_servers, 3, name="payments")
    produce(bootstrap_servers, topic, MESSAGES, 3)
    return topic


@pytest.fixture
def bank(db: psycopg.Connection[Any]) -> Iterator[psycopg.Connection[Any]]:
    """The table that the documents write to."""
    db.execute("CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL)")
    db.execute("INSERT INTO account VALUES (1, 0)")
    yield db
    db.execute("DROP TABLE account")


@pytest.mark.parametrize("block", list(blocks("python")))
def test_code_block_applies_every_payment_once(
    block: str, payments: str, bank: psycopg.Connection[Any], bootstrap_servers: str, conninfo: str
) -> None:
    program = block.replace("localhost:9092", bootstrap_servers).replace("postgresql://localhost/bank", conninfo)
    total = sum(range(MESSAGES))

    def balance() -> int:
        row = bank.execute("SELECT balance FROM account WHERE id = 1").fetchone()
        assert row is not None
        return int(row[0])

    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: balance() >= total or process.poll() is not None, 60, "every payment")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert balance() == total, errors


@pytest.mark.parametrize("command", list(commands()))
def test_command_works(command: str, conninfo: str) -> None:
    words = shlex.split(command)
    match words:
        case ["python3", "run.py", "demo" | "test", *_]:
            # The tests are run by this very command, the demo by its own tests.
            usage = subprocess.run([sys.executable, "run.py"], cwd=ROOT, capture_output=True, text=True, check=False)
            assert f"run.py {words[2]}" in usage.stderr
        case ["bash", ".ci/run"]:
            assert os.access(ROOT / ".ci" / "run", os.R_OK)
        case ["pip", "install", requirement]:
            distribution, _, extra = requirement.rstrip("]").partition("[")
            project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
            assert distribution == project["name"]
            assert not extra or extra in project["optional-dependencies"]
        case ["exactly-once", *arguments]:
            assert main([a.replace("postgresql://localhost/bank", conninfo) for a in arguments]) == 0
        case ["python3", "benchmarks/guarantee_cost.py", *_]:
            text = [sys.executable, "benchmarks/guarantee_cost.py", "--help"]
            assert subprocess.run(text, cwd=ROOT, capture_output=True, check=False).returncode == 0
        case _:
            pytest.fail(f"nobody runs this command: {command}")
