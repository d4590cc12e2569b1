"""Delivery: from what the client fetched to the batches that units are given. No I/O.

A batch that a unit could not commit is given out again from memory, as it was: the client need not
seek, and a retry sees the same messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from confluent_kafka import Message

from .model import Partition
from .ownership import Holding, Ownership

Ends = dict[Partition, tuple[int, int | None]]
"""For each partition of a batch the offset after its last message, and that message's leader epoch."""


class Delivery:
    """Accepts messages in the order of the client and gives them out in batches.

    ``queue_bytes`` is what the client holds at most: batches need no weighing below it.
    """

    def __init__(self, ownership: Ownership, *, on_error: Callable[[Message], None], queue_bytes: int = 0) -> None:
        self._ownership = ownership
        self._on_error = on_error
        self._waiting: list[Message] = []
        self._again: list[Message] = []
        self._ends: Ends | None = None
        self._queue_bytes = queue_bytes
        self.only_topic: str | None = None
        """The one topic there is, if so; it need not be asked of each message then."""
        self.attempt = 0
        self.gaps = 0
        self.dropped = 0
        self.not_owned = 0
        """How many of the dropped messages were of partitions that were not ours then."""

    @property
    def waiting(self) -> int:
        """How many messages can be given out without fetching."""
        return len(self._again) + len(self._waiting)

    @property
    def repeats(self) -> bool:
        """Whether the next batch comes again."""
        return bool(self._again)

    def accept(self, messages: list[Message]) -> None:
        """Take in what the client returned, in order.

        Errors go to ``on_error``. Messages of partitions that are not ours now, or below what was
        already fetched, are dropped and counted; gaps of the log are counted.
        """
        if any(map(Message.error, messages)):
            for error in filter(Message.error, messages):
                self._on_error(error)
            messages = [m for m in messages if m.error() is None]
        kept: list[Message] = []
        ends: Ends = {}
        for partition, run in self._runs(messages):
            holding = self._ownership.deliverable(partition)
            self.not_owned += len(run) if holding is None else 0
            current = [] if holding is None else self._in_order(holding, run)
            if current:
                kept += current
                ends[partition] = _end(current[-1])
        self.dropped += len(messages) - len(kept)
        self._ends = None if self._waiting else ends
        self._waiting = self._waiting + kept if self._waiting else kept

    def take(self, max_messages: int, max_bytes: int) -> tuple[list[Message], Ends]:
        """Give out the next batch: the one that comes again, else what is waiting.

        At least one message, if there is any, however large it is.
        """
        ends = None
        if self._again:
            batch, self._again = self._cut(self._again, max_messages, max_bytes)
        else:
            self.attempt = 0
            batch, self._waiting = self._cut(self._waiting, max_messages, max_bytes)
            ends = None if self._waiting else self._ends
            self._ends = None
        self.attempt += 1
        return batch, self._ends_of(batch) if ends is None else ends

    def put_back(self, messages: Sequence[Message]) -> None:
        """Give these messages out again, before all others and in one batch."""
        self._again = [*messages, *self._again]
        self.discard()

    def committed(self) -> None:
        """Take note that the batch given out last was committed."""
        if not self._again:
            self.attempt = 0

    def drop_all(self) -> None:
        """Drop everything: it will be fetched again."""
        self._waiting, self._again, self._ends = [], [], None

    def discard(self) -> None:
        """Drop the messages of partitions that may not be delivered now, or were refetched."""
        self._again = [m for m in self._again if self._is_current(m)]
        self._waiting = [m for m in self._waiting if self._is_current(m)]
        self._ends = None

    def _is_current(self, message: Message) -> bool:
        holding = self._ownership.deliverable(_partition(message))
        return holding is not None and holding.expected <= _offset(message) < holding.fetched

    def _in_order(self, holding: Holding, run: list[Message]) -> list[Message]:
        """Return the part of the run that continues what was fetched, and move ``fetched``."""
        # Within one call the client gives a partition's messages in rising order: it drops what it had fetched
        # before a seek, and only we seek, between calls. So both ends and the count tell that none is missing.
        first, last = _offset(run[0]), _offset(run[-1])
        if first == holding.fetched and last - first == len(run) - 1:
            holding.fetched = last + 1
            return run
        kept = []
        for message in run:
            offset = _offset(message)
            if offset < holding.fetched:
                continue
            self.gaps += offset > holding.fetched
            holding.fetched = offset + 1
            kept.append(message)
        return kept

    def _ends_of(self, messages: list[Message]) -> Ends:
        return {partition: _end(run[-1]) for partition, run in self._runs(messages)}

    def _runs(self, messages: list[Message]) -> Iterable[tuple[Partition, list[Message]]]:
        """Split into runs of one partition; the loop over single messages stays in C."""
        topics = [(self.only_topic, messages)] if self.only_topic else groupby(messages, Message.topic)
        for topic, same_topic in topics:
            for number, run in groupby(same_topic, Message.partition):
                yield Partition(str(topic), number or 0), list(run)

    def _cut(self, messages: list[Message], count: int, size: int) -> tuple[list[Message], list[Message]]:
        if len(messages) <= count and (size >= self._queue_bytes > 0 or sum(map(len, messages)) <= size):
            return messages, []
        end, total = 0, 0
        for message in messages[:count]:
            total += len(message)
            if total > size and end:
                break
            end += 1
        return messages[:end], messages[end:]


def _end(message: Message) -> tuple[int, int | None]:
    return _offset(message) + 1, message.leader_epoch()


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None
    return offset


def _partition(message: Message) -> Partition:
    return Partition(str(message.topic()), message.partition() or 0)
