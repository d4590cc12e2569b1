"""Recovery of sequences: the last snapshot, and what the topic holds since then."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Any

from confluent_kafka import Message

from exactly_once._log import about
from exactly_once._model import Partition
from exactly_once.errors import ConfigurationError

from .errors import SnapshotCorrupted, TailLost
from .headers import Sent, headers_of, sequence_of
from .sequence import SequenceFilter, read_dumped
from .snapshot import SnapshotStore, pack, unpack
from .tail import Log, describe, ranges_of, read_tail, starts_since

logger = logging.getLogger(__name__)

_KIND = "sequences of a producer"


class Walk:
    """What the log says of one producer: each message names the number pushed before it, so gaps show. No I/O."""

    def __init__(self, persisted: int = -1, above: Mapping[int, int] | None = None) -> None:
        self.persisted = persisted
        self.has_first = False
        """Whether the message before which nothing was pushed is in the log."""
        self._befores: dict[int, int] = {}
        self._following: dict[int, list[int]] = {}
        for number, before in (above or {}).items():
            self._wait(number, before)

    def see(self, sent: Sent) -> None:
        """Take note of a message in the log."""
        self.has_first = self.has_first or sent.before == -1
        if sent.number <= self.persisted or sent.number in self._befores:
            return
        if sent.before > self.persisted:
            self._wait(sent.number, sent.before)
            return
        self._reach(sent.number)

    def result(self) -> tuple[int, dict[int, int]]:
        """Return up to where everything pushed is in the log; and what is there beyond, with the number before each."""
        while reached := [n for n, before in self._befores.items() if before <= self.persisted]:
            self._reach(min(reached))
        return self.persisted, dict(sorted(self._befores.items()))

    def _wait(self, number: int, before: int) -> None:
        self._befores[number] = before
        self._following.setdefault(before, []).append(number)

    def _reach(self, number: int) -> None:
        todo = [number]
        while todo:
            reached = todo.pop()
            self._befores.pop(reached, None)
            self.persisted = max(self.persisted, reached)
            todo += self._following.pop(reached, [])


def sequences_in(kafka: Mapping[str, Any], topic: str) -> dict[str, tuple[int, dict[int, int]]]:
    """Read a topic; return of each producer there what :meth:`Walk.result` says. For looking, not for recovery."""
    walks: dict[str, Walk] = {}
    for message in read_tail(kafka, topic, None):
        sent = sequence_of(headers_of(message))
        if sent is not None:
            walks.setdefault(sent.producer, Walk()).see(sent)
    return {name: walk.result() for name, walk in walks.items()}


class SequenceLog:
    """The sequence of one producer in one topic: recovers it into a filter, and keeps snapshots of it."""

    def __init__(
        self,
        kafka: Mapping[str, Any],
        topic: str,
        sequences: SequenceFilter,
        *,
        producer: str,
        store: SnapshotStore | None = None,
        every: int = 1000,
        accept_trimmed: bool = False,
        is_fenced: bool = False,
        since: datetime | None = None,
    ) -> None:
        self._kafka = kafka
        self._topic = topic
        self._filter = sequences
        self._producer = producer
        self._store = store
        self._every = every
        self._accept_trimmed = accept_trimmed
        self._is_fenced = is_fenced
        """Whether nothing of an earlier life can be on its way: brokers have fenced it and ended what it left open."""
        self._begins = since
        self._log = Log(None, None, is_compacted=False, replicas=1, lag_seconds=0)
        self.positions: dict[Partition, int] = {}
        """Nothing of this producer that the filter does not know stands below them."""
        self._since = 0

    def recover(self) -> int:
        """Load the snapshot, read the topic from there, fill the filter; return how many messages were read.

        Whoever published under the same name before must have ended.

        :raises SnapshotCorrupted: when the snapshot cannot be trusted, or is one of something else.
        :raises TailLost: when retention has removed messages that would have to be read.
        :raises ConfigurationError: when the topic is compacted.
        """
        self._log = describe(self._kafka, self._topic)
        if self._log.is_compacted:
            raise ConfigurationError(
                f"{self._topic!r} is compacted: a number whose message was cleaned away cannot be told from one that "
                "was never sent, and sending it again would put an older value over a newer one. Take a topic with "
                "cleanup.policy=delete, or PostgresWindow with a dedup key"
            )
        walk, starts, is_clean = self._from_snapshot()
        if not is_clean and not self._is_fenced:
            self._wait_for_replicas()
        lows = {p: low for p, (low, _) in ranges_of(self._kafka, self._topic).items()}
        trimmed = set() if starts is not None or self._accept_trimmed else {p for p, low in lows.items() if low > 0}
        if starts is None and self._begins is not None:
            starts = starts_since(self._kafka, self._topic, self._begins)
            trimmed = {p for p in trimmed if starts[p] <= lows[p]}
            starts = {p: max(low, starts[p]) for p, low in lows.items()}
        self.positions = {**lows, **(starts or {})}
        seen_in: set[Partition] = set()
        count = 0
        for message in read_tail(self._kafka, self._topic, starts):
            count += 1
            partition = Partition(self._topic, message.partition() or 0)
            self.positions[partition] = (message.offset() or 0) + 1
            sent = sequence_of(headers_of(message))
            if sent is not None and sent.producer == self._producer:
                seen_in.add(partition)
                walk.see(sent)
        if trimmed:
            self._refuse_trimmed(walk, trimmed - seen_in)
        self._filter.load({self._producer: walk.result()})
        self.save()
        return count

    def has_another_writer(self, own: Collection[tuple[int | None, int | None]]) -> bool:
        """Tell whether the log has a number of this producer that it did not put there, at none of its own places."""
        for message in read_tail(self._kafka, self._topic, self.positions):
            sent = sequence_of(headers_of(message))
            if sent is None or sent.producer != self._producer or (message.partition(), message.offset()) in own:
                continue
            if not self._filter.is_confirmed(self._producer, sent.number):
                return True
        return False

    def confirmed(self, messages: Iterable[Message]) -> None:
        """Take note of acknowledged messages; every so many of them a snapshot is made."""
        fresh: dict[int | None, int | None] = {}
        for message in messages:
            self._since += 1
            fresh[message.partition()] = message.offset()
        if self._filter.has_unknown(self._producer):
            return  # one of the doubtful ones may stand below these offsets, and is not in the filter
        self.positions.update({Partition(self._topic, n or 0): (offset or 0) + 1 for n, offset in fresh.items()})
        if self._since >= self._every:
            self.save()

    def save(self, *, is_clean: bool = False) -> None:
        """Make a snapshot now; a clean one after everything that was sent was answered."""
        if self._store is None:
            return
        persisted, above = self._filter.dump().get(self._producer, (-1, []))
        content = {
            "cluster": self._log.cluster_id,
            "topic": self._topic,
            "topic id": self._log.topic_id,
            "producer": self._producer,
            "clean": is_clean and not self._filter.has_unknown(self._producer),
            "positions": [[p.number, offset] for p, offset in sorted(self.positions.items())],
            "persisted": persisted,
            "above": above,
        }
        self._store.save(pack(_KIND, content))
        self._since = 0

    def _from_snapshot(self) -> tuple[Walk, dict[Partition, int] | None, bool]:
        data = None if self._store is None else self._store.load()
        if data is None:
            return Walk(), None, False
        content = unpack(_KIND, data)
        for what, now in (
            ("producer", self._producer),
            ("topic", self._topic),
            ("cluster", self._log.cluster_id),
            ("topic id", self._log.topic_id),
        ):
            found = content.get(what)
            if found != now and found is not None and now is not None:  # old brokers give topics no ids
                raise SnapshotCorrupted(
                    f"{self._store!r} is a snapshot of {what} {found!r}, not of {now!r}. Give each producer and topic "
                    f"a store of its own. If {self._topic!r} was deleted and made anew, or moved, remove the snapshot "
                    "to begin anew: then what the topic holds now decides, and what it does not hold is published again"
                )
        walk = Walk(*read_dumped((content["persisted"], content["above"])))
        return walk, {Partition(self._topic, n): offset for n, offset in content["positions"]}, bool(content["clean"])

    def _wait_for_replicas(self) -> None:
        """Wait until what a killed predecessor has put into a leader's log is shown, or is gone.

        A message stands there unseen until every in-sync replica has it. One that lags is out of sync after this long.
        """
        if self._log.replicas < 2:
            return
        logger.warning(
            "waiting %g s (replica.lag.time.max.ms) before %r is read: without transactions, what an earlier producer "
            "%r sent last may not be visible yet",
            self._log.lag_seconds,
            self._topic,
            self._producer,
            extra=about("waits_for_replicas") | {"topic": self._topic, "producer": self._producer},
        )
        time.sleep(self._log.lag_seconds)

    def _refuse_trimmed(self, walk: Walk, without_ours: set[Partition]) -> None:
        """Refuse a log that may have held more of this producer than it does.

        What a partition still holds of it is followed there by everything later: retention removes the oldest.
        """
        _, beyond = walk.result()
        if walk.has_first and not beyond and not without_ours:
            return
        raise TailLost(
            f"{self._topic!r} does not start at its beginning any more and there is no snapshot. Whether messages of "
            f"producer {self._producer!r} were removed"
            + (f", those before {min(beyond)} for instance," if beyond else "")
            + " or never sent cannot be told; accept_trimmed=True takes them for never sent"
        )
