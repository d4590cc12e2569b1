"""A new release is deployed while workers of the old one run: the schema is migrated under them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

import exactly_once
from exactly_once.ledger.migrate import VERSION, migrate
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import ROOT, Crew, Worker

PARTITIONS = 4
OPTIONS = {"max_messages": 10}


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """The next release: this one, and a migration that this one can live with."""
    shutil.copytree(Path(exactly_once.__file__).parent, tmp_path / "exactly_once")
    ddl = f"""
        ALTER TABLE {{schema}}.ledger ADD COLUMN remark text NOT NULL DEFAULT 'next';
        UPDATE {{schema}}.version SET version = {VERSION + 1};
    """
    (tmp_path / "exactly_once" / "ledger" / "sql" / "migrations" / f"{VERSION + 1:04d}_next.sql").write_text(ddl)
    return tmp_path


@pytest.fixture
def database(postgres_conninfo: str, name: str) -> Iterator[str]:
    """A database with the schema of this release."""
    with psycopg.connect(postgres_conninfo, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    conninfo = psycopg.conninfo.make_conninfo(postgres_conninfo, dbname=name)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        migrate(connection)
    yield conninfo
    with psycopg.connect(postgres_conninfo, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.mark.slow
@pytest.mark.fault("B20")
def test_old_and_new_release_share_a_group_while_the_schema_is_migrated(
    release: Path, database: str, bootstrap_servers: str, name: str
) -> None:
    program = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv[0] = ''; "

    class NewWorker(Worker):
        def _command(self, config: str) -> list[str]:
            run = "runpy.run_module('tests.support.worker', run_name='__main__')"
            return [sys.executable, "-c", program + run, str(release), config]

    def launch(config: Mapping[str, Any]) -> Worker:
        return NewWorker(config) if config.get("is_new") else Worker(config)

    topic = create_topic(bootstrap_servers, PARTITIONS)
    with Crew(bootstrap_servers, database, name, [topic], launch=launch) as crew:
        old = crew.start(options=OPTIONS)
        produce(bootstrap_servers, topic, 100, PARTITIONS)
        crew.until_applied(100)
        early = crew.start(is_new=True, options=OPTIONS, ready=False)
        assert early.wait("failed")["error"] == "SchemaTooOld"
        command = "from exactly_once.cli import main; sys.exit(main(['migrate', '--conninfo', sys.argv[1]]))"
        migrating = [sys.executable, "-c", program + command, str(release), database]
        subprocess.run(migrating, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=60)
        assert crew.look("SELECT remark FROM exactly_once.ledger WHERE group_id = %s") == [("next",)] * PARTITIONS
        new = crew.start(is_new=True, options=OPTIONS)
        again = crew.start(options=OPTIONS)  # of the old release, begun after the migration
        workers = {old.name, new.name, again.name}
        until(lambda: set(crew.owners()) == workers, 40, "all to own partitions")
        produce(bootstrap_servers, topic, 200, PARTITIONS, start=100)
        crew.until_applied(300)
        crew.end_well(old, again)
        produce(bootstrap_servers, topic, 100, PARTITIONS, start=300)
        crew.until_applied(400)
        crew.end_well(new)
        crew.assert_exact()
