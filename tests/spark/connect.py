"""Both sides of Spark Connect, each in a process of its own: a server, and a query of a client without a JVM.

    python -m tests.spark.connect serve PORT
    python -m tests.spark.connect run PORT BOOTSTRAP CONNINFO TOPIC DIRECTORY [OPTION=VALUE ...]

The query reads the topic in two batches or more, is started again, and has its last batch replayed. With the option
`other` another one is given its checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

import tenacity
from pyspark.sql import SparkSession

from exactly_once.embedded import spark
from tests.spark.scene import Scene
from tests.support.waiting import SPARK_SECONDS

# A server gives the Python that it starts for a query ten seconds, whatever else the machine does: it goes before the
# tests beside it where that is allowed (Unix: the lower the number, the more of the processor), and is asked again.
PRIORITY = -15
patiently = tenacity.retry(
    retry=tenacity.retry_if_exception_message(match=r"(?s).*Python worker failed to connect back"),
    stop=tenacity.stop_after_delay(SPARK_SECONDS / 2),
    reraise=True,
)
SETTINGS = {
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.address": "127.0.0.1",
}


def serve(port: str) -> None:
    """Be a server until killed."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)  # what it starts has it, too
    with spark.session("server", settings=SETTINGS | {"spark.connect.grpc.binding.port": port}):
        print("serving")
        threading.Event().wait()


def run(port: str, bootstrap_servers: str, conninfo: str, topic: str, directory: str, *said: str) -> None:
    """Run the query of a client."""
    session = SparkSession.builder.remote(f"sc://127.0.0.1:{port}").getOrCreate()
    scene = Scene(session, bootstrap_servers, conninfo, Path(directory), topic=topic)
    pairs = (option.partition("=") for option in said if option != "other")
    options = {key: int(value) if value.isdecimal() else value or None for key, _, value in pairs}
    # A function of ours would be looked for by the server's own Python.
    sink = scene.sink(on_report=None, **options)
    patiently(scene.run)(sink, per_trigger=600)
    if "other" in said:  # of a query that has ended, over the same topic
        other = scene.checkpoint.rename(scene.checkpoint.with_name("other"))
        patiently(scene.run)(scene.sink(on_report=None, group_id=f"{topic}-2", checkpoint_location=str(other)))
    scene.forget_last_commit()
    patiently(scene.run)(sink)


if __name__ == "__main__":
    side, *arguments = sys.argv[1:]
    (serve if side == "serve" else run)(*arguments)
