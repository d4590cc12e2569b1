"""Result: the two sides next to each other, as a table, as JSON and in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .checker import TOTAL, Verdict
from .display import Row
from .trial import Tally

HEAD: Row = ("", "exactly once", "ordinary loop")


@dataclass(frozen=True, slots=True)
class Result:
    """What happened on one side, and what was true afterwards."""

    tally: Tally
    verdict: Verdict
    published: int

    @property
    def failures(self) -> list[str]:
        """What went wrong, in words; nothing if every message took effect once, in a run that came to its end."""
        tally, verdict = self.tally, self.verdict
        wrong = {
            f"{self.published - verdict.messages:,} payments not published": verdict.messages != self.published,
            "not everything was applied in time": not tally.drained,
            f"{verdict.lost:,} lost": verdict.lost,
            f"{verdict.duplicated:,} duplicated": verdict.duplicated,
            f"{verdict.foreign:,} effects of aborted messages": verdict.foreign,
            f"{verdict.wrong_balances:,} wrong balances": verdict.wrong_balances,
            f"{verdict.balance - TOTAL:+,} in the sum of balances": verdict.balance != TOTAL,
            f"{tally.landed} zombies not fenced": tally.landed,
            f"{tally.errors} workers ended by themselves": tally.errors,
        }
        return [what for what, is_so in wrong.items() if is_so]

    @property
    def is_exact(self) -> bool:
        """Whether nothing went wrong."""
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        """Return the side's part of the JSON."""
        tally, verdict = self.tally, self.verdict
        return {
            "messages": verdict.messages,
            "crashes": tally.crashes,
            "frozen": tally.frozen,
            "fenced": tally.fenced,
            "landed": tally.landed,
            "lost": verdict.lost,
            "duplicated": verdict.duplicated,
            "foreign": verdict.foreign,
            "wrong_balances": verdict.wrong_balances,
            "balance": verdict.balance,
            "expected_balance": TOTAL,
            "errors": tally.errors,
            "drained": tally.drained,
            "seconds": tally.seconds,
        }


def as_json(results: Mapping[str, Result], *, seed: int) -> dict[str, Any]:
    """Return everything, for programs."""
    sides = {loop: {**result.as_dict(), "seed": seed} for loop, result in results.items()}
    return {**sides, "seed": seed, "ok": results["exactly_once"].is_exact}


def rows(results: Mapping[str, Result]) -> list[Row]:
    """Return the table without its head."""

    def row(name: str, texts: list[str]) -> Row:
        return (name, *texts)  # type: ignore[return-value]

    sides = [results["exactly_once"], results["at_least_once"]]
    return [
        row("messages in the topic", [f"{s.verdict.messages:,}" for s in sides]),
        row("crashes (kill -9)", [f"{s.tally.crashes}" for s in sides]),
        row("zombies fenced", [f"{s.tally.fenced} of {s.tally.frozen}" for s in sides]),
        row("lost", [f"{s.verdict.lost:,}" for s in sides]),
        row("duplicated", [f"{s.verdict.duplicated:,}" for s in sides]),
        row("accounts with a wrong balance", [f"{s.verdict.wrong_balances:,}" for s in sides]),
        row("sum of balances", [f"{s.verdict.balance:,}" for s in sides]),
        row("seconds", [f"{s.tally.seconds:.1f}" for s in sides]),
    ]


def conclusion(results: Mapping[str, Result], *, seed: int) -> str:
    """Say what was shown."""
    exact, ordinary = results["exactly_once"], results["at_least_once"]
    if not exact.is_exact:
        return f"FAILED: {', '.join(exact.failures)}. That must not happen; please report it with --seed {seed}."
    shown = (
        f"Shown with --seed {seed}: {exact.verdict.messages:,} payments took effect exactly once through "
        f"{exact.tally.crashes} crashes and {exact.tally.frozen} zombies"
    )
    if ordinary.verdict.duplicated:
        end = f"; the ordinary loop applied {ordinary.verdict.duplicated:,} of them more than once."
    else:
        end = ". The ordinary loop ended without a duplicate this time: luck; try another --seed."
    return shown + end
