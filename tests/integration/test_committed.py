"""What Kafka holds for a group is asked for without harm, also while the group's coordinator is not ready."""

from __future__ import annotations

import subprocess
import sys

import pytest

from exactly_once.embedded import Kafka
from tests.support.topics import create_topic

PROGRAM = """
import contextlib, sys
from exactly_once import BrokerUnreachable
from exactly_once.kafka.admin import Cluster

cluster = Cluster({"bootstrap.servers": sys.argv[1]})
for number in range(60):
    with contextlib.suppress(BrokerUnreachable):
        assert cluster.committed(f"group-{number}", sys.argv[2], 1) == {}
"""


@pytest.mark.usefixtures("own_servers")
def test_asking_a_new_broker_again_and_again_does_not_end_the_process() -> None:
    """An admin client of librdkafka dies when it is told that the coordinator is another, or still loading."""
    with Kafka() as kafka:
        topic = create_topic(kafka.bootstrap_servers, 1)
        command = [sys.executable, "-c", PROGRAM, kafka.bootstrap_servers, topic]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
