"""Count votes, which are JSON: {"poll": "logo", "weight": 1}."""

from __future__ import annotations

import json
import os
from typing import Any

import django
from confluent_kafka import Consumer
from django.db import transaction

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
    consumer = Consumer({**KAFKA, "enable.auto.commit": False, "auto.offset.reset": "earliest"})
    consumer.subscribe(["votes"])
    try:
        while True:
            message = consumer.poll(1.0)
            if message is None or message.error():
                continue
            with transaction.atomic():
                count(json.loads(message.value()))
            consumer.commit(message)
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
