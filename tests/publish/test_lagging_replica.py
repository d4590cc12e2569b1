"""A restart while a replica lags: what the killed process sent is in the leader's log, and nobody is shown it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from uuid import uuid4

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from exactly_once.embedded.kafka import Kafka
from exactly_once.publish import DedupProducer, SequenceFilter
from tests.publish.test_sequences_on_broker import values
from tests.support.topics import until_in_sync
from tests.support.waiting import until

COUNT = 500
SENDS_AND_DIES = """
import os, sys, threading
from exactly_once.publish import DedupProducer, SequenceFilter
servers, topic, count, transactions = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "True"
producer = DedupProducer(
    {"bootstrap.servers": servers}, dedup=SequenceFilter(), producer_name="files", transactions=transactions
)
producer.produce(topic, b"0", sequence=0).result(60)
print("ready", flush=True)
sys.stdin.readline()
for n in range(1, count):
    producer.produce(topic, b"%d" % n, sequence=n)
threading.Timer(1, os.kill, (os.getpid(), 9)).start()
producer.flush()
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def three_brokers(own_servers: None) -> Iterator[Kafka]:
    # The replica is to be waited for until well after the restart.
    slow = {"broker.session.timeout.ms": "20000", "replica.lag.time.max.ms": "20000"}
    with Kafka(brokers=3, properties=slow) as kafka:
        yield kafka


def create_led_topic(kafka: Kafka, leader: int, *followers: int) -> str:
    """Create a topic of one partition on these brokers."""
    name = f"topic-{uuid4().hex[:12]}"
    topic = NewTopic(name, 1, replica_assignment=[[leader, *followers]], config={"min.insync.replicas": "2"})
    with AdminClient({"bootstrap.servers": kafka.bootstrap_servers}) as admin:
        admin.create_topics([topic])[name].result(60)
    until_in_sync(kafka.bootstrap_servers, name)
    return name


@pytest.mark.slow
@pytest.mark.parametrize(("transactions", "lagging"), [(True, 3), (False, 3), (False, 1)])
def test_a_restart_while_a_replica_lags_doubles_nothing(
    three_brokers: Kafka, *, transactions: bool, lagging: int
) -> None:
    """Without transactions the successor reads the topic when the replica surely is out of sync, and not before."""
    servers = three_brokers.bootstrap_servers
    topic = create_led_topic(three_brokers, 2, 1, 3)
    command = [sys.executable, "-c", SENDS_AND_DIES, servers, topic, str(COUNT), str(transactions)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        three_brokers.pause(lagging)
        try:
            child.stdin.write("go\n")
            child.stdin.flush()
            assert child.wait(60) == -9
            with DedupProducer(
                {"bootstrap.servers": servers},
                dedup=SequenceFilter(),
                producer_name="files",
                transactions=transactions,
            ) as successor:
                for n in range(successor.last_sequence_id(topic), COUNT):
                    successor.produce(topic, b"%d" % n, sequence=n)
        finally:
            three_brokers.resume(lagging)
    until(lambda: len(values(servers, topic)) >= COUNT, 30, "the messages")
    assert values(servers, topic) == list(range(COUNT))
