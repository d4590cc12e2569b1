"""What every ledger store promises: the one on Postgres, and the one on which the simulator runs the consumer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from exactly_once import LedgerRowMissing
from exactly_once._model import Advance, Partition, Row
from exactly_once.ledger.outcome import SHORT_COUNT
from exactly_once.ledger.rows import Ledger
from exactly_once.ledger.session import Session, connector
from exactly_once.ledger.store import LedgerStore
from tests.simulation import database as simulated
from tests.simulation import member

MakeStore = Callable[[], LedgerStore]


class Quiet:
    """A simulated process in a world where nothing goes wrong and nobody else goes on meanwhile."""

    def __init__(self, database: simulated.Database) -> None:
        logs = SimpleNamespace(between=lambda begin, end: [])
        self.name = "quiet"
        self.world = SimpleNamespace(
            database=database, rng=random.Random(0), uuid=uuid4, fault=lambda *_: False, logs={P: logs, Q: logs}
        )

    def __call__(self) -> simulated.Connection:
        return simulated.Connection(self.world.database.incarnation)

    def step(self, what: str) -> None:
        """Go on at once."""


P, Q = Partition("t", 0), Partition("t", 1)


def to(row: Row, next_offset: int, **changes: Any) -> Advance:
    assert row.owner_token is not None
    advance = Advance(
        partition=row.partition,
        token=row.owner_token,
        epoch=row.owner_epoch,
        topic_id=row.topic_id,
        expected=row.next_offset or 0,
        next_offset=next_offset,
        leader_epoch=3,
        generation=row.generation,
    )
    return replace(advance, **changes)


def commit(store: LedgerStore, *advances: Advance) -> None:
    begun = store.session.begin("READ COMMITTED", may_take=60)
    try:
        store.advance(store.session.connection, advances, xid=begun.xid, commit=True)
    except BaseException:
        store.session.roll_back()
        raise


def refused(store: LedgerStore, *advances: Advance) -> bool:
    """Whether the server refuses an advance; then nothing has moved."""
    before = store.look([P, Q])
    try:
        commit(store, *advances)
    except psycopg.Error as error:
        if error.sqlstate != SHORT_COUNT:
            raise
        return store.look([P, Q]) == before
    return False


def offsets(store: LedgerStore) -> list[int | None]:
    return [row.next_offset for row in sorted(store.read([P, Q]), key=lambda row: row.partition)]


class Suite:
    """The promises; a class below says on what."""

    @pytest.fixture
    def store(self, make_store: MakeStore) -> LedgerStore:
        """A store with rows of two partitions, that start at offset 5."""
        store = make_store()
        store.register({P: 5, Q: 5}, cluster_id="c", topic_ids={"t": "id"})
        return store

    def test_rows_are_made_once_and_found(self, make_store: MakeStore) -> None:
        store, other = make_store(), make_store()
        assert not store.has_rows()
        assert store.known(["t"]) == (set(), set())
        store.register({P: 5}, cluster_id="c", topic_ids={"t": "id"})
        other.register({P: 7, Q: None}, cluster_id="c", topic_ids={"t": "id"})
        assert other.has_rows()
        assert store.known(["t"])[0] == {P, Q}
        assert store.existing([P, Partition("t", 2)]) == {P}
        assert {p: offset for p, (offset, _) in store.offsets(["t"]).items()} == {P: 5, Q: None}
        assert store.topic_ids(["t"]) == {"t": {"id"}}

    def test_whoever_acquires_fences_the_owner_before(self, make_store: MakeStore, store: LedgerStore) -> None:
        (row,) = store.acquire([P])
        (taken,) = make_store().acquire([P])
        assert (taken.owner_epoch, taken.next_offset) == (row.owner_epoch + 1, 5)
        assert taken.owner_token != row.owner_token
        assert refused(store, to(row, 9))
        assert not refused(store, to(taken, 9)), "the token tells, not the connection"
        assert offsets(store) == [9, 5]

    def test_a_row_that_is_not_there_cannot_be_acquired(self, store: LedgerStore) -> None:
        with pytest.raises(LedgerRowMissing):
            store.acquire([P, Partition("t", 2)])
        assert [row.owner_token for row in store.look([P])] == [None]

    @pytest.mark.parametrize(
        "change",
        [
            {"token": uuid4()},
            {"epoch": 99},
            {"expected": 4},
            {"expected": 6},
            {"topic_id": "other"},
            {"generation": 9},
            {"partition": Partition("t", 2)},
        ],
    )
    def test_all_that_an_advance_says_is_compared_and_all_partitions_move_or_none(
        self, store: LedgerStore, change: dict[str, Any]
    ) -> None:
        first, second = store.acquire([P, Q])
        assert refused(store, to(first, 9), to(second, 9, **change))
        assert not refused(store, to(first, 9), to(second, 9))
        assert offsets(store) == [9, 9]
        assert refused(store, to(first, 9)), "twice"

    def test_a_rotation_makes_a_row_of_the_next_generation(self, store: LedgerStore) -> None:
        (row,) = store.acquire([P])
        commit(store, to(row, 9, rotates=True))
        (rotated,) = store.read([P])
        assert (rotated.generation, rotated.next_offset, rotated.leader_epoch) == (row.generation + 1, 9, 3)
        assert refused(store, to(replace(row, next_offset=9), 12))
        assert not refused(store, to(rotated, 12))

    def test_a_start_is_chosen_once_and_by_the_owner(self, make_store: MakeStore) -> None:
        store, other = make_store(), make_store()
        store.register({P: None}, cluster_id="c", topic_ids={"t": "id"})
        (old,) = other.acquire([P])
        (row,) = store.acquire([P])
        assert other.start([replace(old, next_offset=3)]) == set()
        assert store.start([replace(row, next_offset=4)]) == {P}
        assert store.start([replace(row, next_offset=6)]) == set()
        assert [found.next_offset for found in store.look([P])] == [4]

    def test_a_unit_in_doubt_is_resolved_under_a_new_token(self, make_store: MakeStore, store: LedgerStore) -> None:
        first, second = store.acquire([P, Q])
        make_store().acquire([Q])
        assert first.owner_token is not None
        assert second.owner_token is not None
        tokens = [first.owner_token, second.owner_token]
        (found,) = store.resolve([P, Q], tokens, lock_seconds=1)
        assert (found.partition, found.next_offset, found.owner_token) == (P, 5, tokens[-1])
        assert len(tokens) == 3
        assert refused(store, to(first, 9)), "the old attempt cannot land any more"
        (again,) = store.resolve([P, Q], tokens, lock_seconds=1)
        assert not refused(store, to(again, 9))

    def test_only_the_owner_gives_a_row_back(self, make_store: MakeStore, store: LedgerStore) -> None:
        (row,) = store.acquire([P])
        assert row.owner_token is not None
        make_store().release([(P, uuid4())])
        assert store.look([P])[0].owner_token == row.owner_token
        store.release([(P, row.owner_token)])
        (released,) = store.read([P])
        assert (released.owner_token, released.next_offset) == (None, 5)
        assert refused(store, to(row, 9))

    def test_the_end_of_a_log_needs_no_unit_and_the_same_conditions(self, store: LedgerStore) -> None:
        first, second = store.acquire([P, Q])
        with pytest.raises(psycopg.Error) as short:
            store.move_to_ends([to(first, 9), to(second, 9, token=uuid4())], lock_seconds=1)
        assert short.value.sqlstate == SHORT_COUNT
        assert offsets(store) == [5, 5]
        store.move_to_ends([to(first, 9), to(second, 8)], lock_seconds=1)
        assert offsets(store) == [9, 8]

    def test_a_unit_that_is_rolled_back_leaves_nothing(self, store: LedgerStore) -> None:
        (row,) = store.acquire([P])
        begun = store.session.begin("READ COMMITTED", may_take=60)
        store.session.roll_back()
        assert store.session.outcome(begun) == "aborted"
        assert store.look([P]) == [row] or store.look([P])[0].owner_token == row.owner_token


class TestPostgres(Suite):
    """Ledger, on real rows."""

    @pytest.fixture
    def make_store(self, conninfo: str, name: str) -> Iterator[MakeStore]:
        """Make owners of the rows of one group, each with a connection of its own."""
        sessions: list[Session] = []

        def make() -> Ledger:
            sessions.append(Session(connector(conninfo), schema="exactly_once"))
            return Ledger(sessions[-1], group_id=name, owner_kind="consumer")

        yield make
        for session in sessions:
            session.close()


class TestSimulated(Suite):
    """The simulator's stand-in, in one world."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        """Make owners of the rows of one group, each with a connection of its own."""
        shared = simulated.Database(lambda partition, begin, end: [], is_strict=False)

        def make() -> LedgerStore:
            session = member.Session(Quiet(shared), schema="exactly_once")  # type: ignore[arg-type]
            return member.Ledger(session, group_id="g")

        return make
