"""Store orders, which are JSON: {"customer": 1, "amount": 5}; the transaction stays the application's own."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from models import Customer, Order, engine
from sqlalchemy.orm import Session

from exactly_once import ExactlyOnceConsumer, Redelivered

KAFKA = {"bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"], "group.id": "orders"}


def store(session: Session, order: dict[str, Any]) -> None:
    customer = session.get(Customer, order["customer"], with_for_update=True)
    if customer is None:
        customer = Customer(id=order["customer"], spent=0)
    customer.spent += order["amount"]
    session.add(Order(customer=customer, amount=order["amount"]))


def main() -> None:
    consumer = ExactlyOnceConsumer(KAFKA, conninfo=os.environ["EXACTLY_ONCE_CONNINFO"], start="committed")
    consumer.subscribe(["orders"])
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    try:
        for unit in consumer:
            try:
                with Session(engine) as session, session.begin():
                    driver = session.connection().connection.driver_connection
                    with unit.join(driver):
                        for message in unit.messages:
                            store(session, json.loads(message.value()))
                        session.flush()  # what the database refuses is to be raised inside the block
            except Redelivered:
                continue  # another owner has the partitions: it was rolled back
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
