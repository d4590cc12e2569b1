"""What is asked of Kafka outside of the consuming client: over one client, also after it was closed."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from exactly_once._model import Partition
from exactly_once.errors import BrokerUnreachable
from exactly_once.kafka import admin
from exactly_once.kafka.admin import Cluster
from tests.support.topics import create_topic, produce


def test_many_questions_share_one_client(bootstrap_servers: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AdminClient] = []

    def make(settings: dict[str, Any]) -> AdminClient:
        made.append(AdminClient(settings))
        return made[-1]

    monkeypatch.setattr(admin, "AdminClient", make)
    create_topic(bootstrap_servers, 2, name=name)
    produce(bootstrap_servers, name, 4, 2)
    partitions = [Partition(name, 0), Partition(name, 1)]
    with Cluster({"bootstrap.servers": bootstrap_servers}) as asked:
        for _ in range(3):
            assert asked.identify()
            assert name in asked.topic_names()
            assert asked.describe([name])[name].partitions == 2
            assert asked.ranges(partitions) == dict.fromkeys(partitions, (0, 2))
            assert asked.ends_within(5, partitions) == dict.fromkeys(partitions, 2)
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
