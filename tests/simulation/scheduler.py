"""Scheduler: runs actors one at a time and decides at each of their steps who goes on.

Actors are threads, so that the code under test needs no change, but only the one that holds the
baton runs; a schedule is a pure function of its seed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import ClassVar

# The name of the threads that run actors.
WORKER = "simulation"


class Killed(BaseException):
    """Unwinds an actor that is dead; nothing that it still does has any effect."""


class _Worker:
    """A thread that runs one actor after another, because starting threads is slow."""

    idle: ClassVar[list[_Worker]] = []

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.job: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, name=WORKER, daemon=True).start()

    @classmethod
    def take(cls) -> _Worker:
        return cls.idle.pop() if cls.idle else cls()

    def _run(self) -> None:
        while True:
            self.baton.acquire()
            self.job()


class Actor:
    """Somebody who takes steps; ``is_frozen`` like a process that was stopped."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = self.is_frozen = self.has_ended = False
        self.worker = _Worker.take()


class Scheduler:
    """Hands the baton on; ``between`` is called at every step and may kill, freeze or add actors."""

    def __init__(self, rng: random.Random, between: Callable[[], None]) -> None:
        self._rng = rng
        self._between = between
        self._done = threading.Lock()
        self._is_over = False
        self.running: Actor | None = None
        self.actors: list[Actor] = []
        self.failure: BaseException | None = None

    def spawn(self, name: str, body: Callable[[], None]) -> Actor:
        """Add an actor; its first step is taken when the scheduler chooses it."""
        actor = Actor(name)

        def job() -> None:
            try:
                if not actor.is_dead:
                    body()
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 - reported by the main thread
                self.failure = self.failure or error
                self._end()
            actor.has_ended = True
            self.actors.remove(actor)
            _Worker.idle.append(actor.worker)
            self._hand_on(None)

        actor.worker.job = job
        self.actors.append(actor)
        return actor

    def pause(self, actor: Actor) -> None:
        """Let others go on before the next step of ``actor``.

        :raises Killed: when it died meanwhile.
        """
        if actor.is_dead:
            raise Killed
        try:
            self._between()
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            self.failure = self.failure or error
            self._end()
        self._hand_on(actor)
        if actor.is_dead:
            raise Killed

    def run(self) -> None:
        """Run until :meth:`stop`; raise what went wrong."""
        self._done.acquire()
        self._hand_on(None)
        self._done.acquire()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """End the schedule: every actor unwinds without effects."""
        self._end()

    def _end(self) -> None:
        self._is_over = True
        for actor in self.actors:
            actor.is_dead = True

    def _hand_on(self, actor: Actor | None) -> None:
        chosen = self._choose()
        if actor is not None and chosen is actor:
            return
        self.running = chosen
        (chosen.worker.baton if chosen is not None else self._done).release()
        if actor is not None:
            actor.worker.baton.acquire()

    def _choose(self) -> Actor | None:
        awake = []
        for actor in self.actors:
            if actor.is_dead:
                return actor
            if not actor.is_frozen:
                awake.append(actor)
        if awake:
            # Long runs of one actor, as real processes have them, find more than a fair coin.
            if self.running in awake and self._rng.random() < 0.6:
                return self.running
            return self._rng.choice(awake)
        if not self.actors:
            return None
        self.actors[0].is_frozen = False
        return self.actors[0]
