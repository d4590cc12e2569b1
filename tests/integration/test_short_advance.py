"""A row that changed under a unit: the server stores nothing, and the unit is told what is wrong."""

# ruff: noqa: PT012 - a unit's block is where things go wrong

from __future__ import annotations

import pytest

from exactly_once import (
    AlreadyApplied,
    Fenced,
    LedgerRewound,
    LedgerRowMissing,
    Redelivered,
    TopicRecreated,
)
from exactly_once.consumer.options import Isolation
from exactly_once.embedded.proxy import COMMIT
from tests.integration.conftest import MakeScene
from tests.integration.scene import Scene, apply, offsets
from tests.support.worker import record


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "SERIALIZABLE"])
def test_a_short_count_stores_nothing_although_commit_shared_its_round_trip(scene: Scene, isolation: Isolation) -> None:
    consumer = scene.consumer(isolation=isolation)
    units = iter(consumer)
    unit = next(units)
    with pytest.raises(Redelivered) as raised, unit:
        record(unit, "test")
        _interfere(scene, "owner_token = gen_random_uuid(), owner_epoch = owner_epoch + 1")
    assert raised.type is (Fenced if isolation == "READ COMMITTED" else Redelivered)
    (advance,) = [sql for sql in scene.proxy.statements if "advance(" in sql]
    assert COMMIT.search(advance)
    assert scene.applied() == []
    assert scene.ledger("next_offset") == [0]


@pytest.mark.fault("A5", more=True)
def test_a_fenced_consumer_proves_its_membership_and_goes_on(scene: Scene) -> None:
    consumer = scene.consumer()
    unit = next(iter(consumer))
    with pytest.raises(Fenced, match="is owned by"), unit:
        record(unit, "test")
        _interfere(scene, "owner_token = gen_random_uuid(), owner_epoch = owner_epoch + 1")
    scene.drain(consumer)
    assert consumer.counters.fenced == 1
    assert scene.ledger("owner_epoch") == [3]
    scene.assert_exact()


def test_the_same_token_under_another_epoch_is_fenced_as_well(scene: Scene) -> None:
    unit = next(iter(scene.consumer()))
    with pytest.raises(Fenced), unit:
        record(unit, "test")
        _interfere(scene, "owner_epoch = owner_epoch + 1")
    assert scene.applied() == []


def test_a_row_ahead_of_the_unit_is_gone_on_from(scene: Scene) -> None:
    consumer = scene.consumer()
    units = iter(consumer)
    with pytest.raises(AlreadyApplied), next(units) as unit:
        record(unit, "test")
        _interfere(scene, "next_offset = 13")
    assert scene.applied() == []
    assert offsets(next(units))[0] == 13
    assert consumer.counters.ahead == 1


def test_a_row_behind_the_unit_is_gone_back_to(scene: Scene) -> None:
    """A failover that lost commits: effects and offset are gone together, so they are made again."""
    consumer = scene.consumer(max_messages=5)
    units = iter(consumer)
    apply(next(units))
    with pytest.raises(LedgerRewound, match="lost commits"), next(units) as unit:
        _interfere(scene, "next_offset = 0")
        scene.query("DELETE FROM journal.entries WHERE topic = %s RETURNING 1")
        scene.query("UPDATE journal.counter SET total = 0 WHERE topic = %s RETURNING 1")
        record(unit, "test")
    scene.drain(consumer)
    assert consumer.counters.rewound == 1
    scene.assert_exact()


def test_a_row_that_was_deleted_under_a_unit_is_told_and_stores_nothing(scene: Scene) -> None:
    consumer = scene.consumer()
    with pytest.raises(Redelivered, match="it was deleted"), next(iter(consumer)) as unit:
        record(unit, "test")
        scene.query("DELETE FROM exactly_once.ledger WHERE group_id = %s RETURNING 1")
    with pytest.raises(LedgerRowMissing):
        scene.drain(consumer)
    assert scene.applied() == []


def test_a_topic_id_that_was_changed_under_a_unit_is_told_and_stores_nothing(scene: Scene) -> None:
    consumer = scene.consumer()
    with pytest.raises(Redelivered, match="the ledger has another"), next(iter(consumer)) as unit:
        record(unit, "test")
        _interfere(scene, "topic_id = 'another'")
    with pytest.raises(TopicRecreated):
        scene.drain(consumer)
    assert scene.applied() == []


def test_a_batch_of_which_one_partition_is_fenced_stores_nothing_of_the_others(make_scene: MakeScene) -> None:
    scene = make_scene(60, partitions=3)
    consumer = scene.consumer(max_messages=60, linger_seconds=60)
    with pytest.raises(Fenced), next(consumer.units()) as unit:
        assert len(unit.advances) == 3
        record(unit, "test")
        _interfere(scene, "owner_token = gen_random_uuid()", where="AND partition = 1")
    assert scene.applied() == []
    scene.drain(consumer)
    scene.assert_exact()


def _interfere(scene: Scene, change: str, *, where: str = "") -> None:
    """Change the group's rows from outside, as another owner, an operator or a failover does."""
    assert scene.query(f"UPDATE exactly_once.ledger SET {change} WHERE group_id = %s {where} RETURNING 1")
