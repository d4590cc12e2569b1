"""Store orders, which are JSON: {"customer": 1, "amount": 5}."""

from __future__ import annotations

import json
import os
from typing import Any

from models import Customer, Order
from sqlalchemy.orm import Session
from units import connect, session_in

from exactly_once import ExactlyOnceConsumer, Unit

KAFKA = {"bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"], "group.id": "orders"}


def store(session: Session, order: dict[str, Any]) -> None:
    customer = session.get(Customer, order["customer"], with_for_update=True)
    if customer is None:
        customer = Customer(id=order["customer"], spent=0)
    customer.spent += order["amount"]
    session.add(Order(customer=customer, amount=order["amount"]))


def store_all(unit: Unit) -> None:
    for message in unit.messages:
        with session_in(unit) as session:  # of its own: what store() rolls back is this message alone
            store(session, json.loads(message.value()))


def main() -> None:
    consumer = ExactlyOnceConsumer(KAFKA, connect=connect, start="committed")
    consumer.subscribe(["orders"])
    try:
        consumer.run(store_all)
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
