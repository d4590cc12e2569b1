"""Pages that a reader follows from an empty folder and an empty database: their own blocks, in the reader's order.

Other pages are walked elsewhere: those of psycopg, SQLAlchemy and Django in test_conversions.py, FastAPI and Alembic in
test_frameworks.py, the table sink in tests/writer/test_how_to.py, roles, TLS and failover in tests/docker, the demo and
what the README has one try next in tests/demo.
"""

from __future__ import annotations

import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psycopg
import pytest
import yaml  # type: ignore[import-untyped]

from exactly_once.cli import main
from exactly_once.embedded.ports import free_port
from tests.docs.programs import code, placed, run
from tests.docs.test_conversions import database
from tests.support.pgbouncer import PgBouncer, pgbouncer_missing
from tests.support.require import skip_unless
from tests.support.topics import create_topic, produce

KUBERNETES = "docs/how-to/kubernetes.md"


@pytest.fixture
def empty(postgres_conninfo: str, name: str) -> Iterator[str]:
    """An empty database, as a URI."""
    with database(postgres_conninfo, name):
        yield re.sub(r"/\w*$", f"/{name}", postgres_conninfo)


def balance(conninfo: str) -> int:
    with psycopg.connect(conninfo) as connection:
        (found,) = connection.execute("SELECT balance FROM account WHERE id = 1").fetchone() or (-1,)
    return int(found)


def test_readme(empty: str, bootstrap_servers: str, name: str, tmp_path: Path, capsys: Any) -> None:
    """Make the tables, make what the first program needs, run it, look at it."""

    def follow(text: str) -> str:
        return placed(text, bootstrap_servers, empty).replace('"payments"', f'"{name}"')

    (migrate,) = [line for block in code("README.md", "console") for line in block.split("\n") if " migrate " in line]
    assert main(shlex.split(follow(migrate))[1:]) == 0
    create_topic(bootstrap_servers, 1, name=name)  # which the tests' broker does not make by itself
    (prepare,) = [block for block in code("README.md", "python") if "produce(" in block]
    exec(follow(prepare), {})
    (tmp_path / "accounts.py").write_text(follow(code("README.md", "python")[0]))
    assert run([sys.executable, "accounts.py"], lambda: balance(empty) == 100, signal.SIGTERM, tmp_path) == 0
    assert main(["status", "--group-id", "accounts", "--conninfo", empty, "--json"]) == 0
    assert f'"topic": "{name}"' in capsys.readouterr().out


def test_kubernetes(empty: str, bootstrap_servers: str, name: str, tmp_path: Path) -> None:
    """The worker behind PgBouncer, probed and stopped as its manifest says."""
    skip_unless("pgbouncer", pgbouncer_missing())
    (program,) = code(KUBERNETES, "python")
    (manifest,) = (yaml.safe_load(block) for block in code(KUBERNETES, "yaml"))
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (port,) = container["ports"]
    probes = [container[probe]["httpGet"] for probe in ("livenessProbe", "readinessProbe")]
    assert {probe["port"] for probe in probes} == {port["name"]}
    assert container["command"] == ["python", "worker.py"]
    assert f"port={port['containerPort']}" in program
    (stop_seconds,) = map(int, re.findall(r"stop_seconds=(\d+)", program))
    assert pod["terminationGracePeriodSeconds"] > stop_seconds + 10, "as the page says"

    assert main(["migrate", "--conninfo", empty]) == 0
    with psycopg.connect(empty) as connection:
        connection.execute("CREATE TABLE account AS SELECT 1 AS id, 0::bigint AS balance")
    create_topic(bootstrap_servers, 3, name=name)
    produce(bootstrap_servers, name, 30, 3)
    free = free_port()

    def is_right() -> bool:
        return balance(empty) == sum(range(30))

    def is_done() -> bool:
        try:
            for probe in probes:  # an answer other than 200 is an error, too
                urlopen(f"http://127.0.0.1:{free}{probe['path']}", timeout=5).close()
        except OSError:
            return False
        return is_right()

    with PgBouncer(empty, pool_size=3) as pooler:
        text = placed(program, bootstrap_servers, pooler.conninfo).replace('"payments"', f'"{name}"')
        (tmp_path / "worker.py").write_text(text.replace(f"port={port['containerPort']}", f"port={free}"))
        assert run([sys.executable, "worker.py"], is_done, signal.SIGTERM, tmp_path, is_right=is_right) == 0
    with psycopg.connect(empty) as connection:
        owned = "SELECT count(*) FROM exactly_once.ledger WHERE owner_token IS NOT NULL"
        assert connection.execute(owned).fetchone() == (0,), "rows were not released"
