"""Nemesis: the kinds of fault in a random order of their own, every one as often as it is worth."""

from __future__ import annotations

import random

# How often each kind comes in one round.
DECK = {
    "kill -9": 4,
    "kill -9 at a failpoint": 4,
    "freeze": 2,
    "freeze at a failpoint": 2,
    "join": 2,
    "leave": 2,
    "cut before COMMIT": 3,
    "cut after COMMIT": 3,
    "COMMIT delayed and its client gone": 2,
    "answer of COMMIT delayed": 1,
    "backend terminated": 2,
    "all connections cut": 1,
    "immediate restart of Postgres": 1,
    "broker killed": 1,
}


class Nemesis:
    """Draws the kinds: all of the deck in random order, and again, with random pauses."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"faults {seed}")  # noqa: S311  (to be repeated, not to be secret)
        self._left: list[str] = []

    def next_kind(self) -> str:
        if not self._left:
            self._left = [kind for kind, times in sorted(DECK.items()) for _ in range(times)]
            self.chance.shuffle(self._left)
        return self._left.pop()

    def pause(self) -> float:
        """Draw for how many seconds nothing new goes wrong."""
        return self.chance.uniform(0.2, 2.5)
