"""A Postgres that stands still, as with a stuck disk: signals end the worker, whatever it waits for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import psycopg
import pytest

from exactly_once import ExactlyOnceConsumer, Unit, _failpoints, embedded
from exactly_once.consumer import maintenance
from exactly_once.ledger.migrate import migrate
from tests.conftest import MakeConsumer
from tests.support import journal
from tests.support.topics import create_topic, produce
from tests.support.waiting import until
from tests.support.worker import drain, record

MESSAGES = 20


@pytest.fixture(scope="module")
def postgres() -> Iterator[embedded.Postgres]:
    """A server of this module's own, because it is stopped."""
    with embedded.Postgres(settings={"fsync": "off"}) as server:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            migrate(connection)
        journal.create(server.conninfo)
        yield server


@pytest.fixture
def topic(bootstrap_servers: str) -> str:
    """A topic with messages."""
    topic = create_topic(bootstrap_servers, 1)
    produce(bootstrap_servers, topic, MESSAGES, 1)
    return topic


def signal_when_stuck(
    consumer: ExactlyOnceConsumer, postgres: embedded.Postgres, *, twice: bool = True
) -> threading.Thread:
    """Send SIGTERM as soon as the consumer has not polled for a while, and again when the first was taken."""

    def act() -> None:
        until(lambda: postgres._paused, 30, "a server that stands still")
        until(lambda: consumer.health().seconds_since_poll > 1, 30, "a consumer that is stuck")
        term()
        # Signals that are pending together are one.
        until(lambda: consumer._stopping.is_set, 10, "the first signal to be taken")
        if twice:
            term()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def quick(postgres: embedded.Postgres) -> str:
    """The server's address for a worker that gives up connecting as early as libpq can."""
    return f"{postgres.conninfo}?connect_timeout=2"


def term() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def read_on(make_consumer: MakeConsumer, conninfo: str, bootstrap_servers: str, topic: str) -> None:
    """Apply the rest with another consumer, and compare effects and log."""
    with make_consumer(conninfo=conninfo) as consumer:
        consumer.subscribe([topic])
        drain(consumer)
    verdict = journal.check(conninfo, bootstrap_servers, topic)
    assert verdict.exact, verdict


@pytest.mark.parametrize("place", ["polled", "begun", "guarded"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_second_signal_ends_run_wherever_a_unit_waits(
    *,
    make_consumer: MakeConsumer,
    postgres: embedded.Postgres,
    bootstrap_servers: str,
    topic: str,
    place: str,
    in_thread: bool,
) -> None:
    """At BEGIN, at the handler's first statement, at COMMIT; and what was not stored is applied later."""
    seen = []
    stands = threading.Event()

    def stand_still() -> None:
        seen.append(1)
        if len(seen) == 2:
            postgres.pause()
            stands.set()

    _failpoints.arm(place, stand_still)
    consumer = make_consumer(conninfo=quick(postgres), max_messages=5)
    consumer.subscribe([topic])
    thread = threading.Thread()
    try:
        thread = signal_when_frozen(consumer, stands) if in_thread else signal_when_stuck(consumer, postgres)
        with pytest.raises(SystemExit) as ended:
            consumer.run(lambda unit: record(unit, "test"), in_thread=in_thread)
        consumer.close()
    finally:
        postgres.resume()
        _failpoints.disarm()
        thread.join(30)
    assert ended.value.code == 128 + signal.SIGTERM
    read_on(make_consumer, postgres.conninfo, bootstrap_servers, topic)


def signal_when_frozen(consumer: ExactlyOnceConsumer, stands: threading.Event) -> threading.Thread:
    """Signal twice once the server stands still: a consumer with a handler in a thread goes on polling."""

    def act() -> None:
        # Not before all of it stands still: a signal is for the library, and not for the test that freezes the server.
        assert stands.wait(60)
        term()
        until(lambda: consumer._stopping.is_set, 10, "the first signal to be taken")
        term()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_second_signal_ends_run_between_units(
    *,
    make_consumer: MakeConsumer,
    postgres: embedded.Postgres,
    bootstrap_servers: str,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There the rows are looked at from time to time."""
    monkeypatch.setattr(maintenance, "RECHECK_SECONDS", 0.2)
    consumer = make_consumer(conninfo=quick(postgres))
    consumer.subscribe([topic])
    drain(consumer)
    postgres.pause()
    thread = signal_when_stuck(consumer, postgres)
    try:
        with pytest.raises(SystemExit) as ended:
            consumer.run(lambda unit: record(unit, "test"))
        consumer.close()
    finally:
        postgres.resume()
        thread.join(30)
    assert ended.value.code == 128 + signal.SIGTERM
    read_on(make_consumer, postgres.conninfo, bootstrap_servers, topic)


def test_first_signal_is_enough_after_stop_seconds(
    make_consumer: MakeConsumer, postgres: embedded.Postgres, bootstrap_servers: str, topic: str
) -> None:
    consumer = make_consumer(conninfo=quick(postgres))
    consumer.subscribe([topic])

    def handle(unit: Unit) -> None:
        record(unit, "test")
        postgres.pause()

    thread = signal_when_stuck(consumer, postgres, twice=False)
    try:
        with pytest.raises(SystemExit):
            consumer.run(handle, stop_seconds=0.5)
        consumer.close()
    finally:
        postgres.resume()
        thread.join(30)
    read_on(make_consumer, postgres.conninfo, bootstrap_servers, topic)


def test_closing_does_not_wait_for_a_server_that_stands_still(
    *,
    make_consumer: MakeConsumer,
    postgres: embedded.Postgres,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its rows cannot be released, which keeps nobody out."""
    monkeypatch.setattr("exactly_once.consumer.consumer.CLOSE_SECONDS", 0.5)
    consumer = make_consumer(conninfo=quick(postgres))
    consumer.subscribe([topic])
    drain(consumer)
    postgres.pause()
    closer = threading.Timer(60, postgres.resume)
    closer.start()
    try:
        consumer.close()
        assert closer.is_alive(), "it had to be set free"
    finally:
        closer.cancel()
        postgres.resume()
    assert "stands still" in caplog.text
