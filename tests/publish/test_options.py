"""Options of the producers: what there is, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from exactly_once import ConfigurationError
from exactly_once.publish import (
    ChainFilter,
    DedupProducer,
    KeyRefused,
    PublishOwner,
    SequenceFilter,
    SharedSlotFilter,
    SlotFilter,
    Store,
    TopicTakeOver,
    TransactionalProducer,
    WindowFilter,
)

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


producer = partial(DedupProducer, KAFKA, dedup=WindowFilter(keys=1))
ODD: list[tuple[Callable[..., Any], str, object]] = [
    (WindowFilter, "keys", "1000"),
    (WindowFilter, "keys", 1.5),
    (WindowFilter, "seconds", [600]),
    (partial(WindowFilter, keys=1), "writes_key", "false"),
    (SlotFilter, "slots", "64"),
    (partial(SlotFilter, 64), "window", 1.5),
    (partial(SlotFilter, 64), "ways", True),
    (SequenceFilter, "max_outstanding", "5"),
    (ChainFilter, "max_gaps", None),
    (ChainFilter, "dense", "false"),
    (partial(SharedSlotFilter, ("nowhere", 1), prefix="p"), "slots", float("nan")),
    (partial(SharedSlotFilter, ("nowhere", 1), prefix="p", slots=1), "timeout_seconds", "3"),
    (partial(SharedSlotFilter, ("nowhere", 1), prefix="p", slots=1), "hash_key", "secret"),
    (partial(SharedSlotFilter, prefix="p", slots=1), "server", "nowhere:1"),
    (partial(PublishOwner, "dbname=nowhere"), "lease_seconds", True),
    (partial(PublishOwner, "dbname=nowhere"), "wait_seconds", "90"),
    (partial(PublishOwner, "dbname=nowhere", name="a"), "exclusive", "false"),
    (Store, "conninfo", b"password=secret"),
    (partial(TopicTakeOver, KAFKA), "seconds", float("nan")),
    (producer, "snapshot_every", "1000"),
    (producer, "commit_seconds", float("nan")),
    (producer, "accept_trimmed", "false"),
    (producer, "owner", "orders-service"),
    (producer, "published_since", "2024-01-01"),
    (producer, "snapshots", 5),
    (producer, "topics", ["audit.*"]),
    (producer, "topics", {"audit.*": "false"}),
]


@pytest.mark.parametrize(("make", "option", "given"), ODD)
def test_an_option_of_another_kind_is_refused_by_name(make: Callable[..., Any], option: str, given: object) -> None:
    """A text is what an environment variable gives: a number would fail at some comparison, and "false" be true."""
    with pytest.raises(ConfigurationError, match=f"^{option}=.* must be ") as refused:
        make(**{option: given})
    assert "secret" not in str(refused.value).replace(f"{option}='secret'", "")


@pytest.mark.parametrize("kafka", [{}, {"bootstrap.servers": ""}, None, "localhost:9092"])
def test_settings_without_a_broker_are_refused(kafka: Any) -> None:
    """The client would look for one until each message has timed out."""
    for kind in (DedupProducer, TransactionalProducer):
        with pytest.raises(ConfigurationError, match=r"bootstrap\.servers is missing|kafka=.* is not possible"):
            kind(kafka, dedup=WindowFilter(keys=1))


def test_values_without_identities_are_refused_as_that() -> None:
    with producer() as made, pytest.raises(KeyRefused, match="a bytes has no identity: give dedup_keys="):
        made.produce_many("orders", [b"17 apples"])
