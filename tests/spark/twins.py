"""A driver whose tasks are run twice at once: an attempt that has copied its rows stands still until all may go on.

    python -m tests.spark.twins MASTER BOOTSTRAP CONNINFO TOPIC DIRECTORY TRANSACTION

Attempts leave a file with the address of their worker in ``DIRECTORY/attempts``, called like their task and their
number (``0-1``); they go on when there is one called ``go``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from exactly_once.embedded import spark
from tests.spark.scene import Scene
from tests.spark.standalone import SETTINGS
from tests.support.waiting import SPARK_SECONDS, until

if TYPE_CHECKING:
    from spark_sink import SinkUnit

ATTEMPTS, GO = "attempts", "go"
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    # Also where nothing else runs that a task could be compared with.
    "spark.speculation.task.duration.threshold": "2s",
    "spark.speculation.efficiency.enabled": "false",
    # One for each twin, and one for an attempt that begins when both have failed.
    "spark.task.maxFailures": "3",
}


class Standstill:
    """What ``in_transaction=`` calls."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __call__(self, _: SinkUnit) -> None:
        from pyspark import TaskContext  # noqa: PLC0415

        task = TaskContext.get()
        assert task is not None
        file = self.place / f"{task.partitionId()}-{task.attemptNumber()}"
        half = file.with_suffix(".half")
        half.write_text(os.environ["SPARK_LOCAL_IP"])
        half.rename(file)
        until((self.place / GO).exists, 2 * SPARK_SECONDS, "leave to go on")


def main(*arguments: str) -> None:
    """Run one query to its end."""
    master, bootstrap_servers, conninfo, topic, directory, transaction = arguments
    place = Path(directory, ATTEMPTS)
    place.mkdir(exist_ok=True)  # a second driver finds its predecessor's
    with spark.session("twins", master=master, settings=SETTINGS | SPECULATION) as session:
        scene = Scene(session, bootstrap_servers, conninfo, Path(directory), topic=topic)
        try:
            scene.run(scene.sink(transaction=transaction, in_transaction=Standstill(place), patience_seconds=10))
        except Exception as error:
            print("failed", str(error).replace("\n", " "))  # nobody can tell what it says once Spark has ended
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
