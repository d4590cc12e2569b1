"""What is asked of Kafka outside of the consuming client: over one client, also after it was closed."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from exactly_once._model import Partition
from exactly_once.embedded import Kafka
from exactly_once.errors import BrokerUnreachable, UnknownTopic
from exactly_once.kafka import admin
from exactly_once.kafka.admin import Cluster, Topic
from tests.support.topics import create_topic, produce


def refused(code: int = KafkaError.TOPIC_AUTHORIZATION_FAILED) -> Future[Any]:
    """Answer as a broker that describes no topics to this client."""
    answer: Future[Any] = Future()
    answer.set_exception(KafkaException(KafkaError(code)))
    return answer


def test_many_questions_share_one_client(bootstrap_servers: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AdminClient] = []

    def make(settings: dict[str, Any]) -> AdminClient:
        made.append(AdminClient(settings))
        return made[-1]

    monkeypatch.setattr(admin, "AdminClient", make)
    monkeypatch.setattr(admin, "_QUICK_SECONDS", 60.0)
    create_topic(bootstrap_servers, 2, name=name)
    produce(bootstrap_servers, name, 4, 2)
    partitions = [Partition(name, 0), Partition(name, 1)]
    with Cluster({"bootstrap.servers": bootstrap_servers}) as asked:
        for _ in range(3):
            assert asked.identify()
            assert name in asked.topic_names()
            assert asked.describe([name])[name].partitions == 2
            assert asked.ranges(partitions) == dict.fromkeys(partitions, (0, 2))
            assert asked.ends_within(60, partitions) == dict.fromkeys(partitions, 2)
            assert asked.leader_epochs(partitions) == dict.fromkeys(partitions, 0)
            assert asked.foreign_members(name) == []
            assert asked.reason() is None
    assert len(made) == 1


def test_closed_cluster_has_no_quick_answers_and_refuses_other_questions(bootstrap_servers: str, name: str) -> None:
    asked = Cluster({"bootstrap.servers": bootstrap_servers})
    asked.close()
    partitions = [Partition(name, 0)]
    assert asked.ends_within(1, partitions) == {}
    assert asked.leader_epochs(partitions) == {}
    with pytest.raises(BrokerUnreachable, match="was closed"):
        asked.ranges(partitions)


def test_broker_that_goes_away_behind_a_refused_description_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is asked for after the refusal, which is made up here: no broker goes away between the two at will."""
    monkeypatch.setattr(admin, "REQUEST_SECONDS", 0.2)
    with socket.socket() as nobody:  # bound, so that nobody else gets the port, and never listening
        nobody.bind(("127.0.0.1", 0))
        with (
            Cluster({"bootstrap.servers": f"127.0.0.1:{nobody.getsockname()[1]}"}) as asked,
            pytest.raises(BrokerUnreachable, match="no answer from Kafka"),
        ):
            asked.described("payments", refused())


def test_topic_that_is_not_there_is_unknown_also_where_none_is_described(bootstrap_servers: str, name: str) -> None:
    with Cluster({"bootstrap.servers": bootstrap_servers}) as asked:
        create_topic(bootstrap_servers, 3, name=name)
        assert asked.described(name, refused()) == Topic(None, 3)
        with pytest.raises(UnknownTopic, match=f"there is no topic '{name}.other'"):
            asked.described(f"{name}.other", refused())


@pytest.mark.usefixtures("own_servers")
def test_no_question_creates_a_topic() -> None:
    """Brokers create topics by default when an admin client asks for their metadata."""
    with (
        Kafka(properties={"auto.create.topics.enable": "true"}) as kafka,
        Cluster({"bootstrap.servers": kafka.bootstrap_servers, "allow.auto.create.topics": True}) as asked,
    ):
        with pytest.raises(UnknownTopic):
            asked.describe(["paymnets"])
        with pytest.raises(BrokerUnreachable):  # asks for metadata, to refresh the list of brokers
            asked.described("paymnets", refused(KafkaError.REQUEST_TIMED_OUT))
        with pytest.raises(UnknownTopic):
            asked.described("paymnets", refused())
        # The controller creates one after the other, and whatever a question asked for comes before this one.
        create_topic(kafka.bootstrap_servers, 1, name="payments")
        assert asked.topic_names() == ["payments"]
