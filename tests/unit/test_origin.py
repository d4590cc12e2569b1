"""Who told Kafka an offset, and what that says about the ledger."""

from __future__ import annotations

from dataclasses import replace

import pytest

from exactly_once._model import MIRRORED
from exactly_once.kafka.origin import Origin, Relation, origin_of, relate

OWN = Origin("3f0c7a52", "7391.16384", 4)


@pytest.mark.parametrize(
    "origin", [OWN, Origin("3f0c7a52"), Origin("3f0c7a52", None, 4), Origin("3f0c7a52", "1.2", None)]
)
def test_metadata_is_read_as_it_was_written(origin: Origin) -> None:
    assert origin_of(str(origin)) == origin
    assert origin_of(f"{origin} proof") == origin
    assert str(origin).startswith(MIRRORED)


@pytest.mark.parametrize("metadata", [None, "", "x", MIRRORED, f"{MIRRORED}:1", "a b c d", "exactly_onced a b 1"])
def test_metadata_of_others_has_no_origin(metadata: str | None) -> None:
    assert origin_of(metadata) is None


@pytest.mark.parametrize(
    ("found", "mirrored", "relation"),
    [
        (None, 900, Relation.OURS),
        (OWN, 600, Relation.OURS),
        (OWN, 599, Relation.OURS),
        (OWN, 601, Relation.REWOUND),
        (replace(OWN, ledger_id="another"), 1, Relation.OTHER),
        (replace(OWN, server="7391.16385"), 600, Relation.OURS),
        (replace(OWN, server="7391.16385"), 601, Relation.COPY),
        (replace(OWN, server=None), 601, Relation.REWOUND),
        (replace(OWN, timeline=5), 1, Relation.OUTLIVED),
        (replace(OWN, timeline=3), 600, Relation.OURS),
        (replace(OWN, timeline=3), 601, Relation.REWOUND),
        (replace(OWN, timeline=None), 600, Relation.OURS),
        (replace(OWN, server="7391.16385", timeline=5), 600, Relation.OURS),
    ],
)
def test_relation(found: Origin | None, mirrored: int, relation: Relation) -> None:
    assert relate(OWN, found, mirrored=mirrored, stored=600) is relation


def test_row_without_an_offset_is_behind_whatever_was_told() -> None:
    assert relate(OWN, OWN, mirrored=1, stored=None) is Relation.REWOUND
    assert relate(OWN, OWN, mirrored=0, stored=None) is Relation.OURS
