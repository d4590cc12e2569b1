"""Where an offset is out of its log's range, and what is done then: at the very edges, where real logs rarely stand.

The ledger is a stand-in: with a real one each edge costs a log whose beginning retention has removed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from exactly_once import LogTruncated, OffsetBelowLogStart, OffsetBeyondLogEnd
from exactly_once._model import Partition, Row
from exactly_once.ledger.start import StartOffsets

LOG = (5, 9)


class Rows:
    """A ledger that notes what it was told to correct, and does it if the row is still ours."""

    group_id = "g"
    session = SimpleNamespace(schema="exactly_once")

    def __init__(self, *, ours: bool) -> None:
        self.ours = ours
        self.corrected: list[int] = []

    def correct(self, row: Row, new_offset: int, *, reason: str) -> bool:
        assert "the ledger stands at offset" in reason
        self.corrected.append(new_offset)
        return self.ours


def found(offset: int, policy: Any, *, ours: bool = True, truncated: bool = False) -> tuple[Row | None, list[int]]:
    rows: Any = Rows(ours=ours)
    cluster: Any = None  # no broker is asked
    starter = StartOffsets(rows, cluster, start=None, on_out_of_range=policy)
    row = Row(partition=Partition("t", 0), next_offset=offset, leader_epoch=3)
    return starter.in_range(row, LOG, truncated=truncated), rows.corrected


@pytest.mark.parametrize("policy", ["fail", "earliest", "latest"])
@pytest.mark.parametrize("offset", [5, 7, 9])
def test_an_offset_from_the_start_of_the_log_to_its_end_stays(offset: int, policy: str) -> None:
    row, corrected = found(offset, policy)
    assert row is not None
    assert (row.next_offset, row.leader_epoch, corrected) == (offset, 3, [])


@pytest.mark.parametrize(
    ("offset", "truncated", "error"),
    [(4, False, OffsetBelowLogStart), (10, False, OffsetBeyondLogEnd), (7, True, LogTruncated)],
)
def test_any_other_is_an_error_or_moved_as_the_policy_says(
    offset: int,
    truncated: bool,  # noqa: FBT001 - a parameter
    error: type[Exception],
) -> None:
    with pytest.raises(error):
        found(offset, "fail", truncated=truncated)
    for policy, to in (("earliest", 5), ("latest", 9)):
        row, corrected = found(offset, policy, truncated=truncated)
        assert row is not None
        assert (row.next_offset, row.leader_epoch, corrected) == (to, None, [to])
        assert found(offset, policy, ours=False, truncated=truncated) == (None, [to]), "it is somebody else's by now"
