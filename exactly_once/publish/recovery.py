"""SequenceLog: what a topic holds of a sequence, since its last snapshot."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any

from confluent_kafka import Message

from exactly_once._log import about
from exactly_once._model import Partition
from exactly_once.errors import ConfigurationError

from .errors import SnapshotCorrupted, TailLost
from .headers import Sent, headers_of, sequence_of
from .sequence import SequenceFilter
from .snapshot import SnapshotStore, pack, unpack
from .tail import Log, describe, ranges_of, read_tail, starts_since

logger = logging.getLogger(__name__)

_KIND = "sequences of a producer"
# A leader looks for replicas that lag twice in replica.lag.time.max.ms, so one may stay in sync for this many of them;
# and the controller has to write it down that it is not.
_LAGS = 1.5
_LEAVE_SECONDS = 1.0
# So many numbers that wait for one before them take 100 KB for each producer of a topic, and are sorted in no time.
_WALKED = 1_000


class Walk:
    """What the log says of one producer: each message names the number pushed before it, so gaps show. No I/O."""

    def __init__(self, persisted: int = -1, above: Mapping[int, int] | None = None) -> None:
        self.persisted = persisted
        # Whether the message before which nothing was pushed is in the log.
        self.has_first = False
        # Numbers above ``persisted``, each with the one pushed before it: partitions are read in another order.
        self._above = dict(above or {})
        # With so many of them it is time to see which are reached.
        self._full = _WALKED

    def see(self, sent: Sent) -> None:
        """Take note of a message in the log."""
        self.has_first = self.has_first or sent.before == -1
        if sent.number <= self.persisted or sent.number in self._above:
            return
        if sent.before <= self.persisted:
            self.persisted = sent.number
            return
        self._above[sent.number] = sent.before
        if len(self._above) >= self._full:
            self.result()
            self._full = 2 * len(self._above) + _WALKED

    def result(self) -> tuple[int, dict[int, int]]:
        """Return up to where everything pushed is in the log; and what is there beyond, with the number before each."""
        for number in sorted(self._above):
            if self._above[number] <= self.persisted:
                self.persisted = max(self.persisted, number)
        self._above = {number: before for number, before in sorted(self._above.items()) if number > self.persisted}
        return self.persisted, self._above


def sequences_in(kafka: Mapping[str, Any], topic: str) -> dict[str, tuple[int, dict[int, int]]]:
    """Read a topic; return of each producer there what :meth:`Walk.result` says. For looking, not for recovery."""
    walks: dict[str, Walk] = {}
    if removed := [f"{p} below offset {low}" for p, (low, _) in sorted(ranges_of(kafka, topic).items()) if low > 0]:
        said = "retention has removed messages, %s: of producers the rest is shown, and their first numbers look lost"
        logger.warning(said, ", ".join(removed), extra=about("numbers_removed") | {"topic": topic})
    for message in read_tail(kafka, topic, None):
        sent = sequence_of(headers_of(message))
        if sent is not None:
            walks.setdefault(sent.producer, Walk()).see(sent)
    return {name: walk.result() for name, walk in walks.items()}


@dataclass
class SequenceLog:
    """The sequence of one producer in one topic: recovers it into a filter, and keeps snapshots of it."""

    kafka: Mapping[str, Any]
    topic: str
    sequences: SequenceFilter
    _: KW_ONLY
    producer: str
    store: SnapshotStore | None = None
    every: int = 1000
    accept_trimmed: bool = False
    # Whether nothing of an earlier life can be on its way: brokers have fenced it and ended what it left open.
    is_fenced: bool = False
    since: datetime | None = None
    # Nothing of this producer that the filter does not know stands below them.
    positions: dict[Partition, int] = field(init=False, default_factory=dict)
    _log: Log = field(init=False, default=Log(None, None, is_compacted=False, replicas=1, lag_seconds=0))
    # How many messages were acknowledged since the last snapshot.
    _fresh: int = field(init=False, default=0)
    # Ends of what was acknowledged, which become positions when all numbers up to ``_until`` are settled: one that is
    # on its way may stand below them, and is not in the filter. Those that come meanwhile wait for their turn.
    _held: dict[Partition, int] = field(init=False, default_factory=dict)
    _until: int = field(init=False, default=-1)
    _next: dict[Partition, int] = field(init=False, default_factory=dict)

    def recover(self) -> int:
        """Load the snapshot, read the topic from there, fill the filter; return how many messages were read.

        Whoever published under the same name before must have ended.

        :raises SnapshotCorrupted: when the snapshot cannot be trusted, or is one of something else.
        :raises TailLost: when retention has removed messages that would have to be read.
        :raises ConfigurationError: when the topic is compacted, or that cannot be read.
        """
        self._log = describe(self.kafka, self.topic)
        if self._log.is_compacted is None:
            raise ConfigurationError(
                f"whether {self.topic!r} is compacted cannot be read, and numbers of a compacted topic would be sent "
                "again: grant DescribeConfigs on the topic to this principal"
            )
        if self._log.is_compacted:
            raise ConfigurationError(
                f"{self.topic!r} is compacted: a number whose message was cleaned away cannot be told from one that "
                "was never sent, and sending it again would put an older value over a newer one. Take a topic with "
                "cleanup.policy=delete, or PostgresWindow with a dedup key"
            )
        walk, starts, may_hide = self._from_snapshot()
        if may_hide and self._log.replicas > 1:
            # A message of a killed predecessor stands in a leader's log unseen until every in-sync replica has it. One
            # that lags leaves them after this long.
            seconds = _LAGS * self._log.lag_seconds + _LEAVE_SECONDS
            said = (
                "waiting %g s (by replica.lag.time.max.ms) before %r is read: without transactions, what an earlier "
                "producer %r sent last may not be visible yet"
            )
            extra = about("waits_for_replicas") | {"topic": self.topic, "producer": self.producer}
            logger.warning(said, seconds, self.topic, self.producer, extra=extra)
            time.sleep(seconds)
        ranges = ranges_of(self.kafka, self.topic)
        lows = {p: low for p, (low, _) in ranges.items()}
        trimmed = set() if starts is not None or self.accept_trimmed else {p for p, low in lows.items() if low > 0}
        if starts is None and self.since is not None:
            starts = starts_since(self.kafka, lows, self.since)
            trimmed = {p for p in trimmed if starts[p] <= lows[p]}
            starts = {p: max(low, starts[p]) for p, low in lows.items()}
        elif starts is not None:
            starts = self._after_removed(starts, lows)
        # All of it is read, also what is no message: the ends of transactions.
        self.positions = {p: high for p, (_, high) in ranges.items()}
        seen_in: set[Partition] = set()
        count = 0
        for message in read_tail(self.kafka, self.topic, starts):
            count += 1
            _pass(self.positions, message)
            sent = sequence_of(headers_of(message))
            if sent is not None and sent.producer == self.producer:
                seen_in.add(Partition.of(message))
                walk.see(sent)
        persisted, beyond = walk.result()
        # What a partition still holds of us is followed there by everything later: retention removes the oldest.
        if trimmed and (beyond or not walk.has_first or trimmed - seen_in):
            raise TailLost(
                f"{self.topic!r} does not start at its beginning any more and there is no snapshot. Whether messages "
                f"of producer {self.producer!r} were removed"
                + (f", those before {min(beyond)} for instance," if beyond else "")
                + " or never sent cannot be told; accept_trimmed=True takes them for never sent"
            )
        self.sequences.load(persisted, beyond)
        self.save()
        return count

    def _after_removed(self, starts: Mapping[Partition, int], lows: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return where to read on behind a snapshot.

        :raises TailLost: where retention has removed messages behind it, unless that is accepted.
        """
        begin = {p: starts.get(p, 0) for p in lows}
        removed = [f"{p} offsets {start} to {lows[p] - 1}" for p, start in begin.items() if start < lows[p]]
        if removed and not self.accept_trimmed:
            raise TailLost(
                f"retention has removed what stood behind the snapshot of producer {self.producer!r}: "
                f"{', '.join(removed)}. Whether some were its own cannot be told; accept_trimmed=True goes on with "
                "what the snapshot knows, and takes them for messages of others"
            )
        if removed:
            said = "of producer %r nothing is taken to have been among the messages that retention has removed: %s"
            extra = about("removed_accepted") | {"topic": self.topic, "producer": self.producer}
            logger.warning(said, self.producer, ", ".join(removed), extra=extra)
        return {p: max(start, lows[p]) for p, start in begin.items()}

    def has_another_writer(self, own: Collection[tuple[int | None, int | None]]) -> bool:
        """Tell whether the log has a number of this producer that it did not put there, at none of its own places.

        :raises TailLost: when that cannot be told, because the topic has become another one, or a compacted one.
        """
        if (why := describe(self.kafka, self.topic).why_unsure(self.topic_id)) is not None:
            raise TailLost(
                f"whether another producer has taken over {self.producer!r} on {self.topic!r} cannot be told: {why}. "
                "Stop, and start anew once the topic has cleanup.policy=delete and is the one to go on with"
            )
        for message in read_tail(self.kafka, self.topic, self.positions):
            sent = sequence_of(headers_of(message))
            if sent is None or sent.producer != self.producer or (message.partition(), message.offset()) in own:
                continue
            if not self.sequences.is_confirmed(sent.number):
                return True
        return False

    @property
    def topic_id(self) -> str | None:
        """Which topic of its name it was when the sequence was recovered."""
        return self._log.topic_id

    def confirmed(self, messages: Iterable[Message]) -> None:
        """Take note of acknowledged messages; every so many of them a snapshot is made."""
        for message in messages:
            self._fresh += 1
            # Behind the last message of a transaction stands its end, or a message of another producer. The end belongs
            # to what is known: where retention has removed nothing else, nothing is lost.
            _pass(self._next, message, 1 + self.is_fenced)
        self._advance()
        if self._fresh >= self.every:
            self.save()

    def _advance(self) -> None:
        """Let positions rise to what is held, if that is due, and then to what came meanwhile."""
        for _ in range(2):
            if not self._held:
                self._held, self._next = self._next, {}
                self._until = self.sequences.last_pushed
            if not self._held or not self.sequences.is_settled(self._until):
                return
            self.positions |= {p: max(self.positions.get(p, 0), end) for p, end in self._held.items()}
            self._held = {}

    def save(self, *, is_clean: bool = False) -> None:
        """Make a snapshot now; a clean one after everything that was sent was answered."""
        if self.store is None:
            return
        self._advance()
        persisted, above = self.sequences.dump()
        content = self._identity | {
            "transactions": self.is_fenced,
            "clean": is_clean and self.sequences.is_settled(self.sequences.last_pushed),
            "positions": [[p.number, offset] for p, offset in sorted(self.positions.items())],
            "persisted": persisted,
            "above": above,
        }
        self.store.save(pack(_KIND, content))
        self._fresh = 0

    @property
    def _identity(self) -> dict[str, Any]:
        """What a snapshot must be of."""
        ids = {"cluster": self._log.cluster_id, "topic id": self._log.topic_id}
        return {"producer": self.producer, "topic": self.topic} | ids

    def _from_snapshot(self) -> tuple[Walk, dict[Partition, int] | None, bool]:
        """Return what the snapshot holds, where to read on, and whether the log may hide what the last life sent."""
        data = None if self.store is None else self.store.load()
        if data is None:
            return Walk(), None, not self.is_fenced
        anew = "to begin anew: then what the topic holds now decides, and what it does not hold is published again"
        try:
            content = unpack(_KIND, data)
        except SnapshotCorrupted as error:
            where = f"{self.store!r}, of producer {self.producer!r} for {self.topic!r}"
            raise SnapshotCorrupted(f"{where}: {error}. Remove it {anew}") from error
        for what, now in self._identity.items():
            found = content.get(what)
            if found != now and found is not None and now is not None:  # old brokers give topics no ids
                raise SnapshotCorrupted(
                    f"{self.store!r} is a snapshot of {what} {found!r}, not of {now!r}. Give each producer and topic "
                    f"a store of its own. If {self.topic!r} was deleted and made anew, or moved, remove the snapshot "
                    + anew
                )
        walk = Walk(content["persisted"], dict(content["above"]))
        # The fence ends only what was sent in transactions.
        may_hide = not (content["clean"] or (self.is_fenced and content.get("transactions", True)))
        return walk, {Partition(self.topic, n): offset for n, offset in content["positions"]}, may_hide


def _pass(ends: dict[Partition, int], message: Message, records: int = 1) -> None:
    """Move the end of a partition behind a message, or behind more records from there on."""
    partition = Partition.of(message)
    ends[partition] = max(ends.get(partition, 0), (message.offset() or 0) + records)
