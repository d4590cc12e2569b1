"""SharedSlotFilter on memcached in a container, which freezes and loses its memory while producers send."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from exactly_once.publish import DedupProducer, FilterUnavailable, SharedSlotFilter, Undelivered
from tests.support import journal
from tests.support.docker import Stack
from tests.support.topics import create_topic

KEYS = 200

MakeProducer = Callable[[], DedupProducer]


@pytest.fixture
def make_producer(cluster: Stack, bootstrap_servers: str, name: str) -> Iterator[MakeProducer]:
    """Make producers that share the slots of the cluster's memcached."""
    made: list[DedupProducer] = []

    def make() -> DedupProducer:
        server = "127.0.0.1", cluster.ports["MEMCACHED_PORT"]
        dedup = SharedSlotFilter(server, prefix=name, slots=1 << 32, timeout_seconds=1)
        made.append(DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=dedup))
        return made[-1]

    yield make
    for producer in made:
        with contextlib.suppress(Undelivered):  # what the other one was sending just then was not sent here
            producer.close()


@pytest.fixture
def topic(bootstrap_servers: str) -> str:
    """An empty topic."""
    return create_topic(bootstrap_servers, 3, replication=3)


def test_producers_share_a_memcached_that_freezes_and_starts_again(
    cluster: Stack, bootstrap_servers: str, topic: str, make_producer: MakeProducer
) -> None:
    """Frozen it lets nothing through; started again it has forgotten all, as is documented."""
    memcached = cluster["memcached"]
    one, other = make_producer(), make_producer()
    for number in range(KEYS):
        for producer in (one, other):
            producer.produce(topic, str(number), dedup_key=str(number))
    for producer in (one, other):
        assert producer.flush(60) == 0
    assert _times(bootstrap_servers, topic) == {1: KEYS}

    memcached.pause()
    try:
        with pytest.raises(FilterUnavailable):
            other.produce(topic, "new", dedup_key="new")
    finally:
        memcached.unpause()
    assert one.produce(topic, "0", dedup_key="0").duplicate
    other.produce(topic, "new", dedup_key="new").result(60)
    assert _times(bootstrap_servers, topic) == {1: KEYS + 1}

    memcached.kill()
    memcached.start()
    memcached.until_ready()
    again = make_producer()
    assert not again.produce(topic, "0", dedup_key="0").duplicate
    assert again.flush(60) == 0
    assert _times(bootstrap_servers, topic) == {1: KEYS, 2: 1}


def _times(bootstrap_servers: str, topic: str) -> dict[int, int]:
    """Tell how many messages are in the topic how many times."""
    values = Counter(record.value for record in journal.scan(bootstrap_servers, topic))
    return dict(Counter(values.values()))
