"""Worker: the groups, and the process that applies messages as it was drawn to, until it is asked to stop."""

from __future__ import annotations

import faulthandler
import json
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from exactly_once import ExactlyOnceConsumer, Fenced, InstanceFenced, Redelivered, Unit
from exactly_once.cli.options import Settings
from exactly_once.cli.sink_flows import Flow, Run, Task
from exactly_once.cli.sink_worker import work
from exactly_once.demo import worker as demo_worker
from exactly_once.demo.worker import report, serve

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
COLUMNS = ("topic", "partition", "offset", "number", "worker")
_CREATE = """
    CREATE TABLE {table} (
        id bigint GENERATED ALWAYS AS IDENTITY,
        topic text NOT NULL, partition int NOT NULL, "offset" bigint NOT NULL,
        number bigint NOT NULL, worker text, xid xid8 NOT NULL DEFAULT pg_current_xact_id());
    CREATE INDEX ON {table} (topic, partition, "offset");
"""
_APPEND = 'INSERT INTO {table} (topic, partition, "offset", number, worker) VALUES (%s, %s, %s, %s, %s)'
_SLOW_UNITS = 0.01  # the share of units that take a moment
_SLOW_SECONDS = 0.5  # long enough for others to join and leave meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(demo_worker.Order):
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


def draw(number: int, bootstrap_servers: str, conninfo: str, chance: random.Random) -> Order:
    """Draw how the next worker in a place goes about its work."""
    group = list(GROUPS)[number // PLACES]
    is_sink = group == "sink"
    options = {
        # Few of the slowest: the sources wait for the slowest of seven.
        "max_messages": chance.choices((1, 20, 200, 2_000), (1, 2, 3, 6))[0],
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


def table(group: str) -> sql.Identifier:
    """Name a group's table. It has no unique key, so that a second effect is seen instead of prevented."""
    return sql.Identifier(SCHEMA, group)


def create_tables(connection: psycopg.Connection[Any], groups: Sequence[str]) -> None:
    connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(SCHEMA)))
    for group in groups:
        connection.execute(sql.SQL(_CREATE).format(table=table(group)))


def main() -> None:
    # The soak asks whoever stands still where that is.
    faulthandler.register(signal.SIGUSR1)
    try:
        serve(lambda line, _: apply(Order.from_line(line)))
    except InstanceFenced as error:
        # Met shortly after a kill of the coordinator, which may not have stored yet who has the id. A supervisor
        # would start another process, and so does the soak.
        report("instance fenced", why=str(error))


def apply(order: Order) -> None:
    """Apply messages as the order says, until this process is asked to end."""
    if order.mode == "sink":
        flow = Flow(
            topics=tuple(TOPICS),
            table=f"{SCHEMA}.{order.group}",
            fields={"number": "number"},
            metadata={name: name for name in ("topic", "partition", "offset")},
        )
        work(
            Task(
                flows=[flow],
                kafka=order.kafka,
                settings=Settings(schema="exactly_once", conninfo=order.conninfo),
                run=Run(**order.options),
                start="earliest",
            )
        )
        return
    with ExactlyOnceConsumer(
        order.kafka, conninfo=order.conninfo, start="earliest", name=order.name, application="soak", **order.options
    ) as consumer:
        handler = _handler(order)
        if order.mode == "loop":  # `run` has handlers of its own
            signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
        consumer.subscribe(list(TOPICS))
        if order.mode != "loop":
            consumer.run(handler, in_thread=order.mode == "thread")
        else:
            units = consumer.units()
            is_over = False
            while not is_over:
                try:
                    for unit in units:
                        with unit:
                            handler(unit)
                    is_over = True
                except Redelivered as error:  # nobody's fault: the loop goes on, as the documentation says
                    report("fenced" if isinstance(error, Fenced) else "redelivered", why=str(error))
        report("stopped", counters=str(consumer.counters))


def _handler(order: Order) -> Callable[[Unit], None]:
    chance = random.Random(order.seed)  # noqa: S311  (to be repeated, not to be secret)
    append = sql.SQL(_APPEND).format(table=table(order.group))

    def handle(unit: Unit) -> None:
        rows = [
            (m.topic(), m.partition(), m.offset(), json.loads(m.value() or b"{}")["number"], order.name)
            for m in unit.messages
        ]
        if order.write == "copy":
            unit.copy(table(order.group), COLUMNS, rows)
        elif order.write == "defer":
            for row in rows:
                unit.defer(append, row)
        else:
            unit.executemany(append, rows)
        if chance.random() < _SLOW_UNITS:
            time.sleep(_SLOW_SECONDS)

    return handle


if __name__ == "__main__":
    main()
