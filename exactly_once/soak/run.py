"""Run: sources, groups, faults, observer and checker together, from a seed to a verdict."""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg

from exactly_once._failpoints import OF_A_UNIT
from exactly_once.demo.crew import Crew, Event, Worker
from exactly_once.demo.display import Display
from exactly_once.demo.journal import log_ends
from exactly_once.embedded import Servers
from exactly_once.embedded.proxy import Fault, PostgresProxy
from exactly_once.ledger.migrate import migrate

from . import verdict
from .nemesis import Nemesis
from .observer import Anomaly, Observer
from .order import GROUPS, MEMBERS, PLACES, TOPICS, Order, draw
from .source import Source, create_topics
from .tail import Place, Tail
from .worker import create_tables

CALM_SECONDS = 30.0
"""After so long without progress of a partition that has messages, nothing new goes wrong until it moves again."""
WEDGED_SECONDS = 120.0
"""After so long, with 90 seconds of calm, it is wedged. Only time in which both servers are up counts."""
_END_SECONDS = 90.0
"""How long a worker may take to end when it is asked to."""
_TURN_SECONDS = 0.05
_LOOK_SECONDS = 0.5
_TELL_SECONDS = 10.0
_MOST_WAITING = 1_500
"""Messages that a group may be behind before sources pause."""
_MOST_ARMED = 4
"""Faults that wait for a COMMIT at a time."""
_MOST_ENDED = 10
"""Workers that may end by themselves before there is no point in going on."""
_STOPPED = {0, 128 + signal.SIGTERM, -signal.SIGTERM}
"""How a worker ends that was asked to; the last one before it had anything to do."""
_FREEZE_SECONDS = (0.5, 3.0, 9.0, 20.0)
_TERMINATE = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE application_name LIKE 'exactly\\_once:%' ORDER BY random() LIMIT 1
"""
_LEDGER = "SELECT * FROM exactly_once.ledger WHERE group_id = %s ORDER BY topic, partition"
_BACKENDS = """
    SELECT pid, application_name, state, wait_event, xact_start, query FROM pg_stat_activity
    WHERE backend_type = 'client backend'
"""


class Wedged(Exception):
    """A partition stands still although nothing is wrong any more."""


class Soak:
    """One soak; `run` does it all."""

    def __init__(self, servers: Servers, *, seed: int, seconds: float, brokers: int, display: Display) -> None:
        self._servers = servers
        self._seed = seed
        self._seconds = seconds
        self._brokers = brokers
        self._display = display
        self._nemesis = Nemesis(seed)
        self._chance = self._nemesis.chance
        self._orders: dict[int, Order] = {}
        self._crew = Crew(self._orders, "exactly_once.soak.worker")
        self._tail: Tail
        self._observer: Observer
        self._proxy: PostgresProxy
        self._sources: list[Source] = []
        self._faults: Counter[str] = Counter()
        self._reports: Counter[str] = Counter()
        self._workers = 0
        self._anomalies: list[Anomaly] = []
        self._wanted: set[int] = set()
        """The places that are to be taken: a worker that ends there is replaced."""
        self._killed: set[Worker] = set()
        self._leaving: dict[Worker, float] = {}
        """Who was asked to end, and when by the clock of `_up`."""
        self._frozen: set[Worker] = set()
        self._armed: list[tuple[str, Fault]] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._outages = ThreadPoolExecutor(1)
        self._outage: Future[None] | None = None
        self._up = 0.0
        """Seconds in which both servers were up."""
        self._turned_at = self._looked_at = self._told_at = time.monotonic()
        self._moved: dict[tuple[str, Place], tuple[int, float]] = {}
        """For each partition of each group where it stood, and until when that was no standstill."""
        self._longest_standstill = 0.0
        self._is_calm = False
        self._began_at = time.monotonic()
        self._kinds: dict[str, Callable[[], bool]] = {
            "kill -9": self._kill,
            "kill -9 at a failpoint": lambda: self._arm("kill"),
            "freeze": self._freeze,
            "freeze at a failpoint": lambda: self._arm("freeze"),
            "join": self._join,
            "leave": self._leave,
            "cut before COMMIT": lambda: self._cut("cut before COMMIT", self._proxy.cut_before),
            "cut after COMMIT": lambda: self._cut("cut after COMMIT", self._proxy.cut_after),
            "COMMIT delayed and its client gone": lambda: self._cut(
                "COMMIT delayed and its client gone", lambda: self._proxy.hold(close_client=True)
            ),
            "answer of COMMIT delayed": lambda: self._cut("answer of COMMIT delayed", self._proxy.hold_answer),
            "backend terminated": self._terminate,
            "all connections cut": self._cut_all,
            "immediate restart of Postgres": self._crash_postgres,
            "broker killed": self._kill_broker,
        }
        """Each returns whether it happened; those that strike later are counted when they do."""

    def run(self) -> dict[str, Any]:
        """Injure for as long as asked, heal, drain, and return the verdict."""
        self._began_at = time.monotonic()
        is_drained = False
        with PostgresProxy(self._servers.conninfo) as self._proxy, self._crew, self._outages:
            self._prepare()
            try:
                self._injure()
                self._heal()
                self._drain()
                self._stop()
                is_drained = True
            except Wedged as wedged:
                self._found("wedged", *wedged.args)
            finally:
                self._observer.stop()
                self._tail.stop()
        return self._verdict(is_drained=is_drained)

    # The run.

    def _prepare(self) -> None:
        servers = self._servers
        with psycopg.connect(servers.conninfo, autocommit=True) as connection:
            migrate(connection)
            create_tables(connection, list(GROUPS))
        create_topics(servers.bootstrap_servers, TOPICS, replicas=self._brokers)
        self._tail = Tail(servers.bootstrap_servers, TOPICS)
        self._observer = Observer(servers.conninfo, list(GROUPS), self._tail)
        self._moved = dict.fromkeys(self._observer.views, (0, 0.0))
        self._sources = [
            Source(servers.bootstrap_servers, topic, count, seed=self._seed, is_transactional=not number)
            for number, (topic, count) in enumerate(TOPICS.items())
        ]
        for thread in (self._tail, self._observer, *self._sources):
            thread.start()
        for number, group in enumerate(GROUPS):
            for place in range(MEMBERS[group]):
                self._hire(number * PLACES + place)

    def _injure(self) -> None:
        next_at = time.monotonic() + self._nemesis.pause()
        while time.monotonic() < self._began_at + self._seconds:
            self._turn()
            if self._is_calm or time.monotonic() < next_at:
                continue
            kind = self._nemesis.next_kind()
            if self._kinds[kind]():
                self._count(kind)
            next_at = time.monotonic() + self._nemesis.pause()

    def _heal(self) -> None:
        """End every fault: what is frozen goes on, what is held is let go, what is down comes up."""
        self._display.say("no more faults; the sources stop, and what is left is applied")
        for source in self._sources:
            source.stop()
        for worker in self._crew.workers.values():
            worker.disarm()
        for _, fault in self._armed:
            fault.release()
        self._is_calm = True
        while self._due or self._outage or any(source.is_alive() for source in self._sources):
            self._due = [(0.0, action) for _, action in self._due]
            self._turn()

    def _drain(self) -> None:
        """Wait until each group has applied every message.

        :raises Wedged: when one does not get on.
        """
        ends: dict[Place, int] = {}
        for topic in TOPICS:
            found = log_ends(self._servers.bootstrap_servers, topic, _END_SECONDS)
            ends |= {(topic, number): end for number, end in found.items()}
        while not all(self._tail.upto(place) >= end for place, end in ends.items()) or self._waiting():
            self._turn()

    def _stop(self) -> None:
        for worker in list(self._crew.workers.values()):
            self._dismiss(worker)
        while self._leaving:
            self._turn()

    def _turn(self) -> None:
        """Do what is due: take in reports, thaw, replace the dead, look how far everybody is."""
        self._listen()
        now = time.monotonic()
        if self._outage is None:
            self._up += now - self._turned_at
        elif self._outage.done():
            self._outage.result()
            self._outage = None
        self._turned_at = now
        due = [action for at, action in self._due if at <= now]
        self._due = [(at, action) for at, action in self._due if at > now]
        for action in due:
            action()
        self._see_what_struck()
        if now - self._looked_at > _LOOK_SECONDS:
            self._look()
            self._looked_at = now

    # Workers.

    def _hire(self, number: int) -> None:
        """Have somebody work in a place."""
        self._wanted.add(number)
        self._orders[number] = draw(number, self._servers.bootstrap_servers, self._proxy.conninfo, self._chance)
        self._crew.start(number)
        self._workers += 1

    def _dismiss(self, worker: Worker) -> None:
        """Ask one to end; nobody takes its place."""
        self._wanted.discard(worker.number)
        self._frozen.discard(worker)
        self._leaving.setdefault(worker, self._up)
        worker.send(signal.SIGTERM)
        worker.send(signal.SIGCONT)

    def _listen(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._take(*self._crew.events.get(timeout=_TURN_SECONDS))
            while True:
                self._take(*self._crew.events.get_nowait())

    def _take(self, worker: Worker, event: Event) -> None:
        name = event["event"]
        self._reports[name] += 1
        worker.heard(event)
        if name == "dying":
            self._count("kill -9 at a failpoint")
            self._killed.add(worker)
        elif name == "frozen":
            self._count("freeze at a failpoint")
            self._thaw_later(worker)
        elif name == "instance fenced":
            self._display.say(f"worker {worker.number} ends: {event['why']}", style="yellow")
        elif name == "ended":
            self._ended(worker)

    def _ended(self, worker: Worker) -> None:
        is_expected = worker in self._leaving and worker.status in _STOPPED
        if not (is_expected or worker in self._killed or "instance fenced" in worker.reports):
            self._found("ended", f"worker {worker.number} ({self._orders[worker.number]})", worker.last_words())
        self._leaving.pop(worker, None)
        self._frozen.discard(worker)
        self._killed.discard(worker)
        self._crew.dismiss(worker)
        if self._count_of("ended") > _MOST_ENDED:
            raise Wedged("all", f"{_MOST_ENDED} workers ended by themselves")
        if worker.number in self._wanted:
            self._hire(worker.number)

    def _living(self) -> list[Worker]:
        return [worker for worker in self._crew.workers.values() if worker.status is None]

    def _thaw_later(self, worker: Worker) -> None:
        self._frozen.add(worker)
        self._later(self._chance.choice(_FREEZE_SECONDS), lambda: self._thaw(worker))

    def _thaw(self, worker: Worker) -> None:
        """Let one go on. A signal that comes before it stands still would be lost."""
        if worker.status is not None:
            return
        if not worker.is_frozen and worker in self._frozen:
            self._later(0.2, lambda: self._thaw(worker))
            return
        worker.send(signal.SIGCONT)
        self._frozen.discard(worker)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, action))

    # Faults.

    def _kill(self) -> bool:
        victim = self._chance.choice(self._living())
        self._killed.add(victim)
        victim.send(signal.SIGKILL)
        return True

    def _arm(self, kind: str) -> bool:
        """Have one killed or frozen at a random moment of a unit; it is counted when it happens."""
        victims = [worker for worker in self._living() if worker not in self._frozen]
        if victims:
            self._chance.choice(victims).arm(kind, self._chance.choice(OF_A_UNIT), self._chance.randrange(20))
        return False

    def _freeze(self) -> bool:
        victims = [worker for worker in self._living() if worker not in self._frozen]
        if not victims or len(self._frozen) >= len(GROUPS):
            return False
        victim = self._chance.choice(victims)
        victim.send(signal.SIGSTOP)
        self._thaw_later(victim)
        return True

    def _join(self) -> bool:
        """One more joins a group, and leaves it some time later."""
        group = self._chance.randrange(len(GROUPS))
        # Not in a place whose member left for a moment: nobody would come back there.
        places = range(group * PLACES + list(MEMBERS.values())[group], (group + 1) * PLACES)
        number = next(number for number in places if number not in self._crew.workers)
        self._hire(number)
        newcomer = self._crew.workers[number]
        self._later(self._chance.uniform(3, 15), lambda: self._resign(newcomer))
        return True

    def _resign(self, newcomer: Worker) -> None:
        """End a membership that was for a while; whoever took the place of one that was killed goes, too."""
        present = self._crew.workers.get(newcomer.number)
        if present is not None:
            self._dismiss(present)
            self._count("leave")
        self._wanted.discard(newcomer.number)

    def _leave(self) -> bool:
        """One leaves in good order, as in a deployment, and another one comes a moment later."""
        leaver = self._chance.choice(self._living())
        number = leaver.number
        if leaver in self._leaving or number % PLACES >= list(MEMBERS.values())[number // PLACES]:
            return False
        self._dismiss(leaver)
        self._later(self._chance.uniform(0, 8), lambda: self._come(number))
        return True

    def _come(self, number: int) -> None:
        if number in self._crew.workers:  # the last one is still on its way out
            self._wanted.add(number)
        else:
            self._hire(number)

    def _cut(self, kind: str, arm: Callable[[], Fault]) -> bool:
        """Injure a COMMIT, or its answer, on whichever connection comes next; it is counted when it strikes."""
        if len(self._armed) < _MOST_ARMED:
            self._armed.append((kind, arm()))
        return False

    def _see_what_struck(self) -> None:
        for kind, fault in [each for each in self._armed if each[1].fired.is_set()]:
            self._armed.remove((kind, fault))
            self._count(kind)
            if fault.holds:
                self._later(self._chance.uniform(0.2, 6), fault.release)

    def _terminate(self) -> bool:
        try:
            with psycopg.connect(self._servers.conninfo) as connection:
                return connection.execute(_TERMINATE).fetchone() is not None
        except psycopg.OperationalError:
            return False

    def _cut_all(self) -> bool:
        self._proxy.cut_all()
        return True

    def _crash_postgres(self) -> bool:
        return self._go_down(lambda: self._servers.postgres.restart("immediate"))

    def _kill_broker(self) -> bool:
        node, seconds = self._chance.randint(1, self._brokers), self._chance.uniform(0, 4)

        def outage() -> None:
            self._servers.kafka.kill(node)
            time.sleep(seconds)
            self._servers.kafka.restart(node)

        return self._go_down(outage)

    def _go_down(self, outage: Callable[[], object]) -> bool:
        """Let a server be away for a while, one at a time."""
        if self._outage is not None:
            return False
        self._outage = self._outages.submit(outage)  # type: ignore[arg-type]  # what it returns is of no interest
        return True

    def _count(self, kind: str) -> None:
        self._faults[kind] += 1
        self._display.say(kind, style="red")

    # Looking.

    def _look(self) -> None:
        """See who stands still, and whether the sources are too fast.

        :raises Wedged: when a partition does not move although nothing is wrong.
        """
        for thread in (self._tail, self._observer):
            if not thread.is_alive():
                raise RuntimeError(f"the {thread.name} has ended; its traceback is above")
        for key, view in self._observer.views.items():
            reached = view.row.next_offset
            if reached != self._moved[key][0] or self._tail.last(key[1]) < reached:
                self._moved[key] = (reached, self._up)
        slowest = min(self._moved, key=lambda key: self._moved[key][1])
        standstill = self._up - self._moved[slowest][1]
        self._longest_standstill = max(self._longest_standstill, standstill)
        self._be_calm(slowest, standstill)
        waiting = self._waiting()
        for source in self._sources:
            source.paused = waiting > _MOST_WAITING
        self._watch_leavers()
        if time.monotonic() - self._told_at > _TELL_SECONDS:
            self._told_at = time.monotonic()
            self._display.say(
                f"{self._tail.messages:,} messages, {waiting:,} of them not applied by the slowest group; "
                f"{self._faults.total()} faults; {self._observer.snapshots} snapshots; "
                f"{len(self._anomalies) + len(self._observer.anomalies)} anomalies"
            )

    def _be_calm(self, slowest: tuple[str, Place], standstill: float) -> None:
        group, (topic, partition) = slowest
        where = f"group {group}, {topic} [{partition}]"
        if standstill > WEDGED_SECONDS:
            raise Wedged(where, self._evidence(group))
        is_calm = standstill > CALM_SECONDS or (self._is_calm and standstill > 1)
        if is_calm and not self._is_calm:
            self._display.say(f"{where} stands still: no faults until it moves", style="yellow")
            for worker in list(self._frozen):
                self._thaw(worker)
            for _, fault in self._armed:
                fault.release()
        self._is_calm = is_calm

    def _watch_leavers(self) -> None:
        for worker, asked_at in list(self._leaving.items()):
            if self._up - asked_at > _END_SECONDS and worker not in self._killed:
                what = f"does not end {_END_SECONDS:g} s after SIGTERM\n{worker.last_words()}"
                self._found("wedged", f"worker {worker.number} ({self._orders[worker.number]})", what)
                self._killed.add(worker)
                worker.send(signal.SIGKILL)

    def _waiting(self) -> int:
        """How many messages the slowest group has not applied."""
        lags: Counter[str] = Counter()
        for (group, place), view in self._observer.views.items():
            lags[group] += len(self._tail.between(place, view.row.next_offset, self._tail.upto(place)))
        return max(lags.values())

    def _evidence(self, group: str) -> str:
        """Tell what everybody in a group said last, what its rows are and what the database does."""
        parts = []
        for worker in self._crew.workers.values():
            order = self._orders[worker.number]
            if order.group == group:
                parts.append(f"--- {worker!r} frozen={worker.is_frozen} {order}\n{worker.last_words()}")
        with psycopg.connect(self._servers.conninfo) as connection:
            parts += ["---", *map(str, connection.execute(_LEDGER, (group,)))]
            parts += ["---", *map(str, connection.execute(_BACKENDS))]
        return "\n".join(parts)

    # The end.

    def _found(self, kind: str, where: str, what: str) -> None:
        self._anomalies.append(Anomaly(kind, where, what))
        self._display.say(f"{kind}: {where}: {what}", style="bold red")

    def _count_of(self, kind: str) -> int:
        return sum(anomaly.kind == kind for anomaly in self._anomalies)

    def _verdict(self, *, is_drained: bool) -> dict[str, Any]:
        self._display.say("checking it against the topics, read anew from their beginnings")
        servers = self._servers
        messages, found = verdict.check(
            servers.bootstrap_servers, servers.conninfo, list(TOPICS), list(GROUPS), is_drained=is_drained
        )
        anomalies = sorted({*self._anomalies, *self._observer.anomalies, *found})
        return {
            "ok": not anomalies,
            "seed": self._seed,
            "seconds": round(time.monotonic() - self._began_at, 1),
            "messages": messages,
            "effects": messages * len(GROUPS) if not anomalies else None,
            "groups": list(GROUPS),
            "transactions_aborted": sum(source.aborted for source in self._sources),
            "transactions_left_open": sum(source.left_open for source in self._sources),
            "faults": dict(sorted(self._faults.items())),
            "faults_total": self._faults.total(),
            "workers": self._workers,
            "fenced": self._reports["fenced"],
            "instances_fenced": self._reports["instance fenced"],
            "redelivered": self._reports["redelivered"],
            "snapshots": self._observer.snapshots,
            "longest_standstill_seconds": round(self._longest_standstill, 1),
            **verdict.counts(anomalies),
            "anomalies": verdict.shown(anomalies),
            "versions": verdict.versions(postgres=servers.postgres.version, kafka=servers.kafka.version),
        }
