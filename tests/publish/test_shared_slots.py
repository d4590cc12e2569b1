"""SharedSlotFilter: the race that the original ignores, places that go away, collisions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from exactly_once import ConfigurationError
from exactly_once.publish import (
    FilterUnavailable,
    MemcachedSlots,
    PostgresSlots,
    SharedSlotFilter,
    State,
    Store,
)
from exactly_once.publish.shared_slots import Slot, SlotPlace
from tests.support.memcached import Memcached, missing_memcached
from tests.support.proxy import PostgresProxy
from tests.support.require import skip_unless
from tests.support.waiting import until

NEW, IN_FLIGHT, UNKNOWN, DUPLICATE = State.NEW, State.IN_FLIGHT, State.UNKNOWN, State.DUPLICATE

MakePlace = Callable[[], SlotPlace]


@pytest.fixture(params=["memcached", "postgres"])
def make_place(request: pytest.FixtureRequest, conninfo: str) -> Iterator[MakePlace]:
    """Make places, each with a connection of its own, that share their slots."""
    scope = uuid4().hex
    made: list[SlotPlace] = []
    stores: list[Store] = []

    def make() -> SlotPlace:
        if request.param == "memcached":
            server: Memcached = request.getfixturevalue("memcached")
            made.append(MemcachedSlots(server.address, prefix=scope))
        else:
            stores.append(Store(conninfo))
            made.append(PostgresSlots(stores[-1], scope=scope))
        return made[-1]

    yield make
    for place in made:
        place.close()
    for store in stores:
        store.close()


def test_two_processes_share_what_they_know(make_place: MakePlace) -> None:
    one, other = (SharedSlotFilter(make_place(), slots=1 << 20) for _ in range(2))
    assert one.reserve("a") is NEW
    assert other.reserve("a") is IN_FLIGHT
    one.confirm("a")
    assert other.reserve("a") is DUPLICATE
    other.reserve("b")
    other.doubt("b")
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


def test_a_lost_answer_to_a_reservation_loses_no_key(conninfo: str, name: str) -> None:
    with PostgresProxy(conninfo) as proxy:
        store = Store(proxy.conninfo)
        made = SharedSlotFilter(PostgresSlots(store, scope=name), slots=1 << 20)
        for number, statement in enumerate(("INSERT INTO", "SELECT slot")):
            fault = proxy.cut_after(statement)
            assert made.reserve(number) is NEW
            assert fault.fired.is_set()
            assert made.reserve(number) is IN_FLIGHT
        store.close()


class Forgetful:
    """A place that does what it is told and then loses the answer, once: real ones do so too seldom to wait for."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Slot | None, object]] = {}
        self.loses = False

    def read(self, slots: list[int]) -> dict[int, tuple[Slot | None, object]]:
        return {slot: self.held.get(slot, (None, None)) for slot in slots}

    def swap(self, slot: int, proof: object, new: Slot | None) -> bool:
        if self.held.get(slot, (None, None))[1] is not proof:
            return False
        self.held[slot] = (new, object())
        if self.loses:
            self.loses = False
            raise FilterUnavailable("the answer was lost")
        return True

    def close(self) -> None:
        pass


def test_a_reservation_of_our_own_that_we_never_heard_of_is_given_again() -> None:
    place = Forgetful()
    made = SharedSlotFilter(place, slots=16)
    place.loses = True
    with pytest.raises(FilterUnavailable):
        made.reserve("a")
    assert made.reserve("a") is NEW
    assert made.reserve("a") is IN_FLIGHT


def test_what_a_dead_process_held_is_unknown_after_its_lease(conninfo: str, name: str) -> None:
    store = Store(conninfo)
    dead = SharedSlotFilter(PostgresSlots(store, scope=name), slots=16)
    dead.reserve("a")
    made = SharedSlotFilter(PostgresSlots(store, scope=name, lease_seconds=0.3), slots=16)
    until(lambda: made.reserve("a") is UNKNOWN, 10, "the end of the lease")
    store.close()


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
