"""Each application in examples/ goes over from its ordinary loop, on a group with offsets and lag, and back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest
from confluent_kafka import Producer
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from exactly_once import BrokerUnreachable
from exactly_once.kafka.admin import Cluster
from exactly_once.ledger.migrate import migrate
from tests.integration.scene import text
from tests.support.topics import create_topic
from tests.support.waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
PARTITIONS = 3
MESSAGES = 60
"""So many at a time."""


@dataclass(frozen=True)
class App:
    """An application: what it reads, how its tables are made, and what they sum up to."""

    directory: str
    topic: str
    group: str
    make_message: Callable[[int], dict[str, object]]
    total: str
    rows: str
    tables: list[str]
    afters: tuple[str, ...] = ("after.py",)
    tests: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.directory


APPS = [
    App(
        "psycopg_app",
        "card-payments",
        "card-accounts",
        lambda n: {"account": n % 7, "amount": n},
        "SELECT sum(balance) FROM card_account",
        "SELECT 0",
        [],
        tests=("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "."),
    ),
    App(
        "psycopg_batch_app",
        "readings",
        "readings",
        lambda n: {"sensor": f"s{n % 7}", "value": n},
        "SELECT sum(total) FROM sensor",
        "SELECT count(*) FROM reading",
        [],
    ),
    App(
        "sqlalchemy_app",
        "orders",
        "orders",
        lambda n: {"customer": n % 7, "amount": n},
        "SELECT sum(spent) FROM customer",
        "SELECT count(*) FROM customer_order",
        ["-c", "from models import Base, engine; Base.metadata.create_all(engine)"],
        ("after.py", "after_join.py"),
    ),
    App(
        "django_app",
        "votes",
        "votes",
        lambda n: {"poll": f"p{n % 7}", "weight": n},
        "SELECT sum(votes) FROM votes_poll",
        "SELECT count(*) FROM votes_vote",
        ["-m", "django", "migrate", "--run-syncdb"],
        ("after.py", "after_connect.py"),
        ("-m", "django", "test"),
    ),
]


class Running:
    """An application on real servers, in a database of its own."""

    def __init__(self, app: App, bootstrap_servers: str, conninfo: str) -> None:
        self.app = app
        self._servers = bootstrap_servers
        self._db = psycopg.connect(conninfo, autocommit=True)
        self._cluster = Cluster({"bootstrap.servers": bootstrap_servers})
        self.produced = 0
        self._env = {
            **os.environ,
            "EXACTLY_ONCE_BOOTSTRAP_SERVERS": bootstrap_servers,
            "EXACTLY_ONCE_CONNINFO": "postgresql://{user}:{password}@{host}:{port}/{dbname}".format(
                **{"password": "", **conninfo_to_dict(conninfo)}
            ),
            "DJANGO_SETTINGS_MODULE": "settings",
        }
        migrate(self._db)
        create_topic(bootstrap_servers, PARTITIONS, name=app.topic)
        tables = EXAMPLES / app.directory / "tables.sql"
        if tables.exists():
            self._db.execute(tables.read_bytes())
        else:
            with self._start(*app.tables) as making:
                _, errors = making.communicate(timeout=120)
            assert making.returncode == 0, errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def produce(self) -> None:
        """Add some messages to the topic."""
        producer = Producer({"bootstrap.servers": self._servers})
        for number in range(self.produced, self.produced + MESSAGES):
            producer.produce(self.app.topic, json.dumps(self.app.make_message(number)), partition=number % PARTITIONS)
        assert producer.flush(60) == 0
        self.produced += MESSAGES

    def run(self, file: str, how_to_stop: signal.Signals) -> int:
        """Run a program until it has applied everything, and Kafka knows; stop it and return its exit status."""
        with self._start(file) as process:
            try:
                until(lambda: self._is_done() or process.poll() is not None, 120, f"all messages by {file}")
                process.send_signal(how_to_stop)
                _, errors = process.communicate(timeout=120)
            finally:
                process.kill()
        self.assert_exact(errors)
        return process.returncode

    def reset_to_committed(self) -> None:
        """Move the ledger to what the ordinary loop told Kafka, as an operator does before going forward again."""
        for partition, found in self._cluster.committed(self.app.group, self.app.topic, PARTITIONS).items():
            command = ["reset", "--topic", self.app.topic, "--partition", str(partition.number), "--execute"]
            command += ["--to-offset", str(found.offset), "--group-id", self.app.group]
            with self._start("-m", "exactly_once", *command, stdout=subprocess.DEVNULL) as reset:
                _, errors = reset.communicate(timeout=120)
            assert reset.returncode == 0, errors

    def run_tests(self) -> None:
        """Run the application's own tests, as its team would."""
        with self._start(*self.app.tests, stdout=subprocess.PIPE) as tests:
            printed, errors = tests.communicate(timeout=600)
        assert tests.returncode == 0, printed + errors

    def assert_exact(self, errors: str) -> None:
        """Each message took effect once."""
        total = sum(range(self.produced))
        assert self._look(self.app.total) == total, errors
        assert self._look(self.app.rows) in (0, self.produced), errors

    def _is_done(self) -> bool:
        try:
            committed = self._cluster.committed(self.app.group, self.app.topic, PARTITIONS)
        except BrokerUnreachable:  # the group is new, and its coordinator not ready
            return False
        return (self._look(self.app.total) or 0) >= sum(range(self.produced)) and (
            sum(found.offset for found in committed.values()) >= self.produced
        )

    def _look(self, query: str) -> Any:
        row = self._db.execute(text(query)).fetchone()
        return row[0] if row else None

    def _start(self, *arguments: str, stdout: int | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, *arguments]
        directory = EXAMPLES / self.app.directory
        return subprocess.Popen(command, cwd=directory, env=self._env, stdout=stdout, stderr=subprocess.PIPE, text=True)


@contextmanager
def database(conninfo: str, name: str) -> Iterator[str]:
    """Make a database for as long as the block runs."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
        yield make_conninfo(conninfo, dbname=name)
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.mark.parametrize("app", APPS, ids=str)
def test_application_goes_over_with_lag_and_back_and_forward_again(
    app: App, bootstrap_servers: str, postgres_conninfo: str
) -> None:
    with database(postgres_conninfo, app.directory) as conninfo, Running(app, bootstrap_servers, conninfo) as running:
        running.produce()
        running.run("before.py", signal.SIGINT)
        running.produce()  # the lag that is there when the old members have been stopped
        for after in app.afters:
            assert running.run(after, signal.SIGTERM) == 0
            running.produce()
        running.run("before.py", signal.SIGINT)  # from the offsets that were mirrored
        running.reset_to_committed()
        running.produce()
        assert running.run(app.afters[0], signal.SIGTERM) == 0
        if app.tests:
            running.produce()  # for the worker that crashes before it has applied any
            running.run_tests()
