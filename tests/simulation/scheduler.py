"""Scheduler: runs actors one at a time and decides at each of their steps who goes on.

Actors are greenlets: the code under test needs no change, as with threads, and a change to another actor costs less
than a step. A schedule is a pure function of its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]


class Killed(BaseException):
    """Unwinds an actor that is dead; nothing that it still does has any effect."""


class Actor:
    """Somebody who takes steps; ``is_frozen`` like a process that was stopped."""

    def __init__(self, name: str, run: Callable[[], None], parent: greenlet) -> None:
        self.name = name
        self.is_dead = self.is_frozen = False
        self.greenlet = greenlet(run, parent)


class Scheduler:
    """Has one actor run at a time; ``between`` is called at every step and may kill, freeze or add actors."""

    def __init__(self, rng: random.Random, between: Callable[[], None]) -> None:
        self._rng = rng
        self._between = between
        self._main = getcurrent()
        self.running: Actor | None = None
        self.actors: list[Actor] = []
        self.failure: BaseException | None = None

    def spawn(self, name: str, body: Callable[[], None]) -> Actor:
        """Add an actor; its first step is taken when the scheduler chooses it."""

        def job() -> None:
            try:
                if not actor.is_dead:
                    body()
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 - reported by run()
                self.failure = self.failure or error
                self._end()
            self.actors.remove(actor)

        actor = Actor(name, job, self._main)
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
        except BaseException as error:  # noqa: BLE001 - reported by run()
            self.failure = self.failure or error
            self._end()
        chosen = self._choose()
        if chosen is not actor:
            self.running = chosen
            self._main.switch()
        if actor.is_dead:
            raise Killed

    def run(self) -> None:
        """Run until :meth:`stop`; raise what went wrong."""
        self.running = self._choose()
        while self.running is not None:
            actor = self.running
            actor.greenlet.switch()
            if actor.greenlet.dead:
                self.running = self._choose()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """End the schedule: every actor unwinds without effects."""
        self._end()

    def _end(self) -> None:
        for actor in self.actors:
            actor.is_dead = True

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
