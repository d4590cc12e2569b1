"""A driver in a process of its own, to be killed and frozen: writes a topic into the journal and prints how it goes.

    python -m tests.spark.driver BOOTSTRAP CONNINFO TOPIC PLACE TRANSACTION [after-commit]

With ``after-commit`` it stands still behind its first batch, before Spark hears that it was written.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from pyspark.sql import DataFrame

from exactly_once.embedded import spark
from tests.spark.scene import Scene


def main(*arguments: str) -> None:
    """Run one query to its end."""
    bootstrap_servers, conninfo, topic, place, transaction, *moment = arguments
    with spark.session("driver") as session:
        scene = Scene(session, bootstrap_servers, conninfo, Path(place), topic=topic)
        sink = scene.sink(transaction=transaction)

        def write(frame: DataFrame, batch_id: int) -> None:
            print("writing", batch_id)
            try:
                sink(frame, batch_id)
            except Exception as error:
                print("failed", type(error).__name__, str(error).replace("\n", " "))
                raise
            print("written", batch_id)
            if moment == ["after-commit"]:
                threading.Event().wait()

        scene.run(write)


if __name__ == "__main__":
    main(*sys.argv[1:])
