"""Mirror: what is told to Kafka after the fact, for lag dashboards and as a proof of membership.

Commits to Kafka are asynchronous and best effort. No offset of it is ever started from; but what Kafka holds is
compared with the ledger, because another database may have told it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Mapping
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from exactly_once._failpoints import failpoint
from exactly_once._log import about
from exactly_once._model import MIRRORED, Partition
from exactly_once.kafka.origin import Origin

logger = logging.getLogger(__name__)

MIRROR_SECONDS = 1.0
_PROOF_SECONDS = 10.0

Offsets = dict[Partition, tuple[int, int | None]]


class Mirror:
    """Commits applied offsets to Kafka at most once a second; proves that we still are a member."""

    def __init__(self, *, group_id: str) -> None:
        self._group_id = group_id
        self.origin: Origin | None = None
        """Which database the offsets are from, once that is known; others read it."""
        self._due: Offsets = {}
        self._sent_at = 0.0
        self._in_flight = 0
        self._proof: Proof | None = None
        self.failed = 0

    def applied(self, partition: Partition, next_offset: int, leader_epoch: int | None) -> None:
        """Take note of an offset that is durable in Postgres."""
        self._due[partition] = (next_offset, leader_epoch)

    def forget(self, partitions: tuple[Partition, ...]) -> None:
        """Forget partitions that are not ours any more; a later commit would move them back."""
        for partition in partitions:
            self._due.pop(partition, None)
        self._proof = None

    def send(self, client: Consumer, *, owned: Container[Partition], at_once: bool = False) -> None:
        """Commit what is due of ``owned``, if the last time is long enough ago.

        For the others somebody else may have told Kafka a later offset by now.
        """
        if not self._due or not (at_once or time.monotonic() - self._sent_at >= MIRROR_SECONDS):
            return
        due, self._due = {p: offset for p, offset in self._due.items() if p in owned}, {}
        if due:
            self._sent_at = time.monotonic()
            self._commit(client, due, metadata=self._metadata)
            failpoint("mirrored")

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due and every commit was answered."""
        return not self._due and self._in_flight <= 0

    def prove(self, client: Consumer, offsets: Mapping[Partition, tuple[int, int | None]]) -> set[Partition] | None:
        """Ask Kafka whether we still are a member, by committing what the ledger holds for ``offsets``.

        Call it again, with polling in between, until it returns something: the partitions that were
        proved, or an empty set if Kafka refused. The answer proves membership, not ownership.
        """
        proof = self._proof
        if proof is None or time.monotonic() > proof.deadline:
            metadata, deadline = f"{self._metadata} {uuid4()}", time.monotonic() + _PROOF_SECONDS
            self._proof = proof = Proof(metadata, deadline, frozenset(offsets))
            if not self._commit(client, offsets, metadata=proof.metadata):
                self._proof = None
                return set()
        if proof.error is None and not proof.answered:
            return None
        self._proof = None
        return set() if proof.error else set(proof.partitions)

    @property
    def _metadata(self) -> str:
        return MIRRORED if self.origin is None else str(self.origin)

    @property
    def is_proving(self) -> bool:
        """Whether a proof is on its way."""
        return self._proof is not None and time.monotonic() <= self._proof.deadline

    def on_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        """Handle librdkafka's answer to a commit."""
        self._in_flight -= 1
        errors = [e for e in (error, *(tp.error for tp in offsets)) if e is not None]
        proof = self._proof
        if proof is not None and any(tp.metadata == proof.metadata for tp in offsets):
            proof.answered, proof.error = True, errors[0] if errors else None
        if errors:
            self.failed += 1
            extra = about(
                "mirror_refused", group=self._group_id, several=[Partition(t.topic, t.partition) for t in offsets]
            )
            logger.info("Kafka did not take the mirrored offsets: %s", errors[0], extra=extra)

    def _commit(self, client: Consumer, offsets: Mapping[Partition, tuple[int, int | None]], metadata: str) -> bool:
        if not client.memberid():
            return False  # it has lost its session; a broker takes a static member without its id for another process
        positions = [
            TopicPartition(p.topic, p.number, offset, metadata=metadata)
            if epoch is None
            else TopicPartition(p.topic, p.number, offset, metadata=metadata, leader_epoch=epoch)
            for p, (offset, epoch) in sorted(offsets.items())
        ]
        try:
            client.commit(offsets=positions, asynchronous=True)
        except KafkaException as error:
            self.failed += 1
            extra = about("mirror_refused", group=self._group_id, several=offsets)
            logger.info("Kafka does not take the mirrored offsets now: %s", error, extra=extra)
            return False
        self._in_flight += 1
        return True


class Proof:
    """One commit that is told from the mirrored ones by its metadata."""

    def __init__(self, metadata: str, deadline: float, partitions: frozenset[Partition]) -> None:
        self.metadata = metadata
        self.deadline = deadline
        self.partitions = partitions
        self.answered = False
        self.error: KafkaError | None = None
