"""Kafka: logs with holes, a group that rebalances, and a client as librdkafka's behaves."""

from __future__ import annotations

import random
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from exactly_once._model import Partition

Callback = Callable[[Any, list[TopicPartition]], None]


class Hiccup(KafkaException):
    """A failure of the client that was injected: what it had fetched is gone."""


class Log:
    """The messages of one partition; offsets have holes, as compaction and transactions leave them."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.offsets: list[int] = []
        self.messages: list[Message] = []
        self.end = 0

    def produce(self, rng: random.Random, count: int) -> None:
        for _ in range(count):
            self.end += rng.choice((0, 0, 0, 1, 3))
            message = Message(
                topic=self.partition.topic,
                partition=self.partition.number,
                offset=self.end,
                value=b"v",
                leader_epoch=1,
            )
            self.offsets.append(self.end)
            self.messages.append(message)
            self.end += 1
        self.end += rng.choice((0, 0, 1, 2))  # a commit marker, an aborted tail

    def between(self, start: int, end: int) -> list[int]:
        return self.offsets[bisect_left(self.offsets, start) : bisect_left(self.offsets, end)]

    def read(self, position: int, count: int) -> list[Message]:
        first = bisect_left(self.offsets, position)
        return self.messages[first : first + count]


class Group:
    """The coordinator. A member that was expelled learns of it when it polls again."""

    def __init__(self, partitions: list[Partition], rng: random.Random, *, is_eager: bool) -> None:
        self._partitions = partitions
        self._rng = rng
        self.is_eager = is_eager
        self.epoch = 0
        self.members: dict[Client, set[Partition]] = {}

    def join(self, client: Client) -> None:
        self.members[client] = set()
        self.rebalance()

    def leave(self, client: Client) -> None:
        if self.members.pop(client, None) is not None:
            self.rebalance()

    def rebalance(self) -> None:
        """Deal the partitions anew."""
        self.epoch += 1
        members = list(self.members)
        self._rng.shuffle(members)
        self.members = {client: set() for client in self.members}
        for index, partition in enumerate(self._partitions):
            if members:
                self.members[members[index % len(members)]].add(partition)

    def is_member(self, client: Client) -> bool:
        """Whether a commit of this client would be accepted now."""
        return client in self.members and (not self.is_eager or client.told == self.epoch)

    def are_free(self, partitions: Iterable[Partition], client: Client) -> bool:
        others = [c.held for c in self.members if c is not client]
        return not any(p in held for p in partitions for held in others)

    def next_change(self, client: Client) -> tuple[str, list[Partition]] | None:
        """What the client's callbacks are told next."""
        if client not in self.members:
            held, client.held = sorted(client.held), set()
            self.join(client)
            return ("lost", held) if held else None
        target = self.members[client]
        if self.is_eager:
            return self._eager(client, target)
        gone = client.held - target
        if gone:
            client.held = client.held - gone
            return "revoked", sorted(gone)
        new = sorted(p for p in target - client.held if self.are_free([p], client))
        client.held = client.held | set(new)
        return ("assigned", new) if new else None

    def _eager(self, client: Client, target: set[Partition]) -> tuple[str, list[Partition]] | None:
        if client.told == self.epoch:
            return None
        if client.held:
            held, client.held = sorted(client.held), set()
            return "revoked", held
        if not self.are_free(target, client):
            return None
        client.held, client.told = set(target), self.epoch
        return "assigned", sorted(target)


class Client:
    """The consumer's client; ``step`` is where others may go on, ``fault`` says what goes wrong."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._member = settings["simulated.member"]
        self._world = self._member.world
        self._on_commit = settings["on_commit"]
        self._callbacks: dict[str, Callback] = {}
        self._answers: deque[tuple[KafkaError | None, list[TopicPartition]]] = deque()
        self.held: set[Partition] = set()
        self.told = 0
        self.positions: dict[Partition, int] = {}
        self.stalled: set[Partition] = set()
        self.paused: set[Partition] = set()
        self.ends: dict[Partition, int] = {}

    def subscribe(self, topics: list[str], **callbacks: Callback) -> None:
        self._callbacks = {
            "assigned": callbacks["on_assign"],
            "revoked": callbacks["on_revoke"],
            "lost": callbacks["on_lost"],
        }
        self._world.group.join(self)

    def poll(self, timeout: float) -> None:
        self.consume(1, timeout)

    def consume(self, count: int, timeout: float) -> list[Message]:
        if timeout:
            self._member.step("polls")
        self._serve()
        messages = self._fetch(count)
        if self._world.fault("the client raises", 0.02):
            raise Hiccup(KafkaError(KafkaError._TRANSPORT))
        if not messages:
            self._world.clock.now += timeout
        return messages

    def get_watermark_offsets(self, partition: TopicPartition, *, cached: bool) -> tuple[int, int]:
        assert cached
        return 0, self._world.logs[Partition(partition.topic, partition.partition)].end

    def _serve(self) -> None:
        while self._answers and not self._world.fault("a commit's answer is late", 0.2):
            error, offsets = self._answers.popleft()
            if error is None and not self._world.group.is_member(self):
                error = KafkaError(KafkaError.ILLEGAL_GENERATION)
            self._on_commit(error, offsets)
        change = self._world.group.next_change(self)
        if change is not None:
            kind, partitions = change
            self._world.note(self._member.name, kind, partitions)
            self._callbacks[kind](self, [TopicPartition(*p) for p in partitions])

    def _fetch(self, count: int) -> list[Message]:
        messages: list[Message] = []
        ready = [p for p in self.positions if p not in self.paused and p not in self.stalled]
        self._world.rng.shuffle(ready)
        for partition in ready:
            if len(messages) >= count:
                break
            if self._world.fault("an offset error", 0.01):
                self.stalled.add(partition)
                messages.append(_error(partition, KafkaError._AUTO_OFFSET_RESET))
                continue
            run = self._world.logs[partition].read(
                self.positions[partition], min(count - len(messages), self._world.rng.randint(1, 4))
            )
            if run:
                self.positions[partition] = run[-1].offset() + 1
                messages += run
            elif self._world.logs[partition].end != self.ends.get(partition):
                # All there is was fetched before: the client says so once, and goes on behind the holes at the end.
                self.positions[partition] = self.ends[partition] = self._world.logs[partition].end
                messages.append(_error(partition, KafkaError._PARTITION_EOF, self.positions[partition]))
        if messages and self._world.fault("an error event", 0.02):
            messages.insert(0, _error(Partition("t", 0), KafkaError._TRANSPORT))
        return messages

    def consumer_group_metadata(self) -> bytes:
        generation = 1 if self in self._world.group.members else -1
        return b"CGMDv2:" + generation.to_bytes(4, sys.byteorder, signed=True)

    def memberid(self) -> str:
        return "a member"

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        refused = not self._world.group.is_member(self)
        error = KafkaError(KafkaError.UNKNOWN_MEMBER_ID) if refused else None
        self._answers.append((error, offsets))

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        is_probe = any(p.topic != "t" for p in partitions)  # what else is asked for decides nothing here
        if is_probe and self._world.fault("the coordinator does not answer", 0.1):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return partitions

    def assignment(self) -> list[TopicPartition]:
        return [TopicPartition(*p) for p in self.positions]

    def assign(self, positions: list[TopicPartition]) -> None:
        self.positions = {Partition(tp.topic, tp.partition): tp.offset for tp in positions}
        self.stalled.clear()
        self.ends.clear()

    def unassign(self) -> None:
        self.assign([])

    def incremental_assign(self, positions: list[TopicPartition]) -> None:
        for tp in positions:
            partition = Partition(tp.topic, tp.partition)
            self._insist(partition not in self.positions and partition in self.held)
            self.positions[partition] = tp.offset
            self.stalled.discard(partition)
            self.ends.pop(partition, None)

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            self._insist(Partition(tp.topic, tp.partition) in self.positions)
            del self.positions[Partition(tp.topic, tp.partition)]

    def seek(self, position: TopicPartition) -> None:
        self._insist(Partition(position.topic, position.partition) in self.positions)
        self.positions[Partition(position.topic, position.partition)] = position.offset
        self.ends.pop(Partition(position.topic, position.partition), None)

    def pause(self, partitions: list[TopicPartition]) -> None:
        self.paused.update(Partition(tp.topic, tp.partition) for tp in partitions)

    def resume(self, partitions: list[TopicPartition]) -> None:
        self.paused.difference_update(Partition(tp.topic, tp.partition) for tp in partitions)

    def unsubscribe(self) -> None:
        self._world.group.leave(self)

    def close(self) -> None:
        self._world.group.leave(self)

    def _insist(self, is_right: bool) -> None:  # noqa: FBT001
        if not is_right:
            raise KafkaException(KafkaError(KafkaError._STATE))


def _error(partition: Partition, code: int, offset: int = 0) -> Message:
    return Message(topic=partition.topic, partition=partition.number, offset=offset, error=KafkaError(code))
