"""A topic, a journal to write it into, and queries that do: what the tests of the sink begin with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_sink import BatchReport, PostgresSink
from tests.support import journal
from tests.support.spark import drain, read_topic
from tests.support.topics import add_partitions, create_topic, produce

Change = Callable[[DataFrame], DataFrame]
Sink = Callable[[DataFrame, int], None]

JOURNAL = "journal.entries"
# Options of the sink for each of its ways to write.
MODES: dict[str, dict[str, Any]] = {
    "batch": {},
    "small": {"small_batch": 1000},
    "partition": {"transaction": "partition"},
    "batch-id": {"ledger": "batch-id"},
}
each_mode = pytest.mark.parametrize("options", MODES.values(), ids=MODES)


class Scene:
    """One topic and the group that writes it, named like the topic."""

    def __init__(
        self,
        spark: SparkSession,
        bootstrap_servers: str,
        conninfo: str,
        place: Path,
        *,
        partitions: int = 2,
        topic: str | None = None,
    ) -> None:
        self.spark = spark
        self.bootstrap_servers = bootstrap_servers
        self.conninfo = conninfo
        self.partitions = partitions
        self.topic = topic or create_topic(bootstrap_servers, partitions)
        self.checkpoint = place / "checkpoint"
        self.produced = 0
        self.reports: list[BatchReport] = []

    def produce(self, count: int) -> None:
        """Add messages, over the partitions in turn."""
        produce(self.bootstrap_servers, self.topic, count, self.partitions, start=self.produced)
        self.produced += count

    def add_partition(self) -> None:
        """Give the topic one more partition; further messages go to it as well."""
        self.partitions += 1
        add_partitions(self.bootstrap_servers, self.topic, self.partitions)

    def delete_records_below(self, offset: int) -> None:
        """Remove the beginning of each log, as retention does."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        ends = [TopicPartition(self.topic, number, offset) for number in range(self.partitions)]
        for future in admin.delete_records(ends).values():
            future.result(30)

    def sink(self, **options: Any) -> PostgresSink:
        """Make a sink into the journal."""
        chosen = {
            "table": JOURNAL,
            "group_id": self.topic,
            "checkpoint_location": None if hasattr(self.spark, "_jsparkSession") else str(self.checkpoint),
            "on_report": self.reports.append,
            "small_batch": 0,  # what a task does is what is tested
            **options,
        }
        return PostgresSink(self.conninfo, **chosen)

    def stream(self, change: Change = lambda frame: frame, **options: str) -> DataFrame:
        """Read the topic as rows of the journal."""
        frame = change(read_topic(self.spark, self.bootstrap_servers, self.topic, **options))
        return frame.select("topic", "partition", "offset", "value", F.lit("spark").alias("worker"))

    def run(
        self,
        sink: Sink | None = None,
        *,
        change: Change = lambda frame: frame,
        per_trigger: int | None = None,
        **options: str,
    ) -> None:
        """Run a query until it has read what is there, `per_trigger` offsets in a batch; its error is raised."""
        if per_trigger is not None:
            options["maxOffsetsPerTrigger"] = str(per_trigger)
        drain(self.stream(change, **options), sink or self.sink(), self.checkpoint)

    def forget_last_commit(self) -> int:
        """Delete the newest entry of Spark's commit log, so that its batch comes again; return which it was."""
        last = max(int(path.name) for path in (self.checkpoint / "commits").iterdir() if path.name.isdigit())
        (self.checkpoint / "commits" / str(last)).unlink()
        (self.checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)
        return last

    def lose_checkpoint(self) -> None:
        """Delete all of it."""
        shutil.rmtree(self.checkpoint)

    def check(self) -> None:
        """See that the journal is the topic, neither more nor less."""
        verdict = journal.check(self.conninfo, self.bootstrap_servers, self.topic, counts=False)
        assert verdict.messages == self.produced
        assert verdict.exact, str(verdict)

    def ledger(self) -> dict[int, int | None]:
        """Return where the ledger stands, by partition."""
        with psycopg.connect(self.conninfo) as connection:
            rows = connection.execute(
                "SELECT partition, next_offset FROM exactly_once.ledger WHERE group_id = %s AND topic = %s",
                (self.topic, self.topic),
            )
            return dict(rows.fetchall())

    def ends(self) -> dict[int, int]:
        """Return where the ledger has to stand when everything was written."""
        return {n: len(range(n, self.produced, self.partitions)) for n in range(self.partitions)}
