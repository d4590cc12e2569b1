"""Whatever is interleaved with whatever: each message is applied once, and nobody waits for ever.

``EXACTLY_ONCE_SCHEDULES`` sets how many schedules are run that stay, and how many that each commit has for itself;
``EXACTLY_ONCE_SEED`` the first of them. A violation prints its seed and the whole schedule.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

import pytest

from tests.support.seeds import drawn, seeds

from .database import Violation
from .member import Clock, Member, simulated
from .world import FAULTS, Plan, World

FOUND = [
    1695295545,  # a move to the end of a log landed, its answer and the look behind it were lost, and a unit began
    777013095,  # the same, and the move landed behind the look
]
"""Seeds that have found something beyond those that stay."""
SCHEDULES = int(os.environ.get("EXACTLY_ONCE_SCHEDULES", "1000"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0 if SCHEDULES > 10_000 else 600)]


@pytest.mark.fault("A5")
def test_every_message_is_applied_once_under_any_schedule_of_faults() -> None:
    began = time.perf_counter()
    tried = seeds([*FOUND, *range(SCHEDULES)], new=SCHEDULES)
    run_all(tried)
    seconds = time.perf_counter() - began
    print(f"{len(tried)} schedules to seed {tried[-1]}: no violation; {len(tried) / seconds:.0f} schedules/s")


def run_all(tried: Iterable[int]) -> None:
    for seed in tried:
        World(seed, Plan()).run()


def test_every_kind_of_fault_happens_and_hurts() -> None:
    """The schedules would prove nothing if nothing went wrong in them."""
    happened: set[object] = set()
    for seed in range(200):  # always the same: the rarest of these is not in any two hundred
        world = World(seed, Plan())
        world.run()
        happened |= {line[-1] if line[1] == "fault" else line[2] for line in world.trace if len(line) > 2}
    assert set(FAULTS) <= happened
    assert {"Fenced", "LedgerRewound", "Redelivered", "OutcomePending", "Hiccup", "Unlucky"} <= happened
    assert {"assigned", "revoked", "lost"} <= happened
    assert {"lost while sending COMMIT", "lost while waiting for COMMIT"} <= happened


def test_a_seed_gives_the_same_schedule_again() -> None:
    worlds = [World(drawn()[0], Plan()) for _ in range(2)]
    for world in worlds:
        world.run()
    assert worlds[0].trace == worlds[1].trace


def test_a_thread_that_is_no_actor_sleeps_as_long_as_it_says() -> None:
    clock = Clock()
    with simulated(clock, seed=0):
        stranger = threading.Thread(target=time.sleep, args=[0.01])
        stranger.start()
        stranger.join()
    assert clock.now == 0


def test_the_offset_alone_need_not_be_trusted() -> None:
    """Without failover and reset the fence suffices: comparing the expected offset is a second line."""

    def prepare(world: World) -> None:
        world.database.compares_expected = False

    for seed in drawn(min(SCHEDULES, 300)):
        World(seed, Plan(without=frozenset({"failover", "reset"}), prepare=prepare)).run()


def test_the_messages_of_a_unit_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Member._handle
    monkeypatch.setattr(Member, "_handle", lambda self, use, messages: handle(self, use, messages[::-1]))
    with pytest.raises(Violation, match="moved past"):
        run_all(drawn(100))


@pytest.mark.fault("B23")
def test_an_epoch_that_a_failover_gives_out_again_is_not_taken_for_the_former_one() -> None:
    for seed in drawn(min(SCHEDULES, 300)):
        World(seed, Plan(usurps=True)).run()
