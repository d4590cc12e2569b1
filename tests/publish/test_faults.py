"""The faults that a filter could cause itself, with producer and broker: E5 (a key too old) and E6 (a false positive).

Where the others are: E1 test_lost_reports, E2 and E3 test_take_over, E4 test_failover, E7 test_transactions and
test_transaction_crashes, E8 test_producer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from exactly_once.publish import DedupProducer, Filter, SlotFilter, WindowFilter
from tests.publish.test_sequences_on_broker import values


def send(bootstrap_servers: str, topic: str, made: Filter[Any], numbers: list[int]) -> None:
    """Send numbers one after another, each with its outcome awaited."""
    with DedupProducer({"bootstrap.servers": bootstrap_servers, "linger.ms": 0}, dedup=made) as producer:
        for n in numbers:
            producer.produce(topic, b"%d" % n, dedup_key=n).result(60)


@pytest.mark.fault("E5")
def test_a_retry_after_the_window_is_a_duplicate_in_the_log(bootstrap_servers: str, topic: str) -> None:
    """Fault E5: it is stated, so the window must be longer than the longest retry."""
    send(bootstrap_servers, topic, WindowFilter(keys=3), [1, 2, 3, 1, 4, 5, 6, 7, 8, 9, 1])
    assert values(bootstrap_servers, topic) == [1, 1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.fault("E6")
@pytest.mark.parametrize(
    "make",
    [
        lambda: SlotFilter(1, ways=1),
        lambda: SlotFilter(16, ways=16, fingerprint=64),
    ],
    ids=["one slot", "fingerprints"],
)
def test_collisions_drop_nothing(bootstrap_servers: str, topic: str, make: Callable[[], SlotFilter]) -> None:
    """Fault E6: a slot that is taken is overwritten; nobody is refused for it."""
    send(bootstrap_servers, topic, make(), list(range(100)))
    assert values(bootstrap_servers, topic) == list(range(100))
