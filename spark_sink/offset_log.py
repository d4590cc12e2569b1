"""Offset log: which offsets a micro-batch covers, read from the query's checkpoint.

Spark writes ``offsets/N`` before it calls ``foreachBatch`` with N, so the file holds the exact ends of the batch; the
starts are the ends of N-1, and for the first batch what ``sources/<i>/0`` says. Parsing is apart from
reading; through Hadoop's FileSystem the checkpoint may be on any storage that Spark can use.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlsplit

from exactly_once._log import about
from exactly_once._model import Partition
from exactly_once.errors import ConfigurationError

from .ranges import Range

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

GIVE = "give the sink what the query is given as option checkpointLocation"
# What the log says of a source that has given nothing so far.
_NOTHING_YET = "-"
# A longer name of a file is cut, since storages know 255 bytes; a digest comes behind it, and a suffix at first.
_NAME_BYTES = 150

# Returns the content of a file below the checkpoint, none of a directory, or None when there is no such thing.
Read = Callable[[str], "bytes | None"]
# Writes a file below the checkpoint, whole or not at all.
Write = Callable[[str, bytes], None]


class Failure(NamedTuple):
    """What a group has not written of a checkpoint, which Spark may count as done all the same."""

    batch_id: int
    """The first batch that failed."""
    error: str
    ends: dict[Partition, int]
    """Where the last batch ends that failed since."""
    is_counted: bool = False
    """Whether the ledger has the batch all the same: another frame of it was written."""


class Mark(NamedTuple):
    """What a group has written from a checkpoint, kept beside it: it stays when the database loses commits."""

    batch_id: int | None = None
    offsets: dict[Partition, int] = {}  # noqa: RUF012 - nobody changes it
    failure: Failure | None = None


class NotKafka(ConfigurationError):
    """A source whose offsets are not Kafka's."""

    is_beside_kafka = False
    """Whether those of another one are."""


class OffsetLog:
    """The checkpoint of one query, as far as offsets are concerned."""

    def __init__(self, location: str, read: Read, write: Write | None = None) -> None:
        self.location = location
        self._read = read
        self._write = write
        self._marks: dict[str, Mark] = {}
        # What is in the files of them, as far as this run has written it.
        self._stored: dict[str, Mark] = {}
        self._ends: tuple[int, dict[Partition, int]] | None = None

    def query_id(self) -> str:
        """Return the id of the query that the checkpoint belongs to."""
        text = self._read("metadata")
        if text is None:
            raise ConfigurationError(f"checkpoint_location={self.location!r} is no checkpoint of a query; {GIVE}")
        return str(json.loads(text)["id"])

    def refuse_done(self, batch_id: int) -> None:
        """Refuse the checkpoint of another query, which has done the batch that is being written."""
        if self._read(f"commits/{batch_id}") is not None:
            raise ConfigurationError(
                f"checkpoint_location={self.location!r} is of another query: it has batch {batch_id}, which is being "
                f"written, as done; {GIVE}"
            )

    def ranges(self, batch_id: int) -> list[Range]:
        """Return what a batch covers; starts that are written nowhere are None."""
        ends = self.ends(batch_id)
        if ends is None:
            raise ConfigurationError(
                f"checkpoint_location={self.location!r} has no offsets of batch {batch_id}, which is being written; "
                f"{GIVE}"
            )
        starts: dict[Partition, int] = {}
        if batch_id > 0:
            starts = self.ends(batch_id - 1) or {}
        else:
            for name in _sources(self._read("offsets/0") or b"", self.location):
                # Begins with a zero byte, for the sake of Spark 2.1, and a line of its version.
                starts |= _kafka_offsets((self._read(f"sources/{name}/0") or b"").decode().partition("\n")[2])
        self._ends = batch_id, ends
        return [Range(partition=p, start=starts.get(p), end=end) for p, end in sorted(ends.items())]

    def ends(self, batch_id: int) -> dict[Partition, int] | None:
        """Return where a batch ends; None if the log lacks it."""
        if self._ends is not None and self._ends[0] == batch_id:
            return self._ends[1]
        text = self._read(f"offsets/{batch_id}")
        return None if text is None else parse_offsets(text, self.location)

    def fingerprint(self, batch_id: int) -> str | None:
        """Return a digest of a batch, by which a replay is told from another batch of the same number.

        Kafka's offsets say what a batch holds. Those of another source may be no more than a number, as of files; Spark
        writes the entry of a batch once, and with it when that was.
        """
        text = self._read(f"offsets/{batch_id}")
        if text is None:
            return None
        ends = _sources(text, self.location).values()
        told = "\n".join(ends).encode() if all(map(_kafka_offsets, ends)) else text
        return hashlib.sha256(told).hexdigest()

    def mark(self, group_id: str) -> Mark:
        """Return what the group has written from this checkpoint."""
        if group_id not in self._marks:
            text = self._read(_mark_of(group_id))
            said = {} if text is None else json.loads(text)
            failed = said.get("failure")
            self._marks[group_id] = self._stored[group_id] = Mark(
                said.get("batch_id"),
                _kafka_offsets(json.dumps(said.get("offsets"))),
                failed and Failure(**{**failed, "ends": _kafka_offsets(json.dumps(failed["ends"]))}),
            )
        return self._marks[group_id]

    def forget(self, group_id: str) -> None:
        """Read what the group has written anew when it is asked for: another sink has written it down."""
        self._marks.pop(group_id, None)

    def note(self, group_id: str, batch_id: int, ends: Mapping[Partition, int]) -> None:
        """Write down that the group has written a batch, before Spark counts it as done."""
        before = self.mark(group_id)
        failure = before.failure
        if failure is not None and failure.batch_id <= batch_id:
            failure = None
        self._keep(group_id, Mark(batch_id, {**before.offsets, **ends}, failure))

    def note_failure(self, group_id: str, this: Failure) -> None:
        """Write down that a batch failed: Spark counts it as done where the user's function catches the error.

        An earlier one stays the first until it was written, or was found in the ledger.
        """
        known = self._marks.pop(group_id, Mark()).failure
        before = self.mark(group_id)  # another driver may have fenced this one, and written since
        other = before.failure or known or this
        together = {p: max(other.ends.get(p, 0), this.ends.get(p, 0)) for p in {*other.ends, *this.ends}}
        first = min(other, this, key=lambda failure: failure.batch_id)  # of one batch the first error
        is_counted = other.is_counted or this.is_counted
        self._keep(group_id, before._replace(failure=first._replace(ends=together, is_counted=is_counted)))

    def settle_failure(self, group_id: str, *, replace_by: Failure | None = None) -> None:
        """Forget a failure of which the ledger has all by now, or what of it was told."""
        self._keep(group_id, self.mark(group_id)._replace(failure=replace_by))

    def _keep(self, group_id: str, mark: Mark) -> None:
        self._marks[group_id] = mark  # for this run also where the storage fails
        if self._write is None or mark == self._stored.get(group_id):
            return
        failure = mark.failure
        failed = failure and {**failure._asdict(), "ends": _by_topic(failure.ends)}
        document = {"batch_id": mark.batch_id, "offsets": _by_topic(mark.offsets), "failure": failed}
        self._write(_mark_of(group_id), json.dumps(document).encode())
        self._stored[group_id] = mark

    def stateful(self) -> list[str]:
        """Return the query's operators that have a state; before Spark 4.0 they are not known until it is written."""
        names = []
        for number in itertools.count():
            text = self._read(f"state/{number}/_metadata/metadata")
            if text is None and self._read(f"state/{number}") is None:
                break
            # Behind a line of its version.
            document = None if text is None else json.loads(text.decode().partition("\n")[2])
            names.append(
                "an operator without metadata" if document is None else str(document["operatorInfo"]["operatorName"])
            )
        return names


def parse_offsets(text: bytes, location: str) -> dict[Partition, int]:
    """Read the ends of all Kafka sources from a file of the offset log."""
    found: dict[Partition, int] = {}
    lines = _sources(text, location).values()
    for line in lines:
        offsets = _kafka_offsets(line)
        if not offsets and line != _NOTHING_YET:
            error = NotKafka(
                f"the query has a source whose offsets are not Kafka's ({line[:60]}), so nobody can tell which of its "
                "rows were written; say ledger='batch-id'"
            )
            error.is_beside_kafka = any(map(_kafka_offsets, lines))
            raise error
        if twice := found.keys() & offsets.keys():
            raise ConfigurationError(
                f"two sources of the query read {min(twice)}; its rows come twice, so offsets cannot tell which were "
                "written. Read the topic once"
            )
        found |= offsets
    return found


def _by_topic(offsets: Mapping[Partition, int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for partition, offset in sorted(offsets.items()):
        found.setdefault(partition.topic, {})[str(partition.number)] = offset
    return found


def _mark_of(group_id: str) -> str:
    name = quote(group_id, safe="")
    if len(name) > _NAME_BYTES:
        name = f"{name[:_NAME_BYTES]}-{hashlib.sha256(group_id.encode()).hexdigest()}"
    # "." and ".." are directories.
    return f"exactly_once/{name.replace('.', '%2E') if not name.strip('.') else name}"


def _sources(text: bytes, location: str) -> dict[str, str]:
    """Return what a file of the offset log says of each source, by its name: after a version and the batch's settings.

    A source that was given no name is called by its number; v2, which Spark 4.2 writes if told to, writes names down.
    """
    if not text:
        return {}
    version, *rest = text.decode().splitlines()
    lines = rest[1:]
    if version.strip() == "v1":
        return {str(number): line for number, line in enumerate(lines)}
    if version.strip() == "v2":
        return {name: offsets for name, _, offsets in (line.partition(":") for line in lines)}
    raise ConfigurationError(
        f"the offset log in {location!r} has format {version[:20]!r}, this release knows v1 and v2; "
        "leave checkpoint_location= out to go without it"
    )


def _kafka_offsets(line: str) -> dict[Partition, int]:
    """Return the offsets of one source; none if it is not Kafka."""
    try:
        said: Any = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(said, Mapping):
        return {}
    return {
        Partition(topic, int(number)): offset
        for topic, numbers in said.items()
        if isinstance(numbers, Mapping)
        for number, offset in numbers.items()
        if number.isdigit() and isinstance(offset, int)
    }


def reader(location: str, spark: SparkSession) -> _Disk | _Hadoop:
    """Return how to read, and to write, below ``location``: on this machine's disk, or through Hadoop's FileSystem."""
    jvm = getattr(spark, "_jvm", None) if hasattr(spark, "_jsparkSession") else None
    if jvm is not None:
        configuration = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001 - pyspark has no public way
        root = jvm.org.apache.hadoop.fs.Path(location)
        files = root.getFileSystem(configuration)
        if files.getUri().getScheme() != "file":
            return _Hadoop(root, files, jvm)
        # Each question to the JVM is a round trip, and this is asked for every batch.
        return _Disk(Path(files.makeQualified(root).toUri().getPath()))
    if (disk := _disk(location)) is None:
        raise ConfigurationError(
            f"checkpoint_location={location!r} cannot be read over Spark Connect, which gives no access to "
            f"{urlsplit(location).scheme}; leave it out, or run the query where the driver is"
        )
    return disk


def on_disk(location: str | None, query_id: str, *, warns: bool) -> OffsetLog | None:
    """Open a query's checkpoint where there is no session; None if it is not on this machine's disk."""
    if location is not None and (disk := _disk(location)) is not None:
        log = OffsetLog(location, disk)
        with contextlib.suppress(ConfigurationError):
            if log.query_id() == query_id:
                return log
    if warns:
        logger.warning(
            "query %s: its checkpoint %s, from which the data source learns what a batch covers, is not on this "
            "machine's disk; so a ledger that was set back while the query stood still goes unnoticed, and rows that "
            "it has lost are missing. foreachBatch reads a checkpoint from any storage",
            query_id,
            location or "(no option checkpointLocation)",
            extra=about("checkpoint_unread"),
        )
    return None


def _disk(location: str) -> _Disk | None:
    place = urlsplit(location)
    return _Disk(Path(place.path)) if place.scheme in ("", "file") else None


class _Disk:
    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, name: str) -> bytes | None:
        path = self._root / name
        if path.is_dir():
            return b""
        return path.read_bytes() if path.exists() else None

    def write(self, name: str, content: bytes) -> None:
        path = self._root / name
        path.parent.mkdir(exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)


class _Hadoop:
    """Files wherever Spark can have its checkpoint."""

    def __init__(self, root: Any, files: Any, jvm: Any) -> None:
        self._root, self._files, self._jvm = root, files, jvm

    def __call__(self, name: str) -> bytes | None:
        path = self._jvm.org.apache.hadoop.fs.Path(self._root, name)
        if not self._files.exists(path):
            return None
        if self._files.getFileStatus(path).isDirectory():
            return b""
        stream = self._files.open(path)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def write(self, name: str, content: bytes) -> None:
        # Not by a rename, which object stores have not; a file that is closed early is found incomplete, and told.
        stream = self._files.create(self._jvm.org.apache.hadoop.fs.Path(self._root, name), True)  # noqa: FBT003
        try:
            stream.write(bytearray(content))
        finally:
            stream.close()
