"""The table of what becomes of a unit: nothing comes again that may be durable, nothing is skipped that may not be."""

from __future__ import annotations

from typing import get_args

import pytest

from exactly_once._model import Sent
from exactly_once.consumer.outcomes import LOST, Decision, Rows, decide

OPEN = ("in progress", "prepared")
HALTS = (Decision.HALT_COMMITTED, Decision.HALT_UNKNOWN)


def possible(sent: Sent, status: str) -> list[Rows | None]:
    """What may be known of the rows of a unit whose transaction has that status."""
    if sent is Sent.NOTHING:
        return [None, "short"]
    return ["moved", "stayed"] if sent is Sent.ADVANCE and status == "committed" else [None]


@pytest.mark.parametrize("sent", [Sent.NOTHING, Sent.JOINED, Sent.ADVANCE])
def test_every_outcome_has_a_decision_and_none_doubles_or_skips(sent: Sent) -> None:
    for status in ("committed", "aborted", LOST, *(() if sent is Sent.NOTHING else OPEN)):
        for rows in possible(sent, status):
            decision = decide(sent, status, rows)
            if status in OPEN:
                assert decision is Decision.WAIT
            elif status == LOST:
                assert decision is Decision.HALT_UNKNOWN, "effects may be durable, and may not be"
            elif status == "committed":
                assert decision in HALTS or rows == "moved", "effects without their offset are never given back"
            else:
                assert decision not in (*HALTS, Decision.WAIT), "what was rolled back comes again"


def test_a_commit_without_an_answer_is_resolved_by_its_rows() -> None:
    assert decide(Sent.COMMIT, None) is Decision.RESOLVE


def test_what_cannot_be_known_at_that_point_has_no_row() -> None:
    with pytest.raises(KeyError):
        decide(Sent.ADVANCE, "committed")
    assert set(get_args(Rows)) == {"short", "moved", "stayed"}
