"""Crew of the sink command: several worker processes; one that dies is replaced, an error ends them all."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType

from .sink_flows import Task
from .sink_progress import Counts, Every, Progress
from .sink_worker import work_alone

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
# How long workers may take to stop, besides what the unit in hand is given: to close their clients and connections.
_CLOSE_SECONDS = 15.0
_KILLED = 128 + signal.SIGKILL


class Crew:
    """Keeps the workers running until they are done, one fails, or a signal comes; says how all of them do."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._context = multiprocessing.get_context("spawn")
        # The last that each worker has sent; of those that are gone, too.
        self._counts: dict[Connection, Counts] = {}
        self._workers: list[SpawnProcess] = []
        self._kill_at: float | None = None

    def run(self) -> int:
        """Watch until all are gone; return the exit code."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        progress = Progress(self._sum, is_live=self._task.is_live)
        code = 0
        try:
            with Every(progress.seconds, progress.tell):
                self._workers = [self._start() for _ in range(self._task.run.workers)]
                while self._workers:
                    code = max(code, self._watched())
                self._receive()  # what the last ones have sent before they ended
            progress.end()
        finally:
            for worker in self._workers:
                worker.terminate()
            for number, handler in before.items():
                signal.signal(number, handler)
        return code

    def _watched(self) -> int:
        """Wait for something to happen; return the exit code of a worker that is to be that of the crew."""
        wait([*(w.sentinel for w in self._workers), *self._open()], timeout=_PAUSE_SECONDS)
        self._receive()
        code = 0
        for worker in [w for w in self._workers if not w.is_alive()]:
            self._workers.remove(worker)
            code = max(code, self._gone(worker))
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            logger.warning("workers do not stop; ending them, which loses nothing")
            for worker in self._workers:
                worker.kill()
                worker.join()
        return code

    def _open(self) -> list[Connection]:
        return [each for each in self._counts if not each.closed]

    def _receive(self) -> None:
        """Take in what workers have sent; what one has done stays counted when it is gone."""
        for connection in self._open():
            try:
                while connection.poll():
                    self._counts[connection] = connection.recv()
            except (EOFError, OSError):
                connection.close()
                last = self._counts[connection]
                done = Counts(
                    messages=last.messages, units=last.units, commit_seconds=last.commit_seconds, rows=last.rows
                )
                self._counts[connection] = done

    def _sum(self) -> Counts:
        return sum(list(self._counts.values()), Counts())

    def _gone(self, worker: SpawnProcess) -> int:
        """Replace a worker that was killed; end the others when one failed by itself."""
        code = worker.exitcode or 0
        if self._kill_at is not None:
            return _KILLED if code == -signal.SIGKILL else max(code, 0)
        if code == 0:
            return 0
        if code < 0:
            logger.warning("worker %s died of signal %s; another takes its place", worker.pid, -code)
            time.sleep(_PAUSE_SECONDS)
            if self._kill_at is None:  # no signal came meanwhile
                self._workers.append(self._start())
            return 0
        logger.error("worker %s failed; stopping the others", worker.pid)
        self._stop(signal.SIGTERM, None)
        return code

    def _start(self) -> SpawnProcess:
        ours, theirs = self._context.Pipe(duplex=False)
        worker = self._context.Process(target=work_alone, args=(self._task, theirs))
        worker.start()
        theirs.close()  # or its end would not be noticed
        self._counts[ours] = Counts()
        return worker

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._kill_at = self._kill_at or time.monotonic() + self._task.run.stop_seconds + _CLOSE_SECONDS
        for worker in self._workers:
            with contextlib.suppress(ValueError):  # one that was not started yet
                if worker.is_alive():
                    worker.terminate()
