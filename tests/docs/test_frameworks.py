"""Pages for people with a framework that is none of the project's dependencies; it is installed for the test."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.request import urlopen

import psycopg
import pytest

from exactly_once.embedded.ports import free_port
from exactly_once.ledger.migrate import migrate
from tests.docs.programs import ROOT, code, placed, run
from tests.docs.test_conversions import database
from tests.support.require import VARIABLE, required_parts
from tests.support.topics import create_topic, delete_topic, produce

if "other-packages" not in required_parts():
    pytest.skip(f"packages are installed if {VARIABLE} names other-packages", allow_module_level=True)

EXAMPLES = ROOT / "examples"
MESSAGES = 60
RATE = 2


@pytest.fixture
def uri(postgres_conninfo: str, name: str) -> Iterator[str]:
    """A database with the ledger, as a URI."""
    with database(postgres_conninfo, name):
        found = re.sub(r"/\w*$", f"/{name}", postgres_conninfo)
        with psycopg.connect(found, autocommit=True) as connection:
            migrate(connection)
        yield found


def python_path(directory: Path, *packages: str) -> str:
    """Install packages into a directory, and return the path that has them behind this project."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(directory)]
    constraints = ["--constraint", str(ROOT / "tests" / "docs" / "migrate-constraints.txt")]
    subprocess.run([*pip, *constraints, *packages], check=True, timeout=300)
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(directory)])


class _Rates(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(RATE).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def rates() -> Iterator[str]:
    """What the example asks over HTTP, running."""
    with HTTPServer(("127.0.0.1", 0), _Rates) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_fastapi_serves_while_every_message_is_applied_once(
    uri: str, bootstrap_servers: str, rates: str, tmp_path: Path
) -> None:
    path = python_path(tmp_path / "packages", "fastapi", "uvicorn", "httpx")
    shutil.copytree(EXAMPLES / "asyncio_app", tmp_path / "app")
    with psycopg.connect(uri) as connection:
        connection.execute("CREATE TABLE payment (amount numeric)")
    topic = create_topic(bootstrap_servers, 3, name="payments")
    produce(bootstrap_servers, topic, MESSAGES, 3)
    port = free_port()

    def amounts() -> list[int]:
        with psycopg.connect(uri) as connection:
            return [int(amount) for (amount,) in connection.execute("SELECT amount FROM payment ORDER BY amount")]

    def is_done() -> bool:
        return amounts() == [RATE * number for number in range(MESSAGES)]

    def is_ready() -> bool:
        try:
            urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
        except OSError:  # an answer other than 200, too
            return False
        return is_done()

    env = {"EXACTLY_ONCE_BOOTSTRAP_SERVERS": bootstrap_servers, "EXACTLY_ONCE_CONNINFO": uri, "RATES_URL": rates}
    command = [sys.executable, "-m", "uvicorn", "web:app", "--host", "127.0.0.1", "--port", str(port)]
    try:
        status = run(command, is_ready, signal.SIGTERM, tmp_path / "app", is_right=is_done, PYTHONPATH=path, **env)
        # As an application's own tests do it, each with a client: the application starts twice in one process.
        twice = "import web\nfrom fastapi.testclient import TestClient\nfor _ in range(2):\n"
        twice += "    with TestClient(web.app) as client:\n        client.get('/readyz')"
        again = {**os.environ, "PYTHONPATH": path, **env}
        subprocess.run([sys.executable, "-c", twice], cwd=tmp_path / "app", env=again, check=True, timeout=60)
    finally:
        delete_topic(bootstrap_servers, topic)
    assert status in (0, -signal.SIGTERM), "uvicorn ends in order, then by the signal that it was sent"
    with psycopg.connect(uri) as connection:
        owned = "SELECT count(*) FROM exactly_once.ledger WHERE owner_token IS NOT NULL"
        assert connection.execute(owned).fetchone() == (0,), "rows were not released"


def test_alembic_leaves_the_ledger_alone(uri: str, tmp_path: Path) -> None:
    path = python_path(tmp_path / "packages", "alembic")
    shutil.copy(EXAMPLES / "sqlalchemy_app" / "models.py", tmp_path)
    env = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{tmp_path}", "EXACTLY_ONCE_CONNINFO": uri}
    (deploy,) = code("docs/how-to/sqlalchemy.md", "sh")
    migrate_ledger, *upgrade = placed(deploy, "", uri).splitlines()

    def call(line: str) -> None:
        program, *words = shlex.split(line)
        command = [sys.executable, "-m", program.replace("-", "_"), *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    call("alembic init migrations")
    shutil.copy(EXAMPLES / "sqlalchemy_app" / "env.py", tmp_path / "migrations")
    call(migrate_ledger)
    call("alembic revision --autogenerate -m orders")
    for line in upgrade:
        call(line)
    with psycopg.connect(uri) as connection:
        tables = "SELECT to_regclass('customer_order'), to_regclass('exactly_once.ledger')"
        assert None not in (connection.execute(tables).fetchone() or [None])


POOLED = """
import sys

import psycopg
from psycopg_pool import ConnectionPool

from exactly_once import ExactlyOnceConsumer, Redelivered

servers, conninfo, topic = sys.argv[1:]
with ConnectionPool(conninfo, min_size=1, max_size=2, timeout=120) as pool, psycopg.connect(conninfo) as other:
    settings = {"bootstrap.servers": servers, "group.id": topic}
    consumer = ExactlyOnceConsumer(settings, connect=pool.getconn, max_messages=5)
    consumer.subscribe([topic])
    units, lost = consumer.units(until_end=True), 0
    while True:
        try:
            for unit in units:
                with unit:
                    unit.executemany("INSERT INTO effect VALUES (%s)", [[int(m.value())] for m in unit.messages])
                    if unit.attempt == 1:
                        lost += 1
                        other.execute("SELECT pg_terminate_backend(%s)", [unit.connection.info.backend_pid])
            break
        except Redelivered:
            continue
    assert lost >= 8
    taken = [pool.getconn()]  # the other one is the consumer's
    consumer.close()
    taken.append(pool.getconn())
    for connection in taken:
        pool.putconn(connection)
"""


def test_a_pool_lends_connections_and_gets_back_those_that_were_lost(
    uri: str, bootstrap_servers: str, name: str, tmp_path: Path
) -> None:
    """psycopg_pool itself, of which tests/integration/test_pool.py has a stand-in."""
    path = python_path(tmp_path / "packages", "psycopg-pool")
    create_topic(bootstrap_servers, 1, name=name)
    produce(bootstrap_servers, name, 40, 1)
    with psycopg.connect(uri) as connection:
        connection.execute("CREATE TABLE effect (number int)")
    command = [sys.executable, "-c", POOLED, bootstrap_servers, uri, name]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    with psycopg.connect(uri) as connection:
        found = connection.execute("SELECT number FROM effect ORDER BY number").fetchall()
    assert found == [(number,) for number in range(40)]
