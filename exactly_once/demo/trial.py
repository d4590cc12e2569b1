"""Trial: one side of the demo. Payments come in, workers apply them, faults strike, and it is drained."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psycopg
from psycopg import sql

from exactly_once._failpoints import OF_A_UNIT

from . import payments
from .crew import Crew
from .display import Display
from .loops import Order

WORKERS = (1, 2)
_LOOK_SECONDS = 0.25  # the bar moves to the eye, and counting the journal costs a few milliseconds
PATIENCE_SECONDS = 180.0  # nothing may happen for so long: a busy machine takes a minute to start a process
_IDLE_SECONDS = 1.5  # longer than any failpoint stays unpassed while there is work
_MOST_ERRORS = 5  # workers that may end by themselves before there is no point in going on

# What a failpoint means, for people.
_MOMENTS = {
    "polled": "with a batch in hand",
    "begun": "in an open transaction",
    "handled": "with effects written",
    "guarded": "with effects checked",
    "advanced": "one step before COMMIT",
    "committed": "right after COMMIT",
    "positioned": "between two batches",
    "mirrored": "after committing to Kafka",
}
# What ``committed`` means for the ordinary loop.
_BETWEEN_COMMITS = "between its two commits"

# Where a frozen worker has something to do as a zombie.
_WITH_BATCH = ("polled", "begun", "handled", "guarded", "advanced")
# Passed about once a second: waiting for a later pass would only take time.
_ONCE_IN_A_WHILE = ("positioned", "mirrored")


class Stuck(Exception):
    """What should have happened did not."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One injury: who, how, and at which pass of which failpoint."""

    kind: Literal["kill", "freeze"]
    at: str
    victim: int
    after: int


def plan(seed: int, *, quick: bool) -> list[Fault]:
    """Draw the faults: each failpoint kills, once or twice, and some freeze a worker with a batch in hand."""
    rounds, freezes = (1, 2) if quick else (2, 3)
    # Frozen after its advance, a worker holds the ledger's rows until its backend is ended: two seconds more.
    moments = _WITH_BATCH[:-1] if quick else _WITH_BATCH
    dice = random.Random(f"faults {seed}")  # noqa: S311  (to be repeated, not to be secret)
    kinds: list[tuple[Literal["kill", "freeze"], str]] = [("kill", at) for at in OF_A_UNIT * rounds]
    kinds += [("freeze", at) for at in dice.sample(moments, freezes)]
    dice.shuffle(kinds)
    return [
        Fault(kind, at, victim=dice.randint(1, 2), after=0 if at in _ONCE_IN_A_WHILE else dice.randrange(4))
        for kind, at in kinds
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the two sides have in common."""

    bootstrap_servers: str
    conninfo: str
    seed: int
    messages: int
    faults: Sequence[Fault]
    session_ms: int

    @property
    def max_messages(self) -> int:
        """How large a batch is: so small that what comes in with each fault makes many."""
        return max(1, min(500, self.messages // (len(self.faults) + 1) // 20))


@dataclass(slots=True, kw_only=True)
class Tally:
    """What happened on one side while it ran."""

    crashes: int = 0
    frozen: int = 0
    fenced: int = 0
    unfenced: int = 0
    """Zombies whose effects were stored nevertheless."""
    errors: int = 0
    """Workers that ended by themselves."""
    spared: int = 0
    """Faults that found nothing to strike, as payments had run out."""
    drained: bool = False
    """Whether everything was applied and the workers stopped when they were asked to."""
    waited_for: str = ""
    """What it was cut short waiting for, if it was."""
    seconds: float = 0.0


class Trial:
    """One side: its topic, its tables, its two workers."""

    def __init__(self, loop: str, setting: Setting, display: Display) -> None:
        self.topic = f"payments-{loop.replace('_', '-')}"
        self.schema = f"demo_{loop}"
        self.tally = Tally()
        self._loop = loop
        self._setting = setting
        self._display = display
        orders = {
            number: Order(
                loop=loop,
                number=number,
                bootstrap_servers=setting.bootstrap_servers,
                conninfo=setting.conninfo,
                topic=self.topic,
                schema=self.schema,
                max_messages=setting.max_messages,
                session_ms=setting.session_ms,
            )
            for number in WORKERS
        }
        self._crew = Crew(orders, "exactly_once.demo.loops")
        # Both are made by `run`.
        self._publisher: payments.Publisher
        self._connection: psycopg.Connection[Any]
        self._faults_left = len(setting.faults)
        self._stopping = False  # whether workers that end were asked to
        # What the journal showed last, and when: how many payments, and the last offset of each partition.
        self._looked_at = 0.0
        self._applied = 0
        self._reached: dict[int, int] = {}
        self._moved_at = time.monotonic()  # when the journal last grew, or had more to come
        self._alive_at = time.monotonic()  # when anything happened last: a worker's report, or the journal grew

    def run(self) -> Tally:
        """Inflict every fault, publish every payment, wait until all is applied, stop the workers."""
        began_at = time.monotonic()
        setting, workers = self._setting, self._crew.workers
        with psycopg.connect(setting.conninfo, autocommit=True) as self._connection, self._crew:
            try:
                for _ in WORKERS:
                    self._crew.warm_up()
                payments.create_topic(setting.bootstrap_servers, self.topic)
                payments.create_tables(self._connection, self.schema)
                for number in WORKERS:
                    self._crew.start(number)
                self._publisher = payments.Publisher(setting.bootstrap_servers, self.topic, seed=setting.seed)
                self._until(self._all_have_some, "the workers to share the topic")
                self._display.log(f"two workers are ready; {setting.messages:,} payments come in while faults strike")
                for fault in setting.faults:
                    self._publish()
                    self._inflict(fault)
                    self._faults_left -= 1
                self._publish()
                self._display.log("no more faults; applying what is left")
                while not self._is_drained():
                    self._listen()
                    self._be_patient("the last payments to be applied", self._moved_at)
                self._stopping = True
                for worker in workers.values():
                    worker.send(signal.SIGTERM)
                self._until(lambda: all("ended" in w.reports for w in workers.values()), "the workers to stop")
                self.tally.drained = True
            except Stuck as trouble:
                self.tally.waited_for = str(trouble)
                self._display.log(f"gave up waiting for {trouble}", style="bold red")
        self._display.no_progress()
        self.tally.seconds = round(time.monotonic() - began_at, 1)
        return self.tally

    def _publish(self) -> bool:
        """Let the next portion come in; return whether there was one.

        It is an equal share for each fault and for the time behind them. While a victim is fed, its own fault is still
        to come: so what is left does not go to the other worker at once.
        """
        left = self._setting.messages - self._publisher.published
        if left > 0:
            self._publisher.publish(-(-left // (self._faults_left + 1)))
            self._moved_at = time.monotonic()
        return left > 0

    def _inflict(self, fault: Fault) -> None:
        """Injure a worker at its failpoint, and wait until another does its work."""
        crew, log = self._crew, self._display.log
        number, victim = fault.victim, crew.workers[fault.victim]
        victim.arm(fault.kind, fault.at, fault.after)
        sign = "dying" if fault.kind == "kill" else "frozen"
        if not self._until(lambda: sign in victim.reports, f"{victim} to pass {fault.at}", feeding=True):
            victim.disarm()
            self.tally.spared += 1
            log(f"worker {number} ran out of payments before it passed {fault.at!r}")
            return
        struck_at = time.monotonic()
        if fault.kind == "kill":
            is_between = (fault.at, self._loop) == ("committed", "at_least_once")
            moment = _BETWEEN_COMMITS if is_between else _MOMENTS[fault.at]
            self._until(lambda: crew.workers[number] is not victim, f"the end of {victim}")
            self._until(lambda: bool(crew.workers[number].partitions), f"a successor of {victim}")
            seconds = time.monotonic() - struck_at
            log(f"worker {number} killed (-9) {moment} ({fault.at}); replaced in {seconds:.1f} s", style="red")
            return
        # The other worker takes a frozen one's partitions; then it is woken up, and its batch shows what it does.
        self.tally.frozen += 1
        log(f"worker {number} frozen (SIGSTOP) {_MOMENTS[fault.at]} ({fault.at})", style="cyan")
        self._until(lambda: victim.is_frozen, f"{victim} to stand still")
        held, other = list(victim.partitions), crew.other(victim)
        self._until(lambda: crew.other(victim).has_since(held, struck_at), f"a successor of frozen {victim}")
        woken_at = time.monotonic()
        seconds = woken_at - struck_at
        log(f"worker {other.number} took over after {seconds:.1f} s; worker {number} wakes up, a zombie", style="cyan")
        before = len(victim.reports)
        victim.send(signal.SIGCONT)
        ends = {"fenced", "stored", "redelivered", "ended"}
        self._until(lambda: not ends.isdisjoint(victim.reports[before:]), f"the outcome of the batch of {victim}")
        end = next(report for report in victim.reports[before:] if report in ends)
        self.tally.fenced += end == "fenced"
        self.tally.unfenced += end == "stored"
        if end == "stored":
            log(f"worker {number} stored its batch, and so does its successor", style="red")
        else:
            why = "was fenced" if end == "fenced" else "lost its transaction"
            log(f"worker {number} {why}, its batch rolled back", style="green")
        # Its old partitions count no more: both must have been given some since.
        self._until(lambda: self._all_have_some(since=woken_at), "both workers to work again")

    def _all_have_some(self, *, since: float = 0.0) -> bool:
        workers = self._crew.workers.values()
        return all(any(moment > since for moment in worker.partitions.values()) for worker in workers)

    def _is_drained(self) -> bool:
        return all(self._reached.get(p, -1) >= last for p, last in self._publisher.last.items())

    def _until(self, condition: Callable[[], bool], what: str, *, feeding: bool = False) -> bool:
        """Listen until ``condition`` holds. With ``feeding``, workers get more work when they have none.

        :raises Stuck: when nothing happens any more. Returns False when there is no more work to give.
        """
        began_at = time.monotonic()
        while not condition():
            self._listen()
            self._be_patient(what, max(began_at, self._alive_at))
            is_idle = feeding and self._is_drained() and time.monotonic() - self._moved_at > _IDLE_SECONDS
            if is_idle and not self._publish():
                return False
        return True

    def _be_patient(self, what: str, since: float) -> None:
        """Give up when nothing has happened for so long.

        :raises Stuck: naming what was waited for.
        """
        if time.monotonic() - since > PATIENCE_SECONDS:
            raise Stuck(what)

    def _listen(self) -> None:
        """Take in what workers report, waiting for a moment; replace who ended, look how far they are."""
        for worker, event in self._crew.received(_LOOK_SECONDS / 5):
            self._alive_at = time.monotonic()
            worker.receive(event)
            if event["event"] != "ended":
                continue
            if "dying" in worker.reports:
                self.tally.crashes += 1
            elif worker.status or not self._stopping:
                self.tally.errors += 1
                self._display.log(f"worker {worker.number} ended by itself ({worker.status}):", style="bold red")
                self._display.line(worker.last_words())
                if self.tally.errors > _MOST_ERRORS:
                    raise Stuck("workers to stay alive")
            if not self._stopping:
                self._crew.start(worker.number)
        if time.monotonic() - self._looked_at <= _LOOK_SECONDS:
            return
        statement = 'SELECT partition, count(*), max("offset") FROM {}.journal GROUP BY partition'
        rows = self._connection.execute(sql.SQL(statement).format(sql.Identifier(self.schema))).fetchall()
        applied = sum(count for _, count, _ in rows)
        if applied != self._applied:
            self._moved_at = self._alive_at = time.monotonic()
        self._applied = applied
        self._reached = {partition: last for partition, _, last in rows}
        # A payment that took effect twice counts twice in the journal, and the bar has an end.
        self._display.progress(min(applied, self._setting.messages), self._setting.messages)
        self._looked_at = time.monotonic()
