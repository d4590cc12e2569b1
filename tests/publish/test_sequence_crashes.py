"""Any series of sends, reports in any order, failures, crashes and recoveries: every number is in the log once.

Pure: the log is a list, a crash leaves in it any part of what was in flight. The filter and the walk along the log are
the real ones.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest

from exactly_once.publish import SequenceFilter, State
from exactly_once.publish.headers import Sent, headers_of, sequence_of
from exactly_once.publish.recovery import Walk
from tests.support.seeds import seeds

SCHEDULES = int(os.environ.get("EXACTLY_ONCE_SCHEDULES", "1500"))
PARTITIONS = 3
NAME = "files"


class World:
    """One application that publishes rising numbers with holes, over several partitions, and dies now and then."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.wanted = sorted(self.rng.sample(range(200), 40))
        self.logs: list[list[Sent]] = [[] for _ in range(PARTITIONS)]
        self.snapshot: tuple[list[int], Any] | None = None
        self.start()

    def start(self) -> None:
        """Recover, and read the wanted numbers again from the last persisted one on."""
        starts, walk = [0] * PARTITIONS, Walk()
        if self.snapshot is not None:
            starts, (persisted, above) = self.snapshot
            walk = Walk(persisted, dict(above))
        entries = [sent for log, start in zip(self.logs, starts, strict=True) for sent in log[start:]]
        self.rng.shuffle(entries)
        for sent in entries:
            walk.see(sent)
        self.made = SequenceFilter()
        self.made.load(*walk.result())
        last = self.made.persisted
        self.todo = [n for n in self.wanted if n >= last]
        self.flying: list[list[Sent]] = [[] for _ in range(PARTITIONS)]
        self.positions = [len(log) for log in self.logs]

    def send(self) -> None:
        if not self.todo:
            return
        number = self.todo.pop(0)
        state = self.made.reserve(number)
        assert state in (State.NEW, State.DUPLICATE)
        if state is State.NEW:
            sent = Sent(NAME, self.made.predecessors([number])[0], number)
            self.rng.choice(self.flying).append(sent)

    def deliver(self, flying: list[Sent], log: list[Sent]) -> None:
        if flying:
            sent = flying.pop(0)
            log.append(sent)
            self.made.confirm(sent.number)
            self.positions[self.logs.index(log)] = len(log)

    def fail(self, flying: list[Sent]) -> None:
        """The broker refuses one message for good; the application sends it again after a while."""
        if flying:
            sent = flying.pop(self.rng.randrange(len(flying)))
            self.made.release(sent.number)
            self.todo.insert(self.rng.randrange(min(4, len(self.todo) + 1)), sent.number)

    def crash(self) -> None:
        for flying, log in zip(self.flying, self.logs, strict=True):
            log.extend(flying[: self.rng.randrange(len(flying) + 1)])
        self.start()

    def save(self) -> None:
        self.snapshot = (list(self.positions), json.loads(json.dumps(self.made.dump())))

    def run(self) -> list[int]:
        for _ in range(600):
            event = self.rng.random()
            place = self.rng.randrange(PARTITIONS)
            if event < 0.45:
                self.send()
            elif event < 0.9:
                self.deliver(self.flying[place], self.logs[place])
            elif event < 0.93:
                self.fail(self.flying[place])
            elif event < 0.96:
                self.save()
            else:
                self.crash()
        while self.todo or any(self.flying):
            self.send()
            for flying, log in zip(self.flying, self.logs, strict=True):
                self.deliver(flying, log)
        return sorted(sent.number for log in self.logs for sent in log)


@pytest.mark.parametrize("part", range(3))
def test_every_number_is_in_the_log_once(part: int) -> None:
    for seed in seeds(range(SCHEDULES), new=SCHEDULES)[part::3]:
        world = World(seed)
        assert world.run() == world.wanted, f"seed {seed}"
        world.crash()
        assert world.made.persisted == world.wanted[-1], f"seed {seed}"


class Unreadable:
    """A message of others with a header whose name is no UTF-8: the client, which raises this, writes none itself."""

    def headers(self) -> None:
        raise SystemError("returned a result with an exception set")


def test_headers_of_others_that_cannot_be_read_are_none_of_ours() -> None:
    assert sequence_of(headers_of(Unreadable())) is None
