"""What a principal may not do is told, and nothing is taken for proved that it may not see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from exactly_once.embedded import Kafka
from exactly_once.errors import BrokerUnreachable, ConfigurationError
from exactly_once.publish import DedupProducer, SequenceFilter
from exactly_once.publish.owners import DeadOwner
from exactly_once.publish.take_over import TopicTakeOver
from tests.support.topics import create_topic
from tests.support.waiting import until

ANYBODY: Any = None


@pytest.fixture(scope="module")
def guarded(own_servers: None) -> Iterator[str]:
    """A broker that lets everybody do what no ACL denies."""
    authorizer = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
    with Kafka(properties={"authorizer.class.name": authorizer, "allow.everyone.if.no.acl.found": "true"}) as kafka:
        yield kafka.bootstrap_servers


def deny(servers: str, kind: Any, name: str, operation: Any) -> None:
    """Deny one thing to everybody; without a rule that allows the others these would be denied, too."""
    admin = AdminClient({"bootstrap.servers": servers})
    bindings = [
        AclBinding(kind, name, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*", what, rule)
        for what, rule in (
            (AclOperation.ALL, AclPermissionType.ALLOW),
            (operation, AclPermissionType.DENY),
        )
    ]
    for future in admin.create_acls(bindings).values():
        future.result()
    wanted = AclBindingFilter(
        kind, name, ResourcePatternType.LITERAL, ANYBODY, ANYBODY, AclOperation.ANY, AclPermissionType.ANY
    )
    until(lambda: len(admin.describe_acls(wanted).result()) == len(bindings), 30, "the rules")


def producer(servers: str, **options: Any) -> DedupProducer:
    """One whose numbers are recovered from the topic."""
    return DedupProducer({"bootstrap.servers": servers}, dedup=SequenceFilter(), producer_name="files", **options)


def test_reading_a_topic_needs_no_right_on_a_group(guarded: str, name: str) -> None:
    topic = create_topic(guarded, 2, name=name)
    deny(guarded, ResourceType.GROUP, "*", AclOperation.ALL)
    for life in range(2):
        with producer(guarded, transactions=bool(life)) as made:
            assert made.last_sequence_id(topic) == 10 * life - 1
            for number in range(10 * life, 10 * life + 10):
                made.produce(topic, b"", sequence=number)


def test_a_topic_that_may_not_be_read_is_named_with_the_right(guarded: str, name: str) -> None:
    topic = create_topic(guarded, 1, name=name)
    with producer(guarded) as made:
        made.produce(topic, b"", sequence=1).result(30)
    deny(guarded, ResourceType.TOPIC, topic, AclOperation.READ)
    with producer(guarded) as made, pytest.raises(BrokerUnreachable, match=f"{topic}.*grant READ"):
        made.last_sequence_id(topic)


def test_a_topic_of_which_nobody_tells_whether_it_is_compacted_proves_nothing(guarded: str, name: str) -> None:
    topic = create_topic(guarded, 1, name=name)
    deny(guarded, ResourceType.TOPIC, topic, AclOperation.DESCRIBE_CONFIGS)
    with producer(guarded) as made, pytest.raises(ConfigurationError, match="grant DescribeConfigs on the topic"):
        made.last_sequence_id(topic)
    owner = DeadOwner(id=1, name="dead", positions={}, transactional_id="dead")
    assert TopicTakeOver({"bootstrap.servers": guarded})(owner, topic).is_sure is False
