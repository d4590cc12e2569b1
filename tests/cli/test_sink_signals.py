"""Signals, kills and restarts of the sink command, in processes of their own."""

# ruff: noqa: PLR0917 - fixtures and parameters are positional

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.cli.conftest import Command
from tests.cli.test_sink import payments, rows, send, workers_of
from tests.conftest import MakeConsumer
from tests.support.topics import create_topic
from tests.support.waiting import until

Database = psycopg.Connection[Any]
OWNERS = "SELECT count(DISTINCT owner_token) FROM exactly_once.ledger WHERE group_id = %s AND owner_token IS NOT NULL"


class Sink:
    """A sink process and what it says."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def said(self) -> str:
        return self._log.read_text("utf-8")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        return self.process.wait(180)


class Start:
    """Starts sinks of one topic into one table."""

    def __init__(self, source: str, where: list[str], folder: Path) -> None:
        self.command = [sys.executable, "-m", "exactly_once", "sink", "--topic", source, "--table", source, *where]
        self._folder = folder
        self._count = 0

    @contextmanager
    def __call__(self, *more: str) -> Iterator[Sink]:
        self._count += 1
        log = self._folder / f"sink-{self._count}.log"
        with log.open("w") as stderr, subprocess.Popen([*self.command, *more], stderr=stderr, text=True) as process:
            try:
                yield Sink(process, log)
            finally:
                children = workers_of(process) if process.poll() is None else []
                process.kill()
                for child in children:
                    with contextlib.suppress(Exception):
                        child.kill()


@pytest.fixture
def source(bootstrap_servers: str, name: str, db: Database) -> str:
    """A topic of two partitions with ten messages, and a table for it."""
    create_topic(bootstrap_servers, 2, name=name)
    db.execute(f"CREATE TABLE {name} (id int)")
    send(bootstrap_servers, name, payments(10))
    return name


@pytest.fixture
def start(bootstrap_servers: str, conninfo: str, source: str, tmp_path: Path) -> Start:
    where = ["--bootstrap-servers", bootstrap_servers, "--conninfo", conninfo, "--group-id", source]
    return Start(source, [*where, "--start", "earliest"], tmp_path)


@pytest.fixture
def long_session(tmp_path: Path) -> tuple[str, str]:
    """An option with which a member that died keeps its partitions for longer than anything here is waited for."""
    file = tmp_path / "long-session.toml"
    file.write_text("[kafka]\nsession.timeout.ms = 300000\n")
    return "--config", str(file)


def has(db: Database, table: str, count: int) -> Any:
    return lambda: len(rows(db, table)) == count


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_restart_after_a_kill_goes_on_at_once(
    workers: str, start: Start, source: str, db: Database, bootstrap_servers: str, long_session: tuple[str, str]
) -> None:
    """Well before the group's session time-out, for which members that died keep their partitions."""
    with start("--workers", workers, *long_session) as sink:
        until(has(db, source, 10), 120, "the first messages")
        # The workers of the first one end with it, in order, or are killed as well.
        killed = workers_of(sink.process)
        sink.signal(signal.SIGKILL)
        for worker in killed:
            worker.kill()
        assert sink.ended() == -signal.SIGKILL
    send(bootstrap_servers, source, payments(10))
    with start("--workers", workers, *long_session) as sink:
        until(has(db, source, 20), 120, "the next ones")
        sink.signal(signal.SIGTERM)
        assert sink.ended() == 0, sink.said


def test_a_member_that_ends_in_order_leaves_its_partitions_to_others(
    start: Start,
    source: str,
    db: Database,
    bootstrap_servers: str,
    make_consumer: MakeConsumer,
    long_session: tuple[str, str],
) -> None:
    with start(*long_session) as sink:
        until(has(db, source, 10), 120, "the first messages")
        sink.signal(signal.SIGTERM)
        assert sink.ended() == 0, sink.said
    with make_consumer({"group.id": source}) as consumer:
        consumer.subscribe([source])
        send(bootstrap_servers, source, payments(2))
        units = consumer.units(idle_seconds=120)
        got = 0
        while got < 2:
            with next(units) as unit:
                got += len(unit.messages)


def test_two_sinks_of_one_group_and_machine_are_two_members(
    start: Start, source: str, db: Database, bootstrap_servers: str
) -> None:
    with start() as one, start() as other:
        until(lambda: db.execute(OWNERS, (source,)).fetchone() == (2,), 120, "both at work")
        for sink in (one, other):
            sink.signal(signal.SIGTERM)
            assert sink.ended() == 0, sink.said


@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_a_stop_waits_for_is_bounded_and_told(
    workers: str, start: Start, source: str, db: Database, conninfo: str, bootstrap_servers: str
) -> None:
    """The table is locked; the unit in hand is given up after --stop-seconds, and comes again."""
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = %s::regclass"
    with (
        start("--stop-seconds", "0.5", "--workers", workers) as sink,
        psycopg.connect(conninfo) as blocker,
    ):
        until(has(db, source, 10), 120, "the first messages")
        until(lambda: db.execute(OWNERS, (source,)).fetchone() == (int(workers),), 120, "every worker at work")
        blocker.execute(f"LOCK TABLE {source} IN SHARE MODE")
        send(bootstrap_servers, source, payments(4))
        until(lambda: db.execute(waits, (source,)).fetchone() != (0,), 120, "a unit that waits for the lock")
        sink.signal(signal.SIGTERM)
        assert sink.ended() == 143, sink.said
        assert "for which at most 0.5 s are waited" in sink.said
    with start("--until-end") as sink:
        assert sink.ended() == 0, sink.said
    assert len(rows(db, source)) == 14


@pytest.mark.parametrize("instance", ["", "named"])
def test_progress_is_the_sum_of_all_workers(
    instance: str, start: Start, source: str, db: Database, tmp_path: Path
) -> None:
    """Also where members are dynamic, or have a name of the operator's own."""
    file = tmp_path / "sink.toml"
    # A member that an operator has named keeps its partitions for so long after it has read to the end.
    file.write_text(f'[kafka]\ngroup.instance.id = "{instance}"\nsession.timeout.ms = 6000\n')
    with start("--workers", "2", "--until-end", "--config", str(file)) as sink:
        assert sink.ended() == 0, sink.said
    assert len(rows(db, source)) == 10
    assert "10 messages; " in sink.said.splitlines()[-1]


@pytest.mark.parametrize(("more", "code"), [((), 0), (("--until-end",), 143)])
def test_a_stop_before_anything_has_begun_is_orderly(more: tuple[str, ...], code: int, start: Start) -> None:
    """With --until-end it is no success: the end was not reached."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        start("--conninfo", f"postgresql://127.0.0.1:{silent.getsockname()[1]}/x", *more) as sink,
    ):
        silent.settimeout(180)
        connection, _ = silent.accept()
        sink.signal(signal.SIGTERM)
        assert sink.ended() == code, sink.said
        connection.close()
    assert "SIGTERM" in sink.said


@pytest.mark.parametrize(
    ("more", "number", "code"),
    [
        ((), signal.SIGTERM, 0),
        (("--until-end",), signal.SIGTERM, 143),
        (("--until-end",), signal.SIGINT, 130),
    ],
)
def test_a_stop_of_workers_that_have_not_begun(
    more: tuple[str, ...], number: signal.Signals, code: int, start: Start, source: str, db: Database, conninfo: str
) -> None:
    """They die of the signal, as Python takes longer to start than it takes to come."""
    lock = f"pg_advisory_xact_lock(hashtext('{source}'))"
    if more:  # nothing is stored where the signal comes late, so that the end is never reached
        db.execute(f"ALTER TABLE {source} ADD CHECK ({lock} IS NOT NULL)")
    with psycopg.connect(conninfo) as blocker, start("--workers", "2", *more) as sink:
        blocker.execute(f"SELECT {lock}")
        until(lambda: len(workers_of(sink.process)) == 2, 120, "the workers")
        sink.signal(number)
        assert sink.ended() == code, sink.said


def test_a_stop_while_workers_are_started_reaches_each(
    operate: Command, source: str, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it had come too early for worked on, until they were killed after three quarters of a minute."""
    start = SpawnProcess.start

    def start_and_interrupt(process: SpawnProcess) -> None:
        start(process)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(SpawnProcess, "start", start_and_interrupt)
    options = ("--workers", "2", "--start", "earliest", "--until-end")
    result = operate("sink", "--topic", source, "--table", source, *options)
    assert (result.code, rows(db, source)) == (143, []), result.err


def test_records_are_one_stream_of_json_to_the_end(start: Start, source: str, db: Database) -> None:
    db.execute(f"ALTER TABLE {source} ADD CHECK (id <> 5)")
    for workers, *more in (
        ("1",),
        ("2",),
        ("2", "--until-end"),
    ):  # the others are sent SIGTERM, which is no signal to us
        with start("--json", "--workers", workers, *more) as sink:
            assert sink.ended() == 1
            records = [json.loads(line) for line in sink.said.splitlines()]
        assert any(r.get("action") == "failed" and "--on-poison dead-letter" in r["text"] for r in records), records


def test_messages_that_are_set_aside_again_behind_a_reset_are_named_again(
    start: Start, source: str, db: Database, bootstrap_servers: str, operate: Command
) -> None:
    """The log had named them, so nothing was said of those that the same worker set aside anew."""
    send(bootstrap_servers, source, [("0", b"bad"), ("0", b"worse")], 2)
    letters = "SELECT count(*) FROM exactly_once.dead_letter WHERE group_id = %s AND status = 'dead'"

    def named() -> list[int]:
        found = re.findall(r"ERROR \S+ (offset \d+) was stored", sink.said)
        return sorted(Counter(found).values())

    with start("--on-poison", "dead-letter") as sink:
        until(lambda: db.execute(letters, (source,)).fetchone() == (2,) and named() == [1, 1], 120, "two dead letters")
        assert operate("reset", "--topic", source, "--to-earliest", "--execute").code == 0
        until(has(db, source, 20), 120, "all messages again")
        until(lambda: named() == [2, 2], 120, "both to be named again")
        sink.signal(signal.SIGTERM)
        assert sink.ended() == 0, sink.said
