"""Taking over from a dead owner: fence it at the brokers, then look which of its keys are in the topic."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from exactly_once._log import about
from exactly_once._model import Partition

from .headers import headers_of, key_of
from .owners import DeadOwner
from .postgres import Found
from .tail import ends_of, fence, ranges_of, read_tail

logger = logging.getLogger(__name__)


def end_positions(kafka: Mapping[str, Any], topics: Iterable[str]) -> dict[str, dict[int, int]]:
    """Return where topics end now, as ``PublishOwner(positions=...)`` takes it: a take-over reads from there."""
    return {topic: {p.number: offset for p, offset in ends_of(kafka, topic).items()} for topic in topics}


class TopicTakeOver:
    """Finds the keys of dead owners in the topics themselves: ``take_over=TopicTakeOver(kafka)``.

    The scope of a window must be the topic's name. An owner with a transactional id is fenced at the brokers first,
    which ends what it left open; after that what is not in the topic cannot arrive any more. Reading goes on to where
    the log ends, also behind transactions of others that are still open.
    """

    def __init__(self, kafka: Mapping[str, Any], *, seconds: float = 120.0) -> None:
        self._kafka = dict(kafka)
        self._seconds = seconds

    def __call__(self, owner: DeadOwner, scope: str) -> Found:
        """Return what of the owner's is in the topic.

        Where retention has removed messages since its life began, what is not in the rest may have been among them, and
        is not sure to be absent.

        :raises TailHidden: when another transaction hides the end for too long.
        """
        if owner.transactional_id is not None:
            fence(self._kafka, owner.transactional_id)
        positions = owner.positions.get(scope)
        starts = None if positions is None else {Partition(scope, int(n)): o for n, o in positions.items()}
        lows = {p: low for p, (low, _) in ranges_of(self._kafka, scope).items()}
        is_trimmed = any(low > (0 if starts is None else starts.get(p, 0)) for p, low in lows.items())
        if is_trimmed:
            logger.warning(
                "retention has removed messages of %r since %r (%s) began: keys that are not in the rest are unknown",
                scope,
                owner.name,
                owner.id,
                extra=about("take_over_trimmed") | {"topic": scope, "producer": owner.name, "owner": owner.id},
            )
            starts = {p: max(low, (starts or {}).get(p, 0)) for p, low in lows.items()}
        keys = set()
        for message in read_tail(self._kafka, scope, starts, seconds=self._seconds):
            key = key_of(headers_of(message))
            if key is not None:
                keys.add(key)
        return Found(keys, is_sure=owner.transactional_id is not None and not is_trimmed)
