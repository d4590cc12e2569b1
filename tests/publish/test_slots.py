"""SlotFilter: the seed's figures, coverage of the slots, and what is lost where."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from exactly_once import ConfigurationError
from exactly_once.publish import SlotFilter, State, loss_probability, messages_for, slots_for
from exactly_once.publish.slots import Fingerprint, _DigestTable, _KeyTable


def send(made: SlotFilter, key: bytes | bytearray) -> State:
    state = made.reserve(key)
    if state is State.NEW:
        made.confirm(key)
    return state


def test_the_size_that_the_seed_computes() -> None:
    """0.9 = 1 - (1 - 1/N) ** 3600000, an hour at 1,000 a second: N = 1,563,461."""
    assert slots_for(3_600_000, 0.9) == 1_563_461
    assert loss_probability(3_600_000, 1_563_461) == pytest.approx(0.9, abs=1e-6)


def test_the_size_that_keeps_ninety_percent() -> None:
    """What the seed overlooks: 0.9 is its chance of having lost the message."""
    assert slots_for(3_600_000, 0.1) == 34_168_398
    assert loss_probability(3_600_000, 34_168_398) == pytest.approx(0.1, abs=1e-6)


def test_the_seeds_hundred_buckets_after_459_messages() -> None:
    assert loss_probability(459, 100) == pytest.approx(0.99, abs=0.001)


@pytest.mark.parametrize("probability", [0.5, 1e-2, 1e-4, 1e-6])
def test_sizing_and_its_inverse_agree(probability: float, subtests: pytest.Subtests) -> None:
    for ways in (1, 2, 4, 8, 16):
        with subtests.test(ways=ways):
            slots = slots_for(100_000, probability, ways)
            assert slots % ways == 0
            assert loss_probability(100_000, slots, ways) == pytest.approx(probability, rel=0.01)
            assert messages_for(slots, probability, ways) == pytest.approx(100_000, rel=0.001)


@pytest.mark.parametrize(("ways", "per_key"), [(4, 17), (8, 5.8), (16, 3.1)])
def test_more_ways_need_fewer_slots(ways: int, per_key: float) -> None:
    """Slots per key for one loss in ten thousand, as measured; one way needs 10,000."""
    assert slots_for(1_000_000, 1e-4, ways) / 1_000_000 == pytest.approx(per_key, rel=0.03)


@pytest.mark.parametrize("ways", [1, 8, 16])
def test_what_is_lost_is_what_the_formula_says(ways: int) -> None:
    slots, lag = 1 << 14, 6000
    made = SlotFilter(slots, ways=ways, seed=11)
    keys = [b"%d" % n for n in range(40_000)]
    lost = checked = 0
    for n, key in enumerate(keys):
        send(made, key)
        if n >= lag:
            checked += 1
            place = made._table.known([keys[n - lag]])
            lost += not place
    expected = loss_probability(lag, slots, ways)
    assert lost / checked == pytest.approx(expected, abs=0.01 + expected * 0.05)


@pytest.mark.parametrize("fingerprint", [None, 64, 128])
def test_every_slot_is_reached(fingerprint: Fingerprint | None) -> None:
    """A rival reached 145,539 of 2**20 slots with 2 million keys; a fair hash leaves 14 % of them empty."""
    slots = 1 << 14
    made = SlotFilter(slots, ways=1, fingerprint=fingerprint, seed=5)
    for n in range(2 * slots):
        send(made, b"%d" % n)
    stats = made.stats()
    assert stats.confirmed == pytest.approx(slots * (1 - 0.1353), rel=0.02)
    full = SlotFilter(64, ways=8, fingerprint=fingerprint, seed=5)
    for n in range(5000):
        send(full, b"%d" % n)
    assert full.stats().confirmed == 64


@pytest.mark.parametrize("fingerprint", [None, 64, 128])
def test_another_seed_makes_other_collisions(fingerprint: Fingerprint | None) -> None:
    """Nobody can prepare keys that push each other out."""

    def survivors(seed: int) -> frozenset[int]:
        made = SlotFilter(256, ways=1, fingerprint=fingerprint, seed=seed)
        for n in range(1000):
            send(made, b"%d" % n)
        return frozenset(n for n in range(1000) if made._table.known([b"%d" % n]))

    assert survivors(1) == survivors(1)
    assert len({survivors(seed) for seed in range(10)}) == 10


@pytest.mark.parametrize(
    "shape",
    [
        *(pytest.param(lambda n, bits=bits: n << bits, id=f"n << {bits}") for bits in (0, 10, 24, 32, 40, 48)),
        pytest.param(lambda n: -n << 32, id="negative"),
        pytest.param(lambda n: n % 64 << 48 | n, id="shard, n"),
        pytest.param(lambda n: n // 1000 << 40 | n % 1000 << 20, id="time, counter"),
        pytest.param(lambda n: (1_700_000_000_000 + n) << 22, id="milliseconds"),
    ],
)
def test_int_keys_of_any_shape_spread_over_the_slots(shape: Callable[[int], int]) -> None:
    """An int hashes to itself, and low bits that are zero in all keys would leave slots empty."""
    made = SlotFilter(1 << 14, ways=8, seed=3)
    made.confirm_many([shape(n) for n in range(3000)])
    assert made.stats().evicted <= 3, "a collision in ten thousand, as of any keys"


@pytest.mark.parametrize("fingerprint", [None, 64, 128])
def test_no_new_key_is_taken_for_a_seen_one(fingerprint: Fingerprint | None) -> None:
    """Also the all-zero ones, with which an empty table of zeros is full."""
    made = SlotFilter(1 << 10, ways=8, fingerprint=fingerprint, seed=9)
    for key in (b"\0", b"\0" * 8, b"\0" * 16, "\0", 0, ""[:0] or "0"):
        assert made.reserve(key) is State.NEW
    for n in range(50_000):
        assert send(made, b"%d" % n) is State.NEW


def test_evictions_younger_than_the_window_are_counted() -> None:
    made = SlotFilter(80, ways=8, window=40, seed=2)
    stored: dict[bytes, int] = {}
    young = 0
    for n in range(3000):
        key = b"%d" % n
        before = {k for k in stored if made._table.known([k])}
        send(made, key)
        stored[key] = n
        for gone in before - {k for k in stored if made._table.known([k])}:
            young += n - stored.pop(gone) <= 40
    assert made.stats().evicted_young == young > 0


def test_a_table_sized_for_its_window_evicts_next_to_nothing_young() -> None:
    """By one in a million of 20,000 keys: 0.02 are expected, and three come once in a million runs.

    Python's own hash of bytes, which each process salts, decides.
    """
    window = 2000
    made = SlotFilter(slots_for(window, 1e-6, 16), ways=16, window=window, seed=4)
    rng = random.Random(4)  # seed 4
    for _ in range(20_000):
        send(made, rng.randbytes(16))
    assert made.stats().evicted_young <= 2
    assert made.stats().evicted > 0


def test_memory_does_not_grow_with_the_keys() -> None:
    made = SlotFilter(1 << 10, ways=8)
    for n in range(20_000):
        send(made, b"%d" % n)
    assert isinstance(made._table, _KeyTable)
    assert len(made._table._slots) == 1 << 10
    assert not made._open
    assert Counter(type(k) for k in made._table._slots) == {bytes: 1 << 10}


@pytest.mark.parametrize(
    ("slots", "options"),
    [(0, {}), (7, {}), (12, {"ways": 8}), (8, {"ways": 3}), (8, {"fingerprint": 32}), (8, {"window": 0})],
)
def test_a_table_that_is_none_is_refused(slots: int, options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        SlotFilter(slots, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("messages", "probability", "ways"), [(0, 0.1, 1), (10, 0.0, 1), (10, 1.0, 8), (10, 0.1, 5)])
def test_a_size_that_is_none_is_refused(messages: int, probability: float, ways: int) -> None:
    with pytest.raises(ConfigurationError):
        slots_for(messages, probability, ways)


def test_a_digest_across_two_slots_is_not_found() -> None:
    made = SlotFilter(8, ways=8, fingerprint=64, seed=1)
    table = made._table
    assert isinstance(table, _DigestTable)
    digest, bucket = table._place(b"a")
    table._data[3:11] = digest
    assert not table._find(digest, bucket)
    table._data[16:24] = digest
    assert table._find(digest, bucket)


def test_a_digest_of_zeros_is_not_an_empty_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub, because nobody can find a key with such a digest."""
    zeros = SimpleNamespace(digest=lambda: bytes(16))
    made = SlotFilter(8, ways=8, fingerprint=64, seed=1)
    monkeypatch.setattr("exactly_once.publish.slots.blake2b", lambda *_, **__: zeros)
    assert made.reserve(b"a") is State.NEW
    made.confirm(b"a")
    assert made.reserve(b"a") is State.DUPLICATE
