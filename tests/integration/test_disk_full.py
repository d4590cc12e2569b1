"""A disk without room under Postgres: a small file system of its own, which root may mount."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from exactly_once import Redelivered
from exactly_once.embedded import Postgres
from exactly_once.ledger.migrate import migrate
from tests.integration.conftest import MakeScene
from tests.integration.scene import apply
from tests.support import journal
from tests.support.require import skip_unless
from tests.support.worker import drain, record

WIDE = 200_000
"""Bytes of one row, far more than the pages of a file have room for. They are random, or they would be compressed."""


class Disk(NamedTuple):
    """A file system in memory."""

    directory: Path

    def fill(self) -> None:
        """Leave no room: its size becomes what is in use."""
        found = os.statvfs(self.directory)
        self._resize((found.f_blocks - found.f_bfree) * found.f_frsize)

    def clear(self) -> None:
        """Leave more room than anything here needs; only what is written takes memory."""
        self._resize(1 << 30)

    def _resize(self, size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", self.directory], check=True)


@pytest.fixture
def disk() -> Iterator[Disk]:
    """A file system whose size the test sets."""
    with tempfile.TemporaryDirectory(prefix="exactly-once-disk-") as directory:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1g,mode=755", "tmpfs", directory]
        try:
            done = subprocess.run(mount, capture_output=True, text=True, check=False)
        except OSError as error:
            skip_unless("mount", str(error))
            raise
        skip_unless("mount", done.stderr.strip() or "failed" if done.returncode else None)
        try:
            yield Disk(Path(directory))
        finally:
            subprocess.run(["umount", "--lazy", directory], check=True)


@pytest.fixture
def server(disk: Disk, own_servers: None) -> Iterator[Postgres]:
    """A server whose data is there, with the schema and the journal."""
    with Postgres(directory=disk.directory, settings={"fsync": "off"}) as server:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            migrate(connection)
            connection.execute("CREATE TABLE wide (value bytea)")
        journal.create(server.conninfo)
        yield server
        disk.clear()


@pytest.mark.fault("B18")
def test_a_full_disk_undoes_units_until_there_is_room(make_scene: MakeScene, server: Postgres, disk: Disk) -> None:
    scene = make_scene(30)
    consumer = scene.consumer(conninfo=server.conninfo)
    units = iter(consumer)
    apply(next(units))
    disk.fill()
    pid = server.pid
    for attempt in (1, 2):
        unit = next(units)
        assert unit.attempt == attempt
        with pytest.raises(Redelivered) as raised, unit:
            record(unit, "test")
            unit.execute("INSERT INTO wide VALUES (%s)", (os.urandom(WIDE),))
        assert isinstance(raised.value.__cause__, psycopg.errors.DiskFull)
    disk.clear()
    drain(consumer)
    assert (server.pid, server.is_running()) == (pid, True)
    verdict = journal.check(server.conninfo, scene.bootstrap_servers, scene.topic)
    assert verdict.exact, str(verdict)
