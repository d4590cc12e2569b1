"""The excerpt of docs/publishing.md on sizes; its programs are run by tests/docs."""

from __future__ import annotations

from exactly_once.publish import slots_for


def test_the_excerpt_on_sizes_is_right() -> None:
    assert slots_for(3_600_000, 0.9) == 1_563_461
    assert slots_for(3_600_000, 0.1) == 34_168_398
