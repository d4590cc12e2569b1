"""The two loops: one keeps its offsets with its effects, the other commits twice, as most do."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
from confluent_kafka import Consumer, KafkaException, TopicPartition

from exactly_once import ExactlyOnceConsumer, Fenced, Redelivered
from exactly_once._failpoints import failpoint

from . import payments, worker
from .worker import Injury, report, serve


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(worker.Order):
    """Where the servers are, what to read and where to write; the same for both loops."""

    loop: str
    bootstrap_servers: str
    conninfo: str
    topic: str
    """Also the name of the group."""
    schema: str
    max_messages: int
    session_ms: int

    @property
    def name(self) -> str:
        """The name of the worker, the same for each process that takes its place."""
        return f"worker-{self.number}"

    @property
    def kafka(self) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.bootstrap_servers,
            "group.id": self.topic,
            # A process started in place of a killed one goes on at once, without a rebalance.
            "group.instance.id": self.name,
            "partition.assignment.strategy": "range",
            "session.timeout.ms": self.session_ms,
            "heartbeat.interval.ms": self.session_ms // 10,  # at most a third; more often finds a rebalance sooner
            "max.poll.interval.ms": 30_000,  # a worker stops for no longer, but for a frozen one, whose session ends
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 50,  # the default of 500 would show as a pause of the bar
        }


def exactly_once(order: Order, injury: Injury) -> None:
    """Apply payments with the library: each unit's effects and offsets are stored together or not at all."""
    with ExactlyOnceConsumer(
        order.kafka, conninfo=order.conninfo, max_messages=order.max_messages, name=order.name
    ) as consumer:
        signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
        consumer.subscribe([order.topic], on_assign=_telling("assigned"), on_revoke=_telling("revoked"))
        units = consumer.units()
        while True:
            try:
                unit = next(units, None)
                if unit is None:
                    break
                with unit:
                    payments.apply(unit.connection, order.schema, unit.messages, order.name)
                _stored(injury)
            except Redelivered as error:
                report("fenced" if isinstance(error, Fenced) else "redelivered", why=str(error))
                injury.was_frozen = False
        report("stopped", counters=str(consumer.counters))


def at_least_once(order: Order, injury: Injury) -> None:
    """Apply payments by an ordinary loop: poll, write, commit the database, commit Kafka.

    It passes the failpoints of the library at the same kinds of moment.
    """
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    client = Consumer(order.kafka | {"enable.auto.commit": False, "auto.offset.reset": "earliest"})
    client.subscribe([order.topic], on_assign=_telling("assigned"), on_revoke=_telling("revoked"))
    with psycopg.connect(order.conninfo, autocommit=True) as connection:
        while not stopping.is_set():
            failpoint("positioned")
            messages = client.consume(1, 0.1)
            messages += client.consume(order.max_messages - 1, 0) if messages else []
            messages = [message for message in messages if message.error() is None]
            if not messages:
                continue
            failpoint("polled")
            with connection.transaction():
                failpoint("begun")
                payments.apply(connection, order.schema, messages, order.name)
                for moment in ("handled", "guarded", "advanced"):
                    failpoint(moment)
            _stored(injury)
            failpoint("committed")
            try:
                client.commit(asynchronous=False)
            except KafkaException as error:
                # Somebody else has the partitions. The effects are stored, and will be stored again.
                report("refused", why=str(error))
            failpoint("mirrored")
    client.close()
    report("stopped")


def _stored(injury: Injury) -> None:
    """Tell of effects that were stored by a worker whose partitions had been given to another."""
    if injury.was_frozen:
        report("stored")
        injury.was_frozen = False


def _telling(event: str) -> Callable[[Any, list[TopicPartition]], None]:
    return lambda _, partitions: report(event, partitions=[tp.partition for tp in partitions])


def apply_payments(line: str, injury: Injury) -> None:
    order = Order.from_line(line)
    {"exactly_once": exactly_once, "at_least_once": at_least_once}[order.loop](order, injury)


if __name__ == "__main__":
    serve(apply_payments)
