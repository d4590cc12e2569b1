"""Each defence of the protocol is taken away once, and the simulator must notice, from any seed.

``EXACTLY_ONCE_MUTANTS=docs/mutants.md`` tries twenty and writes the table there.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

import pytest

from exactly_once import Redelivered
from exactly_once._model import Advance, Partition, Row
from exactly_once.consumer.buffer import FetchBuffer
from exactly_once.consumer.commit import CommitProtocol
from exactly_once.consumer.kafka_offsets import KafkaOffsets
from exactly_once.consumer.maintenance import Maintenance
from exactly_once.consumer.partitions import Ownership
from exactly_once.consumer.unit import Unit
from tests.support.seeds import seeds

from . import member
from .database import Connection, Violation
from .test_simulation import SCHEDULES
from .world import FAULTS, Plan, World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_QUIET = frozenset({"failover", "reset"})
_TABLE = os.environ.get("EXACTLY_ONCE_MUTANTS")
_STARTS = range(0, 20_000, 1000) if _TABLE else seeds([0], new=1)
"""The first seeds of the hunts. Those of the table stay, so that everybody gets the same one."""
_LONGEST = 3 * SCHEDULES
"""A hunt ends after so many. One in 120 schedules catches the rarest, so one hunt in 5,000 would find none in 1,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A defence that is missing: ``patch`` changes code, ``prepare`` the simulated server."""

    name: str
    patch: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    prepare: Callable[[World], None] | None = None
    without: frozenset[str] = frozenset()
    usurps: bool = False
    by: str = ""
    """Part of the violation that counts; others do not show what is meant."""


def _only(*faults: str) -> frozenset[str]:
    """Leave out all faults but some: what a mutant dies of then comes often."""
    return frozenset(FAULTS) - set(faults)


def _server(**flags: bool) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        for name, value in flags.items():
            setattr(world.database, name, value)

    return prepare


def _replaced(owner: type, name: str, function: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, function)


def _offset_first(
    self: member.Ledger, connection: Connection, advances: Sequence[Advance], *, xid: str, commit: bool
) -> None:
    database = self.session.member.world.database
    own = database.begin(self.session.instance)
    self._execute(
        own,
        connection,
        "advance",
        advances,
        waiting=lambda own: database.moved_by(own, advances),
        body=lambda own: database.advance(own, advances),
    )
    database.commit(own)
    self.session.member.step("the offset is stored, the effects are not")
    self._commit(connection)


def _snapshot_acquire() -> AbstractContextManager[Any]:
    original = member.Ledger.acquire

    def acquire(self: member.Ledger, partitions: Sequence[Partition], *, lock_seconds: float = 4.0) -> list[Row]:
        rows = self.session.member.world.database.rows
        seen = {p: rows[p].next_offset for p in partitions if p in rows}
        return [replace(row, next_offset=seen.get(row.partition)) for row in original(self, partitions)]

    return mock.patch.object(member.Ledger, "acquire", acquire)


def _unknown_is_success(self: CommitProtocol, unit: Unit, error: BaseException) -> None:
    self._committed(unit)


def _unknown_is_failure(self: CommitProtocol, unit: Unit, error: BaseException) -> None:
    self._give_back(unit)
    raise Redelivered("surely it failed") from error


def _stale_resolve(
    self: member.Ledger, partitions: Sequence[Partition], tokens: list[UUID], *, lock_seconds: float
) -> list[Row]:
    return [row for row in self.read(partitions) if row.owner_token in tokens]


def _release_anybody(self: member.Ledger, partition: Partition, token: UUID) -> bool:
    return partition in self.session.member.world.database.rows


def _nothing(*args: Any, **kwargs: Any) -> None: ...


MUTANTS = (
    Mutant(name="no fence", prepare=_server(fences_token=False, fences_epoch=False)),
    Mutant(
        name="no fence, and the expected offset is not compared",
        prepare=_server(fences_token=False, fences_epoch=False, compares_expected=False, minds_zombies=False),
        without=_QUIET,
    ),
    Mutant(
        name="fence on the epoch alone (a failover gives epochs out again)",
        prepare=_server(fences_token=False),
        by="a zombie",
        usurps=True,
        without=_only("expel", "failover", "freeze", "rebalance", "thaw", "produce"),
    ),
    Mutant(
        name="expected offset not compared",
        prepare=_server(compares_expected=False),
        without=_only("failover", "produce"),
    ),
    Mutant(
        name="offset stored first, outside of the transaction", patch=_replaced(member.Ledger, "advance", _offset_first)
    ),
    Mutant(
        name="acquire returns an offset read before it had the lock",
        patch=_snapshot_acquire,
        without=_only("expel", "land", "produce"),
    ),
    Mutant(
        name="unknown outcome read as success", patch=_replaced(CommitProtocol, "_after_unknown", _unknown_is_success)
    ),
    Mutant(
        name="unknown outcome read as failure", patch=_replaced(CommitProtocol, "_after_unknown", _unknown_is_failure)
    ),
    Mutant(
        name="resolve without a fresh token",
        patch=_replaced(member.Ledger, "resolve", _stale_resolve),
        without=_only("land", "produce"),
    ),
    Mutant(
        name="messages of an aborted unit not put back",
        patch=_replaced(FetchBuffer, "requeue", lambda self, _: self.discard()),
    ),
    Mutant(name="positions trusted after a poll that raised", patch=_replaced(Ownership, "invalidate_all", _nothing)),
    Mutant(name="release of somebody else's token", patch=_replaced(member.Ledger, "_may_release", _release_anybody)),
    Mutant(name="rows not checked while no message comes", patch=_replaced(Maintenance, "_check_rows", _nothing)),
    Mutant(
        name="membership never confirmed after a fence",
        patch=_replaced(KafkaOffsets, "check_membership", lambda *_: set()),
    ),
)


def _hunt(mutant: Mutant, start: int) -> tuple[int, str]:
    """Return after how many schedules the mutant was caught, and by what."""
    plan = Plan(is_strict=False, prepare=mutant.prepare, without=mutant.without, usurps=mutant.usurps)
    with mutant.patch():
        for count, seed in enumerate(range(start, start + _LONGEST), start=1):
            try:
                World(seed, plan).run()
            except Violation as violation:
                if " broke: " in (first := str(violation).splitlines()[0]) and "AssertionError" not in first:
                    raise  # not the missing defence, but the mutant itself, does not work
                if mutant.by not in str(violation).splitlines()[0]:
                    continue
                return count, str(violation).splitlines()[0].split("(")[0]
    pytest.fail(f"survived {_LONGEST} schedules from seed {start}: {mutant.name}")


@pytest.fixture(scope="module")
def caught() -> Iterator[dict[str, list[tuple[int, str]]]]:
    """What was caught from each seed, printed as a table at the end."""
    found: dict[str, list[tuple[int, str]]] = {}
    yield found
    table = ["| taken away | caught in schedule | at the latest | by what |", "|---|---|---|---|"]
    for name, hunts in found.items():
        counts = [count for count, _ in hunts]
        table.append(f"| {name} | {statistics.median(counts):g} | {max(counts)} | {hunts[0][1]} |")
    print("\n" + "\n".join(table))
    if _TABLE:
        head, _, _ = Path(_TABLE).read_text("utf-8").partition("| taken away")
        Path(_TABLE).write_text(head + "\n".join(table) + "\n", "utf-8")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_missing_defence_is_noticed(mutant: Mutant, caught: dict[str, list[tuple[int, str]]]) -> None:
    caught[mutant.name] = [_hunt(mutant, start) for start in _STARTS]
