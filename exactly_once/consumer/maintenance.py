"""Maintenance: brings ledger, Kafka client and memory to where the ownership wants them, between units.

One pass of :meth:`Maintenance.run_once` does whatever is due. It may fail because a server is away; the
consumer then keeps polling and calls it again.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
from confluent_kafka import OFFSET_INVALID, Consumer, KafkaException, Message, TopicPartition

from exactly_once import errors
from exactly_once._log import about
from exactly_once._model import MIRRORED, Advance, Partition, Row
from exactly_once.kafka.admin import Cluster
from exactly_once.kafka.origin import origin_of
from exactly_once.ledger.commands import command, reset_command
from exactly_once.ledger.rows import LOCK_SECONDS
from exactly_once.ledger.start import StartOffsets

from .commit import CommitProtocol
from .kafka_offsets import MIRROR_SECONDS, KafkaOffsets
from .partitions import Report
from .rebalance import Assignment, Change, generation

logger = logging.getLogger(__name__)

# How often rows are looked at, and topic ids are asked for again where a topic is not large.
RECHECK_SECONDS = 5.0
# A topic id costs a description of the whole topic, 20 microseconds of our CPU a partition: under 0.1 % of it.
PARTITIONS_PER_SECOND = 40
# The members of a group are mostly started together; their questions are not to come together for ever.
_JITTER = 0.2
# How long a log must have had nothing more before the ledger is moved to its end: a busy one moves with its units.
QUIET_SECONDS = 1.0
# When a bad partition is logged again, and tried again if that may help; twice as long each time.
BAD_SECONDS = 30.0
# The longest of these pauses: once an hour shows in every log that is kept for a day.
_BAD_MOST_SECONDS = 3600.0
# How long a member without partitions waits until it believes that: longer than two heartbeats, in which others are
# asked to give up and do it. Only under the eager protocol does Kafka report it once and for all.
SETTLE_SECONDS = 10.0
# For how long a transaction must have been open until that is told: the default of a producer's transaction.timeout.ms.
OPEN_SECONDS = 60.0
# How often what Kafka holds of the group is compared with the ledger: each time is a request to its coordinator.
COMPARE_SECONDS = 10.0
# How long that request may take, for which the loop stands still.
_COMMITTED_SECONDS = 0.5
# How many partitions beside the new ones are compared at once: many members may each ask about many partitions.
_COMPARED_AT_MOST = 200
# How long to leave alone what was locked, refused or gave no answer: its holder is at work for about as long.
_BUSY_SECONDS = 1.0
# How long to wait for one row of several that may be locked: time enough for a round trip, no more.
_FREE_SECONDS = 0.1
# For how much of its time a loop that reads others may stand still for a leader that gives no answer.
_ASKING_SHARE = 0.25
# After how long a wait for the group is told: longer than Kafka delays the first rebalance of a group by default.
_JOINING_SECONDS = 5.0
# When to go on with an acquisition or a membership check that needs several turns: far below a heartbeat.
_AGAIN_SECONDS = 0.05


class Maintenance:
    """Everything that is done between units, in the order in which it must be done."""

    def __init__(
        self,
        commits: CommitProtocol,
        assignment: Assignment,
        start_offsets: StartOffsets,
        kafka_offsets: KafkaOffsets,
        cluster: Cluster,
        *,
        is_called_for_nothing: bool,
        stop_on_bad_partition: bool,
    ) -> None:
        self.commits = commits
        self.ownership = commits.ownership
        self.cluster = cluster
        self._buffer = commits.buffer
        self._ledger = commits.ledger
        self._about = partial(about, group=self._ledger.group_id)
        self._assignment = assignment
        self._start_offsets = start_offsets
        self._kafka_offsets = kafka_offsets
        self._is_called_for_nothing = is_called_for_nothing
        self._stop_on_bad_partition = stop_on_bad_partition
        # Times are on the monotonic clock, and 0 is "at once". What is known of a partition is in its PartitionState.

        # The user's rebalance callbacks.
        self.callbacks: Mapping[Change, Callable[[list[TopicPartition]], object]] = {}
        # What they have not been called for; the end of each run does it.
        self._news: list[tuple[Change, list[TopicPartition]]] = []
        # Questions for topic ids that are on their way; all are answered before the next ones are asked.
        self._asked: dict[str, Future[Any]] = {}
        # When the id of each topic is asked for again; a topic that is not in it is due.
        self._next_recheck: dict[str, float] = {}
        # Why the ids of topics could not be read the last time, and since when it is an error of that class; of those
        # that are asked for.
        self._unchecked: dict[str, tuple[Exception, float]] = {}
        # Until when an error makes no topic due again: one that repeats would ask with each message.
        self._hurried: dict[str, float] = {}
        # When the rows are read again without a lock, to notice a reset or a failover.
        self._next_rows = 0.0
        # When open transactions are looked for.
        self._next_hidden = 0.0
        # When there is something to do though nothing happened.
        self._next_run = 0.0
        # When the run began that goes on now.
        self._began_at = 0.0
        # When to acquire or check the membership again. A new assignment sets it to 0, others wait.
        self._not_before = 0.0
        # When to examine suspects again, of which a row was locked or a leader silent.
        self._next_examination = 0.0
        # What was logged last as waiting for an answer of its leader.
        self._postponed: tuple[Partition, ...] = ()
        # When Kafka last changed what is ours, or the group's generation changed while nothing was.
        self._assigned_at = 0.0
        # The group's generation at the last run without partitions.
        self._generation = -1
        # When what Kafka holds is compared again; new partitions need not wait for that, only
        self._next_comparison = 0.0
        # until this, where the group's coordinator gave no answer.
        self._compare_new_from = 0.0
        # Whether Kafka has reported what is ours, be it nothing, and has not taken all of it since.
        self.is_member = False
        # Since when it has not, and when that is told next.
        self.joining: tuple[float, float] | None = None
        # Topics and patterns of which the client has said that the cluster has none.
        self.absent: set[str] = set()
        # Why Kafka could not be asked the last time, if so.
        self.unreachable: str | None = None

    @property
    def is_due(self) -> bool:
        """Whether :meth:`run_once` has anything to do before the next unit."""
        return bool(
            self._assignment.events
            or self.ownership.has_changed
            or self.commits.is_pending
            or self.commits.failed is not None
            or self._ledger.session.lost
            or time.monotonic() >= self._next_run
        )

    def run_once(self, client: Consumer) -> None:
        """Do what is due. Call it again after an error that passes."""
        self._began_at = time.monotonic()
        self._next_run = self._began_at + MIRROR_SECONDS / 2
        self.take_events()
        if self.commits.failed is not None:
            raise self.commits.failed
        _ = self._ledger.session.connection
        self.commits.resolve()
        self._release()
        self._retry_bad()
        self._acquire()
        self._compare_origins(client)
        self._check_rows()
        self._notice_hidden(client)
        self._examine_suspects()
        self._reject_unreadable()
        self._position(client)
        self._confirm_membership(client)
        self._recheck_topics()
        self._check_presence(client)
        self._kafka_offsets.send(client, self.ownership.states)
        self.ownership.has_changed = bool(self.ownership.to_position())
        if self.ownership.to_acquire() or self.ownership.to_confirm():
            self._next_run = time.monotonic() + _AGAIN_SECONDS
        while self._news:  # outside of librdkafka's callbacks
            change, partitions = self._news.pop(0)
            if change in self.callbacks:
                self._assignment.contain(self.callbacks[change])(partitions)

    def take_events(self) -> None:
        """Apply what the rebalance callbacks recorded."""
        while self._assignment.events:
            event = self._assignment.events[0]
            if event.change is Change.ASSIGNED:
                self.ownership.assigned(event.partitions)
                self._not_before = 0.0  # these need not wait for what others wait for
            else:
                self.ownership.revoked(event.partitions)
                self._kafka_offsets.drop_check()
                self._news.append((event.change, [TopicPartition(*p) for p in event.partitions]))
            extra = self._about(event.change.value, several=event.partitions)
            names = ", ".join(map(str, event.partitions)) or "nothing"
            logger.info("Kafka reports that %s is %s", names, event.change.value, extra=extra)
            self.is_member = event.change is Change.ASSIGNED or bool(self.ownership.states)
            self._assigned_at = time.monotonic()
            self._buffer.discard()
            # Only now: an event that was interrupted is applied again.
            self._assignment.events.popleft()

    @property
    def is_left_idle(self) -> bool:
        """Whether Kafka has nothing for this member: it is in the group, and others have had time to give up some.

        A client whose patterns match no topic joins no group in the classic protocols.
        """
        if self.ownership.states:
            return False
        if self.is_member:
            return not self._assignment.is_incremental or time.monotonic() - self._assigned_at >= SETTLE_SECONDS
        has_nothing = self._finds_no_topic and all(topic.startswith("^") for topic in self._assignment.topics)
        return has_nothing and self.joining is not None and time.monotonic() - self.joining[0] >= SETTLE_SECONDS

    @property
    def unassigned_seconds(self) -> float:
        """For how long Kafka has not said what is ours, although there are the topics."""
        return 0.0 if self.joining is None or self._finds_no_topic else time.monotonic() - self.joining[0]

    @property
    def _finds_no_topic(self) -> bool:
        return self.absent.issuperset(self._assignment.topics)

    def gone(self) -> dict[str, errors.UnknownTopic]:
        """Return the topics of whose name the cluster has had none for a while. Safe from any thread."""
        return {
            topic: error
            for topic, (error, since) in self._unchecked.copy().items()
            if isinstance(error, errors.UnknownTopic) and time.monotonic() - since >= SETTLE_SECONDS
        }

    def move_to_ends(self, *, released: bool = False) -> None:
        """Move the ledger to the ends of logs that are applied, behind what holds no message: commit markers, say.

        Retention may remove those, and the offset would be below the start of the log then. Best effort; of all that
        is held, or of what is to be ``released``.
        """
        if released:
            ends, self.ownership.last_ends = self.ownership.last_ends, []
        else:
            ends = self.ownership.at_end()
        if ends and self.commits.failed is None:
            self._move(ends)

    def unreadable(self, message: Message) -> None:
        """Take note that the client cannot make messages of what it fetched."""
        error = message.error()
        partition = Partition.of(message)
        reason = "" if error is None else f"{error.name()}: {error.str()}"
        self.ownership.unreadable(partition, reason)
        self.recheck_soon(partition.topic)

    def recheck_soon(self, topic: str) -> None:
        """Ask for a topic's id before it is due, after an error that another topic of its name may have caused."""
        if time.monotonic() >= self._hurried.get(topic, 0.0):
            self._hurried[topic] = time.monotonic() + RECHECK_SECONDS
            self._next_recheck.pop(topic, None)
            self._next_run = 0.0

    def _release(self) -> None:
        """Give back rows; best effort, because an acquisition needs no release."""
        self.move_to_ends(released=True)
        held, self.ownership.releases = self.ownership.releases, []
        if held:
            try:
                self._ledger.release(held)
            except psycopg.Error as error:
                extra = self._about("release_failed", several=[p for p, _ in held])
                logger.info("rows were not released: %s", error, extra=extra)

    def _acquire(self) -> None:
        """Acquire, check and start what is pending; what is locked or postponed is left for later."""
        pending = self.ownership.to_acquire()
        if not pending or time.monotonic() < self._not_before:
            return
        try:
            self.unreachable = None
            # Only of topics that exist, as far as the broker knows that answers; it may be behind.
            topics = {p.topic for p in pending}
            unknown = self._start_offsets.describe(topics)
            self._schedule_recheck(topics - unknown.keys())
            for topic in topics - unknown.keys():
                self._unchecked.pop(topic, None)  # one that was waited for is there now
            for topic, error in unknown.items():
                extra = self._about("topic_unknown") | {"topic": topic}
                logger.warning("its partitions are ours, and wait: %s", error, extra=extra)
            known, bad = self._register([p for p in pending if p.topic not in unknown])
            wanted = [p for p in known if p not in bad]
            rows: list[Row] = []
            try:
                rows = self._unlocked(self._ledger.acquire, wanted)[0] if wanted else []
            except errors.LedgerRowMissing as missing:
                # Deleted since a moment ago; which one it is, and that it was there, is found out by registering again.
                logger.warning("looking again: %s", missing, extra=self._about("row_missing", several=wanted))
            self.ownership.acquired(rows)
            partitions = [row.partition for row in rows]
            try:
                if rows:
                    checked = self._start_offsets.validate(rows)
                    for row in checked.ready:
                        self.ownership.started(row.partition, row)
                    self.ownership.taken(set(partitions) - set(checked.bad) - set(checked.postponed))
                    if checked.trouble is not None:
                        self._postpone(checked.postponed, checked.trouble)
                    self._reject(checked.bad, {row.partition: row for row in rows})
            finally:
                # What could not be started is given back and tried anew.
                self.ownership.not_started(partitions)
            self._reject(bad)
        except errors.BrokerUnreachable as error:
            # Partitions that were acquired before need not wait for a leader of these.
            self._postpone(pending, error)
        if self.ownership.to_acquire():
            self._not_before = max(self._not_before, time.monotonic() + _BUSY_SECONDS)
        else:
            self._postponed = ()

    def _postpone(self, partitions: Iterable[Partition], error: errors.BrokerUnreachable) -> None:
        """Let partitions wait for an answer of Kafka, so that others stand still for it rarely; tell it once."""
        self.unreachable = str(error)
        now = time.monotonic()
        share = _ASKING_SHARE if self.ownership.owned() else 1.0
        self._not_before = now + max(_BUSY_SECONDS, (now - self._began_at) / share)
        names = tuple(sorted(partitions))
        level = logging.DEBUG if names == self._postponed else logging.WARNING
        self._postponed = names
        text = "%s cannot be started now, and will be tried again: %s"
        logger.log(level, text, ", ".join(map(str, names)), error, extra=self._about("start_postponed", several=names))

    def _register(self, partitions: list[Partition]) -> tuple[list[Partition], dict[Partition, errors.StartError]]:
        """Make the rows that are missing; return the partitions that need not wait, and those whose row was lost."""
        try:
            return partitions, self._start_offsets.register(partitions) if partitions else {}
        except errors.BrokerUnreachable:
            topics = sorted({p.topic for p in partitions})
        # Nobody tells where the log of an added partition begins, say: only what has no row yet has to wait for that.
        bad: dict[Partition, errors.StartError] = {}
        ready: list[Partition] = []
        for topic in topics:
            of_topic = [p for p in partitions if p.topic == topic]
            try:
                bad |= self._start_offsets.register(of_topic)
                ready += of_topic
            except errors.BrokerUnreachable as error:
                existing = self._ledger.existing(of_topic)
                ready += sorted(existing)
                self._postpone(set(of_topic) - existing, error)
        return ready, bad

    def _unlocked(
        self, call: Callable[..., list[Row]], partitions: list[Partition]
    ) -> tuple[list[Row], list[Partition]]:
        """Lock all rows at once, or where one stays locked, one by one; return rows, and partitions that were locked.

        A statement that was cancelled, by an operator or a pooler, has waited for nothing else.
        """
        try:
            return call(partitions, lock_seconds=LOCK_SECONDS), []
        except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled):
            logger.warning(
                "another transaction holds rows of %s; if it stays, see also pg_prepared_xacts",
                ", ".join(map(str, partitions)),
                extra=self._about("acquire_blocked", several=partitions),
            )
        if len(partitions) == 1:
            return [], partitions
        rows: list[Row] = []
        locked: list[Partition] = []
        for partition in partitions:
            try:
                # There was waiting enough, and Kafka is not polled meanwhile: it is seconds for each.
                rows += call([partition], lock_seconds=_FREE_SECONDS)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled):
                locked.append(partition)
                extra = self._about("acquire_blocked", partition=partition)
                logger.warning("%s stays locked for now", partition, extra=extra)
        return rows, locked

    def _reject(
        self, bad: Mapping[Partition, errors.ExactlyOnceError], rows: Mapping[Partition, Row] | None = None
    ) -> None:
        """Leave bad partitions unread and log why, without hurry from the second time on.

        :raises ExactlyOnceError: the first of them, where that is asked for; it comes again at the next try.
        """
        for partition, error in bad.items():
            self.ownership.rejected(partition, error, (rows or {}).get(partition))
            state = self.ownership.states.get(partition)
            if state is not None and (state.report is None or str(state.report.error) != str(error)):
                state.report = Report(error, BAD_SECONDS, time.monotonic() + BAD_SECONDS)
                if not self._stop_on_bad_partition:
                    self._log_bad(partition, error)
        self._buffer.discard()
        if bad and self._stop_on_bad_partition:
            self.ownership.retried(bad)
            raise next(iter(bad.values()))

    def _retry_bad(self) -> None:
        """Log again what is still bad, and try again what may have passed."""
        now = time.monotonic()
        for partition in self.ownership.bad():
            known = self.ownership.states[partition].report
            if known is not None and now >= known.again_at:
                known.pause_seconds = min(2 * known.pause_seconds, _BAD_MOST_SECONDS)
                known.again_at = now + known.pause_seconds
                self._log_bad(partition, known.error)
                if isinstance(known.error, errors.BatchUnreadable):
                    # The others hold until the row is changed: a log that has grown over an offset that was outside
                    # of it, say, proves nothing.
                    self.ownership.retried([partition])

    def _log_bad(self, partition: Partition, error: Exception) -> None:
        extra = self._about("partition_bad", partition=partition)
        logger.error("%s is not read, any others are: %s", partition, error, extra=extra)

    def _reject_unreadable(self) -> None:
        """Leave partitions out that cannot be read on, once everything is applied that could be read."""
        bad = {
            partition: errors.BatchUnreadable(
                f"{partition} of group {self._ledger.group_id!r}: the client cannot read on at offset "
                f"{state.next_offset} ({state.unreadable}). If the log is damaged, restore it from a replica, or skip "
                "what cannot be read with: "
                + reset_command(self._ledger.group_id, self._ledger.session.schema, partition)
            )
            for partition, state in self.ownership.states.items()
            if state.positioned and state.unreadable is not None and state.next_offset == state.position
        }
        self._reject(bad)

    def _position(self, client: Consumer) -> None:
        """Tell the client what to fetch, and from where."""
        targets = self.ownership.to_position()
        if not targets:
            return
        # The epoch we know is that of what was applied, which may be an older one.
        others = {p: (h.position, None) for p, h in self.ownership.states.items() if h.positioned}
        self._buffer.discard()
        self._assignment.position(client, {p: (h.next_offset, h.leader_epoch) for p, h in targets.items()}, others)
        self.ownership.positioned(targets)
        for partition, state in targets.items():
            extra = self._about("positioned", partition=partition, offset=state.next_offset, owner_epoch=state.epoch)
            logger.info("reading %s from offset %s", partition, state.next_offset, extra=extra)
        self._news.append((Change.ASSIGNED, [TopicPartition(*p, h.next_offset) for p, h in targets.items()]))

    def _confirm_membership(self, client: Consumer) -> None:
        """After a fence: acquire again only when Kafka still counts us as a member."""
        fenced = self.ownership.to_confirm()
        if not fenced or time.monotonic() < self._not_before:
            return
        offsets = {}
        if not self._kafka_offsets.is_checking:
            rows = self._ledger.look(fenced)
            # For dashboards, so a look is enough. Where a failover lost the chosen start or the row, 0 was applied.
            offsets = {r.partition: (r.next_offset or 0, r.leader_epoch) for r in rows}
            self.ownership.confirmed(set(fenced) - set(offsets))
            if not offsets:
                self._not_before = time.monotonic() + _BUSY_SECONDS
                return
        confirmed = self._kafka_offsets.check_membership(client, offsets)
        if confirmed:
            self.ownership.confirmed(confirmed)
        elif confirmed is not None:
            self._not_before = time.monotonic() + _BUSY_SECONDS

    def _recheck_topics(self) -> None:
        """Compare topic ids with those that the partitions were started with, without waiting."""
        now = time.monotonic()
        if self._asked and all(future.done() for future in self._asked.values()):
            asked, self._asked = self._asked, {}
            for topic, future in asked.items():
                self._compare(topic, future)
        if self._asked:
            return
        # One that is subscribed by its name and gone has no partitions any more; one that a pattern found is let go.
        topics = {p.topic for p in self.ownership.owned()}
        topics.update(topic for topic in self._assignment.topics if not topic.startswith("^"))
        self._unchecked = {topic: why for topic, why in self._unchecked.items() if topic in topics}
        self.unreachable = self.unreachable if topics or self.ownership.states else None
        due = [topic for topic in sorted(topics) if now >= self._next_recheck.get(topic, 0.0)]
        self._schedule_recheck(due)
        self._asked = self.cluster.ask(due)

    def _schedule_recheck(self, topics: Iterable[str]) -> None:
        for topic in topics:
            known = self._start_offsets.topics.get(topic)
            seconds = max(RECHECK_SECONDS, known.partitions / PARTITIONS_PER_SECOND if known is not None else 0.0)
            self._next_recheck[topic] = time.monotonic() + seconds * random.uniform(1 - _JITTER, 1)  # noqa: S311

    def _compare(self, topic: str, future: Future[Any]) -> None:
        try:
            found = self.cluster.described(topic, future)
        except (errors.BrokerUnreachable, errors.UnknownTopic) as error:
            # Of a topic that is gone Kafka takes the partitions away; one made again has another id.
            self.unreachable = str(error) if isinstance(error, errors.BrokerUnreachable) else None
            extra = self._about("topic_unchecked") | {"topic": topic}
            # Asked for every few seconds, by each worker, for as long as a server or the topic is away.
            before, begun = self._unchecked.get(topic, (None, 0.0))
            is_known = type(before) is type(error)
            self._unchecked[topic] = (error, begun if is_known else time.monotonic())
            level = logging.DEBUG if is_known else logging.WARNING
            text = "topic id of %r not checked, repetitions are logged at DEBUG: %s"
            logger.log(level, text, topic, error, extra=extra)
            return
        self.unreachable = None
        self._unchecked.pop(topic, None)
        self._start_offsets.topics[topic] = found
        bad = {}
        for partition in [p for p in self.ownership.owned() if p.topic == topic]:
            state = self.ownership.states[partition]
            since, now = state.checked_at, state.next_offset
            try:
                self._start_offsets.recheck(partition, state.topic_id, found)
                state.checked_at = now
            except errors.TopicRecreated as error:
                told = ""
                if since is not None:
                    # Which messages of the new topic may have been skipped, and which were applied.
                    told = f". It was the old one at offset {since} still"
                    if now > since:
                        told += f"; offsets {since} to {now - 1} were applied since, and may be of the new one"
                    if since > 0:
                        told += f"; of the new one nothing below offset {since} was read"
                bad[partition] = errors.TopicRecreated(f"{error}{told}")
        self._reject(bad)

    def _check_presence(self, client: Consumer) -> None:
        """Find out whether we are in the group without partitions: not every protocol calls back for nothing.

        The group itself is never described: where its coordinator is lost that aborts the process (librdkafka's
        issue 4605).
        """
        if self.ownership.states:
            self.joining = None
            self.absent.clear()
            return
        before, self._generation = self._generation, generation(client)
        self.is_member = self._generation > 0 and (self.is_member or not self._is_called_for_nothing)
        if self._generation != before:
            self._assigned_at = time.monotonic()  # the group has changed, and what is meant for whom
        now = time.monotonic()
        since, due = self.joining or (now, now + _JOINING_SECONDS)
        if not self.is_member and now >= due:
            reason = (
                f"it waits for other members of group {self._ledger.group_id}; one that died counts until its session "
                "ends (session.timeout.ms)"
            )
            if self._finds_no_topic:
                reason = f"there is no topic (yet) for topics={self._assignment.topics!r}"
            text = "waiting for Kafka to assign partitions for %.0f s: %s"
            logger.warning(text, now - since, reason, extra=self._about("waiting"))
            due = now + (now - since)
        self.joining = None if self.is_member else (since, due)

    def _compare_origins(self, client: Consumer) -> None:
        """Compare the ledger with offsets in Kafka: of another database, of a copy, from before commits were lost."""
        owned = {p: self.ownership.states[p] for p in self.ownership.owned()}
        new = {p for p, state in owned.items() if state.compared_epoch != state.epoch}
        if not owned or time.monotonic() < (self._next_comparison if not new else self._compare_new_from):
            return
        # Kafka first: what this database has committed there, it had stored before.
        sizes = {p.topic: self._start_offsets.topics[p.topic].partitions for p in owned}
        others = [p for topic, size in sizes.items() for n in range(size) if (p := Partition(topic, n)) not in new]
        if len(others) > _COMPARED_AT_MOST:
            others = random.sample(others, _COMPARED_AT_MOST)  # another one each time
        asked = [TopicPartition(*p) for p in (*sorted(new), *others)]
        answer: list[TopicPartition] | None = None
        try:
            answer = client.committed(asked, timeout=_COMMITTED_SECONDS)
        except KafkaException as error:
            extra = self._about("origin_unchecked")
            logger.info("what Kafka holds is compared with the ledger later: %s", error, extra=extra)
        self._kafka_offsets.origin = own = self._ledger.origin()
        if answer is None:
            self._compare_new_from = time.monotonic() + _BUSY_SECONDS
            return
        answered = {Partition(tp.topic, tp.partition): tp for tp in answer if tp.error is None}
        held = {p: (tp.offset, origin_of(tp.metadata)) for p, tp in answered.items() if tp.offset >= 0}
        for partition in self._start_offsets.compare(new, held, own):
            known = f"Kafka holds offset {held[partition][0]}"
            self.commits.log_rewound(partition, owned[partition].next_offset, known)
        # An operator, perhaps, or a consumer of another kind; ours overwrites it.
        foreign = [
            (partition, tp.offset)
            for tp in answer
            if (partition := Partition(tp.topic, tp.partition)) in new
            and tp.offset not in (OFFSET_INVALID, owned[partition].next_offset)
            and not (tp.metadata or "").startswith(MIRRORED)
        ]
        if foreign:
            places = [f"{p} at {offset}, the ledger at {owned[p].next_offset}" for p, offset in foreign]
            logger.warning(
                "Kafka holds offsets that are not from this library, and move nothing: %s. To go on from them stop "
                "the group, then run %s",
                "; ".join(places),
                command(
                    "reset",
                    self._ledger.group_id,
                    self._ledger.session.schema,
                    "--topic",
                    foreign[0][0].topic,
                    "--to-committed",
                ),
                extra=self._about("kafka_offset_ignored", several=[p for p, _ in foreign]),
            )
        self._next_comparison = time.monotonic() + COMPARE_SECONDS
        for partition in new:
            state = owned[partition]
            state.compared_epoch = state.epoch
            # Its last owner may have ended between a COMMIT and this. Where nothing was applied, another database may
            # still begin.
            is_behind = held.get(partition) != (state.next_offset, own) and (partition in held or state.was_advanced)
            state.is_to_mirror |= is_behind and partition in answered

    def check_rows_soon(self) -> None:
        """Have the rows looked at by the next step: a partition that was bad may have been mended."""
        self._next_rows = self._next_run = 0.0

    def _check_rows(self) -> None:
        """Notice a reset or a failover also where no message comes to tell of it, without writing anything."""
        if time.monotonic() < self._next_rows:
            return
        quiet_since = time.monotonic() - QUIET_SECONDS
        states = self.ownership.states
        self._move(a for a in self.ownership.at_end() if states[a.partition].log_ended_at <= quiet_since)
        held = self.ownership.owned() + self.ownership.bad()
        suspicious = self.ownership.suspicious(held, self._ledger.look(held)) if held else []
        if suspicious:
            rows, locked = self._unlocked(self._ledger.read, suspicious)
            self._act_on_rows([p for p in suspicious if p not in locked], rows)
            self._buffer.discard()
        # Only now: a look that was cut short tells nothing.
        self._next_rows = time.monotonic() + RECHECK_SECONDS

    def _notice_hidden(self, client: Consumer) -> None:
        """Tell of a transaction that a producer leaves open: of its log nothing is delivered from there on."""
        now = time.monotonic()
        if now < self._next_hidden:
            return
        self._next_hidden = now + RECHECK_SECONDS
        for partition, state in self.ownership.states.items():
            high = -1
            if state.positioned and state.log_end >= state.position:
                with contextlib.suppress(KafkaException):  # the client has it no more, which an event will say
                    high = client.get_watermark_offsets(TopicPartition(*partition), cached=True)[1]
            if high <= state.log_end:
                state.hidden = None
            elif state.hidden is None or state.hidden[0] != state.log_end:
                state.hidden = state.log_end, now
            elif now - state.hidden[1] >= OPEN_SECONDS and not state.is_hidden_told:
                state.is_hidden_told = True
                logger.warning(
                    "%s: a transaction of a producer is open at offset %s for %.0f s or longer; its messages and those "
                    "behind it come when it ends, to offset %s. Kafka's command kafka-transactions.sh finds and ends "
                    "one whose producer is gone; this is logged once for each partition that is assigned",
                    partition,
                    state.log_end,
                    now - state.hidden[1],
                    high,
                    extra=self._about("transaction_open", partition=partition, offset=state.log_end),
                )

    def _move(self, ends: Iterable[Advance]) -> None:
        """Move the ledger to ends of logs; where it is refused, the next look at the rows tells why."""
        ends = list(ends)
        if not ends:
            return
        # The epoch of the last message may be older than what follows it, and would pass for a log that was rewritten.
        epochs = self.cluster.leader_epochs([a.partition for a in ends])
        ends = [replace(a, leader_epoch=epochs.get(a.partition)) for a in ends]
        try:
            self._ledger.move_to_ends(ends, lock_seconds=_FREE_SECONDS)
        except psycopg.Error as error:
            extra = self._about("end_not_stored", several=ends)
            logger.info("the ledger was not moved to the ends of its logs: %s", error, extra=extra)
            if self._ledger.session.lost:
                self.ownership.doubted(ends)
            return
        self.ownership.moved_to_end(ends)
        for end in ends:
            extra = self._about("moved_to_end", several=[end])
            logger.info("%s is applied to the end of its log, offset %s", end.partition, end.next_offset, extra=extra)

    def _act_on_rows(self, partitions: list[Partition], rows: list[Row]) -> None:
        """Act on rows that are not as they were left, and log them."""
        expected = {p: self.ownership.states[p].next_offset for p in partitions}
        mended = set(self.ownership.bad()).intersection(partitions)
        conflicts = self.ownership.seen(partitions, rows)
        for partition in mended.difference(self.ownership.bad()):
            extra = self._about("partition_changed", partition=partition)
            logger.warning("the row of %s was changed: trying to read it again", partition, extra=extra)
        for partition, conflict in conflicts.items():
            self.commits.counters.count(conflict)
            logger.warning(
                "%s is not as it was left at offset %s: %s",
                partition,
                expected[partition],
                conflict.value,
                extra=self._about(conflict.name.lower(), partition=partition, offset=expected[partition]),
            )

    def _examine_suspects(self) -> None:
        """Find out why the client could not read on; move, or raise, or just place it again."""
        suspects = self.ownership.suspects()
        if not suspects or time.monotonic() < self._next_examination:
            return
        # First whether it still is the same topic: no policy may move an offset into another one.
        for topic in {p.topic for p in suspects}:
            self._compare(topic, self.cluster.ask([topic])[topic])
        for partition, state in suspects.items():
            reason = state.suspect
            if reason is not None and self.ownership.deliverable(partition) is state and state.unreadable is None:
                rows, locked = self._unlocked(self._ledger.read, [partition])
                if locked:
                    self._next_examination = time.monotonic() + _BUSY_SECONDS
                    continue
                self._act_on_rows([partition], rows)
                logs, trouble = self.cluster.available_ranges([partition])
                if trouble is not None:  # others are read on meanwhile
                    self._postpone([partition], trouble)
                    self._next_examination = self._not_before
                    continue
                if self.ownership.deliverable(partition) is state:
                    is_truncated = "truncat" in reason.lower()
                    if (
                        state.next_offset < state.position
                        and state.next_offset < logs[partition][0]
                        and not is_truncated
                    ):
                        # Retention has removed what was fetched before. It is here only, and is applied first.
                        self._next_examination = time.monotonic() + _BUSY_SECONDS
                        continue
                    try:
                        moved = self._start_offsets.in_range(rows[0], logs[partition], truncated=is_truncated)
                    except errors.OffsetOutOfRange as error:
                        self._reject({partition: error})
                        continue
                    if moved is None:
                        self._next_rows = 0.0  # its row was changed meanwhile: look at all of them
                    else:
                        extra = self._about("repositioned", partition=partition, offset=moved.next_offset)
                        text = "%s: reading on at offset %s after: %s"
                        logger.warning(text, partition, moved.next_offset, reason, extra=extra)
                        self.ownership.started(partition, moved)
            # Of one that is placed anew there comes another error if need be.
            state.suspect = None
        self._buffer.discard()
