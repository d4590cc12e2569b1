"""Brokers that are killed and come back under load: workers live through it."""

from __future__ import annotations

import time

import pytest

from exactly_once.embedded import Kafka
from tests.conftest import PROTOCOLS
from tests.support.topics import create_topic, produce, until_in_sync
from tests.support.waiting import until
from tests.support.worker import Crew

RESTARTS = 3
AWAY_SECONDS = 2.0
"""Long enough that members lose their coordinator, and ask for it again and again."""


@pytest.mark.fault("C10", more=True)
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


@pytest.mark.slow
@pytest.mark.fault("C10")
@pytest.mark.timeout(300)
def test_brokers_killed_in_turn_and_then_all_of_them(conninfo: str, name: str) -> None:
    """Work goes on without each of three, so also without leader, coordinator and controller; and waits for all."""
    total = 0
    with Kafka(brokers=3) as kafka:
        servers = kafka.bootstrap_servers
        topic = create_topic(servers, 3, name=name, replication=3)

        def send() -> None:
            nonlocal total
            produce(servers, topic, 150, 3, start=total)
            total += 150

        with Crew(servers, conninfo, topic, [topic]) as crew:
            workers = [crew.start(options={"max_messages": 20}) for _ in range(2)]
            until(lambda: len(crew.owners()) == 2, 40, "both to own partitions")
            for node in (1, 2, 3):
                send()
                kafka.kill(node)
                send()
                crew.until_applied(total, 60)
                kafka.restart(node)
                until_in_sync(servers, topic)
            send()
            for node in (1, 2, 3):
                kafka.kill(node)
            kafka.start()
            send()
            crew.until_applied(total, 90)
            crew.end_well(*workers)
            assert not any(worker.count("failed") for worker in workers)
            crew.assert_exact()
