"""Brokers that are killed, frozen or restarted, and a leader whose log lacks what had been acknowledged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.chaos.conftest import MakeCrew
from tests.docker.conftest import BROKER_PORTS, BROKERS, coordinator_of
from tests.support.docker import Stack, docker
from tests.support.topics import create_topic, produce, until_in_sync

PARTITIONS = 3
BATCH = 150
OPTIONS = {"max_messages": 20}
LONG = 120


@pytest.fixture
def topic(bootstrap_servers: str) -> str:
    """A topic that survives the loss of a broker."""
    return create_topic(bootstrap_servers, PARTITIONS, replication=3)


@pytest.fixture(autouse=True)
def _brokers_come_back(cluster: Stack) -> Iterator[None]:
    yield
    for broker in BROKERS:
        docker("unpause", cluster[broker].name, check=False)
        cluster[broker].start()
    cluster.until_ready(*BROKERS)


@pytest.mark.fault("C10")
@pytest.mark.parametrize("fault", ["killed", "restarted"])
def test_brokers_one_after_the_other(
    fault: str, topic: str, cluster: Stack, bootstrap_servers: str, make_crew: MakeCrew
) -> None:
    """Work goes on without each of them in turn, so also without the leader, the coordinator and the controller."""
    crew = make_crew(topic)
    workers = [crew.start(options=OPTIONS), crew.start(options=OPTIONS)]
    total = 0
    for broker in BROKERS:
        produce(bootstrap_servers, topic, BATCH, PARTITIONS, start=total)
        if fault == "killed":
            cluster[broker].kill()
        else:
            cluster[broker].restart()
        produce(bootstrap_servers, topic, BATCH, PARTITIONS, start=total + BATCH)
        total += 2 * BATCH
        crew.until_applied(total, LONG)
        if fault == "killed":
            cluster[broker].start()
        cluster.until_ready(broker)
        until_in_sync(bootstrap_servers, topic)
    crew.end_well(*workers)
    crew.assert_exact()


def test_frozen_coordinator_is_replaced_and_forgotten(
    topic: str, cluster: Stack, bootstrap_servers: str, make_crew: MakeCrew
) -> None:
    """Its connections stay open and nothing answers; awake again it is a broker as before."""
    crew = make_crew(topic, kafka={"socket.timeout.ms": 10_000})
    workers = [crew.start(options=OPTIONS), crew.start(options=OPTIONS)]
    produce(bootstrap_servers, topic, BATCH, PARTITIONS)
    crew.until_applied(BATCH, LONG)
    frozen = cluster[coordinator_of(bootstrap_servers, crew.group)]
    frozen.pause()
    produce(bootstrap_servers, topic, BATCH, PARTITIONS, start=BATCH)
    crew.until_applied(2 * BATCH, LONG)
    frozen.unpause()
    until_in_sync(bootstrap_servers, topic)
    produce(bootstrap_servers, topic, BATCH, PARTITIONS, start=2 * BATCH)
    crew.until_applied(3 * BATCH, LONG)
    crew.end_well(*workers)
    crew.assert_exact()


@pytest.mark.fault("C10")
def test_all_brokers_killed_at_once(topic: str, cluster: Stack, bootstrap_servers: str, make_crew: MakeCrew) -> None:
    """What they had acknowledged is on their disks; the workers wait for them and go on."""
    crew = make_crew(topic)
    workers = [crew.start(options=OPTIONS, handler_seconds=0.1), crew.start(options=OPTIONS, handler_seconds=0.1)]
    produce(bootstrap_servers, topic, 2 * BATCH, PARTITIONS)
    crew.until_applied(BATCH, LONG)
    docker("kill", *(cluster[broker].name for broker in BROKERS))
    docker("start", *(cluster[broker].name for broker in BROKERS))
    cluster.until_ready(*BROKERS)
    produce(bootstrap_servers, topic, BATCH, PARTITIONS, start=2 * BATCH)
    crew.until_applied(3 * BATCH, LONG)
    crew.end_well(*workers)
    crew.assert_exact()


@pytest.mark.fault("C3")
@pytest.mark.parametrize(("written_since", "error"), [(BATCH // 3, "OffsetBeyondLogEnd"), (2 * BATCH, "LogTruncated")])
def test_leader_without_the_end_of_the_log_is_detected(
    written_since: int, error: str, cluster: Stack, make_crew: MakeCrew, name: str
) -> None:
    """An unclean election truncates the log below the ledger; new messages may have reached or passed it since.

    Their offsets were applied already, so reading on would lose them; effects of what is gone from Kafka stay.
    """
    bootstrap_servers = cluster.bootstrap_servers(*BROKER_PORTS)
    leader, follower = cluster["kafka-1"], cluster["kafka-2"]
    _create_uncleanly(bootstrap_servers, name)
    crew = make_crew(name)
    worker = crew.start(options=OPTIONS)
    produce(bootstrap_servers, name, BATCH, 1)
    crew.until_applied(BATCH, LONG)
    follower.kill()
    produce(bootstrap_servers, name, BATCH, 1, start=BATCH)
    crew.until_applied(2 * BATCH, LONG)
    crew.end_well(worker)
    leader.kill()
    follower.start()
    follower.until_ready()
    produce(bootstrap_servers, name, written_since, 1, start=2 * BATCH)

    worker = crew.start(ready=False, options={**OPTIONS, "stop_on_bad_partition": True})
    assert worker.wait("failed", LONG)["error"] == error
    verdict = crew.verdict(name)
    gone = [identity.offset for identity in verdict.altered] + [entry.offset for entry in verdict.foreign]
    assert sorted(gone) == list(range(BATCH, 2 * BATCH)), verdict
    assert not verdict.duplicated
    assert [identity.offset for identity in verdict.lost] == list(range(2 * BATCH, BATCH + written_since))


def _create_uncleanly(bootstrap_servers: str, name: str) -> None:
    """Create a topic that prefers availability, on the first two brokers."""
    settings = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.create_topics([NewTopic(name, 1, replica_assignment=[[1, 2]], config=settings)])[name].result(60)
    until_in_sync(bootstrap_servers, name)
