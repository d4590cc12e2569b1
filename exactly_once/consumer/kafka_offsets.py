"""KafkaOffsets: what is committed to Kafka after the fact, for lag dashboards and as a check of membership.

Commits to Kafka are asynchronous and best effort. No offset of it is ever started from; but what Kafka holds is
compared with the ledger, because another database may have committed it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from exactly_once._failpoints import failpoint
from exactly_once._log import about
from exactly_once._model import MIRRORED, Partition
from exactly_once.kafka.origin import Origin

from .partitions import PartitionState, Phase
from .rebalance import Positions, topic_partitions

logger = logging.getLogger(__name__)

# How often offsets are committed to Kafka: dashboards read them every few seconds.
MIRROR_SECONDS = 1.0
# How long a membership check may take until it is asked anew: two heartbeats, for a broker that is busy.
_CHECK_SECONDS = 10.0


@dataclass(slots=True)
class MembershipCheck:
    """One commit that differs from the mirrored ones by its metadata."""

    metadata: str
    deadline: float
    partitions: set[Partition]
    answered: bool = False
    error: KafkaError | None = None


class KafkaOffsets:
    """Commits applied offsets to Kafka at most once a second; confirms that we still are a member."""

    def __init__(self, *, group_id: str) -> None:
        self._group_id = group_id
        # Which database the offsets are from, once that is known; others read it.
        self.origin: Origin | None = None
        # When offsets were committed last, on the monotonic clock.
        self._sent_at = 0.0
        # How many commits were not answered; written by librdkafka's callback, which runs inside of a poll.
        self._in_flight = 0
        # Of which partitions Kafka has not taken the last commit: sent again with the next one.
        self._refused: set[Partition] = set()
        # The question that is on its way. Rebalances end it: its answer would be about what we were before.
        self._check: MembershipCheck | None = None
        # How many commits Kafka refused.
        self.failed = 0
        # How many membership checks in a row had no answer of any kind; the loop sets it back when it has acted.
        self.unanswered = 0

    def drop_check(self) -> None:
        """Forget the question that is on its way: partitions were taken away since."""
        self._check = None

    def send(self, client: Consumer, states: Mapping[Partition, PartitionState], *, at_once: bool = False) -> None:
        """Commit what was not committed yet of partitions that are ours, if the last time is long enough ago.

        For the others somebody else may have committed a later offset by now.
        """
        if not (at_once or time.monotonic() - self._sent_at >= MIRROR_SECONDS):
            return
        mine = {p: h for p, h in states.items() if h.phase is Phase.OWNED}
        # Again only what was compared since it was acquired: another database may have committed a later offset.
        again = {p for p, h in mine.items() if p in self._refused and h.compared_epoch == h.epoch}
        due = {p: h for p, h in mine.items() if h.is_to_mirror or p in again}
        if due:
            self._sent_at = time.monotonic()
            offsets = {p: (h.next_offset, h.leader_epoch) for p, h in due.items()}
            if self._commit(client, offsets, metadata=self._metadata):
                for state in due.values():
                    state.is_to_mirror = False
                self._refused -= due.keys()
            failpoint("mirrored")

    @property
    def is_idle(self) -> bool:
        """Whether every commit was answered."""
        return self._in_flight <= 0

    def check_membership(self, client: Consumer, offsets: Positions) -> set[Partition] | None:
        """Ask Kafka whether we still are a member, by committing what the ledger holds for ``offsets``.

        Call it again, with polling in between, until it returns something: the partitions that were
        confirmed, or an empty set if Kafka refused. The answer confirms membership, not ownership.
        """
        check = self._check
        if check is None or time.monotonic() > check.deadline:
            self.unanswered += check is not None and not check.answered
            metadata, deadline = f"{self._metadata} {uuid4()}", time.monotonic() + _CHECK_SECONDS
            self._check = check = MembershipCheck(metadata, deadline, set(offsets))
            if not self._commit(client, offsets, metadata=check.metadata):
                self._check = None
                return set()
        if check.error is None and not check.answered:
            return None
        self._check = None
        return set() if check.error else check.partitions

    @property
    def _metadata(self) -> str:
        return MIRRORED if self.origin is None else str(self.origin)

    @property
    def is_checking(self) -> bool:
        """Whether a check is on its way."""
        return self._check is not None and time.monotonic() <= self._check.deadline

    def on_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        """Handle librdkafka's answer to a commit."""
        self._in_flight -= 1
        self.unanswered = 0
        errors = [e for e in (error, *(tp.error for tp in offsets)) if e is not None]
        check = self._check
        if check is not None and any(tp.metadata == check.metadata for tp in offsets):
            check.answered, check.error = True, errors[0] if errors else None
        elif errors:
            self._refused |= {Partition(tp.topic, tp.partition) for tp in offsets if error or tp.error}
        if errors:
            self.failed += 1
            extra = about(
                "mirror_refused", group=self._group_id, several=[Partition(t.topic, t.partition) for t in offsets]
            )
            logger.info("Kafka did not take the mirrored offsets: %s", errors[0], extra=extra)

    def _commit(self, client: Consumer, offsets: Positions, metadata: str) -> bool:
        if not client.memberid():
            return False  # it has lost its session; a broker takes a static member without its id for another process
        try:
            client.commit(offsets=topic_partitions(offsets, metadata=metadata), asynchronous=True)
        except KafkaException as error:
            self.failed += 1
            extra = about("mirror_refused", group=self._group_id, several=offsets)
            logger.info("Kafka does not take the mirrored offsets now: %s", error, extra=extra)
            return False
        self._in_flight += 1
        return True
