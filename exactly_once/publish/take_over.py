"""Take-overs: what a topic holds of the keys of a dead owner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from exactly_once._log import about
from exactly_once._model import Partition
from exactly_once.kafka.kinds import check_kinds

from .headers import headers_of, key_of
from .owners import TOPIC_ID, DeadOwner, Positions
from .tail import describe, ends_of, fence, id_of, read_tail, rest_of

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """What a take-over found in the log."""

    keys: Collection[bytes]
    """Encoded keys that are there, as the header ``exactly-once-key`` has them."""
    is_sure: bool
    """Whether nothing of the dead owner can arrive any more: it was fenced at the brokers, too."""


TakeOver = Callable[[DeadOwner, str], Found]


def end_positions(kafka: Mapping[str, Any], topics: Iterable[str]) -> Positions:
    """Return where topics end now, and their ids, as ``PublishOwner(positions=...)`` takes it.

    A take-over reads from there, and everything where the topic was made anew since.
    """
    # The id before the ends: of a topic that is made anew meanwhile, the two would look like one topic otherwise.
    return {
        topic: {TOPIC_ID: id_of(kafka, topic)} | {p.number: offset for p, offset in ends_of(kafka, topic).items()}
        for topic in topics
    }


class TopicTakeOver:
    """Finds the keys of dead owners in the topics themselves: ``take_over=TopicTakeOver(kafka)``.

    The scope of a window must be the topic's name. An owner with a transactional id is fenced at the brokers first,
    which ends what it left open; after that what is not in the topic cannot arrive any more. The topic is read to
    its high watermark; a transaction of another producer that is open there is waited for, ``seconds`` (120) at most.
    """

    def __init__(self, kafka: Mapping[str, Any], *, seconds: float = 120.0) -> None:
        check_kinds(TopicTakeOver.__init__, locals())
        self._kafka = dict(kafka)
        self._seconds = seconds

    def __call__(self, owner: DeadOwner, scope: str) -> Found:
        """Return what of the owner's is in the topic.

        Where the log does not hold all that was put there since its life began, what is not in the rest may have been
        among that, and is not sure to be absent: retention or compaction has removed messages, or the topic was made
        anew.

        :raises TailHidden: when another transaction hides the end for too long.
        """
        if owner.transactional_id is not None:
            fence(self._kafka, owner.transactional_id)
        given = dict(owner.positions.get(scope, {}))
        topic_id = given.pop(TOPIC_ID, None)
        if describe(self._kafka, scope).is_another(topic_id):
            given = {}
        starts = {Partition(scope, int(n)): offset for n, offset in given.items()}
        begin, trimmed = rest_of(self._kafka, scope, starts)
        messages = read_tail(self._kafka, scope, begin, seconds=self._seconds)
        keys = {key for message in messages if (key := key_of(headers_of(message))) is not None}
        # After it was read: its policy may have changed meanwhile.
        why = describe(self._kafka, scope).why_unsure(topic_id) or trimmed
        if why is not None:
            said = (
                "%r does not hold all that was put there since %r (%s) began, and keys that are not there are unknown: "
                "%s"
            )
            extra = about("take_over_trimmed") | {"topic": scope, "producer": owner.name, "owner": owner.id}
            logger.warning(said, scope, owner.name, owner.id, why, extra=extra)
        return Found(keys, is_sure=owner.transactional_id is not None and why is None)
