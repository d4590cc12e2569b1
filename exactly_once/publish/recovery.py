"""Recovery of sequences: the last snapshot, and what the topic holds since then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import Message

from exactly_once.model import Partition

from .errors import SnapshotCorrupted, TailLost
from .headers import Sent, sequence_of
from .sequence import SequenceFilter, read_dumped
from .snapshot import SnapshotStore, pack, unpack
from .tail import read_tail

_KIND = "recovery"


class Walk:
    """What the log says of one producer: each message names the number pushed before it, so gaps show. No I/O."""

    def __init__(self, persisted: int = -1, above: Mapping[int, int] | None = None) -> None:
        self.persisted = persisted
        self._befores: dict[int, int] = {}
        self._following: dict[int, list[int]] = {}
        for number, before in (above or {}).items():
            self._wait(number, before)

    def see(self, sent: Sent) -> None:
        """Take note of a message in the log."""
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


class SequenceLog:
    """The sequences of one topic: recovers them into a filter, and keeps snapshots of it."""

    def __init__(
        self,
        kafka: Mapping[str, Any],
        topic: str,
        sequences: SequenceFilter,
        *,
        store: SnapshotStore | None = None,
        every: int = 1000,
        accept_trimmed: bool = False,
    ) -> None:
        self._kafka = kafka
        self._topic = topic
        self._filter = sequences
        self._store = store
        self._every = every
        self._accept_trimmed = accept_trimmed
        self._positions: dict[Partition, int] = {}
        self._since = 0

    def recover(self) -> int:
        """Load the snapshot, read the topic from there, fill the filter; return how many messages were read.

        Whoever published under the same name before must have ended.

        :raises SnapshotCorrupted: when the snapshot cannot be trusted; nothing is loaded then.
        :raises TailLost: when retention has removed messages that would have to be read.
        """
        walks, starts = self._from_snapshot()
        self._positions = dict(starts or {})
        first: dict[Partition, int] = {}
        count = 0
        for message in read_tail(self._kafka, self._topic, starts):
            count += 1
            partition = Partition(self._topic, message.partition() or 0)
            offset = message.offset() or 0
            first.setdefault(partition, offset)
            self._positions[partition] = offset + 1
            sent = sequence_of(message.headers())  # type: ignore[arg-type]  # they are bytes when read
            if sent is not None:
                walks.setdefault(sent.producer, Walk()).see(sent)
        if starts is None and not self._accept_trimmed and any(first.values()):
            self._refuse_trimmed(walks)
        self._filter.load({name: walk.result() for name, walk in walks.items()})
        if self._store is not None:
            self.save()
        return count

    def confirmed(self, messages: Iterable[Message]) -> None:
        """Take note of acknowledged messages; every so many of them a snapshot is made."""
        if self._store is None:
            return
        fresh: dict[Partition, int] = {}
        for message in messages:
            self._since += 1
            fresh[Partition(self._topic, message.partition() or 0)] = (message.offset() or 0) + 1
        if self._filter.stats().unknown:
            return  # one of the unknown ones may stand below these offsets, and is not in the filter
        self._positions.update(fresh)
        if self._since >= self._every:
            self.save()

    def save(self) -> None:
        """Make a snapshot now."""
        if self._store is None:
            return
        content = {
            "topic": self._topic,
            "positions": [[p.number, offset] for p, offset in sorted(self._positions.items())],
            "producers": self._filter.dump(),
        }
        self._store.save(pack(_KIND, content))
        self._since = 0

    def _from_snapshot(self) -> tuple[dict[str, Walk], dict[Partition, int] | None]:
        data = None if self._store is None else self._store.load()
        if data is None:
            return {}, None
        content = unpack(_KIND, data)
        if content.get("topic") != self._topic:
            raise SnapshotCorrupted(f"the snapshot is one of {content.get('topic')!r}, not of {self._topic!r}")
        walks = {str(name): Walk(*read_dumped(dumped)) for name, dumped in content["producers"].items()}
        return walks, {Partition(self._topic, number): offset for number, offset in content["positions"]}

    def _refuse_trimmed(self, walks: Mapping[str, Walk]) -> None:
        for name, walk in walks.items():
            _, beyond = walk.result()
            if beyond:
                raise TailLost(
                    f"{self._topic!r} does not start at its beginning any more, there is no snapshot, and producer "
                    f"{name!r} has numbers whose predecessors are not there: {min(beyond)} for instance. Whether "
                    "they were removed or never sent cannot be told; accept_trimmed=True takes them for never sent"
                )
