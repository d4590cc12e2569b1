"""The identity of a message: the same at every delivery, different for different messages, never changed."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from exactly_once import ConfigurationError, Identity, Unit
from exactly_once.ledger.transaction import UnitOfWork
from exactly_once.testing import CLUSTER_ID, _advances, message

ids = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_", min_size=1, max_size=22)
identities = st.builds(Identity, ids, ids, st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1))


def unit_of(*messages: Message, topic_id: str | None = "id", cluster_id: str | None = "cluster") -> Unit:
    """A unit that nobody enters."""
    advances = [replace(a, topic_id=topic_id, cluster_id=cluster_id) for a in _advances(messages)]
    none: UnitOfWork | None = None
    return Unit(messages, advances, attempt=1, work=none, commits=none)  # type: ignore[arg-type]


def test_text_and_uuid_are_what_earlier_releases_gave_out() -> None:
    """Payment providers hold them: another text or UUID would be another payment."""
    identity = Identity("5L6g3nShT-eMCtK--X86sw", "oDXw1zPKRmqnGOL3Hc0sDQ", 3, 1234)
    assert identity.text == str(identity) == "5L6g3nShT-eMCtK--X86sw:oDXw1zPKRmqnGOL3Hc0sDQ:3:1234"
    assert identity.uuid == UUID("e7a2dd06-67d7-53cd-ba99-aa6bea015c88")


@given(identities, identities)
def test_equal_identities_have_equal_texts_and_others_other_ones(one: Identity, other: Identity) -> None:
    assert (one == other) == (one.text == other.text) == (one.uuid == other.uuid)


def test_a_unit_knows_the_ids_of_each_partition() -> None:
    first, second = message("a", offset=7), message("b", partition=2, offset=9)
    unit = unit_of(first, second)
    assert unit.identity(first) == Identity("cluster", "id", 0, 7)
    assert unit.identity(second) == Identity("cluster", "id", 2, 9)
    assert CLUSTER_ID != "cluster"


@pytest.mark.parametrize("unknown", [{"topic_id": None}, {"cluster_id": None}])
def test_without_ids_there_is_no_identity(unknown: dict[str, None]) -> None:
    """It would change on the day when the ids become known."""
    first = message("a", offset=7)
    with pytest.raises(ConfigurationError, match=r"a\[0\] offset 7 has no identity"):
        unit_of(first, **unknown).identity(first)


def test_what_a_handler_does_to_a_message_changes_nothing_about_its_name() -> None:
    first = message("a", offset=7)
    unit = unit_of(first)
    first.set_topic("elsewhere")  # type: ignore[attr-defined]  # not in the stubs
    assert unit.identity(first) == Identity("cluster", "id", 0, 7)


def test_a_message_of_another_partition_is_refused() -> None:
    with pytest.raises(ValueError, match=r"b\[0\] offset 1 does not belong to"):
        unit_of(message("a")).identity(message("b", offset=1))
