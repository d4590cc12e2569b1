"""A driver in a process of its own, to be killed and frozen: writes a topic into the journal by the data source.

python -m tests.spark.source_driver BOOTSTRAP CONNINFO TOPIC PLACE
"""

from __future__ import annotations

import sys
from pathlib import Path

from exactly_once.embedded import spark
from tests.spark.scene import Scene
from tests.spark.source import write_stream


def main(*arguments: str) -> None:
    """Run one query to its end."""
    bootstrap_servers, conninfo, topic, place = arguments
    with spark.session("driver") as session:
        scene = Scene(session, bootstrap_servers, conninfo, Path(place), topic=topic)
        try:
            write_stream(scene)
        except Exception as error:
            print("failed", str(error).replace("\n", " "))
            raise
        print("ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
