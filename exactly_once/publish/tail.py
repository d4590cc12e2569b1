"""The tail of a topic: every committed message from given offsets up to where the log ends now.

The end is the high watermark, also where a transaction is open: another producer's open transaction hides committed
messages behind it from a reader that stops at the end it is shown. So reading goes on until the position has reached
the watermark. Whoever wants nobody to write meanwhile fences the writer first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import TimeoutError as Silence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import tenacity
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]

from exactly_once._log import about
from exactly_once._model import Partition
from exactly_once.errors import BrokerUnreachable, UnknownTopic
from exactly_once.kafka.admin import REQUEST_SECONDS, Cluster
from exactly_once.kafka.settings import admin_settings
from exactly_once.ledger.retry import retry_for

from .errors import TailHidden, TailLost

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BATCH = 10_000
_SECONDS = 120.0
# After so long without a message it is logged that one is waited for: brokers that answer take a second.
_TOLD_SECONDS = 5.0
_NOT_ALLOWED = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
_RANGES_SECONDS = 30.0
# For so long the broker that answers may be behind the one that has made a topic, and how often it is asked.
_BEHIND_SECONDS = 3.0
_AGAIN_SECONDS = 0.2
# What the client says of a partition that nobody leads.
_NO_LEADER = -1
# The brokers' default of replica.lag.time.max.ms, where they do not tell.
_LAG_SECONDS = 30.0


class Log(NamedTuple):
    """What a topic is: which one of its name, and what its log promises."""

    cluster_id: str | None
    topic_id: str | None
    is_compacted: bool | None
    """None where the principal may not read that."""
    replicas: int
    """Of the partition that has most."""
    lag_seconds: float
    """For how long a replica may lag behind and still be waited for."""

    def is_another(self, topic_id: str | None) -> bool:
        """Tell whether this is not the topic of that id but one that was made anew; False where ids are not known."""
        return topic_id is not None and self.topic_id is not None and topic_id != self.topic_id

    def why_unsure(self, topic_id: str | None = None) -> str | None:
        """Return why a message that its log does not hold may have been there nevertheless; None if it was not."""
        if self.is_compacted is not False:
            told = "it is" if self.is_compacted else "whether it is cannot be read, without DescribeConfigs: it may be"
            return f"{told} compacted: messages were perhaps cleaned away"
        return "it was deleted and made anew" if self.is_another(topic_id) else None


def describe(kafka: Mapping[str, Any], topic: str) -> Log:
    """Return what the brokers tell of a topic.

    :raises BrokerUnreachable: when they do not answer.
    """

    def log(cluster: Cluster) -> Log:
        cluster_id, topic_id = cluster.identify(), cluster.describe([topic])[topic].topic_id
        try:
            partitions = admin.list_topics(topic, timeout=REQUEST_SECONDS).topics[topic].partitions.values()
            # A client that has just connected again may know the topic and no partition or leader of it.
            leaders = sorted({partition.leader for partition in partitions} - {_NO_LEADER})
            if not leaders:
                raise BrokerUnreachable(f"nobody describes {topic!r}: no leader is known")
            policy = _setting(admin, ConfigResource.Type.TOPIC, topic, "cleanup.policy")
            # A leader's setting decides, and each broker tells its own only: another one may be away.
            lag = _setting(admin, ConfigResource.Type.BROKER, str(leaders[0]), "replica.lag.time.max.ms")
        except KafkaException as error:
            raise BrokerUnreachable(f"nobody describes {topic!r}: {error.args[0].str()}") from error
        return Log(
            cluster_id,
            topic_id,
            is_compacted=None if policy is None else "compact" in policy,
            replicas=max(len(partition.replicas) for partition in partitions),
            lag_seconds=_LAG_SECONDS if lag is None else int(lag) / 1000,
        )

    # As with the fence: without a logger of its own the client would print what is no news here. Nor may a question
    # create the topic.
    with AdminClient({**admin_settings(kafka), "log_level": 3, "allow.auto.create.topics": False}) as admin:
        return _asked(kafka, log)


def _setting(admin: AdminClient, kind: Any, name: str, key: str) -> str | None:
    """Return a setting of a topic or a broker; None where one may not read it."""
    resource = ConfigResource(kind, name)
    try:
        settings = admin.describe_configs([resource], request_timeout=REQUEST_SECONDS)[resource].result(REQUEST_SECONDS)
    except Silence as error:
        raise BrokerUnreachable(f"nobody tells {key} of {name!r}") from error
    except KafkaException as error:
        if error.args[0].code() not in _NOT_ALLOWED:
            raise
        logger.warning(
            "%s of %r cannot be checked: %s", key, name, error.args[0].str(), extra=about("setting_not_readable")
        )
        return None
    return str(settings[key].value) if key in settings else None


def fence(kafka: Mapping[str, Any], transactional_id: str, *, seconds: float = 60.0) -> None:
    """Fence whoever writes under this transactional id, and end what it left open.

    :raises confluent_kafka.KafkaException: when the brokers do not do it in time.
    """
    # Without a logger of its own the client would print what is no news here.
    producer = Producer({**admin_settings(kafka), "transactional.id": transactional_id, "log_level": 3})
    producer.init_transactions(seconds)


def id_of(kafka: Mapping[str, Any], topic: str) -> str | None:
    """Return which topic of its name it is; None from old brokers."""
    return _asked(kafka, lambda cluster: cluster.describe([topic])[topic].topic_id)


def ends_of(kafka: Mapping[str, Any], topic: str) -> dict[Partition, int]:
    """Return where the log of each partition ends now, open transactions included."""
    return {partition: high for partition, (_, high) in ranges_of(kafka, topic).items()}


def rest_of(
    kafka: Mapping[str, Any], topic: str, starts: Mapping[Partition, int], *, ahead: int = 0
) -> tuple[dict[Partition, int], str | None]:
    """Return where to read what is left of a log behind ``starts``, and why there may have been more; None if not.

    A log that ends before its start is another one, and is read as a whole; a start may be ``ahead`` by so many records
    that are still to come.
    """
    begin, why = {}, None
    for partition, (low, high) in ranges_of(kafka, topic).items():
        start = starts.get(partition, 0)
        is_there = low <= start <= high + ahead
        begin[partition] = min(start, high) if is_there else low
        if not is_there:
            why = "retention has removed messages, or the topic was made anew"
    return begin, why


def read_tail(
    kafka: Mapping[str, Any], topic: str, starts: Mapping[Partition, int] | None, *, seconds: float = _SECONDS
) -> Generator[Message, None, None]:
    """Yield the messages from ``starts`` up to now; without ``starts`` all there are.

    A partition that ``starts`` does not name was added since, and is read from its beginning.

    :raises TailLost: when retention has removed messages from ``starts`` on, or the log ends before.
    :raises TailHidden: when an open transaction hides the end for longer than ``seconds``.
    :raises BrokerUnreachable: when the brokers fall silent for so long, or do not let this principal read.
    """
    begin: dict[Partition, int] = {}
    todo: dict[Partition, int] = {}
    for partition, (low, high) in ranges_of(kafka, topic).items():
        start = low if starts is None else starts.get(partition, 0)
        needed = f"{partition} must be read from offset {start}, but its log"
        if start < low:
            raise TailLost(
                f"{needed} starts at {low}: retention has removed messages that nobody has looked at. Decide what they "
                "were, then start from a new snapshot"
            )
        if start > high:
            raise TailLost(
                f"{needed} ends at {high}: the topic was made anew, or brokers have lost messages that they had "
                "acknowledged. Remove the snapshot to begin anew"
            )
        if start < high:
            begin[partition], todo[partition] = start, high
    if todo:
        yield from _read(kafka, begin, todo, seconds)


def ranges_of(kafka: Mapping[str, Any], topic: str) -> dict[Partition, tuple[int, int]]:
    """Return where the log of each partition begins and ends.

    :raises BrokerUnreachable: also when partitions are not told, as to a principal who may not ask: a topic of which
        nothing is seen is not read to its end.
    """

    def ranges(cluster: Cluster) -> dict[Partition, tuple[int, int]]:
        count = cluster.describe([topic])[topic].partitions
        if not count:
            raise BrokerUnreachable(f"nobody tells the partitions of {topic!r}: may this principal DESCRIBE it?")
        return cluster.ranges([Partition(topic, number) for number in range(count)])

    return _asked(kafka, ranges)


def starts_since(kafka: Mapping[str, Any], partitions: Iterable[Partition], moment: datetime) -> dict[Partition, int]:
    """Return the first offset of each partition whose message is not older."""
    return _asked(kafka, lambda cluster: cluster.at(partitions, moment))


def _asked(kafka: Mapping[str, Any], question: Callable[[Cluster], T]) -> T:
    """Return what the brokers answer, asked again while they cannot: a leader may be on its way."""
    until_known = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(UnknownTopic),
        wait=tenacity.wait_fixed(_AGAIN_SECONDS),
        stop=tenacity.stop_after_delay(_BEHIND_SECONDS),
        reraise=True,
    )
    with Cluster(admin_settings(kafka)) as cluster:
        return until_known(lambda: retry_for(_RANGES_SECONDS)(question, cluster))


def _read(
    kafka: Mapping[str, Any], begin: Mapping[Partition, int], todo: dict[Partition, int], seconds: float
) -> Generator[Message, None, None]:
    client = Consumer(
        {
            # Without a logger of its own it would print that it takes none of a producer's settings.
            "log_level": 3,
            **admin_settings(kafka),
            "group.id": f"exactly-once-tail-{uuid4()}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "fetch.queue.backoff.ms": 10,
        }
    )
    try:
        client.assign([TopicPartition(*partition, start) for partition, start in begin.items()])
        seen_at = time.monotonic()
        is_told = False
        reached: dict[Partition, int] = {}
        while True:
            for message in client.consume(_BATCH, 0.1):
                error = message.error()
                if error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                    continue  # the client looks for the coordinator of its group, of which nothing is needed
                if error is not None and error.code() in _NOT_ALLOWED:
                    topic = next(iter(begin)).topic
                    raise BrokerUnreachable(f"{topic!r} cannot be read: {error.str()} (grant READ on the topic)")
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                seen_at = time.monotonic()
                partition = Partition.of(message)
                position = (message.offset() or 0) + (error is None)
                reached[partition] = position
                if error is None and partition in todo and position <= todo[partition]:
                    yield message
                if position >= todo.get(partition, position):
                    todo.pop(partition, None)
            if not todo:
                return
            partition, high = next(iter(todo.items()))
            shown = reached.get(partition, begin[partition])
            found = f"{partition} shows nothing from offset {shown} on, and its log ends at {high}"
            silent_seconds = time.monotonic() - seen_at
            if not is_told and silent_seconds > _TOLD_SECONDS:
                is_told = True
                said = "%s: waiting for %g s at most, for a transaction of another producer to end or brokers to answer"
                logger.warning(said, found, seconds, extra=about("waits_for_tail") | {"topic": partition.topic})
            if silent_seconds > seconds:
                if partition not in reached:
                    raise BrokerUnreachable(f"nothing of {partition} could be read for {seconds:g} s")
                raise TailHidden(
                    f"{found}: a transaction of another producer has been open for {seconds:g} s. It ends with that "
                    "producer's transaction.timeout.ms"
                )
    finally:
        client.close()
