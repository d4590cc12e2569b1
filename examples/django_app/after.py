"""Count votes, which are JSON: {"poll": "logo", "weight": 1}."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import django
from django.db import connection, transaction

from exactly_once import ExactlyOnceConsumer, Redelivered

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
django.setup()

from votes.models import Poll, Vote  # noqa: E402  (models exist after setup)

KAFKA = {"bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"], "group.id": "votes"}


def count(vote: dict[str, Any]) -> None:
    poll, _ = Poll.objects.select_for_update().get_or_create(name=vote["poll"])
    poll.votes += vote["weight"]
    poll.save()
    Vote.objects.create(poll=poll, weight=vote["weight"])


def main() -> None:
    consumer = ExactlyOnceConsumer(KAFKA, conninfo=os.environ["EXACTLY_ONCE_CONNINFO"], start="committed")
    consumer.subscribe(["votes"])
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    try:
        for unit in consumer:
            try:
                with transaction.atomic(), unit.join(connection.connection):
                    for message in unit.messages:
                        count(json.loads(message.value()))
            except Redelivered:
                continue  # another owner has the partitions: it was rolled back
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
