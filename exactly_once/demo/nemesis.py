"""Nemesis: the faults of a seed, in the order in which they are inflicted."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from exactly_once._failpoints import OF_A_UNIT

# What a failpoint means, for people.
MOMENTS = {
    "polled": "with a batch in hand",
    "begun": "in an open transaction",
    "handled": "with effects written",
    "guarded": "with effects checked",
    "advanced": "one step before COMMIT",
    "committed": "right after COMMIT",
    "positioned": "between two batches",
    "mirrored": "after committing to Kafka",
}
# What ``committed`` means for the ordinary loop.
BETWEEN_COMMITS = "between its two commits"

# Where a frozen worker has something to do as a zombie.
_WITH_BATCH = ("polled", "begun", "handled", "guarded", "advanced")
# Passed about once a second: waiting for a later pass would only take time.
_ONCE_IN_A_WHILE = ("positioned", "mirrored")


@dataclass(frozen=True, slots=True)
class Fault:
    """One injury: who, how, and at which pass of which failpoint."""

    kind: Literal["kill", "freeze"]
    at: str
    victim: int
    after: int


def plan(seed: int, *, quick: bool) -> list[Fault]:
    """Draw the faults: each failpoint kills, once or twice, and some freeze a worker with a batch in hand."""
    rounds, freezes = (1, 2) if quick else (2, 3)
    # Frozen after its advance, a worker holds the ledger's rows until its backend is ended: two seconds more.
    moments = _WITH_BATCH[:-1] if quick else _WITH_BATCH
    dice = random.Random(f"faults {seed}")  # noqa: S311  (to be repeated, not to be secret)
    kinds: list[tuple[Literal["kill", "freeze"], str]] = [("kill", at) for at in OF_A_UNIT * rounds]
    kinds += [("freeze", at) for at in dice.sample(moments, freezes)]
    dice.shuffle(kinds)
    return [
        Fault(kind, at, victim=dice.randint(1, 2), after=0 if at in _ONCE_IN_A_WHILE else dice.randrange(4))
        for kind, at in kinds
    ]
