"""SharedSlotFilter: the race that the original ignores, places that go away, collisions."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from exactly_once import ConfigurationError
from exactly_once.publish import DedupProducer, FilterUnavailable, SharedSlotFilter, State
from exactly_once.publish.keys import encoded
from exactly_once.publish.memcached import Slot
from tests.support.memcached import Memcached, missing_memcached
from tests.support.require import skip_unless
from tests.support.waiting import until

NEW, IN_FLIGHT, UNKNOWN, DUPLICATE = State.NEW, State.IN_FLIGHT, State.UNKNOWN, State.DUPLICATE
ANSWER_SECONDS = 60
"""For so long memcached may stand still on a busy machine where a test does not stop it."""

MakeFilter = Callable[[int], SharedSlotFilter]


@pytest.fixture
def make_filter(memcached: Memcached) -> Iterator[MakeFilter]:
    """Make filters, each with a connection of its own, that share their slots."""
    scope = uuid4().hex
    made: list[SharedSlotFilter] = []

    def make(slots: int) -> SharedSlotFilter:
        made.append(SharedSlotFilter(memcached.address, prefix=scope, slots=slots, timeout_seconds=ANSWER_SECONDS))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_two_processes_share_what_they_know(make_filter: MakeFilter) -> None:
    one, other = (make_filter(1 << 20) for _ in range(2))
    assert one.reserve("a") is NEW
    assert other.reserve("a") is IN_FLIGHT
    one.confirm("a")
    assert other.reserve("a") is DUPLICATE
    other.reserve("b")
    other.mark_unknown("b")
    assert one.reserve("b") is UNKNOWN


def test_the_same_key_on_two_topics_is_two_keys(make_filter: MakeFilter) -> None:
    first, twin, other = (make_filter(1 << 32) for _ in range(3))
    first.topic = twin.topic = "orders"  # as the first producer that uses them does
    other.topic = "audit"
    assert first.reserve("a") is NEW
    first.confirm("a")
    assert (twin.reserve("a"), other.reserve("a")) == (DUPLICATE, NEW)


def test_of_processes_that_race_for_a_key_one_gets_it(make_filter: MakeFilter) -> None:
    """Without compare-and-set all would be told that it is new."""
    # So many slots that no two keys share one: those would push each other out, and both be new once more.
    filters = [make_filter(1 << 60) for _ in range(4)]
    keys = [uuid4().bytes for _ in range(150)]
    barrier = threading.Barrier(len(filters))

    def run(made: SharedSlotFilter) -> Counter[State]:
        barrier.wait(60)
        return Counter(made.reserve(key) for key in keys)

    with ThreadPoolExecutor(len(filters)) as pool:
        total = sum(pool.map(run, filters), Counter[State]())
    assert total == {NEW: len(keys), IN_FLIGHT: (len(filters) - 1) * len(keys)}


def test_a_key_overwrites_the_one_in_its_slot(make_filter: MakeFilter) -> None:
    made = make_filter(1)
    made.reserve("a")
    made.confirm("a")
    assert made.reserve("b") is NEW
    made.confirm("b")
    assert made.reserve("b") is DUPLICATE
    assert made.reserve("a") is NEW, "its knowledge was lost, as promised"
    assert made.stats().evicted == 2


def test_a_batch_whose_keys_share_a_slot_is_settled(make_filter: MakeFilter) -> None:
    made = make_filter(2)
    assert made.reserve_many(list("abcdef")) == [NEW] * 6
    made.confirm_many(list("abcdef"))
    assert made.reserve("f") is DUPLICATE


class Forgetful(SharedSlotFilter):
    """Slots that do what they are told and then lose the answer, once: real ones do so too seldom to wait for."""

    def __init__(self) -> None:
        pytest.importorskip("pymemcache")
        super().__init__(("nowhere", 1), prefix="", slots=1 << 20)
        self.held: dict[int, tuple[Slot | None, object]] = {}
        self.loses_after: int | None = None

    def _read(self, slots: list[int]) -> dict[int, tuple[Slot | None, object]]:
        return {slot: self.held.get(slot, (None, None)) for slot in slots}

    def _swap(self, slot: int, proof: object, new: Slot | None) -> bool:
        if self.held.get(slot, (None, None))[1] is not proof:
            return False
        self.held[slot] = (new, object())
        if self.loses_after is not None:
            self.loses_after -= 1
            if self.loses_after < 0:
                self.loses_after = None
                raise FilterUnavailable("the answer was lost")
        return True


def test_a_reservation_of_our_own_that_we_never_heard_of_is_given_again() -> None:
    made = Forgetful()
    made.loses_after = 0
    with pytest.raises(FilterUnavailable):
        made.reserve("a")
    assert made.reserve("a") is NEW
    assert made.reserve("a") is IN_FLIGHT


@pytest.mark.parametrize("change", ["release", "mark_unknown"])
def test_nobody_undoes_a_reservation_that_another_process_has_made_since(make_filter: MakeFilter, change: str) -> None:
    late, holder, third = (make_filter(1 << 20) for _ in range(3))
    assert late.reserve("a") is NEW
    late._client.delete(late._name(late._slot_of(encoded("a"))[0]))  # as at the end of its lease
    assert holder.reserve("a") is NEW
    getattr(late, change)("a")
    assert third.reserve("a") is IN_FLIGHT
    assert holder.reserve("a") is IN_FLIGHT


def test_when_the_place_is_away_within_a_batch_nothing_stays_reserved() -> None:
    made = Forgetful()
    keys = list("abcdefghij")
    made.reserve("unsure")
    made.mark_unknown("unsure")
    made.loses_after = 6
    with pytest.raises(FilterUnavailable):
        made.reserve_many(["unsure", *keys])
    assert made.reserve_many(["unsure", *keys]) == [UNKNOWN] + [NEW] * 10
    assert made.reserve_many(["unsure", *keys]) == [IN_FLIGHT] * 11


def test_a_batch_that_takes_as_long_as_its_lease_is_not_sent(
    memcached: Memcached, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delay stands in for a network that is slow, or a server that swaps."""
    made = SharedSlotFilter(memcached.address, prefix=name, slots=1 << 20, lease_seconds=1)
    with contextlib.closing(made) as slow:
        ask = slow._ask

        def late(*given: Any) -> Any:
            time.sleep(0.02)
            return ask(*given)

        monkeypatch.setattr(slow, "_ask", late)
        with pytest.raises(FilterUnavailable, match=r"to reserve 40 keys, over half of lease_seconds=1"):
            slow.reserve_many(range(40))
        assert slow.reserve_many(range(10)) == [NEW] * 10


def test_what_a_dead_process_held_in_memcached_is_absent_after_its_lease(memcached: Memcached, name: str) -> None:
    # Memcached counts whole seconds: of the last one there may be nothing left.
    options: dict[str, Any] = {"prefix": name, "slots": 1 << 60, "timeout_seconds": ANSWER_SECONDS}
    dead = SharedSlotFilter(memcached.address, **options, lease_seconds=6)
    made = SharedSlotFilter(memcached.address, **options)
    for key in itertools.count():
        began = time.monotonic()
        dead.reserve(key)
        found = made.reserve(key)
        if time.monotonic() - began < 5:  # else the machine stood still, and the lease may be over
            break
    assert found is IN_FLIGHT
    until(lambda: made.reserve(key) is NEW, 10, "the end of the lease")
    dead.close()
    made.close()


@pytest.mark.parametrize("value", [b"", b"1", b"a session of a web server", b"\x00" * 16 + b"c" + b"\x00" * 7])
def test_what_another_program_keeps_under_the_prefix_is_refused_by_its_name(
    memcached: Memcached, name: str, value: bytes
) -> None:
    from pymemcache.client.base import Client  # type: ignore[import-untyped]  # noqa: PLC0415

    theirs = Client(memcached.address, default_noreply=False)
    theirs.set(f"{name}:0", value)
    made = SharedSlotFilter(memcached.address, prefix=name, slots=1, timeout_seconds=ANSWER_SECONDS)
    with pytest.raises(FilterUnavailable, match=f"'{name}:0'.*another program.*prefix='{name}'"):
        made.reserve("a")
    assert theirs.get(f"{name}:0") == value
    theirs.delete(f"{name}:0")
    assert made.reserve("a") is NEW
    made.close()
    theirs.close()


def test_memcached_that_is_gone_stops_publishing_or_lets_everything_through_by_choice(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    skip_unless("memcached", missing_memcached())
    with Memcached() as server:
        options: dict[str, Any] = {"prefix": name, "slots": 16, "timeout_seconds": ANSWER_SECONDS}
        closed = SharedSlotFilter(server.address, **options)
        opened = SharedSlotFilter(server.address, **options, on_unavailable="treat_as_new")
        closed.reserve("a")
        closed.confirm("a")
        server.stop()
        # The client's own error for a connection that the server has closed has no text.
        with pytest.raises(FilterUnavailable, match=rf"memcached at 127.0.0.1:{server.port} .*: \w+Error$"):
            closed.reserve("a")
        assert opened.reserve_many(["a", "b"]) == [NEW, NEW]
        opened.confirm_many(["a", "b"])
        assert opened.stats().failed_open == 2, "keys are let through once, when they are asked for"
        said = [each.getMessage() for each in caplog.records if getattr(each, "action", "") == "keys_let_through"]
        assert [" 2 keys are let through: " in said[0], " 2 outcomes are not stored: " in said[1]] == [True, True]
        server.start()
        assert closed.reserve("a") is NEW, "memcached starts empty"
        assert opened.reserve_many(["a", "a"]) == [DUPLICATE, DUPLICATE], "it has confirmed it meanwhile"
        assert closed.reserve("a") is DUPLICATE
        assert opened.stats().in_flight == 0
        closed.close()
        opened.close()


def test_a_lease_that_ends_before_a_message_may_be_sent_is_told(
    memcached: Memcached, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def told(lease_seconds: int, **kafka: Any) -> int:
        made = SharedSlotFilter(memcached.address, prefix=name, slots=16, lease_seconds=lease_seconds)
        caplog.clear()
        with DedupProducer({"bootstrap.servers": "127.0.0.1:1", **kafka}, dedup=made) as producer:
            producer.filter_of("orders")
            producer.filter_of("orders")
        return sum(getattr(record, "action", "") == "lease_short" for record in caplog.records)

    assert told(600) == 0
    assert told(300) == 1, "a message waits for 300 s by default"
    assert told(300, **{"message.timeout.ms": 299_000}) == 0
    assert told(600, **{"delivery.timeout.ms": "0"}) == 1, "for ever"


def test_a_message_that_failed_while_memcached_stood_still_may_be_sent_again(name: str) -> None:
    """Its slot still says that it is in flight, and nobody but its sender knows better."""
    skip_unless("memcached", missing_memcached())
    with Memcached() as server:
        made = SharedSlotFilter(
            server.address,
            prefix=name,
            slots=1 << 20,
            timeout_seconds=ANSWER_SECONDS,
            on_unavailable="treat_as_new",
        )
        assert made.reserve_many(["new", "unsure", "silent", "sent"]) == [NEW] * 4
        made.mark_unknown("unsure")
        assert made.reserve("unsure") is UNKNOWN
        assert server._process is not None
        made._client.close()
        made._client.timeout = 1  # of the connections that it opens from here on
        server._process.send_signal(signal.SIGSTOP)
        try:
            made.release_many(["new", "unsure"])
            made.mark_unknown("silent")
            made.confirm("sent")
        finally:
            server._process.send_signal(signal.SIGCONT)
        made._client.timeout = ANSWER_SECONDS
        assert made.reserve_many(["new", "unsure", "silent", "sent"]) == [NEW, UNKNOWN, UNKNOWN, DUPLICATE]
        made.close()


class Slow:
    """A memcached that takes its time for every command, and is told when it may go on."""

    def __init__(self) -> None:
        self.commands = 0
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def gets_many(self, names: list[str]) -> dict[str, object]:
        return {}

    def add(self, *_: object) -> bool:
        self.commands += 1
        self.is_asked.set()
        return self.may_answer.wait(30)

    def close(self) -> None:
        """Nothing is open."""


def test_to_close_waits_for_one_command_and_not_for_a_batch() -> None:
    """A real one is slow for too short a time to meet it there."""
    pytest.importorskip("pymemcache")
    made, client = SharedSlotFilter(("nowhere", 1), prefix="", slots=1 << 20), Slow()
    made._client = client
    with ThreadPoolExecutor(2) as pool:
        batch = pool.submit(made.reserve_many, range(100))
        assert client.is_asked.wait(60)
        closed = pool.submit(made.close)
        until(lambda: made._is_closing or closed.done(), 30, "that it is being closed")
        client.may_answer.set()
        closed.result(60)
        with pytest.raises(FilterUnavailable, match="being closed"):
            batch.result(60)
    assert client.commands == 1
    assert made.reserve("a") is NEW, "it may be used again"


@pytest.mark.parametrize(
    "options",
    [{"slots": 0}, {"slots": 1, "on_unavailable": "hope"}, {"slots": 1, "lease_seconds": 0.5}]
    + [{"slots": 1, "timeout_seconds": seconds} for seconds in (-1, 0, 1e12, math.inf)],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        SharedSlotFilter(("nowhere", 1), prefix="", **options)


@pytest.mark.parametrize(
    "options",
    [{"prefix": "my orders"}, {"prefix": "größe"}, {"prefix": "x" * 231}]
    + [{"prefix": "p", "lease_seconds": seconds} for seconds in (-5, 0, 10**8)],
)
def test_what_memcached_cannot_keep_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="memcached takes"):
        SharedSlotFilter(("127.0.0.1", 1), slots=16, **options)
