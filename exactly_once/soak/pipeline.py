"""Pipeline: a program of somebody else's copies a topic into a database under faults, and its effects are counted."""

from __future__ import annotations

import contextlib
import random
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import IO, Any

import psutil
import psycopg
from confluent_kafka import Producer

from exactly_once.demo.display import Display
from exactly_once.embedded.proxy import PostgresProxy

FAULTS = ("kill", "pause", "cut-before", "cut-after")
# How long a pipeline works between two faults.
_BETWEEN_SECONDS = (1.0, 4.0)
# How long a process stands still: longer than its session, if that is short, so that others take its partitions.
_PAUSE_SECONDS = 12.0
# How long a COMMIT is waited for that is to be cut.
_CUT_SECONDS = 5.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run, what it is given, and how its effects are counted."""

    bootstrap_servers: str
    topic: str
    conninfo: str
    start: str
    """The command line of one process, with ``{bootstrap_servers}``, ``{conninfo}`` and ``{topic}`` filled in."""
    effects: str
    """A query of two columns: the number of a message, and how often it took effect."""
    value: str
    """What a message holds, with its number for ``{n}``."""
    processes: int
    messages: int
    seconds: float
    """For how long faults strike."""
    patience_seconds: float
    """How long the effects may stand still at the end, until what lacks counts as lost."""
    faults: Sequence[str]
    seed: int


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What was done, and what was true afterwards."""

    messages: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    """Processes that ended by themselves and were started again."""
    lost: int = 0
    doubled: int = 0
    """Messages that took effect more than once."""
    foreign: int = 0
    """Effects of numbers that were never published."""
    seconds: float = 0.0
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.doubled or self.foreign)

    def as_dict(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"ok": self.is_exact}


class Pipeline:
    """Processes of somebody else's, in groups of their own, started again whenever one has ended."""

    def __init__(self, command: Sequence[str], processes: int, log: IO[bytes]) -> None:
        self.ended = 0
        self._command, self._log = command, log
        self._running: list[subprocess.Popen[bytes]] = [self._start() for _ in range(processes)]

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            self.signal(process, signal.SIGTERM)
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)  # seconds for an end in good order; nothing is counted behind it
            self.signal(process, signal.SIGKILL)
            process.wait()

    def replace(self) -> None:
        """Start anew what has ended by itself, as a supervisor does."""
        for place, process in enumerate(self._running):
            if process.poll() is not None:
                self.ended += 1
                self._running[place] = self._start()

    def kill(self, chance: random.Random) -> None:
        """Kill one with all that it started, and start another one in its place."""
        place = chance.randrange(len(self._running))
        self.signal(self._running[place], signal.SIGKILL)
        self._running[place].wait()
        self._running[place] = self._start()

    @contextlib.contextmanager
    def paused(self, chance: random.Random) -> Iterator[None]:
        """Have one stand still meanwhile."""
        process = chance.choice(self._running)
        self.signal(process, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(process, signal.SIGCONT)

    def signal(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Send a signal to one and to what it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid)
            for member in (family, *family.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.send_signal(number)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=self._log, stderr=self._log, start_new_session=True)


def verify(plan: Plan, display: Display, log: IO[bytes]) -> Verdict:
    """Run the pipeline under faults, let it catch up, and count; the topic must be there and empty."""
    chance = random.Random(plan.seed)  # noqa: S311  (to be repeated, not to be secret)
    verdict, began_at, published = Verdict(messages=plan.messages), time.monotonic(), 0
    producer = Producer({"bootstrap.servers": plan.bootstrap_servers, "linger.ms": 5, "enable.idempotence": True})

    def publish(until: float) -> int:
        """Publish up to a share of all messages."""
        number = published
        while number < until * plan.messages:
            producer.produce(plan.topic, plan.value.replace("{n}", str(number)), str(number))
            producer.poll(0)
            number += 1
        if producer.flush(60):
            raise TimeoutError("Kafka did not take the messages within a minute")
        return number

    with contextlib.ExitStack() as stack:
        conninfo = plan.conninfo
        if any(fault.startswith("cut") for fault in plan.faults):
            proxy = stack.enter_context(PostgresProxy(plan.conninfo))
            conninfo = proxy.conninfo
        places = {"bootstrap_servers": plan.bootstrap_servers, "conninfo": conninfo, "topic": plan.topic}
        command = [word.format(**places) for word in shlex.split(plan.start)]
        published = publish(0.1)  # what it starts with; the rest comes in while faults strike, a tenth behind them
        pipeline = stack.enter_context(Pipeline(command, plan.processes, log))
        while (elapsed := time.monotonic() - began_at) < plan.seconds:
            published = publish(0.1 + 0.8 * elapsed / plan.seconds)
            time.sleep(chance.uniform(*_BETWEEN_SECONDS))
            pipeline.replace()
            fault = chance.choice(plan.faults)
            if fault == "kill":
                pipeline.kill(chance)
            elif fault == "pause":
                with pipeline.paused(chance):
                    time.sleep(_PAUSE_SECONDS)
            else:
                armed = proxy.cut_before() if fault == "cut-before" else proxy.cut_after()
                if not armed.fired.wait(_CUT_SECONDS):
                    continue  # no COMMIT came by; it strikes the next one, uncounted
            verdict.faults[fault] += 1
            display.log(f"{fault}; {published:,} messages published", style="red")
        published = publish(1)
        display.log("no more faults; waiting until the effects stand still")
        found, still_since = None, time.monotonic()
        while time.monotonic() - still_since < plan.patience_seconds:
            time.sleep(_LOOK_SECONDS)
            pipeline.replace()
            now = effects(plan)
            if now != found:
                found, still_since = now, time.monotonic()
            display.progress(len(now), plan.messages)
            if len(now) >= plan.messages and time.monotonic() - still_since > plan.patience_seconds / 4:
                break  # what might still be doubled has had its time
        display.no_progress()
    compare(verdict, effects(plan))
    verdict.ended, verdict.seconds = pipeline.ended, round(time.monotonic() - began_at, 1)
    return verdict


def effects(plan: Plan) -> Counter[str]:
    with psycopg.connect(plan.conninfo) as connection:
        return counted(connection.execute(plan.effects.encode()).fetchall())


def counted(rows: Iterable[tuple[Any, ...]]) -> Counter[str]:
    """Add up how often each number took effect: a query may list it as often, or with 0 or null where it never did."""
    found = Counter[str]()
    for number, times in rows:
        if times:
            found[str(number)] += int(times)
    return found


def compare(verdict: Verdict, found: Mapping[str, int]) -> None:
    """Count what is wrong, and name the first of each kind."""
    published = {str(number) for number in range(verdict.messages)}
    wrong = {
        "lost": sorted(published - found.keys(), key=int),
        "doubled": [number for number, times in found.items() if times > 1],
        "foreign": sorted(found.keys() - published),
    }
    verdict.lost, verdict.doubled, verdict.foreign = (len(numbers) for numbers in wrong.values())
    # Five of a kind show whether they are neighbours, the messages of one batch.
    verdict.examples = {kind: numbers[:5] for kind, numbers in wrong.items() if numbers}
