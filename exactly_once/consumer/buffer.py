"""FetchBuffer: from what the client fetched to the batches that units are given. No I/O.

A batch that a unit could not commit is given out again from memory: the client need not seek, and a
retry sees the same messages, as the broker sent them, whatever the handler did to those it was given.

What comes while no unit can be made, because a handler is slow or a server away, is kept here by partition, and of each
partition only once: a pause makes the client throw away what it has, and behind it the first partitions come first
again, so that the last ones would never have their turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence, Set
from functools import cached_property
from itertools import groupby, islice, repeat
from typing import Any

from confluent_kafka import Message

from exactly_once._model import Partition, Span

from .partitions import Ownership, PartitionState

Spans = dict[Partition, Span]

# About what a message takes in memory beside its value: without that, millions of small ones could be kept.
_MESSAGE_BYTES = 500


class HeadersUnreadable(ValueError):
    """Raised by ``message.headers()`` where the name of a header is no UTF-8; says by attributes of which message."""

    def __init__(self, message: Message) -> None:
        self.topic, self.partition, self.offset = message.topic(), message.partition(), message.offset()
        place = f"{self.topic}[{self.partition}] offset {self.offset}"
        super().__init__(f"{place}: the name of a header is no UTF-8, so that none of its headers can be read")


class _WithoutHeaders(Message):
    """A message whose headers the client cannot read. It is as good as any other to whoever does not ask for them."""

    def headers(self) -> Any:
        raise HeadersUnreadable(self)


class Sent:
    """What the broker sent of a batch, whatever a handler does to its messages, as ``set_value`` does.

    Keeps references to what can be set, about 35 ns a message; a message is made of them only where it comes again.
    """

    def __init__(self, messages: Sequence[Message], *, only_topic: str | None = None) -> None:
        read: list[Message] = list(messages)
        headers: list[Any] = []
        while len(headers) < len(read):
            try:
                headers.extend(map(Message.headers, islice(read, len(headers), None)))
            except (SystemError, UnicodeDecodeError) as error:
                if not isinstance(error.__cause__ or error, UnicodeDecodeError):
                    raise
                # Made anew: of itself the client would next give headers with holes, which crash.
                bad = read[len(headers)]
                read[len(headers)] = _remade(bad, bad.topic(), bad.key(), bad.value(), None, kind=_WithoutHeaders)
        if headers.count(None) < len(headers):  # they are lists, which can be changed
            headers = [None if each is None else list(each) for each in headers]
        self._messages, self._headers = tuple(read), headers
        self._topics = repeat(only_topic) if only_topic else list(map(Message.topic, messages))
        self._keys = list(map(Message.key, messages))
        self._values = list(map(Message.value, messages))

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What to give to a handler, which may change it."""
        return self._messages

    def again(self) -> list[Message]:
        """Make the messages anew."""
        parts = zip(self._messages, self._topics, self._keys, self._values, self._headers, strict=False)
        return [_remade(*each, kind=type(each[0])) for each in parts]

    def of(self, message: Message) -> Message:
        """Make one of them anew; a message that is none of them stays as it is."""
        if (at := self._index[0].get(id(message))) is None:
            return message
        topic = next(self._topics) if isinstance(self._topics, repeat) else self._topics[at]
        return _remade(message, topic, self._keys[at], self._values[at], self._headers[at], kind=type(message))

    def before(self, message: Message) -> int | None:
        """Return the offset of the message that comes before one in the batch and in its partition."""
        offsets = self._index[1].get((message.topic(), message.partition()), [])
        at = bisect_left(offsets, _offset(message))
        return offsets[at - 1] if at else None

    @cached_property
    def _index(self) -> tuple[dict[int, int], dict[tuple[str | None, int | None], list[int]]]:
        """Where messages are in the batch, and the rising offsets of each partition.

        Made when first asked for: a look through the batch for each of a hundred dead letters takes longer than all
        else that is done for them.
        """
        offsets: dict[tuple[str | None, int | None], list[int]] = {}
        for topic, message in zip(self._topics, self._messages, strict=False):
            offsets.setdefault((topic, message.partition()), []).append(_offset(message))
        for each in offsets.values():
            each.sort()
        return {id(message): at for at, message in enumerate(self._messages)}, offsets


def _remade(message: Message, topic: str | None, key: Any, value: Any, headers: Any, *, kind: type[Message]) -> Message:
    """Make a message of what cannot be set, and of what was kept of the rest."""
    latency, leader_epoch = message.latency(), message.leader_epoch()
    return kind(
        topic=topic,
        partition=message.partition(),
        offset=message.offset(),
        key=key,
        value=value,
        headers=None if headers is None else list(headers),
        timestamp=message.timestamp(),
        latency=-1.0 if latency is None else latency,
        leader_epoch=-1 if leader_epoch is None else leader_epoch,
    )


class FetchBuffer:
    """Accepts messages in the order of the client and gives them out in batches.

    ``queue_bytes`` is what the client holds at most. As much is kept beside it; and batches need no weighing below it,
    unless one ``can_outgrow`` what the client holds at once.
    """

    def __init__(
        self,
        ownership: Ownership,
        *,
        on_error: Callable[[Message], None],
        queue_bytes: int = 0,
        can_outgrow: bool = False,
    ) -> None:
        self.ownership = ownership
        self._on_error = on_error
        # What was fetched for the next units, in the client's order; empty while anything is kept.
        self._waiting: list[Message] = []
        # What came while no unit could be made, and since then until it is empty. The first has the next turn.
        self._kept: dict[Partition, list[Message]] = {}
        self._kept_bytes = 0  # what they weigh, see _weight()
        # What comes again, and how often each message was handed out so far.
        self._again: list[tuple[Message, int]] = []
        # The same counts of the batch that was handed out last, if any of it came again.
        self._tried: list[int] = []
        self._spans: Spans | None = None  # those of what is waiting, or None: then the next batch is looked through
        self._queue_bytes = queue_bytes
        # Up to which size batches are weighed; 0 weighs all.
        self._weighs_from = 0 if can_outgrow else queue_bytes
        # The one topic there is, if so; it need not be asked of each message then.
        self.only_topic: str | None = None
        # How often messages of the batch that was handed out last were handed out by now.
        self.attempt = 0
        self.gaps = 0  # offsets behind which the log went on elsewhere, counted for metrics as what follows is
        self.dropped = 0
        # How many of the dropped messages were of partitions that were not ours then.
        self.not_owned = 0

    @property
    def waiting(self) -> int:
        """How many messages can be given out without fetching."""
        return len(self._again) + len(self._waiting) + sum(map(len, self._kept.values()))

    @property
    def keeps(self) -> bool:
        """Whether there is more than what was fetched for the next units."""
        return bool(self._kept)

    @property
    def to_pause(self) -> Set[Partition] | None:
        """What need not be fetched, because some of it is kept; None when nothing must be, because enough is."""
        return None if self._kept_bytes > self._queue_bytes > 0 else self._kept.keys()

    @property
    def repeats(self) -> bool:
        """Whether the next batch comes again."""
        return bool(self._again)

    def add(self, messages: list[Message], *, keep: bool = False) -> None:
        """Take in what the client returned, in order; ``keep`` it where no unit can be made of it now.

        Errors go to ``on_error``. Messages of partitions that are not ours now, or below what was
        already fetched, are dropped and counted; gaps of the log are counted.
        """
        if any(map(Message.error, messages)):
            # In order: what comes behind an error of its partition is not taken, what came before it is.
            start = 0
            for index, message in enumerate(messages):
                if message.error() is not None:
                    self._take_in(messages[start:index])
                    self._on_error(message)
                    start = index + 1
            messages = messages[start:]
        self._take_in(messages)
        if keep or self._kept:
            for partition, run in self._runs(self._waiting):
                self._kept.setdefault(partition, []).extend(run)
            self._kept_bytes += _weight(self._waiting)
            self._waiting, self._spans = [], None

    def _take_in(self, messages: list[Message]) -> None:
        if not messages:
            return
        taken: list[Message] = []
        spans: Spans = {}
        for partition, run in self._runs(messages):
            state = self.ownership.deliverable(partition)
            self.not_owned += len(run) if state is None else 0
            is_taken = state is not None and state.unreadable is None
            current = self._in_order(state, run) if is_taken and state is not None else []
            if current:
                taken += current
                _extend(spans, partition, current)
        self.dropped += len(messages) - len(taken)
        self._spans = None if self._waiting else spans
        self._waiting = self._waiting + taken if self._waiting else taken

    def next_batch(self, max_messages: int, max_bytes: int) -> tuple[list[Message], Spans]:
        """Give out the next batch: the one that comes again, else what is kept, in turns, else what is waiting.

        At least one message, if there is any, however large it is.
        """
        spans = None
        if self._again:
            batch, _ = self._cut([message for message, _ in self._again], max_messages, max_bytes)
            self._tried = [times + 1 for _, times in self._again[: len(batch)]]
            self._again = self._again[len(batch) :]
            self.attempt = max(self._tried)
        elif self._kept:
            batch = []
            for run in self._kept.values():
                batch += run[: max_messages - len(batch)]
            batch, _ = self._cut(batch, max_messages, max_bytes)
            self._kept_bytes -= _weight(batch)
            for partition, run in self._runs(batch):
                rest = self._kept.pop(partition)[len(run) :]
                if rest:
                    self._kept[partition] = rest  # behind the others
            self._tried, self.attempt = [], 1
        else:
            batch, self._waiting = self._cut(self._waiting, max_messages, max_bytes)
            spans = None if self._waiting else self._spans
            self._spans, self._tried, self.attempt = None, [], 1
        if spans is None:
            spans = {}
            for partition, run in self._runs(batch):
                _extend(spans, partition, run)
        return batch, spans

    def requeue(self, messages: Sequence[Message]) -> None:
        """Give the batch that was handed out last out again, before all others and in one batch."""
        self._again = [*zip(messages, self._tried or repeat(1), strict=False), *self._again]
        self.discard()

    def drop_all(self) -> None:
        """Drop everything: it will be fetched again."""
        self._waiting, self._kept, self._kept_bytes, self._again, self._spans = [], {}, 0, [], None

    def discard(self) -> None:
        """Drop the messages of partitions that may not be delivered now, or were refetched."""
        # After each unit that failed, with much still waiting: by runs, which stays in C, not message by message.
        if not all(map(self._is_current, self._runs([message for message, _ in self._again]))):
            self._again = [(m, times) for m, times in self._again if self._is_current((Partition.of(m), [m]))]
        self._waiting, self._spans = self._current(self._waiting), None
        if self._kept:
            kept = {partition: self._current(run) for partition, run in self._kept.items()}
            self._kept = {partition: run for partition, run in kept.items() if run}
            self._kept_bytes = sum(map(_weight, self._kept.values()))

    def _current(self, messages: list[Message]) -> list[Message]:
        if all(map(self._is_current, self._runs(messages))):
            return messages
        return [m for m in messages if self._is_current((Partition.of(m), [m]))]

    def _is_current(self, run_of: tuple[Partition, list[Message]]) -> bool:
        """Tell whether all of a run of rising offsets may be delivered now."""
        partition, run = run_of
        state = self.ownership.deliverable(partition)
        return state is not None and state.next_offset <= _offset(run[0]) <= _offset(run[-1]) < state.position

    def _in_order(self, state: PartitionState, run: list[Message]) -> list[Message]:
        """Return the part of the run that continues what was fetched, and move ``position``."""
        # Within one call the client gives a partition's messages in rising order: it drops what it had fetched
        # before a seek, and only we seek, between calls. So both ends and the count tell that none is missing.
        first, last = _offset(run[0]), _offset(run[-1])
        if first == state.position and last - first == len(run) - 1:
            state.position = last + 1
            return run
        kept = []
        for message in run:
            offset = _offset(message)
            if offset < state.position:
                continue
            if offset > state.position:
                self.gaps += 1
                state.gaps[offset] = state.position
            state.position = offset + 1
            kept.append(message)
        return kept

    def _runs(self, messages: list[Message]) -> Iterable[tuple[Partition, list[Message]]]:
        """Split into runs of one partition; the loop over single messages stays in C."""
        topics = [(self.only_topic, messages)] if self.only_topic else groupby(messages, Message.topic)
        for topic, same_topic in topics:
            for number, run in groupby(same_topic, Message.partition):
                yield Partition(str(topic), number or 0), list(run)

    def _cut(self, messages: list[Message], count: int, size: int) -> tuple[list[Message], list[Message]]:
        if len(messages) <= count and (size >= self._weighs_from > 0 or bytes_of(messages) <= size):
            return messages, []
        end, total = 0, 0
        for message in messages[:count]:
            total += bytes_of([message])
            if total > size and end:
                break
            end += 1
        return messages[:end], messages[end:]


def bytes_of(messages: Sequence[Message]) -> int:
    """Return the bytes of keys and values; a message's own length is that of its value. The loops stay in C."""
    return sum(map(len, messages)) + sum(map(len, filter(None, map(Message.key, messages))))


def _weight(messages: list[Message]) -> int:
    return bytes_of(messages) + _MESSAGE_BYTES * len(messages)


def _extend(spans: Spans, partition: Partition, run: list[Message]) -> None:
    """Add a run of rising offsets to the span of its partition."""
    begin, end, leader_epoch = _offset(run[0]), _offset(run[-1]) + 1, run[-1].leader_epoch()
    known = spans.get(partition)
    if known is not None:
        begin = min(begin, known.begin)
        end, leader_epoch = max((end, leader_epoch), (known.end, known.leader_epoch), key=lambda it: it[0])
    spans[partition] = Span(begin, end, leader_epoch)


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None
    return offset
