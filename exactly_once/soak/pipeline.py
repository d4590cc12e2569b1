"""Pipeline: a program of somebody else's copies a topic into a database under faults, and its effects are counted."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import partial
from typing import IO, Any

import psutil
import psycopg
from confluent_kafka import KafkaError, Message, Producer

from exactly_once.demo.display import Display
from exactly_once.demo.payments import send
from exactly_once.embedded.proxy import Fault, PostgresProxy

from . import reaper
from .reaper import MARK, bearers

FAULTS = ("kill", "pause", "cut-before", "cut-after")
# How long a pipeline works between two faults.
_BETWEEN_SECONDS = (1.0, 4.0)
# How long a process stands still: longer than its session, if that is short, so that others take its partitions.
_PAUSE_SECONDS = 12.0
# How long a COMMIT is waited for that is to be cut.
_CUT_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_WORKS_SECONDS = 0.1  # how soon it is seen that the pipeline works
_LOOKS = 3  # a process that goes into the background forks twice
_LONGEST_SECONDS = 86_400.0  # of a time-out; Postgres counts milliseconds in 32 bits
_STOP_SECONDS = 20.0  # for an end in good order; nothing is counted behind it
_FLUSH_SECONDS = 60.0  # more than a broker that is started again takes to come up
# Processes that may fail before anything took effect: one may meet another that makes the same table.
_MOST_FAILED = 5


class NothingShown(Exception):
    """The faults could not begin, or their effects not be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run, what it is given, and how its effects are counted."""

    bootstrap_servers: str
    topic: str
    conninfo: str
    start: Sequence[str]
    """The command line of one process, with ``{bootstrap_servers}``, ``{conninfo}`` and ``{topic}`` to be filled in."""
    effects: str
    """A query of two columns: the number of a message, and how often it took effect. It finds none before."""
    value: str
    """What a message holds, with its number for ``{n}``."""
    processes: int
    messages: int
    seconds: float
    """For how long faults strike."""
    patience_seconds: float
    """How long the first effect may take, and how long effects may stand still at the end, until what lacks is lost."""
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
    def is_shown(self) -> bool:
        """Whether there is anything to conclude: without a fault any pipeline is exact."""
        return self.faults.total() > 0

    @property
    def struck(self) -> str:
        """The faults in words."""
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items())) or "no faults"

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.doubled or self.foreign)

    def as_dict(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"ok": self.is_exact and self.is_shown}


class Member:
    """One process of the pipeline, with all that it started, in the background too."""

    def __init__(self, command: Sequence[str], log: IO[bytes], mark: str) -> None:
        self._mark = f"{mark} {uuid.uuid4().hex}"
        environment = {**os.environ, MARK: self._mark}
        self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)

    @property
    def has_failed(self) -> bool:
        return self._process.returncode not in (None, 0)

    def has_ended(self) -> bool:
        """Tell whether nothing of it runs any more."""
        # One look misses a process that is forked behind it by one that is gone before it is read.
        return self._process.poll() is not None and not any(self._alive() for _ in range(_LOOKS))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of it."""
        for process in self._alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """Kill all of it, also what it starts meanwhile."""
        while self._alive():
            self.signal(signal.SIGKILL)
            self._process.wait()
        self._process.wait()

    def _alive(self) -> list[psutil.Process]:
        found = bearers(self._mark)
        if self._process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(self._process.pid)
                found |= {process, *process.children(recursive=True)}
        return list(found)


class Pipeline:
    """Processes of somebody else's, in groups of their own, started again whenever one has ended."""

    def __init__(self, command: Sequence[str], processes: int, log: IO[bytes]) -> None:
        self.ended = self.failed = 0
        mark = uuid.uuid4().hex
        self._new_member = partial(Member, command, log, mark)
        # Ends them where this process is killed before it can.
        self._reaper = subprocess.Popen(
            [sys.executable, "-P", reaper.__file__, mark], stdin=subprocess.PIPE, start_new_session=True
        )
        self._running = [self._new_member() for _ in range(processes)]

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._running:
            member.signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < deadline and not all(member.has_ended() for member in self._running):
            time.sleep(_LOOK_SECONDS / 10)
        for member in self._running:
            member.kill()
        self._reaper.communicate()

    def work(self, seconds: float) -> None:
        """Let it work for so long; what ends by itself meanwhile is started anew, as a supervisor does."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for place, member in enumerate(self._running):
                if member.has_ended():
                    self.ended += 1
                    self.failed += member.has_failed
                    self._running[place] = self._new_member()
            time.sleep(min(left, _LOOK_SECONDS))

    def kill(self, chance: random.Random) -> bool:
        """Kill one with all that it started, and start another one in its place; tell whether it was alive."""
        place = chance.randrange(len(self._running))
        if self._running[place].has_ended():
            return False
        self._running[place].kill()
        self._running[place] = self._new_member()
        return True

    def pause(self, chance: random.Random) -> bool:
        """Have one stand still for a while; tell whether it was alive."""
        member = chance.choice(self._running)
        if member.has_ended():
            return False
        member.signal(signal.SIGSTOP)
        try:
            self.work(_PAUSE_SECONDS)
        finally:
            member.signal(signal.SIGCONT)
        return True


class Source:
    """Publishes numbered messages."""

    def __init__(self, plan: Plan) -> None:
        self.published = 0
        self._plan = plan
        self._producer = Producer(
            {"bootstrap.servers": plan.bootstrap_servers, "linger.ms": 5, "enable.idempotence": True, "log_level": 2}
        )

    def publish(self, until: float) -> None:
        """Publish up to a share of all messages.

        :raises NothingShown: when Kafka does not take them.
        """
        plan, refused = self._plan, list[str]()

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                refused.append(f"message {(message.key() or b'').decode()}: {error.str()}")

        while self.published < until * plan.messages:
            number = str(self.published)
            send(self._producer, plan.topic, plan.value.replace("{n}", number), number, on_delivery=delivered)
            self.published += 1
        left = self._producer.flush(_FLUSH_SECONDS)
        if left or refused:
            what = refused[0] if refused else f"{left} messages within {_FLUSH_SECONDS:g} s"
            raise NothingShown(f"Kafka did not take {what}")


def wait_for_an_effect(plan: Plan, pipeline: Pipeline) -> None:
    """Wait until the pipeline works, before there are faults.

    :raises NothingShown: when it does not.
    """
    began_at = time.monotonic()
    while not effects(plan):
        pipeline.work(_LOOK_SECONDS)
        if pipeline.failed > _MOST_FAILED:
            raise NothingShown(f"the pipeline failed {pipeline.failed} times before any message took effect")
        if time.monotonic() - began_at > plan.patience_seconds:
            raise NothingShown(
                f"no message took effect within {plan.patience_seconds:g} s, without a fault. Does the pipeline read "
                "the topic from its beginning, does --effects count what it writes, is --patience-seconds long enough?"
            )


def verify(plan: Plan, display: Display, log: IO[bytes]) -> Verdict:
    """Run the pipeline under faults, let it catch up, and count; the topic must be there and empty.

    :raises NothingShown: for a pipeline that does nothing before there are faults, and for what ends their run.
    """
    chance = random.Random(plan.seed)  # noqa: S311  (to be repeated, not to be secret)
    verdict, source = Verdict(messages=plan.messages), Source(plan)
    late: list[tuple[str, Fault]] = []
    with contextlib.ExitStack() as stack:
        conninfo = plan.conninfo
        if any(fault.startswith("cut") for fault in plan.faults):
            proxy = stack.enter_context(PostgresProxy(plan.conninfo))
            conninfo = proxy.conninfo
        places = {"bootstrap_servers": plan.bootstrap_servers, "conninfo": conninfo, "topic": plan.topic}
        command = [word.format(**places) for word in plan.start]
        source.publish(0.1)  # what it starts with; the rest comes in while faults strike, a tenth behind them
        pipeline = stack.enter_context(Pipeline(command, plan.processes, log))
        display.log("no faults before something takes effect")
        wait_for_an_effect(plan, pipeline)
        began_at = time.monotonic()
        while (elapsed := time.monotonic() - began_at) < plan.seconds:
            source.publish(0.1 + 0.8 * elapsed / plan.seconds)
            pipeline.work(chance.uniform(*_BETWEEN_SECONDS))
            # A pipeline that is idle, or waits for its group, loses and doubles nothing: strike while it works.
            seen = effects(plan)
            while effects(plan) == seen and (elapsed := time.monotonic() - began_at) < plan.seconds:
                source.publish(0.1 + 0.8 * elapsed / plan.seconds)
                pipeline.work(_WORKS_SECONDS)
            fault = chance.choice(plan.faults)
            if fault in ("kill", "pause"):
                # What has ended by itself just now has nothing to lose.
                if not (pipeline.kill(chance) if fault == "kill" else pipeline.pause(chance)):
                    continue
            else:
                armed = proxy.cut_before() if fault == "cut-before" else proxy.cut_after()
                if not armed.fired.wait(_CUT_SECONDS):
                    late.append((fault, armed))  # no COMMIT came by: it strikes the next one
                    continue
            verdict.faults[fault] += 1
            display.log(f"{fault}; {source.published:,} messages published", style="red")
        source.publish(1)
        display.log("no more faults; waiting until the effects stand still")
        found, still_since = None, time.monotonic()
        while time.monotonic() - still_since < plan.patience_seconds:
            pipeline.work(_LOOK_SECONDS)
            now = effects(plan)
            if now != found:
                found, still_since = now, time.monotonic()
            display.progress(len(now), plan.messages)
            if len(now) >= plan.messages and time.monotonic() - still_since > plan.patience_seconds / 4:
                break  # what might still be doubled has had its time
        display.no_progress()
    verdict.faults.update(fault for fault, armed in late if armed.fired.is_set())
    compare(verdict, effects(plan))
    verdict.ended, verdict.seconds = pipeline.ended, round(time.monotonic() - began_at, 1)
    return verdict


def effects(plan: Plan) -> Counter[str]:
    """Count what took effect so far.

    :raises NothingShown: where the pipeline keeps a lock for too long.
    """
    with psycopg.connect(plan.conninfo) as connection:
        connection.execute(f"SET LOCAL lock_timeout = '{min(plan.patience_seconds, _LONGEST_SECONDS):.0f}s'".encode())
        try:
            return counted(connection.execute(plan.effects.encode()).fetchall())
        except psycopg.errors.LockNotAvailable as error:
            raise NothingShown(f"--effects waited {plan.patience_seconds:g} s for a lock of somebody else's") from error


def counted(rows: Iterable[tuple[Any, ...]]) -> Counter[str]:
    """Add up how often each number took effect: a query may list it as often, or with 0 or null where it never did."""
    found = Counter[str]()
    for number, times in rows:
        if times:
            # Of a number that JSON or a column keeps as 5.0, too.
            whole = isinstance(number, (float, Decimal)) and math.isfinite(number) and number == number // 1
            found[str(int(number) if whole else number)] += times
    return found


def compare(verdict: Verdict, found: Mapping[str, int]) -> None:
    """Count what is wrong, and name the first of each kind."""
    published = {str(number) for number in range(verdict.messages)}
    wrong = {
        # Half an effect, or one that was taken back, is none.
        "lost": sorted((number for number in published if not found.get(number, 0) >= 1), key=int),
        "doubled": [number for number, times in found.items() if times > 1],
        "foreign": sorted(found.keys() - published),
    }
    verdict.lost, verdict.doubled, verdict.foreign = (len(numbers) for numbers in wrong.values())
    # Five of a kind show whether they are neighbours, the messages of one batch.
    verdict.examples = {kind: numbers[:5] for kind, numbers in wrong.items() if numbers}
