"""A group goes from the plain consumer to Spark and back, by the command: no gap, no duplicate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from exactly_once import ExactlyOnceConsumer, OwnedBySpark
from exactly_once.cli import main
from tests.conftest import MakeConsumer
from tests.support.worker import drain as consume

if TYPE_CHECKING:
    from tests.spark.scene import Scene

HandOver = Callable[..., dict[str, Any]]


@pytest.fixture
def hand_over(scene: Scene, capsys: pytest.CaptureFixture[str]) -> HandOver:
    """Run the command on the scene's group, and return its document."""

    def run(to: str, *more: str) -> dict[str, Any]:
        capsys.readouterr()
        where = ["--conninfo", scene.conninfo, "--bootstrap-servers", scene.bootstrap_servers]
        assert main(["hand-over", "--to", to, "--group-id", scene.topic, "--json", *more, *where]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def test_consumer_to_spark_and_back_leaves_no_gap_and_no_duplicate(
    scene: Scene, make_consumer: MakeConsumer, hand_over: HandOver
) -> None:
    def consumer() -> ExactlyOnceConsumer:
        made = make_consumer({"group.id": scene.topic}, conninfo=scene.conninfo)
        made.subscribe([scene.topic])
        return made

    scene.produce(100)
    first = consumer()
    assert consume(first, counts=False) == 100

    # The consumer lives and owns: Spark is refused, and told what to do.
    scene.produce(40)
    with pytest.raises(Exception, match=r"OwnedByConsumer(.|\n)*exactly-once hand-over --group-id \S+ --to spark"):
        scene.run()
    assert hand_over("spark")["starting_offsets"] is None
    first.close()
    starts = hand_over("spark")["starting_offsets"]
    assert starts == {scene.topic: {"0": 50, "1": 50}}
    scene.lose_checkpoint()
    scene.run(startingOffsets=json.dumps(starts))
    assert [(r.rows, r.dropped) for r in scene.reports] == [(40, 0)]

    # The query ended as if killed, without a release: the consumer is refused until somebody has decided.
    scene.produce(60)
    with consumer() as refused, pytest.raises(OwnedBySpark, match=r"hand-over --group-id \S+ --to consumer"):
        consume(refused, counts=False)
    assert all(p["in_the_way"] for p in hand_over("consumer", "--execute")["partitions"])
    second = consumer()
    assert consume(second, counts=False) == 60
    second.close()

    # And to Spark again with the checkpoint that it had: what the consumer has applied is dropped.
    scene.produce(10)
    scene.run()
    scene.check()
    with psycopg.connect(scene.conninfo) as connection:
        query = "SELECT worker = 'spark', count(*) FROM journal.entries WHERE topic = %s GROUP BY 1 ORDER BY 1"
        assert connection.execute(query, (scene.topic,)).fetchall() == [(False, 160), (True, 50)]
