"""SharedSlotFilter: the race that the original ignores, places that go away, collisions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from exactly_once import ConfigurationError
from exactly_once.publish import FilterUnavailable, MemcachedSlots, SharedSlotFilter, State
from exactly_once.publish.keys import encoded
from exactly_once.publish.memcached import Slot
from tests.support.memcached import Memcached, missing_memcached
from tests.support.require import skip_unless
from tests.support.waiting import until

NEW, IN_FLIGHT, UNKNOWN, DUPLICATE = State.NEW, State.IN_FLIGHT, State.UNKNOWN, State.DUPLICATE

MakePlace = Callable[[], MemcachedSlots]


@pytest.fixture
def make_place(memcached: Memcached) -> Iterator[MakePlace]:
    """Make places, each with a connection of its own, that share their slots."""
    scope = uuid4().hex
    made: list[MemcachedSlots] = []

    def make() -> MemcachedSlots:
        made.append(MemcachedSlots(memcached.address, prefix=scope))
        return made[-1]

    yield make
    for place in made:
        place.close()


def test_two_processes_share_what_they_know(make_place: MakePlace) -> None:
    one, other = (SharedSlotFilter(make_place(), slots=1 << 20) for _ in range(2))
    assert one.reserve("a") is NEW
    assert other.reserve("a") is IN_FLIGHT
    one.confirm("a")
    assert other.reserve("a") is DUPLICATE
    other.reserve("b")
    other.mark_unknown("b")
    assert one.reserve("b") is UNKNOWN


def test_of_processes_that_race_for_a_key_one_gets_it(make_place: MakePlace) -> None:
    """Without compare-and-set all would be told that it is new."""
    filters = [SharedSlotFilter(make_place(), slots=1 << 20) for _ in range(4)]
    keys = [uuid4().bytes for _ in range(150)]
    barrier = threading.Barrier(len(filters))

    def run(made: SharedSlotFilter) -> Counter[State]:
        barrier.wait(30)
        return Counter(made.reserve(key) for key in keys)

    with ThreadPoolExecutor(len(filters)) as pool:
        total = sum(pool.map(run, filters), Counter[State]())
    assert total == {NEW: len(keys), IN_FLIGHT: (len(filters) - 1) * len(keys)}


def test_a_key_overwrites_the_one_in_its_slot(make_place: MakePlace) -> None:
    made = SharedSlotFilter(make_place(), slots=1)
    made.reserve("a")
    made.confirm("a")
    assert made.reserve("b") is NEW
    made.confirm("b")
    assert made.reserve("b") is DUPLICATE
    assert made.reserve("a") is NEW, "its knowledge was lost, as promised"
    assert made.stats().evicted == 2


def test_a_batch_whose_keys_share_a_slot_is_settled(make_place: MakePlace) -> None:
    made = SharedSlotFilter(make_place(), slots=2)
    assert made.reserve_many(list("abcdef")) == [NEW] * 6
    made.confirm_many(list("abcdef"))
    assert made.reserve("f") is DUPLICATE


class Forgetful(MemcachedSlots):
    """A place that does what it is told and then loses the answer, once: real ones do so too seldom to wait for."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Slot | None, object]] = {}
        self.loses_after: int | None = None

    def read(self, slots: list[int]) -> dict[int, tuple[Slot | None, object]]:
        return {slot: self.held.get(slot, (None, None)) for slot in slots}

    def swap(self, slot: int, proof: object, new: Slot | None) -> bool:
        if self.held.get(slot, (None, None))[1] is not proof:
            return False
        self.held[slot] = (new, object())
        if self.loses_after is not None:
            self.loses_after -= 1
            if self.loses_after < 0:
                self.loses_after = None
                raise FilterUnavailable("the answer was lost")
        return True

    def close(self) -> None:
        pass


def test_a_reservation_of_our_own_that_we_never_heard_of_is_given_again() -> None:
    place = Forgetful()
    made = SharedSlotFilter(place, slots=16)
    place.loses_after = 0
    with pytest.raises(FilterUnavailable):
        made.reserve("a")
    assert made.reserve("a") is NEW
    assert made.reserve("a") is IN_FLIGHT


@pytest.mark.parametrize("change", ["release", "mark_unknown"])
def test_nobody_undoes_a_reservation_that_another_process_has_made_since(make_place: MakePlace, change: str) -> None:
    places = [make_place() for _ in range(3)]
    late, holder, third = (SharedSlotFilter(place, slots=1 << 20) for place in places)
    assert late.reserve("a") is NEW
    places[0]._client.delete(places[0]._name(late._slot_of(encoded("a"))[0]))  # as at the end of its lease
    assert holder.reserve("a") is NEW
    getattr(late, change)("a")
    assert third.reserve("a") is IN_FLIGHT
    assert holder.reserve("a") is IN_FLIGHT


def test_when_the_place_is_away_within_a_batch_nothing_stays_reserved() -> None:
    place = Forgetful()
    made = SharedSlotFilter(place, slots=1 << 20)
    keys = list("abcdefghij")
    made.reserve("unsure")
    made.mark_unknown("unsure")
    place.loses_after = 6
    with pytest.raises(FilterUnavailable):
        made.reserve_many(["unsure", *keys])
    assert made.reserve_many(["unsure", *keys]) == [UNKNOWN] + [NEW] * 10
    assert made.reserve_many(["unsure", *keys]) == [IN_FLIGHT] * 11


def test_what_a_dead_process_held_in_memcached_is_absent_after_its_lease(memcached: Memcached, name: str) -> None:
    dead = SharedSlotFilter(MemcachedSlots(memcached.address, prefix=name, lease_seconds=1), slots=16)
    dead.reserve("a")
    made = SharedSlotFilter(MemcachedSlots(memcached.address, prefix=name), slots=16)
    assert made.reserve("a") is IN_FLIGHT
    until(lambda: made.reserve("a") is NEW, 10, "the end of the lease")
    dead.close()
    made.close()


def test_memcached_that_is_gone_stops_publishing_or_lets_everything_through_by_choice(name: str) -> None:
    skip_unless("memcached", missing_memcached())
    with Memcached() as server:
        closed = SharedSlotFilter(MemcachedSlots(server.address, prefix=name), slots=16)
        opened = SharedSlotFilter(MemcachedSlots(server.address, prefix=name), slots=16, on_unavailable="treat_as_new")
        closed.reserve("a")
        closed.confirm("a")
        server.stop()
        with pytest.raises(FilterUnavailable):
            closed.reserve("a")
        assert opened.reserve_many(["a", "b"]) == [NEW, NEW]
        opened.confirm_many(["a", "b"])
        assert opened.stats().failed_open == 4
        server.start()
        assert closed.reserve("a") is NEW, "memcached starts empty"
        assert opened.reserve("a") is IN_FLIGHT
        closed.close()
        opened.close()


@pytest.mark.parametrize("options", [{"slots": 0}, {"slots": 1, "on_unavailable": "hope"}])
def test_options_that_cannot_be_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        SharedSlotFilter(Forgetful(), **options)  # type: ignore[arg-type]
