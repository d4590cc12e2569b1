"""Count votes, which are JSON: {"poll": "logo", "weight": 1}."""

from __future__ import annotations

import json
import os
from typing import Any

import django
import psycopg
from django.db import connection, transaction

from exactly_once import ExactlyOnceConsumer, Unit

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
django.setup()

from votes.models import Poll, Vote  # noqa: E402  (models exist after setup)


def count(vote: dict[str, Any]) -> None:
    poll, _ = Poll.objects.select_for_update().get_or_create(name=vote["poll"])
    poll.votes += vote["weight"]
    poll.save()
    Vote.objects.create(poll=poll, weight=vote["weight"])


def connect() -> psycopg.Connection[Any]:
    """Have Django open its connection, and leave all transactions to the consumer."""
    connection.settings_dict["AUTOCOMMIT"] = False
    connection.close()
    connection.ensure_connection()
    return connection.connection


def count_all(unit: Unit) -> None:
    for message in unit.messages:
        with transaction.atomic():  # a savepoint: the transaction is the unit's
            count(json.loads(message.value()))


def main() -> None:
    kafka = {"bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"], "group.id": "votes"}
    consumer = ExactlyOnceConsumer(kafka, connect=connect, start="committed")
    consumer.subscribe(["votes"])
    try:
        consumer.run(count_all)
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
