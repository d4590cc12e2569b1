"""A scene: one topic, one group, the journal as oracle, and a proxy between library and database."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from exactly_once import ExactlyOnceConsumer, Redelivered, Unit, _failpoints
from exactly_once.embedded.proxy import PostgresProxy
from tests.support import journal
from tests.support.worker import drain, record


@dataclass(frozen=True)
class Scene:
    """What a test needs; topic and group have the same name."""

    bootstrap_servers: str
    conninfo: str
    topic: str
    proxy: PostgresProxy
    make_consumer: Callable[..., ExactlyOnceConsumer]

    def consumer(self, kafka: dict[str, Any] | None = None, **options: Any) -> ExactlyOnceConsumer:
        """Make a subscribed consumer behind the proxy; ten messages a unit unless told otherwise."""
        if "connect" not in options:
            options.setdefault("conninfo", self.proxy.conninfo)
        options.setdefault("max_messages", 10)
        consumer = self.make_consumer(kafka, **options)
        consumer.subscribe([self.topic])
        return consumer

    def drain(self, consumer: ExactlyOnceConsumer) -> None:
        """Apply the rest of the topic, as the documented loop does."""
        drain(consumer)

    def produce_values(self, values: Iterable[bytes]) -> None:
        """Append messages with these values to partition 0."""
        producer = Producer({"bootstrap.servers": self.bootstrap_servers, "linger.ms": 5})
        for value in values:
            producer.produce(self.topic, value, partition=0)
        assert producer.flush(30) == 0

    def assert_exact(self) -> None:
        """Ask the oracle: each message took effect once, and the ledger stands at the end."""
        verdict = journal.check(self.conninfo, self.bootstrap_servers, self.topic)
        assert verdict.exact, str(verdict)
        assert sum(self.ledger("next_offset")) == verdict.messages

    def ledger(self, column: str) -> list[Any]:
        """One column of the group's rows, by partition."""
        rows = self.query(f"SELECT {column} FROM exactly_once.ledger WHERE group_id = %s ORDER BY partition")
        return [value for (value,) in rows]

    def applied(self) -> list[int]:
        """The offsets in the journal, in order."""
        return [entry.offset for entry in journal.entries(self.conninfo, self.topic)]

    def query(self, statement: Any) -> list[tuple[Any, ...]]:
        """Run a statement whose only parameter, if any, is the group, past the proxy."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            cursor = connection.execute(statement, (self.topic,) if "%s" in statement else None)
            return cursor.fetchall() if cursor.description else []

    def table(self, columns: str) -> str:
        """Make a table of the test's own and return its quoted name."""
        name = f'"{self.topic}_own"'
        self.query(f"CREATE TABLE {name} ({columns})")
        return name


def text(statement: str) -> bytes:
    """A statement that the test has put together, in the form that a unit takes."""
    return statement.encode()


def offsets(unit: Unit) -> list[int]:
    """The offsets of a unit's messages."""
    return [message.offset() or 0 for message in unit.messages]


def actions(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What happened, by the names that log records give it."""
    return [getattr(record, "action", "") for record in caplog.records]


def apply(unit: Unit) -> None:
    """Have the effects that the oracle checks, in a whole unit."""
    with unit:
        record(unit, "test")


def collect(consumer: ExactlyOnceConsumer) -> list[Unit]:
    """Apply all there is and return the units."""
    units = []
    for unit in consumer.units(until_end=True):
        apply(unit)
        units.append(unit)
    return units


def apply_until_done(consumer: ExactlyOnceConsumer, handler: Callable[[Unit], object]) -> list[Redelivered]:
    """Run the documented loop to the end with ``handler`` and the journal; return what it survived."""
    survived: list[Redelivered] = []
    units = consumer.units(until_end=True)
    while True:
        try:
            for unit in units:
                with unit:
                    record(unit, "test")
                    handler(unit)
            return survived
        except Redelivered as error:
            survived.append(error)


def backend_of(consumer: ExactlyOnceConsumer) -> int:
    """The server process behind the consumer's own connection."""
    return consumer._session.connection.info.backend_pid


def interrupt() -> None:
    """Press Ctrl-C."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


@contextmanager
def armed(name: str, action: Callable[[], None]) -> Iterator[None]:
    """Have a failpoint do something, once, within the block."""
    spent: list[bool] = []

    def once() -> None:
        if not spent:
            spent.append(True)
            action()

    _failpoints.arm(name, once)
    try:
        yield
    finally:
        _failpoints.disarm()
    assert spent, f"failpoint {name} was not passed"
