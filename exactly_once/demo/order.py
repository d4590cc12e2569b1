"""Order: what a worker is told to do, in the line of JSON with which its life begins."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Where the servers are, what to read and where to write; the same for both loops."""

    loop: str
    number: int
    bootstrap_servers: str
    conninfo: str
    topic: str
    group_id: str
    schema: str
    max_messages: int
    session_ms: int

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Read an order."""
        return cls(**json.loads(line))

    def to_line(self) -> str:
        """Write an order."""
        return json.dumps(asdict(self))

    @property
    def name(self) -> str:
        """The name of the worker, the same for each process that takes its place."""
        return f"worker-{self.number}"

    @property
    def kafka(self) -> dict[str, Any]:
        """The settings of the Kafka client."""
        return {
            "bootstrap.servers": self.bootstrap_servers,
            "group.id": self.group_id,
            # A process started in place of a killed one goes on at once, without a rebalance.
            "group.instance.id": self.name,
            "partition.assignment.strategy": "range",
            "session.timeout.ms": self.session_ms,
            "heartbeat.interval.ms": self.session_ms // 10,
            "max.poll.interval.ms": 30_000,
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 50,
        }
