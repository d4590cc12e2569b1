"""What proves a membership: the answer to the very commit that asked, without an error of the whole or of a part.

The client is a stand-in: librdkafka gives the error of a part for one of the whole, and answers commits in order.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from exactly_once._model import Partition
from exactly_once.consumer.kafka_offsets import KafkaOffsets
from exactly_once.consumer.partitions import PartitionState, Phase

P, Q = Partition("t", 0), Partition("t", 1)
OFFSETS = {P: (5, None), Q: (6, 3)}


def asked() -> tuple[KafkaOffsets, Mock, list[TopicPartition]]:
    """A mirror whose proof is on its way, and what the client was given to commit."""
    mirror, client = KafkaOffsets(group_id="g"), Mock()
    assert mirror.check_membership(client, OFFSETS) is None
    return mirror, client, client.commit.call_args.kwargs["offsets"]


def refused(code: int) -> Any:
    """A partition of an answer, with an error; a real one cannot be given any."""
    return Mock(topic="t", partition=1, error=KafkaError(code))


def test_its_answer_proves_the_membership() -> None:
    mirror, client, sent = asked()
    mirror.on_commit(None, sent)
    assert mirror.check_membership(client, {}) == {P, Q}
    assert not mirror.is_checking


def test_the_answer_to_another_commit_proves_nothing() -> None:
    mirror, client, sent = asked()
    older = [TopicPartition(tp.topic, tp.partition, tp.offset, metadata="exactly_once") for tp in sent]
    mirror.on_commit(None, older)
    assert mirror.check_membership(client, {}) is None
    assert mirror.is_checking


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
    assert mirror.check_membership(client, {}) == set()
    assert not mirror.is_checking


def test_offsets_are_committed_once_and_of_what_is_owned_only() -> None:
    kafka_offsets, client = KafkaOffsets(group_id="g"), Mock()
    states = {
        P: PartitionState(phase=Phase.OWNED, next_offset=5, leader_epoch=2, is_to_mirror=True),
        Q: PartitionState(phase=Phase.FENCED, next_offset=6, is_to_mirror=True),
    }
    kafka_offsets.send(client, states, at_once=True)
    (sent,) = client.commit.call_args.kwargs["offsets"]
    assert (sent.topic, sent.partition, sent.offset, sent.leader_epoch) == ("t", 0, 5, 2)
    kafka_offsets.send(client, states, at_once=True)
    assert client.commit.call_count == 1


def test_nothing_is_committed_by_a_client_that_has_lost_its_session() -> None:
    """A static member that commits without its id is told that another process has fenced it."""
    kafka_offsets, client = KafkaOffsets(group_id="g"), Mock()
    client.memberid.return_value = ""
    states = {P: PartitionState(phase=Phase.OWNED, next_offset=5, is_to_mirror=True)}
    kafka_offsets.send(client, states, at_once=True)
    assert kafka_offsets.check_membership(client, OFFSETS) == set()
    client.commit.assert_not_called()
    assert kafka_offsets.is_idle


@pytest.mark.parametrize("refusal", ["raised", "no member", "answered", "answered for a part"])
def test_what_kafka_has_not_taken_is_told_again(refusal: str) -> None:
    """Without another message nothing else would tell it, and the lag would stand there for ever."""
    mirror, client = KafkaOffsets(group_id="g"), Mock()
    states = {p: PartitionState(phase=Phase.OWNED, next_offset=5, is_to_mirror=True, compared_epoch=0) for p in (P, Q)}
    if refusal == "raised":
        client.commit.side_effect = KafkaException(KafkaError(KafkaError._STATE))
    elif refusal == "no member":
        client.memberid.return_value = ""
    mirror.send(client, states, at_once=True)
    if "answered" in refusal:
        sent = client.commit.call_args.kwargs["offsets"]
        whole = None if "part" in refusal else KafkaError(KafkaError.REBALANCE_IN_PROGRESS)
        mirror.on_commit(whole, [refused(KafkaError.REBALANCE_IN_PROGRESS), sent[0]] if whole is None else sent)
    client.commit.side_effect, client.memberid.return_value = None, "a member"
    client.commit.reset_mock()
    mirror.send(client, states, at_once=True)
    told = client.commit.call_args.kwargs["offsets"]
    assert {tp.partition for tp in told} == ({1} if "part" in refusal else {0, 1})
    mirror.on_commit(None, told)
    client.commit.reset_mock()
    mirror.send(client, states, at_once=True)
    assert not client.commit.called


def test_what_was_refused_is_not_told_again_before_a_new_tenure_was_compared() -> None:
    """Another database may have told Kafka a later offset meanwhile, which would be overwritten unseen."""
    mirror, client = KafkaOffsets(group_id="g"), Mock()
    mirror.on_commit(KafkaError(KafkaError.ILLEGAL_GENERATION), [TopicPartition("t", 0, 5)])
    state = PartitionState(phase=Phase.OWNED, next_offset=9, epoch=3)
    mirror.send(client, {P: state}, at_once=True)
    assert not client.commit.called
    state.compared_epoch = 3
    mirror.send(client, {P: state}, at_once=True)
    assert client.commit.called
