"""Fixtures of the commands' tests: running one, and a group that has consumed something."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from exactly_once.cli import main
from exactly_once.ledger import stale_owners
from tests.conftest import MakeConsumer
from tests.support.topics import create_topic, produce

PARTITIONS = 2


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document that it printed."""
        return json.loads(self.out)

    @property
    def partitions(self) -> list[dict[str, Any]]:
        """The partitions of that document."""
        found: list[dict[str, Any]] = self.json["partitions"]
        return found


Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in os.environ:
        if key.startswith("PG") or key in (
            "EXACTLY_ONCE_BOOTSTRAP_SERVERS",
            "EXACTLY_ONCE_GROUP_ID",
            "EXACTLY_ONCE_CONNINFO",
            "COLUMNS",
        ):
            monkeypatch.delenv(key)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; what libraries write to the file descriptors is caught, too."""

    def run(*args: object) -> Result:
        capfd.readouterr()
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        result = Result(code, *capfd.readouterr())
        assert "--debug" in args or "Traceback" not in result.err
        return result

    return run


@contextlib.contextmanager
def holding_until_told(other: psycopg.Connection[Any]) -> Iterator[None]:
    """Keep what a transaction has locked until the log names who holds somebody up."""
    told = threading.Event()

    def note(record: logging.LogRecord) -> bool:
        if getattr(record, "action", "") == "unit_blocked":
            told.set()
        return True

    def unlock() -> None:
        told.wait(60)
        other.rollback()

    waiting = threading.Thread(target=unlock)
    stale_owners.logger.addFilter(note)
    try:
        waiting.start()
        yield
    finally:
        stale_owners.logger.removeFilter(note)
        waiting.join()


@pytest.fixture
def operate(command: Command, bootstrap_servers: str, conninfo: str, name: str) -> Command:
    """Run a command on this test's servers and group."""

    def run(*args: object) -> Result:
        where = ("--conninfo", conninfo, "--bootstrap-servers", bootstrap_servers, "--group-id", name)
        return command(*args, *where)

    return run


@pytest.fixture
def topic(bootstrap_servers: str, name: str) -> str:
    """A topic of two partitions with ten messages in each."""
    create_topic(bootstrap_servers, PARTITIONS, name=name)
    produce(bootstrap_servers, name, 20, PARTITIONS)
    return name


@pytest.fixture
def consumed(topic: str, make_consumer: MakeConsumer) -> str:
    """A topic that the group has read to its end; its consumer is closed."""
    assert read_to_end(make_consumer, topic) == [(p, o) for p in range(PARTITIONS) for o in range(10)]
    return topic


def read_to_end(make_consumer: MakeConsumer, topic: str, **options: Any) -> list[tuple[int, int]]:
    """Consume until the end; return partition and offset of every message that took effect, sorted."""
    seen: list[tuple[int, int]] = []
    with make_consumer(**options) as consumer:
        consumer.subscribe([topic])
        for unit in consumer.units(until_end=True):
            with unit:
                messages = [(m.partition() or 0, m.offset() or 0) for m in unit.messages]
            seen += messages
    return sorted(seen)


def ledger(db: psycopg.Connection[Any], group_id: str) -> list[tuple[Any, ...]]:
    """Every column of a group's rows."""
    return db.execute(
        "SELECT * FROM exactly_once.ledger WHERE group_id = %s ORDER BY topic, partition", (group_id,)
    ).fetchall()


def offsets(db: psycopg.Connection[Any], group_id: str) -> list[int | None]:
    """The next offsets of a group's rows."""
    rows = db.execute("SELECT next_offset FROM exactly_once.ledger WHERE group_id = %s ORDER BY partition", (group_id,))
    return [offset for (offset,) in rows]


def audit(db: psycopg.Connection[Any], group_id: str, action: str) -> list[tuple[Any, ...]]:
    """Partition, old offset, new offset and reason of a group's audit rows."""
    return db.execute(
        "SELECT partition, old_offset, new_offset, reason FROM exactly_once.audit "
        "WHERE group_id = %s AND action = %s ORDER BY id",
        (group_id, action),
    ).fetchall()


def suggested(text: str) -> list[str]:
    """The command that an error names, as arguments."""
    found = re.search(r"exactly-once ((?:reset|adopt|migrate|hand-over)(?: --[a-z-]+(?: [\w.{}-]+)?)*)", text)
    assert found, text
    return shlex.split(found[1])
