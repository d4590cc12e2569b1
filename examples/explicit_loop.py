"""Copy a topic into a table up to where it ends now, in units of your own size."""

from __future__ import annotations

import os

import psycopg

from exactly_once import ExactlyOnceConsumer, Redelivered

CONNINFO = os.environ["EXACTLY_ONCE_CONNINFO"]

with psycopg.connect(CONNINFO, autocommit=True) as connection:
    connection.execute('CREATE TABLE IF NOT EXISTS copied (partition int, "offset" bigint, value text)')

with ExactlyOnceConsumer(
    {"bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"], "group.id": "copy"},
    conninfo=CONNINFO,
    migrate=True,
    max_messages=5000,
) as consumer:
    consumer.subscribe(["transfers"])
    for unit in consumer.units(until_end=True):
        try:
            with unit:
                unit.copy(
                    "copied",
                    ["partition", "offset", "value"],
                    [(m.partition(), m.offset(), (m.value() or b"").decode()) for m in unit.messages],
                )
        except Redelivered as reason:
            print("again:", reason)  # a rebalance, a lost connection: the same messages come in the next unit
    print(consumer.counters)
