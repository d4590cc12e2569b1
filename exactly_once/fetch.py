"""Fetch: take from the client what it has."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Consumer, Message


def fetch(client: Consumer, timeout_seconds: float, count: int) -> list[Message]:
    """Take up to *count* messages: wait for the first one only. Serves callbacks."""
    messages = client.consume(1, timeout_seconds)
    if messages and count > 1:
        with _without_collecting():
            messages += client.consume(count - 1, 0)
    return messages


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Leave the garbage collector out while thousands of messages are made, all of which are in use.

    It would run every 700 messages and, because they survive, look through the whole process every few calls: that
    took as long as the client did.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
