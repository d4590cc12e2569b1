"""Worker: the process that applies messages in one of the library's ways, until it is asked to stop."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg import sql

from exactly_once import ExactlyOnceConsumer, Fenced, InstanceFenced, Redelivered, Unit
from exactly_once.cli.sink_flows import Flow, Run, Task
from exactly_once.cli.sink_worker import work
from exactly_once.demo.worker import Injury, report, serve

from .order import SCHEMA, Order

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


def table(group: str) -> sql.Identifier:
    """Name a group's table. It has no unique key, so that a second effect is seen instead of prevented."""
    return sql.Identifier(SCHEMA, group)


def create_tables(connection: psycopg.Connection[Any], groups: Sequence[str]) -> None:
    connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(SCHEMA)))
    for group in groups:
        connection.execute(sql.SQL(_CREATE).format(table=table(group)))


def main() -> None:

    def obey(line: str, _: Injury) -> None:
        try:
            _apply(Order.from_line(line))
        except InstanceFenced as error:
            # Met shortly after a kill of the coordinator, which may not have stored yet who has the id. A supervisor
            # would start another process, and so does the soak.
            report("instance fenced", why=str(error))

    serve(obey)


def _apply(order: Order) -> None:
    """Apply messages as the order says, until this process is asked to end."""
    if order.mode == "sink":
        flow = Flow(
            topics=tuple(order.topics),
            table=f"{SCHEMA}.{order.group}",
            fields={"number": "number"},
            metadata={name: name for name in ("topic", "partition", "offset")},
        )
        work(
            Task(
                flows=[flow],
                kafka=order.kafka,
                conninfo=order.conninfo,
                schema="exactly_once",
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
        consumer.subscribe(list(order.topics))
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
