"""A real Apache Kafka of one or three brokers on this machine, from packages."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from . import broker
from .errors import EmbeddedError, OptionError, check_texts
from .jars import KAFKA_VERSION
from .ports import accepts, free_port
from .process import ServerProcess

_START_SECONDS = 180.0  # three seconds on an idle machine
_STOP_SECONDS = 20.0  # for handing over partitions; after it a broker is killed
_POLL_SECONDS = 0.02  # each look is a connection of its own


class Kafka:
    """Run Apache Kafka on 127.0.0.1; use it in a ``with`` statement.

    Each node is broker and controller in one, with an id from 1. *properties* are added to every broker's
    configuration. Without *directory* the data lives in a temporary one, deleted on `close`. A wrong option
    raises `OptionError` here; a broker that does not come up raises `StartError`, with the tail of its log,
    on `start`.
    """

    version = KAFKA_VERSION

    def __init__(
        self,
        *,
        brokers: int = 1,
        directory: str | Path | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        if brokers not in (1, 3):
            raise OptionError(f"brokers must be 1 or 3, not {brokers!r}")
        self._properties = dict(properties or {})
        check_texts("properties", self._properties)
        if reserved := sorted(broker.RESERVED & self._properties.keys()):
            raise OptionError(f"the property {reserved[0]} is chosen here and cannot be given")
        self._brokers = brokers
        self._given_directory = None if directory is None else Path(directory).absolute()
        # From the first start until `close`; ports and data stay while brokers stop and start.
        self._directory: Path | None = None
        self._nodes: dict[int, broker.Node] = {}  # by id
        self._processes: dict[int, ServerProcess] = {}  # by id, also those that have ended

    def __repr__(self) -> str:
        running = sorted(node for node in self._processes if self.is_running(node))
        return f"<{type(self).__name__} brokers={self._brokers} running={running}>"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bootstrap_servers(self) -> str:
        """Return the addresses of all brokers, running or not."""
        if not self._nodes:
            raise EmbeddedError("Kafka was not started")
        return ",".join(f"127.0.0.1:{node.port}" for node in self._nodes.values())

    def port(self, node: int = 1) -> int:
        """Return the port of one broker; it never changes."""
        return self._node(node).port

    def log(self, node: int = 1) -> Path:
        """Return the file with one broker's own messages."""
        return self._node(node).log

    def pid(self, node: int = 1) -> int:
        """Return the process id of one broker."""
        return self._process(node).pid

    def is_running(self, node: int = 1) -> bool:
        """Return whether the broker's process has not ended; a paused one is running."""
        return node in self._processes and self._processes[node].is_running()

    def start(self, *, wait: bool = True) -> Self:
        """Start the brokers that do not run; with *wait*, return when all are up."""
        try:
            if not self._nodes:
                broker.prepare()
                place = self._directory = self._given_directory or Path(tempfile.mkdtemp(prefix="exactly-once-kafka-"))
                numbers = range(1, self._brokers + 1)
                nodes = [broker.Node(number, free_port(), free_port(), place / f"node-{number}") for number in numbers]
                cluster_id = broker.cluster_id_of(nodes[0]) or broker.new_cluster_id()
                for each in nodes:
                    broker.write_files(each, nodes, self._properties, cluster_id)
                self._nodes = {node.id: node for node in nodes}
            for node in self._nodes:
                self._launch(node)
            if wait:
                self.wait()
        except BaseException:
            self.close()
            raise
        return self

    def wait(self) -> None:
        """Return when every running broker takes part in the cluster."""
        self._wait_for([node for node in self._nodes if self.is_running(node)])

    def stop(self, node: int | None = None) -> None:
        """Stop one broker, or all, in good order; the data stays."""
        nodes = list(self._processes) if node is None else [self._node(node).id]
        # All are asked before any is waited for: each needs the others to hand over its partitions.
        for each in nodes:
            self._processes[each].send(signal.SIGCONT)
            self._processes[each].send(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for each in nodes:
            left = max(0.0, deadline - time.monotonic())
            self._processes[each].end(signal.SIGTERM, timeout_seconds=left)

    def kill(self, node: int = 1) -> None:
        """Kill one broker as ``kill -9`` does."""
        self._process(node).end(signal.SIGKILL, timeout_seconds=_STOP_SECONDS)

    def pause(self, node: int = 1) -> None:
        """Freeze one broker, and return when it stands still: its connections stay open and nothing answers."""
        self._process(node).freeze()

    def resume(self, node: int = 1) -> None:
        """Let a paused broker go on."""
        self._process(node).send(signal.SIGCONT)

    def restart(self, node: int = 1) -> None:
        """Start one broker again with its data and port; stop it first if it runs."""
        self._node(node)
        self.stop(node)
        self._launch(node)
        self._wait_for([node])

    def close(self) -> None:
        """End all brokers and delete the temporary directory; may be called again."""
        if self._given_directory is not None:
            self.stop()
            return
        # Nobody will read this data again: no need for good order.
        for process in self._processes.values():
            process.end(signal.SIGKILL, timeout_seconds=_STOP_SECONDS)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory, self._nodes, self._processes = None, {}, {}

    def _launch(self, node: int) -> None:
        if not self.is_running(node):
            remove = self._directory if self._given_directory is None else None
            self._processes[node] = broker.run(self._nodes[node], remove=remove)

    def _wait_for(self, nodes: list[int]) -> None:
        deadline = time.monotonic() + _START_SECONDS

        def wait(node: int, is_up: Callable[[], bool]) -> None:
            name = f"Kafka broker {node}"
            self._processes[node].come_up(name, is_up, deadline=deadline, poll_seconds=_POLL_SECONDS)

        def knows_all(node: broker.Node) -> bool:
            with AdminClient({"bootstrap.servers": f"127.0.0.1:{node.port}", "log_level": 0}) as client:
                try:
                    found = client.list_topics(timeout=10)
                except KafkaException:
                    return False
            # Another process may have taken the port meanwhile: ours ends then, and its broker is not to be used.
            return set(nodes) <= found.brokers.keys() and found.cluster_id == broker.cluster_id_of(node)

        # A broker accepts connections before it knows the others.
        for node in nodes:
            wait(node, partial(accepts, self._nodes[node].port))
        for node in nodes:
            wait(node, partial(knows_all, self._nodes[node]))

    def _node(self, node: int) -> broker.Node:
        if node not in self._nodes:
            raise OptionError(f"no broker {node!r}; there are {sorted(self._nodes)}")
        return self._nodes[node]

    def _process(self, node: int) -> ServerProcess:
        self._node(node)
        return self._processes[node]
