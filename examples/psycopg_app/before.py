"""Book card payments, which are JSON: {"account": 1, "amount": 5}."""

from __future__ import annotations

import json
import os
from typing import Any

import psycopg
from confluent_kafka import Consumer

CONNINFO = os.environ["EXACTLY_ONCE_CONNINFO"]
KAFKA = {
    "bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"],
    "group.id": "card-accounts",
    "enable.auto.commit": False,
    "auto.offset.reset": "earliest",
}
BOOK = """
    INSERT INTO card_account (id, balance) VALUES (%(account)s, %(amount)s)
    ON CONFLICT (id) DO UPDATE SET balance = card_account.balance + excluded.balance
"""


def parse(value: bytes) -> dict[str, Any]:
    return json.loads(value)


def main() -> None:
    consumer = Consumer(KAFKA)
    consumer.subscribe(["card-payments"])
    connection = psycopg.connect(CONNINFO)
    try:
        while True:
            message = consumer.poll(1.0)
            if message is None or message.error():
                continue
            connection.execute(BOOK, parse(message.value()))
            connection.commit()
            consumer.commit(message)
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
