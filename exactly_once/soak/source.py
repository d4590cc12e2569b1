"""Source: what is published, by transactions of which some are aborted and some left open, and one by one."""

from __future__ import annotations

import json
import logging
import random
import threading

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

logger = logging.getLogger(__name__)

_ABORTED = 0.15
_LEFT_OPEN = 0.03
"""The shares of transactions; one that is left open hides what is behind it until the next producer ends it."""
_LARGEST = 120
"""Messages in a transaction."""
_PAUSE_SECONDS = 0.4
"""The longest pause between two rounds."""
_SECONDS = 30.0
"""How long one answer of the brokers is waited for; longer than one takes to come back."""


def create_topics(bootstrap_servers: str, topics: dict[str, int], *, replicas: int) -> None:
    """Make the topics."""
    with AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 2}) as admin:
        new = [NewTopic(topic, partitions, replicas) for topic, partitions in topics.items()]
        for future in admin.create_topics(new).values():
            future.result(_SECONDS)


class Source(threading.Thread):
    """Publishes numbered messages until it is stopped; after any trouble by a new producer."""

    def __init__(
        self, bootstrap_servers: str, topic: str, partitions: int, *, seed: int, is_transactional: bool
    ) -> None:
        super().__init__(name=f"source of {topic}", daemon=True)
        self.paused = False
        """Set by whoever thinks that enough is waiting."""
        self.published = 0
        """How many were sent by transactions that were committed, or one by one."""
        self.aborted = 0
        self.left_open = 0
        self._topic = topic
        self._partitions = partitions
        self._chance = random.Random(f"source {topic} {seed}")  # noqa: S311  (to be repeated, not to be secret)
        self._number = 0
        self._stopping = threading.Event()
        self._settings = {"bootstrap.servers": bootstrap_servers, "linger.ms": 5, "log_level": 0}
        if is_transactional:
            self._settings |= {"transactional.id": topic, "transaction.timeout.ms": 15_000}
        else:
            self._settings |= {"enable.idempotence": True}
        self._round = self._transaction if is_transactional else self._singles

    def stop(self) -> None:
        """Ask it to end after the present round."""
        self._stopping.set()

    def run(self) -> None:
        """Publish until it is stopped, and leave no transaction open."""
        is_over = False
        while not is_over:
            try:
                # Once more after the stop: a new producer ends what the last one may have left open.
                is_over = self._stopping.is_set()
                self._serve()
            except (KafkaException, BufferError) as error:
                # What became of the last round is nobody's business: the log is what counts.
                logger.info("%s: %s; another producer goes on", self.name, error)
                is_over = False
                self._stopping.wait(_PAUSE_SECONDS)

    def _serve(self) -> None:
        producer = Producer(self._settings)
        if self._round == self._transaction:
            producer.init_transactions(_SECONDS)
        while not self._stopping.is_set():
            if not self.paused and not self._round(producer):
                return
            self._stopping.wait(self._chance.uniform(0, _PAUSE_SECONDS))

    def _transaction(self, producer: Producer) -> bool:
        """Publish one transaction; return False when it was left open."""
        count = self._chance.randint(1, _LARGEST)
        producer.begin_transaction()
        self._send(producer, count)
        end = self._chance.random()
        if end < _LEFT_OPEN:
            self.left_open += 1
            self._stopping.wait(self._chance.uniform(0, 3))
            return False
        if end < _LEFT_OPEN + _ABORTED:
            producer.abort_transaction(_SECONDS)
            self.aborted += 1
        else:
            producer.commit_transaction(_SECONDS)
            self.published += count
        return True

    def _singles(self, producer: Producer) -> bool:
        count = self._chance.choice((1, 1, 1, 2, 15))
        self._send(producer, count)
        self.published += count
        return True

    def _send(self, producer: Producer, count: int) -> None:
        for _ in range(count):
            self._number += 1
            value = json.dumps({"number": self._number})
            producer.produce(self._topic, value, partition=self._chance.randrange(self._partitions))
        # In the log before the transaction ends, also if it ends by an abort.
        producer.flush(_SECONDS)
