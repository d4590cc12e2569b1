"""Source: what is published, by transactions of which some are aborted and some left open, and one by one."""

from __future__ import annotations

import json
import logging
import random
import threading

from confluent_kafka import KafkaException, Producer

from exactly_once.demo.payments import send

logger = logging.getLogger(__name__)

# The shares of transactions; one that is left open hides what is behind it until the next producer ends it.
_ABORTED = 0.15
_LEFT_OPEN = 0.03
_LARGEST = 4_000  # messages in a transaction: twice the largest unit, so that each kind of unit meets its edges
_SINGLES = (1, 1, 1, 2, 15)  # messages of a round without a transaction
_PAUSE_SECONDS = 0.4  # the longest pause between two rounds
_SECONDS = 30.0  # for one answer of the brokers; longer than one takes to come back


class Source(threading.Thread):
    """Publishes numbered messages until it is stopped; after any trouble by a new producer."""

    def __init__(
        self, bootstrap_servers: str, topic: str, partitions: int, *, seed: int, is_transactional: bool
    ) -> None:
        super().__init__(name=f"source of {topic}", daemon=True)
        # Set by the soak while enough is waiting to be applied.
        self.paused = False
        # How many were sent by transactions that were committed, or one by one.
        self.published = 0
        self.aborted = 0  # transactions, as those below
        self.left_open = 0
        self._topic = topic
        self._partitions = partitions
        self._chance = random.Random(f"source {topic} {seed}")  # noqa: S311  (to be repeated, not to be secret)
        self._number = 0  # of the last message that was sent, counted by no server
        self._stopping = threading.Event()
        self._is_transactional = is_transactional
        self._settings = {"bootstrap.servers": bootstrap_servers, "linger.ms": 5, "log_level": 0}
        if is_transactional:
            # A broker ends one that is left open after this, if no other producer does.
            self._settings |= {"transactional.id": topic, "transaction.timeout.ms": 15_000}
        else:
            self._settings |= {"enable.idempotence": True}

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        """Publish until it is stopped, and leave no transaction open."""
        is_over = False
        while not is_over:
            try:
                # Once more after the stop: a new producer ends what the last one may have left open.
                is_over = self._stopping.is_set()
                producer = Producer(self._settings)
                if self._is_transactional:
                    producer.init_transactions(_SECONDS)
                is_open = False
                while not self._stopping.is_set() and not is_open:
                    is_open = not self.paused and not self._publish(producer)
                    self._stopping.wait(self._chance.uniform(0, _PAUSE_SECONDS))
            except KafkaException as error:
                # What became of the last round is nobody's business: the log is what counts.
                logger.info("%s: %s; another producer goes on", self.name, error)
                is_over = False
                self._stopping.wait(_PAUSE_SECONDS)

    def _publish(self, producer: Producer) -> bool:
        """Publish one transaction, or a few messages without; return False when the transaction was left open."""
        count = self._chance.randint(1, _LARGEST) if self._is_transactional else self._chance.choice(_SINGLES)
        if self._is_transactional:
            producer.begin_transaction()
        for _ in range(count):
            self._number += 1
            value = json.dumps({"number": self._number})
            send(producer, self._topic, value, partition=self._chance.randrange(self._partitions))
        # In the log before the transaction ends, also if it ends by an abort.
        producer.flush(_SECONDS)
        end = self._chance.random() if self._is_transactional else 1.0
        if end < _LEFT_OPEN:
            self.left_open += 1
            self._stopping.wait(self._chance.uniform(0, 3))
            return False
        if end < _LEFT_OPEN + _ABORTED:
            producer.abort_transaction(_SECONDS)
            self.aborted += 1
            return True
        if self._is_transactional:
            producer.commit_transaction(_SECONDS)
        self.published += count
        return True
