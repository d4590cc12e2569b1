"""World: one schedule. A group of members on a simulated Kafka and Postgres, and everything that happens to them.

First chaos, then everything heals; by then each message must have been applied once and the ledger
must stand at the end of the log.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from uuid import UUID

from exactly_once._model import Partition

from .database import Database, Violation
from .kafka import Group, Log
from .member import Clock, Member, simulated
from .scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a schedule may contain. ``without`` names faults that are left out."""

    chaos_steps: int = 150
    heal_steps: int = 3000
    is_strict: bool = True
    without: frozenset[str] = field(default_factory=frozenset)
    usurps: bool = False
    """Whether, beside the faults by chance, an epoch is given to two owners as often as that is possible."""
    prepare: Callable[[World], None] | None = None


FAULTS: dict[str, float] = {
    "crash": 1.0,
    "close": 0.5,
    "freeze": 2.0,
    "thaw": 2.0,
    "expel": 1.5,
    "rebalance": 1.5,
    "land": 3.0,
    "drop": 1.0,
    "terminate": 1.0,
    "outage": 0.6,
    "failover": 1.0,
    "reset": 0.5,
    "produce": 2.0,
}
"""What may happen between any two steps, by weight."""


class World:
    """One schedule, made from its seed."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.seed = seed
        self.plan = plan
        self.rng = random.Random(seed)
        self.clock = Clock()
        self._ids = itertools.count(1)
        self.trace: list[tuple[object, ...]] = []
        partitions = [Partition("t", n) for n in range(self.rng.choice((1, 2, 3)))]
        self.logs = {p: Log(p) for p in partitions}
        self.is_healing = False
        self.database = Database(lambda p, a, b: self.logs[p].between(a, b), is_strict=plan.is_strict)
        if plan.prepare is not None:
            plan.prepare(self)
        self.group = Group(partitions, self.rng, is_eager=self.rng.random() < 0.5)
        self.scheduler = Scheduler(self.rng, self._between)
        self.members: list[Member] = []
        self._usurpation = self._usurping()
        self._steps = 0
        self._born = 0
        self._size = self.rng.choice((2, 2, 3))
        faults = {name: weight for name, weight in FAULTS.items() if name not in plan.without}
        # Each schedule has its own mixture, so that some faults come often and some not at all.
        weights = [weight * self.rng.random() ** 2 for weight in faults.values()]
        self._faults, self._weights = list(faults), list(itertools.accumulate(weights))
        self._rate = self.rng.choice((0.03, 0.08, 0.2))
        self._bad_luck = self.rng.choice((0.0, 0.5, 1.0, 3.0))
        for log in self.logs.values():
            log.produce(self.rng, self.rng.randint(3, 12))

    def run(self) -> None:
        """Run the schedule.

        :raises Violation: with its trace.
        """
        try:
            with simulated(self.clock, self.seed):
                for _ in range(self._size):
                    self._bear()
                self.scheduler.run()
        except Violation as violation:
            raise Violation(f"{violation}\n{self.told()}") from violation.__cause__

    def fault(self, name: str, probability: float) -> bool:
        """Whether something goes wrong right here."""
        happens = not self.is_healing and self.rng.random() < probability * self._bad_luck
        if happens:
            self.note("fault", name)
        return happens

    def uuid(self) -> UUID:
        """Return an id that no other has: the same ones for a seed, and without asking the system."""
        return UUID(int=next(self._ids))

    def note(self, *what: object) -> None:
        self.trace.append((self._steps, *what))

    def told(self) -> str:
        """The trace as text."""
        lines = [" ".join(map(str, line)) for line in self.trace[-400:]]
        rows = [
            f"{p}: next_offset {r.next_offset}, epoch {r.owner_epoch}, token {str(r.owner_token)[:8]}, "
            f"log {self.logs[p].offsets}"
            for p, r in sorted(self.database.rows.items())
        ]
        return f"seed {self.seed}, eager {self.group.is_eager}\n" + "\n".join(lines + rows)

    def _between(self) -> None:
        self._steps += 1
        if not self.is_healing:
            if self.plan.usurps:
                next(self._usurpation)
            if self.rng.random() < self._rate:
                self._happen(self.rng.choices(self._faults, cum_weights=self._weights)[0])
            if self._steps >= self.plan.chaos_steps:
                self._heal()
        elif self._is_done():
            self._classify()
            self.scheduler.stop()
        elif self._steps >= self.plan.chaos_steps + self.plan.heal_steps:
            raise Violation("wedged: healed long ago, and the ledger is not at the end of the log")
        else:
            for transaction in list(self.database.in_flight):
                self.database.land(transaction)

    def _happen(self, name: str) -> None:
        member = self.rng.choice(self.members)
        self.note("world", name, member.name)
        getattr(self, f"_{name}")(member)

    def _crash(self, member: Member) -> None:
        member.die()
        self.members.remove(member)
        if self.rng.random() < 0.5:
            self.group.leave(member.client)
        # Otherwise the group notices later, when it expels the silent member.
        self._bear()

    def _close(self, member: Member) -> None:
        member.is_leaving = True

    def _freeze(self, member: Member) -> None:
        member.actor.is_frozen = True

    def _thaw(self, member: Member) -> None:
        for other in self.members:
            other.actor.is_frozen = False

    def _expel(self, member: Member) -> None:
        for client in list(self.group.members):
            if client is member.client or client not in [m.client for m in self.members]:
                self.group.leave(client)

    def _rebalance(self, member: Member) -> None:
        self.group.rebalance()

    def _land(self, member: Member) -> None:
        if self.database.in_flight:
            self.database.land(self.rng.choice(self.database.in_flight))

    def _drop(self, member: Member) -> None:
        if self.database.in_flight:
            self.database.abort(self.rng.choice(self.database.in_flight))

    def _terminate(self, member: Member) -> None:
        member.lose_backend()

    def _outage(self, member: Member) -> None:
        self.database.is_down = not self.database.is_down
        if self.database.is_down:
            for each in self.members:
                each.lose_backend()

    def _failover(self, member: Member) -> None:
        self.database.fail_over(self.rng.choice((0, 1, 2, 5)))

    def _usurping(self) -> Iterator[None]:
        """Have two owners of one epoch, again and again; each fault comes as soon as it is possible.

        A failover loses the acquisition of a member that is in its first unit. It does not know and tries the unit
        again, and is frozen there; Kafka gives its partitions away, and whoever acquires them gets the epoch that the
        first one has. Then that one goes on. By chance alone not one schedule in a thousand hits upon all of this.
        """
        while True:
            found = self.database.last_acquisition()
            owner = next((m for m in self.members if found is not None and m.instance == found.instance), None)
            if found is None or owner is None or not owner.is_in_a_unit() or len(self.members) < 2:
                yield
                continue
            self.database.fail_over(found.commits)
            while owner in self.members and not owner.is_in_a_unit():
                yield
            self.group.leave(owner.client)
            owner.actor.is_frozen = True
            while owner in self.members and self.database.owner_of(found.partition) in {found.before, found.instance}:
                yield
            owner.actor.is_frozen = False

    def _reset(self, member: Member) -> None:
        free = [
            p for p, r in self.database.rows.items() if r.next_offset is not None and not self.database.is_locked(p)
        ]
        if free:
            partition = self.rng.choice(free)
            offset = self.rng.randint(0, self.logs[partition].end)
            self.note("reset", partition, offset)
            self.database.reset(partition, offset)

    def _produce(self, member: Member) -> None:
        self.rng.choice(list(self.logs.values())).produce(self.rng, self.rng.randint(1, 4))

    def _bear(self) -> None:
        self._born += 1
        self.members.append(Member(f"member-{self._born}", self))

    def replace(self, member: Member) -> None:
        """A member has left in order; another comes."""
        if member in self.members:
            self.members.remove(member)
            self._bear()

    def _heal(self) -> None:
        self.note("world", "heals")
        self.is_healing = True
        self.database.is_down = False
        for client in list(self.group.members):
            if client not in [m.client for m in self.members]:
                self.group.leave(client)
        for member in self.members:
            member.actor.is_frozen = False

    def _is_done(self) -> bool:
        rows = self.database.rows
        return (
            not self.database.in_flight
            and len(rows) == len(self.logs)
            and all(
                (rows[p].next_offset or 0) > (log.offsets[-1] if log.offsets else -1) for p, log in self.logs.items()
            )
        )

    def _classify(self) -> None:
        for partition, log in self.logs.items():
            missing = sorted(set(log.offsets) - self.database.effects.get(partition, set()))
            if missing:
                raise Violation(f"{partition}: lost {missing}")
