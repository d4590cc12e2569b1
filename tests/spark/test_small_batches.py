"""Small batches, which the driver writes: where it cannot, a task does, and nobody has to say small_batch=0."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import spark_sink.run as driver_side
from exactly_once.embedded.proxy import ADVANCE_AND_COMMIT, PostgresProxy
from tests.spark.scene import Scene
from tests.support.spark import drain, read_topic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spark_sink import SinkUnit

LIMIT = "spark.driver.maxResultSize"


@pytest.fixture
def narrow_driver(scene: Scene) -> Iterator[None]:
    """A driver that takes a megabyte: a stand-in for its gigabyte, which a thousand large messages exceed as well."""
    conf = scene.spark.sparkContext._jsc.sc().conf()
    before = conf.get(LIMIT, "1g")
    conf.set(LIMIT, "1m")
    yield
    conf.set(LIMIT, before)


@pytest.mark.usefixtures("narrow_driver")
def test_rows_that_are_too_large_for_the_driver_are_written_by_a_task(
    scene: Scene, name: str, db: psycopg.Connection[Any]
) -> None:
    db.execute(f'CREATE TABLE {name} (topic text, partition int, "offset" bigint, padding text)')
    scene.produce(100)
    topic = read_topic(scene.spark, scene.bootstrap_servers, scene.topic)
    frame = topic.selectExpr("topic", "partition", "offset", "repeat('x', 40000) AS padding")
    drain(frame, scene.sink(table=name, small_batch=1000), scene.checkpoint)
    assert db.execute(f"SELECT count(*), min(length(padding)) FROM {name}").fetchone() == (100, 40000)
    assert scene.ledger() == scene.ends()
    db.execute(f"DROP TABLE {name}")


@pytest.fixture
def by_driver(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches that the driver has written; a limit of a byte stands in for sixteen million of them."""
    monkeypatch.setattr(driver_side, "SMALL_BYTES", 1)
    here = getattr(driver_side, "write_here")  # noqa: B009 - a name that it imports
    by_driver: list[int] = []

    def noted(work: Any, *arguments: Any) -> Any:
        by_driver.append(work.batch_id)
        return here(work, *arguments)

    monkeypatch.setattr(driver_side, "write_here", noted)
    return by_driver


def test_what_was_large_in_the_batch_before_is_left_to_a_task(scene: Scene, by_driver: list[int]) -> None:
    scene.produce(30)
    scene.run(scene.sink(small_batch=1000), per_trigger=10)
    assert by_driver == [0]
    scene.check()


def test_a_batch_of_events_that_came_before_says_nothing_of_how_large_rows_are(
    scene: Scene, by_driver: list[int]
) -> None:
    """It writes none; what the batch before it has shown still holds."""
    sink = scene.sink(small_batch=1000, claim="event")
    scene.produce(30)
    scene.run(lambda frame, batch_id: sink(frame.selectExpr("*", "offset % 5 AS event"), batch_id), per_trigger=10)
    assert [report.rows for report in scene.reports] == [5, 0, 0]
    assert by_driver == [0]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_connection_that_is_lost_at_the_commit_does_not_end_the_query(scene: Scene, moment: str) -> None:
    """As it does not where a task writes, which Spark runs again."""
    scene.produce(100)
    with PostgresProxy(scene.conninfo) as proxy:
        fault = proxy.cut_after(ADVANCE_AND_COMMIT) if moment == "after" else proxy.cut_before(ADVANCE_AND_COMMIT)
        before, scene.conninfo = scene.conninfo, proxy.conninfo
        sink = scene.sink(small_batch=1000)
        scene.conninfo = before
        scene.run(sink)
        fault.wait()
    scene.check()
    assert scene.ledger() == scene.ends()


def test_an_also_that_ends_its_process_fails_the_batch(scene: Scene) -> None:
    """On the driver it would end the thread that Java waits for; a worker that is gone is run again, and fails."""

    def leave(_: SinkUnit) -> None:
        sys.exit(3)

    scene.produce(10)
    with pytest.raises(Exception, match=r"in_transaction= called sys\.exit\(3\)"):
        scene.run(scene.sink(small_batch=1000, in_transaction=leave))
    assert set(scene.ledger().values()) == {0}
    scene.run(scene.sink(small_batch=1000))
    scene.check()
