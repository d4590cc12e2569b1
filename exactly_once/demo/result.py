"""Result: the two sides next to each other, as a table, as JSON and in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .checker import TOTAL, Verdict
from .display import Row, row
from .trial import Tally

HEAD: Row = ("", "exactly once", "ordinary loop")


@dataclass(frozen=True, slots=True)
class Result:
    """What happened on one side, and what was true afterwards."""

    tally: Tally
    verdict: Verdict
    published: int

    @property
    def is_cut_short(self) -> bool:
        """Whether it did not come to its end: what was not applied by then is not lost, so no figure means anything."""
        return not self.tally.drained

    @property
    def failures(self) -> list[str]:
        """What went wrong, in words; of a run that was cut short only what must not happen at any time."""
        tally, verdict = self.tally, self.verdict
        # Wrong at any moment, however a run ended.
        never = {
            f"{verdict.duplicated:,} duplicated": verdict.duplicated,
            f"{verdict.foreign:,} effects of aborted messages": verdict.foreign,
            f"{verdict.balance - TOTAL:+,} in the sum of balances": verdict.balance != TOTAL,
            f"{tally.landed} zombies not fenced": tally.landed,
            f"{tally.errors} workers ended by themselves": tally.errors,
        }
        at_the_end = {
            f"{self.published - verdict.messages:,} payments not published": verdict.messages != self.published,
            f"{verdict.lost:,} lost": verdict.lost,
            f"{verdict.wrong_balances:,} wrong balances": verdict.wrong_balances,
        }
        wrong = never if self.is_cut_short else at_the_end | never
        return [what for what, is_so in wrong.items() if is_so]

    @property
    def is_exact(self) -> bool:
        """Whether every message took effect once, in a run that came to its end."""
        return not self.failures and not self.is_cut_short


def as_json(results: Mapping[str, Result], *, seed: int) -> dict[str, Any]:
    document: dict[str, Any] = {"seed": seed, "ok": results["exactly_once"].is_exact}
    for loop, side in results.items():
        figures: dict[str, Any] = {"cut_short": side.tally.waited_for}
        if not side.is_cut_short:
            figures = asdict(side.tally) | asdict(side.verdict) | {"expected_balance": TOTAL}
            del figures["waited_for"]
        document[loop] = figures | {"seed": seed}
    return document


def rows(results: Mapping[str, Result]) -> list[Row]:
    """Return the table without its head; a side that was cut short has no figures."""
    sides = [results["exactly_once"], results["at_least_once"]]

    texts = [
        ("messages in the topic", [f"{s.verdict.messages:,}" for s in sides]),
        ("crashes (kill -9)", [f"{s.tally.crashes}" for s in sides]),
        ("zombies fenced", [f"{s.tally.fenced} of {s.tally.frozen}" for s in sides]),
        ("lost", [f"{s.verdict.lost:,}" for s in sides]),
        ("duplicated", [f"{s.verdict.duplicated:,}" for s in sides]),
        ("accounts with a wrong balance", [f"{s.verdict.wrong_balances:,}" for s in sides]),
        ("sum of balances", [f"{s.verdict.balance:,}" for s in sides]),
        ("seconds", [f"{s.tally.seconds:.1f}" for s in sides]),
    ]
    return [row(name, each, [side.is_cut_short for side in sides]) for name, each in texts]


def conclusion(results: Mapping[str, Result], *, seed: int) -> str:
    exact = results["exactly_once"]
    if exact.failures:
        return f"FAILED: {', '.join(exact.failures)}. That must not happen; please report it with --seed {seed}."
    if exact.is_cut_short:
        return (
            f"Nothing is shown: the run with the library was cut short, waiting for {exact.tally.waited_for}. "
            f"Either this machine is too busy, or something hangs: try it again with --seed {seed}."
        )
    ordinary = results["at_least_once"]
    shown = (
        f"Shown with --seed {seed}: {exact.verdict.messages:,} payments took effect exactly once through "
        f"{exact.tally.crashes} crashes and {exact.tally.frozen} zombies"
    )
    if ordinary.is_cut_short:
        end = f". The ordinary loop was cut short, waiting for {ordinary.tally.waited_for}: it shows nothing."
    elif ordinary.verdict.duplicated:
        end = f"; the ordinary loop applied {ordinary.verdict.duplicated:,} of them more than once."
    else:
        end = ". The ordinary loop ended without a duplicate this time: luck; try another --seed."
    return shown + end
