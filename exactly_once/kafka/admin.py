"""The cluster: what Kafka reports of topics, their identity and the ranges of their logs."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from datetime import datetime
from typing import Any, NamedTuple, Self

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    ConsumerGroupState,
    ConsumerGroupType,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from exactly_once._log import about
from exactly_once._model import MIRRORED, Partition
from exactly_once.errors import BrokerUnreachable, ConfigurationError, UnknownTopic

from .log import kafka_logger
from .origin import Origin, origin_of
from .settings import OUR_CLIENTS

logger = logging.getLogger(__name__)

# How long one question to the cluster may take; the caller repeats it.
REQUEST_SECONDS = 5.0

_EARLIEST, _LATEST = OffsetSpec.earliest(), OffsetSpec.latest()  # type: ignore[no-untyped-call]
# How long the list of brokers may take to come, behind a question that was not answered.
_REFRESH_SECONDS = 1.0
# How long something is asked for that can be done without, by a loop that does not poll meanwhile.
_QUICK_SECONDS = 0.5

# The client's own time-out comes first: it brings the answers of those leaders that are not waited for.
_GRACE = 1.2

# How the client writes the id of a topic where the broker gives none: sixteen bytes of zero.
_ZERO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
# Where topics cannot be described, by lack of a right or by their age; their metadata can be asked for all the same.
_NO_IDS = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.UNSUPPORTED_VERSION,
    KafkaError._UNSUPPORTED_FEATURE,
)


class Topic(NamedTuple):
    """A topic: its id (None where the broker gives none) and how many partitions it has."""

    topic_id: str | None
    partitions: int


class Committed(NamedTuple):
    """What Kafka holds for a group and a partition."""

    offset: int
    leader_epoch: int | None
    is_mirrored: bool
    origin: Origin | None = None
    """Which database it was mirrored from."""


class Cluster:
    """Asks the brokers, with bounded waiting. Made from the consumer's own connection settings."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        # The client's own reasons: a refused login is else only a time-out. Its callback holds this list and not us,
        # so that a cluster which nobody closes ends with its last reference, not with a garbage collection.
        reasons = self._reasons = list[str]()

        def note(error: KafkaError) -> None:
            if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001 - that is its public name
                reasons.append(error.str())

        # Nor may a question create a topic, as brokers let an admin client do by default: one that is misspelt, say, or
        # was deleted a moment ago.
        own = {"error_cb": note, "allow.auto.create.topics": False}
        self._settings: dict[str, Any] = {"logger": kafka_logger(), **settings, **own}
        # Made by the first question, because it has threads and connections of its own. That may come from any thread,
        # and a signal handler may raise anywhere: no lock, which would stay locked then, but a change in one step.
        self._clients: dict[str, AdminClient] = {}
        self._closed = False
        self.servers = str(settings.get("bootstrap.servers", "(no bootstrap.servers)"))
        self._said: set[str] = set()  # topics of which it was logged that they have no id: once is enough
        self._topic: str | None = None  # the last that was asked for, with which the list of brokers is refreshed
        self.cluster_id: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _admin(self) -> AdminClient:
        if self._closed:
            raise BrokerUnreachable(f"the connection to Kafka at {self.servers} was closed")
        client = self._clients.get("admin")
        if client is not None:  # not by its truth: a client that waits for no answer has length 0
            return client
        try:
            return self._clients.setdefault("admin", AdminClient(self._settings))
        except KafkaException as error:
            raise ConfigurationError(f"confluent-kafka refuses the configuration: {error.args[0].str()}") from None

    def close(self) -> None:
        """End the connections; may be called again. Questions raise :class:`BrokerUnreachable` from then on."""
        self._closed = True
        client = self._clients.pop("admin", None)
        if client is not None:
            client.__exit__(None, None, None)  # its only way to be closed

    def identify(self) -> str | None:
        """Learn the cluster's id, once.

        :raises BrokerUnreachable: when no broker answers.
        """
        if self.cluster_id is None:
            with self._naming_unreachable():
                self.cluster_id = self._admin.list_topics(topic=None, timeout=REQUEST_SECONDS).cluster_id
        return self.cluster_id

    def topic_names(self) -> list[str]:
        """Return the names of all topics.

        :raises BrokerUnreachable: when no broker answers.
        """
        with self._naming_unreachable():
            return list(self._admin.list_topics(timeout=REQUEST_SECONDS).topics)

    def describe(self, topics: Iterable[str]) -> dict[str, Topic]:
        """Return identity and size of topics.

        :raises UnknownTopic: naming the first that does not exist.
        :raises BrokerUnreachable: when no broker answers.
        """
        return {name: self.described(name, future) for name, future in self.ask(topics).items()}

    def ask(self, topics: Iterable[str]) -> dict[str, Future[Any]]:
        """Start to describe topics; :meth:`described` reads each answer."""
        self._admin.poll(0)  # for its log lines, which wait for that
        names = list(topics)
        if not names:
            return {}
        self._topic = names[0]
        futures: dict[str, Future[Any]] = self._admin.describe_topics(
            TopicCollection(names), request_timeout=REQUEST_SECONDS
        )
        return futures

    def described(self, name: str, future: Future[Any]) -> Topic:
        """Read the answer to :meth:`ask`; raises as :meth:`describe` does."""
        try:
            answer = future.result(REQUEST_SECONDS + 1)  # the client's own time-out comes first, and says why
        except (KafkaException, TimeoutError) as error:
            code = error.args[0].code() if isinstance(error, KafkaException) else None
            if code in _NO_IDS:
                with self._naming_unreachable():
                    metadata = self._admin.list_topics(topic=name, timeout=REQUEST_SECONDS).topics[name]
                code = KafkaError.NO_ERROR if metadata.error is None else metadata.error.code()
                if code != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    self._say_no_id(name)
                    return Topic(None, len(metadata.partitions))
            if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise UnknownTopic(f"there is no topic {name!r} on {self.servers}; create it") from error
            if code == KafkaError.TOPIC_EXCEPTION:
                raise UnknownTopic(f"{name!r} cannot be the name of a topic") from error
            raise self._unreachable(error) from error
        topic_id = str(answer.topic_id) if answer.topic_id is not None else _ZERO_ID
        if topic_id == _ZERO_ID:
            self._say_no_id(name)
        return Topic(None if topic_id == _ZERO_ID else topic_id, len(answer.partitions))

    def ranges(self, partitions: Iterable[Partition]) -> dict[Partition, tuple[int, int]]:
        """Return for each partition the first offset in the log and the one after the last.

        :raises BrokerUnreachable: when a leader does not answer.
        """
        ranges, trouble = self.available_ranges(partitions)
        if trouble is not None:
            raise trouble
        return ranges

    def available_ranges(
        self, partitions: Iterable[Partition]
    ) -> tuple[dict[Partition, tuple[int, int]], BrokerUnreachable | None]:
        """Return the ranges of the logs whose leaders answer, and why others are missing, if any are."""
        low, silent = self._ask_offsets(list(partitions), _EARLIEST)
        high, also_silent = self._ask_offsets(list(low), _LATEST)
        ranges = {p: (low[p].offset, found.offset) for p, found in high.items()}
        silent |= also_silent
        return ranges, self._unreachable(next(iter(silent.values()))) if silent else None

    def ends(self, partitions: Iterable[Partition], *, read_committed: bool = True) -> dict[Partition, int]:
        """Return where a consumer would stop reading now: by default one of committed messages."""
        return self._offsets(list(partitions), _LATEST, read_committed=read_committed)

    def ends_within(
        self, seconds: float, partitions: list[Partition], *, read_committed: bool = True
    ) -> dict[Partition, int]:
        """Return the ends that brokers report so quickly; none is no error. Safe from any thread."""
        told = self._ask_quickly(seconds, partitions, read_committed=read_committed)
        return {p: found.offset for p, found in told.items()}

    def leader_epochs(self, partitions: list[Partition]) -> dict[Partition, int]:
        """Return the leader epochs that logs end in now, of those partitions whose leaders report it quickly."""
        told = self._ask_quickly(_QUICK_SECONDS, partitions, read_committed=False)
        return {p: found.leader_epoch for p, found in told.items() if known_epoch(found.leader_epoch) is not None}

    def at(self, partitions: Iterable[Partition], when: datetime) -> dict[Partition, int]:
        """Return the offsets of the first messages not older than ``when``; the log end if there is none."""
        partitions = list(partitions)
        milliseconds = int(when.timestamp() * 1000)
        # Negative numbers are Kafka's marks of the ends of a log, and of messages without a time.
        spec = OffsetSpec.for_timestamp(milliseconds) if milliseconds >= 0 else _EARLIEST
        found = self._offsets(partitions, spec)
        ends = self._offsets([p for p in partitions if found[p] < 0], _LATEST)
        return {p: ends.get(p, found[p]) for p in partitions}

    def committed(self, group_id: str, topic: str, partitions: int) -> dict[Partition, Committed]:
        """Return what Kafka holds for a group, where there is anything."""
        asked = [TopicPartition(topic, number) for number in range(partitions)]
        # An admin client asked for this kills the process where the coordinator moves (librdkafka, issue 5040).
        client = Consumer({**self._settings, "group.id": group_id})
        with self._naming_unreachable():
            try:
                answer = client.committed(asked, timeout=REQUEST_SECONDS)
            finally:
                client.close()
        return {
            Partition(tp.topic, tp.partition): Committed(
                tp.offset,
                known_epoch(tp.leader_epoch),
                (tp.metadata or "").startswith(MIRRORED),
                origin_of(tp.metadata),
            )
            for tp in answer
            if tp.offset >= 0
        }

    def foreign_members(self, group_id: str) -> list[str]:
        """Return the client ids and hosts of members of a group that are not ours, as far as the broker reports them.

        It does for the classic protocols only. ListGroups is old, but describing a group by the newer call aborts the
        process where its coordinator goes away meanwhile (librdkafka, issue 4605).

        :raises BrokerUnreachable: when no broker answers.
        """
        ours = self._settings.get("client.id", OUR_CLIENTS)
        with self._naming_unreachable(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            groups = self._admin.list_groups(group=group_id, timeout=REQUEST_SECONDS)
        members = [member for group in groups for member in group.members]
        # A client.id of the user's own is that of all members; ours has the member's name behind it.
        return sorted(
            f"{m.client_id} at {str(m.client_host).lstrip('/')}"
            for m in members
            if m.client_id != ours and not str(m.client_id).startswith(OUR_CLIENTS)
        )

    def has_undescribed_members(self, group_id: str) -> bool:
        """Tell whether a group of the protocol ``consumer`` has members, of which :meth:`foreign_members` is silent.

        :raises BrokerUnreachable: when no broker answers.
        """
        with self._naming_unreachable():
            found = self._admin.list_consumer_groups(request_timeout=REQUEST_SECONDS).result()
        for error in found.errors:
            raise self._unreachable(error)
        # Older brokers tell no type; they have no other protocol.
        groups = [g for g in found.valid if g.group_id == group_id and g.type is ConsumerGroupType.CONSUMER]
        return any(group.state is not ConsumerGroupState.EMPTY for group in groups)

    def _offsets(
        self, partitions: list[Partition], spec: OffsetSpec, *, read_committed: bool = False
    ) -> dict[Partition, int]:
        told, silent = self._ask_offsets(partitions, spec, read_committed=read_committed)
        for error in silent.values():
            raise self._unreachable(error)
        return {p: found.offset for p, found in told.items()}

    def _ask_quickly(
        self, seconds: float, partitions: list[Partition], *, read_committed: bool
    ) -> dict[Partition, Any]:
        """Ask where logs end, for what can be done without; also of a cluster that is closed meanwhile."""
        try:
            return self._ask_offsets(partitions, _LATEST, read_committed=read_committed, seconds=seconds)[0]
        except (KafkaException, BrokerUnreachable):
            return {}

    def _ask_offsets(
        self,
        partitions: list[Partition],
        spec: OffsetSpec,
        *,
        read_committed: bool = False,
        seconds: float = REQUEST_SECONDS,
    ) -> tuple[dict[Partition, Any], dict[Partition, Exception]]:
        """Ask the leaders of partitions; return what they answer, and of those that do not, why."""
        if not partitions:
            return {}, {}
        futures: dict[TopicPartition, Future[Any]] = self._admin.list_offsets(
            {TopicPartition(*p): spec for p in partitions},
            isolation_level=IsolationLevel.READ_COMMITTED if read_committed else IsolationLevel.READ_UNCOMMITTED,
            request_timeout=seconds,
        )
        wait(futures.values(), seconds * _GRACE)
        told: dict[Partition, Any] = {}
        silent: dict[Partition, Exception] = {}
        for tp, future in futures.items():
            partition = Partition(tp.topic, tp.partition)
            error = future.exception() if future.done() else TimeoutError(f"no offsets of {partition} in {seconds:g} s")
            # Where a leader is gone librdkafka may answer without an error and without an offset.
            if error is None and future.result().offset == OFFSET_INVALID:
                error = LookupError(f"no broker answers for the offsets of {partition}")
            if isinstance(error, Exception):
                silent[partition] = error
            else:
                told[partition] = future.result()
        return told, silent

    def _say_no_id(self, name: str) -> None:
        if name not in self._said:
            self._said.add(name)
            logger.warning(
                "the broker gives no topic id for %r: a topic that is deleted and made again goes unnoticed",
                name,
                extra=about("topic_without_id") | {"topic": name},
            )

    def reason(self) -> str | None:
        """Return what the client reports of its trouble so far, if anything. Safe from any thread."""
        client = self._clients.get("admin")
        if client is not None:
            client.poll(0)
        return self._reasons[0] if self._reasons else None

    @contextlib.contextmanager
    def _naming_unreachable(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> BrokerUnreachable:
        if self._topic is not None:
            with contextlib.suppress(KafkaException):
                # Else it goes on to ask a controller or a leader that is gone, for minutes. Any topic brings the list
                # of brokers; all topics of a large cluster would be a load, at the moment when it is in trouble.
                self._admin.list_topics(topic=self._topic, timeout=_REFRESH_SECONDS)
        self._admin.poll(0)
        reason = self._reasons[0] if self._reasons else error
        self._reasons.clear()
        return BrokerUnreachable(f"no answer from Kafka at {self.servers}: {reason}")


def known_epoch(leader_epoch: int | None) -> int | None:
    """Read a leader epoch as librdkafka gives it: -1 stands for none."""
    return leader_epoch if leader_epoch is not None and leader_epoch >= 0 else None
