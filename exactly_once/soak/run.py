"""Run: sources, groups, faults, observer and checker together, from a seed to a verdict."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg

from exactly_once._failpoints import OF_A_UNIT
from exactly_once.demo.crew import Crew, Worker
from exactly_once.demo.display import Display
from exactly_once.demo.journal import log_ends
from exactly_once.demo.payments import create_topic
from exactly_once.embedded import Postgres, Servers
from exactly_once.embedded.errors import StartError
from exactly_once.embedded.proxy import Fault, PostgresProxy
from exactly_once.ledger.migrate import migrate

from . import verdict
from .observer import Anomaly, Observer, Place, Tail
from .source import Source
from .worker import GROUPS, MEMBERS, PLACES, TOPICS, Order, create_tables, draw

# How often each kind comes in one round.
DECK = {
    "kill -9": 4,
    "kill -9 at a failpoint": 4,
    "freeze": 2,
    "freeze at a failpoint": 2,
    "join": 2,
    "leave": 2,
    "cut before COMMIT": 3,
    "cut after COMMIT": 3,
    "COMMIT delayed and its client gone": 2,
    "answer of COMMIT delayed": 1,
    "backend terminated": 2,
    "all connections cut": 1,
    "immediate restart of Postgres": 1,
    "failover": 1,
    "failover that loses commits": 1,
    "broker killed": 1,
}
# Of Postgres: what it keeps for a standby, which is away for some seconds when the primary has crashed.
SETTINGS = {"wal_keep_size": "256MB"}
# After so long without progress of a partition that has messages, nothing new goes wrong until it moves again.
CALM_SECONDS = 30.0
# After so long, with 90 seconds of calm, it is wedged. Only time in which both servers are up counts.
WEDGED_SECONDS = 120.0
_EVIDENCE_LINES = 100  # of a member: what it logged, and where its threads are
_END_SECONDS = 90.0  # for a worker that is asked to end: more than any wait of the library without servers
_TURN_SECONDS = 0.05  # what is due happens about then
_LOOK_SECONDS = 0.5  # the observer's snapshots come once a second
_LOG_SECONDS = 10.0
_MOST_WAITING = 20_000  # messages that a group may be behind before sources pause: some seconds of its work
_MOST_ARMED = 4  # faults that wait for a COMMIT at a time: with more, no COMMIT would get through for a while
_MOST_ENDED = 10  # workers that may end by themselves before there is no point in going on
# How a worker ends that was asked to; the last one before it had anything to do.
_STOPPED = {0, 128 + signal.SIGTERM, -signal.SIGTERM}
# Less than a session, more than one, more than a unit may take, and more than `max.poll.interval.ms`.
_FREEZE_SECONDS = (0.5, 3.0, 9.0, 20.0)
_BEHIND_SECONDS = 3.0  # a standby that is promoted lacks what was committed in so many seconds at most
_ARMED_PASSES = 20  # so many times at most a failpoint is passed before the fault that waits there
_TERMINATE = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE application_name LIKE 'exactly\\_once:%' ORDER BY random() LIMIT 1
"""
_ROWS = "SELECT count(*) FROM exactly_once.ledger"
_FOLLOW_NOBODY = ("ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
_LEDGER = "SELECT * FROM exactly_once.ledger WHERE group_id = %s ORDER BY topic, partition"
_BACKENDS = """
    SELECT pid, application_name, state, wait_event, xact_start, query FROM pg_stat_activity
    WHERE backend_type = 'client backend'
"""


class Nemesis:
    """Draws the kinds: all of the deck in random order, and again, with random pauses."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"faults {seed}")  # noqa: S311  (to be repeated, not to be secret)
        self._left: list[str] = []  # of the deck, in the order in which they will be drawn from its end

    def next_kind(self) -> str:
        if not self._left:
            self._left = [kind for kind, times in sorted(DECK.items()) for _ in range(times)]
            self.chance.shuffle(self._left)
        return self._left.pop()

    def pause(self) -> float:
        """Draw for how many seconds nothing new goes wrong."""
        return self.chance.uniform(0.2, 2.5)  # so that some faults meet the recovery from the one before


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
        self._orders: dict[int, Order] = {}  # by place, of the worker that was started there last
        self._crew = Crew(self._orders, "exactly_once.soak.worker")
        # These four are made by `run`, which has the servers' addresses.
        self._tail: Tail
        self._observer: Observer
        self._proxy: PostgresProxy
        self._standby: Postgres
        self._sources: list[Source] = []
        # What the verdict counts.
        self._faults: Counter[str] = Counter()
        self._reports: Counter[str] = Counter()
        self._workers = 0  # processes that were started, all in all
        self._anomalies: list[Anomaly] = []
        self._wanted: set[int] = set()  # the places that are to be taken: a worker that ends there is replaced
        self._killed: set[Worker] = set()  # those whose end is no anomaly
        self._leaving: dict[Worker, float] = {}  # who was asked to end, and when by the clock of `_up`
        self._frozen: set[Worker] = set()  # those that are to be thawed
        self._armed: list[tuple[str, Fault]] = []  # faults of the proxy that have not struck yet
        self._due: list[tuple[float, Callable[[], None]]] = []  # what is to be done later, and when
        self._outages = ThreadPoolExecutor(1)
        self._outage: Future[None] | None = None  # a server that is away, one at a time
        self._up = 0.0  # seconds in which both servers were up
        self._turned_at = self._looked_at = self._logged_at = time.monotonic()
        # For each partition of each group where it stood, and by the clock of `_up` until when that was no standstill.
        self._moved: dict[tuple[str, Place], tuple[int, float]] = {}
        self._longest_standstill = 0.0
        self._is_calm = False  # whether nothing new goes wrong
        self._began_at = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Injure for as long as asked, heal, drain, and return the verdict."""
        self._began_at = time.monotonic()
        is_drained = False
        with PostgresProxy(self._servers.conninfo) as self._proxy, self._crew, self._outages:
            self._prepare()
            try:
                next_at = time.monotonic() + self._nemesis.pause()
                # Only now: a busy machine takes longer to prepare than a short soak lasts. A run without a fault shows
                # nothing, so that one is waited for.
                end = time.monotonic() + self._seconds
                while time.monotonic() < end or not self._faults:
                    self._turn()
                    if self._is_calm or time.monotonic() < next_at:
                        continue
                    kind = self._nemesis.next_kind()
                    if self._injure_worker(kind) or self._injure_server(kind):
                        self._count(kind)
                    next_at = time.monotonic() + self._nemesis.pause()

                # What is frozen goes on, what is held is let go, what is down comes up.
                self._display.log("no more faults; the sources stop, and what is left is applied")
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

                # Each group applies every message, and each worker ends in good order.
                ends: dict[Place, int] = {}
                for topic in TOPICS:
                    of_topic = log_ends(self._servers.bootstrap_servers, topic, _END_SECONDS)
                    ends |= {(topic, number): end for number, end in of_topic.items()}
                # What the observer saw before a failover may be lost: it looks once more, wholly after the last one.
                seen = self._observer.snapshots + 2
                while (
                    self._observer.snapshots < seen
                    or not all(self._tail.upto(place) >= end for place, end in ends.items())
                    or self._waiting()
                ):
                    self._turn()
                for worker in list(self._crew.workers.values()):
                    self._dismiss(worker)
                while self._leaving:
                    self._turn()
                is_drained = True
            except Wedged as wedged:
                self._found("wedged", *wedged.args)
            finally:
                self._observer.stop()
                self._tail.stop()
                self._outages.shutdown()  # one of them may be making a standby
                self._standby.close()
        self._display.log("checking it against the topics, read anew from their beginnings")
        servers = self._servers
        messages, found = verdict.check(
            servers.bootstrap_servers, servers.conninfo, list(TOPICS), list(GROUPS), is_drained=is_drained
        )
        so_far = self.so_far(found)
        # A run without a fault shows nothing.
        ok = not so_far["anomalies"] and bool(self._faults)
        effects = messages * len(GROUPS) if not so_far["anomalies"] else None
        versions = verdict.versions(postgres=servers.postgres.version, kafka=servers.kafka.version)
        return so_far | {"ok": ok, "messages": messages, "effects": effects, "versions": versions}

    def _prepare(self) -> None:
        """Make tables and topics, start what publishes and what watches, fill every group."""
        servers = self._servers
        with psycopg.connect(servers.conninfo, autocommit=True) as connection:
            migrate(connection)
            create_tables(connection, list(GROUPS))
        for topic, count in TOPICS.items():
            create_topic(servers.bootstrap_servers, topic, count, self._brokers)
        self._tail = Tail(servers.bootstrap_servers, TOPICS)
        self._standby = servers.postgres.start_standby()
        self._observer = Observer(lambda: servers.conninfo, list(GROUPS), self._tail)
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

    def _turn(self) -> None:
        """Do what is due: take in reports, thaw, replace the dead, look how far everybody is."""
        for worker, event in self._crew.received(_TURN_SECONDS):
            name = event["event"]
            self._reports[name] += 1
            worker.receive(event)
            if name == "dying":
                self._count("kill -9 at a failpoint")
                self._killed.add(worker)
            elif name == "frozen":
                self._count("freeze at a failpoint")
                self._thaw_later(worker)
            elif name == "instance fenced":
                self._display.log(f"worker {worker.number} ends: {event['why']}", style="yellow")
            elif name == "ended":
                is_expected = worker in self._leaving and worker.status in _STOPPED
                if not (is_expected or worker in self._killed or "instance fenced" in worker.reports):
                    self._found("ended", f"worker {worker.number} ({self._orders[worker.number]})", worker.last_words())
                self._leaving.pop(worker, None)
                self._frozen.discard(worker)
                self._killed.discard(worker)
                self._crew.dismiss(worker)
                if sum(anomaly.kind == "ended" for anomaly in self._anomalies) > _MOST_ENDED:
                    raise Wedged("all", f"{_MOST_ENDED} workers ended by themselves")
                if worker.number in self._wanted:
                    self._hire(worker.number)
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
        for kind, fault in [each for each in self._armed if each[1].fired.is_set()]:
            self._armed.remove((kind, fault))
            self._count(kind)
            if fault.holds:
                # Up to a session time-out: others take over meanwhile, or do not.
                self._later(self._chance.uniform(0.2, 6), fault.release)
        if now - self._looked_at > _LOOK_SECONDS:
            self._look()
            self._looked_at = now

    # What a turn and a fault do to workers.

    def _hire(self, number: int) -> None:
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

    def _injure_worker(self, kind: str) -> bool:
        """Injure somebody; return whether it happened. What strikes later is counted when it does."""
        chance = self._chance
        living = [worker for worker in self._crew.workers.values() if worker.status is None]
        awake = [worker for worker in living if worker not in self._frozen]
        match kind:
            case "kill -9":
                victim = chance.choice(living)
                self._killed.add(victim)
                victim.send(signal.SIGKILL)
            case "kill -9 at a failpoint" | "freeze at a failpoint" if awake:
                how = "kill" if kind.startswith("kill") else "freeze"
                chance.choice(awake).arm(how, chance.choice(OF_A_UNIT), chance.randrange(_ARMED_PASSES))
                return False
            case "freeze" if awake and len(self._frozen) < len(GROUPS):
                victim = chance.choice(awake)
                victim.send(signal.SIGSTOP)
                self._thaw_later(victim)
            case "join":
                # For a while. Not in a place whose member left for a moment: nobody would come back there.
                group = chance.randrange(len(GROUPS))
                places = range(group * PLACES + list(MEMBERS.values())[group], (group + 1) * PLACES)
                number = next(number for number in places if number not in self._crew.workers)
                self._hire(number)

                def resign() -> None:
                    # Whoever took the place of a newcomer that was killed goes, too.
                    if (present := self._crew.workers.get(number)) is not None:
                        self._dismiss(present)
                        self._count("leave")
                    self._wanted.discard(number)

                self._later(chance.uniform(3, 15), resign)
            case "leave":
                # In good order, as in a deployment; another one comes a moment later.
                leaver = chance.choice(living)
                place = leaver.number
                if leaver in self._leaving or place % PLACES >= list(MEMBERS.values())[place // PLACES]:
                    return False
                self._dismiss(leaver)

                def come() -> None:
                    if place in self._crew.workers:  # the last one is still on its way out
                        self._wanted.add(place)
                    else:
                        self._hire(place)

                self._later(chance.uniform(0, 8), come)
            case _:
                return False
        return True

    def _injure_server(self, kind: str) -> bool:
        """Injure a connection or a server; return whether it happened. What strikes later is counted when it does."""
        proxy, servers = self._proxy, self._servers
        at_commit: dict[str, Callable[[], Fault]] = {
            "cut before COMMIT": proxy.cut_before,
            "cut after COMMIT": proxy.cut_after,
            "COMMIT delayed and its client gone": lambda: proxy.hold(close_client=True),
            "answer of COMMIT delayed": proxy.hold_answer,
        }
        if kind in at_commit:  # on whichever connection comes next
            if len(self._armed) < _MOST_ARMED:
                self._armed.append((kind, at_commit[kind]()))
            return False
        if kind == "backend terminated":
            try:
                with psycopg.connect(servers.conninfo) as connection:
                    return connection.execute(_TERMINATE).fetchone() is not None
            except psycopg.OperationalError:
                return False
        if kind == "all connections cut":
            proxy.cut_all()
            return True
        node, seconds = self._chance.randint(1, self._brokers), self._chance.uniform(0, 4)
        outages: dict[str, Callable[[], None]] = {
            "immediate restart of Postgres": lambda: servers.postgres.restart("immediate"),
            "failover": lambda: self._fail_over(0.0),
            "failover that loses commits": lambda: self._fail_over(seconds / 4 * _BEHIND_SECONDS),
            "broker killed": lambda: self._kill_broker(node, seconds),
        }
        if kind not in outages or self._outage is not None:
            return False
        if kind.startswith("failover"):
            # A group whose first commit is lost has no rows, and is rightly refused until an operator decides.
            with psycopg.connect(self._standby.conninfo) as connection:
                if connection.execute(_ROWS).fetchone() != (len(self._moved),):
                    return False
        self._outage = self._outages.submit(outages[kind])
        return True

    def _kill_broker(self, node: int, seconds: float) -> None:
        self._servers.kafka.kill(node)
        time.sleep(seconds)
        self._servers.kafka.restart(node)

    def _fail_over(self, behind_seconds: float) -> None:
        """Crash the primary and promote the standby, which may lack what was committed last; another one follows it."""
        old, new = self._servers.postgres, self._standby
        with psycopg.connect(new.conninfo, autocommit=True) as connection:
            if behind_seconds:
                for statement in _FOLLOW_NOBODY:
                    connection.execute(statement)
                time.sleep(behind_seconds)
            old.stop("immediate")
            if connection.execute("SELECT pg_promote()").fetchone() != (True,):
                raise StartError("the standby was not promoted within 60 s, the limit of pg_promote()")
        self._servers.postgres = new
        self._proxy.upstream = ("127.0.0.1", new.port)
        old.close()
        self._standby = new.start_standby()

    def _count(self, kind: str) -> None:
        self._faults[kind] += 1
        self._display.log(kind, style="red")

    def _found(self, kind: str, where: str, what: str) -> None:
        self._anomalies.append(Anomaly(kind, where, what))
        self._display.log(f"{kind}: {where}: {what}", style="bold red")

    def _look(self) -> None:
        """See who stands still, who does not leave, and whether the sources are too fast.

        :raises Wedged: when a partition does not move although nothing is wrong.
        """
        for thread in (self._tail, self._observer):
            if not thread.is_alive():
                raise RuntimeError(f"the {thread.name} has ended; its traceback is above")
        for key, view in self._observer.views.items():
            reached = view.row.next_offset
            if reached != self._moved[key][0] or self._tail.last(key[1]) < reached:
                self._moved[key] = (reached, self._up)
        group, (topic, partition) = slowest = min(self._moved, key=lambda key: self._moved[key][1])
        where = f"group {group}, {topic} [{partition}]"
        standstill = self._up - self._moved[slowest][1]
        self._longest_standstill = max(self._longest_standstill, standstill)
        if standstill > WEDGED_SECONDS:
            raise Wedged(where, self._evidence(group))
        is_calm = standstill > CALM_SECONDS or (self._is_calm and standstill > 1)
        if is_calm and not self._is_calm:
            self._display.log(f"{where} stands still: no faults until it moves", style="yellow")
            for worker in list(self._frozen):
                self._thaw(worker)
            for _, fault in self._armed:
                fault.release()
        self._is_calm = is_calm
        waiting = self._waiting()
        for source in self._sources:
            source.paused = waiting > _MOST_WAITING
        for worker, asked_at in list(self._leaving.items()):
            if self._up - asked_at > _END_SECONDS and worker not in self._killed:
                # Whether it has closed its consumer is in its reports alone.
                last = f"its last reports {worker.reports[-3:]}\n{worker.last_words()}"
                what = f"does not end {_END_SECONDS:g} s after SIGTERM, {last}"
                self._found("wedged", f"worker {worker.number} ({self._orders[worker.number]})", what)
                self._killed.add(worker)
                worker.send(signal.SIGKILL)
        if time.monotonic() - self._logged_at > _LOG_SECONDS:
            self._logged_at = time.monotonic()
            self._display.log(
                f"{self._tail.messages:,} messages, {waiting:,} of them not applied by the slowest group; "
                f"{self._faults.total()} faults; {self._observer.snapshots} snapshots; "
                f"{len(self._anomalies) + len(self._observer.anomalies)} anomalies"
            )

    def _waiting(self) -> int:
        """How many messages the slowest group has not applied."""
        lags: Counter[str] = Counter()
        for (group, place), view in self._observer.views.items():
            lags[group] += len(self._tail.between(place, view.row.next_offset, self._tail.upto(place)))
        return max(lags.values())

    def _evidence(self, group: str) -> str:
        """Collect what everybody in a group logged last, what its rows are and what the database does."""
        members = [worker for worker in self._crew.workers.values() if self._orders[worker.number].group == group]
        for worker in members:
            worker.send(signal.SIGUSR1)
        parts = [
            f"{name} {place} at {at} for {self._up - since:.0f} s" for (name, place), (at, since) in self._moved.items()
        ]
        with psycopg.connect(self._servers.conninfo) as connection:
            parts += ["---", *map(str, connection.execute(_LEDGER, (group,)))]
            parts += ["---", *map(str, connection.execute(_BACKENDS))]
        for worker in members:
            order = self._orders[worker.number]
            parts.append(f"--- {worker!r} frozen={worker.is_frozen} {order}\n{worker.last_words(_EVIDENCE_LINES)}")
        for node in range(1, self._brokers + 1):
            lines = self._servers.kafka.log(node).read_text(errors="replace").splitlines()
            parts += [f"--- broker {node}", *lines[-_EVIDENCE_LINES:]]
        return "\n".join(parts)

    def so_far(self, found: Iterable[Anomaly] = ()) -> dict[str, Any]:
        """Return what was counted, and the anomalies that were met or found."""
        is_observed = bool(self._sources)  # which are made behind tail and observer
        anomalies = sorted({*self._anomalies, *(self._observer.anomalies if is_observed else ()), *found})
        return {
            "seed": self._seed,
            "seconds": round(time.monotonic() - self._began_at, 1),
            "messages": self._tail.messages if is_observed else 0,
            "groups": list(GROUPS),
            "transactions_aborted": sum(source.aborted for source in self._sources),
            "transactions_left_open": sum(source.left_open for source in self._sources),
            "faults": dict(sorted(self._faults.items())),
            "faults_total": self._faults.total(),
            "workers": self._workers,
            "fenced": self._reports["fenced"],
            "instances_fenced": self._reports["instance fenced"],
            "redelivered": self._reports["redelivered"],
            "snapshots": self._observer.snapshots if is_observed else 0,
            "longest_standstill_seconds": round(self._longest_standstill, 1),
            **verdict.counts(anomalies),
            "anomalies": verdict.shown(anomalies),
        }
