"""Upkeep: brings ledger, Kafka client and memory to where the ownership wants them, between units.

One pass of :meth:`Upkeep.step` does whatever is due. It may fail because a server is away; the
consumer then keeps polling and calls it again.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Set
from concurrent.futures import Future
from functools import partial
from typing import Any

import psycopg
from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from .assignment import Assignment, Change
from .cluster import Cluster
from .delivery import Delivery
from .errors import BrokerUnreachable, TopicRecreated, UnknownTopic
from .ledger import Ledger
from .logs import about
from .mirror import MIRROR_SECONDS, Mirror
from .model import Partition, Row
from .origin import Origin, origin_of
from .ownership import Holding, Ownership, Verdict
from .settlement import Settlement
from .start import Starter

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 5.0
"""How often topic ids are asked for again; what a recreated topic delivers in between is not noticed."""
COMPARE_SECONDS = 10.0
"""How often what Kafka holds of the group is compared with the ledger: each time is a request to its coordinator."""
_COMMITTED_SECONDS = 0.5
"""How long that request may take, for which the loop stands still."""
_COMPARED_AT_MOST = 200
"""How many partitions beside the new ones are compared at once: many members may each ask about many partitions."""
_BUSY_SECONDS = 1.0
_FREE_SECONDS = 0.1
_AGAIN_SECONDS = 0.05
_CALM_SECONDS = 10.0
_ANSWER_SECONDS = 0.2

Notify = Callable[[Change, list[TopicPartition]], None]


class Upkeep:
    """Everything that is done between units, in the order in which it must be done."""

    def __init__(
        self,
        *,
        assignment: Assignment,
        ownership: Ownership,
        delivery: Delivery,
        ledger: Ledger,
        settlement: Settlement,
        starter: Starter,
        cluster: Cluster,
        mirror: Mirror,
        notify: Notify,
    ) -> None:
        self._assignment = assignment
        self._ownership = ownership
        self._delivery = delivery
        self._ledger = ledger
        self._about = partial(about, group=ledger.group_id)
        self._settlement = settlement
        self._starter = starter
        self._cluster = cluster
        self._mirror = mirror
        self._notify = notify
        self._news: list[tuple[Change, list[TopicPartition]]] = []
        self._suspects: dict[Partition, str] = {}
        self._asked: dict[str, Future[Any]] = {}
        self._group_asked: Future[Any] | None = None
        self._next_recheck = 0.0
        self._next_rows = 0.0
        self._next_look = 0.0
        self._not_before = 0.0
        self._ask_from = 0.0
        self._next_comparison = 0.0
        self._compare_new_from = 0.0
        self._compared: dict[Partition, int] = {}
        """Owned partitions, by owner epoch, whose ledger was compared with what Kafka holds."""
        self.eof: dict[Partition, int] = {}
        self.is_member = False
        """Whether Kafka has said what is ours, be it nothing, and has not taken all of it since."""
        self.unreachable: str | None = None
        """Why Kafka could not be asked the last time, if so."""

    @property
    def is_due(self) -> bool:
        """Whether :meth:`step` has anything to do before the next unit."""
        return bool(
            self._assignment.events
            or self._assignment.paused
            or self._ownership.is_unsettled
            or self._settlement.is_pending
            or self._settlement.failed is not None
            or self._suspects
            or self._ledger.session.lost
            or time.monotonic() >= self._next_look
        )

    def step(self, client: Consumer) -> None:
        """Do what is due. Call it again after an error that passes."""
        self._next_look = time.monotonic() + MIRROR_SECONDS / 2
        self.take_events()
        if self._settlement.failed is not None:
            raise self._settlement.failed
        _ = self._ledger.session.connection
        self._settlement.settle()
        self._release()
        self._acquire()
        self._compare_origins(client)
        self._look_at_rows()
        self._examine_suspects()
        self._place(client)
        self._prove(client)
        self._recheck_topics()
        self._look_for_us(client)
        self._mirror.send(client, owned=self._ownership.owned())
        self._ownership.is_unsettled = bool(self._ownership.to_place())
        if self._ownership.to_acquire() or self._ownership.to_prove():
            self._next_look = time.monotonic() + _AGAIN_SECONDS
        self._tell()

    def take_events(self) -> None:
        """Apply what the rebalance callbacks recorded."""
        while self._assignment.events:
            event = self._assignment.events[0]
            if event.change is Change.ASSIGNED:
                self._ownership.assigned(event.partitions)
                self._next_recheck = 0.0
            else:
                self._ownership.revoked(event.partitions)
                self._ask_from = time.monotonic() + (_CALM_SECONDS if event.change is Change.LOST else 0)
                self._mirror.forget(event.partitions)
                self._news.append((event.change, [TopicPartition(*p) for p in event.partitions]))
            extra = self._about(event.change.value, several=event.partitions)
            names = ", ".join(map(str, event.partitions)) or "nothing"
            logger.info("Kafka says that %s is %s", names, event.change.value, extra=extra)
            self.is_member = event.change is Change.ASSIGNED or bool(self._ownership.holdings)
            for partition in event.partitions:
                self.eof.pop(partition, None)
                self._suspects.pop(partition, None)
            self._delivery.discard()
            # Only now: an event that was interrupted is applied again.
            self._assignment.events.popleft()

    def applied(self, partition: Partition, holding: Holding) -> int:
        """Return up to where a log is applied: transactional and compacted ones end in offsets without messages."""
        end = self.eof.get(partition, 0) if holding.expected == holding.fetched else 0
        return max(holding.expected, end)

    def suspect(self, message: Message) -> None:
        """Take note that the client could not read on at its offset."""
        error = message.error()
        self._suspects[Partition(str(message.topic()), message.partition() or 0)] = "" if error is None else error.str()

    def _release(self) -> None:
        """Give back rows; best effort, because an acquisition needs no release."""
        held, self._ownership.releases = self._ownership.releases, []
        if held:
            try:
                self._ledger.release(held)
            except psycopg.Error as error:
                extra = self._about("release_failed", several=[p for p, _ in held])
                logger.info("rows were not released: %s", error, extra=extra)

    def _acquire(self) -> None:
        """Acquire, check and start what is pending."""
        pending = self._ownership.to_acquire()
        if not pending or time.monotonic() < self._not_before:
            return
        try:
            self._starter.describe({p.topic for p in pending})
            self._starter.enrol(pending)
            rows = self._acquire_free(pending)
            self.unreachable = None
            self._ownership.acquired(rows)
            self._begin(rows)
        except BrokerUnreachable as error:
            # Partitions that were acquired before need not wait for a leader of these.
            self.unreachable = str(error)
            extra = self._about("start_postponed", several=pending)
            logger.warning("%s cannot be started now: %s", ", ".join(map(str, pending)), error, extra=extra)
        if self._ownership.to_acquire():
            self._not_before = time.monotonic() + _BUSY_SECONDS

    def _acquire_free(self, pending: list[Partition]) -> list[Row]:
        """Acquire all at once; where a row stays locked, one by one, leaving the locked ones for later."""
        try:
            return self._ledger.acquire(pending)
        except psycopg.errors.LockNotAvailable:
            logger.warning(
                "another transaction holds rows of %s; if it stays, see also pg_prepared_xacts",
                ", ".join(map(str, pending)),
                extra=self._about("acquire_blocked", several=pending),
            )
        rows: list[Row] = []
        for partition in pending if len(pending) > 1 else []:
            try:
                # There was waiting enough, and Kafka is not polled meanwhile: it is seconds for each.
                rows += self._ledger.acquire([partition], lock_seconds=_FREE_SECONDS)
            except psycopg.errors.LockNotAvailable:
                extra = self._about("acquire_blocked", partition=partition)
                logger.warning("%s stays locked for now", partition, extra=extra)
        return rows

    def _begin(self, rows: list[Row]) -> None:
        try:
            ready = self._starter.begin(rows) if rows else []
            for row in ready:
                self._ownership.started(row.partition, row)
        finally:
            # What could not be started is given back and tried anew.
            self._ownership.not_started(row.partition for row in rows)

    def _place(self, client: Consumer) -> None:
        """Tell the client what to fetch, and from where."""
        targets = self._ownership.to_place()
        if not targets:
            return
        others = {
            p: (h.fetched, None)  # the epoch we know is that of what was applied, which may be an older one
            for p, h in self._ownership.holdings.items()
            if h.placed and p in self._assignment.fetching
        }
        self._delivery.discard()
        self._assignment.place(client, {p: (h.expected, h.leader_epoch) for p, h in targets.items()}, others)
        self._ownership.placed(targets)
        for partition, holding in targets.items():
            self.eof.pop(partition, None)
            extra = self._about("placed", partition=partition, offset=holding.expected, owner_epoch=holding.epoch)
            logger.info("reading %s from offset %s", partition, holding.expected, extra=extra)
        self._news.append((Change.ASSIGNED, [TopicPartition(*p, h.expected) for p, h in targets.items()]))

    def _prove(self, client: Consumer) -> None:
        """After a fence: acquire again only when Kafka still counts us as a member."""
        fenced = self._ownership.to_prove()
        if not fenced or time.monotonic() < self._not_before:
            return
        offsets = {}
        if not self._mirror.is_proving:
            rows = self._ledger.read(fenced)
            # Where a failover lost the chosen start, or the row, nothing was applied.
            offsets = {r.partition: (r.next_offset or 0, r.leader_epoch) for r in rows}
            self._ownership.proved(set(fenced) - set(offsets))
            if not offsets:
                self._not_before = time.monotonic() + _BUSY_SECONDS
                return
        proved = self._mirror.prove(client, offsets)
        if proved:
            self._ownership.proved(proved)
        elif proved is not None:
            self._not_before = time.monotonic() + _BUSY_SECONDS

    def _recheck_topics(self) -> None:
        """Compare topic ids with those that the partitions were started with, without waiting."""
        now = time.monotonic()
        if self._asked and all(future.done() for future in self._asked.values()):
            asked, self._asked = self._asked, {}
            for topic, future in asked.items():
                self._compare(topic, future)
        if now >= self._next_recheck:
            self._next_recheck = now + RECHECK_SECONDS
            topics = {p.topic for p in self._ownership.owned()}
            self.unreachable = self.unreachable if self._ownership.holdings else None
            self._asked = self._asked or self._cluster.ask(topics)

    def _compare(self, topic: str, future: Future[Any]) -> None:
        try:
            found = self._cluster.described(topic, future)
        except (BrokerUnreachable, UnknownTopic) as error:
            # Of a topic that is gone Kafka takes the partitions away; one made again has another id.
            self.unreachable = str(error) if isinstance(error, BrokerUnreachable) else None
            extra = self._about("topic_unchecked") | {"topic": topic}
            logger.warning("topic id of %r not checked this time: %s", topic, error, extra=extra)
            return
        self.unreachable = None
        held = [p for p in self._ownership.owned() if p.topic == topic]
        try:
            self._starter.recheck(topic, found, {p: self._ownership.holdings[p].topic_id for p in held})
        except TopicRecreated:
            # Pending again: whoever goes on in spite of the error meets it once more.
            self._ownership.assigned(held)
            self._delivery.discard()
            raise

    def _look_for_us(self, client: Consumer) -> None:
        """Ask the group while we may be in it without partitions: not every protocol calls back for nothing."""
        if self._group_asked is not None and self._group_asked.done():
            asked, self._group_asked = self._group_asked, None
            self.is_member |= self._cluster.leaves_idle(asked, client.memberid(), cooperative=False)
        elif self._group_asked is None and not self.is_member and self._coordinator_answers(client):
            self._group_asked = self._cluster.ask_group(self._ledger.group_id)

    def _coordinator_answers(self, client: Consumer) -> bool:
        """Try it on the consuming client: describing a group whose coordinator is lost aborts the process.

        That is librdkafka's issue 4605; what is left is the moment between this answer and the question.
        """
        if time.monotonic() < self._ask_from:
            return False
        try:
            client.committed([TopicPartition(self._ledger.group_id, 0)], timeout=_ANSWER_SECONDS)
        except KafkaException:
            self._ask_from = time.monotonic() + _BUSY_SECONDS
            return False
        return True

    def _compare_origins(self, client: Consumer) -> None:
        """Compare the ledger with what Kafka was told: by another database, by a copy, before commits were lost."""
        owned = {p: self._ownership.holdings[p].epoch for p in self._ownership.owned()}
        self._compared = {p: epoch for p, epoch in self._compared.items() if owned.get(p) == epoch}
        new = owned.keys() - self._compared.keys()
        if not owned or time.monotonic() < (self._next_comparison if not new else self._compare_new_from):
            return
        # Kafka first: what this database has told it, it had stored before.
        held = self._held_by_kafka(client, new, {p.topic for p in owned})
        self._mirror.origin = own = self._ledger.origin()
        if held is None:
            self._compare_new_from = time.monotonic() + _BUSY_SECONDS
            return
        for partition in self._starter.compare(new, held, own):
            self._settlement.tell_rewound(partition, mirrored=held[partition][0])
        self._next_comparison = time.monotonic() + COMPARE_SECONDS
        self._compared.update(owned)
        for partition in new & held.keys():
            holding = self._ownership.holdings[partition]
            if held[partition] != (holding.expected, own):
                self._mirror.applied(partition, holding.expected, holding.leader_epoch)

    def _held_by_kafka(
        self, client: Consumer, new: Set[Partition], topics: set[str]
    ) -> dict[Partition, tuple[int, Origin | None]] | None:
        """Ask Kafka what it holds; None where its coordinator does not answer in time."""
        others = [p for p in self._starter.partitions(topics) if p not in new]
        if len(others) > _COMPARED_AT_MOST:
            others = random.sample(others, _COMPARED_AT_MOST)  # another one each time
        asked = [TopicPartition(*p) for p in (*sorted(new), *others)]
        try:
            answer = client.committed(asked, timeout=_COMMITTED_SECONDS)
        except KafkaException as error:
            extra = self._about("origin_unchecked")
            logger.info("what Kafka holds is compared with the ledger later: %s", error, extra=extra)
            return None
        return {
            Partition(tp.topic, tp.partition): (tp.offset, origin_of(tp.metadata))
            for tp in answer
            if tp.offset >= 0 and tp.error is None
        }

    def _look_at_rows(self) -> None:
        """Notice a reset or a failover also where no message comes to tell of it."""
        if time.monotonic() < self._next_rows:
            return
        self._next_rows = time.monotonic() + RECHECK_SECONDS
        owned = self._ownership.owned()
        if owned:
            self._notice(owned, self._ledger.read(owned))
            self._delivery.discard()

    def _notice(self, partitions: list[Partition], rows: list[Row]) -> None:
        """Act on rows that are not as they were left, and tell of them."""
        expected = {p: self._ownership.holdings[p].expected for p in partitions}
        for partition, verdict in self._ownership.seen(partitions, rows).items():
            counters = self._settlement.counters
            counters.fenced += verdict is Verdict.FENCED
            counters.rewound += verdict is Verdict.REWOUND
            counters.ahead += verdict is Verdict.AHEAD
            logger.warning(
                "%s is not as it was left at offset %s: %s",
                partition,
                expected[partition],
                verdict.value,
                extra=self._about(verdict.name.lower(), partition=partition, offset=expected[partition]),
            )

    def _examine_suspects(self) -> None:
        """Find out why the client could not read on; move, or raise, or just place it again."""
        # First whether it still is the same topic: no policy may move an offset into another one.
        for topic in {p.topic for p in self._suspects}:
            self._compare(topic, self._cluster.ask([topic])[topic])
        for partition, reason in list(self._suspects.items()):
            holding = self._ownership.deliverable(partition)
            if holding is None:
                continue
            rows = self._ledger.read([partition])
            self._notice([partition], rows)
            log = self._cluster.ranges([partition])[partition]
            if self._ownership.deliverable(partition) is holding:
                (row,) = rows
                row = self._starter.in_range(row, log, truncated="truncat" in reason.lower())
                extra = self._about("repositioned", partition=partition, offset=row.next_offset)
                logger.warning("%s: reading on at offset %s after: %s", partition, row.next_offset, reason, extra=extra)
                self._ownership.started(partition, row)
            del self._suspects[partition]
        self._delivery.discard()

    def _tell(self) -> None:
        """Call the user's rebalance callbacks, outside of librdkafka's."""
        while self._news:
            self._assignment.contain(self._notify)(*self._news.pop(0))
