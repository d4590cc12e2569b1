"""A worker process that consumes with the library into the journal, and the test's hold on it.

The process prints one JSON line per event. The test's side, `Worker`, reads them with deadlines and sends
signals by pid; `Crew` starts workers of one group and ends all of them, whatever the test does.

Events: ready, assigned, revoked, lost, failpoint, handling, unit, redelivered, failed, ended. A worker that ends
by itself prints `ended` with its counters; with status 3 it has printed `failed` with the error before.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, LiteralString, Self, TypeAlias

import psycopg
from confluent_kafka import Message, TopicPartition

from exactly_once import ExactlyOnceConsumer, Redelivered, Unit, _failpoints
from exactly_once.embedded.process import freeze, is_frozen
from tests.support import journal
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
FAILED = 3

Event: TypeAlias = dict[str, Any]


def record(unit: Unit, worker: str, *, counts: bool = True) -> None:
    """Have the effects that the oracle checks: journal entries, and the counter unless it is not wanted."""
    unit.executemany(journal.APPEND, [journal.entry(message, worker) for message in unit.messages])
    if counts:
        for topic in sorted({str(message.topic()) for message in unit.messages}):
            number = sum(message.topic() == topic for message in unit.messages)
            unit.execute(journal.COUNT, (topic, number))


def drain(consumer: ExactlyOnceConsumer, worker: str = "test", *, counts: bool = True) -> int:
    """Consume to the end into the journal, as the documented loop does; return how many messages took effect."""
    units = consumer.units(until_end=True)
    done = 0
    while True:
        try:
            for unit in units:
                with unit:
                    record(unit, worker, counts=counts)
                done += len(unit.messages)
            return done
        except Redelivered:
            continue


def turn(consumer: ExactlyOnceConsumer, seconds: float = 0.1) -> None:
    """Have a consumer do what is due and poll once, as its iteration does while no message comes."""
    consumer._keep_up()
    consumer._fetch(seconds, 1)


def turn_until(
    consumer: ExactlyOnceConsumer, condition: Callable[[], object], timeout_seconds: float, what: str
) -> None:
    """Turn a consumer until something is true."""

    def is_true() -> object:
        turn(consumer)
        return condition()

    until(is_true, timeout_seconds, what)


def ensure_journal(conninfo: str) -> None:
    """Create the journal if it is not there; tests tell their entries apart by their topics."""
    with psycopg.connect(conninfo) as connection:
        found = connection.execute("SELECT to_regclass('journal.entries')").fetchone()
    if found == (None,):
        journal.create(conninfo)


# The test's side.


class Worker:
    """One worker process."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.name = str(config["name"])
        self.events: list[Event] = []
        self._seen = 0
        self._news = threading.Condition()
        # Open as long as the process may write to it.
        self._log = tempfile.NamedTemporaryFile("w+", prefix=f"{self.name}-")  # noqa: SIM115
        command = self._command(json.dumps(config))
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._log, text=True)
        self._reader = threading.Thread(target=self._read, name=f"reader of {self.name}", daemon=True)
        self._reader.start()

    def _command(self, config: str) -> list[str]:
        return [sys.executable, "-m", "tests.support.worker", config]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait(self, event: str, timeout_seconds: float = 120, **fields: object) -> Event:
        """Return the next event of this kind and with these fields that was not returned before."""
        deadline = time.monotonic() + timeout_seconds
        with self._news:
            while True:
                for number in range(self._seen, len(self.events)):
                    found = self.events[number]
                    if found["event"] == event and fields.items() <= found.items():
                        self._seen = number + 1
                        return found
                ended = not self._reader.is_alive()
                if ended or not self._news.wait(max(0.0, deadline - time.monotonic())):
                    why = f"it ended with status {self._process.poll()}" if ended else f"{timeout_seconds:g} s passed"
                    raise AssertionError(f"no event {event!r} {fields} of {self.name}: {why}\n{self.story()}")

    def count(self, event: str, **fields: object) -> int:
        """How many such events there were up to now."""
        with self._news:
            return sum(e["event"] == event and fields.items() <= e.items() for e in self.events)

    def stop(self) -> None:
        """Freeze it, and return when it is frozen."""
        freeze(self.pid)

    def wait_stopped(self) -> None:
        """Return when it is frozen."""
        until(lambda: is_frozen(self.pid), 10, "a stop")
        assert self._process.poll() is None, f"it ended\n{self.story()}"

    def cont(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def term(self) -> None:
        """Ask it to stop."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill it as ``kill -9`` does."""
        self._process.kill()
        self._process.wait(60)

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended; a frozen one is running."""
        return self._process.poll() is None

    def wait_exit(self, timeout_seconds: float = 120) -> int:
        """Return its exit status, the negative number of the signal if one ended it."""
        try:
            status = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGUSR1)  # where it is at goes to its log
            until(lambda: "most recent call first" in self.log(), 10, "its stacks")
            raise AssertionError(f"{self.name} runs on after {timeout_seconds:g} s\n{self.story()}") from None
        self._reader.join(60)
        return status

    def finish(self, timeout_seconds: float = 120) -> Event:
        """Wait for its end in good order and return its counters."""
        status = self.wait_exit(timeout_seconds)
        assert status == 0, f"{self.name} ended with status {status}\n{self.story()}"
        counters: Event = self.events[-1]["counters"]
        return counters

    def story(self) -> str:
        """Its last events and what it logged, for the message of an assertion."""
        return "\n".join(
            [f"--- events of {self.name}", *map(str, self.events[-15:]), "--- its log", self.log()[-6000:]]
        )

    def log(self) -> str:
        """What it logged up to now."""
        return Path(self._log.name).read_text()

    def end(self) -> None:
        """End it, frozen or not, and give back what it holds."""
        if self.is_running:
            self.kill()
        self._reader.join(60)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.events.append(json.loads(line))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


class Crew:
    """Workers of one group, and what the database says of it: `with Crew(...) as crew: crew.start()`.

    `workers_conninfo` is given to the workers where it is not to be the plain way to the database, and `launch`
    starts them where they are not to be processes of this machine.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        conninfo: str,
        group: str,
        topics: Sequence[str],
        *,
        kafka: Mapping[str, Any] | None = None,
        workers_conninfo: str | None = None,
        launch: Callable[[Mapping[str, Any]], Worker] = Worker,
    ) -> None:
        self._launch = launch
        ensure_journal(conninfo)
        self.workers: list[Worker] = []
        self.group = group
        self._bootstrap_servers = bootstrap_servers
        self._conninfo = conninfo
        self._topics = list(topics)
        settings = {"bootstrap.servers": bootstrap_servers, "group.id": group, **(kafka or {})}
        if settings.get("group.protocol") != "consumer":  # there the broker decides: 6 seconds
            settings |= {"session.timeout.ms": 3000, "heartbeat.interval.ms": 500}
        self.kafka = settings
        self._config = {"conninfo": workers_conninfo or conninfo, "topics": self._topics, "kafka": settings}

    def __enter__(self) -> Self:
        self._db = psycopg.connect(self._conninfo, autocommit=True)
        return self

    def reconnect(self) -> None:
        """Look at the database through another connection: the server of the last one is gone."""
        self._db.close()
        self._db = psycopg.connect(self._conninfo, autocommit=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._db.close()
        for worker in self.workers:
            if isinstance(error, Exception):
                error.add_note(worker.story())
            worker.end()

    def start(self, *, ready: bool = True, **config: Any) -> Worker:
        """Start a worker; `ready=False` returns before it has subscribed.

        The configuration: conninfo, options (of the consumer), mode ("loop", the default, or "run"), until_end,
        idle_seconds, stop_seconds, in_thread, revoke_seconds, counts, handler_seconds (for units of at
        least slow_from_partitions partitions), claims_into (a table for
        values that no message had before), poison (offsets that the handler cannot apply), failpoint =
        [name, action, pass]; the name may be [name, after], and then passes are counted from the first pass of the
        other.
        """
        name = f"worker-{len(self.workers) + 1}"
        self.workers.append(worker := self._launch({**self._config, "name": name, **config}))
        if ready:
            worker.wait("ready")
        return worker

    def end_well(self, *workers: Worker) -> None:
        """Ask workers to stop and see that they end in good order."""
        for worker in workers:
            worker.term()
        for worker in workers:
            worker.finish()

    def look(self, query: LiteralString) -> list[tuple[Any, ...]]:
        """Query the ledger; `%s` is the group."""
        return self._db.execute(query, (self.group,)).fetchall()

    def owners(self) -> dict[str, int]:
        """Return how many rows each worker owns."""
        query = """
            SELECT owner_name, count(*) FROM exactly_once.ledger
            WHERE group_id = %s AND owner_token IS NOT NULL GROUP BY 1
        """
        return dict(self.look(query))

    def epochs(self) -> dict[tuple[str, int], int]:
        """Return the owner epoch of each partition."""
        query = "SELECT topic, partition, owner_epoch FROM exactly_once.ledger WHERE group_id = %s"
        return {(topic, partition): epoch for topic, partition, epoch in self.look(query)}

    def applied(self) -> int:
        """Return the sum of the ledger's offsets: how many messages were applied, if logs start at 0."""
        query = "SELECT coalesce(sum(next_offset), 0)::int FROM exactly_once.ledger WHERE group_id = %s"
        total: int = self.look(query)[0][0]
        return total

    def until_applied(self, total: int, timeout_seconds: float = 120) -> None:
        """Wait until so many messages were applied."""
        until(lambda: self.applied() >= total, timeout_seconds, f"{total} messages to be applied")

    def verdict(self, topic: str, *, counts: bool = True) -> journal.Verdict:
        """Compare a topic with its journal."""
        return journal.check(self._conninfo, self._bootstrap_servers, topic, counts=counts)

    def assert_exact(self, *, counts: bool = True) -> None:
        """Each message of the topics took effect exactly once."""
        for topic in self._topics:
            verdict = self.verdict(topic, counts=counts)
            assert verdict.exact, verdict


# The process.


def emit(event: str, **fields: object) -> None:
    """Print one event."""
    # One write: a kill leaves no half line behind.
    os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())


def main(config: Mapping[str, Any]) -> int:
    """Consume as told; return the exit status."""
    name = str(config["name"])
    faulthandler.register(signal.SIGUSR1)
    consumer = ExactlyOnceConsumer(config["kafka"], conninfo=config["conninfo"], name=name, **config.get("options", {}))
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    with consumer:
        try:
            consumer.subscribe(
                config["topics"],
                on_assign=_teller("assigned"),
                on_revoke=_teller("revoked"),
                on_lost=_teller("lost"),
            )
            _arm(config.get("failpoint"))
            emit("ready", pid=os.getpid())
            if config.get("mode") == "run":
                _run(consumer, config)
            else:
                _loop(consumer, config)
        except Exception as error:  # noqa: BLE001  (it is told, and the status says so)
            emit("failed", error=type(error).__name__, text=str(error))
            traceback.print_exc()
            return FAILED
    counters = {field: getattr(consumer.counters, field) for field in consumer.counters.__slots__}
    emit("ended", counters=counters)
    return 0


def _run(consumer: ExactlyOnceConsumer, config: Mapping[str, Any]) -> None:
    consumer.run(
        _handler(config),
        on_poison="dead-letter" if config.get("poison") else "stop",
        in_thread=config.get("in_thread", False),
        revoke_seconds=config.get("revoke_seconds", 10.0),
        stop_seconds=config.get("stop_seconds", 30),
        until_end=config.get("until_end", False),
    )


def _loop(consumer: ExactlyOnceConsumer, config: Mapping[str, Any]) -> None:
    """Go on after everything that is nobody's fault, as the documentation says."""
    handler = _handler(config)
    units = consumer.units(until_end=config.get("until_end", False), idle_seconds=config.get("idle_seconds"))
    while True:
        try:
            for unit in units:
                with unit:
                    handler(unit)
                first, *_, last = [*unit.messages, *unit.messages]
                emit("unit", count=len(unit.messages), attempt=unit.attempt, first=_place(first), last=_place(last))
            return
        except Redelivered as error:
            emit("redelivered", error=type(error).__name__, text=str(error))


def _handler(config: Mapping[str, Any]) -> Callable[[Unit], None]:
    def handle(unit: Unit) -> None:
        emit("handling", count=len(unit.messages), partitions=len(unit.advances), attempt=unit.attempt)
        record(unit, str(config["name"]), counts=config.get("counts", True))
        if (table := config.get("claims_into")) is not None:
            values = [message.value() or b"" for message in unit.messages]
            first = [(value,) for value, free in zip(values, unit.claim_many(values), strict=True) if free]
            unit.executemany(f"INSERT INTO {table} VALUES (%s)".encode(), first)
        is_slow = len(unit.advances) >= config.get("slow_from_partitions", 1)
        # In the meantime messages of all partitions come together.
        time.sleep(config.get("handler_seconds", 0) if is_slow else 0.3)
        if any(message.offset() in config.get("poison", ()) for message in unit.messages):
            raise ValueError("poison")

    return handle


def _teller(event: str) -> Callable[[ExactlyOnceConsumer, list[TopicPartition]], None]:
    def tell(_: ExactlyOnceConsumer, partitions: list[TopicPartition]) -> None:
        emit(event, partitions=[[tp.topic, tp.partition, tp.offset] for tp in partitions])

    return tell


def _place(message: Message) -> list[object]:
    return [message.topic(), message.partition(), message.offset()]


def _arm(failpoint: Sequence[Any] | None) -> None:
    """Injure this process at the given pass of a failpoint: kill, stop or raise."""
    if failpoint is None:
        return
    at, action, nth = failpoint
    name, after = (at, None) if isinstance(at, str) else at
    passes = 0
    counting = after is None

    def begin() -> None:
        nonlocal counting
        counting = True

    def strike() -> None:
        nonlocal passes
        passes += counting
        if not counting or passes != nth:
            return
        emit("failpoint", name=name, action=action)
        if action == "raise":
            raise RuntimeError(f"failpoint {name}")
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    _failpoints.arm(name, strike)
    if after is not None:
        _failpoints.arm(after, begin)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(json.loads(sys.argv[1])))
