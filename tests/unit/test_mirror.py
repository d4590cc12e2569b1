"""What proves a membership: the answer to the very commit that asked, without an error of the whole or of a part.

The client is a stand-in: librdkafka gives the error of a part for one of the whole, and answers commits in order.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, TopicPartition

from exactly_once._model import Partition
from exactly_once.consumer.kafka_offsets import Mirror

P, Q = Partition("t", 0), Partition("t", 1)
OFFSETS = {P: (5, None), Q: (6, 3)}


def asked() -> tuple[Mirror, Mock, list[TopicPartition]]:
    """A mirror whose proof is on its way, and what the client was given to commit."""
    mirror, client = Mirror(group_id="g"), Mock()
    assert mirror.prove(client, OFFSETS) is None
    return mirror, client, client.commit.call_args.kwargs["offsets"]


def refused(code: int) -> Any:
    """A partition of an answer, with an error; a real one cannot be given any."""
    return Mock(topic="t", partition=1, error=KafkaError(code))


def test_its_answer_proves_the_membership() -> None:
    mirror, client, sent = asked()
    mirror.on_commit(None, sent)
    assert mirror.prove(client, {}) == {P, Q}
    assert not mirror.is_proving


def test_the_answer_to_another_commit_proves_nothing() -> None:
    mirror, client, sent = asked()
    older = [TopicPartition(tp.topic, tp.partition, tp.offset, metadata="exactly_once") for tp in sent]
    mirror.on_commit(None, older)
    assert mirror.prove(client, {}) is None
    assert mirror.is_proving


@pytest.mark.parametrize("code", [KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID])
@pytest.mark.parametrize("is_partial", [False, True])
def test_an_error_of_the_whole_or_of_one_partition_proves_nothing(code: int, *, is_partial: bool) -> None:
    mirror, client, sent = asked()
    if is_partial:
        part = refused(code)
        part.metadata = sent[1].metadata
        mirror.on_commit(None, [sent[0], part])
    else:
        mirror.on_commit(KafkaError(code), sent)
    assert mirror.prove(client, {}) == set()
    assert not mirror.is_proving


def test_nothing_is_committed_by_a_client_that_has_lost_its_session() -> None:
    """A static member that commits without its id is told that another process has fenced it."""
    mirror, client = Mirror(group_id="g"), Mock()
    client.memberid.return_value = ""
    mirror.applied(P, 5, None)
    mirror.send(client, owned=[P], at_once=True)
    assert mirror.prove(client, OFFSETS) == set()
    client.commit.assert_not_called()
    assert mirror.is_idle
