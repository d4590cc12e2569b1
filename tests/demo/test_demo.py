"""``exactly-once demo`` as a user starts it: in a process of its own, with servers of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("own_servers")

SEED = 7
_MARK = "EXACTLY_ONCE_DEMO_TEST"
"""A variable that everything the demo starts inherits, so that a test can find it."""


@dataclass(frozen=True)
class Run:
    """A finished demo."""

    status: int
    output: str
    errors: str
    left: list[str]

    @property
    def result(self) -> dict[str, Any]:
        """What the last line says."""
        document: dict[str, Any] = json.loads(self.output.splitlines()[-1])
        return document


@pytest.fixture(scope="module")
def quick() -> Run:
    """One quick run, looked at by several tests."""
    mark = uuid.uuid4().hex
    done = subprocess.run(
        _command("--quick", "--json", "--seed", str(SEED)),
        env=os.environ | {_MARK: mark},
        capture_output=True,
        text=True,
        check=False,
        timeout=850,
    )
    print(done.stdout, done.stderr)
    return Run(done.returncode, done.stdout, done.stderr, [str(process) for process in _with_mark(mark)])


def test_library_loses_and_doubles_nothing(quick: Run) -> None:
    side = quick.result["exactly_once"]
    assert quick.status == 0, quick.output + quick.errors
    assert (side["lost"], side["duplicated"], side["foreign"], side["wrong_balances"]) == (0, 0, 0, 0)
    assert side["messages"] == 20_000
    assert side["balance"] == side["expected_balance"]
    assert side["drained"]


def test_library_was_injured_at_every_failpoint(quick: Run) -> None:
    side = quick.result["exactly_once"]
    assert side["crashes"] == 8
    assert side["frozen"] == 2


def test_library_fenced_all_zombies(quick: Run) -> None:
    side = quick.result["exactly_once"]
    assert side["fenced"] > 0
    assert side["unfenced"] == 0


def test_ordinary_loop_doubles_under_the_same_faults(quick: Run) -> None:
    side = quick.result["at_least_once"]
    assert side["duplicated"] > 0
    assert side["lost"] == 0
    assert side["crashes"] == quick.result["exactly_once"]["crashes"]
    assert side["fenced"] == 0
    assert side["unfenced"] == side["frozen"]


def test_output_says_the_seed_and_is_plain_without_a_terminal(quick: Run) -> None:
    assert f"--seed {SEED}" in quick.output
    assert "\x1b" not in quick.output
    assert "\r" not in quick.output
    assert not quick.errors


def test_nothing_is_left_running_after_it(quick: Run) -> None:
    assert quick.left == []


@pytest.fixture
def running() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A demo at the moment at which it has a frozen worker, and the mark of its processes."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        _command("--quick", "--seed", str(SEED)),
        env=os.environ | {_MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with process:
        told = []
        for line in process.stdout:
            told.append(line)
            if "frozen" in line:
                break
        else:
            pytest.fail("the demo froze no worker:\n" + "".join(told))
        yield process, mark
        process.kill()
    for each in _with_mark(mark):
        each.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_everything_ends_with_the_demo_however_it_ends(
    running: tuple[subprocess.Popen[str], str], number: signal.Signals
) -> None:
    """Workers, also the frozen one, the broker and the database."""
    process, mark = running
    assert len(_with_mark(mark)) > 5
    process.send_signal(number)
    until(lambda: not _with_mark(mark), 120, "every process of the demo to be gone")
    status = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert process.wait() == status[number]


def test_servers_stay_with_keep_for_what_the_readme_shows_then(tmp_path: Path) -> None:
    """Every command that it prints works, also where there is no psql."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        _command("--quick", "--keep", "--json", "--debug", "--seed", "1", "--messages", "3000"),
        env=os.environ | {_MARK: mark, "PATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with process:
        try:
            lines: list[str] = []
            while not lines or "journal" not in lines[-1]:
                lines.append(process.stdout.readline())
                assert lines[-1], "".join(lines)
            said = "".join(lines)
            shown = subprocess.run(
                lines[-1],
                shell=True,
                env=os.environ | {"PATH": str(tmp_path)},
                capture_output=True,
                text=True,
                check=False,
            )
            assert (shown.returncode, len(shown.stdout.splitlines())) == (0, 10), shown.stderr
            said = said.rpartition("another terminal:")[2]
            hints = [shlex.split(line) for line in said.splitlines() if line]
            where = dict(words[1].split("=", 1) for words in hints if words[0] == "export")
            assert _exactly_once(where, "status").count("payments-exactly-once") >= 6
            (sink,) = (words[1:] for words in hints if words[1] == "sink")
            assert [sink] == _sinks_of_the_readme()
            _exactly_once(where, *sink)
            with psycopg.connect(where["EXACTLY_ONCE_CONNINFO"]) as connection:
                found = """SELECT count(*), min("from") >= 0, min(card ->> 'network') FROM payment"""
                assert connection.execute(found).fetchone() == (3000, True, "amex")
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            assert json.loads(rest.splitlines()[-1])["ok"]
            assert process.wait() == 0
        finally:
            process.kill()
    assert not _with_mark(mark)


def _exactly_once(where: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "exactly_once", *words]
    done = subprocess.run(command, env=os.environ | where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _sinks_of_the_readme() -> list[list[str]]:
    """Find what the README would have one type next."""
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    return [shlex.split(line)[1:] for line in re.findall(r"^\.venv/bin/exactly-once sink .*$", text, re.MULTILINE)]


def _command(*options: str) -> list[str]:
    return [sys.executable, "-m", "exactly_once", "demo", *options]


def _with_mark(mark: str) -> list[psutil.Process]:
    """Find the processes that inherited a mark and have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
