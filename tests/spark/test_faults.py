"""Faults on a real Spark: killed tasks, workers and drivers, upstreams that fail, zombies. The table is the topic."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pyspark.sql import functions as F  # noqa: N812

import spark_sink.run as driver_side
from spark_sink.ranges import OFFSET
from tests.spark.scene import JOURNAL, Scene
from tests.support.spark import Driver
from tests.support.waiting import SPARK_SECONDS, until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_sink import SinkUnit
    from spark_sink.options import Transaction

both = pytest.mark.parametrize("transaction", ["batch", "partition"])


@pytest.mark.fault("F3")
@both
def test_a_worker_that_dies_after_its_commit_is_tried_again_and_writes_nothing_twice(
    scene: Scene, transaction: Transaction
) -> None:
    """F3: a task is run again."""

    def die_once(unit: SinkUnit) -> None:
        from pyspark import TaskContext  # noqa: PLC0415

        from exactly_once import _failpoints  # noqa: PLC0415

        _failpoints.disarm()
        if TaskContext.get().attemptNumber() == 0:  # type: ignore[union-attr]
            _failpoints.arm("committed", lambda: os._exit(1))

    scene.produce(1000)
    scene.run(scene.sink(transaction=transaction, in_transaction=die_once))
    assert scene.ledger() == scene.ends()
    scene.check()


@both
def test_an_upstream_that_fails_in_the_middle_is_tried_again(scene: Scene, transaction: Transaction) -> None:
    """Several source tasks for each Kafka partition, each failing behind its first rows."""

    def fail_once(batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import TaskContext  # noqa: PLC0415

        for batch in batches:
            yield batch.slice(0, 10)
            if TaskContext.get().attemptNumber() == 0:  # type: ignore[union-attr]
                raise RuntimeError("the upstream fails")
            yield batch.slice(10)

    def change(frame: DataFrame) -> DataFrame:
        return frame.mapInArrow(fail_once, frame.schema)

    scene.produce(1000)
    scene.run(scene.sink(transaction=transaction), change=change, minPartitions="6")
    scene.check()


@both
def test_input_that_breaks_off_inside_the_writing_stage_is_not_taken_for_its_end(
    scene: Scene, transaction: Transaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether Python sees a broken pipe or an end in good order differs between versions and moments of Spark."""

    def breaking(name: str, patch: pytest.MonkeyPatch) -> None:
        original: Callable[..., DataFrame] = getattr(driver_side, name)

        def broken(frame: DataFrame, *arguments: Any, **options: Any) -> DataFrame:
            # Not deterministic, so that it is not moved in front of shuffle and sort.
            broken_off = (F.col(OFFSET) == 700) & (F.rand() < 2)
            return original(frame, *arguments, **options).where(
                F.when(broken_off, F.raise_error(F.lit("broken off")).cast("boolean")).otherwise(F.lit(1) == 1)
            )

        patch.setattr(driver_side, name, broken)

    scene.produce(2000)
    with monkeypatch.context() as patch:
        patch.setattr("spark_sink.attempt.ROWS", 100)
        breaking("to_one_task", patch)
        breaking("to_tasks", patch)
        scene.spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
        with pytest.raises(Exception, match="broken off"):
            scene.run(scene.sink(transaction=transaction))
        scene.spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    if transaction == "batch":
        assert set(scene.ledger().values()) == {0}
    else:
        assert all(offset is not None and offset <= 700 for offset in scene.ledger().values()), "prefixes, or nothing"
    # Other splits than the first time.
    scene.spark.conf.set("spark.sql.shuffle.partitions", "7")
    scene.run(scene.sink(transaction=transaction), minPartitions="5")
    scene.spark.conf.set("spark.sql.shuffle.partitions", "2")
    assert scene.ledger() == scene.ends()
    scene.check()


@contextlib.contextmanager
def nobody_can_write(conninfo: str) -> Iterator[psycopg.Connection[Any]]:
    """Lock the journal; transactions of the sink stand still at their first row. Gives a connection to look with."""
    with psycopg.connect(conninfo) as locking, psycopg.connect(conninfo, autocommit=True) as looking:
        locking.execute(f"LOCK TABLE {JOURNAL} IN SHARE ROW EXCLUSIVE MODE")
        yield looking


def writers(connection: psycopg.Connection[Any]) -> list[int]:
    """The backends of the sink that stand still."""
    found = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'exactly_once:%' AND wait_event_type = 'Lock'"
    )
    return [pid for (pid,) in found]


@contextlib.contextmanager
def running(scene: Scene, **options: Any) -> Iterator[Any]:
    """Run the query in the background; leaving waits for its end."""
    writer = scene.stream().writeStream.foreachBatch(scene.sink(**options))
    query = writer.option("checkpointLocation", str(scene.checkpoint)).trigger(availableNow=True).start()
    try:
        yield query
        assert query.awaitTermination(SPARK_SECONDS)
    finally:
        query.stop()


OPEN = """
    SELECT pid FROM pg_stat_activity
    WHERE application_name LIKE 'exactly_once:%' AND state = 'idle in transaction' AND backend_xid IS NOT NULL
      AND state_change < clock_timestamp() - interval '1 second'
"""
"""The transactions of the sink that wait for rows."""


def kill_tasks(scene: Scene) -> int:
    """Kill the attempts that run now, as a cancelled or outrun one is."""
    context = scene.spark.sparkContext
    java: Any = context._jsc.sc()
    killed = 0
    interrupting = (True,)
    for stage in context.statusTracker().getActiveStageIds():
        tasks = java.statusStore().taskList(stage, 0, 100)
        for task in (tasks.apply(i) for i in range(tasks.size())):
            if task.status() == "RUNNING":
                killed += java.killTaskAttempt(task.taskId(), *interrupting, "killed by the test")
    return killed


SLOW = "exactly.once.test.slow"
"""A property of the JVM: while it is true, the sorted input of a task stands still at offset 7000."""


def standing_still(frame: DataFrame) -> DataFrame:
    """Let rows in front of the writing task stop for as long as the property says; it asks Java, so it stays there."""
    is_slow = f"java_method('java.lang.Boolean', 'getBoolean', '{SLOW}') = 'true'"
    sleeps = "java_method('java.lang.Thread', 'sleep', 600000L) IS NOT NULL"
    return frame.where(f"CASE WHEN __exactly_once_offset = 7000 AND {is_slow} THEN {sleeps} ELSE true END")


@both
def test_an_attempt_that_is_killed_between_its_rows_loses_nothing(
    scene: Scene, transaction: Transaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trap that lost 100,000 of 200,000 rows: Spark closes the pipe, and Python sees an end in good order."""
    for name in ("to_one_task", "to_tasks"):
        original: Callable[..., DataFrame] = getattr(driver_side, name)
        monkeypatch.setattr(
            driver_side, name, lambda f, *a, original=original, **o: standing_still(original(f, *a, **o))
        )
    java: Any = scene.spark._jvm
    monkeypatch.setattr("spark_sink.attempt.ROWS", 100)
    scene.spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    java.System.setProperty(SLOW, "true")
    scene.produce(20_000)  # more than what Spark collects before it sends anything
    try:
        with running(scene, transaction=transaction), psycopg.connect(scene.conninfo, autocommit=True) as looking:
            until(lambda: looking.execute(OPEN).fetchall(), SPARK_SECONDS, "a task with rows in its transaction")
            java.System.setProperty(SLOW, "false")
            # Spark writes down what runs a while after it has started it.
            until(lambda: kill_tasks(scene), SPARK_SECONDS, "attempts to kill")
    finally:
        java.System.setProperty(SLOW, "false")
        scene.spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert scene.ledger() == scene.ends()
    scene.check()


@both
def test_a_connection_that_is_lost_while_it_writes_fails_the_attempt_only(
    scene: Scene, transaction: Transaction
) -> None:
    """As where Postgres is restarted in the middle of a batch."""
    scene.produce(1000)
    with running(scene, transaction=transaction), nobody_can_write(scene.conninfo) as connection:
        for pid in until(lambda: writers(connection), SPARK_SECONDS, "a task that stands still in front of the table"):
            connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
    scene.check()


def driver(scene: Scene, place: Path, *arguments: str) -> Any:
    return Driver(
        "-m", "tests.spark.driver", scene.bootstrap_servers, scene.conninfo, scene.topic, str(place), *arguments
    )


@pytest.mark.fault("F1")
def test_a_driver_killed_after_the_commit_writes_the_batch_once(scene: Scene, tmp_path: Path) -> None:
    """F1: Spark has not heard of it, so the batch comes again."""
    scene.produce(1000)
    with driver(scene, tmp_path, "batch", "after-commit") as first:
        first.wait("written 0")
        first.kill(everything=True)
    scene.run()
    assert scene.reports[0].is_replay
    scene.check()


@pytest.mark.slow
@pytest.mark.fault("F2")
def test_a_driver_killed_while_it_writes_leaves_nothing_of_the_batch(scene: Scene, tmp_path: Path) -> None:
    """F2: the transaction goes with its connection."""
    scene.produce(1000)
    with driver(scene, tmp_path, "batch") as first, nobody_can_write(scene.conninfo) as connection:
        first.wait("writing 0")
        until(lambda: writers(connection), SPARK_SECONDS, "a task that stands still in front of the table")
        first.kill(everything=True)
    scene.run()
    assert [r.rows for r in scene.reports] == [1000]
    scene.check()


@pytest.mark.fault("A1", more=True)
def test_a_zombie_driver_is_fenced_by_its_successor(scene: Scene, tmp_path: Path) -> None:
    """It is frozen in the middle of its batch, another one takes over with a checkpoint of its own, it wakes up."""
    scene.produce(1000)
    with driver(scene, tmp_path / "zombie", "batch") as zombie:
        with nobody_can_write(scene.conninfo) as connection:
            zombie.wait("writing 0")
            until(lambda: writers(connection), SPARK_SECONDS, "a task that stands still in front of the table")
            zombie.stop()
        scene.run(per_trigger=600)
        zombie.cont()
        zombie.wait("failed")
        assert "Fenced" in zombie.logged() + "".join(zombie.lines)
    scene.check()
