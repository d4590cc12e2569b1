"""The loop that most people write: consume(500), executemany, commit the database, commit Kafka.

python by_hand.py BOOTSTRAP_SERVERS TOPIC CONNINFO
"""

from __future__ import annotations

import json
import sys
from uuid import uuid4

import psycopg
from confluent_kafka import Consumer

_INSERT = "INSERT INTO payment (id, name, amount, ts) VALUES (%s, %s, %s, %s)"


def main(bootstrap_servers: str, topic: str, conninfo: str) -> None:
    """Copy the topic until the process is ended."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"by-hand-{uuid4().hex[:8]}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    with psycopg.connect(conninfo) as connection:
        while True:
            messages = consumer.consume(500, 0.2)
            if not messages:
                continue
            rows = [json.loads(message.value())["payload"] for message in messages]
            connection.cursor().executemany(_INSERT, [(r["id"], r["name"], r["amount"], r["ts"]) for r in rows])
            connection.commit()
            consumer.commit(asynchronous=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
