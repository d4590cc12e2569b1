"""A broker that is killed and comes back under load: workers of all three protocols live through it."""

from __future__ import annotations

import time

import pytest

from exactly_once.embedded import Kafka
from tests.conftest import PROTOCOLS
from tests.support.topics import create_topic, produce
from tests.support.worker import Crew

RESTARTS = 3
AWAY_SECONDS = 2.0
"""Long enough that members lose their coordinator, and ask for it again and again."""


@pytest.mark.fault("C10")
def test_no_worker_is_aborted_by_its_client(conninfo: str, name: str) -> None:
    """More members than partitions, so that some have nothing: whoever then asks for its group is aborted."""
    crews: list[Crew] = []
    with Kafka() as kafka:
        try:
            for protocol, settings in PROTOCOLS.items():
                topic = create_topic(kafka.bootstrap_servers, 1, name=f"{name}-{protocol}")
                produce(kafka.bootstrap_servers, topic, 100, 1)
                crew = Crew(kafka.bootstrap_servers, conninfo, topic, [topic], kafka=settings).__enter__()
                crews.append(crew)
                for _ in range(2):
                    crew.start(options={"max_messages": 5})
            for _ in range(RESTARTS):
                kafka.kill()
                time.sleep(AWAY_SECONDS)
                kafka.restart()
                time.sleep(AWAY_SECONDS)
            for crew in crews:
                produce(kafka.bootstrap_servers, crew.group, 50, 1, start=100)
                crew.until_applied(150, 90)
                crew.assert_exact()
            for crew in crews:
                crew.end_well(*crew.workers)
        finally:
            for crew in crews:
                crew.__exit__(None, None, None)
