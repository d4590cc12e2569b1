"""Spark in tests: streams of a topic, and drivers in processes of their own to be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from pyspark.sql import DataFrame, SparkSession

from exactly_once.embedded.process import freeze
from tests.support.waiting import SPARK_SECONDS, until

ROOT = Path(__file__).resolve().parents[2]


def read_topic(session: SparkSession, bootstrap_servers: str, topic: str, **options: str) -> DataFrame:
    """Return the stream of a topic, or of several with commas between, from the start unless `options` say otherwise.

    `options` are those of the Kafka source, such as ``startingOffsets`` and ``maxOffsetsPerTrigger``.
    """
    chosen = {
        "kafka.bootstrap.servers": bootstrap_servers,
        "subscribe": topic,
        "startingOffsets": "earliest",
        **options,
    }
    return session.readStream.format("kafka").options(**chosen).load()


def drain(frame: DataFrame, sink: Callable[[DataFrame, int], None], checkpoint: Path, **options: str) -> Any:
    """Run a query over what is there now, and return it when it has ended; its error is raised.

    `options` are those of the writer.
    """
    writer = frame.writeStream.foreachBatch(sink).options(checkpointLocation=str(checkpoint), **options)
    return run_out(writer)


def run_out(writer: Any) -> Any:
    """Start what a stream is written with over what is there now, and return the query when it has ended."""
    query = writer.trigger(availableNow=True).start()
    try:
        if not query.awaitTermination(SPARK_SECONDS):
            raise AssertionError(f"the query did not end: {query.status}")
    finally:
        query.stop()
    return query


class Driver:
    """A Spark driver in a process of its own, with what it printed, and everything that it started.

    ``Driver("-m", "tests.spark.some_driver", argument)``; use it in a ``with`` statement.
    """

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._has_said_all = False
        self._log = tempfile.NamedTemporaryFile("w+", prefix="driver-")  # noqa: SIM115  (open as long as it writes)
        # The session is what its Java and its Python workers have in common with it, also when it is dead.
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id of the Python driver."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll()

    def wait(self, text: str, timeout_seconds: float = SPARK_SECONDS, *, count: int = 1) -> str:
        """Return the `count`-th line that holds `text`."""
        deadline = time.monotonic() + timeout_seconds
        with self._news:
            while True:
                found = [line for line in self.lines if text in line]
                if len(found) >= count:
                    return found[count - 1]
                ended = self._has_said_all
                if ended or not self._news.wait(max(0.0, deadline - time.monotonic())):
                    why = f"it ended with status {self.status}" if ended else f"{timeout_seconds:g} s passed"
                    raise AssertionError(f"no line with {text!r} from the driver: {why}\n{self.story()}")

    def wait_ended(self, timeout_seconds: float = SPARK_SECONDS) -> int:
        """Return its exit status when it and all that it started are gone, and what they printed is read."""
        status = self._process.wait(timeout_seconds)
        self._wait_gone(timeout_seconds)
        self._reader.join(timeout_seconds)
        assert not self._reader.is_alive(), self.story()
        return status

    def kill(self, *, everything: bool = False) -> None:
        """Kill the driver as ``kill -9`` does, and with `everything` its Java in the same moment; wait for their end.

        Java ends by itself when its driver is gone, but may first finish what it was at.
        """
        for pid in self._pids() if everything else [self.pid]:
            self._signal(pid, signal.SIGKILL)
        self._process.wait(120)
        self._wait_gone(120)
        self._reader.join(60)

    def stop(self) -> None:
        """Freeze the driver, its Java and its workers, and return when all stand still."""
        frozen = set[int]()
        while started := set(self._pids()) - frozen:  # what was started by one that still ran
            for pid in started:
                freeze(pid)
            frozen |= started

    def cont(self) -> None:
        """Let them go on."""
        for pid in self._pids():
            self._signal(pid, signal.SIGCONT)

    def close(self) -> None:
        """End all of it."""
        for pid in self._pids():
            self._signal(pid, signal.SIGKILL)
        self._process.wait(120)
        self._wait_gone(120)
        self._reader.join(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def logged(self) -> str:
        """Return all that it and its Java and Python workers have logged."""
        return Path(self._log.name).read_text(errors="replace")

    def story(self) -> str:
        """Return the end of what it printed and logged, for whoever reads of a test that failed."""
        return "\n".join(["-- printed", *self.lines[-40:], "-- logged", *self.logged().splitlines()[-60:]])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._has_said_all = True
            self._news.notify_all()

    def _pids(self) -> list[int]:
        """Return the processes of its session, zombies left out."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                pid, rest = stat.parent.name, stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if rest[3] == str(self.pid) and rest[0] != "Z":
                found.append(int(pid))
        return found

    def _wait_gone(self, timeout_seconds: float) -> None:
        until(lambda: not self._pids(), timeout_seconds, f"the end of all that driver {self.pid} started")

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
