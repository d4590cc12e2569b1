"""Assignment: librdkafka's rebalance callbacks turned into events, and what the client is to fetch.

Callbacks never raise and never wait: an exception out of them loses messages. A new partition is
assigned to nothing at first; only when its row was acquired does :meth:`Assignment.position` make the
client fetch it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from exactly_once._log import about
from exactly_once._model import Partition

logger = logging.getLogger(__name__)

# How long the client may take to begin with what was assigned; it is milliseconds, unless the machine is full.
_SEEK_SECONDS = 0.5
# Between two tries: about as long as the client takes.
_SEEK_WAIT_SECONDS = 0.005
# How long its own thread may take to give up partitions, and how long one look waits for that.
_LEAVE_SECONDS = 5.0
_LEAVE_WAIT_SECONDS = 0.05
_METADATA = b"CGMDv2:"
# How often a callback is gone through that exceptions of signal handlers cut short.
_TRIES = 3

# For each partition the offset to fetch from, and the leader epoch it belongs to.
Positions = Mapping[Partition, tuple[int, int | None]]


class Change(Enum):
    """What Kafka did to the assignment."""

    ASSIGNED = "assigned"
    REVOKED = "revoked"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Event:
    """One rebalance callback."""

    change: Change
    partitions: tuple[Partition, ...]


class Assignment:
    """What the client really fetches; differs from what Kafka assigned while rows are acquired."""

    def __init__(self, *, incremental: bool, group_id: str) -> None:
        self._group_id = group_id
        # What the user has subscribed to.
        self.topics: list[str] = []
        # Whether rebalances are incremental. Learnt from the client where its configuration does not tell.
        self.is_incremental = incremental
        # What librdkafka's callbacks recorded; maintenance applies it between units, in order.
        self.events: deque[Event] = deque()
        # What callbacks raised, and errors that stop the loop, which raises them one by one.
        self.failures: deque[BaseException] = deque()
        # What is not fetched now, because enough of it waits. An interruption may leave more in it, never less.
        self.paused: set[Partition] = set()
        # Drawn by each join, and by the loss of all: callbacks of an earlier one are answered, and tell nothing.
        self._joined = object()

    def join(self, client: Consumer) -> None:
        """Subscribe the client with callbacks that record and return."""
        self._joined = object()
        client.subscribe(
            self.topics,
            on_assign=self._callback(Change.ASSIGNED, self._hold_back),
            on_revoke=self._callback(Change.REVOKED, self._let_go),
            on_lost=self._callback(Change.LOST, self._let_go),
        )

    def lose(self, partitions: Iterable[Partition]) -> None:
        """Record that all partitions are lost, with their client: what that still calls is about another member.

        A client that was left behind may give them up at any time later, when the next one has them.
        """
        self._joined = object()
        if lost := tuple(sorted(partitions)):
            self.events.append(Event(Change.LOST, lost))

    def contain(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a callback of the user: what it raises is raised by the loop instead."""

        def contained(*args: Any) -> Any:
            try:
                return callback(*args)
            except BaseException as error:  # noqa: BLE001 - out of a callback it would lose messages
                self.failures.append(error)
                return None

        return contained

    def position(self, client: Consumer, targets: Positions, others: Positions) -> None:
        """Make the client fetch ``targets`` from their offsets, and go on with ``others``.

        Only ``others`` tells an eager client where the rest stands, whose assignment is always whole.
        """
        # The client is asked, because an interruption may have come between it and our own notes.
        assigned = _assigned(client)
        again = [p for p in targets if p in assigned]
        if self.is_incremental:
            if again:
                client.incremental_unassign(_bare(again))
            client.incremental_assign(topic_partitions(targets))
        else:
            client.assign(topic_partitions({**{p: others[p] for p in others if p in assigned}, **targets}))
        # Have the broker check leader epochs, which an assign does not do: a log may have been rewritten. The client's
        # own thread takes a few milliseconds to begin with what was assigned. Nobody polls meanwhile, so all partitions
        # wait together, and not one after the other.
        deadline = time.monotonic() + _SEEK_SECONDS
        late = topic_partitions({p: place for p, place in targets.items() if place[1] is not None})
        while late:
            waiting, late = late, []
            for position in waiting:
                try:
                    client.seek(position)
                except KafkaException as error:
                    # Numbers below 0 are the client's own: it has not begun with what was assigned, is just then
                    # beginning, or does not know the partition while brokers come back. A broker's answer comes with
                    # what is fetched.
                    if error.args[0].code() >= 0:
                        raise
                    late.append(position)
            if not late or time.monotonic() >= deadline:
                break
            time.sleep(_SEEK_WAIT_SECONDS)
        for position in late:
            partition = Partition(position.topic, position.partition)
            extra = about("epoch_unchecked", group=self._group_id, partition=partition, offset=position.offset)
            text = "the leader epoch of %s was not checked: the client did not begin to fetch in time"
            logger.warning(text, position, extra=extra)
        # A pause outlives a revocation: a partition that comes back may still be paused.
        client.resume(_bare(targets))
        self.paused.difference_update(targets)

    def takes(self, partitions: Iterable[Partition]) -> bool:
        """Tell whether an event that was not applied yet takes one of these away."""
        taken = {p for event in self.events if event.change is not Change.ASSIGNED for p in event.partitions}
        return not taken.isdisjoint(partitions)

    def pause(self, client: Consumer, partitions: Set[Partition] | None) -> None:
        """Fetch all but these, or with None nothing; of what is paused the client throws away what it has fetched."""
        if partitions == self.paused:
            return
        assigned = _assigned(client)
        wanted = assigned if partitions is None else assigned.intersection(partitions)
        before, self.paused = self.paused, self.paused | wanted
        client.pause(_bare(wanted - before))
        client.resume(_bare((before - wanted) & assigned))
        self.paused = wanted

    def find_unrecorded(self, client: Consumer, known: Iterable[Partition]) -> None:
        """Record partitions that the client was given while a callback could not: behind an interruption, see below.

        A signal that came while the client waited is handled at the first line of the callback, where nothing catches
        what its handler raises; the client then fetches by itself what nobody here knows of.
        """
        recorded = {p for event in self.events if event.change is Change.ASSIGNED for p in event.partitions}
        if missed := _assigned(client).difference(known, recorded):
            self.events.append(Event(Change.ASSIGNED, tuple(sorted(missed))))
            if self.is_incremental:
                client.incremental_unassign(_bare(missed))
            else:
                client.assign([])  # all are positioned anew

    def leave(self, client: Consumer, *, for_good: bool) -> None:
        """Answer what callbacks wait, so that closing the client meets one of them at most; leave the group before.

        Incremental clients of librdkafka (2.16) revoke once more when they are closed, whether or not an earlier
        callback was answered. With the answer to the first the client may end, and a call in the second is then
        thrown away: it waits for ever, and holds the interpreter's lock. A client without a subscription does not.
        A static member of the classic protocol would give up its place with it, so only what waits is answered.
        """
        self.pause(client, None)  # else messages would keep coming, which nobody handles any more
        if for_good:
            client.unsubscribe()
        # The callbacks come some time later, and without partitions there is none left to come.
        deadline, pause = time.monotonic() + _LEAVE_SECONDS, 0.0
        while client.poll(pause) is not None or (for_good and client.assignment() and time.monotonic() < deadline):
            pause = _LEAVE_WAIT_SECONDS

    def _callback(
        self, change: Change, act: Callable[[Consumer, list[Partition]], None]
    ) -> Callable[[Consumer, list[TopicPartition]], None]:
        joined = self._joined

        def callback(client: Consumer, assigned: list[TopicPartition]) -> None:
            is_recorded = False
            # A signal handler may raise here, too, and nobody would ever read what was assigned then: once more.
            for _ in range(_TRIES):
                try:
                    partitions = [Partition(tp.topic, tp.partition) for tp in assigned]
                    if not is_recorded and joined is self._joined:
                        self.events.append(Event(change, tuple(partitions)))
                        is_recorded = True
                    return act(client, partitions)
                except BaseException as error:  # noqa: BLE001 - out of a callback it would lose messages
                    if joined is self._joined or not isinstance(error, KafkaException):
                        self.failures.append(error)
                    if isinstance(error, KafkaException):
                        return None
            return None

        return callback

    def _hold_back(self, client: Consumer, partitions: list[Partition]) -> None:
        """Accept the assignment without fetching anything of it, and learn the protocol if it is not as configured."""
        try:
            (client.incremental_assign if self.is_incremental else client.assign)([])
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE:
                raise
            self.is_incremental = not self.is_incremental
            kind = "incremental" if self.is_incremental else "eager"
            logger.info("rebalances of this client are %s", kind, extra=about("protocol_learned", group=self._group_id))
            (client.incremental_assign if self.is_incremental else client.assign)([])

    def _let_go(self, client: Consumer, partitions: list[Partition]) -> None:
        """Unassign exactly what was really assigned, also when that is nothing."""
        if self.is_incremental:
            assigned = _assigned(client)
            client.incremental_unassign(_bare(p for p in partitions if p in assigned))
        else:
            client.unassign()


def generation(client: Consumer) -> int:
    """Return the generation of the group, or the member epoch, in which this client is a member; else 0 or -1.

    It asks no server. The client gives it only inside what it passes on to transactional producers, whose format has
    been ``CGMDv2:``, the number, and names since librdkafka 1.6; -1 where that has changed.
    """
    metadata = client.consumer_group_metadata()
    if not isinstance(metadata, bytes) or not metadata.startswith(_METADATA):
        return -1
    return int.from_bytes(metadata[len(_METADATA) : len(_METADATA) + 4], sys.byteorder, signed=True)


def _assigned(client: Consumer) -> set[Partition]:
    return {Partition(tp.topic, tp.partition) for tp in client.assignment()}


def _bare(partitions: Iterable[Partition]) -> list[TopicPartition]:
    return [TopicPartition(*p) for p in sorted(partitions)]


def topic_partitions(positions: Positions, **more: Any) -> list[TopicPartition]:
    """Write positions as the client takes them, which takes no None for an unknown leader epoch."""
    return [
        TopicPartition(p.topic, p.number, offset, **more)
        if epoch is None
        else TopicPartition(p.topic, p.number, offset, leader_epoch=epoch, **more)
        for p, (offset, epoch) in sorted(positions.items())
    ]
