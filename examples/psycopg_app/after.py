"""Book card payments, which are JSON: {"account": 1, "amount": 5}."""

from __future__ import annotations

import json
import os
from typing import Any

from exactly_once import ExactlyOnceConsumer, Unit

CONNINFO = os.environ["EXACTLY_ONCE_CONNINFO"]
KAFKA = {
    "bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"],
    "group.id": "card-accounts",
    "enable.auto.commit": False,
}
BOOK = """
    INSERT INTO card_account (id, balance) VALUES (%(account)s, %(amount)s)
    ON CONFLICT (id) DO UPDATE SET balance = card_account.balance + excluded.balance
"""


def parse(value: bytes) -> dict[str, Any]:
    return json.loads(value)


def book(unit: Unit) -> None:
    unit.executemany(BOOK, [parse(message.value()) for message in unit.messages])


def main() -> None:
    consumer = ExactlyOnceConsumer(KAFKA, conninfo=CONNINFO, start="committed")
    consumer.subscribe(["card-payments"])
    try:
        consumer.run(book)
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
