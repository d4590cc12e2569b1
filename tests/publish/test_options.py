"""Options of the producers: what there is, and what cannot be."""

from __future__ import annotations

import pytest

from exactly_once import ConfigurationError
from exactly_once.publish import DedupProducer, TransactionalProducer, WindowFilter

KAFKA = {"bootstrap.servers": "127.0.0.1:1"}


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    for kind, last in ((TransactionalProducer, "published_since"), (DedupProducer, "commit_seconds")):
        with pytest.raises(ConfigurationError, match=f"recovr= is no option; there are producer_name, .*{last}$"):
            kind(KAFKA, dedup=WindowFilter(keys=1), recovr=False)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["", 5, b"x", "caf\udce9", "a\0b", "x" * 1025])
def test_a_name_that_is_none_is_refused(name: object) -> None:
    """An empty one as of an environment variable that is not set: each life would have a name of its own.

    What is no text, or none that UTF-8 has, would fail in the header of each message. Behind a NUL the client does not
    read on: names that differ there would fence each other.
    """
    with pytest.raises(ConfigurationError, match="producer_name="):
        DedupProducer(KAFKA, dedup=WindowFilter(keys=1), producer_name=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["snapshot_every", "commit_messages", "commit_seconds"])
def test_a_number_that_is_too_small_is_refused(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option}=-1 must be at least"):
        DedupProducer(KAFKA, dedup=WindowFilter(keys=1), **{option: -1})  # type: ignore[arg-type]
