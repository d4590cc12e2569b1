"""Crew of the sink command: several worker processes; one that dies is replaced, an error ends them all."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from types import FrameType

from .sink_worker import Task, work_alone

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
_CLOSE_SECONDS = 15.0
"""How long workers may take to stop, besides what the unit in hand is given: to close their clients and connections."""
_STOPPED = {0, 128 + signal.SIGTERM, 128 + signal.SIGINT}


class Crew:
    """Keeps ``size`` workers running until they are done, one fails, or a signal comes."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[SpawnProcess] = [self._start() for _ in range(task.run.workers)]
        self._kill_at: float | None = None

    def run(self) -> int:
        """Watch until all are gone; return the exit code."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        code = 0
        try:
            while self._workers:
                wait([w.sentinel for w in self._workers], timeout=_PAUSE_SECONDS)
                for worker in [w for w in self._workers if not w.is_alive()]:
                    self._workers.remove(worker)
                    code = max(code, self._gone(worker))
                if self._kill_at is not None and time.monotonic() > self._kill_at:
                    logger.warning("workers do not stop; ending them, which loses nothing")
                    for worker in self._workers:
                        worker.kill()
        finally:
            for worker in self._workers:
                worker.terminate()
            for number, handler in before.items():
                signal.signal(number, handler)
        return code

    def _gone(self, worker: SpawnProcess) -> int:
        """Replace a worker that was killed; end the others when one failed by itself."""
        code = worker.exitcode or 0
        if self._kill_at is not None or code in _STOPPED:
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
        worker = self._context.Process(target=work_alone, args=(self._task,))
        worker.start()
        return worker

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._kill_at = self._kill_at or time.monotonic() + self._task.run.stop_seconds + _CLOSE_SECONDS
        for worker in self._workers:
            if worker.is_alive():
                worker.terminate()
