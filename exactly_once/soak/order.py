"""Order: what a worker of the soak does, and the groups that they form."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exactly_once.demo import worker

SCHEMA = "soak"
# Topics and how many partitions each has; every group reads all of them.
TOPICS = {"soak-transactions": 6, "soak-singles": 3}
# The groups, each with its rebalance protocol and a table of its own; the last one is the sink command's.
GROUPS: Mapping[str, Mapping[str, Any]] = {
    "eager": {"partition.assignment.strategy": "range"},
    "cooperative": {"partition.assignment.strategy": "cooperative-sticky"},
    "consumer": {"group.protocol": "consumer"},
    "sink": {"partition.assignment.strategy": "cooperative-sticky"},
}
# How many members a group has when nothing is wrong; one more joins and leaves.
MEMBERS = {"eager": 2, "cooperative": 2, "consumer": 2, "sink": 1}
# Numbers of workers for each group; more than may be there at a time, as those that leave take a while.
PLACES = 10

# A frozen owner is ended after this long; with less, a busy machine would look like one.
_MAX_UNIT_SECONDS = 8.0
# More than an outage, with which many starts coincide.
_STARTUP_SECONDS = 180.0

# librdkafka hands out what it fetched first in, first out, over all partitions: with units of one message, a partition
# whose fetch came last would stand still for as long as the others' fetches last, which is minutes with the defaults.
_SHORT_QUEUE = {"queued.min.messages": 100, "max.partition.fetch.bytes": 16_384}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(worker.Order):
    """What one process does until it ends; the next one in its place gets another order."""

    group: str
    kafka: Mapping[str, Any]
    conninfo: str
    mode: str
    """``loop`` over units, ``run`` with a handler, ``thread`` with the handler in its own, or ``sink``."""
    write: str
    """How effects are written: ``execute``, ``defer`` or ``copy``."""
    options: Mapping[str, Any]
    """Options of the consumer."""
    seed: str

    @property
    def name(self) -> str:
        return f"{self.group}-{self.number % PLACES}"

    def __str__(self) -> str:
        return f"{self.name}, {self.mode}, {self.write}, {self.options}"

    @property
    def topics(self) -> Sequence[str]:
        return list(TOPICS)


def draw(number: int, bootstrap_servers: str, conninfo: str, chance: random.Random) -> Order:
    """Draw how the next worker in a place goes about its work."""
    group = list(GROUPS)[number // PLACES]
    is_sink = group == "sink"
    options = {
        "max_messages": chance.choice((1, 20, 200, 200)),
        "linger_seconds": chance.choice((0.0, 0.0, 0.05)),
    }
    if not is_sink:
        options |= {"max_unit_seconds": _MAX_UNIT_SECONDS, "startup_seconds": _STARTUP_SECONDS}
    kafka = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": group,
        "isolation.level": "read_committed",
        "fetch.wait.max.ms": 50,  # an answer that is held back would make every unit a late one
        "max.poll.interval.ms": 20_000,  # longer than a unit may take, shorter than what counts as a standstill
        **GROUPS[group],
    }
    if kafka.get("group.protocol") != "consumer":  # there the broker decides
        # The shortest that busy machines bear: groups must get over what strikes every second.
        kafka |= {"session.timeout.ms": 6_000, "heartbeat.interval.ms": 500}
    if number % PLACES == 0:  # static membership, next to members without
        kafka["group.instance.id"] = f"{group}-{number}"
    if options["max_messages"] == 1:
        kafka |= _SHORT_QUEUE
    return Order(
        number=number,
        group=group,
        kafka=kafka,
        conninfo=conninfo,
        mode="sink" if is_sink else chance.choice(("loop", "run", "thread")),
        write=chance.choice(("execute", "defer", "copy")),
        options=options,
        seed=str(chance.random()),
    )
