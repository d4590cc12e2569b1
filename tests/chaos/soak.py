"""The mixed soak: random faults from one seed against three workers, and the verdict at the end."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg

from exactly_once import failpoints
from exactly_once.embedded import Kafka, Postgres
from tests.support import journal
from tests.support.proxy import PostgresProxy
from tests.support.topics import produce
from tests.support.waiting import until
from tests.support.worker import Crew, Worker

PARTITIONS = 6
BATCH = 200
OPTIONS = {"max_messages": 40}
STALL_SECONDS = 60.0
PROGRESS = 400
"""How many messages must take effect between two faults, so that no run is all faults and no work."""


class Soak:
    """Three workers behind a proxy, a source of messages, and one fault after the other."""

    def __init__(
        self, *, seed: int, kafka: Kafka, postgres: Postgres, topic: str, crew: Crew, proxy: PostgresProxy
    ) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.kafka = kafka
        self.postgres = postgres
        self.topic = topic
        self.crew = crew
        self.proxy = proxy
        self.alive: list[Worker] = []
        self.faults: Counter[str] = Counter()
        self.produced = 0
        self.waiting: list[str] = []
        self.kinds: dict[str, Callable[[], None]] = {
            "kill at a failpoint": self.kill_at_a_failpoint,
            "kill": self.kill,
            "freeze": self.freeze,
            "freeze in a unit": self.freeze_in_a_unit,
            "stop in good order": self.stop_in_good_order,
            "terminate backend": self.terminate_backend,
            "cut before COMMIT": lambda: self.cut(self.proxy.cut_before),
            "cut after COMMIT": lambda: self.cut(self.proxy.cut_after),
            "cut all": self.proxy.cut_all,
            "crash of Postgres": lambda: self.postgres.restart("immediate"),
        }

    def run(self, seconds: float) -> dict[str, Any]:
        """Injure for so long, heal, drain, and return the verdict."""
        began = time.monotonic()
        while len(self.alive) < 3:
            self.hire()
        while time.monotonic() - began < seconds:
            self.progress()
            kind = self.next_kind()
            self.faults[kind] += 1
            print(f"{time.monotonic() - began:6.1f} s: {kind}", flush=True)
            self.kinds[kind]()
            self.replace_the_dead()
        self.progress()
        return self.verdict(began)

    def next_kind(self) -> str:
        """Draw a kind of fault: every one once, in random order, and again."""
        if not self.waiting:
            self.waiting = sorted(self.kinds)
            self.chance.shuffle(self.waiting)
        return self.waiting.pop()

    def progress(self) -> None:
        """Produce, and wait until enough of it took effect."""
        goal = self.applied() + PROGRESS
        deadline = time.monotonic() + STALL_SECONDS
        while self.applied() < goal:
            if self.produced - self.applied() < 4 * PROGRESS:
                produce(self.kafka.bootstrap_servers, self.topic, BATCH, PARTITIONS, start=self.produced)
                self.produced += BATCH
            self.replace_the_dead()
            assert time.monotonic() < deadline, f"no progress within {STALL_SECONDS:g} s (seed {self.seed})"
            time.sleep(0.05)

    def applied(self) -> int:
        """How many messages took effect; a crash of the server is waited for."""

        def ask() -> list[tuple[Any, ...]]:
            query = "SELECT coalesce(sum(next_offset), 0)::int FROM exactly_once.ledger WHERE group_id = %s"
            try:
                with psycopg.connect(self.postgres.conninfo) as connection:
                    return connection.execute(query, (self.crew.group,)).fetchall()
            except psycopg.OperationalError:
                return []

        return int(until(ask, 60, "Postgres to answer")[0][0])

    def hire(self, **config: Any) -> Worker:
        """Start one more worker."""
        worker = self.crew.start(ready=False, options=OPTIONS, **config)
        self.alive.append(worker)
        return worker

    def replace_the_dead(self) -> None:
        """Keep three running; one that ended by itself must have been killed."""
        for worker in [w for w in self.alive if not w.is_running]:
            assert worker.wait_exit() == -signal.SIGKILL, worker.story()
            self.alive.remove(worker)
            self.hire()

    def kill_at_a_failpoint(self) -> None:
        """Have one more worker, which kills itself at a random moment."""
        self.chance.choice(self.alive).kill()
        self.alive = [w for w in self.alive if w.is_running]
        name = self.chance.choice(failpoints.OF_A_UNIT)
        self.hire(failpoint=[name, "kill", self.chance.randrange(1, 6)])

    def kill(self) -> None:
        """Kill one at whatever it does."""
        self.chance.choice(self.alive).kill()

    def freeze(self) -> None:
        """Freeze one beyond the session timeout, until its rows were taken; then let it go on."""
        frozen = self.chance.choice(self.alive)
        frozen.stop()
        until(lambda: frozen.name not in self.owners(), STALL_SECONDS, "the rows of a frozen worker to be taken")
        self.progress()
        frozen.cont()

    def freeze_in_a_unit(self) -> None:
        """Have one more worker, which freezes itself inside a unit; then as any frozen one."""
        self.chance.choice(self.alive).kill()
        self.alive = [w for w in self.alive if w.is_running]
        name = self.chance.choice(("begun", "handled", "guarded", "advanced"))
        zombie = self.hire(failpoint=[name, "stop", self.chance.randrange(2, 6)])
        deadline = time.monotonic() + STALL_SECONDS
        while not zombie.count("failpoint"):
            assert time.monotonic() < deadline, zombie.story()
            self.progress()
        until(lambda: zombie.name not in self.owners(), STALL_SECONDS, "the rows of a zombie to be taken")
        self.progress()
        zombie.cont()

    def owners(self) -> set[str]:
        """Return who owns rows."""
        with psycopg.connect(self.postgres.conninfo) as connection:
            query = "SELECT owner_name FROM exactly_once.ledger WHERE group_id = %s AND owner_token IS NOT NULL"
            return {name for (name,) in connection.execute(query, (self.crew.group,))}

    def stop_in_good_order(self) -> None:
        """Deploy: one goes, another comes."""
        worker = self.chance.choice(self.alive)
        self.alive.remove(worker)
        worker.term()
        assert worker.wait_exit() in (0, -signal.SIGKILL, -signal.SIGTERM), worker.story()
        self.hire()

    def terminate_backend(self) -> None:
        """End a connection of the library from the server's side, if one is in a transaction now."""
        query = """
            SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE application_name LIKE 'exactly\\_once:%' ORDER BY random() LIMIT 1
        """
        with psycopg.connect(self.postgres.conninfo) as connection:
            connection.execute(query)

    def cut(self, arm: Callable[[], Any]) -> None:
        """Lose a COMMIT or its answer; whoever comes next meets it."""
        fault = arm()
        if not fault.fired.wait(0):
            self.progress()
        fault.wait(STALL_SECONDS)

    def verdict(self, began: float) -> dict[str, Any]:
        """Let everything drain and compare journal and topic."""
        goal = self.produced
        until(lambda: self.applied() == goal, STALL_SECONDS, "the lag to be drained to 0")
        self.crew.end_well(*self.alive)
        found = journal.check(self.postgres.conninfo, self.kafka.bootstrap_servers, self.topic)
        counters: Counter[str] = Counter()
        for worker in self.crew.workers:
            counters["rebalances"] += worker.count("assigned")
            counters["fenced"] += worker.count("redelivered", error="Fenced")
            counters["ambiguous"] += worker.log().count("was in doubt")
        return {
            "seed": self.seed,
            "messages": found.messages,
            "faults": dict(sorted(self.faults.items())),
            "workers": len(self.crew.workers),
            "rebalances": counters["rebalances"],
            "fenced": counters["fenced"],
            "ambiguous_commits_resolved": counters["ambiguous"],
            "lost": len(found.lost),
            "duplicated": len(found.duplicated),
            "exact": found.exact,
            "seconds": round(time.monotonic() - began, 1),
        }


def show(verdict: dict[str, Any]) -> str:
    """One line that a machine can read."""
    return "verdict " + json.dumps(verdict)
