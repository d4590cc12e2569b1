"""Charge cards through a payment API that knows idempotency keys: each order is charged once.

Orders are JSON: {"card": "c1", "amount": 5}. The API is at CHARGES_URL.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any

from exactly_once import ExactlyOnceConsumer, Redelivered, Unit

URL = os.environ["CHARGES_URL"]
# What passes: an expired key, a limit, a first try that is still at work. Others of its class refuse an order for good.
PASSES = {401, 403, 407, 408, 409, 421, 423, 425, 429}


def charge(order: dict[str, Any], key: str) -> str:
    """Ask the API; the same key is charged once, however often it is asked."""
    headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
    request = urllib.request.Request(URL, json.dumps(order).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)["charge"]
    except urllib.error.HTTPError as error:
        if 400 <= error.code < 500 and error.code not in PASSES:
            raise  # this order will never be charged: the message's fault
        raise Redelivered(f"the payment API answered {error.code}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Redelivered("the payment API did not answer in full, and may have charged") from error


def apply(unit: Unit) -> None:
    for message in unit.messages:
        order = json.loads(message.value() or b"")
        number = charge(order, unit.identity(message).text)
        unit.execute("INSERT INTO charge VALUES (%s, %s, %s)", [number, order["card"], order["amount"]])


def main() -> None:
    with ExactlyOnceConsumer(
        {"bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"], "group.id": "charges"},
        conninfo=os.environ["EXACTLY_ONCE_CONNINFO"],
        max_messages=20,  # so many calls at most are repeated, and made inside one transaction
    ) as consumer:
        consumer.subscribe(["card-orders"])
        consumer.run(apply, on_poison="dead-letter")


if __name__ == "__main__":
    main()
