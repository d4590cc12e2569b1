"""A standalone Spark on this machine: a master, and two workers on loopback addresses of their own.

    python -m tests.spark.standalone MASTER_PORT DIRECTORY POSTGRES_PORT POSTGRES_PORT

Speculation runs a task twice only on different hosts, which is why `local` and `local-cluster` never do. Each worker
has a Postgres of its own in PGPORT, which may be a proxy. It all runs until it is killed, with the session it is in.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from exactly_once.embedded import spark
from exactly_once.embedded.errors import package_directory
from exactly_once.embedded.ports import accepts
from tests.support.spark import ROOT
from tests.support.waiting import SPARK_SECONDS, until

HOSTS = ("127.0.0.2", "127.0.0.3")
CORES = 2
MEGABYTES = 600
SETTINGS = {
    "spark.cores.max": str(CORES * len(HOSTS)),
    "spark.executor.cores": str(CORES),
    "spark.executor.memory": f"{MEGABYTES}m",
    "spark.locality.wait": "0",
    # The first task waits for both workers.
    "spark.scheduler.minRegisteredResourcesRatio": "1",
}
"""What a driver on this cluster says."""


def main(port: str, directory: str, *postgres_ports: str) -> None:
    """Start all of it and wait."""
    master = start("master.Master", "127.0.0.1", "--port", port)
    until(lambda: accepts(int(port)), SPARK_SECONDS, "the master")
    for host, postgres_port in zip(HOSTS, postgres_ports, strict=True):
        resources = ["--cores", str(CORES), "--memory", f"{MEGABYTES}m", "--work-dir", str(Path(directory, host))]
        start("worker.Worker", host, *resources, f"spark://127.0.0.1:{port}", PGHOST="127.0.0.1", PGPORT=postgres_port)
    master.wait()


def start(name: str, host: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start one process on an address; its log goes to where ours is read."""
    home = package_directory("pyspark")
    where = ["--host", host, "--webui-port", "0"]
    return subprocess.Popen(
        [home / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", *where, *arguments],
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            **spark.environment(),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": host,
            **environment,
        },
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
