"""Crew: the worker processes as their parent sees them, and a spare that is ready to replace a dead one.

Each is in a process group of its own: Ctrl-C in a terminal reaches only the parent, which decides. If the
parent is killed, workers end with their standard input; a frozen one gets SIGHUP and SIGCONT from the
kernel, because its group is orphaned.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from exactly_once.embedded.process import is_frozen

from .worker import Order

Event = Mapping[str, Any]
_LAST_WORDS = 15  # lines: a traceback of ours is about as long


class Worker:
    """One process. It waits until it gets an order."""

    def __init__(self, events: queue.Queue[tuple[Worker, Event]], module: str) -> None:
        self.number = 0  # its place, once it has an order
        # Those that it has by its reports, and since when.
        self.partitions: dict[int, float] = {}
        # The names of its reports, in order.
        self.reports: list[str] = []
        # Without a name: nothing of it stays, however the parent ends.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (as long-lived as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            process_group=0,
        )

        def read() -> None:
            assert self._process.stdout is not None
            with self._process.stdout as lines:
                for line in lines:
                    events.put((self, json.loads(line)))
            self._process.wait()
            events.put((self, {"event": "ended"}))

        threading.Thread(target=read, daemon=True).start()

    def __repr__(self) -> str:
        return f"<Worker {self.number} pid={self._process.pid}>"

    @property
    def is_frozen(self) -> bool:
        """Whether the process is stopped; a signal to go on that comes earlier would be lost."""
        return self.status is None and is_frozen(self._process.pid)

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def receive(self, event: Event) -> None:
        self.reports.append(event["event"])
        for partition in event.get("partitions", ()):
            self.partitions.pop(partition, None)
            if event["event"] == "assigned":
                self.partitions[partition] = event["time"]

    def has_since(self, partitions: Iterable[int], moment: float) -> bool:
        """Return whether it was given all of these after ``moment``; the clock is one for all processes."""
        return all(self.partitions.get(partition, 0.0) > moment for partition in partitions)

    def begin(self, order: Order) -> None:
        self.number = order.number
        self._write(order.to_line())

    def arm(self, kind: str, at: str, after: int) -> None:
        self._write(json.dumps({"kind": kind, "at": at, "after": after}))

    def disarm(self) -> None:
        self._write("null")

    def send(self, number: signal.Signals) -> None:
        if self.status is None:
            os.kill(self._process.pid, number)

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.send(signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._log.close()

    def last_words(self, lines: int = _LAST_WORDS) -> str:
        """Return the end of what it wrote on standard error."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-lines:])

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


class Crew:
    """The workers of one side, by number. Leaving the ``with`` statement ends every process."""

    def __init__(self, orders: Mapping[int, Order], module: str) -> None:
        self._orders = orders  # the owner's: it may put another order in a place before it starts a worker there
        self._module = module
        self._processes: list[Worker] = []  # all that were started and not dismissed
        self._spares: list[Worker] = []  # those of them that wait for an order
        self.events: queue.Queue[tuple[Worker, Event]] = queue.Queue()
        self.workers: dict[int, Worker] = {}  # by place

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._processes:
            worker.end()

    def warm_up(self) -> None:
        """Start a process that waits for its order, with everything imported."""
        worker = Worker(self.events, self._module)
        self._processes.append(worker)
        self._spares.append(worker)

    def start(self, number: int) -> Worker:
        """Give place ``number`` to a process that is warm, and warm up the next one."""
        if not self._spares:
            self.warm_up()
        worker = self._spares.pop(0)
        worker.begin(self._orders[number])
        self.workers[number] = worker
        self.warm_up()
        return worker

    def received(self, seconds: float) -> Iterator[tuple[Worker, Event]]:
        """Yield what workers report, after waiting for the first report for so long."""
        with contextlib.suppress(queue.Empty):
            yield self.events.get(timeout=seconds)
            while True:
                yield self.events.get_nowait()

    def dismiss(self, worker: Worker) -> None:
        """End a process, if it has not ended, and give back what it holds; its place may have been taken."""
        worker.end()
        self._processes.remove(worker)
        if self.workers.get(worker.number) is worker:
            del self.workers[worker.number]

    def other(self, worker: Worker) -> Worker:
        return next(each for each in self.workers.values() if each is not worker)
