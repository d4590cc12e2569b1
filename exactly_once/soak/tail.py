"""Tail: which messages are in the logs and count, read by a plain consumer while the soak runs."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Mapping

from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition

from exactly_once.demo.journal import plain_consumer

logger = logging.getLogger(__name__)

Place = tuple[str, int]
"""Topic and partition."""


class Tail(threading.Thread):
    """Follows the logs, committed messages only. Offsets up to `upto` are complete."""

    def __init__(self, bootstrap_servers: str, topics: Mapping[str, int]) -> None:
        super().__init__(name="tail", daemon=True)
        self.places: list[Place] = [(topic, number) for topic, count in topics.items() for number in range(count)]
        self._offsets: dict[Place, list[int]] = {place: [] for place in self.places}
        self._upto: dict[Place, int] = dict.fromkeys(self.places, 0)
        self._stopping = threading.Event()
        self._consumer = plain_consumer(bootstrap_servers, "read_committed")

    def run(self) -> None:
        self._consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for topic, number in self.places])
        while not self._stopping.is_set():
            for message in self._consumer.consume(1000, 0.2):
                error = message.error()
                place = (message.topic() or "", message.partition() or 0)
                offset = message.offset() or 0
                if error is None:
                    self._offsets[place].append(offset)
                    self._upto[place] = offset + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    self._upto[place] = max(self._upto[place], offset)
                else:
                    logger.info("tail: %s", error)
        self._consumer.close()

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def upto(self, place: Place) -> int:
        return self._upto[place]

    def between(self, place: Place, first: int, end: int) -> list[int]:
        """Return the offsets of messages from ``first`` on and below ``end``."""
        offsets = self._offsets[place]
        return offsets[bisect_left(offsets, first) : bisect_left(offsets, end)]

    def last(self, place: Place) -> int:
        """Return the offset of the last message, -1 without one."""
        offsets = self._offsets[place]
        return offsets[-1] if offsets else -1

    @property
    def messages(self) -> int:
        return sum(map(len, self._offsets.values()))
