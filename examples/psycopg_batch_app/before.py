"""Store sensor readings, which are JSON: {"sensor": "s1", "value": 12}, and keep a total for each sensor."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import psycopg
from confluent_kafka import Consumer, Message

CONNINFO = os.environ["EXACTLY_ONCE_CONNINFO"]
KAFKA = {"bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"], "group.id": "readings"}
STORE = "INSERT INTO reading (sensor, value) VALUES (%(sensor)s, %(value)s)"
ADD = """
    INSERT INTO sensor (name, total) VALUES (%(sensor)s, %(value)s)
    ON CONFLICT (name) DO UPDATE SET total = sensor.total + excluded.total
"""


def store(connection: psycopg.Connection[Any], messages: Sequence[Message]) -> None:
    readings = [json.loads(message.value() or b"") for message in messages if not message.error()]
    with connection.cursor() as cursor:
        cursor.executemany(STORE, readings)
        cursor.executemany(ADD, readings)


def main() -> None:
    consumer = Consumer({**KAFKA, "enable.auto.commit": False, "auto.offset.reset": "earliest"})
    consumer.subscribe(["readings"])
    connection = psycopg.connect(CONNINFO)
    try:
        while True:
            messages = consumer.consume(500, 1.0)
            if not messages:
                continue
            store(connection, messages)
            connection.commit()
            consumer.commit(asynchronous=False)
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
