"""Store orders, which are JSON: {"customer": 1, "amount": 5}."""

from __future__ import annotations

import json
import os
from typing import Any

from confluent_kafka import Consumer
from models import Customer, Order, engine
from sqlalchemy.orm import Session

KAFKA = {"bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"], "group.id": "orders"}


def store(session: Session, order: dict[str, Any]) -> None:
    customer = session.get(Customer, order["customer"], with_for_update=True)
    if customer is None:
        customer = Customer(id=order["customer"], spent=0)
    customer.spent += order["amount"]
    session.add(Order(customer=customer, amount=order["amount"]))


def main() -> None:
    consumer = Consumer({**KAFKA, "enable.auto.commit": False, "auto.offset.reset": "earliest"})
    consumer.subscribe(["orders"])
    try:
        while True:
            message = consumer.poll(1.0)
            if message is None or message.error():
                continue
            with Session(engine) as session:
                store(session, json.loads(message.value()))
                session.commit()
            consumer.commit(message)
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
